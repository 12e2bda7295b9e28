"""tokamax's grouped matrix product on a stack of layers. The one file of moe/ that reads tokamax's private modules.

The public `tokamax.ragged_dot` takes the experts of one layer, so that a stack would be copied out layer by layer, and
gate and up as one array. Its kernel's body needs neither: here it is given references into the stack. Written for
tokamax 0.0.17, which pyproject.toml pins. The body, the tiling of rows and their masks are tokamax's.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int
from tokamax._src.ops.gmm_v2 import gmm_v2

from kimi_k3.config import MXFP4_GROUP
from kimi_k3.errors import InputError

_TILE_ROWS = 256  # rows of one expert at a time: then the matrix unit, not widening the weights, takes the time
_TILE_COLUMNS = 512
_LANES = 128
_ROW_TILE = 16  # rows of a bfloat16 register
_VMEM_BYTES = 56 * 2**20  # of 64 MiB


def grouped_product(
  rows: Float[Array, "C I"],
  weights: tuple[tuple[Array, Array], ...],
  sizes: Int[Array, " E"],
  layer: Int[Array, ""],
  *,
  activation: str | None,
) -> Float[Array, "C O"]:
  """Returns rows times their expert's matrix, or activation(gate, up) of two; rows past the last group are not written.

  Args:
    rows: bfloat16, sorted by expert; C a multiple of 16.
    weights: Codes [n, E, in, out] in float4 and scale bytes [n, E, in/32, out], once, or for gate and for up.
    sizes: Rows of each expert, int32.
    layer: Which of the n.
    activation: tokamax's name of the gated activation, with two matrices; None with one.

  Returns:
    float32, or bfloat16 with an activation.

  Raises:
    InputError: if the rows are not bfloat16, or a size does not fill whole lanes.
  """
  _check(rows, weights[0][0])
  codes, scales = zip(*weights, strict=True)
  factors = [_factors(jax.lax.dynamic_index_in_dim(s, layer, keepdims=False)) for s in scales]
  cfgs = _configs(rows, codes[0], activation)
  hbm = pl.BlockSpec(memory_space=pltpu.HBM)
  tiles = cfgs.dims.size_group + pl.cdiv(cfgs.dims.size_m, cfgs.tiles.tile_m) - 1
  grid_spec = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=3,
    in_specs=[hbm] * (1 + 2 * len(weights)),
    out_specs=hbm,
    scratch_shapes=[
      pltpu.VMEM((cfgs.dims.size_lhs_sublane, cfgs.tiles.tile_n), cfgs.out_dtype),
      pltpu.VMEM((cfgs.tiles.tile_m, cfgs.tiles.tile_n * len(weights)), cfgs.acc_dtype),
      pltpu.SMEM((tiles,), jnp.int32),
      pltpu.SMEM((tiles + 1,), jnp.int32),
    ],
  )
  return pl.pallas_call(
    functools.partial(_kernel, cfgs=cfgs, num_weights=len(weights)),
    out_shape=jax.ShapeDtypeStruct((cfgs.dims.size_m, cfgs.out_size_n), cfgs.out_dtype),
    grid_spec=grid_spec,
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM_BYTES, disable_bounds_checks=True),
    cost_estimate=gmm_v2.get_cost_estimate(cfgs),
    name="expert_grouped",
  )(sizes, jnp.zeros((1,), jnp.int32), layer[None], rows, *codes, *factors)


def _check(rows: Array, codes: Array) -> None:
  if rows.dtype != jnp.bfloat16:
    raise InputError(
      f"expert_implementation 'grouped' computes in bfloat16, found dtype {rows.dtype.name}: set dtype=bfloat16 or use "
      "'reference'"
    )
  if any(size % _LANES for size in codes.shape[-2:]):
    raise InputError(
      f"expert_implementation 'grouped' takes matrices whose sizes are multiples of {_LANES}, found "
      f"{list(codes.shape[-2:])}: use 'reference'"
    )


def _factors(scales: Array) -> Array:
  """Scales of one layer as tokamax reads them, float32 [E, in/32, 1, out]: the byte is the exponent."""
  return jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)[:, :, None, :]


def _configs(rows: Array, codes: Array, activation: str | None) -> gmm_v2.GmmConfigs:
  _, num_experts, size_k, size_n = codes.shape
  return gmm_v2.GmmConfigs(
    tiles=gmm_v2.TileSizes(tile_m=_TILE_ROWS, tile_k=size_k, tile_n=min(_TILE_COLUMNS, size_n), bucket_base=_TILE_ROWS),
    dims=gmm_v2.Dimensions(
      size_m=rows.shape[0],
      size_k=size_k,
      size_n=size_n if activation is None else 2 * size_n,
      size_group=num_experts,
      size_lhs_group=num_experts,
      size_lhs_sublane=_ROW_TILE,
    ),
    lhs_cfgs=gmm_v2.InputConfigs(quant_dtype=None, quant_block_size=None, dtype=rows.dtype),
    rhs_cfgs=gmm_v2.InputConfigs(
      quant_dtype=codes.dtype, quant_block_size=MXFP4_GROUP, dtype=codes.dtype, has_scale=True
    ),
    out_dtype=jnp.dtype(jnp.float32 if activation is None else rows.dtype),
    acc_dtype=jnp.dtype(jnp.float32),
    zero_init=False,
    fuse_act=activation,
  )


def _kernel(sizes, offset, layer, rows, *refs, cfgs: gmm_v2.GmmConfigs, num_weights: int) -> None:
  codes, factors, rest = refs[:num_weights], refs[num_weights : 2 * num_weights], refs[2 * num_weights :]
  out, partial_out, total, expert_of_tile, start_of_tile = rest
  metadata = gmm_v2.MetadataRef(expert_of_tile, start_of_tile)
  num_tiles = gmm_v2.fill_metadata(sizes, offset, metadata, cfgs=cfgs)
  (rows_spec, spec), out_spec = gmm_v2.generate_block_specs(metadata, cfgs)
  matrices = [gmm_v2.WeightsRef(c.at[layer[0]], f, None) for c, f in zip(codes, factors, strict=True)]
  fused = num_weights == 2
  pipeline = pltpu.emit_pipeline(
    functools.partial(gmm_v2.inner_kernel, cfgs=cfgs),
    grid=(pl.cdiv(cfgs.out_size_n, cfgs.tiles.tile_n), num_tiles, 1),
    in_specs=(rows_spec, gmm_v2.FusedWeightsRef(spec, spec) if fused else spec),
    out_specs=out_spec,
  )

  def by_tiles(ref):
    return ref.reshape(-1, cfgs.dims.size_lhs_sublane, ref.shape[-1])

  weights = gmm_v2.FusedWeightsRef(*matrices) if fused else matrices[0]
  pipeline(gmm_v2.LhsRef(by_tiles(rows), None), weights, by_tiles(out), scratches=[partial_out, total, metadata])
