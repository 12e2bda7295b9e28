"""Standard workloads through the slots of an engine: latency and throughput as a service would see them.

    python benchmarks/serve.py OUT/decode.yml partitioning=manual --out serve.json
    python benchmarks/serve.py OUT/decode.yml partitioning=manual --workload serve-1k-8k-c64
    python benchmarks/serve.py OUT/decode.yml --preset tiny                  a small load, for a CPU

Random prompts of a seed, 1K in and 8K out or 8K in and 1K out, as many rows at a time as there are slots (8, 64, 256);
the end token is ignored. Lengths are drawn evenly from RATIO times the most, to the most. Loading and compiling are
apart: every shape runs once before the clock starts, and a run that compiles all the same is refused. What the figures
mean: docs/benchmarks.md. The file is written again after each workload. Each loads the weights into an engine of its
own; --workload chooses. Exit codes: 0 done; 1 a row failed or a workload was refused; 2 bad input.

On several hosts: start the same command on each, with --multihost (docs/multihost.md). Process 0 prints and writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import harness
import models
import workloads
from checks import Refused
from machine import environment, peak_memory
from results import SCHEMA, quantile, shown, write

from kimi_k3.capacity.topologies import parse_topology
from kimi_k3.cli.multihost import add_flags, joined, lost_processes, shown_by
from kimi_k3.errors import InputError

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
WARM_UP_TOKENS = 4
# Of the wall time. A listener of JAX's also hears of what is looked up and takes no time worth mentioning.
MOST_COMPILING = 0.01


def main(argv: Sequence[str]) -> int:
  """Runs the workloads and writes their figures."""
  args = command_line().parse_intermixed_args(argv)
  if args.out is not None:
    from kimi_k3.cli.inputs import check_writable

    check_writable(args.out)
  chosen = chosen_workloads(args)
  with joined(args) as processes:
    result: dict[str, Any] = {
      "schema": SCHEMA,
      "kind": "serving",
      "subject": "serve",
      "preset": args.preset,
      "environment": environment(),
      "settings": args.settings,
      "seed": args.seed,
      "results": [],
      "refused": [],
    }
    for work in chosen:
      try:
        row = serve(work, args, processes)
      except (Refused, InputError) as error:
        if isinstance(error, InputError) and len(chosen) == 1:
          raise
        result["refused"].append({"workload": work.name, "reason": str(error)})
        print(f"{work.name}: refused: {error}", file=sys.stderr, flush=True)
      else:
        result["results"].append(row)
        print(lines(row), flush=True)
      if args.out is not None and processes.first:
        write(args.out, result)
  failed = result["refused"] or any(row["failed_rows"] for row in result["results"])
  return 1 if failed else 0


def command_line() -> argparse.ArgumentParser:
  """Returns it."""
  found = harness.parser(__doc__, preset="k3")
  found.add_argument("config", metavar="CONFIG.yml", help="of a converted checkpoint; key=value may follow")
  found.add_argument("settings", nargs="*", metavar="key=value", help="MaxText's settings")
  found.add_argument("--workload", action="append", metavar="NAME", help="may be repeated (default: all of the preset)")
  found.add_argument(
    "--requests", type=int, metavar="N", help="of each workload (default: twice its concurrency or more)"
  )
  found.add_argument("--seed", type=int, default=0, help="of prompts and lengths (default: 0)")
  found.add_argument("--range-ratio", type=float, metavar="RATIO", help="least length / most (default: the workload's)")
  found.add_argument(
    "--steps-per-call", type=int, default=128, metavar="N", help="of the decoding program, at most (default: 128)"
  )
  add_flags(found)
  return found


def chosen_workloads(args: argparse.Namespace) -> list[workloads.Serving]:
  """Returns them, changed as the flags say. Raises InputError for a name, number or ratio that cannot be."""
  if args.repeats is not None:
    raise InputError("--repeats: a load is run once; give --requests for more rows")
  if args.requests is not None and args.requests < 1:
    raise InputError(f"--requests {args.requests}: expected 1 or more")
  if args.range_ratio is not None and not 0 < args.range_ratio <= 1:
    raise InputError(f"--range-ratio {args.range_ratio}: expected more than 0, and 1 at most")
  if args.seed < 0:
    raise InputError(f"--seed {args.seed}: expected 0 or more")
  found = workloads.of_preset(workloads.SERVINGS, args.preset)
  if args.workload:
    found = [workloads.named(found, name) for name in args.workload]
  changes = {"requests": args.requests, "range_ratio": args.range_ratio}
  changes = {name: value for name, value in changes.items() if value is not None}
  return [dataclasses.replace(work, **changes) for work in found]


def serve(work: workloads.Serving, args: argparse.Namespace, processes: Any) -> dict[str, Any]:
  """Returns the figures of one load, run by all processes."""
  draw = draw_requests(work, args.seed)
  config = processes.together(lambda: read(args, work))
  prompts = draw(config.vocab_size)
  processes.agree(shown_by(processes, config, args, [prompt for prompt, _ in prompts]))
  with lost_processes(processes):
    return measure(config, work, prompts, args, processes)


def read(args: argparse.Namespace, work: workloads.Serving) -> Any:
  """Returns the config with the slots and lengths of a workload."""
  sizes = {"slots": work.concurrency, "max_prompt": work.prompt, "max_length": work.prompt + work.new_tokens}
  return models.read_config(args.config, args.settings, **sizes)


def draw_requests(work: workloads.Serving, seed: int) -> Any:
  """Returns a function: size of the vocabulary -> (prompt, new tokens) of each request, the same for the same seed."""
  import numpy as np

  def draw(vocab_size: int) -> list[tuple[list[int], int]]:
    random = np.random.default_rng(seed)
    found = []
    for i in range(work.requests):
      length, new = (
        int(random.integers(max(1, round(work.range_ratio * most)), most + 1))
        for most in (work.prompt, work.new_tokens)
      )
      found.append((models.prompt_ids(vocab_size, length, seed * 1_000_003 + i).tolist(), new))
    return found

  return draw


def measure(
  config: Any, work: workloads.Serving, prompts: list[tuple[list[int], int]], args: argparse.Namespace, processes: Any
) -> dict[str, Any]:
  """Returns the figures of one load.

  Raises:
    Refused: if something was compiled after the warm-up, a token is counted that no row has, or no row ended well.
  """
  from kimi_k3.generate.clock import CompileClock
  from kimi_k3.generate.loop import Generator, Request
  from kimi_k3.maxtext_adapter.engine import make_engine

  clock = CompileClock()
  begin = time.perf_counter()
  engine = processes.together(lambda: make_engine(config, args.check_placement))
  loaded = time.perf_counter()
  generator = Generator(engine, stop_ids=(), clock=clock, seed=args.seed, steps_per_call=args.steps_per_call)
  requests = [Request(i, prompt, new) for i, (prompt, new) in enumerate(prompts)]
  generator.run(warm_up(requests, engine))
  fence = harness.Fence()
  ready = time.perf_counter()
  rows: list[Any] = []
  timing = generator.run(iter(requests), rows.append)
  end = time.perf_counter()
  fence.seconds()
  compiled = clock.compiling(ready, end)
  if compiled > MOST_COMPILING * (end - ready):
    raise Refused(f"{compiled:.3g} of {end - ready:.3g} s went into compiling after the warm-up: a shape was new")
  figures = {
    "load_seconds": loaded - begin - clock.compiling(begin, loaded),
    "compile_seconds": clock.compiling(begin, ready),
    "warm_up_seconds": ready - loaded - clock.compiling(loaded, ready),
    "peak_memory": peak_memory(),
  }
  return figures_of(work, requests, rows, timing, end - ready, chips()) | figures


def warm_up(requests: Sequence[Any], engine: Any) -> list[Any]:
  """Returns requests that make every program compile that these will run: a prompt of each bucket, then a few steps."""
  from kimi_k3.generate.lengths import bucket

  by_bucket = {bucket(len(one.prompt_ids), engine.max_prompt): one for one in requests}
  return [
    dataclasses.replace(one, index=i, max_new_tokens=min(one.max_new_tokens, WARM_UP_TOKENS))
    for i, one in enumerate(by_bucket.values())
  ]


def figures_of(
  work: workloads.Serving, requests: Sequence[Any], rows: Sequence[Any], timing: Any, wall: float, num_chips: float
) -> dict[str, Any]:
  """Returns latencies and throughput of rows that ended, all of whose tokens are real and counted once.

  Args:
    work: The load.
    requests: That were made.
    rows: That ended; those with an error are counted and left out.
    timing: Of the generator.
    wall: Seconds from the first prefill to the end of the last row.
    num_chips: That took part.

  Raises:
    Refused: if rows are missing or come twice, a row has more or fewer tokens than it asked for, or the generator gave
      another number of tokens than the rows hold.
  """
  asked = {one.index: one.max_new_tokens for one in requests}
  if sorted(row.index for row in rows) != sorted(asked):
    raise Refused(f"{len(rows)} rows ended, {len(asked)} were asked for: some are missing or came twice")
  good = [row for row in rows if row.finish_reason != "error"]
  if not good:
    raise Refused(f"no row ended well: {rows[0].error}")
  if wrong := [row for row in good if len(row.ids) != asked[row.index]]:
    row = wrong[0]
    raise Refused(
      f"row {row.index} has {len(row.ids)} tokens, {asked[row.index]} were asked for: {len(wrong)} such rows"
    )
  produced = sum(len(row.ids) for row in rows)
  given = len(timing.first_token) + sum(call.tokens for call in timing.calls)
  if given != produced:
    raise Refused(f"{given} tokens were given out, the rows hold {produced}: a token is counted twice, or none at all")
  decoded = [row for row in good if len(row.ids) > 1]
  tokens = sum(len(row.ids) for row in good)
  prompt_tokens = sum(len(row.prompt_ids) for row in good)
  steps = [call.seconds / call.steps for call in timing.calls for _ in range(call.steps)]
  latencies = {
    "ttft_seconds": [row.first_token_s - row.started_s for row in good],
    "tpot_seconds": [(row.ended_s - row.first_token_s) / (len(row.ids) - 1) for row in decoded],
    "itl_seconds": steps,
    "end_to_end_seconds": [row.ended_s - row.started_s for row in good],
  }
  return {
    "workload": work.name,
    "load": dataclasses.asdict(work),
    "rows": len(good),
    "failed_rows": len(rows) - len(good),
    "errors": sorted({row.error for row in rows if row.error})[:5],
    "wall_seconds": wall,
    "prompt_tokens": prompt_tokens,
    "output_tokens": tokens,
    "output_tokens_per_second": tokens / wall,
    "output_tokens_per_second_per_chip": tokens / wall / num_chips,
    "total_tokens_per_second": (tokens + prompt_tokens) / wall,
    "chips": num_chips,
    "decoding_calls": len(timing.calls),
    "decoding_steps": len(steps),
  } | {name: spread(values) for name, values in latencies.items()}


def spread(values: Sequence[float]) -> dict[str, float] | None:
  """Returns p50, p90 and p99; None of nothing."""
  return {name: quantile(values, share) for name, share in SHARES.items()} if values else None


def chips() -> float:
  """Returns how many chips take part: of a TPU7x two devices are one, of anything else each is."""
  import jax

  for name in ("tpu7x:1x1x1", "v6e:1x1"):
    kind = parse_topology(name)
    if kind.device_kind == jax.devices()[0].device_kind:
      return jax.device_count() * kind.chips / kind.devices
  return float(jax.device_count())


def lines(row: dict[str, Any]) -> str:
  """Returns the figures of a load as text."""
  served = f"{row['rows']} rows on {row['load']['concurrency']} slots"
  speed = f"{row['output_tokens_per_second']:.1f} tok/s, {row['output_tokens_per_second_per_chip']:.1f} a chip"
  tokens = f"{row['prompt_tokens']} tokens in, {row['output_tokens']} out in {row['wall_seconds']:.1f} s"
  found = [f"{row['workload']}: {served}, {tokens}: {speed}"]
  for name, values in row.items():
    if name.endswith("_seconds") and isinstance(values, dict):
      spreads = ", ".join(f"{share} {shown(values[share])}" for share in SHARES)
      found.append(f"  {name.removesuffix('_seconds'):12} {spreads}")
  apart = ", ".join(
    f"{name.replace('_', ' ')} {row[f'{name}_seconds']:.1f} s" for name in ("load", "compile", "warm_up")
  )
  memory = row["peak_memory"]
  found.append(f"  {apart}; peak memory {memory['bytes'] / 2**30:.2f} GiB of {memory['of']}")
  if row["failed_rows"]:
    found.append(f"  {row['failed_rows']} rows failed: {'; '.join(row['errors'])}")
  return "\n".join(found)


if __name__ == "__main__":
  harness.exit_with(main, __file__)
