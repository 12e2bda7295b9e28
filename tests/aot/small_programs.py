"""Small programs that show every form in which the TPU compiler writes what kimi_k3.capacity reads.

Run as a script it writes their texts, which the tests of the readers use without a compiler:
`.venv/bin/python tests/aot/small_programs.py tests/kimi_k3/capacity/texts`, of those named behind or of all.
small_programs_test.py compiles them anew.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_k3.capacity import hlo, topology

LAYERS, ROWS, WIDTH, HEADS, LANES = 5, 64, 1024, 8, 128
CACHE_LAYERS, TOKENS, LATENT, VOCABULARY, CHOSEN = 3, 1024, 576, 16384, 16


def four_devices() -> Mesh:
  return topology.tpu_mesh("tpu7x:2x2x1", {"x": 4})


def array(mesh: Mesh, shape: tuple[int, ...], dtype, spec: P) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def scan(options=topology.FAST_COMPILE_OPTIONS) -> topology.Report:
  """Layers of two matrices cut in four, with an all-reduce, and a state that is updated in place."""
  mesh = four_devices()

  def program(up, down, states, x):
    def layer(carry, inputs):
      x, states = carry
      w_up, w_down, index = inputs
      hidden = jnp.dot(x, w_up, preferred_element_type=jnp.bfloat16)
      y = lax.psum(jnp.dot(hidden, w_down, preferred_element_type=jnp.bfloat16), "x")
      state = lax.dynamic_index_in_dim(states, index, 0, keepdims=False) * 0.5 + y[:, None, :].astype(jnp.float32)
      return (x + y, lax.dynamic_update_index_in_dim(states, state, index, 0)), None

    return lax.scan(layer, (x, states), (up, down, jnp.arange(LAYERS)))[0]

  args = (
    array(mesh, (LAYERS, WIDTH, 4 * WIDTH), jnp.bfloat16, P(None, None, "x")),
    array(mesh, (LAYERS, 4 * WIDTH, WIDTH), jnp.bfloat16, P(None, "x")),
    array(mesh, (LAYERS, ROWS, HEADS, WIDTH), jnp.float32, P()),
    array(mesh, (ROWS, WIDTH), jnp.bfloat16, P()),
  )
  specs = tuple(arg.sharding.spec for arg in args)
  mapped = jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=(P(), P()), check_vma=False)
  return topology.compile_for(mesh, mapped, args, donate=(2,), options=options)


def offloaded(options=topology.COMPILE_OPTIONS) -> topology.Report:
  """All-gather, reduce-scatter and all-reduce large enough for the SparseCore, and two all-to-alls, four times each."""
  mesh = topology.tpu_mesh("tpu7x:2x2x4", {"e": 8, "t": 4})
  both = ("e", "t")

  def program(up, down, x):
    def layer(x, matrices):
      gathered = lax.all_gather(x, both, axis=0, tiled=True)
      hidden = jnp.dot(gathered, matrices[0], preferred_element_type=jnp.bfloat16)
      y = jnp.dot(hidden, matrices[1], preferred_element_type=jnp.bfloat16)
      y = lax.psum(lax.psum_scatter(y, both, scatter_dimension=0, tiled=True), "t")
      y = lax.all_to_all(y, "e", split_axis=1, concat_axis=0, tiled=True)
      return x + lax.all_to_all(y, "e", split_axis=0, concat_axis=1, tiled=True), None

    return lax.scan(layer, x, (up, down))[0]

  args = (
    array(mesh, (4, 4096, 8192), jnp.bfloat16, P(None, None, both)),
    array(mesh, (4, 8192, 4096), jnp.bfloat16, P(None, both)),
    array(mesh, (32 * 512, 4096), jnp.bfloat16, P(both)),
  )
  specs = tuple(arg.sharding.spec for arg in args)
  mapped = jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=P(both), check_vma=False)
  return topology.compile_for(mesh, mapped, args, donate=(2,), options=options)


def kernel(options=topology.FAST_COMPILE_OPTIONS) -> topology.Report:
  """A Mosaic kernel in a scan: it is given whole stacks and the layer's number, and updates one of them in place."""
  mesh = four_devices()

  def body(layer, x, weights, state, out, new_state):
    del layer
    out[...] = jnp.dot(x[...], weights[...], preferred_element_type=jnp.float32)
    new_state[...] = state[...] + 1

  def program(weights, states, x):
    def layer(carry, index):
      x, states = carry
      out, states = pl.pallas_call(
        body,
        name="multiply_and_count",
        out_shape=(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), jax.ShapeDtypeStruct(states.shape, states.dtype)),
        input_output_aliases={3: 1},
        grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=1,
          grid=(4,),
          in_specs=[
            pl.BlockSpec((ROWS, WIDTH), lambda *_: (0, 0)),
            pl.BlockSpec((None, WIDTH, WIDTH // 4), lambda i, layer: (layer[0], 0, i)),
            pl.BlockSpec((None, ROWS // 4, HEADS, LANES), lambda i, layer: (layer[0], i, 0, 0)),
          ],
          out_specs=(
            pl.BlockSpec((ROWS, WIDTH // 4), lambda i, _: (0, i)),
            pl.BlockSpec((None, ROWS // 4, HEADS, LANES), lambda i, layer: (layer[0], i, 0, 0)),
          ),
        ),
      )(index[None], x, weights, states)
      return (out.astype(jnp.bfloat16), states), None

    return lax.scan(layer, (x, states), jnp.arange(LAYERS))[0]

  args = (
    array(mesh, (LAYERS, WIDTH, WIDTH), jnp.bfloat16, P()),
    array(mesh, (LAYERS, ROWS, HEADS, LANES), jnp.float32, P()),
    array(mesh, (ROWS, WIDTH), jnp.bfloat16, P()),
  )
  mapped = jax.shard_map(program, mesh=mesh, in_specs=(P(), P(), P()), out_specs=(P(), P()), check_vma=False)
  return topology.compile_for(mesh, mapped, args, donate=(1,), options=options)


def nested(options=topology.FAST_COMPILE_OPTIONS) -> topology.Report:
  """A loop that runs as often as an argument says, with a loop of seven and a conditional in it."""
  mesh = four_devices()

  def program(x, weights, limit):
    def inner(_, y):
      return jnp.tanh(lax.psum(jnp.dot(y, weights, preferred_element_type=jnp.float32), "x")).astype(jnp.bfloat16)

    def multiply(x):
      return jnp.dot(x, weights, preferred_element_type=jnp.bfloat16)

    def outer(carry):
      count, x = carry
      x = lax.fori_loop(0, 7, inner, x)
      return count + 1, lax.cond(x[0, 0] > 0, multiply, lambda x: lax.psum(x, "x"), x)

    return lax.while_loop(lambda carry: carry[0] < limit, outer, (jnp.int32(0), x))[1]

  args = (
    array(mesh, (ROWS, WIDTH), jnp.bfloat16, P()),
    array(mesh, (WIDTH, WIDTH), jnp.bfloat16, P()),
    array(mesh, (), jnp.int32, P()),
  )
  mapped = jax.shard_map(program, mesh=mesh, in_specs=(P(), P(), P()), out_specs=P(), check_vma=False)
  return topology.compile_for(mesh, mapped, args, options=options)


def cache(options=topology.FAST_COMPILE_OPTIONS) -> topology.Report:
  """A latent cache written by a scatter, all of which the SparseCore copies twice; and a gather of rows."""
  mesh = four_devices()

  def program(latents, queries, positions, new, tokens, embedding, layer):
    latents = latents.at[layer, jnp.arange(ROWS), positions].set(new)
    mine = lax.dynamic_index_in_dim(latents, layer, 0, keepdims=False)
    scores = jnp.einsum("bhc,bsc->bhs", queries, mine, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores).astype(jnp.bfloat16)
    out = jnp.einsum("bhs,bsc->bhc", weights, mine, preferred_element_type=jnp.float32)
    return latents, out, embedding[tokens], lax.top_k(out[:, 0], CHOSEN)

  args = (
    array(mesh, (CACHE_LAYERS, ROWS, TOKENS, LATENT), jnp.bfloat16, P()),
    array(mesh, (ROWS, 3, LATENT), jnp.bfloat16, P()),
    array(mesh, (ROWS,), jnp.int32, P()),
    array(mesh, (ROWS, LATENT), jnp.bfloat16, P()),
    array(mesh, (ROWS,), jnp.int32, P()),
    array(mesh, (VOCABULARY, WIDTH), jnp.bfloat16, P()),
    array(mesh, (), jnp.int32, P()),
  )
  mapped = jax.shard_map(program, mesh=mesh, in_specs=(P(),) * 7, out_specs=P(), check_vma=False)
  return topology.compile_for(mesh, mapped, args, donate=(0,), options=options)


# What springs a trap of kimi_k3.capacity.traps, and the same program without: the arrays are as large as a trap has to
# be to be told, which costs a compiler nothing.
DEEP, WIDE, LONG, STRETCHES = 4, 4096, 32768, 8
WHOLE = P()


def compile_mapped(
  program, args, *, results=WHOLE, donate=(), options=topology.FAST_COMPILE_OPTIONS
) -> topology.Report:
  """A function of one device's parts, compiled."""
  mesh = args[0].sharding.mesh
  specs = tuple(arg.sharding.spec for arg in args)
  mapped = jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
  return topology.compile_for(mesh, mapped, args, donate=donate, options=options)


def stack(dtype=jnp.bfloat16, options=topology.FAST_COMPILE_OPTIONS) -> topology.Report:
  """A matrix of each layer, multiplied in bfloat16 whatever it is stored in."""
  mesh = four_devices()

  def program(weights, x):
    def layer(x, w):
      return jnp.tanh(jnp.dot(x, w.astype(x.dtype), preferred_element_type=jnp.float32)).astype(x.dtype), None

    return lax.scan(layer, x, weights)[0]

  args = (array(mesh, (DEEP, WIDE, WIDE), dtype, P()), array(mesh, (ROWS, WIDE), jnp.bfloat16, P()))
  return compile_mapped(program, args, options=options)


def residual(*, cut: bool) -> topology.Report:
  """Layers of an MLP cut in four; the tokens of the stream are on one device each, or all on every one."""
  mesh = four_devices()

  def program(up, down, x):
    def layer(x, matrices):
      everything = lax.all_gather(x, "x", axis=1, tiled=True) if cut else x
      hidden = jnp.dot(jnp.tanh(everything), matrices[0], preferred_element_type=jnp.bfloat16)
      y = jnp.dot(hidden, matrices[1], preferred_element_type=jnp.bfloat16)
      return x + (lax.psum_scatter(y, "x", scatter_dimension=1, tiled=True) if cut else lax.psum(y, "x")), None

    return lax.scan(layer, x, (up, down))[0]

  tokens = P(None, "x") if cut else P()
  args = (
    array(mesh, (DEEP, WIDTH, WIDTH), jnp.bfloat16, P(None, None, "x")),
    array(mesh, (DEEP, WIDTH, WIDTH), jnp.bfloat16, P(None, "x")),
    array(mesh, (1, LONG, WIDTH), jnp.bfloat16, tokens),
  )
  return compile_mapped(program, args, results=tokens, donate=(2,))


def table(*, closed_over: bool) -> topology.Report:
  """A product with a table of 2 MiB."""
  mesh = four_devices()
  numbers = np.arange(ROWS * HEADS * WIDTH, dtype=np.float32).reshape(ROWS * HEADS, WIDTH)

  def program(x, *given):
    return jnp.sin(x) * (numbers if closed_over else given[0])

  return compile_mapped(program, (array(mesh, numbers.shape, jnp.float32, P()),) * (1 if closed_over else 2))


def layer_of_kernel(*, sliced: bool) -> topology.Report:
  """A kernel in a scan that is given the slice of its layer, or the whole stack and the layer's number."""
  mesh, tile = four_devices(), WIDE // 16

  def body(layer, x, weights, out):
    del layer
    out[...] = jnp.dot(x[...], weights[...], preferred_element_type=jnp.float32).astype(out.dtype)

  def program(weights, x):
    def layer(x, index):
      mine, number = (lax.dynamic_slice_in_dim(weights, index, 1), jnp.int32(0)) if sliced else (weights, index)
      out = pl.pallas_call(
        body,
        name="multiply",
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=1,
          grid=(2 * WIDE // tile,),
          in_specs=[
            pl.BlockSpec(x.shape, lambda *_: (0, 0)),
            pl.BlockSpec((None, 2 * WIDE, tile), lambda i, layer: (layer[0], 0, i)),
          ],
          out_specs=pl.BlockSpec((x.shape[0], tile), lambda i, _: (0, i)),
        ),
      )(number[None], x, mine)
      return out, None

    return lax.scan(layer, x, jnp.arange(DEEP))[0]

  wide = 2 * WIDE  # a layer's matrix is then larger than VMEM
  args = (array(mesh, (DEEP, wide, wide), jnp.bfloat16, P()), array(mesh, (ROWS, wide), jnp.bfloat16, P()))
  return compile_mapped(program, args)


def attention(*, stretches: bool) -> topology.Report:
  """Layers that write a token to a latent cache and attend to it: by a scan over stretches of it, or in one product."""
  mesh = four_devices()

  def scores(queries, keys):
    return jnp.einsum("bhc,bsc->bhs", queries, keys, preferred_element_type=jnp.float32)

  def values(weights, keys):
    return jnp.einsum("bhs,bsc->bhc", weights.astype(keys.dtype), keys, preferred_element_type=jnp.float32)

  def by_stretches(queries, latents):
    def add(state, keys):
      largest, total, out = state
      score = scores(queries, keys)
      new = jnp.maximum(largest, score.max(-1))
      weight, scale = jnp.exp(score - new[..., None]), jnp.exp(largest - new)
      return (new, total * scale + weight.sum(-1), out * scale[..., None] + values(weight, keys)), None

    parts = jnp.moveaxis(latents.reshape(latents.shape[0], STRETCHES, -1, latents.shape[-1]), 1, 0)
    zeros = jnp.zeros(queries.shape[:2], jnp.float32)
    (_, total, out), _ = lax.scan(add, (zeros - 1e30, zeros, jnp.zeros(queries.shape, jnp.float32)), parts)
    return out / total[..., None]

  def program(latents, queries, new, position):
    def layer(carry, index):
      queries, latents = carry
      latents = lax.dynamic_update_slice(latents, new[None, :, None], (index, 0, position, 0))
      mine = lax.dynamic_index_in_dim(latents, index, keepdims=False)
      out = by_stretches(queries, mine) if stretches else values(jax.nn.softmax(scores(queries, mine)), mine)
      return (queries + out.astype(queries.dtype), latents), None

    return lax.scan(layer, (queries, latents), jnp.arange(DEEP))[0]

  args = (
    array(mesh, (DEEP, ROWS, TOKENS, WIDTH), jnp.bfloat16, P()),
    array(mesh, (ROWS, HEADS, WIDTH), jnp.bfloat16, P()),
    array(mesh, (ROWS, WIDTH), jnp.bfloat16, P()),
    array(mesh, (), jnp.int32, P()),
  )
  return compile_mapped(program, args, donate=(0,))


def state(*, donated: bool) -> topology.Report:
  """One layer of a stack of states replaced."""
  mesh = four_devices()

  def program(states, new):
    return lax.dynamic_update_slice(states, new[None], (1, 0, 0))

  args = (array(mesh, (DEEP, WIDTH, WIDTH), jnp.float32, P()), array(mesh, (WIDTH, WIDTH), jnp.float32, P()))
  return compile_mapped(program, args, donate=(0,) if donated else ())


def without_compile_options() -> dict[str, str]:
  return {k: v for k, v in topology.FAST_COMPILE_OPTIONS.items() if k not in topology.COMPILE_OPTIONS}


PROGRAMS: dict[str, Callable[[], topology.Report]] = {
  "scan": scan,
  "offloaded": offloaded,
  # What the same program becomes on the TensorCore: the reduce-scatter is an all-reduce in a fusion.
  "not_offloaded": lambda: offloaded(topology.FAST_COMPILE_OPTIONS),
  "kernel": kernel,
  "nested": nested,
  "cache": cache,
  "stack": stack,
  "stack_copied": lambda: stack(options=without_compile_options()),
  "stack_cast": lambda: stack(jnp.float32),
  "residual": lambda: residual(cut=True),
  "residual_replicated": lambda: residual(cut=False),
  "table": lambda: table(closed_over=False),
  "table_constant": lambda: table(closed_over=True),
  "layer": lambda: layer_of_kernel(sliced=False),
  "layer_sliced": lambda: layer_of_kernel(sliced=True),
  "attention": lambda: attention(stretches=False),
  "attention_copied": lambda: attention(stretches=True),
  "state": lambda: state(donated=True),
  "state_copied": lambda: state(donated=False),
}


def short(text: str) -> str:
  """The text without what the readers do not use: places in source files, the backend's configs, compiled kernels."""
  text = re.sub(r",? backend_config=\{(?!.*known_trip_count).*$", "", hlo.strip_locations(text), flags=re.MULTILINE)
  return re.sub(r" stack_frame_id=\d+", "", text)


if __name__ == "__main__":
  for name, make in PROGRAMS.items():
    if sys.argv[2:] and name not in sys.argv[2:]:
      continue
    (Path(sys.argv[1]) / f"{name}.hlo").write_text(short(make().text))
