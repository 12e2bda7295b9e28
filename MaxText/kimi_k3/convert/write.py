"""Writes leaves as an Orbax checkpoint (OCDBT, zarr3), slice by slice.

Orbax's own save wants whole arrays, and a stacked expert leaf of Kimi K3 has hundreds of GiB. So the arrays go through
TensorStore, which Orbax itself uses, and Orbax's two metadata files are written by hand. What bounds memory: a worker
holds one stored tensor and at most RUN_BYTES of slices (one slice if that is more), which TensorStore copies once more.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns the name bfloat16 from it)
import numpy as np
import tensorstore as ts

from kimi_k3 import checksums
from kimi_k3.convert import transforms
from kimi_k3.convert.index import Source
from kimi_k3.convert.mapping import Leaf, Piece
from kimi_k3.convert.plan import leaf_bytes
from kimi_k3.errors import InputError

CHUNK_BYTES = 256 * 1024 * 1024  # 256 MiB: a loader reads whole chunks, a device rarely wants more of one array.
RUN_BYTES = 128 * 1024 * 1024  # 128 MiB: what one OCDBT commit writes; many small experts or leaves go into one.
NODE_BYTES = 512 * 1024  # 512 KiB: of OCDBT's index; a commit rewrites a node, and there are half a million keys.
_REASON_LENGTH = 160  # characters of TensorStore's message, which names the file at every level and the reason last

KEY_PREFIX = ("params", "params")  # The item, and inside it Flax's collection: where MaxText looks for weights.
_DICT_KEY = 2  # Orbax's key_type for a step into a dict.
_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"


class Stopped(Exception):
  """Another worker failed or the user interrupted: give up without an error of one's own."""


def write_checkpoint(
  directory: Path, source: Source, leaves: Sequence[Leaf], *, scan: bool, workers: int, progress: Callable[[int], Any]
) -> dict[str, str]:
  """Writes `directory`/items and the metadata beside it, and returns the checksum of every leaf by its name.

  Args:
    directory: The step directory; must exist and be empty. TensorStore refuses a path with `..` in it.
    source: Where to read from.
    leaves: What to write.
    scan: Recorded for whoever reads the checkpoint.
    workers: Groups of leaves written at a time.
    progress: Called with a number of bytes, from any worker, when they are written.

  Raises:
    InputError: for a stored value that cannot be represented, and when the disk takes no more.
  """
  items = directory / "items"
  items.mkdir()
  context, stop = ts.Context(), threading.Event()
  sums: dict[str, int] = {}  # each leaf is written by one worker, in the order of its bytes

  def write(group: Sequence[Leaf]) -> None:
    for nbytes in write_group(items, group, source, context, sums):
      progress(nbytes)
      if stop.is_set():
        raise Stopped

  _run_all(write, _groups(leaves), workers, stop)
  _write_json(items / "_METADATA", _tree_metadata(leaves))
  _write_json(directory / "_CHECKPOINT_METADATA", _checkpoint_metadata(scan))
  return {_name(leaf): checksums.spelled(sums[_name(leaf)]) for leaf in leaves}


def _name(leaf: Leaf) -> str:
  return ".".join(leaf.path)


def _run_all(
  write: Callable[[Sequence[Leaf]], None], groups: Sequence[Sequence[Leaf]], workers: int, stop: threading.Event
) -> None:
  """Runs `write` on all groups. The first error, Ctrl-C included, stops the others and is raised."""
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    pending = [pool.submit(write, group) for group in groups]
    try:
      for future in concurrent.futures.as_completed(pending):
        future.result()
    except BaseException:
      stop.set()
      pool.shutdown(wait=True, cancel_futures=True)
      raise


def _groups(leaves: Sequence[Leaf]) -> list[list[Leaf]]:
  """Leaves to write together: small ones up to RUN_BYTES, a large one alone.

  The largest come first, so that no worker starts the longest leaf when the others have finished.
  """
  groups, size = [], 0
  for leaf in sorted(leaves, key=leaf_bytes, reverse=True):
    size += leaf_bytes(leaf)
    if not groups or size > RUN_BYTES:
      groups.append([])
      size = leaf_bytes(leaf)
    groups[-1].append(leaf)
  return groups


def write_group(
  items: Path, group: Sequence[Leaf], source: Source, context: ts.Context, sums: dict[str, int]
) -> Iterator[int]:
  """Writes a group of leaves, adds their checksums to `sums` and yields the bytes written after each step.

  A commit makes a few files and waits for the disk, so small leaves share one through a transaction, which holds them
  in memory until then. A leaf larger than that commits each run of slices.
  """
  small = sum(map(leaf_bytes, group)) <= RUN_BYTES
  transaction = ts.Transaction() if small else None
  for leaf in group:
    array, name = _create(items, leaf, context, transaction), _name(leaf)
    for part in write_leaf(array, leaf, source):
      sums[name] = checksums.extend(sums.get(name, 0), part)
      nbytes = part.nbytes
      del part  # not held while the next one is made
      yield nbytes
  if transaction is not None:
    with _storing():
      transaction.commit_sync()


@contextlib.contextmanager
def _storing() -> Iterator[None]:
  """Around every call that stores something: TensorStore knows one kind of error, a full disk is another's fault."""
  try:
    yield
  except (ValueError, OSError) as error:
    # It names the same file at every level, and the reason at the end.
    reason = " ".join(str(error).split())[-_REASON_LENGTH:]
    raise InputError(f"the checkpoint cannot be written, is the disk full? ...{reason}") from error


def write_leaf(array: ts.TensorStore, leaf: Leaf, source: Source) -> Iterator[np.ndarray]:
  """Writes one leaf piece by piece and yields each part when it is written, in the order of the leaf's bytes."""
  rows = _chunk_rows(leaf)
  if leaf.slice_shape and rows < leaf.slice_shape[0]:
    for piece in sorted(leaf.pieces):
      yield from _write_rows(array, leaf, piece, source, rows)
  else:
    for run in _runs(leaf):
      yield _write_run(array, leaf, run, source)


def _slice_bytes(leaf: Leaf) -> int:
  return math.prod(leaf.slice_shape) * np.dtype(leaf.dtype).itemsize


def _chunk_rows(leaf: Leaf) -> int:
  """How many rows of one piece's slice make a chunk: all of them, unless that is more than CHUNK_BYTES."""
  if not leaf.slice_shape:
    return 1
  rows = leaf.slice_shape[0]
  return max(1, min(rows, CHUNK_BYTES * rows // max(1, _slice_bytes(leaf))))


def _chunk_shape(leaf: Leaf) -> list[int]:
  """A chunk holds one block's or one expert's part, so that a device reads only what it holds."""
  ones = [1] * len(leaf.pieces[0].index)
  return [*ones, _chunk_rows(leaf), *leaf.slice_shape[1:]] if leaf.slice_shape else ones


def _runs(leaf: Leaf) -> Iterator[list[Piece]]:
  """Pieces that follow each other along the last index axis, up to RUN_BYTES together."""
  limit, run = max(1, RUN_BYTES // max(1, _slice_bytes(leaf))), []
  for piece in sorted(leaf.pieces):
    follows = (
      run and piece.index and piece.index[:-1] == run[-1].index[:-1] and piece.index[-1] == run[-1].index[-1] + 1
    )
    if run and (not follows or len(run) == limit):
      yield run
      run = []
    run.append(piece)
  yield run


def _slice(leaf: Leaf, piece: Piece, source: Source) -> np.ndarray:
  return transforms.apply(leaf.transform, piece.names, source.read, leaf.slice_shape)


def _write_run(array: ts.TensorStore, leaf: Leaf, run: list[Piece], source: Source) -> np.ndarray:
  buffer = np.empty((len(run), *leaf.slice_shape), leaf.dtype)
  for i, piece in enumerate(run):
    buffer[i] = _slice(leaf, piece, source)
  first = run[0].index
  target = array[(*first[:-1], slice(first[-1], first[-1] + len(run)))] if first else array
  # The buffer is never written to again, so TensorStore need not copy it.
  with _storing():
    target.write(buffer if first else buffer[0], can_reference_source_data_indefinitely=True).result()
  return buffer


def _write_rows(array: ts.TensorStore, leaf: Leaf, piece: Piece, source: Source, rows: int) -> Iterator[np.ndarray]:
  """One large piece, a chunk of rows at a time: a transposed view is copied only so far."""
  whole, target = _slice(leaf, piece, source), array[piece.index] if piece.index else array
  for start in range(0, whole.shape[0], rows):
    part = np.ascontiguousarray(whole[start : start + rows])
    with _storing():
      target[start : start + len(part)].write(part, can_reference_source_data_indefinitely=True).result()
    yield part


def _create(items: Path, leaf: Leaf, context: ts.Context, transaction: ts.Transaction | None) -> ts.TensorStore:
  base = {"driver": "file", "path": f"{items}/"}
  kvstore = {
      "driver": "ocdbt", "base": base, "path": ".".join((*KEY_PREFIX, *leaf.path)) + "/",
      "config": {"max_decoded_node_bytes": NODE_BYTES},
  }  # fmt: skip
  metadata = {
    "shape": list(leaf.shape),
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": _chunk_shape(leaf)}},
    "data_type": leaf.dtype,
    "codecs": [{"name": "bytes"}, {"name": "crc32c"}],  # A damaged chunk must not become a wrong answer.
  }
  # An all-zero chunk is not stored by default, and MaxText's trainer refuses to load an array with a missing chunk.
  spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata, "store_data_equal_to_fill_value": True}
  with _storing():
    return ts.open(spec, create=True, context=context, transaction=transaction).result()


def _tree_metadata(leaves: Sequence[Leaf]) -> dict[str, Any]:
  tree = {}
  for leaf in leaves:
    keys = (*KEY_PREFIX, *leaf.path)
    # A jax.Array could only be restored with a sharding. This restores as either, sharded when asked so.
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    key = [{"key": name, "key_type": _DICT_KEY} for name in keys]
    tree[str(keys)] = {"key_metadata": key, "value_metadata": value}
  return {
      "tree_metadata": tree, "use_ocdbt": True, "use_zarr3": True, "store_array_data_equal_to_fill_value": True,
      "custom_metadata": None,
  }  # fmt: skip


def _checkpoint_metadata(scan: bool) -> dict[str, Any]:
  now = time.time_ns()
  return {
      "item_handlers": {"items": _HANDLER}, "metrics": {}, "performance_metrics": {}, "init_timestamp_nsecs": now,
      "commit_timestamp_nsecs": now, "custom_metadata": {"scan_layers": scan},
  }  # fmt: skip


def _write_json(path: Path, value: dict[str, Any]) -> None:
  with _storing():
    path.write_text(json.dumps(value))
