"""Slices of TPU v7x (Ironwood) as GKE names them: chips, VMs, devices.

A topology counts chips. `tpu7x-32`, as xpk and MaxText write it, counts devices, two a chip: it is 2x2x4, 16 chips.
"""

from __future__ import annotations

import dataclasses
import math

from kimi_k3.errors import InputError

ACCELERATOR = "tpu7x"  # value of the node label cloud.google.com/gke-tpu-accelerator
DEVICES_A_CHIP = 2
_CHIPS_A_VM = 4
# Those that GKE offers as a node pool of its own.
_NAMES = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")


@dataclasses.dataclass(frozen=True)
class Topology:
  """One slice.

  Attributes:
    name: Chips along each axis, such as 2x2x4.
  """

  name: str

  @property
  def chips(self) -> int:
    return math.prod(int(size) for size in self.name.split("x"))

  @property
  def chips_a_host(self) -> int:
    return min(self.chips, _CHIPS_A_VM)

  @property
  def hosts(self) -> int:
    """VMs, and so pods and processes."""
    return self.chips // self.chips_a_host

  @property
  def devices(self) -> int:
    return self.chips * DEVICES_A_CHIP

  @property
  def multi_host(self) -> bool:
    return self.hosts > 1

  @property
  def machine_type(self) -> str:
    return f"tpu7x-standard-{self.chips_a_host}t"

  @property
  def xpk_name(self) -> str:
    """Xpk's other name of it, which counts devices."""
    return f"{ACCELERATOR}-{self.devices}"


TOPOLOGIES = {name: Topology(name) for name in _NAMES}


def find(name: str) -> Topology:
  """Returns the topology of a name.

  Raises:
    InputError: if there is none; a name that counts devices is answered with the one that counts chips.
  """
  if name in TOPOLOGIES:
    return TOPOLOGIES[name]
  meant = [one.name for one in TOPOLOGIES.values() if name in (one.xpk_name, f"{ACCELERATOR}-{one.name}")]
  hint = f"{name} is --topology {meant[0]}" if meant else f"expected one of {', '.join(TOPOLOGIES)}"
  raise InputError(f"--topology is {name!r}, which names no slice of {ACCELERATOR} here: {hint}; it counts chips")
