"""The KDA layer with its caches, against the numpy reference and against itself in pieces."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from kimi_k3.config import KimiK3Config

pytestmark = pytest.mark.usefixtures("unsharded")

# float32 against float64 through five products and the recurrence; of the largest output. The bar is 1e-4.
TOLERANCE = 2e-5
LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 127, 129, 200)
LAYER = 1


@pytest.fixture(params=["k3_tiny", "kimi_linear_tiny"])
def layer_case(request, reference, float32_compute):
  """(config, function to make the layer with a cache or without, reference checkpoint with the same weights)."""
  from flax import nnx

  from kimi_k3.cache import KDACache
  from kimi_k3.kda.layer import KDA

  config = request.getfixturevalue({"k3_tiny": "k3_config", "kimi_linear_tiny": "kimi_linear_config"}[request.param])
  ckpt = reference.load_checkpoint(request.getfixturevalue(request.param).checkpoint)

  def make(batch: int | None, **changed) -> KDA:
    compute = dataclasses.replace(float32_compute, **changed)
    cache = None if batch is None else KDACache(config, compute, batch=batch, prefill=True)
    layer = KDA(config, compute, nnx.Rngs(0), cache=cache)
    load(layer, ckpt, f"model.layers.{LAYER}.self_attn", config)
    return layer

  return config, make, ckpt


def load(layer, ckpt, name, config: KimiK3Config) -> None:
  """The layer's weights from a stored checkpoint, written out here so that it owes nothing to the converter."""
  import jax.numpy as jnp

  D, H, K = config.hidden_size, config.kda_num_heads, config.kda_head_dim

  def put(param, array):
    assert param[...].shape == array.shape
    param[...] = jnp.asarray(array, param[...].dtype)

  def weight(part):
    return ckpt.weight(f"{name}.{part}")

  for c in "qkv":
    put(getattr(layer, f"{c}_proj").kernel, weight(f"{c}_proj.weight").T.reshape(D, H, K))
    put(getattr(layer, f"{c}_conv"), weight(f"{c}_conv1d.weight")[:, 0].T.reshape(-1, H, K))
  put(layer.f_a_proj.kernel, weight("f_a_proj.weight").T)
  put(layer.f_b_proj.kernel, weight("f_b_proj.weight").T.reshape(-1, H, K))
  put(layer.A_log, weight("A_log").reshape(-1)[:H])
  put(layer.dt_bias, weight("dt_bias").reshape(H, K))
  put(layer.b_proj.kernel, weight("b_proj.weight").T)
  if config.kda_full_rank_gate:
    put(layer.g_proj.kernel, weight("g_proj.weight").T.reshape(D, H, K))
  else:
    put(layer.g_a_proj.kernel, weight("g_a_proj.weight").T)
    put(layer.g_b_proj.kernel, weight("g_b_proj.weight").T.reshape(-1, H, K))
  put(layer.o_norm.scale, weight("o_norm.weight"))
  put(layer.o_proj.kernel, weight("o_proj.weight").T.reshape(H, K, D))


def inputs(config: KimiK3Config, length: int, *, similar: bool = False) -> np.ndarray:
  """Hidden states of a normalised stream; `similar` ones differ little, so that the keys are nearly parallel."""
  rng = np.random.default_rng(length)
  h = rng.standard_normal((1, length, config.hidden_size))
  return (h[:, :1] + 0.05 * h if similar else h).astype(np.float32)


def apply(layer, h, **kwargs):
  from flax import nnx

  return np.asarray(nnx.jit(lambda layer, h, kwargs: layer(h, **kwargs))(layer, h, kwargs))


@pytest.mark.parametrize("similar", [False, True], ids=["random", "nearly-parallel-keys"])
@pytest.mark.parametrize("length", [1, 3, 64, 65, 200])
def test_whole_rows_equal_the_reference(layer_case, reference, length, similar):
  config, make, ckpt = layer_case
  h = inputs(config, length, similar=similar)
  expected = reference.kda_attention(ckpt, f"model.layers.{LAYER}.self_attn", h.astype(np.float64), {})
  error = np.abs(apply(make(None), h) - expected).max()
  assert error <= TOLERANCE * np.abs(expected).max()


def test_state_and_history_equal_the_reference_after_a_padded_row(layer_case, reference):
  import jax.numpy as jnp

  config, make, ckpt = layer_case
  layer, h, n = make(1), inputs(config, 70), 37
  caches = {}
  reference.kda_attention(ckpt, f"model.layers.{LAYER}.self_attn", h[:, :n].astype(np.float64), caches)
  h[:, n:] = 1e6  # pads touch neither taps nor state
  apply(layer, h, valid=jnp.arange(70)[None] < n)
  state = np.asarray(layer.cache.recurrent_state[...])
  assert state.dtype == np.float32
  assert np.abs(state - caches["state"]).max() <= TOLERANCE * np.abs(caches["state"]).max()
  history = np.asarray(layer.cache.conv_state[...])
  for i, c in enumerate("qkv"):
    expected = caches[c].reshape(history[:, :, i].shape)
    assert np.abs(history[:, :, i] - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_padded_pieces_and_steps_equal_the_whole_row_for_every_length_and_split(layer_case):
  from flax import nnx

  config, make, _ = layer_case
  longest = max(LENGTHS)
  h = inputs(config, longest)
  whole = apply(make(None), h)[0]  # causal: the rows of every shorter length
  assert np.isfinite(whole).all()  # or the bound would be infinite
  bound = TOLERANCE * np.abs(whole).max()
  layer = make(1)
  run = nnx.jit(lambda layer, h, valid: layer(h, valid=valid))

  def piece(start: int, stop: int, width: int) -> np.ndarray:
    padded = np.full((1, width, config.hidden_size), 1e4, np.float32)
    padded[0, : stop - start] = h[0, start:stop]
    return np.asarray(run(layer, padded, np.arange(width)[None] < stop - start))[0, : stop - start]

  for length in LENGTHS:
    cuts = sorted({c for c in (1, 2, 3, 4, 63, 64, length // 2, length - 2, length - 1, length) if 0 < c <= length})
    for first, second in itertools.combinations_with_replacement(cuts, 2):
      for variable in (layer.cache.recurrent_state, layer.cache.conv_state):
        variable[...] = np.zeros_like(variable[...])
      found = [piece(0, first, longest)] + ([piece(first, second, longest)] if second > first else [])
      found += [piece(t, t + 1, 1) for t in range(second, min(second + 4, length))]
      end = min(second + 4, length)
      error = np.abs(np.concatenate(found) - whole[:end]).max()
      assert error <= bound, f"{length} tokens cut at {first} and {second}: off by {error:.1e}, bound {bound:.1e}"


def test_packed_documents_equal_separate_rows(layer_case):
  import jax.numpy as jnp

  config, make, _ = layer_case
  layer, lengths = make(None), (37, 1, 2, 25)
  h = inputs(config, sum(lengths))
  starts = np.cumsum((0, *lengths))[:-1]
  resets = jnp.zeros((1, sum(lengths)), bool).at[0, starts[1:]].set(True)
  packed = apply(layer, h, resets=resets)
  for start, length in zip(starts, lengths, strict=True):
    alone = apply(layer, h[:, start : start + length])
    assert np.isfinite(alone).all()
    assert np.abs(packed[:, start : start + length] - alone).max() <= TOLERANCE * np.abs(alone).max()


def test_each_switch_of_the_gates_is_wired(layer_case):
  config, make, _ = layer_case
  layer, h = make(None), inputs(config, 20)
  before = apply(layer, h)
  bound = -5.0 if config.kda_gate_lower_bound is None else None
  layer.config = dataclasses.replace(config, kda_gate_lower_bound=bound)
  assert np.abs(apply(layer, h) - before).max() > 1e-3 * np.abs(before).max()


ROWS, WIDTH = 4, 65
ROW_LENGTHS = (65, 18, 1, 0)


@functools.cache
def compiled():
  """One compiled (layer, h, valid) -> output for equal layers of all tests; a layer with a cache moves it on."""
  from flax import nnx

  return nnx.jit(lambda layer, h, valid: layer(h, valid=valid))


def run(layer, h, valid) -> np.ndarray:
  return np.asarray(compiled()(layer, h, valid))


def caches_of(layer) -> tuple[np.ndarray, np.ndarray]:
  return np.asarray(layer.cache.recurrent_state[...]), np.asarray(layer.cache.conv_state[...])


def set_caches(layer, state, history) -> None:
  import jax.numpy as jnp

  layer.cache.recurrent_state[...], layer.cache.conv_state[...] = jnp.asarray(state), jnp.asarray(history)


# -0.0 and subnormals are changed by adding 0, a NaN's bits by any arithmetic.
STRANGE = np.array([-0.0, 1e-42, np.inf, np.nan, 2.0], np.float32)


def carried(config: KimiK3Config) -> tuple[np.ndarray, np.ndarray]:
  """A state and a history of ROWS rows; those of the row without a token are STRANGE."""
  rng, heads, size = np.random.default_rng(1), config.kda_num_heads, config.kda_head_dim
  state = rng.standard_normal((ROWS, heads, size, size), np.float32)
  history = rng.standard_normal((ROWS, config.kda_conv_width - 1, 3, heads, size), np.float32)
  for cache in (state, history):
    cache[ROW_LENGTHS.index(0)] = np.resize(STRANGE, cache.shape[1:])
  return state, history


def ragged(config: KimiK3Config) -> tuple[np.ndarray, np.ndarray]:
  """Hidden states of ROWS rows of ROW_LENGTHS tokens, and which are real."""
  h = np.random.default_rng(2).standard_normal((ROWS, WIDTH, config.hidden_size), np.float32)
  return h, np.arange(WIDTH) < np.array(ROW_LENGTHS)[:, None]


def assert_same_bits(found, expected) -> None:
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def test_rows_of_a_ragged_batch_are_independent_and_pads_have_no_say(layer_case):
  """On carried caches: a row alone, rows permuted, NaN in pads and in a row, other later tokens, a row without any."""
  config, make, _ = layer_case
  layer, (h, valid), (state, history) = make(ROWS), ragged(config), carried(config)

  def after(h, valid, state, history):
    set_caches(layer, state, history)
    return np.where(valid[..., None], run(layer, h, valid), 0.0), *caches_of(layer)

  expected = after(h, valid, state, history)
  empty = ROW_LENGTHS.index(0)
  assert all(np.isfinite(np.delete(x, empty, axis=0)).all() for x in expected)
  assert_same_bits([x[empty] for x in expected[1:]], [state[empty], history[empty]])
  # Its neighbours have no token, then they stand elsewhere.
  for row in range(ROWS):
    others = np.arange(ROWS) != row
    alone = after(h, valid & ~others[:, None], state, history)
    assert_same_bits([x[row] for x in alone], [x[row] for x in expected])
    assert_same_bits([x[others] for x in alone[1:]], [state[others], history[others]])
  order = np.array([2, 0, 3, 1])
  assert_same_bits(after(h[order], valid[order], state[order], history[order]), [x[order] for x in expected])
  # NaN where nothing is real, and in all of one row.
  for garbage in (np.nan, np.inf):
    assert_same_bits(after(np.where(valid[..., None], h, np.float32(garbage)), valid, state, history), expected)
  broken = h.copy()
  broken[0] = np.nan
  assert_same_bits([x[1:] for x in after(broken, valid, state, history)], [x[1:] for x in expected])
  # Later tokens change no earlier output.
  bound = 1e-6 * np.abs(expected[0]).max()
  for t in (1, 16, 47, 48, 49, 63, 64):
    other = np.where((np.arange(WIDTH) < t)[:, None], h, h[::-1])
    found = after(other, valid, state, history)[0]
    assert np.abs(found[:, :t] - expected[0][:, :t]).max() <= bound
    assert np.abs(found[0, t] - expected[0][0, t]).max() > bound


def test_rows_without_a_token_in_a_step_keep_every_bit_of_their_caches(layer_case):
  config, make, _ = layer_case
  layer, caches = make(ROWS), [np.resize(STRANGE, x.shape) for x in carried(config)]
  set_caches(layer, *caches)
  run(layer, np.full((ROWS, 1, config.hidden_size), np.nan, np.float32), np.zeros((ROWS, 1), bool))
  assert_same_bits(caches_of(layer), caches)


def test_pads_on_the_left_of_a_fresh_row_leak_nowhere(layer_case):
  """The same tokens in four rows, each with its own number of pads on the left, and pads on the right."""
  config, make, _ = layer_case
  layer, lefts, length = make(ROWS), (0, 1, 3, 5), 18
  h = np.full((ROWS, WIDTH, config.hidden_size), np.nan, np.float32)
  valid = np.zeros((ROWS, WIDTH), bool)
  for row, left in enumerate(lefts):
    h[row, left : left + length] = inputs(config, length)[0]
    valid[row, left : left + length] = True
  out = run(layer, h, valid)
  for row, left in enumerate(lefts):
    found, expected = out[row, left : left + length], out[0, :length]
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
    for cache in caches_of(layer):
      assert np.abs(cache[row] - cache[0]).max() <= TOLERANCE * np.abs(cache[0]).max()


def test_a_tail_of_one_to_three_tokens_on_carried_caches_equals_the_whole_row_padded_or_not(layer_case):
  config, make, _ = layer_case
  layer, cut = make(ROWS), 37
  h = np.broadcast_to(inputs(config, WIDTH), (ROWS, WIDTH, config.hidden_size))
  place, fresh = np.arange(WIDTH)[None], caches_of(layer)
  lengths = np.array([1, 2, 3, 0])[:, None]
  whole = run(layer, h, place < cut + lengths)
  ended, bound = caches_of(layer), TOLERANCE * np.abs(whole[:, :cut]).max()
  set_caches(layer, *fresh)
  run(layer, h, np.broadcast_to(place < cut, (ROWS, WIDTH)))
  caches = caches_of(layer)
  rest = np.concatenate([h[:, cut:], np.full_like(h[:, :cut], np.nan)], axis=1)
  padded = run(layer, rest, place < lengths)
  for a, b in zip(caches_of(layer), ended, strict=True):
    assert np.abs(a - b).max() <= TOLERANCE * np.abs(b).max()
  set_caches(layer, *caches)
  bare = run(layer, h[:, cut : cut + 3], np.ones((ROWS, 3), bool))
  for row, length in enumerate(lengths[:, 0]):
    for found in (padded, bare):
      error = np.abs(found[row, :length] - whole[row, cut : cut + length]).max(initial=0.0)
      assert error <= bound, f"tail of {length}: off by {error:.1e}, bound {bound:.1e}"


@pytest.mark.parametrize("layer_case", ["k3_tiny"], indirect=True)  # the gate alone is another in Kimi-Linear
def test_the_state_stays_float32_and_so_does_its_arithmetic_when_computing_in_bfloat16(layer_case, monkeypatch):
  """What enters and leaves the recurrence is taken down, and the recurrence is repeated in float64."""
  import jax.numpy as jnp
  from flax import nnx

  import kimi_k3.kda.layer as module
  from k3_reference import delta_rule, l2_norm, sigmoid

  config, make, _ = layer_case
  traced, run_kda = [], module.run_kda

  def recorded(*args, **kwargs):
    traced.append((args, run_kda(*args, **kwargs)))
    return traced[-1][1]

  @nnx.jit
  def traced_run(layer, h):
    layer(h)
    return traced.pop()

  monkeypatch.setattr(module, "run_kda", recorded)
  layer = make(1, dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16)
  h = jnp.asarray(inputs(config, 37), jnp.bfloat16)
  calls = [traced_run(layer, h[:, :33]), *(traced_run(layer, h[:, t : t + 1]) for t in range(33, 37))]
  assert layer.cache.recurrent_state[...].dtype == jnp.float32
  assert layer.cache.conv_state[...].dtype == jnp.bfloat16
  state, bound = np.zeros(layer.cache.recurrent_state[...].shape), config.kda_gate_lower_bound
  for (q, k, v, a, a_log, dt_bias, beta, before), (_, after) in calls:
    assert {x.dtype for x in (q, k, v, a_log, dt_bias, beta, before, after)} == {jnp.dtype(jnp.float32)}
    q, k, v, a, a_log, dt_bias, beta = (np.asarray(x, np.float64) for x in (q, k, v, a, a_log, dt_bias, beta))
    rate = np.exp(a_log)[:, None]
    g = -rate * np.logaddexp(0.0, a + dt_bias) if bound is None else bound * sigmoid(rate * (a + dt_bias))
    _, state = delta_rule(l2_norm(q), l2_norm(k), v, g, beta, state)
    # A state that is rounded to bfloat16 anywhere would be off by 2^-9.
    assert np.abs(np.asarray(after) - state).max() <= TOLERANCE * np.abs(state).max()
  np.testing.assert_array_equal(layer.cache.recurrent_state[...], calls[-1][1][1])
