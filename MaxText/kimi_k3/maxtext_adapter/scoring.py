"""Scoring batches of windows: the log-likelihood of given tokens. Logits stay on the devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen import logical_axis_rules
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kimi_k3.errors import InputError
from kimi_k3.evaluate.perplexity import Scorer, Scores
from kimi_k3.maxtext_adapter.checkpoint import load_params, storage_settings
from kimi_k3.maxtext_adapter.engine import abstract_model, checkpoint_path, concrete_rest, make_mesh, refuse_for_auto
from kimi_k3.sharding import mesh_axes

_BATCH = "activation_batch"  # MaxText's name of the axis of rows
_TOKENS_AT_A_TIME = 4096  # of all rows, where the user sets no number: K3's logits of so many are 2.5 GiB


def make_scorer(config: Any, placement: str | None = None) -> Scorer:
  """Returns what scores windows on the config's mesh, one program for each shape of a batch.

  Args:
    config: MaxText's HyperParameters.
    placement: See make_engine.

  Raises:
    InputError: if the checkpoint or the mesh does not fit the config.
  """
  return _manual(config, placement) if config.partitioning == "manual" else _auto(config, placement)


def rows_at_a_time(config: Any, windows: int, tokens: int, *, explicit: bool) -> int:
  """Returns how many windows are scored at once.

  Args:
    config: MaxText's HyperParameters.
    windows: There are.
    tokens: Of a window.
    explicit: Whether the user has set per_device_batch_size, which then counts; else as many as make 4096 tokens.

  Raises:
    InputError: if the mesh cuts the rows and does not divide an explicit number.
  """
  parts = 1
  if config.partitioning == "auto":
    sizes = make_mesh(config).shape
    parts = math.prod(sizes[axis] for axis in mesh_axes(config.logical_axis_rules, _BATCH))
  if explicit:
    rows = config.per_device_batch_size * jax.device_count()
    if rows < 1 or rows % parts:
      raise InputError(
        f"per_device_batch_size is {config.per_device_batch_size}: {rows:g} windows at once, which the mesh cuts into "
        f"{parts}; expected a multiple of that"
      )
    return int(rows)
  wanted = max(1, min(windows, _TOKENS_AT_A_TIME // tokens))
  return -(-wanted // parts) * parts


def next_token_scores(
  logits: Float[Array, "B T X"], targets: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Bool[Array, " B"]]:
  """Returns what Scores holds.

  Float32 throughout. The vocabulary may be cut: nothing is gathered or sorted, only summed and compared.
  """
  logits = logits.astype(jnp.float32)
  at = jnp.arange(logits.shape[-1])
  largest = logits.max(axis=-1)
  first = jnp.argmax(logits, axis=-1)
  second = jnp.where(at == first[..., None], -jnp.inf, logits).max(axis=-1)
  below = logits - largest[..., None]
  of_target = jnp.where(at == targets[..., None], below, 0).sum(axis=-1)
  nll = jnp.log(jnp.exp(below).sum(axis=-1)) - of_target
  real = jnp.arange(logits.shape[1]) < lengths[:, None]
  finite = (jnp.isfinite(logits).all(axis=-1) | ~real).all(axis=-1)
  return nll, largest - second, finite


def _auto(config: Any, placement: str | None) -> Scorer:
  from maxtext.common.common_types import MODEL_MODE_TRAIN

  refuse_for_auto(placement)
  mesh, abstract = abstract_model(config, MODEL_MODE_TRAIN)
  graph, params, rest = nnx.split(abstract, nnx.Param, ...)
  params, rest = load_params(checkpoint_path(config), params, storage_settings(config)), concrete_rest(rest)

  @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
  def run(params, inputs, targets, lengths):
    model: Any = nnx.merge(graph, params, rest, copy=True)
    positions = jnp.arange(inputs.shape[1])
    logits, _, _ = model.decoder.trace(
      model.token_embedder,
      inputs,
      jnp.broadcast_to(positions, inputs.shape),
      (positions < lengths[:, None]).astype(jnp.int32),
      deterministic=True,
      model_mode=MODEL_MODE_TRAIN,
      one_document=True,
    )
    return next_token_scores(logits, targets, lengths)

  def score(inputs, targets, lengths) -> Scores:
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
      return _to_host(run(params, inputs, targets, lengths))

  return score


def _manual(config: Any, placement: str | None) -> Scorer:
  from kimi_k3.maxtext_adapter.spmd_engine import build_model, cache_length, load, padded_length, placed
  from kimi_k3.spmd import programs

  model = build_model(config)
  params = load(model, config, placement)
  everywhere = NamedSharding(model.mesh, PartitionSpec())
  scores = jax.jit(next_token_scores, out_shardings=everywhere)

  @functools.cache
  def program(rows: int, tokens: int) -> tuple[programs.Program, Callable[[], dict[str, Array]]]:
    length = cache_length(model, tokens, cut="sequence")
    made = programs.prefill(
      model, rows=rows, tokens=tokens, length=length, cut=config.prefill_cut, history=False, all_logits=True
    )
    return made, programs.make_empty(made.arguments[1])

  def score(inputs, targets, lengths) -> Scores:
    rows, tokens = inputs.shape
    extra = padded_length(model, config.prefill_cut, tokens) - tokens
    to_run, empty = program(rows, tokens + extra)
    given = (np.pad(inputs, ((0, 0), (0, extra))), np.zeros(rows, np.int32), lengths)
    logits, _ = to_run.function(params, empty(), *placed(to_run, given))
    wanted = jax.make_array_from_callback
    padded = np.pad(targets, ((0, 0), (0, extra)))
    there = (wanted(value.shape, everywhere, lambda i, value=value: value[i]) for value in (padded, lengths))
    nll, margin, finite = _to_host(scores(logits, *there))
    return Scores(nll[:, :tokens], margin[:, :tokens], finite)

  return score


def _to_host(found: tuple[Array, ...]) -> Scores:
  return Scores(*map(np.asarray, found))
