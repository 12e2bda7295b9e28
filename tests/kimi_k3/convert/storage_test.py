from __future__ import annotations

import copy
import dataclasses

import pytest

from kimi_k3.config import FLOAT32_KINDS
from kimi_k3.convert import storage
from kimi_k3.errors import InputError

MOE = "language_model.model.layers.2.block_sparse_moe"
W1 = f"{MOE}.experts.3.w1"


def renamed(source, old, new):
  return {old: None, new: dataclasses.replace(source.tensors[old], name=new)}


def unpacked(source, stem):
  """The stem's packed pair replaced by one BF16 matrix."""
  codes = source.tensors[f"{stem}.weight_packed"]
  plain = dataclasses.replace(
    codes, name=f"{stem}.weight", dtype="BF16", shape=(codes.shape[0], 2 * codes.shape[1]), nbytes=4 * codes.nbytes
  )
  return {f"{stem}.weight_packed": None, f"{stem}.weight_scale": None, plain.name: plain}


def with_quantization(source, edit):
  config = copy.deepcopy(source.config)
  edit(config["text_config"]["quantization_config"])
  return config


def test_k3_packs_experts_and_keeps_five_kinds_in_float32(k3_source):
  assert storage.storage(k3_source) == (("experts",), FLOAT32_KINDS)


def test_kimi_linear_packs_nothing_and_keeps_two_kinds_in_float32(kimi_linear_source):
  assert storage.storage(kimi_linear_source) == ((), ("A_log", "dt_bias"))


def test_shared_experts_and_latent_projections_count_as_packed_where_they_are(all_packed_source):
  assert storage.storage(all_packed_source)[0] == ("experts", "latent", "shared_experts")


def test_vision_tensors_are_left_out_of_a_wrapper_only(k3_source, kimi_linear_source, edited):
  assert not any(name.startswith(storage.VISION_PREFIXES) for name in storage.text_tensors(k3_source))
  vision = k3_source.tensors["mm_projector.proj.0.weight"]
  assert vision.name in storage.text_tensors(edited(kimi_linear_source, {vision.name: vision}))


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale"])
def test_half_of_a_packed_matrix_is_refused_by_name(k3_source, edited, suffix):
  with pytest.raises(InputError) as error:
    storage.storage(edited(k3_source, {f"{W1}.{suffix}": None}))
  assert f"{W1}.weight_packed" in str(error.value)
  assert f"{W1}.weight_scale" in str(error.value)


def test_a_matrix_both_packed_and_plain_is_refused_by_name(k3_source, edited):
  plain = {name: tensor for name, tensor in unpacked(k3_source, W1).items() if tensor}
  with pytest.raises(InputError, match=rf"{W1}: stored both as weight_packed and as weight"):
    storage.storage(edited(k3_source, plain))


def test_the_odd_matrices_of_a_module_packed_in_part_are_named(k3_source, all_packed_source, edited):
  with pytest.raises(InputError, match=rf"^{W1}: not packed, unlike the other matrices of experts: "):
    storage.storage(edited(k3_source, unpacked(k3_source, W1)))
  stems = [f"{MOE}.routed_expert_down_proj", f"{MOE}.shared_experts.up_proj"]
  tensors = unpacked(all_packed_source, stems[0]) | unpacked(all_packed_source, stems[1])
  with pytest.raises(InputError) as error:
    storage.storage(edited(all_packed_source, tensors))
  assert all(stem in str(error.value) for stem in stems)


def test_a_packed_matrix_where_packing_is_not_supported_is_refused_by_name(k3_source, edited):
  stem = "language_model.model.layers.0.self_attn.o_proj"
  tensors = {f"{stem}.weight": None}
  for suffix in ("weight_packed", "weight_scale"):
    tensors |= renamed(k3_source, f"{W1}.{suffix}", f"{stem}.{suffix}") | {
      f"{W1}.{suffix}": k3_source.tensors[f"{W1}.{suffix}"]
    }
  with pytest.raises(InputError, match=rf"{stem}.weight_packed: packing is supported in"):
    storage.storage(edited(k3_source, tensors))


@pytest.mark.parametrize("pattern", ["re:.*experts.*", "re:.*w1", W1, W1.removeprefix("language_model.")])
def test_a_packed_matrix_that_the_config_exempts_is_refused_by_name(k3_source, edited, pattern):
  config = with_quantization(k3_source, lambda q: q["ignore"].append(pattern))
  with pytest.raises(
    InputError, match=r"experts\.\d+\.w1\.weight_packed: packed, but quantization_config.ignore"
  ) as error:
    storage.storage(edited(k3_source, config=config))
  assert pattern in str(error.value)


def test_regexes_of_the_ignore_list_match_from_the_start_of_the_name(k3_source, edited):
  config = with_quantization(k3_source, lambda q: q["ignore"].extend(["re:experts", "re:.*w9"]))
  assert storage.storage(edited(k3_source, config=config))[0] == ("experts",)


@pytest.mark.parametrize("ignore", [1, True, "re:.*", {"a": 1}, [1], [None]])
def test_an_ignore_list_that_holds_other_things_is_refused(k3_source, edited, ignore):
  config = with_quantization(k3_source, lambda q: q.update(ignore=ignore))
  with pytest.raises(InputError, match=r"quantization_config.ignore is .*, expected a list of names"):
    storage.storage(edited(k3_source, config=config))


def test_an_ignore_entry_that_is_no_regex_is_refused(k3_source, edited):
  config = with_quantization(k3_source, lambda q: q["ignore"].append("re:((("))
  with pytest.raises(InputError, match=r"'re:\(\(\(' is no regular expression"):
    storage.storage(edited(k3_source, config=config))


@pytest.mark.parametrize(
  ("field", "value"),
  [
    *(("group_size", 16), ("num_bits", 8), ("type", "int"), ("symmetric", False), ("num_bits", None)),
    *(("strategy", "channel"), ("dynamic", True), ("actorder", "group"), ("zp_dtype", "torch.int8")),
    ("scale_dtype", "torch.float8_e4m3fn"),
  ],
)
def test_a_quantization_of_another_kind_is_refused_by_field(k3_source, edited, field, value):
  config = with_quantization(k3_source, lambda q: q["config_groups"]["group_0"]["weights"].update({field: value}))
  with pytest.raises(InputError, match=rf"group_0.weights.{field} is '?{value}'?, expected"):
    storage.storage(edited(k3_source, config=config))


@pytest.mark.parametrize(("field", "value"), [("kv_cache_scheme", {"num_bits": 8}), ("quant_method", "awq")])
def test_a_quantization_of_more_than_the_weights_or_by_another_tool_is_refused(k3_source, edited, field, value):
  config = with_quantization(k3_source, lambda q: q.update({field: value}))
  with pytest.raises(InputError, match=rf"{field} is .*, expected"):
    storage.storage(edited(k3_source, config=config))


def test_a_quantization_of_another_format_or_of_activations_is_refused(k3_source, edited):
  config = with_quantization(k3_source, lambda q: q.update(format="nvfp4-pack-quantized"))
  with pytest.raises(InputError, match=r"quantization_config\.format is 'nvfp4-pack-quantized'"):
    storage.storage(edited(k3_source, config=config))
  config = with_quantization(
    k3_source, lambda q: q["config_groups"]["group_0"].update(input_activations={"num_bits": 8})
  )
  with pytest.raises(InputError, match="input_activations is set"):
    storage.storage(edited(k3_source, config=config))


def test_packed_weights_need_a_quantization_config_of_either_place_and_only_one(k3_source, edited):
  moved = copy.deepcopy(k3_source.config)
  moved["quantization_config"] = moved["text_config"].pop("quantization_config")
  assert storage.storage(edited(k3_source, config=moved))[0] == ("experts",)
  none = {key: value for key, value in moved.items() if key != "quantization_config"}
  with pytest.raises(InputError, match="quantization_config is missing"):
    storage.storage(edited(k3_source, config=none))
  both = copy.deepcopy(k3_source.config) | {"quantization_config": {"format": "other"}}
  with pytest.raises(InputError, match="differ"):
    storage.storage(edited(k3_source, config=both))


def test_a_quantization_config_without_packed_weights_is_fine(kimi_linear_source, k3_source, edited):
  config = kimi_linear_source.config | {"quantization_config": k3_source.config["text_config"]["quantization_config"]}
  assert storage.storage(edited(kimi_linear_source, config=config))[0] == ()


@pytest.mark.parametrize("suffix", storage.FLOAT32_SUFFIXES.values(), ids=storage.FLOAT32_SUFFIXES)
def test_a_k3_float32_leaf_in_another_dtype_is_refused_by_name(k3_source, edited, suffix):
  name = next(name for name in k3_source.tensors if name.endswith(suffix))
  with pytest.raises(InputError, match=rf"^{name}: stored as BF16, expected F32"):
    storage.storage(edited(k3_source, {name: dataclasses.replace(k3_source.tensors[name], dtype="BF16")}))


def test_a_flat_checkpoint_may_keep_a_whole_kind_in_float32_but_not_a_part(kimi_linear_source, edited):
  norms = [name for name in kimi_linear_source.tensors if name.endswith(".o_norm.weight")]
  in_float32 = {name: dataclasses.replace(kimi_linear_source.tensors[name], dtype="F32") for name in norms}
  assert storage.storage(edited(kimi_linear_source, in_float32))[1] == ("A_log", "dt_bias", "o_norm")
  odd = norms[4]
  with pytest.raises(InputError, match=rf"^{odd}: stored as F32, expected BF16 as the other o_norm tensors"):
    storage.storage(edited(kimi_linear_source, {odd: in_float32[odd]}))
  with pytest.raises(InputError, match=rf"^{odd}: stored as BF16, expected F32 as the other"):
    storage.storage(edited(kimi_linear_source, in_float32 | {odd: kimi_linear_source.tensors[odd]}))


@pytest.mark.parametrize("dtype", ["float16", "float32", None])
def test_another_weight_dtype_is_refused_by_name(kimi_linear_source, edited, dtype):
  with pytest.raises(InputError, match=f"dtype is {dtype or 'missing'}: only bfloat16"):
    storage.storage(edited(kimi_linear_source, config=kimi_linear_source.config | {"dtype": dtype}))


def test_the_older_name_of_the_dtype_counts(kimi_linear_source, edited):
  config = {key: value for key, value in kimi_linear_source.config.items() if key != "dtype"}
  assert storage.storage(edited(kimi_linear_source, config=config | {"torch_dtype": "bfloat16"}))
