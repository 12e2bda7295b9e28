"""A finished conversion back in the released layout: the same names, dtypes and bytes, in shards of a chosen size.

Everything is planned from the record first: which tensor stands at which byte of which shard. Then shards are written
one after the other, each by several workers, a chunk of OUT at a time: a chunk holds whole rows of a stored tensor,
which follow each other in the shard. A shard that is done is renamed, and two kinds of checksums are noted for it: of
the chunks that were read, which must give the recorded ones of their leaves, and of the bytes that were written, by
which a later run knows it again. All is made in HF_DIR.partial/out, which becomes HF_DIR at the end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from kimi_k3 import checksums
from kimi_k3.config import text_config
from kimi_k3.convert import appear, chunks, mapping, output, plan, storage, store, transforms
from kimi_k3.convert.beside import Beside, Kept
from kimi_k3.convert.chunks import Chunk
from kimi_k3.convert.database import chunk_faults, differing_arrays
from kimi_k3.convert.faults import listed, refuse_any
from kimi_k3.convert.index import INDEX_FILE, Source
from kimi_k3.convert.mapping import Leaf, Shape
from kimi_k3.convert.progress import Progress, say
from kimi_k3.convert.reader import Output
from kimi_k3.convert.shards import (
  DEFAULT_SHARD_BYTES,
  STATE_FILE,
  Release,
  Shard,
  Tensor,
  check_plan,
  check_result,
  check_space,
  check_target,
  file_size,
  index_file,
  limit_of,
  plan_shards,
  write_at,
)
from kimi_k3.convert.transforms import Transform
from kimi_k3.convert.write import leaf_name, run_all
from kimi_k3.errors import InputError

_WRITER = 1  # Of the bytes: a shard of another writer is not kept.
_COPY_BYTES = 64 * 1024 * 1024  # Of a vision tensor, read at a time.
_CHECK_BYTES = 8 * 1024 * 1024  # Of a shard of an earlier run, read at a time.
_DECODED_EXPERTS = r"re:.*\.experts\.\d+\.w[123]$"  # Matches no shared_experts, which may stay packed.


class Part(NamedTuple):
  """What one worker writes at a time: rows of a tensor, made of a chunk of its leaf or copied from the vision source.

  Attributes:
    tensor: Which.
    chunk: Of its leaf; None for a vision tensor.
    rows: The first, and the one after the last.
  """

  tensor: Tensor
  chunk: Chunk | None
  rows: tuple[int, int]

  @property
  def row_bytes(self) -> int:
    """Size of a row."""
    return self.tensor.nbytes // max(1, self.tensor.shape[0] if self.tensor.shape else 1)

  @property
  def offset(self) -> int:
    """In the shard's file."""
    return self.tensor.offset + self.rows[0] * self.row_bytes

  @property
  def nbytes(self) -> int:
    """Size."""
    return (self.rows[1] - self.rows[0]) * self.row_bytes


class Note(NamedTuple):
  """CRC-32C of the chunk that was read for a part, None of a vision tensor, and of the bytes that were written."""

  chunk: int | None
  written: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(Release):
  """An export, ready to be carried out.

  Attributes:
    out: What to export.
    vision: Where the vision tensors come from; None if they are not carried.
  """

  out: Output
  vision: Source | None


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
  shard_bytes = limit_of(tensors, shard_bytes)
  shards = plan_shards(tensors, shard_bytes)
  identity = {
    "writer": _WRITER,
    "conversion": hashlib.sha256(out.record_bytes).hexdigest(),
    "vision": None if vision is None else [plan.fingerprint(vision), vision.sample()],
    "shard_bytes": shard_bytes,
  }
  files = {name: data for name in output.COPIED_FILES if (data := out.file(name)) is not None}
  files |= {"config.json": config, INDEX_FILE: index_file(shards, identity)}
  check_plan(config, shards)
  return Export(
    out=out, vision=vision, shards=shards, files=files, identity=identity, places=tuple(_read_places(out, vision))
  )


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
  faults += out.data_faults()
  recorded = out.record[checksums.FIELD]
  faults += [f"{name}: no checksum recorded" for name in names if name not in recorded]
  for leaf in out.leaves:
    held, expected = arrays.held.get(leaf_name(leaf)), chunks.chunk_shape(leaf)
    if held is not None and held.shape == leaf.shape and held.chunk_shape != expected:
      faults.append(f"{leaf_name(leaf)}: in chunks of {list(held.chunk_shape)}, expected {list(expected)}")
  refuse_any(faults, f"{out.path} is damaged or not what its {output.RECORD} says; convert again")


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
  recorded = out.record["source"]
  if (plan.fingerprint(source), source.sample()) != (recorded["fingerprint"], recorded["sample"]):
    raise InputError(
      f"{source.directory}: its headers or weights are not those that {out.path} was made from: vision tensors must "
      "come from the checkpoint that was converted"
    )
  for tensor in sorted(found, key=lambda tensor: (tensor.shard, tensor.offset)):
    yield Tensor(tensor.name, tensor.dtype, tensor.shape, None, None)


def _read_places(out: Output, vision: Source | None) -> Iterator[Path]:
  """Local directories that an export reads from, or that what it reads was made from."""
  if not store.is_url(out.path):
    yield Path(out.path)
  if vision is not None:
    yield vision.directory.resolve()
  made_from = out.record["source"].get("directory")
  if isinstance(made_from, str) and made_from and Path(made_from).is_dir():
    yield Path(made_from).resolve()


def export(target: str | Path, planned: Export, *, workers: int, overwrite: bool) -> int:
  """Carries out the plan and returns how many shards an earlier run had finished.

  An error, Ctrl-C or a kill leaves `target` as it was, and HF_DIR.partial with the shards that are done; the next run
  of the same export goes on from there.

  Raises:
    InputError: naming what stopped it: what `check_target` refuses, a chunk that cannot be read or is not what was
      converted, the disk, another export, a file that someone put at `target` meanwhile.
  """
  place = Beside(appear.local(target), STATE_FILE, "export")
  with place.lock():
    try:
      before = appear.contents(place.target)
      check_target(target, planned, overwrite=overwrite)  # Again: from `before` on, nothing goes unnoticed.
      done = _begin(place, planned, workers, overwrite=overwrite)
      _write_shards(place, planned, done, workers)
      for name, data in planned.files.items():
        store.LocalStore(place.out).write(name, [data])
      check_result(place.out, planned)
      place.finish()
      place.put(before)
    except Kept:
      raise
    except BaseException:  # Ctrl-C too
      _leave(place, planned)
      raise
  return len(done)


def _begin(place: Beside, planned: Export, workers: int, *, overwrite: bool) -> dict[str, list[Note]]:
  """Makes the directory ours and returns the notes of the shards that are done already."""
  state = place.state()
  if state and state.get("identity") == planned.identity:
    place.resume()
    done = _kept(place, planned, workers)
    say(f"{place.root}: {len(done)} of {len(planned.shards)} shards were done before and are kept")
    return done
  if state and not overwrite:
    raise InputError(
      f"{place.root}: an unfinished export of something else; --overwrite gives it up, or choose another HF_DIR"
    )
  place.begin(planned.identity, [*(shard.name for shard in planned.shards), *planned.files])
  return {}


def _kept(place: Beside, planned: Export, workers: int) -> dict[str, list[Note]]:
  """The shards of an earlier run that hold, by their checksums, what it wrote. Others are removed."""
  there = [shard for shard in planned.shards if (place.out / shard.name).exists()]
  kept: dict[str, list[Note]] = {}
  with Progress("check", sum(shard.size for shard in there)) as progress:

    def check(number: int) -> None:
      shard = there[number]
      notes = _noted(place, shard)
      if notes is not None and _holds(place.out / shard.name, shard, notes):
        kept[shard.name] = notes
      else:
        say(f"{place.out / shard.name}: not what was written, or not noted: written again")
        _drop(place, shard)
      progress.add(shard.size)

    run_all(range(len(there)), check, workers)
  return kept


def _noted(place: Beside, shard: Shard) -> list[Note] | None:
  """What an earlier run noted of a shard when it was done."""
  try:
    notes = [Note(*note) for note in json.loads((place.notes / f"{shard.name}.json").read_bytes())]
  except (OSError, ValueError, TypeError):
    return None
  return notes if len(notes) == sum(1 for _ in _parts(shard)) else None


def _holds(path: Path, shard: Shard, notes: Sequence[Note]) -> bool:
  """Whether a shard has the header and the checksums that were noted."""
  if file_size(path) != shard.size:
    return False
  try:
    with path.open("rb", buffering=0) as file:
      if os.pread(file.fileno(), len(shard.header), 0) != shard.header:
        return False
      pairs = zip(_parts(shard), notes, strict=True)
      return all(_file_checksum(file.fileno(), part.offset, part.nbytes) == note.written for part, note in pairs)
  except OSError:
    return False


def _file_checksum(descriptor: int, offset: int, nbytes: int) -> int:
  found = 0
  for at in range(offset, offset + nbytes, _CHECK_BYTES):
    found = google_crc32c.extend(found, os.pread(descriptor, min(_CHECK_BYTES, offset + nbytes - at), at))
  return found


def _drop(place: Beside, shard: Shard) -> None:
  (place.notes / f"{shard.name}.json").unlink(missing_ok=True)
  (place.out / shard.name).unlink(missing_ok=True)


class _Leaves:
  """The checksums of OUT's chunks as they are read, gathered from all shards."""

  def __init__(self, out: Output):
    self._recorded = out.record[checksums.FIELD]
    self._grids = {leaf_name(leaf): np.zeros(_grid(leaf), np.uint32) for leaf in out.leaves}
    self._left = {name: grid.size for name, grid in self._grids.items()}

  def add(self, shard: Shard, notes: Sequence[Note]) -> dict[str, str]:
    """Takes in a shard. Returns, by name, the leaves that it completes and that are not as recorded."""
    faults = {}
    for part, note in zip(_parts(shard), notes, strict=True):
      if part.tensor.leaf is None or part.chunk is None:
        continue
      assert note.chunk is not None
      name = leaf_name(part.tensor.leaf)
      self._grids[name][part.chunk.index] = note.chunk
      self._left[name] -= 1
      if self._left[name] == 0:
        found = checksums.leaf_checksum(map(int, self._grids[name].reshape(-1)))
        if found != self._recorded[name]:
          faults[name] = f"{name}: checksum {found}, recorded {self._recorded[name]}"
    return faults


def _grid(leaf: Leaf) -> Shape:
  return tuple(-(-size // chunk) for size, chunk in zip(leaf.shape, chunks.chunk_shape(leaf), strict=True))


def _refuse_leaves(place: Beside, planned: Export, faults: Mapping[str, str]) -> None:
  """Raises if leaves are not what was converted. Shards made of them are not kept."""
  if not faults:
    return
  for shard in planned.shards:
    if any(tensor.leaf is not None and leaf_name(tensor.leaf) in faults for tensor in shard.tensors):
      _drop(place, shard)
  raise InputError(
    f"{planned.out.path}: {listed(faults.values())}: OUT is not what was converted: run `kimi-k3 verify SRC OUT`, "
    "convert again"
  )


def _write_shards(place: Beside, planned: Export, done: Mapping[str, list[Note]], workers: int) -> None:
  """Writes the shards that are not done. A leaf is compared with its record as soon as all its shards are there."""
  todo, leaves = [shard for shard in planned.shards if shard.name not in done], _Leaves(planned.out)
  check_space(place, sum(shard.size for shard in todo))
  for shard in planned.shards:
    if shard.name in done:
      _refuse_leaves(place, planned, leaves.add(shard, done[shard.name]))
  total = sum(tensor.nbytes for shard in todo for tensor in shard.tensors)
  with Progress("export", total) as progress:
    for shard in todo:
      notes = _write_shard(place.out, planned, shard, workers, progress)
      store.LocalStore(place.notes).write(f"{shard.name}.json", [json.dumps(notes).encode()])
      _refuse_leaves(place, planned, leaves.add(shard, notes))
  if planned.vision is not None:
    for name in sorted({tensor.shard for tensor in planned.vision.tensors.values()}):
      planned.vision.check_unchanged(name)


def _write_shard(directory: Path, planned: Export, shard: Shard, workers: int, progress: Progress) -> list[Note]:
  """Writes a shard and returns the notes of its parts."""
  temporary, parts = directory / f"{shard.name}.tmp", list(_parts(shard))
  assert len(shard.header) + sum(part.nbytes for part in parts) == shard.size, f"{shard.name}: parts of another size"
  notes: dict[int, Note] = {}
  try:
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
      os.ftruncate(descriptor, shard.size)
      write_at(descriptor, shard.header, 0)

      def work(number: int) -> None:
        part = parts[number]
        data, checksum = _made(planned, part)
        assert data.nbytes == part.nbytes, f"{part.tensor.name}: {data.nbytes} bytes made of {part.nbytes}"
        write_at(descriptor, memoryview(data), part.offset)
        notes[number] = Note(checksum, google_crc32c.value(data))
        progress.add(data.nbytes)

      run_all(range(len(parts)), work, workers)
      os.fsync(descriptor)
    finally:
      os.close(descriptor)
    temporary.rename(directory / shard.name)
  except OSError as error:
    raise InputError(f"{directory / shard.name}: cannot be written ({error.strerror}): is the disk full?") from error
  return [notes[number] for number in range(len(parts))]


def _parts(shard: Shard) -> Iterator[Part]:
  """All parts of a shard, always in the same order."""
  for tensor in shard.tensors:
    if tensor.leaf is not None and tensor.piece is not None:
      yield from (Part(tensor, chunk, chunk.rows) for chunk in chunks.piece_chunks(tensor.leaf, tensor.piece))
      continue
    rows = tensor.shape[0] if tensor.shape else 1
    step = max(1, _COPY_BYTES * rows // max(1, tensor.nbytes))
    yield from (Part(tensor, None, (start, min(start + step, rows))) for start in range(0, rows, step))


def _made(planned: Export, part: Part) -> tuple[np.ndarray, int | None]:
  """The bytes of a part, and the checksum of the chunk of OUT that they were made from."""
  tensor, chunk, rows = part
  if chunk is None:
    assert planned.vision is not None
    data = planned.vision.read(tensor.name, *rows) if tensor.shape else planned.vision.read(tensor.name)
    return data.reshape(-1).view(np.uint8), None
  assert tensor.leaf is not None
  read = planned.out.read_chunk(tensor.leaf, chunk)
  checksum = checksums.chunk_checksum(checksums.filled(read, chunks.chunk_shape(tensor.leaf)))
  shape = (rows[1] - rows[0], *tensor.shape[1:])
  data = transforms.invert(tensor.leaf.transform, read.reshape(chunk.shape[len(chunk.piece.index) :]), shape)
  return np.ascontiguousarray(data).reshape(-1).view(np.uint8), checksum


def _leave(place: Beside, planned: Export) -> None:
  """After a failure: finished shards stay; without any, nothing does."""
  state = place.state()
  if state and state.get("identity") != planned.identity:
    return  # Another export's, which we were not to touch.
  if state and any((place.out / shard.name).exists() for shard in planned.shards):
    place.resume()
  else:
    place.remove()
