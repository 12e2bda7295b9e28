"""The TPU compiler on a machine without a TPU: devices of a topology, compiling for them, what the program takes.

libtpu holds the compiler and needs no hardware for it. Program and bytes only: no model, no MaxText.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3.errors import InputError

if TYPE_CHECKING:
  import jax

# Read by libtpu when it is loaded: no question to a metadata server, no lock against a second process, one host.
# The type only quietens it: the topology's name decides what is compiled for.
LIBTPU_ENVIRONMENT: Mapping[str, str] = {
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "tpu7x-32",
}
TOPOLOGY_EXAMPLES = ("tpu7x:2x2x1", "tpu7x:2x2x4", "v6e:2x2", "v6e:2x4")
# Where `make install` puts libtpu: beside site-packages, since JAX loads any libtpu it can import and asks it for TPUs,
# which prints lines nobody asked for. See docs/decisions/0015-reading-compiled-programs.md.
LIBTPU_DIRECTORY = Path(sys.prefix) / "tpu-compiler"

# Without the first, stacked bfloat16 weights are retiled, which is to say copied whole, before a scan over layers: temp
# memory equals the weights. It belongs to every program of this package, on a TPU too.
COMPILE_OPTIONS: Mapping[str, str] = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}
# For tests: without collectives on the SparseCore compiles are quicker. A reduce-scatter then becomes an all-reduce in
# a fusion, at times with a collective-permute more: what is counted for a claim is counted with COMPILE_OPTIONS.
FAST_COMPILE_OPTIONS: Mapping[str, str] = COMPILE_OPTIONS | {
  f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "false"
  for kind in ("all_reduce", "all_gather", "reduce_scatter")
}

# Compiles what does not fit, for the memory of it: libtpu 0.0.50.1 then reports arguments, temporaries and code as of
# any program, still scheduled for the HBM that there is, and a program that fits is the same with it as without. Only
# after an error that oom.read_out_of_memory reads: a kernel too large for VMEM is not refused then, its compile may
# never end. To be added to other options; what it compiles does not run.
UNLIMITED_HBM_OPTIONS: Mapping[str, str] = {"xla_tpu_no_crash_on_oom": "true"}


@dataclasses.dataclass(frozen=True)
class DeviceKind:
  """What one device of a kind offers. A chip of TPU7x has two devices, one of v6e is one.

  Attributes:
    hbm_bytes: HBM that a program may take, less than what the chip has.
    hbm_bytes_per_second: Peak bandwidth of a device's HBM.
  """

  hbm_bytes: int
  hbm_bytes_per_second: float


# By JAX's device_kind. HBM: "available HBM" in the error of libtpu 0.0.50.1 for a program that does not fit, exact to a
# hundredth of a GiB. Bandwidth: https://docs.cloud.google.com/tpu/docs/tpu7x, 7380 GB/s a chip of two devices, and
# https://docs.cloud.google.com/tpu/docs/v6e, 1638 GB/s.
DEVICE_KINDS: Mapping[str, DeviceKind] = {
  "TPU7x": DeviceKind(hbm_bytes=int(94.74 * 2**30), hbm_bytes_per_second=3.69e12),
  "TPU v6 lite": DeviceKind(hbm_bytes=int(31.24 * 2**30), hbm_bytes_per_second=1.638e12),
}


@dataclasses.dataclass(frozen=True)
class Memory:
  """What one device holds while a program runs, in bytes.

  Attributes:
    argument_bytes: Arguments.
    output_bytes: Results, those that take an argument's place included.
    alias_bytes: Results that take the place of a donated argument.
    temp_bytes: Temporaries, the most at one time.
    code_bytes: The program itself.
  """

  argument_bytes: int
  output_bytes: int
  alias_bytes: int
  temp_bytes: int
  code_bytes: int

  @property
  def total_bytes(self) -> int:
    """Arguments, results that are new, temporaries and code."""
    return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes


@dataclasses.dataclass(frozen=True)
class Report:
  """A compiled program and what making it took.

  Attributes:
    compiled: JAX's own object.
    memory: Bytes on one device.
    lower_seconds: Tracing and lowering.
    compile_seconds: The TPU compiler.
  """

  compiled: jax.stages.Compiled
  memory: Memory
  lower_seconds: float
  compile_seconds: float

  @functools.cached_property
  def text(self) -> str:
    """The scheduled HLO, for kimi_k3.capacity.hlo.parse."""
    text = self.compiled.as_text()
    assert text is not None
    return text


def has_libtpu() -> bool:
  """Whether the TPU compiler is here: importable, or where `make install` puts it."""
  return importlib.util.find_spec("libtpu") is not None or (LIBTPU_DIRECTORY / "libtpu").is_dir()


def libtpu_version() -> str:
  """Returns the release of libtpu, which every figure of the compiler belongs to.

  Raises:
    InputError: if libtpu is absent.
  """
  _find_libtpu("the version of libtpu")
  return importlib.metadata.version("libtpu")


def load_tpu_compiler(what: str) -> None:
  """Makes libtpu importable and sets LIBTPU_ENVIRONMENT where the caller's environment has nothing of that name.

  To be called before libtpu is loaded.

  Args:
    what: Needs it, for the error.

  Raises:
    InputError: if libtpu is absent.
  """
  _find_libtpu(what)
  for name, value in LIBTPU_ENVIRONMENT.items():
    os.environ.setdefault(name, value)


def _find_libtpu(what: str) -> None:
  """Makes libtpu importable, or says how to get it."""
  if not has_libtpu():
    raise InputError(
      f"{what}: no libtpu found, expected the TPU compiler in this environment: "
      "`make install` in a checkout, or pip install 'maxtext-kimi-k3[plan]'"
    )
  if importlib.util.find_spec("libtpu") is None:
    sys.path.append(str(LIBTPU_DIRECTORY))


def tpu_devices(topology: str, *, slices: int = 1) -> list[Any]:
  """Returns the devices of a topology, as good for compiling as real ones and for nothing else.

  Sets LIBTPU_ENVIRONMENT where the caller's environment has nothing of that name, before libtpu is loaded.

  Args:
    topology: Kind and shape in chips: "tpu7x:2x2x4" is 16 chips and 32 devices.
    slices: Slices of that shape, joined by the data center's network. Devices of several have a `slice_index`.

  Raises:
    InputError: if libtpu is absent, or knows no such topology.
  """
  if slices < 1:
    raise InputError(f"topology {topology}: {slices} slices, expected 1 or more")
  load_tpu_compiler(f"topology {topology}")
  import jax
  from jax.experimental import topologies

  try:
    if not topology:
      raise ValueError("an empty name")  # for JAX it is the TPU of this machine
    several = {"num_slices": slices} if slices > 1 else {}
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **several).devices)
  except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:
    reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
    raise InputError(
      f"topology {topology!r}: libtpu {libtpu_version()} does not know it ({reason}), "
      f"expected for example {', '.join(TOPOLOGY_EXAMPLES)}"
    ) from error


def tpu_mesh(topology: str, axes: Mapping[str, int], *, slices: int = 1) -> jax.sharding.Mesh:
  """Returns a mesh of the first devices of a topology, in the order libtpu names them.

  Args:
    topology: As for tpu_devices.
    axes: Sizes by name of axis, outermost first.
    slices: As for tpu_devices; one after the other, so that the outermost axes lie across them.

  Raises:
    InputError: as tpu_devices, and if the topology has too few devices.
  """
  devices = tpu_devices(topology, slices=slices)
  count = math.prod(axes.values())
  if not 0 < count <= len(devices):
    raise InputError(
      f"topology {topology}: {len(devices)} devices found, the mesh {dict(axes)} takes {count}: "
      "take a larger topology or smaller axes"
    )
  import jax
  import numpy as np

  return jax.sharding.Mesh(np.asarray(devices[:count]).reshape(tuple(axes.values())), tuple(axes))


def device_kind(mesh: jax.sharding.Mesh) -> DeviceKind:
  """Returns what a device of the mesh offers.

  Raises:
    InputError: if the kind is not in DEVICE_KINDS.
  """
  kind = mesh.devices.flat[0].device_kind
  if kind not in DEVICE_KINDS:
    raise InputError(f"device kind {kind}: HBM and bandwidth are not known, expected {', '.join(DEVICE_KINDS)}")
  return DEVICE_KINDS[kind]


def compile_for(
  mesh: jax.sharding.Mesh,
  function: Any,
  args: Sequence[Any] = (),
  *,
  donate: Sequence[int] = (),
  static: Sequence[int] = (),
  options: Mapping[str, str] = COMPILE_OPTIONS,
  matmul_precision: str = "default",
) -> Report:
  """Returns a program compiled for the devices of a mesh.

  JAX's persistent cache is left out: it can write such a program, but not read it again.

  Args:
    mesh: From tpu_mesh. It is the abstract mesh while the function is traced, so that shard_map needs no other.
    function: A function of the arguments, a jitted one, or what its `.lower` returned.
    args: Trees of ShapeDtypeStruct whose shardings name this mesh; static arguments as they are.
    donate: Positions of arguments whose memory the results may take. Not with a function that is jitted already.
    static: Positions of arguments that are no arrays.
    options: The compiler's. What is left out of COMPILE_OPTIONS costs memory, see there.
    matmul_precision: Of products that name none, whatever JAX_DEFAULT_MATMUL_PRECISION says here: "highest", as in this
      package's tests, is another program, and one that Mosaic refuses for bfloat16.

  Raises:
    jax.errors.JaxRuntimeError: whatever the compiler refuses, a program that does not fit among it.
  """
  import jax

  start = time.perf_counter()
  lowered = function
  if not isinstance(function, jax.stages.Lowered):
    if hasattr(function, "lower"):
      assert not donate and not static, "the jitted function names its own donated and static arguments"
    else:
      function = jax.jit(function, donate_argnums=tuple(donate), static_argnums=tuple(static))
    with (
      jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
      jax.default_matmul_precision(matmul_precision),
      cross_compile(),
    ):
      lowered = function.lower(*args)
  middle = time.perf_counter()
  with no_persistent_cache():
    compiled = lowered.compile(dict(options))
  return Report(compiled, memory(compiled), middle - start, time.perf_counter() - middle)


def memory(compiled: jax.stages.Compiled) -> Memory:
  """Returns what a compiled program takes on one device."""
  found = compiled.memory_analysis()
  assert found is not None, "this backend has no memory analysis"
  return Memory(
    argument_bytes=found.argument_size_in_bytes,
    output_bytes=found.output_size_in_bytes,
    alias_bytes=found.alias_size_in_bytes,
    temp_bytes=found.temp_size_in_bytes,
    code_bytes=found.generated_code_size_in_bytes,
  )


@contextlib.contextmanager
def no_persistent_cache() -> Iterator[None]:
  """Switches JAX's persistent cache off, also where this process has used it: it cannot read a TPU's program again."""
  import jax
  from jax.experimental.compilation_cache import compilation_cache

  before = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@contextlib.contextmanager
def cross_compile() -> Iterator[None]:
  """Lets tokamax lower kernels for a TPU that this machine does not have; without it they refuse.

  Where the heuristics of its configurations ask for the device that is absent, name the tiles in the call.
  """
  from tokamax import config

  with config.cross_compile(True):
    yield
