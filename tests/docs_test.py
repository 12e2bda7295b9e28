"""The commands of docs/convert.md and docs/plan.md, run as their reader would; cluster manifests."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kimi_k3.cli.main import main

REPO = Path(__file__).resolve().parents[1]


def blocks(kind: str, document: str = "convert.md") -> list[str]:
  text = (REPO / "docs" / document).read_text()
  return re.findall(rf"^```{kind}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def shell(tmp_path):
  for name in ("tests", "configs"):  # its paths are relative to a checkout; what it writes lands in tmp_path
    (tmp_path / name).symlink_to(REPO / name)
  path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

  def run(script: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
      ["bash", "-euo", "pipefail", "-c", script],
      cwd=tmp_path,
      env=os.environ | {"PATH": path} | variables,
      capture_output=True,
      text=True,
      timeout=300,
      check=False,
    )

  return run


@pytest.mark.slow
def test_the_way_from_the_hub_to_a_decode_runs_as_written(shell):
  commands = blocks("sh")
  verbs = ("inspect", "convert", "verify", "decode", "export", "slice")
  assert not [verb for verb in verbs if not any(f"kimi-k3 {verb} " in command for command in commands)]
  for command in commands:
    result = shell(command)
    assert result.returncode == 0, f"{command}\n{result.stderr}"


def test_three_questions_of_a_newcomer_are_answered_by_one_command_each(capsys, monkeypatch):
  monkeypatch.chdir(REPO)
  answers = []
  for command in blocks("sh", "plan.md"):
    words, _, ending = command.strip().partition(" || ")
    program, *arguments = shlex.split(words)
    assert program == "kimi-k3"
    code = main(arguments)
    assert code == (2 if ending == "test $? -eq 2" else 0)
    answers.append(capsys.readouterr())
  fits, largest, other = answers
  assert "decode 8 x 1048576" in fits.out
  assert "fits, " in fits.out
  assert re.search(r"\d+ rows of 131072 tokens", largest.out)
  assert "tokens of a prompt at a time, beside caches" in largest.out
  assert "DOES NOT FIT" in other.out
  assert "by arithmetic these fit: --topology tpu7x:2x2x4" in other.err


def test_the_jobs_of_the_manifests_convert_finish_and_verify(shell, tmp_path):
  (text,) = blocks("yaml")
  jobs = [job["spec"] for job in yaml.safe_load_all(text)]
  commands = [job["template"]["spec"]["containers"][0] for job in jobs]
  assert all(command["command"] == ["bash", "-c"] for command in commands)
  assert jobs[0]["completionMode"] == "Indexed"
  parts = jobs[0]["completions"]
  assert f"/{parts}" in commands[0]["args"][0]
  source = REPO / "tests" / "golden" / "kimi-linear-tiny" / "checkpoint"
  scripts = [command["args"][0].replace("/source", shlex.quote(str(source))) for command in commands]
  for index in range(parts):
    result = shell(scripts[0], OUT="out", JOB_COMPLETION_INDEX=str(index))
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "out").exists()
  result = shell(scripts[1], OUT="out")
  assert result.returncode == 0, result.stderr
  assert (tmp_path / "out" / "decode.yml").is_file()
