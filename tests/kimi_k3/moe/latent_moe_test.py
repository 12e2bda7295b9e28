from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import k3_reference
from kimi_k3.moe.latent_moe import GatedMLP, LatentMoE, dense_mlp
from kimi_k3.norms import RMSNorm

pytestmark = [pytest.mark.strict_ranks, pytest.mark.usefixtures("unsharded")]

TOLERANCE = 1e-4  # of the largest value, as for the whole model: two norms and five products deep
LAYER = "model.layers.5.block_sparse_moe"


def set_leaf(module, path: str, value) -> None:
  *parents, leaf = path.split(".")
  for name in parents:
    module = getattr(module, name)
  variable = getattr(module, leaf)
  assert variable[...].shape == value.shape, path
  variable[...] = jnp.asarray(value, variable[...].dtype)


def moe_of(ckpt, config, compute) -> LatentMoE:
  """The MoE layer with the checkpoint's weights, all decoded to bfloat16 or float32."""
  config = dataclasses.replace(config, packed_modules=())
  moe = LatentMoE(config, compute, nnx.Rngs(0))
  weights = {
    "router.kernel": ckpt.weight(f"{LAYER}.gate.weight").T,
    "router.bias": ckpt.weight(f"{LAYER}.gate.e_score_correction_bias"),
  }
  for w in ("w1", "w2", "w3"):
    stacked = [ckpt.weight(f"{LAYER}.experts.{e}.{w}.weight").T for e in range(config.num_experts)]
    weights[f"experts.{w}"] = np.stack(stacked)
  for m in ("gate", "up", "down"):
    weights[f"shared_experts.{m}_proj.kernel"] = ckpt.weight(f"{LAYER}.shared_experts.{m}_proj.weight").T
  if config.expert_latent_dim is not None:
    weights["norm.scale"] = ckpt.weight(f"{LAYER}.routed_expert_norm.weight")
    for m in ("down", "up"):
      weights[f"{m}_proj.kernel"] = ckpt.weight(f"{LAYER}.routed_expert_{m}_proj.weight").T
  for path, value in weights.items():
    set_leaf(moe, path, value)
  assert len(nnx.to_flat_state(nnx.state(moe, nnx.Param))) == len(weights)
  return moe


@pytest.mark.parametrize("name", ["k3", "kimi_linear"])
def test_the_layer_is_the_references(name, request, float32_compute):
  ckpt = k3_reference.load_checkpoint(request.getfixturevalue(f"{name}_tiny").checkpoint)
  config = request.getfixturevalue(f"{name}_config")
  compute = dataclasses.replace(float32_compute, weight_dtype=jnp.bfloat16)
  h = np.float32(np.random.default_rng(0).standard_normal((2, 9, config.hidden_size)))
  trace = {}
  expected = k3_reference.mixture_of_experts(ckpt, LAYER, h.astype(np.float64), trace)
  assert trace["router_margin"].min() > 1e-5  # no choice hangs on rounding
  moe = moe_of(ckpt, config, compute)
  found, ids = jax.jit(moe.__call__)(jnp.asarray(h))
  np.testing.assert_array_equal(ids, trace["expert_ids"])
  np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.fixture(scope="module", params=["k3", "kimi_linear"])
def compiled(request, float32_compute):
  """(compiled layer, hidden states of two rows of nine tokens)."""
  ckpt = k3_reference.load_checkpoint(request.getfixturevalue(f"{request.param}_tiny").checkpoint)
  config = request.getfixturevalue(f"{request.param}_config")
  with nnx.use_eager_sharding(False):
    moe = moe_of(ckpt, config, dataclasses.replace(float32_compute, weight_dtype=jnp.bfloat16))
  h = jnp.asarray(np.random.default_rng(0).standard_normal((2, 9, config.hidden_size)), jnp.float32)
  return jax.jit(moe.__call__), h


def test_the_order_of_tokens_and_their_neighbours_do_not_matter(compiled):
  moe, h = compiled
  out, ids = moe(h)
  swapped, swapped_ids = moe(h[::-1, ::-1])
  np.testing.assert_array_equal(swapped_ids, ids[::-1, ::-1])
  # The experts of a token are summed in the order of their numbers, the rows of a tile in no order.
  bound = 1e-6 * np.abs(out).max()
  np.testing.assert_allclose(swapped, out[::-1, ::-1], rtol=0, atol=bound)
  for t in (0, 4, 8):
    crowd = jnp.broadcast_to(h[1:, t : t + 1], h.shape).at[0, 0].set(h[0, 0])  # all but one choose alike
    crowded, crowded_ids = moe(crowd)
    np.testing.assert_array_equal(crowded_ids[0, 0], ids[0, 0])
    np.testing.assert_allclose(crowded[0, 0], out[0, 0], rtol=0, atol=bound)
    np.testing.assert_allclose(crowded[1, 3], out[1, t], rtol=0, atol=bound)
  alone, alone_ids = moe(h[1:, 4:5])
  np.testing.assert_array_equal(alone_ids[0, 0], ids[1, 4])
  np.testing.assert_allclose(alone[0, 0], out[1, 4], rtol=0, atol=bound)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_garbage_in_a_token_changes_no_bit_of_the_others_though_it_shares_their_experts_tiles(compiled, garbage):
  moe, h = compiled
  out, ids = moe(h)
  hit = jnp.zeros((*h.shape[:2], 1), bool).at[1, 5:].set(True).at[0, 0].set(True)  # the pads of a row, and a token
  found, found_ids = moe(jnp.where(hit, garbage, h))
  np.testing.assert_array_equal(np.where(hit, 0, found), np.where(hit, 0, out))
  np.testing.assert_array_equal(np.where(hit, 0, found_ids), np.where(hit, 0, ids))
  assert np.isnan(found[1, 5:]).all()


def parameters(config, compute) -> set[str]:
  moe = nnx.eval_shape(lambda: LatentMoE(config, compute, nnx.Rngs(0)))
  return {".".join(path) for path, _ in nnx.to_flat_state(nnx.state(moe, nnx.Param))}


ROUTER_AND_SHARED = {
  "router.kernel", "router.bias",
  "shared_experts.gate_proj.kernel", "shared_experts.up_proj.kernel", "shared_experts.down_proj.kernel",
}  # fmt: skip


def test_k3_has_a_latent_and_packed_experts(k3_config, float32_compute):
  assert parameters(k3_config, float32_compute) == ROUTER_AND_SHARED | {
    "experts.w1_packed", "experts.w1_scale", "experts.w2_packed", "experts.w2_scale",
    "experts.w3_packed", "experts.w3_scale", "down_proj.kernel", "up_proj.kernel", "norm.scale",
  }  # fmt: skip


def test_kimi_linear_has_neither(kimi_linear_config, float32_compute):
  expected = ROUTER_AND_SHARED | {"experts.w1", "experts.w2", "experts.w3"}
  assert parameters(kimi_linear_config, float32_compute) == expected


def test_shared_experts_and_latent_projections_can_be_packed(k3_config, float32_compute):
  config = dataclasses.replace(k3_config, packed_modules=("latent", "shared_experts"))
  assert {n for n in parameters(config, float32_compute) if n.endswith(("packed", "scale"))} == {
    "down_proj.packed", "down_proj.scale", "up_proj.packed", "up_proj.scale", "norm.scale",
    "shared_experts.gate_proj.packed", "shared_experts.gate_proj.scale",
    "shared_experts.up_proj.packed", "shared_experts.up_proj.scale",
    "shared_experts.down_proj.packed", "shared_experts.down_proj.scale",
  }  # fmt: skip


def test_norm_and_shared_experts_are_absent_when_the_config_says_so(k3_config, float32_compute):
  config = dataclasses.replace(k3_config, latent_moe_use_norm=False, num_shared_experts=0)
  names = parameters(config, float32_compute)
  assert "norm.scale" not in names
  assert not any(name.startswith("shared_experts") for name in names)


def test_the_norm_is_on_the_sum_and_not_on_each_expert(k3_config, float32_compute):
  config = dataclasses.replace(k3_config, packed_modules=(), num_shared_experts=0, rms_norm_eps=1e-30)
  moe = LatentMoE(config, float32_compute, nnx.Rngs(0))
  moe.up_proj.kernel[...] = jnp.eye(config.expert_dim, config.hidden_size)
  h = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, config.hidden_size)), jnp.float32)
  normalised = moe(h)[0][..., : config.expert_dim]
  # The mean of four normalised outputs would have a mean square near 1/4.
  np.testing.assert_allclose(np.mean(np.square(normalised), axis=-1), np.ones((1, 6)), rtol=1e-4)


def test_the_routed_sum_is_cast_before_it_is_normalised(k3_config, float32_compute, monkeypatch):
  compute = dataclasses.replace(float32_compute, dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16)
  moe = nnx.eval_shape(lambda: LatentMoE(k3_config, compute, nnx.Rngs(0)))
  seen = []
  monkeypatch.setattr(RMSNorm, "__call__", lambda self, x: seen.append((self.eps, x.dtype)) or x)
  graph, state = nnx.split(moe)
  h = jax.ShapeDtypeStruct((1, 3, k3_config.hidden_size), jnp.bfloat16)
  out, _ = jax.eval_shape(lambda s, h: nnx.merge(graph, s)(h), state, h)
  assert seen == [(k3_config.rms_norm_eps, jnp.bfloat16)]
  assert out.dtype == jnp.bfloat16


def test_the_dense_mlp_is_the_references(k3_tiny, k3_config, float32_compute):
  ckpt = k3_reference.load_checkpoint(k3_tiny.checkpoint)
  mlp = dense_mlp(k3_config, float32_compute, nnx.Rngs(0))
  assert isinstance(mlp, GatedMLP)
  for m in ("gate", "up", "down"):
    set_leaf(mlp, f"{m}_proj.kernel", ckpt.weight(f"model.layers.0.mlp.{m}_proj.weight").T)
  x = np.float32(np.random.default_rng(0).standard_normal((2, 3, k3_config.hidden_size)))
  expected = k3_reference.gated_mlp(ckpt, "model.layers.0.mlp", x.astype(np.float64))
  np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("experts", ["reference", "dropless"])
def test_a_pad_asks_for_no_expert_and_changes_no_other_token(experts, kimi_linear_config, float32_compute):
  compute = dataclasses.replace(float32_compute, expert_implementation=experts)
  moe = LatentMoE(kimi_linear_config, compute, nnx.Rngs(0))
  h = jax.random.normal(jax.random.key(0), (2, 9, kimi_linear_config.hidden_size))
  valid = jnp.arange(9)[None, :] < jnp.array([9, 5])[:, None]
  found, ids = moe(h, valid)
  expected, all_ids = moe(h)
  np.testing.assert_array_equal(ids, all_ids)
  np.testing.assert_allclose(found[valid], expected[valid], rtol=0, atol=1e-6 * np.abs(expected).max())
  np.testing.assert_allclose(found[~valid], moe.shared_experts(h)[~valid], rtol=0, atol=1e-6 * np.abs(expected).max())
