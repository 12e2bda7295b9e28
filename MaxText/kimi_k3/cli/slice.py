"""`kimi-k3 slice`: a smaller valid checkpoint out of a released one."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from kimi_k3.cli import sizes
from kimi_k3.errors import InputError

DESCRIPTION = """\
Cuts a smaller checkpoint out of a released one, in the released layout: one range of layers, the first experts of each
layer. Byte ranges are copied, so every value is the source's. config.json and the index are rewritten, tokenizer and
code files copied; vision tensors are not carried. `kimi-k3 convert` takes the result as it takes the release.

Layers are renumbered from 0. first_k_dense_replace shrinks by the layers left out in front: 0 if the range starts
after the dense layers. Where the range does not start at 0, its first layer takes the embedding as its input and the
attention-residual snapshots restart there, so these layers compute something else than inside the whole model.
With fewer experts than num_experts_per_token, that number is lowered too. Embedding, final norm and head are kept.

SRC is only read. OUT appears when it is complete; a run that was killed starts over.
"""
EPILOG = """\
examples:
  kimi-k3 slice Kimi-K3/ k3-small/ --layers 0-7 --experts 64 --dry-run    what would be written
  kimi-k3 slice Kimi-K3/ k3-small/ --layers 0-7 --experts 64
  kimi-k3 convert k3-small/ k3-small-maxtext/
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
  """Adds the verb to the command line."""
  parser = subparsers.add_parser(
      "slice", help="a smaller checkpoint out of a released one", description=DESCRIPTION, epilog=EPILOG,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )  # fmt: skip
  parser.add_argument("src", type=Path, metavar="SRC", help="directory of the released checkpoint")
  parser.add_argument("out", metavar="OUT", help="directory to make")
  parser.add_argument("--layers", metavar="A-B", help="0-based, both ends included (default: all)")
  parser.add_argument("--experts", metavar="N", help="the first N of each layer (default: all)")
  parser.add_argument("--shard-size", metavar="SIZE", default="5GB", help="of a file, at most (default: %(default)s)")
  parser.add_argument("--dry-run", action="store_true", help="check SRC, print what would be written, write nothing")
  parser.add_argument("--overwrite", action="store_true", help="replace an OUT that holds a slice")
  parser.set_defaults(run=run)
  return parser


def run(args: argparse.Namespace) -> int:
  """Slices, or says what it would do. Returns the exit code.

  Raises:
    InputError: if the source, the options or OUT do not allow it; nothing has been written then.
  """
  from kimi_k3.convert import index, slicing  # Late: --help must not wait for numpy.
  from kimi_k3.convert.progress import say

  options = slicing.Options(
    layers=None if args.layers is None else slicing.parse_layers(args.layers),
    experts=None if args.experts is None else _experts(args.experts),
    shard_bytes=sizes.parse("--shard-size", args.shard_size),
  )
  if options.layers is None and options.experts is None:
    raise InputError("neither --layers nor --experts is given: say what to keep, such as --layers 0-7 --experts 64")
  started = time.monotonic()
  with index.open_source(args.src) as source:
    for note in source.notes:
      say(note)
    cut = slicing.make_slice(source, options)
    done = slicing.check_output(args.out, source, cut, overwrite=args.overwrite)
    for note in cut.notes:
      say(note)
    held = f"{len(cut.source.tensors):,} tensors, {cut.nbytes} bytes, {len(cut.files)} shards"
    if done:
      say(f"{args.out}: already holds this slice, nothing written")
    if args.dry_run:
      free = slicing.free_bytes(args.out)
      print(f"{args.out}: would hold {held}")
      print(f"disk: {sizes.spelled(free)} free: {'enough' if done or free >= cut.nbytes else 'NOT ENOUGH'}")
      return 0
    if done:
      slicing.tidy(args.out)
    else:
      _write(args.out, cut, overwrite=args.overwrite)
  print(f"{args.out}: {held}, {time.monotonic() - started:.1f} seconds")
  return 0


def _write(out: str, cut, *, overwrite: bool) -> None:
  from kimi_k3.convert import slicing
  from kimi_k3.convert.progress import Progress

  with Progress("slice", cut.nbytes) as progress:
    slicing.write_slice(out, cut, progress.add, overwrite=overwrite)


def _experts(text: str) -> int:
  if not text.isascii() or not text.isdigit() or len(text) > 9:
    raise InputError(f"--experts is {text!r}, expected a number of experts such as 64")
  return int(text)
