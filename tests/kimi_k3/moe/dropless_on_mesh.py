"""Experts with a gradient on simulated devices: `dropless_on_mesh.py REQUEST.json ANSWER.json`.

A request is {"meshes": [sizes by axis], "rules", "axes"}. Its answer has for each mesh the largest differences from one
device, relative to the largest value, the number of parts into which the gradient of each matrix is cut, whether the
gradient of the selection bias is that of one device to the bit, and whether a device holds the scores of all tokens.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_k3.config import ComputeConfig
from kimi_k3.moe.dropless import Matrices, dropless_experts, sharded_experts
from kimi_k3.moe.router import route, with_load_gradient
from kimi_k3.sharding import expert_placement

ROWS, EXPERTS, LATENT, WIDTH, CHOICES = 128, 16, 8, 24, 3  # no two the same: shapes are looked for


class Activation:
  """Of the config, what the experts read."""

  hidden_act, situ_beta, situ_linear_beta, num_experts = "situ", 4.0, 25.0, EXPERTS


HOW: dict[str, Any] = {
  "config": Activation(),
  "compute": ComputeConfig(
    dtype="float32",
    weight_dtype="float32",
    precision="highest",
    kda_implementation="portable",
    expert_implementation="dropless",
  ),
}


def run(experts, placement, x, scores, bias, matrices, valid):
  """Outputs, and gradients of a sum in which each output counts differently."""

  def loss(x, scores, bias, matrices):
    ids, weights = route(scores, bias, num_selected=CHOICES, renormalize=True, scaling=2.0, placement=placement)
    weights = with_load_gradient(weights, bias, ids, valid)
    y = experts(x, jnp.where(valid[:, None], ids, EXPERTS), weights, matrices)
    return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)), y

  gradients, y = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(x, scores, bias, matrices)
  return dict(zip(("y", "x", "scores", "bias", "matrices"), (y, *gradients), strict=True))


def main() -> None:
  request = json.loads(Path(sys.argv[1]).read_text())
  rng = np.random.default_rng(0)
  shapes = ((EXPERTS, LATENT, WIDTH), (EXPERTS, LATENT, WIDTH), (EXPERTS, WIDTH, LATENT))
  matrices = Matrices(*(np.float32(rng.standard_normal(s) * s[1] ** -0.5) for s in shapes))
  x, scores = np.float32(rng.standard_normal((ROWS, LATENT))), np.float32(rng.random((ROWS, EXPERTS)))
  bias, valid = np.float32(rng.random(EXPERTS) * 0.3), rng.random(ROWS) < 0.9
  arrays = (x, scores, bias, matrices, valid)
  one = jax.jit(functools.partial(run, functools.partial(dropless_experts, **HOW), None))(*arrays)
  answers = []
  for sizes in request["meshes"]:
    shape = tuple(sizes.get(axis, 1) for axis in request["axes"])
    mesh = jax.make_mesh(shape, tuple(request["axes"]), axis_types=(AxisType.Auto,) * len(shape))
    placed = expert_placement(mesh, request["rules"])
    assert placed is not None
    rows, into = P(placed.tokens), P(placed.experts, placed.inputs, placed.widths)
    specs = (rows, rows, P(), Matrices(into, into, P(placed.experts, placed.widths, placed.inputs)), rows)
    sharded = jax.tree.map(lambda a, spec, mesh=mesh: jax.device_put(a, NamedSharding(mesh, spec)), arrays, specs)
    with jax.set_mesh(mesh):
      experts = functools.partial(sharded_experts, placement=placed, **HOW)
      compiled = jax.jit(functools.partial(run, experts, placed)).lower(*sharded).compile()
      found = compiled(*sharded)
    errors = {
      jax.tree_util.keystr(path): float(np.abs(a - b).max() / np.abs(b).max())
      for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(jax.tree.map(np.asarray, found)),
        jax.tree.leaves(jax.tree.map(np.asarray, one)),
        strict=True,
      )
    }
    cut = {
      name: leaf.size // math.prod(leaf.sharding.shard_shape(leaf.shape))
      for name, leaf in found["matrices"]._asdict().items()
    }
    same = np.array_equal(found["bias"], one["bias"]) and bool(np.any(one["bias"]))
    gathers_scores = f"f32[{ROWS},{EXPERTS}]" in compiled.as_text()
    answers.append({"errors": errors, "cut": cut, "bias_gradient_is_equal": same, "gathers_scores": gathers_scores})
  Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
  main()
