"""Bytes that a step must move, against sums written out and against the sizes of the released model."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

GIB = 2**30


@pytest.fixture(scope="module")
def k3(k3_config):
  """K3 at full size: the golden model's switches with the released sizes."""
  full = tuple(range(4, 93, 4)) + (93,)
  return dataclasses.replace(
    k3_config,
    hidden_size=7168,
    vocab_size=163840,
    num_layers=93,
    num_heads=96,
    num_kv_heads=96,
    dense_mlp_dim=33792,
    expert_mlp_dim=3072,
    expert_latent_dim=3584,
    num_experts=896,
    num_experts_per_token=16,
    num_shared_experts=2,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kda_num_heads=96,
    kda_head_dim=128,
    kda_conv_width=4,
    kda_layers=tuple(i for i in range(1, 94) if i not in full),
    full_attention_layers=full,
    attn_res_block_size=12,
  )


@pytest.fixture(scope="module")
def decode_traffic():
  from kimi_k3.capacity.traffic import decode_traffic

  return decode_traffic


def test_k3_on_32_devices_reads_42_gib_of_experts_and_14_of_other_weights(k3, decode_traffic):
  found = decode_traffic(k3, devices_heads=32, devices_experts=32, batch=64, context=8192, latent_cuts=32)
  assert found.experts_worst == 92 * 28 * 3 * 3584 * 3072 * 17 / 32
  assert found.experts_worst / GIB == pytest.approx(42.1, abs=0.01)
  # The compiled prototype's arguments hold 13.68 GiB; a step reads rows of the embedding table, not all of it.
  assert found.other_weights / GIB == pytest.approx(13.68 - 163840 * 7168 * 2 / 32 / GIB, abs=0.01)


def test_k3s_states_and_cache_are_those_of_a_sequence_times_the_batch(k3, decode_traffic):
  found = decode_traffic(k3, devices_heads=32, devices_experts=32, batch=64, context=8192, latent_cuts=32)
  assert found.kda_states == 2 * 64 * 434_110_464 / 32  # read and written
  assert found.conv_states == 2 * 64 * 69 * 3 * 3 * 96 * 128 * 2 / 32
  assert found.latent_cache == 64 * (8192 + 1) * 24 * 576 * 2 / 32
  assert found.logits == 64 * 163840 / 32 * 4


def test_total_is_the_sum_of_the_kinds_and_the_worst_case_differs_by_the_experts(k3, decode_traffic):
  found = decode_traffic(k3, devices_heads=32, devices_experts=32, batch=2, context=100)
  kinds = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
  assert found.total == pytest.approx(sum(kinds.values()) - kinds["experts_worst"])
  assert found.total_worst - found.total == pytest.approx(found.experts_worst - found.experts)
  assert found.table().splitlines()[-1].startswith("total_worst ")
  assert found.experts_worst == 92 * 28 * 3 * 3584 * 3072 * 17 / 32  # 32 choices may all be of these 28
  one = decode_traffic(k3, devices_heads=32, devices_experts=32, batch=1, context=100)
  assert one.experts_worst == found.experts_worst * 16 / 28


@pytest.mark.parametrize(
  ("changed", "kind", "by"),
  [
    ({"batch": 128}, "kda_states", 2),
    ({"batch": 128}, "conv_states", 2),
    ({"batch": 128}, "latent_cache", 2),
    ({"batch": 128}, "embedding_rows", 2),
    ({"rows_cuts": 4}, "kda_states", 1 / 4),
    ({"rows_cuts": 4}, "latent_cache", 1 / 4),
    ({"latent_cuts": 32}, "latent_cache", 1 / 32),
    ({"cache_dtype_bytes": 1}, "latent_cache", 1 / 2),
    ({"state_dtype_bytes": 2}, "kda_states", 1 / 2),
    ({"devices_experts": 8}, "experts_worst", 4),
    ({"devices_experts": 8, "expert_width_cuts": 4}, "experts_worst", 1),
    ({"devices_experts": 8, "expert_width_cuts": 4}, "experts", 1),
    ({"devices_heads": 8}, "shared_experts", 4),
    ({"devices_heads": 8}, "dense_mlp", 4),
    ({"devices_heads": 8}, "logits", 4),
    ({"router_cuts": 32}, "router", 1 / 32),
    ({"context": 10**6}, "kda_states", 1),
  ],
)
def test_each_cut_acts_on_its_own_kind(k3, decode_traffic, changed, kind, by):
  base = {"devices_heads": 32, "devices_experts": 32, "batch": 64, "context": 8192}
  before, after = decode_traffic(k3, **base), decode_traffic(k3, **base | changed)
  assert getattr(after, kind) == pytest.approx(by * getattr(before, kind))


def test_replicated_latent_projections_are_8_8_gib_and_cut_ones_a_32nd(k3, decode_traffic):
  cuts = {"devices_heads": 32, "devices_experts": 32, "batch": 64, "context": 8192}
  whole, cut = (decode_traffic(k3, **cuts, latent_projection_cuts=n).latent_projections for n in (1, 32))
  norms = 92 * 3584 * 2
  assert whole == 92 * 2 * 7168 * 3584 * 2 + norms
  assert cut == (whole - norms) / 32 + norms
  assert (whole - cut) / GIB == pytest.approx(8.5, abs=0.05)  # docs: 8.5 GiB less


def test_the_expected_experts_are_those_that_uniform_choices_hit():
  from kimi_k3.capacity.traffic import expected_hits

  # All choices of 2 of 4 experts by 3 tokens, one by one.
  choices = list(itertools.combinations(range(4), 2))
  hits = [len(set().union(*map(set, each))) for each in itertools.product(choices, repeat=3)]
  assert expected_hits(4, 2, 3) == pytest.approx(sum(hits) / len(hits))
  assert expected_hits(896, 16, 1) == pytest.approx(16)
  assert expected_hits(896, 16, 64) / 896 == pytest.approx(0.684, abs=1e-3)


def test_the_golden_models_traffic_is_the_sum_written_out(k3_config, decode_traffic):
  """Two devices, experts in two groups, four rows of ten tokens. Sizes are those of tests/golden/k3-tiny."""
  c = k3_config
  found = decode_traffic(c, devices_heads=2, devices_experts=2, batch=4, context=10)
  kda, mla = len(c.kda_layers), len(c.full_attention_layers)
  moe, h, k, d = c.num_layers - 1, c.kda_num_heads // 2, c.kda_head_dim, c.hidden_size
  channels = h * k
  one = 2 * (5 * d * channels + d * k + k * channels + d * h)  # q, k, v, o, gate; decay; beta
  one += 4 * (3 * channels * c.kda_conv_width + h + channels + k)  # float32: taps, A_log, dt_bias, o_norm
  assert found.kda_weights == kda * one
  n, r, v = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
  q, latent, heads = c.q_lora_rank, c.kv_lora_rank, c.num_heads // 2
  one = d * q + q + q * heads * (n + r) + d * (latent + r) + latent + latent * heads * (n + v) + 2 * heads * v * d
  assert found.mla_weights == mla * 2 * one
  assert found.dense_mlp == 2 * 3 * d * c.dense_mlp_dim / 2
  assert found.shared_experts == moe * 2 * 3 * d * c.shared_mlp_dim / 2
  assert found.router == moe * (2 * d + 4) * c.num_experts
  assert found.norms == c.num_layers * 2 * d * 6
  assert found.head == 2 * (d * c.vocab_size / 2 + 3 * d)
  assert found.embedding_rows == 4 * d * 2 / 2
  assert found.latent_cache == mla * 4 * 11 * (latent + r) * 2


def test_kimi_linear_has_no_latent_and_plain_queries_and_unpacked_experts(kimi_linear_config, decode_traffic):
  c = kimi_linear_config
  found = decode_traffic(c, devices_heads=2, devices_experts=2, batch=1, context=10)
  assert found.latent_projections == 0
  assert found.norms == c.num_layers * 2 * c.hidden_size * 2
  local = min(c.num_experts // 2, c.num_experts_per_token)
  assert found.experts_worst == sum(c.moe_layers) * local * 3 * c.hidden_size * c.expert_mlp_dim * 2
  heads = c.num_heads // 2
  queries = c.hidden_size * heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
  with_rank = dataclasses.replace(c, q_lora_rank=8)
  ranked = decode_traffic(with_rank, devices_heads=2, devices_experts=2, batch=1, context=10)
  per_layer = (found.mla_weights - ranked.mla_weights) / 2 / len(c.full_attention_layers)
  assert per_layer == queries - (c.hidden_size * 8 + 8 + queries // c.hidden_size * 8)


def test_what_does_not_divide_is_named_all_at_once(k3, decode_traffic):
  from kimi_k3.errors import InputError

  with pytest.raises(InputError, match=r"num_heads is 96, not a multiple of devices_heads = 64;.*batch is 3"):
    decode_traffic(k3, devices_heads=64, devices_experts=32, batch=3, context=1, rows_cuts=2)
