"""How often the loops of a compiled program run, read from their conditions."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Mapping

from kimi_k3.capacity.hlo_text import Computation, Instruction, Program
from kimi_k3.errors import InputError

# What hands a value on unchanged, for a counter.
_TRANSPARENT = ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start", "opt-barrier")
# How often a counter that moves by step > 0 satisfies the comparison, from the distance to its bound.
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


@dataclasses.dataclass(frozen=True)
class Affine:
  """element + offset, where element is a part of the computation's one tuple parameter; a constant if it is None."""

  element: int | None
  offset: int


# The constant parts of the tuple a computation was called with.
Known = Mapping[int, int]


def constants(program: Program, computation: Computation, operand: str, known: Known) -> dict[int, int]:
  """Returns which parts of a tuple are constants, so that a called computation may use them."""
  source = computation.instructions[operand]
  while source.opcode in _TRANSPARENT:
    source = computation.instructions[source.operands[0]]
  if source.opcode == "parameter":
    return dict(known)
  if source.opcode != "tuple":
    return {}
  values = {i: _affine(program, computation, name, {}) for i, name in enumerate(source.operands)}
  return {i: number for i, v in values.items() if (number := _number(v, known)) is not None}


def invariants(program: Program, body: Computation) -> set[int]:
  """Returns the parts of a loop's tuple that the body hands on as they are."""
  if body.root.opcode != "tuple":
    return set()
  values = ((i, _affine(program, body, name, {})) for i, name in enumerate(body.root.operands))
  return {i for i, value in values if value == Affine(i, 0)}


def trip_count(
  program: Program, computation: Computation, loop: Instruction, known: Known, given: Mapping[str, int]
) -> int | None:
  """Returns how often a while loop's body runs, or None where that depends on data and `given` does not name it.

  Args:
    program: The program.
    computation: Where the loop stands.
    loop: The while instruction.
    known: Constant parts of the computation's parameter.
    given: Counts by pattern of op_name or instruction name (fnmatch), for loops that depend on data.
  """
  stated = re.search(r'"?known_trip_count"?:\{"?n"?:"?(\d+)', loop.backend_config)
  if stated:
    return int(stated.group(1))
  counted = _counted(program, computation, loop, known)
  if counted is not None:
    return counted
  matches = {count for pattern, count in given.items() if matches_loop(loop, pattern)}
  if len(matches) > 1:
    raise InputError(f"loop {loop_name(loop)}: {sorted(matches)} runs given by several patterns, expected one")
  return matches.pop() if matches else None


def matches_loop(loop: Instruction, pattern: str) -> bool:
  return fnmatch.fnmatchcase(loop.op_name, pattern) or fnmatch.fnmatchcase(loop.name, pattern)


def loop_name(loop: Instruction) -> str:
  """A loop's name for messages, both forms that a pattern may match."""
  return f"{loop.name} ({loop.op_name or 'no op_name'})"


def _counted(program: Program, computation: Computation, loop: Instruction, known: Known) -> int | None:
  """The count of a loop whose counter starts at a constant, moves by one and is compared with another."""
  body = program.computation(loop.called("body")[0])
  condition = program.computation(loop.called("condition")[0])
  start = constants(program, computation, loop.operands[0], known)
  fixed = {i: value for i, value in start.items() if i in invariants(program, body)}
  compared = _comparison(program, condition, condition.root.name, {})
  if compared is None:
    return None
  left, right, direction = compared
  if _number(left, fixed) is not None:
    left, right, direction = right, left, _MIRRORED.get(direction, direction)
  bound = _number(right, fixed)
  if bound is None or left is None or left.element is None or left.element not in start:
    return None
  if body.root.opcode != "tuple":
    return None
  moved = _affine(program, body, body.root.operands[left.element], {})
  if moved is None or moved.element != left.element or moved.offset == 0:
    return None
  return _runs(start[left.element] + left.offset, moved.offset, bound, direction)


def _runs(start: int, step: int, bound: int, direction: str) -> int | None:
  """How often start, start + step, ... satisfies the comparison before it first fails; None if it never fails."""
  if step < 0:
    start, step, bound, direction = -start, -step, -bound, _MIRRORED.get(direction, direction)
  distance = bound - start
  if direction == "LT":
    return max(0, -(-distance // step))
  if direction == "LE":
    return max(0, distance // step + 1)
  if direction == "NE" and distance >= 0 and distance % step == 0:
    return distance // step
  if (direction == "GT" and distance >= 0) or (direction == "GE" and distance > 0):
    return 0  # it moves away from a bound it does not satisfy
  return None


def _number(value: Affine | None, known: Known) -> int | None:
  if value is None:
    return None
  if value.element is None:
    return value.offset
  return known[value.element] + value.offset if value.element in known else None


def _affine(program: Program, computation: Computation, name: str, bound: Mapping[int, Affine | None]) -> Affine | None:
  """What an instruction computes, if it is a constant or a part of the parameter plus one.

  Args:
    program: The program.
    computation: Where the instruction stands.
    name: The instruction.
    bound: Values of the computation's parameters, in a fusion; empty where the parameter is the tuple itself.
  """
  instruction = computation.instructions[name]
  opcode, operands = instruction.opcode, instruction.operands
  if opcode in _TRANSPARENT:
    return _affine(program, computation, operands[0], bound)
  if opcode == "constant":
    return Affine(None, int(instruction.literal)) if re.fullmatch(r"-?\d+", instruction.literal) else None
  if opcode == "parameter":
    return bound.get(instruction.index)
  if opcode == "get-tuple-element":
    source = computation.instructions[operands[0]]
    if source.opcode == "parameter" and not bound:
      return Affine(instruction.index, 0)
    if source.opcode == "tuple":
      return _affine(program, computation, source.operands[instruction.index], bound)
    if source.opcode == "while" and instruction.index in invariants(
      program, program.computation(source.called("body")[0])
    ):
      inner = computation.instructions[source.operands[0]]
      return (
        _affine(program, computation, inner.operands[instruction.index], bound) if inner.opcode == "tuple" else None
      )
    return None
  if opcode in ("add", "subtract"):
    left, right = (_affine(program, computation, operand, bound) for operand in operands)
    if left is None or right is None:
      return None
    if opcode == "add" and left.element is None:
      left, right = right, left
    sign = 1 if opcode == "add" else -1
    return Affine(left.element, left.offset + sign * right.offset) if right.element is None else None
  if opcode == "fusion":
    fused = program.fused(instruction)
    values = {i: _affine(program, computation, operand, bound) for i, operand in enumerate(operands)}
    return _affine(program, fused, fused.root.name, values)
  return None


def _comparison(
  program: Program, computation: Computation, name: str, bound: Mapping[int, Affine | None]
) -> tuple[Affine | None, Affine | None, str] | None:
  """Both sides and the direction of the comparison that an instruction is."""
  instruction = computation.instructions[name]
  if instruction.opcode in _TRANSPARENT:
    return _comparison(program, computation, instruction.operands[0], bound)
  if instruction.opcode == "fusion":
    fused = program.fused(instruction)
    values = {i: _affine(program, computation, operand, bound) for i, operand in enumerate(instruction.operands)}
    return _comparison(program, fused, fused.root.name, values)
  direction = re.search(r"\bdirection=(\w+)", instruction.attributes)
  if instruction.opcode != "compare" or direction is None:
    return None
  left, right = (_affine(program, computation, operand, bound) for operand in instruction.operands)
  return left, right, direction.group(1)
