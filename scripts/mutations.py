"""Puts plausible misreadings of the model into copies of the package, one each, and runs the test that must fail.

Prints each misreading with what caught it and how. The table is data: tests/mutations/table.toml. Caught means: by a
comparison that fails or a refusal of the product (InputError). A row whose change merely breaks the program, by a wrong
shape or name, is broken and catches nothing, and so is one whose test fails without the misreading.

Exit code 0: all caught; 1: one survived, or a row is broken; 2: the table cannot be used.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
SOURCES = Path("MaxText")
PACKAGE = SOURCES / "kimi_k3"
BESIDE = ("configs", "tests")  # what the package looks for beside it in a checkout (kimi_k3/resources.py)
TABLE = Path("tests", "mutations", "table.toml")
CAUGHT, SURVIVED, BROKEN = "caught", "SURVIVED", "BROKEN"
COMPARISONS = ("builtins.AssertionError", "builtins.Failed")  # the latter is pytest's: what should raise did not
REFUSAL = "kimi_k3.errors.InputError"
_PLUGINS = ("no:cacheprovider", "mutation_probe", "jaxtyping._pytest_plugin")
_SIZES = re.compile(r"^\s*(Max absolute difference.*|\(shapes .* mismatch\))$", re.MULTILINE)
_LONGEST_LINE = 160
_LONGEST_OUTPUT = 4000


class TableError(Exception):
  """The table cannot be used: every fault, one a line."""


@dataclasses.dataclass(frozen=True)
class Edit:
  """A text that occurs exactly once in a file of the package, and what takes its place."""

  file: str
  old: str
  new: str


@dataclasses.dataclass(frozen=True)
class Mutation:
  """A misreading in plain words, how to write it, and the test that must fail under it."""

  name: str
  test: str
  edits: tuple[Edit, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What came of a row."""

  verdict: str
  how: str
  seconds: float


@dataclasses.dataclass(frozen=True)
class Result:
  """What came of a run of pytest.

  Attributes:
    code: Its exit code; None when it had to be stopped.
    found: What mutation_probe.py wrote.
    output: What pytest said.
  """

  code: int | None
  found: dict[str, Any]
  output: str


def load_table(path: Path) -> list[Mutation]:
  """Returns the rows. A row has a name, a test, and file, old, new, or a list `edits` of those three.

  Raises:
    TableError: naming every row that is not so, and every name used twice.
  """
  rows, faults = [], []
  for number, entry in enumerate(tomllib.loads(path.read_text()).get("mutation", []), 1):
    name = entry.get("name", f"row {number}")
    edits = entry.get("edits") or [{key: entry[key] for key in ("file", "old", "new") if key in entry}]
    keys = {"name", "test", "edits"} if "edits" in entry else {"name", "test", "file", "old", "new"}
    if set(entry) != keys or any(set(edit) != {"file", "old", "new"} for edit in edits):
      found = ", ".join(sorted(entry))
      faults.append(f"{name}: has {found}; expected name, test and either file, old, new or edits of these three")
    elif any(edit["old"] == edit["new"] for edit in edits):
      faults.append(f"{name}: changes nothing")
    elif any(row.name == name for row in rows):
      faults.append(f"{name}: used for two rows")
    else:
      rows.append(Mutation(name, entry["test"], tuple(Edit(**edit) for edit in edits)))
  if faults:
    raise TableError("\n".join(faults))
  return rows


def edit_faults(rows: Sequence[Mutation], package: Path) -> Iterator[str]:
  """Says of every row which text it does not find exactly once in which file."""
  for row in rows:
    for edit in row.edits:
      path = package / edit.file
      if not path.is_file():
        yield f"{row.name}: {edit.file} does not exist"
      elif (count := path.read_text().count(edit.old)) != 1:
        yield f"{row.name}: {edit.file} holds {edit.old!r} {count} times, expected once"


class Bench:
  """Runs tests of the repository `root` on copies, below `work`, of its package as it was at the start."""

  def __init__(self, root: Path, work: Path, *, jobs: int, timeout: float):
    self.root, self.work, self.jobs, self.timeout = root, work, jobs, timeout
    self._original = shutil.copytree(root / PACKAGE, work / "original", ignore=shutil.ignore_patterns("__pycache__"))
    self._lock = threading.Lock()
    self._running: set[subprocess.Popen] = set()

  def try_unmutated(self, tests: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
    """Runs the tests on unchanged copies. Returns how long each took that passed, and what is wrong with the others.

    Raises:
      TableError: with what pytest said, if it did not come to an end: a test does not exist, or hangs.
    """
    groups = [group for i in range(self.jobs) if (group := tests[i :: self.jobs])]
    with self._pool() as pool:
      results = list(pool.map(lambda group: self.run(self.copy(()), group, self.timeout * len(group)), groups))
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for result in results:
      if result.code not in (0, 1):
        said = result.output.strip()[-_LONGEST_OUTPUT:] or "no result in time"
        raise TableError(f"the tests do not run without a misreading: {said}")
      seconds |= result.found["seconds"]
      failed |= {failure["test"]: _what_failed(failure) for failure in result.found["failures"]}
    passed, faults = {}, {}
    for test in tests:
      names = [name for name in seconds if name == test or name.startswith(f"{test}[")]
      if wrong := [failed[name] for name in names if name in failed]:
        faults[test] = wrong[0]
      else:
        passed[test] = sum(seconds[name] for name in names)
    return passed, faults

  def try_rows(self, rows: Sequence[Mutation]) -> Iterator[tuple[Mutation, Outcome]]:
    """Yields each row and its outcome as it ends."""
    with self._pool() as pool:
      pending = {pool.submit(self._try_row, row): row for row in rows}
      for future in concurrent.futures.as_completed(pending):
        yield pending[future], future.result()

  def _try_row(self, row: Mutation) -> Outcome:
    start = time.perf_counter()
    sources = self.copy(row.edits)
    result = self.run(sources, [row.test], self.timeout, "-x")
    shutil.rmtree(sources.parent)
    return Outcome(*_judge(result, self.timeout), time.perf_counter() - start)

  def copy(self, edits: Sequence[Edit]) -> Path:
    """Returns the source root of a new copy of the package with the edits in it, laid out as in a checkout."""
    directory = Path(tempfile.mkdtemp(dir=self.work))
    shutil.copytree(self._original, directory / PACKAGE)
    for name in BESIDE:
      (directory / name).symlink_to(self.root / name)
    for edit in edits:
      path = directory / PACKAGE / edit.file
      path.write_text(path.read_text().replace(edit.old, edit.new))
    return directory / SOURCES

  def run(self, sources: Path, tests: Sequence[str], timeout: float, *options: str) -> Result:
    """Runs tests with `sources` before the real package, in pytest and in what the tests start."""
    probe = sources.parent / "probe.json"
    environment = os.environ | {
      "PYTHONPATH": os.pathsep.join((str(sources), str(SCRIPTS))),
      "MUTATION_PROBE": str(probe),
      "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # loading all of them takes longer than many a test
    }
    command = [sys.executable, "-c", "import kimi_k3; print(kimi_k3.__file__)"]
    where = subprocess.run(command, cwd=sources.parent, env=environment, capture_output=True, text=True, check=False)
    if not where.stdout.startswith(str(sources)):
      return Result(None, {}, f"a subprocess imports {where.stdout.strip() or where.stderr.strip()}, not the copy")
    command = [sys.executable, "-m", "pytest", "-q", *options]
    for plugin in _PLUGINS:
      command += ["-p", plugin]
    # The ini file's own pythonpath would put the real package first.
    command += ["-o", f"pythonpath={shlex.quote(str(sources))} tests/reference"]
    command += ["--jaxtyping-packages=kimi_k3,beartype.beartype", *tests]
    with self._process(command, environment) as process:
      try:
        output, _ = process.communicate(timeout=timeout)
      except subprocess.TimeoutExpired:
        return Result(None, {}, f"no result in {timeout:.0f} s")
    found = json.loads(probe.read_text()) if probe.is_file() else {}
    imported = found.get("imported")
    if imported is not None and not imported.startswith(str(sources)):
      return Result(None, {}, f"the test imports {imported}, not the copy")
    return Result(process.returncode, found, output)

  @contextlib.contextmanager
  def _process(self, command: Sequence[str], environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
      command,
      cwd=self.root,
      env=environment,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      start_new_session=True,
    )
    with self._lock:
      self._running.add(process)
    try:
      yield process
    finally:
      with self._lock:
        self._running.discard(process)
      _kill(process)
      assert process.stdout is not None
      process.stdout.close()

  @contextlib.contextmanager
  def _pool(self) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Threads. When one fails, or the user has had enough, every test that runs is ended with what it started."""
    with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
      try:
        yield pool
      except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
          for process in self._running:
            _kill(process)
        raise


def _kill(process: subprocess.Popen) -> None:
  if process.poll() is None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _judge(result: Result, timeout: float) -> tuple[str, str]:
  """The verdict, and in one line how it came about."""
  if result.code == 0:
    return SURVIVED, "the test passes"
  if result.code is None:
    return BROKEN, result.output or f"no result in {timeout:.0f} s"
  if not result.found.get("failures"):
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    return BROKEN, f"pytest ended with code {result.code}: {_shortened(lines[-1]) if lines else 'nothing said'}"
  failure = result.found["failures"][0]
  return CAUGHT if result.code == 1 and _is_catch(failure) else BROKEN, _what_failed(failure)


def _is_catch(failure: dict[str, Any]) -> bool:
  return not {REFUSAL, *COMPARISONS}.isdisjoint(failure["types"])


def _what_failed(failure: dict[str, Any]) -> str:
  said = _first_line(failure["message"])
  if REFUSAL in failure["types"]:
    return f"refused: {said}"
  return said if _is_catch(failure) else f"{failure['types'][0].removeprefix('builtins.')}: {said}"


def _first_line(message: str) -> str:
  """The first line that says something, with the size of the difference if numpy tells it further down."""
  lines = [line.strip() for line in message.splitlines() if line.strip()]
  if not lines:
    return "no message"
  sizes = [size for size in _SIZES.findall(message) if size != lines[0]]
  return "; ".join([_shortened(lines[0]), *sizes[-1:]])


def _shortened(line: str) -> str:
  return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."


def run_rows(bench: Bench, rows: Sequence[Mutation]) -> dict[Mutation, Outcome]:
  """Runs the rows, the slowest tests first, and prints each as it ends."""
  tests = sorted({row.test for row in rows})
  print(f"{len(rows)} misreadings, {len(tests)} tests: first the tests without a misreading", flush=True)
  start = time.perf_counter()
  seconds, faults = bench.try_unmutated(tests)
  print(f"{len(seconds)} of {len(tests)} pass, in {time.perf_counter() - start:.0f} s", flush=True)
  outcomes: dict[Mutation, Outcome] = {}

  def note(row: Mutation, outcome: Outcome) -> None:
    outcomes[row] = outcome
    print(f"[{len(outcomes):>3}/{len(rows)}] {outcome.seconds:5.1f} s  {outcome.verdict}: {row.name}")
    print(f"    by {row.test}\n    {outcome.how}", flush=True)

  for row in rows:
    if row.test in faults:
      note(row, Outcome(BROKEN, f"its test fails without the misreading: {faults[row.test]}", 0.0))
  ordered = sorted((row for row in rows if row not in outcomes), key=lambda row: -seconds[row.test])
  for row, outcome in bench.try_rows(ordered):
    note(row, outcome)
  return outcomes


def markdown(rows: Sequence[Mutation], outcomes: dict[Mutation, Outcome]) -> str:
  """Returns the rows as a table, in their order."""
  lines = ["| misreading | in | caught by | how |", "|---|---|---|---|"]
  for row in rows:
    outcome = outcomes[row]
    files = ", ".join(dict.fromkeys(f"`{edit.file}`" for edit in row.edits))
    test = row.test.removeprefix("tests/kimi_k3/")
    how = outcome.how if outcome.verdict == CAUGHT else f"**{outcome.verdict}**: {outcome.how}"
    cells = (text.replace("|", "\\|") for text in (row.name, files, f"`{test}`", how))
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("-k", action="append", default=[], metavar="TEXT", help="only rows with TEXT in their name")
  parser.add_argument("--list", action="store_true", help="print the rows and run nothing")
  parser.add_argument("--jobs", type=int, default=2, metavar="N", help="rows at a time (default: %(default)s)")
  parser.add_argument("--timeout", type=float, default=300, metavar="S", help="seconds a row (default: %(default)s)")
  parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there as well")
  parser.add_argument("--root", type=Path, default=SCRIPTS.parent, help="the repository (default: this one)")
  return parser


def _chosen_rows(root: Path, texts: Sequence[str]) -> list[Mutation]:
  rows = load_table(root / TABLE)
  if faults := list(edit_faults(rows, root / PACKAGE)):
    raise TableError("\n".join(faults))
  if texts:
    rows = [row for row in rows if any(text.lower() in row.name.lower() for text in texts)]
  if not rows:
    raise TableError("there is no such row; --list names them")
  return rows


def main() -> int:
  """Runs the rows that were asked for."""
  args = _parser().parse_args()
  root, start = args.root.resolve(), time.perf_counter()
  try:
    rows = _chosen_rows(root, args.k)
    if args.list:
      for row in rows:
        print(f"{row.name}\n    {', '.join(edit.file for edit in row.edits)}: {row.test}")
      return 0
    with tempfile.TemporaryDirectory() as work:
      bench = Bench(root, Path(work).resolve(), jobs=max(1, args.jobs), timeout=args.timeout)
      outcomes = run_rows(bench, rows)
  except TableError as error:
    print(f"mutations: error: {error}", file=sys.stderr)
    return 2
  if args.markdown:
    args.markdown.write_text(markdown(rows, outcomes))
  missed = [row for row in rows if outcomes[row].verdict != CAUGHT]
  for row in missed:
    print(f"{outcomes[row].verdict}: {row.name}: {outcomes[row].how}")
  print(f"{len(rows) - len(missed)} of {len(rows)} misreadings caught, in {time.perf_counter() - start:.0f} s")
  return 1 if missed else 0


if __name__ == "__main__":
  sys.exit(main())
