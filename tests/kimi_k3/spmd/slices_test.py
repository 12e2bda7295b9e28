"""What is reduced or exchanged in every layer stays inside a slice; rows may lie across."""

from __future__ import annotations

import platform
import sys

import jax
import numpy as np
import pytest

from kimi_k3.capacity import topology
from kimi_k3.errors import InputError
from kimi_k3.spmd.cuts import Cuts
from kimi_k3.spmd.slices import check_slices, make_mesh, nearest_mesh, slice_of

pytestmark = pytest.mark.skipif(
  (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="libtpu exists for Linux on x86-64 only"
)
TOPOLOGY = "tpu7x:2x2x1"  # 8 devices a slice


def made(sizes: dict[str, int], slices: int = 2, rules: dict | None = None) -> jax.sharding.Mesh:
  return make_mesh(sizes, Cuts.of(sizes, rules), topology.tpu_devices(TOPOLOGY, slices=slices))


def slices_along(mesh: jax.sharding.Mesh) -> np.ndarray:
  return np.vectorize(slice_of)(mesh.devices)


@pytest.mark.parametrize(
  "sizes", [{"data": 2, "tensor": 8}, {"tensor": 8, "data": 2}, {"data": 4, "expert": 2, "tensor": 2}]
)
def test_rows_lie_across_slices_and_everything_else_inside_one(sizes):
  mesh = made(sizes)
  check_slices(mesh, Cuts.of(sizes))
  by_row = np.moveaxis(slices_along(mesh), list(sizes).index("data"), 0).reshape(sizes["data"], -1)
  assert (by_row == by_row[:, :1]).all()
  assert set(by_row[:, 0]) == {0, 1}


def test_devices_of_one_slice_have_number_0_and_any_mesh_of_theirs_passes():
  mesh = made({"tensor": 8}, slices=1)
  assert {slice_of(device) for device in [*mesh.devices, *jax.devices()]} == {0}
  check_slices(mesh, Cuts.of({"tensor": 8}))


REFUSAL = (
  "mesh {} on 2 slices: {} would lie across slices and cuts {}, which must stay inside one; only rows may lie across: "
)


@pytest.mark.parametrize(
  ("sizes", "rules", "crossing", "what", "nearest"),
  [
    ({"tensor": 16}, None, "tensor", "heads, width, vocab, experts", "data=2,tensor=8"),
    (
      {"expert": 4, "tensor": 4},
      {"experts": ["expert"], "expert_width": ["tensor"]},
      "expert, tensor",
      "heads, width, vocab, experts, expert width",
      "data=2,expert=2,tensor=4",
    ),
    (
      {"attn_dp_expert": 2, "model": 8},
      None,
      "attn_dp_expert, model",
      "heads, width, vocab, experts",
      "data=2,model=8",
    ),
  ],
)
def test_a_group_over_two_slices_is_refused_with_the_nearest_mesh_that_works(sizes, rules, crossing, what, nearest):
  with pytest.raises(InputError) as refused:
    made(sizes, rules=rules)
  mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items())
  assert str(refused.value) == REFUSAL.format(mesh, crossing, what) + f"set partition_mesh={nearest}"
  works = dict(part.split("=") for part in nearest.split(","))
  made({axis: int(size) for axis, size in works.items()})


def test_a_mesh_of_another_origin_is_refused_too():
  devices = np.asarray(topology.tpu_devices(TOPOLOGY, slices=2)).reshape(8, 2)
  mesh = jax.sharding.Mesh(devices.T.reshape(2, 8)[:, ::-1], ("data", "tensor"))
  with pytest.raises(InputError, match=r"tensor would lie across slices .* set partition_mesh=data=2,tensor=8"):
    check_slices(mesh, Cuts.of({"data": 2, "tensor": 8}))


def test_slices_of_different_size_are_refused():
  devices = topology.tpu_devices(TOPOLOGY, slices=2)[:12]
  with pytest.raises(InputError, match=r"slices of different size \(slice 0: 8, slice 1: 4 devices\)"):
    make_mesh({"tensor": 12}, Cuts.of({"tensor": 12}), devices)


@pytest.mark.parametrize(
  ("sizes", "slices", "nearest"),
  [
    ({"tensor": 64}, 2, {"data": 2, "tensor": 32}),
    ({"data": 2, "tensor": 64}, 4, {"data": 4, "tensor": 32}),
    ({"fsdp": 3, "expert": 8, "tensor": 4}, 6, {"fsdp": 6, "expert": 4, "tensor": 4}),
    ({"tensor": 8, "data": 4}, 4, {"data": 4, "tensor": 8}),
  ],
)
def test_the_nearest_mesh_has_as_many_devices_and_rows_across_slices(sizes, slices, nearest):
  assert nearest_mesh(sizes, Cuts.of(sizes), slices) == nearest


def test_more_slices_than_none_are_asked_for():
  assert len(topology.tpu_devices(TOPOLOGY, slices=3)) == 24
  assert topology.tpu_mesh(TOPOLOGY, {"data": 2, "x": 8}, slices=2).size == 16
  with pytest.raises(InputError, match="0 slices, expected 1 or more"):
    topology.tpu_devices(TOPOLOGY, slices=0)
