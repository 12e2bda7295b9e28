"""Sizes in bytes as people write and read them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kimi_k3.errors import InputError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_FACTORS = {"": 1, "B": 1} | {
  prefix + unit: base**power
  for power, prefix in enumerate("KMGT", 1)
  for unit, base in (("", 1024), ("I", 1024), ("IB", 1024), ("B", 1000))
}


def parse(flag: str, text: str) -> int:
  """Returns the bytes that a flag's value stands for: 1073741824, 1G, 1GiB (1024 cubed) or 1GB (1000 cubed).

  Raises:
    InputError: naming the flag, for anything else and for nothing.
  """
  match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]{0,3})", text.strip())
  factor = _FACTORS.get(match[2].upper()) if match else None
  if match is None or factor is None or float(match[1]) * factor < 1:
    raise InputError(f"{flag} is {text!r}, expected a size such as 2GiB, 500MB or a number of bytes")
  return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def spelled(nbytes: int | float) -> str:
  """A size with four digits and a unit."""
  size, units = float(nbytes), list(_UNITS)
  while size >= 1024 and len(units) > 1:
    size /= 1024
    units.pop(0)
  return f"{size:.4g} {units[0]}"


def peak_bytes() -> int:
  """Returns the most memory that this process has held.

  Not getrusage's ru_maxrss where there is /proc: on Linux that takes over what the process was that started this one.
  """
  if sys.platform != "linux":
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
  lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
  return 1024 * int(lines["VmHWM"].removesuffix("kB"))
