"""`kimi-k3 batch CONFIG`: a file of prompts in, a file of completions out, through any number of interruptions."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kimi_k3.cli.batch_given import read_given
from kimi_k3.cli.inputs import write_whole
from kimi_k3.cli.multihost import HELP, add_flags, joined, lost_processes
from kimi_k3.cli.progress import RowProgress
from kimi_k3.cli.signals import told_of_signals
from kimi_k3.errors import InputError
from kimi_k3.generate.batch_input import SOUND, Line, named_lines
from kimi_k3.generate.batch_output import MISSING, Completions

if TYPE_CHECKING:
  from kimi_k3.generate.loop import Generator, Request, Row, Timing
  from kimi_k3.generate.tokenizer import Tokenizer
  from kimi_k3.maxtext_adapter.distributed import Processes

SCHEMA = 1
_DEFAULT_NEW_TOKENS = 256
_FAULTS_PRINTED = 20
DESCRIPTION = """\
Completes the prompts of a JSONL file (docs/batch.md). A line is an object with one of prompt (text), prompt_ids and
messages, and may have id, max_new_tokens, temperature, top_k, top_p and seed; with messages also tools, thinking,
thinking_effort, tool_choice and response_format. A completion is a line with index (number of the input line, from 0),
id, prompt_ids, ids (new ones), text, finish_reason (stop, length or error), error, and for messages the message.

Completions are appended as rows finish. Stopped in any way and started again with the same command, it goes on where it
stopped; when all are there they are put in the order of the input. A line that cannot be run gets a completion that
says why, and stops no other.

Greedy, unless decode_sampling_strategy or the line says otherwise. A row's draws depend on its seed, or else on
decode_sampling_seed and its index, not on its slot or its neighbours.

{multihost}"""
EPILOG = """\
examples:
  kimi-k3 batch OUT/decode.yml --in prompts.jsonl --out completions.jsonl --max-new-tokens 512
  kimi-k3 batch OUT/decode.yml --in prompts.jsonl --out completions.jsonl --dry-run
  kimi-k3 batch OUT/decode.yml --in prompts.jsonl --out completions.jsonl --retry-errors --summary summary.json
  kimi-k3 batch OUT/decode.yml --in prompts.jsonl --out completions.jsonl partitioning=manual --multihost auto
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
  """Adds the verb to the command line."""
  parser = subparsers.add_parser(
    "batch",
    help="a file of prompts in, a file of completions out",
    description=DESCRIPTION.format(multihost=HELP),
    epilog=EPILOG,
  )
  parser.add_argument("config", metavar="CONFIG.yml", help="decode.yml of a converted checkpoint; key=value may follow")
  parser.add_argument("--in", dest="input", required=True, metavar="FILE.jsonl", help="a prompt a line")
  parser.add_argument("--out", required=True, metavar="FILE.jsonl", help="a completion a line, appended to")
  parser.add_argument(
    "--max-new-tokens",
    type=int,
    default=_DEFAULT_NEW_TOKENS,
    metavar="N",
    help="at most, for lines that say nothing (default: %(default)s)",
  )
  parser.add_argument("--ignore-eos", action="store_true", help="go on after the end token")
  parser.add_argument("--strict", action="store_true", help="refuse all if a line is bad, before anything is loaded")
  parser.add_argument(
    "--retry-errors", action="store_true", help="run rows again that ended with an error; their lines may be mended"
  )
  parser.add_argument("--dry-run", action="store_true", help="check every line, say what would be done, do nothing")
  parser.add_argument("--summary", metavar="FILE.json", help="write counts, seconds and tok/s there")
  add_flags(parser)
  parser.set_defaults(settings=[])
  return parser


def run(args: argparse.Namespace) -> int:
  """Completes all rows; exit code 1 if one of them ended with an error, 128 + signal if it was stopped by one."""
  if args.max_new_tokens < 1:
    raise InputError(f"--max-new-tokens is {args.max_new_tokens}, expected 1 or more")
  batch = _Batch(args)
  with told_of_signals(batch.ask, batch.end), joined(args) as processes, contextlib.ExitStack() as held:
    batch.read(processes)
    batch.open(processes, held)
    if args.dry_run:
      return batch.describe()
    if batch.is_left:
      batch.load(processes)
      with lost_processes(processes):
        batch.generate(processes)
    batch.finish(processes)
    return batch.code


class _Batch:
  """One run of the verb, step by step."""

  def __init__(self, args: argparse.Namespace):
    self._args = args
    self._out = Completions(args.out)
    self._writes = True  # whether this process does
    self._started = time.perf_counter()
    self._load_seconds = self._seconds = 0.0
    self._before = self._tokens = 0
    self._engine: Any = None
    self._generator: Generator | None = None
    self._timing: Timing | None = None
    self._alone = True
    self._signal: int | None = None
    self._in_flight: dict[int, Line] = {}

  def read(self, processes: Processes) -> None:
    """Reads the config and looks through the input."""
    self._writes, self._alone = processes.first, processes.count == 1
    self._given = processes.together(lambda: read_given(self._args, processes))
    processes.agree(self._given.shown)

  def open(self, processes: Processes, held: contextlib.ExitStack) -> None:
    """Finds out what is there, in the process that writes, and tells the others."""
    processes.together(lambda: self._open(held) if self._writes else None)
    self._out.status = bytearray(processes.gather(bytes(self._out.status))[0])
    self._before = self._out.done

  def _open(self, held: contextlib.ExitStack) -> None:
    args, given = self._args, self._given
    if not args.dry_run:
      held.enter_context(self._out.locked())
    self._out.look(given.prompts, given.settings, mended=args.retry_errors)
    if self._out.torn:
      verb = "would be cut off" if args.dry_run else "cut off"
      _say(f"{args.out}: {self._out.torn} bytes of a torn last line {verb}; its row is run again")
    if not args.dry_run:
      self._out.repair(given.prompts, given.settings, drop_failed=args.retry_errors)
    elif args.retry_errors:
      for index in self._out.failed:
        self._out.status[index] = MISSING
    self._report_bad_lines()

  def _report_bad_lines(self) -> None:
    prompts, status = self._given.prompts, self._out.status
    new = [i for i, kind in enumerate(prompts.kinds) if kind != SOUND and i in prompts.faults and not status[i]]
    for index in new[:_FAULTS_PRINTED]:
      _say(f"{prompts.path}: line {index + 1}: {prompts.faults[index]}")
    if (more := len(new) - _FAULTS_PRINTED) > 0:
      _say(f"{prompts.path}: {more} more bad lines; their completions in {self._args.out} say why")

  @property
  def is_left(self) -> bool:
    """Whether rows are missing."""
    return self._missing > 0

  @property
  def _missing(self) -> int:
    return self._given.prompts.rows - self._out.done

  @property
  def code(self) -> int:
    """The exit code."""
    if self._signal is not None:
      return 128 + self._signal
    return 1 if self._out.failed else 0

  def describe(self) -> int:
    """Says what would be done; exit code 1 if a line is bad."""
    prompts, config = self._given.prompts, self._given.config
    lengths = [length for length, kind in zip(prompts.prompt_tokens, prompts.kinds, strict=True) if kind == SOUND]
    print(f"{prompts.path}: {prompts.rows} rows, {prompts.bad} of them bad lines")
    if lengths:
      print(
        f"prompts of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all; up to {prompts.most_new_tokens} "
        f"new ones a row, {sum(prompts.new_tokens)} in all"
      )
    print(
      f"caches of {config.max_target_length} tokens, {config.max_prefill_predict_length} of them for prompts, in "
      f"{_slots(config)} slots"
    )
    print(f"{self._args.out}: {self._out.done} rows are there, {len(self._out.failed)} of them failed")
    print(f"would run {self._missing} rows; nothing is loaded or written")
    return 1 if prompts.bad else 0

  def load(self, processes: Processes) -> None:
    """Makes the engine and loads the weights, if a row needs them."""
    start = time.perf_counter()
    status, kinds = self._out.status, self._given.prompts.kinds
    if any(kind == SOUND and status[i] == MISSING for i, kind in enumerate(kinds)):
      self._engine = processes.together(lambda: _engine(self._given.config, self._args))
    self._load_seconds = time.perf_counter() - start

  def generate(self, processes: Processes) -> None:
    """Runs what is missing."""
    from kimi_k3.generate.clock import CompileClock
    from kimi_k3.generate.loop import Generator

    start, given = time.perf_counter(), self._given
    with RowProgress(given.prompts.rows, self._before, shown=processes.first) as progress:
      self._progress = progress
      if self._engine is None:
        assert not list(self._requests())
      else:
        self._generator = Generator(
          self._engine, stop_ids=given.stop_ids, clock=CompileClock(), seed=given.config.decode_sampling_seed
        )
        self._timing = self._generator.run(self._requests(), self._finished, self._progressed)
      self._tokens = progress.tokens
    self._seconds = time.perf_counter() - start

  def _requests(self) -> Iterator[Request]:
    from kimi_k3.generate.loop import Request

    missing = bytearray(self._out.status)  # as it was when the run began, the same in every process
    for line in self._given.prompts.read(lambda index: missing[index] == MISSING):
      if self._signal is not None:
        return
      if line.error is not None:
        self._write(_completion(line, None, self._given.tokenizer))
        continue
      self._in_flight[line.index] = line
      sampling = dataclasses.replace(self._given.sampling, **line.sampling)
      yield Request(line.index, line.prompt_ids, line.max_new_tokens, sampling)

  def _finished(self, row: Row) -> None:
    self._write(_completion(self._in_flight.pop(row.index), row, self._given.tokenizer))

  def _write(self, completion: Mapping[str, Any]) -> None:
    if self._writes:
      self._out.append(completion)
    self._progress.row()

  def _progressed(self, tokens: int) -> None:
    self._progress.add(tokens)
    if self._signal is not None and self._generator is not None:
      self._generator.stop()

  def finish(self, processes: Processes) -> None:
    """Brings everything to the disk and says how it went."""
    processes.together(lambda: self._finish() if self._writes else None)
    # Those that do not write have no file of their own.
    self._out.status = bytearray(processes.gather(bytes(self._out.status))[0])

  def _finish(self) -> None:
    self._out.close()
    rows, failed = self._given.prompts.rows, self._out.failed
    whole = not self._missing
    if whole:
      self._out.sort()
    if self._args.summary:
      summary = json.dumps(self._summary(), indent=1, allow_nan=False)
      write_whole(self._args.summary, lambda file: file.write(f"{summary}\n".encode()))
    if self._signal is not None:
      _say(f"kimi-k3: {self._how_to_go_on(self._signal)}")
      return
    if failed:
      _say(
        f"{self._args.out}: {len(failed)} row(s) failed: {named_lines(failed, len(failed))} of "
        f"{self._given.prompts.path}; --retry-errors runs them again, and such lines may be mended first"
      )
    if self._before == rows:
      print(f"{self._args.out}: all {rows} rows are there, {len(failed)} of them failed: nothing to do")
      return
    earlier = f", {self._before} of them before" if self._before else ""
    how = f" on {self._engine.num_slots} slots: {self._timing.summary()}" if self._timing is not None else ""
    print(f"{rows} rows ({len(failed)} failed{earlier}){how}")

  def _summary(self) -> dict[str, Any]:
    rows, failed = self._given.prompts.rows, len(self._out.failed)
    compiling = 0.0 if self._timing is None else self._timing.compiling
    running = self._seconds - compiling
    return {
      "schema": SCHEMA,
      "rows": rows,
      "ok": self._out.done - failed,
      "errors": failed,
      "missing": self._missing,
      "done_before": self._before,
      "tokens": self._tokens,
      "seconds": self._seconds,
      "compile_seconds": compiling,
      "tokens_per_second": self._tokens / running if running > 0 else 0.0,
      "load_seconds": self._load_seconds,
      "slots": None if self._engine is None else self._engine.num_slots,
      "signal": self._signal,
    }

  def ask(self, number: int) -> bool:
    """Asks the run to end, from another thread; whether it will by itself."""
    self._signal = number
    # Processes of one run that stop at different steps would wait for each other.
    if self._generator is None or not self._alone:
      return False
    self._generator.stop()
    return True

  def end(self, number: int) -> None:
    """The last words, from another thread, before the process ends."""
    self._out.freeze()
    if self._writes:
      below_the_bar = "\n" if sys.stderr.isatty() else ""
      _say(f"{below_the_bar}kimi-k3: {self._how_to_go_on(number)}")

  def _how_to_go_on(self, number: int) -> str:
    what = "interrupted" if number == signal.SIGINT else "terminated"
    given = getattr(self, "_given", None)
    if self._args.dry_run or given is None:
      return what
    return f"{what}: {self._out.done} of {given.prompts.rows} rows are in {self._args.out}; the same command goes on"


def _slots(config: Any) -> int:
  import jax

  from kimi_k3.maxtext_adapter.engine import number_of_slots

  return number_of_slots(config, jax.device_count())


def _engine(config: Any, args: argparse.Namespace) -> Any:
  from kimi_k3.maxtext_adapter.engine import make_engine

  return make_engine(config, args.check_placement)


def _completion(line: Line, row: Row | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
  """A line of the output, of a line that could not be run if there is no row."""
  ids = [] if row is None else row.ids
  said = {
    "index": line.index,
    "id": line.id,
    "prompt_ids": line.prompt_ids,
    "ids": ids,
    "text": None if tokenizer is None else tokenizer.decode(ids),
    "finish_reason": "error" if row is None else row.finish_reason,
    "error": line.error if row is None else row.error,
  }
  if line.kind != "messages":
    return said
  if row is None or tokenizer is None:
    return said | {"message": None, "problems": []}
  from kimi_k3.chat import parse

  parsed = parse(tokenizer, ids, thinking=line.thinking)
  return said | {"message": parsed.as_message(), "problems": list(parsed.problems)}


def _say(line: str) -> None:
  print(line, file=sys.stderr, flush=True)
