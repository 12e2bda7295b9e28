"""The TPU compiler's own schedule of a Mosaic kernel: how many bundles a loop body takes, and which unit is busiest.

A bundle is what a TensorCore issues in one cycle. Seen is the static schedule: loads, arithmetic, the matrix unit,
register spills. Not seen: how often a loop runs, which predicated parts are skipped (all count), and every wait for a
DMA, so a kernel that HBM bounds takes longer than its bundles. The clock is inferred, not documented.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kimi_k3.errors import InputError

CLOCK_HZ = 2.2e9  # TPU7x, inferred from its peak of 1153 bf16 TFLOP/s a device; good for ratios, not for promises

_BUNDLE = re.compile(r"^\s*(?:0x)?([0-9a-f]+)\s+([A-Z]{2})?\s*:\s*(>*)\s*\{")
_FILE = re.compile(r"^\d+-(.+)-\d+-final_bundles\.txt$")
_COMPILE_TIMEOUT_S = 1800


@dataclasses.dataclass(frozen=True)
class Loop:
  """One loop of a schedule, or what stands outside of all loops.

  Attributes:
    depth: Nesting: 1 is the grid's loop, 0 is outside of all.
    first: Address of its first bundle.
    bundles: Bundles of one run of the body, loops inside it left out.
    empty: Those of them that hold nothing.
    used: Operations by unit, loops inside left out: MXU, XLU, VALU, VPOP, EUP, VLOAD, VSTORE, SALU, fills and spills.
    capacity: Operations of a unit that fit into one bundle.
  """

  depth: int
  first: int
  bundles: int
  empty: int
  used: Mapping[str, int]
  capacity: Mapping[str, int]

  @property
  def busiest(self) -> tuple[str, float]:
    """The unit that bounds the body and how full it is: 1 is always. Fills and spills take loads' and stores' slots."""
    full = {unit: count / (self.capacity[unit] * max(1, self.bundles)) for unit, count in self.used.items()}
    unit = max(full, key=lambda unit: full[unit])
    return unit, full[unit]

  @property
  def seconds(self) -> float:
    """Time of one run of the body without loops inside it and without waiting, at CLOCK_HZ."""
    return self.bundles / CLOCK_HZ


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The schedule of one kernel.

  Attributes:
    name: The kernel's, with the number XLA gave it.
    loops: In order of their first bundle; the first is what stands outside of loops.
  """

  name: str
  loops: tuple[Loop, ...]

  @property
  def bundles(self) -> int:
    """Bundles of the whole program, each counted once."""
    return sum(loop.bundles for loop in self.loops)

  @property
  def hottest(self) -> Loop:
    """The loop with the longest body."""
    return max(self.loops, key=lambda loop: (loop.depth > 0, loop.bundles))

  def table(self) -> str:
    """Returns one line a loop: bundles, time of a run, the busiest unit and all others."""
    lines = [f"{self.name}: {self.bundles} bundles"]
    for loop in self.loops:
      unit, full = loop.busiest
      used = ", ".join(f"{name} {count}" for name, count in loop.used.items() if count)
      lines.append(
        f"  depth {loop.depth} at {loop.first:#x}: {loop.bundles} bundles ({loop.empty} empty), "
        f"{1e6 * loop.seconds:.3f} us, {unit} {full:.0%} full; {used}"
      )
    return "\n".join(lines)


def kernel_schedule(spec: str, name: str, arguments: Mapping[str, Any] | None = None) -> Schedule:
  """Returns the schedule of the one kernel of a program that has the name.

  Args:
    spec: As for kernel_schedules.
    name: The name given to pallas_call, or a pattern (fnmatch).
    arguments: As for kernel_schedules.

  Raises:
    InputError: if none or several match, naming those that were found; as kernel_schedules.
  """
  found = kernel_schedules(spec, arguments)
  matching = [
    schedule
    for kernel, schedule in found.items()
    if fnmatch.fnmatchcase(re.sub(r"\.\d+$", "", kernel), name) or fnmatch.fnmatchcase(kernel, name)
  ]
  if len(matching) != 1:
    raise InputError(
      f"{spec}: {len(matching)} kernels match {name!r}, expected one; the compiler scheduled {', '.join(sorted(found))}"
    )
  return matching[0]


def kernel_schedules(spec: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Schedule]:
  """Returns the schedules of everything that a function compiles, by the names XLA gave: kernels, fusions and the rest.

  The function runs in a process of its own, since libtpu takes its flags when it is loaded; its dump, some hundred
  files a kernel, is read and deleted.

  Args:
    spec: "package.module:function" or "path/to/file.py:function". The function compiles for a TPU, best with
      kimi_k3.capacity.topology.compile_for; its result is not used.
    arguments: Keyword arguments for it, values of JSON.

  Raises:
    InputError: if there is no such function, or the compile fails: its last line of output is in the message.
  """
  with tempfile.TemporaryDirectory(prefix="kimi_k3_llo_") as directory:
    flags = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
    environment = {
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "JAX_ENABLE_COMPILATION_CACHE": "false",  # what comes from a cache is not scheduled again
      "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip(),
      "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-m", "kimi_k3.capacity.schedule", spec, json.dumps(dict(arguments or {}))]
    done = subprocess.run(
      command, env=environment, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
    )
    if done.returncode:
      last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
      raise InputError(f"{spec}: compiling ended with exit code {done.returncode}: {last}")
    return read_dump(Path(directory))


def read_dump(directory: Path) -> dict[str, Schedule]:
  """Returns the schedules that a dump of --xla_jf_dump_llo_text holds, by name.

  Raises:
    InputError: if there are none: the program was not compiled with the flags, or came from a cache.
  """
  found = {}
  for bundles in sorted(directory.glob("*-final_bundles.txt")):
    match = _FILE.match(bundles.name)
    if match is None or match.group(1).endswith("schedule-analysis"):
      continue
    prefix = bundles.name[: bundles.name.index(match.group(1)) + len(match.group(1))]
    utilization = sorted(directory.glob(f"{_escaped(prefix)}-*-final_hlo-static-per-bundle-utilization.txt"))
    if utilization:
      found[match.group(1)] = schedule_of(match.group(1), bundles.read_text(), utilization[-1].read_text())
  if not found:
    raise InputError(
      f"{directory}: no *-final_bundles.txt with a utilization beside it, expected the dump of a compile with "
      "LIBTPU_INIT_ARGS=--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true"
    )
  return found


def _escaped(name: str) -> str:
  """A name as a pattern of itself."""
  return re.sub(r"([*?\[])", r"[\1]", name)


def schedule_of(name: str, bundles: str, utilization: str) -> Schedule:
  """Returns the schedule that the texts of final_bundles and of final_hlo-static-per-bundle-utilization describe.

  A loop reaches from its first bundle, marked LB, to the last one marked as deep: what stands between them is issued in
  every run, also what belongs to the code around it.

  Raises:
    ValueError: if the texts do not belong together.
  """
  heads = [match for line in bundles.splitlines() if (match := _BUNDLE.match(line))]
  units, capacity, used = _utilization(utilization)
  if len(heads) != len(used):
    raise ValueError(f"{name}: {len(heads)} bundles, but a utilization of {len(used)}")
  depths = [len(head.group(3)) for head in heads]
  starts = [i for i, head in enumerate(heads) if head.group(2) == "LB"]
  owner = [0] * len(heads)  # the innermost loop of each bundle; 0 is outside
  for number, start in enumerate(starts, 1):
    depth = depths[start]
    stop = next((i for i in starts if i > start and depths[i] <= depth), len(heads))
    last = max(i for i in range(start, stop) if depths[i] >= depth)
    owner[start : last + 1] = [number] * (last + 1 - start)
  loops = []
  for number in range(len(starts) + 1):
    own = [i for i, loop in enumerate(owner) if loop == number]
    totals = {unit: sum(used[i][column] for i in own) for column, unit in enumerate(units)}
    first = starts[number - 1] if number else 0
    empty = sum(not any(used[i]) for i in own)
    loops.append(
      Loop(depths[first] if number else 0, first, len(own), empty, totals, dict(zip(units, capacity, strict=True)))
    )
  return Schedule(name, tuple(loops))


def _utilization(text: str) -> tuple[Sequence[str], Sequence[int], Sequence[Sequence[int]]]:
  """Units, how many operations of each fit into a bundle, and how many each bundle holds."""
  lines = text.splitlines()
  header = next((i for i, line in enumerate(lines) if line.startswith("MXU")), None)
  if header is None:
    raise ValueError("no line of units in the utilization: has the format of libtpu changed?")
  rows = [[int(part) for part in line.split()] for line in lines[header + 1 :] if re.fullmatch(r"[0-9\s]+", line)]
  units = [unit.strip() for unit in lines[header].split(",")]
  if any(len(row) != len(units) for row in rows):
    raise ValueError("rows and units of the utilization differ: has the format of libtpu changed?")
  return units, rows[0], rows[1:]


def function_of(spec: str) -> Any:
  """The function a spec names."""
  where, _, name = spec.rpartition(":")
  if not where or not name:
    raise InputError(f"{spec!r}: expected package.module:function or path/to/file.py:function")
  if where.endswith(".py"):
    path = Path(where)
    loaded = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or loaded is None or loaded.loader is None:
      raise InputError(f"{spec!r}: no file {where} found")
    module = importlib.util.module_from_spec(loaded)
    sys.modules[path.stem] = module
    loaded.loader.exec_module(module)
  else:
    try:
      module = importlib.import_module(where)
    except ModuleNotFoundError as error:
      raise InputError(f"{spec!r}: {error}") from error
  if not hasattr(module, name):
    raise InputError(f"{spec!r}: {where} has no {name}")
  return getattr(module, name)


if __name__ == "__main__":
  function_of(sys.argv[1])(**json.loads(sys.argv[2]))
