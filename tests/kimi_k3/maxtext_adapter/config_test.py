"""MaxText's config class with this family's fields: what it adds, and what it refuses."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter import config as adapter
from kimi_k3.maxtext_adapter.config import KimiMaxTextConfig, architecture, compute_config
from kimi_k3.maxtext_adapter.settings import read_config
from kimi_k3.maxtext_keys import NEW_NAMES, REQUIRED_KEYS, to_maxtext
from kimi_k3.resources import configs_dir
from kimi_k3.sharding import USED_AXES, check_rules, mesh_axes

# Each switch that this model refuses, at another value than the one it computes with.
OTHER_VALUES = {
  "global_parameter_scale": 2,
  "attention_type": "global",
  "mla_naive_kvcache": True,
  "use_mla_absorbed_mqa": True,
  "use_multimodal": True,
  "use_audio": True,
  "quantization": "int8",
  "quantize_kvcache": True,
  "use_indexer": True,
  "stack_prefill_result_cache": True,
  "enable_dropout": True,
  "use_untrainable_positional_embedding": True,
  "trainable_position_size": 16,
  "final_logits_soft_cap": 30.0,
  "attn_logits_soft_cap": 50.0,
  "normalize_embedding_logits": False,
  "fused_qkv": True,
  "fused_mlp": True,
  "use_qk_norm": True,
  "use_qk_clip": True,
  "param_scan_axis": 1,
  "mhc_expansion_rate": 4,
  "engram_layers": [1],
  "enable_prefix_caching": True,
  "use_chunked_prefill": True,
}
OTHER_CHOICES = {"attention": "paged", "dtype": "float16", "weight_dtype": "float8_e4m3fn"}
# Axes a mesh may have. That every other one is refused is checked against MaxText's own list.
SUPPORTED_PARALLELISM = {"data", "fsdp", "fsdp_transpose", "tensor", "expert", "autoregressive"}


def read(*settings: str) -> Any:
  return read_config(str(configs_dir() / "decode.yml"), ["model_name=kimi-k3-tiny", *settings])


@pytest.fixture(scope="module")
def tiny() -> Any:
  """MaxText's HyperParameters of the tiny model."""
  return read()


def changed(config: Any, **values: Any) -> KimiMaxTextConfig:
  """The pydantic object behind a config with values as they would stand after parsing."""
  return config._pydantic_config.model_copy(update=values)


def test_the_architecture_comes_through_maxtexts_config(tiny, k3_config):
  assert architecture(tiny) == architecture(tiny._pydantic_config) == k3_config


def test_every_setting_of_a_model_is_a_field(k3_config):
  fields = set(KimiMaxTextConfig.model_fields)
  assert set(to_maxtext(k3_config, scan_layers=True, dtype="bfloat16")) <= fields
  assert fields >= REQUIRED_KEYS


def test_fields_of_our_own_are_not_maxtexts_and_null_for_other_models():
  from maxtext.configs import types

  ours = set(KimiMaxTextConfig.model_fields) - set(types.MaxTextConfig.model_fields)
  partitioning = {"partitioning", "mla_cache_cut", "prefill_cut", "prefill_rows", "interpret_kernels"}
  implementation = {name for name in ours if name.endswith("_implementation")} | {"decode_sampling_seed", *partitioning}
  unset = {"partition_mesh", "partition_rules", "prefill_chunk", "mla_cache_dtype"}
  assert ours <= set(NEW_NAMES) | implementation | unset
  assert all(KimiMaxTextConfig.model_fields[name].default is None for name in (ours - implementation) | unset)


def test_models_and_tokenizers_are_the_same_list():
  assert set(adapter.TOKENIZERS) == set(adapter.MODEL_NAMES)
  assert sorted(adapter.MODEL_NAMES) == sorted(path.stem for path in (configs_dir() / "models").iterdir())


@pytest.mark.parametrize(
  ("settings", "dtype", "weight_dtype", "precision"),
  [
    ((), jnp.bfloat16, jnp.bfloat16, "default"),
    (("dtype=float32", "matmul_precision=highest"), jnp.float32, jnp.bfloat16, "highest"),
  ],
)
def test_how_to_compute_is_read_from_maxtexts_settings(settings, dtype, weight_dtype, precision):
  compute = compute_config(read(*settings))
  assert (compute.dtype, compute.weight_dtype, compute.precision) == (dtype, weight_dtype, precision)
  assert (compute.kda_implementation, compute.expert_implementation) == ("portable", "reference")


def test_every_refused_switch_is_tried_here():
  assert set(OTHER_VALUES) == set(adapter._ONLY)
  assert set(OTHER_CHOICES) == set(adapter._CHOICES)


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_a_switch_that_would_be_ignored_is_refused_by_name(tiny, key):
  faults = list(adapter._unsupported(changed(tiny, **{key: OTHER_VALUES[key]})))
  assert faults == [f"{key} is {OTHER_VALUES[key]!r}: this model supports {adapter._ONLY[key]!r} only"]


@pytest.mark.parametrize("key", OTHER_CHOICES)
def test_a_value_of_maxtexts_that_is_not_computed_is_refused_by_name(tiny, key):
  (fault,) = adapter._unsupported(changed(tiny, **{key: OTHER_CHOICES[key]}))
  assert fault.startswith(f"{key} is {OTHER_CHOICES[key]!r}: this model supports '")


def test_scaling_by_length_is_refused(tiny):
  (fault,) = adapter._unsupported(changed(tiny, original_max_position_embeddings=128))
  assert fault.startswith("original_max_position_embeddings differs from max_position_embeddings")


@pytest.mark.parametrize(
  ("setting", "said"),
  [
    ("quantization=int8", "quantization is 'int8': this model supports '' only"),
    ("fused_mlp=true", "fused_mlp is True: this model supports False only"),
    ("attention=paged", "attention is 'paged': this model supports 'autoselected', 'dot_product', 'flash' only"),
    ("dtype=float16", "dtype is 'float16': this model supports 'bfloat16', 'float32' only"),
    ("ici_context_parallelism=2", "ici_context_parallelism is 2: not supported by this model, set it to 1"),
    ("dcn_pipeline_parallelism=4", "dcn_pipeline_parallelism is 4: not supported by this model, set it to 1"),
    ("override_model_config=true situ_beta=true", "situ_beta is True, expected int or float or null"),
    ("override_model_config=true attn_res_block_size=true", "attn_res_block_size is True, expected int or null"),
    ("override_model_config=true kda_full_rank_gate=1", "kda_full_rank_gate is 1, expected bool"),
    ("override_model_config=true kv_lora_rank=none", "kv_lora_rank is null, expected int"),
    ("ici_tensor_parallelism=3", "kda_num_heads is 4, which tensor parallelism of 3 does not divide"),
  ],
)
def test_what_is_refused_is_refused_when_a_config_is_read(setting, said):
  with pytest.raises(InputError) as error:
    read(*setting.split())
  assert str(error.value).endswith(said)
  assert "\n" not in str(error.value)


def test_maxtext_has_no_axis_that_is_neither_supported_nor_refused():
  suffix = "_parallelism"
  for kind in ("ici_", "dcn_"):
    fields = [n for n in KimiMaxTextConfig.model_fields if n.startswith(kind) and n.endswith(suffix)]
    axes = {n.removeprefix(kind).removesuffix(suffix) for n in fields} - {"parallelism", ""}
    assert axes == SUPPORTED_PARALLELISM | set(adapter._NOT_SUPPORTED_PARALLELISM)


@pytest.mark.parametrize("kind", ["ici", "dcn"])
@pytest.mark.parametrize("axis", adapter._NOT_SUPPORTED_PARALLELISM)
def test_an_axis_this_model_cannot_be_cut_along_is_refused_by_name(kind, axis):
  key = f"{kind}_{axis}_parallelism"
  for size in (2, -1):
    with pytest.raises(ValueError, match=f"{key} is {size}: not supported by this model, set it to 1"):
      KimiMaxTextConfig.check_as_written({"decoder_block": "kimi_k3", key: size})
  for harmless in ({"decoder_block": "kimi_k3", key: 1}, {"decoder_block": "llama2", key: 2}):
    assert KimiMaxTextConfig.check_as_written(harmless) == harmless


@pytest.mark.parametrize(
  ("sizes", "said"),
  [
    ({"ici_tensor_parallelism": 4}, []),
    ({"ici_tensor_parallelism": 2, "ici_autoregressive_parallelism": 2, "ici_expert_parallelism": 16}, []),
    ({"ici_tensor_parallelism": -1, "ici_expert_parallelism": -1}, []),
    (
      {"ici_tensor_parallelism": 8},
      [f"{k} is 4, which tensor parallelism of 8 does not divide" for k in ("base_num_query_heads", "kda_num_heads")],
    ),
    (
      {"ici_tensor_parallelism": 2, "dcn_tensor_parallelism": 2, "kda_num_heads": 6},
      ["kda_num_heads is 6, which tensor parallelism of 4 does not divide"],
    ),
    (
      {"ici_tensor_parallelism": 2, "ici_autoregressive_parallelism": 4, "base_num_query_heads": 8},
      ["kda_num_heads is 4, which tensor parallelism of 8 does not divide"],
    ),
    ({"ici_expert_parallelism": 3}, ["num_experts is 16, which expert parallelism of 3 does not divide"]),
    (
      {"ici_expert_parallelism": 8, "dcn_expert_parallelism": 4},
      ["num_experts is 16, which expert parallelism of 32 does not divide"],
    ),
  ],
)
def test_sizes_that_the_mesh_would_cut_unevenly_are_refused(tiny, sizes, said):
  assert list(adapter._mesh_faults(changed(tiny, **sizes))) == said


def test_maxtexts_rules_know_every_axis_that_is_used(tiny):
  check_rules(tiny.logical_axis_rules, tiny.mesh_axes)


def test_an_axis_without_a_rule_is_named():
  with pytest.raises(InputError, match="no rule for exp, mlp_moe: these axes would be replicated"):
    check_rules([(name, []) for name in USED_AXES - {"exp", "mlp_moe"}], ["tensor"])


@pytest.mark.parametrize("axes", ["tensr", ["tensor", "tensr"]])
def test_a_rule_that_names_no_axis_of_the_mesh_is_refused(axes):
  with pytest.raises(InputError, match=r"names tensr \(of exp\): not among mesh_axes, which are data, tensor"):
    check_rules([(name, axes if name == "exp" else []) for name in USED_AXES], ["tensor", "data"])


def test_caches_are_cut_by_rows_unless_the_user_cuts_them_otherwise(tiny):
  assert mesh_axes(tiny.logical_axis_rules, "cache_batch") == ("data", "fsdp", "fsdp_transpose", "expert")
  own = read('logical_axis_rules=[["cache_batch",["data"]]]')
  assert mesh_axes(own.logical_axis_rules, "cache_batch") == ("data",)


def test_rules_that_replace_maxtexts_must_know_every_axis():
  rules = '[["q_heads",["tensor"]],["embed",["fsdp"]]]'
  with pytest.raises(InputError, match=r"has no rule for cache_batch_prefill, .* embed_attn, .*exp,"):
    read("override_logical_axis_rules=true", f"logical_axis_rules={rules}")
