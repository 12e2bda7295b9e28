"""Every command of README.md works: run here, or a make target (demo_test.py runs what `make demo` runs)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands_of(text: str) -> list[str]:
  """Command lines with their continuation lines joined; comments and empty lines left out."""
  lines = (line.strip() for line in text.replace("\\\n", " ").splitlines())
  return [re.sub(r"\s+", " ", line) for line in lines if line and not line.startswith("#")]


def make_targets() -> set[str]:
  return set(re.findall(r"^([a-z][a-z-]*):", (REPO / "Makefile").read_text(), flags=re.MULTILINE))


def demo_commands() -> set[str]:
  """What scripts/demo.sh runs, as it prints it."""
  script = commands_of((REPO / "scripts" / "demo.sh").read_text())
  return {match[1] for line in script if (match := re.match(r"step \S+ (kimi-k3 .*)", line))}


def demo_output() -> list[str]:
  block = re.search(r"<!-- demo output -->\n(.*?)<!-- end of demo output -->", README, flags=re.DOTALL)
  assert block, "README.md has lost its demo output markers"
  return [line.strip() for line in block[1].splitlines() if line.strip() and not line.startswith("```")]


COMMANDS = [command for block in BLOCKS for command in commands_of(block)]
RUN_HERE = [c for c in COMMANDS if not c.startswith("make ")]


def test_the_readme_has_commands():
  assert {"make demo", "make test", "make install"} <= set(COMMANDS)
  assert RUN_HERE


def test_every_make_command_is_a_target():
  assert not {c.split()[1] for c in COMMANDS if c.startswith("make ")} - make_targets()


def test_the_shown_demo_output_is_of_these_commands():
  output = demo_output()
  assert {line[2:] for line in output if line.startswith("$ kimi-k3")} == demo_commands()
  assert "tok/s" in output[-1]


# Those that decode many tokens compile for long: `make test-slow`, which CI runs too.
LONG = ("kimi-k3 eval", "kimi-k3 batch")


@pytest.mark.parametrize(
  "command",
  [
    pytest.param(c, marks=pytest.mark.slow if any(verb in c and "--help" not in c for verb in LONG) else ())
    for c in RUN_HERE
  ],
)
def test_a_readme_command_runs(command, tmp_path):
  for name in ("tests", "configs", "scripts"):  # its paths are relative to a checkout; what it writes lands in tmp_path
    (tmp_path / name).symlink_to(REPO / name)
  scripts = Path(sys.executable).parent
  run = subprocess.run(
    ["bash", "-euo", "pipefail", "-c", command.replace(".venv/bin/", f"{scripts}/")],
    cwd=tmp_path,
    env=os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert run.returncode == 0, run.stderr
  assert run.stdout or run.stderr


@pytest.mark.parametrize(
  "document", sorted(REPO.glob("*.md")) + sorted(REPO.glob("docs/**/*.md")), ids=lambda p: p.name
)
def test_every_relative_link_leads_somewhere(document):
  links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
  assert not [link for link in links if "://" not in link and not (document.parent / link).exists()]
