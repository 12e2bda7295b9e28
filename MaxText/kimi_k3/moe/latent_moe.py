"""Feed-forward layers: the dense gated MLP, and LatentMoE (routed experts in a latent space + shared experts)."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kimi_k3.activations import gated_activation
from kimi_k3.config import ComputeConfig, KimiK3Config
from kimi_k3.linear import Linear, matrix
from kimi_k3.moe.experts import Experts
from kimi_k3.moe.router import Router
from kimi_k3.norms import RMSNorm
from kimi_k3.sharding import EMBED, LATENT, MLP, Placement
from kimi_k3.spmd.collectives import Collectives

# Of all devices, gathered to the experts: input and sums in float32 are 336 MiB on each. A piece reads the experts that
# are hit once, which by bandwidth alone takes a quarter of what its arithmetic takes at the peak rate.
_TOKENS_AT_A_TIME = 16384


class GatedMLP(nnx.Module):
  """down(act(gate x, up x)): the dense MLP of the first layers, and all shared experts as one."""

  def __init__(self, config: KimiK3Config, width: int, *, packed: bool, compute: ComputeConfig, rngs: nnx.Rngs):
    self.config, self.compute = config, compute
    size = config.hidden_size
    form = {"packed": packed, "fp8": "dense" in config.fp8_modules, "compute": compute, "rngs": rngs}
    self.gate_proj = matrix(size, width, axes=(EMBED, MLP), **form)
    self.up_proj = matrix(size, width, axes=(EMBED, MLP), **form)
    self.down_proj = matrix(width, size, axes=(MLP, EMBED), **form)

  def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Returns the MLP's output in the compute dtype."""
    hidden = gated_activation(self.config, self.gate_proj(x), self.up_proj(x))
    return self.down_proj(hidden.astype(self.compute.dtype))

  def on_own_tokens(self, x: Float[Array, "*batch D"], collectives: Collectives) -> Float[Array, "*batch D"]:
    """Returns the whole MLP's output of the tokens that this device holds: its weights are gathered for the call."""

    def whole(projection: Any, axis: int):
      return projection.by(collectives.gather_width(projection.weights(), axis))

    hidden = gated_activation(self.config, whole(self.gate_proj, 1)(x), whole(self.up_proj, 1)(x))
    return whole(self.down_proj, 0)(hidden.astype(self.compute.dtype))


class LatentMoE(nnx.Module):
  """Routed experts plus shared experts.

  h --> router (full hidden, float32) --> ids, weights
  h --> down_proj --> experts --> sum (float32) --> cast --> norm --> up_proj --+
  h --> shared_experts ---------------------------------------------------------+--> out

  Without a latent (Kimi-Linear) the experts see h itself and there is neither down_proj, norm nor up_proj.
  """

  def __init__(self, config: KimiK3Config, compute: ComputeConfig, rngs: nnx.Rngs, placement: Placement | None = None):
    self.config, self.compute = config, compute
    self.router = Router(config, compute, rngs, placement)
    self.experts = Experts(config, compute, rngs, placement)
    if config.expert_latent_dim is not None:
      size, latent = config.hidden_size, config.expert_latent_dim
      packed, fp8 = "latent" in config.packed_modules, "dense" in config.fp8_modules
      form = {"packed": packed, "fp8": fp8, "compute": compute, "rngs": rngs}
      self.down_proj = matrix(size, latent, axes=(EMBED, LATENT), **form)
      self.up_proj = matrix(latent, size, axes=(LATENT, EMBED), **form)
      if config.latent_moe_use_norm:
        self.norm = RMSNorm(latent, eps=config.rms_norm_eps, dtype=compute.weight_dtype, axes=(None,))
    if config.num_shared_experts:
      packed = "shared_experts" in config.packed_modules
      self.shared_experts = GatedMLP(config, config.shared_mlp_dim, packed=packed, compute=compute, rngs=rngs)

  def __call__(
    self, h: Float[Array, "B T D"], valid: Bool[Array, "B T"] | None = None
  ) -> tuple[Float[Array, "B T D"], Int[Array, "B T S"]]:
    """Returns the layer's output in the compute dtype and the chosen experts, best selection score first.

    Args:
      h: Hidden state.
      valid: Real tokens; None: all are. A pad asks for no expert and counts in no expert's load.
    """
    config, rows = self.config, h.reshape(-1, h.shape[-1])
    real = None if valid is None else valid.reshape(-1)
    ids, weights = self.router(rows, real)
    wanted = ids if real is None else jnp.where(real[:, None], ids, config.num_experts)
    latent = config.expert_latent_dim is not None
    x = self.down_proj(rows) if latent else rows
    y = self.experts(x, wanted, weights).astype(self.compute.dtype)
    if latent:
      if config.latent_moe_use_norm:
        y = self.norm(y)
      y = self.up_proj(y)
    if config.num_shared_experts:
      y = y + self.shared_experts(rows)
    return y.reshape(h.shape), ids.reshape(*h.shape[:2], ids.shape[-1])

  def partial(
    self, h: Float[Array, "b t D"], valid: Bool[Array, "b t"] | None, index: Any, collectives: Collectives
  ) -> tuple[Float[Array, "b t D"], Int[Array, "b t S"]]:
    """Returns the same, computed by many devices of which each has some of the experts and of the widths.

    Args:
      h: The tokens that this device holds.
      valid: Real tokens; None: all are. A pad asks for no expert.
      index: Of this layer in stacked weights, traced.
      collectives: Between the devices.
    """
    ids, weights = (x.reshape(*h.shape[:2], -1) for x in self.router(h.reshape(-1, h.shape[-1])))
    wanted = ids if valid is None else jnp.where(valid[..., None], ids, self.config.num_experts)
    x = self._into_latent(h, collectives)
    shared, complete = self._shared(h, collectives)
    if collectives.cuts.latent and not collectives.tokens:  # up_proj gives a partial sum too
      y, _ = self._routed(x, wanted, weights, None, index, collectives)
      out = self.up_proj(collectives.own_latent(self._normed(y)))
      return collectives.leave_width(out if shared is None else out + shared), ids
    y, summed = self._routed(x, wanted, weights, None if complete else shared, index, collectives)
    y = self._out_of_latent(self._normed(y), collectives)
    rest = shared if complete else summed
    return (y if rest is None else y + rest), ids

  def _routed(
    self,
    x: Float[Array, "b t L"],
    ids: Int[Array, "b t S"],
    weights: Float[Array, "b t S"],
    beside: Float[Array, "b t D"] | None,
    index: Any,
    collectives: Collectives,
  ) -> tuple[Float[Array, "b t L"], Float[Array, "b t D"] | None]:
    """The sums over all experts, and of what is beside them: see `Collectives.leave_experts`.

    Many tokens go piece by piece, as what they take while they are gathered (input, and sums in float32) is the most
    that a chunk of prefill holds.
    """

    def piece(x: Array, ids: Array, weights: Array, beside: Array | None):
      found, chosen, combine = collectives.enter_experts(x, ids, weights)
      y = self.experts.partial(
        found.reshape(-1, found.shape[-1]),
        chosen.reshape(-1, chosen.shape[-1]) - collectives.first_expert(self.experts.num_here),
        combine.reshape(-1, combine.shape[-1]),
        index,
        many=collectives.prefill,
      )
      return collectives.leave_experts(y.reshape(found.shape).astype(self.compute.dtype), beside)

    parts = _pieces(x.shape[1], x.shape[0] * collectives.cuts.size(collectives.tokens))
    if parts == 1:
      return piece(x, ids, weights, beside)

    def cut(y: Array) -> Array:
      return jnp.moveaxis(y.reshape(y.shape[0], parts, -1, y.shape[-1]), 1, 0)

    def join(y: Array) -> Array:
      return jnp.moveaxis(y, 0, 1).reshape(*x.shape[:2], y.shape[-1])

    pieces = jax.tree.map(cut, (x, ids, weights, beside))
    return jax.tree.map(join, jax.lax.map(lambda args: piece(*args), pieces))

  def _into_latent(self, h: Array, collectives: Collectives) -> Array:
    """The experts' input. A latent that is cut is joined; where devices hold different tokens its matrix is."""
    if self.config.expert_latent_dim is None:
      return h
    if not collectives.cuts.latent:
      return self.down_proj(h)
    if not collectives.tokens:
      return collectives.gather_latent(self.down_proj(h))
    down = cast(Linear, self.down_proj)
    return down.by(collectives.gather_width(down.weights(), 1))(h)

  def _normed(self, y: Array) -> Array:
    return self.norm(y) if self.config.expert_latent_dim is not None and self.config.latent_moe_use_norm else y

  def _out_of_latent(self, y: Array, collectives: Collectives) -> Array:
    if self.config.expert_latent_dim is None:
      return y
    if not collectives.cuts.latent:
      return self.up_proj(y)
    up = cast(Linear, self.up_proj)
    return up.by(collectives.gather_width(up.weights(), 0))(y)

  def _shared(self, h: Array, collectives: Collectives) -> tuple[Array | None, bool]:
    """What the shared experts add, None without any, and whether it is complete or a partial sum over the widths."""
    if not self.config.num_shared_experts:
      return None, True
    if not collectives.cuts.width:
      return self.shared_experts(h), True
    if not collectives.tokens:
      return self.shared_experts(h), False
    # Either the tokens travel, there and back, or the three matrices do: what is less.
    if 2 * collectives.cuts.size(collectives.tokens) * h.shape[1] < 3 * self.config.shared_mlp_dim:
      return collectives.leave_width(self.shared_experts(collectives.enter_width(h))), True
    return self.shared_experts.on_own_tokens(h, collectives), True


def _pieces(tokens: int, others: int) -> int:
  """In how many equal pieces a device's tokens go to the experts, `others` tokens of rows and devices with each."""
  wanted = -(-tokens * others // _TOKENS_AT_A_TIME)
  return next(parts for parts in range(wanted, tokens + 1) if tokens % parts == 0)


def dense_mlp(config: KimiK3Config, compute: ComputeConfig, rngs: nnx.Rngs) -> GatedMLP:
  """Returns the dense MLP of a layer without routed experts."""
  return GatedMLP(config, config.dense_mlp_dim, packed=False, compute=compute, rngs=rngs)
