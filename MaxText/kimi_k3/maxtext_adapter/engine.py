"""MaxText's engine and forward pass around our model: what the verbs drive."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen import logical_axis_rules
from jaxtyping import Array, Float, Int

from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter.checkpoint import load_params
from kimi_k3.maxtext_adapter.quiet import quiet
from kimi_k3.maxtext_adapter.register import register_engine


class Engine:
  """Prefill, insert and generate on MaxEngine, with sampling left to the caller.

  One decode state is held here; a row of it is a slot.
  """

  def __init__(self, config: Any):
    register_engine()
    from kimi_k3.maxtext_adapter.max_engine import KimiMaxEngine

    self.config = config
    _make_mesh(config)  # MaxEngine makes the same one, and fails without a word for the user
    if config.per_device_batch_size * jax.device_count() < 1:
      raise InputError(
        f"per_device_batch_size is {config.per_device_batch_size}: no row fits; expected 1 or more over all devices"
      )
    with quiet():
      self._engine = KimiMaxEngine(config)
      self._rng = jax.random.PRNGKey(0)  # MaxEngine wants one; its own samples are not used
      self._params = self._engine.load_params(rng=self._rng)
      self._state = self._engine.init_decode_state()

  @property
  def num_slots(self) -> int:
    """Rows that decode at the same time."""
    return self._engine.max_concurrent_decodes

  def prefill(self, slot: int, tokens: Int[np.ndarray, " T"], true_length: int) -> Float[Array, " X"]:
    """Runs a prompt into a slot and returns the logits of its next token.

    Args:
      slot: Where its caches go; whatever was there is gone.
      tokens: The prompt, padded on the right to a bucket length.
      true_length: Tokens that are no pads.
    """
    if not 0 <= slot < self.num_slots:
      raise ValueError(f"slot {slot}: there are {self.num_slots}")  # it would be clamped onto another row's slot
    if not 0 < true_length <= tokens.shape[0]:
      raise ValueError(f"true_length {true_length} of {tokens.shape[0]} tokens")
    prefix, _ = self._engine.prefill(
      params=self._params, padded_tokens=jnp.asarray(tokens), true_length=true_length, rng=self._rng
    )
    logits = prefix["logits"][0, 0]
    with warnings.catch_warnings():
      # MaxEngine offers a prompt's caches for reuse as the slots' caches, whose shapes differ.
      warnings.filterwarnings("ignore", "Some donated buffers were not usable")
      self._state = self._engine.insert(prefix, self._state, slot=slot)
    return logits

  def step(self, tokens: Int[np.ndarray, " B"]) -> Float[Array, "B X"]:
    """Feeds one token a slot and returns the logits of the next ones. Free slots are fed too and mean nothing."""
    fed = jax.device_put(jnp.asarray(tokens, jnp.int32)[:, None], self._state["tokens"].sharding)
    self._state, _ = self._engine.generate(self._params, self._state | {"tokens": fed}, rng=self._rng)
    return self._state["logits"][:, 0]

  @property
  def cache(self) -> dict[str, Any]:
    """The caches of all slots, by layer, under the names of the parameter tree."""
    return self._state["cache"]["decoder"]


Forward = Callable[[np.ndarray, int], tuple[Array, Array | None]]


def make_forward(config: Any) -> Forward:
  """Returns (padded tokens [T], true length) -> (logits [T, X], chosen experts [MoE layers, T, S]), without caches.

  Raises:
    InputError: if the checkpoint does not fit the config.
  """
  from maxtext.common.common_types import MODEL_MODE_TRAIN

  mesh, abstract = abstract_model(config, MODEL_MODE_TRAIN)
  graph, params, rest = nnx.split(abstract, nnx.Param, ...)
  params, rest = load_params(checkpoint_path(config), params), concrete_rest(rest)

  @jax.jit
  def forward(params, tokens, true_length):
    model: Any = nnx.merge(graph, params, rest, copy=True)
    positions = jnp.arange(tokens.shape[0])
    logits, _, chosen = model.decoder.trace(
      model.token_embedder,
      tokens[None],
      positions[None],
      (positions < true_length).astype(jnp.int32)[None],
      deterministic=True,
      model_mode=MODEL_MODE_TRAIN,
    )
    return logits[0].astype(jnp.float32), None if chosen is None else chosen[:, 0]

  def run(tokens: np.ndarray, true_length: int) -> tuple[Array, Array | None]:
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
      return forward(params, jnp.asarray(tokens), true_length)

  return run


def abstract_model(config: Any, model_mode: str) -> tuple[jax.sharding.Mesh, nnx.Module]:
  """Returns the mesh, and the model with shapes and shardings in place of arrays: costs nothing at any size."""
  from maxtext.utils import model_creation_utils

  mesh = _make_mesh(config)
  with quiet():
    _, abstract = model_creation_utils.create_nnx_abstract_model(config, mesh, model_mode=model_mode)
  return mesh, abstract


def _make_mesh(config: Any) -> jax.sharding.Mesh:
  """Returns the mesh. Raises InputError if the devices cannot be shared out so: MaxText asserts it."""
  from maxtext.utils import maxtext_utils

  try:
    with quiet():
      return maxtext_utils.get_mesh_from_config(config)
  except (AssertionError, ValueError) as error:
    raise InputError(
      f"no mesh of {jax.device_count()} device(s) can be made: {error}; the ici and dcn parallelism settings must "
      "multiply to the number of devices, and one of them may be -1: what is left"
    ) from error


def concrete_rest(rest: nnx.State) -> nnx.State:
  """Returns the variables that are neither parameters nor caches (random streams nobody draws from) as arrays."""

  def concrete(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype)

  return jax.tree.map(concrete, rest)


def checkpoint_path(config: Any) -> str:
  """Returns the checkpoint's path. Raises InputError if there is none: random weights are never decoded."""
  path = str(config.load_parameters_path)
  if not path:
    raise InputError("load_parameters_path is empty: give the OUT/0/items of a converted checkpoint")
  return path if "://" in path else str(pathlib.Path(path).absolute())  # Orbax takes no relative path
