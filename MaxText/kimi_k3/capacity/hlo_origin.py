"""Where a value of a compiled program comes from and goes to, through loops, calls, copies and updates in place."""

from __future__ import annotations

import functools
from typing import NamedTuple

from kimi_k3.capacity.hlo_loops import invariants
from kimi_k3.capacity.hlo_text import Computation, Instruction, Program
from kimi_k3.capacity.hlo_traffic import in_place_operands
from kimi_k3.capacity.hlo_walk import CALLS

# Their first operand is what they hand on: whole, in part, changed in type or layout, or with a part replaced.
_FIRST = (
  "bitcast",
  "convert",
  "copy",
  "copy-done",
  "copy-start",
  "dynamic-slice",
  "dynamic-slice-done",
  "dynamic-slice-start",
  "dynamic-update-slice",
  "reshape",
  "scatter",
  "slice",
  "slice-done",
  "slice-start",
  "transpose",
)

# What hands on all of a value, and the tuple that a loop is given.
_RENAMING = ("bitcast", "copy", "copy-start", "reshape", "tuple")


class _Caller(NamedTuple):
  """Where a computation is called from.

  Attributes:
    computation: The name of the one that the call stands in.
    instruction: The call's.
    operands: What its parameters are, in order.
    loop: Whether the call is a loop.
  """

  computation: str
  instruction: str
  operands: tuple[str, ...]
  loop: bool


class Origins:
  """Answers where values of a program come from."""

  def __init__(self, program: Program):
    self.program = program
    self._callers: dict[str, _Caller] = {}
    names = [program.entry]
    while names:
      computation = program.computation(names.pop())
      for instruction in computation.instructions.values():
        for name, operands, loop in _called(computation, instruction):
          if name not in self._callers:
            self._callers[name] = _Caller(computation.name, instruction.name, operands, loop)
            names.append(name)

  def in_loop(self, computation: Computation) -> bool:
    """Whether a computation is, or is called in, the body of a loop."""
    while caller := self._callers.get(computation.name):
      if caller.loop:
        return True
      computation = self.program.computation(caller.computation)
    return False

  def handed_on(self, loop: Instruction) -> set[int]:
    """Parts of a loop's tuple that its body leaves as they are."""
    return invariants(self.program, self.program.computation(loop.called("body")[0]))

  def argument(self, computation: Computation, name: str) -> Instruction | None:
    """Returns the argument that a value is, or is a part or a newer state of; None if it is computed otherwise."""
    return self._of(computation.name, name, None)

  def users(self, computation: Computation, name: str) -> list[tuple[Computation, Instruction]]:
    """Returns what takes a value, perhaps under another name, and what takes the result of a call that returns it."""
    found, seen = [], set[tuple[str, str]]()
    names = [(computation, name)]
    while names:
      place, name = names.pop()
      caller = self._callers.get(place.name)
      if place.instructions[name].is_root and caller and not caller.loop:
        names.append((self.program.computation(caller.computation), caller.instruction))
      for user in place.users.get(name, ()):
        if (place.name, user.name) in seen:
          continue
        seen.add((place.name, user.name))
        found.append((place, user))
        if user.opcode in _RENAMING or user.opcode.endswith(("-done", "-update")):
          names.append((place, user.name))
    return found

  @functools.cache  # noqa: B019 (an object of this class lives as long as one reading of a program)
  def _of(self, place: str, name: str, part: int | None) -> Instruction | None:
    """The same of one part of a tuple; None: the value is no tuple."""
    computation = self.program.computations[place]
    instruction = computation.instructions[name]
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "parameter":
      return self._of_parameter(computation, instruction, part)
    if opcode == "get-tuple-element":
      return self._of(place, operands[0], instruction.index)
    if opcode == "tuple":
      return self._of(place, operands[part], None) if part is not None else None
    if opcode in ("opt-barrier", "optimization-barrier"):
      return self._of(place, operands[0 if len(operands) == 1 else part or 0], part if len(operands) == 1 else None)
    if opcode == "while":
      return self._of(place, operands[0], part)
    if opcode in _FIRST:
      return self._of(place, operands[0], None)
    if opcode == "fusion":
      return self._of_fusion(place, instruction, part)
    if opcode in ("custom-call", "custom-call-start"):
      taken = in_place_operands(instruction).get(part or 0)
      return self._of(place, operands[taken], None) if taken is not None else None
    if opcode in ("call", "call-start", "async-start"):
      called = (instruction.called("to_apply") + instruction.called("calls"))[0]
      return self._of(called, self.program.computation(called).root.name, part)
    if opcode.endswith(("-done", "-update")) and operands:
      return self._of(place, operands[0], part)
    return None

  def _of_parameter(self, computation: Computation, parameter: Instruction, part: int | None) -> Instruction | None:
    if computation.name == self.program.entry:
      return parameter if part is None else None
    caller = self._callers.get(computation.name)
    if caller is None:
      return None
    return self._of(caller.computation, caller.operands[parameter.index], part)

  def _of_fusion(self, place: str, fusion: Instruction, part: int | None) -> Instruction | None:
    """Of a fusion that hands an operand on; what it computes from several comes from none."""
    fused = self.program.fused(fusion)
    name = fused.root.operands[part] if part is not None and fused.root.opcode == "tuple" else fused.root.name
    while True:
      instruction = fused.instructions[name]
      if instruction.opcode == "parameter":
        return self._of(place, fusion.operands[instruction.index], None)
      if instruction.opcode == "fusion":
        inner = self._handed_on(instruction)
        if inner is None:
          return None
        name = instruction.operands[inner]
      elif instruction.opcode in _FIRST:
        name = instruction.operands[0]
      else:
        return None

  def _handed_on(self, fusion: Instruction) -> int | None:
    """Which operand a fusion in a fusion hands on."""
    fused = self.program.fused(fusion)
    instruction = fused.root
    while instruction.opcode in _FIRST:
      instruction = fused.instructions[instruction.operands[0]]
    if instruction.opcode == "fusion":
      inner = self._handed_on(instruction)
      return None if inner is None else _parameter_of(fused, instruction.operands[inner])
    return instruction.index if instruction.opcode == "parameter" else None


def _parameter_of(fused: Computation, name: str) -> int | None:
  instruction = fused.instructions[name]
  while instruction.opcode in _FIRST:
    instruction = fused.instructions[instruction.operands[0]]
  return instruction.index if instruction.opcode == "parameter" else None


def _called(computation: Computation, instruction: Instruction) -> list[tuple[str, tuple[str, ...], bool]]:
  """Computations that an instruction runs: name, what their parameters are, whether it is a loop."""
  operands = instruction.operands
  if instruction.opcode == "while":
    return [(name, operands, True) for key in ("body", "condition") for name in instruction.called(key)]
  if instruction.opcode == "conditional":
    names = instruction.called("branch_computations")
    names = names or instruction.called("true_computation") + instruction.called("false_computation")
    return [(name, operands[i + 1 : i + 2], False) for i, name in enumerate(names)]
  if instruction.opcode in CALLS:
    started = instruction
    while updates := [user for user in computation.users.get(started.name, ()) if user.opcode.endswith("-update")]:
      (started,) = updates
      operands += started.operands[1:]  # a SparseCore is started before what it works on is there
    return [(name, operands, False) for key in ("to_apply", "calls") for name in instruction.called(key)]
  return []
