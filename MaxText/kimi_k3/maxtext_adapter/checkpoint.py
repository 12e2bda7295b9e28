"""Comparing a checkpoint with the model before loading it, and loading it.

MaxText's own loader casts dtypes, un-transposes, repeats a half-width array and ignores extra keys, and it makes the
whole model from random numbers first. So tree, shapes and dtypes are compared here, from the checkpoint's metadata
alone, and only an exact fit is loaded, straight into the shards that hold it. Beside a conversion's record the content
of the smaller leaves is compared too. Of what the trainer saved only the parameters are read.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from kimi_k3 import checksums
from kimi_k3.errors import InputError

_SHOWN = 6  # offenders named in full; more are counted
_METADATA_FILE = "_METADATA"
_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a step that is being saved
# Of a checkpoint: the parameters, and what the trainer saves beside them.
_PARAMETERS, _TRAINERS = "params", ("opt_state", "step", "nnx_aux")
RECORD_SCHEMA = 2  # of conversion.json
UNFINISHED = ".unfinished/plan.json"  # below OUT while a conversion that commits by a marker is under way
MARKERS = ("0/items/commit_success.txt", "0/commit_success.txt")  # below OUT when it is complete
# 2 GiB: of leaves, the smallest first, whose content is compared on loading. Takes some seconds whatever the model, and
# covers every leaf that keeps its shape when two of its axes are swapped, also at full size. JAX keeps the host's copy.
CHECKED_BYTES = 2 * 1024**3


_STORAGE_SETTINGS = ("scan_layers", "packed_modules", "fp8_modules", "float32_leaves")


def storage_settings(config: Any) -> dict[str, Any]:
  """Returns the settings of a MaxText config that decide how weights are stored."""
  return {name: getattr(config, name) for name in _STORAGE_SETTINGS}


def model_leaves(abstract_model: nnx.Module) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns shape and dtype of every parameter, by its name in a checkpoint."""
  flat = nnx.to_flat_state(nnx.state(abstract_model, nnx.Param))
  return {".".join(map(str, path)): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in flat}


def stored_leaves(path: str) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns shape and dtype of every leaf of the checkpoint `items` directory, without the `params.params.` before it.

  What the trainer saves beside the parameters is left out.

  Raises:
    InputError: if there is no complete Orbax checkpoint of parameters, or it holds anything else.
  """
  import orbax.checkpoint as ocp
  from etils import epath

  if "://" not in path and not (pathlib.Path(path) / _METADATA_FILE).is_file():
    raise InputError(
      f"load_parameters_path is {path!r}: no Orbax checkpoint there (no {_METADATA_FILE}); expected OUT/0/items, or "
      "RUN/checkpoints/STEP/items of a training run"
    )
  if _UNFINISHED in path:
    raise InputError(f"load_parameters_path is {path!r}: by its name the trainer was killed while it saved that step")
  _check_key_value_store(path)
  try:
    metadata = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True).metadata(epath.Path(path))
    tree: Any = metadata.tree if hasattr(metadata, "tree") else metadata
    params = tree[_PARAMETERS][_PARAMETERS]
    others = [f"{_PARAMETERS}.{name}" for name in tree[_PARAMETERS] if name != _PARAMETERS]
    others += [name for name in tree if name not in (_PARAMETERS, *_TRAINERS)]
  except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
    raise InputError(
      f"load_parameters_path is {path!r}: not a checkpoint of parameters: {' '.join(str(error).split())}"
    ) from error
  if others:
    raise InputError(f"load_parameters_path is {path!r}: holds {_shown(others)}, which this model has not")
  return {name: jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype)) for name, leaf in _flatten(params)}


def _check_key_value_store(path: str) -> None:
  """Reads the arrays' metadata of a local checkpoint once: Orbax does it in parallel and complains in many voices."""
  if "://" in path:
    return
  import tensorstore as ts

  spec = {"driver": "ocdbt", "base": f"file://{pathlib.Path(path).resolve()}/"}
  try:
    store = ts.KvStore.open(spec).result()
    keys = store.list().result()
    for value in [store.read(key) for key in keys if key.endswith(b"zarr.json")]:
      value.result()
  except (ValueError, OSError) as error:
    raise InputError(f"{path}: cannot be read: {' '.join(str(error).split())[:300]}; convert again") from error
  if not keys:
    raise InputError(f"{path}: holds no arrays; convert again")


def _flatten(tree: Mapping[str, Any], prefix: str = ""):
  for key, value in tree.items():
    if isinstance(value, Mapping):
      yield from _flatten(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", value


def load_params(path: str, abstract: nnx.State, settings: Mapping[str, Any] | None = None) -> nnx.State:
  """Returns the parameters of the checkpoint at `path`, each where its sharding puts it.

  Args:
    path: The `items` directory.
    abstract: State of nnx.Param whose values are ShapeDtypeStructs with shardings.
    settings: Of the config, as `storage_settings` gives them; compared with what the checkpoint was made for.

  Raises:
    InputError: if the checkpoint is not finished or was made for other settings, tree, shapes or dtypes differ from it,
      the mesh does not divide a leaf, the data cannot be read, or a leaf's content is not what was converted.
  """
  import orbax.checkpoint as ocp
  from etils import epath

  record = read_record(path)
  check_settings(settings or {}, record, path)
  recorded = recorded_leaves(record, path)
  flat = nnx.to_flat_state(abstract)
  names = {path: ".".join(map(str, path)) for path, _ in flat}
  check_fit({names[p]: jax.ShapeDtypeStruct(v.shape, v.dtype) for p, v in flat}, stored_leaves(path), path)
  check_cuts({names[p]: v for p, v in flat})
  target = nnx.to_pure_dict(jax.tree.map(lambda leaf: leaf, abstract))
  restore_args = jax.tree.map(
    lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype), target
  )
  # The handler alone: a Checkpointer waits for the other processes, and one that failed would let them hang.
  handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
  try:
    arguments = ocp.args.PyTreeRestore(
      item={_PARAMETERS: {_PARAMETERS: target}},
      restore_args={_PARAMETERS: {_PARAMETERS: restore_args}},
      partial_restore=True,  # Without the optimizer's state. That the parameters are the model's was compared above.
    )
    restored = handler.restore(epath.Path(path), args=arguments)
  except Exception as error:  # Orbax raises nothing narrower; what TensorStore said is the cause
    reason = " ".join(str(error.__cause__ or error).split())[:300]
    raise InputError(f"{path}: cannot be read: {reason}; convert again") from error
  nnx.replace_by_pure_dict(abstract, restored[_PARAMETERS][_PARAMETERS])
  check_content({names[p]: v[...] for p, v in nnx.to_flat_state(abstract)}, recorded, path)
  return abstract


def bytes_read() -> int:
  """Returns the bytes that this process has read through TensorStore since it started, from disks and buckets."""
  import tensorstore as ts

  metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
  found = [metric for metric in metrics if metric["name"].endswith("/bytes_read")]
  return sum(int(value["value"]) for metric in found for value in metric["values"])


def check_fit(model: Mapping[str, jax.ShapeDtypeStruct], stored: Mapping[str, jax.ShapeDtypeStruct], path: str) -> None:
  """Raises InputError unless the checkpoint holds exactly the model's leaves, in its shapes and dtypes."""
  faults = [f"{name} is missing" for name in sorted(model.keys() - stored.keys())]
  faults += [f"{name} is not part of the model" for name in sorted(stored.keys() - model.keys())]
  for name in sorted(model.keys() & stored.keys()):
    found, expected = stored[name], model[name]
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
      faults.append(f"{name} is {_describe(found)}, expected {_describe(expected)}")
  if not faults:
    return
  raise InputError(f"{path} does not fit the config: {_shown(faults)}. {_likely_cause(model, stored)}")


def check_cuts(leaves: Mapping[str, Any]) -> None:
  """Raises InputError if the mesh would cut a leaf into unequal parts: nothing is padded."""
  faults = []
  for name, leaf in leaves.items():
    try:
      leaf.sharding.shard_shape(leaf.shape)
    except ValueError:
      cuts = {axis: size for axis, size in leaf.sharding.mesh.shape.items() if size > 1}
      faults.append(f"{name} {list(leaf.shape)} by {tuple(leaf.sharding.spec)} of {cuts}")
  if faults:
    raise InputError(f"the mesh does not divide {_shown(faults)}: set parallelism to sizes that do")


class Recorded(NamedTuple):
  """What `convert` recorded of a leaf: its checksum, and the shape of the chunks that it was made over."""

  checksum: str
  chunk_shape: tuple[int, ...]


def read_record(path: str) -> dict[str, Any] | None:
  """Returns the record of the conversion whose OUT/0/items `path` is; None for what `convert` did not write.

  Raises:
    InputError: if the conversion is not finished, or its record cannot be read or is of another version.
  """
  from etils import epath

  out = epath.Path(path).parent.parent
  if (out / UNFINISHED).exists():
    raise InputError(
      f"{path}: the conversion that makes it is not finished ({out / UNFINISHED} is there): finish it first"
    )
  record = out / checksums.RECORD
  if not record.exists():
    return None
  try:
    found = json.loads(record.read_text())
    schema = found["schema"]
  except (KeyError, TypeError, ValueError, OSError) as error:
    raise InputError(f"{record}: cannot be read: {' '.join(str(error).split())}; convert again") from error
  if schema != RECORD_SCHEMA:
    raise InputError(f"{record}: is of schema {schema!r}, this version reads {RECORD_SCHEMA}; convert again")
  missing = [marker for marker in MARKERS if found.get("commit") == "marker" and not (out / marker).exists()]
  if missing:
    raise InputError(f"{path}: its commit marker {out / missing[0]} is missing: not finished, or not copied to the end")
  return found


def recorded_leaves(record: Mapping[str, Any] | None, path: str) -> dict[str, Recorded]:
  """Returns what a record says of each leaf; nothing without a record.

  Raises:
    InputError: if it does not say it.
  """
  if record is None:
    return {}
  sums, shapes = record.get(checksums.FIELD), record.get(checksums.CHUNKS_FIELD)
  if (
    not isinstance(sums, dict)
    or not isinstance(shapes, dict)
    or not sums
    or sums.keys() != shapes.keys()
    or not all(isinstance(value, str) for value in sums.values())
    or not all(map(_is_shape, shapes.values()))
  ):
    raise InputError(
      f"{path}: its {checksums.RECORD} lacks {checksums.FIELD} and {checksums.CHUNKS_FIELD} of each leaf; convert again"
    )
  return {name: Recorded(checksum, tuple(shapes[name])) for name, checksum in sums.items()}


def _is_shape(value: Any) -> bool:
  return isinstance(value, list) and all(type(size) is int and size > 0 for size in value)


def check_settings(settings: Mapping[str, Any], record: Mapping[str, Any] | None, path: str) -> None:
  """Raises InputError if a checkpoint was made for other settings than these.

  Args:
    settings: Of the config, as `storage_settings` gives them.
    record: Of the conversion; nothing is said without one.
    path: For the message.
  """
  if record is None:
    return
  made = {
    "scan_layers": _field(record, "options", "scan"),
    "packed_modules": _field(record, "packed_modules"),
    "fp8_modules": _field(record, "fp8_modules"),
    "float32_leaves": _field(record, "stored", "float32_leaves"),
  }
  faults = []
  for name, value in settings.items():
    wanted = sorted(value) if isinstance(value, list | tuple) else value
    found = sorted(made[name], key=str) if isinstance(made[name], list) else made[name]
    if found != wanted:
      faults.append(f"{name} is {json.dumps(wanted)} in the config, {json.dumps(found)} in the checkpoint")
  if faults:
    raise InputError(
      f"{path}: made for another config: {'; '.join(faults)}. Use the decode.yml written with it, or convert again"
    )


def _field(record: Any, *names: str) -> Any:
  """A value of a record, None where it has none."""
  for name in names:
    record = record.get(name) if isinstance(record, dict) else None
  return record


def check_content(leaves: Mapping[str, Any], recorded: Mapping[str, Recorded], path: str) -> None:
  """Raises InputError if one of the smallest leaves, CHECKED_BYTES of them together, is not what was recorded of it."""
  faults, left = [], CHECKED_BYTES
  owners = {held.checksum: name for name, held in recorded.items()}
  for name, leaf in sorted(leaves.items(), key=lambda item: item[1].nbytes) if recorded else ():
    left -= leaf.nbytes
    if left < 0:
      break
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
      continue  # spread over several hosts: none of them has all its bytes
    held = recorded.get(name)
    fits = held is not None and len(held.chunk_shape) == leaf.ndim
    found = checksums.array_checksum(np.asarray(leaf), held.chunk_shape) if held and fits else "none"
    if held is None or found != held.checksum:
      whose = f", which is {owners[found]}" if found in owners else ""
      faults.append(f"{name} has checksum {found}{whose}, recorded is {held.checksum if held else 'none'}")
  if faults:
    raise InputError(f"{path} is not what was converted: {_shown(faults)}. Convert again")


def _shown(faults: list[str]) -> str:
  more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
  return f"{'; '.join(faults[:_SHOWN])}{more}"


def _describe(leaf: jax.ShapeDtypeStruct) -> str:
  return f"{leaf.dtype}{list(leaf.shape)}"


def _likely_cause(model: Mapping[str, jax.ShapeDtypeStruct], stored: Mapping[str, jax.ShapeDtypeStruct]) -> str:
  def folded(names):
    return any(name.startswith("decoder.lead_") for name in names)

  if folded(model) != folded(stored):
    return f"The checkpoint was written with scan_layers: {str(folded(stored)).lower()}: set that, or convert again"
  widths = {(leaf.dtype.name, stored[name].dtype.name) for name, leaf in model.items() if name in stored}
  if widths & {("float32", "bfloat16"), ("bfloat16", "float32")}:
    return (
      "Use the weight_dtype and float32_leaves of the decode.yml that was written with the checkpoint, or of the "
      "config that it was trained with"
    )
  return "Use the decode.yml that was written with the checkpoint, or the config that it was trained with"
