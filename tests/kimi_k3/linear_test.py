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
  layer = Linear((3, 8), (4, 6), axes=("q_heads", "kv", None, None), compute=float32_compute, rngs=nnx.Rngs(0))
  assert layer.kernel.shape == (3, 8, 4, 6)
  expected = np.einsum("bthv,hvkd->btkd", x, np.asarray(layer.kernel[...], np.float64))
  assert_near(layer(jnp.asarray(x, jnp.float32)), expected)


@pytest.mark.parametrize("packed", [True, False])
def test_matrix_is_stored_as_the_checkpoint_says(packed, float32_compute, x):
  layer = matrix(IN, OUT, packed=packed, axes=("embed", "mlp"), compute=float32_compute, rngs=nnx.Rngs(0))
  names = {path[-1] for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
  assert names == ({"packed", "scale"} if packed else {"kernel"})
  assert layer(x).shape == (2, 5, OUT)


@pytest.mark.parametrize("packed", [True, False])
def test_the_result_and_the_operands_are_of_the_compute_dtype(packed, float32_compute, x):
  compute = dataclasses.replace(float32_compute, dtype=jnp.bfloat16)
  layer = matrix(IN, OUT, packed=packed, axes=("embed", "mlp"), compute=compute, rngs=nnx.Rngs(0))
  found = layer(x)
  assert found.dtype == jnp.bfloat16
  rounded = np.asarray(x.astype(jnp.bfloat16), np.float64)
  if packed:
    weight = mxfp4_decode(np.asarray(layer.packed[...]), np.asarray(layer.scale[...])).T
  else:
    weight = np.asarray(layer.kernel[...].astype(jnp.bfloat16), np.float64)
  assert_near(np.asarray(found, np.float64), rounded @ weight, 2.0**-8)


def test_random_weights_keep_the_size_of_activations(float32_compute):
  x = jnp.asarray(np.random.default_rng(3).standard_normal((64, 1024)), jnp.float32)
  for packed in (True, False):
    layer = matrix(1024, 512, packed=packed, axes=("embed", "mlp"), compute=float32_compute, rngs=nnx.Rngs(0))
    assert 0.7 < float(jnp.std(layer(x))) < 1.4


def test_random_packed_experts_have_a_scale_a_group():
  packed, scale = random_packed(nnx.Rngs(0), (4, 48, 128))
  assert (packed.shape, scale.shape) == ((4, 48, 64), (4, 48, 4))
