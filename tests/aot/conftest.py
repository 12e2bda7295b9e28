"""Tests that compile for TPUs with libtpu: all are marked `aot`, for `make test-aot`."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Marks what is in this directory; elsewhere than on Linux on x86-64 there is no libtpu, and it is skipped."""
  absent = (sys.platform, platform.machine()) != ("linux", "x86_64")
  for item in items:
    if HERE in item.path.parents:
      item.add_marker(pytest.mark.aot)
      if absent:
        item.add_marker(pytest.mark.skip(reason="libtpu exists for Linux on x86-64 only"))


@pytest.fixture(scope="session")
def small_programs() -> ModuleType:
  """The module of that name beside this file."""
  spec = importlib.util.spec_from_file_location("small_programs", HERE / "small_programs.py")
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
