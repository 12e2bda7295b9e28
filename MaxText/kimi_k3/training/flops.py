"""Floating point operations of a training step, counted from the architecture.

Counted are the model's own products of a matrix, 2 m n k each, whatever an implementation does beside them: KDA by its
recurrence and not by chunks, causal attention by the half of the square that is not masked, the routed experts that a
token is sent to and no padding of their groups, nothing that rematerialisation does again. This is what model FLOP
utilisation divides by (PaLM, arXiv:2204.02311, appendix B). Not counted: what is elementwise (norms, activations,
decay, softmax) and the lookup of an embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kimi_k3.config import KimiK3Config, LayerKind

# The backward pass has two products for each of the forward: one for the inputs' gradient, one for the other factor's.
TRAINING_PASSES = 3

# Products with a weight; all others are of activations with each other.
LEARNABLE_KINDS = (
  "kda_projections", "short_conv", "mla_projections", "router", "latent", "routed_experts", "shared_experts",
  "dense_mlp", "attn_res_scores", "head",
)  # fmt: skip
ATTENTION_KINDS = ("kda_recurrence", "mla_attention", "attn_res_mix")


@dataclasses.dataclass(frozen=True)
class Flops:
  """FLOPs of one step over some rows.

  Attributes:
    forward: Of the forward pass, by kind: LEARNABLE_KINDS and ATTENTION_KINDS.
  """

  forward: Mapping[str, float]

  @property
  def learnable(self) -> float:
    """Of products with weights, forward and backward: 6 a token for each active parameter."""
    return TRAINING_PASSES * sum(self.forward[kind] for kind in LEARNABLE_KINDS)

  @property
  def attention(self) -> float:
    """Of products of activations with each other, forward and backward: over tokens, and over depth (AttnRes)."""
    return TRAINING_PASSES * sum(self.forward[kind] for kind in ATTENTION_KINDS)

  @property
  def total(self) -> float:
    """All of the step."""
    return self.learnable + self.attention


def training_flops(config: KimiK3Config, tokens_per_row: int, rows: int | float) -> Flops:
  """Returns the FLOPs of a training step.

  Documents packed in a row are counted as one: attention between them is masked, which only the batch would tell.

  Args:
    config: The architecture.
    tokens_per_row: T, pads included.
    rows: Of the step, or of one device's share of it, which need not be whole.
  """
  tokens = float(rows * tokens_per_row)
  kinds, moes = config.layer_kinds, config.moe_layers
  kda, mla = (kinds.count(kind) for kind in (LayerKind.KDA, LayerKind.MLA))
  moe = sum(moes)
  dense = config.num_layers - moe
  candidates = _attn_res_candidates(config)
  weights = {
    "kda_projections": kda * _kda_weights(config),
    "short_conv": kda * 3 * config.kda_conv_width * config.kda_num_heads * config.kda_head_dim,
    "mla_projections": mla * _mla_weights(config),
    "router": moe * config.hidden_size * config.num_experts,
    "latent": 0 if config.expert_latent_dim is None else moe * 2 * config.hidden_size * config.expert_latent_dim,
    "routed_experts": moe * config.num_experts_per_token * 3 * config.expert_dim * config.expert_mlp_dim,
    "shared_experts": moe * 3 * config.hidden_size * config.shared_mlp_dim,
    "dense_mlp": dense * 3 * config.hidden_size * config.dense_mlp_dim,
    "attn_res_scores": candidates * config.hidden_size,
    "head": config.hidden_size * config.vocab_size,
  }
  per_token = {kind: 2 * count for kind, count in weights.items()} | {
    # What is read for k, what is written, what is read for q: a matrix [K, V] each.
    "kda_recurrence": kda * config.kda_num_heads * 3 * 2 * config.kda_head_dim**2,
    # Scores and weighted sum, with half of the row's tokens on average.
    "mla_attention": mla * config.num_heads * (_qk_dim(config) + config.v_head_dim) * tokens_per_row,
    "attn_res_mix": candidates * 2 * config.hidden_size,
  }
  return Flops({kind: tokens * count for kind, count in per_token.items()})


def _qk_dim(c: KimiK3Config) -> int:
  return c.qk_nope_head_dim + c.qk_rope_head_dim


def _kda_weights(c: KimiK3Config) -> int:
  """Of the projections of one KDA layer: q, k, v, o; the decay's two; beta; the output gate's."""
  inner, width = c.kda_num_heads * c.kda_head_dim, c.kda_head_dim
  low_rank = c.hidden_size * width + width * inner
  gate = c.hidden_size * inner if c.kda_full_rank_gate else low_rank
  return 4 * c.hidden_size * inner + low_rank + c.hidden_size * c.kda_num_heads + gate


def _mla_weights(c: KimiK3Config) -> int:
  """Of the projections of one MLA layer. Keys and values are made of the latent once a token, as in training."""
  query, value = c.num_heads * _qk_dim(c), c.num_heads * c.v_head_dim
  to_query = c.hidden_size * query if c.q_lora_rank is None else c.q_lora_rank * (c.hidden_size + query)
  to_latent = c.hidden_size * (c.kv_lora_rank + c.qk_rope_head_dim)
  from_latent = c.kv_lora_rank * c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
  gate = c.hidden_size * value if c.mla_use_output_gate else 0
  return to_query + to_latent + from_latent + gate + value * c.hidden_size


def _attn_res_candidates(c: KimiK3Config) -> int:
  """Candidates mixed at all sites: two a layer and one behind the last. A site without a snapshot does not mix."""
  size = c.attn_res_block_size
  if size is None:
    return 0
  at_attention = [-(-i // size) for i in range(c.num_layers)]
  at_mlp = [i // size + 1 for i in range(c.num_layers)]
  return sum(count + 1 for count in (*at_attention, *at_mlp, c.num_snapshots) if count)
