"""Names as data: which stored tensor fills which part of which leaf. The target is docs/parameter-tree.md.

`leaves` spells out the whole tree for a config, without looking at a checkpoint; `compare` then holds every stored
tensor against it. Matrices are stored output-first and become input-first, with heads as an axis of their own, so an
entry is a pair of names plus the axes of its input and output side.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from kimi_k3 import layout
from kimi_k3.config import FP8_BLOCK, MXFP4_GROUP, KimiK3Config, LayerKind
from kimi_k3.convert.faults import refuse_any
from kimi_k3.convert.index import StoredTensor
from kimi_k3.convert.transforms import Transform

Shape = tuple[int, ...]

LEAF_DTYPES = {"BF16": "bfloat16", "F32": "float32", "U8": "uint8"}
# Of leaves that have no stored tensor's dtype.
_MADE_DTYPES = {
  Transform.DECODE: "bfloat16",
  Transform.PACK_CODES: "uint8",
  Transform.PACK_SCALES: "uint8",
  Transform.FP8_CODES: "float8_e4m3fn",
  Transform.FP8_SCALES: "float32",
}
# What `dense` in fp8_modules means: of the leaves of a layer, every matrix of attention, and of the MLP all but the
# router and the routed experts. Embedding, head, norms, convolutions and residual projections are none of these.
_DENSE = re.compile(r"attention\.\w+\.kernel|mlp\.(?:shared_experts\.)?\w+_proj\.kernel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredForm:
  """What the config leaves open about the stored tensors.

  Attributes:
    prefix: What every stored name starts with.
    packed_modules: Modules stored in MXFP4. Experts that the target's config does not pack are decoded.
    a_log_shape: [K] with zero padding past H, [1, 1, H, 1] or [H].
  """

  prefix: str
  packed_modules: tuple[str, ...]
  a_log_shape: Shape


class Stored(NamedTuple):
  """One tensor as it must be stored, with safetensors' name of the dtype."""

  name: str
  dtype: str
  shape: Shape


class Piece(NamedTuple):
  """The stored tensor(s) that fill the leaf at `index`, a prefix of its axes: (), (block,), (expert,) or both."""

  index: Shape
  names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One array of the tree.

  Attributes:
    path: Below `params.params`, for example ("decoder", "blocks", "layers_0", "input_norm", "scale").
    shape: Of the whole array, block and expert axes included.
    dtype: numpy's name of the dtype.
    transform: From the stored tensors of a piece to its slice, `slice_shape` large.
    stored: Shape and safetensors dtype that each tensor of a piece must have, in the order of its names.
    pieces: Together they fill the array.
  """

  path: tuple[str, ...]
  shape: Shape
  dtype: str
  transform: Transform
  stored: tuple[tuple[str, Shape], ...]
  pieces: tuple[Piece, ...]

  @property
  def slice_shape(self) -> Shape:
    """Shape of the part that one piece fills."""
    return self.shape[len(self.pieces[0].index) :]


class _Entry(NamedTuple):
  """A leaf of one layer or of the top. The stored tensors are named within the layer; `{e}` is an expert's number."""

  path: str
  shape: Shape
  transform: Transform
  stored: tuple[Stored, ...]
  num_experts: int = 0
  result: int = 0  # Which of the stored tensors has the leaf's dtype.

  @property
  def dtype(self) -> str:
    return _MADE_DTYPES.get(self.transform) or LEAF_DTYPES[self.stored[self.result].dtype]


def leaves(config: KimiK3Config, form: StoredForm, *, scan: bool) -> tuple[Leaf, ...]:
  """Returns every leaf of the tree in the order of the model.

  Args:
    config: The target's config; `packed_modules` and `fp8_modules` say how matrices are stored.
    form: How the source stores them.
    scan: Whether layers are folded into blocks (`kimi_k3.layout`).
  """
  fold = layout.fold(config) if scan else None
  table: dict[tuple[str, ...], tuple[_Entry, list[Piece]]] = {}
  for entry in _embedding(config):
    _add(table, entry, layout.Place(""), form.prefix)
  for layer in range(config.num_layers):
    place = fold.place(layer) if fold else layout.Place(f"layers_{layer}")
    place = dataclasses.replace(place, path=f"decoder.{place.path}.")
    for entry in _layer(config, form, layer):
      _add(table, entry, place, f"{form.prefix}model.layers.{layer}.")
  for entry in _head(config):
    _add(table, entry, layout.Place("decoder."), form.prefix)
  return tuple(_leaf(path, *held, blocks=fold.num_blocks if fold else 0) for path, held in table.items())


def _add(table: dict, entry: _Entry, place: layout.Place, prefix: str) -> None:
  """Adds the pieces of one layer's entry to its leaf, which other layers of the same scan share."""
  path = tuple((place.path + entry.path).split("."))
  _, pieces = table.setdefault(path, (entry, []))
  block = () if place.index is None else (place.index,)
  names = [prefix + stored.name for stored in entry.stored]
  if not entry.num_experts:
    pieces.append(Piece(block, tuple(names)))
  for e in range(entry.num_experts):
    pieces.append(Piece((*block, e), tuple(name.replace("{e}", str(e)) for name in names)))


def _leaf(path: tuple[str, ...], entry: _Entry, pieces: list[Piece], *, blocks: int) -> Leaf:
  experts = (entry.num_experts,) if entry.num_experts else ()
  stacked = (blocks,) if len(pieces[0].index) > len(experts) else ()
  stored = tuple((tensor.dtype, tensor.shape) for tensor in entry.stored)
  return Leaf(path, (*stacked, *experts, *entry.shape), entry.dtype, entry.transform, stored, tuple(pieces))


def _matrix(path: str, name: str, inputs: Shape, outputs: Shape) -> _Entry:
  """`name` [outputs, inputs] becomes `path` [*inputs, *outputs]."""
  stored = Stored(name, "BF16", (math.prod(outputs), math.prod(inputs)))
  return _Entry(path, (*inputs, *outputs), Transform.TRANSPOSE, (stored,))


def _vector(path: str, name: str, *shape: int, stored: Shape | None = None, dtype: str = "BF16") -> _Entry:
  return _Entry(path, shape, Transform.RESHAPE, (Stored(name, dtype, stored or shape),))


def _codes_and_scales(name: str, inputs: int, outputs: int) -> tuple[Stored, Stored]:
  return (
    Stored(f"{name}_packed", "U8", (outputs, inputs // 2)),
    Stored(f"{name}_scale", "U8", (outputs, inputs // MXFP4_GROUP)),
  )


def _packed(
  path: str, name: str, inputs: int, outputs: int, num_experts: int = 0, stored: bool = True
) -> Iterator[_Entry]:
  """Codes and scales, as stored or made from bfloat16. The codes' path ends in `packed`, the scales' in `scale`."""
  codes, scales = _codes_and_scales(name, inputs, outputs)
  if not stored:
    weights = (Stored(name, "BF16", (outputs, inputs)),)
    yield _Entry(f"{path}packed", codes.shape, Transform.PACK_CODES, weights, num_experts)
    yield _Entry(f"{path}scale", scales.shape, Transform.PACK_SCALES, weights, num_experts)
    return
  yield _Entry(f"{path}packed", codes.shape, Transform.RESHAPE, (codes,), num_experts)
  yield _Entry(f"{path}scale", scales.shape, Transform.SCALES, (codes, scales), num_experts, result=1)


def _fp8(entry: _Entry) -> Iterator[_Entry]:
  """FP8 codes in place of bfloat16, and their scales beside them. `entry` is a matrix, or one that is decoded."""
  outputs, _ = entry.stored[0].shape
  blocks = tuple(-(-size // FP8_BLOCK) for size in (math.prod(entry.shape) // outputs, outputs))
  yield entry._replace(transform=Transform.FP8_CODES)
  yield entry._replace(path=f"{entry.path}_scale_inv", shape=blocks, transform=Transform.FP8_SCALES)


def _embedding(c: KimiK3Config) -> Iterator[_Entry]:
  yield _vector("token_embedder.embedding", "model.embed_tokens.weight", c.vocab_size, c.hidden_size)


def _head(c: KimiK3Config) -> Iterator[_Entry]:
  if c.attn_res_block_size is not None:
    yield from _residual(c, "output_res", "model.output_attn_res")
  yield _vector("decoder_norm.scale", "model.norm.weight", c.hidden_size)
  yield _matrix("logits_dense.kernel", "lm_head.weight", (c.hidden_size,), (c.vocab_size,))


def _residual(c: KimiK3Config, path: str, name: str) -> Iterator[_Entry]:
  yield _vector(f"{path}.norm", f"{name}_norm.weight", c.hidden_size)
  yield _vector(f"{path}.proj", f"{name}_proj.weight", c.hidden_size, stored=(1, c.hidden_size))


def _layer(c: KimiK3Config, form: StoredForm, layer: int) -> Iterator[_Entry]:
  for entry in _layer_as_stored(c, form, layer):
    if "dense" in c.fp8_modules and _DENSE.fullmatch(entry.path):
      yield from _fp8(entry)
    else:
      yield entry


def _layer_as_stored(c: KimiK3Config, form: StoredForm, layer: int) -> Iterator[_Entry]:
  yield _vector("input_norm.scale", "input_layernorm.weight", c.hidden_size)
  yield _vector("post_attention_norm.scale", "post_attention_layernorm.weight", c.hidden_size)
  if c.attn_res_block_size is not None:
    yield from _residual(c, "attention_res", "self_attention_res")
    yield from _residual(c, "mlp_res", "mlp_res")
  attention = _kda(c, form) if c.layer_kinds[layer] is LayerKind.KDA else _mla(c)
  yield from (_within(entry, "attention.", "self_attn.") for entry in attention)
  if c.moe_layers[layer]:
    yield from (_within(entry, "mlp.", "block_sparse_moe.") for entry in _moe(c, form))
  else:
    yield from _mlp(c, "mlp.", "mlp.", c.dense_mlp_dim, packed=False)


def _within(entry: _Entry, path: str, name: str) -> _Entry:
  stored = tuple(tensor._replace(name=name + tensor.name) for tensor in entry.stored)
  return entry._replace(path=path + entry.path, stored=stored)


def _kda(c: KimiK3Config, form: StoredForm) -> Iterator[_Entry]:
  D, heads, K = (c.hidden_size,), (c.kda_num_heads, c.kda_head_dim), c.kda_head_dim
  taps_dtype = "F32" if "conv1d" in c.float32_leaves else "BF16"
  for x in "qkv":
    yield _matrix(f"{x}_proj.kernel", f"{x}_proj.weight", D, heads)
    taps = Stored(f"{x}_conv1d.weight", taps_dtype, (math.prod(heads), 1, c.kda_conv_width))
    yield _Entry(f"{x}_conv", (c.kda_conv_width, *heads), Transform.TRANSPOSE, (taps,))
  yield _matrix("f_a_proj.kernel", "f_a_proj.weight", D, (K,))
  yield _matrix("f_b_proj.kernel", "f_b_proj.weight", (K,), heads)
  padded = len(form.a_log_shape) == 1 and form.a_log_shape[0] > c.kda_num_heads
  a_log = Stored("A_log", "F32", form.a_log_shape)
  yield _Entry("A_log", (c.kda_num_heads,), Transform.NARROW if padded else Transform.RESHAPE, (a_log,))
  yield _vector("dt_bias", "dt_bias", *heads, stored=(math.prod(heads),), dtype="F32")
  yield _matrix("b_proj.kernel", "b_proj.weight", D, (c.kda_num_heads,))
  if c.kda_full_rank_gate:
    yield _matrix("g_proj.kernel", "g_proj.weight", D, heads)
  else:
    yield _matrix("g_a_proj.kernel", "g_a_proj.weight", D, (K,))
    yield _matrix("g_b_proj.kernel", "g_b_proj.weight", (K,), heads)
  yield _vector("o_norm.scale", "o_norm.weight", K, dtype="F32" if "o_norm" in c.float32_leaves else "BF16")
  yield _matrix("o_proj.kernel", "o_proj.weight", heads, D)


def _mla(c: KimiK3Config) -> Iterator[_Entry]:
  D, H, C, N, R, V = (
      (c.hidden_size,), c.num_heads, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim,
  )  # fmt: skip
  if c.q_lora_rank is None:
    yield _matrix("query.kernel", "q_proj.weight", D, (H, N + R))
  else:
    yield _matrix("wq_a.kernel", "q_a_proj.weight", D, (c.q_lora_rank,))
    yield _vector("q_norm.scale", "q_a_layernorm.weight", c.q_lora_rank)
    yield _matrix("wq_b.kernel", "q_b_proj.weight", (c.q_lora_rank,), (H, N + R))
  yield _matrix("wkv_a.kernel", "kv_a_proj_with_mqa.weight", D, (C + R,))
  yield _vector("kv_norm.scale", "kv_a_layernorm.weight", C)
  yield _matrix("wkv_b.kernel", "kv_b_proj.weight", (C,), (H, N + V))
  if c.mla_use_output_gate:
    yield _matrix("gate.kernel", "g_proj.weight", D, (H, V))
  yield _matrix("out.kernel", "o_proj.weight", (H, V), D)


def _moe(c: KimiK3Config, form: StoredForm) -> Iterator[_Entry]:
  D, L = c.hidden_size, c.expert_dim
  bias_dtype = "F32" if "e_score_correction_bias" in c.float32_leaves else "BF16"
  yield _matrix("router.kernel", "gate.weight", (D,), (c.num_experts,))
  yield _vector("router.bias", "gate.e_score_correction_bias", c.num_experts, dtype=bias_dtype)
  yield from _experts(c, form)
  if c.expert_latent_dim is not None:
    packed = "latent" in c.packed_modules
    yield from _dense("down_proj.", "routed_expert_down_proj.weight", D, L, packed=packed)
    yield from _dense("up_proj.", "routed_expert_up_proj.weight", L, D, packed=packed)
  if c.latent_moe_use_norm:
    yield _vector("norm.scale", "routed_expert_norm.weight", L)
  if c.num_shared_experts:
    packed = "shared_experts" in c.packed_modules
    yield from _mlp(c, "shared_experts.", "shared_experts.", c.shared_mlp_dim, packed=packed)


def _experts(c: KimiK3Config, form: StoredForm) -> Iterator[_Entry]:
  L, F = c.expert_dim, c.expert_mlp_dim
  for w, inputs, outputs in (("w1", L, F), ("w3", L, F), ("w2", F, L)):
    name = f"experts.{{e}}.{w}.weight"
    if "experts" in c.packed_modules:
      stored = "experts" in form.packed_modules
      yield from _packed(f"experts.{w}_", name, inputs, outputs, c.num_experts, stored)
      continue
    entry = _matrix(f"experts.{w}", name, (inputs,), (outputs,))._replace(num_experts=c.num_experts)
    if "experts" in form.packed_modules:
      entry = entry._replace(transform=Transform.DECODE, stored=_codes_and_scales(name, inputs, outputs))
    yield from _fp8(entry) if "experts" in c.fp8_modules else (entry,)


def _mlp(c: KimiK3Config, path: str, name: str, width: int, *, packed: bool) -> Iterator[_Entry]:
  for proj, inputs, outputs in (
    ("gate", c.hidden_size, width),
    ("up", c.hidden_size, width),
    ("down", width, c.hidden_size),
  ):
    yield from _dense(f"{path}{proj}_proj.", f"{name}{proj}_proj.weight", inputs, outputs, packed=packed)


def _dense(path: str, name: str, inputs: int, outputs: int, *, packed: bool) -> Iterator[_Entry]:
  if packed:
    yield from _packed(path, name, inputs, outputs)
  else:
    yield _matrix(f"{path}kernel", name, (inputs,), (outputs,))


def compare(tree: Iterable[Leaf], tensors: Mapping[str, StoredTensor]) -> None:
  """Raises unless the tree uses up exactly these tensors, with the shapes and dtypes it expects.

  Raises:
    InputError: naming every tensor that is missing, unexpected, of another shape or of another dtype.
  """
  expected = {
    name: stored
    for leaf in tree
    for piece in leaf.pieces
    for name, stored in zip(piece.names, leaf.stored, strict=True)
  }
  faults = collections.defaultdict(list)
  for name, (dtype, shape) in expected.items():
    found = tensors.get(name)
    if found is None:
      faults["missing"].append(f"{name}: missing, expected {dtype} {list(shape)}")
    elif (found.dtype, found.shape) != (dtype, shape):
      faults["different"].append(f"{name}: {found.dtype} {list(found.shape)}, expected {dtype} {list(shape)}")
  faults["unexpected"] += [f"{name}: unexpected, nothing uses it" for name in tensors if name not in expected]
  counts = ", ".join(f"{len(names)} {kind}" for kind, names in faults.items() if names)
  refuse_any(
    [f for names in faults.values() for f in names], f"{counts}: do config.json and the shards belong together?"
  )
