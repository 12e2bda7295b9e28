"""Scores of windows: the golden K3 against the float64 reference, pads, meshes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_k3.errors import InputError
from kimi_k3.evaluate.perplexity import cut_windows, perplexity

# Of the mean over 129 tokens, nats. One logit is off by at most 1e-4 of the largest, which is about 20 (model_test.py);
# over all tokens these errors cancel: 2e-6 was seen.
NATS_TOLERANCE = 5e-5
# Of the smallest and the median margin, each a difference of two such logits: 5e-5 was seen.
MARGIN_TOLERANCE = 1e-3
WIDTH = 64  # of all arrays, so that the cases share one program
CASES = [(32, 32), (32, 16), (50, 7)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
  below = logits - logits.max(axis=-1, keepdims=True)
  return below - np.log(np.exp(below).sum(axis=-1, keepdims=True))


def expect(reference: Any, checkpoint: Path, row: list[int], window: int, stride: int) -> dict[str, float]:
  """Nats a token and margins by the reference, a window at a time, without pads."""
  loaded, nats, margins = reference.load_checkpoint(checkpoint), [], []
  for w in cut_windows([len(row)], window, stride):
    tokens = np.array(row[w.start : w.start + w.tokens + 1])
    logits = reference.forward(loaded, tokens[None, :-1])["logits"][0]
    nats += log_softmax(logits)[np.arange(w.tokens), tokens[1:]][-w.counted :].tolist()
    largest = np.sort(logits, axis=-1)[-w.counted :]
    margins += (largest[:, -1] - largest[:, -2]).tolist()
  return {"nats": -float(np.mean(nats)), "smallest": min(margins), "median": float(np.median(margins))}


def check(found: dict[str, Any], expected: dict[str, float]) -> None:
  assert abs(found["nats_per_token"] - expected["nats"]) <= NATS_TOLERANCE
  for name in ("smallest", "median"):
    assert abs(found["margins"][name] - expected[name]) <= MARGIN_TOLERANCE


@pytest.fixture(scope="module")
def scorer(k3_tiny, convert, float32_config):
  """One program for all tests: 3 windows of up to 64 tokens."""
  from kimi_k3.maxtext_adapter.scoring import make_scorer

  return make_scorer(float32_config(convert(k3_tiny.checkpoint, "--scan")))


def measure(score: Any, row: list[int], window: int, stride: int) -> dict[str, Any]:
  return perplexity(score, [row], window=window, stride=stride, rows=3, padded=lambda _: WIDTH)


@pytest.mark.parametrize(("window", "stride"), CASES)
def test_perplexity_is_that_of_the_reference(scorer, k3_tiny, reference, window, stride):
  row = k3_tiny.prompts[2]
  assert len(row) == 130
  check(measure(scorer, row, window, stride), expect(reference, k3_tiny.checkpoint, row, window, stride))


def test_what_stands_in_pads_changes_no_bit(scorer, k3_tiny):
  tokens = np.array(k3_tiny.prompts[2], np.int32)
  lengths = np.array([40, 1, 0], np.int32)
  found = []
  for pad in (0, 201):
    inputs, targets = np.full((3, WIDTH), pad, np.int32), np.full((3, WIDTH), pad, np.int32)
    for row, length in enumerate(lengths):
      inputs[row, :length], targets[row, :length] = tokens[:length], tokens[1 : length + 1]
    found.append(scorer(inputs, targets, lengths))
  assert found[0].finite.all()
  for row, length in enumerate(lengths):
    for name in ("nll", "margin"):
      one, other = (getattr(scores, name)[row, :length] for scores in found)
      np.testing.assert_array_equal(one, other)


def test_a_row_that_is_not_finite_is_told_and_a_pad_that_is_not_is_none():
  from kimi_k3.maxtext_adapter.scoring import next_token_scores

  logits = np.zeros((4, 3, 5), np.float32)
  logits[0, 2, 4], logits[1, 0, 3], logits[2, 1, 0] = np.nan, -np.inf, np.inf
  found = next_token_scores(jnp.asarray(logits), jnp.zeros((4, 3), jnp.int32), jnp.array([2, 1, 2, 3]))
  assert found[2].tolist() == [True, False, False, True]


def test_scores_are_exact_where_logits_are_large_or_equal():
  from kimi_k3.maxtext_adapter.scoring import next_token_scores

  logits = jnp.array([[[1000.0, 1000.0, 0.0, 0.0], [1e30, 0.0, 0.0, 0.0], [3.0, 1.0, 2.5, 3.0]]])
  nll, margin, finite = next_token_scores(logits, jnp.array([[1, 0, 1]]), jnp.array([3]))
  assert finite.all()
  assert margin.tolist() == [[0, float(np.float32(1e30)), 0]]
  expected = [np.log(2), 0, -log_softmax(np.array([3.0, 1.0, 2.5, 3.0]))[1]]
  np.testing.assert_allclose(nll[0], expected, rtol=1e-6)  # float32


def test_windows_at_once_are_bounded_by_their_tokens_and_the_users_number_counts(k3_tiny, convert, float32_config):
  from kimi_k3.maxtext_adapter.scoring import rows_at_a_time

  out = convert(k3_tiny.checkpoint, "--scan")
  config = float32_config(out)
  found = [rows_at_a_time(config, windows, tokens, explicit=False) for windows, tokens in ((100, 256), (3, 256))]
  assert found == [16, 3]
  assert rows_at_a_time(config, 100, 8192, explicit=False) == 1
  assert rows_at_a_time(float32_config(out, "per_device_batch_size=5"), 100, 256, explicit=True) == 5
  with pytest.raises(InputError, match=r"per_device_batch_size is 0\.5: 0\.5 windows at once"):
    rows_at_a_time(float32_config(out, "per_device_batch_size=0.5"), 100, 256, explicit=True)


def test_a_check_of_the_placement_is_refused_where_the_partitioning_is_auto(k3_tiny, convert, float32_config):
  from kimi_k3.maxtext_adapter.scoring import make_scorer

  with pytest.raises(InputError, match="--check-placement all: partitioning is auto"):
    make_scorer(float32_config(convert(k3_tiny.checkpoint, "--scan")), "all")


@pytest.mark.slow
@pytest.mark.parametrize(
  ("devices", "settings"),
  [
    (8, ("ici_tensor_parallelism=2", "ici_expert_parallelism=2", "ici_fsdp_parallelism=2")),
    (8, ("ici_tensor_parallelism=2", "ici_data_parallelism=4", "ici_fsdp_parallelism=1")),
    (4, ("partitioning=manual", "partition_mesh=model=4")),
    (4, ("partitioning=manual", "partition_mesh=model=4", "prefill_cut=whole")),
    (1, ("partitioning=manual", "partition_mesh=model=1")),
  ],
)
def test_several_devices_and_the_manual_partitioning_answer_as_the_reference(
  k3_tiny, convert, reference, tmp_path, devices, settings
):
  """The verb itself, in a process that has as many simulated devices."""
  row, (window, stride) = k3_tiny.prompts[2], (50, 7)
  (tmp_path / "rows.json").write_text(json.dumps([row]))
  config = convert(k3_tiny.checkpoint, "--scan") / "decode.yml"
  words = ("--tokens", "rows.json", "--window", str(window), "--stride", str(stride), "--out", "out.json")
  float32 = ("dtype=float32", "matmul_precision=highest")
  run = subprocess.run(
    [Path(sys.executable).parent / "kimi-k3", "eval", config, *words, *float32, *settings],
    cwd=tmp_path,
    env=os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"},
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
  )
  assert run.returncode == 0, run.stderr[-4000:]
  result = json.loads((tmp_path / "out.json").read_text())
  assert result["config"]["devices"] == devices
  check(result["perplexity"], expect(reference, k3_tiny.checkpoint, row, window, stride))
