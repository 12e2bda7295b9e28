"""How long the caches must be, and how prompts are padded so that few programs are compiled."""

from __future__ import annotations

import fractions
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kimi_k3.errors import InputError

_LARGEST_INDEX = 2**31 - 1
_MOST_DEVICES = 4096  # that a row is spread over; a finer fraction means something else
_SMALLEST_BUCKET = 256  # tokens: shorter prompts share one program, which costs less than compiling more


def bucket(length: int, limit: int | None = None) -> int:
  """Returns the padded length of a prompt: the next power of two, from 256 on, but no more than `limit`."""
  size = _SMALLEST_BUCKET
  while size < length:
    size *= 2
  return size if limit is None else min(size, limit)


def cache_lengths(rows: Sequence[Sequence[int]], max_new_tokens: int, explicit: Mapping[str, Any]) -> dict[str, int]:
  """Returns MaxText's two lengths: of the prompts (max_prefill_predict_length) and of everything (max_target_length).

  What the user did not set is sized from the longest row and the number of new tokens; what was set must suffice.

  Raises:
    InputError: naming the first row that does not fit an explicit length.
  """
  longest = max(map(len, rows))
  row = next(i for i, r in enumerate(rows) if len(r) == longest)
  prefill, target = (_positive(explicit, key) for key in ("max_prefill_predict_length", "max_target_length"))
  if prefill is not None and longest > prefill:
    raise InputError(
      f"row {row} has {longest} tokens, longer than the prompt cache: max_prefill_predict_length is {prefill}; "
      "raise it or leave it out"
    )
  if target is not None and longest + max_new_tokens > target:
    raise InputError(
      f"row {row} needs {longest} + {max_new_tokens} tokens, longer than the cache: max_target_length is {target}; "
      "raise it or leave it out"
    )
  if prefill is None:
    prefill = longest if target is not None else bucket(longest)
  if target is None:
    part = _rows_fraction(explicit)
    target = -(-(prefill + max_new_tokens) // part) * part
  if target - prefill < max_new_tokens:
    raise InputError(
      f"{max_new_tokens} new tokens do not fit: max_target_length {target} - max_prefill_predict_length {prefill} "
      f"leaves {target - prefill}; raise the one or lower the other"
    )
  if target > _LARGEST_INDEX:
    raise InputError(f"a cache of {target} tokens cannot be made: ask for fewer new tokens or a shorter cache")
  return {"max_prefill_predict_length": prefill, "max_target_length": target}


def _rows_fraction(explicit: Mapping[str, Any]) -> int:
  """What must divide the length: MaxText wants a whole number of tokens a device, a row spread over many too."""
  rows = explicit.get("per_device_batch_size", 1)
  if isinstance(rows, float) and math.isfinite(rows):
    denominator = fractions.Fraction(rows).denominator
    return denominator if denominator <= _MOST_DEVICES else 1
  return 1


def _positive(explicit: Mapping[str, Any], key: str) -> int | None:
  value = explicit.get(key)
  if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
    raise InputError(f"{key} is {value!r}, expected a positive whole number")
  return value
