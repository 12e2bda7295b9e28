"""MXFP4 experts of one device in the forms that the implementations read: re-laid out at load, never decoded.

A stack holds the experts of n layers, so that a loop over layers passes it whole and a kernel takes the layer's number.

  form     w1, w3: codes               scales             w2: codes                   scales
  stored   uint8 [n, E, F, L/2]        [n, E, F, L/32]    uint8 [n, E, L, F/2]        [n, E, L, F/32]
  float4   float4_e2m1fn [n, E, L, F]  [n, E, L/32, F]    float4_e2m1fn [n, E, F, L]  [n, E, F/32, L]
  nibbles  uint8 [n, E, L/2, F]        [n, E, L/32, F]    uint8 [n, E, F/2, L]        [n, E, F/32, L]

Scales are E8M0 bytes, uint8. "stored" is the checkpoint's own: two inputs a byte, the even one in the low nibble.
"nibbles" is for a TPU without float4: row 16 g + r holds input 32 g + r in the low nibble and input 32 g + 16 + r in
the high one, so that both halves of a group unpack into whole tiles of 16 rows.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8

from kimi_k3.config import MXFP4_GROUP
from kimi_k3.errors import InputError

Form = Literal["stored", "float4", "nibbles"]
FORMS: tuple[Form, ...] = ("stored", "float4", "nibbles")


class ExpertStack(NamedTuple):
  """Codes `w` and scales `s` of one device's experts, every leaf [n, E, ...]; w1 is the gate, w3 up, w2 down."""

  w1: Array
  s1: Array
  w3: Array
  s3: Array
  w2: Array
  s2: Array

  @property
  def num_experts(self) -> int:
    """E: the experts that the device holds of a layer."""
    return self.w1.shape[1]

  @property
  def form(self) -> Form:
    """The form, told from dtype and shapes.

    Raises:
      InputError: naming dtype and shapes, if they are of no form.
    """
    codes, rows = self.w1.shape[-2], self.s1.shape[-2]
    if self.w1.dtype == jnp.float4_e2m1fn and codes == rows * MXFP4_GROUP:
      return "float4"
    if self.w1.dtype == jnp.uint8 and codes == rows:
      return "stored"
    if self.w1.dtype == jnp.uint8 and codes == rows * MXFP4_GROUP // 2:
      return "nibbles"
    raise InputError(
      f"experts: codes {self.w1.dtype}{list(self.w1.shape)} with scales {list(self.s1.shape)} are in none of the forms "
      f"{', '.join(FORMS)}: lay them out with prepare"
    )


def prepare(packed: UInt8[Array, "*lead O P"], scale: UInt8[Array, "*lead O G"], form: str) -> tuple[Array, Array]:
  """Returns codes and scales of matrices in a form: exact, by bitcast and transpose, nothing is decoded.

  Meant for one jit at load, one leaf at a time and with its input donated. A stack [n, E, ...] is walked along n, so
  that beside input and output there are temporaries of one layer.

  Args:
    packed: Stored codes [..., out, in/2].
    scale: Stored scales [..., out, in/32].
    form: One of FORMS.

  Raises:
    InputError: if the form is unknown.
  """
  if form not in FORMS:
    raise InputError(f"experts: form {form!r}, expected one of {', '.join(FORMS)}")
  if form == "stored":
    return packed, scale
  codes = _float4 if form == "float4" else _nibbles
  if packed.ndim > 3:
    return jax.lax.map(lambda layer: (codes(layer[0]), layer[1].mT), (packed, scale))
  return codes(packed), scale.mT


def _float4(packed: UInt8[Array, "*lead O P"]) -> Array:
  pairs = jax.lax.bitcast_convert_type(packed, jnp.float4_e2m1fn)  # [..., out, in/2, 2], the low nibble first
  return pairs.reshape(*packed.shape[:-1], -1).mT


def _nibbles(packed: UInt8[Array, "*lead O P"]) -> Array:
  *lead, out, half = packed.shape
  codes = jnp.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*lead, out, 2 * half).mT
  groups = codes.reshape(*lead, 2 * half // MXFP4_GROUP, 2, MXFP4_GROUP // 2, out)
  return (groups[..., 0, :, :] | groups[..., 1, :, :] << 4).reshape(*lead, half, out)


def restore(codes: Array, scales: UInt8[Array, "_ _"], form: str) -> tuple[Array, Array]:
  """Returns one matrix as the checkpoint stores it: [out, in/2] codes and [out, in/32] scales. Undoes prepare."""
  if form == "stored":
    return codes, scales
  if form == "float4":
    pairs = codes.mT.reshape(codes.shape[1], codes.shape[0] // 2, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.uint8), scales.mT
  half, out = codes.shape
  groups = codes.reshape(2 * half // MXFP4_GROUP, 1, MXFP4_GROUP // 2, out)
  values = jnp.concatenate([groups & 0xF, groups >> 4], axis=1).reshape(half, 2, out)
  return (values[:, 0] | values[:, 1] << 4).mT, scales.mT
