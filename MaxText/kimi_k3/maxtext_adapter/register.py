"""The one file that patches MaxText: it makes `decoder_block: kimi_k3` known, and nothing else changes.

`register()` checks the version and every seam before it touches any. Importing this module touches none.
"""

from __future__ import annotations

import enum
import functools
import importlib.metadata
import inspect
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter.quiet import quiet
from kimi_k3.maxtext_keys import DECODER_BLOCK, NEW_NAMES, REQUIRED_KEYS

SUPPORTED_VERSIONS = ("0.2.5",)
_ENUM_NAME = "KIMI_K3"
_READERS = ("initialize", "initialize_pydantic", "_initialize_pydantic", "_prepare_for_pydantic")
_MARK = "_kimi_k3"  # set on what we put in place, so that a second register() finds it


class ConfigError(ValueError):
  """A config of this family that cannot be read, in one line. MaxText's own readers let it pass."""


def register() -> None:
  """Makes MaxText build this model from a config with `decoder_block: kimi_k3`. Calling it again does nothing.

  Raises:
    InputError: if MaxText is missing or of a version this was not tested with.
    RuntimeError: if a seam is not where the tested version has it. Nothing has been changed then.
  """
  check_version()
  with quiet():
    _register()


def _register() -> None:
  from maxtext.common import common_types
  from maxtext.configs import pyconfig, types
  from maxtext.layers import nnx_decoders
  from maxtext.models import models
  from maxtext.optimizers import optimizers
  from maxtext.utils import globals as maxtext_globals
  from maxtext.utils import maxtext_utils, train_utils

  if getattr(models.NNXDecoder, _MARK, False):
    return
  block_types = common_types.DecoderBlockType
  _assert_seams(block_types, types.MaxTextConfig, models, nnx_decoders, pyconfig, maxtext_globals)
  _assert_training_seams(optimizers, maxtext_utils, train_utils)
  from kimi_k3.maxtext_adapter.config import TOKENIZERS, KimiMaxTextConfig
  from kimi_k3.maxtext_adapter.training import with_checks, with_flops, with_selection_bias

  member = _extend_enum(block_types, _ENUM_NAME, DECODER_BLOCK)
  for reader in (getattr(pyconfig, name) for name in _READERS):
    reader.__defaults__ = tuple(KimiMaxTextConfig if d is types.MaxTextConfig else d for d in reader.__defaults__)
  pyconfig._initialize_pydantic = _with_our_models(pyconfig, KimiMaxTextConfig)
  maxtext_globals.HF_IDS.update(TOKENIZERS)
  models.NNXDecoder = _decoder_by_block(nnx_decoders.NNXDecoder, member)
  optimizers.get_optimizer = with_selection_bias(optimizers.get_optimizer)
  train_utils.validate_train_config = with_checks(train_utils.validate_train_config)
  maxtext_utils.calculate_tflops_training_per_device = with_flops(maxtext_utils.calculate_tflops_training_per_device)


def register_engine() -> None:
  """Makes MaxEngine usable where JetStream is absent: MaxText's stand-in result is no pytree, which jit needs."""
  register()
  import jax

  with quiet():
    from maxtext.inference.maxengine import maxengine

  results = maxengine.engine_api.ResultTokens
  if not getattr(maxengine.engine_api, "_IS_STUB", False) or getattr(results, _MARK, False):
    return
  static = ("tokens_idx", "valid_idx", "length_idx", "samples_per_slot")
  jax.tree_util.register_pytree_node(
    results,
    lambda r: ((r.data, r.log_prob), tuple(getattr(r, name) for name in static)),
    lambda aux, children: results(data=children[0], log_prob=children[1], **dict(zip(static, aux, strict=True))),
  )
  setattr(results, _MARK, True)


def check_version() -> None:
  """Raises InputError unless the installed MaxText is one this was tested with."""
  supported = " or ".join(SUPPORTED_VERSIONS)
  try:
    found = importlib.metadata.version("maxtext")
  except importlib.metadata.PackageNotFoundError as error:
    raise InputError(f"maxtext is not installed; install maxtext=={supported}") from error
  if found not in SUPPORTED_VERSIONS:
    raise InputError(
      f"maxtext {found} is installed, this package is tested with {supported}: install maxtext=={supported}"
    )


def _assert_seams(block_types, config_class, models, nnx_decoders, pyconfig, maxtext_globals) -> None:
  faults = []
  if block_types.__mro__[1:] != enum.Enum.__mro__ or "DEFAULT" not in block_types.__members__:
    faults.append("common_types.DecoderBlockType is no plain enum")
  defaults = {name: getattr(getattr(pyconfig, name, None), "__defaults__", None) or () for name in _READERS}
  faults += [f"pyconfig.{name} has no default config class" for name, d in defaults.items() if config_class not in d]
  if models.NNXDecoder is not nnx_decoders.NNXDecoder:
    faults.append("models.NNXDecoder is not nnx_decoders.NNXDecoder")
  methods = ("_init_decoder_layers", "_apply_embedding", "apply_output_head", "get_remat_policy", "get_norm_layer")
  faults += [f"NNXDecoder.{m} is missing" for m in methods if not hasattr(nnx_decoders.NNXDecoder, m)]
  helpers = ("_resolve_or_infer_config", "_load_config")
  faults += [f"pyconfig.{h} is missing" for h in helpers if not hasattr(pyconfig, h)]
  if not isinstance(getattr(maxtext_globals, "HF_IDS", None), dict):
    faults.append("globals.HF_IDS is no dict")
  if faults:
    raise RuntimeError(f"MaxText's seams have moved: {'; '.join(faults)}")


def _assert_training_seams(optimizers: Any, maxtext_utils: Any, train_utils: Any) -> None:
  expected = {
    (optimizers, "get_optimizer"): ["config", "learning_rate_schedule", "model", "mesh"],
    (maxtext_utils, "calculate_tflops_training_per_device"): ["config", "log"],
    (train_utils, "validate_train_config"): ["config"],
  }
  for (module, name), parameters in expected.items():
    function = getattr(module, name, None)
    found = list(inspect.signature(function).parameters) if callable(function) else None
    if found != parameters:
      raise RuntimeError(f"MaxText's seams have moved: {module.__name__}.{name} takes {found}, expected {parameters}")


def _extend_enum(cls: Any, name: str, value: str) -> enum.Enum:
  """Adds a member to an enum that has no public way to do so."""
  member = object.__new__(cls)
  member._name_, member._value_, member.__objclass__ = name, value, cls
  member._sort_order_ = len(cls._member_names_)
  cls._member_names_.append(name)
  cls._member_map_[name] = member
  cls._value2member_map_[value] = member
  type.__setattr__(cls, name, member)
  return member


def _decoder_by_block(upstream: type, member: enum.Enum) -> Callable[..., Any]:
  """A constructor that makes our decoder for our block and upstream's for any other."""

  @functools.wraps(upstream, updated=())
  def make_decoder(*args: Any, **kwargs: Any) -> Any:
    config = kwargs["config"] if "config" in kwargs else args[0]
    if config.decoder_block is not member:
      return upstream(*args, **kwargs)
    from kimi_k3.maxtext_adapter.decoder import KimiDecoder

    return KimiDecoder(*args, **kwargs)

  setattr(make_decoder, _MARK, True)
  return make_decoder


def _with_our_models(pyconfig: Any, config_class: type) -> Callable[..., Any]:
  """MaxText's reader, which also finds our model files, and resolves a checkpoint's path beside its config."""
  upstream = pyconfig._initialize_pydantic

  @functools.wraps(upstream)
  def initialize(argv: list[str] | None = None, config_class: type = config_class, **kwargs: Any) -> Any:
    try:
      extra = _extra_settings(pyconfig, argv, kwargs)
    except ValueError as error:
      raise ConfigError(*error.args) from error
    return upstream(argv, config_class, **extra, **kwargs)

  return initialize


def _extra_settings(pyconfig: Any, argv: list[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
  """Settings that MaxText would not find by itself: the model's YAML from our package, an absolute checkpoint path.

  Raises:
    ValueError: for a model of ours whose YAML is nowhere, that lacks a key or has an unknown one, or that the command
      line contradicts.
  """
  path, arguments = pyconfig._resolve_or_infer_config(argv, **kwargs)
  given = command_line(arguments) | kwargs
  own = own_settings(pathlib.Path(path))
  name = given.get("model_name", own.get("model_name", "default"))
  model, found_by_maxtext = _model_settings(pathlib.Path(path), name)
  known = own | model | given
  if faults := _key_faults(known, name):
    raise ValueError("; ".join(faults))
  if known.get("decoder_block") != DECODER_BLOCK:
    return {}
  said_otherwise = _contradictions(model, own | given, allowed=bool(known.get("override_model_config")))
  extra = ({} if found_by_maxtext else model) | said_otherwise
  extra = {key: value for key, value in extra.items() if key not in given}
  checkpoint = own.get("load_parameters_path")
  if checkpoint and "load_parameters_path" not in given:
    extra["load_parameters_path"] = checkpoint
  return extra


def _key_faults(known: dict[str, Any], model_name: str) -> list[str]:
  """All keys that a config of ours lacks, and all that nobody knows: MaxText stops at the first of these alone."""
  ours = "decoder_block" not in known and bool(known.keys() & set(NEW_NAMES))  # it lost its block
  if known.get("decoder_block") != DECODER_BLOCK and not ours:
    return []
  from kimi_k3.maxtext_adapter.config import KimiMaxTextConfig

  fields = KimiMaxTextConfig.model_fields
  known_to_maxtext = set(fields).union(*(getattr(field.annotation, "model_fields", ()) for field in fields.values()))
  faults = []
  if missing := sorted(REQUIRED_KEYS - known.keys()):
    faults.append(f"missing {', '.join(missing)} (model_name is {model_name}): MaxText's own defaults would be used")
  if unknown := sorted(known.keys() - known_to_maxtext - {"base_config"}):
    faults.append(f"unknown key {', '.join(unknown)}")
  return faults


def command_line(arguments: Sequence[str]) -> dict[str, Any]:
  """Returns key=value arguments as MaxText reads them."""
  import omegaconf

  return _as_dict(omegaconf.OmegaConf.from_cli(list(arguments)))


def load_yaml(path: pathlib.Path) -> dict[str, Any]:
  """Returns the settings of a YAML file. Raises ValueError if it holds anything else."""
  import omegaconf

  return _as_dict(omegaconf.OmegaConf.load(path))


def _as_dict(settings: Any) -> dict[str, Any]:
  import omegaconf

  plain = omegaconf.OmegaConf.to_container(settings)
  if not isinstance(plain, dict):
    raise ValueError(f"expected key: value lines, found {type(plain).__name__}")
  return {str(key): value for key, value in plain.items()}


def own_settings(path: pathlib.Path, above: tuple[pathlib.Path, ...] = ()) -> dict[str, Any]:
  """What a config file and its bases say, without MaxText's own files, whose defaults are another model's.

  A checkpoint's path is relative to the file that names it. `above` are the files whose base `path` is; ValueError is
  raised if it is among them.
  """
  from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

  if pathlib.Path(MAXTEXT_CONFIGS_DIR).resolve() in path.resolve().parents or not path.is_file():
    return {}
  settings = load_yaml(path)
  base = settings.pop("base_config", None)
  checkpoint = settings.get("load_parameters_path")
  if isinstance(checkpoint, str) and checkpoint and "://" not in checkpoint:
    settings["load_parameters_path"] = str(path.resolve().parent / checkpoint)
  if base is None:
    return settings
  if not isinstance(base, str):
    raise ValueError(f"base_config is {base!r}, expected a file")
  if path.resolve() in above:
    raise ValueError(f"base_config leads back to {path}")
  return own_settings(path.parent / base, (*above, path.resolve())) | settings


def _model_settings(path: pathlib.Path, name: str) -> tuple[dict[str, Any], bool]:
  """The YAML of a model of ours, and whether MaxText's own search finds it. Empty for any other model."""
  from kimi_k3.maxtext_adapter.config import MODEL_NAMES
  from kimi_k3.resources import configs_dir

  if name not in MODEL_NAMES:
    return {}, True
  beside = [folder / "models" / f"{name}.yml" for folder in (path.parent, path.parent.parent)]
  ours = configs_dir() / "models" / f"{name}.yml"
  for file in (*beside, ours):
    if file.is_file():
      return load_yaml(file), file is not ours
  raise ValueError(f"model_name is {name}, but {name}.yml is neither in {ours.parent} nor in models/ beside the config")


def _contradictions(model: dict[str, Any], said: dict[str, Any], *, allowed: bool) -> dict[str, Any]:
  """What the user says against the model's YAML. MaxText would let the YAML win over a config file in silence."""
  otherwise = {key: value for key, value in said.items() if key in model and value != model[key]}
  if otherwise and not allowed:
    raise ValueError(
      f"{', '.join(sorted(otherwise))} given, but the model's YAML says otherwise: set override_model_config=true"
    )
  return otherwise
