"""What a token may depend on: the earlier tokens of its own document. Not on later ones, on neighbours or on pads.

One program a model, a batch of rows as in training: every question is put to the same compiled forward pass, so that an
answer that differs comes from the arrays and not from another order of sums.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

ROWS, WIDTH = 4, 128  # two chunks of 64 tokens in KDA
REAL_IDS = 250  # ids below are drawn; PAD is none of them
PAD = 250
# Of the largest logit: rounding, where the sums of a row have the same terms in another place. See model_test.py.
TOLERANCE = 1e-4
EXACT = 1e-6  # of the largest logit, where the same sums have other zeros among them

Run = Callable[..., np.ndarray]


def compiled(config: Any) -> Run:
  """Returns (tokens [B, T], segment ids [B, T], what the embedding of PAD is) -> logits [B, T, X]."""
  import jax
  from flax import nnx
  from flax.linen import logical_axis_rules

  from kimi_k3.maxtext_adapter.checkpoint import load_params
  from kimi_k3.maxtext_adapter.engine import abstract_model, checkpoint_path, concrete_rest

  mesh, abstract = abstract_model(config, "train")
  graph, params, rest = nnx.split(abstract, nnx.Param, ...)
  params, rest = load_params(checkpoint_path(config), params), concrete_rest(rest)

  @jax.jit
  def forward(params, tokens, segment_ids, pad):
    model: Any = nnx.merge(graph, params, rest, copy=True)
    table = model.token_embedder.embedding
    table[...] = table[...].at[PAD].set(pad.astype(table[...].dtype))
    positions = jax.numpy.broadcast_to(jax.numpy.arange(WIDTH), tokens.shape)
    return model.decoder.trace(
      model.token_embedder, tokens, positions, segment_ids, deterministic=True, model_mode="train"
    )[0]

  def run(tokens: np.ndarray, segment_ids: np.ndarray, pad: float = 0.5) -> np.ndarray:
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
      arrays = (np.asarray(a, np.int32) for a in (tokens, segment_ids))
      return np.asarray(forward(params, *arrays, np.float32(pad)), np.float32)

  return run


LENGTHS = {"per_device_batch_size": ROWS, "max_target_length": WIDTH, "max_prefill_predict_length": WIDTH // 2}


@pytest.fixture(scope="module", params=["k3_tiny", "kimi_linear_tiny"])
def run(request, convert, float32_config) -> Run:
  out = convert(request.getfixturevalue(request.param).checkpoint, "--scan")
  return compiled(float32_config(out, **LENGTHS))


def drawn_tokens() -> np.ndarray:
  return np.random.default_rng(7).integers(0, REAL_IDS, (ROWS, WIDTH))


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
  return drawn_tokens()


def segments(lengths: tuple[int, ...]) -> np.ndarray:
  """One document a row, padded on the right."""
  return (np.arange(WIDTH) < np.array(lengths)[:, None]).astype(int)


def assert_equal_where(real: np.ndarray, found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
  """Compares the logits of the real tokens, all of which have to be finite."""
  found, expected = found[real], expected[real]
  assert np.isfinite(expected).all()
  assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def test_later_tokens_change_no_earlier_logits(run, tokens):
  full = segments((WIDTH,) * ROWS)
  whole, other = run(tokens, full), tokens[:, ::-1]
  # Each row changes at places of its own: at the first tokens, and around the edges of sub-chunks and chunks.
  for cuts in ((1, 2, 3, 4), (15, 16, 17, 100), (63, 64, 65, 127)):
    early = np.arange(WIDTH) < np.array(cuts)[:, None]
    mixed = np.where(early, tokens, other)
    found = run(mixed, full)
    assert_equal_where(early, found, whole, EXACT)
    for row, cut in enumerate(cuts):
      if mixed[row, cut] != tokens[row, cut]:
        assert np.abs(found[row, cut] - whole[row, cut]).max() > 1e-3 * np.abs(whole).max()


def test_a_row_of_a_ragged_batch_equals_the_row_among_others_and_alone(run, tokens):
  real = segments((WIDTH, 65, 3, 64))
  whole = run(tokens, real)
  # Neighbours gone (all pads), replaced, of other lengths, elsewhere in the batch.
  for row in range(ROWS):
    only = (np.arange(ROWS) == row)[:, None]
    mine = only & (real == 1)
    assert_equal_where(mine, run(tokens, real * only), whole, EXACT)
    neighbours = np.where(only, tokens, tokens[::-1, ::-1])
    assert_equal_where(mine, run(neighbours, np.where(only, real, 1)), whole, TOLERANCE)
    # A longer row, whose first tokens are these.
    assert_equal_where(mine, run(tokens, np.where(only, 1, real)), whole, EXACT)
  order = np.array([2, 0, 3, 1])
  assert_equal_where(real[order] == 1, run(tokens[order], real[order]), whole[order], TOLERANCE)


def check_pads(run: Run, tokens: np.ndarray, garbage: float) -> None:
  real = segments((WIDTH, 65, 1, 0))
  padded = np.where(real == 1, tokens, PAD)
  assert_equal_where(real == 1, run(padded, real, garbage), run(padded, real), 0.0)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_what_stands_in_pads_reaches_no_real_token(run, tokens, garbage):
  """Through norms, convolutions, the recurrence, attention, the router and the experts' tiles."""
  check_pads(run, tokens, garbage)


def check_broken_row(run: Run, tokens: np.ndarray, garbage: float) -> None:
  """PAD stands among a row's real tokens: everything of the row from there on is lost, and nothing of another."""
  real = segments((WIDTH, 65, 33, 1))
  broken = tokens.copy()
  broken[0, 20] = PAD
  found, clean = run(broken, real, garbage), run(broken, real)
  others = (real == 1) & (np.arange(ROWS) > 0)[:, None]
  assert_equal_where(others, found, clean, 0.0)
  assert np.isnan(found[0, 20:]).any(axis=-1).all()


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_a_row_that_is_broken_changes_no_other_row(run, tokens, garbage):
  check_broken_row(run, tokens, garbage)


def test_an_empty_row_gives_its_neighbours_nothing_and_is_finite(run, tokens):
  real = segments((65, 0, 64, 0))
  found = run(np.where(real == 1, tokens, PAD), real, np.nan)
  assert_equal_where(real == 1, found, run(tokens, segments((65,) * ROWS)), TOLERANCE)
  assert np.isfinite(found).all()


@pytest.mark.parametrize("cuts", [(64,), (1, 63), (2, 3, 67)], ids=str)
def test_packed_documents_equal_the_documents_alone(run, tokens, cuts):
  """Two to four in a row, pads between them and after them; each alone at the start of a row of its own."""
  bounds = [0, *cuts, 110]
  packed_tokens, ids = np.full((ROWS, WIDTH), PAD), np.zeros((ROWS, WIDTH), int)
  place, places = 0, []
  for number, (start, stop) in enumerate(itertools.pairwise(bounds), 1):
    packed_tokens[0, place : place + stop - start] = tokens[0, start:stop]
    ids[0, place : place + stop - start] = number
    places.append((place, start, stop - start))
    place += stop - start + (number == 1) * 2  # two pads after the first
  packed = run(packed_tokens, ids)[0]
  largest = np.abs(packed).max()
  for place, start, length in places:
    alone = np.full((ROWS, WIDTH), PAD)
    alone[0, :length] = tokens[0, start : start + length]
    expected = run(alone, segments((length, 0, 0, 0)))[0, :length]
    assert np.abs(packed[place : place + length] - expected).max() <= TOLERANCE * largest


def main() -> None:
  """The two questions about NaN on the devices of this process. Arguments: decode.yml and settings."""
  import jax

  from kimi_k3.maxtext_adapter.settings import read_config

  path, *settings = sys.argv[1:]
  run = compiled(read_config(path, settings, **LENGTHS))
  check_pads(run, drawn_tokens(), np.nan)
  check_broken_row(run, drawn_tokens(), np.nan)
  print(jax.device_count())


@pytest.mark.slow
def test_nan_stays_where_it_is_on_several_devices_too(k3_tiny, convert):
  """Through the collectives of heads cut in two and experts cut in two, on simulated devices of another process."""
  settings = ["dtype=float32", "matmul_precision=highest", "ici_fsdp_parallelism=1"]
  settings += ["ici_tensor_parallelism=2", "ici_expert_parallelism=2"]
  command = [sys.executable, __file__, str(convert(k3_tiny.checkpoint, "--scan") / "decode.yml"), *settings]
  environment = os.environ | {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    "PYTHONPATH": os.pathsep.join(sys.path),
  }
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-1] == "4"


if __name__ == "__main__":
  main()
