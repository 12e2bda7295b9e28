"""Topologies and meshes by arithmetic."""

from __future__ import annotations

import dataclasses
import math

import pytest

from kimi_k3.errors import InputError


@pytest.mark.parametrize(
  ("name", "slices", "chips", "devices", "hosts"),
  [
    ("tpu7x:2x2x1", 1, 4, 8, 1),
    ("tpu7x:2x2x4", 1, 16, 32, 4),
    ("tpu7x:4x4x4", 1, 64, 128, 16),
    ("tpu7x:2x2x4", 2, 32, 64, 8),
    ("tpu7x:1x1x1", 1, 1, 2, 1),
    ("v6e:1x1", 1, 1, 1, 1),
    ("v6e:2x4", 1, 8, 8, 2),
    ("v6e:16x16", 1, 256, 256, 64),
  ],
)
def test_a_chip_of_tpu7x_has_two_devices_one_of_v6e_is_one_and_a_host_has_four(name, slices, chips, devices, hosts):
  from kimi_k3.capacity.topologies import parse_topology

  found = parse_topology(name, slices)
  assert (found.chips, found.devices, found.hosts, found.slices) == (chips, devices, hosts, slices)


def test_limits_and_speeds_are_those_of_the_device_kind():
  from kimi_k3.capacity.topologies import parse_topology

  found = parse_topology("tpu7x:2x2x4"), parse_topology("v6e:2x4")
  assert [one.device_kind for one in found] == ["TPU7x", "TPU v6 lite"]
  assert [round(one.limit_bytes / 2**30, 2) for one in found] == [94.74, 31.24]
  assert [one.hbm_bytes_per_second for one in found] == [3.69e12, 1.638e12]
  assert [one.flops_per_second for one in found] == [1153e12, 918e12]


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("tpu8:2x2", "unknown kind 'tpu8', expected one of tpu7x, v6e"),
    ("", "unknown kind ''"),
    ("tpu7x", "the nearest that works is tpu7x:1x1x1;"),
    ("tpu7x:3x3x3", "the nearest that works is tpu7x:2x4x4;"),
    ("tpu7x:16x16x16", "the nearest that works is tpu7x:8x8x8;"),
    ("v6e:3x3", "the nearest that works is v6e:2x4; it has 1x1, 2x2, 2x2x1, 2x4,"),
    ("v6e:2x-4", "the nearest that works is v6e:2x4;"),
    ("v6e:x", "the nearest that works is v6e:1x1;"),
  ],
)
def test_an_unknown_topology_names_the_nearest_that_works(name, message):
  from kimi_k3.capacity.topologies import parse_topology

  with pytest.raises(InputError, match=message) as caught:
    parse_topology(name)
  assert "\n" not in str(caught.value)


def test_no_slices_are_refused():
  from kimi_k3.capacity.topologies import parse_topology

  with pytest.raises(InputError, match="0 slices, expected 1 or more"):
    parse_topology("v6e:2x4", 0)


def test_larger_topologies_are_of_the_kind_the_smallest_first():
  from kimi_k3.capacity.topologies import larger_topologies, parse_topology

  found = larger_topologies(parse_topology("v6e:4x8", 2))
  assert [(one.name, one.devices) for one in found] == [("v6e:8x8", 128), ("v6e:8x16", 256), ("v6e:16x16", 512)]
  assert not larger_topologies(parse_topology("tpu7x:8x8x8"))


def wide(config):
  """A config with the sizes of K3 that a mesh divides."""
  sizes = dict(num_heads=96, num_kv_heads=96, kda_num_heads=96, num_experts=896, expert_mlp_dim=3072)
  return dataclasses.replace(config, **sizes, dense_mlp_dim=33792, expert_latent_dim=3584, vocab_size=163840)


@pytest.mark.parametrize(
  ("name", "slices", "mesh"),
  [
    ("tpu7x:2x2x1", 1, {"tensor": 8}),
    ("tpu7x:2x2x4", 1, {"tensor": 32}),
    ("tpu7x:2x4x4", 1, {"attn_dp_expert": 2, "model": 32}),
    ("tpu7x:4x4x4", 1, {"attn_dp_expert": 4, "model": 32}),
    ("tpu7x:4x4x8", 1, {"data": 2, "attn_dp_expert": 4, "model": 32}),  # 896 = 128 x 7
    ("tpu7x:2x2x4", 2, {"data": 2, "tensor": 32}),
    ("tpu7x:4x4x4", 2, {"data": 2, "attn_dp_expert": 4, "model": 32}),
    ("tpu7x:2x2x3", 1, {"data": 3, "tensor": 8}),  # 896 has no factor 3
    ("v6e:1x1", 1, {"tensor": 1}),
  ],
)
def test_the_default_mesh_cuts_heads_at_most_32_ways_experts_by_all_of_a_slice_and_slices_by_rows(
  name, slices, mesh, k3_config
):
  from kimi_k3.capacity.topologies import default_mesh, parse_topology

  assert default_mesh(wide(k3_config), parse_topology(name, slices)) == mesh


@pytest.mark.parametrize("architecture", ["k3_config", "kimi_linear_config"])
@pytest.mark.parametrize("name", ["tpu7x:2x2x1", "tpu7x:2x2x4", "tpu7x:4x4x4", "v6e:16x16"])
def test_every_default_mesh_fits_and_has_all_devices_also_for_small_models(architecture, name, request):
  from kimi_k3.capacity.topologies import default_mesh, parse_topology
  from kimi_k3.spmd.cuts import Cuts

  config, topology = request.getfixturevalue(architecture), parse_topology(name)
  mesh = default_mesh(config, topology)
  Cuts.of(mesh).check_fits(config)
  assert math.prod(mesh.values()) == topology.devices


@pytest.mark.parametrize(
  ("asked", "devices", "nearest"),
  [
    ({"tensor": 16}, 32, {"tensor": 32}),
    ({"tensor": 64}, 64, {"attn_dp_expert": 2, "model": 32}),  # 96 heads: no sizes of this axis alone work
    ({"attn_dp_expert": 4, "model": 7}, 32, {"attn_dp_expert": 4, "model": 8}),
    ({"attn_dp_expert": 2, "model": 64}, 128, {"attn_dp_expert": 4, "model": 32}),
    ({"expert": 5, "tensor": 6}, 32, {"expert": 4, "tensor": 8}),
    ({}, 32, {"tensor": 32}),
  ],
)
def test_the_nearest_mesh_keeps_the_axes_where_it_can(asked, devices, nearest, k3_config):
  from kimi_k3.capacity.topologies import nearest_mesh

  assert nearest_mesh(wide(k3_config), asked, devices) == nearest
