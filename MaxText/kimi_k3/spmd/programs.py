"""The programs that an engine runs and that capacity planning compiles: a decoding step, and a chunk of prefill."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from kimi_k3.block import Context
from kimi_k3.capacity import replicated
from kimi_k3.capacity.topology import COMPILE_OPTIONS
from kimi_k3.errors import InputError
from kimi_k3.generate import device_loop
from kimi_k3.generate.device_loop import NUM_STOP_IDS, Plan, Rows
from kimi_k3.generate.sampling import Draws, sample
from kimi_k3.moe import implementations
from kimi_k3.spmd.collectives import Collectives
from kimi_k3.spmd.cuts import Axes, Cuts
from kimi_k3.spmd.model import Arrays, SpmdModel

PREFILL_CUTS = ("sequence", "whole")
_PREFILL_CACHE_CUT = "sequence"


@dataclasses.dataclass(frozen=True)
class Program:
  """A function of sharded arrays, compiled or to be compiled.

  Attributes:
    function: Jitted, with shardings of arguments and results.
    arguments: Abstract arguments, with their shardings.
  """

  function: Callable[..., Any]
  arguments: tuple[Any, ...]


def decode_step(model: SpmdModel, *, rows: int, length: int, cut: str) -> Program:
  """Returns (params, cache, tokens [B], positions [B]) -> (logits float32 [B, X], cache).

  A position is the number of the row's token in its sequence; negative: the row has none, its caches stay as they are
  and its logits mean nothing. The cache is donated.

  Args:
    model: On its mesh.
    rows: B.
    length: Tokens that a row's latents have room for.
    cut: How the latents are cut: "sequence" or "batch".
  """
  cuts = model.cuts
  cache = model.cache(rows, length, cut=cut)

  def step(params: Arrays, cache: Arrays, tokens: Int[Array, " b"], positions: Int[Array, " b"]):
    return _step(model, params, cache, tokens, positions, cut)

  row = _abstract(model, (rows,), jnp.int32, cuts.rows)
  arguments = (model.params, cache, row, row)
  results = (NamedSharding(model.mesh, PartitionSpec(cuts.rows or None, cuts.vocab or None)), _shardings(cache))
  return _program(model, step, arguments, results)


def decode_loop(model: SpmdModel, *, rows: int, length: int, cut: str, buffer: int) -> Program:
  """Returns (params, cache, positions [B], rows, plan) -> (cache, what `device_loop.decoded` reads), of many steps.

  Everything is inside one program: the steps, the choice of tokens, the ends of rows. A negative position says that the
  slot holds no row. The logits of a row are brought whole to one device, which chooses: each device those of its share
  of the rows. The cache is donated, and is that of one step: nothing is held twice.

  Args:
    model: On its mesh.
    rows: B.
    length: Tokens that a row's latents have room for.
    cut: How the latents are cut: "sequence" or "batch".
    buffer: Steps that there is room for.
  """
  cuts = model.cuts
  cache = model.cache(rows, length, cut=cut)

  def loop(params: Arrays, cache: Arrays, positions: Int[Array, " b"], slots: Rows, plan: Plan):
    def step(state, tokens, active):
      cache, positions = state
      logits, cache = _step(model, params, cache, tokens, jnp.where(active, positions, -1), cut)
      return logits, (cache, positions + active)

    (cache, _), packed = device_loop.decode_loop(
      step,
      (cache, positions),
      slots,
      positions >= 0,
      plan,
      buffer=buffer,
      choose=functools.partial(_choose, cuts.vocab),
      total=lambda x: jax.lax.psum(x, cuts.rows) if cuts.rows else x,
    )
    return cache, jax.lax.all_gather(packed, cuts.rows, axis=0, tiled=True) if cuts.rows else packed

  def of_rows(dtype: Any) -> jax.ShapeDtypeStruct:
    return _abstract(model, (rows,), dtype, cuts.rows)

  whole = functools.partial(_abstract, model, dtype=jnp.int32, axes=())
  draws = Draws(
    of_rows(jnp.uint32), of_rows(jnp.uint32), of_rows(jnp.float32), of_rows(jnp.int32), of_rows(jnp.float32)
  )
  slots = Rows(of_rows(jnp.int32), of_rows(jnp.int32), of_rows(jnp.int32), draws)
  plan = Plan(whole((NUM_STOP_IDS,)), whole(()), whole(()))
  arguments = (model.params, cache, of_rows(jnp.int32), slots, plan)
  return _program(model, loop, arguments, (_shardings(cache), NamedSharding(model.mesh, PartitionSpec())))


def _step(model: SpmdModel, params: Arrays, cache: Arrays, tokens: Array, positions: Array, cut: str):
  """One step inside a device's program."""
  cuts = model.cuts
  comm = Collectives(cuts, rows=cuts.rows, tokens=(), prefill=False)
  upstream = {"positions": positions, "lengths": None, "axes": cuts.heads, "cut": cut, "history": False}
  context = Context((positions >= 0)[:, None], None, upstream, comm)
  stream, cache = model.run(params, cache, tokens[:, None], context)
  return model.logits(params, model.output(params, stream)[:, 0]), cache


def _choose(vocab: Axes, logits: Array, draws: Draws, counts: Array) -> tuple[Array, Array]:
  """Chooses tokens from logits [b, x] whose vocabulary is cut: an all-to-all trades vocabulary for rows, and back."""
  if not vocab:
    return sample(logits, draws, counts)
  rows, parts = logits.shape[0], jax.lax.axis_size(vocab)
  share = -(-rows // parts)

  def padded(x: Array) -> Array:
    return jnp.pad(x, ((0, share * parts - rows), *((0, 0),) * (x.ndim - 1)))

  def own(x: Array) -> Array:
    return jax.lax.dynamic_slice_in_dim(padded(x), jax.lax.axis_index(vocab) * share, share)

  whole = jax.lax.all_to_all(padded(logits), vocab, split_axis=0, concat_axis=1, tiled=True)
  tokens, finite = sample(whole, jax.tree.map(own, draws), own(counts))
  both = jax.lax.all_gather(jnp.stack([tokens, finite.astype(jnp.int32)]), vocab, axis=1, tiled=True)[:, :rows]
  return both[0], both[1] != 0


def prefill(
  model: SpmdModel, *, rows: int, tokens: int, length: int, cut: str, history: bool, all_logits: bool = False
) -> Program:
  """Returns (params, cache, tokens [R, T], start [R], lengths [R]) -> (logits float32, cache).

  The logits [R, X] are of what follows each row's last token, or with `all_logits` [R, T, X] of every token. The cache
  is donated.

  Args:
    model: On its mesh.
    rows: R, padded on the right to T tokens each; every device of a row axis computes all of them.
    tokens: T.
    length: Tokens that a row's latents have room for. They are cut by sequence.
    cut: "sequence": residual stream, snapshots, router and latent projections of T / devices tokens a device; "whole".
    history: Whether a row may have tokens already: `start` of them, in its cache. Without, `start` must be 0.
    all_logits: For comparisons; T x X numbers.

  Raises:
    InputError: if the mesh does not divide the tokens.
  """
  cuts = model.cuts
  check_prefill_cut(cuts, cut)
  token_axes: Axes = cuts.rows + cuts.heads if cut == "sequence" else ()
  if tokens % cuts.size(token_axes):
    raise InputError(
      f"a chunk of {tokens} tokens: the mesh cuts it into {cuts.size(token_axes)}, expected a multiple of that"
    )
  cache = model.cache(rows, length, cut=_PREFILL_CACHE_CUT, cut_rows=False)
  comm = Collectives(cuts, rows=(), tokens=token_axes, prefill=True)

  def chunk(params: Arrays, cache: Arrays, tokens: Int[Array, "R T"], start: Array, lengths: Array):
    upstream = {"positions": start, "lengths": lengths, "axes": cuts.heads, "cut": _PREFILL_CACHE_CUT}
    valid = jnp.arange(tokens.shape[1]) < lengths[:, None]
    context = Context(valid, None, upstream | {"history": history}, comm)
    stream, cache = model.run(params, cache, tokens, context)
    if all_logits:
      hidden = comm.enter_attention(model.output(params, stream))
    else:
      last = jax.tree.map(lambda x: comm.token_of(x, lengths - 1)[..., None, :], stream)
      hidden = model.output(params, last)[:, 0]
    return model.logits(params, hidden), cache

  row = _abstract(model, (rows,), jnp.int32, ())
  arguments = (model.params, cache, _abstract(model, (rows, tokens), jnp.int32, ()), row, row)
  spec = PartitionSpec(*(None,) * (2 if all_logits else 1), cuts.vocab or None)
  return _program(model, chunk, arguments, (NamedSharding(model.mesh, spec), _shardings(cache)))


def check_prefill_cut(cuts: Cuts, cut: str) -> None:
  """Raises InputError if prefill cannot be cut so on this mesh."""
  if cut not in PREFILL_CUTS:
    raise InputError(f"prefill_cut is {cut!r}, expected one of: {', '.join(PREFILL_CUTS)}")
  if cut == "sequence" and not cuts.heads == cuts.width == cuts.vocab:
    raise InputError(
      f"prefill_cut sequence needs heads, width and vocab cut by the same axes, found {list(cuts.heads)}, "
      f"{list(cuts.width)} and {list(cuts.vocab)}: use prefill_cut=whole"
    )


def prepare_experts(model: SpmdModel, params: Arrays) -> Arrays:
  """Returns the parameters with packed experts in the form that the programs take. Uses the given ones up."""
  form, found = model.expert_form, dict(params)
  if form == "stored":
    return found
  for names in model.packed_experts:
    stored = tuple(found.pop(name) for name in names)
    wanted = tuple(model.params[name].sharding for name in names)
    specs = tuple(leaf.sharding.spec for leaf in stored)
    here = jax.shard_map(
      functools.partial(implementations.prepare, form=form),
      mesh=model.mesh,
      in_specs=specs,
      out_specs=tuple(sharding.spec for sharding in wanted),
      check_vma=False,
    )
    found |= dict(zip(names, jax.jit(here)(*stored), strict=True))
    del stored  # of a form that no program takes, and as large
  return found


def insert(cache: Arrays, prompts: Arrays, number: int | Int[Array, ""], slot: int | Int[Array, ""]) -> Arrays:
  """Returns the caches of all rows with those of one prompt in a row. Use under jit, with the caches donated.

  Whatever was in the row is replaced; latents behind the prompt's are left, and no row sees them before it has written
  there itself.

  Args:
    cache: Leaves [n, B, ...].
    prompts: Leaves [n, R, ...]; latents [n, R, S', .] with S' at most S.
    number: Which of them.
    slot: The row.
  """

  def put(all_rows, some):
    one = jax.lax.dynamic_slice_in_dim(some, number, 1, 1)
    start = (0, slot, *(0,) * (all_rows.ndim - 2))
    return jax.lax.dynamic_update_slice(all_rows, one.astype(all_rows.dtype), start)

  return {name: put(leaf, prompts[name]) for name, leaf in cache.items()}


def replicated_leaves(model: SpmdModel) -> replicated.Replicated:
  """Returns which parameters every device holds whole, with their bytes."""
  leaves = {name: (leaf.shape, str(leaf.dtype), leaf.sharding.spec) for name, leaf in model.params.items()}
  return replicated.report(leaves, model.mesh)


def make_empty(abstract: dict[str, jax.ShapeDtypeStruct]) -> Callable[[], Arrays]:
  """Returns a function that makes caches of zeros, each where its sharding puts it; compiled once."""
  return jax.jit(
    lambda: {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in abstract.items()},
    out_shardings=_shardings(abstract),
  )


def _program(model: SpmdModel, function: Callable, arguments: tuple, results: Any) -> Program:
  given = jax.tree.map(lambda leaf: leaf.sharding, arguments)
  local = jax.shard_map(function, mesh=model.mesh, in_specs=_specs(given), out_specs=_specs(results), check_vma=False)
  on_tpu = model.mesh.devices.flat[0].platform == "tpu"
  jitted = jax.jit(
    local,
    in_shardings=given,
    out_shardings=results,
    donate_argnums=(1,),
    compiler_options=dict(COMPILE_OPTIONS) if on_tpu else None,
  )
  return Program(jitted, arguments)


def _specs(shardings: Any) -> Any:
  return jax.tree.map(lambda sharding: sharding.spec, shardings)


def _shardings(abstract: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
  return {name: leaf.sharding for name, leaf in abstract.items()}


def _abstract(model: SpmdModel, shape: tuple[int, ...], dtype: Any, axes: Axes) -> jax.ShapeDtypeStruct:
  spec = PartitionSpec(*((axes or None, *(None,) * (len(shape) - 1)) if shape else ()))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(model.mesh, spec))
