"""The TPU compiler's words for a program that takes more HBM than a device has, as numbers."""

from __future__ import annotations

import dataclasses
import re

# Of libtpu 0.0.50.1. The first is what it says before it schedules anything, and what it calls temporaries is all:
# arguments, results that take no argument's place, and the least that temporaries can take. The other two stand in the
# same library, for a program that has been scheduled, with its largest allocations, and for one that was given up.
_WORDINGS = (
  re.compile(
    r"Ran out of memory on HBM, the total memory required for HLO temporaries \((?P<needed>[\d.]+\w?)\) "
    r"exceeds available HBM \((?P<limit>[\d.]+\w?)\)"
  ),
  re.compile(r"Ran out of memory in memory space hbm\. Used (?P<needed>[\d.]+\w?) of (?P<limit>[\d.]+\w?) hbm"),
  re.compile(
    r"Aborting compilation early because it's unlikely to have enough device memory\. "
    r"Requires (?P<needed>[\d.]+\w?), has (?P<limit>[\d.]+\w?) available"
  ),
)
_ALLOCATION = re.compile(r"^\s*\d+\. Size: (?P<size>[\d.]+\w?)\s*$")
_FIELD = re.compile(r"^\s*(?P<name>Operator|Shape|XLA label|Allocation type): (?P<value>.*)$")
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Allocation:
  """One of the largest allocations of a program.

  Attributes:
    size_bytes: With padding.
    shape: As XLA prints it; empty where the compiler does not say.
    operator: Path in the traced program, likewise.
    kind: "HLO temp", "Arguments" and so on, likewise.
  """

  size_bytes: int
  shape: str
  operator: str
  kind: str


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
  """A program that takes more HBM than a device has, by the compiler's error. Numbers are rounded as it prints them.

  Attributes:
    needed_bytes: Arguments, results and temporaries of one device. A lower bound where the compiler has not scheduled
      the program, as libtpu 0.0.50.1 does not: compile again with topology.UNLIMITED_HBM_OPTIONS for all of it.
    limit_bytes: What a device has.
    allocations: The largest, where the text lists them.
  """

  needed_bytes: int
  limit_bytes: int
  allocations: tuple[Allocation, ...] = ()

  @property
  def exceeded_bytes(self) -> int:
    """How much is missing."""
    return self.needed_bytes - self.limit_bytes


def read_out_of_memory(error: BaseException) -> OutOfMemory | None:
  """Returns what a compile error says of HBM, or None for any other error: VMEM of a kernel that is too large too."""
  text = str(error)
  for wording in _WORDINGS:
    if found := wording.search(text):
      return OutOfMemory(_bytes(found["needed"]), _bytes(found["limit"]), _allocations(text[found.end() :]))
  return None


def _allocations(text: str) -> tuple[Allocation, ...]:
  found: list[tuple[int, dict[str, str]]] = []
  for line in text.splitlines():
    if start := _ALLOCATION.match(line):
      found.append((_bytes(start["size"]), {}))
    elif found and (field := _FIELD.match(line)):
      found[-1][1].setdefault(field["name"], field["value"].strip())
  return tuple(
    Allocation(
      size,
      shape=fields.get("Shape", ""),
      operator=re.sub(r'^op_name="(.*?)".*$', r"\1", fields.get("Operator", "")),
      kind=fields.get("Allocation type", ""),
    )
    for size, fields in found
  )


def _bytes(text: str) -> int:
  """The bytes of XLA's "193.53G", which counts in powers of 1024."""
  number = re.fullmatch(r"([\d.]+)([BKMGT]?)", text)
  if number is None:
    raise ValueError(f"not a size: {text!r}, expected for example 193.53G")
  return round(float(number[1]) * _UNITS[number[2]])
