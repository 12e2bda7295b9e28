"""A finished conversion, read back: what its record says it is, and what its arrays hold.

Everything is read through TensorStore or `store`, so a bucket's URL works as a directory does. A chunk that is missing
or that fails its own checksum is an error: by itself TensorStore would return zeros for a missing one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import threading
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (numpy learns the name bfloat16 from it)
import numpy as np
import tensorstore as ts

from kimi_k3 import checksums
from kimi_k3.config import KimiK3Config
from kimi_k3.convert import appear, chunks, mapping, output, store, unfinished
from kimi_k3.convert.faults import listed
from kimi_k3.convert.mapping import Leaf, Shape, StoredForm
from kimi_k3.convert.write import KEY_PREFIX, leaf_name
from kimi_k3.errors import InputError

NODE_CACHE_BYTES = 64 * 1024 * 1024  # 64 MiB: OCDBT's index; half a million keys take some 30 MB of nodes.
_ARRAY_FILE = "zarr.json"
_REASON_LENGTH = 160  # characters of TensorStore's message, which names the file at every level and the reason last
_NODES = 16  # Of that index, read at a time where all are looked at: some MB each, decoded.
_AGAIN = "convert again"


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
class Output:
  """A finished conversion. Nothing is ever written to it.

  Attributes:
    path: Local path or URL.
    record: conversion.json.
    record_bytes: As it stands there.
    hf_config: config.json, the source's.
    config_bytes: As it stands there.
    config: Of the model, as it is stored here.
    form: How the source stored its tensors.
    scan: Whether layers are folded.
    leaves: What the record and the config imply, in the order of the model.
  """

  path: str
  record: Mapping[str, Any]
  record_bytes: bytes
  hf_config: Mapping[str, Any]
  config_bytes: bytes
  config: KimiK3Config
  form: StoredForm
  scan: bool
  leaves: tuple[Leaf, ...]
  _context: ts.Context = dataclasses.field(repr=False, compare=False)
  _opened: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
  _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False, compare=False)

  @property
  def options(self) -> Mapping[str, Any]:
    """What convert was told: scan, experts, dense."""
    return self.record["options"]

  def file(self, name: str) -> bytes | None:
    """Returns a file beside the arrays; None if there is none."""
    return _read(store.open_store(self.path), name)

  @functools.cached_property
  def arrays(self) -> Arrays:
    """All arrays that are there, from a listing of the database's keys and each array's own metadata.

    Raises:
      InputError: if the index of the database cannot be read.
    """
    try:
      kvstore = ts.KvStore.open(self._kvstore(""), context=self._context).result()
      keys = kvstore.list().result()
      by_name, strays = _grouped(keys)
      pending = {name: kvstore.read(_key(name) + _ARRAY_FILE) for name in by_name}
      found = {name: _settled(future) for name, future in pending.items()}
    except (ValueError, OSError) as error:
      raise UnreadableError(
        f"{self._items}: the index of its keys cannot be read ({_reason(error)}): a file is damaged, missing or of "
        f"another conversion; {_AGAIN}"
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
    local = {"driver": "file", "path": f"{self._items}/"}
    ends: dict[str, int] = {}
    try:
      base = ts.KvStore.open(f"{self._items}/" if store.is_url(self._items) else local, context=self._context).result()
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
      raise UnreadableError(f"{self._items}: the index of its keys cannot be read ({error}); {_AGAIN}") from error
    return ends

  def data_faults(self) -> list[str]:
    """Returns which files of the database are missing or end too early; of a bucket only which are missing."""
    sizes = store.open_store(self.path).sizes(f"{unfinished.ITEMS}/")
    faults = []
    for name, end in sorted(self.data_ends().items()):
      path = f"{unfinished.ITEMS}/{name}"
      size = sizes.get(path)
      if path not in sizes:
        faults.append(f"{path}: missing, {end:,} bytes of data expected")
      elif size is not None and size < end:
        faults.append(f"{path}: {size:,} bytes, at least {end:,} expected: cut short")
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
    """Returns the part of a leaf that a chunk covers, `chunk.shape` large. Raises as `read`."""
    steps = chunks.chunk_shape(leaf)
    starts = [i * step for i, step in zip(chunk.index, steps, strict=True)]
    return self.read(leaf_name(leaf), tuple(slice(a, a + n) for a, n in zip(starts, chunk.shape, strict=True)))

  @property
  def _items(self) -> str:
    return store.in_directory(self.path, unfinished.ITEMS)

  def _kvstore(self, path: str) -> dict[str, Any]:
    # TensorStore takes no local path with `..` in it.
    local = {"driver": "file", "path": f"{self._items}/"}
    base = f"{self._items}/" if store.is_url(self._items) else local
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


def open_output(out: str | Path) -> Output:
  """Returns the finished conversion at a local path or a URL. Its arrays are not looked at yet.

  Raises:
    InputError: if there is none, if it is unfinished or of another schema, or if its record or config is damaged.
  """
  path = str(out)
  if not store.is_url(path):
    path = str(appear.local(path))
    _check_utf8(path)
  where, held = str(out), store.open_store(path)
  _refuse_unfinished(where, path, held)
  record_bytes = _read(held, output.RECORD)
  if record_bytes is None:
    _refuse_missing(where, path, held)
  assert record_bytes is not None
  record = _record(where, record_bytes)
  missing = [name for name in unfinished.MARKERS if _read(held, name) is None] if record["commit"] == "marker" else []
  if missing:
    raise InputError(
      f"{where}: commit marker {' and '.join(missing)} missing: an unfinished conversion or a copy of a part; {_AGAIN}"
    )
  config_bytes = _read(held, "config.json")
  if config_bytes is None:
    raise InputError(f"{where}: config.json is missing, expected in every conversion; {_AGAIN}")
  hf_config = _json_object(f"{where}/config.json", config_bytes)
  with _malformed(f"{where}: {output.RECORD}"):
    config, form = _stored_config(hf_config, record)
    scan = bool(record["options"]["scan"])
    leaves = mapping.leaves(config, form, scan=scan)
  context = ts.Context({"cache_pool": {}, "cache_pool#nodes": {"total_bytes_limit": NODE_CACHE_BYTES}})
  return Output(path, record, record_bytes, hf_config, config_bytes, config, form, scan, leaves, context)


def _check_utf8(path: str) -> None:
  try:
    path.encode()
  except UnicodeEncodeError as error:
    raise InputError(f"{path!a}: a path that is not UTF-8, which TensorStore does not take: rename it") from error


def _refuse_unfinished(where: str, path: str, held: store.Store) -> None:
  if path.rstrip("/").endswith(unfinished.PARTIAL_SUFFIX):
    raise InputError(f"{where}: an unfinished conversion by its name; run the same `kimi-k3 convert` again")
  state = unfinished.STATE_DIRECTORY
  if _read(held, f"{state}/{unfinished.PLAN}") is not None:
    raise InputError(f"{where}: holds {state}: an unfinished conversion; run the same `kimi-k3 convert` again")


def _refuse_missing(where: str, path: str, held: store.Store) -> None:
  """Says what is there in the place of a conversion."""
  if not held.exists():
    partial = path.rstrip("/") + unfinished.PARTIAL_SUFFIX
    if store.open_store(partial).exists():
      raise InputError(f"{where}: unfinished, {partial} is there; run the same `kimi-k3 convert` again")
    raise InputError(f"{where}: nothing there, expected what `kimi-k3 convert SRC OUT` made")
  raise InputError(f"{where}: no {output.RECORD}, expected what `kimi-k3 convert SRC OUT` made")


def _read(held: store.Store, name: str) -> bytes | None:
  try:
    return held.read(name)
  except OSError as error:
    raise InputError(f"{held.url}/{name}: cannot be read ({error.strerror}): check the disk and permissions") from error


def _json_object(what: str, data: bytes) -> dict[str, Any]:
  try:
    value = json.loads(data)
  except (ValueError, RecursionError) as error:
    raise InputError(f"{what}: damaged, not JSON ({str(error)[:_REASON_LENGTH]}); {_AGAIN}") from error
  if not isinstance(value, dict):
    raise InputError(f"{what}: damaged, a JSON {type(value).__name__} where an object was expected; {_AGAIN}")
  return value


def _record(where: str, data: bytes) -> dict[str, Any]:
  """conversion.json, after a check of its schema and of every field that is used."""
  record = _json_object(f"{where}/{output.RECORD}", data)
  if record.get("schema") != output.SCHEMA:
    raise InputError(
      f"{where}: made by version {record.get('version', 'unknown')} with schema {record.get('schema')!r}, this version "
      f"reads schema {output.SCHEMA}: {_AGAIN}"
    )
  faults = [
    f"{field} is {str(_at(record, field))[:40]}" for field, kind in _FIELDS.items() if not _is(record, field, kind)
  ]
  if faults:
    raise InputError(f"{where}: {output.RECORD} is damaged ({listed(faults)}); {_AGAIN}")
  return record


_FIELDS: Mapping[str, type] = {
    "source": dict, "source.fingerprint": str, "source.sample": str, "source.shards": dict, "options": dict,
    "options.scan": bool, "options.experts": str, "options.dense": str, "stored": dict, "stored.prefix": str,
    "stored.packed_modules": list, "stored.a_log_shape": list, "stored.float32_leaves": list, "packed_modules": list,
    "fp8_modules": list, "leaves": int, "bytes": int, "commit": str, checksums.FIELD: dict,
    checksums.CHUNKS_FIELD: dict,
}  # fmt: skip


def _at(record: Mapping[str, Any], field: str) -> Any:
  value: Any = record
  for key in field.split("."):
    value = value.get(key) if isinstance(value, Mapping) else None
  return value


def _is(record: Mapping[str, Any], field: str, kind: type) -> bool:
  value = _at(record, field)
  return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


@contextlib.contextmanager
def _malformed(what: str) -> Iterator[None]:
  """Around what is made of a record: a field of a wrong kind inside it is no fault of ours."""
  try:
    yield
  except InputError:
    raise
  except (KeyError, TypeError, ValueError, IndexError) as error:
    raise InputError(f"{what} is damaged ({error!r}); {_AGAIN}") from error


def _stored_config(hf_config: Mapping[str, Any], record: Mapping[str, Any]) -> tuple[KimiK3Config, StoredForm]:
  """The config of what is stored in OUT, and how its source stored it."""
  stored = record["stored"]
  form = StoredForm(
    prefix=stored["prefix"],
    packed_modules=tuple(stored["packed_modules"]),
    a_log_shape=tuple(stored["a_log_shape"]),
  )
  source = KimiK3Config.from_hf(
    hf_config, packed_modules=form.packed_modules, float32_leaves=tuple(stored["float32_leaves"])
  )
  here = {"packed_modules": tuple(record["packed_modules"]), "fp8_modules": tuple(record["fp8_modules"])}
  return dataclasses.replace(source, **here), form


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
