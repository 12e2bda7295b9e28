"""Rules of the repository that no tool of `make check` knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "MaxText" / "kimi_k3"
MODULES = sorted(PACKAGE.rglob("*.py"))
ADAPTER = PACKAGE / "maxtext_adapter"

# Brackets keep this file from holding what it forbids.
FORBIDDEN = {
  "the address of a package index": re.compile(
    r"https?://[^\s\"']*/(?:simple|packages)(?:/|\b)"
    r"|[p]ypi\.org|[p]ythonhosted\.org|registry\.[n]pmjs\.org|conda\.[a]naconda\.org"
  ),
  "a path of one machine": re.compile(r"(?<![\w.$})~-])/(?:work|farm|root|home|Users|tmp|opt|mnt)/[\w.]"),
}

HEAVY = ("maxtext", "jax", "flax", "orbax", "tensorstore", "tokamax", "transformers", "torch", "tensorflow")


def project_files() -> list[Path]:
  """Files that are tracked, or untracked and not ignored."""
  if not (REPO / ".git").exists():
    pytest.skip("not a git checkout: which files belong to the project is not known")
  listed = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=REPO, capture_output=True, check=True
  )
  return [REPO / name for name in listed.stdout.decode().split("\0") if name and (REPO / name).is_file()]


def violations(text: str) -> Iterator[str]:
  for number, line in enumerate(text.splitlines(), 1):
    for what, pattern in FORBIDDEN.items():
      if match := pattern.search(line):
        yield f"{number}: {what}: {match.group()}"


def imported_modules(source: str) -> set[str]:
  """Top-level names of what a source imports, anywhere in it; relative imports are the package's own."""
  names = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names |= {alias.name.split(".")[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
      names.add(str(node.module).split(".")[0])
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
      "importlib.import_module",
      "import_module",
      "__import__",
    ):
      names |= {str(arg.value).split(".")[0] for arg in node.args[:1] if isinstance(arg, ast.Constant)}
  return names


def test_no_file_holds_an_index_address_or_a_path_of_one_machine():
  found, read = [], 0
  for path in project_files():
    content = path.read_bytes()
    if b"\0" in content:
      continue
    read += 1
    found += [f"{path.relative_to(REPO)}:{line}" for line in violations(content.decode("utf-8", "replace"))]
  assert read > 20
  assert not found, "\n".join(found)


@pytest.mark.parametrize(
  "line",
  [
    "index-url = https:" + "//example.org/some/simple/",
    "--find-links https:" + "//example.org/packages/ab/",
    "see files.python" + "hosted.org",
    "cd /wo" + "rk/main",
    'open("/tm' + 'p/x.json")',
    "PATH=/ho" + "me/me/bin",
  ],
)
def test_the_search_for_addresses_and_paths_finds(line):
  assert list(violations(line))


@pytest.mark.parametrize("line", ["src/root/x", "$(DIR)/opt/x", "docs/home/index.md", "a simple/ path", "tmp/x"])
def test_the_search_for_addresses_and_paths_lets_pass(line):
  assert not list(violations(line))


def test_no_document_has_a_place_left_to_fill():
  unfilled = {
    str(path.relative_to(REPO)): found
    for path in [*REPO.glob("*.md"), *REPO.glob("docs/**/*.md")]
    if (found := re.findall(r"@[A-Z_]{3,}@", path.read_text()))
  }
  assert not unfilled


def test_only_the_adapter_imports_maxtext():
  offenders = [
    str(path.relative_to(REPO))
    for path in MODULES
    if ADAPTER not in path.parents and {"maxtext", "MaxText"} & imported_modules(path.read_text())
  ]
  assert MODULES
  assert not offenders


@pytest.mark.parametrize(
  "source",
  [
    "import maxtext",
    "from maxtext.layers import moe",
    "import maxtext.common as c",
    "def f():\n  import maxtext.utils",
    "import importlib\nimportlib.import_module('maxtext.models')",
  ],
)
def test_the_search_for_imports_finds(source):
  assert "maxtext" in imported_modules(source)


def test_every_module_has_a_docstring():
  assert not [str(path.relative_to(REPO)) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))]


def test_importing_the_package_loads_nothing_heavy_and_changes_nothing():
  program = """
import logging, os, sys, warnings

def surroundings():
  root = logging.getLogger()
  return dict(os.environ), list(sys.path), list(sys.meta_path), list(warnings.filters), root.level, list(root.handlers)

before = surroundings()
import kimi_k3
assert surroundings() == before, "importing kimi_k3 changed the process around it"
print(*sys.modules)
"""
  run = subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
  assert run.returncode == 0, run.stderr
  loaded = {name.split(".")[0] for name in run.stdout.split()}
  assert "kimi_k3" in loaded
  assert not loaded & set(HEAVY)


def test_the_locks_hold_the_direct_dependencies_and_no_other_framework():
  project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
  base, dev = (locked(REPO / "requirements" / name) for name in ("base.txt", "dev.txt"))
  direct = {normal(name) for name in project["dependencies"]}
  tools = {normal(name) for name in project["optional-dependencies"]["dev"]}
  assert direct <= base
  assert base | tools <= dev
  assert not [name for name in dev if re.match("torch|tensorflow|nvidia|google-jetstream|libtpu", name)]


def locked(path: Path) -> set[str]:
  """`name==version` of each line of a requirements file, without markers."""
  return {normal(line.split(";")[0]) for line in path.read_text().splitlines() if re.match(r"[A-Za-z0-9]", line)}


def normal(requirement: str) -> str:
  name, version = requirement.strip().split("==")
  return re.sub(r"[-_.]+", "-", name.split("[")[0]).lower() + "==" + version
