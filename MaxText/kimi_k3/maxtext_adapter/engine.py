"""MaxText's engine and forward pass around our model: what the verbs drive."""

from __future__ import annotations

import math
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen import logical_axis_rules
from jaxtyping import Array, Float

from kimi_k3.errors import InputError
from kimi_k3.generate.device_loop import NOT_FINITE, Decoded, Plan, Rows, decoded
from kimi_k3.maxtext_adapter.checkpoint import load_params, storage_settings
from kimi_k3.maxtext_adapter.quiet import quiet
from kimi_k3.maxtext_adapter.register import register_engine
from kimi_k3.sharding import CACHE_BATCH, check_known, mesh_axes


class Prefilled:
  """A prompt that has been run and waits for a slot.

  Attributes:
    logits: Of its next token [X], float32.
  """

  def __init__(self, prefix: dict[str, Any]):
    self.logits: Float[Array, " X"] = prefix["logits"][0, 0]
    self._prefix: dict[str, Any] | None = prefix

  def take(self) -> dict[str, Any]:
    """Returns what MaxEngine inserts, once: inserting uses it up."""
    if self._prefix is None:
      raise ValueError("this prompt has been inserted before: name all its slots in one call, or prefill it again")
    prefix, self._prefix = self._prefix, None
    return prefix


def make_engine(config: Any, placement: str | None = None) -> Any:
  """Returns the engine of the config's partitioning: MaxText's, or that of our own programs. Both have one interface.

  Args:
    config: MaxText's HyperParameters.
    placement: How far the loaded weights are compared with the checkpoint, see SpmdEngine.

  Raises:
    InputError: if the checkpoint, the mesh or the number of rows does not fit.
  """
  if config.partitioning == "manual":
    from kimi_k3.maxtext_adapter.spmd_engine import SpmdEngine

    return SpmdEngine(config, placement)
  refuse_for_auto(placement)
  return Engine(config)


def refuse_for_auto(placement: str | None) -> None:
  """Raises InputError for what only the manual partitioning can do."""
  if (count := jax.process_count()) > 1:
    raise InputError(f"partitioning is auto on {count} processes, expected one: set partitioning=manual")
  if placement not in (None, "none"):
    raise InputError(
      f"--check-placement {placement}: partitioning is auto, which it is not for: set partitioning=manual"
    )


def number_of_slots(config: Any, devices: int) -> int:
  """Returns the rows that decode at the same time. Raises InputError if that is no whole number, 1 or more."""
  slots = config.per_device_batch_size * devices
  if slots < 1 or slots != int(slots):
    raise InputError(
      f"per_device_batch_size is {config.per_device_batch_size}: {slots:g} rows over {devices} device(s); "
      "expected a whole number, 1 or more"
    )
  return int(slots)


def check_tokens(tokens: np.ndarray, whose: str, vocab_size: int) -> None:
  """Raises ValueError unless these are ids [T]: one outside would be clamped to the last row, a fraction cut off."""
  if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
    raise ValueError(f"tokens {whose}: expected integers in 1 axis, found {tokens.dtype}{list(tokens.shape)}")
  faulty = tokens[(tokens < 0) | (tokens >= vocab_size)]  # a prompt may have a million
  if faulty.size:
    raise ValueError(
      f"tokens {whose}: {', '.join(map(str, faulty[:5].tolist()))} outside the vocabulary of {vocab_size}"
    )


def check_rows(rows: Rows, used: Sequence[bool], vocab_size: int) -> np.ndarray:
  """Returns the steps that each slot's row may still take, 0 where there is none.

  Raises:
    ValueError: unless `rows` has one row a slot, with a token id and room for one more token where the slot is in use.
  """
  check_tokens(np.asarray(rows.tokens), f"for {len(used)} slots", vocab_size)
  if shapes := {np.shape(leaf) for leaf in jax.tree.leaves(rows)} - {(len(used),)}:
    raise ValueError(f"rows of shape {', '.join(map(str, sorted(shapes)))}: expected one number a slot, [{len(used)}]")
  steps = np.where(used, np.asarray(rows.limits) - np.asarray(rows.counts), 0)
  if done := np.flatnonzero(used & (steps < 1)).tolist():
    raise ValueError(f"slot {', '.join(map(str, done))}: the row has all the tokens it may get: release it first")
  return steps


class Engine:
  """Prefill, insert, step and release on MaxEngine, with sampling left to the caller.

  One decode state is held here; a row of it is a slot. A slot is empty until a prompt is inserted and after it is
  released: its caches are zero then, and no step writes to them.
  """

  def __init__(self, config: Any):
    register_engine()
    from kimi_k3.maxtext_adapter.max_engine import KimiMaxEngine

    self.config = config
    mesh = make_mesh(config)  # MaxEngine makes the same one, and fails without a word for the user
    number_of_slots(config, jax.device_count())
    with quiet():
      self._engine = KimiMaxEngine(config)
      check_axes((self._engine.model, self._engine.model_ar), config.logical_axis_rules)
      check_slots(self.num_slots, config.logical_axis_rules, mesh.shape)
      self._engine.check_caches()
      self._rng = jax.random.PRNGKey(0)  # MaxEngine wants one; its own samples are not used
      self._params = self._engine.load_params(rng=self._rng)
      self._state = self._engine.init_decode_state()
    self._generated: list[int | None] = [None] * self.num_slots  # steps since the insert; None: empty

  @property
  def num_slots(self) -> int:
    """Rows that decode at the same time."""
    return self._engine.max_concurrent_decodes

  @property
  def max_prompt(self) -> int:
    """Tokens of a prompt, at most."""
    return self.config.max_prefill_predict_length

  @property
  def max_steps(self) -> int:
    """Steps that a row can take after its prompt: its cache holds no more."""
    return self._engine.max_steps

  def prefill(self, tokens: np.ndarray, true_length: int) -> Prefilled:
    """Runs a prompt, which may wait for a slot while others are run or decode.

    Args:
      tokens: The prompt [T], whole numbers, padded on the right to a bucket length.
      true_length: Tokens that are no pads.

    Raises:
      ValueError: if `true_length` is not a length of `tokens`, they are longer than the prompt cache, or one is no
        token id.
    """
    check_tokens(tokens, "of a prompt", self.config.vocab_size)
    prefix, _ = self._engine.prefill(
      params=self._params, padded_tokens=jnp.asarray(tokens), true_length=true_length, rng=self._rng
    )
    return Prefilled(prefix)

  def rows_together(self, tokens: int) -> int:
    """Prompts of so many tokens that are run together: MaxEngine takes one."""
    del tokens
    return 1

  def prefill_together(self, prompts: Sequence[np.ndarray], true_lengths: Sequence[int]) -> list[Prefilled]:
    """Runs one prompt: `prefill`.

    Raises:
      ValueError: as `prefill` does, or if there are several.
    """
    if len(prompts) != 1:
      raise ValueError(f"{len(prompts)} prompts together, expected 1")
    return [self.prefill(prompts[0], true_lengths[0])]

  def insert(self, prompt: Prefilled, *slots: int) -> None:
    """Puts a prompt into an empty slot, or into several: rows that go on differently.

    Raises:
      ValueError: if a slot does not exist, is in use or is named twice, or the prompt was inserted before.
    """
    self._engine.check_slots(slots)
    if used := [slot for slot in slots if self._generated[slot] is not None]:
      raise ValueError(f"slot {', '.join(map(str, used))} is in use: release it first")
    prefix = prompt.take()
    with warnings.catch_warnings():
      # MaxEngine offers a prompt's caches for reuse as the slots' caches, whose shapes differ.
      warnings.filterwarnings("ignore", "Some donated buffers were not usable")
      if len(slots) == 1:
        self._state = self._engine.insert(prefix, self._state, slot=slots[0])
      else:
        self._state = self._engine.bulk_insert(prefix, self._state, slots)
    for slot in slots:
      self._generated[slot] = 0

  def step(self, tokens: np.ndarray) -> Float[Array, "B X"]:
    """Feeds one token [B] a slot and returns the logits of the next ones. Empty slots are left alone and mean nothing.

    Raises:
      ValueError: naming the rows whose cache is full, or if `tokens` is not one token id a slot.
    """
    check_tokens(tokens, f"for {self.num_slots} slots", self.config.vocab_size)
    if tokens.shape != (self.num_slots,):
      raise ValueError(f"{tokens.shape[0]} tokens for {self.num_slots} slots: expected one a slot")
    if full := [slot for slot, steps in enumerate(self._generated) if steps == self.max_steps]:
      raise ValueError(
        f"slot {', '.join(map(str, full))}: the cache holds {self.max_steps} generated tokens (max_target_length - "
        "max_prefill_predict_length) and is full"
      )
    fed = jax.device_put(jnp.asarray(tokens, jnp.int32)[:, None], self._state["tokens"].sharding)
    self._state, _ = self._engine.generate(self._params, self._state | {"tokens": fed}, rng=self._rng)
    self._generated = [None if steps is None else steps + 1 for steps in self._generated]
    return self._state["logits"][:, 0]

  def decode(self, rows: Rows, plan: Plan, *, buffer: int) -> Decoded:
    """Decodes all rows in slots on the device until the plan says to end.

    Args:
      rows: Of all slots.
      plan: When to end. None of it is compiled in.
      buffer: Steps that the program has room for: another number is another program.

    Raises:
      ValueError: naming the rows whose cache would be full before their limit, or if `rows` are not of all slots.
    """
    steps = check_rows(rows, [slot is not None for slot in self._generated], self.config.vocab_size)
    generated = np.array([slot or 0 for slot in self._generated])
    if full := np.flatnonzero(generated + steps > self.max_steps).tolist():
      raise ValueError(
        f"slot {', '.join(map(str, full))}: the cache holds {self.max_steps} generated tokens (max_target_length - "
        "max_prefill_predict_length), fewer than the row may still get"
      )
    self._state, packed = self._engine.decode(self._params, self._state, rows, plan, buffer)
    found = decoded(np.asarray(packed))
    # A row whose logits were not finite has been fed once more than it got tokens.
    fed = found.counts + (found.status == NOT_FINITE)
    self._generated = [None if g is None else g + int(fed[slot]) for slot, g in enumerate(self._generated)]
    return found

  def release(self, slot: int) -> None:
    """Empties a slot: its caches become zero.

    Raises:
      ValueError: if there is no such slot, or it is empty.
    """
    self._engine.check_slots([slot])
    if self._generated[slot] is None:
      raise ValueError(f"slot {slot} is empty")
    self._state = self._engine.release(self._state, slot)
    self._generated[slot] = None

  @property
  def cache(self) -> dict[str, Any]:
    """The caches of all slots, by layer, under the names of the parameter tree."""
    return self._state["cache"]["decoder"]

  @property
  def cache_axes(self) -> dict[str, Any]:
    """The logical axes of each leaf of `cache`."""
    axes: Any = self._engine.kv_cache_annotations_named
    return axes["decoder"]

  @property
  def params(self) -> nnx.State:
    """The parameters, each where its sharding puts it."""
    return self._params


Forward = Callable[[np.ndarray, int], tuple[Array, Array | None]]


def make_forward(config: Any, placement: str | None = None) -> Forward:
  """Returns (padded tokens [T], true length) -> (logits [T, X], chosen experts [MoE layers, T, S]), without caches.

  Args:
    config: MaxText's HyperParameters.
    placement: See make_engine.

  Raises:
    InputError: if the checkpoint does not fit the config.
  """
  if config.partitioning == "manual":
    from kimi_k3.maxtext_adapter.spmd_engine import make_spmd_forward

    return make_spmd_forward(config, placement)
  refuse_for_auto(placement)
  from maxtext.common.common_types import MODEL_MODE_TRAIN

  mesh, abstract = abstract_model(config, MODEL_MODE_TRAIN)
  graph, params, rest = nnx.split(abstract, nnx.Param, ...)
  params, rest = load_params(checkpoint_path(config), params, storage_settings(config)), concrete_rest(rest)

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
      one_document=True,
    )
    return logits[0].astype(jnp.float32), None if chosen is None else chosen[:, 0]

  def run(tokens: np.ndarray, true_length: int) -> tuple[Array, Array | None]:
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
      return forward(params, jnp.asarray(tokens), true_length)

  return run


def abstract_model(config: Any, model_mode: str) -> tuple[jax.sharding.Mesh, nnx.Module]:
  """Returns the mesh, and the model with shapes and shardings in place of arrays: costs nothing at any size."""
  from maxtext.utils import model_creation_utils

  mesh = make_mesh(config)
  with quiet():
    _, abstract = model_creation_utils.create_nnx_abstract_model(config, mesh, model_mode=model_mode)
  return mesh, abstract


def make_mesh(config: Any, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
  """Returns the mesh. Raises InputError if the devices cannot be shared out so: MaxText asserts it."""
  from maxtext.utils import maxtext_utils

  try:
    with quiet():
      return maxtext_utils.get_mesh_from_config(config, devices)
  except (AssertionError, ValueError) as error:
    raise InputError(
      f"no mesh of {len(devices or jax.devices())} device(s) can be made: {error}; the ici and dcn parallelism "
      "settings must multiply to the number of devices, and one of them may be -1: what is left"
    ) from error


def check_axes(models: tuple[nnx.Module, ...], rules: Any) -> None:
  """Raises InputError if a parameter or cache is laid out by a name that no rule knows: it would be replicated."""
  named = []
  for model in models:
    for path, leaf in nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.Cache))):
      axes = leaf.get_metadata().get("out_sharding") or ()
      named.append((".".join(map(str, path)), (axes,) if isinstance(axes, str) else tuple(axes)))
  check_known(named, rules)


def check_slots(slots: int, rules: Any, mesh_shape: Mapping[str, int]) -> None:
  """Raises InputError if the mesh axes that cut the caches by rows do not divide the slots."""
  axes = mesh_axes(rules, CACHE_BATCH)
  parts = math.prod(mesh_shape[axis] for axis in axes)
  if slots % parts:
    cut = ", ".join(f"{axis} {mesh_shape[axis]}" for axis in axes if mesh_shape[axis] > 1)
    raise InputError(
      f"{slots} slots (per_device_batch_size times devices) over {parts} parts of the mesh ({cut}): expected a "
      f"multiple of {parts}"
    )


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
