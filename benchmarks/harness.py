"""The one way in which this repository times something, and the checks that stand between a mistake and a figure.

    session = harness.session("kda", args)
    session.compare("kda-step B4", [Program("portable", run, inputs, work), Program("pallas", ...)], tolerance=1e-5)
    return session.finish()

Programs are compiled here, apart from what is timed, and run in turns, so that a ratio is of one run. Every output of
every call is awaited. What is refused, and why: checks.py and docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import workloads
from checks import (
  Fence,
  Refused,
  Work,
  await_results,
  check_agreement,
  check_compiled,
  check_drained,
  check_outputs,
  check_tokens,
  to_numpy,
)
from machine import environment, peak_memory, roof_of
from results import SCHEMA, Spread, table, write

from kimi_k3.errors import InputError

REPO = Path(__file__).resolve().parents[1]
DEFAULT_REPEATS = {"tiny": 11, "k3": 21}


@dataclasses.dataclass(frozen=True)
class Program:
  """A function of arrays, which the harness compiles, inspects, runs and awaits.

  Attributes:
    name: Of the implementation.
    function: Traced once. With `carry`, (carry, *inputs) -> (carry, outputs).
    inputs: Number of the set (0 or 1) -> arguments. The sets differ, so that no result can be an earlier one.
    work: Of one application.
    carry: The first argument, which is donated and handed on from call to call; None: there is none.
    times: Applications of the operation in one call, each of which needs the one before.
    check: Looks at the compiled HLO text before anything is timed; raises Refused.
    options: The compiler's.
  """

  name: str
  function: Callable[..., Any]
  inputs: Callable[[int], tuple[Any, ...]]
  work: Work
  carry: Callable[[], Any] | None = None
  times: int = 1
  check: Callable[[str], object] | None = None
  options: Mapping[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Procedure:
  """A call of Python that ends with results of a device, or of the host.

  Attributes:
    name: Of the form.
    call: Number of the call -> results: arrays, or values that took them. They are awaited. A procedure whose results
      are neither is not accepted.
    work: Of one application.
    count: Results -> real tokens that they hold; compared with `work.tokens`, of all applications of a call.
    compared: Whether results are kept, to be compared with those of other subjects.
    before: Brings about the state that a call starts from; not timed.
    times: Steps of a call.
    repeats: Fewer than the run's, for what takes long; None: the run's.
    traces: Whether tracing and compiling is a part of what is timed, as where every operation is dispatched alone.
  """

  name: str
  call: Callable[[int], Any]
  work: Work
  count: Callable[[Any], int] | None = None
  compared: bool = False
  before: Callable[[], object] | None = None
  times: int = 1
  repeats: int | None = None
  traces: bool = False


@dataclasses.dataclass
class Runner:
  """A subject ready to be timed, and what was seen of it."""

  subject: Program | Procedure
  run: Callable[[int], Any]
  compile_seconds: float
  seconds: list[float] = dataclasses.field(default_factory=list)
  drained: list[float] = dataclasses.field(default_factory=list)
  first: list[Any] = dataclasses.field(default_factory=list)


def prepare(subject: Program | Procedure) -> Runner:
  """Compiles a program and inspects it, or runs a procedure once, which compiles what it needs.

  Raises:
    Refused: if arguments are not read, work is missing, or results do not depend on what goes in.
    InputError: if the implementation cannot run here.
  """
  check_tokens(subject.work)
  return _prepare_program(subject) if isinstance(subject, Program) else _prepare_procedure(subject)


def _prepare_program(program: Program) -> Runner:
  import jax

  sets = [program.inputs(0), program.inputs(1)]
  carried = [program.carry()] if program.carry else []
  # Unused arguments stay: jit would drop them without a word, and check_compiled is to see them.
  function = jax.jit(program.function, donate_argnums=(0,) if program.carry else (), keep_unused=True)
  start = time.perf_counter()
  compiled = function.lower(*carried, *sets[0]).compile(dict(program.options) if program.options else None)
  runner = Runner(program, lambda _: None, time.perf_counter() - start)
  check_compiled(compiled, (*carried, *sets[0]), program.name, program.work, program.times)
  if program.check is not None:
    program.check(compiled.as_text() or "")

  def run(i: int) -> Any:
    results = compiled(*carried, *sets[i % 2])
    carried[:] = results[:1] if program.carry else []
    return results

  runner.run = run
  outputs = []
  for i in range(2):
    outputs.append([to_numpy(leaf) for leaf in await_results(run(i))])
    if program.carry:
      carried.clear()  # its memory, before there is another
      carried.append(program.carry())
  check_outputs(outputs, program.name)
  runner.first = outputs[0]
  return runner


def _prepare_procedure(procedure: Procedure) -> Runner:
  if procedure.before is not None:
    procedure.before()
  start = time.perf_counter()
  results = procedure.call(0)
  leaves = await_results(results)
  seconds = time.perf_counter() - start
  if procedure.count is not None:
    check_tokens(procedure.work, procedure.count(results), procedure.times)
  runner = Runner(procedure, procedure.call, seconds)
  if procedure.compared:
    runner.first = [to_numpy(leaf) for leaf in leaves]
  return runner


def time_in_turns(runners: Sequence[Runner], repeats: int, clock: Any, fence: Fence) -> None:
  """Runs all of them `repeats` times in turns, each call awaited, and keeps the seconds in the runners.

  Every second turn goes backwards, so that nobody always runs behind the same other.

  Args:
    runners: From `prepare`.
    repeats: Of each, but for a procedure that names fewer.
    clock: A CompileClock.
    fence: Of this process.

  Raises:
    Refused: if there is nothing to repeat, something was compiled while it was timed, or a call left work running.
  """
  if repeats < 1:
    raise Refused(f"{repeats} repeats: nothing would be measured")
  for turn in range(repeats):
    for runner in runners if turn % 2 == 0 else reversed(runners):
      subject = runner.subject
      if isinstance(subject, Procedure) and subject.repeats is not None and turn >= subject.repeats:
        continue
      _make_ready(runner, fence)
      start = time.perf_counter()
      results = runner.run(turn)
      await_results(results)
      end = time.perf_counter()
      runner.drained.append(fence.seconds())
      compiling = clock.compiling(start, end)
      if compiling and not (isinstance(subject, Procedure) and subject.traces):
        raise Refused(
          f"{subject.name}: call {turn} spent {compiling:.3g} s tracing or compiling inside what is timed: a shape or "
          "a static argument changes from call to call"
        )
      if isinstance(subject, Procedure) and subject.count is not None:
        check_tokens(subject.work, subject.count(results), subject.times)
      runner.seconds.append((end - start) / subject.times)
      del results  # before there are others
  for runner in runners:
    called = [seconds * runner.subject.times for seconds in runner.seconds]
    check_drained(runner.subject.name, called, runner.drained, fence)


def _make_ready(runner: Runner, fence: Fence) -> None:
  """Brings about what a call starts from, and waits until the devices are at rest."""
  if isinstance(runner.subject, Procedure) and runner.subject.before is not None:
    runner.subject.before()
    fence.seconds()


class Session:
  """One run of one benchmark script: measures, keeps results, says what failed, writes the file."""

  def __init__(self, subject: str, *, preset: str, repeats: int, out: str | None):
    from kimi_k3.generate.clock import CompileClock

    if repeats < 1:
      raise InputError(f"--repeats {repeats}: expected 1 or more")
    if out is not None:
      from kimi_k3.cli.inputs import check_writable

      check_writable(out)
    import jax

    self.repeats, self._out, self._clock = repeats, out, CompileClock()
    self._platform = jax.devices()[0].platform
    self.fence, self.roof = Fence(), roof_of(jax.devices()[0])
    self.result: dict[str, Any] = {
      "schema": SCHEMA,
      "kind": "benchmark",
      "subject": subject,
      "preset": preset,
      "environment": environment(),
      "roof": dataclasses.asdict(self.roof),
      "results": [],
      "ratios": [],
      "absent": [],
      "refused": [],
      "notes": [],
    }

  def absent(self, name: str, reason: object) -> None:
    """Keeps that a peer or an implementation was not measured, and why."""
    entry = {"name": name, "reason": " ".join(str(reason).split())}
    if entry not in self.result["absent"]:
      self.result["absent"].append(entry)

  def note(self, text: str) -> None:
    """Keeps a remark on the run."""
    self.result["notes"].append(text)

  def compare(
    self,
    workload: str,
    subjects: Sequence[Program | Procedure],
    *,
    tolerance: float | None = None,
    axes: Mapping[str, Any] | None = None,
    padding: int | None = None,
  ) -> None:
    """Measures subjects of one workload in turns and keeps a row for each, with its ratio to the first.

    Args:
      workload: Its name.
      subjects: The first is the one that the others are compared with. One that cannot run here is listed as absent.
      tolerance: How far results may be from the first's, as a part of the largest; None: they are not comparable.
      axes: What a plot may put on an axis, such as "batch" and "context".
      padding: Positions that hold no token, of all that were computed.
    """
    runners: list[Runner] = []
    try:
      for subject in subjects:
        try:
          runners.append(prepare(subject))
        except InputError as error:
          self.absent(subject.name, error)
      firsts = {runner.subject.name: runner.first for runner in runners}
      agreement = check_agreement(firsts, runners[0].subject.name, tolerance) if runners else {}
      time_in_turns(runners, self.repeats, self._clock, self.fence)
      rows = [self._row(workload, one, axes or {}, padding, agreement) for one in runners]
    except Refused as error:
      self.refuse(workload, error)
      return
    self.result["results"] += rows
    self.result["ratios"] += [_ratio(workload, one, runners[0]) for one in runners[1:]]

  def refuse(self, workload: str, error: Exception) -> None:
    """Keeps that a workload has no figure, and why."""
    self.result["refused"].append({"workload": workload, "reason": str(error)})
    print(f"{workload}: refused: {error}", file=sys.stderr, flush=True)

  def _row(
    self, workload: str, runner: Runner, axes: Mapping[str, Any], padding: int | None, agreement: Mapping[str, float]
  ) -> dict[str, Any]:
    subject, spread = runner.subject, Spread.of(runner.seconds)
    work = subject.work
    self.roof.refuse_faster(subject.name, work, spread.median, self._platform)
    bound, by = self.roof.bound(work)
    return {
      "workload": workload,
      "name": subject.name,
      "axes": dict(axes),
      "repeats": len(runner.seconds),
      "times": subject.times,
      "seconds": dataclasses.asdict(spread),
      "compile_seconds": runner.compile_seconds,
      "tokens": work.tokens,
      "padding": padding,
      "tokens_per_second": None if work.tokens is None else work.tokens / spread.median,
      "hbm_bytes": work.hbm_bytes,
      "flops": work.flops,
      "bound_seconds": bound,
      "bound_by": by,
      "ratio_to_bound": None if bound is None else spread.median / bound,
      "differs_by": agreement.get(subject.name),
    }

  def finish(self) -> int:
    """Prints the table, writes the file and returns the exit code: 1 if a workload was refused."""
    self.result["peak_memory"] = peak_memory()
    print(table(self.result), flush=True)
    if self._out is not None:
      write(self._out, self.result)
    return 1 if self.result["refused"] else 0


def _ratio(workload: str, runner: Runner, reference: Runner) -> dict[str, Any]:
  """Of the pairs that were run in the same turn: seconds of the first subject over seconds of this one."""
  pairs = [a / b for a, b in zip(reference.seconds, runner.seconds, strict=False)]
  spread = Spread.of(pairs)
  return {
    "workload": workload,
    "name": runner.subject.name,
    "against": reference.subject.name,
    "speed_up": {"median": spread.median, "p10": spread.p10, "p90": spread.p90},
    "pairs": len(pairs),
  }


def parser(doc: str | None, preset: str = "tiny") -> argparse.ArgumentParser:
  """Returns a command line with what all benchmarks have; errors of it are one line and exit code 2.

  Args:
    doc: What `--help` says.
    preset: The default.
  """
  from kimi_k3.cli.main import Parser

  found = Parser(description=doc)
  found.add_argument(
    "--preset",
    choices=workloads.PRESETS,
    default=preset,
    help="tiny: a CPU is enough; k3: released sizes (%(default)s)",
  )
  found.add_argument("--out", metavar="FILE.json", help="write the result there")
  listed = ", ".join(f"{preset} {number}" for preset, number in DEFAULT_REPEATS.items())
  found.add_argument("--repeats", type=int, metavar="N", help=f"timed calls of each (default: {listed})")
  return found


def session(subject: str, args: argparse.Namespace) -> Session:
  """Returns the session of a parsed command line. Raises InputError if --repeats or --out cannot be."""
  repeats = DEFAULT_REPEATS[args.preset] if args.repeats is None else args.repeats
  return Session(subject, preset=args.preset, repeats=repeats, out=args.out)


def exit_with(main: Callable[[Sequence[str]], int], script: str) -> None:
  """Runs a script and ends the process: 0 done; 1 done, but something was refused; 2 bad input, in one line."""
  name = Path(script).name
  try:
    code = main(sys.argv[1:])
  except InputError as error:
    print(f"{name}: error: {error}", file=sys.stderr)
    code = 2
  except KeyboardInterrupt:
    code = 130
  sys.exit(code)


def needs_tpu(what: str) -> None:
  """Raises InputError unless this is a TPU."""
  import jax

  if jax.default_backend() != "tpu":
    raise InputError(f"{what} needs a TPU, the backend is {jax.default_backend()}")


def add_only(found: argparse.ArgumentParser) -> None:
  """Adds --only, which `chosen` reads."""
  found.add_argument("--only", metavar="PATTERN", help="workloads whose name matches, such as 'kda-step*'")


def chosen[W: workloads.Workload](all_of_them: Sequence[W], args: argparse.Namespace) -> list[W]:
  """Returns the workloads of the preset whose name matches --only."""
  found = workloads.of_preset(all_of_them, args.preset)
  return [one for one in found if args.only is None or fnmatch.fnmatchcase(one.name, args.only)]
