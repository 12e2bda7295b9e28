"""Bias-free projections, stored plain, in block-wise FP8 or in MXFP4."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kimi_k3 import fp8_block_jax, mxfp4_jax
from kimi_k3.config import MXFP4_GROUP, ComputeConfig

Axes = tuple[str | None, ...]


def random_matrix(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: Any) -> Array:
  """Random weights of variance 1 / fan_in, so that activations keep their size through the depth."""
  return (jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5).astype(dtype)


def random_packed(rngs: nnx.Rngs, shape: tuple[int, ...]) -> tuple[Array, Array]:
  """Random codes [..., out, in/2] and scales [..., out, in/32] of a matrix [..., out, in] with variance near 1 / in."""
  *rows, fan_in = shape
  packed = jax.random.bits(rngs.params(), (*rows, fan_in // 2), jnp.uint8)
  # The 16 codes have variance 9.3 = about 2**3.2, so a scale of 2**-1.6 / sqrt(in) evens it out.
  byte = 127 + round(-1.6 - math.log2(fan_in) / 2)
  return packed, jnp.full((*rows, fan_in // MXFP4_GROUP), byte, jnp.uint8)


class Linear(nnx.Module):
  """x [..., *in] -> [..., *out] by `kernel` [*in, *out], widened to the compute dtype in the forward.

  In FP8 the kernel holds float8_e4m3fn codes in the same layout, and `kernel_scale_inv` [in/128, out/128] their scales,
  the axes of each side counted as one.
  """

  def __init__(
    self,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    *,
    fp8: bool,
    axes: Axes,
    compute: ComputeConfig,
    rngs: nnx.Rngs,
  ):
    self.num_in, self.fp8, self.dtype, self.precision = len(in_shape), fp8, compute.dtype, compute.precision
    weights = random_matrix(rngs, in_shape + out_shape, math.prod(in_shape), compute.weight_dtype)
    if fp8:
      weights, scale_inv = fp8_block_jax.encode(weights, num_in=self.num_in)
      # Whole on every device: one number for 16384 weights, and a shard of those need not be whole blocks.
      self.kernel_scale_inv = nnx.Param(scale_inv, out_sharding=(None, None))
    self.kernel = nnx.Param(weights, out_sharding=axes)

  def weights(self) -> Float[Array, "..."]:
    """Returns the kernel in the compute dtype."""
    if self.fp8:
      return fp8_block_jax.widen(self.kernel[...], self.kernel_scale_inv[...], self.dtype, num_in=self.num_in)
    return self.kernel[...].astype(self.dtype)

  def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the projection in the compute dtype."""
    return self.by(self.weights())(x)

  def by(self, weights: Float[Array, "..."]) -> Callable[[Float[Array, "..."]], Float[Array, "..."]]:
    """Returns the projection with other weights in place of the kernel: more of them than this device has."""

    def project(x: Float[Array, "..."]) -> Float[Array, "..."]:
      n = self.num_in
      contract = (tuple(range(x.ndim - n, x.ndim)), tuple(range(n)))
      return jax.lax.dot_general(x.astype(self.dtype), weights, (contract, ((), ())), precision=self.precision)

    return project


class PackedLinear(nnx.Module):
  """x [..., in] -> [..., out] by an MXFP4 matrix: `packed` [out, in/2] and `scale` [out, in/32], as stored."""

  def __init__(self, in_size: int, out_size: int, *, axes: Axes, compute: ComputeConfig, rngs: nnx.Rngs):
    self.dtype, self.precision = compute.dtype, compute.precision
    packed, scale = random_packed(rngs, (out_size, in_size))
    # Cut by output only: an input axis would cut a group of 32 weights from the scale it shares.
    self.packed = nnx.Param(packed, out_sharding=(axes[1], None))
    self.scale = nnx.Param(scale, out_sharding=(axes[1], None))

  def __call__(self, x: Float[Array, "*batch I"]) -> Float[Array, "*batch O"]:
    """Returns the projection in the compute dtype; the matrix is decoded for this call."""
    weight = mxfp4_jax.decode(self.packed[...], self.scale[...], self.dtype)
    contract = ((x.ndim - 1,), (1,))
    return jax.lax.dot_general(x.astype(self.dtype), weight, (contract, ((), ())), precision=self.precision)


def matrix(
  in_size: int, out_size: int, *, packed: bool, fp8: bool, axes: Axes, compute: ComputeConfig, rngs: nnx.Rngs
) -> Linear | PackedLinear:
  """Returns a projection of one axis to one axis, stored as the checkpoint stores it: what is packed is not in FP8."""
  if packed:
    return PackedLinear(in_size, out_size, axes=axes, compute=compute, rngs=rngs)
  return Linear((in_size,), (out_size,), fp8=fp8, axes=axes, compute=compute, rngs=rngs)
