"""Latents cached in float8_e4m3fn: the model on one device and on eight against the reference that attends to them.

A difference of 1e-7 can move a number over the middle between two of FP8, by 6 to 12 %. So the reference is fed the
very latents that were cached, after a check that each is the nearest to the reference's own, or that the reference's
own lies beside the middle of the two. What remains is float32 against float64, as in the golden cases.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

FP8 = ml_dtypes.float8_e4m3fn
TOLERANCE = 1e-4  # of the largest logit: the golden cases' own, see model_test.py
NEAR = 1e-5  # of a number: how far from the middle it may be if it was rounded the other way. Seen: noise of 1e-6
DEVICES, STEPS = 8, 8
LENGTHS = (37, 70, 100)
# Four layers: dense and MoE, KDA and MLA. Eight heads, for eight devices.
CHECKPOINT = (
  *("--preset", "tiny", "--seed", "12", "--layers", "4"),
  *(
    part
    for key in ("num_attention_heads", "num_key_value_heads", "linear_attn_config.num_heads")
    for part in ("--set", f"{key}=8")
  ),
)
KERNELS = ("interpret_kernels=true", "mla_step_implementation=pallas", "mla_prefill_implementation=flash")
MESH_CASES = {
  "sequence-kernels-chunks": ("ici_tensor_parallelism=8", "prefill_chunk=48", *KERNELS),
  "batch-kernels": ("ici_tensor_parallelism=8", "mla_cache_cut=batch", *KERNELS),
  "batch-portable-chunks": ("partition_mesh=attn_dp_expert=2,model=4", "mla_cache_cut=batch", "prefill_chunk=64"),
}


def make_fp8_engine(converted: Path, prompts: list[list[int]], *settings: str) -> Any:
  from kimi_k3.maxtext_adapter.engine import make_engine
  from kimi_k3.maxtext_adapter.settings import read_config

  longest = -(-max(map(len, prompts)) // 16) * 16
  lengths = {"max_prefill_predict_length": longest, "max_target_length": longest + STEPS, "per_device_batch_size": 3}
  given = ["dtype=float32", "matmul_precision=highest", "partitioning=manual", "mla_cache_dtype=float8_e4m3fn"]
  return make_engine(read_config(str(converted / "decode.yml"), [*given, *settings], **lengths))


def run(engine: Any, prompts: list[list[int]]) -> list[tuple[np.ndarray, list[np.ndarray]]]:
  """Returns for each prompt the logits of its last STEPS + 1 tokens, and the cached latents [T, P] of each MLA layer.

  All but the first of those tokens are fed in steps, the prompts side by side.
  """
  logits: list[list[np.ndarray]] = []
  for slot, prompt in enumerate(prompts):
    tokens = np.pad(np.array(prompt), (0, engine.config.max_prefill_predict_length - len(prompt)))
    start = engine.prefill(tokens, len(prompt) - STEPS)
    logits.append([np.asarray(start.logits)])
    engine.insert(start, slot)
  for step in range(-STEPS, 0):
    tokens = np.zeros(engine.num_slots, np.int32)
    tokens[: len(prompts)] = [prompt[step] for prompt in prompts]
    found = np.asarray(engine.step(tokens))
    for slot, row in enumerate(logits):
      row.append(found[slot])
  latents = {
    unit.first + 4 * i: np.asarray(leaf[i])
    for unit in engine.model.units
    if (leaf := engine.cache.get(f"{unit.name}.latents")) is not None
    for i in range(leaf.shape[0])
  }
  for slot in range(len(prompts)):
    engine.release(slot)
  layers = [latents[number] for number in sorted(latents)]
  return [
    (np.array(row), [layer[slot, : len(prompt)] for layer in layers])
    for slot, (row, prompt) in enumerate(zip(logits, prompts, strict=True))
  ]


class Fp8Reference:
  """The reference with latents in FP8: its own ones rounded, or those that it is given.

  Attributes:
    flipped: How many of the given numbers were not the nearest to the reference's own, which lay beside a middle.
    largest: Of each token [T], the largest of its numbers before they were rounded.
  """

  def __init__(self, reference: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    self.flipped, self.largest = 0, np.zeros(0)
    self._forward = reference.forward
    self._given: list[np.ndarray] | None = None
    self._layer = 0
    self._checkpoint = reference.load_checkpoint(checkpoint)
    tensors = self._checkpoint.tensors
    norms = {id(self._checkpoint.weight(name)) for name in tensors if "kv_a_layernorm" in name}
    linear, norm, size = self._checkpoint.linear, reference.rms_norm, self._checkpoint.config["kv_lora_rank"]

    def linear_with_tail_cached(name, x):
      found = linear(name, x)
      if name.endswith("kv_a_proj_with_mqa"):
        found[..., size:] = self._cached(found[..., size:], slice(size, None))
      return found

    def norm_with_latent_cached(x, weight, eps):
      found = norm(x, weight, eps)
      if id(weight) in norms:
        found = self._cached(found, slice(size))
        self._layer += 1
      return found

    monkeypatch.setattr(self._checkpoint, "linear", linear_with_tail_cached)
    monkeypatch.setattr(reference, "rms_norm", norm_with_latent_cached)

  def logits(self, tokens: list[int], latents: list[np.ndarray] | None = None) -> np.ndarray:
    """Logits [T, X], with these latents [T, P] of each MLA layer, or with the reference's own."""
    self._given, self._layer, self.largest = latents, 0, np.zeros(len(tokens))
    return self._forward(self._checkpoint, np.array(tokens)[None])["logits"][0]

  def _cached(self, own: np.ndarray, part: slice) -> np.ndarray:
    self.largest = np.maximum(self.largest, np.abs(own[0]).max(axis=-1))
    nearest = own.astype(FP8).astype(np.float64)
    if self._given is None:
      return nearest
    found = self._given[self._layer][None, :, part].astype(np.float64)
    other = found != nearest
    np.testing.assert_allclose(own[other], (found[other] + nearest[other]) / 2, rtol=NEAR, atol=0)
    self.flipped += int(other.sum())
    return found


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint) -> Path:
  return tiny_checkpoint(*CHECKPOINT)


@pytest.fixture
def fp8_reference(reference, checkpoint, monkeypatch) -> Fp8Reference:
  return Fp8Reference(reference, checkpoint, monkeypatch)


def make_prompts() -> list[list[int]]:
  return [np.random.default_rng(n).integers(0, 250, n).tolist() for n in LENGTHS]


def check(found: np.ndarray, latents: list[np.ndarray], prompt: list[int], fp8_reference: Fp8Reference) -> None:
  assert [layer.dtype for layer in latents] == [FP8]
  expected = fp8_reference.logits(prompt, latents)[-len(found) :]
  assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
  assert fp8_reference.flipped <= 10  # of some 20,000 numbers; about one is expected


def with_loudest(prompts: list[list[int]], fp8_reference: Fp8Reference) -> tuple[list[list[int]], int, int, float]:
  """Shortens the prompt that has the largest number of all, so that its token is among those fed in steps.

  Returns the prompts, the number of that one and of its token, and a limit that only this token exceeds.
  """
  largest = []
  for prompt in prompts:
    fp8_reference.logits(prompt)
    largest.append(fp8_reference.largest)
  loud = int(np.argmax([numbers[STEPS:].max() for numbers in largest]))
  token = STEPS + int(np.argmax(largest[loud][STEPS:]))
  prompts[loud] = prompts[loud][: token + 3]
  largest[loud] = largest[loud][: token + 3]
  second, first = np.sort(np.concatenate(largest))[-2:]
  assert first > 1.01 * second
  return prompts, loud, token, float((first + second) / 2)


def test_a_number_without_fp8_ends_its_row_alone_and_other_rows_equal_the_reference_fed_their_latents(
  fp8_reference, checkpoint, convert, monkeypatch
):
  from kimi_k3 import cache
  from kimi_k3.generate.clock import CompileClock
  from kimi_k3.generate.loop import Request, generate

  prompts, loud, token, limit = with_loudest(make_prompts(), fp8_reference)
  monkeypatch.setattr(cache, "_E4M3_LIMIT", limit)  # as if FP8 ended there
  engine = make_fp8_engine(convert(checkpoint, "--scan"), prompts)
  for row, (found, latents) in enumerate(run(engine, prompts)):
    if row == loud:
      before = token - (len(prompts[row]) - STEPS) + 1
      assert np.isfinite(found[:before]).all()
      assert np.isnan(found[before:]).all()
    else:
      check(found, latents, prompts[row], fp8_reference)
  requests = [Request(i, prompt, STEPS) for i, prompt in enumerate(prompts)]
  rows, _ = generate(engine, requests, stop_ids=(), clock=CompileClock())
  assert [row.finish_reason for row in rows] == ["error" if i == loud else "length" for i in range(len(rows))]
  for prompt, row in zip(prompts, rows, strict=True):
    if row.finish_reason == "length":
      logits = fp8_reference.logits([*prompt, *row.ids])
      assert np.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist() == row.ids


def test_fp8_is_refused_by_name_on_a_tpu_that_has_another_fp8(float32_compute):
  from kimi_k3.errors import InputError
  from kimi_k3.spmd.model import check_latents

  fp8, bf16 = (dataclasses.replace(float32_compute, mla_cache_dtype=dtype) for dtype in ("float8_e4m3fn", "bfloat16"))
  with pytest.raises(InputError, match="float8_e4m3fn: TPU7x needed, found TPU v6 lite, whose matrix unit"):
    check_latents(fp8, "TPU v6 lite")
  check_latents(fp8, "TPU7x")
  check_latents(fp8, "cpu")
  check_latents(bf16, "TPU v6 lite")


@pytest.mark.slow
@pytest.mark.parametrize("name", MESH_CASES)
def test_eight_devices_equal_the_reference_fed_their_latents(name, fp8_reference, checkpoint, convert, tmp_path):
  environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
  environment["PYTHONPATH"] = os.pathsep.join(sys.path)
  out = tmp_path / "found.npz"
  command = [sys.executable, __file__, str(convert(checkpoint, "--scan")), str(out), *MESH_CASES[name]]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
  assert done.returncode == 0, done.stderr[-4000:]
  with np.load(out) as found:
    for row, prompt in enumerate(make_prompts()):
      latents = [found[f"latents-{row}-{layer}"].view(FP8) for layer in range(1)]
      check(found[f"logits-{row}"], latents, prompt, fp8_reference)


def on_devices(converted: str, out: str, *settings: str) -> None:
  """Runs the prompts in this process and writes what `run` returns, FP8 as bytes."""
  prompts, found = make_prompts(), {}
  for row, (logits, latents) in enumerate(run(make_fp8_engine(Path(converted), prompts, *settings), prompts)):
    found[f"logits-{row}"] = logits
    found |= {f"latents-{row}-{i}": layer.view(np.uint8) for i, layer in enumerate(latents)}
  np.savez(out, **found)


if __name__ == "__main__":
  on_devices(*sys.argv[1:])
