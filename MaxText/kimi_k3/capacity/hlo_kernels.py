"""Mosaic kernels in a compiled program: the compiler shows their operands, and what they move the caller says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

from kimi_k3.capacity.hlo_text import Array, Instruction, Program
from kimi_k3.capacity.hlo_traffic import in_place_operands
from kimi_k3.capacity.hlo_walk import Step, Walk
from kimi_k3.errors import InputError

_MOSAIC = "tpu_custom_call"
_PRIMITIVES = ("pallas_call", "mpmd_map", "core_map")  # of pl.pallas_call, pl.kernel and pl.core_map


@dataclasses.dataclass(frozen=True)
class KernelCall:
  """One Mosaic kernel of the text, which XLA knows nothing about but its operands and results.

  Attributes:
    name: The name given to pallas_call, or of the jitted function around it.
    runs: How often it runs in a run of the program.
    operands: Arrays that go in, prefetched scalars among them.
    results: Arrays that come out.
    aliases: Number of the operand whose memory a result takes, by number of the result.
    op_name: Path in the traced program.
  """

  name: str
  runs: int
  operands: tuple[Array, ...]
  results: tuple[Array, ...]
  aliases: Mapping[int, int]
  op_name: str

  @property
  def weight(self) -> float:
    return float(self.runs)


# Bytes that a kernel reads from HBM and writes to it in one run of it.
KernelBytes = Callable[[KernelCall], tuple[float, float]]


def layer_of_stack(stacked: Iterable[int] = (), *, share: Mapping[int, float] | None = None) -> KernelBytes:
  """Returns the bytes of a kernel that is given whole stacks and works on one layer.

  Each operand is read once and each result written once. Of the operands named, and of results that take their memory,
  only one layer of the first axis counts.

  Args:
    stacked: Numbers of the operands that hold all layers, prefetched scalars counted.
    share: Part of an operand that is really read, by number: hit experts over all, or the filled part of a cache. A
      result in its memory counts in full unless it is named here too as -1 - number of the result.
  """
  stacked, share = frozenset(stacked), dict(share or {})

  def count(call: KernelCall) -> tuple[float, float]:
    known = set(range(len(call.operands)))
    if wrong := (stacked | {i for i in share if i >= 0}) - known:
      raise InputError(f"kernel {call.name}: operands {sorted(wrong)} named, {len(known)} found")

    def part(operand: int | None, array: Array) -> float:
      return array.hbm_bytes / (array.dims[0] if operand in stacked else 1)

    read = sum(part(i, array) * share.get(i, 1.0) for i, array in enumerate(call.operands))
    written = sum(part(call.aliases.get(i), array) * share.get(-1 - i, 1.0) for i, array in enumerate(call.results))
    return float(read), float(written)

  return count


def kernel_calls(program: Program, loops: Mapping[str, int] | None = None) -> list[KernelCall]:
  """Returns the Mosaic kernels of a run, one for each in the text. Raises as collectives does."""

  def rows(step: Step) -> list[KernelCall]:
    call = kernel_of(program, step)
    return [call] if call else []

  return Walk(program, rows, loops or {}).run()


def kernels(program: Program, loops: Mapping[str, int] | None = None) -> dict[str, int]:
  """Returns how often each Mosaic kernel runs in a run of the program, by name."""
  counts: dict[str, int] = {}
  for call in kernel_calls(program, loops):
    counts[call.name] = counts.get(call.name, 0) + call.runs
  return counts


def kernel_of(program: Program, step: Step) -> KernelCall | None:
  """The kernel that an instruction is, or that a fusion holds."""
  instruction, computation = step.instruction, step.computation
  if instruction.opcode == "fusion":
    fused = program.fused(instruction)
    inside = [i for i in fused.instructions.values() if custom_call_target(i) == _MOSAIC]
    assert len(inside) < 2, f"{instruction.name} holds {len(inside)} kernels"
    return kernel_of(program, Step(inside[0], fused, step.runs)) if inside else None
  if custom_call_target(instruction) != _MOSAIC:
    return None
  operands = tuple(array for name in instruction.operands for array in computation.arrays(name))
  started = instruction.opcode == "custom-call-start"
  return KernelCall(
    name=_name(instruction),
    runs=step.runs,
    operands=operands,
    results=instruction.parts[1] if started else instruction.arrays,
    aliases=in_place_operands(instruction),
    op_name=instruction.op_name,
  )


def _name(instruction: Instruction) -> str:
  """The name before the primitive in the path; without a path the instruction's, its number left out."""
  *path, primitive = instruction.op_name.split("/")
  if primitive in _PRIMITIVES and path:
    return re.sub(r"^jit\((.*)\)$", r"\1", path[-1])
  return re.sub(r"\.\d+$", "", instruction.name)


def custom_call_target(instruction: Instruction) -> str | None:
  if instruction.opcode not in ("custom-call", "custom-call-start"):
    return None
  match = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
  return match.group(1) if match else ""
