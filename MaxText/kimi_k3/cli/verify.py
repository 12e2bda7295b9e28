"""`kimi-k3 verify`: a conversion against the checkpoint it was made from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from kimi_k3.cli.inputs import check_writable, write_whole
from kimi_k3.errors import InputError

DESCRIPTION = """\
Compares OUT, what `kimi-k3 convert SRC OUT` made, with SRC: every leaf must be there, and every value must be, bit for
bit, what convert makes of SRC. Also the record of the conversion, its checksums, config.json and tokenizer files. A
difference is described: one value, experts exchanged, a matrix transposed, rows shifted, a damaged chunk. Of weights in
FP8 the rounding is measured against SRC and held against the bound of the format. Nothing is written but FILE.json.

Exit code 0: all equal; 1: a check failed; 2: SRC is no checkpoint, or OUT no finished conversion.
"""
EPILOG = """\
examples:
  kimi-k3 verify Kimi-K3/ k3-maxtext/                           every value
  kimi-k3 verify Kimi-K3/ k3-maxtext/ --sample 5000             5000 chunks, one of every leaf first
  kimi-k3 verify Kimi-K3/ k3-maxtext/ --report verified.json    the report as JSON too
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
  """Adds the verb to the command line."""
  parser = subparsers.add_parser(
    "verify", help="compare a conversion with its source", description=DESCRIPTION, epilog=EPILOG
  )
  parser.add_argument("src", type=Path, metavar="SRC", help="directory of the released checkpoint")
  parser.add_argument("out", metavar="OUT", help="what was converted from it: a directory, or a URL such as gs://...")
  how_much = parser.add_mutually_exclusive_group()
  how_much.add_argument("--all", action="store_true", help="compare every value (the default)")
  how_much.add_argument("--sample", type=int, metavar="N", help="compare N chunks, the same ones each time")
  parser.add_argument("--report", metavar="FILE.json", help="file to write the report to, outside SRC and OUT")
  parser.add_argument(
    "--workers", type=int, metavar="N", help="chunks compared at a time (default: the CPUs, at most 4)"
  )
  parser.set_defaults(run=run)
  return parser


def run(args: argparse.Namespace) -> int:
  """Compares and says what came of it. Returns the exit code.

  Raises:
    InputError: if SRC is no checkpoint, OUT no finished conversion, or FILE.json cannot be written.
  """
  for flag, value in (("--sample", args.sample), ("--workers", args.workers)):
    if value is not None and value < 1:
      raise InputError(f"{flag} is {value}, expected 1 or more")
  if args.report is not None:
    check_writable(args.report, outside=(args.src, args.out))
  from kimi_k3.convert import index, reader, verify  # Late: --help must not wait for TensorStore.
  from kimi_k3.convert.faults import MAX_LISTED
  from kimi_k3.convert.progress import say

  with index.open_source(args.src) as source:
    for note in source.notes:
      say(note)
    out = reader.open_output(args.out)
    workers = args.workers or min(4, os.cpu_count() or 1)
    report = verify.verify(source, out, sample=args.sample, workers=workers)
  if args.report is not None:
    content = json.dumps(report.as_json(), indent=2).encode() + b"\n"
    write_whole(args.report, lambda file: file.write(content))
  _print(args.out, report, MAX_LISTED)
  return 0 if report.ok else 1


def _print(out: str, report, limit: int) -> None:
  """The report in a few lines, faults last."""
  c = report.compared
  print(
    f"{out}: {c['leaves']:,} leaves, {c['chunks']:,} chunks, {c['bytes']:,} bytes compared, {_percent(c['share'])} of "
    f"all, in {report.seconds:.1f} seconds"
  )
  for check in report.checks:
    print(f"{check.name:<10} {'ok: ' + check.detail if check.ok else 'FAILED'}")
  _print_faults(report.faults, limit)
  fine = "all equal" if c["share"] >= 1 else "all that was compared is equal"
  print(fine if report.ok else f"{sum(not check.ok for check in report.checks)} check(s) failed")


def _print_faults(faults: Sequence[str], limit: int) -> None:
  for fault in faults[:limit]:
    print(f"  {fault}")
  if len(faults) > limit:
    print(f"  and {len(faults) - limit} more")


def _percent(share: float) -> str:
  """100 % only when it is."""
  return "100 %" if share >= 1 else f"{100 * share:.4g} %" if share < 0.999 else "99.9 %"
