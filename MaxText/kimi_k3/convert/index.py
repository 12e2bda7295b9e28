"""A released checkpoint as its headers describe it, checked before any tensor is read.

`open_source` reads config.json, model.safetensors.index.json and the header of every shard: what is stored under which
name, with what dtype and shape, at which byte of which file. Headers must tile their files exactly and agree with the
index, so a truncated download or a mixed-up directory fails here, within seconds, with the file named. Without an
index every *.safetensors file of the directory counts.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import hashlib
import json
import math
import os
import socket
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from kimi_k3.convert.faults import refuse_any
from kimi_k3.errors import InputError

INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8  # A safetensors file starts with the length of its header, little endian.
SAMPLES, SAMPLE_BYTES = 16, 1024  # Of each shard's data: enough to tell another training of the same shapes.
MAX_HEADER_BYTES = 100_000_000  # The limit of the safetensors library: a longer one means the file is something else.
MAX_JSON_BYTES = 256 * 1024 * 1024  # 256 MiB: four times the index of K3.
# What no checkpoint has, and what would make a message unreadable, a product unprintable or a walk overflow the stack.
MAX_KEY_LENGTH = 512  # characters
MAX_DIGITS = 20  # of an integer: 64 bits and a sign
MAX_AXES = 32  # of a tensor
MAX_NESTING = 32  # levels in config.json
_SHOWN = 80  # characters of a value that a message quotes

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


class ShardError(InputError):
  """A shard cannot be read any more, or is not what it was."""


class Shard(NamedTuple):
  """A file of a checkpoint as it was when its header was read.

  Attributes:
    name: Below the checkpoint's directory.
    size: In bytes.
    modified: Time of its last modification, in nanoseconds.
    header: Hex SHA-256 of its header, the length before it included.
    header_bytes: Of both.
  """

  name: str
  size: int
  modified: int
  header: str
  header_bytes: int


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
  shards: Mapping[str, Shard] = dataclasses.field(default_factory=dict)
  notes: tuple[str, ...] = ()  # What is odd but does no harm, for people to read.
  _files: _OpenFiles = dataclasses.field(default_factory=_OpenFiles, repr=False, compare=False)

  def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Returns rows `start` to `stop` of a tensor, along its first axis, as stored. Safe to call from several threads.

    Raises:
      InputError: if the file cannot be read or no longer holds them.
    """
    tensor = self.tensors[name]
    shape = tensor.shape
    if shape and (start, stop) != (0, None):
      start, stop, _ = slice(start, stop).indices(shape[0])
      row = tensor.nbytes // shape[0]
      return self._read(tensor, start * row, (stop - start) * row).reshape(stop - start, *shape[1:])
    return self._read(tensor, 0, tensor.nbytes).reshape(shape)

  def _read(self, tensor: StoredTensor, offset: int, nbytes: int) -> np.ndarray:
    data = np.empty(nbytes, np.uint8)
    self._read_into(tensor, offset, memoryview(data))
    return data.view(DTYPES[tensor.dtype])

  def _read_into(self, tensor: StoredTensor, offset: int, data: memoryview) -> None:
    done = 0
    try:
      descriptor = self._files.get(self.directory / tensor.shard)
      while done < len(data):  # One call moves at most 2 GiB.
        count = os.preadv(descriptor, [data[done:]], tensor.offset + offset + done)
        if count == 0:
          raise ShardError(
            f"{tensor.shard}: ends inside {tensor.name}, which it held when opened: was the file changed?"
          )
        done += count
    except OSError as error:
      raise ShardError(f"{tensor.shard}: {tensor.name} cannot be read ({error.strerror})") from error

  def blocks(self, name: str, block_bytes: int) -> Iterator[memoryview]:
    """Yields a tensor's stored bytes, at most `block_bytes` at a time. A block is good until the next one.

    Raises:
      InputError: if the file cannot be read or no longer holds them.
    """
    tensor, buffer = self.tensors[name], bytearray(min(block_bytes, self.tensors[name].nbytes))
    for start in range(0, tensor.nbytes, block_bytes):
      block = memoryview(buffer)[: min(block_bytes, tensor.nbytes - start)]
      self._read_into(tensor, start, block)
      yield block

  def check_unchanged(self, shard: str) -> None:
    """Raises InputError if a file is not the one whose header was read."""
    found, path = self.shards[shard], self.directory / shard
    try:
      status = path.stat()
    except OSError as error:
      raise ShardError(f"{shard}: cannot be read any more ({error.strerror})") from error
    if (status.st_size, status.st_mtime_ns) != (found.size, found.modified):
      raise ShardError(f"{shard}: changed while it was read: start again when nothing writes to {self.directory}")

  def sample(self) -> str:
    """Returns a hex digest of a few bytes all over each shard: two trainings of one architecture share every header."""
    digest = hashlib.sha256()
    for shard in sorted({tensor.shard for tensor in self.tensors.values()}):
      digest.update(self._sampled(shard))
    return digest.hexdigest()

  def stamp(self, shard: str) -> str:
    """Returns what tells one state of a shard from another; compare two by `same_state`.

    That is its size, the time of its last modification, a digest of a few bytes, and whose clock that time is of.
    """
    found, clock = self.shards[shard], f"{socket.gethostname()}:{self.directory.resolve()}"
    digests = (hashlib.sha256(data).hexdigest()[:16] for data in (self._sampled(shard), os.fsencode(clock)))
    return "-".join((str(found.size), str(found.modified), *digests))

  def _sampled(self, shard: str) -> bytes:
    try:
      descriptor = self._files.get(self.directory / shard)
      size = os.fstat(descriptor).st_size
      return b"".join(os.pread(descriptor, SAMPLE_BYTES, (2 * i + 1) * size // (2 * SAMPLES)) for i in range(SAMPLES))
    except OSError as error:
      raise ShardError(f"{shard}: cannot be read ({error.strerror})") from error

  def close(self) -> None:
    """Closes the shards that were read."""
    self._files.close()

  def __enter__(self) -> Source:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def same_state(one: str, other: str) -> bool:
  """Whether two stamps say that a shard is the same.

  Of one directory on one machine everything must be equal. Copies on several machines have times of their own.
  """
  a, b = one.split("-"), other.split("-")
  return one == other or (len(a) == len(b) == 4 and a[3] != b[3] and (a[0], a[2]) == (b[0], b[2]))


def open_source(directory: str | Path) -> Source:
  """Returns the checkpoint in `directory`.

  Raises:
    InputError: if a file is missing, broken, truncated, no regular file or outside the directory, or if index and
      shards disagree. A link to a file is followed, as in a Hugging Face cache.
  """
  directory = Path(directory)
  try:
    there = directory.is_dir()
  except OSError as error:
    raise InputError(f"{directory}: cannot be read ({error.strerror})") from error
  if not there:
    raise InputError(f"{directory}: no such directory, expected a checkpoint with config.json and *.safetensors")
  config_bytes = _file_bytes(directory / "config.json")
  config = _json_object(config_bytes, "config.json")
  _check_nesting(config)
  weight_map, total_size = _read_index(directory)
  shards = sorted(set(weight_map.values())) if weight_map is not None else _shards_without_index(directory)
  headers = _read_shards(directory, shards)
  tensors = {tensor.name: tensor for _, held in headers for tensor in held}
  notes = () if weight_map is None else _check_index(directory, weight_map, total_size, tensors.values())
  return Source(directory, config, config_bytes, tensors, {shard.name: shard for shard, _ in headers}, notes)


def _open_file(path: Path) -> BinaryIO:
  """Opens a regular file. Any other kind is an error: a pipe would wait for a writer for ever, a device has no end."""
  if path.is_symlink() and not path.exists():
    raise OSError(errno.ENOENT, f"a link to {_printable(str(path.readlink()))}, which is not there")
  mode = path.stat().st_mode
  if not stat.S_ISREG(mode):
    kind = "a directory" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
    raise OSError(errno.EINVAL, f"{kind}, expected a file")
  # Without waiting, should it have become a pipe just now.
  return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def _file_bytes(path: Path) -> bytes:
  try:
    with _open_file(path) as file:
      size = os.fstat(file.fileno()).st_size
      if size > MAX_JSON_BYTES:
        raise InputError(f"{path}: {size} bytes, expected at most {MAX_JSON_BYTES}: download it again")
      return file.read(size)
  except OSError as error:
    raise InputError(f"{path}: cannot be read ({error.strerror}), expected in every checkpoint") from error


def _shown(value: Any) -> str:
  """The start of an untrusted value, for a message."""
  try:
    return ascii(value)[:_SHOWN]
  except RecursionError:
    return f"a {type(value).__name__} nested too deep to show"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """A JSON object with plain keys, none of them twice: the parser would keep the last without a word."""
  result = dict(pairs)
  if len(result) != len(pairs):
    twice = sorted(name for name, count in collections.Counter(name for name, _ in pairs).items() if count > 1)
    raise ValueError(f"key(s) {', '.join(_shown(name) for name in twice[:3])} given twice")
  odd = [name for name in result if len(name) > MAX_KEY_LENGTH or not name.isprintable()]
  if odd:
    raise ValueError(f"key(s) {', '.join(_shown(name) for name in odd[:3])}: too long, or not printable")
  return result


def _too_large(digits: str) -> int:
  raise ValueError(f"an integer of {len(digits)} digits")


# A lambda, which the type checker of the tests leaves alone: the headers of K3 hold two million integers.
_integer = lambda digits: int(digits) if len(digits) <= MAX_DIGITS else _too_large(digits)  # noqa: E731


def _no_number(name: str) -> float:
  raise ValueError(f"{name} is no JSON")


def _json_object(data: bytes, what: str) -> dict[str, Any]:
  try:
    value = json.loads(data, object_pairs_hook=_unique, parse_int=_integer, parse_constant=_no_number)
  except (ValueError, RecursionError) as error:
    raise InputError(f"{what}: not valid JSON ({str(error) or 'nested too deep'}), download it again") from error
  if not isinstance(value, dict):
    raise InputError(f"{what}: holds a JSON {type(value).__name__}, expected an object")
  return value


def _check_nesting(config: Mapping[str, Any]) -> None:
  """Whoever prints or walks a value of config.json may recurse. Of headers and index only flat values are used."""
  values: list[Any] = [config]
  for _ in range(MAX_NESTING):
    values = [
      child for value in values for child in (value.values() if isinstance(value, dict) else value)
      if isinstance(child, dict | list)
    ]  # fmt: skip
    if not values:
      return
  raise InputError(f"config.json: nested deeper than {MAX_NESTING} levels, expected a released config")


def _read_index(directory: Path) -> tuple[dict[str, str] | None, Any]:
  """Shard by tensor name and the total size of all tensors as the index says it; None for what is not said."""
  if not os.path.lexists(directory / INDEX_FILE):  # A dangling link is an index that cannot be read.
    return None, None
  content = _json_object(_file_bytes(directory / INDEX_FILE), INDEX_FILE)
  weight_map, metadata = content.get("weight_map"), content.get("metadata")
  if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
    raise InputError(f"{INDEX_FILE}: weight_map is missing or not an object of file names, expected one entry a tensor")
  if not weight_map:
    raise InputError(f"{INDEX_FILE}: weight_map is empty, expected one entry a tensor")
  outside = [_shown(shard) for shard in sorted(set(weight_map.values())) if not _is_plain(shard)]
  refuse_any(
    outside,
    f"{INDEX_FILE} names file(s) with a path, maybe outside the checkpoint directory, expected plain names of shards",
  )
  _check_names_of_shards(directory, set(weight_map.values()))
  if metadata is not None and not isinstance(metadata, dict):
    raise InputError(f"{INDEX_FILE}: metadata is {_shown(metadata)}, expected an object")
  return weight_map, (metadata or {}).get("total_size")


def _is_plain(shard: str) -> bool:
  """Whether it names a file of the directory itself. The file may be a link, as in a Hugging Face cache."""
  return (
    shard not in ("", ".", "..") and shard == Path(shard).name and shard.isprintable() and len(shard) <= MAX_KEY_LENGTH
  )


def _check_names_of_shards(directory: Path, named: set[str]) -> None:
  """Refuses an index of another release, which names files that are not there and none of some that are."""
  there = {path.name for path in directory.glob("*.safetensors")}
  missing, unnamed = sorted(named - {path.name for path in directory.iterdir()}), sorted(there - named)
  if missing and unnamed:
    faults = [f"{shard}: named by the index, not there" for shard in missing]
    faults += [f"{shard}: not named by the index" for shard in map(_printable, unnamed)]
    refuse_any(faults, f"{INDEX_FILE} and the shards are not of the same release; download both again")


def _printable(name: str) -> str:
  """The name of a file, which may hold any byte."""
  return name if name.isprintable() else ascii(name)


def _shards_without_index(directory: Path) -> list[str]:
  shards = sorted(path.name for path in directory.glob("*.safetensors"))
  if not shards:
    raise InputError(f"{directory}: neither {INDEX_FILE} nor any *.safetensors file, expected a released checkpoint")
  odd = [_shown(shard) for shard in shards if not _is_plain(shard)]
  refuse_any(odd, "file name(s) that are too long or not printable, expected names as released")
  return shards


def _read_shards(directory: Path, shards: Iterable[str]) -> list[tuple[Shard, list[StoredTensor]]]:
  """All shards with their tensors. Lists every shard that is at fault and every tensor stored twice."""
  read, faults = [], []
  for shard in shards:
    try:
      read.append(read_header(directory, shard))
    except InputError as error:
      faults.append(str(error))
  refuse_any(faults, "download the named file(s) again")
  holders = collections.defaultdict(list)
  for shard, tensors in read:
    for tensor in tensors:
      holders[tensor.name].append(shard.name)
  twice = [f"{name}: stored in {' and in '.join(held)}" for name, held in holders.items() if len(held) > 1]
  refuse_any(twice, "each tensor must stand in exactly one shard; remove the files that do not belong here")
  return read


def read_header(directory: Path, shard: str) -> tuple[Shard, list[StoredTensor]]:
  """Returns one safetensors file and its tensors, from its header alone.

  Raises:
    InputError: if the header is no safetensors header, or does not tile the rest of the file exactly.
  """
  try:
    with _open_file(directory / shard) as file:
      status = os.fstat(file.fileno())
      prefix = file.read(LENGTH_BYTES)
      length, size = int.from_bytes(prefix, "little"), status.st_size
      if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise InputError(
          f"{shard}: header of {length} bytes declared, the file has {size}: truncated or no safetensors"
        )
      header = file.read(length)
  except OSError as error:
    raise InputError(f"{shard}: cannot be read ({error.strerror})") from error
  entries = _json_object(header, f"{shard}: header")
  metadata = entries.pop("__metadata__", {})
  if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
    raise InputError(f"{shard}: header: __metadata__ is {_shown(metadata)}, expected an object of strings")
  start = LENGTH_BYTES + length
  tensors = [_stored_tensor(name, entry, shard, start) for name, entry in entries.items()]
  _check_tiling(shard, tensors, start, size)
  return Shard(shard, size, status.st_mtime_ns, hashlib.sha256(prefix + header).hexdigest(), start), tensors


def _is_sizes(value: Any) -> bool:
  return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _stored_tensor(name: str, entry: Any, shard: str, start: int) -> StoredTensor:
  if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
    raise InputError(f"{shard}: {name}: expected an entry with dtype, shape and data_offsets, found {_shown(entry)}")
  dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
  if not isinstance(dtype, str) or dtype not in DTYPES:
    raise InputError(f"{shard}: {name}: unknown dtype {_shown(dtype)}, expected one of {', '.join(DTYPES)}")
  if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2 or len(shape) > MAX_AXES:
    raise InputError(
      f"{shard}: {name}: shape {_shown(shape)} and data_offsets {_shown(offsets)}, expected lists of sizes"
    )
  nbytes, expected = offsets[1] - offsets[0], math.prod(shape) * DTYPES[dtype].itemsize
  if nbytes != expected:
    raise InputError(f"{shard}: {name}: {nbytes} bytes declared, {dtype} {_shown(shape)} takes {expected}")
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


def _check_index(
  directory: Path, weight_map: Mapping[str, str], total_size: Any, tensors: Iterable[StoredTensor]
) -> tuple[str, ...]:
  """Refuses an index that names other tensors than the shards hold; returns a note on a total that is not theirs."""
  stored = {tensor.name: tensor.shard for tensor in tensors}
  unnamed = sorted({path.name for path in directory.glob("*.safetensors")} - set(weight_map.values()))
  faults = [f"{_printable(name)}: not named by the index" for name in unnamed]
  faults += _disagreements(weight_map, stored)
  refuse_any(faults, f"{INDEX_FILE} and the shards must name the same tensors; are both of the same release?")
  nbytes = sum(tensor.nbytes for tensor in tensors)
  if total_size is None or (total_size == nbytes and not isinstance(total_size, bool)):
    return ()
  # Nothing depends on it, and not every tool that writes an index counts bytes.
  return (f"{INDEX_FILE}: metadata.total_size is {_shown(total_size)}, the tensors of the shards have {nbytes} bytes",)


def _disagreements(weight_map: Mapping[str, str], stored: Mapping[str, str]) -> Iterator[str]:
  for name, shard in weight_map.items():
    if name not in stored:
      yield f"{name}: in the index, but not in {shard}"
    elif stored[name] != shard:
      yield f"{name}: the index says {shard}, found in {stored[name]}"
  for name, shard in stored.items():
    if name not in weight_map:
      yield f"{name}: in {shard}, but not in the index"
