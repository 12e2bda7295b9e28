"""Reading a YAML config with command-line settings, in one clear line when something is wrong with it."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import pydantic

from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter.quiet import quiet
from kimi_k3.maxtext_adapter.register import command_line, own_settings, register
from kimi_k3.maxtext_keys import DECODER_BLOCK
from kimi_k3.sharding import check_form

_SETTING = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)

_SUFFIX = ".yml"

# What a run of ours never needs of MaxText, and would trip over: run directories, the trainer's checkpoint manager.
_DEFAULTS = {
  "run_name": "kimi-k3",
  "base_output_directory": "maxtext_output",
  "enable_checkpointing": False,
  "log_config": False,
  "skip_jax_distributed_system": True,
}


def explicit_settings(path: str, settings: Sequence[str]) -> dict[str, Any]:
  """Returns what the user said: the settings given and those of the config files that are not MaxText's own.

  Raises:
    InputError: if the file is missing or no YAML, or a setting is not key=value or is given twice.
  """
  import omegaconf
  import yaml

  if not path.endswith(_SUFFIX):
    raise InputError(f"{path}: expected a file that ends in {_SUFFIX}: MaxText takes no other for a config")
  if not pathlib.Path(path).is_file():
    raise InputError(
      f"{path}: no such file; expected a YAML config such as the decode.yml that `kimi-k3 convert` writes"
    )
  faulty = [s for s in settings if not _SETTING.fullmatch(s)]
  if faulty:
    raise InputError(f"{' '.join(faulty)}: expected key=value after {path}")
  names = [s.split("=", 1)[0] for s in settings]
  if twice := sorted({n for n in names if names.count(n) > 1}):
    raise InputError(f"{', '.join(twice)} given twice")
  try:
    explicit = own_settings(pathlib.Path(path)) | command_line(settings)
  except (yaml.YAMLError, omegaconf.errors.OmegaConfBaseException, TypeError, ValueError, OSError) as error:
    raise InputError(f"{path}: cannot be read as YAML: {_one_line(error)}") from error
  if "logical_axis_rules" in explicit:
    check_form(explicit["logical_axis_rules"])
  return explicit


def read_config(path: str, settings: Sequence[str], **derived: Any) -> Any:
  """Returns MaxText's HyperParameters of a config of this family.

  Args:
    path: A YAML file.
    settings: key=value, which win over the file.
    derived: Settings worked out by the caller, which must not contradict explicit ones.

  Raises:
    InputError: naming every key that is unknown, missing, of a wrong type or not supported.
  """
  register()
  import jax
  from maxtext.configs import pyconfig

  explicit = explicit_settings(path, settings)
  defaults: dict[str, Any] = {**_DEFAULTS, **_compile_cache(), **derived}
  extra = {k: v for k, v in defaults.items() if k not in explicit}
  if "dataset_type" not in command_line(settings):
    extra["dataset_type"] = "synthetic"  # a training config names files that nothing but the trainer reads
  try:
    with quiet():
      config = pyconfig.HyperParameters(pyconfig._initialize_pydantic(["", path, *settings], **extra))
  except pydantic.ValidationError as error:
    raise InputError(f"{path}: {validation_faults(error)}") from error
  except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
    raise InputError(f"{path}: {_key_fault(error)}") from error
  if config.decoder_block.value != DECODER_BLOCK:
    raise InputError(
      f"{path}: decoder_block is {config.decoder_block.value}, expected {DECODER_BLOCK}: give model_name=kimi-k3 or "
      "use the decode.yml of a converted checkpoint"
    )
  if config.partitioning == "manual":
    _check_manual(path, explicit)
  if config.attention == "flash" and jax.default_backend() == "cpu":  # MaxText would say so in the middle of a trace
    raise InputError(f"{path}: attention is flash, which the cpu backend lacks: set dot_product or autoselected")
  return config


def _check_manual(path: str, explicit: dict[str, Any]) -> None:
  """Names settings that the manual partitioning would not look at."""
  if "logical_axis_rules" in explicit:
    raise InputError(
      f"{path}: logical_axis_rules given, which partitioning 'manual' does not read: set partition_rules"
    )
  sizes = [key for key in explicit if re.fullmatch(r"(ici|dcn)_\w+_parallelism", key)]
  if explicit.get("partition_mesh") and sizes:
    raise InputError(f"{path}: partition_mesh and {', '.join(sorted(sizes))} given: leave one of them out")


def _compile_cache() -> dict[str, str]:
  """JAX's own variable for it wins over MaxText's ~/jax_cache, which would replace it."""
  directory = os.environ.get("JAX_COMPILATION_CACHE_DIR")
  return {} if directory is None else {"jax_cache_dir": directory}


def validation_faults(error: pydantic.ValidationError) -> str:
  """Returns what pydantic found, in one line."""
  from kimi_k3.maxtext_adapter.config import MODEL_NAMES

  faults = []
  for fault in error.errors():
    if fault["loc"][:1] == ("model_name",):  # MaxText's own message lists its hundred names, once for each way to match
      faults.append(
        f"model_name is {fault['input']!r}: unknown; the models of this family are {', '.join(MODEL_NAMES)}"
      )
      continue
    place = ".".join(str(part) for part in fault["loc"] if not str(part).startswith(("literal", "lax-or-strict")))
    message = fault["msg"].removeprefix("Value error, ")
    found = "" if not place or fault["type"] == "value_error" else f" (found {fault['input']!r})"
    faults.append(f"{place + ': ' if place else ''}{message}{found}")
  return "; ".join(dict.fromkeys(faults))


def _key_fault(error: Exception) -> str:
  """MaxText answers an unknown key with a list of all it knows; the key is what matters."""
  text = _one_line(error)
  unknown = re.match(r"'([^']*)' not in ", text)
  return f"unknown key {unknown[1]}" if unknown else text


def _one_line(error: BaseException) -> str:
  return " ".join(str(error).split())
