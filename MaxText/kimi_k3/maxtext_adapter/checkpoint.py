"""Comparing a checkpoint with the model before loading it, and loading it.

MaxText's own loader casts dtypes, un-transposes, repeats a half-width array and ignores extra keys, and it makes the
whole model from random numbers first. So tree, shapes and dtypes are compared here, from the checkpoint's metadata
alone, and only an exact fit is loaded, straight into the shards that hold it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from kimi_k3.errors import InputError

_SHOWN = 6  # offenders named in full; more are counted
_METADATA_FILE = "_METADATA"


def model_leaves(abstract_model: nnx.Module) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns shape and dtype of every parameter, by its name in a checkpoint."""
  flat = nnx.to_flat_state(nnx.state(abstract_model, nnx.Param))
  return {".".join(map(str, path)): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in flat}


def stored_leaves(path: str) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns shape and dtype of every leaf of the checkpoint `items` directory, without the `params.params.` before it.

  Raises:
    InputError: if there is no complete Orbax checkpoint of parameters.
  """
  import orbax.checkpoint as ocp
  from etils import epath

  if "://" not in path and not (pathlib.Path(path) / _METADATA_FILE).is_file():
    raise InputError(
      f"load_parameters_path is {path!r}: no Orbax checkpoint there (no {_METADATA_FILE}); expected OUT/0/items"
    )
  _check_key_value_store(path)
  try:
    metadata = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True).metadata(epath.Path(path))
    tree = metadata.tree if hasattr(metadata, "tree") else metadata
    params = tree["params"]["params"]
  except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
    raise InputError(
      f"load_parameters_path is {path!r}: not a checkpoint of parameters: {' '.join(str(error).split())}"
    ) from error
  return {name: jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype)) for name, leaf in _flatten(params)}


def _check_key_value_store(path: str) -> None:
  """Lists the keys of a local checkpoint once: Orbax reads them in parallel and complains in many voices."""
  if "://" in path:
    return
  import tensorstore as ts

  spec = {"driver": "ocdbt", "base": f"file://{pathlib.Path(path).resolve()}/"}
  try:
    keys = ts.KvStore.open(spec).result().list().result()
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


def load_params(path: str, abstract: nnx.State) -> nnx.State:
  """Returns the parameters of the checkpoint at `path`, each where its sharding puts it.

  Args:
    path: The `items` directory.
    abstract: State of nnx.Param whose values are ShapeDtypeStructs with shardings.

  Raises:
    InputError: if tree, shapes or dtypes differ from the checkpoint's, or its data cannot be read.
  """
  import orbax.checkpoint as ocp

  flat = nnx.to_flat_state(abstract)
  names = {path: ".".join(map(str, path)) for path, _ in flat}
  check_fit({names[p]: jax.ShapeDtypeStruct(v.shape, v.dtype) for p, v in flat}, stored_leaves(path), path)
  target = nnx.to_pure_dict(jax.tree.map(lambda leaf: leaf, abstract))
  restore_args = jax.tree.map(
    lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype), target
  )
  checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
  try:
    restored = checkpointer.restore(
      pathlib.Path(path) if "://" not in path else path,
      item={"params": {"params": target}},
      restore_args={"params": {"params": restore_args}},
    )
  except Exception as error:  # Orbax raises nothing narrower; what TensorStore said is the cause
    reason = " ".join(str(error.__cause__ or error).split())[:300]
    raise InputError(f"{path}: cannot be read: {reason}; convert again") from error
  nnx.replace_by_pure_dict(abstract, restored["params"]["params"])
  return abstract


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
  more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
  raise InputError(
    f"{path} does not fit the config: {'; '.join(faults[:_SHOWN])}{more}. {_likely_cause(model, stored)}"
  )


def _describe(leaf: jax.ShapeDtypeStruct) -> str:
  return f"{leaf.dtype}{list(leaf.shape)}"


def _likely_cause(model: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
  def folded(names):
    return any(name.startswith("decoder.lead_") for name in names)

  if folded(model) != folded(stored):
    return f"The checkpoint was written with scan_layers: {str(folded(stored)).lower()}: set that, or convert again"
  return "Use the decode.yml that was written with the checkpoint"
