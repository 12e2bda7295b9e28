"""Every instruction that a compiled program executes, and how often."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from kimi_k3.capacity.hlo_loops import Known, constants, invariants, loop_name, matches_loop, trip_count
from kimi_k3.capacity.hlo_text import Computation, Instruction, Program
from kimi_k3.errors import InputError

CALLS = ("call", "call-start", "async-start")  # they run another computation, once


@dataclasses.dataclass(frozen=True)
class Step:
  """An instruction that is executed, and how often in one run of the program."""

  instruction: Instruction
  computation: Computation
  runs: int


class Row(Protocol):
  """What a walk collects: its weight decides between the branches of a conditional."""

  @property
  def weight(self) -> float: ...


class Walk[R: Row]:
  """Collects rows of every executed instruction; `rows` makes them, `every_branch` takes all branches."""

  def __init__(
    self,
    program: Program,
    rows: Callable[[Step], Iterable[R]],
    loops: Mapping[str, int],
    *,
    every_branch: bool = False,
  ):
    self.program, self.rows, self.loops, self.every_branch = program, rows, loops, every_branch
    self.unknown: dict[str, None] = {}
    self.counts: list[tuple[Instruction, int, int]] = []
    self.used: set[str] = set()

  def run(self) -> list[R]:
    found = self.visit(self.program.entry, 1, {})
    if self.unknown:
      raise InputError(
        f"loop(s) {', '.join(self.unknown)}: how often they run depends on data, expected a count in `loops`: "
        "{pattern of the name or op_name: runs}"
      )
    if unused := set(self.loops) - self.used:
      raise InputError(f"loops: {', '.join(sorted(unused))} matches no loop whose count depends on data")
    return found

  def visit(self, name: str, runs: int, known: Known) -> list[R]:
    computation = self.program.computation(name)
    found: list[R] = []
    for instruction in computation.instructions.values():
      if instruction.opcode == "while":
        found += self.loop(computation, instruction, runs, known)
      elif instruction.opcode == "conditional":
        found += self.branches(computation, instruction, runs, known)
      elif instruction.opcode in CALLS:
        one = instruction.operands if instruction.opcode == "call" and len(instruction.operands) == 1 else ()
        inside = constants(self.program, computation, one[0], known) if one else {}
        for called in instruction.called("to_apply") + instruction.called("calls"):
          found += self.visit(called, runs, inside)
      elif called := _called_by_custom_call(instruction):
        for target in called:
          found += self.visit(target, runs, {})
      else:
        found += self.rows(Step(instruction, computation, runs))
    return found

  def loop(self, computation: Computation, loop: Instruction, runs: int, known: Known) -> list[R]:
    self.used |= {
      pattern
      for pattern in self.loops
      if matches_loop(loop, pattern) and trip_count(self.program, computation, loop, known, {}) is None
    }
    count = trip_count(self.program, computation, loop, known, self.loops)
    if count is None:
      self.unknown[loop_name(loop)] = None
      count = 1
    self.counts.append((loop, count, runs))
    # What the loop starts with stays known only where the body hands it on.
    inside = constants(self.program, computation, loop.operands[0], known)
    handed_on = invariants(self.program, self.program.computation(loop.called("body")[0]))
    inside = {i: value for i, value in inside.items() if i in handed_on}
    body = self.visit(loop.called("body")[0], runs * count, inside)
    return body + self.visit(loop.called("condition")[0], runs * (count + 1), inside)

  def branches(self, computation: Computation, conditional: Instruction, runs: int, known: Known) -> list[R]:
    names = conditional.called("branch_computations")
    names = names or conditional.called("true_computation") + conditional.called("false_computation")
    each = []
    for name, operand in zip(names, conditional.operands[1:], strict=True):
      each.append(self.visit(name, runs, constants(self.program, computation, operand, known)))
    if self.every_branch:
      return [row for rows in each for row in rows]
    return max(each, key=lambda rows: sum(row.weight for row in rows))


def _called_by_custom_call(instruction: Instruction) -> tuple[str, ...]:
  """Computations that run inside a custom call, as SparseCore offload once wrote them."""
  return instruction.called("called_computations") if instruction.opcode.startswith("custom-call") else ()
