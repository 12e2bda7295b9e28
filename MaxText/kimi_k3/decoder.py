"""The stack of layers, unrolled or folded: 4 leading layers, a scan over blocks of four, and the tail.

Unrolled, the compiler's schedule collapses past some 32 layers; folded, the program is the size of nine layers. Both
have the same arithmetic, and their parameters differ in place only (see layout.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_k3.attn_res import AttentionResidual
from kimi_k3.block import AttentionFactory, Context, Layer, Stream
from kimi_k3.config import ComputeConfig, KimiK3Config
from kimi_k3.layout import BLOCK_LAYERS, LEAD_LAYERS, fold
from kimi_k3.sharding import Placement, rows_cut

StackLayers = Callable[[Callable[[nnx.Rngs], nnx.Module], int, nnx.Rngs], nnx.Module]
Remat = Callable[..., Callable]  # jax.checkpoint with a policy


class Block(nnx.Module):
  """Four consecutive layers, the unit of the scan."""

  def __init__(self, layers: list[Layer]):
    for j, layer in enumerate(layers):
      setattr(self, f"layers_{j}", layer)

  def __call__(self, stream: Stream, first: Int[Array, ""], context: Context) -> tuple[Stream, list]:
    """Returns the stream after the four layers, the first of which is number `first`, and their chosen experts."""
    chosen = []
    for j in range(BLOCK_LAYERS):
      stream, ids = getattr(self, f"layers_{j}")(stream, first + j, context)
      chosen.append(ids)
    return stream, chosen


def build_layers(
  owner: Any,
  config: KimiK3Config,
  compute: ComputeConfig,
  make_attention: AttentionFactory,
  rngs: nnx.Rngs,
  *,
  scan: bool,
  stack: StackLayers,
  placement: Placement | None = None,
) -> None:
  """Sets the layers as attributes of `owner`, under the names of docs/parameter-tree.md.

  Args:
    owner: The decoder.
    config: The architecture.
    compute: Dtypes and implementations.
    make_attention: Makes the attention of a layer.
    rngs: Of the random initialisation.
    scan: Folded or unrolled.
    stack: (make one, how many, rngs) -> a module whose leaves have a leading axis of that many.
    placement: Of the routed experts, if their implementation is "dropless" and there are several devices.
  """
  kinds, moes = config.layer_kinds, config.moe_layers
  owner.placement = placement

  def make(i: int, rngs: nnx.Rngs) -> Layer:
    return Layer(config, compute, kinds[i], moes[i], make_attention, rngs, placement)

  if scan:
    plan = fold(config)
    for i in range(plan.num_lead):
      setattr(owner, f"lead_{i}", make(i, rngs))
    if plan.num_blocks:
      owner.blocks = stack(
        lambda r: Block([make(LEAD_LAYERS + j, r) for j in range(BLOCK_LAYERS)]), plan.num_blocks, rngs
      )
    for i in range(plan.num_tail):
      setattr(owner, f"tail_{i}", make(plan.first_tail + i, rngs))
  else:
    for i in range(config.num_layers):
      setattr(owner, f"layers_{i}", make(i, rngs))
  if config.attn_res_block_size is not None:
    owner.output_res = AttentionResidual(config.hidden_size, eps=config.rms_norm_eps, compute=compute, rngs=rngs)


def run_layers(
  owner: Any,
  config: KimiK3Config,
  embedded: Float[Array, "B T D"],
  context: Context,
  *,
  scan: bool,
  remat: Remat | None = None,
) -> tuple[Float[Array, "B T D"], Int[Array, "M B T S"] | None]:
  """Returns what the final norm sees, and the chosen experts of the M layers that have routed experts, in order.

  Args:
    owner: The decoder that `build_layers` filled.
    config: The architecture.
    embedded: Token embeddings in the compute dtype.
    context: What the layers of this call share.
    scan: As at construction.
    remat: Wraps each layer, and of the scan each block, in training; None keeps all activations.
  """
  snapshots = jnp.zeros((config.num_snapshots, *embedded.shape), embedded.dtype)
  stream = Stream(rows_cut(embedded, owner.placement), rows_cut(snapshots, owner.placement, axis=1))
  chosen: list[Array] = []
  for i, layer in _unscanned(owner, config, scan, tail=False):
    stream, ids = _one_layer(layer, stream, i, context, remat)
    chosen += [ids[None]] if ids is not None else []
  if scan and (plan := fold(config)).num_blocks:
    stream, block_ids = _scan_blocks(owner.blocks, plan.num_blocks, stream, context, remat)
    chosen += [] if block_ids is None else [block_ids]
  for i, layer in _unscanned(owner, config, scan, tail=True):
    stream, ids = _one_layer(layer, stream, i, context, remat)
    chosen += [ids[None]] if ids is not None else []
  hidden = stream.prefix
  if config.attn_res_block_size is not None:
    hidden = owner.output_res(hidden, stream.snapshots, config.num_snapshots)
  return rows_cut(hidden, owner.placement), jnp.concatenate(chosen) if chosen else None


def _one_layer(
  layer: Layer, stream: Stream, index: int, context: Context, remat: Remat | None
) -> tuple[Stream, Int[Array, "B T S"] | None]:
  if remat is None:
    return layer(stream, index, context)
  graph, params, rest = nnx.split(layer, nnx.Param, ...)  # in training no layer has state to move on
  return remat(lambda stream, params: nnx.merge(graph, params, rest)(stream, index, context))(stream, params)


def _unscanned(owner: Any, config: KimiK3Config, scan: bool, *, tail: bool):
  """(number, layer) of the layers before the blocks, or after them. Unrolled, all stand before."""
  if not scan:
    return [] if tail else [(i, getattr(owner, f"layers_{i}")) for i in range(config.num_layers)]
  plan = fold(config)
  if tail:
    return [(plan.first_tail + i, getattr(owner, f"tail_{i}")) for i in range(plan.num_tail)]
  return [(i, getattr(owner, f"lead_{i}")) for i in range(plan.num_lead)]


def _scan_blocks(
  blocks: nnx.Module, count: int, stream: Stream, context: Context, remat: Remat | None
) -> tuple[Stream, Int[Array, "M B T S"] | None]:
  """Runs the blocks one after the other. Caches go in and come out sliced; weights only go in.

  Caches as a carry would fix their shape, and a short prefill bucket changes it; weights as an output would be copied.
  """
  graph, params, rest = nnx.split(blocks, nnx.Param, ...)

  def body(stream: Stream, xs):
    number, params, rest = xs
    block = nnx.merge(graph, params, rest)
    stream, chosen = block(stream, LEAD_LAYERS + BLOCK_LAYERS * number, context)
    ids = [c for c in chosen if c is not None]
    return stream, (nnx.split(block, nnx.Param, ...)[2], jnp.stack(ids) if ids else None)

  body = body if remat is None else remat(body, prevent_cse=False)  # a loop's body is not merged with its gradient's
  stream, (rest, ids) = jax.lax.scan(body, stream, (jnp.arange(count), params, rest))
  nnx.update(blocks, rest)
  return stream, None if ids is None else ids.reshape(-1, *ids.shape[2:])
