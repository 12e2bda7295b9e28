"""`kimi-k3 run maxtext.MODULE ARGS...`: any entry point of MaxText with this model registered."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kimi_k3.errors import InputError

DESCRIPTION = """\
Registers the model with MaxText, then runs one of MaxText's modules as `python -m MODULE ARGS...` would. Model YAMLs
are found from any config, and `load_parameters_path` in a decode.yml is taken relative to that file.

maxtext.trainers.pre_train.train_compile finds the TPU compiler by itself and needs no TPU. It says what a device holds,
or ends with exit code 2 and by how much the training step does not fit.
"""
EPILOG = """\
example:
  kimi-k3 run maxtext.checkpoint_conversion.inspect_checkpoint maxtext model_name=kimi-k3 scan_layers=true
  kimi-k3 run maxtext.trainers.pre_train.train_compile configs/train-full.yml compile_topology=tpu7x-1024
"""
TRAIN_COMPILE = "maxtext.trainers.pre_train.train_compile"


def add_parser(subparsers) -> argparse.ArgumentParser:
  """Adds the verb to the command line."""
  parser = subparsers.add_parser(
    "run", help="a module of MaxText, with the model", description=DESCRIPTION, epilog=EPILOG
  )
  parser.add_argument("module", metavar="maxtext.MODULE", help="module to run")
  parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
  return parser


def run(args: argparse.Namespace) -> int:
  """Runs the module; its own exit code passes through."""
  if args.module == TRAIN_COMPILE:
    # Read when JAX is imported: nothing is run here, and devices that there are stay with others.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
  from kimi_k3.maxtext_adapter import register

  if args.module.split(".")[0] != "maxtext":
    raise InputError(f"{args.module}: expected a module of maxtext, such as maxtext.trainers.pre_train.train")
  register()
  try:
    found = importlib.util.find_spec(args.module)
  except ModuleNotFoundError:
    found = None
  if found is None:
    raise InputError(f"{args.module}: MaxText has no such module")
  with _one_line(args.arguments):
    if args.module == TRAIN_COMPILE:
      from kimi_k3.maxtext_adapter.train_compile import run_train_compile

      run_train_compile(args.arguments)
      return 0
    sys.argv = [args.module, *args.arguments]
    runpy.run_module(args.module, run_name="__main__", alter_sys=True)
  return 0


@contextmanager
def _one_line(arguments: Sequence[str]) -> Iterator[None]:
  """A config that is refused is told in one line, as by every other verb."""
  import pydantic

  from kimi_k3.maxtext_adapter.register import ConfigError
  from kimi_k3.maxtext_adapter.settings import validation_faults

  config = arguments[0] if arguments else "config"
  try:
    yield
  except pydantic.ValidationError as error:
    raise InputError(f"{config}: {validation_faults(error)}") from error
  except AssertionError as error:
    if not str(error).startswith("Number of devices per slice"):  # what MaxText says of a mesh
      raise
    raise InputError(f"{config}: {' '.join(str(error).split())}: set the ici_* sizes so that they do") from error
  except ConfigError as error:
    raise InputError(f"{config}: {' '.join(str(error).split())}") from error
