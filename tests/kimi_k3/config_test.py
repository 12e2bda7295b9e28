"""The architecture as data: what a released config.json must hold, and what is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest

from kimi_k3.config import ALWAYS_FLOAT32, FLOAT32_KINDS, KimiK3Config, LayerKind
from kimi_k3.errors import InputError

PACKED_EXPERTS = {"packed_modules": ("experts",), "float32_leaves": FLOAT32_KINDS}
PLAIN = {"packed_modules": (), "float32_leaves": ALWAYS_FLOAT32}

# Every key of the released text_config that carries arithmetic, and the one field that holds it.
FIELD_OF_KEY = {
  "hidden_size": "hidden_size",
  "vocab_size": "vocab_size",
  "num_hidden_layers": "num_layers",
  "num_attention_heads": "num_heads",
  "num_key_value_heads": "num_kv_heads",
  "intermediate_size": "dense_mlp_dim",
  "moe_intermediate_size": "expert_mlp_dim",
  "routed_expert_hidden_size": "expert_latent_dim",
  "latent_moe_use_norm": "latent_moe_use_norm",
  "first_k_dense_replace": "first_k_dense_replace",
  "moe_layer_freq": "moe_layer_freq",
  "num_experts": "num_experts",
  "num_experts_per_token": "num_experts_per_token",
  "num_shared_experts": "num_shared_experts",
  "moe_renormalize": "moe_renormalize",
  "routed_scaling_factor": "routed_scaling_factor",
  "moe_router_activation_func": "router_activation",
  "topk_method": "topk_method",
  "num_expert_group": "num_expert_group",
  "topk_group": "topk_group",
  "use_grouped_topk": "use_grouped_topk",
  "q_lora_rank": "q_lora_rank",
  "kv_lora_rank": "kv_lora_rank",
  "qk_nope_head_dim": "qk_nope_head_dim",
  "qk_rope_head_dim": "qk_rope_head_dim",
  "v_head_dim": "v_head_dim",
  "mla_use_nope": "mla_use_nope",
  "mla_use_output_gate": "mla_use_output_gate",
  "linear_attn_config.num_heads": "kda_num_heads",
  "linear_attn_config.head_dim": "kda_head_dim",
  "linear_attn_config.short_conv_kernel_size": "kda_conv_width",
  "linear_attn_config.gate_lower_bound": "kda_gate_lower_bound",
  "linear_attn_config.use_full_rank_gate": "kda_full_rank_gate",
  "linear_attn_config.kda_layers": "kda_layers",
  "linear_attn_config.full_attn_layers": "full_attention_layers",
  "attn_res_block_size": "attn_res_block_size",
  "hidden_act": "hidden_act",
  "activation_situ_beta": "situ_beta",
  "activation_situ_linear_beta": "situ_linear_beta",
  "rms_norm_eps": "rms_norm_eps",
  "max_position_embeddings": "max_position_embeddings",
  "tie_word_embeddings": "tie_word_embeddings",
  "num_nextn_predict_layers": "num_nextn_predict_layers",
  "bos_token_id": "bos_token_id",
  "eos_token_id": "eos_token_id",
  "pad_token_id": "pad_token_id",
}
NULLABLE = {
  "routed_expert_hidden_size", "q_lora_rank", "linear_attn_config.gate_lower_bound", "attn_res_block_size",
  "activation_situ_beta", "activation_situ_linear_beta",
}  # fmt: skip
# What Kimi-Linear's file does not hold, and what that means.
ABSENT_IN_KIMI_LINEAR = {
  "routed_expert_hidden_size": None,
  "latent_moe_use_norm": False,
  "topk_method": "noaux_tc",
  "mla_use_output_gate": False,
  "linear_attn_config.gate_lower_bound": None,
  "linear_attn_config.use_full_rank_gate": False,
  "attn_res_block_size": None,
  "activation_situ_beta": None,
  "activation_situ_linear_beta": None,
}
HARMLESS_IN_K3 = {"architectures", "dtype", "initializer_range", "model_type", "quantization_config", "use_cache"}
HARMLESS_IN_KIMI_LINEAR = {
  "architectures", "dtype", "head_dim", "initializer_range", "model_type", "rope_scaling", "rope_theta", "use_cache",
}  # fmt: skip
NO_LATENT = {"routed_expert_hidden_size": None, "latent_moe_use_norm": False}
SWITCHES = (
  "latent_moe_use_norm", "moe_renormalize", "use_grouped_topk", "mla_use_output_gate",
  "linear_attn_config.use_full_rank_gate",
)  # fmt: skip


@pytest.fixture
def k3(k3_tiny) -> dict[str, Any]:
  """The golden K3 config.json, to be changed."""
  return json.loads((k3_tiny.checkpoint / "config.json").read_text())


@pytest.fixture
def kimi_linear(kimi_linear_tiny) -> dict[str, Any]:
  """The golden Kimi-Linear config.json, to be changed."""
  return json.loads((kimi_linear_tiny.checkpoint / "config.json").read_text())


def scope(config: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
  """The object that holds a key of the text config, and the key's own name."""
  text = config.get("text_config", config)
  *parents, name = key.split(".")
  return (text[parents[0]] if parents else text), name


def changed(config: dict[str, Any], **values: Any) -> dict[str, Any]:
  """A copy with keys of the text config set; `__` stands for the dot."""
  config = copy.deepcopy(config)
  for key, value in values.items():
    held, name = scope(config, key.replace("__", "."))
    held[name] = value
    if name in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings") and "text_config" in config:
      config[name] = value  # the wrapper repeats these
  return config


def read(config: dict[str, Any], **storage: Any) -> KimiK3Config:
  defaults = PACKED_EXPERTS if "text_config" in config else PLAIN
  return KimiK3Config.from_hf(config, **defaults | storage)


def refusal(config: dict[str, Any], **storage: Any) -> str:
  with pytest.raises(InputError) as error:
    read(config, **storage)
  assert "\n" not in str(error.value)
  return str(error.value)


def test_k3_tiny_is_read_field_by_field(k3):
  assert read(k3) == KimiK3Config(
    hidden_size=64,
    vocab_size=256,
    num_layers=13,
    num_heads=4,
    num_kv_heads=4,
    dense_mlp_dim=192,
    expert_mlp_dim=32,
    expert_latent_dim=32,
    latent_moe_use_norm=True,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    num_experts=16,
    num_experts_per_token=4,
    num_shared_experts=2,
    moe_renormalize=True,
    routed_scaling_factor=1.0,
    router_activation="sigmoid",
    topk_method="noaux_tc",
    num_expert_group=1,
    topk_group=1,
    use_grouped_topk=True,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    mla_use_nope=True,
    mla_use_output_gate=True,
    kda_num_heads=4,
    kda_head_dim=32,
    kda_conv_width=4,
    kda_gate_lower_bound=-5.0,
    kda_full_rank_gate=True,
    kda_layers=(1, 2, 3, 5, 6, 7, 9, 10, 11),
    full_attention_layers=(4, 8, 12, 13),
    attn_res_block_size=4,
    hidden_act="situ",
    situ_beta=4.0,
    situ_linear_beta=25.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    num_nextn_predict_layers=0,
    bos_token_id=252,
    eos_token_id=254,
    pad_token_id=255,
    packed_modules=("experts",),
    fp8_modules=(),
    float32_leaves=("A_log", "conv1d", "dt_bias", "e_score_correction_bias", "o_norm"),
  )


def test_kimi_linear_differs_from_k3_in_fields_alone(k3, kimi_linear):
  ours, theirs = dataclasses.asdict(read(kimi_linear)), dataclasses.asdict(read(k3))
  assert {name: value for name, value in ours.items() if value != theirs[name]} == {
    "num_heads": 2,
    "num_kv_heads": 2,
    "expert_latent_dim": None,
    "latent_moe_use_norm": False,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "q_lora_rank": None,
    "mla_use_output_gate": False,
    "kda_gate_lower_bound": None,
    "kda_full_rank_gate": False,
    "attn_res_block_size": None,
    "hidden_act": "silu",
    "situ_beta": None,
    "situ_linear_beta": None,
    "packed_modules": (),
    "float32_leaves": ("A_log", "dt_bias"),
  }


def test_every_arithmetic_key_has_exactly_one_field():
  fields = dataclasses.fields(KimiK3Config)
  assert {f.metadata["key"].hf: f.name for f in fields if f.metadata} == FIELD_OF_KEY
  assert [f.name for f in fields if not f.metadata] == ["packed_modules", "fp8_modules", "float32_leaves"]


def test_no_field_has_a_default():
  assert all(f.default is dataclasses.MISSING for f in dataclasses.fields(KimiK3Config))


def test_every_key_of_the_golden_files_is_accounted_for(k3, kimi_linear):
  for config, harmless, absent in (
    (k3["text_config"], HARMLESS_IN_K3, {}),
    (kimi_linear, HARMLESS_IN_KIMI_LINEAR, ABSENT_IN_KIMI_LINEAR),
  ):
    linear = {f"linear_attn_config.{name}" for name in config["linear_attn_config"]}
    found = (set(config) - {"linear_attn_config"} | linear) - harmless
    if "model_max_length" in found:  # Kimi-Linear's name
      found = found - {"model_max_length"} | {"max_position_embeddings"}
    assert found == set(FIELD_OF_KEY) - set(absent)


@pytest.mark.parametrize("key", FIELD_OF_KEY)
def test_a_missing_k3_key_is_named(k3, key):
  held, name = scope(k3, key)
  del held[name]
  assert refusal(k3) == f"config.json: missing key {key}"


@pytest.mark.parametrize("key", sorted(set(FIELD_OF_KEY) - set(ABSENT_IN_KIMI_LINEAR) - {"max_position_embeddings"}))
def test_a_missing_kimi_linear_key_is_named(kimi_linear, key):
  held, name = scope(kimi_linear, key)
  del held[name]
  assert refusal(kimi_linear) == f"config.json: missing key {key}"


def test_kimi_linears_own_name_of_the_length_is_asked_for(kimi_linear):
  del kimi_linear["model_max_length"]
  assert refusal(kimi_linear) == "config.json: missing key max_position_embeddings or model_max_length"


@pytest.mark.parametrize("key", sorted(HARMLESS_IN_K3 | HARMLESS_IN_KIMI_LINEAR))
def test_a_harmless_key_changes_nothing_when_it_is_gone(k3, kimi_linear, key):
  for config in (k3, kimi_linear):
    expected = read(config)
    config.get("text_config", config).pop(key, None)
    assert read(config) == expected


@pytest.mark.parametrize("key", FIELD_OF_KEY)
def test_a_renamed_key_is_named_under_both_names(k3, key):
  held, name = scope(k3, key)
  held[f"{name}_v2"] = held.pop(name)
  assert refusal(k3) == f"config.json: missing key {key}; unknown key {key}_v2"


@pytest.mark.parametrize("key", sorted(set(FIELD_OF_KEY) - set(ABSENT_IN_KIMI_LINEAR) - {"max_position_embeddings"}))
def test_a_renamed_kimi_linear_key_is_named_under_both_names(kimi_linear, key):
  held, name = scope(kimi_linear, key)
  held[f"{name}_v2"] = held.pop(name)
  assert refusal(kimi_linear) == f"config.json: missing key {key}; unknown key {key}_v2"


@pytest.mark.parametrize("key", ABSENT_IN_KIMI_LINEAR)
def test_a_misspelt_key_that_kimi_linear_may_leave_out_is_unknown_and_not_left_out(kimi_linear, key):
  """Or K3's value under a wrong name would become Kimi-Linear's without a word."""
  held, name = scope(kimi_linear, key)
  held[f"{name}_v2"] = 1
  assert refusal(kimi_linear) == f"config.json: unknown key {key}_v2"


def test_an_unknown_key_is_named_wherever_it_stands(k3, kimi_linear):
  assert refusal(k3 | {"audio_config": {}}).startswith("config.json: unknown key(s) audio_config beside text_config")
  assert refusal(k3 | {"hidden_size": 64}).startswith("config.json: unknown key(s) hidden_size beside text_config")
  assert refusal(changed(k3, sliding_window=512)) == "config.json: unknown key sliding_window"
  assert refusal(changed(kimi_linear, sliding_window=512)) == "config.json: unknown key sliding_window"
  assert refusal(changed(k3, linear_attn_config__expand_v=2)) == "config.json: unknown key linear_attn_config.expand_v"


def test_all_faults_are_listed_at_once(k3):
  config = changed(k3, new_feature=1, hidden_size="64")
  del config["text_config"]["vocab_size"]
  message = refusal(config)
  assert "missing key vocab_size" in message
  assert "unknown key new_feature" in message
  assert "hidden_size is '64', expected int" in message


def wrong_values(key: str, value: Any) -> list[Any]:
  """Values of other types than the golden one's, those that Python would take for it among them."""
  if isinstance(value, bool):
    wrong = [int(value), str(value)]
  elif isinstance(value, int):
    wrong = [True, str(value), float(value), [value]]
  elif isinstance(value, float):
    wrong = [True, str(value), [value]]
  elif isinstance(value, str):
    wrong = [1, True, [value]]
  else:
    wrong = [1, "1", {"1": 1}]
  return wrong + ([] if key in NULLABLE else [None])


@pytest.mark.parametrize("key", FIELD_OF_KEY)
def test_a_value_of_another_type_is_refused_with_its_key(k3, key):
  held, name = scope(k3, key)
  for wrong in wrong_values(key, held[name]):
    message = refusal(changed(k3, **{key.replace(".", "__"): wrong}))
    found = "null" if wrong is None else repr(wrong)
    assert message.startswith(f"config.json: {key} is {found}, expected ")


def test_whole_numbers_are_taken_for_floats(k3):
  config = read(changed(k3, routed_scaling_factor=2, linear_attn_config__gate_lower_bound=-3))
  assert (config.routed_scaling_factor, config.kda_gate_lower_bound) == (2.0, -3.0)
  assert type(config.routed_scaling_factor) is type(config.kda_gate_lower_bound) is float


@pytest.mark.parametrize("wrong", [[1, 2, True], [1, 2, "3"], [1, 2, 3.0], [1, 2, None]])
def test_a_layer_list_holds_whole_numbers_only(k3, wrong):
  message = refusal(changed(k3, linear_attn_config__kda_layers=wrong))
  assert message == "config.json: linear_attn_config.kda_layers holds other things than layer numbers"


@pytest.mark.parametrize("wrong", [None, [], "kda", 3])
def test_linear_attn_config_must_be_an_object(k3, wrong):
  assert f"linear_attn_config is {wrong!r}, expected an object" in refusal(changed(k3, linear_attn_config=wrong))


@pytest.mark.parametrize("wrong", [None, [], "text"])
def test_text_config_must_be_an_object(k3, wrong):
  assert f"text_config is {type(wrong).__name__}, expected an object" in refusal(k3 | {"text_config": wrong})


@pytest.mark.parametrize(
  ("kda", "full", "said"),
  [
    ((1, 2, 3, 5, 6, 7, 9, 10), (4, 8, 12, 13), "missing [11], twice [], beyond []"),
    ((1, 2, 3, 5, 6, 7, 9, 10, 11, 12), (4, 8, 12, 13), "missing [], twice [12], beyond []"),
    ((1, 2, 3, 5, 6, 7, 9, 10, 11, 11), (4, 8, 12, 13), "missing [], twice [11], beyond []"),
    ((1, 2, 3, 5, 6, 7, 9, 10, 11), (4, 8, 12, 13, 14), "missing [], twice [], beyond [14]"),
    ((0, 1, 2, 4, 5, 6, 8, 9, 10), (3, 7, 11, 12), "missing [13], twice [], beyond [0]"),
    ((), (), "missing [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], twice [], beyond []"),
  ],
)
def test_the_layer_lists_cover_each_layer_once(k3, kda, full, said):
  lists = {"linear_attn_config__kda_layers": list(kda), "linear_attn_config__full_attn_layers": list(full)}
  message = refusal(changed(k3, **lists))
  assert message.startswith("linear_attn_config.kda_layers and full_attn_layers must cover layers 1 to ")
  assert "num_hidden_layers = 13 exactly once" in message
  assert message.endswith(said)


@pytest.mark.parametrize("key", SWITCHES)
@pytest.mark.parametrize("value", [True, False])
def test_a_switch_is_what_the_file_says_and_false_is_not_unset(k3, kimi_linear, key, value):
  for config in (k3, kimi_linear):
    if key == "latent_moe_use_norm" and value and config is kimi_linear:
      continue  # has no latent to normalise
    assert getattr(read(changed(config, **{key.replace(".", "__"): value})), FIELD_OF_KEY[key]) is value


def keys_of_type(*types: type) -> list[str]:
  return [
    f.metadata["key"].hf for f in dataclasses.fields(KimiK3Config) if f.metadata and f.metadata["key"].types == types
  ]


@pytest.mark.parametrize("key", keys_of_type(bool))
def test_an_explicit_false_is_false_or_refused_by_name_and_null_is_neither(k3, kimi_linear, key):
  for config in (k3, kimi_linear):
    setting = {key.replace(".", "__"): False}
    if key == "mla_use_nope":
      assert f"{key} is False: only True is supported" in refusal(changed(config, **setting))
    else:
      assert getattr(read(changed(config, **setting)), FIELD_OF_KEY[key]) is False
    assert f"{key} is null, expected bool" in refusal(changed(config, **{key.replace(".", "__"): None}))


@pytest.mark.parametrize("key", [*keys_of_type(int), *keys_of_type(int, float)])
def test_nought_is_nought_or_refused_by_name_and_never_unset(k3, kimi_linear, key):
  for config in (k3, kimi_linear):
    try:
      value = getattr(read(changed(config, **{key.replace(".", "__"): 0})), FIELD_OF_KEY[key])
    except InputError as error:
      assert f"{key} is 0" in str(error)  # noqa: PT017
    else:
      assert value == 0
      assert value is not None


@pytest.mark.parametrize("key", keys_of_type(str))
def test_an_empty_word_is_refused_by_name(k3, kimi_linear, key):
  for config in (k3, kimi_linear):
    assert f"{key} is ''" in refusal(changed(config, **{key: ""}))


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("num_shared_experts", 0),
    ("first_k_dense_replace", 0),
    ("first_k_dense_replace", 13),
    ("q_lora_rank", None),
    ("linear_attn_config__gate_lower_bound", None),
    ("attn_res_block_size", None),
    ("activation_situ_linear_beta", None),
    ("bos_token_id", 0),
  ],
)
def test_nought_and_null_are_values(k3, key, value):
  assert getattr(read(changed(k3, **{key: value})), FIELD_OF_KEY[key.replace("__", ".")]) == value


@pytest.mark.parametrize(
  ("key", "value", "said"),
  [
    ("moe_router_activation_func", "softmax", "is 'softmax': only 'sigmoid' is supported"),
    ("topk_method", "greedy", "is 'greedy': only 'noaux_tc' is supported"),
    ("num_expert_group", 8, "is 8: only 1 is supported"),
    ("topk_group", 2, "is 2: only 1 is supported"),
    ("mla_use_nope", False, "is False: only True is supported"),
    ("tie_word_embeddings", True, "is True: only False is supported"),
    ("num_nextn_predict_layers", 1, "is 1: only 0 is supported"),
    ("hidden_act", "gelu", "is 'gelu': only 'situ' and 'silu' are supported"),
    ("activation_situ_beta", None, "is missing, hidden_act 'situ' needs it"),
    ("linear_attn_config.gate_lower_bound", 0.0, "is 0.0, expected a negative number or null"),
    ("linear_attn_config.gate_lower_bound", float("-inf"), "is -inf, expected a negative number or null"),
    ("linear_attn_config.gate_lower_bound", float("nan"), "is nan, expected a negative number or null"),
  ],
)
def test_what_nobody_computes_is_refused_by_key(k3, key, value, said):
  assert f"{key} {said}" in refusal(changed(k3, **{key.replace(".", "__"): value})).split("; ")


def test_a_norm_without_a_latent_is_refused(k3):
  message = refusal(changed(k3, routed_expert_hidden_size=None))
  assert "latent_moe_use_norm is true without routed_expert_hidden_size" in message


@pytest.mark.parametrize(
  "key",
  [
    "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "moe_intermediate_size", "routed_expert_hidden_size", "moe_layer_freq", "num_experts", "num_experts_per_token",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "linear_attn_config.num_heads", "linear_attn_config.head_dim", "attn_res_block_size", "max_position_embeddings",
    "rms_norm_eps", "routed_scaling_factor", "activation_situ_beta", "activation_situ_linear_beta",
  ],
)  # fmt: skip
def test_a_size_that_is_not_positive_is_refused(k3, key):
  held, name = scope(k3, key)
  wrong = (0.0, -1.0, float("nan"), float("inf")) if isinstance(held[name], float) else (0, -1)
  for value in wrong:
    message = refusal(changed(k3, **{key.replace(".", "__"): value}))
    assert f"{key} is {value}, expected a positive number" in message.split("; ")


@pytest.mark.parametrize(
  ("key", "value", "said"),
  [
    ("first_k_dense_replace", -1, "first_k_dense_replace is -1, expected 0 or more"),
    ("num_shared_experts", -1, "num_shared_experts is -1, expected 0 or more"),
    ("linear_attn_config__short_conv_kernel_size", 1, "is 1, expected 2 or more taps"),
    ("num_key_value_heads", 2, "num_key_value_heads is 2, expected num_attention_heads = 4"),
    ("num_experts_per_token", 17, "num_experts_per_token is 17, more than num_experts = 16"),
    ("bos_token_id", 256, "bos_token_id is 256, outside the vocabulary of 256"),
    ("eos_token_id", -1, "eos_token_id is -1, outside the vocabulary of 256"),
    ("pad_token_id", 300, "pad_token_id is 300, outside the vocabulary of 256"),
  ],
)
def test_sizes_that_contradict_each_other_are_refused(k3, key, value, said):
  assert said in refusal(changed(k3, **{key: value}))


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"])
def test_the_wrapper_must_repeat_what_the_text_config_says(k3, key):
  k3[key] = 7
  assert refusal(k3).startswith(f"config.json: {key} is 7 at the top and {k3['text_config'][key]!r} in text_config")
  del k3[key]
  read(k3)


def test_the_wrapper_is_no_part_of_the_architecture(k3):
  assert read(k3["text_config"], **PACKED_EXPERTS) == read(k3)


@pytest.mark.parametrize("key", ABSENT_IN_KIMI_LINEAR)
def test_only_the_flat_form_may_leave_out_what_kimi_linear_lacks(k3, key):
  held, name = scope(k3, key)
  del held[name]
  assert refusal(k3) == f"config.json: missing key {key}"
  flat = k3["text_config"]
  if key == "activation_situ_beta":  # the flat form may leave it out, SiTU may not
    assert refusal(flat, **PACKED_EXPERTS) == "activation_situ_beta is missing, hidden_act 'situ' needs it"
  elif key == "routed_expert_hidden_size":
    assert "there is no latent to normalise" in refusal(flat, **PACKED_EXPERTS)
  else:
    assert getattr(read(flat, **PACKED_EXPERTS), FIELD_OF_KEY[key]) == ABSENT_IN_KIMI_LINEAR[key]


@pytest.mark.parametrize(
  ("packed", "sizes", "said"),
  [
    ("experts", {"moe_intermediate_size": 48}, "moe_intermediate_size is 48"),
    ("experts", {"routed_expert_hidden_size": 40}, "routed_expert_hidden_size is 40"),
    ("experts", NO_LATENT | {"hidden_size": 72}, "hidden_size is 72"),
    ("latent", {"hidden_size": 72}, "hidden_size is 72"),
    ("latent", {"routed_expert_hidden_size": 40}, "routed_expert_hidden_size is 40"),
    ("shared_experts", {"hidden_size": 72}, "hidden_size is 72"),
    ("shared_experts", {"moe_intermediate_size": 24}, "moe_intermediate_size * num_shared_experts is 48"),
  ],
)
def test_a_packed_matrix_has_whole_groups_of_32_inputs(k3, packed, sizes, said):
  message = refusal(changed(k3, **sizes), packed_modules=(packed,))
  assert message == f"{said}, not a multiple of the MXFP4 group of 32"
  read(changed(k3, **sizes), packed_modules=())


def test_the_shared_experts_are_one_matrix_so_their_widths_add_up_to_whole_groups(k3):
  assert read(changed(k3, moe_intermediate_size=16), packed_modules=("shared_experts",)).shared_mlp_dim == 32


@pytest.mark.parametrize(
  ("storage", "said"),
  [
    ({"packed_modules": ("attention",)}, "packed_modules is ['attention'], expected a sorted choice of ['experts', "),
    ({"packed_modules": ("latent", "experts")}, "packed_modules is ['latent', 'experts'], expected a sorted choice"),
    ({"packed_modules": ("experts", "experts")}, "packed_modules is ['experts', 'experts'], expected a sorted choice"),
    ({"fp8_modules": ("attention",)}, "fp8_modules is ['attention'], expected a sorted choice of ['dense', 'experts']"),
    ({"fp8_modules": ("experts", "dense")}, "fp8_modules is ['experts', 'dense'], expected a sorted choice"),
    ({"fp8_modules": ("dense", "experts")}, "packed_modules and fp8_modules both name experts: a matrix is stored in"),
    ({"float32_leaves": ("A_log", "dt_bias", "norm")}, "float32_leaves is ['A_log', 'dt_bias', 'norm'], expected"),
    ({"float32_leaves": ("dt_bias",)}, "float32_leaves is ['dt_bias']: A_log and dt_bias are always stored in float32"),
  ],
)
def test_how_weights_are_stored_is_a_sorted_choice(k3, storage, said):
  assert said in refusal(k3, **storage)


def test_what_does_not_exist_is_not_packed(k3):
  config = changed(k3, num_shared_experts=0, **NO_LATENT)
  message = refusal(config, packed_modules=("latent", "shared_experts"))
  assert message == (
    "packed_modules names latent, but there is no routed_expert_hidden_size; "
    "packed_modules names shared_experts, but num_shared_experts is 0"
  )


def test_layers_are_counted_from_1_in_the_file_and_from_0_here(k3):
  kda, mla = LayerKind.KDA, LayerKind.MLA
  config = read(k3)
  assert config.layer_kinds == (kda, kda, kda, mla) * 3 + (mla,)
  assert config.moe_layers == (False, *[True] * 12)


def test_every_second_layer_past_the_dense_ones_has_experts(k3):
  config = read(changed(k3, first_k_dense_replace=3, moe_layer_freq=2))
  assert [i for i, moe in enumerate(config.moe_layers) if moe] == [4, 6, 8, 10, 12]


def test_derived_widths(k3, kimi_linear):
  config, plain = read(k3), read(kimi_linear)
  assert (config.expert_dim, plain.expert_dim) == (32, 64)  # latent, or hidden without one
  assert (config.shared_mlp_dim, plain.shared_mlp_dim) == (64, 32)
  assert read(changed(k3, num_shared_experts=0)).shared_mlp_dim == 0


@pytest.mark.parametrize(("size", "count"), [(None, 0), (1, 13), (4, 4), (5, 3), (12, 2), (13, 1), (100, 1)])
def test_a_snapshot_is_taken_every_so_many_layers_from_the_first_on(k3, size, count):
  assert read(changed(k3, attn_res_block_size=size)).num_snapshots == count


def test_a_config_cannot_be_changed_and_can_be_a_key(k3):
  config = read(k3)
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.hidden_size = 1
  assert hash(config) == hash(read(k3))


@pytest.mark.parametrize("key", ["num_hidden_layers", "attn_res_block_size", "vocab_size", "num_experts"])
@pytest.mark.parametrize("size", [2**31, 2**63, 10**30])
def test_a_size_beyond_any_array_is_refused_at_once(k3, key, size):
  assert f"{key} is {size}, expected at most 2147483647" in refusal(changed(k3, **{key: size}))


def test_the_layers_that_no_list_names_are_not_all_counted(k3):
  assert len(refusal(changed(k3, num_hidden_layers=2**31 - 1))) < 1000
