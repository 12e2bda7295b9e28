"""Fixtures of the whole-model tests: converted checkpoints, and configs that compute in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FLOAT32 = ("dtype=float32", "matmul_precision=highest")


@pytest.fixture(scope="session")
def convert(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
  """Returns a function: a released checkpoint to the directory it is converted to, once a session."""
  from kimi_k3.cli.main import main

  @functools.cache
  def run(checkpoint: Path, *options: str) -> Path:
    out = tmp_path_factory.mktemp("converted") / "out"
    assert main(["convert", str(checkpoint), str(out), *options]) == 0
    return out

  return run


@pytest.fixture(scope="session")
def float32_config() -> Callable[..., Any]:
  """Returns a function: a converted directory and settings to MaxText's config with float32 arithmetic."""
  from kimi_k3.maxtext_adapter.settings import read_config

  def read(out: Path, *settings: str, **derived: Any) -> Any:
    return read_config(str(out / "decode.yml"), [*FLOAT32, *settings], **derived)

  return read
