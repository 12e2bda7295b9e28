"""`kimi-k3 export`: a conversion back to released safetensors."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from kimi_k3.cli import sizes
from kimi_k3.errors import InputError

DESCRIPTION = """\
Writes what `kimi-k3 convert SRC OUT` made back in the released layout: shards of safetensors under the released names,
in the order of the model, their index, config.json and tokenizer files. Of an as-stored conversion every text tensor is
byte for byte that of SRC. Of --experts bf16 the experts are bfloat16 and config.json no longer says they are packed.
Rounded formats (mxfp4 from bfloat16, fp8-block) are refused: no release stores them, export the as-stored conversion.

The vision tensors are not in OUT: --vision-from copies them from SRC. HF_DIR appears when it is complete. Stopped, the
same command goes on in HF_DIR.partial: shards that were done are read once and kept if they are what was written. What
is read of OUT is compared with the checksums that convert recorded.
"""
EPILOG = """\
examples:
  kimi-k3 export k3-maxtext/ Kimi-K3-again/ --dry-run                 what would be written
  kimi-k3 export k3-maxtext/ Kimi-K3-again/ --vision-from Kimi-K3/    the whole checkpoint
  kimi-k3 export k3-bf16/ Kimi-K3-bf16/ --shard-size 10GB             experts in bfloat16
"""
DEFAULT_SHARD_SIZE = "5GB"


def add_parser(subparsers) -> argparse.ArgumentParser:
  """Adds the verb to the command line."""
  parser = subparsers.add_parser(
    "export", help="a conversion back to released safetensors", description=DESCRIPTION, epilog=EPILOG
  )
  parser.add_argument("out", metavar="OUT", help="what was converted: a directory, or a URL such as gs://...")
  parser.add_argument("hf_dir", metavar="HF_DIR", help="directory to make")
  parser.add_argument("--vision-from", type=Path, metavar="SRC", help="checkpoint to copy the vision tensors from")
  parser.add_argument(
      "--shard-size", metavar="BYTES", default=DEFAULT_SHARD_SIZE,
      help="of the tensors of a shard: 5GB (1000 cubed), 5G or 5GiB (1024 cubed), a number (default: %(default)s)",
  )  # fmt: skip
  parser.add_argument("--dry-run", action="store_true", help="check OUT and HF_DIR, print the plan, write nothing")
  parser.add_argument("--overwrite", action="store_true", help="replace an HF_DIR that holds an export")
  parser.add_argument(
    "--workers", type=int, metavar="N", help="chunks written at a time (default: the CPUs, at most 4)"
  )
  parser.set_defaults(run=run)
  return parser


def run(args: argparse.Namespace) -> int:
  """Exports, or says what it would do. Returns the exit code.

  Raises:
    InputError: if OUT, its format or HF_DIR do not allow it, or if the work was stopped; HF_DIR is as it was then.
  """
  shard_bytes = sizes.parse("--shard-size", args.shard_size)
  if args.workers is not None and args.workers < 1:
    raise InputError(f"--workers is {args.workers}, expected 1 or more")
  from kimi_k3.convert import export, index, reader  # Late: --help must not wait for TensorStore.
  from kimi_k3.convert.progress import say

  started = time.monotonic()
  out = reader.open_output(args.out)
  vision = index.open_source(args.vision_from) if args.vision_from is not None else None
  try:
    planned = export.plan_export(out, vision, shard_bytes=shard_bytes)
    if vision is None and out.hf_config.get("vision_config"):
      say("vision is not carried: OUT holds the text model only; give --vision-from SRC to copy its vision tensors")
    done = export.check_target(args.hf_dir, planned, overwrite=args.overwrite)
    if done:
      say(f"{args.hf_dir}: already holds this export, nothing written")
    if args.dry_run:
      _print_plan(planned, args.hf_dir)
      return 0
    if done:
      export.tidy(args.hf_dir)
    else:
      workers = args.workers or min(4, os.cpu_count() or 1)
      export.export(args.hf_dir, planned, workers=workers, overwrite=args.overwrite)
  finally:
    if vision is not None:
      vision.close()
  print(
    f"{args.hf_dir}: {planned.num_tensors} tensors, {len(planned.shards)} shards, {planned.nbytes} bytes, "
    f"{time.monotonic() - started:.1f} seconds"
  )
  return 0


def _print_plan(planned, target: str) -> None:
  from kimi_k3.convert import appear, store

  vision = 0 if planned.vision is None else sum(t.leaf is None for shard in planned.shards for t in shard.tensors)
  largest = max(shard.size for shard in planned.shards)
  free = store.LocalStore(appear.local(target)).free()
  lines = {
    "tensors": f"{planned.num_tensors:,}, {vision:,} of them vision",
    "shards": f"{len(planned.shards):,} of up to {sizes.spelled(largest)}",
    "bytes": f"{planned.nbytes:,} ({sizes.spelled(planned.nbytes)})",
    "experts": "decoded to bfloat16" if planned.out.options["experts"] == "bf16" else "as released",
    "files": ", ".join(planned.files),
    "disk": f"{sizes.spelled(free)} free: {'enough' if free >= planned.nbytes else 'NOT ENOUGH'}",
  }
  print("\n".join(f"{name:<9}{value}" for name, value in lines.items()))
