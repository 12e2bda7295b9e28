"""Meshes over several slices: inside one, devices have links of their own; between two there is the data center.

Rows are the only thing that may be cut between slices: a step then moves nothing from one to the other. Heads, widths,
vocabulary, latent and experts are reduced or exchanged in every layer, so their devices lie in one slice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from kimi_k3.errors import InputError
from kimi_k3.spmd.cuts import Axes, Cuts

_WITHIN = ("heads", "width", "vocab", "latent", "experts", "expert_width")  # cuts that no slice boundary may cross
_ROW_AXIS = "data"  # of rows and nothing else, in every mesh of RULES


def slice_of(device: Any) -> int:
  """Returns the number of a device's slice; 0 where the platform or a topology of one slice knows none."""
  return int(getattr(device, "slice_index", 0))


def make_mesh(sizes: Mapping[str, int], cuts: Cuts, devices: Sequence[Any]) -> Mesh:
  """Returns the mesh of these sizes, in which axes that cut rows and nothing else lie across the slices, major first.

  Args:
    sizes: Devices along each axis, major first; their product is the number of devices.
    cuts: Of these sizes.
    devices: Of one slice or of several of the same size.

  Raises:
    InputError: if the slices differ in size, or an axis of something else than rows would lie across them, with the
      nearest mesh that works.
  """
  names, shape = tuple(sizes), tuple(sizes.values())
  held = Counter(map(slice_of, devices))
  if len(held) == 1:
    return Mesh(mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True), names)
  if len(set(held.values())) > 1:
    found = ", ".join(f"slice {number}: {count}" for number, count in sorted(held.items()))
    raise InputError(f"slices of different size ({found} devices): expected as many devices in each")
  across = parts_across(sizes, cuts, len(held))
  within = tuple(size // part for size, part in zip(shape, across, strict=True))
  ordered = mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
  return Mesh(ordered, names)


def parts_across(sizes: Mapping[str, int], cuts: Cuts, slices: int) -> tuple[int, ...]:
  """Returns into how many parts the slices cut each axis: those of rows as far as it takes, others not at all.

  Args:
    sizes: Devices along each axis, major first.
    cuts: Of these sizes.
    slices: How many.

  Raises:
    InputError: if rows do not suffice, with the nearest mesh that works.
  """
  across, left = [], slices
  for name, size in sizes.items():
    part = math.gcd(size, left) if name in _row_axes(cuts) else 1
    across.append(part)
    left //= part
  if left > 1:
    crossing = [name for name, size in sizes.items() if size > 1 and name not in _row_axes(cuts)]
    raise InputError(_refusal(sizes, cuts, slices, crossing))
  return tuple(across)


def check_slices(mesh: Mesh, cuts: Cuts) -> None:
  """Raises InputError if devices that share heads, widths, vocabulary, latent or experts lie in several slices.

  Args:
    mesh: Of any origin.
    cuts: Of that mesh.
  """
  slices = np.vectorize(slice_of, otypes=[int])(mesh.devices)
  count = len(np.unique(slices))
  if count == 1:
    return
  crossing = [
    name
    for axis, name in enumerate(mesh.axis_names)
    if name not in _row_axes(cuts) and (slices != slices.take([0], axis)).any()
  ]
  if crossing:
    raise InputError(_refusal(dict(mesh.shape), cuts, count, crossing))


def _row_axes(cuts: Cuts) -> Axes:
  """Axes that cut rows and nothing that is exchanged inside a layer."""
  inside = {axis for what in _WITHIN for axis in getattr(cuts, what)}
  return tuple(axis for axis in cuts.rows if axis not in inside)


def _refusal(sizes: Mapping[str, int], cuts: Cuts, slices: int, crossing: Sequence[str]) -> str:
  said = ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
  what = [name for name in _WITHIN if set(crossing) & set(getattr(cuts, name))]
  nearest = nearest_mesh(sizes, cuts, slices)
  return (
    f"mesh {said} on {slices} slices: {', '.join(crossing)} would lie across slices and cuts "
    f"{', '.join(what).replace('_', ' ')}, which must stay inside one; only rows may lie across: set "
    f"partition_mesh={','.join(f'{name}={size}' for name, size in nearest.items())}"
  )


def nearest_mesh(sizes: Mapping[str, int], cuts: Cuts, slices: int) -> dict[str, int]:
  """Returns the mesh of as many devices in which rows lie across the slices, and other axes are as large as can be.

  Args:
    sizes: Devices along each axis, major first.
    cuts: Of these sizes.
    slices: How many.
  """
  rows = _row_axes(cuts)
  missing = slices
  for name in rows:
    missing //= math.gcd(sizes[name], missing)
  found, divide = {name: size for name, size in sizes.items() if size > 1}, missing
  for name, size in list(found.items()):
    if name not in rows:
      part = math.gcd(size, divide)
      found[name], divide = size // part, divide // part
  found = {name: size for name, size in found.items() if size > 1}
  if missing == 1:
    return {name: found[name] for name in (*rows, *(name for name in found if name not in rows)) if name in found}
  target = rows[0] if rows else _ROW_AXIS
  return {target: found.pop(target, 1) * missing, **found}
