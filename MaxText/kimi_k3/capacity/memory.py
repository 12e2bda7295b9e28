"""HBM that a program takes on one device, by arithmetic: from the architecture and from what cuts it, no compiler.

Arguments are summed leaf by leaf with the padding of a TPU's tiles. Temporaries and code are modelled: which arrays
live at one time is the compiler's choice, and the constants below are fitted to what libtpu 0.0.50.1 chose
(benchmarks/capacity/quick.py, tests/kimi_k3/capacity/compiled.json). A chunk with a history and `prefill_cut: whole`
are modelled in the same way, but none has been compiled to compare with.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from kimi_k3.capacity import shapes
from kimi_k3.capacity.traffic import DecodeTraffic, decode_traffic
from kimi_k3.config import KimiK3Config, LayerKind
from kimi_k3.errors import InputError
from kimi_k3.spmd.cuts import RULES, Axes, Cuts

KINDS: tuple[str, ...] = (
  "experts",
  "kda",
  "mla",
  "dense_mlp",
  "shared_experts",
  "latent_projections",
  "router",
  "norms",
  "embedding",
  "head",
)
CACHE_CUTS = ("sequence", "batch")
PREFILL_CUTS = ("sequence", "whole")
LATENT_TILE = 128  # of maxtext_adapter/spmd_engine.py
TOKENS_AT_A_TIME = 16384  # that go to the experts, of moe/latent_moe.py
GROUPED_ROWS = 8192  # (token, choice) pairs at a time, of moe/grouped.py
KDA_CHUNK = 64  # tokens of a chunk of tokamax's kernel

WORST_ERROR = 0.02  # of the HBM of the programs in tests/kimi_k3/capacity/compiled.json, which a test holds

# The form of packed experts that the kernels of a device kind read, as moe/implementations.py chooses it.
EXPERT_FORMS: Mapping[str, shapes.ExpertForm] = {"TPU7x": "float4", "TPU v6 lite": "nibbles"}

_KDA_LEAVES = frozenset(
  "q_proj k_proj v_proj q_conv k_conv v_conv f_a_proj f_b_proj A_log dt_bias b_proj g_proj g_a_proj g_b_proj o_norm "
  "o_proj".split()
)
_MLA_LEAVES = frozenset("wq_a q_norm wq_b query wkv_a kv_norm wkv_b gate out".split())
_NORM_MODULES = frozenset(("input_norm", "post_attention_norm", "attention_res", "mlp_res"))


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Bytes of one device while a program runs.

  Attributes:
    weights_bytes: Weights by kind, without padding.
    latent_cache_bytes: MLA latents, without padding.
    kda_state_bytes: Recurrent states and what the convolutions remember, without padding.
    argument_bytes: Weights, caches and tokens, with padding.
    temp_bytes: Temporaries.
    code_bytes: The program itself.
    output_bytes: Results that take no argument's place: logits.
  """

  weights_bytes: dict[str, int]
  latent_cache_bytes: int
  kda_state_bytes: int
  argument_bytes: int
  temp_bytes: int
  code_bytes: int
  output_bytes: int

  @property
  def total_bytes(self) -> int:
    """What the program takes."""
    return self.argument_bytes + self.output_bytes + self.temp_bytes + self.code_bytes


def kind_of(leaf_name: str, names: Collection[str] = ()) -> str:
  """Returns the kind of weights, of KINDS, that a parameter is.

  `mlp.up_proj` and `mlp.down_proj` are the latent projections of a layer with experts and parts of the MLP of one
  without: the router beside them, or `mlp.gate_proj`, tells.

  Args:
    leaf_name: As in docs/parameter-tree.md.
    names: Of all parameters; needed for those two.

  Raises:
    InputError: if the name is of no parameter, or of one that `names` do not tell.
  """
  top = {"token_embedder": "embedding", "decoder.logits_dense": "head", "decoder.decoder_norm": "norms"}
  top["decoder.output_res"] = "norms"
  for prefix, kind in top.items():
    if leaf_name.startswith(f"{prefix}."):
      return kind
  path = leaf_name.split(".")
  path = path[3 if path[1:2] == ["blocks"] else 2 :] if path[0] == "decoder" else []
  module, inner = path[0] if path else "", path[1] if len(path) > 1 else ""
  if module in _NORM_MODULES and inner:
    return "norms"
  if module == "attention" and inner in _KDA_LEAVES:
    return "kda"
  if module == "attention" and inner in _MLA_LEAVES:
    return "mla"
  if module == "mlp":
    fixed = {"experts": "experts", "router": "router", "shared_experts": "shared_experts", "gate_proj": "dense_mlp"}
    if inner in fixed:
      return fixed[inner]
    if inner == "norm":
      return "latent_projections"
    if inner in ("up_proj", "down_proj"):
      return _of_projection(leaf_name, names)
  raise InputError(f"{leaf_name}: a parameter of no known kind, expected a name of docs/parameter-tree.md")


def _of_projection(name: str, names: Collection[str]) -> str:
  layer = name[: name.index(".mlp.") + len(".mlp.")]
  found = {
    kind
    for kind, part in (("latent_projections", "router"), ("dense_mlp", "gate_proj"))
    if any(other.startswith(f"{layer}{part}.") for other in names)
  }
  if len(found) != 1:
    raise InputError(f"{name}: a latent projection or a part of a dense MLP, expected `names` with the layer's others")
  return found.pop()


def weights_by_kind(leaves: Mapping[str, tuple[Sequence[int], Any, int]]) -> dict[str, int]:
  """Returns the bytes of one device by kind, without padding.

  Args:
    leaves: Whole shape, dtype and number of parts of each parameter by its name.

  Raises:
    InputError: naming a parameter of no known kind.
  """
  siblings = [name for name in leaves if ".mlp.router." in name or ".mlp.gate_proj." in name]
  found = dict.fromkeys(KINDS, 0)
  for name, (shape, dtype, parts) in leaves.items():
    bits = shapes.element_bits(dtype if isinstance(dtype, str) else np.dtype(dtype).name)
    found[kind_of(name, siblings)] += math.prod(shape) * bits // 8 // parts
  return found


def latent_tokens(tokens: int, parts: int) -> int:
  """Returns how many tokens of latents a row is given: at least `tokens`, cut evenly, and whole tiles on a device.

  Args:
    tokens: To hold.
    parts: Devices that share a row's latents: those of the heads where they are cut by sequence, else 1.
  """
  here = -(-tokens // parts)
  if here > LATENT_TILE:
    here = -(-here // LATENT_TILE) * LATENT_TILE
  return here * parts


def estimate_decode(
  config: KimiK3Config,
  cuts: Cuts,
  *,
  batch: int,
  context: int,
  cache_cut: str,
  latent_dtype_bytes: int = 2,
  device_kind: str = "TPU7x",
) -> Estimate:
  """Returns what a decoding step takes.

  Args:
    config: The architecture.
    cuts: What cuts it.
    batch: Sequences of a step, of all devices.
    context: Tokens that a row's latents have room for.
    cache_cut: How the axes of the heads cut the latents: "sequence" or "batch".
    latent_dtype_bytes: Of an element of the latents: 2, or 1 in float8.
    device_kind: JAX's name of the devices.

  Raises:
    InputError: if the mesh does not divide the model, the batch or the context, naming the nearest that it does.
  """
  cuts.check_fits(config)
  _check_choice("mla_cache_cut", cache_cut, CACHE_CUTS)
  _check_multiple("a batch", batch, batch_unit(cuts, cache_cut), "rows")
  _check_multiple("a context", context, context_unit(cuts, cache_cut), "tokens")
  caches = shapes.caches(
    config, cuts, rows=batch, length=context, cut=cache_cut, latent_dtype=_latent_dtype(latent_dtype_bytes)
  )
  here = batch // cuts.size(cuts.rows)
  logits = shapes.Leaf((here, config.vocab_size // cuts.size(cuts.vocab)), "float32", (1, 1))
  vectors = 2 * _vector_bytes(here)
  temp = _decode_temp(config, here, caches)
  return _estimate(config, cuts, caches, device_kind, vectors, logits.padded_bytes, temp, _DECODE_CODE)


def estimate_prefill(
  config: KimiK3Config,
  cuts: Cuts,
  *,
  tokens: int,
  length: int,
  history: bool,
  prefill_cut: str,
  device_kind: str = "TPU7x",
  latent_dtype_bytes: int = 2,
) -> Estimate:
  """Returns what a chunk of one prompt takes.

  Args:
    config: The architecture.
    cuts: What cuts it.
    tokens: Of the chunk.
    length: Tokens that the prompt's latents have room for.
    history: Whether tokens may be in the caches already.
    prefill_cut: "sequence" or "whole": how the residual stream is cut.
    device_kind: JAX's name of the devices.
    latent_dtype_bytes: Of an element of the latents: 2, or 1 in float8.

  Raises:
    InputError: if the mesh does not divide the model, the chunk or the length, naming the nearest that it does.
  """
  cuts.check_fits(config)
  _check_choice("prefill_cut", prefill_cut, PREFILL_CUTS)
  if prefill_cut == "sequence" and not cuts.heads == cuts.width == cuts.vocab:
    raise InputError(
      f"prefill_cut sequence needs heads, width and vocab cut by the same axes, found {list(cuts.heads)}, "
      f"{list(cuts.width)} and {list(cuts.vocab)}: use prefill_cut=whole"
    )
  _check_multiple("a chunk", tokens, cuts.size(_token_axes(cuts, prefill_cut)), "tokens")
  _check_multiple("latents", length, cuts.size(cuts.heads), "tokens")
  caches = shapes.caches(
    config, cuts, rows=1, length=length, cut="sequence", cut_rows=False, latent_dtype=_latent_dtype(latent_dtype_bytes)
  )
  logits = shapes.Leaf((1, config.vocab_size // cuts.size(cuts.vocab)), "float32", (1, 1))
  vectors = _vector_bytes(tokens) + 2 * _vector_bytes(1)
  temp = _prefill_temp(config, cuts, tokens, history, prefill_cut, device_kind)
  return _estimate(config, cuts, caches, device_kind, vectors, logits.padded_bytes, temp, _PREFILL_CODE)


def _estimate(
  config: KimiK3Config,
  cuts: Cuts,
  caches: Mapping[str, shapes.Leaf],
  device_kind: str,
  vectors: int,
  output: int,
  temp: int,
  code: Mapping[str, tuple[int, int]],
) -> Estimate:
  latents = [leaf for name, leaf in caches.items() if name.endswith(".latents")]
  states = [leaf for name, leaf in caches.items() if not name.endswith(".latents")]
  axes = tuple(getattr(cuts, what) for what in RULES)
  weights, padded = _weights(config, tuple(cuts.sizes.items()), axes, device_kind)
  return Estimate(
    weights_bytes=dict(weights),
    latent_cache_bytes=sum(leaf.device_bytes for leaf in latents),
    kda_state_bytes=sum(leaf.device_bytes for leaf in states),
    argument_bytes=padded + sum(leaf.padded_bytes for leaf in (*latents, *states)) + vectors,
    temp_bytes=temp,
    code_bytes=code[device_kind][bool(cuts.rows)],
    output_bytes=output,
  )


@functools.lru_cache(maxsize=64)  # a search asks for the same weights each time
def _weights(
  config: KimiK3Config, sizes: tuple[tuple[str, int], ...], axes: tuple[Axes, ...], device_kind: str
) -> tuple[Mapping[str, int], int]:
  """Bytes of one device by kind without padding, and of all with it."""
  cuts = Cuts(dict(sizes), **dict(zip(RULES, axes, strict=True)))
  weights = shapes.parameters(config, cuts, expert_form=_expert_form(device_kind))
  leaves = {name: (leaf.shape, leaf.dtype, math.prod(leaf.cuts)) for name, leaf in weights.items()}
  return weights_by_kind(leaves), sum(leaf.padded_bytes for leaf in weights.values())


def batch_unit(cuts: Cuts, cache_cut: str) -> int:
  """Returns of what number the batch must be a multiple."""
  return cuts.size(cuts.rows + cuts.heads) if cache_cut == "batch" else cuts.size(cuts.rows)


def context_unit(cuts: Cuts, cache_cut: str) -> int:
  """Returns of what number the tokens of a row's latents must be a multiple."""
  return cuts.size(cuts.heads) if cache_cut == "sequence" else 1


def _token_axes(cuts: Cuts, prefill_cut: str) -> Axes:
  return cuts.rows + cuts.heads if prefill_cut == "sequence" else ()


def _check_choice(what: str, found: str, known: Sequence[str]) -> None:
  if found not in known:
    raise InputError(f"{what} is {found!r}, expected one of: {', '.join(known)}")


def _check_multiple(what: str, found: int, unit: int, of: str) -> None:
  if found < 1 or found % unit:
    nearest = max(1, round(found / unit)) * unit
    raise InputError(f"{what} of {found} {of}: the mesh cuts it into {unit}, the nearest that works is {nearest}")


def _expert_form(device_kind: str) -> shapes.ExpertForm:
  if device_kind not in EXPERT_FORMS:
    raise InputError(f"device kind {device_kind!r}, expected one of: {', '.join(EXPERT_FORMS)}")
  return EXPERT_FORMS[device_kind]


def _latent_dtype(size: int) -> str:
  if size not in (1, 2):
    raise InputError(f"latents of {size} bytes an element, expected 2 (bfloat16) or 1 (float8)")
  return {1: "float8_e4m3fn", 2: "bfloat16"}[size]


def _vector_bytes(size: int) -> int:
  """Bytes of int32 [size]."""
  return 4 * shapes.padded_size((size,))


# Temporaries and code: what libtpu 0.0.50.1 chose with COMPILE_OPTIONS, read from the schedules of the compiled texts.
# Beside arguments of 25 to 85 GiB the error of these constants is what is left of the error of an estimate.

_BF16, _F32 = 2, 4
# Bytes of the program, without and with rows that are cut: on TPU7x the SparseCore then runs more collectives, each a
# program of its own. Layers are folded, so that depth does not matter.
_DECODE_CODE = {"TPU7x": (16 * 2**20, 48 * 2**20), "TPU v6 lite": (16 * 2**20, 16 * 2**20)}
_PREFILL_CODE = {"TPU7x": (42 * 2**20, 133 * 2**20), "TPU v6 lite": (44 * 2**20, 44 * 2**20)}
# A step: the convolutions' histories are written beside the old ones, the snapshots are there twice, and one layer's
# arrays take no more than this.
_DECODE_REST = 5 * 2**20
# Sums of T x D in bfloat16 that wait for their reduction beside the gathered tokens, in the layers before the blocks:
# collectives of three layers are under way at one time.
_SUMS_UNDER_WAY = 3.1
# Bytes of a KDA layer for each token and channel of its heads: queries, keys, values and decays in bfloat16 and in
# float32, and what the chunks of the kernel leave for one another.
_KDA_BYTES = 83
# Copies of residual stream and snapshots beside the one that the program needs.
_STREAM_COPIES = 1


def _decode_temp(config: KimiK3Config, rows: int, caches: Mapping[str, shapes.Leaf]) -> int:
  """The histories of the convolutions, the snapshots of the rows, and one layer's arrays."""
  history = sum(leaf.device_bytes for name, leaf in caches.items() if name.endswith(".conv_state"))
  stream = rows * config.hidden_size * _BF16 * 2 * (config.num_snapshots + 1)
  return history + stream + _DECODE_REST


def _prefill_temp(
  config: KimiK3Config, cuts: Cuts, tokens: int, history: bool, prefill_cut: str, device_kind: str
) -> int:
  """The stream of the device's own tokens, and what the hungriest part of a layer holds beside it."""
  D, L = config.hidden_size, config.expert_dim
  own = tokens // cuts.size(_token_axes(cuts, prefill_cut))
  stream = own * D * _BF16 * (1 + config.num_snapshots) * (1 + _STREAM_COPIES)
  gathered = tokens * D * _BF16
  groups = cuts.size(cuts.rows) if prefill_cut == "sequence" else 1
  # A group sums its own tokens only. No snapshot is there yet: the stream, and what is read of it and added to it.
  sums = gathered + _SUMS_UNDER_WAY * gathered / groups + 3 * own * D * _BF16
  channels = config.kda_num_heads // cuts.size(cuts.heads) * config.kda_head_dim
  axes = _token_axes(cuts, prefill_cut)
  copies = 1 + 1 / groups if len(axes) > 1 else 1  # gathered over one axis after the other: a group's tokens first
  attention = copies * gathered + _KDA_BYTES * tokens * channels
  if history:  # what attention to it has summed so far
    attention += tokens * config.num_heads // cuts.size(cuts.heads) * config.v_head_dim * _F32
  piece = min(tokens, TOKENS_AT_A_TIME)
  # Input in bfloat16, sums in float32 before and after an addition; grouped, also the products to be added.
  experts = piece * L * (_BF16 + 2 * _F32)
  if _expert_form(device_kind) == "float4":
    experts += GROUPED_ROWS * L * _F32
  return int(max(sums, stream + attention, stream + experts))


# Speed.


def traffic_of(
  config: KimiK3Config, cuts: Cuts, *, batch: int, context: int, latent_dtype_bytes: int = 2
) -> DecodeTraffic:
  """Returns the bytes that one device must move in a decoding step: `traffic.decode_traffic` of these cuts.

  Raises:
    InputError: as decode_traffic, and if heads, widths and vocabulary are not cut alike, which it takes for granted.
  """
  if not cuts.heads == cuts.width == cuts.vocab:
    raise InputError(
      f"bytes of a step are known where heads, width and vocab are cut by the same axes, found {list(cuts.heads)}, "
      f"{list(cuts.width)} and {list(cuts.vocab)}: cut them alike"
    )
  return decode_traffic(
    config,
    devices_heads=cuts.size(cuts.heads),
    devices_experts=cuts.size(cuts.experts),
    expert_width_cuts=cuts.size(cuts.expert_width),
    batch=batch,
    context=context,
    rows_cuts=cuts.size(cuts.rows),
    latent_cuts=cuts.size(cuts.heads),
    cache_dtype_bytes=latent_dtype_bytes,
    latent_projection_cuts=cuts.size(cuts.latent),
  )


def prefill_flops(config: KimiK3Config, *, tokens: int, history: int = 0) -> float:
  """Returns the operations of matrix products in a chunk of one prompt, of all devices together.

  Two for each weight that a token meets (experts: those it chooses; the head: one token), MLA's scores and values of
  what a token sees, keys and values of the history made again, KDA's chunks of 64 tokens. Not counted: convolutions,
  norms, gates, softmax.

  Args:
    config: The architecture.
    tokens: Of the chunk.
    history: Tokens of the prompt before it.
  """
  c = config
  whole = Cuts.of({})
  leaves = shapes.parameters(dataclasses.replace(c, packed_modules=()), whole, expert_form="stored")
  per_token = 0.0
  for name, leaf in leaves.items():
    kind, size = kind_of(name, leaves), math.prod(leaf.shape)
    if kind in ("norms", "embedding", "head") or leaf.dtype == "float32" or len(leaf.shape) < 2:
      continue
    per_token += size * (c.num_experts_per_token / c.num_experts if kind == "experts" else 1.0)
  mla = sum(kind is LayerKind.MLA for kind in c.layer_kinds)
  kda = c.num_layers - mla
  seen = history + (tokens + 1) / 2
  one_pair = c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
  remade = history * c.kv_lora_rank * c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
  K = c.kda_head_dim
  # Of a chunk with C tokens: k k^T, q k^T, the inverse applied to keys and values, the masked product with values
  # [C, C, K each]; the state read for values and for queries, and written [C, K, K each].
  one_token = c.kda_num_heads * (5 * KDA_CHUNK * K + 3 * K * K)
  macs = tokens * per_token + c.hidden_size * c.vocab_size
  macs += mla * (tokens * seen * one_pair + remade) + kda * tokens * one_token
  return 2.0 * macs
