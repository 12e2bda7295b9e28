"""A step that MaxText's trainer saved: what it is, and whether it is whole. Its weights are not read here.

RUN/checkpoints/STEP/_CHECKPOINT_METADATA, commit_success.txt   when it was finished, and that it was
RUN/checkpoints/STEP/items/                                     all arrays: parameters, optimizer, random streams
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimi_k3.config import KimiK3Config
from kimi_k3.convert import appear, hf_config, mapping, output, storage, store
from kimi_k3.convert.database import Database, chunk_faults, differing_arrays
from kimi_k3.convert.faults import refuse_any
from kimi_k3.convert.mapping import Leaf, StoredForm
from kimi_k3.convert.progress import say
from kimi_k3.convert.write import leaf_name
from kimi_k3.errors import InputError
from kimi_k3.training import record

ITEMS = "items"  # of a step, as MaxText names it
_STEPS = "checkpoints"  # of a run
COMMIT_MARKER = "commit_success.txt"  # written last, by Orbax
STEP_METADATA = "_CHECKPOINT_METADATA"
TREE_METADATA = "_METADATA"
UNFINISHED_SUFFIX = ".orbax-checkpoint-tmp"
# Beside the parameters: the optimizer's state, the step, and random streams that nobody draws from after training.
_NOT_WEIGHTS = re.compile(r"opt_state[./].*|step/.*|nnx_aux\..*\.(rngs|dropout)\..*")
ANOTHER_STEP = "export another step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
  """A step of a training run. Nothing is ever written to it.

  Attributes:
    path: Of the step: local path or URL.
    config: The model, as it was trained.
    form: How its release stores it.
    leaves: What the step must hold, in the order of the model.
    database: Its arrays.
    fingerprint: Hex digest of its metadata, which differ between any two saves.
  """

  path: str
  config: KimiK3Config
  form: StoredForm
  leaves: tuple[Leaf, ...]
  database: Database
  fingerprint: str


def open_training(step: str | Path, config: KimiK3Config, *, scan: bool, weight_dtype: str) -> Training:
  """Returns a step of a training run, after a check of everything that shows without reading a weight.

  Args:
    step: RUN/checkpoints/STEP, or its `items`; a local path or a URL.
    config: The model as it was trained.
    scan: Whether its layers are folded.
    weight_dtype: Of the leaves that are not always float32: "float32" or "bfloat16".

  Raises:
    InputError: if there is no finished step of a trainer, or it does not hold exactly this model's parameters, naming
      every leaf that is missing, unexpected, of another shape or dtype, or damaged.
  """
  where, path = str(step), _step_path(step)
  held = store.open_store(path)
  metadata = _step_metadata(where, path, held)
  if config.packed_modules or config.fp8_modules:
    packed = ", ".join((*config.packed_modules, *config.fp8_modules))
    raise InputError(f"the config stores {packed} packed, which is not trained: set packed_modules=[] fp8_modules=[]")
  saved_scan = (metadata[0].get("custom_metadata") or {}).get("scan_layers")
  if saved_scan is not None and bool(saved_scan) != scan:
    said = [str(bool(value)).lower() for value in (saved_scan, scan)]
    raise InputError(f"{where}: was trained with scan_layers={said[0]}, the config says {said[1]}: set it as trained")
  _check_architecture(where, path, config)
  form = release_form(config)
  database = Database(store.in_directory(path, ITEMS), ANOTHER_STEP)
  leaves = trained_leaves(config, form, scan=scan, weight_dtype=weight_dtype)
  _check_arrays(where, database, leaves)
  digest = hashlib.sha256(b"\0".join(metadata[1:]))
  return Training(path=path, config=config, form=form, leaves=leaves, database=database, fingerprint=digest.hexdigest())


def release_form(config: KimiK3Config) -> StoredForm:
  """Returns how a release of this model stores what its config leaves open: K3's form, or Kimi-Linear's."""
  heads = config.kda_num_heads
  if hf_config.is_wrapped(config):
    return StoredForm(
      prefix=storage.TEXT_PREFIX, packed_modules=(), a_log_shape=(max(config.kda_head_dim, heads),)
    )  # zeros past the heads
  return StoredForm(prefix="", packed_modules=(), a_log_shape=(1, 1, heads, 1))


def trained_leaves(config: KimiK3Config, form: StoredForm, *, scan: bool, weight_dtype: str) -> tuple[Leaf, ...]:
  """Returns the leaves that a trainer saves: those of the model, with matrices in `weight_dtype`."""
  held = mapping.leaves(config, form, scan=scan)
  return tuple(leaf if leaf.dtype == "float32" else dataclasses.replace(leaf, dtype=weight_dtype) for leaf in held)


def steps_of(path: str) -> Path:
  """Returns the directory in which a step lies with others of its run: a stranger there would be taken for a step."""
  step = Path(path)
  return step.parent if step.parent.name == _STEPS else step


def _check_architecture(where: str, path: str, config: KimiK3Config) -> None:
  """Refuses a config that is not the run's, where arrays would have the same shapes. Says so if the run has no note."""
  run, steps = ["", *path.rsplit("/", 2)][-3:-1]
  noted = store.open_store(run).read(record.NAME) if steps == _STEPS else None
  if noted is None:
    say(f"{where}: no {record.NAME} two directories up: what shapes do not show is taken from the config unchecked")
    return
  try:
    differing = record.differences(noted, config)
  except ValueError as error:
    raise InputError(f"{run}/{record.NAME}: {error}: damaged; copy the run again") from error
  if differing:
    raise InputError(
      f"{where}: was trained with {'; '.join(differing)}, as the config says: give the config of the run"
    )


def _step_path(step: str | Path) -> str:
  path = str(step)
  if not store.is_url(path):
    path = str(appear.local(path))
  path = path.rstrip("/")
  head, _, last = path.rpartition("/")
  return head if last == ITEMS else path


def _step_metadata(where: str, path: str, held: store.Store) -> tuple[dict[str, Any], bytes, bytes, bytes]:
  """The step's own metadata, and the bytes that tell it from any other. Refuses what is no finished step."""
  if UNFINISHED_SUFFIX in path:
    raise InputError(f"{where}: by its name the trainer was killed while it saved it: {ANOTHER_STEP}")
  if held.read(output.RECORD) is not None:
    raise InputError(f"{where}: holds {output.RECORD}: what `kimi-k3 convert` made is exported without --config")
  found = {name: held.read(name) for name in (STEP_METADATA, COMMIT_MARKER)}
  items = {name: held.read(f"{ITEMS}/{name}") for name in (TREE_METADATA, "manifest.ocdbt")}
  if not any(value is not None for value in (*found.values(), *items.values())):
    raise InputError(f"{where}: no step of a trainer there, expected RUN/checkpoints/STEP{_steps_below(path)}")
  if missing := [name for name, value in found.items() if value is None]:
    raise InputError(
      f"{where}: {' and '.join(missing)} missing: not finished, or not copied to the end: {ANOTHER_STEP}"
    )
  tree = _json(f"{where}/{ITEMS}/{TREE_METADATA}", items[TREE_METADATA])
  if not (tree.get("use_ocdbt") and tree.get("use_zarr3")):
    raise InputError(
      f"{where}: saved with checkpoint_storage_use_ocdbt or checkpoint_storage_use_zarr3 false: set both to true, "
      "MaxText's default, and save again"
    )
  if items["manifest.ocdbt"] is None:
    raise InputError(f"{where}: {ITEMS}/manifest.ocdbt missing: not copied to the end, or damaged: {ANOTHER_STEP}")
  step = _json(f"{where}/{STEP_METADATA}", found[STEP_METADATA])
  if not step.get("commit_timestamp_nsecs"):
    raise InputError(f"{where}: {STEP_METADATA} has no time of commit: not finished: {ANOTHER_STEP}")
  return step, found[STEP_METADATA] or b"", items[TREE_METADATA] or b"", items["manifest.ocdbt"]


def _steps_below(path: str) -> str:
  """Where the directory of all steps was given: a word about those that are there."""
  below = Path(path)
  if store.is_url(path) or not below.is_dir():
    return ""
  steps = sorted((int(child.name) for child in below.iterdir() if child.name.isdigit()), reverse=True)
  return f"; the last step below it is {steps[0]}" if steps else ""


def _json(what: str, data: bytes | None) -> dict[str, Any]:
  try:
    value = json.loads(data or b"")
  except ValueError as error:
    raise InputError(f"{what}: missing or damaged, not JSON: {ANOTHER_STEP}") from error
  if not isinstance(value, dict):
    raise InputError(f"{what}: damaged, a JSON {type(value).__name__} where an object was expected: {ANOTHER_STEP}")
  return value


def _check_arrays(where: str, database: Database, leaves: Sequence[Leaf]) -> None:
  """The step holds exactly these leaves, complete; beside them only what is known to be no weight."""
  arrays = database.arrays
  expected = {leaf_name(leaf): leaf for leaf in leaves}
  faults = [
    f"{name}: missing, expected {leaf.dtype} {list(leaf.shape)}"
    for name, leaf in expected.items()
    if name not in arrays.held and name not in arrays.damaged
  ]
  faults += [f"{name}: unexpected, no such leaf in the model" for name in arrays.held if name not in expected]
  others = {key.partition("/")[0]: None for key in arrays.strays if not _NOT_WEIGHTS.fullmatch(key)}
  faults += [f"{name}: unexpected, neither a parameter nor the optimizer's state" for name in others]
  faults += [f"{name}: {reason}" for name, reason in differing_arrays(leaves, arrays).items()]
  faults += [f"{name}: {reason}" for name, reason in (*arrays.damaged.items(), *chunk_faults(arrays).items())]
  faults += [f"{ITEMS}/{fault}" for fault in database.data_faults()]
  refuse_any(faults, f"{where} is not a whole step of the config's model: give the config of the training run")
