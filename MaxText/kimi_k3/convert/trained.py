"""What MaxText's trainer saved, in the released layout: bfloat16 weights, experts packed to MXFP4.

A trainer's checkpoint holds parameters, the optimizer's state and random streams; only the parameters are read. Its
arrays are cut by the training mesh, not by released tensors, and a stored chunk is decoded whole whatever part of it is
wanted. So the arrays decide the order: each chunk is read once, and what it gives is written to its places in the
shards. What is held at a time is one `cell`, the chunks that together hold whole released tensors: at most one leaf.

float32 weights are rounded to bfloat16 first and packed from that, so that exporting in bfloat16 and packing later
gives the same bytes (docs/decisions/0020).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np

from kimi_k3.config import MXFP4_GROUP, KimiK3Config
from kimi_k3.convert import appear, chunks, hf_config, mapping, mxfp4, output, store, transforms
from kimi_k3.convert.beside import Beside, Kept
from kimi_k3.convert.chunks import Chunk
from kimi_k3.convert.database import Database
from kimi_k3.convert.faults import refuse_any
from kimi_k3.convert.index import INDEX_FILE
from kimi_k3.convert.mapping import Leaf, Piece, Shape
from kimi_k3.convert.progress import Progress
from kimi_k3.convert.shards import (
  STATE_FILE,
  Release,
  Tensor,
  check_plan,
  check_result,
  check_space,
  check_target,
  index_file,
  limit_of,
  plan_shards,
  write_at,
)
from kimi_k3.convert.training_step import ANOTHER_STEP, Training, steps_of
from kimi_k3.convert.write import leaf_name, run_all
from kimi_k3.errors import InputError

Experts = Literal["mxfp4", "bf16"]
_WRITER = 1  # of the bytes
_CACHE_OVERHEAD = 1024 * 1024  # 1 MiB: TensorStore counts more than the data, and drops what is beyond the limit
# Of the largest weight of a group. That is 4 to 8 scales; codes above 2 are 1 or 2 scales apart, and 6 is the last.
_PACKING_BOUND = 0.25
_LEAST_STEP = 2.0**-128  # between two codes at the least scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedExport(Release):
  """An export, ready to be carried out.

  Attributes:
    training: What to export.
    experts: As what.
  """

  training: Training
  experts: Experts

  @property
  def cell_bytes(self) -> int:
    """Of the largest cell: what is held at a time, decoded, beside what the workers need."""
    return max(cell.nbytes for leaf in self.training.leaves for cell in _cells(self.training, leaf))


class Cell(NamedTuple):
  """Pieces of a leaf that lie in the same stored chunks, and the size of these chunks when they are decoded."""

  pieces: tuple[Piece, ...]
  nbytes: int


@dataclasses.dataclass
class Packing:
  """How far packed experts are from the trained weights.

  Attributes:
    largest_of_group: Largest error, relative to the largest weight of its group.
    squares: Sum of squared errors, and `weight_squares` of squared weights.
  """

  largest_of_group: float = 0.0
  squares: float = 0.0
  weight_squares: float = 0.0

  @property
  def rms_relative(self) -> float:
    """Root of mean squared error over that of the weights; 0 where all weights are 0."""
    return math.sqrt(self.squares / self.weight_squares) if self.weight_squares else 0.0


def plan_export(
  training: Training, *, experts: Experts | None, shard_bytes: int, tokenizer: Path | None = None
) -> TrainedExport:
  """Returns how to export a step.

  Args:
    training: The step.
    experts: "mxfp4" packs them; "bf16" does not; None does what the release of this kind of model does.
    shard_bytes: Of the tensors of a shard; one larger tensor has a shard of its own.
    tokenizer: Directory whose tokenizer files come along; None for none.

  Raises:
    InputError: if a width is no multiple of MXFP4's group, or the release has another form than the model.
  """
  chosen = experts or ("mxfp4" if hf_config.is_wrapped(training.config) else "bf16")
  packed = ("experts",) if chosen == "mxfp4" and any(training.config.moe_layers) else ()
  released = dataclasses.replace(training.config, packed_modules=packed)
  config = json.dumps(hf_config.hf_config(released), indent=2).encode() + b"\n"
  files = {"config.json": config} | (_tokenizer_files(tokenizer) if tokenizer else {})
  tensors = list(_tensors(training, released))
  shard_bytes = limit_of(tensors, shard_bytes)
  shards = plan_shards(tensors, shard_bytes)
  identity = {
    "writer": _WRITER,
    "training": training.fingerprint,
    "experts": chosen,
    "files": hashlib.sha256(b"\0".join(b"%s\0%s" % (name.encode(), files[name]) for name in files)).hexdigest(),
    "shard_bytes": shard_bytes,
  }
  check_plan(config, shards)
  files[INDEX_FILE] = index_file(shards, identity)
  places = () if store.is_url(training.path) else (steps_of(training.path),)
  if tokenizer is not None:
    places = (*places, appear.local(tokenizer))
  return TrainedExport(shards=shards, files=files, identity=identity, places=places, training=training, experts=chosen)


def _tokenizer_files(directory: Path) -> dict[str, bytes]:
  held = store.LocalStore(appear.local(directory))
  names = [name for name in output.COPIED_FILES if name != "config.json"]
  files = {name: data for name in names if (data := held.read(name)) is not None}
  if not files:
    raise InputError(f"{directory}: holds none of {', '.join(names)}: leave --tokenizer-from out or give another")
  return files


def _tensors(training: Training, released: KimiK3Config) -> Iterator[Tensor]:
  """What is written, in the order of the model, each with the piece that it is made from."""
  made_from = {}
  for leaf in training.leaves:
    for piece in leaf.pieces:
      made_from[piece.names[0]] = (leaf, piece)
  form = dataclasses.replace(training.form, packed_modules=released.packed_modules)
  for leaf in mapping.leaves(released, form, scan=False):
    which = 1 if leaf.transform is transforms.Transform.SCALES else 0
    for piece in leaf.pieces:
      name = piece.names[which]
      yield Tensor(name, *leaf.stored[which], *made_from[_PACKED_NAME.sub(".weight", name)])


_PACKED_NAME = re.compile(r"\.weight_(packed|scale)$")


def export(target: str | Path, planned: TrainedExport, *, workers: int, overwrite: bool) -> Packing:
  """Carries out the plan and returns how far packed experts are from the trained ones.

  An error, Ctrl-C or a kill leaves `target` as it was; the next run starts anew.

  Raises:
    InputError: naming what stopped it: what `check_target` refuses, every leaf with a value that is not finite or that
      bfloat16 cannot hold, an array that cannot be read, the disk.
  """
  place = Beside(appear.local(target), STATE_FILE, "export")
  with place.lock():
    try:
      before = appear.contents(place.target)
      check_target(target, planned, overwrite=overwrite)  # Again: from `before` on, nothing goes unnoticed.
      state = place.state()
      if state and state.get("identity") != planned.identity and not overwrite:
        raise InputError(
          f"{place.root}: an unfinished export of something else; --overwrite gives it up, or choose another HF_DIR"
        )
      check_space(place, planned.nbytes)
      place.begin(planned.identity, [*(shard.name for shard in planned.shards), *planned.files])
      packing = _Writer(place.out, planned, workers).write()
      for name, data in planned.files.items():
        store.LocalStore(place.out).write(name, [data])
      check_result(place.out, planned)
      place.finish()
      place.put(before)
    except Kept:
      raise
    except BaseException:  # Ctrl-C too
      state = place.state()
      if not state or state.get("identity") == planned.identity:  # Another export's is not ours to touch.
        place.remove()
      raise
  return packing


def _cells(training: Training, leaf: Leaf) -> Iterator[Cell]:
  """The cells of a leaf: along block and expert as its chunks are cut, along the other axes whole."""
  before = len(leaf.pieces[0].index)
  steps = training.database.arrays.held[leaf_name(leaf)].chunk_shape[:before]
  groups: dict[Shape, list[Piece]] = {}
  for piece in sorted(leaf.pieces):
    groups.setdefault(tuple(i // step for i, step in zip(piece.index, steps, strict=True)), []).append(piece)
  itemsize = np.dtype(leaf.dtype).itemsize
  for pieces in groups.values():
    yield Cell(tuple(pieces), len(pieces) * math.prod(leaf.slice_shape) * itemsize)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[int]:
  """A file that is written in parts, as a descriptor."""
  try:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
      yield descriptor
    finally:
      os.close(descriptor)
  except OSError as error:
    raise InputError(f"{path}: cannot be written ({error.strerror}): is the disk full?") from error


def _said(broken: int, overflowing: int) -> str:
  parts = [f"{broken:,} value(s) are NaN or infinite"] if broken else []
  parts += [f"{overflowing:,} value(s) are beyond bfloat16's largest, 3.39e38"] if overflowing else []
  return " and ".join(parts)


class _Writer:
  """Fills the shards of an export, cell by cell, and gathers what cannot be written."""

  def __init__(self, directory: Path, planned: TrainedExport, workers: int):
    self._directory, self._planned, self._workers = directory, planned, workers
    self._places: dict[str, tuple[Path, Tensor]] = {}
    for shard in planned.shards:
      for tensor in shard.tensors:
        self._places[tensor.name] = (directory / shard.name, tensor)
    self._lock = threading.Lock()
    self._faults: dict[str, list[int]] = {}  # by leaf: values that are not finite, and that overflow bfloat16
    self._written = 0
    self._packing = Packing()

  def write(self) -> Packing:
    """Writes everything. Raises InputError naming every leaf that holds what cannot be written."""
    training = self._planned.training
    for shard in self._planned.shards:
      self._make(self._directory / shard.name, shard.header, shard.size)
    total = sum(tensor.nbytes for _, tensor in self._places.values())
    with Progress("export", total) as progress:
      for leaf in training.leaves:
        for cell in _cells(training, leaf):
          self._write_cell(leaf, cell, progress)
    refuse_any(
      [f"{name}: {_said(*counts)}" for name, counts in self._faults.items()],
      f"{training.path} holds weights that no release can hold: {ANOTHER_STEP}",
    )
    assert self._written == total, f"{self._written} of {total} bytes written"
    for shard in self._planned.shards:
      with (self._directory / shard.name).open("rb") as file:
        os.fsync(file.fileno())
    return self._packing

  def _make(self, path: Path, header: bytes, size: int) -> None:
    with _writing(path) as descriptor:
      os.ftruncate(descriptor, size)
      write_at(descriptor, header, 0)

  def _write_cell(self, leaf: Leaf, cell: Cell, progress: Progress) -> None:
    """Reads the chunks of a cell once, and writes what becomes of them."""
    database = self._planned.training.database.cached(cell.nbytes + cell.nbytes // 8 + _CACHE_OVERHEAD)
    parts = [chunk for piece in cell.pieces for chunk in chunks.piece_chunks(leaf, piece)]

    def work(number: int) -> None:
      count = self._write_part(leaf, parts[number], database)
      with self._lock:
        self._written += count
      progress.add(count)

    run_all(range(len(parts)), work, min(self._workers, len(parts)))

  def _write_part(self, leaf: Leaf, part: Chunk, database: Database) -> int:
    """Writes what some rows of a released tensor are made from. Returns how many bytes that were."""
    stored_dtype, stored_shape = leaf.stored[0]
    read = database.read_chunk(leaf, part).reshape(part.shape[len(part.piece.index) :])
    rows = (part.rows[1] - part.rows[0], *stored_shape[1:])
    weights = transforms.invert(leaf.transform, read, rows)
    data = weights
    if stored_dtype == "BF16" and weights.dtype == np.float32:
      with np.errstate(over="ignore", invalid="ignore"):  # What is not finite is a fault, named below.
        data = weights.astype(ml_dtypes.bfloat16)
    if not self._is_finite(leaf, weights, data):
      return 0
    (name,) = part.piece.names
    if name in self._places:
      return self._put(name, part.rows[0], data)
    codes, scales = mxfp4.pack(data, name)
    self._measure(weights.astype(np.float32), data.astype(np.float32), mxfp4.decode(codes, scales, np.float32), name)
    return self._put(f"{name}_packed", part.rows[0], codes) + self._put(f"{name}_scale", part.rows[0], scales)

  def _is_finite(self, leaf: Leaf, weights: np.ndarray, data: np.ndarray) -> bool:
    """Notes what is not. Counted in float32, which every float here fits in."""
    if np.isfinite(data.astype(np.float32)).all():
      return True
    broken = int(np.count_nonzero(~np.isfinite(weights.astype(np.float32))))
    overflowing = int(np.count_nonzero(~np.isfinite(data.astype(np.float32)))) - broken
    with self._lock:
      counts = self._faults.setdefault(leaf_name(leaf), [0, 0])
      counts[0], counts[1] = counts[0] + broken, counts[1] + overflowing
    return False

  def _put(self, name: str, row: int, data: np.ndarray) -> int:
    path, tensor = self._places[name]
    row_bytes = tensor.nbytes // tensor.shape[0]
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    with _writing(path) as descriptor:
      write_at(descriptor, memoryview(raw), tensor.offset + row * row_bytes)
    return raw.nbytes

  def _measure(self, weights: np.ndarray, rounded: np.ndarray, packed: np.ndarray, name: str) -> None:
    """Compares packed rows with the bfloat16 they were made from, group by group, and with the trained ones."""
    groups = (len(weights), -1, MXFP4_GROUP)
    largest = np.abs(rounded).reshape(groups).max(axis=2)
    error = np.abs(packed - rounded).reshape(groups).max(axis=2)
    assert (error <= _PACKING_BOUND * largest + _LEAST_STEP).all(), f"{name}: packed further off than MXFP4 rounds"
    relative = np.divide(error, largest, out=np.zeros_like(largest), where=largest > 0)
    squares = [float(np.square(a, dtype=np.float64).sum()) for a in (packed - weights, weights)]
    with self._lock:
      found = self._packing
      found.largest_of_group = max(found.largest_of_group, float(relative.max(initial=0)))
      found.squares, found.weight_squares = found.squares + squares[0], found.weight_squares + squares[1]
