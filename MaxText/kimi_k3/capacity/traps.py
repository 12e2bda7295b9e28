"""What costs memory or time in a compiled program and shows nowhere in its source: found in the text, with the cure.

Each trap is one that the TPU compiler has sprung on this model; docs/decisions/0015-reading-compiled-programs.md tells
of some. A program of `kimi_k3.spmd` has none of them: a trap in one is a change of the compiler, of the options, or of
the program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from kimi_k3.capacity.hlo_kernels import kernel_of
from kimi_k3.capacity.hlo_loops import trip_count
from kimi_k3.capacity.hlo_origin import Origins
from kimi_k3.capacity.hlo_text import Array, Computation, Instruction, Program
from kimi_k3.capacity.hlo_traffic import slice_like
from kimi_k3.capacity.hlo_walk import Step, Walk
from kimi_k3.errors import InputError

# Smaller ones are vectors, prefetches, blocks of an update: a block of 4096 latents is 5 MiB, and a step of 64 rows
# copies 7 MiB of its residuals. Larger ones are layers of states and stacks of matrices.
MIN_COPY_BYTES = 8 * 2**20
# A kernel's small operands are made for it; the least that it reads of a layer's weights is more.
MIN_SLICE_BYTES = 2**20
# Tables of numbers, masks for a tile: what is larger was an array that the program closed over.
MIN_CONSTANT_BYTES = 2**20
_GIB, _MIB = 2**30, 2**20

STACK_COPIED = "stack copied at entry"
HOISTED_CAST = "hoisted cast"
REPLICATED_RESIDUAL = "replicated residual"
CONSTANT = "constant in the program"
STACK_SLICED = "stack sliced for a kernel"
CACHE_COPIED = "cache copied in a loop"
STATE_COPIED = "state copied whole"

_CURES = {
  STACK_COPIED: "compile with xla_tpu_control_large_2nd_minor_layout_for_x16=false, or give the argument its layout",
  HOISTED_CAST: "store it in the type that it is computed in",
  REPLICATED_RESIDUAL: "set prefill_cut: sequence",
  CONSTANT: "pass it as an argument",
  STACK_SLICED: "hand the kernel the whole stack and the layer's number",
  CACHE_COPIED: "read it by one product over all positions, or by a kernel",
  STATE_COPIED: "replace parts of it by slices or by a kernel, not by a scatter, and read it before or after, not both",
}
_DONATE = "donate it"


@dataclasses.dataclass(frozen=True)
class Trap:
  """A trap that a program has.

  Attributes:
    trap: Its name, one of the constants of this module.
    detail: What, how many bytes, and what to do: one sentence.
  """

  trap: str
  detail: str


class _Case(NamedTuple):
  """One place where a trap shows: what is there, its bytes, how often in a run; a cure of its own."""

  trap: str
  what: str
  size: int
  runs: int
  cure: str = ""


def find_traps(
  program: Program,
  *,
  tokens: int | None = None,
  width: int | None = None,
  loops: Mapping[str, int] | None = None,
) -> list[Trap]:
  """Returns the traps that a program has, at most one of a name; its detail names the largest place and tells how many.

  Args:
    program: From parse, the header of the text included: it says which results take an argument's place.
    tokens: Of a chunk of prefill, those that one device should hold: all over the devices that cut them. Without it a
      replicated residual is not looked for, as in a decoding step, where every device has all rows.
    width: Of the residual stream, the hidden size; together with `tokens`.
    loops: Runs of loops that depend on data, as for `hlo.collectives`; only for the counts that the details tell.

  Raises:
    InputError: naming each loop whose count is neither in the text nor in `loops`; if only one of tokens and width is
      given.
  """
  if (tokens is None) != (width is None):
    raise InputError(f"a residual is looked for by tokens and width, found {tokens} and {width}: give both or none")
  origins = Origins(program)
  loops = loops or {}
  cases = [case for step in _steps(program, loops) for case in _cases_of(program, origins, step, loops)]
  cases += _constants(program)
  cases += _not_in_place(program)
  if tokens is not None and width is not None:
    cases += _residuals(program, origins, tokens, width)
  return [_told(name, found) for name in _CURES if (found := [case for case in cases if case.trap == name])]


def _told(name: str, cases: list[_Case]) -> Trap:
  worst = max(cases, key=lambda case: case.size)
  times = f", {worst.runs} times a run" if worst.runs > 1 else ""
  more = f"; {len(cases) - 1} more, {_size(sum(case.size for case in cases))} in all" if len(cases) > 1 else ""
  return Trap(name, f"{worst.what}, {_size(worst.size)}{times}{more}: {worst.cure or _CURES[name]}")


def _name(argument: Instruction) -> str:
  """The path of an argument, as the caller wrote it."""
  return argument.op_name.replace("\\'", "'") or argument.name


def _size(size: int) -> str:
  return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"


def _steps(program: Program, loops: Mapping[str, int]) -> list[Step]:
  return [row.step for row in Walk(program, lambda step: [_Executed(step)], loops, every_branch=True).run()]


class _Executed(NamedTuple):
  """A step of the walk, each of the same weight."""

  step: Step

  @property
  def weight(self) -> float:
    return 1.0


def _cases_of(program: Program, origins: Origins, step: Step, loops: Mapping[str, int]) -> list[_Case]:
  """Traps that one instruction is."""
  found = slice_like(program, step.computation, step.instruction)
  if found is None:
    return []
  kind, source, result = found
  if not result.in_hbm or not source.in_hbm:
    return []  # prefetched, or written back: a read or a write that has to be
  argument = origins.argument(step.computation, step.instruction.name)
  if argument is None:
    return []
  size, what = result.padded_bytes, f"{_name(argument)} {argument.arrays[0]}"
  donated, in_loop = argument.index in program.aliases.values(), origins.in_loop(step.computation)
  if source.size != result.size:
    if kind not in ("slice", "dynamic-slice") or result.size * source.dims[0] != source.size or size < MIN_SLICE_BYTES:
      return []  # no layer of a stack
    if kernel := _kernel_fed(program, origins, step.computation, step.instruction):
      return [_Case(STACK_SLICED, f"a layer of {what} for {kernel}", size, step.runs)]
    if not donated or not in_loop:
      return []  # a layer of weights is read where it is used, but for what the compiler prefetches or lays out anew
  if size < MIN_COPY_BYTES:
    return []
  if in_loop:
    return [_Case(CACHE_COPIED, what, size, step.runs)] if donated else []
  if donated:
    return [_Case(STATE_COPIED, what, size, 1)]
  if not _is_stack(program, origins, step.computation, step.instruction, result, loops):
    return []  # a matrix of one layer, in the layout that its kernel or loop wants
  if source.dtype != result.dtype:
    return [_Case(HOISTED_CAST, f"{what} as {result.dtype}", size, 1)]
  return [_Case(STACK_COPIED, what, size, 1)]


def _is_stack(
  program: Program,
  origins: Origins,
  computation: Computation,
  instruction: Instruction,
  array: Array,
  loops: Mapping[str, int],
) -> bool:
  """Whether a value goes into a loop that runs as often as its first axis is long, which is one over layers."""
  if not array.dims or array.dims[0] < 2:
    return False
  return any(
    user.opcode == "while" and trip_count(program, place, user, {}, loops) == array.dims[0]
    for place, user in origins.users(computation, instruction.name)
  )


def _kernel_fed(program: Program, origins: Origins, computation: Computation, instruction: Instruction) -> str | None:
  """The name of the kernel that takes an instruction's result."""
  for place, user in origins.users(computation, instruction.name):
    if call := kernel_of(program, Step(user, place, 1)):
      return call.name
  return None


def _constants(program: Program) -> list[_Case]:
  """Literal arrays, those in fusions included."""
  return [
    _Case(CONSTANT, f"{instruction.name} {array}", array.padded_bytes, 1)
    for computation in program.computations.values()
    for instruction in computation.instructions.values()
    if instruction.opcode == "constant"
    for array in instruction.arrays
    if array.in_hbm and array.padded_bytes > MIN_CONSTANT_BYTES
  ]


def _not_in_place(program: Program) -> list[_Case]:
  """Arguments that a result is like and does not take the place of."""
  entry = program.computation(program.entry)
  results = entry.root.arrays
  free: list[Array] = [array for i, array in enumerate(results) if i not in program.aliases]
  found = []
  for parameter in entry.parameters:
    array = parameter.arrays[0] if parameter.arrays else None
    if array is None or parameter.index in program.aliases.values() or array.padded_bytes < MIN_COPY_BYTES:
      continue
    like = next((i for i, other in enumerate(free) if (other.dtype, other.dims) == (array.dtype, array.dims)), None)
    if like is not None:
      free.pop(like)
      what = f"{_name(parameter)} {array} and the result like it both live"
      found.append(_Case(STATE_COPIED, what, array.padded_bytes, 1, _DONATE))
  return found


def _residuals(program: Program, origins: Origins, tokens: int, width: int) -> list[_Case]:
  """Arrays of more tokens than a device's that the loop over layers carries, and so for the whole program."""
  found = []
  for instruction in program.computation(program.entry).instructions.values():
    if instruction.opcode != "while":
      continue
    kept = origins.handed_on(instruction)
    for i, array in enumerate(instruction.arrays):
      if i in kept or not array.in_hbm or not array.dims or array.dims[-1] != width:
        continue
      if any(size > tokens and size % tokens == 0 for size in array.dims[:-1]):
        what = f"{array} in {instruction.op_name or instruction.name}, {tokens} tokens a device would do"
        found.append(_Case(REPLICATED_RESIDUAL, what, array.padded_bytes, 1))
  return found
