"""The shipped YAMLs against the sizes of the released models, typed out from their config.json a second time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kimi_k3.config import ALWAYS_FLOAT32, FLOAT32_KINDS, KimiK3Config
from kimi_k3.maxtext_keys import to_maxtext

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

FAMILY = {
  "vocab_size": 163840,
  "rms_norm_eps": 1e-5,
  "kv_lora_rank": 512,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "mla_use_nope": True,
  "first_k_dense_replace": 1,
  "moe_layer_freq": 1,
  "moe_router_activation_func": "sigmoid",
  "moe_renormalize": True,
  "num_expert_group": 1,
  "topk_group": 1,
  "use_grouped_topk": True,
  "tie_word_embeddings": False,
  "num_nextn_predict_layers": 0,
  "bos_token_id": 163584,
  "eos_token_id": 163586,
  "pad_token_id": 163839,
}

K3_MLA = [4 * i for i in range(1, 24)] + [93]
KIMI_K3 = FAMILY | {
  "hidden_size": 7168,
  "num_hidden_layers": 93,
  "num_attention_heads": 96,
  "num_key_value_heads": 96,
  "intermediate_size": 33792,
  "moe_intermediate_size": 3072,
  "routed_expert_hidden_size": 3584,
  "latent_moe_use_norm": True,
  "num_experts": 896,
  "num_experts_per_token": 16,
  "num_shared_experts": 2,
  "routed_scaling_factor": 1.0,
  "topk_method": "noaux_tc",
  "q_lora_rank": 1536,
  "mla_use_output_gate": True,
  "linear_attn_config": {
    "num_heads": 96,
    "head_dim": 128,
    "short_conv_kernel_size": 4,
    "gate_lower_bound": -5.0,
    "use_full_rank_gate": True,
    "full_attn_layers": K3_MLA,
    "kda_layers": [i for i in range(1, 94) if i not in K3_MLA],
  },
  "attn_res_block_size": 12,
  "hidden_act": "situ",
  "activation_situ_beta": 4.0,
  "activation_situ_linear_beta": 25.0,
  "max_position_embeddings": 1048576,
}

KIMI_LINEAR_MLA = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR = FAMILY | {
  "hidden_size": 2304,
  "num_hidden_layers": 27,
  "num_attention_heads": 32,
  "num_key_value_heads": 32,
  "intermediate_size": 9216,
  "moe_intermediate_size": 1024,
  "num_experts": 256,
  "num_experts_per_token": 8,
  "num_shared_experts": 1,
  "routed_scaling_factor": 2.446,
  "q_lora_rank": None,
  "linear_attn_config": {
    "num_heads": 32,
    "head_dim": 128,
    "short_conv_kernel_size": 4,
    "full_attn_layers": KIMI_LINEAR_MLA,
    "kda_layers": [i for i in range(1, 28) if i not in KIMI_LINEAR_MLA],
  },
  "hidden_act": "silu",
  "model_max_length": 1048576,
}


def shipped(name: str) -> dict[str, Any]:
  return yaml.safe_load((CONFIGS / name).read_text())


def as_yaml(config: dict[str, Any], *, packed: tuple[str, ...], float32: tuple[str, ...]) -> dict[str, Any]:
  """The settings of a released config.json, without those that decode.yml or the user chooses."""
  keys = to_maxtext(
    KimiK3Config.from_hf(config, packed_modules=packed, float32_leaves=float32), scan_layers=True, dtype="bfloat16"
  )
  return {k: v for k, v in keys.items() if k not in ("scan_layers", "dtype", "weight_dtype")}


def test_kimi_k3_yml_is_the_released_model():
  released = {"model_type": "kimi_k3", "text_config": KIMI_K3}
  assert shipped("models/kimi-k3.yml") == as_yaml(released, packed=("experts",), float32=FLOAT32_KINDS)


def test_kimi_linear_yml_is_the_released_model():
  assert shipped("models/kimi-linear-48b-a3b.yml") == as_yaml(KIMI_LINEAR, packed=(), float32=ALWAYS_FLOAT32)


def test_tiny_yml_is_the_golden_checkpoint(k3_tiny):
  released = json.loads((k3_tiny.checkpoint / "config.json").read_text())
  assert shipped("models/kimi-k3-tiny.yml") == as_yaml(released, packed=("experts",), float32=FLOAT32_KINDS)


def test_decode_yml_leaves_the_model_open_and_stands_on_maxtexts_defaults():
  assert shipped("decode.yml") == {
    "base_config": "base.yml",
    "scan_layers": True,
    "dtype": "bfloat16",
    "weight_dtype": "bfloat16",
    "attention": "dot_product",
  }


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yml")), ids=lambda path: path.stem)
def test_no_key_is_given_twice(path):
  keys = [line.split(":")[0] for line in path.read_text().splitlines() if line and line[0].isalpha()]
  assert len(set(keys)) == len(keys) == len(yaml.safe_load(path.read_text()))


def test_these_are_the_models_that_ship():
  assert sorted(path.stem for path in (CONFIGS / "models").iterdir()) == [
    "kimi-k3", "kimi-k3-nano", "kimi-k3-tiny", "kimi-linear-48b-a3b",
  ]  # fmt: skip
