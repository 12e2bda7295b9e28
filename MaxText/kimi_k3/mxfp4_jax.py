"""MXFP4 weights decoded in JAX, by integer arithmetic so that no unit may round or flush a subnormal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from kimi_k3.config import MXFP4_GROUP

_F32_MANTISSA_BITS = 23
# E2M1 magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 as 2**exponent * (1 or 1.5); code 0 is zero.
_CODE_EXPONENT = (0, -1, 0, 0, 1, 1, 2, 2)
_CODE_HALF = (0, 0, 0, 1, 0, 1, 0, 1)


def decode(packed: UInt8[Array, "*rows P"], scale: UInt8[Array, "*rows G"], dtype) -> Float[Array, "*rows I"]:
  """Returns the weights [..., in] that packed codes [..., in/2] and scales [..., in/32] stand for.

  The low nibble of a byte is the even element; a code is a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; a scale byte
  s is 2**(s - 127). Exact in float32 and in bfloat16 for every s up to 252, subnormals included. Scales that overflow
  are refused by the converter, not here.

  Args:
    packed: Two codes a byte.
    scale: One byte a group of 32 weights.
    dtype: float32 or bfloat16.
  """
  codes = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
  codes = codes.reshape(*packed.shape[:-1], scale.shape[-1], MXFP4_GROUP).astype(jnp.int32)
  magnitude = codes & 7
  exponent = scale[..., None].astype(jnp.int32) + _lookup(_CODE_EXPONENT, magnitude)  # biased by 127
  significand = (1 << _F32_MANTISSA_BITS) | (_lookup(_CODE_HALF, magnitude) << (_F32_MANTISSA_BITS - 1))
  normal = (exponent << _F32_MANTISSA_BITS) | (significand & ((1 << _F32_MANTISSA_BITS) - 1))
  subnormal = significand >> jnp.clip(1 - exponent, 0, _F32_MANTISSA_BITS)
  bits = jnp.where(magnitude == 0, 0, jnp.where(exponent > 0, normal, subnormal))
  bits = bits | ((codes & 8) << 28)
  return _from_f32_bits(bits, dtype).reshape(*packed.shape[:-1], -1)


def _lookup(table: tuple[int, ...], index: Array) -> Array:
  """Eight small constants, as shifts of one word: cheaper than a gather on every backend."""
  low = min(table)
  word = sum((value - low) << (2 * i) for i, value in enumerate(table))
  return ((word >> (2 * index)) & 3) + low


def _from_f32_bits(bits: Array, dtype) -> Array:
  dtype = jnp.dtype(dtype)
  if dtype == jnp.float32:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
  if dtype == jnp.bfloat16:  # the low half is zero: one mantissa bit, and subnormals keep it in the upper 16 bits
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
  raise ValueError(f"MXFP4 decodes to float32 or bfloat16, not {dtype}")
