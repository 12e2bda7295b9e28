"""`kimi-k3 logits CONFIG --tokens FILE.json --out FILE.npz`: one forward pass a row, without caches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from kimi_k3.cli.inputs import check_vocabulary, check_writable, read_rows, write_whole
from kimi_k3.cli.multihost import HELP, add_flags, joined, lost_processes, shown_by

if TYPE_CHECKING:
  from kimi_k3.maxtext_adapter.distributed import Processes

DESCRIPTION = """\
Computes the logits of every position of every row by one forward pass. FILE.npz holds logits_0, logits_1, ...: float32
[tokens of the row, vocabulary], real positions only, in the order of the rows.

{multihost}"""
EPILOG = """\
examples:
  kimi-k3 logits OUT/decode.yml --tokens rows.json --out logits.npz
  kimi-k3 logits OUT/decode.yml --tokens rows.json --out logits.npz dtype=float32 matmul_precision=highest
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
  """Adds the verb to the command line."""
  parser = subparsers.add_parser(
    "logits", help="logits of given tokens", description=DESCRIPTION.format(multihost=HELP), epilog=EPILOG
  )
  parser.add_argument("config", metavar="CONFIG.yml", help="decode.yml of a converted checkpoint; key=value may follow")
  parser.add_argument("--tokens", required=True, metavar="FILE.json", help="list of lists of token ids")
  parser.add_argument("--out", required=True, metavar="FILE.npz", help="file to write")
  add_flags(parser)
  parser.set_defaults(settings=[])
  return parser


def run(args: argparse.Namespace) -> int:
  """Writes the logits; exit code 1 if any are not finite."""
  with joined(args) as processes:
    config, rows, shown = processes.together(lambda: _read(args, processes))
    processes.agree(shown)
    forward = processes.together(lambda: _load(config, args))
    with lost_processes(processes):
      results = _compute(forward, rows, processes)
    processes.together(lambda: _finish(results, rows, config, args, processes))
  faulty = [i for i, found in enumerate(results) if not np.isfinite(found).all()]
  if faulty and processes.first:
    print(f"kimi-k3: row(s) {', '.join(map(str, faulty))} hold logits that are not finite", file=sys.stderr)
  return 1 if faulty else 0


def _read(args: argparse.Namespace, processes: Processes) -> tuple[Any, list[list[int]], dict[str, str]]:
  rows = read_rows(args.tokens)
  if processes.first:
    check_writable(args.out)
  from kimi_k3.maxtext_adapter.settings import read_config

  config = read_config(args.config, args.settings)
  check_vocabulary(rows, config.vocab_size, args.tokens)
  return config, rows, shown_by(processes, config, args, rows)


def _load(config: Any, args: argparse.Namespace) -> Callable[..., Any]:
  from kimi_k3.maxtext_adapter.engine import make_forward

  return make_forward(config, args.check_placement)


def _compute(forward: Callable[..., Any], rows: list[list[int]], processes: Processes) -> list[np.ndarray]:
  from kimi_k3.generate.lengths import bucket
  from kimi_k3.generate.loop import to_host

  results = []
  for i, row in enumerate(rows):
    tokens = np.zeros(bucket(len(row)), np.int32)
    tokens[: len(row)] = row
    results.append(to_host(forward(tokens, len(row))[0])[: len(row)])
    if processes.first:
      print(f"row {i}: {len(row)} tokens", file=sys.stderr)
  return results


def _finish(
  results: list[np.ndarray], rows: list[list[int]], config: Any, args: argparse.Namespace, processes: Processes
) -> None:
  if not processes.first:
    return

  def write(file: BinaryIO) -> None:
    arrays: dict[str, Any] = {f"logits_{i}": found for i, found in enumerate(results)}
    np.savez(file, **arrays)

  write_whole(args.out, write)
  print(f"{args.out}: {len(rows)} rows, {sum(map(len, rows))} positions, vocabulary {config.vocab_size}")
