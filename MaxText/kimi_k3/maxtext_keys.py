"""The same fields under MaxText's names: a table, read in both directions. Does not import MaxText."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from kimi_k3.config import KimiK3Config, type_fault
from kimi_k3.errors import InputError

DECODER_BLOCK = "kimi_k3"

# Fields that MaxText has under a name of its own, with the same meaning.
UPSTREAM_NAMES = {
  "hidden_size": "base_emb_dim",
  "vocab_size": "vocab_size",
  "num_layers": "base_num_decoder_layers",
  "num_heads": "base_num_query_heads",
  "num_kv_heads": "base_num_kv_heads",
  "dense_mlp_dim": "base_mlp_dim",
  "expert_mlp_dim": "base_moe_mlp_dim",
  "first_k_dense_replace": "first_num_dense_layers",
  "num_experts": "num_experts",
  "num_experts_per_token": "num_experts_per_tok",
  "num_shared_experts": "shared_experts",
  "routed_scaling_factor": "routed_scaling_factor",
  "q_lora_rank": "q_lora_rank",
  "kv_lora_rank": "kv_lora_rank",
  "qk_nope_head_dim": "qk_nope_head_dim",
  "qk_rope_head_dim": "qk_rope_head_dim",
  "v_head_dim": "v_head_dim",
  "rms_norm_eps": "normalization_layer_epsilon",
  "max_position_embeddings": "max_position_embeddings",
  "tie_word_embeddings": "logits_via_embedding",
  "num_nextn_predict_layers": "mtp_num_layers",
}

# Every other field is new to MaxText and keeps its name.
NEW_NAMES = tuple(f.name for f in dataclasses.fields(KimiK3Config) if f.name not in UPSTREAM_NAMES)

_SETTING_OF_KEY = {
  field.metadata["key"].hf: UPSTREAM_NAMES.get(field.name, field.name)
  for field in dataclasses.fields(KimiK3Config)
  if field.metadata
} | {"full_attn_layers": "full_attention_layers"}

# What MaxText must be told about any model of this family, whatever its sizes.
_FIXED = {
  "decoder_block": DECODER_BLOCK,
  "attention_type": "mla",
  "mla_naive_kvcache": False,
  "use_mla_absorbed_mqa": False,  # absorbed in decode all the same: decided by the mode, see maxtext_adapter/mla.py
  "enable_dropout": False,
  # MaxText's check for "every layer is MoE" must not trip on models whose first layers are dense by another rule.
  "inhomogeneous_layer_cycle_interval": 4,
}

REQUIRED_KEYS = frozenset(
  ("decoder_block", "attention_type", "original_max_position_embeddings", *UPSTREAM_NAMES.values(), *NEW_NAMES)
)


def to_maxtext(config: KimiK3Config, *, scan_layers: bool, dtype: str) -> dict[str, Any]:
  """Returns the MaxText settings of a model: everything a YAML needs but paths and lengths.

  Args:
    config: The architecture.
    scan_layers: Folded or unrolled.
    dtype: Compute and weight dtype, as the source names it ("bfloat16").
  """
  keys = dict(_FIXED)
  for field in dataclasses.fields(KimiK3Config):
    value = getattr(config, field.name)
    keys[UPSTREAM_NAMES.get(field.name, field.name)] = list(value) if isinstance(value, tuple) else value
  keys["q_lora_rank"] = config.q_lora_rank or 0  # MaxText's "no low-rank query"
  keys["original_max_position_embeddings"] = config.max_position_embeddings  # equal: no mscale
  return keys | {"scan_layers": scan_layers, "param_scan_axis": 0, "dtype": dtype, "weight_dtype": dtype}


def type_faults(keys: Mapping[str, Any]) -> list[str]:
  """Returns what is wrong with settings as a user wrote them, before MaxText's lax types take true, "1" or 1.0 for 1.

  A null where a value is needed is named too: MaxText would take it for a field that was never set.
  """
  faults = []
  for field in dataclasses.fields(KimiK3Config):
    name, key = UPSTREAM_NAMES.get(field.name, field.name), field.metadata.get("key")
    if name not in keys:
      continue
    value = list(keys[name]) if isinstance(keys[name], tuple) else keys[name]
    if key is None:  # how weights are stored
      if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        faults.append(f"{name} is {'null' if value is None else repr(value)}, expected a list of names")
    elif fault := type_fault(name, value, key):
      faults.append(fault)
  return faults


def from_maxtext(keys: Mapping[str, Any]) -> KimiK3Config:
  """Returns the architecture that MaxText settings describe.

  Raises:
    InputError: naming each field whose value nobody can compute.
    KeyError: if a setting is missing altogether, which the adapter has ruled out before.
  """
  values = {}
  for field in dataclasses.fields(KimiK3Config):
    value = keys[UPSTREAM_NAMES.get(field.name, field.name)]
    values[field.name] = tuple(value) if isinstance(value, list | tuple) else value
  values["q_lora_rank"] = values["q_lora_rank"] or None
  try:
    return KimiK3Config(**values)
  except InputError as error:
    raise InputError(_in_maxtexts_words(str(error))) from error


def _in_maxtexts_words(message: str) -> str:
  """A refusal that speaks of config.json, with the names under which these settings were given."""
  return re.sub(r"[\w.]+", lambda word: _SETTING_OF_KEY.get(word[0], word[0]), message)
