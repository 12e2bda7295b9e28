"""Slices of TPUs as numbers: devices, hosts, memory and speed of a topology by its name, and meshes that fit it.

Needs neither libtpu nor a device. The names are libtpu's, with which `capacity.topology` compiles.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from kimi_k3.capacity.topology import DEVICE_KINDS
from kimi_k3.config import KimiK3Config
from kimi_k3.errors import InputError
from kimi_k3.spmd.cuts import Cuts

CHIPS_A_HOST = 4


@dataclasses.dataclass(frozen=True)
class _Kind:
  """What a kind of slice is made of.

  Attributes:
    device_kind: JAX's name of a device, a key of DEVICE_KINDS.
    devices_a_chip: Devices that JAX sees.
    flops_per_second: Peak of one device in bfloat16.
    shapes: Chips along each axis of the slices that libtpu 0.0.50.1 makes.
  """

  device_kind: str
  devices_a_chip: int
  flops_per_second: float
  shapes: tuple[tuple[int, ...], ...]


# bfloat16 peak: https://docs.cloud.google.com/tpu/docs/tpu7x, 2307 TFLOP/s a chip of two devices, and
# https://docs.cloud.google.com/tpu/docs/v6e, 918. The shapes were each asked of libtpu 0.0.50.1.
_KINDS: Mapping[str, _Kind] = {
  "tpu7x": _Kind(
    "TPU7x",
    2,
    1153e12,
    ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 3), (2, 2, 4), (2, 4, 2), (2, 4, 4), (4, 4, 4), (4, 4, 8), (8, 8, 8)),
  ),
  "v6e": _Kind(
    "TPU v6 lite",
    1,
    918e12,
    ((1, 1), (2, 2), (2, 2, 1), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
  ),
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """One slice, or several equal ones that a data center network joins.

  Attributes:
    name: libtpu's, of one slice.
    kind: "tpu7x" or "v6e".
    chips: Of all slices.
    devices: Of all slices, as JAX sees them.
    hosts: Of all slices.
    slices: How many.
  """

  name: str
  kind: str
  chips: int
  devices: int
  hosts: int
  slices: int = 1

  @property
  def device_kind(self) -> str:
    """JAX's name of a device."""
    return _KINDS[self.kind].device_kind

  @property
  def limit_bytes(self) -> int:
    """HBM that a program may take on one device."""
    return DEVICE_KINDS[self.device_kind].hbm_bytes

  @property
  def hbm_bytes_per_second(self) -> float:
    """Peak bandwidth of one device's HBM."""
    return DEVICE_KINDS[self.device_kind].hbm_bytes_per_second

  @property
  def flops_per_second(self) -> float:
    """Peak of one device in bfloat16."""
    return _KINDS[self.kind].flops_per_second


def parse_topology(name: str, slices: int = 1) -> Topology:
  """Returns the topology of a name: "tpu7x:2x2x4" has 16 chips and 32 devices, "v6e:2x4" 8 chips and 8 devices.

  Args:
    name: Kind and chips along each axis of a slice.
    slices: Equal slices.

  Raises:
    InputError: if libtpu makes no such slice: naming the kinds, or the nearest slices of the kind by chips.
  """
  if slices < 1:
    raise InputError(f"{slices} slices, expected 1 or more")
  kind, _, shape = name.partition(":")
  if kind not in _KINDS:
    raise InputError(
      f"topology {name!r}: unknown kind {kind!r}, expected one of {', '.join(_KINDS)}, for example tpu7x:2x2x4"
    )
  found = _KINDS[kind]
  known = {"x".join(map(str, sizes)): math.prod(sizes) for sizes in found.shapes}
  if shape not in known:
    raise InputError(
      f"topology {name!r}: {kind} has no such slice, the nearest that works is {kind}:{_nearest_shape(shape, known)}; "
      f"it has {', '.join(known)}"
    )
  chips = known[shape] * slices
  hosts = max(1, known[shape] // CHIPS_A_HOST) * slices
  return Topology(name, kind, chips, chips * found.devices_a_chip, hosts, slices)


def larger_topologies(topology: Topology) -> list[Topology]:
  """Returns the slices of the same kind, and as many of them, that have more devices; the smallest first."""
  names = [f"{topology.kind}:{'x'.join(map(str, shape))}" for shape in _KINDS[topology.kind].shapes]
  found = [parse_topology(name, topology.slices) for name in names]
  return sorted((one for one in found if one.devices > topology.devices), key=lambda one: one.devices)


def _nearest_shape(shape: str, known: Mapping[str, int]) -> str:
  """The known shape with the number of chips nearest to what was asked; of equals the larger one."""
  numbers = [int(part) for part in re.findall(r"\d{1,6}", shape)]
  wanted = math.prod(numbers) if numbers else 1
  return min(known, key=lambda one: (abs(math.log(known[one] / max(wanted, 1))), -known[one]))


def default_mesh(config: KimiK3Config, topology: Topology) -> dict[str, int]:
  """Returns the mesh that cuts the model furthest on all devices of a topology.

  As many devices as divide heads, widths and vocabulary share these (tensor); the others of a slice take rows of their
  own and share the experts (attn_dp_expert) as far as these divide, and slices take rows (data). What divides nothing
  takes rows too. Beside attn_dp_expert the axis of the heads is `model`, as in MaxText's serving meshes.

  Args:
    config: The architecture.
    topology: Whose devices are all used.
  """
  here = topology.devices // topology.slices
  meshes = _meshes(config, here)
  heads, shared, rows = max(meshes, key=lambda one: (one[0] * one[1], one[0]))
  return _named(heads, shared, rows * topology.slices)


def nearest_mesh(config: KimiK3Config, sizes: Mapping[str, int], devices: int) -> dict[str, int]:
  """Returns the mesh of all devices that is nearest to one that does not work.

  Nearest is: the same axes if any sizes of them work, and sizes that differ by the least factors.

  Args:
    config: The architecture.
    sizes: What was asked for, by axis.
    devices: That the mesh must have.
  """
  axes = [axis for axis in sizes if sizes[axis] > 1]
  best: tuple[float, dict[str, int]] | None = None
  for parts in _splits(devices, len(axes)) if axes else ():
    mesh = dict(zip(axes, parts, strict=True))
    if not _fits(config, mesh):
      continue
    distance = sum(abs(math.log(mesh[axis] / sizes[axis])) for axis in axes)
    if best is None or distance < best[0]:
      best = distance, mesh
  if best is not None:
    return best[1]
  wanted = max(sizes.values(), default=devices)
  heads, shared, rows = min(_meshes(config, devices), key=lambda one: (abs(math.log(one[0] / wanted)), -one[1]))
  return _named(heads, shared, rows)


def _meshes(config: KimiK3Config, devices: int) -> list[tuple[int, int, int]]:
  """All that fit: devices that share the heads, groups of them that share the experts, groups with rows alone."""
  found = [
    (heads, shared, devices // heads // shared)
    for heads in _divisors(devices)
    for shared in _divisors(devices // heads)
    if _fits(config, _named(heads, shared, devices // heads // shared))
  ]
  assert found  # a mesh of rows alone cuts no weight
  return found


def _named(heads: int, shared: int, rows: int) -> dict[str, int]:
  mesh = {"data": rows} if rows > 1 else {}
  if shared > 1:
    return mesh | {"attn_dp_expert": shared} | ({"model": heads} if heads > 1 else {})
  return mesh | ({"tensor": heads} if heads > 1 or not mesh else {})


def _fits(config: KimiK3Config, mesh: Mapping[str, int]) -> bool:
  try:
    Cuts.of(mesh).check_fits(config)
  except InputError:
    return False
  return True


def _divisors(number: int) -> list[int]:
  return [part for part in range(1, number + 1) if number % part == 0]


def _splits(number: int, count: int) -> Iterator[tuple[int, ...]]:
  """Every way to write a number as a product of `count` factors, in order."""
  if count == 1:
    yield (number,)
    return
  for first in _divisors(number):
    for rest in _splits(number // first, count - 1):
      yield (first, *rest)
