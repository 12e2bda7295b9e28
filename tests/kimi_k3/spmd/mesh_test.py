"""Eight devices answer as the reference, each holds its share, and what is whole everywhere is known by name."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ON_DEVICES = Path(__file__).parent / "on_devices.py"
TOLERANCE = 1e-4  # of the largest logit: the golden cases' own, see model_test.py
DEVICES, STEPS = 8, 8
CHECKPOINT = (
  *("--preset", "tiny", "--seed", "12"),  # a seed whose routers and tokens are decided by 5e-5 or more
  *(
    part
    for key in ("num_attention_heads", "num_key_value_heads", "linear_attn_config.num_heads")
    for part in ("--set", f"{key}=8")
  ),
  *("--set", "moe_intermediate_size=64"),  # two groups that share a scale, so that it can be cut in two
)

# name: (settings, parts of heads, rows, experts, width)
CASES: dict[str, tuple[list[str], dict[str, int]]] = {
  "tp8": (["ici_tensor_parallelism=8", "prefill_chunk=48"], {"heads": 8, "experts": 8, "width": 8}),
  "attn_dp_expert4-model2-batch": (
    ["partition_mesh=attn_dp_expert=4,model=2", "mla_cache_cut=batch"],
    {"heads": 2, "rows": 4, "experts": 8, "width": 2},
  ),
}
SLOW_CASES: dict[str, tuple[list[str], dict[str, int]]] = {
  "latent-sharded": (
    ["partition_mesh=model=8", "partition_rules={latent: [model]}"],
    {"heads": 8, "experts": 8, "width": 8, "latent": 8},
  ),
  "ep8": (["ici_expert_parallelism=8", "mla_cache_cut=batch"], {"heads": 8, "experts": 8, "width": 8}),
  "tp2-ep4": (
    ["ici_tensor_parallelism=2", "ici_expert_parallelism=4", "prefill_cut=whole"],
    {"heads": 8, "experts": 8, "width": 8},
  ),
  "tp2-ep4-expert-width": (
    ["partition_mesh=expert=4,tensor=2", "partition_rules={experts: [expert], expert_width: [tensor]}"],
    {"heads": 8, "experts": 8, "width": 8},
  ),
  "data2-tensor4": (
    ["partition_mesh=data=2,tensor=4", "prefill_chunk=64", "mla_cache_cut=batch"],
    {"heads": 4, "rows": 2, "experts": 4, "width": 4},
  ),
  "attn_dp_expert4-model2-latent": (
    ["partition_mesh=attn_dp_expert=4,model=2", "partition_rules={latent: [model]}", "prefill_cut=whole"],
    {"heads": 2, "rows": 4, "experts": 8, "width": 2, "latent": 2},
  ),
  "kernels": (
    [
      *("ici_tensor_parallelism=8", "interpret_kernels=true", "expert_implementation=decode_kernel"),
      *("kda_step_implementation=pallas", "mla_step_implementation=pallas", "kda_implementation=tokamax_xla_chunked"),
    ],
    {"heads": 8, "experts": 8, "width": 8},
  ),
}

# What no axis cuts, and why: choices must be the same everywhere; a low rank or a latent has no heads; norms are small.
WHOLE = (
  *("router.kernel", "router.bias", "f_a_proj.kernel", "wq_a.kernel", "wkv_a.kernel", "mlp.down_proj.kernel"),
  *("mlp.up_proj.kernel", ".scale", ".norm", ".proj"),
)


@dataclasses.dataclass(frozen=True)
class Case:
  """The checkpoint with eight heads, and what the reference says of it."""

  checkpoint: Path
  arrays: dict[str, np.ndarray]

  def of(self, name: str) -> list[np.ndarray]:
    return [self.arrays[f"{name}_{i}"] for i in range(3)]


@pytest.fixture(scope="module")
def case(tiny_checkpoint, tmp_path_factory) -> Case:
  checkpoint = tiny_checkpoint(*CHECKPOINT)
  out = tmp_path_factory.mktemp("eight-heads")
  reference = Path(__file__).parents[2] / "reference" / "make_golden.py"
  command = [sys.executable, str(reference), str(checkpoint), str(out), "--seed", "12", "--greedy", str(STEPS)]
  subprocess.run(command, check=True, timeout=300, capture_output=True)
  with np.load(out / "golden.npz") as arrays:
    return Case(checkpoint, dict(arrays))


@pytest.fixture
def run(convert, tmp_path) -> Callable[..., Any]:
  def ask(cases: dict[str, tuple[list[str], Any]], case: Case) -> Any:
    used = {int(token) for name in ("tokens", "greedy") for row in case.of(name) for token in row}
    request = {
      "converted": str(convert(case.checkpoint, "--scan")),
      "cases": {name: settings for name, (settings, _) in cases.items()},
      "prompts": [tokens.tolist() for tokens in case.of("tokens")],
      "steps": STEPS,
      "unused": min(set(range(256)) - used),
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
    command = [sys.executable, str(ON_DEVICES), str(tmp_path / "request.json"), str(tmp_path / "answer.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((tmp_path / "answer.json").read_text())

  return ask


def test_eight_devices_answer_as_the_reference_and_each_holds_its_share(case, run):
  check(case, run(CASES, case), CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_other_cuts_answer_as_the_reference_and_each_device_holds_its_share(name, case, run):
  check(case, run({name: SLOW_CASES[name]}, case), {name: SLOW_CASES[name]})


@pytest.mark.slow
def test_experts_that_are_not_packed_are_cut_too(kimi_linear_tiny, run):
  case = Case(kimi_linear_tiny.checkpoint, kimi_linear_tiny.arrays)
  settings = ["partition_mesh=attn_dp_expert=4,model=2"]
  (answer,) = run({"kimi-linear": (settings, None)}, case).values()
  for found, expected in zip(answer["logits"], case.of("logits"), strict=True):
    assert np.abs(np.array(found) - expected[-1]).max() <= TOLERANCE * np.abs(expected).max()
  assert worst_step(answer, case) <= TOLERANCE
  assert answer["ids"] == [ids[:STEPS].tolist() for ids in case.of("greedy")]


def check(case: Case, answers: dict[str, Any], cases: dict[str, tuple[list[str], dict[str, int]]]) -> None:
  assert answers.keys() == cases.keys()
  for name, answer in answers.items():
    for found, expected in zip(answer["logits"], case.of("logits"), strict=True):
      worst = np.abs(np.array(found) - expected[-1]).max() / np.abs(expected).max()
      assert worst <= TOLERANCE, f"{name}: {worst}"
    assert worst_step(answer, case) <= TOLERANCE, name
    assert answer["ids"] == [ids[:STEPS].tolist() for ids in case.of("greedy")], name
    assert answer["traces"] == 1, f"{name}: traced again"
    check_parts(name, answer, cases[name][1])


def worst_step(answer: dict[str, Any], case: Case) -> float:
  """The largest difference of the logits of steps, of the largest logit."""
  expected, forced = case.of("logits")[0], np.array(answer["forced"])
  return float(np.abs(forced - expected[-len(forced) :]).max() / np.abs(expected).max())


def check_parts(name: str, answer: dict[str, Any], parts: dict[str, int]) -> None:
  for leaf, (total, shard) in answer["params"].items():
    expected = expected_parts(leaf, parts)
    assert total == shard * expected, f"{name}: {leaf} is in {total / shard} parts, expected {expected}"
  for leaf, (total, shard) in answer["caches"].items():
    # Heads and rows cut the states; the same axes cut the latents, by tokens or by rows.
    assert total == shard * parts["heads"] * parts.get("rows", 1), f"{name}: {leaf}"


def expected_parts(leaf: str, parts: dict[str, int]) -> int:
  if ".experts." in leaf:
    return parts["experts"]
  if leaf.endswith(("mlp.down_proj.kernel", "mlp.up_proj.kernel")) and "lead_0" not in leaf:
    return parts.get("latent", 1)
  if (
    leaf.endswith(WHOLE)
    and not leaf.endswith((".q_proj.kernel", ".lead_0.mlp.down_proj.kernel"))
    and "lead_0.mlp." not in leaf
  ):
    return 1
  if ".mlp." in leaf or leaf.startswith("token_embedder") or "logits_dense" in leaf:
    return parts["width"]
  return parts["heads"]
