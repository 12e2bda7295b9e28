"""A finished conversion back in the released layout: the same names, dtypes and bytes, in shards of a chosen size.

Everything is planned from the record first: which tensor stands at which byte of which shard. Then shards are written
one after the other, each by several workers, a chunk of OUT at a time: a chunk holds whole rows of a stored tensor,
which follow each other in the shard. A shard that is done is renamed; HF_DIR.partial becomes HF_DIR when all are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kimi_k3.config import text_config
from kimi_k3.convert import chunks, index, mapping, output, plan, storage, store, transforms, unfinished
from kimi_k3.convert.chunks import Chunk
from kimi_k3.convert.faults import listed, refuse_any
from kimi_k3.convert.index import DTYPES, INDEX_FILE, LENGTH_BYTES, Source, StoredTensor
from kimi_k3.convert.mapping import Leaf, Piece, Shape
from kimi_k3.convert.progress import Progress
from kimi_k3.convert.reader import Output, chunk_faults, differing_arrays
from kimi_k3.convert.transforms import Transform
from kimi_k3.convert.write import leaf_name, run_all
from kimi_k3.errors import InputError

DEFAULT_SHARD_BYTES = 5_000_000_000  # As the libraries that read shards write them.
STATE_FILE = "export.json"  # in HF_DIR.partial: what is being exported
METADATA_KEY = "kimi_k3_export"  # in the index: what was
_WRITER = 1  # Of the bytes: a shard of another writer is not kept.
_ALIGNMENT = 8  # A header is padded with spaces to a multiple of this, as the safetensors library does.
_COPY_BYTES = 64 * 1024 * 1024  # Of a vision tensor, read at a time.
_LOCK = "lock"
_DECODED_EXPERTS = r"re:.*\.experts\.\d+\.w[123]$"  # Matches no shared_experts, which may stay packed.


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
class Export:
  """An export, ready to be carried out.

  Attributes:
    out: What to export.
    vision: Where the vision tensors come from; None if they are not carried.
    shards: In the order of the model.
    files: Small files by name, the index and config.json among them.
    identity: What decides the result.
  """

  out: Output
  vision: Source | None
  shards: tuple[Shard, ...]
  files: Mapping[str, bytes]
  identity: Mapping[str, Any]

  @property
  def nbytes(self) -> int:
    """Of all shards."""
    return sum(shard.size for shard in self.shards)

  @property
  def num_tensors(self) -> int:
    """Of all shards."""
    return sum(len(shard.tensors) for shard in self.shards)


def plan_export(out: Output, vision: Source | None, *, shard_bytes: int = DEFAULT_SHARD_BYTES) -> Export:
  """Returns how to export a conversion.

  Args:
    out: The conversion.
    vision: The checkpoint it was made from, for its vision tensors; None leaves them out.
    shard_bytes: Of the tensors of a shard; one larger tensor has a shard of its own.

  Raises:
    InputError: if OUT holds rounded weights, which no release stores, or if `vision` is of another model.
  """
  _check_formats(out)
  _check_arrays(out)
  config = _config_bytes(out)
  tensors = [*_text_tensors(out), *(_vision_tensors(out, vision) if vision is not None else ())]
  shards = _shards(tensors, shard_bytes)
  identity = {
    "writer": _WRITER,
    "conversion": hashlib.sha256(out.record_bytes).hexdigest(),
    "vision": None if vision is None else [plan.fingerprint(vision), vision.sample()],
    "shard_bytes": shard_bytes,
  }
  files = {name: data for name in output.COPIED_FILES if (data := out.file(name)) is not None}
  files |= {"config.json": config, INDEX_FILE: _index(shards, identity)}
  _check_plan(config, shards)
  return Export(out=out, vision=vision, shards=shards, files=files, identity=identity)


def _check_formats(out: Output) -> None:
  rounded = {leaf.transform for leaf in out.leaves} & set(transforms.LOSSY) - {Transform.DECODE}
  if rounded:
    what = "FP8" if rounded & {Transform.FP8_CODES, Transform.FP8_SCALES} else "MXFP4"
    flags = " ".join(
      f"--{name} {out.options[name]}" for name in ("experts", "dense") if out.options[name] != "as-stored"
    )
    raise InputError(
      f"{out.path}: converted with {flags}: weights were rounded to {what}, the released ones cannot be given back; "
      "export the as-stored conversion"
    )


def _check_arrays(out: Output) -> None:
  """Everything that OUT must hold is there, before hours of writing."""
  arrays = out.arrays
  names = dict.fromkeys(leaf_name(leaf) for leaf in out.leaves)
  faults = [f"{name}: missing" for name in names if name not in arrays.held and name not in arrays.damaged]
  faults += [f"{name}: {reason}" for name, reason in (*arrays.damaged.items(), *chunk_faults(arrays).items())]
  faults += [f"{name}: {reason}" for name, reason in differing_arrays(out.leaves, arrays).items()]
  faults += [f"{name}: unexpected, the record implies no such leaf" for name in arrays.held if name not in names]
  refuse_any(faults, f"{out.path} is damaged or not what its {output.RECORD} says; convert again")


def _check_plan(config: bytes, shards: Sequence[Shard]) -> None:
  """What is going to be written must be a checkpoint that `convert` takes, before anything is."""
  tensors = {
    t.name: StoredTensor(t.name, t.dtype, t.shape, s.name, t.offset, t.nbytes) for s in shards for t in s.tensors
  }
  plan.make_plan(Source(Path(), json.loads(config), config, tensors), plan.Options())


def _config_bytes(out: Output) -> bytes:
  """config.json as it is, or where experts were decoded without saying that they are packed."""
  if out.config.packed_modules == out.form.packed_modules:
    return out.config_bytes
  config = json.loads(out.config_bytes)
  for scope in (config, text_config(config)[0]):
    declared = scope.get("quantization_config")
    if not declared:
      continue
    assert isinstance(scope, dict)
    if out.config.packed_modules:
      declared["ignore"] = [*(declared.get("ignore") or []), _DECODED_EXPERTS]
    else:
      del scope["quantization_config"]
  return json.dumps(config, indent=2).encode() + b"\n"


def _text_tensors(out: Output) -> Iterator[Tensor]:
  """The tensors of the language model, layer by layer."""
  form = dataclasses.replace(out.form, packed_modules=out.config.packed_modules)  # As they are stored in OUT.
  held = {}
  for leaf in mapping.leaves(out.config, form, scan=out.scan):
    which = 1 if leaf.transform is Transform.SCALES else 0
    for piece in leaf.pieces:
      held[piece.names[which]] = Tensor(piece.names[which], *leaf.stored[which], leaf, piece)
  for leaf in mapping.leaves(out.config, form, scan=False):
    which = 1 if leaf.transform is Transform.SCALES else 0
    yield from (held[piece.names[which]] for piece in leaf.pieces)


def _vision_tensors(out: Output, source: Source) -> Iterator[Tensor]:
  if not out.form.prefix:
    raise InputError("--vision-from: the converted model has no vision part; leave the flag out")
  if source.config != out.hf_config:
    raise InputError(
      f"{source.directory}: its config.json is not that of {out.path}: vision tensors must come from the checkpoint "
      "that was converted"
    )
  found = [tensor for name, tensor in source.tensors.items() if name.startswith(storage.VISION_PREFIXES)]
  if not found:
    raise InputError(f"{source.directory}: holds no vision tensors ({', '.join(storage.VISION_PREFIXES)}*)")
  for tensor in sorted(found, key=lambda tensor: (tensor.shard, tensor.offset)):
    yield Tensor(tensor.name, tensor.dtype, tensor.shape, None, None)


def _shards(tensors: Sequence[Tensor], limit: int) -> tuple[Shard, ...]:
  groups: list[list[Tensor]] = []
  size = limit + 1
  for tensor in tensors:
    if size + tensor.nbytes > limit or not groups:
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
  whole = len(text).to_bytes(LENGTH_BYTES, "little") + text
  placed = [tensor._replace(offset=len(whole) + header[tensor.name]["data_offsets"][0]) for tensor in ordered]
  return Shard(f"model-{number:05d}-of-{count:06d}.safetensors", whole, tuple(placed))


def _index(shards: Sequence[Shard], identity: Mapping[str, Any]) -> bytes:
  total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
  weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
  content = {"metadata": {"total_size": total, METADATA_KEY: dict(identity)}, "weight_map": weight_map}
  return json.dumps(content, indent=2).encode() + b"\n"


def check_target(target: str | Path, export: Export, *, overwrite: bool) -> bool:
  """Returns whether `target` already holds this very export.

  Raises:
    InputError: if it holds anything that must not be replaced, or lies in OUT or in the vision source (or these in it).
  """
  if store.is_url(str(target)):
    raise InputError(f"{target}: HF_DIR is a local directory, no URL")
  target = Path(target)
  here = target.resolve()
  for other in (export.out.path, export.vision and str(export.vision.directory.resolve())):
    if other and not store.is_url(other) and (here.is_relative_to(other) or Path(other).is_relative_to(here)):
      raise InputError(f"{target}: the same as {other} or inside each other, choose another HF_DIR")
  if not os.path.lexists(target):
    return False
  if not target.is_dir() or target.is_symlink():
    raise InputError(f"{target}: not a directory, choose another HF_DIR")
  if not any(target.iterdir()):
    return False
  found = _identity_of(target)
  if found is None:
    raise InputError(f"{target}: holds files, but no export: never overwritten; choose another HF_DIR")
  complete = all(_size(target / shard.name) == shard.size for shard in export.shards)
  if found == export.identity and complete:
    return True
  if not overwrite:
    raise InputError(f"{target}: holds another export; give --overwrite to replace it or choose another HF_DIR")
  return False


def _identity_of(directory: Path) -> Any:
  """What an export says of itself in its index; None if there is none."""
  try:
    return json.loads((directory / INDEX_FILE).read_bytes())["metadata"][METADATA_KEY]
  except (OSError, ValueError, KeyError, TypeError):
    return None


def _size(path: Path) -> int | None:
  return path.stat().st_size if path.is_file() else None


def export(target: str | Path, planned: Export, *, workers: int, overwrite: bool) -> int:
  """Carries out the plan and returns how many shards an earlier run had finished.

  Call `check_target` before. An error or Ctrl-C leaves `target` as it was, and HF_DIR.partial with the shards that are
  done; the next run of the same export goes on from there.

  Raises:
    InputError: naming what stopped it: a chunk that cannot be read, the disk, another export.
  """
  target = Path(target).resolve()
  partial = store.LocalStore(target.with_name(target.name + unfinished.PARTIAL_SUFFIX))
  with _locked(partial):
    try:
      done = _begin(partial, planned, overwrite=overwrite)
      todo = [shard for shard in planned.shards if shard.name not in done]
      _check_space(partial, sum(shard.size for shard in todo))
      _write_shards(partial.root, planned, todo, workers)
      for name, data in planned.files.items():
        partial.write(name, [data])
      _check_result(partial.root, planned)
    except BaseException:  # Ctrl-C too
      _leave(partial, planned)
      raise
    _appear(partial.root, target)
  return len(done)


@contextlib.contextmanager
def _locked(partial: store.LocalStore) -> Iterator[None]:
  with contextlib.ExitStack() as stack:
    try:
      stack.enter_context(partial.lock(_LOCK))
    except store.Locked as error:
      raise InputError(
        f"{partial.root}: another export is writing there, wait for it or choose another HF_DIR"
      ) from error
    yield


def _begin(partial: store.LocalStore, planned: Export, *, overwrite: bool) -> set[str]:
  """Makes the directory ours and returns the names of the shards that are done already."""
  strangers = [name for name in partial.names() if name != _LOCK]
  content = partial.read(STATE_FILE)
  if content is None and strangers:
    raise InputError(
      f"{partial.root}: holds {strangers[0]}, but no {STATE_FILE}: no export; remove it or choose another"
    )
  if content is not None and _parsed(content) != planned.identity:
    if not overwrite:
      raise InputError(
        f"{partial.root}: an unfinished export of something else; --overwrite gives it up, or choose another HF_DIR"
      )
    for name in strangers:
      partial.delete(name)
    content = None
  if content is None:
    partial.write(STATE_FILE, [json.dumps(dict(planned.identity)).encode()])
    return set()
  done = {shard.name for shard in planned.shards if _is_done(partial.root / shard.name, shard)}
  for name in strangers:  # A shard that was being written, and small files: these are written again.
    if name not in done and name != STATE_FILE:
      partial.delete(name)
  print(f"{partial.root}: {len(done)} of {len(planned.shards)} shards were done before and are kept", file=sys.stderr)
  return done


def _parsed(content: bytes) -> Any:
  try:
    return json.loads(content)
  except ValueError:
    return None


def _is_done(path: Path, shard: Shard) -> bool:
  """Whether a shard stands there under its final name, which it got when all of it was on the disk."""
  if _size(path) != shard.size:
    return False
  with path.open("rb") as file:
    return file.read(len(shard.header)) == shard.header


def _check_space(partial: store.LocalStore, nbytes: int) -> None:
  free = partial.free()
  print(f"{partial.root.parent}: {nbytes:,} bytes to write, {free:,} free", file=sys.stderr)
  if free < nbytes:
    raise InputError(f"{partial.root.parent}: {free:,} bytes free, the export takes {nbytes:,}: choose another HF_DIR")


def _write_shards(directory: Path, planned: Export, todo: Sequence[Shard], workers: int) -> None:
  total = sum(tensor.nbytes for shard in todo for tensor in shard.tensors)
  with Progress("export", total) as progress:
    for shard in todo:
      _write_shard(directory, planned, shard, workers, progress)


def _write_shard(directory: Path, planned: Export, shard: Shard, workers: int, progress: Progress) -> None:
  temporary, lock, written = directory / f"{shard.name}.tmp", threading.Lock(), len(shard.header)
  parts = list(_parts(shard))
  try:
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
      os.ftruncate(descriptor, shard.size)
      _write_at(descriptor, shard.header, 0)

      def work(number: int) -> None:
        nonlocal written
        offset, data = _made(planned, *parts[number])
        _write_at(descriptor, data, offset)
        with lock:
          written += len(data)
        progress.add(len(data))

      run_all(range(len(parts)), work, workers)
      assert written == shard.size, f"{shard.name}: {written} bytes written of {shard.size}"
      os.fsync(descriptor)
    finally:
      os.close(descriptor)
    temporary.rename(directory / shard.name)
  except OSError as error:
    raise InputError(f"{directory / shard.name}: cannot be written ({error.strerror}): is the disk full?") from error


def _parts(shard: Shard) -> Iterator[tuple[Tensor, Chunk | None, tuple[int, int]]]:
  """What one worker does at a time: a tensor, the chunk of its leaf, and which of its rows that gives."""
  for tensor in shard.tensors:
    if tensor.leaf is not None and tensor.piece is not None:
      yield from ((tensor, chunk, chunk.rows) for chunk in chunks.piece_chunks(tensor.leaf, tensor.piece))
      continue
    rows = tensor.shape[0] if tensor.shape else 1
    step = max(1, _COPY_BYTES * rows // max(1, tensor.nbytes))
    yield from ((tensor, None, (start, min(start + step, rows))) for start in range(0, rows, step))


def _made(planned: Export, tensor: Tensor, chunk: Chunk | None, rows: tuple[int, int]) -> tuple[int, memoryview]:
  """The bytes of some rows of a tensor, and where in the shard they go."""
  if chunk is None:
    assert planned.vision is not None
    data = planned.vision.read(tensor.name, *rows) if tensor.shape else planned.vision.read(tensor.name)
  else:
    assert tensor.leaf is not None
    shape = (rows[1] - rows[0], *tensor.shape[1:])
    part = planned.out.read_chunk(tensor.leaf, chunk)
    data = transforms.invert(tensor.leaf.transform, part.reshape(chunk.shape[len(chunk.piece.index) :]), shape)
  row_bytes = tensor.nbytes // max(1, tensor.shape[0] if tensor.shape else 1)
  return tensor.offset + rows[0] * row_bytes, memoryview(data.reshape(-1).view("u1"))


def _write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
  view = memoryview(data)
  while view:  # One call moves at most 2 GiB.
    count = os.pwrite(descriptor, view, offset)
    view, offset = view[count:], offset + count


def _check_result(directory: Path, planned: Export) -> None:
  """What was written must be a checkpoint that `convert` takes: config.json describes it, and nothing is missing."""
  with index.open_source(directory) as source:
    plan.make_plan(source, plan.Options())
    found = {name: _described(tensor) for name, tensor in source.tensors.items()}
  expected = {t.name: (t.dtype, t.shape, t.offset) for shard in planned.shards for t in shard.tensors}
  odd = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
  assert not odd, f"written otherwise than planned: {listed(odd)}"


def _described(tensor: StoredTensor) -> tuple[str, Shape, int]:
  return tensor.dtype, tensor.shape, tensor.offset


def _leave(partial: store.LocalStore, planned: Export) -> None:
  """After a failure: finished shards stay; without any, nothing does."""
  for path in partial.root.glob("*.tmp*"):
    path.unlink(missing_ok=True)
  content = partial.read(STATE_FILE)
  if content is None or _parsed(content) != planned.identity:
    return  # Another export's, which we were not to touch.
  if not any((partial.root / shard.name).exists() for shard in planned.shards):
    shutil.rmtree(partial.root, ignore_errors=True)


def _appear(partial: Path, target: Path) -> None:
  """Renames the finished directory; an export that was there goes away only after that."""
  for name in (STATE_FILE, _LOCK):
    (partial / name).unlink(missing_ok=True)
  old = target.with_name(f"{target.name}.replaced")
  if replaced := target.exists() and any(target.iterdir()):
    target.rename(old)
  try:
    partial.rename(target)
  except BaseException:
    if replaced:
      old.rename(target)
    raise
  if replaced:
    shutil.rmtree(old)
