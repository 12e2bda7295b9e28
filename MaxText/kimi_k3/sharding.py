"""Logical axis names of every parameter and cache, as MaxText's rules name them.

A name that no rule knows is replicated without a word, so `check_rules` refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kimi_k3.errors import InputError

EMBED_ATTN = "embed_attn"  # hidden axis of attention projections
HEADS = "q_heads"
HEAD_DIM = "kv"
EMBED = "embed"  # hidden axis of dense and shared MLPs
MLP = "mlp"
EXPERT = "exp"
EXPERT_EMBED = "embed_moe"  # input axis of the routed experts
EXPERT_MLP = "mlp_moe"
ROUTER_EMBED = "embed_router"
NORM = "norm"
CACHE_BATCH_PREFILL = "cache_batch_prefill"
CACHE_BATCH = "cache_batch"
CACHE_HEADS = "cache_heads"

USED_AXES = frozenset(
  (EMBED_ATTN, HEADS, HEAD_DIM, EMBED, MLP, EXPERT, EXPERT_EMBED, EXPERT_MLP, ROUTER_EMBED, NORM)
  + (CACHE_BATCH_PREFILL, CACHE_BATCH, CACHE_HEADS)
)


def check_rules(rule_names: Iterable[str]) -> None:
  """Raises InputError if a logical axis that the model uses has no rule: it would be replicated in silence."""
  missing = sorted(USED_AXES - set(rule_names))
  if missing:
    raise InputError(
      f"logical_axis_rules has no rule for {', '.join(missing)}: these axes would be replicated; "
      "add [name, []] to mean that"
    )
