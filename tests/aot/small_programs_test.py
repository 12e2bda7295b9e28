"""What the TPU compiler writes today is what the readers of kimi_k3.capacity were tested on."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

TEXTS = Path(__file__).resolve().parents[1] / "kimi_k3" / "capacity" / "texts"
NAMES = (
  *("scan", "offloaded", "not_offloaded", "kernel", "nested", "cache"),
  *("stack", "stack_copied", "stack_cast", "residual", "residual_replicated", "table", "table_constant"),
  *("layer", "layer_sliced", "attention", "attention_copied", "state", "state_copied"),
)
KERNELS = {"kernel": {"multiply_and_count": {2, 3}}, "layer": {"multiply": {2}}, "layer_sliced": {"multiply": set()}}
LOOPS = {"nested": {"jit(program)/shard_map/while": 10}}


@pytest.fixture(scope="module")
def made(small_programs):
  """Returns a function: a program's name to its report, compiled once."""
  return functools.cache(lambda name: small_programs.PROGRAMS[name]())


def figures(text: str, name: str):
  from kimi_k3.capacity import hlo
  from kimi_k3.capacity.traps import find_traps

  program, loops = hlo.parse(text), LOOPS.get(name, {})
  kernels = {kernel: hlo.layer_of_stack(stacked) for kernel, stacked in KERNELS.get(name, {}).items()}
  traffic = hlo.hbm_bytes(program, kernels, loops)
  return {
    "loops": sorted(hlo.loop_counts(program, loops).values()),
    "collectives": sorted((c.kind, c.where, c.calls, c.bytes, c.groups) for c in hlo.collectives(program, loops)),
    "kernels": hlo.kernels(program, loops),
    "bytes": (traffic.read, traffic.written),
    "copies": [str(copy).split(" (")[0] for copy in hlo.copies(program, loops=loops)],
    "traps": find_traps(program, loops=loops, tokens=8192, width=1024),
    "aliases": program.aliases,
  }


@pytest.mark.parametrize("name", NAMES)
def test_the_compiler_still_writes_what_the_stored_text_holds(made, name):
  assert figures(made(name).text, name) == figures((TEXTS / f"{name}.hlo").read_text(), name)


def test_every_program_has_a_stored_text(small_programs):
  assert set(NAMES) == set(small_programs.PROGRAMS) == {path.stem for path in TEXTS.iterdir()}


def test_stacked_bfloat16_weights_are_copied_before_a_scan_without_the_compile_options(made, small_programs):
  """The reason for COMPILE_OPTIONS. Small stacks are retiled into VMEM, where they take memory all the same."""
  from kimi_k3.capacity import hlo, topology

  offload = {k: v for k, v in topology.FAST_COMPILE_OPTIONS.items() if k not in topology.COMPILE_OPTIONS}
  without = hlo.parse(small_programs.scan(offload).text)
  stack = (5, 1024, 1024)
  assert [c.result.dims for c in hlo.copies(without, into_vmem=True)].count(stack) >= 1
  assert stack not in [c.result.dims for c in hlo.copies(hlo.parse(made("scan").text), into_vmem=True)]


def test_temporary_memory_is_small_and_updates_take_their_arguments_place(made):
  memory = made("scan").memory
  assert memory.alias_bytes == 5 * 64 * 8 * 1024 * 4
  assert memory.temp_bytes < 2**20
  assert memory.argument_bytes == 2 * 5 * 1024 * 1024 * 2 + memory.alias_bytes + 64 * 1024 * 2


@pytest.mark.parametrize(("name", "gib"), [("tpu7x:2x2x1", 94.74), ("v6e:2x4", 31.24)])
def test_the_compiler_names_the_hbm_that_a_device_has(name, gib):
  import jax
  import jax.numpy as jnp
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  from kimi_k3.capacity import topology

  mesh = topology.tpu_mesh(name, {"x": 1})
  huge = jax.ShapeDtypeStruct((120 * 2**10, 2**10, 2**10), jnp.int8, sharding=NamedSharding(mesh, P()))
  with pytest.raises(jax.errors.JaxRuntimeError, match=rf"exceeds available HBM \({gib}G\)"):
    topology.compile_for(mesh, lambda x: x + 1, (huge,))
  assert topology.device_kind(mesh).hbm_bytes == int(gib * 2**30)


def _huge(name: str, gib: int):
  """An array of so many GiB on one device, and the mesh of that device."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  from kimi_k3.capacity import topology

  mesh = topology.tpu_mesh(name, {"x": 1})
  return mesh, jax.ShapeDtypeStruct((gib * 2**10, 2**10, 2**9), jnp.bfloat16, sharding=NamedSharding(mesh, P()))


@pytest.mark.parametrize(
  ("function", "gib", "needed"),
  [
    (lambda x: x[:8, :8] + 1, 120, 120),  # what the error calls temporaries is the argument
    (lambda x: x + 1, 60, 120),  # argument and result
    (lambda x: (x[::2] + x[1::2], x.sum()), 80, 120),
  ],
)
def test_the_error_of_a_program_that_does_not_fit_counts_arguments_and_results(function, gib, needed):
  import jax

  from kimi_k3.capacity import oom, topology

  mesh, array = _huge("tpu7x:2x2x1", gib)
  with pytest.raises(jax.errors.JaxRuntimeError) as raised:
    topology.compile_for(mesh, function, (array,))
  found = oom.read_out_of_memory(raised.value)
  assert found is not None
  assert (found.needed_bytes, found.limit_bytes) == (needed * 2**30, round(94.74 * 2**30))


def test_what_does_not_fit_compiles_with_its_memory_told_when_the_compiler_is_asked_to_go_on():
  """The reason for UNLIMITED_HBM_OPTIONS: 64 GiB of stacked weights, retiled."""
  import jax
  import jax.numpy as jnp

  from kimi_k3.capacity import hlo, oom, topology
  from kimi_k3.capacity.traps import find_traps

  mesh, weights = _huge("tpu7x:2x2x1", 64)
  rows = jax.ShapeDtypeStruct((512, 2**10), jnp.bfloat16, sharding=weights.sharding)
  weights = jax.ShapeDtypeStruct((2**15, 2**10, 2**10), jnp.bfloat16, sharding=weights.sharding)

  def program(weights, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

  def compiled(options):
    return topology.compile_for(mesh, program, (weights, rows), options=options)

  with pytest.raises(jax.errors.JaxRuntimeError) as raised:
    compiled({})
  found = oom.read_out_of_memory(raised.value)
  assert found is not None and found.needed_bytes == 128 * 2**30
  report = compiled(topology.UNLIMITED_HBM_OPTIONS)
  memory = report.memory
  assert memory.argument_bytes == 64 * 2**30 + 2**20
  assert 64 * 2**30 <= memory.temp_bytes < 65 * 2**30
  (trap,) = find_traps(hlo.parse(report.text))
  assert trap.trap == "stack copied at entry" and "64.00 GiB" in trap.detail
  # What fits is the same with it as without.
  kept = [compiled(options).memory for options in (topology.COMPILE_OPTIONS, _unlimited())]
  assert kept[0] == kept[1] and kept[0].temp_bytes < 2**20


def _unlimited() -> dict[str, str]:
  from kimi_k3.capacity import topology

  return {**topology.COMPILE_OPTIONS, **topology.UNLIMITED_HBM_OPTIONS}


def test_a_kernel_too_large_for_vmem_is_not_out_of_hbm():
  import jax
  import jax.numpy as jnp
  from jax.experimental import pallas as pl
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  from kimi_k3.capacity import oom, topology

  mesh = topology.tpu_mesh("tpu7x:2x2x1", {"x": 1})
  array = jax.ShapeDtypeStruct((2**15, 2**12), jnp.bfloat16, sharding=NamedSharding(mesh, P()))

  def body(x, out):
    out[...] = x[...] + 1

  def program(x):
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="too_large")(x)

  with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED: .*vmem.*too_large") as raised:
    topology.compile_for(mesh, program, (array,))
  assert oom.read_out_of_memory(raised.value) is None


def test_the_schedule_of_a_kernel_is_found_by_its_name():
  from kimi_k3.capacity import schedule
  from kimi_k3.errors import InputError

  spec = f"{Path(__file__).with_name('small_programs.py')}:kernel"
  found = schedule.kernel_schedule(spec, "multiply_and_count")
  grid = found.hottest
  assert grid.depth == 1 and 100 < grid.bundles < 1000
  # The product of [64, 1024] and [1024, 256]: the matrix unit has something to do, and so have loads.
  assert grid.used["MXU"] > 0 and grid.used["VLOAD"] > grid.used["VSTORE"] > 0
  with pytest.raises(InputError, match=r"0 kernels match 'other', expected one; .*multiply_and_count"):
    schedule.kernel_schedule(spec, "other")


def test_a_compile_that_fails_says_so():
  from kimi_k3.capacity import schedule
  from kimi_k3.errors import InputError

  with pytest.raises(InputError, match=r"exit code 1: .*small_programs.py has no absent"):
    schedule.kernel_schedules(f"{Path(__file__).with_name('small_programs.py')}:absent")
