"""A chunk of prompt against itself and the cached MLA latents, on the devices of a jax.shard_map.

Keys and values are materialised for this device's heads: all of the chunk's, those of the history a block at a time.
The cache is cut along the positions, so each block of history comes from the device that owns it. What is held is
bounded by the chunk and one block, whatever the length of the history.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_k3.cache import as_cached
from kimi_k3.errors import InputError
from kimi_k3.mla_flash import Keys, Softmax, flash_all, flash_causal, start_softmax

PREFILL_IMPLEMENTATIONS = ("flash", "portable")
HISTORY_BLOCK = 4096  # positions whose keys and values exist at a time
WRITE_BLOCK = 4096  # positions written at a time
_LANES = 128  # positions side by side in a TPU's memory
_PORTABLE_BLOCK = 512  # queries and keys of one array of scores


class _Setup(NamedTuple):
  """What is the same in all calls of one prefill."""

  axes: tuple[str, ...]
  precision: Any
  implementation: str
  interpret: bool


def latent_prefill(
  q: Float[Array, "R T h K"],
  chunk: Float[Array, "R T P"],
  to_key: Float[Array, "C h N"],
  to_value: Float[Array, "C h V"],
  cache: Float[Array, "n R s P"],
  layer: Int[Array, ""],
  start: Int[Array, " R"],
  lengths: Int[Array, " R"],
  *,
  axes: tuple[str, ...],
  precision: Any,
  implementation: str,
  history: bool,
  interpret: bool = False,
) -> Float[Array, "R T h V"]:
  """Returns the attention output of a chunk of each row in q's dtype, 0 at pads.

  Runs inside jax.shard_map on one device's arrays; P is a latent of C channels with its shared key tail, K is N and the
  tail. Token t of a row attends to positions 0 to start - 1 of the row's cache and to tokens 0 to t of the chunk. What
  stands in pads, and in the cache from start on, may be anything, NaN included. One all-reduce for each block of
  history on several devices, none without history.

  Args:
    q: Queries of this device's heads, scaled.
    chunk: Latents and tails of the chunk's tokens, the same on every device.
    to_key: Key half of kv_b, this device's heads.
    to_value: Value half of kv_b.
    cache: Latents of all layers of the stack; device i of the axes holds positions i * s on. Not changed.
    layer: Index into the stack.
    start: How many tokens of each row are in the cache.
    lengths: Real tokens of each row's chunk; they stand first.
    axes: Mesh axes that cut heads and cache; () on one device.
    precision: Of the matrix products.
    implementation: "portable", or "flash" (a TPU kernel).
    history: False promises that start is 0 everywhere, and reads no cache.
    interpret: Runs the kernel on any backend, for tests.

  Raises:
    InputError: if the implementation is unknown.
  """
  if implementation not in PREFILL_IMPLEMENTATIONS:
    known = ", ".join(PREFILL_IMPLEMENTATIONS)
    raise InputError(f"MLA prefill implementation is {implementation!r}, expected one of: {known}")
  setup = _Setup(axes, precision, implementation, interpret)
  chunk = as_cached(chunk, cache.dtype)
  valid_RT = jnp.arange(q.shape[1])[None] < lengths[:, None]
  # A weight of 0 times NaN is NaN: pads are replaced before anything is made of them.
  keys = _materialise(jnp.where(valid_RT[..., None], chunk, 0), to_key, to_value, setup, q.dtype)
  q_RhKT = jnp.transpose(q, (0, 2, 3, 1))
  state = _over_history(q_RhKT, to_key, to_value, cache, layer, start, setup) if history else None
  if implementation == "flash":
    o = flash_causal(state, q_RhKT, keys, lengths, precision=precision, interpret=interpret)
  else:
    o = _portable_causal(state, q_RhKT, keys, precision)
  return jnp.where(valid_RT[..., None, None], jnp.transpose(o, (0, 3, 1, 2)), 0)


def write_chunk(
  cache: Float[Array, "n R s P"],
  chunk: Float[Array, "R T P"],
  layer: Int[Array, ""],
  start: Int[Array, " R"],
  lengths: Int[Array, " R"],
  *,
  axes: tuple[str, ...],
) -> Float[Array, "n R s P"]:
  """Returns the cache with each row's real tokens at positions start on, in place; no other bit of it changes.

  The arguments are those of `latent_prefill`. Each device writes the positions it holds; there is no collective.
  """
  _, rows, s, channels = cache.shape
  window = _window(chunk.shape[1], s)
  chunk = jnp.pad(chunk, ((0, 0), (0, max(0, window - chunk.shape[1])), (0, 0)))
  tokens = chunk.shape[1]
  first = start - (jax.lax.axis_index(axes) * s if axes else 0)  # where token 0 belongs on this device
  begin, end = jnp.clip(first, 0, s), jnp.clip(first + lengths, 0, s)
  chunk = as_cached(chunk, cache.dtype)

  def write_window(number, row, cache):
    # Read, mixed and written back as one: a scatter would go token by token.
    # A multiple of whole tiles: before a write elsewhere the TPU compiler copies all of a cache in FP8.
    at = number * window if s % window == 0 else jnp.minimum(number * window, s - window)
    token = at - first[row]  # of the window's first position; before the chunk's first, or near its last, is possible
    source = jnp.clip(token, 0, tokens - window)
    part = jax.lax.dynamic_slice(chunk, (row, source, 0), (1, window, channels))[0]
    part = jnp.roll(part, source - token, axis=0)  # what wraps around is not a token of the window
    old = jax.lax.dynamic_slice(cache, (layer, row, at, 0), (1, 1, window, channels))[0, 0]
    position = at + jnp.arange(window)
    mixed = jnp.where(((position >= begin[row]) & (position < end[row]))[:, None], part, old)
    return jax.lax.dynamic_update_slice(cache, mixed[None, None], (layer, row, at, 0))

  def write_row(row, cache):
    # None where another device has all of them.
    return jax.lax.fori_loop(
      begin[row] // window, -(-end[row] // window), lambda number, cache: write_window(number, row, cache), cache
    )

  with jax.named_scope("write_chunk"):
    return jax.lax.fori_loop(0, rows, write_row, cache)


def _window(tokens: int, s: int) -> int:
  """How many positions are written at a time: a divisor of s that is whole tiles, where s is."""
  if s % _LANES:
    return min(WRITE_BLOCK, tokens, s)
  window = math.gcd(s, WRITE_BLOCK)
  while window > _LANES and window >= 2 * tokens:
    window //= 2
  return window


def _materialise(
  latents: Float[Array, "R G P"],
  to_key: Float[Array, "C h N"],
  to_value: Float[Array, "C h V"],
  setup: _Setup,
  dtype: Any,
) -> Keys:
  num_latent = to_key.shape[0]
  latents = latents.astype(dtype)

  def product(spec: str, weights: Array) -> Array:
    parts = (latents[..., :num_latent], weights)
    return jnp.einsum(spec, *parts, precision=setup.precision, preferred_element_type=dtype)

  return Keys(product("rgc,chn->rhgn", to_key), latents[..., num_latent:], product("rgc,chv->rhvg", to_value))


def _over_history(
  q: Float[Array, "R h K T"],
  to_key: Float[Array, "C h N"],
  to_value: Float[Array, "C h V"],
  cache: Float[Array, "n R s P"],
  layer: Int[Array, ""],
  start: Int[Array, " R"],
  setup: _Setup,
) -> Softmax:
  """The state after all positions before start: by blocks, in the order of the positions, up to the longest row."""
  s = cache.shape[2]
  block = min(HISTORY_BLOCK, s)
  blocks = -(-s // block)  # of one device
  owners = max(1, HISTORY_BLOCK // s)  # devices whose whole part is in one block, where parts are small
  longest = jnp.max(start)
  last = jnp.maximum(longest - 1, 0)
  count = jnp.where(longest == 0, 0, (last // s * blocks + last % s // block) // owners + 1)

  def add_block(i, state):
    owner, number = i * owners // blocks, i * owners % blocks
    at = jnp.minimum(number * block, s - block)  # the last block of a part starts earlier if it would stand out
    base = owner * s + at
    latents = _fetch(cache, layer, owner, at, block, owners, setup.axes)
    position = base + jnp.arange(latents.shape[1])
    latents = jnp.where((position[None] < start[:, None])[..., None], latents, 0)
    keys = _materialise(latents, to_key, to_value, setup, q.dtype)
    low = jnp.full_like(start, number * block - at)
    high = jnp.clip(start - base, 0, latents.shape[1])
    if setup.implementation == "flash":
      return flash_all(state, q, keys, low, high, precision=setup.precision, interpret=setup.interpret)
    return _portable_all(state, q, keys, low, high, setup.precision)

  with jax.named_scope("mla_history"):
    return jax.lax.fori_loop(0, count, add_block, start_softmax(q, to_value.shape[-1]))


def _fetch(
  cache: Float[Array, "n R s P"], layer: Int[Array, ""], owner: Any, at: Any, block: int, owners: int, axes: tuple
) -> Float[Array, "R G P"]:
  """One block of history on every device: of one owner, or the whole parts of some that follow each other."""
  _, rows, _, channels = cache.shape
  mine = jax.lax.dynamic_slice(cache, (layer, 0, at, 0), (1, rows, block, channels))[0]
  if not axes:
    return mine
  # A sum of one device's latents and zeros is exact, of FP8 as integers. The owner is a traced number, so no static
  # gather can name it.
  if is_fp8 := cache.dtype.itemsize == 1:
    mine = jax.lax.bitcast_convert_type(mine, jnp.uint8)
  place = jax.lax.axis_index(axes) - owner
  mine = jnp.where((place >= 0) & (place < owners), mine, 0)
  if owners > 1:
    empty = jnp.zeros((rows, owners * block, channels), mine.dtype)
    mine = jax.lax.dynamic_update_slice(empty, mine, (0, jnp.clip(place, 0, owners - 1) * block, 0))
  fetched = jax.lax.psum(mine, axes)
  return jax.lax.bitcast_convert_type(fetched, cache.dtype) if is_fp8 else fetched


def _portable_causal(
  state: Softmax | None, q: Float[Array, "R h K T"], keys: Keys, precision: Any
) -> Float[Array, "R h V T"]:
  tokens = q.shape[-1]
  block = min(_PORTABLE_BLOCK, tokens)
  state = start_softmax(q, keys.values.shape[2]) if state is None else state

  def one_block(number):
    at = jnp.minimum(number * block, tokens - block)
    part = Softmax(*(jax.lax.dynamic_slice_in_dim(x, at, block, axis=3) for x in state))
    q_block = jax.lax.dynamic_slice_in_dim(q, at, block, axis=3)
    token = at + jnp.arange(block)
    count = (at + block + block - 1) // block  # blocks of keys, which are as long as those of queries
    after = _portable_keys(part, q_block, keys, lambda key: (key[:, None] <= token[None])[None], count, precision)
    return (after.values / jnp.where(after.total == 0, 1.0, after.total)).astype(q.dtype), at

  def put(number, o):
    value, at = one_block(number)
    return jax.lax.dynamic_update_slice_in_dim(o, value, at, axis=3)

  o = jnp.zeros(state.values.shape, q.dtype)
  return jax.lax.fori_loop(0, -(-tokens // block), put, o)


def _portable_all(
  state: Softmax,
  q: Float[Array, "R h K T"],
  keys: Keys,
  low: Int[Array, " R"],
  high: Int[Array, " R"],
  precision: Any,
) -> Softmax:
  tokens = q.shape[-1]
  block = min(_PORTABLE_BLOCK, tokens)
  count = -(-keys.tail.shape[1] // min(_PORTABLE_BLOCK, keys.tail.shape[1]))

  def visible(key):
    return ((key[None] >= low[:, None]) & (key[None] < high[:, None]))[..., None]

  def one_block(number, after):
    at = jnp.minimum(number * block, tokens - block)
    part = Softmax(*(jax.lax.dynamic_slice_in_dim(x, at, block, axis=3) for x in state))
    part = _portable_keys(part, jax.lax.dynamic_slice_in_dim(q, at, block, axis=3), keys, visible, count, precision)
    return Softmax(*(jax.lax.dynamic_update_slice_in_dim(x, y, at, axis=3) for x, y in zip(after, part, strict=True)))

  return jax.lax.fori_loop(0, -(-tokens // block), one_block, state)


def _portable_keys(
  state: Softmax, q: Float[Array, "R h K t"], keys: Keys, visible: Any, count: Any, precision: Any
) -> Softmax:
  """The state after the first `count` blocks of keys; `visible` maps positions [G] to a mask [R or 1, G, t or 1]."""
  length = keys.tail.shape[1]
  block = min(_PORTABLE_BLOCK, length)
  width = keys.nope.shape[-1]

  def product(spec: str, *operands: Array) -> Array:
    return jnp.einsum(spec, *operands, precision=precision, preferred_element_type=jnp.float32)

  def add(number, state):
    begin = number * block
    at = jnp.minimum(begin, length - block)
    part = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=at, slice_size=block)
    score = product("rhgn,rhnt->rhgt", part(keys.nope, axis=2), q[:, :, :width])
    score += product("rgn,rhnt->rhgt", part(keys.tail, axis=1), q[:, :, width:])
    key = at + jnp.arange(block)
    seen = visible(key) & (key >= begin)[None, :, None]
    score = jnp.where(seen[:, None], score, -jnp.inf)
    largest = jnp.maximum(state.largest, jnp.max(score, axis=2, keepdims=True))
    finite = jnp.where(largest == -jnp.inf, 0.0, largest)  # nothing seen yet
    weight = jnp.exp(score - finite)
    scale = jnp.exp(state.largest - finite)
    values = part(keys.values, axis=3)
    return Softmax(
      state.values * scale + product("rhvg,rhgt->rhvt", values, weight.astype(values.dtype)),
      largest,
      state.total * scale + jnp.sum(weight, axis=2, keepdims=True),
    )

  return jax.lax.fori_loop(0, count, add, state)
