"""Prefill of MLA against a full softmax in float64: one device, and eight simulated ones, a process of this file."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from kimi_k3 import mla_prefill
from kimi_k3.errors import InputError
from kimi_k3.mla_flash import Keys, flash_all, flash_causal, start_softmax
from kimi_k3.mla_prefill import latent_prefill, write_chunk

pytestmark = pytest.mark.strict_ranks

LAYERS, LAYER, HEADS, LATENT, TAIL, NOPE, VALUE = 3, 2, 8, 24, 8, 16, 12
DEVICES, AXES = 8, ("x", "y")
TOKENS, ALLOCATED = 37, 160  # 20 positions a device
# Rows with no history, with all the room there is taken, with one token over a device's edge, and with no token at all.
START = np.array([0, ALLOCATED - TOKENS, 61, 90], np.int32)
LENGTHS = np.array([TOKENS, TOKENS, 1, 0], np.int32)
TOLERANCE = 1e-5  # of the largest value: float32 against float64
# implementation, whether there is history, and positions of a block of history: part of a device's, or several parts
MESH_CASES = ["flash-True-8", "portable-True-48-fp8"]
MORE_MESH_CASES = [
  *("portable-True-48", "portable-False-48", "flash-False-8", "portable-True-8", "flash-True-48", "flash-True-8-fp8"),
]
FP8 = ml_dtypes.float8_e4m3fn


def make_case(start=START, lengths=LENGTHS, tokens=TOKENS, allocated=ALLOCATED):
  """q, chunk, to_key, to_value, cache: NaN in pads, and in the cache from start on."""
  rng = np.random.default_rng(0)
  shapes = (
    (len(start), tokens, HEADS, NOPE + TAIL),
    (len(start), tokens, LATENT + TAIL),
    (LATENT, HEADS, NOPE),
    (LATENT, HEADS, VALUE),
    (LAYERS, len(start), allocated, LATENT + TAIL),
  )
  q, chunk, to_key, to_value, cache = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
  for row, (first, length) in enumerate(zip(start, lengths, strict=True)):
    q[row, length:], chunk[row, length:], cache[:, row, first:] = np.nan, np.nan, np.nan
  return q * (NOPE + TAIL) ** -0.5, chunk, to_key * LATENT**-0.5, to_value * LATENT**-0.5, cache


def expected(q, chunk, to_key, to_value, cache, start: Any = START, lengths: Any = LENGTHS):
  """The plain form, token by token: keys and values of all positions as cached, one softmax. And the cache after it."""
  chunk = chunk.astype(cache.dtype)
  out, after = np.zeros((*q.shape[:3], VALUE)), cache.copy()
  for row, (first, length) in enumerate(zip(start, lengths, strict=True)):
    after[LAYER, row, first : first + length] = chunk[row, :length]
    latents = np.concatenate([cache[LAYER, row, :first], chunk[row, :length]]).astype(np.float64)
    keys = np.einsum("gc,chn->hgn", latents[:, :LATENT], to_key)
    keys = np.concatenate([keys, np.broadcast_to(latents[:, LATENT:], (HEADS, len(latents), TAIL))], axis=-1)
    values = np.einsum("gc,chv->hgv", latents[:, :LATENT], to_value)
    for t in range(length):
      seen = first + t + 1
      score = np.einsum("hk,hgk->hg", q[row, t], keys[:, :seen])
      weight = np.exp(score - score.max(axis=-1, keepdims=True))
      out[row, t] = np.einsum("hg,hgv->hv", weight / weight.sum(axis=-1, keepdims=True), values[:, :seen])
  return out, after


def prefill(implementation, history, axes=()):
  """Attention of a chunk, and the cache with the chunk, as a layer does it. The arrays are whole ones on a mesh too."""

  def one_device(q, chunk, to_key, to_value, cache, layer, start, lengths):
    arguments = (layer, start, lengths)
    options: Any = dict(axes=axes, precision="highest", implementation=implementation, history=history, interpret=True)
    o = latent_prefill(q, chunk, to_key, to_value, cache, *arguments, **options)
    return o, write_chunk(cache, chunk, *arguments, axes=axes)

  if not axes:
    return jax.jit(one_device)
  mesh, spec = Mesh(np.array(jax.devices()[:DEVICES]).reshape(2, -1), axes), PartitionSpec
  third, second = spec(None, None, axes), spec(None, axes)
  in_specs = (third, spec(), second, second, third, spec(), spec(), spec())
  return jax.jit(jax.shard_map(one_device, mesh=mesh, in_specs=in_specs, out_specs=(third, third), check_vma=False))


def check(found, wanted):
  (o, cache), (expected_o, expected_cache) = found, wanted
  np.testing.assert_allclose(o, expected_o, rtol=0, atol=TOLERANCE * np.abs(expected_o).max())
  # As bits: NaN stays NaN, and nothing but the chunk's real tokens is written.
  assert cache.dtype == expected_cache.dtype
  bits = f"uint{8 * expected_cache.dtype.itemsize}"
  np.testing.assert_array_equal(np.asarray(cache).view(bits), expected_cache.view(bits))


def in_fp8(case: Any) -> Any:
  """The same with a cache in FP8."""
  *rest, cache = case
  return *rest, cache.astype(FP8)


def small_blocks(history_block):
  """Blocks so small that this case has many, of history, of the portable form and of what is written."""
  return {"HISTORY_BLOCK": history_block, "_PORTABLE_BLOCK": 16, "WRITE_BLOCK": 16}


@pytest.mark.parametrize(
  ("implementation", "history", "history_block"),
  [
    ("portable", True, 48),
    ("flash", False, 48),
    pytest.param("flash", True, 48, marks=pytest.mark.slow),  # on eight devices below
    pytest.param("portable", False, 48, marks=pytest.mark.slow),
    pytest.param("portable", True, 4096, marks=pytest.mark.slow),
    pytest.param("flash", True, 4096, marks=pytest.mark.slow),
  ],
)
def test_a_chunk_equals_the_full_softmax_and_writes_its_real_tokens_alone(
  implementation, history, history_block, monkeypatch
):
  for name, value in small_blocks(history_block).items():
    monkeypatch.setattr(mla_prefill, name, value)
  start = START if history else np.zeros_like(START)
  case = make_case(start)
  check(prefill(implementation, history)(*case, jnp.int32(LAYER), start, LENGTHS), expected(*case, start))


@pytest.mark.parametrize("implementation", ["portable", pytest.param("flash", marks=pytest.mark.slow)])
def test_a_chunk_on_fp8_attends_to_its_own_tokens_as_they_are_cached(implementation, monkeypatch):
  for name, value in small_blocks(48).items():
    monkeypatch.setattr(mla_prefill, name, value)
  q, chunk, *weights, cache = make_case()
  chunk = chunk * 3  # scores that hang on single latents
  chunk[1, TOKENS - 1, 5] = 465.0  # its last token has no number in FP8: that row alone is NaN, from there on
  case = in_fp8((q, chunk, *weights, cache))
  answer: Any = prefill(implementation, history=True)(*case, jnp.int32(LAYER), START, LENGTHS)
  o, after = (np.asarray(array) for array in answer)
  exact, wanted = expected(*case)
  assert np.isnan(o[1, TOKENS - 1]).all(axis=-1).all(), "every head"
  assert np.isnan(after[LAYER, 1, ALLOCATED - 1]).tolist() == [i == 5 for i in range(LATENT + TAIL)]
  rows = np.array([0, 2, 3])
  check((o[rows], after[:, rows]), (exact[rows], wanted[:, rows]))


@pytest.mark.parametrize("cases", [MESH_CASES, pytest.param(MORE_MESH_CASES, marks=pytest.mark.slow)], ids=" ".join)
def test_eight_devices_equal_the_full_softmax_with_history_over_their_edges(cases, tmp_path: Path):
  environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
  environment["PYTHONPATH"] = os.pathsep.join(sys.path)
  command = [sys.executable, __file__, str(tmp_path / "found.npz"), *cases]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
  assert done.returncode == 0, done.stderr[-4000:]
  with np.load(tmp_path / "found.npz") as found:
    for name in cases:
      case, start = make_named_case(name)
      check([found[f"{name}-0"], found[f"{name}-1"].view(case[-1].dtype)], expected(*case, start=start))


def make_named_case(name: str) -> tuple[Any, Any]:
  """The arrays, and where the chunks start."""
  start = START if "True" in name else np.zeros_like(START)
  return (in_fp8(make_case(start)) if name.endswith("fp8") else make_case(start)), start


def on_mesh(path: str, names: list[str]) -> None:
  """Answers cases by name into a file."""
  found = {}
  for name in names:
    implementation, history, history_block = name.split("-")[:3]
    for constant, value in small_blocks(int(history_block)).items():
      setattr(mla_prefill, constant, value)
    case, start = make_named_case(name)
    answer = prefill(implementation, history == "True", AXES)(*case, jnp.int32(LAYER), start, LENGTHS)
    o, cache = (np.asarray(array) for array in answer)
    found |= {f"{name}-0": o, f"{name}-1": cache.view(f"uint{8 * cache.dtype.itemsize}")}
  np.savez(path, **found)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["portable", "flash"])
@pytest.mark.parametrize(
  ("tokens", "start", "lengths"),
  [
    (1, [0, 1, 159, 20], [1, 1, 1, 0]),
    (64, [0, 96, 19, 20], [64, 64, 63, 1]),
    (160, [0, 0, 100, 160], [160, 1, 60, 0]),  # a chunk as long as the cache
  ],
)
def test_chunks_of_any_length_at_any_place(implementation, tokens, start, lengths, monkeypatch):
  for name, value in small_blocks(48).items():
    monkeypatch.setattr(mla_prefill, name, value)
  start, lengths = np.array(start, np.int32), np.array(lengths, np.int32)
  case = make_case(start, lengths, tokens)
  found = prefill(implementation, history=True)(*case, jnp.int32(LAYER), start, lengths)
  check(found, expected(*case, start, lengths))


def plain_softmax(q, keys, visible):
  """Output of queries [R, h, K, T] over keys that `visible` [R, G, T] shows, transposed: [R, h, V, T]."""
  nope, tail, values, q = (np.asarray(x, np.float64) for x in (*keys, q))
  width = nope.shape[-1]
  score = np.einsum("rhgn,rhnt->rhgt", nope, q[:, :, :width]) + np.einsum("rgn,rhnt->rhgt", tail, q[:, :, width:])
  score = np.where(visible[:, None], score, -np.inf)
  weight = np.exp(score - score.max(axis=2, keepdims=True))
  return np.einsum("rhvg,rhgt->rhvt", values, weight / weight.sum(axis=2, keepdims=True))


@pytest.mark.parametrize(
  "tokens", [300, pytest.param(512, marks=pytest.mark.slow), pytest.param(640, marks=pytest.mark.slow)]
)
def test_the_kernel_folds_the_triangle_of_blocks_right_and_goes_on_from_a_state(tokens):
  """Odd and even numbers of blocks, rows whose keys and tokens end in and at the edge of a block, and empty ones."""
  block, rows, heads, keys_before = 128, 4, 2, 260
  rng = np.random.default_rng(0)

  def make(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)

  def make_keys(count):
    return Keys(make(rows, heads, count, NOPE), make(rows, count, TAIL), make(rows, heads, VALUE, count))

  q, before, own = make(rows, heads, NOPE + TAIL, tokens) * 0.3, make_keys(keys_before), make_keys(tokens)
  low, high = np.array([0, 130, 0, 5], np.int32), np.array([256, 131, 0, 260], np.int32)
  lengths = np.array([tokens, 1, 129, tokens - 1], np.int32)

  @jax.jit
  def run(q, before, own):
    options: Any = dict(precision="highest", interpret=True, block=block)
    state = flash_all(start_softmax(q, VALUE), q, before, jnp.asarray(low), jnp.asarray(high), **options)
    return flash_causal(state, q, own, jnp.asarray(lengths), **options)

  # Small scores, and such that rise from block to block by more than the kernel's fast way takes. Float32 leaves an
  # error of 1e-5 in a score of 100, and a weight is the exponential.
  for scale, tolerance in ((1.0, TOLERANCE), (20.0, 10 * TOLERANCE)):
    check_kernel(run(q * scale, before, own), q * scale, before, own, low, high, lengths, tolerance)


def check_kernel(found, q, before, own, low, high, lengths, tolerance):
  rows, keys_before, tokens = len(low), before.tail.shape[1], q.shape[-1]
  at = np.arange(keys_before)
  seen = np.broadcast_to(((at >= low[:, None]) & (at < high[:, None]))[..., None], (rows, keys_before, tokens))
  causal = np.broadcast_to(np.triu(np.ones((tokens, tokens), bool)), (rows, tokens, tokens))
  both = tuple(np.concatenate(x, axis) for x, axis in zip(zip(before, own, strict=True), (2, 1, 3), strict=True))
  wanted = plain_softmax(q, both, np.concatenate([seen, causal], axis=1))
  for row, length in enumerate(lengths):
    error = np.abs(np.asarray(found[row, ..., :length]) - wanted[row, ..., :length]).max()
    assert error <= tolerance * np.abs(wanted).max()


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["portable", "flash"])
def test_bfloat16_gives_bfloat16_close_to_float64(implementation):
  case = tuple(jnp.asarray(x, jnp.bfloat16) for x in make_case())
  o, cache = prefill(implementation, history=True)(*case, jnp.int32(LAYER), START, LENGTHS)
  assert o.dtype == cache.dtype == jnp.bfloat16
  exact, _ = expected(*(np.asarray(x, np.float32) for x in case))
  # 8 bits of the keys, the values, the weights and the result.
  np.testing.assert_allclose(np.asarray(o, np.float32), exact, rtol=0, atol=2**-6 * np.abs(exact).max())


def test_no_array_of_the_portable_form_grows_with_the_square_of_the_tokens():
  tokens, spec = 4096, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  rows = jax.ShapeDtypeStruct((1,), jnp.int32)
  chunk = (spec((1, tokens, 1, NOPE + TAIL)), spec((1, tokens, LATENT + TAIL)))
  weights = (spec((LATENT, 1, NOPE)), spec((LATENT, 1, VALUE)))
  cache = spec((1, 1, tokens, LATENT + TAIL))
  arguments = (*chunk, *weights, cache, jax.ShapeDtypeStruct((), jnp.int32), rows, rows)
  text = prefill("portable", history=True).lower(*arguments).as_text()
  assert f"{mla_prefill._PORTABLE_BLOCK}x{mla_prefill._PORTABLE_BLOCK}x" in text
  assert f"{tokens}x{tokens}" not in text


def test_an_unknown_implementation_is_refused_by_name():
  with pytest.raises(InputError, match="'splash', expected one of: flash, portable"):
    prefill("splash", history=False)(*make_case(), jnp.int32(LAYER), START, LENGTHS)


@pytest.fixture(scope="module")
def mla_benchmark():
  """benchmarks/kernels/mla.py, which builds the programs."""
  path = Path(__file__).parents[2] / "benchmarks" / "kernels" / "mla.py"
  spec = importlib.util.spec_from_file_location("mla_benchmark", path)
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # its dataclasses look there for their annotations
  spec.loader.exec_module(module)
  return module


@pytest.mark.aot
@pytest.mark.parametrize(
  ("topology", "devices", "tokens", "allocated", "history", "heads", "temp_mib"),
  [
    # Queries, keys, values, sums in float32 and the chunk: so many bytes a token and head, whatever the cache holds.
    ("tpu7x:2x2x4", 32, 32768, 2**20, False, 96, 200),
    ("tpu7x:2x2x4", 32, 131072, 2**20, False, 96, 800),
    ("tpu7x:2x2x4", 32, 32768, 2**18, True, 96, 320),
    ("tpu7x:2x2x4", 32, 32768, 2**20, True, 96, 320),
    ("tpu7x:2x2x1", 1, 8192, 16384, True, 3, 100),
    ("tpu7x:2x2x1", 1, 8192, 16384, True, 6, 160),
    ("tpu7x:2x2x1", 1, 8192, 16384, True, 12, 240),
    ("tpu7x:2x2x1", 1, 8192, 16384, True, 96, 1500),
    ("v6e:2x4", 8, 8192, 2**17, True, 96, 320),
    ("v6e:2x4", 8, 8192, 2**17, False, 96, 320),
  ],
)
def test_temp_memory_is_bounded_by_the_chunk(
  topology, devices, tokens, allocated, history, heads, temp_mib, mla_benchmark
):
  from kimi_k3.capacity.hlo import collectives, kernels

  work = mla_benchmark.Prefill(topology, devices, tokens, allocated, history, heads)
  compiled = mla_benchmark.compile_prefill(work)
  assert compiled.report.memory.temp_bytes < temp_mib * 2**20
  runs = compiled.loops
  assert set(kernels(compiled.program, runs)) == ({"flash_causal", "flash_all"} if history else {"flash_causal"})
  blocks = compiled.layers * runs["*/mla_history/while"] if history and devices > 1 else 0
  found = [c.kind for c in collectives(compiled.program, runs) for _ in range(c.calls)]
  assert found == ["all-reduce"] * blocks


def with_fp8_cache(mla_benchmark, monkeypatch):
  """The benchmark, its programs with the cache in FP8."""
  made = mla_benchmark._arrays

  def arrays(mesh, shapes, specs):
    return [
      leaf.update(dtype=jnp.dtype(FP8)) if leaf.ndim == 4 and leaf.shape[-1] == mla_benchmark.CHANNELS else leaf
      for leaf in made(mesh, shapes, specs)
    ]

  monkeypatch.setattr(mla_benchmark, "_arrays", arrays)
  return mla_benchmark


@pytest.mark.aot
def test_history_in_fp8_travels_as_bytes_and_a_chunk_is_rounded_before_keys_are_made_of_it(mla_benchmark, monkeypatch):
  from kimi_k3.capacity.hlo import collectives, copies, kernels

  benchmark = with_fp8_cache(mla_benchmark, monkeypatch)
  compiled = benchmark.compile_prefill(benchmark.Prefill("tpu7x:2x2x4", 32, 32768, 2**20, history=True))
  assert compiled.report.memory.temp_bytes < 320 * 2**20
  assert set(kernels(compiled.program, compiled.loops)) == {"flash_causal", "flash_all"}
  (found,) = collectives(compiled.program, compiled.loops)
  assert found.kind == "all-reduce"
  assert found.bytes <= 1.12 * benchmark.CHANNELS * mla_prefill.HISTORY_BLOCK  # 576 channels take 640
  # Written in place. The layout of the chunk itself may change, a window of history too.
  cache = (benchmark.PREFILL_LAYERS, 1, 32768, benchmark.CHANNELS)
  assert cache not in [copy.result.dims for copy in copies(compiled.program, loops=compiled.loops)]
  assert "sparse-core-data-format-call(f8" not in compiled.report.text
  # Keys are made of FP8: of what is cached.
  keys = [line for line in compiled.report.text.splitlines() if "-> bf16[1,3,32768,128] {" in line]
  assert keys
  assert all("f8e4m3fn[1,32768,576]" in line for line in keys)


if __name__ == "__main__":
  on_mesh(sys.argv[1], sys.argv[2:])
