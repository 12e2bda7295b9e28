from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_k3.kda.short_conv import short_conv
from kimi_k3.kda.short_conv_step import short_conv_step_stacked

pytestmark = pytest.mark.strict_ranks

LAYERS, BATCH, BRANCHES, WIDTH, HEADS, KEY_DIM = 3, 4, 3, 4, 2, 8
# The same four products in another order of summation.
TOLERANCE = 1e-6

_step = jax.jit(short_conv_step_stacked)


def case(dtype=jnp.float32):
  rng = np.random.default_rng(0)
  x = rng.standard_normal((BATCH, BRANCHES, HEADS, KEY_DIM))
  taps = rng.standard_normal((BRANCHES, WIDTH, HEADS, KEY_DIM))
  stack = rng.standard_normal((LAYERS, BATCH, WIDTH - 1, BRANCHES, HEADS, KEY_DIM))
  return jnp.asarray(x, dtype), jnp.asarray(taps, jnp.float32), jnp.asarray(stack, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_step_equals_the_activated_convolution_of_one_token_and_leaves_other_layers_alone(dtype):
  x, taps, stack = case(dtype)
  for layer in range(LAYERS):
    y, after = _step(x, taps, stack, jnp.int32(layer), None)
    assert (y.dtype, after.dtype) == (jnp.float32, dtype)
    for c in range(BRANCHES):
      filtered, history = short_conv(x[:, None, c], taps[c], stack[layer, :, :, c])
      expected = jax.nn.silu(filtered[:, 0])
      np.testing.assert_allclose(y[:, c], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
      np.testing.assert_array_equal(after[layer, :, :, c], history)
    others = np.delete(np.arange(LAYERS), layer)
    np.testing.assert_array_equal(after[others], stack[others])


def test_inactive_rows_keep_every_bit_whatever_they_are_given():
  x, taps, stack = case()
  stack = stack.at[1, 2, 0, 0, 0, :3].set(jnp.array([jnp.nan, -0.0, 1e-42]))
  active = jnp.array([True, False, False, True])
  y, after = _step(x.at[1:3].set(jnp.nan), taps, stack, jnp.int32(1), active)
  expected, moved = _step(x, taps, stack, jnp.int32(1), None)
  np.testing.assert_array_equal(y[active], expected[active])
  np.testing.assert_array_equal(after[1][active], moved[1][active])
  bits = (np.asarray(a[1, 1:3]).view(np.uint32) for a in (after, stack))
  np.testing.assert_array_equal(*bits)


def test_a_layer_in_a_scan_moves_its_own_histories():
  x, taps, stack = case()

  def body(stack, layer):
    y, stack = short_conv_step_stacked(x, taps, stack, layer, None)
    return stack, y

  after, ys = jax.jit(lambda stack: jax.lax.scan(body, stack, jnp.arange(LAYERS, dtype=jnp.int32)))(stack)
  for layer in range(LAYERS):
    y, alone = _step(x, taps, stack, jnp.int32(layer), None)
    np.testing.assert_allclose(ys[layer], y, rtol=0, atol=TOLERANCE * np.abs(y).max())
    np.testing.assert_array_equal(after[layer], alone[layer])


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["tpu7x:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(("rows", "heads"), [(1, 3), (64, 3), (256, 3), (64, 12), (8, 96)])
def test_a_scan_over_layers_updates_the_histories_in_place(topology, rows, heads):
  from kimi_k3.capacity.hlo import copies, parse
  from kimi_k3.capacity.topology import compile_for, tpu_mesh

  blocks, width = 22, 128
  mesh = tpu_mesh(topology, {"x": 1})

  def decode(x, taps, stacks, active):
    def block(carry, i):
      x, stacks = carry
      moved = []
      for states in stacks:
        y, states = short_conv_step_stacked(x, taps, states, i, active)
        x = x + y.astype(x.dtype)
        moved.append(states)
      return (x, moved), None

    return jax.lax.scan(block, (x, stacks), jnp.arange(blocks, dtype=jnp.int32))[0]

  def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P()))

  stack = array(blocks, rows, WIDTH - 1, BRANCHES, heads, width)
  args = (array(rows, BRANCHES, heads, width), array(BRANCHES, WIDTH, heads, width), [stack] * 3)
  with jax.numpy_rank_promotion("allow"):
    report = compile_for(mesh, decode, (*args, array(rows, dtype=jnp.bool_)), donate=(2,))
  assert [copy for copy in copies(parse(report.text)) if copy.source.dims[0] == blocks] == []
  assert report.memory.temp_bytes < max(stack.size * 2 / 8, 2**20)
