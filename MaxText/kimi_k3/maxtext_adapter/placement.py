"""Whether every device holds the part of the checkpoint that it should: element by element, by another reading.

Loading trusts Orbax, the sharding and the mesh to mean the same by a shard. Here each device's content is compared with
what TensorStore reads at the index that the sharding names for it. Experts of one layer have one shape, so that two
that changed places would load, run, and answer wrongly.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from kimi_k3.errors import InputError

Box = tuple[tuple[int, int], ...]  # first and one past the last element along each axis

MODES = ("all", "sample", "none")
SMALL_BYTES = 1024 * 1024  # 1 MiB: shards up to this are compared whole; of larger ones one chunk, unless all is asked
_SHOWN = 3  # differences named in full
_PREFIX = "params.params."


@dataclasses.dataclass
class Compared:
  """What was compared.

  Attributes:
    leaves: Leaves.
    num_bytes: Bytes on devices.
  """

  leaves: int = 0
  num_bytes: int = 0


class _Held(NamedTuple):
  """A device's part of a leaf."""

  device: Any
  box: Box
  data: jax.Array


def check_placement(path: str, params: Mapping[str, jax.Array], mode: str) -> Compared:
  """Compares what stands on this process's devices with the checkpoint, and returns how much it was.

  Args:
    path: The `items` directory.
    params: As they were loaded, by name.
    mode: "all": every element; "sample": shards of up to SMALL_BYTES whole, and one chunk of every larger one, another
      one for each device; "none".

  Raises:
    InputError: naming leaf, device and index of what differs, and of which shard it is the content, if of one.
  """
  compared, faults = Compared(), []
  for name, leaf in params.items() if mode != "none" else ():
    stored = _Stored(path, name)
    fault = None
    for number, held in enumerate(_held(leaf)):
      for box in stored.boxes(held.box, mode, number):
        found = _part(held, box)
        compared.num_bytes += found.nbytes
        if fault is None and not _same(found, stored.read(box)):
          fault = _fault(name, leaf, held, box, found, stored)
    compared.leaves += 1
    faults += [fault] if fault else []
  if faults:
    more = f"; and {len(faults) - _SHOWN} more leaves" if len(faults) > _SHOWN else ""
    raise InputError(f"{path} is not what the devices hold: {'; '.join(faults[:_SHOWN])}{more}. Report this fault")
  return compared


class _Stored:
  """One leaf of the checkpoint, read at global indices. A part that several devices hold is read once."""

  def __init__(self, path: str, name: str):
    import tensorstore as ts

    base = path if "://" in path else f"file://{path}"
    spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{_PREFIX}{name}/"}}
    self._array: Any = ts.open(spec, open=True, read=True).result()
    self._last: tuple[Box, np.ndarray] | None = None

  def read(self, box: Box) -> np.ndarray:
    if self._last is None or self._last[0] != box:
      self._last = box, np.asarray(self._array[_slices(box)].read().result())
    return self._last[1]

  def boxes(self, box: Box, mode: str, number: int) -> Iterator[Box]:
    """The parts of a shard that are compared: whole if it is small, else chunks of the array, one or all."""
    nbytes = math.prod(stop - start for start, stop in box) * self._array.dtype.numpy_dtype.itemsize
    if nbytes <= SMALL_BYTES:
      yield box
      return
    sizes = self._array.chunk_layout.read_chunk.shape
    grids = [_pieces(start, stop, size) for (start, stop), size in zip(box, sizes, strict=True)]
    if mode == "all":
      yield from itertools.product(*grids)
      return
    at, count = [], math.prod(map(len, grids))
    place = (number * 2654435761) % count  # another chunk on each device, the same ones in every run
    for grid in reversed(grids):
      place, here = divmod(place, len(grid))
      at.append(grid[here])
    yield tuple(reversed(at))


def _pieces(start: int, stop: int, size: int) -> list[tuple[int, int]]:
  """The interval, cut at the multiples of `size`."""
  edges = [start, *range((start // size + 1) * size, stop, size), stop]
  return list(itertools.pairwise(edges))


def _held(leaf: jax.Array) -> list[_Held]:
  """What each device of this process has of a leaf, and the index that the sharding names for it."""
  boxes = leaf.sharding.addressable_devices_indices_map(leaf.shape)
  data = {shard.device: shard.data for shard in leaf.addressable_shards}
  held = [_Held(device, _box(index, leaf.shape), data[device]) for device, index in boxes.items()]
  return sorted(held, key=lambda one: one.box)  # equal parts side by side: read once


def _box(index: Any, shape: tuple[int, ...]) -> Box:
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _slices(box: Box) -> tuple[slice, ...]:
  return tuple(slice(start, stop) for start, stop in box)


def _part(held: _Held, box: Box) -> np.ndarray:
  """A part of what a device holds, at its global index. Of a large shard no more than that leaves the device."""
  start = [first - origin for (first, _), (origin, _) in zip(box, held.box, strict=True)]
  shape = tuple(stop - first for first, stop in box)
  if shape == held.data.shape:
    return np.asarray(held.data)
  return np.asarray(_slice(held.data, np.array(start, np.int32), shape))


@functools.partial(jax.jit, static_argnums=2)
def _slice(data: jax.Array, start: Any, shape: tuple[int, ...]) -> jax.Array:
  return jax.lax.dynamic_slice(data, tuple(start), shape)


def _same(found: np.ndarray, expected: np.ndarray) -> bool:
  """Whether all bits are the same: NaN is a value like others here."""
  return (
    found.shape == expected.shape and found.dtype == expected.dtype and np.array_equal(_bits(found), _bits(expected))
  )


def _bits(array: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _fault(name: str, leaf: jax.Array, held: _Held, box: Box, found: np.ndarray, stored: _Stored) -> str:
  expected = stored.read(box)
  if found.shape != expected.shape or found.dtype != expected.dtype:
    differs = f"{found.dtype}{list(found.shape)} there, expected {expected.dtype}{list(expected.shape)}"
  else:
    wide = expected.dtype.itemsize
    count = np.count_nonzero((_bits(found) != _bits(expected)).reshape(-1, wide).any(axis=1))
    differs = f"{count} of {found.size} elements differ"
  text = f"{name} on {_named(held.device)} at {_said(box)}: {differs}"
  offset = [(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, held.box, strict=True)]
  others: dict[Box, Any] = {}
  for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
    others.setdefault(_box(index, leaf.shape), device)
  for other, device in others.items():
    there = tuple((origin + start, origin + stop) for (origin, _), (start, stop) in zip(other, offset, strict=True))
    if other != held.box and _same(found, stored.read(there)):
      return f"{text}: it is the content of {_said(there)}, which belongs on {_named(device)}"
  return text


def _named(device: Any) -> str:
  return f"device {device.id} of process {device.process_index}"


def _said(box: Box) -> str:
  return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
