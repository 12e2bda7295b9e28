"""A pytest plugin of scripts/mutations.py: writes what failed first, each test's seconds, and the package imported."""

from __future__ import annotations

import collections
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

OUT = "MUTATION_PROBE"  # environment variable: the file to write

_seconds: dict[str, float] = collections.defaultdict(float)
_failures: list[dict[str, Any]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
  """Adds up set-up, call and tear-down of each test."""
  _seconds[report.nodeid] += report.duration


def pytest_exception_interact(node: pytest.Item | pytest.Collector, call: pytest.CallInfo) -> None:
  """Keeps the exception of a test, fixture or collection that failed."""
  assert call.excinfo is not None
  error = call.excinfo.value
  _failures.append(
    {
      "test": node.nodeid,
      "when": call.when,
      "types": [f"{c.__module__}.{c.__qualname__}" for c in type(error).__mro__],
      "message": str(error),
    }
  )


def pytest_sessionfinish() -> None:
  """Writes all of it."""
  package = sys.modules.get("kimi_k3")
  found = {"imported": package and package.__file__, "seconds": _seconds, "failures": _failures}
  Path(os.environ[OUT]).write_text(json.dumps(found))
