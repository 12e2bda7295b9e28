"""One decode step of KDA on a stack of layers' states: the layer's part is updated in place, never sliced out.

A decode step moves the state once each way and does little else, so that is what the kernel is built around: it reads
and writes the states of the active rows in HBM by its own copies, several in flight at a time. What was tried and what
it cost: docs/decisions/0013-kda-on-devices.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from kimi_k3.errors import InputError
from kimi_k3.kda.reference import kda_step, l2_normalize

IMPLEMENTATIONS = ("pallas", "portable")
_SUBLANES = 8  # rows of a float32 register; of bfloat16 it has twice as many
_DECAY, _K, _Q, _QK = range(4)  # rows of a register; the first three multiply rows of a state
_VALUE, _BETA = range(2)  # of another one, beside _QK, for columns of it
_L2_EPS = 1e-6  # of l2_normalize
_ITEM_HEADS = 12  # at least, of states in a buffer: their work hides each other's latencies
_BUFFERS = 6  # of an item each: half of them for loads, half for stores
_SMALL_BYTES = 24 * 2**20  # of inputs and outputs besides the state that may stay in VMEM whole
_BLOCK_ROWS = 256  # of them in VMEM at a time, where they do not fit whole
_VMEM_BYTES = 48 * 2**20  # limit given to the compiler; v7x has 64 MiB


def kda_step_stacked(
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B H V"],
  g: Float32[Array, "B H K"],
  beta: Float32[Array, "B H"],
  states: Float32[Array, "n B H K V"],
  layer: Int32[Array, ""],
  *,
  active: Bool[Array, " B"] | None,
  implementation: str,
  interpret: bool = False,
) -> tuple[Float32[Array, "B H V"], Float32[Array, "n B H K V"]]:
  """Returns one token's output for each row, and the stack with the states of one layer moved on.

  The arithmetic is that of `kda_step` after `l2_normalize`.

  Args:
    q: Queries, neither normalised nor scaled.
    k: Keys, not normalised.
    v: Values.
    g: Log decay, natural log, never positive.
    beta: Learning rate of the delta rule, in [0, 1].
    states: States of n layers. Donate it, or carry it through a scan: then nothing of it is copied.
    layer: Which of the n to use; outside, the nearest, as a dynamic slice does.
    active: Rows that have a token; None when all have. Of another row nothing is read, its output is 0 and its state
      keeps every bit.
    implementation: "portable" (any backend) or "pallas" (a TPU kernel, which neither reads nor writes the states of
      inactive rows).
    interpret: Run the kernel in interpret mode, for tests without a TPU.

  Raises:
    InputError: if the implementation is unknown or cannot run here.
  """
  if implementation not in IMPLEMENTATIONS:
    known = ", ".join(IMPLEMENTATIONS)
    raise InputError(f"KDA step implementation is {implementation!r}, expected one of: {known}")
  if implementation == "portable":
    return _portable(q, k, v, g, beta, states, layer, active)
  if not interpret:
    require_tpu("KDA step implementation 'pallas'", 'use "portable"')
    _check_tiles(*states.shape[-2:])
  return _pallas(q, k, v, g, beta, states, layer, active, interpret)


def require_tpu(what: str, advice: str) -> None:
  """Raises InputError unless there is a TPU, or a program for one is being compiled (tokamax's `cross_compile`)."""
  if jax.default_backend() == "tpu":
    return
  from tokamax import config as tokamax_config  # slow to import

  if not tokamax_config.cross_compile.value:
    raise InputError(f"{what} needs a TPU, the backend is {jax.default_backend()}: {advice}")


def _check_tiles(key_dim: int, value_dim: int) -> None:
  if key_dim % (2 * _SUBLANES) or value_dim % 128:
    raise InputError(
      f"KDA step implementation 'pallas' takes states [K, V] with K a multiple of {2 * _SUBLANES} and V of 128, found "
      f'[{key_dim}, {value_dim}]: use "portable"'
    )


def _portable(q, k, v, g, beta, states, layer, active):
  before = jax.lax.dynamic_index_in_dim(states, layer, keepdims=False)
  o, after = kda_step(l2_normalize(q), l2_normalize(k), v, g, beta, before)
  if active is not None:
    # A select keeps the bits of what it passes on, NaN included.
    o = jnp.where(active[:, None, None], o, 0.0)
    after = jnp.where(active[:, None, None, None], after, before)
  return o, jax.lax.dynamic_update_index_in_dim(states, after, layer, 0)


def _pallas(q, k, v, g, beta, states, layer, active, interpret: bool):
  rows, heads, key_dim = q.shape
  value_dim = v.shape[-1]
  plan = _Plan.of(rows, heads, key_dim, value_dim)
  order, counts = _active_rows(plan, active)
  # Heads first: the projections leave rows on the sublanes, so this moves nothing, and a row first would be a copy.
  inputs = [jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (q, k, v, g)]
  # Under shard_map the results differ between devices as the states do.
  varying = jax.typeof(states).manual_axis_type
  in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)  # "any" lets XLA move a small stack to VMEM and back
  if not interpret:
    states = pltpu.with_memory_space_constraint(states, pltpu.HBM)
  o_HBV, states = pl.pallas_call(
    functools.partial(_kernel, plan=plan),
    out_shape=(
      jax.ShapeDtypeStruct((heads, rows, value_dim), jnp.float32, manual_axis_type=varying),
      jax.ShapeDtypeStruct(states.shape, jnp.float32, manual_axis_type=varying),
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=plan.grid,
      in_specs=[*map(plan.spec, inputs), plan.spec(beta), in_hbm],
      out_specs=[plan.spec(inputs[2]), in_hbm],
      scratch_shapes=[
        pltpu.VMEM((_BUFFERS, plan.item_rows, plan.item_heads, key_dim, value_dim), jnp.float32),
        _thirds_scratch((plan.item_rows, plan.item_heads), key_dim, interpret),
        pltpu.VMEM((plan.item_rows, plan.item_heads, _SUBLANES, value_dim), jnp.float32),
        pltpu.SemaphoreType.DMA((_BUFFERS,)),
        pltpu.SemaphoreType.DMA((_BUFFERS,)),
      ],
    ),
    input_output_aliases={8: 1},
    # The kernel makes its own indices, and keeps the layer's in range.
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM_BYTES, disable_bounds_checks=True),
    cost_estimate=pl.CostEstimate(
      flops=7 * math.prod(states.shape[1:]),
      transcendentals=rows * heads * key_dim,
      bytes_accessed=2 * 4 * math.prod(states.shape[1:]),
    ),
    interpret=interpret,
    name=f"kda_step_{heads}_heads",
  )(layer[None], order, counts, *inputs, beta, states)
  o = jnp.moveaxis(o_HBV, 0, 1)
  if active is not None:  # the kernel wrote nothing there
    o = jnp.where(active[:, None, None], o, 0.0)
  return o, states


@dataclasses.dataclass(frozen=True)
class _Plan:
  """How the work is cut.

  An item is a group of heads of a few rows: what one buffer holds. Inputs and outputs other than the state stay in VMEM
  whole where they fit: then the grid has one step, and items go through it without a pause. Otherwise a step of the
  grid has a block of rows and one group of heads.

  Attributes:
    rows: B.
    groups: Groups of heads in a step of the grid.
    item_heads: Heads of a group.
    item_rows: Rows of an item.
    block_rows: Rows of a step of the grid.
    grid: Blocks of rows, and groups of heads if they are steps.
  """

  rows: int
  groups: int
  item_heads: int
  item_rows: int
  block_rows: int
  grid: tuple[int, int]

  @classmethod
  def of(cls, rows: int, heads: int, key_dim: int, value_dim: int) -> _Plan:
    most = _ITEM_HEADS + _ITEM_HEADS // 2
    item_heads = max(n for n in range(1, min(heads, most) + 1) if heads % n == 0)
    item_rows = min(rows, -(-_ITEM_HEADS // item_heads))
    groups = heads // item_heads
    if 4 * rows * heads * (3 * key_dim + 2 * value_dim) <= _SMALL_BYTES:
      return cls(rows, groups, item_heads, item_rows, rows, (1, 1))
    block_rows = min(rows, _BLOCK_ROWS)
    return cls(rows, 1, item_heads, item_rows, block_rows, (-(-rows // block_rows), groups))

  @property
  def places(self) -> int:
    """Places for the rows of a block in the order: whole items, and one item more."""
    return (-(-self.block_rows // self.item_rows) + 1) * self.item_rows

  def spec(self, x: Array) -> pl.BlockSpec:
    """Of an array [H, B, *], or of beta [B, H]."""
    if self.grid == (1, 1):
      return pl.BlockSpec(memory_space=pltpu.VMEM)
    if x.ndim == 2:
      return pl.BlockSpec((self.block_rows, x.shape[1]), lambda block, _group, *_: (block, 0))
    return pl.BlockSpec((self.item_heads, self.block_rows, x.shape[2]), lambda block, group, *_: (group, block, 0))


def _active_rows(plan: _Plan, active: Bool[Array, " B"] | None) -> tuple[Int32[Array, " P"], Int32[Array, " N"]]:
  """For each block of rows the numbers of the active ones, in front and in order, and how many they are."""
  blocks = plan.grid[0]
  if active is None:
    active = jnp.ones((plan.rows,), bool)
  active = jnp.pad(active, (0, blocks * plan.block_rows - plan.rows)).reshape(blocks, plan.block_rows)
  count = jnp.sum(active, axis=1, dtype=jnp.int32)
  # Places past the last row repeat it: the same bits are then written twice, and no part of an item needs a condition.
  place = jnp.minimum(jnp.arange(plan.places, dtype=jnp.int32)[None], count[:, None] - 1)
  # Sums over small matrices: a cumulative sum, a sort or a scatter of so few takes more operations on a TPU.
  rows = jnp.arange(plan.block_rows, dtype=jnp.int32)[None, None]
  before = active[:, None, :] & (rows < rows.swapaxes(1, 2))
  number = jnp.sum(before, axis=2, dtype=jnp.int32)
  hit = active[:, None, :] & (number[:, None, :] == place[:, :, None])
  return jnp.sum(jnp.where(hit, rows, 0), axis=2, dtype=jnp.int32).reshape(-1), count


def _kernel(
  layer, order, counts, q, k, v, g, beta, _, o, states, buffers, thirds, factors, loads, stores, *, plan: _Plan
):
  """Moves items through a ring of buffers: copy in, step in place, copy out.

  Args:
    layer: [1], in SMEM as are order [blocks * places] and counts [blocks].
    q, k, v, g, o: [H, B, *] in VMEM, whole or a group of heads and a block of rows.
    beta: [B, H] in VMEM, whole or a block of rows.
    states: In HBM; the result, which is the operand's own memory.
    buffers: [_BUFFERS, item_rows, item_heads, K, V].
    thirds, factors: [item_rows, item_heads, *]: what `_prepare` makes for an item.
    loads, stores: A semaphore a buffer.
    plan: How the work is cut.
  """
  items = _Items(plan, layer, order, counts, states, buffers, loads, stores)
  ahead = _BUFFERS // 2
  members = [(r, h) for r in range(plan.item_rows) for h in range(plan.item_heads)]
  grid_head = pl.program_id(1) * plan.item_heads

  def prepare(item, r: int, h: int):
    row, head = pl.ds(items.rows(item)[r], 1), items.head(item) + h
    rate = _number(beta[row], grid_head + head)
    thirds[r, h], factors[r, h] = _prepare(q[head, row], k[head, row], v[head, row], g[head, row], rate, thirds.dtype)

  def load_ahead(item):
    @pl.when(item + ahead >= _BUFFERS)
    def _():
      items.wait_for_store(item + ahead - _BUFFERS)

    items.start_load(item + ahead)

  def step(item, carry):
    pl.when(item + ahead < items.count)(functools.partial(load_ahead, item))
    inputs = {(r, h): (thirds[r, h], factors[r, h]) for r, h in members}
    items.wait_for_load(item)
    rows, select = items.rows(item), _selector(states.shape[-1])
    for r, h in members:
      prepare(item + 1, r, h)  # in the shadow of the work on this item, whose own inputs have been read
      _step_head(*inputs[r, h], items.buffer(item).at[r, h], o.at[items.head(item) + h, pl.ds(rows[r], 1)], select)
    items.start_store(item)
    return carry

  for i in range(ahead):
    pl.when(i < items.count)(functools.partial(items.start_load, i))
  for r, h in members:
    prepare(0, r, h)
  jax.lax.fori_loop(0, items.count, step, None)
  stored = jnp.maximum(items.count - _BUFFERS, 0)  # those before have been waited for
  jax.lax.fori_loop(stored, items.count, lambda item, _: items.wait_for_store(item), None)


class _Items:
  """The items of a step of the grid, and their copies between HBM and the ring of buffers."""

  def __init__(self, plan: _Plan, layer, order, counts, states, buffers, loads, stores):
    self._plan, self._order, self._states, self._buffers = plan, order, states, buffers
    self._loads, self._stores = loads, stores
    self._layer = jnp.clip(layer[0], 0, states.shape[0] - 1)
    self._block = pl.program_id(0)
    self._grid_head = pl.program_id(1) * plan.item_heads
    self.count = pl.cdiv(counts[self._block], plan.item_rows) * plan.groups

  def rows(self, item) -> list:
    """The numbers of an item's rows in their block."""
    first = self._block * self._plan.places + item // self._plan.groups * self._plan.item_rows
    return [self._order[first + r] for r in range(self._plan.item_rows)]

  def head(self, item):
    """An item's first head, of those that this step of the grid has."""
    return item % self._plan.groups * self._plan.item_heads

  def buffer(self, item):
    return self._buffers.at[item % _BUFFERS]

  def start_load(self, item) -> None:
    for hbm, vmem in self._parts(item):
      pltpu.make_async_copy(hbm, vmem, self._loads.at[item % _BUFFERS]).start()

  def start_store(self, item) -> None:
    for hbm, vmem in self._parts(item):
      pltpu.make_async_copy(vmem, hbm, self._stores.at[item % _BUFFERS]).start()

  def wait_for_load(self, item) -> None:
    self._wait(item, self._loads)

  def wait_for_store(self, item) -> None:
    self._wait(item, self._stores)

  def _parts(self, item) -> Iterator[tuple]:
    """Where the rows of an item are in HBM and in its buffer."""
    heads = pl.ds(self._grid_head + self.head(item), self._plan.item_heads)
    for r, row in enumerate(self.rows(item)):
      yield self._states.at[self._layer, self._block * self._plan.block_rows + row, heads], self.buffer(item).at[r]

  def _wait(self, item, semaphores) -> None:
    """Waits for a buffer's worth of bytes: for all rows at once."""
    buffer = self.buffer(item)
    pltpu.make_async_copy(buffer, buffer, semaphores.at[item % _BUFFERS]).wait()


def _number(row: Float32[Array, "1 C"], lane: int | Int32[Array, ""]) -> Float32[Array, "1 1"]:
  """The number in one lane of a row."""
  own = jax.lax.broadcasted_iota(jnp.int32, row.shape, 1) == lane
  return jnp.sum(jnp.where(own, row, 0.0), axis=1, keepdims=True)


def _prepare(q, k, v, g, beta, dtype):
  """Returns all that a head's step needs besides the state, thirds and factors: see `_step_head`."""
  rows = _stack({_DECAY: g, _K: k, _Q: q, _QK: q})
  # One sum over lanes for three numbers: k^2, q^2 and q k.
  sums = jnp.sum(rows * _stack({_K: k, _Q: q, _QK: k}), axis=1, keepdims=True)
  part = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
  norms = jax.lax.rsqrt(sums + _L2_EPS) * jnp.where(part[:, :1] == _Q, q.shape[-1] ** -0.5, 1.0)
  multipliers = jnp.where(part == _DECAY, jnp.exp(rows), jnp.where(part <= _Q, rows * norms, 0.0))
  qk = sums[_QK : _QK + 1] * norms[_K : _K + 1] * norms[_Q : _Q + 1]
  high = _truncate(multipliers)
  middle = _truncate(multipliers - high)
  thirds = jnp.concatenate([high, middle, multipliers - high - middle], axis=0)
  return _pack(thirds, dtype), _stack({_VALUE: v, _BETA: beta, _QK: qk})


def _thirds_scratch(shape: tuple[int, ...], key_dim: int, interpret: bool):
  """For columns of bfloat16, two in a word.

  As bfloat16 their layout would depend on an option of the compiler (topology.COMPILE_OPTIONS), and with it the loop
  takes 15 % longer. The CPU has no product of bfloat16 with float32 sums, so interpret mode has float32.
  """
  if interpret:
    return pltpu.VMEM((*shape, key_dim, 3 * _SUBLANES), jnp.float32)
  return pltpu.VMEM((*shape, key_dim // 2, 3 * _SUBLANES), jnp.uint32)


def _pack(thirds: Float32[Array, "24 K"], dtype) -> Array:
  """As columns, in the form of `_thirds_scratch`."""
  if dtype == jnp.float32:
    return thirds.T
  return pltpu.bitcast(thirds.astype(jnp.bfloat16).T, jnp.uint32)


def _unpack(thirds: Array) -> Array:
  """[K, 24], bfloat16, or float32 in interpret mode."""
  return thirds if thirds.dtype == jnp.float32 else pltpu.bitcast(thirds, jnp.bfloat16)


def _stack(rows: dict[int, Float32[Array, "1 C"]]) -> Float32[Array, "8 D"]:
  """One register with the rows at their places and the first row in all others; a row of one number fills its place."""
  register, *others = rows.values()
  register = jnp.broadcast_to(register, (_SUBLANES, register.shape[1]))
  place = jax.lax.broadcasted_iota(jnp.int32, register.shape, 0)
  for at, row in zip(list(rows)[1:], others, strict=True):
    register = jnp.where(place == at, row, register)
  return register


def _step_head(thirds, factors, state, o, select) -> None:
  """One step of a head, in place.

  With d = exp(g), S the state before and w = beta * (v - (d S)^T k):

    S_new = d S + k w^T,   S_new^T q = (d S)^T q + (k . q) w

  Key channels run down the sublanes of a state. Moving what multiplies them (d, k, q) from lanes to sublanes, and to
  all lanes, takes more cycles than the rest of the step; a product with ones in the idle matrix unit takes fewer. It is
  exact: a float32 is the sum of three bfloat16.

  Args:
    thirds: d, k and q as columns, in three parts each, in the form of `_thirds_scratch`.
    factors: [8, V], rows v, beta and k . q.
    state: [K, V], a reference.
    o: [1, V], a reference.
    select: Of `_selector`.
  """
  # Named, since Mosaic refuses "highest", which may be the caller's default, for bfloat16.
  thirds = _unpack(thirds)
  columns = jax.lax.dot_general(
    thirds,
    select.astype(thirds.dtype),
    (((1,), (0,)), ((), ())),
    precision=jax.lax.Precision.DEFAULT,
    preferred_element_type=jnp.float32,
  )
  decay_KV, key_KV, query_KV = jnp.split(columns, 3, axis=1)
  value, beta, qk = (factors[i : i + 1] for i in (_VALUE, _BETA, _QK))
  decayed_KV = state[...] * decay_KV
  w = beta * (value - jnp.sum(key_KV * decayed_KV, axis=0, keepdims=True))
  o[...] = jnp.sum(query_KV * decayed_KV, axis=0, keepdims=True) + qk * w
  state[...] = decayed_KV + key_KV * w


def _truncate(x: Float32[Array, "8 K"]) -> Float32[Array, "8 K"]:
  """The upper half of each number's bits: what bfloat16 holds. A compiler may drop a cast there and back."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _selector(value_dim: int):
  """[24, 3 V]: for each of d, k and q, V columns with ones where its thirds are, and zeros elsewhere."""
  shape = (3 * _SUBLANES, 3 * value_dim)
  row = jax.lax.broadcasted_iota(jnp.int32, shape, 0) % _SUBLANES
  return (row == jax.lax.broadcasted_iota(jnp.int32, shape, 1) // value_dim).astype(jnp.float32)
