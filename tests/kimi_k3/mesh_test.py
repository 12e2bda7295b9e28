"""Several devices answer as one, and each holds its share. Simulated devices, in processes of their own: on_mesh.py."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TOLERANCE = 1e-4  # of the largest logit: the golden cases' own, see model_test.py
AXES = ("tensor", "expert", "data", "fsdp")
ON_MESH = Path(__file__).parent / "on_mesh.py"

# (golden case, sizes of the mesh). Kimi-Linear's tiny case has two MLA heads, which four devices do not cut.
CASES = [
  ("k3_tiny", {"tensor": 2, "expert": 2}),
  pytest.param("k3_nano", {"tensor": 2, "expert": 2}, marks=pytest.mark.slow),
  pytest.param("k3_tiny", {"tensor": 4}, marks=pytest.mark.slow),
  pytest.param("k3_tiny", {"data": 2, "tensor": 2}, marks=pytest.mark.slow),
  pytest.param("kimi_linear_tiny", {"tensor": 2, "expert": 2}, marks=pytest.mark.slow),
  pytest.param("k3_hd128", {"tensor": 4}, marks=pytest.mark.slow),
  pytest.param("k3_hd128", {"tensor": 2, "expert": 2}, marks=pytest.mark.slow),
  pytest.param("k3_hd128", {"data": 2, "tensor": 2}, marks=pytest.mark.slow),
  pytest.param("kimi_linear_tiny", {"data": 2, "tensor": 2}, marks=pytest.mark.slow),
  pytest.param("k3_tiny", {"tensor": 2, "expert": 2, "fsdp": 2}, marks=pytest.mark.slow),
]


def mesh_id(value: Any) -> str | None:
  return "-".join(f"{axis}-{size}" for axis, size in value.items()) if isinstance(value, dict) else None


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
  """Returns a function: the sizes of a mesh and a request to the answer of on_mesh.py."""

  def ask(mesh: dict[str, int], **request: Any) -> Any:
    settings = [f"ici_{axis}_parallelism={mesh.get(axis, 1)}" for axis in AXES]
    (tmp_path / "request.json").write_text(json.dumps({"settings": settings, **request}))
    devices = math.prod(mesh.values())
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, str(ON_MESH), str(tmp_path / "request.json"), str(tmp_path / "answer.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((tmp_path / "answer.json").read_text())

  return ask


@pytest.mark.parametrize(("case_name", "mesh"), CASES, ids=mesh_id)
def test_a_mesh_answers_as_the_golden_case_and_each_device_holds_its_share(case_name, mesh, request, run, convert):
  case = request.getfixturevalue(case_name)
  new_tokens = len(case.greedy[0])
  answer = run(mesh, converted=str(convert(case.checkpoint, "--scan")), prompts=case.prompts, new_tokens=new_tokens)
  for i, found in enumerate(answer["logits"]):
    expected = case.arrays[f"logits_{i}"]
    assert np.abs(np.array(found) - expected[-1]).max() <= TOLERANCE * np.abs(expected).max()
  assert answer["ids"] == case.greedy
  assert set(answer["programs"].values()) == {1}, f"traced again: {answer['programs']}"

  heads, experts = mesh.get("tensor", 1), mesh.get("tensor", 1) * mesh.get("expert", 1)
  rows = math.prod(size for axis, size in mesh.items() if axis != "tensor")
  cut = {name: total / shard for name, (total, shard) in answer["params"].items() if is_big(name)}
  assert len(cut) > 50
  # A group of 32 weights shares a scale, so packed experts are not cut along their input: the axis of fsdp devices.
  packed = {name for name in cut if name.endswith("_packed")}
  assert {cut[name] for name in packed} <= {experts}
  assert {cut[name] for name in cut.keys() - packed} == {experts * mesh.get("fsdp", 1)}
  for name, (total, shard) in answer["caches"].items():
    if "recurrent_state" in name or "conv_state" in name:
      assert total / shard == heads * rows, name
    elif "cache_ar_index" in name:
      assert total == shard  # a number that all rows share
    else:
      assert total / shard == rows, name  # latents have no heads


def is_big(name: str) -> bool:
  """Matrices that make up the size of the model: experts, MLPs, embedding and head, all that has heads."""
  parts = ("experts.", "embedding", "logits_dense", "q_proj", "k_proj", "v_proj", "g_proj", "o_proj")
  mla = ("wq_b", "wkv_b", "attention.gate.", "attention.out.")
  return any(part in name for part in (*parts, *mla)) and not name.endswith("_scale")


@pytest.mark.parametrize(
  "mesh",
  [
    pytest.param({"tensor": 4}, marks=pytest.mark.slow),
    {"tensor": 4, "expert": 8},
    pytest.param({"tensor": 2, "expert": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.slow),
  ],
  ids=mesh_id,
)
def test_every_leaf_of_the_full_model_over_a_gib_is_cut_by_the_whole_mesh(mesh, run):
  shapes = run(mesh)
  parts = math.prod(size for axis, size in mesh.items() if axis != "data")
  big = {name: total / shard for name, (total, shard) in shapes.items() if total > 2**30}
  assert len(big) > 20
  assert {name: ratio for name, ratio in big.items() if ratio != parts} == {}
  total, held = np.array(list(shapes.values()), float).sum(axis=0)
  assert held < total / parts * 1.1  # the rest, whole or cut along one axis only, is small
