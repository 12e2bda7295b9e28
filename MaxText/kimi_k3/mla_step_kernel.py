"""The TPU kernel of MLA decode: one read of the cached latents up to each row's position, the new one written in place.

Keys and values of absorbed MLA are the same latents, so one block in VMEM serves both products. The grid is the rows;
the blocks of all rows form one queue that a ring of buffers fetches ahead, across the rows.

The kernel sees the cache with positions last. That is how XLA itself lays the array [n, b, s, P] out on a TPU, as 576
channels would be padded to 640 lanes; so the transpose here is a view, and a program's own arguments need no copy.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kimi_k3.errors import InputError

BLOCK = 1024  # positions
LONG_BLOCK = 2048  # of rows with many: less work a position, but more of it behind a short row's end
_LONG = 16384
_RING_BYTES = 12 * 2**20  # in flight: what a latency of some 2 us at 3.7 TB/s needs, and as much being worked on
_MAX_RING = 16
_VMEM_BYTES = 48 * 2**20
_LANES = 128


def attend_in_kernel(
  q: Float[Array, "b H P"],
  new: Float[Array, "b P"],
  cache: Float[Array, "n b s P"],
  layer: Int[Array, ""],
  seen: Int[Array, " b"],
  write: Int[Array, " b"],
  *,
  num_values: int,
  precision: Any,
  interpret: bool = False,
  block: int | None = None,
) -> tuple[Float[Array, "b H C"], Float[Array, "b H"], Float[Array, "n b s P"]]:
  """Returns the average of the latents a row sees, the logarithm of the sum of its weights (-inf: none), and the cache.

  Args:
    q: Scaled queries.
    new: Latents and tails to write, in the cache's dtype.
    cache: Stack of all layers, updated in place.
    layer: Index into the stack.
    seen: How many positions of its row each query attends to, the new one included.
    write: Where the new latent goes, which is the last of the seen; -1 for nowhere.
    num_values: How many channels of a latent the average has.
    precision: Of the products of float32 operands.
    interpret: Runs on any backend.
    block: Positions read at a time; None: BLOCK, or LONG_BLOCK where a device has many.

  Raises:
    InputError: if the positions are no multiple of the 128 lanes (fewer than 128 are one block).
  """
  _, rows, s, channels = cache.shape
  tile = min(s, _LANES)  # the least that can be written
  if s % tile:
    raise InputError(f'MLA decode "pallas" has {s} positions on a device, a multiple of {_LANES} expected: allocate so')
  block = min(block or (LONG_BLOCK if s >= _LONG else BLOCK), s)
  ring = max(2, min(_MAX_RING, _RING_BYTES // (block * channels * cache.dtype.itemsize)))
  nonempty = jnp.where(seen > 0, jnp.arange(rows), rows)
  following = jax.lax.cummin(jnp.append(nonempty, rows), reverse=True).astype(jnp.int32)  # first nonempty row from i on
  kernel = functools.partial(_kernel, precision=precision, block=block, tile=tile)

  def per_row(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, *shape), lambda i, *_: (i, 0, 0))

  anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
  heads = q.shape[1]
  o, log_sum, cache = pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(rows,),
      in_specs=[per_row(heads, channels), per_row(1, channels), anywhere],
      out_specs=[per_row(heads, num_values), per_row(heads, _LANES), anywhere],
      scratch_shapes=[
        pltpu.VMEM((ring, channels, block), cache.dtype),
        pltpu.VMEM((channels, tile), cache.dtype),
        pltpu.VMEM((heads, num_values), jnp.float32),
        pltpu.VMEM((heads, 1), jnp.float32),
        pltpu.VMEM((heads, 1), jnp.float32),
        pltpu.SMEM((5,), jnp.int32),
        pltpu.SemaphoreType.DMA((ring,)),
        pltpu.SemaphoreType.DMA,
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((rows, heads, num_values), q.dtype),
      jax.ShapeDtypeStruct((rows, heads, _LANES), jnp.float32),
      jax.ShapeDtypeStruct((*cache.shape[:2], channels, s), cache.dtype),
    ],
    input_output_aliases={6: 2},
    compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_BYTES),
    interpret=interpret,
    name="latent_step",
  )(layer[None].astype(jnp.int32), seen, write, following, q, new[:, None], jnp.swapaxes(cache, 2, 3))
  return o, log_sum[..., 0], jnp.swapaxes(cache, 2, 3)


# What the SMEM scratch holds: the next block to fetch, how many were fetched and used, whether a write is on its way.
_FETCH_ROW, _FETCH_BLOCK, _FETCHED, _USED, _WRITING = range(5)


class _Scratch(NamedTuple):
  """VMEM, SMEM and semaphores that outlive a row."""

  ring: Any  # blocks, fetched in the order they are used
  tile: Any  # on its way to the cache
  acc: Any
  largest: Any
  total: Any
  at: Any
  fetched: Any
  written: Any


class _Queue(NamedTuple):
  """The blocks of all rows in the order they are used, fetched ahead into the ring."""

  layer: Any
  rows: Any
  seen: Any
  following: Any
  cache: Any
  scratch: _Scratch
  block: int
  tile: int

  def begin(self, number):
    """Where a block begins in its row: the last one of a row that is no multiple of blocks begins before its turn."""
    return pl.multiple_of(jnp.minimum(number * self.block, self.cache.shape[3] - self.block), self.tile)

  def copy(self, row, number, slot):
    source = self.cache.at[self.layer, row, :, pl.ds(self.begin(number), self.block)]
    return pltpu.make_async_copy(source, self.scratch.ring.at[slot], self.scratch.fetched.at[slot])

  def fetch_next(self):
    at = self.scratch.at
    row = at[_FETCH_ROW]

    @pl.when(row < self.rows)
    def _():
      number = at[_FETCH_BLOCK]
      self.copy(row, number, at[_FETCHED] % self.scratch.ring.shape[0]).start()
      at[_FETCHED] += 1
      more = (number + 1) * self.block < self.seen[row]
      at[_FETCH_ROW] = jnp.where(more, row, self.following[row + 1])
      at[_FETCH_BLOCK] = jnp.where(more, number + 1, 0)

  def start(self):
    """Fetches all but one block of the ring: that one is still in use whenever the next is fetched."""
    at = self.scratch.at
    at[_FETCH_ROW] = self.following[0]
    for k in (_FETCH_BLOCK, _FETCHED, _USED, _WRITING):
      at[k] = 0
    jax.lax.fori_loop(0, self.scratch.ring.shape[0] - 1, lambda _, carry: (self.fetch_next(), carry)[1], 0)


def _kernel(
  layer_ref,
  seen_ref,
  write_ref,
  following_ref,
  q_ref,
  new_ref,
  cache_ref,
  o_ref,
  log_sum_ref,
  cache_out_ref,
  *scratch_refs,
  precision: Any,
  block: int,
  tile: int,
):
  """One row: its blocks, one after another, while the ring fills with the next ones, of the rows after it too."""
  i, rows = pl.program_id(0), pl.num_programs(0)
  layer, scratch = layer_ref[0], _Scratch(*scratch_refs)
  queue = _Queue(layer, rows, seen_ref, following_ref, cache_ref, scratch, block, tile)
  pl.when(i == 0)(queue.start)
  seen, write = seen_ref[i], write_ref[i]
  scratch.acc[...] = jnp.zeros_like(scratch.acc)
  scratch.largest[...] = jnp.full_like(scratch.largest, -jnp.inf)
  scratch.total[...] = jnp.zeros_like(scratch.total)

  def body(number, carry):
    slot = scratch.at[_USED] % scratch.ring.shape[0]
    queue.fetch_next()
    queue.copy(i, number, slot).wait()
    scratch.at[_USED] += 1
    begin, turn = queue.begin(number), number * block
    whole = (turn + block <= seen) & (begin == turn)
    add = functools.partial(_accumulate, q_ref[0], scratch, slot, precision)

    @pl.when((write >= turn) & (write < turn + block))
    def _():
      _put_new(new_ref[0], scratch, slot, write - begin, cache_out_ref.at[layer, i], begin)

    pl.when(whole)(lambda: add(None))
    pl.when(~whole)(lambda: add((turn - begin, seen - begin)))
    return carry

  jax.lax.fori_loop(0, pl.cdiv(seen, block), body, 0)
  total = scratch.total[...]
  o_ref[0] = (scratch.acc[...] / jnp.where(total == 0, 1.0, total)).astype(o_ref.dtype)
  log_sum = jnp.where(total == 0, -jnp.inf, scratch.largest[...] + jnp.log(total))
  log_sum_ref[0] = jnp.broadcast_to(log_sum, log_sum_ref.shape[1:])
  pl.when(i == rows - 1)(lambda: _finish_write(scratch, cache_out_ref.at[layer, i]))


def _put_new(new, scratch: _Scratch, slot, at, row_ref, begin):
  """Replaces a position's column in a block, and sends the tile it lies in to the cache, where the block begins."""
  _finish_write(scratch, row_ref)
  tile = scratch.tile.shape[1]
  first = pl.multiple_of(at // tile * tile, tile)
  old = scratch.ring[slot, :, pl.ds(first, tile)]
  is_new = jax.lax.broadcasted_iota(jnp.int32, old.shape, 1) == at - first
  # In float32, exact for what a cache holds: 16-bit masks and transposes are not everywhere.
  columns = jnp.broadcast_to(new.astype(jnp.float32), (tile, old.shape[0])).T
  mixed = jnp.where(is_new, columns, old.astype(jnp.float32)).astype(old.dtype)
  scratch.ring[slot, :, pl.ds(first, tile)] = mixed
  scratch.tile[...] = mixed
  place = row_ref.at[:, pl.ds(pl.multiple_of(begin + first, tile), tile)]
  pltpu.make_async_copy(scratch.tile, place, scratch.written).start()
  scratch.at[_WRITING] = 1


def _finish_write(scratch: _Scratch, row_ref):
  """Waits for the tile on its way, if there is one; any destination will do, as all tiles are one size."""

  @pl.when(scratch.at[_WRITING] == 1)
  def _():
    pltpu.make_async_copy(scratch.tile, row_ref.at[:, pl.ds(0, scratch.tile.shape[1])], scratch.written).wait()
    scratch.at[_WRITING] = 0


def _accumulate(q, scratch: _Scratch, slot, precision: Any, inside: tuple | None):
  """Adds a block's positions from `inside[0]` to before `inside[1]`, or all where that is None."""

  def is_inside(shape):
    assert inside is not None
    position = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return (position >= inside[0]) & (position < inside[1])

  latent = scratch.ring[slot]
  if latent.dtype.itemsize > 1 or q.dtype == jnp.float32:  # the matrix unit takes FP8 as it is beside bfloat16
    latent = latent.astype(q.dtype)
  if inside is not None:
    # A weight of 0 times NaN is NaN: what is not visible is replaced here, in the last block of a row alone.
    latent = jnp.where(is_inside(latent.shape), latent.astype(jnp.float32), 0.0).astype(latent.dtype)
  score = _dot(q, latent, ((1,), (0,)), precision)
  if inside is not None:
    score = jnp.where(is_inside(score.shape), score, -jnp.inf)
  before = scratch.largest[...]
  largest = jnp.maximum(before, jnp.max(score, axis=1, keepdims=True))
  weight = jnp.exp(score - largest)
  scale = jnp.exp(before - largest)
  scratch.largest[...] = largest
  scratch.total[...] = scratch.total[...] * scale + jnp.sum(weight, axis=1, keepdims=True)
  values = latent[: scratch.acc.shape[1]]
  scratch.acc[...] = scratch.acc[...] * scale + _dot(weight.astype(q.dtype), values, ((1,), (1,)), precision)


def _dot(a, b, contract: tuple, precision: Any):
  # 16-bit operands have one precision; the compiler refuses another, as a default set elsewhere would be.
  precision = precision if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
  return jax.lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)
