"""The bytes of a converted checkpoint: the data file of each slice, and what makes an Orbax checkpoint of them.

Orbax's own save wants whole arrays, and a stacked expert leaf of Kimi K3 has hundreds of GiB. So a chunk is written as
its zarr3 array stores it, the description of each array is TensorStore's own, the index that joins them is
`kimi_k3.convert.ocdbt`, and Orbax's two metadata files are written by hand. The same plan gives the same bytes.
"""

from __future__ import annotations

import concurrent.futures
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns the name bfloat16 from it)
import numpy as np
import tensorstore as ts

from kimi_k3 import checksums
from kimi_k3.convert import chunks, ocdbt, slices, transforms
from kimi_k3.convert.index import Source
from kimi_k3.convert.mapping import Leaf
from kimi_k3.convert.slices import Slices

WORKER_BYTES = (
  256 * 1024 * 1024
)  # What one worker holds at most: some chunks, before and after, or a slice for a bucket.
KEY_PREFIX = ("params", "params")  # The item, and inside it Flax's collection: where MaxText looks for weights.
INDEX_FILE = f"{slices.DATA_DIRECTORY}/index"
_DICT_KEY = 2  # Orbax's key_type for a step into a dict.
_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
_NO_TIME = 1  # Nanoseconds since 1970, where Orbax wants a time: the same source gives the same bytes at any time.


class Stopped(Exception):
  """Another worker failed or the user interrupted: give up without an error of one's own."""


def slice_parts(work: Slices, number: int, source: Source, sums: list[int]) -> Iterator[Any]:
  """The buffers of a slice's data file, one after the other, each made when the one before is done with.

  Args:
    work: All slices.
    number: Which.
    source: Where to read from.
    sums: Gets the checksum of each chunk, in the order of the file.

  Raises:
    InputError: for a stored value that cannot be represented, and for a file that cannot be read.
  """
  for placed in work.chunks(number):
    leaf, chunk = work.leaves[placed.leaf], placed.chunk
    shape = chunk.shape[len(chunk.piece.index) :]
    part = transforms.apply(leaf.transform, chunk.piece.names, source.read, shape, chunk.rows)
    whole = checksums.filled(part.reshape(chunk.shape), chunks.chunk_shape(leaf))
    del part  # not held while the next one is made
    data = np.ascontiguousarray(whole).reshape(-1).view(np.uint8)
    sums.append(checksums.chunk_checksum(data))
    yield data
    del data, whole
    yield sums[-1].to_bytes(checksums.CHECKSUM_BYTES, "little")


def run_all(tasks: Iterable[int], work: Callable[[int], None], workers: int) -> None:
  """Runs `work` on all tasks, in order. The first error, Ctrl-C included, lets those under way end and is raised."""
  stop = threading.Event()

  def unless_stopped(task: int) -> None:
    if stop.is_set():
      raise Stopped
    work(task)

  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    pending = [pool.submit(unless_stopped, task) for task in tasks]
    try:
      for future in concurrent.futures.as_completed(pending):
        future.result()
    except BaseException:
      stop.set()
      pool.shutdown(wait=True, cancel_futures=True)
      raise


def leaf_name(leaf: Leaf) -> str:
  """A leaf's name in messages and records."""
  return ".".join(leaf.path)


def leaf_checksums(work: Slices, sums: Mapping[int, Sequence[int]]) -> dict[str, str]:
  """Returns the recorded checksum of every leaf by its name.

  Args:
    work: All slices.
    sums: Of each slice, the checksums of its chunks.
  """
  grids = [np.zeros(_grid(leaf), np.uint32) for leaf in work.leaves]
  for number in range(len(work)):
    for placed, checksum in zip(work.chunks(number), sums[number], strict=True):
      grids[placed.leaf][placed.chunk.index] = checksum
  return {
    leaf_name(leaf): checksums.leaf_checksum(map(int, grid.reshape(-1)))
    for leaf, grid in zip(work.leaves, grids, strict=True)
  }


def _grid(leaf: Leaf) -> tuple[int, ...]:
  return tuple(-(-size // chunk) for size, chunk in zip(leaf.shape, chunks.chunk_shape(leaf), strict=True))


def database(work: Slices, uuid: bytes) -> ocdbt.Database:
  """Returns the index of all data files. Its own file is INDEX_FILE."""
  prefixes = [".".join((*KEY_PREFIX, *leaf.path)) for leaf in work.leaves]
  entries: list[tuple[bytes, bytes | ocdbt.Reference]] = [
    (f"{prefix}/zarr.json".encode(), array_metadata(leaf)) for prefix, leaf in zip(prefixes, work.leaves, strict=True)
  ]
  for number in range(len(work)):
    file = slices.file_name(number)
    for placed in work.chunks(number):
      key = chunks.key(placed.chunk.index)
      value = ocdbt.Reference(file, placed.offset, placed.nbytes)
      entries.append((f"{prefixes[placed.leaf]}/{key}".encode(), value))
  return ocdbt.database(entries, index_path=INDEX_FILE, uuid=uuid)


def array_metadata(leaf: Leaf) -> bytes:
  """Returns the zarr.json of a leaf's array, as TensorStore writes it."""
  context = ts.Context()
  metadata = {
    "shape": list(leaf.shape),
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunks.chunk_shape(leaf))}},
    "data_type": leaf.dtype,
    # Little endian, as every machine that runs this is. A damaged chunk must not become a wrong answer.
    "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
  }
  ts.open({"driver": "zarr3", "kvstore": "memory://", "metadata": metadata}, create=True, context=context).result()
  return ts.KvStore.open("memory://", context=context).result().read("zarr.json").result().value


def tree_metadata(leaves: Sequence[Leaf]) -> bytes:
  """Returns Orbax's `_METADATA` of the items directory."""
  tree = {}
  for leaf in leaves:
    keys = (*KEY_PREFIX, *leaf.path)
    # A jax.Array could only be restored with a sharding. This restores as either, sharded when asked so.
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    key = [{"key": name, "key_type": _DICT_KEY} for name in keys]
    tree[str(keys)] = {"key_metadata": key, "value_metadata": value}
  # Every chunk is stored, all-zero ones too: MaxText's trainer refuses to load an array with a missing chunk.
  return _json({
      "tree_metadata": tree, "use_ocdbt": True, "use_zarr3": True, "store_array_data_equal_to_fill_value": True,
      "custom_metadata": None,
  })  # fmt: skip


def checkpoint_metadata(custom: Mapping[str, Any]) -> bytes:
  """Returns Orbax's `_CHECKPOINT_METADATA` of the step directory, with what `custom` says of the checkpoint."""
  return _json({
      "item_handlers": {"items": _HANDLER}, "metrics": {}, "performance_metrics": {}, "init_timestamp_nsecs": _NO_TIME,
      "commit_timestamp_nsecs": _NO_TIME, "custom_metadata": dict(custom),
  })  # fmt: skip


def _json(value: Mapping[str, Any]) -> bytes:
  return json.dumps(value).encode()
