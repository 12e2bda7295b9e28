"""HBM bytes of single instructions: what a fusion uses of its operands, what it writes of its result."""

from __future__ import annotations

import re

from kimi_k3.capacity.hlo_text import Array, Computation, Instruction, Program, total

_SLICES = ("slice", "dynamic-slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is the update, of those that update one array
# In a fusion these make only the elements that are asked for.
_ON_DEMAND = ("bitcast", "reshape", "copy", "transpose", "convert")
# They move nothing: they name, order, or stand for what is counted elsewhere.
_FREE = (
  "add-dependency",
  "after-all",
  "bitcast",
  "constant",
  "domain",
  "get-tuple-element",
  "opt-barrier",
  "parameter",
  "partition-id",
  "replica-id",
  "tuple",
)


def traffic(program: Program, computation: Computation, instruction: Instruction) -> tuple[int, int]:
  """Returns the bytes of HBM that one run of an instruction reads and writes, what it calls left out."""
  opcode = instruction.opcode
  if opcode in _FREE or opcode.endswith(("-done", "-update")):
    return 0, 0
  operands = [computation.arrays(name) for name in instruction.operands if name in computation.instructions]
  if opcode == "fusion":
    return _fusion(program, instruction, operands)
  if opcode == "copy-start":  # (destination, source, context)
    destination, source = instruction.parts[0], instruction.parts[1]
    return _when(source, total_size(destination)), total(destination)
  results = instruction.arrays
  if opcode.endswith("-start") and len(instruction.parts) > 1:  # (operands, results, context)
    opcode, results = opcode.removesuffix("-start"), instruction.parts[1]
  if opcode in _SLICES:
    return _when(operands[0], total_size(results)) + sum(map(total, operands[1:])), total(results)
  if opcode in _UPDATES:
    update = operands[_UPDATES[opcode]]
    return sum(map(total, operands[1:])), _when(results, total_size(update))
  return sum(map(total, operands)), total(results)


def total_size(arrays: tuple[Array, ...]) -> int:
  """Padded bytes wherever they live."""
  return sum(array.padded_bytes for array in arrays)


def _when(place: tuple[Array, ...], size: int) -> int:
  """A number of bytes, if they come from or go to HBM."""
  return size if all(array.in_hbm for array in place) else 0


def in_place_operands(instruction: Instruction) -> dict[int, int]:
  """Returns the number of the operand whose memory a result takes, by number of the result, as the text states it."""
  stated = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", instruction.attributes)
  if stated is None:
    return {}
  pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", stated.group(1))
  return {int(result or 0): int(operand) for result, operand in pairs}


def _fusion(program: Program, fusion: Instruction, operands: list[tuple[Array, ...]]) -> tuple[int, int]:
  fused = program.fused(fusion)
  read = 0
  for parameter, arrays in zip(fused.parameters, operands, strict=True):
    size = total(arrays)
    if size:
      used, returned = _used(program, fused, parameter.name, size)
      read += size if returned else used
  return read, sum(
    _written(program, fused, name, array.padded_bytes)
    for name, array in zip(_results(fused), fusion.arrays, strict=True)
    if array.in_hbm
  )


def _results(fused: Computation) -> tuple[str, ...]:
  """Names of what a fusion returns."""
  return fused.root.operands if fused.root.opcode == "tuple" else (fused.root.name,)


def _used(program: Program, fused: Computation, name: str, size: int) -> tuple[int, bool]:
  """Returns the bytes that are used of a value in a fusion, at most its size, and whether it is a result itself."""
  used, returned = 0, fused.instructions[name].is_root
  for user in fused.users.get(name, ()):
    first = bool(user.operands) and user.operands[0] == name
    if user.opcode in _SLICES and first:
      used += total_size(user.arrays)
    elif user.opcode in _UPDATES and first and name not in user.operands[1:]:
      # Updated where it is: what is not replaced is not read, unless something else uses the result.
      used += _used(program, fused, user.name, size)[0]
    elif user.opcode in _ON_DEMAND:
      inner = _used(program, fused, user.name, size)
      used, returned = used + inner[0], returned or inner[1]
    elif user.opcode == "tuple" and user.is_root:
      returned = True
    elif user.opcode == "fusion":
      nested = program.fused(user)
      for parameter, operand in zip(nested.parameters, user.operands, strict=True):
        if operand != name:
          continue
        inside, handed_on = _used(program, nested, parameter.name, size)
        used += inside
        if handed_on:
          inner = _used(program, fused, user.name, size)
          used, returned = used + inner[0], returned or inner[1]
    else:
      used = size
  return min(used, size), returned


def _written(program: Program, fused: Computation, name: str, size: int) -> int:
  """Bytes that a fusion writes of a result: the update alone, where it updates an operand in place."""
  instruction = fused.instructions[name]
  if instruction.opcode in _UPDATES and _is_parameter(program, fused, instruction.operands[0]):
    return min(size, total_size(fused.arrays(instruction.operands[_UPDATES[instruction.opcode]])))
  if instruction.opcode in ("bitcast", "reshape"):
    return _written(program, fused, instruction.operands[0], size)
  if instruction.opcode == "fusion":
    nested = program.fused(instruction)
    return _written(program, nested, nested.root.name, size) if nested.root.opcode != "tuple" else size
  return size


def _is_parameter(program: Program, fused: Computation, name: str) -> bool:
  """Whether a value in a fusion is an operand of it, perhaps updated or under another name."""
  instruction = fused.instructions[name]
  while instruction.opcode in ("bitcast", "reshape", "copy", *_UPDATES):
    instruction = fused.instructions[instruction.operands[0]]
  if instruction.opcode == "fusion":
    return _is_parameter(program, program.fused(instruction), program.fused(instruction).root.name)
  return instruction.opcode == "parameter"


def slice_like(program: Program, computation: Computation, instruction: Instruction) -> tuple[str, Array, Array] | None:
  """Returns kind, source and result of an instruction that only writes again what it reads, or None."""
  opcode = instruction.opcode
  if opcode == "copy-start":
    return "copy", instruction.parts[1][0], instruction.parts[0][0]
  if opcode == "fusion":
    return _copying_fusion(program, computation, instruction)
  kind = opcode.removesuffix("-start")
  if kind not in (*_SLICES, "copy", "transpose", "reshape", "convert", "concatenate") or len(instruction.parts) == 0:
    return None
  results = instruction.parts[1] if opcode.endswith("-start") else instruction.arrays
  return kind, computation.arrays(instruction.operands[0])[0], results[0]


def _copying_fusion(program: Program, computation: Computation, fusion: Instruction) -> tuple[str, Array, Array] | None:
  """A fusion whose result is an operand, through nothing but copies, casts and slices."""
  fused = program.fused(fusion)
  kind, instruction, place = "", fused.root, fused
  operands = fusion.operands
  chain: list[tuple[Computation, Instruction]] = []
  while True:
    opcode = instruction.opcode
    if opcode == "fusion":
      chain.append((place, instruction))
      place = program.fused(instruction)
      instruction = place.root
    elif opcode == "parameter":
      if not chain:
        break
      outer, call = chain.pop()
      place, instruction = outer, outer.instructions[call.operands[instruction.index]]
    elif opcode in (*_SLICES, "copy", "transpose", "convert"):
      kind = opcode if opcode in _SLICES or not kind else kind
      instruction = place.instructions[instruction.operands[0]]
    elif opcode in ("bitcast", "reshape"):
      instruction = place.instructions[instruction.operands[0]]
    else:
      return None
  if not kind:
    return None
  return kind, computation.arrays(operands[instruction.index])[0], fusion.arrays[0]
