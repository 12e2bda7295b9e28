"""`kimi-k3 convert`: released safetensors to a checkpoint that MaxText loads."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from kimi_k3.convert import index, plan
from kimi_k3.errors import InputError

DESCRIPTION = """\
Converts a released Kimi K3 or Kimi-Linear checkpoint (config.json and *.safetensors) to an Orbax checkpoint for
MaxText. OUT/0/items is what load_parameters_path takes, OUT/decode.yml a complete config for `kimi-k3 decode`.

All headers are checked first: every stored tensor is used, or ignored by a rule, or named in an error. SRC is only
read. OUT appears when it is complete; the same command once more finds it and does nothing.
"""
EPILOG = """\
examples:
  kimi-k3 convert Kimi-K3/ k3-maxtext/ --dry-run    what would be written: leaves, bytes, folding
  kimi-k3 convert Kimi-K3/ k3-maxtext/              everything as stored: packed experts stay packed
  kimi-k3 convert Kimi-K3/ k3-bf16/ --experts bf16  routed experts decoded to bfloat16 (four times their size)
  kimi-k3 decode k3-maxtext/decode.yml prompt="Hello"
"""
# Accepted so that scripts can be written now; each is refused by name until it does something.
_NOT_YET = {"part": "--part", "finish": "--finish", "ram_budget": "--ram-budget"}


def add_parser(subparsers) -> argparse.ArgumentParser:
  """Adds the verb to the command line."""
  parser = subparsers.add_parser(
      "convert", help="released safetensors to a MaxText checkpoint", description=DESCRIPTION, epilog=EPILOG,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )  # fmt: skip
  parser.add_argument("src", type=Path, metavar="SRC", help="directory of the released checkpoint")
  parser.add_argument("out", type=Path, metavar="OUT", help="directory to make")
  parser.add_argument(
    "--scan",
    action=argparse.BooleanOptionalAction,
    help="fold layers into scanned blocks of four (default: where they fold)",
  )
  parser.add_argument(
      "--experts", choices=plan.EXPERT_CHOICES, default="as-stored",
      help="routed experts: as stored, packed, or decoded; fp8-block is not yet supported (default: %(default)s)",
  )  # fmt: skip
  parser.add_argument(
      "--dense", choices=plan.DENSE_CHOICES, default="as-stored",
      help="all other matrices; fp8-block is not yet supported (default: %(default)s)",
  )  # fmt: skip
  parser.add_argument("--dry-run", action="store_true", help="check SRC, print the plan, write nothing")
  parser.add_argument("--overwrite", action="store_true", help="replace an OUT that holds another conversion")
  parser.add_argument(
    "--workers", type=int, metavar="N", help="leaves written at a time (default: the CPUs, at most 4)"
  )
  parser.add_argument("--ram-budget", metavar="BYTES", help="not yet supported")
  parser.add_argument("--part", metavar="i/n", help="not yet supported")
  parser.add_argument("--finish", action="store_true", help="not yet supported")
  parser.set_defaults(run=run)
  return parser


def run(args: argparse.Namespace) -> int:
  """Converts, or says what it would do. Returns the exit code.

  Raises:
    InputError: if the source, the options or OUT do not allow it; nothing has been written then.
  """
  _check_flags(args)
  from kimi_k3.convert import output  # Late: --help must not wait for TensorStore.

  started = time.monotonic()
  with index.open_source(args.src) as source:
    planned = plan.make_plan(source, plan.Options(scan=args.scan, experts=args.experts, dense=args.dense))
    done = output.check_output(args.out, source, planned, overwrite=args.overwrite)
    scan = "--scan" if planned.scan else "--no-scan"
    _say(f"{args.src}: {len(source.tensors):,} tensors, {planned.num_parameters:,} weights; {scan}")
    if done:
      _say(f"{args.out}: already holds this conversion, nothing written")
    if args.dry_run:
      print(plan.summary(planned))
      return 0
    if not done:
      workers = args.workers or output.default_workers()
      output.convert(args.out, source, planned, workers=workers, command=_command(args, planned.options))
  print(f"{args.out}: {len(planned.leaves)} leaves, {planned.nbytes} bytes, {time.monotonic() - started:.1f} seconds")
  return 0


def _check_flags(args: argparse.Namespace) -> None:
  for field, flag in _NOT_YET.items():
    if getattr(args, field) not in (None, False):
      raise InputError(f"{flag}: not yet supported; leave it out to convert in one process")
  if args.workers is not None and args.workers < 1:
    raise InputError(f"--workers is {args.workers}, expected 1 or more")


def _command(args: argparse.Namespace, options: dict) -> str:
  """The command that gives this result, with the defaults spelled out."""
  scan = "--scan" if options["scan"] else "--no-scan"
  words = ("kimi-k3", "convert", str(args.src), str(args.out), scan, "--experts", options["experts"])
  return shlex.join(words)


def _say(line: str) -> None:
  print(line, file=sys.stderr)
