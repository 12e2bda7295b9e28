"""One layer of either kind in its place on the stream: what its tokens may see, and what broken ones may reach."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

ROWS, WIDTH = 3, 65
INDEX = 5  # of the layer: two snapshots are taken, and it takes none
LENGTHS = (65, 17, 1)
TOLERANCE = 1e-5  # of the largest value: float32 through an attention and a mixture of experts


class Case(NamedTuple):
  """A compiled layer and its inputs.

  Attributes:
    run: (prefix, snapshots, segment ids, resets) -> (prefix after, snapshots after, caches).
    prefix: The stream [B, T, D].
    snapshots: [J, B, T, D].
  """

  run: Callable[..., tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]
  prefix: np.ndarray
  snapshots: np.ndarray


def make_case(kind_name: str, mode: str, rows: int) -> Case:
  """A K3 layer with routed experts on random weights. In prefill, MLA has a cache and there is one row."""
  import jax
  from flax import nnx
  from flax.linen import logical_axis_rules
  from maxtext.utils import maxtext_utils

  from kimi_k3.maxtext_adapter.register import register
  from kimi_k3.maxtext_adapter.settings import read_config
  from kimi_k3.resources import configs_dir

  register()
  from kimi_k3.block import Context, Layer, Stream
  from kimi_k3.config import LayerKind
  from kimi_k3.kda.layer import KDA
  from kimi_k3.maxtext_adapter.config import architecture, compute_config
  from kimi_k3.maxtext_adapter.engine import concrete_rest
  from kimi_k3.maxtext_adapter.mla import KimiMLA

  settings = ["model_name=kimi-k3-tiny", "dtype=float32", "matmul_precision=highest"]
  lengths = {"max_prefill_predict_length": WIDTH, "max_target_length": WIDTH + 1}
  upstream = read_config(str(configs_dir() / "decode.yml"), settings, per_device_batch_size=rows, **lengths)
  config, compute = architecture(upstream), compute_config(upstream)
  mesh = maxtext_utils.get_mesh_from_config(upstream)

  def attention(kind: LayerKind, rngs: nnx.Rngs) -> nnx.Module:
    if kind is LayerKind.MLA:
      return KimiMLA(upstream, config, compute, mesh, mode, rngs)
    return KDA(config, compute, rngs, cache=None)

  def on_mesh(function: Callable, *arguments: Any) -> Any:
    with jax.set_mesh(mesh), logical_axis_rules(upstream.logical_axis_rules):
      return function(*arguments)

  abstract = on_mesh(nnx.eval_shape, lambda: Layer(config, compute, LayerKind(kind_name), True, attention, nnx.Rngs(0)))
  graph, params, rest = nnx.split(abstract, nnx.Param, ...)
  rng = np.random.default_rng(3)
  params, rest = jax.tree.map(lambda leaf: weights(rng, leaf), params), concrete_rest(rest)

  @jax.jit
  def run(params, prefix, snapshots, segment_ids, resets):
    layer = nnx.merge(graph, params, rest, copy=True)
    positions = jax.numpy.broadcast_to(jax.numpy.arange(WIDTH), segment_ids.shape)
    arguments = {"positions": positions, "segment_ids": segment_ids, "model_mode": mode}
    context = Context(segment_ids != 0, resets, arguments)
    stream, _ = layer(Stream(prefix, snapshots), INDEX, context)
    return (*stream, nnx.to_pure_dict(nnx.state(layer, nnx.Cache)))

  def in_numpy(prefix, snapshots, segment_ids, resets=None):
    after, pushed, caches = on_mesh(run, params, prefix, snapshots, np.int32(segment_ids), resets)
    leaves = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(caches)}
    return np.asarray(after), np.asarray(pushed), leaves

  shape = (rows, WIDTH, config.hidden_size)
  snapshots = rng.standard_normal((config.num_snapshots, *shape), np.float32)
  return Case(in_numpy, rng.standard_normal(shape, np.float32), snapshots)


def weights(rng: np.random.Generator, leaf: Any) -> np.ndarray:
  """Random weights, which a program would be slow to make: codes, scales of 1/16, or floats of about that size."""
  if leaf.dtype == np.uint8:
    return np.full(leaf.shape, 123, np.uint8) if leaf.shape[-1] < 8 else rng.integers(0, 256, leaf.shape, np.uint8)
  return (0.1 * rng.standard_normal(leaf.shape) + 0.1 * (len(leaf.shape) == 1)).astype(leaf.dtype)


@pytest.fixture(scope="module", params=["kda", "mla"])
def case(request) -> Case:
  return make_case(request.param, "train", ROWS)


@pytest.fixture(scope="module")
def prefill() -> Case:
  """Attention with latents to cache. KDA's state and history are in kda/layer_test.py."""
  return make_case("mla", "prefill", 1)


def segments(lengths: tuple[int, ...]) -> np.ndarray:
  return (np.arange(WIDTH) < np.array(lengths)[:, None]).astype(np.int32)


def assert_same(found: np.ndarray, expected: np.ndarray, where: np.ndarray, tolerance: float = 0.0) -> None:
  found, expected = found[where], expected[where]
  assert np.isfinite(expected).all()
  assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_what_stands_in_pads_reaches_no_real_token(case, garbage):
  ids = segments(LENGTHS)
  real = (ids == 1)[..., None]
  clean, _, _ = case.run(case.prefix, case.snapshots, ids)
  dirty = np.where(real, case.prefix, np.float32(garbage)), np.where(real, case.snapshots, np.float32(garbage))
  assert_same(case.run(*dirty, ids)[0], clean, ids == 1)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_what_stands_in_the_pads_of_a_prompt_reaches_no_cache(prefill, garbage):
  """A decoding step gives a cached pad the weight 0, which a NaN outlives."""
  ids = segments((17,))
  real = (ids == 1)[..., None]
  clean, _, clean_caches = prefill.run(prefill.prefix, prefill.snapshots, ids)
  dirty = np.where(real, prefill.prefix, np.float32(garbage)), np.where(real, prefill.snapshots, np.float32(garbage))
  found, _, caches = prefill.run(*dirty, ids)
  assert_same(found, clean, ids == 1)
  assert len(caches) >= 2
  for name, leaf in caches.items():
    assert np.isfinite(leaf.astype(np.float64)).all(), name
    np.testing.assert_array_equal(leaf, clean_caches[name], err_msg=name)


def test_a_broken_row_changes_no_bit_of_the_others(case):
  ids = segments(LENGTHS)
  clean, _, _ = case.run(case.prefix, case.snapshots, ids)
  prefix, snapshots = case.prefix.copy(), case.snapshots.copy()
  prefix[0], snapshots[:, 0] = np.nan, np.nan
  found, _, _ = case.run(prefix, snapshots, ids)
  others = ids == 1
  others[0] = False
  assert_same(found, clean, others)
  assert np.isnan(found[0]).all()


def test_rows_may_change_places_and_later_tokens_change_no_earlier_output(case):
  ids = segments(LENGTHS)
  clean, _, _ = case.run(case.prefix, case.snapshots, ids)
  order = np.array([2, 0, 1])
  found, _, _ = case.run(case.prefix[order], case.snapshots[:, order], ids[order])
  assert_same(found, clean[order], ids[order] == 1, 1e-6)
  full = np.ones_like(ids)
  whole, _, _ = case.run(case.prefix, case.snapshots, full)
  for cuts in ((1, 2, 16), (17, 47, 48), (49, 63, 64)):
    early = (np.arange(WIDTH) < np.array(cuts)[:, None])[..., None]
    found, _, _ = case.run(np.where(early, case.prefix, case.prefix[:, ::-1]), case.snapshots, full)
    assert_same(found, whole, early[..., 0], 1e-6)
  assert_same(whole, clean, ids == 1, 1e-6)  # a row is the beginning of a longer one


def test_packed_documents_equal_the_documents_alone(case):
  bounds = [0, 1, 3, 33, WIDTH]
  ids, resets = np.ones((ROWS, WIDTH), np.int32), np.zeros((ROWS, WIDTH), bool)
  for number, (start, stop) in enumerate(itertools.pairwise(bounds), 1):
    ids[:, start:stop] = number
    resets[:, start] = number > 1
  packed, _, _ = case.run(case.prefix, case.snapshots, ids, resets)
  for start, stop in itertools.pairwise(bounds):
    prefix, snapshots = (np.roll(x, -start, axis=-2) for x in (case.prefix, case.snapshots))
    alone = segments((stop - start,) * ROWS)
    expected, _, _ = case.run(prefix, snapshots, alone, np.zeros_like(resets))
    assert_same(packed[:, start:stop], expected[:, : stop - start], np.s_[:], TOLERANCE)
