"""An OCDBT database in one generation: its index and manifest, once the values lie in data files.

TensorStore writes OCDBT too, but every commit makes files of random names, so that two runs never give the same bytes,
and a killed run leaves files that nothing refers to. Here values are written first, anywhere below the database's
directory, in any order and by any number of machines; the index made of them at the end is a pure function of what it
holds. What comes out is read by TensorStore, which is how the tests check it (docs/decisions/0009).

Format: https://google.github.io/tensorstore/kvstore/ocdbt/index.html, version 0 of manifest and nodes, uncompressed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import google_crc32c

MANIFEST = "manifest.ocdbt"
MAX_INLINE_BYTES = 4096  # An array's zarr.json stands in the index: it is what everyone reads first.
NODE_BYTES = 128 * 1024  # 128 KiB: what one lookup fetches at each of two or three levels.
_ENTRY_BYTES = 24  # About what an entry takes beside the part of its key that differs from the one before.
_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_VERSION_TREE_ARITY_LOG2 = 4  # TensorStore's default; there is only one version.
_GENERATION = _COMMIT_TIME = 1  # The time is a constant, so that the same content gives the same bytes.
_COUNT_LIMIT = 2  # An interior node has at least two children, or the tree would never end.


class Reference(NamedTuple):
  """A value in a data file: its path below the database, where it starts and its size in bytes."""

  path: str
  offset: int
  nbytes: int


class Database(NamedTuple):
  """What makes the values a database: `index` goes to the data file it was made for, `manifest` to MANIFEST, last."""

  index: bytes
  manifest: bytes


class _Node(NamedTuple):
  """An encoded node in the index and what its parent says of it."""

  first_key: bytes
  place: Reference
  num_keys: int
  tree_bytes: int
  indirect_bytes: int


def database(entries: Iterable[tuple[bytes, bytes | Reference]], *, index_path: str, uuid: bytes) -> Database:
  """Returns the index of all entries and the manifest that names its root.

  Args:
    entries: Keys with their values, small ones as they are. In any order; no key twice; at least one.
    index_path: Data file that will hold the index.
    uuid: 16 bytes that identify the database.

  Raises:
    ValueError: if a key stands there twice, or none at all.
  """
  ordered = sorted(entries, key=lambda entry: entry[0])
  if not ordered:
    raise ValueError("no entries: an OCDBT database of nothing")
  for (before, _), (key, _) in itertools.pairwise(ordered):
    if key == before:
      raise ValueError(f"key {key!r} given twice")
  index = bytearray()

  def add(node: bytes, first_key: bytes, num_keys: int, below: int, indirect: int) -> _Node:
    place = Reference(index_path, len(index), len(node))
    index.extend(node)
    return _Node(first_key, place, num_keys, len(node) + below, indirect)

  level = []
  for group in _groups(ordered):
    indirect = sum(value.nbytes for _, value in group if isinstance(value, Reference))
    level.append(add(_leaf(group), group[0][0], len(group), 0, indirect))
  height = 0
  while len(level) > 1:
    height += 1
    children, level = level, []
    for group in _groups([(node.first_key, node) for node in children]):
      nodes = [node for _, node in group]
      totals = (sum(node[i] for node in nodes) for i in range(2, 5))
      level.append(add(_interior(nodes, height), nodes[0].first_key, *totals))
  return Database(bytes(index), _manifest(level[0], height, uuid))


def _groups(entries: Sequence[tuple]) -> Iterable[Sequence[tuple]]:
  """Entries that go into one node together: up to about NODE_BYTES, but two at least where there are two."""
  start, size, before = 0, 0, b""
  for i, (key, value) in enumerate(entries):
    inline = len(value) if isinstance(value, bytes) else 0
    cost = _ENTRY_BYTES + len(key) - _shared(before, key) + inline
    if i - start >= _COUNT_LIMIT and size + cost > NODE_BYTES:
      yield entries[start:i]
      start, size = i, 0
    size, before = size + cost, key
  yield entries[start:]


def _leaf(entries: Sequence[tuple[bytes, bytes | Reference]]) -> bytes:
  references = [value for _, value in entries if isinstance(value, Reference)]
  inline = [value for _, value in entries if isinstance(value, bytes)]
  table, numbers = _file_table(reference.path for reference in references)
  prefixes, suffixes = _compressed([key for key, _ in entries])
  body = bytearray((0,)) + table
  body += _varint(len(entries)) + _varints(prefixes) + _varints(map(len, suffixes)) + b"".join(suffixes)
  body += _varints(value.nbytes if isinstance(value, Reference) else len(value) for _, value in entries)
  body += _varints(int(isinstance(value, Reference)) for _, value in entries)
  body += _varints(numbers[reference.path] for reference in references)
  body += _varints(reference.offset for reference in references)
  return _framed(_NODE_MAGIC, bytes(body + b"".join(inline)))


def _interior(children: Sequence[_Node], height: int) -> bytes:
  table, numbers = _file_table(child.place.path for child in children)
  prefixes, suffixes = _compressed([child.first_key for child in children])
  body = bytearray((height,)) + table
  body += _varint(len(children)) + _varints(prefixes) + _varints(map(len, suffixes))
  body += _varints(0 for _ in children)  # Children keep their keys whole: prefixes are cheap enough in each node.
  body += b"".join(suffixes)
  body += _varints(numbers[child.place.path] for child in children)
  body += _varints(child.place.offset for child in children)
  body += _varints(child.place.nbytes for child in children)
  body += _varints(child.num_keys for child in children)
  body += _varints(child.tree_bytes for child in children)
  body += _varints(child.indirect_bytes for child in children)
  return _framed(_NODE_MAGIC, bytes(body))


def _manifest(root: _Node, height: int, uuid: bytes) -> bytes:
  if len(uuid) != 16:
    raise ValueError(f"uuid of {len(uuid)} bytes, expected 16")
  table, numbers = _file_table((root.place.path,))
  single_file = uncompressed = 0
  body = uuid + _varint(single_file) + _varint(MAX_INLINE_BYTES) + _varint(NODE_BYTES)
  body += bytes((_VERSION_TREE_ARITY_LOG2,)) + _varint(uncompressed)
  body += table + _varint(1) + _varint(_GENERATION) + bytes((height,))
  body += _varints((numbers[root.place.path], root.place.offset, root.place.nbytes))
  body += _varints((root.num_keys, root.tree_bytes, root.indirect_bytes))
  body += _COMMIT_TIME.to_bytes(8, "little") + _varint(0)  # No older versions.
  return _framed(_MANIFEST_MAGIC, body)


def _framed(magic: int, body: bytes) -> bytes:
  """With the header before it and the checksum after it that manifest and nodes share."""
  version, uncompressed = _varint(0), _varint(0)
  total = 4 + 8 + len(version) + len(uncompressed) + len(body) + 4
  framed = magic.to_bytes(4, "big") + total.to_bytes(8, "little") + version + uncompressed + body
  return framed + google_crc32c.value(framed).to_bytes(4, "little")


def _file_table(paths: Iterable[str]) -> tuple[bytes, dict[str, int]]:
  """The encoded table of data files and each one's number in it."""
  ordered = sorted(set(paths))
  prefixes, suffixes = _compressed([path.encode() for path in ordered])
  table = _varint(len(ordered)) + _varints(prefixes) + _varints(map(len, suffixes))
  table += _varints(0 for _ in ordered)  # No base paths: all files belong to this database.
  return table + b"".join(suffixes), {path: number for number, path in enumerate(ordered)}


def _compressed(keys: Sequence[bytes]) -> tuple[list[int], list[bytes]]:
  """For all keys but the first, how many bytes they share with the one before; and what is left of each."""
  prefixes = [_shared(a, b) for a, b in itertools.pairwise(keys)]
  return prefixes, [key[shared:] for key, shared in zip(keys, (0, *prefixes), strict=False)]


def _shared(a: bytes, b: bytes) -> int:
  """Length of the common prefix."""
  limit = min(len(a), len(b))
  if a[:limit] == b[:limit]:
    return limit
  return next(i for i in range(limit) if a[i] != b[i])


def _varints(values: Iterable[int]) -> bytes:
  return b"".join(map(_varint, values))


def _varint(value: int) -> bytes:
  """Unsigned LEB128."""
  encoded = bytearray()
  while value >= 0x80:
    encoded.append(value & 0x7F | 0x80)
    value >>= 7
  encoded.append(value)
  return bytes(encoded)
