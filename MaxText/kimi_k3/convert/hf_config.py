"""The config.json of a model that was not released: written from its architecture, in the form of its relatives.

K3 has a wrapper around the text model's config, Kimi-Linear has none. The names of the keys are those that
`KimiK3Config.from_hf` reads, and what is written is read again before it is returned.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kimi_k3.config import ALWAYS_FLOAT32, FLOAT32_KINDS, MXFP4_GROUP, KimiK3Config
from kimi_k3.convert.storage import QUANTIZATION_FORMAT, WEIGHT_DTYPE
from kimi_k3.errors import InputError

# Everything that is stored in bfloat16 beside packed experts and has a name that a pattern of the release matches.
_IGNORED = (
    "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
    "re:.*vision_tower.*", "re:.*mm_projector.*",
)  # fmt: skip


def is_wrapped(config: KimiK3Config) -> bool:
  """Whether a model is released in K3's wrapper: if it has anything that the flat form has no key for."""
  keys = ((field.name, field.metadata.get("key")) for field in dataclasses.fields(config))
  return any(key is not None and key.k3_only and getattr(config, name) != key.absent for name, key in keys)


def hf_config(config: KimiK3Config) -> dict[str, Any]:
  """Returns the config.json of a model: in K3's wrapper or flat, with a quantization_config if experts are packed.

  Args:
    config: The architecture, and how its weights will be stored.

  Raises:
    InputError: if that form of release stores other kinds of leaves in float32, or packs other modules.
  """
  wrapped = is_wrapped(config)
  _check_storage(config, wrapped=wrapped)
  text = _text(config, wrapped=wrapped)
  if config.packed_modules:
    text["quantization_config"] = _quantization()
  result = text
  if wrapped:
    shared = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")}
    architectures = ["KimiK3ForConditionalGeneration"]
    result = {"architectures": architectures, "dtype": WEIGHT_DTYPE, "model_type": "kimi_k3", **shared}
    result["text_config"] = text
  stored = {name: getattr(config, name) for name in ("packed_modules", "fp8_modules", "float32_leaves")}
  read = KimiK3Config.from_hf(result, **stored)
  assert read == config, f"config.json would be read as {read}, written of {config}"
  return result


def _check_storage(config: KimiK3Config, *, wrapped: bool) -> None:
  if wrapped and set(config.float32_leaves) != set(FLOAT32_KINDS):
    missing = sorted(set(FLOAT32_KINDS) - set(config.float32_leaves))
    raise InputError(
      f"float32_leaves is {list(config.float32_leaves)}: K3's released form stores {', '.join(missing)} in float32 "
      f"too: train with float32_leaves={list(FLOAT32_KINDS)}"
    )
  assert set(ALWAYS_FLOAT32) <= set(config.float32_leaves), config.float32_leaves
  if others := {*config.packed_modules, *config.fp8_modules} - {"experts"}:
    raise InputError(f"{', '.join(sorted(others))} packed: only experts are packed in a release")


def _text(config: KimiK3Config, *, wrapped: bool) -> dict[str, Any]:
  """All keys that carry arithmetic, and what a reader of the family expects beside them."""
  text: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "dtype": WEIGHT_DTYPE,
    "model_type": "kimi_linear",
    "use_cache": True,
  }
  for field in dataclasses.fields(config):
    key = field.metadata.get("key")
    if key is None or (key.k3_only and not wrapped):
      continue
    value = getattr(config, field.name)
    scope, _, name = key.hf.rpartition(".")
    if name == "max_position_embeddings" and not wrapped:
      name = "model_max_length"  # Kimi-Linear's name for it
    into = text.setdefault(scope, {}) if scope else text
    into[name] = list(value) if isinstance(value, tuple) else value
  return text


def _quantization() -> dict[str, Any]:
  """What the release says of packed experts."""
  weights = {
      "actorder": None, "block_structure": None, "dynamic": False, "group_size": MXFP4_GROUP, "num_bits": 4,
      "observer": "minmax", "observer_kwargs": {}, "scale_dtype": "torch.uint8", "strategy": "group", "symmetric": True,
      "type": "float", "zp_dtype": None,
  }  # fmt: skip
  group = {"format": QUANTIZATION_FORMAT, "input_activations": None, "output_activations": None, "targets": ["Linear"]}
  return {
    "config_groups": {"group_0": group | {"weights": weights}},
    "format": QUANTIZATION_FORMAT,
    "global_compression_ratio": None,
    "ignore": list(_IGNORED),
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
  }
