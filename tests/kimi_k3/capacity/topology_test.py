"""The TPU compiler on a machine without a TPU."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import types

import pytest

pytestmark = pytest.mark.skipif(
  (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="libtpu exists for Linux on x86-64 only"
)


@pytest.fixture(scope="module")
def topology():
  from kimi_k3.capacity import topology

  return topology


def test_two_devices_a_chip_of_tpu7x_and_one_of_v6e(topology):
  assert len(topology.tpu_devices("tpu7x:2x2x1")) == 8
  devices = topology.tpu_devices("v6e:2x4")
  assert len(devices) == 8 and {device.device_kind for device in devices} <= set(topology.DEVICE_KINDS)
  for example in topology.TOPOLOGY_EXAMPLES:
    assert topology.tpu_devices(example)


@pytest.mark.parametrize("name", ["tpu7x:3x3x3", "tpu9:2x2", "tpu7x", ""])
def test_an_unknown_topology_is_named_with_examples(topology, name):
  from kimi_k3.errors import InputError

  with pytest.raises(InputError, match=rf"topology '{name}': libtpu \S+ does not know it .*for example tpu7x:2x2x1"):
    topology.tpu_devices(name)


def test_a_mesh_larger_than_the_topology_is_an_error(topology):
  from kimi_k3.errors import InputError

  with pytest.raises(InputError, match=r"8 devices found, the mesh \{'x': 9\} takes 9"):
    topology.tpu_mesh("tpu7x:2x2x1", {"x": 9})
  mesh = topology.tpu_mesh("tpu7x:2x2x1", {"data": 2, "model": 3})
  assert dict(mesh.shape) == {"data": 2, "model": 3}
  assert topology.device_kind(mesh).hbm_bytes == int(94.74 * 2**30)


def test_without_libtpu_the_error_says_what_to_install(topology, monkeypatch, tmp_path):
  from kimi_k3.errors import InputError

  monkeypatch.setattr(topology, "LIBTPU_DIRECTORY", tmp_path)
  monkeypatch.setattr(topology.importlib.util, "find_spec", lambda _: None)
  with pytest.raises(
    InputError, match=r"topology tpu7x:2x2x1: no libtpu found, .*pip install 'maxtext-kimi-k3\[plan\]'"
  ):
    topology.tpu_devices("tpu7x:2x2x1")


def test_a_device_of_unknown_size_is_an_error(topology):
  import numpy as np

  from kimi_k3.errors import InputError

  mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(device_kind="TPU v2")]))
  with pytest.raises(InputError, match="device kind TPU v2: HBM and bandwidth are not known"):
    topology.device_kind(mesh)


def test_a_program_is_compiled_for_32_devices_with_its_memory_and_its_text(topology):
  import jax
  import jax.numpy as jnp
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  from kimi_k3.capacity import hlo

  mesh = topology.tpu_mesh("tpu7x:2x2x4", {"x": 32})
  rows = jax.ShapeDtypeStruct((32, 8, 1024), jnp.float32, sharding=NamedSharding(mesh, P("x")))
  add = jax.shard_map(lambda x: x + jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
  found = topology.compile_for(mesh, add, (rows,), donate=(0,), options=topology.FAST_COMPILE_OPTIONS)
  assert (found.memory.argument_bytes, found.memory.output_bytes, found.memory.alias_bytes) == (2**15, 2**15, 2**15)
  assert found.memory.total_bytes == 2**15 + found.memory.temp_bytes + found.memory.code_bytes
  (row,) = hlo.collectives(hlo.parse(found.text))
  assert (row.kind, row.calls, row.bytes) == ("all-reduce", 1, 2**15)


def test_what_is_compiled_depends_on_no_default_of_this_process_and_leaves_the_cache_as_it_was(topology):
  import jax
  import jax.numpy as jnp
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  mesh = topology.tpu_mesh("tpu7x:2x2x1", {"x": 1})
  square = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=NamedSharding(mesh, P()))
  assert jax.config.jax_default_matmul_precision == "highest"  # tests/conftest.py
  before = jax.config.jax_enable_compilation_cache
  default = topology.compile_for(mesh, lambda x: x @ x, (square,))
  highest = topology.compile_for(mesh, lambda x: x @ x, (square,), matmul_precision="highest")
  assert "operand_precision={highest,highest}" in highest.text
  assert "highest" not in default.text
  assert jax.config.jax_enable_compilation_cache == before


def test_the_compiler_beside_site_packages_leaves_jax_to_the_cpu_in_silence():
  """Without JAX_PLATFORMS: JAX would load a libtpu that it can import, and libtpu would say that it finds no TPU."""
  environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "PYTHONPATH")}
  program = "import jax; print(jax.devices()[0].platform)"
  run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
  assert (run.stdout, run.stderr) == ("cpu\n", "")
