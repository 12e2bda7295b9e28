"""A checkpoint in the released layout, planned to the byte: what is in which shard, and whether it may appear.

Everything is decided before anything is written: which tensor stands at which byte of which shard, and that the whole
is a checkpoint that `convert` takes. `export` and `trained` fill the shards, each in the order that suits its source.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kimi_k3.convert import appear, index, plan, store
from kimi_k3.convert.beside import Beside
from kimi_k3.convert.faults import listed
from kimi_k3.convert.index import DTYPES, INDEX_FILE, LENGTH_BYTES, MAX_HEADER_BYTES, Source, StoredTensor
from kimi_k3.convert.mapping import Leaf, Piece, Shape
from kimi_k3.convert.progress import say
from kimi_k3.errors import InputError

DEFAULT_SHARD_BYTES = 5_000_000_000  # As the libraries that read shards write them.
STATE_FILE = "export.json"  # in HF_DIR.partial: what is being exported
METADATA_KEY = "kimi_k3_export"  # in the index: what was
_ALIGNMENT = 8  # A header is padded with spaces to a multiple of this, as the safetensors library does.


class Tensor(NamedTuple):
  """One tensor of a shard and where it comes from: a piece of a leaf, or with neither the vision source.

  Attributes:
    name: As released.
    dtype: As safetensors spells it.
    shape: As released.
    leaf: In OUT.
    piece: Of the leaf.
    offset: In the shard's file.
  """

  name: str
  dtype: str
  shape: Shape
  leaf: Leaf | None
  piece: Piece | None
  offset: int = 0

  @property
  def nbytes(self) -> int:
    """Size of its data."""
    return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Shard(NamedTuple):
  """A file to write: its header, the length before it included, and what follows."""

  name: str
  header: bytes
  tensors: tuple[Tensor, ...]

  @property
  def size(self) -> int:
    """Bytes of the file."""
    return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
  """A checkpoint in the released layout that is going to be written.

  Attributes:
    shards: In the order of the model.
    files: Small files by name, the index and config.json among them.
    identity: What decides the result.
    places: Local directories that are read from, or that what is read was made from.
  """

  shards: tuple[Shard, ...]
  files: Mapping[str, bytes]
  identity: Mapping[str, Any]
  places: tuple[Path, ...]

  @property
  def nbytes(self) -> int:
    """Of all shards."""
    return sum(shard.size for shard in self.shards)

  @property
  def num_tensors(self) -> int:
    """Of all shards."""
    return sum(len(shard.tensors) for shard in self.shards)


def limit_of(tensors: Sequence[Tensor], shard_bytes: int) -> int:
  """Returns what `shard_bytes` comes to: no shard is larger than all tensors, so a larger limit is none."""
  return min(shard_bytes, sum(tensor.nbytes for tensor in tensors))


def plan_shards(tensors: Sequence[Tensor], shard_bytes: int) -> tuple[Shard, ...]:
  """Returns the shards of these tensors, in their order.

  Args:
    tensors: Whose place in a shard is not decided yet.
    shard_bytes: Of the tensors of a shard; one larger tensor has a shard of its own.

  Raises:
    InputError: if a shard would have a larger header than readers take.
  """
  groups: list[list[Tensor]] = []
  size = shard_bytes + 1
  for tensor in tensors:
    if size + tensor.nbytes > shard_bytes or not groups:
      groups.append([])
      size = 0
    groups[-1].append(tensor)
    size += tensor.nbytes
  return tuple(_shard(number, len(groups), group) for number, group in enumerate(groups, 1))


def _shard(number: int, count: int, group: Sequence[Tensor]) -> Shard:
  # Wide types first, so that each tensor is aligned to its own type.
  ordered = sorted(group, key=lambda tensor: -DTYPES[tensor.dtype].itemsize)
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  at = 0
  for tensor in ordered:
    header[tensor.name] = {
      "dtype": tensor.dtype,
      "shape": list(tensor.shape),
      "data_offsets": [at, at + tensor.nbytes],
    }
    at += tensor.nbytes
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % _ALIGNMENT)
  if len(text) > MAX_HEADER_BYTES:
    raise InputError(
      f"--shard-size: {len(group):,} tensors in one shard, a header of {len(text):,} bytes, expected at most "
      f"{MAX_HEADER_BYTES:,}: give a smaller size"
    )
  whole = len(text).to_bytes(LENGTH_BYTES, "little") + text
  placed = [tensor._replace(offset=len(whole) + header[tensor.name]["data_offsets"][0]) for tensor in ordered]
  return Shard(f"model-{number:05d}-of-{count:06d}.safetensors", whole, tuple(placed))


def index_file(shards: Sequence[Shard], identity: Mapping[str, Any]) -> bytes:
  """Returns the index of the shards, with what decided them."""
  total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
  weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
  content = {"metadata": {"total_size": total, METADATA_KEY: dict(identity)}, "weight_map": weight_map}
  return json.dumps(content, indent=2).encode() + b"\n"


def check_plan(config: bytes, shards: Sequence[Shard]) -> None:
  """What is going to be written must be a checkpoint that `convert` takes, before anything is."""
  tensors = {
    t.name: StoredTensor(t.name, t.dtype, t.shape, s.name, t.offset, t.nbytes) for s in shards for t in s.tensors
  }
  plan.make_plan(Source(Path(), json.loads(config), config, tensors), plan.Options())


def check_target(target: str | Path, export: Release, *, overwrite: bool) -> bool:
  """Returns whether `target` already holds this very export, complete, so that nothing is to be written.

  Raises:
    InputError: if it holds anything that must not be replaced, or lies in OUT or in a source (or these in it), or if
      anything but an unfinished export stands beside it.
  """
  if store.is_url(str(target)):
    raise InputError(f"{target}: HF_DIR is a local directory, no URL")
  here = appear.local(target)
  for other in export.places:
    if here.is_relative_to(other) or other.is_relative_to(here):
      raise InputError(f"{target}: the same as {other} or inside each other, choose another HF_DIR")
  if Path(target).is_symlink() or (here.exists() and not here.is_dir()):
    raise InputError(f"{target}: not a directory, choose another HF_DIR")
  place = Beside(here, STATE_FILE, "export")
  place.check()
  if not here.exists() or not any(here.iterdir()):
    return False
  found = _identity_of(here)
  if found is None:
    raise InputError(f"{target}: holds files, but no export: never overwritten; choose another HF_DIR")
  fault = _incomplete(here, export) if found == export.identity else ""
  if found == export.identity and not fault and (place.committed() or not overwrite):
    return True
  if not overwrite and fault:
    raise InputError(f"{target}: holds this export, but {fault}; give --overwrite to write it anew")
  if not overwrite:
    raise InputError(f"{target}: holds another export; give --overwrite to replace it or choose another HF_DIR")
  return False


def _incomplete(target: Path, export: Release) -> str:
  """What of this export is missing or differs, as far as that shows without reading shards; empty for nothing."""
  faults = [shard.name for shard in export.shards if file_size(target / shard.name) != shard.size]
  for name, data in export.files.items():
    if file_size(target / name) != len(data) or (target / name).read_bytes() != data:
      faults.append(name)
  return f"{listed(faults)} is missing or not what was written" if faults else ""


def _identity_of(directory: Path) -> Any:
  """What an export says of itself in its index; None if there is none."""
  try:
    return json.loads((directory / INDEX_FILE).read_bytes())["metadata"][METADATA_KEY]
  except (OSError, ValueError, KeyError, TypeError):
    return None


def file_size(path: Path) -> int | None:
  """Bytes of a file; None if there is none."""
  return path.stat().st_size if path.is_file() else None


def tidy(target: str | Path) -> None:
  """Removes what a kill right after the commit left beside a finished `target`."""
  Beside(appear.local(target), STATE_FILE, "export").tidy()


def check_space(place: Beside, nbytes: int) -> None:
  """Raises InputError if the disk has less than this left."""
  free = store.LocalStore(place.root).free()
  say(f"{place.root.parent}: {nbytes:,} bytes to write, {free:,} free")
  if free < nbytes:
    raise InputError(f"{place.root.parent}: {free:,} bytes free, the export takes {nbytes:,}: choose another HF_DIR")


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
  """Writes all of it at an offset of an open file. Safe to call from several threads."""
  view = memoryview(data)
  while view:  # One call moves at most 2 GiB.
    count = os.pwrite(descriptor, view, offset)
    view, offset = view[count:], offset + count


def check_result(directory: Path, planned: Release) -> None:
  """What was written must be a checkpoint that `convert` takes: config.json describes it, and nothing is missing."""
  with index.open_source(directory) as source:
    plan.make_plan(source, plan.Options())
    found = {name: _described(tensor) for name, tensor in source.tensors.items()}
  expected = {t.name: (t.dtype, t.shape, t.offset) for shard in planned.shards for t in shard.tensors}
  odd = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
  assert not odd, f"written otherwise than planned: {listed(odd)}"


def _described(tensor: StoredTensor) -> tuple[str, Shape, int]:
  return tensor.dtype, tensor.shape, tensor.offset
