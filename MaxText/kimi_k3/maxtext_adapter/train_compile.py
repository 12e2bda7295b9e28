"""MaxText's train_compile with the TPU compiler of this package, and its answer in words: fits, or by how much not.

The trainer's step is compiled for a TPU topology on a machine that has none; see docs/training-full-size.md.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kimi_k3.capacity.oom import OutOfMemory, read_out_of_memory
from kimi_k3.capacity.topology import (
  DEVICE_KINDS,
  Memory,
  cross_compile,
  libtpu_version,
  load_tpu_compiler,
  memory,
  no_persistent_cache,
)
from kimi_k3.errors import InputError

MODULE = "maxtext.trainers.pre_train.train_compile"
_GIB = 2**30
_ADVICE = "take more devices, fewer or shorter rows, or a mesh that cuts more"


def run_train_compile(arguments: Sequence[str]) -> None:
  """Compiles the trainer's step as `python -m` of the module would, and says on stderr what a device holds.

  Args:
    arguments: A config file and key=value.

  Raises:
    InputError: if there is no TPU compiler, or the program takes more memory than a device has.
    SystemExit: with the module's own exit code.
  """
  load_tpu_compiler("train_compile")
  _say(f"compiling for TPUs with libtpu {libtpu_version()} on this machine's CPU; nothing is run")
  from absl import app
  from maxtext.trainers.pre_train import train_compile

  with _judged(train_compile), cross_compile(), no_persistent_cache():
    sys.argv = [MODULE, *arguments]
    app.run(train_compile.main)


@contextmanager
def _judged(module: Any) -> Iterator[None]:
  """Looks at what the module compiles, by the function that does it."""
  upstream = module.jit_and_compile

  def compile_and_judge(*args: Any, **kwargs: Any) -> Any:
    mesh = inspect.signature(upstream).bind(*args, **kwargs).arguments["mesh"]
    try:
      compiled = upstream(*args, **kwargs)
    except Exception as error:
      if found := read_out_of_memory(error):
        raise InputError(too_large(found, mesh.size)) from error
      raise
    kind = DEVICE_KINDS.get(mesh.devices.flat[0].device_kind)
    _say(judge(memory(compiled), None if kind is None else kind.hbm_bytes, mesh.size))
    return compiled

  module.jit_and_compile = compile_and_judge
  try:
    yield
  finally:
    module.jit_and_compile = upstream


def too_large(found: OutOfMemory, devices: int) -> str:
  """Returns what the compiler's refusal means, in one line."""
  needed, limit, over = (x / _GIB for x in (found.needed_bytes, found.limit_bytes, found.exceeded_bytes))
  return (
    f"the training step does not fit on {devices} devices: each needs at least {needed:.2f} GiB and has {limit:.2f}, "
    f"over by {over:.2f}: {_ADVICE}"
  )


def judge(taken: Memory, limit_bytes: int | None, devices: int) -> str:
  """Returns what a compiled step takes, in one line.

  Args:
    taken: By one device.
    limit_bytes: What one has; None where that is not known of its kind.
    devices: How many there are.

  Raises:
    InputError: if it is more than a device has, as the compiler lets pass with topology.UNLIMITED_HBM_OPTIONS.
  """
  total = taken.total_bytes / _GIB
  parts = (
    f"arguments {taken.argument_bytes / _GIB:.2f}, temporaries {taken.temp_bytes / _GIB:.2f}, "
    f"new results {(taken.output_bytes - taken.alias_bytes) / _GIB:.2f}, code {taken.code_bytes / _GIB:.2f}"
  )
  if limit_bytes is None:
    return f"on {devices} devices the training step takes {total:.2f} GiB of each ({parts})"
  limit = limit_bytes / _GIB
  if taken.total_bytes > limit_bytes:
    raise InputError(
      f"the training step does not fit on {devices} devices: each needs {total:.2f} GiB ({parts}) and has {limit:.2f}, "
      f"over by {total - limit:.2f}: {_ADVICE}"
    )
  return f"the training step fits on {devices} devices: each holds {total:.2f} GiB of {limit:.2f} ({parts})"


def _say(line: str) -> None:
  print(f"kimi-k3: {line}", file=sys.stderr, flush=True)
