from __future__ import annotations

import dataclasses

import pytest
import yaml

from kimi_k3.config import KimiK3Config
from kimi_k3.errors import InputError
from kimi_k3.maxtext_keys import NEW_NAMES, REQUIRED_KEYS, UPSTREAM_NAMES, from_maxtext, to_maxtext


@pytest.fixture(params=["k3_config", "kimi_linear_config"])
def config(request) -> KimiK3Config:
  return request.getfixturevalue(request.param)


def test_a_config_comes_back_from_maxtexts_names(config):
  assert from_maxtext(to_maxtext(config, scan_layers=True, dtype="bfloat16")) == config


def test_a_config_comes_back_from_yaml(config):
  text = yaml.safe_dump(to_maxtext(config, scan_layers=False, dtype="bfloat16"))
  assert from_maxtext(yaml.safe_load(text)) == config


@pytest.mark.parametrize(
  "changes",
  [
    {"latent_moe_use_norm": False, "moe_renormalize": False, "use_grouped_topk": False},
    {"mla_use_output_gate": False, "kda_full_rank_gate": False},
    {"num_shared_experts": 0, "first_k_dense_replace": 0, "bos_token_id": 0, "packed_modules": ()},
    {"situ_linear_beta": None, "kda_gate_lower_bound": None, "attn_res_block_size": None, "q_lora_rank": None},
  ],
)
def test_false_nought_and_null_come_back(config, changes):
  config = dataclasses.replace(config, **changes)
  assert from_maxtext(to_maxtext(config, scan_layers=True, dtype="bfloat16")) == config


def test_each_field_has_one_name_of_its_own(config):
  fields = {f.name for f in dataclasses.fields(config)}
  assert set(UPSTREAM_NAMES) | set(NEW_NAMES) == fields
  names = [*UPSTREAM_NAMES.values(), *NEW_NAMES]
  assert len(set(names)) == len(names) == len(fields)


def test_nothing_that_must_be_given_is_left_out(config):
  keys = to_maxtext(config, scan_layers=True, dtype="bfloat16")
  assert set(keys) >= REQUIRED_KEYS
  assert all(name in REQUIRED_KEYS for name in UPSTREAM_NAMES.values())


def test_maxtext_is_told_what_its_defaults_would_get_wrong(config):
  keys = to_maxtext(config, scan_layers=False, dtype="float32")
  told = {
    "decoder_block": "kimi_k3",
    "attention_type": "mla",
    "mla_naive_kvcache": False,
    "param_scan_axis": 0,
    "scan_layers": False,
    "dtype": "float32",
    "weight_dtype": "float32",
    "original_max_position_embeddings": config.max_position_embeddings,  # equal: no mscale
  }
  assert told.items() <= keys.items()
  assert keys["q_lora_rank"] == (config.q_lora_rank or 0)  # MaxText's "none"


@pytest.mark.parametrize("change", [{"mla_use_nope": False}, {"hidden_act": "gelu"}, {"kda_layers": [1, 2]}])
def test_settings_nobody_can_compute_are_refused(config, change):
  with pytest.raises(InputError, match=r"mla_use_nope|hidden_act|kda_layers"):
    from_maxtext(to_maxtext(config, scan_layers=True, dtype="bfloat16") | change)
