"""One MLA step against a full softmax in float64: one device, and eight simulated ones, a process of this file."""

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

from kimi_k3.errors import InputError
from kimi_k3.mla_step import latent_step
from kimi_k3.mla_step_kernel import attend_in_kernel

pytestmark = pytest.mark.strict_ranks

LAYERS, LAYER, LATENT, TAIL, HEADS = 3, 1, 24, 8, 16
DEVICES, AXES = 8, ("x", "y")
ALLOCATED = 64
# The first, the last, both sides of a device's edge (8 positions each), and rows without a token.
POSITIONS = np.array([0, ALLOCATED - 1, -1, 5, 8, 7, -7, 33], np.int32)
TOLERANCE = 1e-5  # of the largest value: float32 against float64, scores up to 20
MESH_CASES = ["sequence-pallas", "batch-portable"]
MORE_MESH_CASES = [
  *("sequence-portable", "batch-pallas", "sequence-pallas-fp8", "sequence-portable-fp8", "batch-pallas-fp8"),
]
FP8 = ml_dtypes.float8_e4m3fn


def make_case(positions=POSITIONS, allocated=ALLOCATED, seed=0):
  """q, new, cache: NaN in the cache from each row's position on, and in all that rows without a token bring."""
  rng = np.random.default_rng(seed)
  rows, channels = len(positions), LATENT + TAIL
  q, new, cache = (
    rng.standard_normal(shape).astype(np.float32)
    for shape in ((rows, HEADS, channels), (rows, channels), (LAYERS, rows, allocated, channels))
  )
  for row, position in enumerate(positions):
    cache[:, row, max(position, 0) :] = np.nan
  q[positions < 0], new[positions < 0] = np.nan, np.nan
  return q, new, cache


def make_fp8_case(*arguments, **options):
  """The same with a cache in FP8."""
  q, new, cache = make_case(*arguments, **options)
  return q, new, cache.astype(FP8)


def expected(q, new, cache, positions: Any = POSITIONS):
  """The plain form: every head's softmax over all positions of its row, as cached; and the cache after it."""
  after, out = cache.copy(), np.zeros((*q.shape[:2], LATENT))
  for row, position in enumerate(positions):
    if position >= 0:
      after[LAYER, row, position] = new[row].astype(cache.dtype)
      seen = after[LAYER, row, : position + 1].astype(np.float64)
      score = q[row].astype(np.float64) @ seen.T
      weight = np.exp(score - score.max(axis=-1, keepdims=True))
      out[row] = weight / weight.sum(axis=-1, keepdims=True) @ seen[:, :LATENT]
  return out, after


@functools.cache
def step(cut, implementation, axes=()):
  """The function under test, its arrays the whole ones also on a mesh."""
  one_device = functools.partial(
    latent_step,
    axes=axes,
    cut=cut,
    num_values=LATENT,
    precision="highest",
    implementation=implementation,
    interpret=True,
  )
  if not axes:
    return jax.jit(one_device)
  mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(2, -1), axes)
  spec = PartitionSpec
  cache = spec(None, None, axes) if cut == "sequence" else spec(None, axes)
  in_specs = (spec(None, axes), spec(), cache, spec(), spec())
  return jax.jit(
    jax.shard_map(one_device, mesh=mesh, in_specs=in_specs, out_specs=(spec(None, axes), cache), check_vma=False)
  )


def check(found, wanted):
  (o, cache), (expected_o, expected_cache) = found, wanted
  np.testing.assert_allclose(o, expected_o, rtol=0, atol=TOLERANCE * np.abs(expected_o).max())
  # As bits: NaN stays NaN, and nothing but the new latents is written.
  assert cache.dtype == expected_cache.dtype
  bits = f"uint{8 * expected_cache.dtype.itemsize}"
  np.testing.assert_array_equal(np.asarray(cache).view(bits), expected_cache.view(bits))


@pytest.mark.parametrize("implementation", ["portable", "pallas"])
def test_a_step_equals_the_full_softmax_and_writes_the_new_latents_alone(implementation):
  case = make_case()
  check(step("sequence", implementation)(*case, jnp.int32(LAYER), POSITIONS), expected(*case))


@pytest.mark.parametrize("implementation", ["portable", "pallas"])
def test_a_step_on_fp8_attends_to_the_new_latent_as_it_is_cached(implementation):
  q, new, cache = make_fp8_case()
  new[0] *= 40  # row 0 sees nothing else
  found, wanted = step("sequence", implementation)(q, new, cache, jnp.int32(LAYER), POSITIONS), expected(q, new, cache)
  check(found, wanted)


@pytest.mark.parametrize("implementation", ["portable", "pallas"])
def test_a_number_that_fp8_has_not_ends_its_row_alone(implementation):
  q, new, cache = make_fp8_case()
  new[3, 2], new[4, LATENT + 1] = -465.0, np.inf
  new[5, :2] = 464.0, -448.0  # the largest, and what is nearest to it
  o, after = step("sequence", implementation)(q, new, cache, jnp.int32(LAYER), POSITIONS)
  exact, wanted = expected(q, new, cache)
  assert np.isnan(o[3:5]).any(axis=-1).all(), "every head of those rows"
  rows = np.array([0, 1, 2, 5, 6, 7])
  check((np.asarray(o)[rows], np.asarray(after)[:, rows]), (exact[rows], wanted[:, rows]))
  for row in (3, 4):  # of NaN the sign may differ
    np.testing.assert_array_equal(np.isnan(after[LAYER, row]), np.isnan(wanted[LAYER, row]))


@pytest.mark.parametrize("cases", [MESH_CASES, pytest.param(MORE_MESH_CASES, marks=pytest.mark.slow)], ids=" ".join)
def test_eight_devices_equal_the_full_softmax_with_either_cut(cases, tmp_path: Path):
  environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
  environment["PYTHONPATH"] = os.pathsep.join(sys.path)
  command = [sys.executable, __file__, str(tmp_path / "found.npz"), *cases]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
  assert done.returncode == 0, done.stderr[-4000:]
  with np.load(tmp_path / "found.npz") as found:
    for name in cases:
      case = make_named_case(name)
      cache = found[f"{name}-1"].view(case[2].dtype)
      check([found[f"{name}-0"], cache], expected(*case))
      calls = sorted(found[f"{name}-collectives"].tolist())
      assert calls == (["all_gather", "all_to_all"] if "sequence" in name else ["all_to_all", "all_to_all"])


def make_named_case(name: str):
  return make_fp8_case() if name.endswith("fp8") else make_case()


def on_mesh(path: str, names: list[str]) -> None:
  """Answers MESH_CASES by name into a file, with the names of the collectives each program has."""
  found = {}
  for name in names:
    case = make_named_case(name)
    function = step(*name.split("-")[:2], AXES)
    o, cache = (np.asarray(array) for array in function(*case, jnp.int32(LAYER), POSITIONS))
    found |= {f"{name}-0": o, f"{name}-1": cache.view(f"uint{8 * cache.dtype.itemsize}")}
    text = str(function.trace(*case, jnp.int32(LAYER), POSITIONS).jaxpr)
    kinds = ("all_gather", "all_to_all", "psum", "ppermute", "reduce_scatter")
    found[f"{name}-collectives"] = np.array([kind for kind in kinds for _ in range(text.count(f" {kind}["))])
  np.savez(path, **found)


@pytest.mark.parametrize(
  ("allocated", "block"),
  [
    (640, 256),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((512, 128), (640, 640), (128, 2048))),
  ],
)
def test_the_kernel_reads_rows_of_any_length_in_blocks_of_any_size(allocated, block):
  # A last block that starts before its turn; rows on both sides of a block's edge; empty rows first, last and between.
  positions = np.minimum(np.array([-1, 0, 127, 128, -1, -1, 383, 511, 639, -1]), allocated - 1).astype(np.int32)
  q, new, cache = make_case(positions, allocated, seed=1)
  q = np.where(positions[:, None, None] < 0, 0, q)  # the caller's duty
  attend = functools.partial(attend_in_kernel, num_values=LATENT, precision="highest", interpret=True, block=block)
  o, log_sum, after = jax.jit(attend)(q, new, cache, jnp.int32(LAYER), positions + 1, positions)
  check((o, after), expected(q, new, cache, positions))
  np.testing.assert_array_equal(np.isneginf(log_sum), np.broadcast_to((positions < 0)[:, None], log_sum.shape))


@pytest.mark.parametrize("implementation", ["portable", "pallas"])
def test_all_rows_without_a_token_give_zero_and_keep_the_cache(implementation):
  nobody = np.full(len(POSITIONS), -1, np.int32)
  case = make_case(nobody)
  check(step("sequence", implementation)(*case, jnp.int32(LAYER), nobody), expected(*case, nobody))


@pytest.mark.parametrize("implementation", ["portable", pytest.param("pallas", marks=pytest.mark.slow)])
def test_bfloat16_gives_bfloat16_close_to_float64(implementation):
  q, new, cache = (jnp.asarray(x, jnp.bfloat16) for x in make_case())
  o, after = step("sequence", implementation)(q * 0.2, new, cache, jnp.int32(LAYER), POSITIONS)
  assert o.dtype == after.dtype == jnp.bfloat16
  exact, _ = expected(*(np.asarray(x, np.float32) for x in (q * jnp.bfloat16(0.2), new, cache)))
  # 8 bits of the weights and of the result.
  np.testing.assert_allclose(np.asarray(o, np.float32), exact, rtol=0, atol=2**-7 * np.abs(exact).max())


@pytest.mark.parametrize("implementation", ["pallas", pytest.param("portable", marks=pytest.mark.slow)])
def test_bfloat16_queries_take_fp8_as_it_is(implementation):
  q, new, cache = make_fp8_case()
  q, new = jnp.asarray(q * np.float32(0.2), jnp.bfloat16), jnp.asarray(new, jnp.bfloat16)
  o, after = step("sequence", implementation)(q, new, cache, jnp.int32(LAYER), POSITIONS)
  assert (o.dtype, after.dtype) == (jnp.bfloat16, FP8)
  exact, _ = expected(np.asarray(q, np.float32), np.asarray(new, np.float32), cache)
  # As above: 8 bits of the weights and of the result.
  np.testing.assert_allclose(np.asarray(o, np.float32), exact, rtol=0, atol=2**-7 * np.abs(exact).max())


def test_what_cannot_be_done_is_refused_by_name():
  q, new, cache = make_case()
  arguments = (jnp.int32(LAYER), POSITIONS)
  with pytest.raises(InputError, match="'mosaic', expected one of: pallas, portable"):
    step("batch", "mosaic")(q, new, cache, *arguments)
  with pytest.raises(InputError, match="'heads', expected one of: batch, sequence"):
    step("heads", "portable")(q, new, cache, *arguments)
  with pytest.raises(InputError, match='7 rows, 8 expected for the cut "batch"'):
    step("batch", "portable")(q, new, cache[:, 1:], *arguments)
  longer = np.zeros((LAYERS, len(POSITIONS), 200, LATENT + TAIL), np.float32)
  with pytest.raises(InputError, match="200 positions on a device, a multiple of 128 expected"):
    step("batch", "pallas")(q, new, longer, *arguments)


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
  ("topology", "devices", "rows", "allocated", "cut", "heads", "temp_mib"),
  [
    # Every head's queries and partial results of 64 rows are on every device: 2 x 7.5 MiB, padded.
    ("tpu7x:2x2x4", 32, 64, 8192, "sequence", 96, 16),
    ("tpu7x:2x2x4", 32, 64, 8192, "batch", 96, 1),
    ("tpu7x:2x2x4", 32, 1, 2**20, "sequence", 96, 1),
    ("tpu7x:2x2x4", 32, 32, 2**20, "batch", 96, 1),
    ("tpu7x:2x2x1", 1, 4, 8192, "batch", 3, 1),
    ("v6e:2x4", 8, 8, 8192, "batch", 96, 1),
    ("v6e:2x4", 8, 8, 8192, "sequence", 96, 1),
  ],
)
def test_a_scan_over_layers_holds_no_copy_of_the_cache(
  topology, devices, rows, allocated, cut, heads, temp_mib, mla_benchmark
):
  from kimi_k3.capacity.hlo import collectives, copies, hbm_bytes, kernels

  compiled = mla_benchmark.compile_step(mla_benchmark.Step(topology, devices, rows, allocated, cut, heads))
  memory, program, layers = compiled.report.memory, compiled.program, compiled.layers
  assert memory.temp_bytes < temp_mib * 2**20
  cache_bytes = layers * compiled.least_bytes
  assert memory.alias_bytes == cache_bytes, "the channels are padded, or the cache is not updated in place"
  assert copies(program, min_bytes=compiled.least_bytes) == []
  assert kernels(program) == {"latent_step": layers}
  found = [c.kind for c in collectives(program) for _ in range(c.calls)]
  kinds = ("all-gather", "all-to-all") if cut == "sequence" else ("all-to-all", "all-to-all")
  assert sorted(found) == sorted(kinds * layers) if devices > 1 else not found
  if temp_mib == 1:
    # The cache once, a tile of each row back. Of 64 rows by sequence, queries and results of all heads weigh more.
    assert hbm_bytes(program, compiled.kernels).total < 1.05 * cache_bytes


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
@pytest.mark.parametrize(
  ("rows", "allocated", "cut", "temp_mib"),
  [(64, 8192, "batch", 1), (40, 2**20, "sequence", 12), (32, 2**20, "batch", 1)],
)
def test_a_cache_in_fp8_takes_half_the_memory_and_half_the_traffic(
  rows, allocated, cut, temp_mib, mla_benchmark, monkeypatch
):
  from kimi_k3.capacity.hlo import copies, hbm_bytes, kernels

  benchmark = with_fp8_cache(mla_benchmark, monkeypatch)
  compiled = benchmark.compile_step(benchmark.Step("tpu7x:2x2x4", 32, rows, allocated, cut))
  memory, program, layers = compiled.report.memory, compiled.program, compiled.layers
  cache_bytes = layers * rows * allocated * benchmark.CHANNELS // 32
  assert memory.alias_bytes == cache_bytes, "something is padded, or the cache is not updated in place"
  assert memory.argument_bytes < cache_bytes + 2**20
  assert memory.temp_bytes < temp_mib * 2**20
  assert copies(program, min_bytes=cache_bytes // layers) == []
  assert kernels(program) == {"latent_step": layers}
  assert hbm_bytes(program, compiled.kernels).total < 1.05 * cache_bytes


if __name__ == "__main__":
  on_mesh(sys.argv[1], sys.argv[2:])
