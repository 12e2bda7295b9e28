from __future__ import annotations

import copy
import json
import math
import time

import pytest

from kimi_k3.convert import chunks, index, plan
from kimi_k3.convert.plan import Options
from kimi_k3.convert.transforms import Transform
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


def released_headers(config, maker, *, packed=True):
  """(name, dtype, shape) of every text tensor of the release: 1,954 BF16, 506 F32, 494,592 U8."""
  float32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
  for name, shape in maker.tensor_shapes(config["text_config"]):
    name = f"language_model.{name}"
    if packed and ".experts." in name:
      yield f"{name}_packed", "U8", (shape[0], shape[1] // 2)
      yield f"{name}_scale", "U8", (shape[0], shape[1] // 32)
    else:
      yield name, "F32" if name.endswith(float32) else "BF16", shape


def test_the_full_size_release_is_planned_in_seconds(k3_source, maker, headers):
  source = full_size(k3_source, maker, headers, num_experts=896)
  table = source.tensors
  counts = {dtype: sum(tensor.dtype == dtype for tensor in table.values()) for dtype in ("BF16", "F32", "U8")}
  assert counts["U8"] == 92 * 896 * 3 * 2
  assert counts["F32"] == 69 * 6 + 92
  assert len(table) == 497_220 - 168

  started = time.process_time()
  planned = plan.make_plan(source, Options())
  assert time.process_time() - started < 20  # seconds; 5 here, 11 with run-time shape checks
  assert planned.scan
  assert planned.num_parameters == pytest.approx(2.7795e12, rel=2e-5)
  assert planned.nbytes == pytest.approx((105.67 + 0.04 + 1347.12) * 2**30, rel=1e-3)
  experts = next(leaf for leaf in planned.leaves if leaf.path[-1] == "w1_packed" and "blocks" in leaf.path)
  assert experts.shape == (22, 896, 3072, 1792)
  assert "4 leading layers, 22 blocks of 4, tail of 1" in plan.summary(planned)


# Of the matrices of a layer: (inputs, outputs), all heads together.
KDA = [*[(7168, 12288)] * 4, (12288, 7168), (7168, 128), (128, 12288), (7168, 96)]
MLA = [(7168, 1536), (1536, 18432), (7168, 576), (512, 24576), (7168, 12288), (12288, 7168)]
DENSE_MLP = [(7168, 33792)] * 2 + [(33792, 7168)]
MOE = [(7168, 3584), (3584, 7168), (7168, 6144), (7168, 6144), (6144, 7168)]
DENSE = 69 * KDA + 24 * MLA + DENSE_MLP + 92 * MOE
EXPERT = [(3584, 3072), (3584, 3072), (3072, 3584)]


def fp8_bytes(matrices) -> int:
  return sum(i * o + 4 * -(-i // 128) * -(-o // 128) for i, o in matrices)


def full_size(k3_source, maker, headers, *, num_experts: int, packed: bool = True) -> index.Source:
  """The release by its headers, with fewer experts if that will do: a table of half a million tensors takes seconds."""
  config = released_config(k3_source)
  config["text_config"]["num_experts"] = num_experts
  table = headers(released_headers(config, maker, packed=packed))
  return index.Source(k3_source.directory, config, json.dumps(config).encode(), table)


@pytest.mark.parametrize("num_experts", [16, pytest.param(896, marks=pytest.mark.slow)])
def test_every_format_of_the_full_model_has_its_size_and_as_many_parameters(k3_source, maker, headers, num_experts):
  packed, plain = (full_size(k3_source, maker, headers, num_experts=num_experts, packed=p) for p in (True, False))
  expert, dense = sum(i * o for i, o in EXPERT), sum(i * o for i, o in DENSE)
  experts = {
    "bf16": 2 * expert,
    "mxfp4": expert // 2 + expert // 32,
    "fp8-block": fp8_bytes(EXPERT),
  }
  stored = plan.make_plan(packed, Options())
  rest = stored.nbytes - 92 * num_experts * experts["mxfp4"]
  if num_experts == 896:
    assert rest == pytest.approx((105.67 + 0.04) * 2**30, rel=1e-3)
  saved = {"as-stored": 0, "fp8-block": 2 * dense - fp8_bytes(DENSE)}
  cases = (
    (packed, "fp8-block", "fp8-block", "fp8-block"),
    (packed, "mxfp4", "as-stored", "as-stored"),
    (packed, "bf16", "as-stored", "bf16"),
    (plain, "mxfp4", "fp8-block", "mxfp4"),
    (plain, "fp8-block", "as-stored", "fp8-block"),
  )
  for source, choice, dense_choice, meant in cases if num_experts < 896 else cases[:1]:  # a plan takes half a minute
    planned = plan.make_plan(source, Options(experts=choice, dense=dense_choice))
    assert planned.nbytes == rest - saved[dense_choice] + 92 * num_experts * experts[choice], (choice, dense_choice)
    assert planned.num_parameters == stored.num_parameters
    assert planned.experts == meant
    check_chunks(planned)


def check_chunks(planned: plan.Plan) -> None:
  """No chunk takes more than CHUNK_BYTES of the source; a piece's chunks take each of its rows once."""
  for leaf in planned.leaves:
    nbytes = sum(math.prod(shape) * index.DTYPES[dtype].itemsize for dtype, shape in leaf.stored)
    rows = leaf.stored[0][1][0]
    cut = [chunk.rows for chunk in chunks.piece_chunks(leaf, leaf.pieces[-1])]
    assert [0, *(stop for _, stop in cut)] == [*(start for start, _ in cut), rows], leaf.path
    if leaf.transform is Transform.FP8_SCALES:
      assert len(cut) == 1  # made from a few rows at a time
      continue
    largest = max(stop - start for start, stop in cut)
    assert largest * nbytes <= chunks.CHUNK_BYTES * rows, leaf.path
    if leaf.transform is Transform.FP8_CODES:
      assert all(start % 128 == 0 for start, _ in cut), leaf.path


def test_an_unknown_choice_is_refused_by_name(k3_source):
  with pytest.raises(InputError, match="--experts fp4: unknown"):
    plan.make_plan(k3_source, Options(experts="fp4"))
  with pytest.raises(InputError, match="--dense bf16: unknown, expected one of as-stored, fp8-block"):
    plan.make_plan(k3_source, Options(dense="bf16"))


@pytest.mark.parametrize(
  ("name", "options", "packed", "fp8", "experts"),
  [
    ("k3", {"experts": "mxfp4"}, ("experts",), (), "as-stored"),
    ("k3", {"experts": "fp8-block"}, (), ("experts",), "fp8-block"),
    ("k3", {"dense": "fp8-block"}, ("experts",), ("dense",), "as-stored"),
    ("k3", {"experts": "bf16", "dense": "fp8-block"}, (), ("dense",), "bf16"),
    ("kimi-linear", {"experts": "mxfp4"}, ("experts",), (), "mxfp4"),
    ("kimi-linear", {"experts": "bf16"}, (), (), "as-stored"),
    ("kimi-linear", {"experts": "fp8-block", "dense": "fp8-block"}, (), ("dense", "experts"), "fp8-block"),
    ("all packed", {"experts": "fp8-block"}, ("latent", "shared_experts"), ("experts",), "fp8-block"),
  ],
)
def test_the_plan_says_what_the_result_is_stored_in(small_sources, name, options, packed, fp8, experts):
  planned = plan.make_plan(small_sources[name], Options(**options))
  assert (planned.config.packed_modules, planned.config.fp8_modules) == (packed, fp8)
  assert planned.options == {"scan": True, "experts": experts, "dense": options.get("dense", "as-stored")}
  said = plan.summary(planned)
  assert ("experts    rounded to float8_e4m3fn, with a scale for each 128 x 128 block" in said) == ("experts" in fp8)
  assert ("dense      rounded to float8_e4m3fn" in said) == ("dense" in fp8)
  assert ("experts    rounded to MXFP4" in said) == (experts == "mxfp4")


def test_a_choice_that_changes_nothing_gives_the_very_same_plan(k3_source, kimi_linear_source):
  for source, choice in ((k3_source, "mxfp4"), (kimi_linear_source, "bf16")):
    assert plan.make_plan(source, Options(experts=choice)) == plan.make_plan(source, Options())


def test_experts_that_are_no_whole_groups_are_refused_by_the_name_of_their_size(kimi_linear_source, edited):
  config = kimi_linear_source.config | {"moe_intermediate_size": 24}
  with pytest.raises(InputError, match="moe_intermediate_size is 24, not a multiple of the MXFP4 group of 32"):
    plan.make_plan(edited(kimi_linear_source, config=config), Options(experts="mxfp4"))


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
