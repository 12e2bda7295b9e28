"""The TPU kernel of MLA prefill: flash attention over blocks of keys, which goes on from an earlier state.

All is transposed, queries along the lanes: the maxima and sums over keys are then plain vector operations, and the
statistics of a query are rows. Keys are the 128-wide part of each head and the tail that all heads share, joined in
VMEM. The causal grid folds the triangle of blocks into a rectangle: no step of it is idle, and there is no mask array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

BLOCK = 1024  # queries, and keys; see docs/decisions/0014-mla-on-devices.md
_LANES = 128
_ONES = 16  # rows of the smallest tile of a 16-bit dtype
_RISE = 20.0  # weights up to e^20: far from the largest float32 and bfloat16, also summed
_VMEM_BYTES = 56 * 2**20  # of 64 MiB on a tpu7x


class Softmax(NamedTuple):
  """A softmax over the keys so far; queries come last.

  Attributes:
    values: Sum of the weighted values.
    largest: The score that weights are relative to: the largest so far, or at most 20 below it.
    total: Sum of the weights.
  """

  values: Float[Array, "R h V T"]
  largest: Float[Array, "R h 1 T"]
  total: Float[Array, "R h 1 T"]


class Keys(NamedTuple):
  """Keys and their values: each head's part, the tail that all heads share, the values transposed. All finite."""

  nope: Float[Array, "R h G N"]
  tail: Float[Array, "R G Y"]
  values: Float[Array, "R h V G"]


def start_softmax(q: Float[Array, "R h K T"], num_values: int) -> Softmax:
  """Returns the state before any key, in float32."""
  rows, heads, _, tokens = q.shape
  row = (rows, heads, 1, tokens)
  values = jnp.zeros((rows, heads, num_values, tokens), jnp.float32)
  return Softmax(values, jnp.full(row, -jnp.inf, jnp.float32), jnp.zeros(row, jnp.float32))


class _Call(NamedTuple):
  """One call of the kernel: `place` maps (row, i, j) of the grid to blocks of queries and keys, and if they meet."""

  grid: tuple[int, ...]
  place: Callable[..., tuple[Any, Any, Any]]
  causal: bool
  queries: int
  keys: int
  precision: Any
  interpret: bool


def flash_causal(
  state: Softmax | None,
  q: Float[Array, "R h K T"],
  keys: Keys,
  lengths: Int[Array, " R"],
  *,
  precision: Any,
  interpret: bool = False,
  block: int = BLOCK,
) -> Float[Array, "R h V T"]:
  """Returns the attention output in q's dtype: query t sees keys 0 to t, and what the state has seen.

  Args:
    state: Of other keys that every query sees; None: there are none.
    q: Scaled queries.
    keys: One for each query.
    lengths: Real tokens of each row; the output is undefined in pads.
    precision: Of the products of float32 operands.
    interpret: Runs on any backend.
    block: Queries and keys of a step.
  """
  rows, heads, _, tokens = q.shape
  block, padded = _blocks(tokens, block)
  count = padded // block

  def place(row, i, j, low, high):
    del low
    first = j <= i  # row i of the triangle of blocks, then row count - 1 - i: count + 1 steps together
    at_q = jnp.where(first, i, count - 1 - i)
    used = (first | (count - 1 - i != i)) & (at_q * block < high[row])
    return at_q, jnp.where(used, jnp.where(first, j, j - i - 1), 0), used

  grid = (rows, heads, pl.cdiv(count, 2), count + 1)
  call = _Call(grid, place, True, block, block, precision, interpret)
  padded_state = None if state is None else Softmax(*(_pad(x, 3, padded) for x in state))
  (o,) = _run(call, padded_state, _pad(q, 3, padded), _pad_keys(keys, padded), jnp.zeros_like(lengths), lengths)
  return o[..., :tokens]


def flash_all(
  state: Softmax,
  q: Float[Array, "R h K T"],
  keys: Keys,
  low: Int[Array, " R"],
  high: Int[Array, " R"],
  *,
  precision: Any,
  interpret: bool = False,
  block: int = BLOCK,
) -> Softmax:
  """Returns the state after keys low to high - 1 of each row, which every query sees.

  The arguments are those of `flash_causal`. Where the tokens are a multiple of the block the state is updated in place.
  """
  rows, heads, _, tokens = q.shape
  block_q, padded = _blocks(tokens, block)
  block_k, padded_k = _blocks(keys.tail.shape[1], block)

  def place(row, i, j, low, high):
    used = (j * block_k < high[row]) & ((j + 1) * block_k > low[row]) & (low[row] < high[row])
    return i, jnp.clip(j, low[row] // block_k, jnp.maximum(high[row] - 1, 0) // block_k), used

  grid = (rows, heads, padded // block_q, padded_k // block_k)
  call = _Call(grid, place, False, block_q, block_k, precision, interpret)
  padded_state = Softmax(*(_pad(x, 3, padded) for x in state))
  after = _run(call, padded_state, _pad(q, 3, padded), _pad_keys(keys, padded_k), low, high)
  return Softmax(*(x[..., :tokens] for x in after))


def _blocks(length: int, block: int) -> tuple[int, int]:
  """The block and the padded length: whole blocks of a multiple of the lanes."""
  block = min(block, -(-length // _LANES) * _LANES)
  return block, -(-length // block) * block


def _pad(x: Array, axis: int, length: int) -> Array:
  return jnp.pad(x, [(0, length - x.shape[axis] if a == axis else 0) for a in range(x.ndim)])


def _pad_keys(keys: Keys, length: int) -> Keys:
  return Keys(_pad(keys.nope, 2, length), _pad(keys.tail, 1, length), _pad(keys.values, 3, length))


def _run(call: _Call, state: Softmax | None, q: Array, keys: Keys, low: Array, high: Array) -> tuple[Array, ...]:
  rows, heads, width, tokens = q.shape
  num_values = keys.values.shape[2]

  def spec(block_shape: tuple, where: Callable) -> pl.BlockSpec:
    def index(r, h, i, j, low, high):
      return where(r, h, *call.place(r, i, j, low, high)[:2])

    return pl.BlockSpec(block_shape, index)

  def by_query(n: int) -> pl.BlockSpec:
    return spec((1, 1, n, call.queries), lambda r, h, i, _: (r, h, 0, i))

  def shape(n: int, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, heads, n, tokens), dtype)

  state_specs = [by_query(num_values), by_query(1), by_query(1)]
  in_specs = [
    by_query(width),
    spec((1, 1, call.keys, keys.nope.shape[-1]), lambda r, h, _, j: (r, h, j, 0)),
    spec((1, call.keys, keys.tail.shape[-1]), lambda r, _h, _, j: (r, j, 0)),
    spec((1, 1, num_values, call.keys), lambda r, h, _, j: (r, h, 0, j)),
    *(state_specs if state is not None else []),
  ]
  statistics = [shape(n, jnp.float32) for n in (num_values, 1, 1)]
  return tuple(
    pl.pallas_call(
      functools.partial(_kernel, call=call, has_state=state is not None),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=call.grid,
        in_specs=in_specs,
        out_specs=[by_query(num_values)] if call.causal else state_specs,
        scratch_shapes=[
          *(pltpu.VMEM((n, call.queries), jnp.float32) for n in (num_values, 1, 1, 1, num_values + _ONES)),
          pltpu.SMEM((1,), jnp.int32),
        ],
      ),
      out_shape=[shape(num_values, q.dtype)] if call.causal else statistics,
      input_output_aliases={} if call.causal else {6: 0, 7: 1, 8: 2},
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
      ),
      interpret=call.interpret,
      name="flash_causal" if call.causal else "flash_all",
    )(low, high, q, keys.nope, keys.tail, keys.values, *(state or ()))
  )


class _Scratch(NamedTuple):
  """The softmax of a block of queries, and what a block of keys would add to it."""

  values: Any
  largest: Any  # what weights are relative to: the largest score, or at most _RISE below it
  total: Any
  rise: Any
  sums: Any
  again: Any  # whether the keys are still to be added


def _kernel(low_ref, high_ref, q_ref, nope_ref, tail_ref, values_ref, *refs, call: _Call, has_state: bool):
  state_refs, refs = (refs[:3], refs[3:]) if has_state else ((), refs)
  out_refs, scratch = refs[: -len(_Scratch._fields)], _Scratch(*refs[-len(_Scratch._fields) :])
  row, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
  at_q, at_k, used = call.place(row, i, j, low_ref, high_ref)
  low, high = low_ref[row] - at_k * call.keys, high_ref[row] - at_k * call.keys
  if call.causal:
    first, last, edge = used & (at_k == 0), used & (at_k == at_q), at_k == at_q
  else:
    first, last, edge = j == 0, j == call.grid[3] - 1, (low > 0) | (high < call.keys)
  block = _Block(q_ref, nope_ref, tail_ref, values_ref, scratch, call.precision)

  @pl.when(first)
  def _():
    if has_state:
      for to, of in zip(scratch, state_refs, strict=False):
        to[...] = of[0, 0]
    else:
      scratch.values[...] = jnp.zeros_like(scratch.values)
      scratch.largest[...] = jnp.full_like(scratch.largest, -jnp.inf)
      scratch.total[...] = jnp.zeros_like(scratch.total)

  def visible(key, query):
    return key <= query if call.causal else (key >= low) & (key < high)

  pl.when(used & edge)(lambda: block.add(visible))
  # Without a state the first keys have nothing that their weights could be relative to.
  scratch.again[0] = jnp.where(used & ~edge, 1, 0)
  pl.when(used & ~edge if has_state else used & ~edge & ~first)(block.add_fast)
  pl.when(scratch.again[0] == 1)(lambda: block.add(None))

  @pl.when(last)
  def _():
    if call.causal:
      out_refs[0][0, 0] = (scratch.values[...] / scratch.total[...]).astype(out_refs[0].dtype)
    else:
      for to, of in zip(out_refs, scratch, strict=False):
        to[0, 0] = of[...]


class _Block(NamedTuple):
  """Queries, keys and values of one step."""

  q: Any
  nope: Any
  tail: Any
  values: Any
  scratch: _Scratch
  precision: Any

  def add(self, visible: Callable | None):
    """Adds the keys to the softmax, those that `visible` shows by their numbers in the block; all where it is None."""
    score, scratch = self._scores(), self.scratch
    if visible is not None:
      key, query = (jax.lax.broadcasted_iota(jnp.int32, score.shape, axis) for axis in (0, 1))
      score = jnp.where(visible(key, query), score, -jnp.inf)
    before = scratch.largest[...]
    largest = jnp.maximum(before, jnp.max(score, axis=0, keepdims=True))
    scale = jnp.exp(before - largest)
    scratch.largest[...] = largest
    self._sum(jnp.exp(score - largest))
    self._add_sums(scale)

  def add_fast(self):
    """Adds all keys relative to the largest score before them, unless one rises far above it: then `again` stays set.

    Weights need not wait for the largest of all scores, which would hold the block's scores in memory meanwhile.
    Relative to a score that is a little lower the softmax is the same.
    """
    score, scratch = self._scores(), self.scratch
    before = scratch.largest[...]
    scratch.rise[...] = jnp.max(score, axis=0, keepdims=True) - before
    self._sum(jnp.exp(score - before))
    small = jnp.max(scratch.rise[...]) <= _RISE  # not where a score is NaN

    @pl.when(small)
    def _():
      self._add_sums(1.0)
      scratch.again[0] = 0

  def _scores(self):
    q, nope, tail = self.q[0, 0], self.nope[0, 0], self.tail[0]
    width = nope.shape[-1]
    if width % _LANES == 0:  # joined in registers: one pass through a 256-deep matrix unit
      return _dot(jnp.concatenate([nope, tail], axis=-1), q, self.precision)
    return _dot(nope, q[:width], self.precision) + _dot(tail, q[width:], self.precision)

  def _sum(self, weight):
    # Rows of ones sum the weights in the matrix unit, as it does the values: vector operations are scarcer.
    values = self.values[0, 0]
    values = jnp.concatenate([values, jnp.ones((_ONES, values.shape[1]), values.dtype)], axis=0)
    self.scratch.sums[...] = _dot(values, weight.astype(values.dtype), self.precision)

  def _add_sums(self, scale):
    values, total, sums = self.scratch.values, self.scratch.total, self.scratch.sums
    count = values.shape[0]
    total[...] = total[...] * scale + sums[count : count + 1]
    values[...] = values[...] * scale + sums[:count]


def _dot(a, b, precision: Any):
  # 16-bit operands have one precision; the compiler refuses another, as a default set elsewhere would be.
  precision = precision if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
  return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
