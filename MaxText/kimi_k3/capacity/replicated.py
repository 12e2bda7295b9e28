"""Which parameters every device holds whole, and what that costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kimi_k3.errors import InputError

# numpy stores one of these in a byte, a TPU does not.
_BITS = {"float4_e2m1fn": 4, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2}


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One parameter.

  Attributes:
    name: Its path.
    shape: Whole, not one device's part.
    dtype: Name of its type.
    bytes: Of the whole array.
    cuts: Parts that the mesh cuts it into.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  bytes: int
  cuts: int

  @property
  def device_bytes(self) -> float:
    """Bytes that one device holds."""
    return self.bytes / self.cuts


@dataclasses.dataclass(frozen=True)
class Replicated:
  """Parameters that no mesh axis cuts, among all.

  Attributes:
    rows: Those that no axis cuts, the largest first.
    leaves: All parameters.
    devices: Devices of the mesh.
  """

  rows: tuple[Leaf, ...]
  leaves: tuple[Leaf, ...]
  devices: int

  @property
  def bytes(self) -> int:
    """Bytes of the rows, on each device."""
    return sum(row.bytes for row in self.rows)

  @property
  def share(self) -> float:
    """The rows' part of the bytes of all parameters."""
    return self.bytes / max(1, sum(leaf.bytes for leaf in self.leaves))

  @property
  def device_bytes(self) -> float:
    """Bytes of all parameters that one device holds."""
    return float(sum(leaf.device_bytes for leaf in self.leaves))

  def table(self) -> str:
    """Returns one line a row, and the sums."""
    lines = [f"{'MiB':>10}  dtype          shape  name"]
    lines += [
      f"{row.bytes / 2**20:10.3f}  {row.dtype:13}  {'x'.join(map(str, row.shape)) or 'scalar'}  {row.name}"
      for row in self.rows
    ]
    held = self.bytes / max(1.0, self.device_bytes)
    lines.append(
      f"{len(self.rows)} of {len(self.leaves)} parameters whole on each of {self.devices} devices: "
      f"{self.bytes / 2**20:.3f} MiB, {self.share:.3%} of all parameters' bytes, {held:.3%} of what a device holds"
    )
    return "\n".join(lines)


def report(leaves: Mapping[str, tuple[Sequence[int], Any, Any]], mesh: Any) -> Replicated:
  """Returns which parameters no axis of the mesh cuts.

  Args:
    leaves: Shape, dtype and PartitionSpec of each parameter by name.
    mesh: A mesh, abstract or not: its `shape` gives the size of each axis by name.

  Raises:
    InputError: naming each parameter whose spec names an axis that the mesh lacks, has more entries than axes, or does
      not divide it.
  """
  sizes = dict(mesh.shape)
  found, faults = [], []
  for name, (shape, dtype, spec) in leaves.items():
    cuts = [_cuts(entry, sizes) for entry in (spec or ())]
    if None in cuts:
      faults.append(f"{name}: {spec} names an axis that is none of {', '.join(sizes)}")
    elif len(cuts) > len(shape) or any(size % cut for size, cut in zip(shape, cuts, strict=False) if cut):
      faults.append(f"{name}: {spec} does not divide {tuple(shape)}")
    else:
      found.append(_leaf(name, shape, dtype, math.prod(cut for cut in cuts if cut)))
  if faults:
    raise InputError(f"{'; '.join(faults)}: check the sharding table")
  rows = tuple(sorted((leaf for leaf in found if leaf.cuts == 1), key=lambda leaf: -leaf.bytes))
  return Replicated(rows, tuple(found), math.prod(sizes.values()))


def _cuts(entry: Any, sizes: Mapping[str, int]) -> int | None:
  """Into how many parts an entry of a spec cuts; None if it names no axis of the mesh."""
  names = () if entry is None else (entry,) if isinstance(entry, str) else entry
  if not isinstance(names, tuple) or not set(names) <= set(sizes):
    return None
  return math.prod(sizes[name] for name in names)


def _leaf(name: str, shape: Sequence[int], dtype: Any, cuts: int) -> Leaf:
  kind = np.dtype(dtype)
  bits = _BITS.get(kind.name, 8 * kind.itemsize)
  return Leaf(name, tuple(shape), kind.name, -(-math.prod(shape) * bits // 8), cuts)
