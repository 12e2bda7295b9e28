"""The model as a function of flat parameters and caches: what one device computes, and where its parts lie.

Parameters are named as in a checkpoint (docs/parameter-tree.md). Caches are named by the place of their layer, and are
stacked like the parameters: a layer outside the blocks is a stack of one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from kimi_k3.attn_res import AttentionResidual
from kimi_k3.block import Context, Layer, Stream
from kimi_k3.cache import KDAStack, LatentStack
from kimi_k3.config import ComputeConfig, KimiK3Config, LayerKind
from kimi_k3.errors import InputError
from kimi_k3.kda.layer import KDA
from kimi_k3.kda.tops_backend import tops_kda
from kimi_k3.layout import BLOCK_LAYERS, LEAD_LAYERS, fold
from kimi_k3.linear import Linear
from kimi_k3.moe import implementations
from kimi_k3.moe.packed import Form
from kimi_k3.norms import RMSNorm
from kimi_k3.sharding import EMBED, EXPERT, EXPERT_MLP, NORM, VOCAB
from kimi_k3.spmd.collectives import Collectives
from kimi_k3.spmd.cuts import Axes, Cuts
from kimi_k3.spmd.mla import MLA

Arrays = dict[str, Any]
CACHE_CUTS = ("sequence", "batch")
# libtpu 0.0.50.1 compiles it for TPU v6 lite too, and pushes it there as e4m3b11, which ends at 30 and has another NaN.
_E4M3_TPUS = ("TPU7x",)

_EMBEDDING = "token_embedder.embedding"
_NORM, _HEAD, _OUTPUT_RES = "decoder.decoder_norm", "decoder.logits_dense", "decoder.output_res"
_W2_PACKED = (".experts.w2_packed", ".experts.w2_scale")


class Place(NamedTuple):
  """One layer's caches (a KDAStack or LatentStack) and its index in stacked arrays, for the length of a trace."""

  cache: Any
  index: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class _Unit:
  """Layers that share one stack of parameters: one layer outside the blocks, or one position of every block.

  Attributes:
    name: Of the place in the tree, without `decoder.`.
    first: 0-based number of its first layer.
    count: Layers in the stack; None for a layer outside the blocks, whose parameters have no axis of layers.
  """

  name: str
  first: int
  count: int | None
  kind: LayerKind
  moe: bool


@dataclasses.dataclass(frozen=True)
class SpmdModel:
  """The architecture on a mesh.

  Attributes:
    config: The architecture.
    compute: How to compute.
    mesh: The devices.
    cuts: Which of its axes cut what.
    scan: Whether the checkpoint has its blocks of four layers stacked. Unrolled, temporaries may grow with the depth:
      docs/decisions/0016-the-unrolled-cliff.md.
  """

  config: KimiK3Config
  compute: ComputeConfig
  mesh: Mesh
  cuts: Cuts
  scan: bool = True

  def __post_init__(self) -> None:
    check_supported(self.config)
    check_platform(self.compute, self.mesh.devices.flat[0].platform)
    check_latents(self.compute, self.mesh.devices.flat[0].device_kind)
    check_experts(self.config, self.compute)
    self.cuts.check_fits(self.config)
    if "experts" in self.config.packed_modules:
      _ = self.expert_form  # refuses what these devices cannot run, before any weight is read

  @functools.cached_property
  def units(self) -> tuple[_Unit, ...]:
    """All layers in order, those of the blocks once for each of the four positions."""
    kinds, moes = self.config.layer_kinds, self.config.moe_layers

    def unit(name: str, i: int, count: int | None = None) -> _Unit:
      return _Unit(name, i, count, kinds[i], moes[i])

    if not self.scan:
      return tuple(unit(f"layers_{i}", i) for i in range(self.config.num_layers))
    plan = fold(self.config)
    units = [unit(f"lead_{i}", i) for i in range(plan.num_lead)]
    if plan.num_blocks:
      units += [unit(f"blocks.layers_{j}", LEAD_LAYERS + j, plan.num_blocks) for j in range(BLOCK_LAYERS)]
    return (*units, *(unit(f"tail_{i}", plan.first_tail + i) for i in range(plan.num_tail)))

  def shortened(self, layers: int) -> SpmdModel:
    """Returns the model of the first `layers` layers, of which the last is MLA as in the whole.

    Folded, it has every kind of layer from 13 on, and compiles in the time of the whole. For tests and quick looks.
    """
    c = self.config
    kda = tuple(i for i in c.kda_layers if i < layers)
    mla = (*(i for i in c.full_attention_layers if i < layers), layers)
    config = dataclasses.replace(c, num_layers=layers, kda_layers=kda, full_attention_layers=mla)
    return dataclasses.replace(self, config=config)

  # Where everything lies.

  @functools.cached_property
  def stored_params(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of every parameter as a checkpoint holds it."""
    return {
      name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, leaf.spec))
      for name, leaf in self._leaves.items()
    }

  @functools.cached_property
  def params(self) -> dict[str, jax.ShapeDtypeStruct]:
    """The same as the programs take them: packed experts in the form that their implementation reads."""
    found = dict(self.stored_params)
    for packed, scale in self.packed_experts:
      leaf, of_scale = found[packed], found[scale]
      codes, scales = jax.eval_shape(functools.partial(implementations.prepare, form=self.expert_form), leaf, of_scale)
      specs = [_moved(self._leaves[name].spec, self.expert_form) for name in (packed, scale)]
      for name, shape, spec in zip((packed, scale), (codes, scales), specs, strict=True):
        found[name] = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(self.mesh, spec))
    return found

  @functools.cached_property
  def packed_experts(self) -> tuple[tuple[str, str], ...]:
    """Names of the codes and scales of every stack of packed expert matrices."""
    names = [name for name in self._leaves if ".experts." in name and name.endswith("_packed")]
    return tuple((name, f"{name.removesuffix('_packed')}_scale") for name in names)

  @functools.cached_property
  def expert_form(self) -> Form:
    """The form in memory of packed experts.

    Raises:
      InputError: if decoding and prefill read different forms, or one does not run on these devices.
    """
    compute, kind = self.compute, self.mesh.devices.flat[0].device_kind
    named = [compute.expert_implementation, compute.prefill_expert_implementation]
    return implementations.shared_form(named, kind, interpret=compute.interpret_kernels)

  def cache(self, rows: int, length: int, *, cut: str, cut_rows: bool = True) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of the caches.

    Args:
      rows: Sequences.
      length: Tokens that a row's latents have room for.
      cut: How the axes of the heads cut the latents: by "sequence" or by "batch".
      cut_rows: Whether the rows are cut as in a step, or whole everywhere as in prefill.

    Raises:
      InputError: if the mesh does not divide rows or length.
    """
    c, cuts = self.config, self.cuts
    row_axes = cuts.rows if cut_rows else ()
    if cut not in CACHE_CUTS:
      raise InputError(f"mla_cache_cut is {cut!r}, expected one of: {', '.join(CACHE_CUTS)}")
    latent_rows, latent_length = (row_axes + cuts.heads, ()) if cut == "batch" else (row_axes, cuts.heads)
    for what, total, axes in (
      ("rows", rows, row_axes),
      ("rows of latents", rows, latent_rows),
      ("tokens of latents", length, latent_length),
    ):
      if total % cuts.size(axes):
        by = ", ".join(f"{axis} {cuts.sizes[axis]}" for axis in axes)
        raise InputError(
          f"{total} {what}: the mesh ({by}) cuts them into {cuts.size(axes)}: expected a multiple of that"
        )

    def leaf(shape, dtype, *axes: Axes):
      spec = PartitionSpec(*(a or None for a in axes))
      return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    found = {}
    for unit in self.units:
      n = unit.count or 1
      if unit.kind is LayerKind.KDA:
        H, K = c.kda_num_heads, c.kda_head_dim
        found[f"{unit.name}.recurrent_state"] = leaf((n, rows, H, K, K), jnp.float32, (), row_axes, cuts.heads)
        shape = (n, rows, c.kda_conv_width - 1, 3, H, K)
        found[f"{unit.name}.conv_state"] = leaf(shape, self.compute.dtype, (), row_axes, (), (), cuts.heads)
      else:
        shape = (n, rows, length, c.kv_lora_rank + c.qk_rope_head_dim)
        dtype = jnp.dtype(self.compute.mla_cache_dtype or self.compute.dtype)
        found[f"{unit.name}.latents"] = leaf(shape, dtype, (), latent_rows, latent_length)
    return found

  # What a device computes. All arrays are its parts.

  def run(
    self,
    params: Arrays,
    cache: Arrays,
    tokens: Int[Array, "B T"],
    context: Context,
  ) -> tuple[Stream, Arrays]:
    """Returns the stream above the last layer and the caches moved on.

    Args:
      params: This device's parts.
      cache: Its parts of the caches.
      tokens: Whole rows, as far as `context` says that the tokens are cut inside.
      context: With `collectives`.
    """
    comm = context.collectives
    assert comm is not None
    embedded = self._embed(params[_EMBEDDING], tokens, comm)
    if (valid := context.valid_here) is not None:
      embedded = jnp.where(valid[..., None], embedded, 0)  # a pad is 0 all the way up, whatever token stands in it
    stream = Stream(embedded, jnp.zeros((self.config.num_snapshots, *embedded.shape), embedded.dtype))
    cache = dict(cache)
    blocks = [unit for unit in self.units if unit.count is not None]
    for unit in self.units:
      if unit.count is None:
        layer = self._layer(unit, _below(params, f"decoder.{unit.name}"))
        stream = self._one(layer, unit, stream, unit.first, context, cache, jnp.int32(0))
      elif unit is blocks[0]:
        stream = self._scan(blocks, params, stream, context, cache)
    return stream, cache

  def logits(self, params: Arrays, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows x"]:
    """Returns the logits of this device's part of the vocabulary, in float32, of what the final norm sees."""
    normed = self._norm(params)(hidden)
    return jax.lax.dot_general(
      normed.astype(self.compute.dtype),
      params[f"{_HEAD}.kernel"].astype(self.compute.dtype),
      (((hidden.ndim - 1,), (0,)), ((), ())),
      precision=self.compute.precision,
      preferred_element_type=jnp.float32,
    )

  def output(self, params: Arrays, stream: Stream) -> Float[Array, "B T D"]:
    """Returns what the final norm sees."""
    if self.config.attn_res_block_size is None:
      return stream.prefix
    graph, abstract = self._parts[_OUTPUT_RES]
    mix = nnx.merge(graph, _filled(abstract, _below(params, _OUTPUT_RES)))
    return mix(stream.prefix, stream.snapshots, self.config.num_snapshots)

  def _norm(self, params: Arrays) -> RMSNorm:
    graph, abstract = self._parts[_NORM]
    return nnx.merge(graph, _filled(abstract, _below(params, _NORM)))

  def _embed(self, table: Float[Array, "x D"], tokens: Int[Array, "B T"], comm: Collectives) -> Float[Array, "B t D"]:
    axes = self.cuts.vocab
    first = jax.lax.axis_index(axes) * table.shape[0] if axes else 0
    local = tokens - first
    here = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.clip(local, 0, table.shape[0] - 1)].astype(self.compute.dtype)
    return comm.leave_vocab(jnp.where(here[..., None], rows, 0))

  def _one(self, layer, unit: _Unit, stream, number, context: Context, cache: Arrays, index) -> Stream:
    """One layer; moves its caches inside `cache` on."""
    names = [f"{unit.name}.{name}" for name in _CACHES[unit.kind]]
    stack: Any = _stack(unit.kind, [cache[name] for name in names], index)
    stream, _ = layer(stream, number, context, Place(stack, index))
    cache |= dict(zip(names, _arrays(stack), strict=True))
    return stream

  def _scan(self, blocks: list[_Unit], params: Arrays, stream: Stream, context: Context, cache: Arrays) -> Stream:
    """The blocks, one after the other.

    Caches are carried, so that they stay where they are. The experts' weights are not sliced by the scan but handed
    over whole with the index of the block: a kernel cannot read a slice without a copy of it.
    """
    names = [name for unit in blocks for name in params if name.startswith(f"decoder.{unit.name}.")]
    whole = {name for name in names if ".mlp.experts." in name}
    held = [name for name in cache if name.startswith("blocks.")]

    def body(carry, xs):
      stream, caches = carry
      number, sliced = xs
      caches = dict(caches)
      for unit in blocks:
        prefix = f"decoder.{unit.name}"
        here = {
          name: params[name] if name in whole else sliced[name] for name in names if name.startswith(f"{prefix}.")
        }
        layer = self._layer(unit, _below(here, prefix))
        stream = self._one(layer, unit, stream, unit.first + BLOCK_LAYERS * number, context, caches, number)
      return (stream, caches), None

    carry = (stream, {name: cache[name] for name in held})
    xs = (jnp.arange(blocks[0].count, dtype=jnp.int32), {name: params[name] for name in names if name not in whole})
    (stream, caches), _ = jax.lax.scan(body, carry, xs)
    cache |= caches
    return stream

  def _layer(self, unit: _Unit, params: Mapping[str, Any]) -> Layer:
    graph, abstract = self._parts[unit.kind, unit.moe]
    return nnx.merge(graph, _filled(abstract, params))

  # The modules, as shapes.

  @functools.cached_property
  def _parts(self) -> dict[Any, tuple[Any, nnx.State]]:
    """Graph and abstract parameters of each kind of module."""
    config, compute = self.config, self.compute

    def attention(kind: LayerKind, rngs: nnx.Rngs) -> nnx.Module:
      return MLA(config, compute, rngs) if kind is LayerKind.MLA else KDA(config, compute, rngs, cache=None)

    def made(make: Callable[[nnx.Rngs], nnx.Module]):
      with nnx.use_eager_sharding(False):
        return nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    size, eps, dtype = config.hidden_size, config.rms_norm_eps, compute.weight_dtype
    parts: dict[Any, Any] = {(unit.kind, unit.moe): None for unit in self.units}
    for kind, moe in list(parts):
      parts[kind, moe] = made(lambda rngs, kind=kind, moe=moe: Layer(config, compute, kind, moe, attention, rngs))
    parts[_NORM] = made(lambda _: RMSNorm(size, eps=eps, dtype=dtype, axes=(NORM,)))
    parts[_HEAD] = made(
      lambda rngs: Linear((size,), (config.vocab_size,), fp8=False, axes=(EMBED, VOCAB), compute=compute, rngs=rngs)
    )
    if config.attn_res_block_size is not None:
      parts[_OUTPUT_RES] = made(lambda rngs: AttentionResidual(size, eps=eps, compute=compute, rngs=rngs))
    return parts

  @functools.cached_property
  def _leaves(self) -> dict[str, _Leaf]:
    """Every parameter as stored, and how it is cut."""
    shape = (self.config.vocab_size, self.config.hidden_size)
    found = {_EMBEDDING: _Leaf(shape, jnp.dtype(self.compute.weight_dtype), self.cuts.spec((VOCAB, EMBED)))}

    def add(prefix: str, state: nnx.State, count: int | None) -> None:
      for path, leaf in nnx.to_flat_state(state):
        lead, none = ((), ()) if count is None else ((count,), (None,))
        axes = leaf.get_metadata().get("out_sharding") or (None,) * len(leaf.shape)
        name = ".".join((prefix, *map(str, path)))
        if name.endswith(_W2_PACKED):  # [E, out, in]; what cuts the experts' width cuts it along its input
          axes = (EXPERT, None, EXPERT_MLP)
        found[name] = _Leaf(lead + leaf.shape, jnp.dtype(leaf.dtype), self.cuts.spec(none + tuple(axes)))

    for unit in self.units:
      add(f"decoder.{unit.name}", self._parts[unit.kind, unit.moe][1], unit.count)
    for part in (_NORM, _HEAD, _OUTPUT_RES):
      if part in self._parts:
        add(part, self._parts[part][1], None)
    return found


class _Leaf(NamedTuple):
  shape: tuple[int, ...]
  dtype: Any
  spec: PartitionSpec


_CACHES = {LayerKind.KDA: ("recurrent_state", "conv_state"), LayerKind.MLA: ("latents",)}


def check_supported(config: KimiK3Config) -> None:
  """Raises InputError for what the manual partitioning cannot cut: naming it, with what can be done instead."""
  faults = [f"packed {name.replace('_', ' ')}" for name in config.packed_modules if name != "experts"]
  faults += [f"{name} in FP8" for name in config.fp8_modules]
  if faults:
    raise InputError(
      f"partitioning is manual, and the checkpoint has {', '.join(faults)}: not supported there, set partitioning=auto"
    )


def check_platform(compute: ComputeConfig, platform: str) -> None:
  """Raises InputError if a kernel is named that these devices cannot run. The experts' are checked with their form."""
  if compute.kda_implementation == "tops":
    tops_kda()  # refuses it where that package is not installed
  if platform == "tpu":
    return
  keys = ("kda_step_implementation", "mla_step_implementation", "mla_prefill_implementation")
  named = [
    f"{key} {getattr(compute, key)}"
    for key in keys
    if getattr(compute, key) != "portable" and not compute.interpret_kernels
  ]
  if compute.kda_implementation == "tokamax_mosaic":
    named.append("kda_implementation tokamax_mosaic")
  if named:
    raise InputError(f"{', '.join(named)}: a TPU is needed, the devices are of {platform}: use portable")


def check_latents(compute: ComputeConfig, device_kind: str) -> None:
  """Raises InputError if the latents' dtype is one that this kind of TPU does not have."""
  if compute.mla_cache_dtype == "float8_e4m3fn" and device_kind.startswith("TPU") and device_kind not in _E4M3_TPUS:
    raise InputError(
      f"mla_cache_dtype float8_e4m3fn: {', '.join(_E4M3_TPUS)} needed, found {device_kind}, whose matrix unit takes "
      "another FP8: use bfloat16"
    )


def check_experts(config: KimiK3Config, compute: ComputeConfig) -> None:
  """Raises InputError if a kernel for MXFP4 is named and the experts are stored in another form."""
  keys = ("expert_implementation", "prefill_expert_implementation")
  named = [f"{key} {getattr(compute, key)}" for key in keys if getattr(compute, key) != "reference"]
  if named and "experts" not in config.packed_modules:
    raise InputError(f"{', '.join(named)}: for experts in MXFP4, which this checkpoint does not have: use reference")


def _stack(kind: LayerKind, arrays: list[Array], index: Int[Array, ""]) -> KDAStack | LatentStack:
  if kind is LayerKind.KDA:
    state, history = arrays
    return KDAStack(state, history, index)
  (latents,) = arrays
  return LatentStack(latents, index)


def _arrays(stack: KDAStack | LatentStack) -> tuple[Array, ...]:
  if isinstance(stack, KDAStack):
    return stack.recurrent_states, stack.conv_states
  return (stack.latents,)


def _below(params: Mapping[str, Any], prefix: str) -> dict[str, Any]:
  """The parameters of one module, named from there."""
  return {name.removeprefix(f"{prefix}."): value for name, value in params.items() if name.startswith(f"{prefix}.")}


def _filled(abstract: nnx.State, params: Mapping[str, Any]) -> nnx.State:
  """The state with arrays in place of shapes."""
  tree: dict[str, Any] = {}
  for name, value in params.items():
    *path, last = name.split(".")
    node = tree
    for part in path:
      node = node.setdefault(part, {})
    node[last] = value
  state = jax.tree.map(lambda leaf: leaf, abstract)
  nnx.replace_by_pure_dict(state, tree)
  return state


def _moved(spec: PartitionSpec, form: Form) -> PartitionSpec:
  """The spec of codes or scales whose last two axes `form` has swapped."""
  if form == "stored":
    return spec
  *lead, out, into = spec
  return PartitionSpec(*lead, into, out)
