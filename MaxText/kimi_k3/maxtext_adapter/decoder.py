"""MaxText's decoder with our stack of layers in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array
from maxtext.common.common_types import MODEL_MODE_AUTOREGRESSIVE, MODEL_MODE_PREFILL, MODEL_MODE_TRAIN
from maxtext.layers import nnx_decoders, nnx_scan
from maxtext.layers.normalizations import RMSNorm
from maxtext.utils import max_utils

from kimi_k3.block import Context
from kimi_k3.cache import KDACache
from kimi_k3.config import TRAINED_EXPERTS, LayerKind
from kimi_k3.decoder import Block, build_layers, run_layers
from kimi_k3.kda.layer import KDA
from kimi_k3.kda.sharded import kda_placement
from kimi_k3.maxtext_adapter.config import architecture, compute_config
from kimi_k3.maxtext_adapter.mla import KimiMLA
from kimi_k3.sharding import expert_placement

_SCAN_AXIS_NAME = "layers"


class KimiDecoder(nnx_decoders.NNXDecoder):
  """Embedding, final norm and head are MaxText's; the layers between are ours (kimi_k3.decoder)."""

  def get_decoder_layers(self) -> list[type[nnx.Module]]:
    """The class of a scanned block, for callers that look at the blueprint."""
    return [Block]

  def get_norm_layer(self, num_features: int, rngs: nnx.Rngs):
    """Constructor of the final norm."""
    return functools.partial(RMSNorm, num_features=num_features, shard_mode=self.config.shard_mode, rngs=rngs)

  def _init_decoder_layers(self, decoder_block_classes, rngs, mesh) -> None:
    del decoder_block_classes
    self.architecture, self.compute = architecture(self.config), compute_config(self.config)
    build_layers(
      self,
      self.architecture,
      self.compute,
      functools.partial(self._make_attention, mesh),
      rngs,
      scan=self.config.scan_layers,
      stack=_stack,
      placement=expert_placement(mesh, self.config.logical_axis_rules)
      if self.compute.expert_implementation in TRAINED_EXPERTS
      else None,
    )

  def _make_attention(self, mesh: Any, kind: LayerKind, rngs: nnx.Rngs) -> nnx.Module:
    if kind is LayerKind.MLA:
      return KimiMLA(self.config, self.architecture, self.compute, mesh, self.model_mode, rngs)
    if self.model_mode == MODEL_MODE_TRAIN:
      placement = kda_placement(mesh, self.config.logical_axis_rules)
      return KDA(self.architecture, self.compute, rngs, cache=None, placement=placement)
    batch, _ = max_utils.get_batch_seq_len_for_mode(self.config, self.model_mode)
    prefill = self.model_mode == MODEL_MODE_PREFILL
    cache = KDACache(self.architecture, self.compute, batch=batch, prefill=prefill)
    return KDA(self.architecture, self.compute, rngs, cache=cache)

  def __call__(
    self,
    shared_embedding: nnx.Module,
    decoder_input_tokens: Array,
    decoder_positions: Array,
    decoder_segment_ids: Array | None = None,
    deterministic: bool = False,
    model_mode: str = MODEL_MODE_TRAIN,
    previous_chunk: Array | None = None,
    slot: int | None = None,
    kv_caches: list[Array] | None = None,
    attention_metadata: Any = None,
    deepstack_visual_embeds: list[Array] | None = None,
    multimodal_input: Any = None,
    forced_routed_experts: Array | None = None,
    decoder_input_embeddings: Array | None = None,
  ) -> tuple[Array, Array, None]:
    """Returns (logits [B, T, X], what the final norm saw [B, T, D], None)."""
    del slot
    refused = {
      "previous_chunk": previous_chunk,
      "kv_caches": kv_caches,
      "attention_metadata": attention_metadata,
      "deepstack_visual_embeds": deepstack_visual_embeds,
      "multimodal_input": multimodal_input,
      "forced_routed_experts": forced_routed_experts,
    }
    given = [name for name, value in refused.items() if value is not None]
    if given:
      raise NotImplementedError(f"{', '.join(given)}: not supported by the Kimi K3 decoder")
    logits, hidden, _ = self.trace(
      shared_embedding,
      decoder_input_tokens,
      decoder_positions,
      decoder_segment_ids,
      deterministic=deterministic,
      model_mode=model_mode,
      decoder_input_embeddings=decoder_input_embeddings,
    )
    return logits, hidden, None

  def trace(
    self,
    shared_embedding: nnx.Module,
    tokens: Array,
    positions: Array,
    segment_ids: Array | None,
    *,
    deterministic: bool,
    model_mode: str,
    one_document: bool = False,
    decoder_input_embeddings: Array | None = None,
  ) -> tuple[Array, Array, Array | None]:
    """Returns logits, what the final norm saw, and the chosen experts [MoE layers, B, T, S].

    Args:
      shared_embedding: MaxText's.
      tokens: [B, T].
      positions: [B, T]. In a step, a negative one says that the row has no token: its caches are left alone.
      segment_ids: [B, T], 0 in pads; MaxEngine gives none in a step.
      deterministic: MaxText's.
      model_mode: MaxText's.
      one_document: No document starts inside a row. A prompt of MaxEngine is always one.
      decoder_input_embeddings: In place of the tokens' own.
    """
    embedded = self._apply_embedding(
      shared_embedding,
      tokens,
      positions,
      deterministic,
      model_mode,
      decoder_input_embeddings=decoder_input_embeddings,
    )
    if model_mode == MODEL_MODE_TRAIN and decoder_input_embeddings is None:
      # Looked up out of bounds, a token gets another's row, and as a target it costs nothing. NaN stops the trainer.
      known = (tokens >= 0) & (tokens < self.architecture.vocab_size)
      embedded = jnp.where(known[..., None], embedded, jnp.nan)
    step = model_mode == MODEL_MODE_AUTOREGRESSIVE
    if step and tokens.shape[1] != 1:
      raise NotImplementedError(f"a decoding step takes one token a row, not {tokens.shape[1]}")
    packed = not one_document and model_mode != MODEL_MODE_PREFILL
    if model_mode == MODEL_MODE_TRAIN and not self.config.packing:
      packed = False
    valid, resets = (positions >= 0, None) if step else _segments(segment_ids, packed=packed)
    if valid is not None:
      embedded = jnp.where(valid[..., None], embedded, 0)  # a pad is 0 all the way up, whatever token stands in it
    upstream = {"positions": positions, "segment_ids": segment_ids, "model_mode": model_mode}
    context = Context(valid, resets, upstream)
    hidden, chosen = run_layers(
      self, self.architecture, embedded, context, scan=self.config.scan_layers, remat=self._remat(model_mode)
    )
    logits = self.apply_output_head(shared_embedding, hidden, deterministic, model_mode)
    return logits, hidden, chosen

  def _remat(self, model_mode: str):
    if model_mode != MODEL_MODE_TRAIN or self.config.remat_policy in (None, "none"):  # MaxText reads "none" as None
      return None
    return functools.partial(jax.checkpoint, policy=self.get_remat_policy())


def _segments(segment_ids: Array | None, *, packed: bool) -> tuple[Array | None, Array | None]:
  """Which tokens are real, and where a packed document starts.

  A pad has id 0. Documents packed in a row have different ids, and the recurrence starts anew where the id changes.
  """
  if segment_ids is None:
    return None, None
  valid = segment_ids != 0
  if not packed:
    return valid, None
  before = jnp.pad(jax.lax.cummax(segment_ids, axis=1)[:, :-1], ((0, 0), (1, 0)))
  return valid, valid & (before != 0) & (segment_ids != before)


def _stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> Any:
  return nnx_scan.create_scanned_layers(
    make, length=count, param_scan_axis=0, metadata_axis_name=_SCAN_AXIS_NAME, rngs=rngs
  )
