"""FLOPs of a training step against the published number of active parameters, and against the traced model itself."""

from __future__ import annotations

import collections
import functools
import math
from typing import Any

import pytest

from kimi_k3.training.flops import ATTENTION_KINDS, LEARNABLE_KINDS, training_flops

TOKENS, ROWS = 64, 2
# Counted apart from the rest of a trace: an implementation's own arithmetic is not the model's.
KDA, EXPERTS = "kda", "experts"


@pytest.fixture(scope="module")
def read():
  """Returns a function: a model's name and settings to MaxText's config."""
  from kimi_k3.maxtext_adapter.settings import read_config
  from kimi_k3.resources import configs_dir

  def read(name: str, *settings: str) -> Any:
    return read_config(str(configs_dir() / "decode.yml"), [f"model_name={name}", *settings])

  return read


@pytest.fixture(scope="module")
def architecture_of(read):
  """Returns a function: a model's name to its architecture."""
  from kimi_k3.maxtext_adapter.config import architecture

  return functools.cache(lambda name: architecture(read(name)))


@pytest.mark.parametrize(("name", "active"), [("kimi-k3", 104.19e9), ("kimi-linear-48b-a3b", 3.1068e9)])
def test_a_token_takes_six_flops_for_each_active_parameter(architecture_of, name, active):
  flops = training_flops(architecture_of(name), 4096, 1)
  # What is no matrix and so not counted (norms, A_log, biases) is less than a thousandth.
  assert flops.learnable == pytest.approx(6 * 4096 * active, rel=1e-3)
  assert flops.total == flops.learnable + flops.attention


def test_every_kind_is_either_learnable_or_attention(architecture_of):
  kinds = set(training_flops(architecture_of("kimi-k3"), 8, 1).forward)
  assert kinds == set(LEARNABLE_KINDS) | set(ATTENTION_KINDS)
  assert not set(LEARNABLE_KINDS) & set(ATTENTION_KINDS)


def test_only_mla_attention_grows_with_the_length_of_a_row(architecture_of):
  config = architecture_of("kimi-k3")
  short, long = training_flops(config, 1024, 4), training_flops(config, 4096, 1)
  grown = {kind for kind in short.forward if short.forward[kind] != long.forward[kind]}
  assert grown == {"mla_attention"}
  assert long.forward["mla_attention"] == 4 * short.forward["mla_attention"]


def test_mla_attention_is_half_of_the_square(architecture_of):
  config = architecture_of("kimi-k3")
  flops = training_flops(config, 4096, 1).forward["mla_attention"]
  assert flops == 24 * 96 * (2 * 192 + 2 * 128) * 4096**2 / 2


def test_kda_is_three_products_with_a_state_of_each_head(architecture_of):
  config = architecture_of("kimi-k3")
  assert training_flops(config, 100, 1).forward["kda_recurrence"] == 100 * 69 * 96 * 3 * 2 * 128 * 128


def test_attn_res_mixes_as_many_candidates_as_there_are_snapshots_and_the_prefix(architecture_of):
  config = architecture_of("kimi-k3")
  # Layers 0, 12, ... 84 take a snapshot behind their attention's site, of which that of layer 0 mixes nothing.
  sites = [sum(s < i for s in range(0, 93, 12)) for i in range(93)]
  sites += [sum(s <= i for s in range(0, 93, 12)) for i in range(93)] + [8]
  candidates = sum(count + 1 for count in sites if count)
  flops = training_flops(config, 1, 1).forward
  assert flops["attn_res_mix"] == flops["attn_res_scores"] == 2 * 7168 * candidates


def test_rows_need_not_be_whole(architecture_of):
  config = architecture_of("kimi-k3")
  assert training_flops(config, 512, 0.5).total == training_flops(config, 512, 2).total / 4


@pytest.mark.parametrize(("name", "scan"), [("kimi-k3", True), ("kimi-k3-tiny", False), ("kimi-linear-48b-a3b", True)])
def test_the_formula_is_the_products_of_the_traced_model(read, name, scan):
  """Every product of the real model, folded and not. KDA and the experts are one operation each in the trace."""
  settings = (f"scan_layers={str(scan).lower()}", "packed_modules=[]", "override_model_config=true")
  found, experts, config = traced(read(name, *settings))
  expected = collections.Counter({k: int(v) for k, v in training_flops(config, TOKENS, ROWS).forward.items()})
  assert experts == expected["routed_experts"]
  products = sum(expected[kind] for kind in LEARNABLE_KINDS) - expected["routed_experts"]
  # These are sums of elementwise products in the trace.
  products -= expected["short_conv"] + expected["attn_res_scores"]
  # Attention computes the whole square, of which half is masked.
  assert found == products + 2 * expected["mla_attention"]


def traced(config: Any) -> tuple[int, int, Any]:
  """FLOPs of all products of the forward pass but those of KDA and the experts; the experts'; the architecture."""
  import jax
  import jax.numpy as jnp
  from flax import nnx
  from flax.linen import logical_axis_rules
  from maxtext.common.common_types import MODEL_MODE_TRAIN

  from kimi_k3.kda import layer as kda_layer
  from kimi_k3.maxtext_adapter.config import architecture
  from kimi_k3.maxtext_adapter.engine import abstract_model
  from kimi_k3.moe.experts import Experts

  def experts(self, x, ids):
    """One product for each choice of each of the three matrices, in place of whatever walks over them."""
    rows = jnp.repeat(x, ids.shape[1], axis=0)
    hidden = rows @ self.w1[...][0] + rows @ self.w3[...][0]
    return (hidden @ self.w2[...][0]).reshape(*ids.shape, -1).sum(axis=1)

  def named(name, function, **options):
    @functools.wraps(function)
    def call(*args, **kwargs):
      inner: Any = functools.partial(function, **kwargs)
      inner.__name__ = name  # which the trace shows
      return jax.jit(inner, **options)(*args)

    call.__name__ = name
    return call

  mesh, abstract = abstract_model(config, MODEL_MODE_TRAIN)
  graph, state = nnx.split(abstract)

  def forward(state, tokens):
    model: Any = nnx.merge(graph, state)
    positions = jnp.broadcast_to(jnp.arange(TOKENS), tokens.shape)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(kda_layer, "run_kda", named(KDA, kda_layer.run_kda))
      patch.setattr(Experts, "__call__", _one_operation(experts))
      return model.decoder.trace(
        model.token_embedder, tokens, positions, jnp.ones_like(tokens), deterministic=True, model_mode=MODEL_MODE_TRAIN
      )[0]

  with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
    jaxpr = jax.make_jaxpr(forward)(state, jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32))
  counts = collections.Counter()
  count_products(jaxpr.jaxpr, 1, "", counts)
  assert counts[KDA], "KDA was not found in the trace"
  return counts[""], counts[EXPERTS], architecture(config)


def _one_operation(function):
  """The experts, recognisable in a trace by their name."""
  import jax

  def experts(self, x, ids, weights):  # noqa: ARG001 (weighting is no product)
    def inner(x, ids):
      return function(self, x, ids)

    inner.__name__ = EXPERTS
    return jax.jit(inner)(x, ids)

  return experts


def count_products(jaxpr: Any, times: int, inside: str, counts: collections.Counter) -> None:
  """Adds 2 m n k of every dot_general, by the named operation it is in; loops count as often as they turn."""
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    if name == "dot_general":
      (contract, _), (batch, _) = equation.params["dimension_numbers"]
      if not contract:  # MaxText's norms scale by an einsum that sums nothing
        continue
      left, right = (v.aval.shape for v in equation.invars)
      shared = math.prod(left[i] for i in (*contract, *batch))
      counts[inside] += times * 2 * math.prod(left) * math.prod(right) // shared
      continue
    assert name not in ("conv_general_dilated", "ragged_dot", "ragged_dot_general"), f"{name} is not counted"
    assert name not in ("while", "cond") or inside, f"{name} outside of KDA and the experts is not counted"
    turns = equation.params["length"] if name == "scan" else 1
    label = equation.params.get("name")
    within = label if not inside and label in (KDA, EXPERTS) else inside
    for value in equation.params.values():
      for inner in value if isinstance(value, tuple | list) else (value,):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          count_products(inner, times * turns, within, counts)
