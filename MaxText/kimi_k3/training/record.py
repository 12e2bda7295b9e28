"""What a training run says of its model beside its steps, so that none of them is taken for another model's.

A step of MaxText's trainer holds arrays. Two configs whose arrays have the same shapes, such as those of other
attention residuals or another number of chosen experts, are told apart by this file alone.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from kimi_k3.config import KimiK3Config

NAME = "kimi_k3_architecture.json"  # in RUN, beside RUN/checkpoints
_STORAGE = ("packed_modules", "fp8_modules", "float32_leaves")  # how weights are stored, which steps show by themselves


def encode(config: KimiK3Config) -> str:
  """Returns the contents of the file."""
  return json.dumps(_fields(config), indent=1) + "\n"


def differences(recorded: str | bytes, config: KimiK3Config) -> list[str]:
  """Returns how a run's model differs from a config, one entry a field; empty if it does not.

  Raises:
    ValueError: if `recorded` is no such file.
  """
  found = json.loads(recorded)
  if not isinstance(found, dict):
    raise ValueError(f"holds {type(found).__name__}, expected an object")
  own = _fields(config)
  return [f"{name} {found.get(name)!r} and not {value!r}" for name, value in own.items() if found.get(name) != value]


def _fields(config: KimiK3Config) -> dict[str, Any]:
  fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in _STORAGE}
  return json.loads(json.dumps(fields))  # tuples are lists there
