"""The command line in this process: a small converted checkpoint, and what a refusal looks like."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def five_layers(tiny_checkpoint: Callable[..., Path], convert: Callable[..., Path]) -> Path:
  """A converted K3 of five layers with every kind of layer, vocabulary 256. Read only: copy it to change it."""
  return convert(tiny_checkpoint("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2"))


@pytest.fixture
def ids_file(tmp_path: Path) -> Callable[..., str]:
  """Returns a function: any JSON value, or text that is none, to the path of a file that holds it."""

  def write(value: Any = ((1, 2, 3), (4, 5)), *, text: str | None = None) -> str:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(value) if text is None else text)
    return str(path)

  return write


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
  """Returns a function: command line words to the one line that refuses them, with an empty stdout and exit code 2."""
  from kimi_k3.cli.main import main

  def run(*words: str | Path) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("kimi-k3: error: ")
    assert said.err.endswith("\n")
    assert said.err.count("\n") == 1
    return said.err.removeprefix("kimi-k3: error: ").removesuffix("\n")

  return run
