"""A sequence in one pass equals the same sequence as a padded prompt and single steps, wherever it is split."""

from __future__ import annotations

import numpy as np
import pytest

TOLERANCE = 1e-4  # of the largest logit: the golden cases' own, see model_test.py
LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 127, 129, 200)
LONGEST = max(LENGTHS)
STEPS = 6  # past the prompt: further than the convolutions' memory of three


@pytest.fixture(scope="module", params=["k3_tiny", pytest.param("kimi_linear_tiny", marks=pytest.mark.slow)])
def case(request):
  return request.getfixturevalue(request.param)


def test_every_prompt_length_then_steps_equals_one_pass(case, convert, float32_config):
  from kimi_k3.maxtext_adapter.engine import Engine, make_forward

  out = convert(case.checkpoint, "--scan")
  tokens = np.random.default_rng(3).integers(0, 252, LONGEST + STEPS).astype(np.int32)
  whole = np.asarray(make_forward(float32_config(out))(tokens, len(tokens))[0])
  assert np.isfinite(whole).all()
  config = float32_config(
    out,
    max_prefill_predict_length=LONGEST,
    max_target_length=LONGEST + STEPS * len(LENGTHS),
    per_device_batch_size=len(LENGTHS),
  )
  engine = Engine(config)
  bound = TOLERANCE * np.abs(whole).max()
  for slot, length in enumerate(LENGTHS):
    padded = np.full(LONGEST, 9, np.int32)
    padded[:length] = tokens[:length]
    prompt = engine.prefill(padded, length)
    engine.insert(prompt, slot)
    logits = np.asarray(prompt.logits)
    assert np.abs(logits - whole[length - 1]).max() <= bound, f"prompt of {length}"
  for step in range(STEPS):
    logits = np.asarray(engine.step(np.array([tokens[length + step] for length in LENGTHS])))
    for slot, length in enumerate(LENGTHS):
      error = np.abs(logits[slot] - whole[length + step]).max()
      assert error <= bound, f"step {step} after a prompt of {length}: off by {error:.2e}, bound {bound:.2e}"
