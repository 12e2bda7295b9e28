"""Every parameter and cache of the manual partitioning as shapes, without the model: what a device holds of each.

The names are those of docs/parameter-tree.md, the cuts those of `spmd.cuts`. A test holds them equal to the model's.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Literal

from kimi_k3.config import MXFP4_GROUP, KimiK3Config, LayerKind
from kimi_k3.errors import InputError
from kimi_k3.layout import BLOCK_LAYERS, LEAD_LAYERS, fold
from kimi_k3.spmd.cuts import Axes, Cuts

ExpertForm = Literal["stored", "float4", "nibbles"]  # of moe/packed.py
SUBLANES, LANES = 8, 128  # rows and columns of a tile
_BITS = {
  "float4_e2m1fn": 4,
  "uint8": 8,
  "float8_e4m3fn": 8,
  "bfloat16": 16,
  "float16": 16,
  "int32": 32,
  "float32": 32,
}


def element_bits(dtype: str) -> int:
  """Returns the bits of an element of a type, by its name.

  Raises:
    InputError: if no parameter or cache has the type.
  """
  if dtype not in _BITS:
    raise InputError(f"dtype {dtype}: the size of its elements is not known here, expected one of {', '.join(_BITS)}")
  return _BITS[dtype]


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One array.

  Attributes:
    shape: Whole.
    dtype: Name of its type.
    cuts: Parts of each axis.
  """

  shape: tuple[int, ...]
  dtype: str
  cuts: tuple[int, ...]

  @property
  def local_shape(self) -> tuple[int, ...]:
    """What one device holds of each axis."""
    return tuple(size // cut for size, cut in zip(self.shape, self.cuts, strict=True))

  @property
  def device_bytes(self) -> int:
    """Bytes that one device holds, without padding."""
    return math.prod(self.local_shape) * element_bits(self.dtype) // 8

  @property
  def padded_bytes(self) -> int:
    """Bytes that one device's part takes in a TPU's memory."""
    return padded_size(self.local_shape) * element_bits(self.dtype) // 8


@functools.lru_cache(maxsize=4096)  # stacks of many layers have few shapes
def padded_size(shape: tuple[int, ...]) -> int:
  """Returns the elements of an argument with the padding of its tiles.

  A tile has 8 rows and 128 lanes, or fewer rows where an axis has fewer, and the compiler lays the axes of an argument
  so that least is padded: seen in the layouts of all arguments of the programs in compiled.json. A vector is padded to
  1024 elements, or to a smaller power of two.
  """
  if not shape:
    return 1
  if len(shape) == 1:
    unit = min(1024, max(LANES, _power_of_two(shape[0])))
    return -(-shape[0] // unit) * unit
  size = math.prod(shape)
  return min(
    size // rows // lanes * _padded_rows(rows) * (-(-lanes // LANES) * LANES)
    for rows, lanes in itertools.permutations(shape, 2)
  )


def _padded_rows(rows: int) -> int:
  unit = min(SUBLANES, _power_of_two(rows))
  return -(-rows // unit) * unit


def _power_of_two(size: int) -> int:
  """The smallest that is not less."""
  return 1 << max(0, size - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class Unit:
  """Layers that share one stack of parameters: one outside the blocks, or one position of every block.

  Attributes:
    name: Of its place in the tree, without `decoder.`.
    count: Layers in the stack; None for a layer outside the blocks, whose parameters have no axis of layers.
    kind: What mixes its tokens.
    moe: Whether it has routed experts.
  """

  name: str
  count: int | None
  kind: LayerKind
  moe: bool


def units(config: KimiK3Config, *, scan: bool = True) -> tuple[Unit, ...]:
  """Returns the layers in order, those of the blocks once for each of the four positions.

  Args:
    config: The architecture.
    scan: Whether the blocks of four layers are stacked.

  Raises:
    InputError: if the layers do not fold into blocks and `scan` says they do.
  """

  def unit(name: str, i: int, count: int | None = None) -> Unit:
    return Unit(name, count, config.layer_kinds[i], config.moe_layers[i])

  if not scan:
    return tuple(unit(f"layers_{i}", i) for i in range(config.num_layers))
  plan = fold(config)
  found = [unit(f"lead_{i}", i) for i in range(plan.num_lead)]
  if plan.num_blocks:
    found += [unit(f"blocks.layers_{j}", LEAD_LAYERS + j, plan.num_blocks) for j in range(BLOCK_LAYERS)]
  return (*found, *(unit(f"tail_{i}", plan.first_tail + i) for i in range(plan.num_tail)))


def parameters(
  config: KimiK3Config,
  cuts: Cuts,
  *,
  expert_form: ExpertForm,
  weight_dtype: str = "bfloat16",
  scan: bool = True,
) -> dict[str, Leaf]:
  """Returns every parameter as the programs take it, by its name in the tree.

  Args:
    config: The architecture.
    cuts: What cuts it.
    expert_form: In which packed experts lie in memory.
    weight_dtype: Of what is neither packed nor a float32 leaf.
    scan: Whether the blocks of four layers are stacked.

  Raises:
    InputError: if a module is stored in a form that the manual partitioning does not take, or layers do not fold.
  """
  forms = [f"packed {name}" for name in config.packed_modules if name != "experts"]
  forms += [f"{name} in FP8" for name in config.fp8_modules]
  if forms:
    raise InputError(f"the checkpoint has {', '.join(forms)}: not supported in the manual partitioning, nor estimated")
  make = _Parameters(config, cuts, expert_form, weight_dtype)
  D, X = config.hidden_size, config.vocab_size
  found = {"token_embedder.embedding": make.leaf((X, D), cuts.vocab)}
  for unit in units(config, scan=scan):
    stack = () if unit.count is None else (unit.count,)
    for name, leaf in make.layer(unit.kind, unit.moe):
      ones = (1,) * len(stack)
      found[f"decoder.{unit.name}.{name}"] = Leaf(stack + leaf.shape, leaf.dtype, ones + leaf.cuts)
  found["decoder.decoder_norm.scale"] = make.leaf((D,))
  found["decoder.logits_dense.kernel"] = make.leaf((D, X), (), cuts.vocab)
  if config.attn_res_block_size is not None:
    found |= {f"decoder.output_res.{name}": make.leaf((D,)) for name in ("norm", "proj")}
  return found


@dataclasses.dataclass(frozen=True)
class _Parameters:
  """Parameters of one layer, named from there."""

  config: KimiK3Config
  cuts: Cuts
  expert_form: ExpertForm
  weight_dtype: str

  def leaf(self, shape: tuple[int, ...], *axes: Axes, dtype: str | None = None) -> Leaf:
    parts = [self.cuts.size(axis) for axis in axes] + [1] * (len(shape) - len(axes))
    return Leaf(shape, dtype or self.weight_dtype, tuple(parts))

  def _float32(self, kind: str) -> str:
    return "float32" if kind in self.config.float32_leaves else self.weight_dtype

  def layer(self, kind: LayerKind, moe: bool) -> Iterator[tuple[str, Leaf]]:
    D = self.config.hidden_size
    yield "input_norm.scale", self.leaf((D,))
    yield "post_attention_norm.scale", self.leaf((D,))
    if self.config.attn_res_block_size is not None:
      for mix in ("attention_res", "mlp_res"):
        yield f"{mix}.norm", self.leaf((D,))
        yield f"{mix}.proj", self.leaf((D,))
    for name, leaf in self._kda() if kind is LayerKind.KDA else self._mla():
      yield f"attention.{name}", leaf
    mlp = self._moe() if moe else self._gated_mlp(self.config.dense_mlp_dim)
    for name, leaf in mlp:
      yield f"mlp.{name}", leaf

  def _kda(self) -> Iterator[tuple[str, Leaf]]:
    c, heads = self.config, self.cuts.heads
    D, H, K, W = c.hidden_size, c.kda_num_heads, c.kda_head_dim, c.kda_conv_width
    for name in "qkv":
      yield f"{name}_proj.kernel", self.leaf((D, H, K), (), heads)
      yield f"{name}_conv", self.leaf((W, H, K), (), heads, dtype=self._float32("conv1d"))
    yield "f_a_proj.kernel", self.leaf((D, K))
    yield "f_b_proj.kernel", self.leaf((K, H, K), (), heads)
    yield "A_log", self.leaf((H,), heads, dtype="float32")
    yield "dt_bias", self.leaf((H, K), heads, dtype="float32")
    yield "b_proj.kernel", self.leaf((D, H), (), heads)
    if c.kda_full_rank_gate:
      yield "g_proj.kernel", self.leaf((D, H, K), (), heads)
    else:
      yield "g_a_proj.kernel", self.leaf((D, K))
      yield "g_b_proj.kernel", self.leaf((K, H, K), (), heads)
    yield "o_norm.scale", self.leaf((K,), dtype=self._float32("o_norm"))
    yield "o_proj.kernel", self.leaf((H, K, D), heads)

  def _mla(self) -> Iterator[tuple[str, Leaf]]:
    c, heads = self.config, self.cuts.heads
    D, H, Q, C = c.hidden_size, c.num_heads, c.q_lora_rank, c.kv_lora_rank
    N, R, V = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    if Q:
      yield "wq_a.kernel", self.leaf((D, Q))
      yield "q_norm.scale", self.leaf((Q,))
      yield "wq_b.kernel", self.leaf((Q, H, N + R), (), heads)
    else:
      yield "query.kernel", self.leaf((D, H, N + R), (), heads)
    yield "wkv_a.kernel", self.leaf((D, C + R))
    yield "kv_norm.scale", self.leaf((C,))
    yield "wkv_b.kernel", self.leaf((C, H, N + V), (), heads)
    if c.mla_use_output_gate:
      yield "gate.kernel", self.leaf((D, H, V), (), heads)
    yield "out.kernel", self.leaf((H, V, D), heads)

  def _gated_mlp(self, width: int) -> Iterator[tuple[str, Leaf]]:
    D = self.config.hidden_size
    yield "gate_proj.kernel", self.leaf((D, width), (), self.cuts.width)
    yield "up_proj.kernel", self.leaf((D, width), (), self.cuts.width)
    yield "down_proj.kernel", self.leaf((width, D), self.cuts.width)

  def _moe(self) -> Iterator[tuple[str, Leaf]]:
    c = self.config
    D, E, L = c.hidden_size, c.num_experts, c.expert_latent_dim
    yield "router.kernel", self.leaf((D, E))
    yield "router.bias", self.leaf((E,), dtype=self._float32("e_score_correction_bias"))
    yield from self._experts()
    if L is not None:
      yield "down_proj.kernel", self.leaf((D, L), (), self.cuts.latent)
      yield "up_proj.kernel", self.leaf((L, D), self.cuts.latent)
      if c.latent_moe_use_norm:
        yield "norm.scale", self.leaf((L,))
    if c.num_shared_experts:
      for name, leaf in self._gated_mlp(c.shared_mlp_dim):
        yield f"shared_experts.{name}", leaf

  def _experts(self) -> Iterator[tuple[str, Leaf]]:
    """Matrices [in, out] of w1, w3 (L to F) and w2 (F to L), or what of them is stored packed."""
    c, experts, width = self.config, self.cuts.experts, self.cuts.expert_width
    E, L, F = c.num_experts, c.expert_dim, c.expert_mlp_dim
    for name, into, out, cut_in, cut_out in (("w1", L, F, (), width), ("w3", L, F, (), width), ("w2", F, L, width, ())):
      if "experts" not in c.packed_modules:
        yield f"experts.{name}", self.leaf((E, into, out), experts, cut_in, cut_out)
        continue
      rows, dtype = {
        "stored": (into // 2, "uint8"),
        "nibbles": (into // 2, "uint8"),
        "float4": (into, "float4_e2m1fn"),
      }[self.expert_form]
      for part, size, kind in (("packed", rows, dtype), ("scale", into // MXFP4_GROUP, "uint8")):
        if self.expert_form == "stored":
          yield f"experts.{name}_{part}", self.leaf((E, out, size), experts, cut_out, cut_in, dtype=kind)
        else:
          yield f"experts.{name}_{part}", self.leaf((E, size, out), experts, cut_in, cut_out, dtype=kind)


def caches(
  config: KimiK3Config,
  cuts: Cuts,
  *,
  rows: int,
  length: int,
  cut: str,
  cut_rows: bool = True,
  conv_dtype: str = "bfloat16",
  latent_dtype: str = "bfloat16",
  scan: bool = True,
) -> dict[str, Leaf]:
  """Returns the caches by the place of their layer.

  Args:
    config: The architecture.
    cuts: What cuts it.
    rows: Sequences.
    length: Tokens that a row's latents have room for.
    cut: How the axes of the heads cut the latents: by "sequence" or by "batch".
    cut_rows: Whether the rows are cut as in a step, or whole everywhere as in prefill.
    conv_dtype: Of what the convolutions remember.
    latent_dtype: Of the latents.
    scan: Whether the blocks of four layers are stacked.
  """
  row_axes = cuts.rows if cut_rows else ()
  latent_rows, latent_length = (row_axes + cuts.heads, ()) if cut == "batch" else (row_axes, cuts.heads)
  H, K = config.kda_num_heads, config.kda_head_dim

  def leaf(shape: tuple[int, ...], dtype: str, *axes: Axes) -> Leaf:
    parts = [cuts.size(axis) for axis in axes] + [1] * (len(shape) - len(axes))
    return Leaf(shape, dtype, tuple(parts))

  found = {}
  for unit in units(config, scan=scan):
    n = unit.count or 1
    if unit.kind is LayerKind.KDA:
      found[f"{unit.name}.recurrent_state"] = leaf((n, rows, H, K, K), "float32", (), row_axes, cuts.heads)
      shape = (n, rows, config.kda_conv_width - 1, 3, H, K)
      found[f"{unit.name}.conv_state"] = leaf(shape, conv_dtype, (), row_axes, (), (), cuts.heads)
    else:
      shape = (n, rows, length, config.kv_lora_rank + config.qk_rope_head_dim)
      found[f"{unit.name}.latents"] = leaf(shape, latent_dtype, (), latent_rows, latent_length)
  return found
