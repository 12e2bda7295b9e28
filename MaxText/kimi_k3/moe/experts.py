"""The routed experts: weights in bf16, block-wise FP8 or MXFP4, and the portable way to multiply by the chosen ones.

The portable implementation walks over tiles of rows that share an expert and holds one expert's weights decoded at a
time. No array is ever as large as tokens x experts or as all experts decoded, whatever the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_k3 import fp8_block_jax, mxfp4_jax
from kimi_k3.activations import gated_activation
from kimi_k3.config import ComputeConfig, KimiK3Config
from kimi_k3.errors import InputError
from kimi_k3.linear import random_matrix, random_packed
from kimi_k3.moe.dropless import Matrices, dropless_experts, sharded_experts
from kimi_k3.sharding import EXPERT, EXPERT_EMBED, EXPERT_MLP, Placement

_MAX_TILE_ROWS = 128  # one MXU pass; more would only pad the experts with few rows

ExpertFn = Callable[[Int[Array, ""], Float[Array, "rows L"]], Float[Array, "rows L"]]


class _Tiles(NamedTuple):
  """Rows sorted by expert, and where each expert's tiles begin."""

  order_R: Array  # position in the flat (token, choice) list of each sorted row
  first_row_E: Array
  num_rows_E: Array
  first_tile_E: Array
  num_tiles: Array


def apply_experts(
  x: Float[Array, "N L"], ids: Int[Array, "N S"], weights: Float[Array, "N S"], num_experts: int, expert: ExpertFn
) -> Float[Array, "N L"]:
  """Returns the weighted sum of each token's chosen experts, in float32.

  Args:
    x: Input of the experts, compute dtype.
    ids: Chosen experts of each token, all different.
    weights: Combine weights, float32.
    num_experts: E.
    expert: (expert number, rows) -> that expert's float32 output of the rows.
  """
  tile_rows = min(_MAX_TILE_ROWS, x.shape[0])
  tiles = _sort_into_tiles(ids, num_experts, tile_rows)
  flat_weights_R = weights.reshape(-1)

  def one_tile(carry):
    tile, total = carry
    e = jnp.searchsorted(tiles.first_tile_E, tile, side="right") - 1
    row = (tile - tiles.first_tile_E[e]) * tile_rows + jnp.arange(tile_rows)
    real = row < tiles.num_rows_E[e]
    slot = tiles.order_R[jnp.where(real, tiles.first_row_E[e] + row, 0)]
    token = slot // ids.shape[1]
    y = expert(e, x[token]) * flat_weights_R[slot][:, None]
    return tile + 1, total.at[token].add(jnp.where(real[:, None], y, 0.0))

  start = (jnp.int32(0), jnp.zeros(x.shape, jnp.float32))
  return jax.lax.while_loop(lambda carry: carry[0] < tiles.num_tiles, one_tile, start)[1]


def _sort_into_tiles(ids: Int[Array, "N S"], num_experts: int, tile_rows: int) -> _Tiles:
  flat = ids.reshape(-1)
  num_rows_E = jnp.zeros((num_experts,), jnp.int32).at[flat].add(1)
  num_tiles_E = -(-num_rows_E // tile_rows)
  last_tile_E = jnp.cumsum(num_tiles_E)
  first_row_E = jnp.cumsum(num_rows_E) - num_rows_E
  return _Tiles(jnp.argsort(flat, stable=True), first_row_E, num_rows_E, last_tile_E - num_tiles_E, last_tile_E[-1])


class Experts(nnx.Module):
  """w2(act(w1 x, w3 x)) of the chosen experts. `w1`, `w3` [E, L, F], `w2` [E, F, L], or packed as stored.

  In FP8 these hold codes, and `w1_scale_inv` [E, L/128, F/128] and so on their scales.

  Where the compiler partitions, the implementation "dropless" must know its devices: `placement`, from
  kimi_k3.sharding.expert_placement(mesh, rules), which is None on a single one.
  """

  def __init__(self, config: KimiK3Config, compute: ComputeConfig, rngs: nnx.Rngs, placement: Placement | None = None):
    self.config, self.compute, self.placement = config, compute, placement
    _check_storage(config, compute)
    E, L, F = config.num_experts, config.expert_dim, config.expert_mlp_dim
    into, out = (EXPERT, EXPERT_EMBED, EXPERT_MLP), (EXPERT, EXPERT_MLP, EXPERT_EMBED)
    for name, shape, axes in (("w1", (E, L, F), into), ("w3", (E, L, F), into), ("w2", (E, F, L), out)):
      if "experts" in config.packed_modules:
        packed, scale = random_packed(rngs, (E, shape[2], shape[1]))
        # Cut by experts and by output: an input axis would cut a group of 32 weights from the scale it shares.
        stored_axes = (EXPERT, EXPERT_MLP, None)
        setattr(self, f"{name}_packed", nnx.Param(packed, out_sharding=stored_axes))
        setattr(self, f"{name}_scale", nnx.Param(scale, out_sharding=stored_axes))
        continue
      weights = random_matrix(rngs, shape, shape[1], compute.weight_dtype)
      if "experts" in config.fp8_modules:
        weights, scale_inv = jax.vmap(functools.partial(fp8_block_jax.encode, num_in=1))(weights)
        # Cut by experts only: what a device holds of one expert's codes need not be whole blocks.
        setattr(self, f"{name}_scale_inv", nnx.Param(scale_inv, out_sharding=(EXPERT, None, None)))
      setattr(self, name, nnx.Param(weights, out_sharding=axes))

  def __call__(
    self, x: Float[Array, "N L"], ids: Int[Array, "N S"], weights: Float[Array, "N S"]
  ) -> Float[Array, "N L"]:
    """Returns the weighted sum over each token's experts, in float32.

    Raises:
      InputError: if the named implementation is one of the manual partitioning.
    """
    if self.compute.expert_implementation == "reference":
      return apply_experts(x, ids, weights, self.config.num_experts, self._expert)
    if self.compute.expert_implementation != "dropless":
      raise InputError(
        f"expert_implementation is {self.compute.expert_implementation!r}, where the compiler partitions expected "
        "'reference' or 'dropless': set one of them, or partitioning=manual"
      )
    matrices = Matrices(*(getattr(self, name)[...] for name in Matrices._fields))
    how = {"config": self.config, "compute": self.compute}
    if self.placement is None:
      return dropless_experts(x, ids, weights, matrices, **how)
    return sharded_experts(x, ids, weights, matrices, self.placement, **how)

  @property
  def num_here(self) -> int:
    """Experts whose weights this module holds: fewer than the model has where they are cut."""
    leaf = getattr(self, "w1_packed" if "experts" in self.config.packed_modules else "w1")
    return leaf[...].shape[-3]

  def partial(
    self,
    x: Float[Array, "N L"],
    ids: Int[Array, "N S"],
    weights: Float[Array, "N S"],
    index: Int[Array, ""],
    *,
    many: bool,
  ) -> Float[Array, "N L"]:
    """Returns the weighted sum over those of each token's experts that are here, in float32.

    Args:
      x: Input of the experts.
      ids: Numbers among the experts that are here; any other number is an expert elsewhere.
      weights: Combine weights.
      index: Of the layer, where the module holds the weights of several: in stacks, axis 0.
      many: Whether the tokens are those of prefill, which may have an implementation of its own.
    """
    from kimi_k3.moe.implementations import ExpertStack, run_experts  # it imports this file

    if "experts" not in self.config.packed_modules:
      ids = jnp.where((ids >= 0) & (ids < self.num_here), ids, self.num_here)
      return apply_experts(x, ids, weights, self.num_here, lambda e, rows: self._expert((index, e), rows))
    names = [f"{name}_{part}" for name in ("w1", "w3", "w2") for part in ("packed", "scale")]
    leaves = [getattr(self, name)[...] for name in names]
    compute = self.compute
    return run_experts(
      x,
      ids,
      weights,
      ExpertStack(*(leaf if leaf.ndim == 4 else leaf[None] for leaf in leaves)),
      index,
      config=self.config,
      compute=compute,
      implementation=compute.prefill_expert_implementation if many else compute.expert_implementation,
      interpret=compute.interpret_kernels,
    )

  def _expert(self, e: Any, rows: Float[Array, "rows L"]) -> Float[Array, "rows L"]:
    gate, up = self._product("w1", e, rows), self._product("w3", e, rows)
    hidden = gated_activation(self.config, gate, up).astype(self.compute.dtype)
    return self._product("w2", e, hidden)

  def _product(self, name: str, e: Any, rows: Float[Array, "rows I"]) -> Float[Array, "rows O"]:
    """Multiplies the rows by one matrix of expert e, accumulated in float32."""
    dtype = self.compute.dtype
    if "experts" in self.config.packed_modules:
      packed, scale = (getattr(self, f"{name}_{part}")[...] for part in ("packed", "scale"))
      weight, contract = mxfp4_jax.decode(_take(packed, e), _take(scale, e), dtype), ((1,), (1,))
    elif "experts" in self.config.fp8_modules:
      codes, scale_inv = getattr(self, name)[...], getattr(self, f"{name}_scale_inv")[...]
      # Where float8 is computed in a wider type, the compiler would widen the codes of all experts, before the loop of
      # which this is a turn. The barrier makes them part of the turn.
      codes, e = jax.lax.optimization_barrier((codes, e))
      weight = fp8_block_jax.widen(_take(codes, e), _take(scale_inv, e), dtype, num_in=1)
      contract = ((1,), (0,))
    else:
      weight, contract = _take(getattr(self, name)[...], e).astype(dtype), ((1,), (0,))
    return jax.lax.dot_general(
      rows.astype(dtype),
      weight,
      (contract, ((), ())),
      precision=self.compute.precision,
      preferred_element_type=jnp.float32,
    )


def _check_storage(config: KimiK3Config, compute: ComputeConfig) -> None:
  """Raises InputError if the experts are to have a gradient and are stored as codes, which have none."""
  for key in ("packed_modules", "fp8_modules"):
    if compute.expert_implementation == "dropless" and "experts" in (modules := getattr(config, key)):
      raise InputError(
        f"expert_implementation 'dropless' trains experts in bfloat16 or float32, found {key} = {list(modules)}: take "
        f"experts out of {key}, with override_model_config=true"
      )


def _take(stack: Array, e: Int[Array, ""] | tuple[Int[Array, ""], Int[Array, ""]]) -> Array:
  """One expert's matrix [., .]; of a stack of layers, that of (layer, expert), without a copy of the layer."""
  start = e if isinstance(e, tuple) else (e,)
  start = start[-(stack.ndim - 2) :]
  one = jax.lax.dynamic_slice(stack, (*start, 0, 0), (*(1,) * len(start), *stack.shape[-2:]))
  return one.reshape(stack.shape[-2:])
