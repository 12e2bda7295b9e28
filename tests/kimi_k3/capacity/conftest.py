"""Texts of compiled programs: what tests/aot/small_programs.py wrote with libtpu 0.0.50.1."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # imported late at run time, after the type checker of --jaxtyping-packages is in place
  from kimi_k3.capacity.hlo_text import Program

TEXTS = Path(__file__).parent / "texts"


@pytest.fixture(scope="session")
def compiled() -> Callable[[str], Program]:
  """Returns a function: the name of a stored text to the program it holds."""
  from kimi_k3.capacity import hlo

  @functools.cache
  def load(name: str) -> Program:
    return hlo.parse((TEXTS / f"{name}.hlo").read_text())

  return load
