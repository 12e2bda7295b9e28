from __future__ import annotations

import copy
import json
import time

import pytest

from kimi_k3.convert import index, plan
from kimi_k3.convert.plan import Options
from kimi_k3.errors import InputError

# Released sizes: hidden 7168, 93 layers, 896 experts, 96 heads of 128 in both attentions.
K3_SIZES = {
  "hidden_size": 7168, "vocab_size": 163840, "num_hidden_layers": 93, "intermediate_size": 33792,
  "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "num_experts": 896, "num_experts_per_token": 16,
  "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
  "num_attention_heads": 96, "num_key_value_heads": 96, "attn_res_block_size": 12, "max_position_embeddings": 1048576,
  "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
}  # fmt: skip


def released_config(k3_source) -> dict:
  config = copy.deepcopy(k3_source.config)
  text = config["text_config"]
  text |= K3_SIZES
  full = [layer for layer in range(1, 94) if layer % 4 == 0 or layer == 93]
  kda = [layer for layer in range(1, 94) if layer not in full]
  text["linear_attn_config"] |= {"num_heads": 96, "head_dim": 128, "full_attn_layers": full, "kda_layers": kda}
  return config | {key: text[key] for key in config if key in K3_SIZES}


def released_headers(config, maker):
  """(name, dtype, shape) of every text tensor of the release: 1,954 BF16, 506 F32, 494,592 U8."""
  float32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
  for name, shape in maker.tensor_shapes(config["text_config"]):
    name = f"language_model.{name}"
    if ".experts." in name:
      yield f"{name}_packed", "U8", (shape[0], shape[1] // 2)
      yield f"{name}_scale", "U8", (shape[0], shape[1] // 32)
    else:
      yield name, "F32" if name.endswith(float32) else "BF16", shape


def test_the_full_size_release_is_planned_in_seconds(k3_source, maker, headers):
  config = released_config(k3_source)
  table = headers(released_headers(config, maker))
  counts = {dtype: sum(tensor.dtype == dtype for tensor in table.values()) for dtype in ("BF16", "F32", "U8")}
  assert counts["U8"] == 92 * 896 * 3 * 2
  assert counts["F32"] == 69 * 6 + 92
  assert len(table) == 497_220 - 168
  source = index.Source(k3_source.directory, config, json.dumps(config).encode(), table)

  started = time.process_time()
  planned = plan.make_plan(source, Options())
  assert time.process_time() - started < 20  # seconds; 5 here, 11 with run-time shape checks
  assert planned.scan
  assert planned.num_parameters == pytest.approx(2.7795e12, rel=2e-5)
  assert planned.nbytes == pytest.approx((105.67 + 0.04 + 1347.12) * 2**30, rel=1e-3)
  experts = next(leaf for leaf in planned.leaves if leaf.path[-1] == "w1_packed" and "blocks" in leaf.path)
  assert experts.shape == (22, 896, 3072, 1792)
  assert "4 leading layers, 22 blocks of 4, tail of 1" in plan.summary(planned)


def test_choices_not_yet_supported_are_refused_by_name(k3_source):
  for options in (Options(experts="fp8-block"), Options(dense="fp8-block")):
    with pytest.raises(InputError, match="fp8-block: not yet supported"):
      plan.make_plan(k3_source, options)
  with pytest.raises(InputError, match="--experts fp4: unknown"):
    plan.make_plan(k3_source, Options(experts="fp4"))


def test_packing_what_is_stored_in_bfloat16_is_refused(k3_source, kimi_linear_source):
  with pytest.raises(InputError, match="--experts mxfp4: the source's experts are bfloat16"):
    plan.make_plan(kimi_linear_source, Options(experts="mxfp4"))
  assert plan.make_plan(k3_source, Options(experts="mxfp4")).options == plan.make_plan(k3_source, Options()).options


def test_decoding_takes_experts_out_of_the_packed_modules_and_nothing_else(all_packed_source, kimi_linear_source):
  planned = plan.make_plan(all_packed_source, Options(experts="bf16"))
  assert planned.config.packed_modules == ("latent", "shared_experts")
  assert planned.form.packed_modules == ("experts", "latent", "shared_experts")
  assert plan.make_plan(kimi_linear_source, Options(experts="bf16")).experts == "as-stored"


def test_decoding_keeps_the_number_of_parameters(k3_source):
  packed, decoded = (plan.make_plan(k3_source, Options(experts=choice)) for choice in ("as-stored", "bf16"))
  assert packed.num_parameters == decoded.num_parameters


def test_layers_that_do_not_fold_are_planned_unrolled_unless_folding_was_asked_for(k3_source, edited, maker, headers):
  config = copy.deepcopy(k3_source.config)
  linear = config["text_config"]["linear_attn_config"]
  linear["full_attn_layers"], linear["kda_layers"] = [4, 8, 9], [1, 2, 3, 5, 6, 7, 10, 11, 12, 13]
  source = edited(k3_source, config=config)
  source = index.Source(source.directory, config, source.config_bytes, headers(released_headers(config, maker)))
  assert not plan.make_plan(source, Options()).scan
  with pytest.raises(InputError, match="scan_layers: true needs blocks"):
    plan.make_plan(source, Options(scan=True))


def test_an_unknown_config_key_is_named(k3_source, edited):
  config = copy.deepcopy(k3_source.config)
  config["text_config"]["mixture_of_depths"] = True
  with pytest.raises(InputError, match="unknown key mixture_of_depths"):
    plan.make_plan(edited(k3_source, config=config), Options())
  with pytest.raises(InputError, match=r"unknown key\(s\) audio_config"):
    plan.make_plan(edited(k3_source, config=k3_source.config | {"audio_config": {}}), Options())


def test_the_fingerprint_follows_the_config_and_every_header(k3_source, edited, headers):
  same = index.open_source(k3_source.directory)
  assert plan.fingerprint(same) == plan.fingerprint(k3_source)
  name = next(iter(k3_source.tensors))
  moved = headers([(name, "BF16", k3_source.tensors[name].shape)])
  others = [edited(k3_source, moved), edited(k3_source, {name: None}), edited(k3_source, config={"a": 1})]
  assert len({plan.fingerprint(source) for source in (k3_source, *others)}) == 4


def test_a_wrong_number_of_experts_is_refused_before_a_table_of_them_is_made(k3_source, edited):
  config = copy.deepcopy(k3_source.config)
  config["text_config"]["num_experts"] = 2**31 - 1
  with pytest.raises(InputError, match=r"num_experts is 2147483647 in 12 layers, .* holds only 1504 tensors"):
    plan.make_plan(edited(k3_source, config=config), Options())
