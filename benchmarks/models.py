"""A model for benchmarks that need all of it: the config and checkpoint of a preset, and engines on it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import workloads

from kimi_k3.errors import InputError
from kimi_k3.resources import demo_dir

# Forms of one computation round differently in bfloat16, and the demo's logits have ties there.
FLOAT32 = ("dtype=float32", "matmul_precision=highest")


def add_config(found: argparse.ArgumentParser) -> None:
  """Adds --config and key=value, which `checkpoint` and `make_engine` read."""
  found.add_argument(
    "--config", metavar="CONFIG.yml", help="of a converted checkpoint (preset tiny: the demo's, converted for the run)"
  )
  found.add_argument("settings", nargs="*", metavar="key=value", help="MaxText's settings")


def settings(args: argparse.Namespace) -> list[str]:
  """Returns the settings given; of the preset tiny behind those of float32 arithmetic."""
  return [*(FLOAT32 if args.preset == "tiny" else ()), *args.settings]


@contextlib.contextmanager
def checkpoint(args: argparse.Namespace) -> Iterator[str]:
  """Gives the path of the config: what --config says, or the demo's checkpoint, converted into a temporary directory.

  Raises:
    InputError: if the preset is k3 and --config is not given.
  """
  if args.config is not None:
    yield args.config
    return
  if args.preset != "tiny":
    raise InputError(
      f"--preset {args.preset} needs --config: the decode.yml of a converted K3, or a config as configs/tpu7x-32.yml"
    )
  with tempfile.TemporaryDirectory() as directory:
    yield str(convert_demo(Path(directory) / "k3-nano"))


def convert_demo(out: Path) -> Path:
  """Converts the checkpoint that ships with the package and returns the path of its decode.yml."""
  from kimi_k3.cli.main import main

  with contextlib.redirect_stdout(io.StringIO()):
    code = main(["convert", str(demo_dir() / "checkpoint"), str(out)])
  if code:
    raise InputError(f"converting the demo's checkpoint ended with exit code {code}")
  return out / "decode.yml"


def read_config(path: str, given: Sequence[str], *, slots: int, max_prompt: int, max_length: int) -> Any:
  """Returns MaxText's config with these sizes. Raises InputError if the settings name others."""
  import jax

  from kimi_k3.maxtext_adapter import settings as reading

  return reading.read_config(
    path,
    given,
    per_device_batch_size=slots / jax.device_count(),  # may be a part of one: rows are then spread over devices
    max_prefill_predict_length=max_prompt,
    max_target_length=max_length,
  )


def make_engine(path: str, given: Sequence[str], work: workloads.Generation) -> Any:
  """Returns an engine with the slots and caches of a workload, all slots empty.

  Of the preset tiny it is kept, compiled programs and all: several benchmarks in one process then share it. Those that
  use it release their slots.
  """
  make = _tiny_engine if work.preset == "tiny" else _engine
  return make(path, tuple(given), work.slots, work.max_prompt, work.max_length)


def _engine(path: str, given: tuple[str, ...], slots: int, max_prompt: int, max_length: int) -> Any:
  from kimi_k3.maxtext_adapter.engine import make_engine as make

  return make(read_config(path, given, slots=slots, max_prompt=max_prompt, max_length=max_length))


_tiny_engine = functools.cache(_engine)


def prompt_ids(vocab_size: int, length: int, seed: int) -> Any:
  """Returns random token ids [T] of a seed, without the last 32 of the vocabulary, which are special in this family."""
  import numpy as np

  return np.random.default_rng(seed).integers(0, vocab_size - 32, length).astype(np.int32)


def padded(ids: Any, limit: int) -> Any:
  """Returns ids in the bucket that generation would put them into."""
  import numpy as np

  from kimi_k3.generate.lengths import bucket

  found = np.zeros(bucket(len(ids), limit), np.int32)
  found[: len(ids)] = ids
  return found
