"""`kimi-k3 logits CONFIG --tokens FILE.json --out FILE.npz`: one forward pass a row, without caches."""

from __future__ import annotations

import argparse
import sys
from typing import BinaryIO

import numpy as np

from kimi_k3.cli.inputs import check_vocabulary, check_writable, read_rows, write_whole

DESCRIPTION = """\
Computes the logits of every position of every row by one forward pass. FILE.npz holds logits_0, logits_1, ...: float32
[tokens of the row, vocabulary], real positions only, in the order of the rows.
"""
EPILOG = """\
examples:
  kimi-k3 logits OUT/decode.yml --tokens rows.json --out logits.npz
  kimi-k3 logits OUT/decode.yml --tokens rows.json --out logits.npz dtype=float32 matmul_precision=highest
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
  """Adds the verb to the command line."""
  parser = subparsers.add_parser("logits", help="logits of given tokens", description=DESCRIPTION, epilog=EPILOG)
  parser.add_argument("config", metavar="CONFIG.yml", help="decode.yml of a converted checkpoint; key=value may follow")
  parser.add_argument("--tokens", required=True, metavar="FILE.json", help="list of lists of token ids")
  parser.add_argument("--out", required=True, metavar="FILE.npz", help="file to write")
  parser.set_defaults(settings=[])
  return parser


def run(args: argparse.Namespace) -> int:
  """Writes the logits; exit code 1 if any are not finite."""
  rows = read_rows(args.tokens)
  check_writable(args.out)
  from kimi_k3.generate.lengths import bucket
  from kimi_k3.maxtext_adapter.settings import read_config

  config = read_config(args.config, args.settings)
  check_vocabulary(rows, config.vocab_size, args.tokens)
  from kimi_k3.maxtext_adapter.engine import make_forward

  forward, results = make_forward(config), {}
  for i, row in enumerate(rows):
    tokens = np.zeros(bucket(len(row)), np.int32)
    tokens[: len(row)] = row
    results[f"logits_{i}"] = np.asarray(forward(tokens, len(row))[0])[: len(row)]
    print(f"row {i}: {len(row)} tokens", file=sys.stderr)

  def write(file: BinaryIO) -> None:
    np.savez(file, **results)

  write_whole(args.out, write)
  print(f"{args.out}: {len(rows)} rows, {sum(map(len, rows))} positions, vocabulary {config.vocab_size}")
  faulty = [i for i, name in enumerate(results) if not np.isfinite(results[name]).all()]
  if faulty:
    print(f"kimi-k3: row(s) {', '.join(map(str, faulty))} hold logits that are not finite", file=sys.stderr)
  return 1 if faulty else 0
