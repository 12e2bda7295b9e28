"""One token of each row against the cached MLA latents, on the devices of a jax.shard_map.

The cache is stacked over layers and cut either along the positions ("sequence": every device scores every head against
its own positions, and the partial results are merged) or along the rows ("batch": a device holds whole rows and scores
every head of them). Nothing here copies the cache, or one layer of it: the new latents are written in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_k3.cache import as_cached
from kimi_k3.errors import InputError
from kimi_k3.mla_step_kernel import attend_in_kernel

STEP_IMPLEMENTATIONS = ("pallas", "portable")
CACHE_CUTS = ("batch", "sequence")


class _Place(NamedTuple):
  """What a device does for each row it has: positions it attends to, and where the new latent goes (-1: nowhere)."""

  seen: Int[Array, " b"]
  write: Int[Array, " b"]


def latent_step(
  q: Float[Array, "B h P"],
  new: Float[Array, "B P"],
  cache: Float[Array, "n b s P"],
  layer: Int[Array, ""],
  positions: Int[Array, " B"],
  *,
  axes: tuple[str, ...],
  cut: str,
  num_values: int,
  precision: Any,
  implementation: str,
  interpret: bool = False,
) -> tuple[Float[Array, "B h C"], Float[Array, "n b s P"]]:
  """Returns the latents averaged by each head's attention, in q's dtype, and the cache with the new latents in it.

  Runs inside jax.shard_map on one device's arrays; P = C + R is a latent with its shared key tail. Row i attends to
  positions 0 to positions[i]. Two collectives a call, none on one device. "sequence": an all_gather of q, an all_to_all
  of the partial results, each with the logarithm of its sum. "batch": an all_to_all each way.

  What the cache holds behind a row's position may be anything, NaN included. A row without a token gets 0 and leaves
  every bit of the cache as it was; nothing in its q and new is read, and its own cache is not either.

  Args:
    q: Queries of this device's heads against the latents (key half of kv_b folded in) and the tails, scaled.
    new: Latent and tail of the new token of every row, the same on every device.
    cache: Latents of all layers of the stack. "sequence": b = B, and device i holds positions i * s on. "batch":
      b = B / devices, s is all positions, and device i holds rows i * b on.
    layer: Index into the stack.
    positions: Index of the new token in its row, less than the positions allocated; negative: no token.
    axes: Mesh axes that cut heads and cache; () on one device.
    cut: "sequence" or "batch".
    num_values: C, how many of the P channels are the latent.
    precision: Of the matrix products.
    implementation: "portable" (two einsums over all s positions: reads the layer twice) or "pallas" (a TPU kernel:
      reads the blocks up to each row's position once).
    interpret: Runs the kernel on any backend, for tests.

  Raises:
    InputError: if the cut or the implementation is unknown or cannot compute this.
  """
  size = jax.lax.axis_size(axes) if axes else 1
  _check(q, cache, size, cut, implementation)
  has_token_B = positions >= 0
  q = jnp.where(has_token_B[:, None, None], q, 0)
  place = _place(positions, cache, axes, cut)
  if axes and cut == "sequence":
    q = jax.lax.all_gather(q, axes, axis=1, tiled=True)
  elif axes:
    q = jax.lax.all_to_all(q, axes, split_axis=0, concat_axis=1, tiled=True)
    new = jax.lax.dynamic_slice_in_dim(new, jax.lax.axis_index(axes) * cache.shape[1], cache.shape[1])
  merge = bool(axes) and cut == "sequence"
  new = as_cached(new, cache.dtype)
  if implementation == "pallas":
    o, log_sum, cache = attend_in_kernel(
      q, new, cache, layer, place.seen, place.write, num_values=num_values, precision=precision, interpret=interpret
    )
  else:
    o, log_sum, cache = _attend(q, new, cache, layer, place, num_values, precision)
  if merge:
    o = _merge(o, log_sum, axes, size)
  elif axes:
    o = jax.lax.all_to_all(o, axes, split_axis=1, concat_axis=0, tiled=True)
  return o, cache


def _check(q: Array, cache: Array, size: int, cut: str, implementation: str) -> None:
  if implementation not in STEP_IMPLEMENTATIONS:
    known = ", ".join(STEP_IMPLEMENTATIONS)
    raise InputError(f"MLA decode implementation is {implementation!r}, expected one of: {known}")
  if cut not in CACHE_CUTS:
    raise InputError(f"cut of the MLA cache is {cut!r}, expected one of: {', '.join(CACHE_CUTS)}")
  rows, parts = q.shape[0], size if cut == "batch" else 1
  if rows % parts:
    raise InputError(f'{rows} rows on {parts} devices with the cut "batch": a multiple expected; change one of them')
  if cache.shape[1] != rows // parts:
    raise InputError(
      f'the MLA cache of a device has {cache.shape[1]} rows, {rows // parts} expected for the cut "{cut}"'
    )


def _place(positions: Int[Array, " B"], cache: Float[Array, "n b s P"], axes: tuple[str, ...], cut: str) -> _Place:
  _, b, s, _ = cache.shape
  index = jax.lax.axis_index(axes) if axes else 0
  if cut == "batch":
    local = jax.lax.dynamic_slice_in_dim(positions, index * b, b)
    return _Place(jnp.clip(local + 1, 0, s), jnp.where(local < s, jnp.maximum(local, -1), -1))
  local = positions - index * s
  has_token = positions >= 0
  here = has_token & (local >= 0) & (local < s)
  return _Place(jnp.where(has_token, jnp.clip(local + 1, 0, s), 0), jnp.where(here, local, -1))


def _attend(
  q: Float[Array, "b H P"],
  new: Float[Array, "b P"],
  cache: Float[Array, "n b s P"],
  layer: Int[Array, ""],
  place: _Place,
  num_values: int,
  precision: Any,
) -> tuple[Float[Array, "b H C"], Float[Array, "b H"], Float[Array, "n b s P"]]:
  """The average over the visible positions, the logarithm of the sum of its weights (-inf: none), and the cache."""
  s = cache.shape[2]
  cache = _write(cache, new, layer, place.write)
  visible_bs = jnp.arange(s)[None] < place.seen[:, None]
  # A weight of 0 times NaN is NaN: what is not visible is replaced, inside the products, not in memory.
  latent_bsP = jnp.where(visible_bs[..., None], jax.lax.dynamic_index_in_dim(cache, layer, keepdims=False), 0).astype(
    q.dtype
  )

  def product(spec: str, *operands: Array) -> Array:
    return jnp.einsum(spec, *operands, precision=precision, preferred_element_type=jnp.float32)

  score_bHs = jnp.where(visible_bs[:, None], product("bhp,bsp->bhs", q, latent_bsP), -jnp.inf)
  largest_bH = jnp.max(score_bHs, axis=-1)
  largest_bH = jnp.where(largest_bH == -jnp.inf, 0.0, largest_bH)  # nothing visible
  weight_bHs = jnp.exp(score_bHs - largest_bH[..., None])
  sum_bH = jnp.sum(weight_bHs, axis=-1)
  o_bHC = product("bhs,bsc->bhc", weight_bHs.astype(q.dtype), latent_bsP[..., :num_values])
  o_bHC = o_bHC / jnp.where(sum_bH == 0, 1.0, sum_bH)[..., None]
  return o_bHC.astype(q.dtype), largest_bH + jnp.log(sum_bH), cache


def _write(
  cache: Float[Array, "n b s P"], new: Float[Array, "b P"], layer: Int[Array, ""], write: Int[Array, " b"]
) -> Float[Array, "n b s P"]:
  """The cache with each row's new latent, in place. One row after another: a scatter wants another layout on a TPU."""

  def write_row(row, cache):
    where = (layer, row, jnp.maximum(write[row], 0), 0)
    old = jax.lax.dynamic_slice(cache, where, (1, 1, 1, cache.shape[-1]))
    value = jnp.where(write[row] < 0, old, jax.lax.dynamic_index_in_dim(new, row)[None, None])
    return jax.lax.dynamic_update_slice(cache, value, where)

  return jax.lax.fori_loop(0, cache.shape[1], write_row, cache)


def _merge(
  o: Float[Array, "B H C"], log_sum: Float[Array, "B H"], axes: tuple[str, ...], size: int
) -> Float[Array, "B h C"]:
  """Each device's part of the heads, over all devices' positions."""
  packed = _pack(o, log_sum)
  parts = jax.lax.all_to_all(packed, axes, split_axis=1, concat_axis=0, tiled=True)
  o_iBhC, log_sum_iBh = _unpack(parts.reshape(size, o.shape[0], -1, packed.shape[-1]), o.dtype, o.shape[-1])
  largest_Bh = jnp.max(log_sum_iBh, axis=0)
  weight_iBh = jnp.exp(log_sum_iBh - jnp.where(largest_Bh == -jnp.inf, 0.0, largest_Bh)[None])
  sum_Bh = jnp.sum(weight_iBh, axis=0)
  merged = jnp.sum(weight_iBh[..., None] * o_iBhC.astype(jnp.float32), axis=0)
  return (merged / jnp.where(sum_Bh == 0, 1.0, sum_Bh)[..., None]).astype(o.dtype)


def _bits(dtype: Any) -> Any:
  """The unsigned integers of a dtype's width: integers travel bit for bit, which a float32 cut in two needs."""
  return jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


def _pack(o: Float[Array, "B H C"], log_sum: Float[Array, "B H"]) -> Array:
  bits = _bits(o.dtype)
  log_sum_bits = jax.lax.bitcast_convert_type(log_sum, bits).reshape(*log_sum.shape, -1)
  return jnp.concatenate([jax.lax.bitcast_convert_type(o, bits), log_sum_bits], axis=-1)


def _unpack(packed: Array, dtype: Any, num_values: int) -> tuple[Array, Array]:
  log_sum = packed[..., num_values:]
  log_sum = log_sum[..., 0] if log_sum.shape[-1] == 1 else log_sum
  return (
    jax.lax.bitcast_convert_type(packed[..., :num_values], dtype),
    jax.lax.bitcast_convert_type(log_sum, jnp.float32),
  )
