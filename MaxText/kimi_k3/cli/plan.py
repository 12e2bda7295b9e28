"""`kimi-k3 plan CONFIG --topology NAME`: what a run takes on TPUs, before there are any."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3.cli.inputs import check_writable, write_whole
from kimi_k3.cli.sizes import parse as parse_size
from kimi_k3.errors import InputError

if TYPE_CHECKING:
  from kimi_k3.capacity.fit import Largest
  from kimi_k3.capacity.plan import Facts, Planner, Setup

DESCRIPTION = """\
Compiles the folded decoding step and prefill for a TPU topology, with libtpu's compiler and no TPU, and prints what one
device holds against what it has; collectives; bytes of HBM a step, and the time that reading them takes at least; the
kernels; and a warning for each trap that the program has. Results are kept: the same question is answered at once.

CONFIG may be a preset (configs/tpu7x-32.yml model_name=kimi-k3), a model of configs/models, or the decode.yml of a
converted checkpoint. No weights are read.

--fit finds the largest batch, context and chunk of prefill that fit, by compiling each answer and the next size.
--quick is arithmetic alone, in seconds and without libtpu. What does not fit ends with exit code 2, by how much, and
what would fit.
"""
EPILOG = """\
examples:
  kimi-k3 plan configs/tpu7x-32.yml model_name=kimi-k3 --topology tpu7x:2x2x4 --decode 64,8192 --prefill 32768
  kimi-k3 plan configs/models/kimi-k3.yml --topology tpu7x:2x2x4 --decode 8,1048576 --quick
  kimi-k3 plan configs/models/kimi-k3.yml --topology tpu7x:2x2x4 --decode 1,1048576 --fit --json
  kimi-k3 plan configs/models/kimi-k3.yml --topology tpu7x:2x4x4 --mesh attn_dp_expert=2,model=32 --plot memory.png
"""
_DEFAULT_ROWS_A_DEVICE = 2
_DEFAULT_CONTEXT, _DEFAULT_PROMPT = 8192, 32768


def add_parser(subparsers) -> argparse.ArgumentParser:
  """Adds the verb to the command line."""
  parser = subparsers.add_parser(
    "plan", help="what a run takes on TPUs, by their compiler", description=DESCRIPTION, epilog=EPILOG
  )
  parser.add_argument("config", metavar="CONFIG.yml", help="key=value may follow")
  parser.add_argument("--topology", required=True, metavar="NAME", help="kind and chips: tpu7x:2x2x4 is 16 chips")
  parser.add_argument("--slices", type=int, default=1, metavar="N", help="that many of it (default: %(default)s)")
  parser.add_argument("--mesh", metavar="AXIS=N,...", help="default: the config's, else one that fits")
  parser.add_argument("--decode", metavar="B,S", help="compile a step of B rows of up to S tokens")
  parser.add_argument("--prefill", metavar="T", help="compile prefill of T tokens")
  parser.add_argument("--fit", action="store_true", help="find the largest batch, context and chunk that fit")
  parser.add_argument(
    "--reserve", default="4GiB", metavar="SIZE", help="HBM that --fit leaves on each device (default: %(default)s)"
  )
  parser.add_argument("--quick", action="store_true", help="arithmetic alone: nothing is compiled")
  parser.add_argument("--json", action="store_true", help="print one object, sizes in bytes")
  parser.add_argument("--plot", metavar="FILE.png", help="draw memory by context and batch")
  parser.add_argument("--no-cache", action="store_true", help="compile anew, keep nothing")
  parser.set_defaults(settings=[])
  return parser


def run(args: argparse.Namespace) -> int:
  """Plans; exit code 2, after the table, if a program that was asked for does not fit."""
  decode, prefill = _pair(args.decode), _number("--prefill", args.prefill)
  reserve = 0 if args.reserve.strip() == "0" else parse_size("--reserve", args.reserve)
  if args.plot:
    if not args.plot.endswith(".png"):
      raise InputError(f"--plot is {args.plot!r}, expected a name that ends in .png")
    from kimi_k3.capacity.plot import check_matplotlib

    check_writable(args.plot)
    check_matplotlib()
  # Nothing here runs on a device: where there are TPUs they are left to others.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  from kimi_k3.capacity.topologies import parse_topology
  from kimi_k3.maxtext_adapter.planning import read_setup

  setup = read_setup(args.config, args.settings, parse_topology(args.topology, args.slices), args.mesh)
  planner = _planner(args, setup)
  if reserve >= (limit := setup.topology.limit_bytes):
    raise InputError(
      f"--reserve is {args.reserve}, a device of {setup.topology.name} has {limit / 2**30:.2f} GiB: leave some of it"
    )
  programs: dict[str, Facts] = {}
  if decode is None and prefill is None and not args.fit:
    decode = (setup.rows or _default_rows(setup), setup.context or min(_DEFAULT_CONTEXT, _longest(setup)))
    prefill = setup.prompt or min(_DEFAULT_PROMPT, _longest(setup))
  _check_lengths(setup, decode, prefill)
  if decode is not None:
    programs["decode"] = planner.decode(*decode)
  if prefill is not None:
    programs["prefill"] = planner.prefill(prefill)
  one_engine = decode is not None and prefill is not None
  fit = _fit(args, setup, planner, reserve, programs) if args.fit else None
  _deliver(args, setup, programs, fit, reserve, one_engine=one_engine)
  _refuse_what_does_not_fit(setup, programs, {"decode": decode, "prefill": None if prefill is None else (prefill,)})
  if fit is not None and not any(fit[name]["largest"] for name in ("batch", "context", "prefill") if name in fit):
    raise InputError(
      f"nothing fits on {setup.topology.name} with {reserve / 2**30:.2f} GiB in reserve: take a larger topology"
    )
  return 0


def _pair(text: str | None) -> tuple[int, int] | None:
  if text is None:
    return None
  match = re.fullmatch(r"([0-9]{1,9}),([0-9]{1,9})", text)
  if match is None or not int(match[1]) or not int(match[2]):
    raise InputError(f"--decode is {text!r}, expected rows,tokens such as 64,8192")
  return int(match[1]), int(match[2])


def _number(flag: str, text: str | None) -> int | None:
  if text is None:
    return None
  if not re.fullmatch(r"[0-9]{1,9}", text) or not int(text):
    raise InputError(f"{flag} is {text!r}, expected a number of tokens such as 32768")
  return int(text)


def _planner(args: argparse.Namespace, setup: Setup) -> Planner:
  from kimi_k3.capacity import plan, results

  if args.quick:
    return plan.Arithmetic(setup)

  def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

  directory: Path | None = None if args.no_cache else results.default_directory()
  return plan.Compiler(setup, results.Results(directory, say), say)


def _default_rows(setup: Setup) -> int:
  """Two rows a device, or the next number that the mesh divides."""
  parts = setup.cuts.size(setup.cuts.rows)
  return -(-_DEFAULT_ROWS_A_DEVICE * setup.topology.devices // parts) * parts


def _longest(setup: Setup) -> int:
  return setup.config.max_position_embeddings


def _check_lengths(setup: Setup, decode: tuple[int, int] | None, prefill: int | None) -> None:
  longest = _longest(setup)
  for flag, tokens in (("--decode", decode[1] if decode else 0), ("--prefill", prefill or 0)):
    if tokens > longest:
      raise InputError(f"{flag}: {tokens} tokens, the model knows {longest} (max_position_embeddings)")


def _fit(
  args: argparse.Namespace, setup: Setup, planner: Planner, reserve: int, programs: dict[str, Facts]
) -> dict[str, Any]:
  """Searches; a program that was not asked for by its size is shown at the size found."""
  from kimi_k3.capacity import fit

  budget = setup.topology.limit_bytes - reserve
  found: dict[str, Any] = {"reserve_bytes": reserve, "estimated": args.quick}
  decode, prefill = programs.get("decode"), programs.get("prefill")
  both = decode is None and prefill is None

  def shown(name: str, largest: Largest) -> None:
    if largest.facts is not None and name not in programs:
      programs[name] = largest.facts

  if decode is not None or both:
    context = decode["context"] if decode else _longest(setup)
    largest = fit.largest_batch(planner, setup, context, budget)
    found["batch"] = fit.as_json(largest, context=context, cache_cut=setup.cut_of(1))
    shown("decode", largest)
  if decode is not None:
    batch = decode["batch"]
    found["context"] = fit.as_json(fit.largest_context(planner, setup, batch, budget), batch=batch)
  if prefill is not None or both:
    beside = decode["latent_cache_bytes"] + decode["kda_state_bytes"] if decode else 0
    largest = fit.largest_chunk(planner, setup, budget - beside)
    found["prefill"] = fit.as_json(largest, beside_bytes=beside)
    shown("prefill", largest)
  return found


def _deliver(
  args: argparse.Namespace,
  setup: Setup,
  programs: dict[str, Facts],
  fit: dict[str, Any] | None,
  reserve: int,
  *,
  one_engine: bool,
) -> None:
  from kimi_k3.capacity import memory, report

  error = memory.WORST_ERROR if args.quick else None
  if args.plot:
    if not args.plot.endswith(".png"):
      raise InputError(f"--plot is {args.plot!r}, expected a name that ends in .png")
    from kimi_k3.capacity.plot import draw

    write_whole(args.plot, lambda file: draw(file, setup, programs, reserve_bytes=reserve))
  if args.json:
    print(json.dumps(report.as_object(setup, programs, fit, one_engine=one_engine, quick_error=error)))
  else:
    print(report.table(setup, programs, fit, one_engine=one_engine, quick_error=error))
  sys.stdout.flush()


def _refuse_what_does_not_fit(
  setup: Setup, programs: dict[str, Facts], sizes: dict[str, tuple[int, ...] | None]
) -> None:
  """Raises InputError if what was asked for does not fit, alone or in one engine: by how much, and what would."""
  from kimi_k3.capacity.fit import remedies
  from kimi_k3.capacity.report import title, together

  asked = {name: size for name, size in sizes.items() if size is not None}
  limit = setup.topology.limit_bytes
  faults = [
    f"{title(name, facts)} takes {facts['total_bytes'] / 2**30:.2f} GiB on a device, {setup.topology.name} has "
    f"{limit / 2**30:.2f}, {facts['exceeds_bytes'] / 2**30:.2f} less"
    for name, facts in programs.items()
    if name in asked and not facts["fits"]
  ]
  both = together(setup, programs) if len(asked) == 2 and not faults else None
  if both is not None and both["left_bytes"] < 0:
    faults.append(
      f"{title('decode', programs['decode'])} and {title('prefill', programs['prefill'])} in one engine take "
      f"{both['total_bytes'] / 2**30:.2f} GiB on a device, {setup.topology.name} has {limit / 2**30:.2f}, "
      f"{-both['left_bytes'] / 2**30:.2f} less, though each alone fits"
    )
  if faults:
    would = remedies(setup, asked)
    advice = f"by arithmetic these fit: {'; '.join(would)}" if would else "nothing that --quick knows of makes it fit"
    raise InputError(f"{'. '.join(faults)}; {advice}")
