"""Every format that `convert` writes computes what its weights say, against the reference on those very weights.

MXFP4, bfloat16, and FP8 where no weight is far below its block's largest, hold the same experts and give the same
logits. What was rounded is compared with the numpy reference on the rounded weights, at the tolerance of the golden
cases, and how far that is from the logits of the stored weights is printed and bounded.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kimi_k3.convert import fp8_block, mxfp4

SUMS = 1e-5  # of the largest logit: float32 sums of tens of products in another order
TOLERANCE = 1e-4  # of the largest logit: the golden cases' own, see model_test.py
FEW = ("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2")  # every kind of layer
ROW = np.random.default_rng(3).integers(0, 252, 24).astype(np.int32)
STEPS = 6  # past the prompt: further than the convolutions' memory of three
# What `--dense fp8-block` rounds, by stored name.
DENSE = re.compile(
  r"model\.layers\.\d+\.(?:self_attn\.\w+_proj(?:_with_mqa)?|mlp\.\w+_proj"
  r"|block_sparse_moe\.(?:shared_experts\.\w+|routed_expert_(?:down|up)_proj))\.weight"
)
# FP8's three places of mantissa round a weight by 2.7 % (root mean square; docs/decisions/0010-fp8-block.md). Random
# noise of that size does as much to the logits as rounding may do: six seeds differ by 1.35 among themselves.
NOISE, NOISE_FACTOR = 0.027, 1.5


def with_noise(weights: np.ndarray) -> np.ndarray:
  rng = np.random.default_rng(weights.size)
  return weights.astype(np.float64) * (1 + NOISE * rng.standard_normal(weights.shape))


def fp8(weights: np.ndarray) -> np.ndarray:
  """What a stored matrix becomes in FP8, widened."""
  codes, scales = fp8_block.encode(weights, "w")
  spread = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[: weights.shape[0], : weights.shape[1]]
  return codes.astype(np.float64) * spread


def logits(config: Any, row: np.ndarray = ROW) -> np.ndarray:
  from kimi_k3.maxtext_adapter.engine import make_forward

  found = np.asarray(make_forward(config)(row, len(row))[0])
  assert np.isfinite(found).all()
  return found


@pytest.fixture(scope="session")
def sources(tiny_checkpoint) -> dict[str, Path]:
  return {variant: tiny_checkpoint(*FEW, "--variant", variant) for variant in ("k3", "kimi-linear")}


@pytest.fixture(scope="module")
def fp8_out(sources, convert) -> Path:
  """K3 with all that can be in FP8."""
  return convert(sources["k3"], "--experts", "fp8-block", "--dense", "fp8-block")


@pytest.fixture(scope="module")
def fp8_logits(fp8_out, float32_config) -> np.ndarray:
  return logits(float32_config(fp8_out))


def rounded(reference: Any, source: Path, *, dense: Any = None, experts: Any = None) -> Any:
  """The reference's checkpoint after rounding dense matrices and experts, each by a function."""
  loaded = reference.load_checkpoint(source)
  held = dict(loaded.tensors)
  for name in [name for name in held if dense and DENSE.fullmatch(name)]:
    held[name] = dense(held[name])
  for stem in {name.removesuffix("_packed") for name in held if ".experts." in name and not name.endswith("_scale")}:
    weights = loaded.weight(stem).astype(ml_dtypes.bfloat16)
    held[stem] = experts(weights) if experts else weights
  return reference.Checkpoint(loaded.config, held)


def expect(reference: Any, checkpoint: Any, row: np.ndarray = ROW) -> np.ndarray:
  return reference.forward(checkpoint, row[None])["logits"][0]


@pytest.mark.slow
def test_formats_that_hold_the_same_experts_give_the_same_logits(sources, convert, float32_config, reference):
  packed, bf16, in_fp8 = (
    logits(float32_config(convert(sources["k3"], "--experts", form))) for form in ("mxfp4", "bf16", "fp8-block")
  )
  loaded = rounded(reference, sources["k3"])
  stems = [name for name in loaded.tensors if re.search(r"experts\.\d+\.w[123]\.weight$", name)]
  assert len(stems) == 4 * 4 * 3
  for name in stems:
    np.testing.assert_array_equal(fp8(loaded.tensors[name]), loaded.tensors[name].astype(np.float64))
  np.testing.assert_array_equal(bf16, in_fp8)
  # A packed matrix is multiplied along its last axis, and float32 sums depend on the order: 6e-7 here.
  assert np.abs(packed - bf16).max() <= SUMS * np.abs(bf16).max()


def check_dense(found: np.ndarray, source: Path, reference: Any, *, experts_change: bool) -> None:
  """One pass against the reference on the rounded weights, and on the stored ones with and without random noise."""
  expected = expect(reference, rounded(reference, source, dense=fp8, experts=fp8))
  stored = expect(reference, reference.load_checkpoint(source))
  noisy = rounded(reference, source, dense=with_noise, experts=with_noise if experts_change else None)
  largest, noise = np.abs(stored).max(), (expect(reference, noisy) - stored).std()
  assert np.abs(found - expected).max() <= TOLERANCE * largest
  error = found - stored
  print(
    f"FP8 against the stored weights: {np.abs(error).max() / largest:.3f} of the largest logit, root mean square "
    f"{error.std() / stored.std():.3f} of the logits', random noise of {NOISE:.1%}: {noise / stored.std():.3f}"
  )
  assert noise / NOISE_FACTOR <= error.std() <= noise * NOISE_FACTOR


def test_dense_fp8_is_the_reference_on_the_rounded_weights(sources, fp8_logits, reference):
  check_dense(fp8_logits, sources["k3"], reference, experts_change=False)


@pytest.mark.slow
def test_dense_fp8_of_kimi_linear_is_the_reference_on_the_rounded_weights(sources, convert, float32_config, reference):
  source = sources["kimi-linear"]
  out = convert(source, "--experts", "fp8-block", "--dense", "fp8-block")
  check_dense(logits(float32_config(out)), source, reference, experts_change=True)


@pytest.mark.slow
def test_a_prompt_and_steps_in_fp8_equal_one_pass(fp8_out, fp8_logits, float32_config):
  """Steps take the absorbed halves of wkv_b, one pass takes its product."""
  from kimi_k3.maxtext_adapter.engine import Engine

  whole = fp8_logits
  prompt = len(ROW) - STEPS
  config = float32_config(
    fp8_out, max_prefill_predict_length=prompt, max_target_length=len(ROW), per_device_batch_size=1
  )
  engine = Engine(config)
  prefilled = engine.prefill(ROW[:prompt], prompt)
  engine.insert(prefilled, 0)
  found = [np.asarray(prefilled.logits), *(np.asarray(engine.step(token[None]))[0] for token in ROW[prompt:])]
  assert np.abs(np.array(found) - whole[prompt - 1 :]).max() <= TOLERANCE * np.abs(whole).max()


@pytest.mark.slow
def test_bfloat16_experts_packed_by_convert_are_the_reference_on_the_rounded_weights(
  sources, convert, float32_config, reference
):
  source = sources["kimi-linear"]
  found = logits(float32_config(convert(source, "--experts", "mxfp4")))

  def packed(weights):
    return reference.mxfp4_decode(*mxfp4.pack(weights, "w"))

  expected = expect(reference, rounded(reference, source, experts=packed))
  stored = expect(reference, reference.load_checkpoint(source))
  assert np.abs(found - expected).max() <= TOLERANCE * np.abs(stored).max()
  assert np.abs(found - stored).max() > 100 * TOLERANCE * np.abs(stored).max()


NINE = ("--layers", "9", "--packed", "experts+shared+latent")


@pytest.mark.slow
@pytest.mark.parametrize("scan", ["--scan", "--no-scan"])
def test_a_scanned_block_in_fp8_is_the_reference_on_the_rounded_weights(
  scan, tiny_checkpoint, convert, float32_config, reference
):
  """Packed shared experts and latent projections stay packed beside attention in FP8."""
  source = tiny_checkpoint(*NINE)
  out = convert(source, scan, "--experts", "fp8-block", "--dense", "fp8-block")
  found = logits(float32_config(out))
  expected = expect(reference, rounded(reference, source, dense=fp8, experts=fp8))
  assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.fixture
def run_on_mesh(tmp_path):
  """Returns a function: sizes of a mesh and a request to the answer of on_mesh.py on as many simulated devices."""

  def run(mesh: dict[str, int], *settings: str, **request: Any) -> dict[str, Any]:
    axes = [f"ici_{axis}_parallelism={mesh.get(axis, 1)}" for axis in ("tensor", "expert", "data", "fsdp")]
    (tmp_path / "request.json").write_text(json.dumps({"settings": [*axes, *settings], **request}))
    devices = math.prod(mesh.values())
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    on_mesh = str(Path(__file__).parent / "on_mesh.py")
    command = [sys.executable, on_mesh, str(tmp_path / "request.json"), str(tmp_path / "answer.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((tmp_path / "answer.json").read_text())

  return run


@pytest.mark.slow
def test_fp8_on_four_devices_answers_as_on_one(k3_tiny, convert, float32_config, run_on_mesh):
  """Codes are cut as bfloat16 is, and each device has the scales of its experts."""
  out = convert(k3_tiny.checkpoint, "--scan", "--experts", "fp8-block", "--dense", "fp8-block")
  answer = run_on_mesh({"tensor": 2, "expert": 2}, converted=str(out), prompts=k3_tiny.prompts, new_tokens=2)
  for prompt, found in zip(k3_tiny.prompts, answer["logits"], strict=True):
    expected = logits(float32_config(out), np.array(prompt, np.int32))[-1]
    assert np.abs(np.array(found) - expected).max() <= TOLERANCE * np.abs(expected).max()
  cut = {name.split("decoder.")[-1]: total / shard for name, (total, shard) in answer["params"].items()}
  assert cut["lead_1.mlp.experts.w1"] == 4
  assert cut["lead_1.mlp.experts.w1_scale_inv"] == 2
  assert cut["lead_1.attention.q_proj.kernel_scale_inv"] == 1


@pytest.mark.slow
def test_the_full_model_in_fp8_has_the_leaves_that_convert_writes_and_is_cut_by_32_devices(run_on_mesh):
  from kimi_k3.convert import mapping, plan
  from kimi_k3.maxtext_adapter.config import architecture
  from kimi_k3.maxtext_adapter.settings import read_config
  from kimi_k3.resources import configs_dir

  fp8 = ("packed_modules=[]", "fp8_modules=[dense,experts]", "override_model_config=true")
  config = architecture(read_config(str(configs_dir() / "decode.yml"), ["model_name=kimi-k3", *fp8]))
  form = mapping.StoredForm(prefix="", packed_modules=("experts",), a_log_shape=(128,))
  tree = {".".join(leaf.path): plan.leaf_bytes(leaf) for leaf in mapping.leaves(config, form, scan=True)}
  shapes = run_on_mesh({"tensor": 4, "expert": 8}, *fp8)
  assert {name: total for name, (total, _) in shapes.items()} == tree
  big = {name: total / shard for name, (total, shard) in shapes.items() if total > 2**30}
  assert len(big) > 20
  assert set(big.values()) == {32}
  total, held = np.array(list(shapes.values()), float).sum(axis=0)
  assert held < total / 32 * 1.1
