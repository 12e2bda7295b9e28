"""`kimi-k3 convert`: released safetensors to a checkpoint that MaxText loads."""

from __future__ import annotations

import argparse
import re
import shlex
import time
from pathlib import Path
from typing import Literal

from kimi_k3.cli import sizes
from kimi_k3.convert import index, plan
from kimi_k3.convert.progress import say
from kimi_k3.errors import InputError

WORKER_BYTES = 256 * 1024 * 1024  # As kimi_k3.convert.write has it, which takes TensorStore along.
DESCRIPTION = """\
Converts a released Kimi K3 or Kimi-Linear checkpoint (config.json and *.safetensors) to an Orbax checkpoint for
MaxText. OUT/0/items is what load_parameters_path takes, OUT/decode.yml a complete config for `kimi-k3 decode`.

All headers are checked first: every stored tensor is used, or ignored by a rule, or named in an error. SRC is only
read. OUT appears when it is complete; the same command once more finds it and does nothing. When it was stopped, the
same command goes on from there, and the result is the same. See docs/convert.md.
"""
EPILOG = """\
examples:
  kimi-k3 convert Kimi-K3/ k3-maxtext/ --dry-run        what would be written: leaves, bytes, slices, memory, disk
  kimi-k3 convert Kimi-K3/ k3-maxtext/                  everything as stored: packed experts stay packed
  kimi-k3 convert Kimi-K3/ k3-serving/ --no-scan        layer by layer, for MaxText's vLLM adapter and tpu-inference
  kimi-k3 convert Kimi-K3/ k3-fp8/ --experts fp8-block --dense fp8-block
  kimi-k3 convert Kimi-K3/ gs://bucket/k3 --part 3/8    one of eight machines; then once with --finish
  kimi-k3 decode k3-maxtext/decode.yml prompt="Hello"
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
  """Adds the verb to the command line."""
  parser = subparsers.add_parser(
      "convert", help="released safetensors to a MaxText checkpoint", description=DESCRIPTION, epilog=EPILOG,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )  # fmt: skip
  parser.add_argument("src", type=Path, metavar="SRC", help="directory of the released checkpoint")
  parser.add_argument("out", metavar="OUT", help="directory to make, or a URL such as gs://bucket/directory")
  parser.add_argument(
    "--scan",
    action=argparse.BooleanOptionalAction,
    help="layers folded into scanned blocks of four, for MaxText decode, or one by one, for MaxText's vLLM adapter and "
    "tpu-inference (default: folded where they fold)",
  )
  parser.add_argument(
      "--experts", choices=plan.EXPERT_CHOICES, default="as-stored",
      help="routed experts: as stored; mxfp4: bfloat16 ones packed by OCP's rule; fp8-block: float8_e4m3fn, a scale "
      "for 128 x 128 weights; bf16: decoded (default: %(default)s)",
  )  # fmt: skip
  parser.add_argument(
      "--dense", choices=plan.DENSE_CHOICES, default="as-stored",
      help="attention, dense MLPs, shared experts and latent projections that are bfloat16: as stored or in block-wise "
      "float8_e4m3fn (default: %(default)s)",
  )  # fmt: skip
  parser.add_argument(
    "--dry-run", action="store_true", help="check SRC, print the plan and the work left, write nothing"
  )
  parser.add_argument(
    "--overwrite",
    action="store_true",
    help="convert anew whatever conversion OUT holds or was begun; the old OUT stays until the new is complete (with "
    "--commit marker: it goes first)",
  )
  parser.add_argument(
    "--workers",
    type=int,
    metavar="N",
    help="slices written at a time (default: the CPUs, at most 8, within the budget)",
  )
  parser.add_argument(
    "--ram-budget", metavar="BYTES", default="2GiB",
    help=f"memory for the data on its way, {sizes.spelled(WORKER_BYTES)} a worker; plan and libraries take up to 1 GiB "
    "beside it (default: %(default)s)",
  )  # fmt: skip
  parser.add_argument(
    "--part", metavar="i/n", help="convert only the i-th of n shares, for n machines that share OUT; then --finish"
  )
  parser.add_argument(
    "--finish", action="store_true", help="commit what the parts have written; refused while one is missing"
  )
  parser.add_argument(
    "--hash", action="store_true", help="record the SHA-256 of every shard in conversion.json (reads SRC a second time)"
  )
  parser.add_argument(
    "--commit", choices=("auto", "rename", "marker"), default="auto",
    help="how OUT appears: renamed from OUT.partial, or in place with a marker file written last, where nothing can be "
    "renamed at once (buckets, gcsfuse); auto: marker for a URL, rename for a path (default: %(default)s)",
  )  # fmt: skip
  parser.set_defaults(run=run)
  return parser


def run(args: argparse.Namespace) -> int:
  """Converts, or says what it would do. Returns the exit code.

  Raises:
    InputError: if the source, the options or OUT do not allow it, or the work was stopped; OUT is as it was then.
  """
  part, budget = _part(args.part), sizes.parse("--ram-budget", args.ram_budget)
  from kimi_k3.convert import output  # Late: --help must not wait for TensorStore.

  started, commit = time.monotonic(), _commit(args)
  workers = _workers(args.workers, budget, output.default_workers(budget))
  with index.open_source(args.src) as source:
    for note in source.notes:
      say(note)
    planned = plan.make_plan(source, plan.Options(scan=args.scan, experts=args.experts, dense=args.dense))
    done = output.check_output(args.out, source, planned, overwrite=args.overwrite)
    scan = "--scan" if planned.scan else "--no-scan"
    say(f"{args.src}: {len(source.tensors):,} tensors, {planned.num_parameters:,} weights; {scan}")
    if done:
      say(f"{args.out}: already holds this conversion, nothing written{_ignored(args)}")
    if args.dry_run:
      print(plan.summary(planned))
      if not done:
        print(_outlook(output.progress_so_far(args.out, source, planned, commit), args.out, workers))
      return 0
    job = output.Job(
      commit=commit, workers=workers, part=part, convert=part is not None or not args.finish,
      finish=part is None or args.finish, hash_shards=args.hash, overwrite=args.overwrite,
      command=_command(args, planned.options),
    )  # fmt: skip
    if done:
      output.tidy(args.out, commit)
    try:
      outcome = None if done else output.convert(args.out, source, planned, job)
    except KeyboardInterrupt:
      say(f"{args.out}: what is done is kept, the same command goes on from there")
      raise
  seconds = time.monotonic() - started
  if outcome is None or outcome.finished:
    print(f"{args.out}: {len(planned.leaves)} leaves, {planned.nbytes} bytes, {seconds:.1f} seconds")
  else:
    print(
      f"{args.out}: part {args.part} is done; of other parts, {outcome.missing:,} of {outcome.slices:,} slices are not"
    )
  if outcome is not None and outcome.written:
    say(
      f"{outcome.written:,} of {outcome.slices:,} slices written, {outcome.found:,} were done before; "
      f"{sizes.spelled(outcome.nbytes)}, {sizes.spelled(outcome.nbytes / max(seconds, 1e-9))}/s, "
      f"peak memory {sizes.spelled(sizes.peak_bytes())}"
    )
  return 0


def _ignored(args: argparse.Namespace) -> str:
  """The flags that had no effect on a conversion that is there already."""
  flags = [flag for flag, given in (("--hash", args.hash), ("--part", args.part), ("--finish", args.finish)) if given]
  return f"; {' and '.join(flags)} had no effect" if flags else ""


def _outlook(progress: tuple, out: str, workers: int) -> str:
  """The lines of --dry-run about the work: how much is left, how much memory and disk it takes."""
  from kimi_k3.convert import store

  work, done, done_bytes = progress
  left = work.nbytes - done_bytes
  lines = {
    "slices": f"{len(work):,} of up to {sizes.spelled(max(work.size(n) for n in range(len(work))))}, {done:,} done",
    "to write": f"{left:,} ({sizes.spelled(left)})",
    "memory": f"{workers} worker(s), up to {sizes.spelled(WORKER_BYTES)} each; up to 1 GiB for plan and libraries",
  }
  if not store.is_url(out):
    free = store.LocalStore(Path(out)).free()
    lines["disk"] = f"{sizes.spelled(free)} free: {'enough' if free >= left else 'NOT ENOUGH'}"
  return "\n".join(f"{name:<11}{value}" for name, value in lines.items())


def _commit(args: argparse.Namespace) -> Literal["rename", "marker"]:
  url = "://" in args.out
  if url and args.commit == "rename":
    raise InputError(f"--commit rename: {args.out} has no renames, expected marker")
  return "marker" if args.commit == "marker" or (url and args.commit == "auto") else "rename"


def _part(text: str | None) -> tuple[int, int] | None:
  if text is None:
    return None
  match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
  if not match or not 1 <= int(match[1]) <= int(match[2]):
    raise InputError(f"--part is {text!r}, expected i/n with i from 1 to n, such as 1/4")
  return int(match[1]), int(match[2])


def _workers(asked: int | None, budget: int, default: int) -> int:
  if asked is not None and asked < 1:
    raise InputError(f"--workers is {asked}, expected 1 or more")
  needed = WORKER_BYTES * (asked or 1)
  if needed > budget:
    raise InputError(
      f"--ram-budget is {sizes.spelled(budget)}, {asked or 1} worker(s) take up to {sizes.spelled(needed)}: raise it"
      + (" or lower --workers" if asked else "")
    )
  return asked or default


def _command(args: argparse.Namespace, options: dict) -> str:
  """The command that gives this result, with the defaults spelled out. OUT may be moved, so its name says nothing."""
  scan = "--scan" if options["scan"] else "--no-scan"
  words = ("kimi-k3", "convert", str(args.src), "OUT", scan)
  words += ("--experts", str(options["experts"]), "--dense", str(options["dense"]))
  return shlex.join(words)
