"""The routed experts with a gradient, for training: nothing is dropped, nothing is as large as tokens x experts.

Rows are sorted by expert and walked over in tiles of one expert each, as in kimi_k3.moe.experts. How many tiles there
are depends on the choices, so this is a loop that JAX cannot differentiate; the gradient is written here, as a second
walk over the same tiles. Only the arguments are kept for it: gate and up are computed again.

For a token's row x, its output gradient g, an expert's w1, w3, w2 and the combine weight c:

  a, b = x w1, x w3        h = act(a, b)        out += c h w2
  q = g w2^T               dc = <h, q>          dw2 += (c h)^T g
  da, db = act'(a, b)^T c q                     dw1 += x^T da      dw3 += x^T db      dx += da w1^T + db w3^T
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from kimi_k3.activations import gated_activation
from kimi_k3.config import ComputeConfig, KimiK3Config
from kimi_k3.sharding import Placement

# Of fewer rows there are more tiles, each of which reads and writes an expert's matrices; of more, more are padding.
_TILE_ROWS = (128, 256, 512, 1024)
_TILES_AN_EXPERT = 4


class Matrices(NamedTuple):
  """The experts' weights: `w1`, `w3` [E, L, F] and `w2` [E, F, L], in any float dtype."""

  w1: Array
  w3: Array
  w2: Array


def dropless_experts(
  x: Float[Array, "N L"],
  ids: Int[Array, "N S"],
  weights: Float[Array, "N S"],
  matrices: Matrices,
  *,
  config: KimiK3Config,
  compute: ComputeConfig,
  tile_rows: int | None = None,
) -> Float[Array, "N L"]:
  """Returns the weighted sum over those of each token's experts that are in `matrices`, float32, with a gradient.

  The gradient goes to `x`, `weights` and the matrices, each in its own dtype; sums are float32 until then.

  Args:
    x: Input of the experts.
    ids: Chosen experts of each token, all different; any number outside 0 .. E - 1 is an expert elsewhere.
    weights: Combine weights, float32.
    matrices: Of E experts.
    config: Activation.
    compute: Dtype and precision of the products, which are accumulated in float32.
    tile_rows: Most rows of one expert at a time; None: by how many an expert gets on average.
  """
  return _differentiable(x, ids, weights, matrices, config, compute, tile_rows=tile_rows)


def sharded_experts(
  x: Float[Array, "N L"],
  ids: Int[Array, "N S"],
  weights: Float[Array, "N S"],
  matrices: Matrices,
  placement: Placement,
  *,
  config: KimiK3Config,
  compute: ComputeConfig,
) -> Float[Array, "N L"]:
  """Returns what `dropless_experts` does, of arrays on many devices, under jit.

  The compiler cannot partition a loop whose length hangs on the choices, so this is one jax.shard_map. Each device
  gathers the tokens of those that hold other experts or widths, and the inputs of its own matrices; runs its experts;
  and the sums are scattered back. The transposes of these collectives are those of the gradient: each device ends with
  that of its own tokens and its own part of the matrices.

  Args:
    x: As there, as are the following. N is of all devices.
    ids: Out of 0 .. E - 1, or E for none.
    weights: Float32.
    matrices: Of all experts.
    placement: From kimi_k3.sharding.expert_placement.
    config: As there.
    compute: As there.

  Raises:
    InputError: if the mesh does not divide tokens, experts or sizes.
  """
  mesh, tokens, experts, widths, inputs = (getattr(placement, f.name) for f in dataclasses.fields(placement))
  num_experts, num_inputs, width = matrices.w1.shape
  placement.check_divides(tokens=x.shape[0], experts=num_experts, widths=width, inputs=num_inputs)
  cut = (*experts, *widths)
  gathered = tuple(axis for axis in tokens if axis in cut)
  summed = tuple(axis for axis in cut if axis not in gathered)
  alike = tuple(axis for axis in inputs if axis not in (*tokens, *cut))  # their devices compute the same
  every = (*tokens, *summed, *alike)

  def local(x: Array, ids: Array, weights: Array, w1: Array, w3: Array, w2: Array) -> Array:
    def whole(a: Array, axis: int, names: tuple[str, ...]) -> Array:
      return jax.lax.all_gather(a, names, axis=axis, tiled=True) if names else a

    def varying(a: Array, *already: str) -> Array:
      # Each device has a gradient of its own even of what is the same on all; the transpose of this adds them up.
      axes = tuple(axis for axis in every if axis not in already)
      return jax.lax.pcast(a, axes, to="varying") if axes else a

    x, ids, weights = (varying(whole(a, 0, gathered), *tokens) for a in (x, ids, weights))
    gathered_inputs = (whole(w1, 1, inputs), whole(w3, 1, inputs), whole(w2, 2, inputs))
    matrices = Matrices(*(varying(w, *cut, *inputs) for w in gathered_inputs))
    if experts:
      ids = ids - jax.lax.axis_index(experts) * w1.shape[0]
    y = _differentiable(x, ids, weights, matrices, config, compute, axes=every)
    if gathered:
      y = jax.lax.psum_scatter(y, gathered, scatter_dimension=0, tiled=True)
    y = jax.lax.psum(y, summed) if summed else y
    return jax.lax.pmean(y, alike) if alike else y

  rows, into, out = P(tokens), P(experts, inputs, widths), P(experts, widths, inputs)
  run = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, rows, into, into, out), out_specs=rows)
  return run(x, ids, weights, *matrices)


class _Static(NamedTuple):
  """What is no array."""

  config: KimiK3Config
  compute: ComputeConfig
  tile_rows: int
  axes: tuple[str, ...]  # of a shard_map: those along which the arrays differ


def _differentiable(
  x: Array,
  ids: Array,
  weights: Array,
  matrices: Matrices,
  config: KimiK3Config,
  compute: ComputeConfig,
  *,
  tile_rows: int | None = None,
  axes: tuple[str, ...] = (),
) -> Array:
  num_experts = matrices.w1.shape[0]
  ids = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts).astype(jnp.int32)
  tile_rows = min(tile_rows or _tile_rows(ids.size / config.num_experts), x.shape[0])
  return _dropless(_Static(config, compute, tile_rows, axes), x, ids, weights, matrices)


def _tile_rows(rows_an_expert: float) -> int:
  """Rows of a tile, when an expert gets so many on average: a few tiles each, the last of them half empty."""
  wanted = rows_an_expert / _TILES_AN_EXPERT
  return next((rows for rows in _TILE_ROWS if rows >= wanted), _TILE_ROWS[-1])


def _zeros(static: _Static, a: Array) -> Array:
  zeros = jnp.zeros(a.shape, jnp.float32)
  return jax.lax.pcast(zeros, static.axes, to="varying") if static.axes else zeros


class _Tiles(NamedTuple):
  """Rows sorted by expert, and where each expert's tiles begin. Rows of no expert here come last, in no tile."""

  order_R: Array  # position in the flat (token, choice) list of each sorted row
  first_row_E: Array
  num_rows_E: Array
  first_tile_E: Array
  num_tiles: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dropless(static: _Static, x: Array, ids: Array, weights: Array, matrices: Matrices) -> Array:
  tiles, flat_weights_R = _sort(ids, matrices.w1.shape[0], static.tile_rows), weights.reshape(-1)

  def one_tile(tile, total):
    e, slot, real = _rows_of(tiles, tile, static.tile_rows)
    token = slot // ids.shape[1]
    w1, w3, w2 = _expert(static, matrices, e)
    rows = x[token].astype(w1.dtype)
    hidden = gated_activation(static.config, _dot(static, rows, w1), _dot(static, rows, w3))
    y = _dot(static, hidden.astype(w2.dtype), w2) * flat_weights_R[slot][:, None]
    return total.at[token].add(jnp.where(real, y, 0.0))

  return jax.lax.fori_loop(0, tiles.num_tiles, one_tile, _zeros(static, x))


def _forward(static: _Static, x: Array, ids: Array, weights: Array, matrices: Matrices):
  return _dropless(static, x, ids, weights, matrices), (x, ids, weights, matrices)


def _backward(static: _Static, saved: Any, g: Array):
  x, ids, weights, matrices = saved
  tiles, flat_weights_R = _sort(ids, matrices.w1.shape[0], static.tile_rows), weights.reshape(-1)

  def one_tile(tile, carry):
    dx, dweights_R, d1, d3, d2 = carry
    e, slot, real = _rows_of(tiles, tile, static.tile_rows)
    token = slot // ids.shape[1]
    w1, w3, w2 = _expert(static, matrices, e)
    dtype = w1.dtype
    # What is not real is another expert's row: as 0 it adds nothing to a sum over rows, whatever it holds.
    rows = jnp.where(real, x[token], 0).astype(dtype)
    out = jnp.where(real, g[token], 0.0)
    combine = flat_weights_R[slot][:, None]
    hidden, activation_vjp = jax.vjp(
      functools.partial(gated_activation, static.config), _dot(static, rows, w1), _dot(static, rows, w3)
    )
    hidden = hidden.astype(dtype)
    q = _dot(static, out.astype(dtype), w2, (1, 1))
    da, db = (d.astype(dtype) for d in activation_vjp(combine * q))
    add = functools.partial(_add_to_expert, e=e)
    back = _dot(static, da, w1, (1, 1)) + _dot(static, db, w3, (1, 1))
    return (
      dx.at[token].add(back),
      dweights_R.at[slot].add(jnp.sum(hidden.astype(jnp.float32) * q, axis=1)),
      add(d1, _dot(static, rows, da, (0, 0))),
      add(d3, _dot(static, rows, db, (0, 0))),
      add(d2, _dot(static, hidden, (combine * out).astype(dtype), (0, 0))),
    )

  start = jax.tree.map(functools.partial(_zeros, static), (x, flat_weights_R, *matrices))
  dx, dweights_R, d1, d3, d2 = jax.lax.fori_loop(0, tiles.num_tiles, one_tile, start)
  dmatrices = Matrices(*(d.astype(w.dtype) for d, w in zip((d1, d3, d2), matrices, strict=True)))
  return dx.astype(x.dtype), None, dweights_R.reshape(weights.shape).astype(weights.dtype), dmatrices


_dropless.defvjp(_forward, _backward)


def _sort(ids: Int[Array, "N S"], num_experts: int, tile_rows: int) -> _Tiles:
  flat = ids.reshape(-1)
  num_rows_E = jnp.zeros((num_experts,), jnp.int32).at[flat].add(1)
  num_tiles_E = -(-num_rows_E // tile_rows)
  last_tile_E = jnp.cumsum(num_tiles_E)
  first_row_E = jnp.cumsum(num_rows_E) - num_rows_E
  order = jnp.argsort(flat, stable=True).astype(jnp.int32)
  return _Tiles(order, first_row_E, num_rows_E, last_tile_E - num_tiles_E, last_tile_E[-1])


def _rows_of(tiles: _Tiles, tile: Array, tile_rows: int) -> tuple[Array, Array, Array]:
  """A tile's expert, the places of its rows in the flat (token, choice) list, and which rows are its own [rows, 1]."""
  e = jnp.sum(tiles.first_tile_E <= tile) - 1  # the last one to begin by then; a search would be a loop of its own
  row = (tile - tiles.first_tile_E[e]) * tile_rows + jnp.arange(tile_rows, dtype=jnp.int32)
  real = row < tiles.num_rows_E[e]
  return e, tiles.order_R[jnp.where(real, tiles.first_row_E[e] + row, 0)], real[:, None]


def _expert(static: _Static, matrices: Matrices, e: Array) -> Matrices:
  one = (jax.lax.dynamic_index_in_dim(w, e, 0, keepdims=False).astype(static.compute.dtype) for w in matrices)
  return Matrices(*one)


def _add_to_expert(total: Float[Array, "E I O"], d: Float[Array, "I O"], *, e: Array) -> Float[Array, "E I O"]:
  return jax.lax.dynamic_update_index_in_dim(total, jax.lax.dynamic_index_in_dim(total, e, 0) + d[None], e, 0)


def _dot(static: _Static, a: Array, b: Array, contract: tuple[int, int] = (1, 0)) -> Array:
  """Product of two matrices over the axes named, accumulated in float32."""
  return jax.lax.dot_general(
    a,
    b,
    (((contract[0],), (contract[1],)), ((), ())),
    precision=static.compute.precision,
    preferred_element_type=jnp.float32,
  )
