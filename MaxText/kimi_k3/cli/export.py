"""`kimi-k3 export`: a conversion back to released safetensors."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_k3.cli import sizes
from kimi_k3.errors import InputError

if TYPE_CHECKING:
  from kimi_k3.convert.shards import Release

DESCRIPTION = """\
Writes what `kimi-k3 convert SRC OUT` made back in the released layout: shards of safetensors under the released names,
in the order of the model, their index, config.json and tokenizer files. Of an as-stored conversion every text tensor is
byte for byte that of SRC. Of --experts bf16 the experts are bfloat16 and config.json no longer says they are packed.
Rounded formats (mxfp4 from bfloat16, fp8-block) are refused: no release stores them, export the as-stored conversion.

The vision tensors are not in OUT: --vision-from copies them from SRC. HF_DIR appears when it is complete. Stopped, the
same command goes on in HF_DIR.partial: shards that were done are read once and kept if they are what was written. What
is read of OUT is compared with the checksums that convert recorded.

With --config, OUT is a step that MaxText's trainer saved, RUN/checkpoints/STEP, and --config the config it was trained
with (key=value may follow). Its parameters are rounded to bfloat16, experts to MXFP4; the kinds that a release stores
in float32 stay as they are. Stopped, the same command starts anew.
"""
EPILOG = """\
examples:
  kimi-k3 export k3-maxtext/ Kimi-K3-again/ --dry-run                 what would be written
  kimi-k3 export k3-maxtext/ Kimi-K3-again/ --vision-from Kimi-K3/    the whole checkpoint
  kimi-k3 export k3-bf16/ Kimi-K3-bf16/ --shard-size 10GB             experts in bfloat16
  kimi-k3 export run/checkpoints/999 my-k3/ --config train.yml        what was trained
"""
DEFAULT_SHARD_SIZE = "5GB"


def add_parser(subparsers) -> argparse.ArgumentParser:
  """Adds the verb to the command line."""
  parser = subparsers.add_parser(
    "export", help="a conversion, or a trained model, to released safetensors", description=DESCRIPTION, epilog=EPILOG
  )
  parser.add_argument(
    "out", metavar="OUT", help="what was converted or trained: a directory, or a URL such as gs://..."
  )
  parser.add_argument("hf_dir", metavar="HF_DIR", help="directory to make")
  parser.add_argument("--vision-from", type=Path, metavar="SRC", help="checkpoint to copy the vision tensors from")
  parser.add_argument(
    "--config", metavar="CONFIG.yml", help="OUT is a step of a training run with this config; key=value may follow"
  )
  parser.add_argument(
    "--experts", choices=("mxfp4", "bf16"),
    help="with --config: how to store experts (default: as releases do, mxfp4 for K3, bf16 for Kimi-Linear)",
  )  # fmt: skip
  parser.add_argument(
    "--tokenizer-from", type=Path, metavar="DIR", help="with --config: directory to copy tokenizer files from"
  )
  parser.add_argument(
      "--shard-size", metavar="BYTES", default=DEFAULT_SHARD_SIZE,
      help="of the tensors of a shard: 5GB (1000 cubed), 5G or 5GiB (1024 cubed), a number (default: %(default)s)",
  )  # fmt: skip
  parser.add_argument("--dry-run", action="store_true", help="check OUT and HF_DIR, print the plan, write nothing")
  parser.add_argument("--overwrite", action="store_true", help="replace an HF_DIR that holds an export")
  parser.add_argument(
    "--workers", type=int, metavar="N", help="chunks written at a time (default: the CPUs, at most 4)"
  )
  parser.set_defaults(run=run, settings=[])
  return parser


def run(args: argparse.Namespace) -> int:
  """Exports, or says what it would do. Returns the exit code.

  Raises:
    InputError: if OUT, its format or HF_DIR do not allow it, or if the work was stopped; HF_DIR is as it was then.
  """
  shard_bytes = sizes.parse("--shard-size", args.shard_size)
  if args.workers is not None and args.workers < 1:
    raise InputError(f"--workers is {args.workers}, expected 1 or more")
  _check_flags(args)
  started = time.monotonic()
  workers = args.workers or min(4, os.cpu_count() or 1)
  planned = _export_training if args.config is not None else _export_conversion
  done = planned(args, shard_bytes, workers)
  if not args.dry_run:
    print(
      f"{args.hf_dir}: {done.num_tensors} tensors, {len(done.shards)} shards, {done.nbytes} bytes, "
      f"{time.monotonic() - started:.1f} seconds"
    )
  return 0


def _check_flags(args: argparse.Namespace) -> None:
  """Names flags of the other kind of export, which would be ignored."""
  if args.config is not None:
    if args.vision_from is not None:
      raise InputError("--vision-from is of a conversion's export: a training run has no vision tensors, leave it out")
    return
  if args.settings:
    raise InputError(f"unrecognized arguments: {' '.join(args.settings)} (settings belong to --config CONFIG.yml)")
  flags = {"--experts": args.experts, "--tokenizer-from": args.tokenizer_from}
  if given := [flag for flag, value in flags.items() if value is not None]:
    raise InputError(f"{' and '.join(given)} given without --config: OUT is exported as it was converted")


def _export_conversion(args: argparse.Namespace, shard_bytes: int, workers: int) -> Release:
  from kimi_k3.convert import export, index, reader, shards  # Late: --help must not wait for TensorStore.
  from kimi_k3.convert.progress import say

  out = reader.open_output(args.out)
  vision = index.open_source(args.vision_from) if args.vision_from is not None else None
  try:
    planned = export.plan_export(out, vision, shard_bytes=shard_bytes)
    if vision is None and out.hf_config.get("vision_config"):
      say("vision is not carried: OUT holds the text model only; give --vision-from SRC to copy its vision tensors")
    done = shards.check_target(args.hf_dir, planned, overwrite=args.overwrite)
    if done:
      say(f"{args.hf_dir}: already holds this export, nothing written")
    if args.dry_run:
      carried = 0 if vision is None else sum(t.leaf is None for shard in planned.shards for t in shard.tensors)
      experts = "decoded to bfloat16" if out.options["experts"] == "bf16" else "as released"
      _print_plan(planned, args.hf_dir, {"experts": experts}, f", {carried:,} of them vision")
    elif done:
      shards.tidy(args.hf_dir)
    else:
      export.export(args.hf_dir, planned, workers=workers, overwrite=args.overwrite)
  finally:
    if vision is not None:
      vision.close()
  return planned


def _export_training(args: argparse.Namespace, shard_bytes: int, workers: int) -> Release:
  from kimi_k3.convert import shards, trained, training_step
  from kimi_k3.convert.progress import say
  from kimi_k3.maxtext_adapter.config import architecture
  from kimi_k3.maxtext_adapter.settings import read_config

  config = read_config(args.config, args.settings)
  training = training_step.open_training(
    args.out, architecture(config), scan=config.scan_layers, weight_dtype=config.weight_dtype.name
  )
  planned = trained.plan_export(training, experts=args.experts, shard_bytes=shard_bytes, tokenizer=args.tokenizer_from)
  done = shards.check_target(args.hf_dir, planned, overwrite=args.overwrite)
  if done:
    say(f"{args.hf_dir}: already holds this export, nothing written")
  if args.dry_run:
    experts = {"mxfp4": "rounded to MXFP4", "bf16": "rounded to bfloat16"}[planned.experts]
    memory = f"{sizes.spelled(planned.cell_bytes)} of arrays at a time, and up to {workers} parts of them"
    _print_plan(planned, args.hf_dir, {"experts": experts, "memory": memory})
  elif done:
    shards.tidy(args.hf_dir)
  else:
    packing = trained.export(args.hf_dir, planned, workers=workers, overwrite=args.overwrite)
    if packing.weight_squares:
      say(
        f"experts in MXFP4: error {packing.rms_relative:.3g} of the trained weights, RMS; at most "
        f"{packing.largest_of_group:.3g} of the largest of a group"
      )
  return planned


def _print_plan(planned: Release, target: str, more: dict[str, str], kinds: str = "") -> None:
  from kimi_k3.convert import appear, store

  largest = max(shard.size for shard in planned.shards)
  free = store.LocalStore(appear.local(target)).free()
  lines = {
    "tensors": f"{planned.num_tensors:,}{kinds}",
    "shards": f"{len(planned.shards):,} of up to {sizes.spelled(largest)}",
    "bytes": f"{planned.nbytes:,} ({sizes.spelled(planned.nbytes)})",
    **more,
    "files": ", ".join(planned.files),
    "disk": f"{sizes.spelled(free)} free: {'enough' if free >= planned.nbytes else 'NOT ENOUGH'}",
  }
  print("\n".join(f"{name:<9}{value}" for name, value in lines.items()))
