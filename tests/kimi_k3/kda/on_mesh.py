"""KDA on the local heads of eight simulated devices, as a process: `on_mesh.py ANSWER.json IMPLEMENTATION...`.

The answer holds, by implementation, the largest difference to one device, over the largest value: outputs, states.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from kimi_k3.kda import step_kernel
from kimi_k3.kda.kernel import run_kda
from kimi_k3.kda.sharded import kda_placement, run_kda_sharded
from kimi_k3.kda.step_kernel import kda_step_stacked

BATCH, LENGTH, HEADS, WIDTH, LAYERS = 3, 70, 8, 16, 2
LENGTHS = (70, 33, 0)
P = jax.P


def chunk_case():
  rng = np.random.default_rng(0)
  shape = (BATCH, LENGTH, HEADS)
  q, k, v, a = rng.standard_normal((4, *shape, WIDTH))
  a_log, dt_bias = rng.uniform(0.0, 2.0, HEADS), rng.uniform(-6.5, -2.0, (HEADS, WIDTH))
  beta, state = rng.random(shape), rng.standard_normal((BATCH, HEADS, WIDTH, WIDTH))
  valid = np.arange(LENGTH) < np.array(LENGTHS)[:, None]
  case = (*(jnp.asarray(x, jnp.float32) for x in (q, k, v, a, a_log, dt_bias, beta, state)), jnp.asarray(valid))
  token = P(None, None, "x")
  return case, (token, token, token, token, P("x"), P("x"), token, P(None, "x"), P()), (token, P(None, "x"))


def step_case():
  rng = np.random.default_rng(0)
  q, k, v, g = rng.standard_normal((4, BATCH, HEADS, WIDTH))
  states = rng.standard_normal((LAYERS, BATCH, HEADS, WIDTH, WIDTH))
  case = (q, k, v, -np.abs(g), rng.random((BATCH, HEADS)), states)
  case = (*(jnp.asarray(x, jnp.float32) for x in case), jnp.int32(1), jnp.array([True, False, True]))
  head, stack = P(None, "x"), P(None, None, "x")
  return case, (head, head, head, head, head, stack, P(), P()), (head, stack)


def chunk(implementation):
  def run(*case):
    *case, valid = case
    return run_kda(*case, lower_bound=-5.0, valid=valid, resets=None, implementation=implementation)

  return run


def step(implementation):
  def run(*case):
    *case, active = case
    return kda_step_stacked(*case, active=active, implementation=implementation, interpret=True)

  return run


def trained(implementation: str) -> list[float]:
  """Differences of outputs and of all gradients, by `run_kda_sharded` over rows and heads."""
  *case, _ = chunk_case()[0]
  case = [jnp.concatenate([x, x[:1]]) if x.shape[0] == BATCH else x for x in case]  # 4 rows
  mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("fsdp", "expert", "tensor"))
  placement = kda_placement(mesh, [("activation_batch", ("fsdp", "expert")), ("q_heads", ("tensor",))])
  assert placement is not None and (placement.rows, placement.heads) == (("fsdp", "expert"), ("tensor",))
  how = {"lower_bound": -5.0, "valid": None, "resets": None, "implementation": implementation}

  def loss(case, sharded):
    run = functools.partial(run_kda_sharded, placement=placement) if sharded else run_kda
    o, state = run(*case, **how)
    return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state)), o

  results = [jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)(case, sharded) for sharded in (True, False)]
  pairs = zip(*map(jax.tree.leaves, results), strict=True)
  return [float(np.abs(found - one).max() / np.abs(one).max()) for found, one in pairs]


def differences(name: str) -> list[float]:
  kind, implementation = name.split(":")
  if kind == "trained":
    return trained(implementation)
  case, in_specs, out_specs = chunk_case() if kind == "chunk" else step_case()
  run = (chunk if kind == "chunk" else step)(implementation)
  mesh = jax.sharding.Mesh(jax.devices(), ("x",))
  sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))
  with mock.patch.object(step_kernel, "_ITEM_HEADS", 1):
    results = zip(sharded(*case), jax.jit(run)(*case), strict=True)
    return [float(np.abs(found - one).max() / np.abs(one).max()) for found, one in results]


if __name__ == "__main__":
  Path(sys.argv[1]).write_text(json.dumps({name: differences(name) for name in sys.argv[2:]}))
