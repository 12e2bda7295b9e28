"""Steps of MaxText's trainer on a toy: the loss falls, and the selection bias follows its rule and no optimizer."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from flax.linen import logical_axis_rules

pytestmark = pytest.mark.slow

RATE = 0.01
STEPS = 20
SETTINGS = (
  *("opt_type=adamw", "learning_rate=1e-2", "warmup_steps_fraction=0", f"steps={STEPS}", "adam_weight_decay=0.5"),
  f"routed_bias_update_rate={RATE}",
)
BIAS = "decoder.layers_1.mlp.router.bias"


def trained(toys: Any, toy: Any, config: Any, batch: Any) -> tuple[list[dict[str, float]], list[Any], Any]:
  """Metrics of each step on one batch, the parameters before each and after the last, and the optimizer."""
  from maxtext.common.train_state_nnx import TrainStateNNX
  from maxtext.trainers.pre_train import train
  from maxtext.utils import train_utils

  from kimi_k3.maxtext_adapter.engine import abstract_model, concrete_rest

  mesh, abstract = abstract_model(config, "train")
  with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
    _, optimizer = train_utils.create_training_optimizer(config, abstract, mesh)
    graph, params, rest = nnx.split(abstract, nnx.Param, ...)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    model = nnx.merge(graph, toys.load(params, toy.leaves(scan=False)), concrete_rest(rest))
    graph, state = nnx.split(TrainStateNNX(model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)))

    @jax.jit
    def step(state, data):
      return train.train_step(graph, config, None, shardings, state, dict(data))

    metrics, held = [], []
    for _ in range(STEPS):
      held.append(toys.flat(nnx.state(nnx.merge(graph, state).model, nnx.Param)))
      state, found = step(state, batch)
      metrics.append({name: float(value) for name, value in found["scalar"].items()})
    after = nnx.merge(graph, state)
    return metrics, [*held, toys.flat(nnx.state(after.model, nnx.Param))], after.optimizer


@pytest.mark.parametrize("accumulated", [1, 4])
def test_steps_lower_the_loss_and_move_the_bias_by_its_rule_alone(toys, small_k3, documents, tmp_path, accumulated):
  settings = (*SETTINGS, f"gradient_accumulation_steps={accumulated}")
  config = small_k3.config(tmp_path, *settings, scan=False, length=112, rows=8 // accumulated)
  batch = toys.pack([documents[:3], documents[3:], [documents[1]], [4, documents[3]]], (8, 112))
  metrics, held, optimizer = trained(toys, small_k3, config, batch)
  losses = [step["learning/lm_loss"] for step in metrics]
  assert all(np.isfinite(value) for step in metrics for value in step.values())
  assert losses[-1] < 0.5 * losses[0], losses

  # The loads of the first step, by the reference.
  tokens = [*documents, documents[1], documents[3]]
  ids = toys.reference_loss(small_k3, tokens, {}).ids[0]
  load = np.bincount(ids.ravel(), minlength=8)
  assert load.sum() == 2 * sum(len(doc) - 1 for doc in tokens)
  sign = np.sign(load.mean() - load)
  np.testing.assert_allclose(held[1][BIAS] - held[0][BIAS], RATE * (sign - sign.mean()), rtol=0, atol=1e-6)
  for before, after in itertools.pairwise(held):  # every step: whole steps of the rate, whose sum is 0
    moved = (after[BIAS] - before[BIAS]) / RATE
    assert abs(moved.sum()) < 1e-3
    assert np.abs(np.diff(np.sort(moved)) - np.round(np.diff(np.sort(moved)))).max() < 1e-3

  kept = [str(path) for path, leaf in nnx.to_flat_state(nnx.state(optimizer)) if jax.tree.leaves(leaf)]
  moments = [path for path in kept if "'mu'" in path or "'nu'" in path]
  assert len(moments) == 2 * (len(held[0]) - 1)
  assert not [path for path in moments if "'bias'" in path]
  assert all(np.any(held[0][name] != held[-1][name]) for name in held[0] if "layers_0.attention_res" not in name)
