"""The mutation table fits the present source and suite, and scripts/mutations.py tells its verdicts apart."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "scripts" / "mutations.py"


@pytest.fixture(scope="module")
def mutations() -> ModuleType:
  """scripts/mutations.py, which is no package."""
  spec = importlib.util.spec_from_file_location("mutations", SCRIPT)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # dataclasses look their module up
  spec.loader.exec_module(module)
  return module


def of_its_own(command: list[str]) -> subprocess.CompletedProcess[str]:
  """Runs a command that runs pytest, which must not take itself for a worker of this one."""
  environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
  return subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_every_text_of_the_table_occurs_exactly_once_in_its_file(mutations):
  rows = mutations.load_table(REPO / mutations.TABLE)
  assert len(rows) >= 60
  faults = list(mutations.edit_faults(rows, REPO / mutations.PACKAGE))
  assert not faults, "\n".join(faults)


def test_every_edited_file_is_still_a_program(mutations):
  for row in mutations.load_table(REPO / mutations.TABLE):
    texts = {edit.file: (REPO / mutations.PACKAGE / edit.file).read_text() for edit in row.edits}
    for edit in row.edits:
      texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
    for file, text in texts.items():
      compile(text, f"{row.name}: {file}", "exec")


def test_every_test_of_the_table_exists_and_is_one_test(mutations):
  tests = sorted({row.test for row in mutations.load_table(REPO / mutations.TABLE)})
  command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tests]
  done = of_its_own(command)
  assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if line.startswith("ERROR"))
  assert sorted(line for line in done.stdout.splitlines() if "::" in line) == tests


THING = '''"""A product in four functions."""

from kimi_k3.errors import InputError


def twice(x: int) -> int:
  return 2 * x


def root(x: float) -> float:
  if x < 0:
    raise InputError(f"{x} has no root")
  return abs(x) ** 0.5
'''
THING_TEST = """
import subprocess, sys, time

import pytest

from kimi_k3.errors import InputError
from kimi_k3.thing import root, twice


def test_twice():
  assert twice(3) == 6, f"off by {twice(3) - 6}"


def test_twice_in_a_process_of_its_own():
  program = "from kimi_k3.thing import twice; print(twice(3))"
  assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "6\\n"


def test_root():
  assert root(4.0) == 2.0


def test_a_negative_number_is_refused():
  with pytest.raises(InputError):
    root(-1.0)


def test_that_fails_anyway():
  assert twice(3) == 7
"""
# name, old, new, test, verdict, how
STUBS = [
  ("a wrong number", "2 * x", "x * 4", "test_twice_in_a_process_of_its_own", "caught", "assert '12"),
  ("refused", "if x < 0", "if x > 0", "test_root", "caught", "refused: 4.0 has no root"),
  ("not refused", "if x < 0", "if False", "test_a_negative_number_is_refused", "caught", "DID NOT RAISE"),
  ("the same in other words", "2 * x", "x + x", "test_twice", "SURVIVED", "the test passes"),
  ("a wrong type", "2 * x", "'6'", "test_twice", "BROKEN", "jaxtyping.TypeCheckError: "),
  (
    "a test that fails",
    "2 * x",
    "3 * x",
    "test_that_fails_anyway",
    "BROKEN",
    "fails without the misreading: assert 6 == 7",
  ),
]


@pytest.fixture(scope="module")
def stub(tmp_path_factory) -> Path:
  """A repository of one module and its tests, with a row for each verdict."""
  root = tmp_path_factory.mktemp("stub")
  package, tests = root / "MaxText" / "kimi_k3", root / "tests"
  for directory in (package, tests / "mutations", root / "configs"):
    directory.mkdir(parents=True)
  (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["MaxText"]\n')
  (package / "__init__.py").write_text("")
  (package / "errors.py").write_text("class InputError(Exception):\n  pass\n")
  (package / "thing.py").write_text(THING)
  (tests / "thing_test.py").write_text(THING_TEST)
  return root


def write_table(root: Path, *rows: tuple[str, ...]) -> None:
  keys = ("name", "file", "old", "new", "test")
  lines = []
  for name, old, new, test, *_ in rows:
    values = (name, "thing.py", old, new, f"tests/thing_test.py::{test}")
    lines += ["[[mutation]]", *(f'{key} = "{value}"' for key, value in zip(keys, values, strict=True))]
  (root / "tests" / "mutations" / "table.toml").write_text("\n".join(lines))


def run(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
  return of_its_own([sys.executable, str(SCRIPT), "--root", str(root), *options])


@pytest.mark.slow
def test_each_verdict_is_told_from_the_others_and_only_what_is_caught_is_fine(stub, tmp_path):
  write_table(stub, *STUBS)
  out = tmp_path / "table.md"
  done = run(stub, "--markdown", str(out))
  assert done.returncode == 1, done.stderr
  lines = [line.strip() for line in done.stdout.splitlines()]
  for name, _, _, test, verdict, how in STUBS:
    (at,) = (i for i, line in enumerate(lines) if line.startswith("[") and line.endswith(f" s  {verdict}: {name}"))
    assert lines[at + 1] == f"by tests/thing_test.py::{test}"
    assert how in lines[at + 2], name
  missed = [line.split(": ")[1] for line in lines if line.startswith(("SURVIVED: ", "BROKEN: "))]
  assert missed == [name for name, *_, verdict, _ in STUBS if verdict != "caught"]
  assert lines[-1].startswith("3 of 6 misreadings caught, in ")
  table = out.read_text().splitlines()
  assert len(table) == 2 + len(STUBS)
  assert table[3] == "| refused | `thing.py` | `tests/thing_test.py::test_root` | refused: 4.0 has no root |"
  assert table[5].endswith(" | **SURVIVED**: the test passes |")


def test_when_all_are_caught_the_exit_code_is_0_and_the_source_is_as_it_was(stub):
  write_table(stub, *STUBS)
  done = run(stub, "-k", "NOT REF")
  assert done.returncode == 0, done.stdout + done.stderr
  assert done.stdout.splitlines()[-1].startswith("1 of 1 misreadings caught")
  assert (stub / "MaxText" / "kimi_k3" / "thing.py").read_text() == THING


ASSERTION = ["builtins.AssertionError", "builtins.Exception"]
REFUSAL = ["kimi_k3.errors.InputError", "builtins.ValueError"]
NUMPY = (
  "\nNot equal to tolerance rtol=0, atol=1\nMismatched elements: 1 / 2\nMax absolute difference among violations: 3.\n"
)


@pytest.mark.parametrize(
  ("code", "types", "message", "verdict", "how"),
  [
    (1, ASSERTION, "off by 3\nassert 9 == 6", "caught", "off by 3"),
    (
      1,
      ASSERTION,
      NUMPY,
      "caught",
      "Not equal to tolerance rtol=0, atol=1; Max absolute difference among violations: 3.",
    ),
    (1, ASSERTION, "", "caught", "no message"),
    (1, REFUSAL, "a.b: no", "caught", "refused: a.b: no"),
    (1, ["builtins.NameError"], "name 'y'", "BROKEN", "NameError: name 'y'"),
    (1, ["builtins.ValueError"], "shapes", "BROKEN", "ValueError: shapes"),
    (2, ["_pytest.nodes.Collector.CollectError"], "\nImportError", "BROKEN", "Collector.CollectError: ImportError"),
    (2, ASSERTION, "at import", "BROKEN", "at import"),
    (4, None, "", "BROKEN", "pytest ended with code 4: the last line"),
    (1, None, "", "BROKEN", "pytest ended with code 1: the last line"),
    (0, None, "", "SURVIVED", "the test passes"),
  ],
)
def test_only_a_comparison_or_a_refusal_of_a_test_that_ran_is_a_catch(mutations, code, types, message, verdict, how):
  failures = [] if types is None else [{"test": "t", "when": "call", "types": types, "message": message}]
  found, said = mutations._judge(mutations.Result(code, {"failures": failures}, "a line\n\nthe last line\n"), 1)
  assert found == verdict
  assert said.endswith(how)


def test_a_test_that_does_not_end_is_ended(mutations, stub, tmp_path):
  bench = mutations.Bench(stub, tmp_path, jobs=1, timeout=2)
  sources = bench.copy([mutations.Edit("thing.py", "2 * x", "max(iter(int, 1))")])
  start = time.perf_counter()
  result = bench.run(sources, ["tests/thing_test.py::test_twice"], 2)
  assert time.perf_counter() - start < 60
  assert mutations._judge(result, 2) == (mutations.BROKEN, "no result in 2 s")


def test_rows_are_listed_without_a_run(stub):
  write_table(stub, *STUBS)
  done = run(stub, "--list", "-k", "in other words")
  assert done.returncode == 0
  assert done.stdout == "the same in other words\n    thing.py: tests/thing_test.py::test_twice\n"


def test_every_text_that_is_not_there_exactly_once_is_named_before_anything_runs(stub):
  write_table(stub, ("gone", "5 * x", "x", "test_twice"), ("twice there", "return", "yield", "test_twice"), STUBS[0])
  done = run(stub)
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.splitlines() == [
    "mutations: error: gone: thing.py holds '5 * x' 0 times, expected once",
    "twice there: thing.py holds 'return' 2 times, expected once",
  ]


def test_a_test_that_does_not_exist_is_named(stub):
  write_table(stub, ("of no test", "2 * x", "3 * x", "test_thrice"))
  done = run(stub)
  assert done.returncode == 2
  assert "not found" in done.stderr
  assert "test_thrice" in done.stderr


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ('name = "a"\ntest = "t"\nfile = "f"\nold = "x"', "a: has file, name, old, test; expected name, test and either"),
    ('name = "a"\ntest = "t"\nedits = [{ file = "f", old = "x" }]', "a: has edits, name, test; expected"),
    ('file = "f"\nold = "x"\nnew = "y"\ntest = "t"', "row 1: has file, new, old, test; expected"),
    ('name = "a"\ntest = "t"\nfile = "f"\nold = "x"\nnew = "x"', "a: changes nothing"),
  ],
)
def test_a_row_that_is_none_is_refused_by_name(mutations, tmp_path, text, said):
  path = tmp_path / "table.toml"
  path.write_text(f"[[mutation]]\n{text}\n")
  with pytest.raises(mutations.TableError) as error:
    mutations.load_table(path)
  assert said in str(error.value)


def test_a_name_is_used_once(mutations, tmp_path):
  path = tmp_path / "table.toml"
  path.write_text('[[mutation]]\nname = "a"\ntest = "t"\nfile = "f"\nold = "x"\nnew = "y"\n' * 2)
  with pytest.raises(mutations.TableError, match="a: used for two rows"):
    mutations.load_table(path)
