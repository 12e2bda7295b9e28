"""Bytes of HBM that a decoding step must move on one device, whatever the program: the measure of a compiled one.

Pure arithmetic on the architecture and on how it is cut. Arrays count without padding. What may stay in VMEM for the
whole step counts nothing: the residual, the snapshots of the attention residuals, queries, gates, partial sums.
"""

from __future__ import annotations

import dataclasses

from kimi_k3.config import MXFP4_GROUP, KimiK3Config, LayerKind
from kimi_k3.errors import InputError

WEIGHT_BYTES = 2  # bfloat16
_FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTraffic:
  """Bytes of one step on one device, by kind: weights read once, states read and written, one token written.

  Attributes:
    experts: Routed experts that are hit, as expected of tokens that choose uniformly and independently.
    experts_worst: Routed experts if every one is hit that can be.
    kda_weights: Projections, convolution taps and gates of all KDA layers.
    mla_weights: Projections of all MLA layers.
    dense_mlp: MLPs of the layers without experts.
    shared_experts: Their matrices.
    latent_projections: Into the experts' latent and out of it, with its norm.
    router: Router matrices and correction biases.
    norms: Layer norms and the vectors of the attention residuals.
    head: Output matrix and final norm.
    embedding_rows: Rows of the tokens decoded.
    kda_states: Recurrent states, read and written.
    conv_states: Inputs that the convolutions remember, read and written.
    latent_cache: MLA latents of the context read, of the new token written.
    logits: Written.
  """

  experts: float
  experts_worst: float
  kda_weights: float
  mla_weights: float
  dense_mlp: float
  shared_experts: float
  latent_projections: float
  router: float
  norms: float
  head: float
  embedding_rows: float
  kda_states: float
  conv_states: float
  latent_cache: float
  logits: float

  @property
  def other_weights(self) -> float:
    """Weights that every step reads, routed experts left out."""
    names = "kda_weights mla_weights dense_mlp shared_experts latent_projections router norms head".split()
    return float(sum(getattr(self, name) for name in names))

  @property
  def total(self) -> float:
    """All bytes, with the experts that are expected to be hit."""
    return sum(getattr(self, field.name) for field in dataclasses.fields(self)) - self.experts_worst

  @property
  def total_worst(self) -> float:
    """All bytes, with every expert that can be hit."""
    return self.total - self.experts + self.experts_worst

  def table(self) -> str:
    """Returns one line a kind in MiB, and the sums."""
    values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    values |= {"total": self.total, "total_worst": self.total_worst}
    return "\n".join(f"{name:20} {value / 2**20:12.3f} MiB" for name, value in values.items())


def expected_hits(experts: int, chosen: int, tokens: int) -> float:
  """Returns how many of the experts at least one token chooses, if each takes `chosen` of them uniformly at random."""
  return experts * (1 - (1 - chosen / experts) ** tokens)


def decode_traffic(
  config: KimiK3Config,
  *,
  devices_heads: int,
  devices_experts: int,
  expert_width_cuts: int = 1,
  batch: int,
  context: int,
  rows_cuts: int = 1,
  latent_cuts: int = 1,
  cache_dtype_bytes: int = 2,
  latent_projection_cuts: int = 1,
  router_cuts: int = 1,
  state_dtype_bytes: int = 4,
  conv_dtype_bytes: int = 2,
  logits_dtype_bytes: int = 4,
) -> DecodeTraffic:
  """Returns the bytes that one device must move in a decoding step.

  Args:
    config: The architecture.
    devices_heads: Devices that share the heads, the dense and shared MLPs and the vocabulary.
    devices_experts: Groups of devices that share the routed experts.
    expert_width_cuts: Devices that share the width of one expert.
    batch: Rows decoded together by all the devices.
    context: Tokens of each row that are in the latent cache.
    rows_cuts: Parts of the batch, of which a device holds states and cache for one: data parallel attention.
    latent_cuts: Devices that share the latent cache of the rows a device works on, whether cut by sequence or by rows.
    cache_dtype_bytes: Bytes of an element of the latent cache.
    latent_projection_cuts: Devices that share the latent projections; 1 is replicated.
    router_cuts: Devices that share the router; 1 is replicated.
    state_dtype_bytes: Bytes of an element of the KDA state.
    conv_dtype_bytes: Bytes of an element that a convolution remembers.
    logits_dtype_bytes: Bytes of a logit.

  Raises:
    InputError: naming every size that its cut does not divide.
  """
  c = config
  _check(
    ("linear_attn_config.num_heads", c.kda_num_heads, "devices_heads", devices_heads),
    ("num_attention_heads", c.num_heads, "devices_heads", devices_heads),
    ("intermediate_size", c.dense_mlp_dim, "devices_heads", devices_heads),
    ("the width of the shared experts", c.shared_mlp_dim, "devices_heads", devices_heads),
    ("vocab_size", c.vocab_size, "devices_heads", devices_heads),
    ("num_experts", c.num_experts, "devices_experts", devices_experts),
    ("num_experts", c.num_experts, "router_cuts", router_cuts),
    ("moe_intermediate_size", c.expert_mlp_dim, "expert_width_cuts", expert_width_cuts),
    ("batch", batch, "rows_cuts", rows_cuts),
    ("the experts' width", c.expert_dim, "latent_projection_cuts", latent_projection_cuts),
  )
  kda = sum(kind is LayerKind.KDA for kind in c.layer_kinds)
  mla, moe = c.num_layers - kda, sum(c.moe_layers)
  rows = batch / rows_cuts
  channels = c.kda_num_heads * c.kda_head_dim / devices_heads
  local_experts = c.num_experts // devices_experts
  one_expert = 3 * c.expert_dim * c.expert_mlp_dim / expert_width_cuts * _bytes(c, "experts") * moe
  # Each token chooses among all experts; the local ones are hit in proportion.
  hit = expected_hits(c.num_experts, c.num_experts_per_token, batch) / devices_experts
  latent = 0 if c.expert_latent_dim is None else 2 * c.hidden_size * c.expert_latent_dim * _bytes(c, "latent")
  latent_norm = WEIGHT_BYTES * c.expert_dim if c.latent_moe_use_norm else 0
  head_norms = 1 + (2 if c.attn_res_block_size else 0)
  cached = c.kv_lora_rank + c.qk_rope_head_dim
  bytes_by_kind = dict(
    experts=hit * one_expert,
    experts_worst=min(local_experts, batch * c.num_experts_per_token) * one_expert,
    kda_weights=kda * _kda_bytes(c, devices_heads),
    mla_weights=mla * WEIGHT_BYTES * _mla_weights(c, devices_heads),
    dense_mlp=(c.num_layers - moe) * WEIGHT_BYTES * 3 * c.hidden_size * c.dense_mlp_dim / devices_heads,
    shared_experts=moe * 3 * c.hidden_size * c.shared_mlp_dim / devices_heads * _bytes(c, "shared_experts"),
    latent_projections=moe * (latent / latent_projection_cuts + latent_norm),
    router=moe * (WEIGHT_BYTES * c.hidden_size + _FLOAT32_BYTES) * c.num_experts / router_cuts,
    norms=c.num_layers * WEIGHT_BYTES * c.hidden_size * (2 + (4 if c.attn_res_block_size else 0)),
    head=WEIGHT_BYTES * c.hidden_size * (c.vocab_size / devices_heads + head_norms),
    embedding_rows=batch * WEIGHT_BYTES * c.hidden_size / devices_heads,
    kda_states=2 * kda * rows * channels * c.kda_head_dim * state_dtype_bytes,
    conv_states=2 * kda * rows * 3 * channels * (c.kda_conv_width - 1) * conv_dtype_bytes,
    latent_cache=mla * rows / latent_cuts * (context + 1) * cached * cache_dtype_bytes,
    logits=rows * c.vocab_size / devices_heads * logits_dtype_bytes,
  )
  return DecodeTraffic(**{kind: float(value) for kind, value in bytes_by_kind.items()})


def _check(*cuts: tuple[str, int, str, int]) -> None:
  faults = [
    f"{what} is {size}, not a multiple of {name} = {by}" for what, size, name, by in cuts if by < 1 or size % by
  ]
  if faults:
    raise InputError(f"{'; '.join(faults)}: choose cuts that divide")


def _bytes(c: KimiK3Config, module: str) -> float:
  """Bytes of a weight of a module: MXFP4 has a scale byte for each group of codes."""
  return 0.5 + 1 / MXFP4_GROUP if module in c.packed_modules else float(WEIGHT_BYTES)


def _kda_bytes(c: KimiK3Config, cuts: int) -> float:
  """Weights of one KDA layer on one device: matrices by heads, the narrow sides of low-rank pairs whole."""
  heads, width, hidden = c.kda_num_heads / cuts, c.kda_head_dim, c.hidden_size
  channels = heads * width
  matrices = 4 * hidden * channels  # q, k, v, o
  matrices += hidden * width + width * channels  # decay
  matrices += hidden * heads  # beta
  matrices += hidden * channels if c.kda_full_rank_gate else hidden * width + width * channels
  taps = 3 * channels * c.kda_conv_width * _leaf_bytes(c, "conv1d")
  return WEIGHT_BYTES * matrices + taps + _FLOAT32_BYTES * (heads + channels) + width * _leaf_bytes(c, "o_norm")


def _leaf_bytes(c: KimiK3Config, kind: str) -> int:
  return _FLOAT32_BYTES if kind in c.float32_leaves else WEIGHT_BYTES


def _mla_weights(c: KimiK3Config, cuts: int) -> float:
  """Number of weights of one MLA layer on one device: matrices by heads, what makes the latents whole."""
  heads, hidden = c.num_heads / cuts, c.hidden_size
  queries = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
  values = heads * c.v_head_dim
  rank = c.q_lora_rank
  found = hidden * queries if rank is None else hidden * rank + rank + rank * queries
  found += hidden * (c.kv_lora_rank + c.qk_rope_head_dim) + c.kv_lora_rank
  found += c.kv_lora_rank * heads * (c.qk_nope_head_dim + c.v_head_dim)
  return found + (2 if c.mla_use_output_gate else 1) * hidden * values  # the gate, o
