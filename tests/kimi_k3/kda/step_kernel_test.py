from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_reference import delta_rule, l2_norm, sigmoid
from kimi_k3.errors import InputError
from kimi_k3.kda import step_kernel
from kimi_k3.kda.step_kernel import kda_step_stacked

pytestmark = pytest.mark.strict_ranks

HEADS, KEY_DIM, VALUE_DIM = 3, 32, 48  # unequal widths: a transposed state cannot hide
LAYERS, LAYER = 3, 1
TOLERANCE = 1e-6  # of the largest value: some ten roundings of float32, the sums of 32 products among them
IMPLEMENTATIONS = ("portable", "pallas")
# Rows, heads of an item at least, and type of q, k, v. Items of one head, and of two rows with a last one half full.
CASES = [(1, 1, "float32"), (2, 1, "float32"), (7, 6, "float32"), (64, 1, "bfloat16"), (65, 1, "float32")]


def make_case(rows, heads=HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM, seed=0):
  """q, k, v, g, beta, states: a head that decays at the floor, one not at all, the others in between."""
  rng = np.random.default_rng(seed)
  q, k, g = rng.standard_normal((3, rows, heads, key_dim))
  g = -5.0 * sigmoid(g)
  g[:, 0], g[:, -1] = -5.0, 0.0
  v, beta = rng.standard_normal((rows, heads, value_dim)), sigmoid(rng.standard_normal((rows, heads)))
  states = rng.standard_normal((LAYERS, rows, heads, key_dim, value_dim))
  return tuple(jnp.asarray(x, jnp.float32) for x in (3 * q, 0.2 * k, v, g, beta, states))


def exact(case, layer=LAYER):
  """Outputs and new states of a layer in float64."""
  q, k, v, g, beta, states = (np.asarray(x, np.float64) for x in case)
  o, after = delta_rule(*(x[:, None] for x in (l2_norm(q), l2_norm(k), v, g, beta)), states[layer])
  return o[:, 0], after


@functools.partial(
  jax.jit,
  static_argnames=("implementation", "interpret", "item_heads"),
  compiler_options={"xla_backend_optimization_level": 0},  # the loops are unrolled: most of the time is LLVM's
)
def run(case, layer, active=None, *, implementation="pallas", interpret=True, item_heads=1):
  """One step; an item has `item_heads` heads at least: programs of few are quick to compile."""
  with mock.patch.object(step_kernel, "_ITEM_HEADS", item_heads):
    return kda_step_stacked(*case, layer, active=active, implementation=implementation, interpret=interpret)


def assert_close(found, expected):
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def bits(x):
  return np.asarray(x).view(np.uint32)


def assert_other_layers_are_untouched(after, before, layer=LAYER):
  others = np.delete(np.arange(len(before)), layer)
  np.testing.assert_array_equal(bits(after[others]), bits(before[others]))


@pytest.mark.parametrize(("rows", "item_heads", "dtype"), CASES)
def test_the_kernel_equals_the_reference_and_touches_one_layer(rows, item_heads, dtype):
  *qkv, g, beta, states = make_case(rows)
  case = (*(x.astype(dtype) for x in qkv), g, beta, states)
  o, after = run(case, jnp.int32(LAYER), jnp.ones(rows, bool), item_heads=item_heads)
  expected, expected_after = exact(case)
  assert_close(o, expected)
  assert_close(after[LAYER], expected_after)
  assert_other_layers_are_untouched(after, case[-1])


@pytest.mark.parametrize("layer", range(LAYERS))
def test_the_portable_form_equals_the_reference_and_touches_one_layer(layer):
  case = make_case(7)
  o, after = run(case, jnp.int32(layer), implementation="portable")
  expected, expected_after = exact(case, layer)
  assert_close(o, expected)
  assert_close(after[layer], expected_after)
  assert_other_layers_are_untouched(after, case[-1], layer)


# -0.0 and subnormals are changed by adding 0, a NaN's bits by any arithmetic.
STRANGE = np.array([-0.0, 0.0, 1e-42, -1e-42, 1.5, np.inf, -np.inf, np.nan], np.float32)
ACTIVE = {
  "some": [False, True, True, False, True, True, True],
  "last": [False] * 6 + [True],
  "none": [False] * 7,
  "all": [True] * 7,
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inactive_rows_keep_every_bit_and_give_zeros_whatever_they_are_given(implementation):
  case = make_case(7)
  expected, expected_after = exact(case)
  for active in (np.array(rows) for rows in ACTIVE.values()):
    *inputs, states = (np.array(x) for x in case)
    for x in inputs:
      x[~active] = np.nan
    states[LAYER, ~active] = np.resize(STRANGE, states.shape[2:])
    given = tuple(map(jnp.asarray, (*inputs, states)))
    o, after = run(given, jnp.int32(LAYER), jnp.asarray(active), implementation=implementation, item_heads=6)
    np.testing.assert_array_equal(bits(after[LAYER][~active]), bits(states[LAYER][~active]))
    np.testing.assert_array_equal(bits(o[~active]), 0)
    if active.any():
      assert_close(o[active], expected[active])
      assert_close(after[LAYER][active], expected_after[active])
    assert_other_layers_are_untouched(after, states)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_nan_in_one_head_changes_no_bit_of_the_others(implementation):
  case, step = make_case(2), functools.partial(run, implementation=implementation)
  active = jnp.ones(2, bool)
  o, after = step(case, jnp.int32(LAYER), active)
  for i in range(5):
    poisoned = (*case[:i], case[i].at[0, 1].set(jnp.nan), *case[i + 1 :])
    o_found, after_found = step(poisoned, jnp.int32(LAYER), active)
    assert np.isnan(o_found[0, 1]).all()
    for found, expected in ((o_found, o), (after_found[LAYER], after[LAYER])):
      np.testing.assert_array_equal(bits(found[0, ::2]), bits(expected[0, ::2]))
      np.testing.assert_array_equal(bits(found[1]), bits(expected[1]))


def test_blocks_of_rows_and_groups_of_heads_equal_the_reference(monkeypatch):
  """Where the inputs do not fit into VMEM: two blocks of eight rows, the second with three, and six groups."""
  monkeypatch.setattr(step_kernel, "_SMALL_BYTES", 0)
  monkeypatch.setattr(step_kernel, "_BLOCK_ROWS", 8)
  case, active = make_case(11, heads=6), np.arange(11) % 4 != 1
  o, after = run(case, jnp.int32(LAYER), jnp.asarray(active))
  expected, expected_after = exact(case)
  assert_close(o[active], expected[active])
  assert_close(after[LAYER][active], expected_after[active])
  np.testing.assert_array_equal(bits(after[LAYER][~active]), bits(case[-1][LAYER][~active]))


def test_steps_in_a_scan_over_layers_move_their_own_states():
  *inputs, states = make_case(1)

  def body(states, layer):
    o, states = step(*inputs, states, layer)
    return states, o

  with mock.patch.object(step_kernel, "_ITEM_HEADS", 1):
    step = functools.partial(kda_step_stacked, active=None, implementation="pallas", interpret=True)
    after, o = jax.jit(lambda states: jax.lax.scan(body, states, jnp.arange(LAYERS, dtype=jnp.int32)))(states)
  for layer in range(LAYERS):
    expected, expected_after = exact((*inputs, states), layer)
    assert_close(o[layer], expected)
    assert_close(after[layer], expected_after)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "heads"), [(65, 3), (7, 6), (7, 12), (2, 96)])
def test_full_size_heads_equal_the_reference(rows, heads):
  case = make_case(rows, heads, 128, 128)
  o, after = run(case, jnp.int32(LAYER), item_heads=step_kernel._ITEM_HEADS)
  expected, expected_after = exact(case)
  assert_close(o, expected)
  assert_close(after[LAYER], expected_after)
  assert_other_layers_are_untouched(after, case[-1])


@pytest.mark.parametrize(
  ("implementation", "message"),
  [
    ("mosaic", "'mosaic', expected one of: pallas, portable"),
    ("pallas", 'needs a TPU, the backend is cpu: use "portable"'),
  ],
)
def test_what_cannot_run_here_is_refused(implementation, message):
  with pytest.raises(InputError, match=message):
    run(make_case(1), jnp.int32(0), implementation=implementation, interpret=False)


def test_states_that_do_not_fill_registers_are_refused_by_the_compiled_kernel():
  from tokamax import config

  with (
    config.cross_compile(True),
    pytest.raises(InputError, match=r"K a multiple of 16 and V of 128, found \[32, 48\]"),
  ):
    run(make_case(1), jnp.int32(0), implementation="pallas", interpret=False)


def compiled_scan(topology, rows, heads):
  """Report of a scan over 22 blocks of three KDA layers, as decoding has it, and the bytes of the states."""
  from kimi_k3.capacity.topology import compile_for, tpu_mesh

  blocks, width = 22, 128
  mesh = tpu_mesh(topology, {"x": 1})

  def decode(x, rates, stacks, active):
    def block(carry, i):
      x, stacks = carry
      moved = []
      for states in stacks:
        q, k, v, a = jax.nn.silu(x), jax.nn.silu(-x), jax.nn.silu(2 * x), x
        g = -5.0 * jax.nn.sigmoid(a)
        o, states = kda_step_stacked(q, k, v, g, rates, states, i, active=active, implementation="pallas")
        x = x + o
        moved.append(states)
      return (x, moved), None

    return jax.lax.scan(block, (x, stacks), jnp.arange(blocks, dtype=jnp.int32))[0]

  def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P()))

  stacks = [array(blocks, rows, heads, width, width)] * 3
  args = (array(rows, heads, width), array(rows, heads), stacks, array(rows, dtype=jnp.bool_))
  with jax.numpy_rank_promotion("allow"):
    return compile_for(mesh, decode, args, donate=(2,)), 3 * 4 * blocks * rows * heads * width**2


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["tpu7x:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
  ("rows", "heads"), [(1, 3), (8, 3), (64, 3), (256, 3), (65, 3), (64, 6), (64, 12), (1, 96), (8, 96)]
)
def test_a_scan_over_layers_holds_no_copy_of_a_state(topology, rows, heads):
  from kimi_k3.capacity.hlo import copies, kernels, parse

  report, states_bytes = compiled_scan(topology, rows, heads)
  program = parse(report.text)
  assert report.memory.alias_bytes == states_bytes
  assert report.memory.temp_bytes < max(states_bytes / 66, 2**20)  # the state of one layer
  assert [copy for copy in copies(program) if copy.source.dims[-2:] == (128, 128)] == []
  assert kernels(program) == {f"kda_step_{heads}_heads": 66}
