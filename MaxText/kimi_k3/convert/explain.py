"""What the difference of one leaf looks like: its chunks are read once more, beside others they may be mixed up with.

Called on failure only. Where a chunk's content belongs is told by the checksums that the comparison has made anyway.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from kimi_k3 import checksums
from kimi_k3.convert import chunks, diagnose, transforms
from kimi_k3.convert.chunks import Chunk
from kimi_k3.convert.database import UnreadableError
from kimi_k3.convert.index import Source
from kimi_k3.convert.mapping import Leaf
from kimi_k3.convert.reader import Output
from kimi_k3.convert.write import leaf_name

_SLICE_BYTES = 256 * 1024 * 1024  # 256 MiB: a larger slice is looked at by its first chunk that differs only.
_MOVED_CHUNKS = 64  # Of a leaf, how many are looked for elsewhere: a pattern shows in a few.
_BLOCK_BYTES = 8 << 30  # 8 GiB: of a block's experts, what a sample reads to find where an expert's content belongs.


class Tally:
  """What was found in one leaf. Chunks are numbered in the order of the grid."""

  def __init__(self, leaf: Leaf):
    count = chunks.num_chunks(leaf)
    self.leaf, self.name = leaf, leaf_name(leaf)
    self.grid = tuple(-(-n // step) for n, step in zip(leaf.shape, chunks.chunk_shape(leaf), strict=True))
    self.values = self.different = 0
    self.differing: list[int] = []
    self.unreadable: dict[int, str] = {}
    self.seen, self.known = np.zeros(count, bool), np.zeros(count, bool)  # Known: `expected` holds its checksum.
    self.found, self.expected = np.zeros(count, np.uint32), np.zeros(count, np.uint32)

  def number(self, chunk: Chunk) -> int:
    return int(np.ravel_multi_index(chunk.index, self.grid)) if self.grid else 0

  def chunk(self, number: int) -> Chunk:
    return next(itertools.islice(chunks.chunks(self.leaf), number, None))

  @property
  def faulty(self) -> bool:
    return bool(self.differing or self.unreadable)

  @property
  def share(self) -> float:
    return self.different / max(1, self.values)


def expected_chunk(source: Source, leaf: Leaf, chunk: Chunk) -> np.ndarray:
  """Returns what convert writes of the source into a chunk, `chunk.shape` large."""
  shape = chunk.shape[len(chunk.piece.index) :]
  return transforms.apply(leaf.transform, chunk.piece.names, source.read, shape, chunk.rows).reshape(chunk.shape)


class Explainer:
  """Looks at differences of leaves, given what was found in all of them."""

  def __init__(self, source: Source, out: Output, tallies: Collection[Tally]):
    self.source, self.out, self.tallies = source, out, tallies

  def difference(self, tally: Tally) -> dict[str, Any]:
    """Returns what one leaf's difference looks like: leaf, share, different, values, unreadable, looks_like, first."""
    entry = {
        "leaf": tally.name, "share": tally.share, "different": tally.different, "values": tally.values,
        "unreadable": len(tally.unreadable), "looks_like": "", "first": None,
    }  # fmt: skip
    if tally.unreadable:
      number = min(tally.unreadable)
      key = chunks.key(tally.chunk(number).index)
      more = f" (and {len(tally.unreadable) - 1} more chunks)" if len(tally.unreadable) > 1 else ""
      return entry | {"looks_like": f"chunk {key} cannot be read: {tally.unreadable[number]}{more}"}
    chunk = tally.chunk(min(tally.differing))
    found, expected = self.out.read_chunk(tally.leaf, chunk), expected_chunk(self.source, tally.leaf, chunk)
    if diagnose.same(found, expected):
      return entry | {"looks_like": "equal when read once more: something writes to OUT or SRC, or memory is faulty"}
    first, steps = diagnose.first_difference(found, expected), chunks.chunk_shape(tally.leaf)
    index = [n * step + i for n, step, i in zip(chunk.index, steps, first.index, strict=True)]
    entry["first"] = {"index": index, "found": first.found, "expected": first.expected, "bits": first.bits}
    if tally.different == 1:
      return entry | {"looks_like": f"one value, {_bits(first.bits)}"}
    return entry | {
      "looks_like": self._moved(tally) or self._pattern(tally, chunk, found, expected) or "no known pattern"
    }

  def _pattern(self, tally: Tally, chunk: Chunk, found: np.ndarray, expected: np.ndarray) -> str | None:
    """What was done to a whole slice, or where that is too large to its first chunk that differs."""
    leaf, piece = tally.leaf, chunk.piece
    if chunks.slice_bytes(leaf) <= _SLICE_BYTES:
      parts = [expected_chunk(self.source, leaf, part) for part in chunks.piece_chunks(leaf, piece)]
      axis = next((i for i, n in enumerate(tally.grid) if n > 1 and i >= len(piece.index)), 0)
      expected = np.concatenate(parts, axis) if len(parts) > 1 else parts[0]
      try:
        found = self.out.read(tally.name, tuple(slice(i, i + 1) for i in piece.index))
      except UnreadableError:
        return None
    inside = leaf.slice_shape if found.size == math.prod(leaf.slice_shape) else chunk.shape[len(piece.index) :]
    looks = diagnose.pattern(found.reshape(inside), expected.reshape(inside))
    where = _words(leaf, piece.index)
    return f"{looks}{f' ({where})' if where else ''}" if looks else None

  def _moved(self, tally: Tally) -> str | None:
    """Whether chunks hold what belongs elsewhere, told by checksums and confirmed by the bytes of the first."""
    first = min(tally.differing)
    self._learn_block(tally, tally.chunk(first))
    moves = {number: self._home(tally, number) for number in sorted(tally.differing)[:_MOVED_CHUNKS]}
    homes = {number: home for number, home in moves.items() if home is not None}
    if first not in homes:
      return None
    other, number = homes[first]
    home = expected_chunk(self.source, other.leaf, other.chunk(number))
    if not diagnose.same(self.out.read_chunk(tally.leaf, tally.chunk(first)), home):
      return None
    rest = f"; {len(homes)} of {len(moves)} chunks that differ are such" if len(moves) > 1 else ""
    here = _words(tally.leaf, tally.chunk(first).piece.index)
    if other is not tally:
      there = " ".join(filter(None, (other.name, _words(other.leaf, other.chunk(number).piece.index))))
      return f"{here + ' has ' if here else ''}the content of another leaf, {there}{rest}"
    there = _words(other.leaf, other.chunk(number).piece.index)
    if homes.get(number) == (tally, first):
      return f"exchanged: {here} and {there} have each other's content{rest}"
    return f"{here} has the content of {there}{rest}"

  def _home(self, tally: Tally, number: int) -> tuple[Tally, int] | None:
    """Which chunk of which leaf should hold what stands in this one; the leaf itself is looked at first."""
    for other in (tally, *(t for t in self.tallies if t is not tally and t.leaf.dtype == tally.leaf.dtype)):
      hits = np.flatnonzero(other.known & (other.expected == tally.found[number]))
      if hits.size:
        return other, int(hits[0])
    return None

  def _learn_block(self, tally: Tally, chunk: Chunk) -> None:
    """After a sample: the checksums of what a block's other experts should hold."""
    block = chunk.piece.index[:-1]
    others = [piece for piece in tally.leaf.pieces if piece.index[:-1] == block] if chunk.piece.index else []
    if tally.known.all() or len(others) * chunks.slice_bytes(tally.leaf) > _BLOCK_BYTES:
      return
    for piece in others:
      for part in chunks.piece_chunks(tally.leaf, piece):
        number = tally.number(part)
        if not tally.known[number]:
          whole = checksums.filled(expected_chunk(self.source, tally.leaf, part), chunks.chunk_shape(tally.leaf))
          tally.expected[number], tally.known[number] = checksums.chunk_checksum(whole), True


def _words(leaf: Leaf, index: tuple[int, ...]) -> str:
  """A piece's place in words: "block 0, expert 3"."""
  names = ["expert"] if ".experts." in leaf_name(leaf) else []
  names = ["block"] * (len(index) - len(names)) + names
  return ", ".join(f"{name} {i}" for name, i in zip(names, index, strict=True))


def _bits(count: int) -> str:
  return "1 bit" if count == 1 else f"{count} bits"


def line(entry: Mapping[str, Any]) -> str:
  """A difference as one line."""
  text = f"{entry['leaf']}: {entry['different']:,} of {entry['values']:,} values differ ({100 * entry['share']:.3g} %)"
  text += f": {entry['looks_like']}"
  if first := entry["first"]:
    text += f"; at {first['index']} {first['found']!r}, expected {first['expected']!r} ({_bits(first['bits'])})"
  return text
