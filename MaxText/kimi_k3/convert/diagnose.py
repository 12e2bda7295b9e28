"""What a difference between two parts of a leaf looks like, in words: the mistakes that a converter or a disk makes.

Called on failure only, with arrays in memory. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_AXES = 4  # of a slice whose axes are permuted: 24 orders
_PROBES = 8  # An axis has so many parts; where those of its middle half start, lines are looked for elsewhere.
_MAX_CANDIDATES = 16  # ways to move them, where many lines are alike


class First(NamedTuple):
  """The first value that differs: its index in the part, what was found and expected, and in how many bits."""

  index: tuple[int, ...]
  found: int | float
  expected: int | float
  bits: int


def num_different(found: np.ndarray, expected: np.ndarray) -> int:
  """Returns how many values differ in any bit."""
  return int(np.count_nonzero(bits_of(found) != bits_of(expected)))


def bits_of(array: np.ndarray) -> np.ndarray:
  """Returns the values as unsigned integers of their size: NaN equals itself and 0 is not -0."""
  return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def same(found: np.ndarray, expected: np.ndarray) -> bool:
  """Returns whether two arrays hold the same bytes, whatever their shapes."""
  a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (found, expected))
  if a.size != b.size:
    return False
  wide = np.uint64 if a.size % 8 == 0 else np.uint8
  return np.array_equal(a.view(wide), b.view(wide))


def first_difference(found: np.ndarray, expected: np.ndarray) -> First:
  """Returns the first value in C order that differs."""
  a, b = bits_of(found), bits_of(expected)
  index = np.unravel_index(int(np.argmax(a != b)), a.shape)
  bits = int(a[index] ^ b[index]).bit_count()
  return First(tuple(map(int, index)), _plain(found[index]), _plain(expected[index]), bits)


def _plain(value: np.generic) -> int | float:
  return int(value) if np.issubdtype(value.dtype, np.integer) else float(value)


def pattern(found: np.ndarray, expected: np.ndarray) -> str | None:
  """Returns what was done to `expected` to make `found`, two arrays of one shape; None if nothing known explains it."""
  if not bits_of(found).any():
    return "all values are 0"
  return _permuted(found, expected) or _shifted(found, expected)


def _permuted(found: np.ndarray, expected: np.ndarray) -> str | None:
  """Other orders of the axes, the reverse first. That a matrix's sides are equal is not needed: its bytes tell."""
  axes = [axis for axis, size in enumerate(expected.shape) if size > 1]
  if not 2 <= len(axes) <= MAX_AXES:
    return None
  orders = sorted(itertools.permutations(axes), key=lambda order: order != tuple(reversed(axes)))
  squeezed = expected.reshape([expected.shape[axis] for axis in axes])
  for order in orders:
    steps = [axes.index(axis) for axis in order]
    if order != tuple(axes) and same(found, squeezed.transpose(steps)):
      return "transposed" if len(axes) == 2 else f"transposed: its axes stand in the order {_spelled(order)}"
  return None


def _shifted(found: np.ndarray, expected: np.ndarray) -> str | None:
  """All lines along some axis moved by as many places, around the end or out of it."""
  for axis, size in enumerate(expected.shape):
    a, b = (np.moveaxis(bits_of(array), axis, 0).reshape(size, -1) for array in (found, expected))
    for shift in _shifts(a, b):
      if np.array_equal(a, np.roll(b, shift, axis=0)):
        return f"shifted: rows along axis {axis} stand {abs(shift)} place(s) {_way(shift)}, around the end"
      kept, moved = (b[: size - shift], a[shift:]) if shift > 0 else (b[-shift:], a[: size + shift])
      if 4 * len(kept) >= 3 * size and np.array_equal(kept, moved):
        return f"shifted: rows along axis {axis} stand {abs(shift)} place(s) {_way(shift)}"
  return None


def _shifts(found: np.ndarray, expected: np.ndarray) -> list[int]:
  """How far some lines in the middle have moved, if all of them as far, the shortest ways first; [lines, values]."""
  size = len(found)
  common: set[int] | None = None
  for line in {size * part // _PROBES for part in range(_PROBES // 4, 3 * _PROBES // 4 + 1)}:
    ways = {line - int(other) for other in np.flatnonzero((expected == found[line]).all(axis=1))}
    around = {way + turn for way in ways for turn in (-size, 0, size)}
    common = around if common is None else common & around
  return sorted((way for way in common or () if 0 < abs(way) < size), key=abs)[:_MAX_CANDIDATES]


def _way(shift: int) -> str:
  return "too far" if shift > 0 else "too early"


def _spelled(order: Sequence[int]) -> str:
  return "(" + ", ".join(map(str, order)) + ")"
