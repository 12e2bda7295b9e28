"""The KDA layer with its caches, against the numpy reference and against itself in pieces."""

from __future__ import annotations

import dataclasses
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

  def make(batch: int | None) -> KDA:
    cache = None if batch is None else KDACache(config, float32_compute, batch=batch, prefill=True)
    layer = KDA(config, float32_compute, nnx.Rngs(0), cache=cache)
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
    assert np.abs(packed[:, start : start + length] - alone).max() <= TOLERANCE * np.abs(alone).max()


def test_each_switch_of_the_gates_is_wired(layer_case):
  config, make, _ = layer_case
  layer, h = make(None), inputs(config, 20)
  before = apply(layer, h)
  bound = -5.0 if config.kda_gate_lower_bound is None else None
  layer.config = dataclasses.replace(config, kda_gate_lower_bound=bound)
  assert np.abs(apply(layer, h) - before).max() > 1e-3 * np.abs(before).max()
