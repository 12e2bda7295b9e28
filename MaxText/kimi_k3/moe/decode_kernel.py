"""The routed experts of few tokens, in one Pallas kernel for TPU: gate, up, activation, down and combine in one pass.

A visit is one expert with up to 8 of its tokens; the grid is (visits) x (blocks of the expert's width). A block reads
its part of w1, w3 and w2 from the stack in HBM, packed as it is there. Experts that no token chose are never read.

The codes go to the matrix unit without their scales, in a type that holds them exactly: float8_e4m3fn with bfloat16 on
the other side, which halves what is pushed into the unit and leaves nothing to round. A scale belongs to 32 inputs, so
the rows are laid out as a block diagonal: row 8 g + r holds token r at the inputs of group g, and 0 elsewhere. One
product over 8 groups then gives the sums of each group apart, [8 groups x 8 tokens, outputs], and these are scaled and
added in float32. See docs/decisions/0012-expert-decode-kernel.md for what else was tried.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kimi_k3.activations import gated_activation
from kimi_k3.config import MXFP4_GROUP, ComputeConfig, KimiK3Config
from kimi_k3.errors import InputError
from kimi_k3.moe.packed import ExpertStack, Form

MAX_TOKENS = 512  # their input and output stay in VMEM; and an expert is read again for every 8 of its tokens
KERNEL_NAME = "expert_decode"
VISIT_ROWS = 8  # tokens a visit: rows of a float32 register
_TILE = VISIT_ROWS * MXFP4_GROUP  # inputs of one product: the matrix unit's depth, 8 groups
_COLUMNS = 512  # outputs of one product: both matrix units
_BLOCK = 1536  # of the expert's width; larger blocks spread the cost of a grid step over more weights
_VMEM_BYTES = 56 * 2**20  # of 64 MiB


class Schedule(NamedTuple):
  """What the kernel reads ahead as scalars. V is a bound on the number of visits."""

  expert_V: Array  # int32: expert of each visit
  first_V: Array  # int32: its first token's place in the expert's list
  sizes: Array  # int32 [2]: visits, layer
  count_E: Array  # int32: tokens of each expert
  token_EN: Array  # int32, flat: tokens of each expert, in order
  share_EN: Array  # float32, flat: their combine weights


def decode_experts(
  x: Float[Array, "N L"],
  ids: Int[Array, "N S"],
  weights: Float[Array, "N S"],
  stack: ExpertStack,
  layer: Int[Array, ""],
  *,
  config: KimiK3Config,
  compute: ComputeConfig,
  interpret: bool = False,
) -> Float[Array, "N L"]:
  """Returns the weighted sum over each token's experts in the stack, float32.

  Args:
    x: Input of the experts; rows without an expert here may hold anything.
    ids: Experts of each token, all different, E for one that is not here.
    weights: Combine weights, float32.
    stack: In the form float4 or nibbles.
    layer: Which layer of the stack.
    config: Activation.
    compute: Compute dtype of rows and hidden values. Products are accumulated, and scaled, in float32.
    interpret: Runs in interpret mode.

  Raises:
    InputError: if there are more than MAX_TOKENS rows.
  """
  num_rows = x.shape[0]
  if num_rows > MAX_TOKENS:
    raise InputError(
      f"expert_implementation 'decode_kernel' takes at most {MAX_TOKENS} tokens a call, found {num_rows}: use 'grouped'"
    )
  # Float32 rows: one row of a packed type cannot be addressed by a number known only at run time.
  rows = jnp.pad(x.astype(compute.dtype).astype(jnp.float32), ((0, -num_rows % VISIT_ROWS), (0, 0)))
  schedule = make_schedule(ids, weights, stack.num_experts, layer)
  return _call(schedule, rows, stack, config=config, compute=compute, interpret=interpret)[:num_rows]


def make_schedule(ids: Int[Array, "N S"], weights: Float[Array, "N S"], num_experts: int, layer: Array) -> Schedule:
  """Returns the visits: experts in order, each with its tokens by eights. By comparisons; a sort would be slower."""
  num_rows, num_choices = ids.shape
  chosen_NSE = ids[..., None] == jnp.arange(num_experts, dtype=jnp.int32)
  chosen_NE = jnp.any(chosen_NSE, axis=1)
  share_NE = jnp.sum(jnp.where(chosen_NSE, weights[..., None].astype(jnp.float32), 0.0), axis=1)
  place_NE = jnp.where(chosen_NE, jnp.cumsum(chosen_NE, axis=0, dtype=jnp.int32) - 1, num_rows)
  count_E = jnp.sum(chosen_NE, axis=0, dtype=jnp.int32)
  at_ENN = place_NE.T[:, None, :] == jnp.arange(num_rows, dtype=jnp.int32)[None, :, None]  # [E, place, token]
  token_EN = jnp.sum(jnp.where(at_ENN, jnp.arange(num_rows, dtype=jnp.int32)[None, None, :], 0), axis=2)
  share_EN = jnp.sum(jnp.where(at_ENN, share_NE.T[:, None, :], 0.0), axis=2)
  visits_E = -(-count_E // VISIT_ROWS)
  end_E = jnp.cumsum(visits_E)
  bound = num_experts + num_rows * min(num_choices, num_experts) // VISIT_ROWS
  visit = jnp.arange(bound, dtype=jnp.int32)
  expert_V = jnp.sum(end_E[None, :] <= visit[:, None], axis=1, dtype=jnp.int32)
  expert_V = jnp.minimum(expert_V, num_experts - 1)  # places past the last visit; the first of them if none is hit
  before_V = jnp.sum(jnp.where(end_E[None, :] <= visit[:, None], visits_E[None, :], 0), axis=1)
  first_V = (visit - before_V) * VISIT_ROWS
  sizes = jnp.stack([end_E[-1], layer]).astype(jnp.int32)
  return Schedule(expert_V, first_V, sizes, count_E, token_EN.reshape(-1), share_EN.reshape(-1))


def _call(
  schedule: Schedule, rows: Array, stack: ExpertStack, *, config: KimiK3Config, compute: ComputeConfig, interpret: bool
) -> Array:
  num_rows, latent = rows.shape
  width, form, dtype = stack.w1.shape[-1], stack.form, jnp.dtype(compute.dtype)
  block = _block(width)
  codes_a_row = MXFP4_GROUP if form == "float4" else MXFP4_GROUP // 2  # rows of codes for one row of scales

  def weight(groups: int, columns: int, index) -> list[pl.BlockSpec]:
    def at(i, j, expert, _first, sizes, *_):
      return sizes[1], expert[i], *index(j)

    return [pl.BlockSpec((None, None, n, columns), at) for n in (groups * codes_a_row, groups)]

  whole = pl.BlockSpec((num_rows, latent), lambda *_: (0, 0))
  into = weight(latent // MXFP4_GROUP, block, lambda j: (0, j))
  down = weight(block // MXFP4_GROUP, latent, lambda j: (j, 0))
  grid_spec = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=len(schedule),
    # At least one step, which then only clears the output.
    grid=(jnp.maximum(schedule.sizes[0], 1), width // block),
    in_specs=[whole, *into, *into, *down],
    out_specs=whole,
    scratch_shapes=[
      pltpu.VMEM((VISIT_ROWS, latent), jnp.float32),  # the visit's rows
      pltpu.VMEM((VISIT_ROWS, latent), jnp.float32),  # the visit's output
      pltpu.VMEM((_diagonal_rows(latent), _TILE), dtype),  # the visit's rows, block diagonal
      *(pltpu.VMEM((latent // MXFP4_GROUP, block), jnp.float32) for _ in range(2)),  # scales as floats
      pltpu.VMEM((block // MXFP4_GROUP, latent), jnp.float32),
    ],
  )
  expert_weights = 3 * latent * width
  return pl.pallas_call(
    functools.partial(_kernel, config=config, precision=_precision(compute), form=form),
    out_shape=jax.ShapeDtypeStruct((num_rows, latent), jnp.float32),
    grid_spec=grid_spec,
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM_BYTES, dimension_semantics=("arbitrary", "arbitrary")),
    cost_estimate=pl.CostEstimate(
      flops=2 * VISIT_ROWS * expert_weights * stack.num_experts,
      bytes_accessed=expert_weights * stack.num_experts * (MXFP4_GROUP // 2 + 1) // MXFP4_GROUP,
      transcendentals=3 * VISIT_ROWS * stack.num_experts * width,
    ),
    interpret=interpret,
    name=KERNEL_NAME,
  )(*schedule, rows, *stack)


def _precision(compute: ComputeConfig) -> jax.lax.Precision:
  """Of products. Those of bfloat16 and codes are exact at any precision, and Mosaic takes only the default for them."""
  return jax.lax.Precision(compute.precision if jnp.dtype(compute.dtype) == jnp.float32 else "default")


def blocks_of(width: int) -> int:
  """Returns in how many blocks the kernel walks through an expert of a width."""
  return width // _block(width)


def _block(width: int) -> int:
  """The largest part of an expert's width that divides it, is at most _BLOCK and has scales for whole registers."""
  parts = [b for b in range(_TILE, min(width, _BLOCK) + 1, _TILE) if width % b == 0]
  return max(parts, default=width)


def _tiles(size: int, step: int) -> list[tuple[int, int]]:
  """Start and size of the parts of at most `step`."""
  return [(start, min(step, size - start)) for start in range(0, size, step)]


def _diagonal_rows(num_inputs: int) -> int:
  return num_inputs // MXFP4_GROUP * VISIT_ROWS


def _kernel(
  expert, first, sizes, count, token, share, rows, w1, s1, w3, s3, w2, s2, out, mine, y, diagonal, f1, f3, f2,
  *, config: KimiK3Config, precision, form: Form,
):  # fmt: skip
  i, j = pl.program_id(0), pl.program_id(1)
  num_rows = share.shape[0] // count.shape[0]
  e = expert[i]
  here = jnp.minimum(count[e] - first[i], VISIT_ROWS)  # tokens of the visit
  place = e * num_rows + first[i]

  @pl.when((i == 0) & (j == 0))
  def _():
    @pl.loop(0, out.shape[0], step=VISIT_ROWS)  # not unrolled: the code would grow with the tokens
    def _(start):
      out[pl.ds(start, VISIT_ROWS), :] = jnp.zeros((VISIT_ROWS, out.shape[1]), out.dtype)

  @pl.when((i < sizes[0]) & (j == 0))
  def _():
    y[...] = jnp.zeros_like(y)
    mine[...] = jnp.zeros_like(mine)

    @pl.loop(0, here)
    def _(r):
      mine[pl.ds(r, 1), :] = rows[pl.ds(token[place + r], 1), :]

    for start, size in _tiles(rows.shape[1], _TILE):
      tile = _block_diagonal(mine[:, pl.ds(start, size)], diagonal.dtype)
      diagonal[pl.ds(_diagonal_rows(start), _diagonal_rows(size)), pl.ds(0, size)] = tile

  @pl.when(i < sizes[0])
  def _():
    for scales, factors in ((s1, f1), (s3, f3), (s2, f2)):
      factors[...] = jax.lax.bitcast_convert_type(scales[...].astype(jnp.int32) << 23, jnp.float32)
    product = functools.partial(_product, form=form, precision=precision)
    tiles = []
    for start, size in _tiles(rows.shape[1], _TILE):
      tile = diagonal[pl.ds(_diagonal_rows(start), _diagonal_rows(size)), pl.ds(0, size)]
      tiles.append(((start, size), tile))
    hidden = []
    for column in _tiles(w1.shape[1], _COLUMNS):
      gate, up = product(tiles, w1, f1, column), product(tiles, w3, f3, column)
      hidden.append(gated_activation(config, gate, up).astype(diagonal.dtype).astype(jnp.float32))
    hidden = jnp.concatenate(hidden, axis=1)
    parts = _tiles(hidden.shape[1], _TILE)
    tiles = [(part, _block_diagonal(hidden[:, part[0] : sum(part)], diagonal.dtype)) for part in parts]
    for column in _tiles(rows.shape[1], _COLUMNS):
      y[:, pl.ds(*column)] += product(tiles, w2, f2, column)

  @pl.when((i < sizes[0]) & (j == pl.num_programs(1) - 1))
  def _():
    @pl.loop(0, here)
    def _(r):
      out[pl.ds(token[place + r], 1), :] += share[place + r] * y[pl.ds(r, 1), :]


def _block_diagonal(x: Float[Array, "8 inputs"], dtype) -> Float[Array, "groups_x_8 inputs"]:
  """Row 8 g + r is row r at the inputs of group g, 0 elsewhere."""
  groups = x.shape[1] // MXFP4_GROUP
  group_of_input = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) // MXFP4_GROUP
  return jnp.concatenate([jnp.where(group_of_input == g, x, 0.0) for g in range(groups)], axis=0).astype(dtype)


def _product(tiles, codes, factors, column, *, form: Form, precision) -> Float[Array, "8 outputs"]:
  """Rows times weights, for some of the outputs, float32.

  Args:
    tiles: ((first input, inputs), block diagonal rows) of each part of the inputs.
    codes: Reference to the codes of all inputs.
    factors: Reference to their scales as floats [groups, outputs].
    column: First output and number of outputs.
    form: Of the codes.
    precision: Of the products.
  """
  total = jnp.zeros((VISIT_ROWS, column[1]), jnp.float32)
  for (start, size), rows in tiles:
    weights = _codes(codes, start, size, column, rows.dtype, form)
    sums = jnp.dot(rows, weights, precision=precision, preferred_element_type=jnp.float32)
    for g in range(size // MXFP4_GROUP):
      factor = factors[pl.ds(start // MXFP4_GROUP + g, 1), pl.ds(*column)]
      total += sums[g * VISIT_ROWS : (g + 1) * VISIT_ROWS] * factor
  return total


def _codes(codes, start: int, size: int, column, dtype, form: Form) -> Array:
  """The values of the codes of some inputs and outputs, without their scales."""
  if form == "float4":
    values = codes[pl.ds(start, size), pl.ds(*column)]
    return values.astype(jnp.float8_e4m3fn if dtype == jnp.bfloat16 else dtype)
  half = MXFP4_GROUP // 2
  both = codes[pl.ds(start // 2, size // 2), pl.ds(*column)].astype(jnp.int32)
  low, high = _code_value(both & 0xF), _code_value(both >> 4)
  parts = [part[g : g + half] for g in range(0, size // 2, half) for part in (low, high)]
  return jnp.concatenate(parts, axis=0).astype(dtype)


def _code_value(code: Int[Array, "rows outputs"]) -> Float[Array, "rows outputs"]:
  """The float32 that a code 0 .. 15 stands for: its bits, moved into place. 0 and 0.5 have no float's exponent."""
  magnitude = code & 7
  value = jax.lax.bitcast_convert_type((magnitude << 22) + (126 << 23), jnp.float32)
  value = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, value)
  return jnp.where(code < 8, value, -value)
