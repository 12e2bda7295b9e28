"""A released checkpoint as its headers describe it, checked before any tensor is read.

`open_source` reads config.json, model.safetensors.index.json and the header of every shard: what is stored under which
name, with what dtype and shape, at which byte of which file. Headers must tile their files exactly and agree with the
index, so a truncated download or a mixed-up directory fails here, within seconds, with the file named. Without an
index every *.safetensors file of the directory counts.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kimi_k3.convert.faults import refuse_any
from kimi_k3.errors import InputError

INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8  # A safetensors file starts with the length of its header, little endian.
SAMPLES, SAMPLE_BYTES = 16, 1024  # Of each shard's data: enough to tell another training of the same shapes.
MAX_HEADER_BYTES = 100_000_000  # The limit of the safetensors library: a longer one means the file is something else.

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BOOL": np.dtype(np.bool_), "U8": np.dtype(np.uint8), "I8": np.dtype(np.int8), "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16), "U32": np.dtype(np.uint32), "I32": np.dtype(np.int32), "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
  """One tensor of a checkpoint: `dtype` as safetensors spells it, `shard` and `offset` say where its bytes start."""

  name: str
  dtype: str
  shape: tuple[int, ...]
  shard: str
  offset: int
  nbytes: int


class _OpenFiles:
  """File descriptors by shard, opened once: half a million opens are slow on a network file system."""

  def __init__(self) -> None:
    self._lock, self._descriptors = threading.Lock(), {}

  def get(self, path: Path) -> int:
    with self._lock:
      if path not in self._descriptors:
        self._descriptors[path] = os.open(path, os.O_RDONLY)
      return self._descriptors[path]

  def close(self) -> None:
    with self._lock:
      while self._descriptors:
        os.close(self._descriptors.popitem()[1])


@dataclasses.dataclass(frozen=True)
class Source:
  """A checkpoint directory in the released layout. Only `read` touches tensor data; nothing is ever written."""

  directory: Path
  config: Mapping[str, Any]
  config_bytes: bytes
  tensors: Mapping[str, StoredTensor]
  _files: _OpenFiles = dataclasses.field(default_factory=_OpenFiles, repr=False, compare=False)

  def read(self, name: str) -> np.ndarray:
    """Returns the tensor's stored bytes as an array of its dtype and shape. Safe to call from several threads."""
    tensor = self.tensors[name]
    data = np.empty(tensor.nbytes, np.uint8)
    descriptor, done = self._files.get(self.directory / tensor.shard), 0
    while done < tensor.nbytes:  # One call moves at most 2 GiB, less than an embedding table.
      count = os.preadv(descriptor, [memoryview(data)[done:]], tensor.offset + done)
      if count == 0:
        raise InputError(f"{tensor.shard}: ends inside {name}, which it held when opened: was the file changed?")
      done += count
    return data.view(DTYPES[tensor.dtype]).reshape(tensor.shape)

  def sample(self) -> str:
    """Returns a hex digest of a few bytes all over each shard: two trainings of one architecture share every header."""
    digest = hashlib.sha256()
    for shard in sorted({tensor.shard for tensor in self.tensors.values()}):
      descriptor = self._files.get(self.directory / shard)
      size = os.fstat(descriptor).st_size
      for i in range(SAMPLES):
        digest.update(os.pread(descriptor, SAMPLE_BYTES, (2 * i + 1) * size // (2 * SAMPLES)))
    return digest.hexdigest()

  def close(self) -> None:
    """Closes the shards that were read."""
    self._files.close()

  def __enter__(self) -> Source:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def open_source(directory: str | Path) -> Source:
  """Returns the checkpoint in `directory`.

  Raises:
    InputError: if a file is missing, broken, truncated or leaves the directory, or if index and shards disagree.
  """
  directory = Path(directory)
  if not directory.is_dir():
    raise InputError(f"{directory}: no such directory, expected a checkpoint with config.json and *.safetensors")
  config_bytes = _file_bytes(directory / "config.json")
  config = _json_object(config_bytes, "config.json")
  weight_map = _weight_map(directory)
  shards = sorted(set(weight_map.values())) if weight_map is not None else _shards_without_index(directory)
  tensors = _read_shards(directory, shards)
  if weight_map is not None:
    _check_index(directory, weight_map, tensors)
  return Source(directory, config, config_bytes, {t.name: t for t in tensors})


def _file_bytes(path: Path) -> bytes:
  try:
    return path.read_bytes()
  except OSError as error:
    raise InputError(f"{path}: cannot be read ({error.strerror}), expected in every checkpoint") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """A JSON object that must not name a key twice: the parser would keep the last without a word."""
  result = dict(pairs)
  if len(result) != len(pairs):
    twice = sorted(name for name, count in collections.Counter(name for name, _ in pairs).items() if count > 1)
    raise ValueError(f"key(s) {', '.join(twice[:3])} given twice")
  return result


def _json_object(data: bytes, what: str) -> dict[str, Any]:
  try:
    value = json.loads(data, object_pairs_hook=_unique)
  except (ValueError, RecursionError) as error:
    raise InputError(f"{what}: not valid JSON ({str(error) or 'nested too deep'}), download it again") from error
  if not isinstance(value, dict):
    raise InputError(f"{what}: holds a JSON {type(value).__name__}, expected an object")
  return value


def _weight_map(directory: Path) -> dict[str, str] | None:
  """Shard by tensor name, or None without an index."""
  if not (directory / INDEX_FILE).exists():
    return None
  weight_map = _json_object(_file_bytes(directory / INDEX_FILE), INDEX_FILE).get("weight_map")
  if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
    raise InputError(f"{INDEX_FILE}: weight_map is missing or not an object of file names, expected one entry a tensor")
  if not weight_map:
    raise InputError(f"{INDEX_FILE}: weight_map is empty, expected one entry a tensor")
  outside = [f"{shard!r}" for shard in sorted(set(weight_map.values())) if not _inside(directory, shard)]
  refuse_any(outside, f"{INDEX_FILE} names file(s) outside the checkpoint directory, expected plain names of shards")
  return weight_map


def _inside(directory: Path, shard: str) -> bool:
  """Whether a shard's path stays in the directory. The file itself may be a link, as in a Hugging Face cache."""
  path = Path(shard)
  if path.is_absolute() or ".." in path.parts or not path.name or "\0" in shard:
    return False
  return (directory / path).parent.resolve().is_relative_to(directory.resolve())


def _shards_without_index(directory: Path) -> list[str]:
  shards = sorted(path.name for path in directory.glob("*.safetensors"))
  if not shards:
    raise InputError(f"{directory}: neither {INDEX_FILE} nor any *.safetensors file, expected a released checkpoint")
  return shards


def _read_shards(directory: Path, shards: Iterable[str]) -> list[StoredTensor]:
  """All tensors of all shards. Lists every shard that is at fault and every tensor stored twice."""
  tensors, faults = [], []
  for shard in shards:
    try:
      tensors += read_header(directory, shard)
    except InputError as error:
      faults.append(str(error))
  refuse_any(faults, "download the named file(s) again")
  holders = collections.defaultdict(list)
  for tensor in tensors:
    holders[tensor.name].append(tensor.shard)
  twice = [f"{name}: stored in {' and in '.join(held)}" for name, held in holders.items() if len(held) > 1]
  refuse_any(twice, "each tensor must stand in exactly one shard; remove the files that do not belong here")
  return tensors


def read_header(directory: Path, shard: str) -> list[StoredTensor]:
  """Returns the tensors of one safetensors file, from its header alone.

  Raises:
    InputError: if the header is no safetensors header, or does not tile the rest of the file exactly.
  """
  try:
    size = (directory / shard).stat().st_size
    with open(directory / shard, "rb") as file:
      length = int.from_bytes(file.read(LENGTH_BYTES), "little")
      if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise InputError(
          f"{shard}: header of {length} bytes declared, the file has {size}: truncated or no safetensors"
        )
      header = file.read(length)
  except OSError as error:
    raise InputError(f"{shard}: cannot be read ({error.strerror})") from error
  entries = _json_object(header, f"{shard}: header")
  entries.pop("__metadata__", None)
  start = LENGTH_BYTES + length
  tensors = [_stored_tensor(name, entry, shard, start) for name, entry in entries.items()]
  _check_tiling(shard, tensors, start, size)
  return tensors


def _is_sizes(value: Any) -> bool:
  return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _stored_tensor(name: str, entry: Any, shard: str, start: int) -> StoredTensor:
  if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
    raise InputError(f"{shard}: {name}: expected an entry with dtype, shape and data_offsets, found {str(entry)[:80]}")
  dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
  if not isinstance(dtype, str) or dtype not in DTYPES:
    raise InputError(f"{shard}: {name}: unknown dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
  if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
    raise InputError(f"{shard}: {name}: shape {shape} and data_offsets {offsets}, expected lists of sizes")
  nbytes, expected = offsets[1] - offsets[0], math.prod(shape) * DTYPES[dtype].itemsize
  if nbytes != expected:
    raise InputError(f"{shard}: {name}: {nbytes} bytes declared, {dtype} {shape} takes {expected}")
  return StoredTensor(name, dtype, tuple(shape), shard, start + offsets[0], nbytes)


def _check_tiling(shard: str, tensors: list[StoredTensor], start: int, size: int) -> None:
  """The tensors must follow each other from the header to the end of the file, without gap, overlap or rest."""
  at, before = start, "the header"
  for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
    if tensor.offset != at:
      kind = "a gap" if tensor.offset > at else "an overlap"
      raise InputError(f"{shard}: {kind} of {abs(tensor.offset - at)} bytes between {before} and {tensor.name}")
    at, before = tensor.offset + tensor.nbytes, tensor.name
  if at != size:
    kind = "truncated" if at > size else "something was appended"
    raise InputError(f"{shard}: {at} bytes declared by its header, the file has {size}: {kind}")


def _check_index(directory: Path, weight_map: Mapping[str, str], tensors: Iterable[StoredTensor]) -> None:
  stored = {tensor.name: tensor.shard for tensor in tensors}
  unnamed = sorted({p.name for p in directory.glob("*.safetensors")} - {str(Path(s)) for s in weight_map.values()})
  faults = [f"{name}: not named by the index" for name in unnamed]
  faults += _disagreements(weight_map, stored)
  refuse_any(faults, f"{INDEX_FILE} and the shards must name the same tensors; are both of the same release?")


def _disagreements(weight_map: Mapping[str, str], stored: Mapping[str, str]) -> Iterator[str]:
  for name, shard in weight_map.items():
    if name not in stored:
      yield f"{name}: in the index, but not in {shard}"
    elif stored[name] != shard:
      yield f"{name}: the index says {shard}, found in {stored[name]}"
  for name, shard in stored.items():
    if name not in weight_map:
      yield f"{name}: in {shard}, but not in the index"
