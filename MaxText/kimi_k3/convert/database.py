"""The arrays of a checkpoint's `items` directory, read through TensorStore: a bucket's URL works as a directory does.

A chunk that is missing or that fails its own checksum is an error: by itself TensorStore would return zeros for a
missing one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import threading
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (numpy learns the name bfloat16 from it)
import numpy as np
import tensorstore as ts

from kimi_k3.convert import chunks, store
from kimi_k3.convert.faults import listed
from kimi_k3.convert.mapping import Leaf, Shape
from kimi_k3.convert.write import KEY_PREFIX, leaf_name
from kimi_k3.errors import InputError

NODE_CACHE_BYTES = 64 * 1024 * 1024  # 64 MiB: OCDBT's index; half a million keys take some 30 MB of nodes.
_ARRAY_FILE = "zarr.json"
_REASON_LENGTH = 160  # characters of TensorStore's message, which names the file at every level and the reason last
_NODES = 16  # Of that index, read at a time where all are looked at: some MB each, decoded.


class UnreadableError(InputError):
  """Part of an array is missing or fails its own checksum."""


class StoredArray(NamedTuple):
  """What an array says of itself, and how its keys compare with that.

  Attributes:
    shape: Of the array.
    dtype: numpy's name of it.
    chunk_shape: Of its chunks.
    missing: Keys of chunks that its grid has and the database has not, such as "c/0/1".
    strays: Keys below it that its grid has not.
  """

  shape: Shape
  dtype: str
  chunk_shape: Shape
  missing: tuple[str, ...]
  strays: tuple[str, ...]


class Arrays(NamedTuple):
  """All keys of a conversion's database.

  Attributes:
    held: Arrays by the name of their leaf.
    damaged: By name, why an array cannot be opened.
    strays: Keys that belong to no leaf.
  """

  held: Mapping[str, StoredArray]
  damaged: Mapping[str, str]
  strays: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Database:
  """The arrays below an `items` directory. Nothing is ever written to it.

  Attributes:
    items: Local path or URL.
    advice: What to do when it is damaged, for messages.
    cache_bytes: Of decoded chunks that are kept, for who reads a chunk in parts.
  """

  items: str
  advice: str
  cache_bytes: int = 0
  _parent: ts.Context = dataclasses.field(
    default_factory=lambda: ts.Context({"cache_pool#nodes": {"total_bytes_limit": NODE_CACHE_BYTES}}),
    repr=False, compare=False,
  )  # fmt: skip
  _opened: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)
  _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False, repr=False, compare=False)

  def cached(self, nbytes: int) -> Database:
    """Returns the same arrays with a cache for this many bytes of decoded chunks, which ends with what is returned."""
    return dataclasses.replace(self, cache_bytes=nbytes)

  @functools.cached_property
  def _context(self) -> ts.Context:
    return ts.Context({"cache_pool": {"total_bytes_limit": self.cache_bytes}}, self._parent)

  @functools.cached_property
  def _root(self) -> ts.KvStore:
    """Held, as TensorStore forgets the nodes of an index that nobody has open."""
    return ts.KvStore.open(self._kvstore(""), context=self._context).result()

  @functools.cached_property
  def arrays(self) -> Arrays:
    """All arrays that are there, from a listing of the database's keys and each array's own metadata.

    Raises:
      InputError: if the index of the database cannot be read.
    """
    try:
      kvstore = self._root
      keys = kvstore.list().result()
      by_name, strays = _grouped(keys)
      pending = {name: kvstore.read(_key(name) + _ARRAY_FILE) for name in by_name}
      found = {name: _settled(future) for name, future in pending.items()}
    except (ValueError, OSError) as error:
      raise UnreadableError(
        f"{self.items}: the index of its keys cannot be read ({_reason(error)}): a file is damaged, missing or of "
        f"another conversion; {self.advice}"
      ) from error
    held, damaged = {}, {}
    for name, value in found.items():
      try:
        held[name] = _stored_array(value, by_name[name])
      except (ValueError, KeyError, TypeError, IndexError) as error:
        damaged[name] = f"its {_ARRAY_FILE} cannot be read ({str(error)[:_REASON_LENGTH]})"
    return Arrays(held, damaged, tuple(strays))

  def data_ends(self) -> dict[str, int]:
    """Returns of each file of the database, named below it, how many bytes its index refers to. Reads the index alone.

    Raises:
      UnreadableError: if the index cannot be read.
    """
    local = {"driver": "file", "path": f"{self.items}/"}
    ends: dict[str, int] = {}
    try:
      base = ts.KvStore.open(f"{self.items}/" if store.is_url(self.items) else local, context=self._context).result()
      root = ts.ocdbt.dump(base, context=self._context).result()["versions"][-1]["root"].get("location")
      nodes = [root] if root else []
      while nodes:
        some, nodes = nodes[-_NODES:], nodes[:-_NODES]
        places = list(some)
        for future in [ts.ocdbt.dump(base, node, context=self._context) for node in some]:
          entries = future.result()["entries"]
          nodes += [entry["location"] for entry in entries if "location" in entry]
          places += [entry["indirect_value"] for entry in entries if "indirect_value" in entry]
        for place in places:  # kind:directory:path:offset:length
          _, directory, path, offset, length = place.split(":")
          name = urllib.parse.unquote(directory + path)
          ends[name] = max(ends.get(name, 0), int(offset) + int(length))
    except (ValueError, OSError, KeyError, TypeError, IndexError) as error:
      raise UnreadableError(f"{self.items}: the index of its keys cannot be read ({error}); {self.advice}") from error
    return ends

  def data_faults(self) -> list[str]:
    """Returns which files of the database are missing or end too early; of a bucket only which are missing."""
    sizes = store.open_store(self.items).sizes("")
    faults = []
    for name, end in sorted(self.data_ends().items()):
      size = sizes.get(name)
      if name not in sizes:
        faults.append(f"{name}: missing, {end:,} bytes of data expected")
      elif size is not None and size < end:
        faults.append(f"{name}: {size:,} bytes, at least {end:,} expected: cut short")
    return faults

  def read(self, name: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
    """Returns part of a leaf, contiguous. Each chunk's checksum is checked. Safe to call from several threads.

    Args:
      name: Of the leaf: its path joined by dots.
      slices: One an axis from the first on; the rest is taken whole.

    Raises:
      UnreadableError: if the array cannot be opened, or a chunk is missing or fails its own checksum.
    """
    try:
      array = self._open(name)
      return np.ascontiguousarray((array[slices] if slices else array).read(order="C").result())
    except (ValueError, OSError) as error:
      raise UnreadableError(f"{name}: {_reason(error)}") from error

  def read_chunk(self, leaf: Leaf, chunk: chunks.Chunk) -> np.ndarray:
    """Returns the part of a leaf that a chunk of ours covers, `chunk.shape` large. Raises as `read`.

    Args:
      leaf: Which.
      chunk: Of `chunks`; the array may be stored in others.
    """
    steps = chunks.chunk_shape(leaf)
    starts = [i * step for i, step in zip(chunk.index, steps, strict=True)]
    return self.read(leaf_name(leaf), tuple(slice(a, a + n) for a, n in zip(starts, chunk.shape, strict=True)))

  def _kvstore(self, path: str) -> dict[str, Any]:
    # TensorStore takes no local path with `..` in it.
    local = {"driver": "file", "path": f"{self.items}/"}
    base = f"{self.items}/" if store.is_url(self.items) else local
    return {"driver": "ocdbt", "base": base, "path": path, "cache_pool": "cache_pool#nodes"}

  def _open(self, name: str) -> Any:
    """The array, opened once."""
    with self._lock:
      opened = self._opened.get(name)
    if opened is None:
      spec = {
          "driver": "zarr3", "kvstore": self._kvstore(_key(name)), "fill_missing_data_reads": False,
          "recheck_cached_metadata": "open", "recheck_cached_data": "open",
      }  # fmt: skip
      opened = ts.open(spec, open=True, read=True, context=self._context).result()
      with self._lock:
        self._opened[name] = opened
    return opened


def differing_arrays(leaves: Iterable[Leaf], arrays: Arrays) -> dict[str, str]:
  """Returns, by name, what arrays of another shape or dtype than their leaf are, and what was expected."""
  different = {}
  for leaf in leaves:
    held = arrays.held.get(leaf_name(leaf))
    if held is not None and (held.shape, held.dtype) != (leaf.shape, leaf.dtype):
      different[leaf_name(leaf)] = f"{held.dtype} {list(held.shape)}, expected {leaf.dtype} {list(leaf.shape)}"
  return different


def chunk_faults(arrays: Arrays) -> dict[str, str]:
  """Returns, by name, which chunks of an array are missing or too many."""
  faults = {}
  for name, held in arrays.held.items():
    parts = [f"{len(held.missing)} of its chunks missing: {listed(held.missing)}"] if held.missing else []
    parts += [f"key(s) that its grid has not: {listed(held.strays)}"] if held.strays else []
    if parts:
      faults[name] = "; ".join(parts)
  return faults


def _key(name: str) -> str:
  return ".".join((*KEY_PREFIX, name)) + "/"


def _grouped(keys: Iterable[bytes]) -> tuple[dict[str, list[str]], list[str]]:
  """Keys by the leaf they belong to, without its name; and those of no leaf."""
  prefix, by_name, strays = ".".join(KEY_PREFIX) + ".", {}, []
  for key in keys:
    head, slash, rest = key.decode(errors="replace").partition("/")
    if slash and head.startswith(prefix):
      by_name.setdefault(head.removeprefix(prefix), []).append(rest)
    else:
      strays.append(key.decode(errors="replace"))
  return by_name, strays


def _settled(future: Any) -> bytes | Exception:
  try:
    result = future.result()
  except (ValueError, OSError) as error:
    return error
  return result.value if result.state == "value" else ValueError("it is missing")


def _stored_array(value: bytes | Exception, keys: Iterable[str]) -> StoredArray:
  if isinstance(value, Exception):
    raise ValueError(_reason(value))
  metadata = json.loads(value)
  shape = tuple(map(int, metadata["shape"]))
  chunk_shape = tuple(map(int, metadata["chunk_grid"]["configuration"]["chunk_shape"]))
  grid = [range(-(-size // step)) for size, step in zip(shape, chunk_shape, strict=True)]
  found = set(keys)
  found.discard(_ARRAY_FILE)
  # One by one: the grid of a damaged array may be larger than memory.
  missing = tuple(key for index in itertools.product(*grid) if (key := chunks.key(index)) not in found)
  strays = () if len(found) + len(missing) == _num(grid) else tuple(sorted(found - set(_keys(grid))))
  return StoredArray(shape, str(metadata["data_type"]), chunk_shape, missing, strays)


def _keys(grid: list[range]) -> Iterator[str]:
  return map(chunks.key, itertools.product(*grid))


def _num(grid: list[range]) -> int:
  return int(np.prod([len(axis) for axis in grid], dtype=np.int64))


def _reason(error: Exception) -> str:
  """TensorStore's message in a few words."""
  text = " ".join(str(error).split())
  if "Digest mismatch" in text or "CRC-32C" in text:
    return "fails its own checksum"
  if text.startswith("NOT_FOUND"):
    return "is missing"
  return text if len(text) <= _REASON_LENGTH else f"...{text[-_REASON_LENGTH:]}"
