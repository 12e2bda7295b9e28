"""The experts with a gradient: equal to a sum over all experts with a mask, which any autodiff can differentiate."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_k3.activations import gated_activation
from kimi_k3.errors import InputError
from kimi_k3.moe.dropless import Matrices, dropless_experts, sharded_experts
from kimi_k3.moe.experts import Experts
from kimi_k3.moe.implementations import form_of
from kimi_k3.sharding import Placement, expert_placement

pytestmark = [pytest.mark.strict_ranks, pytest.mark.usefixtures("unsharded")]

EXPERTS, LATENT, WIDTH = 7, 12, 20
TOLERANCE = 1e-5  # of the largest value: sums of some hundred products in float32
ON_MESH = Path(__file__).parent / "dropless_on_mesh.py"


def masked_sum(config, x, ids, weights, matrices: Matrices):
  """Every expert of every token, times its combine weight or 0."""
  share_NE = jnp.sum(jax.nn.one_hot(ids, matrices.w1.shape[0]) * weights[..., None], axis=1)
  product = functools.partial(jnp.einsum, precision="highest")
  hidden = gated_activation(config, product("nl,elf->enf", x, matrices.w1), product("nl,elf->enf", x, matrices.w3))
  return product("ne,enf,efl->nl", share_NE, hidden, matrices.w2)


def make_case(rows: int, choose: Any = range(EXPERTS), num_selected: int = 3, seed: int = 0) -> Any:
  """Rows, ids (of those given, all different), combine weights and matrices."""
  rng = np.random.default_rng(seed)
  ids = np.array([rng.permutation(list(choose))[:num_selected] for _ in range(rows)], np.int32)
  shapes = ((EXPERTS, LATENT, WIDTH), (EXPERTS, LATENT, WIDTH), (EXPERTS, WIDTH, LATENT))
  matrices = Matrices(*(jnp.float32(rng.standard_normal(s) * s[1] ** -0.5) for s in shapes))
  x = rng.standard_normal((rows, LATENT))
  return jnp.float32(x), jnp.asarray(ids), jnp.float32(rng.random(ids.shape)), matrices


@functools.partial(jax.jit, static_argnums=(0,))
def values_and_gradients(experts, x, ids, weights, matrices):
  """Outputs, and the gradients of a sum of them in which each counts differently."""

  def loss(x, weights, matrices):
    y = experts(x, ids, weights, matrices)
    return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)), y

  gradients, y = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, weights, matrices)
  return y, *gradients


def assert_near(found, expected, tolerance=TOLERANCE):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize(
  ("name", "rows", "choose", "num_selected"),
  [
    ("k3", 90, range(EXPERTS), 3),  # several tiles an expert, the last ones partly filled
    ("k3", 1, range(EXPERTS), 3),  # less than a tile
    ("k3", 48, [4], 1),  # one expert gets every row in whole tiles, the others none
    ("k3", 90, range(-2, EXPERTS + 3), 4),  # some choices are elsewhere
    ("kimi_linear", 90, range(EXPERTS), 3),  # the other activation
  ],
)
def test_outputs_and_gradients_are_those_of_a_masked_sum_over_all_experts(
  name, rows, choose, num_selected, request, float32_compute
):
  config = request.getfixturevalue(f"{name}_config")
  x, ids, weights, matrices = make_case(rows, choose, num_selected)
  experts = functools.partial(dropless_experts, config=config, compute=float32_compute, tile_rows=16)
  found = values_and_gradients(experts, x, ids, weights, matrices)
  expected = values_and_gradients(functools.partial(masked_sum, config), x, ids, weights, matrices)
  assert_near(found, expected)


def test_the_rows_of_a_tile_do_not_matter(k3_config, float32_compute):
  case = make_case(300)
  how = {"config": k3_config, "compute": float32_compute}
  found, expected = (
    values_and_gradients(functools.partial(dropless_experts, **how, tile_rows=n), *case) for n in (None, 8)
  )
  assert_near(found, expected)


def test_choices_that_are_all_elsewhere_give_nothing_and_have_no_gradient(k3_config, float32_compute):
  x, ids, weights, matrices = make_case(5)
  experts = functools.partial(dropless_experts, config=k3_config, compute=float32_compute)
  found = values_and_gradients(experts, x, jnp.full_like(ids, EXPERTS), weights, matrices)
  for leaf in jax.tree.leaves(found):
    np.testing.assert_array_equal(leaf, np.zeros(leaf.shape, np.float32))


def test_matrices_in_bfloat16_get_a_gradient_that_was_summed_in_float32(k3_config, float32_compute):
  """2048 equal rows in 256 tiles: a sum in bfloat16 stops to grow once it is 256 times a tile's part."""
  compute = dataclasses.replace(float32_compute, dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16)
  x, ids, weights, matrices = make_case(1, [2], 1)

  @functools.partial(jax.jit, static_argnums=0)
  def gradient(copies: int):
    rows = [jnp.repeat(a, copies, axis=0) for a in (x.astype(jnp.bfloat16), ids, weights)]
    experts = functools.partial(dropless_experts, *rows, config=k3_config, compute=compute, tile_rows=8)
    return jax.grad(lambda m: jnp.sum(experts(m)))(jax.tree.map(jnp.bfloat16, matrices))

  one, many = gradient(8), gradient(2048)
  assert many.w1.dtype == jnp.bfloat16
  assert_near(
    jax.tree.map(np.float32, many),
    jax.tree.map(lambda a: 256 * np.float32(a), one),
    2**-8,  # both are rounded to 8 bits once
  )


def test_a_nan_in_one_token_reaches_only_its_own_experts_and_itself(k3_config, float32_compute):
  x, ids, weights, matrices = make_case(40, [0, 1, 2])
  ids, x = ids.at[7].set(jnp.array([3, 4, 5])), x.at[7].set(jnp.nan)
  experts = functools.partial(dropless_experts, config=k3_config, compute=float32_compute, tile_rows=16)
  y, dx, dweights, dmatrices = values_and_gradients(experts, x, ids, weights, matrices)
  for leaf in (y, dx, dweights):
    assert np.flatnonzero(np.isnan(leaf).any(axis=1)).tolist() == [7]
  assert np.flatnonzero(np.isnan(dmatrices.w1).any(axis=(1, 2))).tolist() == [3, 4, 5]


def inner_jaxprs(jaxpr):
  yield jaxpr
  for eqn in jaxpr.eqns:
    for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from inner_jaxprs(inner)


def test_no_array_of_the_gradient_is_larger_than_the_matrices_or_the_rows(k3_config, float32_compute):
  """Not tokens x experts, nor every row of every choice; in the traced program and in the compiler's temporaries."""
  rows, num_experts, latent, width, choices = 1024, 64, 32, 48, 4
  stack = num_experts * latent * width
  assert rows * latent < stack < rows * choices * latent < rows * num_experts * latent
  config = dataclasses.replace(k3_config, num_experts=num_experts)
  x, ids = jax.ShapeDtypeStruct((rows, latent), jnp.float32), jax.ShapeDtypeStruct((rows, choices), jnp.int32)
  weights = jax.ShapeDtypeStruct((rows, choices), jnp.float32)
  into, out = (jax.ShapeDtypeStruct((num_experts, *s), jnp.float32) for s in ((latent, width), (width, latent)))
  experts = functools.partial(dropless_experts, config=config, compute=float32_compute)
  traced = jax.jit(values_and_gradients.__wrapped__, static_argnums=(0,)).trace(
    experts, x, ids, weights, Matrices(into, into, out)
  )
  sizes = [v.aval.size for p in inner_jaxprs(traced.jaxpr.jaxpr) for e in p.eqns for v in e.outvars if v.aval.shape]
  assert max(sizes) <= stack
  # The three sums are outputs; beside them, no more than a few arrays of the size of the rows.
  temporary = traced.lower().compile().memory_analysis().temp_size_in_bytes
  assert temporary < 8 * rows * latent * 4


def experts_by_name(config, compute, name: str) -> Experts:
  return Experts(config, dataclasses.replace(compute, expert_implementation=name), nnx.Rngs(0))


def test_by_its_name_the_experts_answer_as_the_reference(kimi_linear_config, float32_compute):
  rng = np.random.default_rng(0)
  x = np.float32(rng.standard_normal((150, kimi_linear_config.expert_dim)))
  ids = np.array([rng.permutation(kimi_linear_config.num_experts)[:2] for _ in x])
  found, expected = (
    jax.jit(experts_by_name(kimi_linear_config, float32_compute, name).__call__)(x, ids, np.float32(ids + 1))
    for name in ("dropless", "reference")
  )
  assert_near(found, expected)


@pytest.mark.parametrize("form", ["packed_modules", "fp8_modules"])
def test_experts_stored_as_codes_are_refused_and_the_message_says_what_to_set(form, k3_config, float32_compute):
  config = dataclasses.replace(k3_config, **{"packed_modules": (), form: ("experts",)})
  with pytest.raises(InputError, match=rf"^expert_implementation 'dropless' .* found {form} = \['experts'\]: take .*$"):
    experts_by_name(config, float32_compute, "dropless")


@pytest.mark.parametrize("name", ["decode_kernel", "grouped"])
def test_where_the_compiler_partitions_a_kernel_of_the_manual_partitioning_is_refused(
  name, kimi_linear_config, float32_compute
):
  experts = experts_by_name(kimi_linear_config, float32_compute, name)
  x = jnp.zeros((1, kimi_linear_config.expert_dim))
  with pytest.raises(InputError, match=f"^expert_implementation is '{name}', .* expected 'reference' or 'dropless'"):
    experts(x, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)))


def test_in_the_manual_partitioning_it_is_refused():
  with pytest.raises(InputError, match=r"^expert_implementation 'dropless' is for training.* set partitioning=auto"):
    form_of("dropless", "cpu")


RULES = (  # of MaxText's base.yml, those that count here, in their order
  ("exp", "expert"),
  ("mlp_moe", ["fsdp_transpose", "tensor", "tensor_sequence", "autoregressive"]),
  ("embed_moe", ["fsdp", "fsdp_transpose", "context"]),
  ("embed_moe", ["fsdp", "context"]),
  ("activation_batch", ["data", "fsdp", "fsdp_transpose", "expert"]),
)
AXES = ("data", "fsdp", "fsdp_transpose", "context", "expert", "tensor", "tensor_sequence", "autoregressive")


def abstract_mesh(**sizes: int) -> Any:
  return jax.sharding.AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)


def test_the_rules_of_maxtext_place_tokens_experts_widths_and_inputs():
  mesh = abstract_mesh(data=2, fsdp=2, fsdp_transpose=2, expert=4, tensor=2)
  placed = expert_placement(mesh, RULES)
  assert placed == Placement(
    mesh,
    tokens=("data", "fsdp", "fsdp_transpose", "expert"),
    experts=("expert",),
    widths=("fsdp_transpose", "tensor"),
    inputs=("fsdp",),
  )


def test_axes_of_one_device_cut_nothing_and_a_single_device_has_no_placement():
  mesh = abstract_mesh(expert=8)
  assert expert_placement(mesh, RULES) == Placement(mesh, ("expert",), ("expert",), (), ())
  assert expert_placement(abstract_mesh(), RULES) is None


def test_what_the_mesh_does_not_divide_is_refused_and_named(k3_config, float32_compute):
  placement: Any = expert_placement(abstract_mesh(data=4, expert=2), RULES)
  how = {"config": k3_config, "compute": float32_compute}
  with pytest.raises(InputError, match=r"found 12 tokens among 8 devices \(data, expert\); 7 experts among 2 devices"):
    sharded_experts(*make_case(12), placement, **how)


@pytest.mark.parametrize(
  "meshes",
  [
    [{"fsdp": 2, "expert": 2, "tensor": 2}],
    pytest.param(
      [
        {"data": 2, "expert": 4},
        {"expert": 8},
        {"expert": 4, "tensor": 2},
        {"fsdp": 2, "fsdp_transpose": 4},
        {"data": 8},
        {"fsdp": 8},
        {"tensor": 8},
        {"context": 2, "expert": 4},  # an axis that cuts the inputs and no tokens
      ],
      marks=pytest.mark.slow,
    ),
  ],
  ids=["fsdp-expert-tensor", "others"],
)
def test_eight_devices_answer_as_one_and_each_ends_with_the_gradient_of_its_share(meshes, tmp_path):
  request, answer = tmp_path / "request.json", tmp_path / "answer.json"
  request.write_text(json.dumps({"meshes": meshes, "rules": RULES, "axes": AXES}))
  environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
  command = [sys.executable, str(ON_MESH), str(request), str(answer)]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
  assert done.returncode == 0, done.stderr[-4000:]
  for mesh, found in zip(meshes, json.loads(answer.read_text()), strict=True):
    assert max(found["errors"].values()) <= TOLERANCE, mesh
    inputs = mesh.get("fsdp", 1) * mesh.get("context", 1)
    share = mesh.get("expert", 1) * mesh.get("tensor", 1) * mesh.get("fsdp_transpose", 1) * inputs
    assert set(found["cut"].values()) == {share}, mesh
    assert found["bias_gradient_is_equal"], mesh
    tokens = mesh.get("data", 1) * mesh.get("fsdp", 1) * mesh.get("fsdp_transpose", 1) * mesh.get("expert", 1)
    assert found["gathers_scores"] == (tokens == 1), mesh
