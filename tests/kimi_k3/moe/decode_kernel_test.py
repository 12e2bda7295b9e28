"""What the decode kernel visits, and that it compiles for TPUs at K3's sizes without a copy of the stack."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_k3.moe import decode_kernel
from kimi_k3.moe.decode_kernel import MAX_TOKENS, VISIT_ROWS, make_schedule
from kimi_k3.moe.implementations import ExpertStack, form_of, prepare, run_experts

EXPERTS, CHOICES, LAYER = 6, 3, 4


@functools.partial(jax.jit, static_argnums=2)
def scheduled(ids, weights, num_experts):
  return make_schedule(ids, weights, num_experts, jnp.int32(LAYER))


def schedule(ids, weights=None):
  """The schedule as plain numbers: list of (expert, its tokens, their weights), and its bound on visits."""
  ids = np.asarray(ids, np.int32)
  weights = np.ones(ids.shape, np.float32) if weights is None else weights
  s = jax.tree.map(np.asarray, scheduled(ids, weights, EXPERTS))
  assert s.sizes[1] == LAYER
  visits = []
  for i in range(s.sizes[0]):
    e, first = s.expert_V[i], s.first_V[i]
    place = slice(e * len(ids) + first, e * len(ids) + min(first + VISIT_ROWS, s.count_E[e]))
    visits.append((int(e), s.token_EN[place].tolist(), s.share_EN[place].tolist()))
  return visits, len(s.expert_V)


def test_experts_are_visited_in_order_each_with_its_tokens():
  visits, _ = schedule([[5, 2, EXPERTS], [2, 0, 5], [EXPERTS] * 3, [5, EXPERTS, 0]], np.arange(12.0).reshape(4, 3))
  assert visits == [(0, [1, 3], [4.0, 11.0]), (2, [0, 1], [1.0, 3.0]), (5, [0, 1, 3], [0.0, 5.0, 9.0])]


def test_nobody_is_visited_where_no_expert_was_hit():
  assert schedule(np.full((5, CHOICES), EXPERTS))[0] == []


@pytest.mark.parametrize("tokens", [1, VISIT_ROWS, VISIT_ROWS + 1, 65])
def test_an_expert_is_visited_once_for_eight_of_its_tokens(tokens):
  ids = np.full((tokens, CHOICES), EXPERTS)
  ids[:, 1] = 3
  visits, _ = schedule(ids)
  assert [e for e, _, _ in visits] == [3] * -(-tokens // VISIT_ROWS)
  assert [t for _, mine, _ in visits for t in mine] == list(range(tokens))


@pytest.mark.parametrize("tokens", [1, 7, 9, 64])
def test_no_choice_of_experts_has_more_visits_than_there_is_room_for(tokens):
  rng = np.random.default_rng(tokens)
  for _ in range(20):
    skew = rng.random(EXPERTS) ** 4
    ids = np.array([rng.choice(EXPERTS, CHOICES, replace=False, p=skew / skew.sum()) for _ in range(tokens)])
    visits, room = schedule(ids)
    assert len(visits) <= room
    pairs = sorted((t, e) for e, mine, _ in visits for t in mine)
    assert pairs == sorted((t, int(e)) for t in range(tokens) for e in ids[t])


def test_a_visit_walks_through_blocks_of_the_width_and_parts_of_inputs_and_outputs(
  k3_config, float32_compute, monkeypatch
):
  """As at K3's sizes, where a block is half of the width: 2 blocks, 2 parts of the inputs, 2 of the outputs."""
  layers, experts, latent, width, tokens = 2, 3, 288, 512, 9
  monkeypatch.setattr(decode_kernel, "_BLOCK", 256)
  monkeypatch.setattr(decode_kernel, "_COLUMNS", 256)
  assert decode_kernel.blocks_of(width) == 2
  rng = np.random.default_rng(0)
  stored = []
  for out, into in ((width, latent), (width, latent), (latent, width)):
    stored.append(jnp.asarray(rng.integers(0, 256, (layers, experts, out, into // 2), dtype=np.uint8)))
    stored.append(jnp.asarray(rng.integers(118, 124, (layers, experts, out, into // 32), dtype=np.uint8)))
  float4 = [leaf for i in range(0, len(stored), 2) for leaf in prepare(stored[i], stored[i + 1], "float4")]
  x = jnp.asarray(rng.standard_normal((tokens, latent)), jnp.float32)
  ids = jnp.asarray([[0, 2]] * tokens, jnp.int32)  # 9 tokens: two visits each
  weights = jnp.asarray(rng.random((tokens, 2)), jnp.float32)
  settings = {"config": k3_config, "compute": float32_compute}

  def run(implementation, leaves, **more):
    arguments = (x, ids, weights, ExpertStack(*leaves), jnp.int32(1))
    return jax.jit(lambda: run_experts(*arguments, **settings, implementation=implementation, **more))()

  expected = run("reference", stored)
  found = run("decode_kernel", float4, interpret=True)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())  # sums of float32 products


def compiled(
  config, compute, topology: str, implementation: str, rows: int, experts: int, width: int, layers: int = 22
):
  """The report of an implementation on the stack of one device, K3's other sizes."""
  from kimi_k3.capacity.topology import compile_for, tpu_mesh

  mesh, choices, latent = tpu_mesh(topology, {"x": 1}), 16, 3584
  whole = jax.NamedSharding(mesh, jax.P())
  form = form_of(implementation, mesh.devices.flat[0].device_kind)

  def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

  def leaf(into, out):
    codes = ((into, out), jnp.float4_e2m1fn) if form == "float4" else ((into // 2, out), jnp.uint8)
    return array((layers, experts, *codes[0]), codes[1]), array((layers, experts, into // 32, out), jnp.uint8)

  stack = ExpertStack(*leaf(latent, width), *leaf(latent, width), *leaf(width, latent))
  compute = dataclasses.replace(compute, dtype="bfloat16")

  def run(x, ids, weights, stack, layer):
    settings = {"config": config, "compute": compute, "implementation": implementation}
    return run_experts(x, ids, weights, stack, layer, **settings)

  arguments = (
    array((rows, latent), jnp.bfloat16),
    array((rows, choices), jnp.int32),
    array((rows, choices), jnp.float32),
    stack,
    array((), jnp.int32),
  )
  return compile_for(mesh, run, arguments)


@pytest.mark.aot
@pytest.mark.parametrize("rows", [8, 64, 256, MAX_TOKENS])
@pytest.mark.parametrize(("experts", "width"), [(28, 3072), (56, 3072), (112, 3072), (112, 768)])
def test_the_kernel_compiles_for_tpu7x_with_no_copy_of_the_stack(k3_config, float32_compute, rows, experts, width):
  layers = 1 if experts * width > 28 * 3072 else 22  # one device's HBM
  report = compiled(k3_config, float32_compute, "tpu7x:2x2x1", "decode_kernel", rows, experts, width, layers)
  assert report.memory.temp_bytes < 10 * 2**20  # rows and the schedule; one expert has 17.5 MiB


@pytest.mark.aot
@pytest.mark.parametrize("rows", [8, 256])
def test_the_kernel_compiles_for_v6e_where_the_codes_are_nibbles(k3_config, float32_compute, rows):
  report = compiled(k3_config, float32_compute, "v6e:2x2", "decode_kernel", rows, 28, 3072, layers=1)
  assert report.memory.temp_bytes < 8 * 2**20


@pytest.mark.aot
@pytest.mark.parametrize(("experts", "width"), [(28, 3072), (112, 768)])
def test_grouped_compiles_for_tpu7x_with_no_copy_of_a_layer(k3_config, float32_compute, experts, width):
  report = compiled(k3_config, float32_compute, "tpu7x:2x2x1", "grouped", 32768, experts, width)
  # One layer's scales in float32, 115 MiB; a chunk's rows, hidden values and outputs, 221 MiB. Its codes are 441 MiB.
  assert report.memory.temp_bytes < 400 * 2**20
