"""Shapes by arithmetic against the model's own, leaf by leaf."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import yaml

from kimi_k3.errors import InputError


@functools.cache
def k3():
  """The architecture of K3 whole."""
  from kimi_k3.maxtext_keys import from_maxtext
  from kimi_k3.resources import configs_dir

  return from_maxtext(yaml.safe_load((configs_dir() / "models" / "kimi-k3.yml").read_text()))


def model_on(config, mesh, rules=None, *, expert_form="stored", scan=True):
  """The model on a mesh of one device many times over: shapes and shardings need no more."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from kimi_k3.config import ComputeConfig
  from kimi_k3.spmd.cuts import Cuts
  from kimi_k3.spmd.model import SpmdModel

  devices = np.array([jax.devices()[0]] * math.prod(mesh.values())).reshape(tuple(mesh.values()))
  compute = ComputeConfig(
    dtype=jnp.bfloat16,
    weight_dtype=jnp.bfloat16,
    precision="highest",
    kda_implementation="portable",
    expert_implementation="decode_kernel" if expert_form == "float4" else "reference",
    interpret_kernels=expert_form == "float4",  # a kernel in this mode reads what it reads on TPU7x
  )
  return SpmdModel(config, compute, jax.sharding.Mesh(devices, tuple(mesh)), Cuts.of(mesh, rules), scan=scan)


def of_model(leaves):
  """Shape, type and one device's part of each leaf."""
  return {name: (leaf.shape, leaf.dtype.name, leaf.sharding.shard_shape(leaf.shape)) for name, leaf in leaves.items()}


def of_arithmetic(leaves):
  return {name: (leaf.shape, leaf.dtype, leaf.local_shape) for name, leaf in leaves.items()}


LAYOUTS = {
  "tp32": ({"tensor": 32}, None),
  "latent": ({"tensor": 32}, {"latent": ["tensor"]}),
  "ep8-tp4": ({"expert": 8, "tensor": 4}, {"experts": ["expert"], "expert_width": ["tensor"]}),
  "dp4-tp8": ({"attn_dp_expert": 4, "model": 8}, None),
  "slices": ({"data": 2, "attn_dp_expert": 4, "model": 32}, None),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("expert_form", ["stored", "float4"])
def test_parameters_of_k3_are_the_models_leaf_by_leaf_on_every_layout(name, expert_form):
  from kimi_k3.capacity import shapes

  mesh, rules = LAYOUTS[name]
  model = model_on(k3(), mesh, rules, expert_form=expert_form)
  found = shapes.parameters(k3(), model.cuts, expert_form=expert_form)
  assert of_arithmetic(found) == of_model(model.params)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("architecture", ["k3_config", "kimi_linear_config"])
def test_parameters_of_the_golden_models_are_the_models_scanned_or_not(architecture, scan, request):
  from kimi_k3.capacity import shapes

  config = request.getfixturevalue(architecture)
  model = model_on(config, {"tensor": 2}, scan=scan)
  found = shapes.parameters(config, model.cuts, expert_form="stored", scan=scan)
  assert of_arithmetic(found) == of_model(model.params)


@pytest.mark.parametrize(
  ("mesh", "cut", "cut_rows"),
  [
    ({"tensor": 32}, "batch", True),
    ({"tensor": 32}, "sequence", True),
    ({"attn_dp_expert": 4, "model": 8}, "batch", True),
    ({"attn_dp_expert": 4, "model": 8}, "sequence", True),
    ({"attn_dp_expert": 4, "model": 8}, "sequence", False),
  ],
)
def test_caches_are_the_models_leaf_by_leaf(mesh, cut, cut_rows):
  from kimi_k3.capacity import shapes

  model = model_on(k3(), mesh)
  found = shapes.caches(k3(), model.cuts, rows=64, length=8192, cut=cut, cut_rows=cut_rows)
  assert of_arithmetic(found) == of_model(model.cache(64, 8192, cut=cut, cut_rows=cut_rows))


def test_nibbles_have_the_shapes_that_preparing_experts_gives():
  import jax
  import jax.numpy as jnp

  from kimi_k3.capacity import shapes
  from kimi_k3.moe.packed import prepare
  from kimi_k3.spmd.cuts import Cuts

  whole = Cuts.of({})
  stored = shapes.parameters(k3(), whole, expert_form="stored")
  nibbles = shapes.parameters(k3(), whole, expert_form="nibbles")
  for name in ("w1", "w3", "w2"):
    names = [f"decoder.lead_1.mlp.experts.{name}_{part}" for part in ("packed", "scale")]
    leaves = [jax.ShapeDtypeStruct(stored[one].shape, jnp.uint8) for one in names]
    made = jax.eval_shape(lambda packed, scale: prepare(packed, scale, "nibbles"), *leaves)
    assert [(leaf.shape, leaf.dtype.name) for leaf in made] == [
      (nibbles[one].shape, nibbles[one].dtype) for one in names
    ]


@pytest.mark.parametrize(
  ("shape", "size"),
  [
    ((22, 7168, 3, 128), 22 * 7168 * 3 * 128),  # heads are not the rows of a tile, whatever their place
    ((22, 7168, 192), 22 * 7168 * 192),  # nor 192 its lanes
    ((22, 7168), 24 * 7168),
    ((7168, 3), 7168 * 4),
    ((22, 3), 128 * 4),
    ((7168,), 7168),
    ((3584,), 4096),
    ((512,), 512),
    ((3,), 128),
    ((), 1),
  ],
)
def test_padding_is_what_the_compiler_gives_an_argument(shape, size):
  from kimi_k3.capacity import shapes

  assert shapes.padded_size(shape) == size


def test_what_the_manual_partitioning_does_not_take_is_named():
  from kimi_k3.capacity import shapes
  from kimi_k3.spmd.cuts import Cuts

  packed = dataclasses.replace(k3(), packed_modules=("experts", "latent"))
  with pytest.raises(InputError, match="packed latent: not supported in the manual partitioning"):
    shapes.parameters(packed, Cuts.of({}), expert_form="stored")
  with pytest.raises(InputError, match=r"dtype complex64: .*expected one of float4_e2m1fn"):
    shapes.element_bits("complex64")
