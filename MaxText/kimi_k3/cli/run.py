"""`kimi-k3 run maxtext.MODULE ARGS...`: any entry point of MaxText with this model registered."""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys

from kimi_k3.errors import InputError

DESCRIPTION = """\
Registers the model with MaxText, then runs one of MaxText's modules as `python -m MODULE ARGS...` would. Model YAMLs
are found from any config, and `load_parameters_path` in a decode.yml is taken relative to that file.
"""
EPILOG = """\
example:
  kimi-k3 run maxtext.checkpoint_conversion.inspect_checkpoint maxtext model_name=kimi-k3 scan_layers=true
"""


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
  sys.argv = [args.module, *args.arguments]
  runpy.run_module(args.module, run_name="__main__", alter_sys=True)
  return 0
