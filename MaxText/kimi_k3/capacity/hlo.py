"""What a compiled program does in one run: collectives, bytes of HBM, kernels, copies.

`parse(text)` first. Then every count is a run's: the body of a loop counts as often as it runs, read from its
condition; a loop whose count depends on data needs its count in `loops`, or it is an error. Of a conditional the branch
that costs most counts (for copies: every branch). What is asynchronous counts once, at its start, on whatever core.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from kimi_k3.capacity.hlo_kernels import (
  KernelBytes,
  KernelCall,
  custom_call_target,
  kernel_calls,
  kernel_of,
  kernels,
  layer_of_stack,
)
from kimi_k3.capacity.hlo_loops import loop_name
from kimi_k3.capacity.hlo_text import Array, Computation, Instruction, Program, parse, strip_locations
from kimi_k3.capacity.hlo_traffic import in_place_operands, slice_like, traffic
from kimi_k3.capacity.hlo_walk import CALLS, Step, Walk
from kimi_k3.errors import InputError
from kimi_k3.layout import BLOCK_LAYERS

__all__ = [
  "Array",
  "Collective",
  "Copy",
  "HbmBytes",
  "KernelBytes",
  "KernelCall",
  "Program",
  "Traffic",
  "buffers",
  "collective_table",
  "collectives",
  "copies",
  "hbm_bytes",
  "kernel_calls",
  "kernels",
  "layer_of_stack",
  "loop_counts",
  "parse",
  "reductions_per_layer",
  "strip_locations",
]

COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-broadcast",
  "collective-permute",
  "ragged-all-to-all",
  "reduce-scatter",
)
_GROUPS = re.compile(
  r"(?:replica_groups|source_target_pairs)="
  r"(\{\{.*?\}\}|\{\}|\[[^\]]*\]<=\[[^\]]*\](?:T\([^)]*\))?|mesh\[.*?\] \{.*?\})"
)
_CALLING = (*CALLS, "while", "conditional", "call-update", "async-update")
# Custom calls of XLA that touch no HBM: they reserve or rename.
_FREE_CUSTOM_CALLS = ("AllocateBuffer", "ConcatBitcast", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")


def loop_counts(program: Program, loops: Mapping[str, int] | None = None) -> dict[str, int]:
  """Returns how often the body of each loop runs each time the loop is entered, by its name and op_name."""
  walk = Walk[Traffic](program, lambda _: (), loops or {})
  walk.run()
  return {loop_name(loop): count for loop, count, _ in walk.counts}


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of the text.

  Attributes:
    kind: One of COLLECTIVES.
    calls: How often it runs in a run of the program.
    operand_bytes: What a device puts in, without padding.
    result_bytes: What a device gets out, without padding.
    groups: replica_groups or source_target_pairs as the text has them.
    op_name: Path in the traced program; empty where the compiler made it.
    where: The core that runs it, or that it stands in a fusion.
    name: The instruction's.
  """

  kind: str
  calls: int
  operand_bytes: int
  result_bytes: int
  groups: str
  op_name: str
  where: Literal["tensorcore", "sparsecore", "fusion"]
  name: str

  @property
  def bytes(self) -> int:
    """The larger side of one call on one device."""
    return max(self.operand_bytes, self.result_bytes)

  @property
  def weight(self) -> float:
    return self.calls + self.calls * self.bytes * 1e-18  # calls first, bytes between equals


def collectives(program: Program, loops: Mapping[str, int] | None = None) -> list[Collective]:
  """Returns the collectives of a run, one for each in the text, in order of the schedule.

  What a Mosaic kernel sends to other devices by itself is not among them.

  Args:
    program: From parse.
    loops: Runs of loops that depend on data, by pattern of name or op_name.

  Raises:
    InputError: naming each loop whose count is neither in the text nor in `loops`.
  """

  def rows(step: Step) -> list[Collective]:
    if step.instruction.opcode == "fusion":
      fused = program.fused(step.instruction)
      inside = (_collective(Step(i, fused, step.runs), "fusion") for i in _deep(program, fused))
      return [row for row in inside if row]
    row = _collective(step, "tensorcore" if step.computation.thread == "main" else "sparsecore")
    return [row] if row else []

  return Walk(program, rows, loops or {}).run()


def _deep(program: Program, computation: Computation) -> list[Instruction]:
  """Instructions of a fusion and of the fusions in it."""
  found = []
  for instruction in computation.instructions.values():
    found.append(instruction)
    if instruction.opcode == "fusion":
      found += _deep(program, program.fused(instruction))
  return found


def _collective(step: Step, where: Literal["tensorcore", "sparsecore", "fusion"]) -> Collective | None:
  instruction = step.instruction
  kind = instruction.opcode.removesuffix("-start")
  if kind not in COLLECTIVES:
    return None
  started = instruction.opcode.endswith("-start")
  known = step.computation.instructions
  operands = [array for name in instruction.operands if name in known for array in known[name].arrays]
  results = instruction.arrays
  if started and kind != "all-reduce" and len(instruction.parts) > 1:
    results = instruction.parts[1]  # (operands, results, context)
  groups = _GROUPS.search(instruction.attributes)
  users = step.computation.users.get(instruction.name, ())
  if where == "fusion" and kind == "all-reduce" and users and all(user.opcode == "dynamic-slice" for user in users):
    kind = "reduce-scatter"  # as the TensorCore runs it: each device keeps its slice
  return Collective(
    kind=kind,
    calls=step.runs,
    operand_bytes=sum(array.bytes for array in operands),
    result_bytes=sum(array.bytes for array in results),
    groups=groups.group(1) if groups else "",
    op_name=instruction.op_name,
    where=where,
    name=instruction.name,
  )


def collective_table(rows: Sequence[Collective]) -> str:
  """Returns the collectives as text, most bytes first, and their sums."""
  lines = [f"{'kind':20} {'calls':>6} {'KiB each':>10} where       groups  op_name"]
  for row in sorted(rows, key=lambda row: -row.calls * row.bytes):
    groups = row.groups if len(row.groups) < 40 else row.groups[:37] + "..."
    lines.append(f"{row.kind:20} {row.calls:6} {row.bytes / 2**10:10.1f} {row.where:11} {groups}  {row.op_name}")
  calls, size = sum(row.calls for row in rows), sum(row.calls * row.bytes for row in rows)
  return "\n".join([*lines, f"{calls} calls, {size / 1e6:.2f} MB a device"])


def reductions_per_layer(rows: Sequence[Collective]) -> float | None:
  """Returns how often the devices meet for a sum in a layer of the blocks; None without a scan over blocks.

  Of a decoding step of `spmd.programs`, whose only loop is the scan over blocks of BLOCK_LAYERS layers: what its body
  does has `while/body` in its path in the traced program; embedding, head and the layers outside the blocks do not.
  All-reduces and reduce-scatters count, and all-gathers beyond as many as there are reduce-scatters: one that undoes a
  reduce-scatter is the second half of the same sum, one that joins the parts of a product is as far a way as a sum. 2
  where heads and experts are cut, 4 (three sums and a join) where the projections of the experts' latent are cut too.

  Not of a chunk of prefill: there the compiler loses the paths of reduce-scatters, and layers outside the blocks have
  loops of their own.

  Args:
    rows: From `collectives`, all of them.
  """
  inside = [row for row in rows if "/while/body/" in row.op_name]
  if not inside:
    return None
  runs = max(row.calls for row in inside)
  reduces, scatters, gathers = (
    sum(row.calls for row in inside if row.kind == kind) for kind in ("all-reduce", "reduce-scatter", "all-gather")
  )
  return (reduces + scatters + max(0, gathers - scatters)) / (runs * BLOCK_LAYERS)


@dataclasses.dataclass(frozen=True)
class Traffic:
  """HBM traffic of one instruction of the text, in bytes of one run of it.

  Attributes:
    name: The instruction's, or the kernel's.
    opcode: What it is.
    runs: How often it runs in a run of the program.
    read: Bytes read from HBM.
    written: Bytes written to HBM.
    op_name: Path in the traced program.
  """

  name: str
  opcode: str
  runs: int
  read: float
  written: float
  op_name: str

  @property
  def total(self) -> float:
    """Bytes of a run of the program."""
    return self.runs * (self.read + self.written)

  @property
  def weight(self) -> float:
    return self.total


@dataclasses.dataclass(frozen=True)
class HbmBytes:
  """HBM traffic of one device in a run of the program, by instruction."""

  rows: tuple[Traffic, ...]

  @property
  def read(self) -> float:
    return float(sum(row.runs * row.read for row in self.rows))

  @property
  def written(self) -> float:
    return float(sum(row.runs * row.written for row in self.rows))

  @property
  def total(self) -> float:
    return self.read + self.written

  def table(self, top: int = 20) -> str:
    """Returns the instructions that move most, and the sums."""
    lines = [f"{'MiB a run':>10} {'runs':>6} {'read MiB':>9} {'written':>9}  what"]
    for row in sorted(self.rows, key=lambda row: -row.total)[:top]:
      read, written = row.read / 2**20, row.written / 2**20
      lines.append(f"{row.total / 2**20:10.2f} {row.runs:6} {read:9.3f} {written:9.3f}  {row.name}  {row.op_name}")
    return "\n".join([*lines, f"read {self.read / 2**20:.1f} MiB, written {self.written / 2**20:.1f} MiB"])


def hbm_bytes(
  program: Program, kernels: Mapping[str, KernelBytes] | None = None, loops: Mapping[str, int] | None = None
) -> HbmBytes:
  """Returns the bytes that one device reads from HBM and writes to it in a run of the program.

  Arrays count with their padding and only where they live in HBM. A fusion reads of an operand what it uses: the
  slices, if it only slices it. An update in place writes the update. A copy into VMEM reads, one out of it writes. What
  this cannot see: that a write smaller than a tile reads the tile first, and what a device sends to others.

  Args:
    program: From parse.
    kernels: What each Mosaic kernel or other custom call moves, by pattern of its name (fnmatch).
    loops: Runs of loops that depend on data, by pattern of name or op_name.

  Raises:
    InputError: naming every kernel that no pattern matches, every pattern that matches none, every uncounted loop.
  """
  kernels = kernels or {}
  unknown: dict[str, None] = {}
  used: set[str] = set()

  def rows(step: Step) -> list[Traffic]:
    instruction = step.instruction
    call = kernel_of(program, step)
    target = custom_call_target(instruction)
    if call is None and target is not None:
      if target in _FREE_CUSTOM_CALLS:
        return []
      operands = tuple(array for name in instruction.operands for array in step.computation.arrays(name))
      call = KernelCall(target, step.runs, operands, instruction.arrays, {}, instruction.op_name)
    if call is None:
      read, written = traffic(program, step.computation, instruction)
      if not read and not written:
        return []
      sizes = (float(read), float(written))
      return [Traffic(instruction.name, instruction.opcode, step.runs, *sizes, instruction.op_name)]
    matching = [pattern for pattern in kernels if fnmatch.fnmatchcase(call.name, pattern)]
    if len(matching) != 1:
      unknown[f"{call.name} ({', '.join(matching)})" if matching else call.name] = None
      return []
    used.add(matching[0])
    read, written = kernels[matching[0]](call)
    return [Traffic(call.name, instruction.opcode, step.runs, float(read), float(written), call.op_name)]

  found = Walk(program, rows, loops or {}).run()
  if unknown:
    raise InputError(
      f"kernel(s) {', '.join(unknown)}: what they move cannot be read from the text, "
      f"expected exactly one pattern in `kernels` for each, found {', '.join(kernels) or 'none'}"
    )
  if unused := set(kernels) - used:
    raise InputError(f"kernels: {', '.join(sorted(unused))} matches none that the program runs")
  return HbmBytes(tuple(found))


@dataclasses.dataclass(frozen=True)
class Copy:
  """An array that is written again as it was: elsewhere, in another layout or type, or a slice of it.

  Attributes:
    kind: copy, transpose, reshape, convert, slice, dynamic-slice, gather or concatenate.
    runs: How often in a run of the program.
    source: What is read.
    result: What is written.
    op_name: Path in the traced program; empty where the compiler made it.
    name: The instruction's.
  """

  kind: str
  runs: int
  source: Array
  result: Array
  op_name: str
  name: str

  @property
  def weight(self) -> float:
    return float(self.runs * self.result.padded_bytes)

  def __str__(self) -> str:
    size = self.result.padded_bytes / 2**20
    return f"{self.runs} x {self.kind} of {self.source} to {self.result}, {size:.1f} MiB ({self.op_name or self.name})"


def copies(
  program: Program,
  *,
  min_bytes: int = 2**20,
  loops: Mapping[str, int] | None = None,
  into_vmem: bool = False,
) -> list[Copy]:
  """Returns the copies of a run, those of every branch, the largest first.

  Fusions that only copy, cast, transpose or slice an operand count too: the slice of stacked weights that is made for a
  kernel, or the cast of all layers before a scan. So do copies that a SparseCore makes.

  Args:
    program: From parse.
    min_bytes: Smallest result that counts, with padding.
    loops: Runs of loops that depend on data, by pattern of name or op_name.
    into_vmem: Also what is copied from HBM to VMEM or other memory, mostly prefetches, which is a read and no copy.
  """

  def rows(step: Step) -> list[Copy]:
    found = slice_like(program, step.computation, step.instruction)
    if found is None:
      return []
    kind, source, result = found
    if result.padded_bytes < min_bytes or not (result.in_hbm or into_vmem):
      return []
    return [Copy(kind, step.runs, source, result, step.instruction.op_name, step.instruction.name)]

  return sorted(Walk(program, rows, loops or {}, every_branch=True).run(), key=lambda copy: -copy.weight)


def buffers(program: Program, *, top: int = 20) -> list[tuple[str, Array, str]]:
  """Returns the largest arrays in HBM that instructions make, as (name, array, op_name), largest first.

  Candidates for what temp memory holds: the text has no buffer assignment, so which of them live at one time and which
  share memory is not known. Parameters, updates in place and what only renames are left out.
  """
  found = []
  for computation in _executed(program):
    for instruction in computation.instructions.values():
      if instruction.opcode in _CALLING:
        continue
      written = 1 if custom_call_target(instruction) is not None else traffic(program, computation, instruction)[1]
      aliased = in_place_operands(instruction)
      found += [
        (instruction.name, array, instruction.op_name)
        for i, array in enumerate(instruction.arrays)
        if written and i not in aliased and array.in_hbm and not _updates(program, instruction)
      ]
  return sorted(found, key=lambda row: -row[1].padded_bytes)[:top]


def _updates(program: Program, instruction: Instruction) -> bool:
  """Whether an instruction replaces a part of an array where it is."""
  while instruction.opcode == "fusion":
    instruction = program.fused(instruction).root
  return instruction.opcode in ("dynamic-update-slice", "scatter")


def _executed(program: Program) -> list[Computation]:
  """Computations that are walked: all but those of fusions and reductions."""
  names, found = [program.entry], []
  while names:
    computation = program.computation(names.pop())
    found.append(computation)
    for instruction in computation.instructions.values():
      keys = {"while": ("body",), "conditional": ("branch_computations", "true_computation", "false_computation")}
      calls = ("to_apply", "calls") if instruction.opcode in CALLS else ()
      for key in keys.get(instruction.opcode, calls):
        names += instruction.called(key)
  return found
