"""Feed-forward layers: the dense gated MLP, and LatentMoE (routed experts in a latent space + shared experts)."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_k3.activations import gated_activation
from kimi_k3.config import ComputeConfig, KimiK3Config
from kimi_k3.linear import matrix
from kimi_k3.moe.experts import Experts
from kimi_k3.moe.router import Router
from kimi_k3.norms import RMSNorm
from kimi_k3.sharding import EMBED, MLP


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


class LatentMoE(nnx.Module):
  """Routed experts plus shared experts.

  h --> router (full hidden, float32) --> ids, weights
  h --> down_proj --> experts --> sum (float32) --> cast --> norm --> up_proj --+
  h --> shared_experts ---------------------------------------------------------+--> out

  Without a latent (Kimi-Linear) the experts see h itself and there is neither down_proj, norm nor up_proj.
  """

  def __init__(self, config: KimiK3Config, compute: ComputeConfig, rngs: nnx.Rngs):
    self.config, self.compute = config, compute
    self.router = Router(config, compute, rngs)
    self.experts = Experts(config, compute, rngs)
    if config.expert_latent_dim is not None:
      size, latent = config.hidden_size, config.expert_latent_dim
      packed, fp8 = "latent" in config.packed_modules, "dense" in config.fp8_modules
      form = {"packed": packed, "fp8": fp8, "compute": compute, "rngs": rngs}
      self.down_proj = matrix(size, latent, axes=(EMBED, MLP), **form)
      self.up_proj = matrix(latent, size, axes=(MLP, EMBED), **form)
      if config.latent_moe_use_norm:
        self.norm = RMSNorm(latent, eps=config.rms_norm_eps, dtype=compute.weight_dtype, axes=(None,))
    if config.num_shared_experts:
      packed = "shared_experts" in config.packed_modules
      self.shared_experts = GatedMLP(config, config.shared_mlp_dim, packed=packed, compute=compute, rngs=rngs)

  def __call__(self, h: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Int[Array, "B T S"]]:
    """Returns the layer's output in the compute dtype and the chosen experts, best selection score first."""
    config, rows = self.config, h.reshape(-1, h.shape[-1])
    ids, weights = self.router(rows)
    latent = config.expert_latent_dim is not None
    x = self.down_proj(rows) if latent else rows
    y = self.experts(x, ids, weights).astype(self.compute.dtype)
    if latent:
      if config.latent_moe_use_norm:
        y = self.norm(y)
      y = self.up_proj(y)
    if config.num_shared_experts:
      y = y + self.shared_experts(rows)
    return y.reshape(h.shape), ids.reshape(*h.shape[:2], ids.shape[-1])


def dense_mlp(config: KimiK3Config, compute: ComputeConfig, rngs: nnx.Rngs) -> GatedMLP:
  """Returns the dense MLP of a layer without routed experts."""
  return GatedMLP(config, config.dense_mlp_dim, packed=False, compute=compute, rngs=rngs)
