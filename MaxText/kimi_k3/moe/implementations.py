"""The routed experts of one device, by a named implementation. None of them falls back to another.

  name            runs on               reads             for
  reference       anything              every form        the definition; one expert decoded at a time
  decode_kernel   TPU, interpret mode   float4, nibbles   few tokens: only experts that were hit are read
  grouped         TPU with float4       float4            many tokens: tokamax's grouped matrix product

A fourth, dropless, has a gradient: see kimi_k3.moe.dropless. It takes no packed experts, so it is not run here.

Each takes the stack of several layers and the layer's number, and never copies a layer out of the stack.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_k3 import mxfp4_jax
from kimi_k3.activations import gated_activation
from kimi_k3.config import ComputeConfig, KimiK3Config
from kimi_k3.errors import InputError
from kimi_k3.moe.decode_kernel import decode_experts
from kimi_k3.moe.experts import ExpertFn, apply_experts
from kimi_k3.moe.grouped import grouped_experts
from kimi_k3.moe.packed import FORMS, ExpertStack, Form, prepare, restore

__all__ = ["EXPERT_IMPLEMENTATIONS", "ExpertStack", "form_of", "prepare", "run_experts", "shared_form"]

EXPERT_IMPLEMENTATIONS = ("reference", "decode_kernel", "grouped")
_FLOAT4_TPUS = ("TPU7x",)  # device kinds whose compiler takes float4 in a kernel
_READS: dict[str, tuple[Form, ...]] = {
  "reference": FORMS,
  "decode_kernel": ("float4", "nibbles"),
  "grouped": ("float4",),
}


def form_of(implementation: str, device_kind: str, *, interpret: bool = False) -> Form:
  """Returns the form in which an implementation reads the experts on a kind of device.

  Args:
    implementation: One of EXPERT_IMPLEMENTATIONS.
    device_kind: `device_kind` of the device, as JAX names it.
    interpret: Whether kernels run in interpret mode, which any device can.

  Raises:
    InputError: if the implementation is unknown or does not run on such a device.
  """
  _check_name(implementation)
  if implementation == "reference":
    return "stored"
  if any(device_kind.startswith(kind) for kind in _FLOAT4_TPUS):
    return "float4"
  if implementation == "decode_kernel" and interpret:
    return "float4"
  if implementation == "decode_kernel" and device_kind.startswith("TPU"):
    return "nibbles"
  need = "a TPU" if implementation == "decode_kernel" else f"a TPU with float4 ({', '.join(_FLOAT4_TPUS)})"
  raise InputError(f"expert_implementation {implementation!r} needs {need}, found {device_kind!r}: use 'reference'")


def shared_form(implementations: Sequence[str], device_kind: str, *, interpret: bool = False) -> Form:
  """Returns the one form of the experts that serves several implementations on a kind of device.

  Args:
    implementations: Those that will run on the same arrays, out of EXPERT_IMPLEMENTATIONS.
    device_kind: As for form_of.
    interpret: As for form_of.

  Raises:
    InputError: as form_of, and if no form serves all, naming what each reads.
  """
  preferred = [form_of(name, device_kind, interpret=interpret) for name in implementations]
  for form in FORMS:
    if form in preferred and all(form in _READS[name] for name in implementations):
      return form
  reads = "; ".join(f"{name} reads {form}" for name, form in zip(implementations, preferred, strict=True))
  raise InputError(f"experts are kept in one form, and none serves all on {device_kind}: {reads}: choose others")


def run_experts(
  x: Float[Array, "N L"],
  ids: Int[Array, "N S"],
  weights: Float[Array, "N S"],
  stack: ExpertStack,
  layer: Int[Array, ""],
  *,
  config: KimiK3Config,
  compute: ComputeConfig,
  implementation: str,
  interpret: bool = False,
) -> Float[Array, "N L"]:
  """Returns the weighted sum over those of each token's experts that the device holds, float32; 0 where it holds none.

  A row none of whose experts are here may hold anything, NaN included.

  Args:
    x: Input of the experts.
    ids: Chosen experts of each token, numbered from this device's first; outside 0 .. E - 1 means another device's.
    weights: Combine weights, float32.
    stack: Experts of n layers, in a form that the implementation reads.
    layer: Which of the n.
    config: Sizes and activation; F is the stack's, which may be a part of the config's.
    compute: Compute dtype and precision.
    implementation: One of EXPERT_IMPLEMENTATIONS.
    interpret: Runs the decode kernel in interpret mode, slowly and anywhere.

  Raises:
    InputError: if the implementation is unknown, does not read the stack's form, or cannot take so many tokens.
  """
  _check_name(implementation)
  if stack.form not in _READS[implementation]:
    raise InputError(
      f"expert_implementation {implementation!r} reads experts as {' or '.join(_READS[implementation])}, found "
      f"{stack.form}: lay them out with the form that form_of names"
    )
  num_experts = stack.num_experts
  ids = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts).astype(jnp.int32)
  if implementation == "reference":
    return apply_experts(x, ids, weights, num_experts, _decoded_expert(stack, layer, config, compute))
  settings = {"config": config, "compute": compute}
  if implementation == "decode_kernel":
    return decode_experts(x, ids, weights, stack, layer, **settings, interpret=interpret)
  if interpret:
    raise InputError("expert_implementation 'grouped' has no interpret mode, it needs a TPU: use 'reference'")
  return grouped_experts(x, ids, weights, stack, layer, **settings)


def _check_name(implementation: str) -> None:
  if implementation == "dropless":
    raise InputError(
      "expert_implementation 'dropless' is for training, with experts that are not packed and where the compiler "
      "partitions: set partitioning=auto and packed_modules=[], or use 'reference'"
    )
  if implementation not in EXPERT_IMPLEMENTATIONS:
    raise InputError(
      f"expert_implementation is {implementation!r}, expected one of {', '.join(EXPERT_IMPLEMENTATIONS)}"
    )


def _decoded_expert(
  stack: ExpertStack, layer: Int[Array, ""], config: KimiK3Config, compute: ComputeConfig
) -> ExpertFn:
  form = stack.form

  def product(packed: Array, scale: Array, e: Array, rows: Array) -> Array:
    one = restore(_take(packed, layer, e), _take(scale, layer, e), form)
    weight = mxfp4_jax.decode(*one, compute.dtype)
    return jax.lax.dot_general(
      rows.astype(compute.dtype),
      weight,
      (((1,), (1,)), ((), ())),
      precision=compute.precision,
      preferred_element_type=jnp.float32,
    )

  def expert(e: Int[Array, ""], rows: Float[Array, "rows L"]) -> Float[Array, "rows L"]:
    gate, up = product(stack.w1, stack.s1, e, rows), product(stack.w3, stack.s3, e, rows)
    return product(stack.w2, stack.s2, e, gated_activation(config, gate, up).astype(compute.dtype))

  return expert


def _take(leaf: Array, layer: Int[Array, ""], e: Int[Array, ""]) -> Array:
  """One expert's part of a stacked leaf, in one slice: of a layer there is no copy."""
  one = jax.lax.dynamic_slice(leaf, (layer, e, 0, 0), (1, 1, *leaf.shape[2:]))
  return one.reshape(leaf.shape[2:])
