from __future__ import annotations

import dataclasses

import pytest
import yaml

from kimi_k3.config import KimiK3Config
from kimi_k3.errors import InputError
from kimi_k3.maxtext_keys import NEW_NAMES, REQUIRED_KEYS, UPSTREAM_NAMES, from_maxtext, to_maxtext, type_faults


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


FIELDS = {UPSTREAM_NAMES.get(f.name, f.name): f for f in dataclasses.fields(KimiK3Config)}


def settings(config: KimiK3Config, **changes) -> dict:
  return to_maxtext(config, scan_layers=True, dtype="bfloat16") | changes


def types_of(name: str) -> tuple[type, ...]:
  key = FIELDS[name].metadata.get("key")
  return key.types if key else (list,)


def wrong_values(name: str) -> list:
  """Values of other types that YAML or MaxText's parsing would take for the right one."""
  wrong = {
    (bool,): [1, 0, "true", "false", "", [True]],
    (int,): [True, "1", 1.0, 1.5, [1], ""],
    (int, float): [True, "1.0", [1.0], ""],
    (str,): [1, True, ["silu"]],
    (list,): [1, "1", "", {"1": 1}, [True], [1.0], [None]],
  }[types_of(name)]
  key = FIELDS[name].metadata.get("key")
  return [*wrong, ["1"] if key else [1], *([] if key and key.nullable else [None])]


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_of_another_type_is_named_as_the_setting_was_written(config, name):
  assert type_faults(settings(config)) == []
  for wrong in wrong_values(name):
    (fault,) = type_faults(settings(config, **{name: wrong}))
    found = "null" if wrong is None else repr(wrong)
    assert fault.startswith((f"{name} is {found}, expected ", f"{name} holds other things than layer numbers"))


@pytest.mark.parametrize("name", [name for name in FIELDS if types_of(name) == (bool,)])
def test_an_explicit_false_is_false_or_refused_by_name(config, name):
  if name == "mla_use_nope":
    with pytest.raises(InputError, match=r"^mla_use_nope is False: only True is supported$"):
      from_maxtext(settings(config, **{name: False}))
  else:
    assert getattr(from_maxtext(settings(config, **{name: False})), FIELDS[name].name) is False


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("name", [name for name in FIELDS if int in types_of(name)])
def test_a_number_that_is_not_positive_is_kept_or_refused_by_the_settings_own_name(config, name, number):
  number = float(number) if float in types_of(name) else number  # as MaxText reads it
  try:
    value = getattr(from_maxtext(settings(config, **{name: number})), FIELDS[name].name)
  except InputError as error:
    assert f"{name} is {number}" in str(error)  # noqa: PT017
    return
  nought = (
    "first_num_dense_layers",
    "shared_experts",
    "mtp_num_layers",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
  )
  if number == 0 and name in nought:
    assert value == 0
  elif number == -1:
    assert (name, value) == ("kda_gate_lower_bound", -1)
  else:
    assert (name, value) == ("q_lora_rank", None)  # MaxText's "none"


@pytest.mark.parametrize("name", [name for name in FIELDS if types_of(name) == (str,)])
def test_an_empty_word_is_refused_by_name(config, name):
  with pytest.raises(InputError, match=f"{name} is ''"):
    from_maxtext(settings(config, **{name: ""}))
