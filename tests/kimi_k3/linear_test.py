from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3_reference import mxfp4_decode
from kimi_k3.linear import Linear, PackedLinear, matrix, random_packed

pytestmark = [pytest.mark.strict_ranks, pytest.mark.usefixtures("unsharded")]

IN, OUT = 64, 96
TOLERANCE = 1e-5  # of the largest value; sums of 64 products in float32


def assert_near(found, expected, tolerance=TOLERANCE):
  np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.fixture(scope="module")
def x():
  return jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, IN)), jnp.float32)


def test_a_packed_matrix_is_cut_by_output_so_that_no_group_loses_its_scale(float32_compute):
  layer = PackedLinear(IN, OUT, axes=("embed", "mlp"), compute=float32_compute, rngs=nnx.Rngs(0))
  assert layer.packed.get_metadata("out_sharding") == ("mlp", None)
  assert layer.scale.get_metadata("out_sharding") == ("mlp", None)


def test_a_packed_matrix_is_stored_output_first_and_multiplies_by_its_decoded_weights(float32_compute, x):
  layer = PackedLinear(IN, OUT, axes=("embed", "mlp"), compute=float32_compute, rngs=nnx.Rngs(0))
  assert (layer.packed.shape, layer.scale.shape) == ((OUT, IN // 2), (OUT, IN // 32))
  rng = np.random.default_rng(1)
  layer.packed[...] = jnp.asarray(rng.integers(0, 256, (OUT, IN // 2)), jnp.uint8)
  layer.scale[...] = jnp.asarray(rng.integers(120, 130, (OUT, IN // 32)), jnp.uint8)
  weight = mxfp4_decode(np.asarray(layer.packed[...]), np.asarray(layer.scale[...]))
  assert_near(layer(x), np.asarray(x, np.float64) @ weight.T)


def test_a_plain_matrix_contracts_all_its_input_axes(float32_compute):
  rng = np.random.default_rng(2)
  x = rng.standard_normal((2, 5, 3, 8))
  axes = ("q_heads", "kv", None, None)
  layer = Linear((3, 8), (4, 6), fp8=False, axes=axes, compute=float32_compute, rngs=nnx.Rngs(0))
  assert layer.kernel.shape == (3, 8, 4, 6)
  expected = np.einsum("bthv,hvkd->btkd", x, np.asarray(layer.kernel[...], np.float64))
  assert_near(layer(jnp.asarray(x, jnp.float32)), expected)


@pytest.mark.parametrize(
  ("packed", "fp8", "leaves"),
  [
    (True, False, {"packed": "uint8", "scale": "uint8"}),
    (True, True, {"packed": "uint8", "scale": "uint8"}),
    (False, True, {"kernel": "float8_e4m3fn", "kernel_scale_inv": "float32"}),
    (False, False, {"kernel": "float32"}),
  ],
)
def test_matrix_is_stored_as_the_checkpoint_says(packed, fp8, leaves, float32_compute, x):
  layer = matrix(IN, OUT, packed=packed, fp8=fp8, axes=("embed", "mlp"), compute=float32_compute, rngs=nnx.Rngs(0))
  assert {path[-1]: str(v.dtype) for path, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))} == leaves
  assert layer(x).shape == (2, 5, OUT)


def test_an_fp8_kernel_is_cut_as_a_plain_one_and_its_scales_are_whole_everywhere(float32_compute):
  axes = ("embed_attn", "q_heads", "kv")
  layer = Linear((300,), (4, 48), fp8=True, axes=axes, compute=float32_compute, rngs=nnx.Rngs(0))
  assert (layer.kernel.shape, layer.kernel_scale_inv.shape) == ((300, 4, 48), (3, 2))
  assert layer.kernel.get_metadata("out_sharding") == axes
  assert layer.kernel_scale_inv.get_metadata("out_sharding") == (None, None)


@pytest.mark.parametrize(("inputs", "outputs"), [((300,), (4, 48)), ((4, 48), (300,)), ((3, 50), (2, 65))])
def test_an_fp8_matrix_multiplies_by_codes_times_the_scales_of_their_blocks(inputs, outputs, float32_compute):
  layer = Linear(inputs, outputs, fp8=True, axes=(None,) * 3, compute=float32_compute, rngs=nnx.Rngs(0))
  rng = np.random.default_rng(4)
  layer.kernel_scale_inv[...] = jnp.asarray(2.0 ** rng.integers(-8, 8, layer.kernel_scale_inv.shape), jnp.float32)
  codes, scales = np.asarray(layer.kernel[...], np.float64), np.asarray(layer.kernel_scale_inv[...], np.float64)
  weight = codes.reshape(np.prod(inputs), -1)
  for i, j in np.ndindex(*weight.shape):
    weight[i, j] *= scales[i // 128, j // 128]
  x = np.float32(rng.standard_normal((5, *inputs)))
  assert_near(layer(jnp.asarray(x)), (x.reshape(5, -1) @ weight).reshape(5, *outputs))


@pytest.mark.parametrize(("packed", "fp8"), [(True, False), (False, True), (False, False)])
def test_the_result_and_the_operands_are_of_the_compute_dtype(packed, fp8, float32_compute, x):
  compute = dataclasses.replace(float32_compute, dtype=jnp.bfloat16)
  layer = matrix(IN, OUT, packed=packed, fp8=fp8, axes=("embed", "mlp"), compute=compute, rngs=nnx.Rngs(0))
  found = layer(x)
  assert found.dtype == jnp.bfloat16
  rounded = np.asarray(x.astype(jnp.bfloat16), np.float64)
  if packed:
    weight = mxfp4_decode(np.asarray(layer.packed[...]), np.asarray(layer.scale[...])).T
  else:
    weight = np.asarray(layer.weights(), np.float64)
    assert layer.weights().dtype == jnp.bfloat16
  assert_near(np.asarray(found, np.float64), rounded @ weight, 2.0**-8)


def test_random_weights_keep_the_size_of_activations(float32_compute):
  x = jnp.asarray(np.random.default_rng(3).standard_normal((64, 1024)), jnp.float32)
  for packed, fp8 in ((True, False), (False, True), (False, False)):
    form = {"packed": packed, "fp8": fp8, "compute": float32_compute}
    layer = matrix(1024, 512, axes=("embed", "mlp"), rngs=nnx.Rngs(0), **form)
    assert 0.7 < float(jnp.std(layer(x))) < 1.4


def test_random_packed_experts_have_a_scale_a_group():
  packed, scale = random_packed(nnx.Rngs(0), (4, 48, 128))
  assert (packed.shape, scale.shape) == ((4, 48, 64), (4, 48, 4))
