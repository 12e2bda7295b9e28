"""MaxEngine with our checkpoint loader, and with slots that are empty, clean and left alone until a prompt is inserted.

Upstream's loader makes the whole model from random numbers before it reads a byte; its slots are all fed in every step,
a slot number outside the range is clamped onto another row's slot, and logits that are not finite become token 0.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen import logical_axis_rules
from jaxtyping import Array
from maxtext.inference.maxengine import maxengine
from maxtext.utils import maxtext_utils, sharding

from kimi_k3.generate.device_loop import Plan, Rows, decode_loop
from kimi_k3.maxtext_adapter.checkpoint import check_cuts, load_params, storage_settings
from kimi_k3.maxtext_adapter.engine import checkpoint_path, concrete_rest

# The position of a slot that holds no row. Any negative one says so to the decoder; this one stays negative however
# often upstream's step adds 1 to it.
EMPTY = -(2**30)


class KimiMaxEngine(maxengine.MaxEngine):
  """The same engine and decode state; a row of it is a slot, and `next_pos` of an empty slot is negative.

  In a ResultTokens a row is valid unless its slot is empty, its logits are not finite or its cache has overflowed.
  """

  _decoding: Any = None  # `_decode`, jitted at its first call

  @property
  def max_steps(self) -> int:
    """Steps that a row can take after its prompt: its cache holds no more."""
    return self.config.max_target_length - self.config.max_prefill_predict_length

  def prefill(self, *, padded_tokens: Array, true_length: int, **arguments: Any) -> tuple[Any, Any]:
    """Runs one prompt: upstream's `prefill`.

    Raises:
      ValueError: if `true_length` is not a length of `padded_tokens`, or these are longer than the prompt cache.
      NotImplementedError: for an existing prefix, positions, images and whatever else would be ignored in silence.
    """
    self._check_prompt(padded_tokens, true_length)
    _refuse(arguments, known={"params", "rng", "sampler", "request_id", "slot", *_SAMPLING, "return_prompt_logp"})
    return _validated(*super().prefill(padded_tokens=padded_tokens, true_length=true_length, **arguments))

  def prefill_multisampling(self, *, padded_tokens: Array, true_length: int, **arguments: Any) -> tuple[Any, Any]:
    """Runs one prompt and draws several first tokens: upstream's, in the form that `bulk_insert` reads."""
    self._check_prompt(padded_tokens, true_length)
    if arguments.get("num_samples", 1) < 1:
      raise ValueError(f"num_samples is {arguments['num_samples']}, expected 1 or more")
    prefix, result = super().prefill_multisampling(padded_tokens=padded_tokens, true_length=true_length, **arguments)
    count = prefix["tokens"].shape[0]
    log_prob = jnp.zeros((count, 1), jnp.float32) if result.log_prob is None else result.log_prob
    return _validated(prefix | {"token_logp": log_prob}, result)

  def insert(self, prefix: Any, decode_state: Any, slot: int, request_id: Any = None) -> Any:
    """Returns the decode state with the prefix in `slot`, and nothing left of what was there.

    Raises:
      ValueError: if there is no such slot.
    """
    self.check_slots([slot])
    return super().insert(prefix, self.release(decode_state, slot), slot, request_id)

  def bulk_insert(self, prefix: Any, decode_state: Any, slots: Sequence[int]) -> Any:
    """Returns the decode state with one prompt in several slots, all with its first token or each with its own.

    Raises:
      ValueError: if a slot does not exist or is named twice, or the tokens are neither one nor as many as the slots.
    """
    self.check_slots(slots)
    slots = [int(slot) for slot in slots]
    count = prefix["tokens"].shape[0]
    if count not in (1, len(slots)):
      raise ValueError(f"{count} first tokens for {len(slots)} slots: expected one, or one a slot")
    drawn = {name: jnp.repeat(prefix[name], len(slots) // count, 0) for name in _PER_SAMPLE}  # upstream would clamp
    for slot in slots:
      decode_state = self.release(decode_state, slot)
    return super().bulk_insert(prefix | drawn, decode_state, slots)

  def generate(self, params: Any, decode_state: Any, **arguments: Any) -> tuple[Any, Any]:
    """Feeds every row its token. Empty slots stay as they are, bit for bit."""
    state, result = super().generate(params, decode_state, **arguments)
    positions, counts, valid = _after_step(
      state["next_pos"], state["generated_tokens"], state["logits"], self.max_steps
    )
    state |= {"next_pos": positions, "generated_tokens": counts}
    return state, _with_validity(result, valid)

  def decode(self, params: Any, decode_state: Any, rows: Rows, plan: Plan, buffer: int) -> tuple[Any, Array]:
    """Decodes all rows in slots until the plan says to end; returns the state and what `device_loop.decoded` reads.

    A row that ends is left alone from then on, as if its slot were empty. The state given is used up.
    """
    if self._decoding is None:
      # Placed by the very objects that placed the state before: the compiler's own names of the same places may be
      # others, and what takes the state next would be traced again.
      places = jax.tree.map(lambda leaf: leaf.sharding, decode_state), self.replicated_sharding
      self._decoding = jax.jit(self._decode, static_argnums=(4,), donate_argnums=(1,), out_shardings=places)
    return self._decoding(params, decode_state, rows, plan, buffer)

  def _decode(self, params: Any, decode_state: Any, rows: Rows, plan: Plan, buffer: int) -> tuple[Any, Array]:
    rng = jax.random.PRNGKey(0)  # upstream wants one, for draws that are not used

    def step(state, tokens, active):
      positions = jnp.where(active[:, None], state["next_pos"], EMPTY)
      fed = jnp.where(active, tokens, 0)[:, None].astype(state["tokens"].dtype)
      state, _ = self.generate(params, state | {"tokens": fed, "next_pos": positions}, rng=rng)
      return state["logits"][:, 0], self._placed(state)

    active = decode_state["next_pos"][:, 0] >= 0
    return decode_loop(step, decode_state, rows, active, plan, buffer=buffer)

  def init_decode_state(self, *arguments: Any, **keywords: Any) -> Any:
    """Returns the decode state with all slots empty."""
    return self._settle(super().init_decode_state(*arguments, **keywords))

  @functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(1,))
  def _settle(self, decode_state: Any) -> Any:
    """The first state, empty and placed as every later one is: a step would be traced again for another placement."""
    return self._placed(decode_state | {"next_pos": jnp.full_like(decode_state["next_pos"], EMPTY)})

  def _placed(self, decode_state: Any) -> Any:
    rows = {name: value for name, value in decode_state.items() if name != "cache"}
    cache = jax.lax.with_sharding_constraint(decode_state["cache"], self.kv_cache_shardings)
    return {"cache": cache} | jax.lax.with_sharding_constraint(rows, self.replicated_sharding)

  @functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(1,))
  def _release(self, decode_state: Any, slot: int | Array) -> Any:
    def wipe(cache, axes):
      if "cache_batch" not in axes:
        return cache  # the position that all rows share
      axis = axes.index("cache_batch")
      empty = jnp.zeros((*cache.shape[:axis], 1, *cache.shape[axis + 1 :]), cache.dtype)
      return jax.lax.dynamic_update_slice_in_dim(cache, empty, slot, axis)

    cache = jax.tree.map(wipe, decode_state["cache"], self.kv_cache_annotations_named)
    rows = {n: v.at[slot].set(EMPTY if n == "next_pos" else 0) for n, v in decode_state.items() if n != "cache"}
    return self._placed({"cache": cache} | rows)

  def release(self, decode_state: Any, slot: int) -> Any:
    """Returns the decode state with the slot empty and its caches zero. The state given is used up.

    Raises:
      ValueError: if there is no such slot.
    """
    self.check_slots([slot])
    return self._release(decode_state, slot)

  def prefill_concat(self, **arguments: Any) -> Any:
    """Refuses: prompts packed in one row would share the one recurrent state, and each slot get the last one's."""
    del arguments
    raise NotImplementedError("packed prefill (prefill_concat) is not supported: prefill the prompts one by one")

  def insert_partial(self, *arguments: Any, **keywords: Any) -> Any:
    """Refuses, as there are no packed prompts to insert."""
    del arguments, keywords
    raise NotImplementedError("packed prefill (insert_partial) is not supported: insert the prompts one by one")

  def _check_prompt(self, tokens: Array, true_length: int) -> None:
    if tokens.ndim != 1 or not _is_whole(true_length):
      raise ValueError(
        f"tokens {list(tokens.shape)}, true_length {true_length!r}: expected one axis and a whole number"
      )
    length = tokens.shape[0]
    if length > self.max_prefill_length:
      raise ValueError(f"a prompt of {length} tokens: max_prefill_predict_length is {self.max_prefill_length}")
    if not 0 < true_length <= length:
      raise ValueError(f"true_length {true_length} of {length} tokens")

  def check_slots(self, slots: Sequence[int]) -> None:
    """Raises ValueError: an index outside would be clamped or counted from the end, onto another row's slot."""
    if faulty := [slot for slot in slots if not _is_whole(slot)]:
      raise ValueError(f"slot {', '.join(map(repr, faulty))}: expected whole numbers")
    if faulty := [slot for slot in slots if not 0 <= slot < self.max_concurrent_decodes]:
      raise ValueError(f"slot {', '.join(map(str, faulty))}: there are {self.max_concurrent_decodes}")
    if len(set(slots)) < len(slots) or not slots:
      raise ValueError(f"slots {list(slots)}: expected each once, and at least one")

  def _load_params_nnx(self, params: Any, rng: Any) -> Any:
    """Returns the parameters and fills in what prefill, insert and generate look up."""
    del rng  # nothing is random here
    _, abstract, _, rest = nnx.split(self.model, nnx.Param, nnx.Cache, ...)
    with logical_axis_rules(self.config.logical_axis_rules):
      placed = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        abstract,
        sharding.nnx_construct_named_sharding(abstract, self._mesh),
      )
    if params is None:
      params = load_params(checkpoint_path(self.config), placed, storage_settings(self.config))
    else:
      params = jax.tree.map(lambda leaf, place: jax.device_put(leaf, place.sharding), params, placed)
    self._nnx_rest_state = concrete_rest(rest)
    self.abstract_params = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params
    )
    self._find_cache_shardings()
    return params

  def check_caches(self) -> None:
    """Raises InputError if the mesh would cut a slot's cache into unequal parts: before a checkpoint is read.

    Those of a prompt are not looked at: MaxEngine places them nowhere.
    """
    self._find_cache_shardings()
    shapes = nnx.to_pure_dict(nnx.split(self.model_ar, nnx.Cache, ...)[1])
    placed = jax.tree.map(
      lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, self.kv_cache_shardings
    )
    check_cuts({jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(placed)})

  def _find_cache_shardings(self) -> None:
    def named(annotations):
      return jax.tree.map(lambda spec: jax.sharding.NamedSharding(self._mesh, spec), annotations)

    self.prefill_kv_cache_annotations = maxtext_utils.get_prefill_kv_cache_annotations_nnx(
      self.model, self.config, self._mesh
    )
    self.kv_cache_annotations = maxtext_utils.get_kv_cache_annotations_nnx(self.model_ar, self.config, self._mesh)
    self.prefill_kv_cache_shardings = named(self.prefill_kv_cache_annotations)
    self.kv_cache_shardings = named(self.kv_cache_annotations)
    self.state_mesh_annotations = None


def _is_whole(number: Any) -> bool:
  return isinstance(number, int | np.integer) and not isinstance(number, bool)


_SAMPLING = ("algorithm", "topk", "nucleus_topp", "temperature")
_PER_SAMPLE = ("tokens", "generated_tokens", "token_logp")


def _refuse(arguments: dict[str, Any], known: set[str]) -> None:
  """An existing prefix, and inputs of other models, would be ignored or refused deep inside."""
  given = sorted(name for name, value in arguments.items() if name not in known and value is not None)
  if given:
    raise NotImplementedError(
      f"prefill with {', '.join(given)} is not supported: give the whole prompt as padded_tokens, of text"
    )


@jax.jit
def _after_step(next_pos: Array, generated: Array, logits: Array, room: Any) -> tuple[Array, Array, Array]:
  """Positions and counts, with those of empty slots where they were, and which rows have a token that counts.

  A row that has taken more steps than its cache has `room` for has lost its first ones: its tokens count no more.
  """
  active = next_pos >= 0
  valid = active & _finite(logits) & (generated <= room)
  return jnp.where(active, next_pos, EMPTY), jnp.where(active, generated, 0), valid


def _finite(logits: Array) -> Array:
  return jnp.isfinite(logits).all(axis=-1)


def _validated(prefix: Any, result: Any) -> tuple[Any, Any]:
  return prefix, _with_validity(result, jnp.broadcast_to(_finite(prefix["logits"]), prefix["tokens"].shape))


def _with_validity(result: Any, valid: Array) -> Any:
  """The result with its column of validity. It is frozen where JetStream is installed."""
  start, end = result.valid_idx
  changed = copy.copy(result)
  object.__setattr__(changed, "data", result.data.at[:, start:end].set(valid.astype(result.data.dtype)))
  return changed
