"""Forms of packed experts: what each holds where, and that nothing is lost on the way."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_k3 import mxfp4_jax
from kimi_k3.errors import InputError
from kimi_k3.moe.packed import FORMS, prepare, restore

GROUP = 32


def every_byte(*lead: int):
  """Codes [*lead, 96, 32] with every byte in them, scales of 2 groups."""
  rng = np.random.default_rng(0)
  packed = np.stack([rng.permutation(12 * 256) % 256 for _ in range(int(np.prod(lead)))])
  return packed.astype(np.uint8).reshape(*lead, 96, 32), rng.integers(0, 255, (*lead, 96, 2), dtype=np.uint8)


@functools.partial(jax.jit, static_argnums=2)
def prepared(packed, scale, form):
  return prepare(packed, scale, form)


@pytest.mark.parametrize("form", FORMS)
def test_restore_undoes_prepare_to_the_byte(form):
  packed, scale = every_byte(2)
  codes, scales = prepared(packed, scale, form)
  for e in range(2):
    found = restore(codes[e], scales[e], form)
    np.testing.assert_array_equal(found[0], packed[e])
    np.testing.assert_array_equal(found[1], scale[e])


@pytest.mark.parametrize("form", FORMS)
def test_a_stack_of_layers_is_prepared_layer_by_layer(form):
  packed, scale = every_byte(3, 2)
  stacked = prepared(packed, scale, form)
  for layer in range(3):
    for found, expected in zip(stacked, prepared(packed[layer], scale[layer], form), strict=True):
      np.testing.assert_array_equal(found[layer].view(jnp.uint8), expected.view(jnp.uint8))


def test_float4_holds_the_values_of_the_codes_inputs_first():
  packed, scale = every_byte(1)
  codes, scales = prepared(packed, scale, "float4")
  assert codes.dtype == jnp.float4_e2m1fn
  assert codes.shape == (1, 64, 96)
  assert scales.shape == (1, 2, 96)
  expected = mxfp4_jax.decode(jnp.asarray(packed), jnp.full_like(scale, 127), jnp.float32)
  np.testing.assert_array_equal(codes.astype(jnp.float32), np.swapaxes(expected, 1, 2))


def test_a_row_of_nibbles_holds_inputs_16_apart():
  packed, scale = every_byte(1)
  codes, _ = prepared(packed, scale, "nibbles")
  values = np.stack([packed[0] & 15, packed[0] >> 4], axis=-1).reshape(96, 64)  # [out, in]
  for row in range(32):
    first = GROUP * (row // 16) + row % 16
    np.testing.assert_array_equal(codes[0, row] & 15, values[:, first])
    np.testing.assert_array_equal(codes[0, row] >> 4, values[:, first + 16])


def test_an_unknown_form_is_refused():
  with pytest.raises(InputError, match="form 'int4', expected one of stored, float4, nibbles"):
    prepare(*map(jnp.asarray, every_byte(1)), "int4")


@pytest.mark.aot
@pytest.mark.parametrize(("topology", "form"), [("tpu7x:2x2x1", "float4"), ("v6e:2x2", "nibbles")])
@pytest.mark.parametrize(("out", "into"), [(3072, 3584), (3584, 3072)])
def test_preparing_a_leaf_takes_little_beside_its_input_and_output(topology, form, out, into):
  from kimi_k3.capacity.topology import compile_for, tpu_mesh

  mesh = tpu_mesh(topology, {"x": 1})
  whole = jax.NamedSharding(mesh, jax.P())
  layers, experts = 22, 28
  leaf = [jax.ShapeDtypeStruct((layers, experts, out, into // part), jnp.uint8, sharding=whole) for part in (2, GROUP)]
  report = compile_for(mesh, lambda packed, scale: prepare(packed, scale, form), leaf)
  packed_bytes = layers * experts * out * into // 2
  one_layer = packed_bytes // layers
  # Codes as bytes and their transpose, of one layer: a twentieth of the leaf each.
  assert report.memory.temp_bytes < 12 * one_layer
  assert report.memory.output_bytes <= 1.001 * report.memory.argument_bytes  # nothing is widened or padded
