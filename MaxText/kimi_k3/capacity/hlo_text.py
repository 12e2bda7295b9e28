"""The text of a compiled XLA program as data: computations, instructions and the arrays they make.

Only what XLA prints is read, with no JAX: `jax.stages.Compiled.as_text()` or a dump. An array knows its tiles, so that
the bytes it takes, with padding, differ from the bytes of its elements; and its memory space, so that what lives in
VMEM or SMEM is told from what lives in HBM.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

# Bits of one element. A type that is not here is an error, never nothing.
ELEMENT_BITS: Mapping[str, int] = {
  **dict.fromkeys(("s2", "u2"), 2),
  **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
  **dict.fromkeys(("pred", "s8", "u8", "f8e3m4", "f8e4m3", "f8e4m3b11fnuz", "f8e4m3fn", "f8e4m3fnuz", "f8e5m2"), 8),
  **dict.fromkeys(("f8e5m2fnuz", "f8e8m0fnu"), 8),
  **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
  **dict.fromkeys(("s32", "u32", "f32"), 32),
  **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
  "c128": 128,
  **dict.fromkeys(("token", "opaque"), 0),
}

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^  (ROOT )?%?([^\s=]+) = ")
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+)[ (].*\{\s*$")
_CLOSING = re.compile(r"^\}(?:, execution_thread=\"([^\"]*)\")?\s*$")
_OPERAND = re.compile(r"%([^\s,(){}]+)")
_TILE = re.compile(r"\(([0-9,*]*)\)")


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of a type, as XLA prints it: bf16[22,64,1024]{2,1,0:T(8,128)(2,1)S(1)}.

  Attributes:
    dtype: XLA's name of the element type.
    dims: Sizes, logical order.
    minor_to_major: Axes from the fastest to the slowest in memory; empty where the text has no layout.
    tile: The first tile, most minor axis last; empty without one. -1 merges an axis into the next minor one.
    space: Memory space: 0 is HBM, 1 VMEM, 6 SMEM; others are semaphores, SparseCore or host memory.
    element_bits: Bits an element takes, which a layout may change.
  """

  dtype: str
  dims: tuple[int, ...]
  minor_to_major: tuple[int, ...]
  tile: tuple[int, ...]
  space: int
  element_bits: int

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    """Bytes of the elements alone."""
    return -(-self.size * self.element_bits // 8)

  @property
  def padded_bytes(self) -> int:
    """Bytes it takes in memory: every axis that a tile covers is rounded up to it."""
    if not self.tile or not self.dims or len(self.minor_to_major) != len(self.dims):
      return self.bytes
    sizes = [1] * len(self.tile) + [self.dims[axis] for axis in reversed(self.minor_to_major)]
    outer, inner = sizes[: -len(self.tile)], sizes[-len(self.tile) :]
    elements, carried = math.prod(outer), 1
    for size, tile in zip(inner, self.tile, strict=True):
      carried *= size
      if tile > 0:
        elements, carried = elements * (-(-carried // tile) * tile), 1
    return -(-elements * self.element_bits // 8)

  @property
  def in_hbm(self) -> bool:
    """Whether it lives in the default memory space."""
    return self.space == 0

  @property
  def hbm_bytes(self) -> int:
    """Padded bytes in HBM: 0 when it lives elsewhere."""
    return self.padded_bytes if self.in_hbm else 0

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.dims))}]" + (f" in space {self.space}" if self.space else "")


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction.

  Attributes:
    name: Its name in the text, without the percent sign.
    opcode: copy, fusion, all-reduce-start and so on.
    parts: Arrays of its result by the parts of the outermost tuple; one part if it is no tuple.
    operands: Names of operands, in order.
    literal: The text between the parentheses: the number of a parameter, the value of a constant.
    attributes: What follows the parentheses, without the backend config.
    backend_config: The backend's own text.
    is_root: Whether it is the result of its computation.
  """

  name: str
  opcode: str
  parts: tuple[tuple[Array, ...], ...]
  operands: tuple[str, ...]
  literal: str
  attributes: str
  backend_config: str
  is_root: bool

  @property
  def arrays(self) -> tuple[Array, ...]:
    """All arrays of the result, flat."""
    return tuple(array for part in self.parts for array in part)

  @property
  def op_name(self) -> str:
    """The path of the operation in the traced program; empty where the compiler lost it."""
    match = re.search(r'op_name="([^"]*)"', self.attributes)
    return match.group(1) if match else ""

  def called(self, key: str) -> tuple[str, ...]:
    """Names of the computations an attribute names: calls, to_apply, body, condition, branch_computations and so on."""
    match = re.search(rf"(?<![\w]){key}=(?:\{{([^}}]*)\}}|(%?[^\s,{{}}]+))", self.attributes)
    if match is None:
      return ()
    return tuple(name.strip().lstrip("%") for name in (match.group(1) or match.group(2)).split(",") if name.strip())

  @property
  def index(self) -> int:
    """The number of a parameter, or which part of a tuple a get-tuple-element takes."""
    if self.opcode == "parameter":
      return int(self.literal)
    match = re.search(r"\bindex=(\d+)", self.attributes)
    assert match, f"{self.name} has no index"
    return int(match.group(1))


@dataclasses.dataclass(frozen=True)
class Computation:
  """A computation: its instructions by name, in the order of the text, which is the schedule's."""

  name: str
  instructions: dict[str, Instruction]
  thread: str

  @functools.cached_property
  def root(self) -> Instruction:
    return next(i for i in self.instructions.values() if i.is_root)

  @functools.cached_property
  def parameters(self) -> tuple[Instruction, ...]:
    """Parameters in order of their numbers."""
    found = [i for i in self.instructions.values() if i.opcode == "parameter"]
    return tuple(sorted(found, key=lambda i: i.index))

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    """Instructions that have a name as an operand, once each."""
    users: dict[str, list[Instruction]] = {}
    for instruction in self.instructions.values():
      for operand in dict.fromkeys(instruction.operands):
        users.setdefault(operand, []).append(instruction)
    return users

  def arrays(self, name: str) -> tuple[Array, ...]:
    """Arrays of an instruction's result."""
    return self.instructions[name].arrays


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled program.

  Attributes:
    computations: By name.
    entry: Name of the one that is run.
    aliases: Number of the argument whose memory a result takes, by number of the result. Empty where the text has lost
      its first line.
  """

  computations: dict[str, Computation]
  entry: str
  aliases: Mapping[int, int] = dataclasses.field(default_factory=dict)

  def computation(self, name: str) -> Computation:
    return self.computations[name]

  def fused(self, fusion: Instruction) -> Computation:
    """The computation a fusion calls."""
    return self.computations[fusion.called("calls")[0]]


def parse(text: str) -> Program:
  """Returns the program that a compiled HLO text holds.

  Raises:
    ValueError: naming the line, if there is no entry computation, a line is no instruction or a type is unknown.
  """
  computations: dict[str, Computation] = {}
  entry = name = None
  lines: list[str] = []
  for line in text.splitlines():
    if name is None:
      header = _HEADER.match(line)
      if header and not line.startswith(("HloModule", " ")):
        name, lines = header.group(2), []
        entry = name if header.group(1) else entry
    elif (closing := _CLOSING.match(line)) and (not lines or _is_whole(lines[-1])):
      instructions = {i.name: i for i in map(_instruction, lines)}
      if not any(i.is_root for i in instructions.values()):
        raise ValueError(f"computation {name} has no ROOT instruction: is the text cut?")
      computations[name] = Computation(name, instructions, closing.group(1) or "main")
      name = None
    elif _INSTRUCTION.match(line):
      lines.append(line)
    elif lines:  # a literal or an attribute with line breaks
      lines[-1] += " " + line.strip()
    elif line.strip():
      raise ValueError(f"not an instruction of {name}: {line[:200]}")
  if name is not None or entry is None:
    raise ValueError("no ENTRY computation, or the text ends inside a computation: expected the whole HLO text")
  return Program(computations, entry, _aliases(text))


def _aliases(text: str) -> dict[int, int]:
  """input_output_alias of the module: {result}: (argument, {}, may-alias); a lone result has no number."""
  header = next((line for line in text.splitlines() if line.startswith("HloModule")), "")
  stated = re.search(r"input_output_alias=\{(.*?\))\s*\}", header)
  pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", stated.group(1)) if stated else []
  return {int(result or 0): int(argument) for result, argument in pairs}


def _is_whole(line: str) -> bool:
  """Whether every brace outside quotes is closed."""
  bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", line)
  return bare.count("{") <= bare.count("}")


def _instruction(line: str) -> Instruction:
  head = _INSTRUCTION.match(line)
  assert head
  rest = re.sub(r"/\*index=\d+\*/", "", line[head.end() :])
  end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
  opening = rest.find("(", end)
  if end <= 0 or opening < 0:
    raise ValueError(f"not an instruction: {line[:200]}")
  closing = _closing(rest, opening)
  literal, tail = rest[opening + 1 : closing], rest[closing + 1 :]
  attributes, _, backend = tail.partition(", backend_config=")
  opcode = rest[end:opening].strip()
  return Instruction(
    name=head.group(2),
    opcode=opcode,
    parts=tuple(_parts(rest[:end])),
    operands=() if opcode in ("constant", "parameter") else tuple(_OPERAND.findall(literal)),
    literal=literal,
    attributes=attributes,
    backend_config=backend,
    is_root=bool(head.group(1)),
  )


def _closing(text: str, opening: int) -> int:
  """Where the parenthesis that opens at `opening` closes."""
  depth = 0
  for match in re.compile(r"[()]").finditer(text, opening):
    depth += 1 if match.group() == "(" else -1
    if depth == 0:
      return match.start()
  raise ValueError(f"unbalanced parentheses: {text[:200]}")


def _parts(text: str) -> Iterator[tuple[Array, ...]]:
  """Arrays of a type's text, one tuple for each part of the outermost tuple."""
  if not text.startswith("("):
    yield tuple(map(_array, _ARRAY.finditer(text)))
    return
  depth, start = 0, 1
  for match in re.compile(r"[(){}\[\],]").finditer(text):
    character = match.group()
    depth += (character in "({[") - (character in ")}]")
    if (character == "," and depth == 1) or depth == 0:
      if text[start : match.start()].strip():
        yield tuple(map(_array, _ARRAY.finditer(text[start : match.start()])))
      start = match.end()


def _array(match: re.Match[str]) -> Array:
  dtype, dims, layout = match.group(1), match.group(2), match.group(3) or ""
  if dtype not in ELEMENT_BITS:
    raise ValueError(f"unknown element type {dtype} in {match.group()}: its size in bits belongs into ELEMENT_BITS")
  order, _, rest = layout.partition(":")
  tiles = re.search(r"T((?:\([0-9,*]*\))+)", rest)
  first = _TILE.match(tiles.group(1)) if tiles else None
  space = re.search(r"S\((\d+)\)", rest)
  bits = re.search(r"E\((\d+)\)", rest)
  return Array(
    dtype=dtype,
    dims=_numbers(dims.replace("<=", "")),
    minor_to_major=_numbers(order),
    tile=tuple(-1 if part == "*" else int(part) for part in first.group(1).split(",")) if first else (),
    space=int(space.group(1)) if space else 0,
    element_bits=int(bits.group(1)) if bits else ELEMENT_BITS[dtype],
  )


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(int(part) for part in text.split(",") if part)


def strip_locations(text: str) -> str:
  """Returns a text without the names of source files and functions that XLA prints, for keeping as a fixture."""
  return "\n".join(line for line in text.splitlines() if not re.match(r"^\d+ [{\"]", line)) + "\n"


def total(arrays: Sequence[Array]) -> int:
  """Padded bytes of those that live in HBM."""
  return sum(array.hbm_bytes for array in arrays)
