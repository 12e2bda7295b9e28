"""The manual partitioning on one device: the golden cases, chunks, and what it refuses. Meshes: mesh_test.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kimi_k3.errors import InputError
from kimi_k3.generate.clock import CompileClock
from kimi_k3.generate.loop import Request, generate

TOLERANCE = 1e-4  # of the largest logit: the golden cases' own, see model_test.py


def engine_of(float32_config, converted: Path, longest: int, steps: int, *settings: str):
  from kimi_k3.maxtext_adapter.engine import make_engine

  lengths = {"max_prefill_predict_length": longest, "max_target_length": longest + steps, "per_device_batch_size": 2}
  return make_engine(float32_config(converted, "partitioning=manual", *settings, **lengths))


@pytest.mark.parametrize(
  ("case_name", "form", "settings"),
  [
    ("k3_tiny", "--scan", ()),
    pytest.param("k3_tiny", "--no-scan", ("prefill_chunk=50",), marks=pytest.mark.slow),
    pytest.param("kimi_linear_tiny", "--scan", ("prefill_chunk=64",), marks=pytest.mark.slow),
    pytest.param("k3_hd128", "--scan", ("mla_cache_cut=batch",), marks=pytest.mark.slow),
  ],
)
def test_decoding_equals_the_golden_case(case_name, form, settings, request, convert, float32_config):
  case = request.getfixturevalue(case_name)
  longest = max(map(len, case.prompts))
  engine = engine_of(float32_config, convert(case.checkpoint, form), longest, 32, *settings)
  for i, prompt in enumerate(case.prompts):
    padded = np.pad(np.array(prompt), (0, longest - len(prompt)))
    found = np.asarray(engine.prefill(padded, len(prompt)).logits)
    expected = case.arrays[f"logits_{i}"]
    assert np.abs(found - expected[-1]).max() <= TOLERANCE * np.abs(expected).max()
  # The end of a prompt, fed in steps: a place in the cache that is one off would not change a token.
  prompt, expected, split = case.prompts[0], case.arrays["logits_0"], len(case.prompts[0]) - 8
  engine.insert(engine.prefill(np.pad(np.array(prompt), (0, longest - len(prompt))), split), 1)
  for i in range(split, len(prompt)):
    found = np.asarray(engine.step(np.array([0, prompt[i]]))[1])
    assert np.abs(found - expected[i]).max() <= TOLERANCE * np.abs(expected).max()
  engine.release(1)
  # Three rows for two slots: one waits, and comes in beside a row in the middle.
  requests = [Request(i, prompt, 32) for i, prompt in enumerate(case.prompts)]
  rows, _ = generate(engine, requests, stop_ids=(), clock=CompileClock())
  assert [row.ids for row in rows] == case.greedy


@pytest.mark.slow
def test_one_pass_gives_the_logits_of_every_position(k3_tiny, convert, float32_config, monkeypatch):
  from kimi_k3.maxtext_adapter.engine import make_forward
  from kimi_k3.moe import latent_moe

  monkeypatch.setattr(latent_moe, "_TOKENS_AT_A_TIME", 20)  # 48 tokens in three pieces

  forward = make_forward(float32_config(convert(k3_tiny.checkpoint, "--scan"), "partitioning=manual"))
  prompt, expected = k3_tiny.prompts[0], k3_tiny.arrays["logits_0"]
  padded = np.pad(np.array(prompt), (0, 11))
  found = np.asarray(forward(padded, len(prompt))[0])[: len(prompt)]
  assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (("partition_rules={heads: [tensor]}",), "partitioning 'auto' does not know: set partitioning=manual"),
    (("expert_implementation=decode_kernel",), "partitioning 'auto' does not know: set partitioning=manual"),
    (("mla_cache_dtype=float8_e4m3fn",), "mla_cache_dtype is 'float8_e4m3fn', which partitioning 'auto' does not know"),
    (("partitioning=manual", "mla_cache_dtype=float8_e5m2"), "mla_cache_dtype: Input should be 'bfloat16' or 'float8_"),
    (("partitioning=manual", "partition_mesh=tensor"), "expected sizes of 1 or more as in model=8,expert=4"),
    (("partitioning=manual", "partition_mesh=tensor=0"), "expected sizes of 1 or more"),
    (("partitioning=manual", "prefill_cut=heads"), "prefill_cut: Input should be 'sequence' or 'whole'"),
    (("partitioning=manual", "prefill_chunk=0"), "prefill_chunk: Input should be greater than 0"),
    (("partitioning=manual", "prefill_chunk=true"), "prefill_chunk: Input should be a valid integer"),
    (("partitioning=manual", "logical_axis_rules=[['mlp',['tensor']]]"), "does not read: set partition_rules"),
    (
      ("partitioning=manual", "partition_mesh=tensor=1", "ici_tensor_parallelism=1"),
      "partition_mesh and ici_tensor_parallelism given: leave one of them out",
    ),
  ],
)
def test_a_config_that_means_nothing_is_refused(settings, message, k3_tiny, convert, float32_config):
  with pytest.raises(InputError, match=message):
    float32_config(convert(k3_tiny.checkpoint, "--scan"), *settings)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (("partition_mesh=tensor=2",), "partition_mesh is tensor 2: 2 devices, found 1"),
    (("expert_implementation=decode_kernel",), "'decode_kernel' needs a TPU, found 'cpu'"),
    (("expert_implementation=grouped",), "'grouped' needs a TPU"),
    (("kda_implementation=tokamax_mosaic",), "kda_implementation tokamax_mosaic: a TPU is needed"),
    (("mla_step_implementation=pallas", "kda_step_implementation=pallas"), "kda_step_implementation pallas, mla_step_"),
    (
      ("mla_prefill_implementation=flash",),
      "mla_prefill_implementation flash: a TPU is needed, the devices are of cpu",
    ),
  ],
)
def test_what_these_devices_cannot_do_is_refused_before_weights_are_read(
  settings, message, k3_tiny, convert, float32_config
):
  with pytest.raises(InputError, match=message):
    engine_of(float32_config, convert(k3_tiny.checkpoint, "--scan"), 8, 8, *settings)


def test_a_kernel_for_few_tokens_is_refused_where_prompts_may_have_many(k3_tiny, convert, float32_config):
  settings = ("interpret_kernels=true", "expert_implementation=decode_kernel")
  with pytest.raises(InputError, match="a chunk of a prompt may have 600: set prefill_chunk=512"):
    engine_of(float32_config, convert(k3_tiny.checkpoint, "--scan"), 600, 8, *settings)


def test_a_kernel_for_packed_experts_is_refused_for_others(kimi_linear_tiny, convert, float32_config):
  settings = ("interpret_kernels=true", "expert_implementation=decode_kernel")
  with pytest.raises(InputError, match="for experts in MXFP4, which this checkpoint does not have: use reference"):
    engine_of(float32_config, convert(kimi_linear_tiny.checkpoint, "--scan"), 8, 8, *settings)


@pytest.mark.parametrize(
  ("packed", "message"), [("experts+shared+latent", "the checkpoint has packed latent, packed shared experts")]
)
def test_storage_that_cannot_be_cut_is_refused(packed, message, tiny_checkpoint, convert, float32_config):
  checkpoint = tiny_checkpoint("--packed", packed)
  with pytest.raises(InputError, match=message):
    engine_of(float32_config, convert(checkpoint, "--scan"), 8, 8)
