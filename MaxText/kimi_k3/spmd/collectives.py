"""Where tokens are gathered and partial sums are reduced inside one device's program.

A token is on one device or on several; the work on it (heads, experts, widths) may be cut by the axes that cut the
tokens, by others, or by both. Before work, tokens are gathered over the axes that cut both; after it, the partial sums
are reduced over the axes of the work, and where tokens were gathered each device keeps the part of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_k3.spmd.cuts import Axes, Cuts

_ROW, _TOKEN = 0, 1  # axes of [rows, tokens, ...]


@dataclasses.dataclass(frozen=True)
class Collectives:
  """The collectives of one program, for arrays [rows, tokens, channels] that hold one device's part.

  Attributes:
    cuts: Of the mesh.
    rows: Axes that cut the rows: those of `cuts` in a decoding step, none in prefill.
    tokens: Axes that cut the tokens of a row: none in a step. In prefill by sequence, all that cut rows or heads.
    prefill: Whether the program is one of prefill.
  """

  cuts: Cuts
  rows: Axes
  tokens: Axes
  prefill: bool

  # Attention: all tokens of the row, some of the heads.

  def enter_attention(self, x: Float[Array, "B t D"]) -> Float[Array, "B T D"]:
    """Gathers the tokens of each row."""
    return _gather(x, self.tokens, _TOKEN, one_by_one=True)

  def leave_attention(self, y: Float[Array, "B T D"]) -> Float[Array, "B t D"]:
    """Sums over the heads of all devices; each keeps its tokens."""
    return self._leave(y, self.cuts.heads)

  # Experts: tokens of several rows, some of the experts.

  def enter_experts(
    self, x: Float[Array, "b t L"], ids: Int[Array, "b t S"], weights: Float[Array, "b t S"]
  ) -> tuple[Float[Array, "B T L"], Int[Array, "B T S"], Float[Array, "B T S"]]:
    """Gathers what the experts of this device may be asked for: input, choice and weights; in a step by one collective.

    The weights are float32.
    """
    rows, tokens = self._shared(self.rows, self._expert_axes), self._shared(self.tokens, self._expert_axes)
    if not rows and not tokens:
      return x, ids, weights

    def gather(y: Array) -> Array:
      return _gather(_gather(y, tokens, _TOKEN, one_by_one=True), rows, _ROW)

    choice = jnp.concatenate([jax.lax.bitcast_convert_type(ids, jnp.uint32), _as_words(weights)], axis=-1)
    if self.prefill:  # so many that what counts is bytes: packing them into words would take more than it saves
      found, choice = gather(x), gather(choice)
    else:
      words = gather(jnp.concatenate([_as_words(x), choice], axis=-1))
      found, choice = _from_words(words[..., : -choice.shape[-1]], x.dtype), words[..., -choice.shape[-1] :]
    chosen, combine = jnp.split(choice, 2, axis=-1)
    return found, jax.lax.bitcast_convert_type(chosen, jnp.int32), _from_words(combine, weights.dtype)

  def leave_experts(
    self, y: Float[Array, "B T L"], beside: Float[Array, "b t D"] | None
  ) -> tuple[Float[Array, "b t L"], Float[Array, "b t D"] | None]:
    """Sums over the experts of all devices, and in the same collective what the shared experts gave of it.

    Args:
      y: Partial sums of the routed experts.
      beside: Partial sums over `width`, None if there are none or they are complete.
    """
    y = _scatter(y, self._shared(self.rows, self._expert_axes), _ROW)
    y = _scatter(y, self._shared(self.tokens, self._expert_axes), _TOKEN)
    rest = self._rest(self._expert_axes)
    width = self._rest(self.cuts.width)
    if beside is None:
      return _sum(y, rest), None
    if not self._shared(self.tokens, self.cuts.width) and set(rest) == set(width):
      both = _sum(jnp.concatenate([y, beside], axis=-1), rest)
      return both[..., : y.shape[-1]], both[..., y.shape[-1] :]
    return _sum(y, rest), self.leave_width(beside)

  def first_expert(self, num_here: int) -> Int[Array, ""]:
    """The number of the first expert of this device."""
    return _index(self.cuts.experts) * num_here

  # Dense and shared MLPs: some of the inner width.

  def enter_width(self, x: Float[Array, "b t D"]) -> Float[Array, "b T D"]:
    """Gathers the tokens that the weights of this device are for."""
    return _gather(x, self._shared(self.tokens, self.cuts.width), _TOKEN, one_by_one=True)

  def leave_width(self, y: Float[Array, "b T D"]) -> Float[Array, "b t D"]:
    """Sums over the widths of all devices; each keeps its tokens."""
    width = self.cuts.width
    return _sum(_scatter(y, self._shared(self.tokens, width), _TOKEN), self._rest(width))

  def gather_width(self, weights: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Returns the whole of a matrix that `width` cuts along an axis."""
    return _gather(weights, self.cuts.width, axis, one_by_one=True)

  # The latent of the experts, where its projections are cut.

  def gather_latent(self, x: Float[Array, "b t l"]) -> Float[Array, "b t L"]:
    """Joins the latent of tokens that every device of `latent` has."""
    return _gather(x, self.cuts.latent, -1)

  def own_latent(self, y: Float[Array, "b t L"]) -> Float[Array, "b t l"]:
    """The part of the latent that this device projects back."""
    if not self.cuts.latent:
      return y
    size = y.shape[-1] // self.cuts.size(self.cuts.latent)
    return jax.lax.dynamic_slice_in_dim(y, _index(self.cuts.latent) * size, size, -1)

  # Embedding and head.

  def leave_vocab(self, x: Float[Array, "b T D"]) -> Float[Array, "b t D"]:
    """Sums embeddings that one device each has found."""
    return self._leave(x, self.cuts.vocab)

  def own_tokens(self, x: Array, axis: int = _TOKEN) -> Array:
    """This device's part of what every device has of all tokens."""
    return _own(x, self.tokens, axis)

  def token_of(self, x: Float[Array, "*lead b t D"], at: Int[Array, " b"]) -> Float[Array, "*lead b D"]:
    """Returns each row's token of that number, on every device."""
    size = x.shape[-2]
    local = at - _index(self.tokens) * size
    here = (local >= 0) & (local < size)
    found = jnp.take_along_axis(
      x, jnp.clip(local, 0, size - 1).reshape((1,) * (x.ndim - 3) + (-1, 1, 1)).astype(jnp.int32), axis=-2
    )[..., 0, :]
    here = here.reshape((1,) * (x.ndim - 3) + (-1, 1))
    return _sum(jnp.where(here, found, 0), self.tokens)

  @property
  def _expert_axes(self) -> Axes:
    return self.cuts.experts + self.cuts.expert_width

  def _shared(self, axes: Axes, work: Axes) -> Axes:
    return tuple(axis for axis in axes if axis in work)

  def _rest(self, work: Axes) -> Axes:
    return tuple(axis for axis in work if axis not in self.rows and axis not in self.tokens)

  def _leave(self, y: Array, work: Axes) -> Array:
    """Sums of all tokens, to this device's tokens."""
    both = self._shared(self.tokens, work)
    alone = tuple(axis for axis in self.tokens if axis not in work)
    assert self.tokens == alone + both, (self.tokens, work)  # so that parts come in the order of the tokens
    # Devices along axes that cut the tokens and not the work have the same sums: each takes its part before summing.
    return _sum(_scatter(_own(y, alone, _TOKEN), both, _TOKEN), self._rest(work))


def _gather(x: Array, axes: Axes, axis: int, *, one_by_one: bool = False) -> Array:
  """Joins the parts of all devices. One axis after the other moves the same bytes in more calls.

  The TPU compiler makes an all-reduce of the whole, zeros included, of a gather over two axes of more than 32 devices.
  """
  groups = [(name,) for name in reversed(axes)] if one_by_one else [axes] if axes else []
  for names in groups:
    x = jax.lax.all_gather(x, names, axis=axis % x.ndim, tiled=True)
  return x


def _scatter(x: Array, axes: Axes, axis: int) -> Array:
  return jax.lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True) if axes else x


def _sum(x: Array, axes: Iterable[str]) -> Array:
  return jax.lax.psum(x, tuple(axes)) if axes else x


def _own(x: Array, axes: Axes, axis: int) -> Array:
  if not axes:
    return x
  size = x.shape[axis] // jax.lax.axis_size(axes)
  return jax.lax.dynamic_slice_in_dim(x, _index(axes) * size, size, axis)


def _index(axes: Axes) -> Int[Array, ""]:
  return jax.lax.axis_index(axes) if axes else jnp.int32(0)


def _as_words(x: Array) -> Array:
  """The bits of a float32 or bfloat16 array, in words of 32 along its last axis: integers that no unit can flush."""
  if x.dtype.itemsize == 4:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)
  return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint32)


def _from_words(words: Array, dtype) -> Array:
  found = jax.lax.bitcast_convert_type(words, dtype)
  return found if jnp.dtype(dtype).itemsize == 4 else found.reshape(*words.shape[:-1], -1)
