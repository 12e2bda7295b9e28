"""The two ends of the demo: a golden case's prompts for decode, and decode's tokens against the golden ones."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np


def write_prompts(golden: dict[str, np.ndarray], out: Path) -> None:
  """Writes the prompts of the case as a list of id lists."""
  out.write_text(json.dumps([golden[f"tokens_{i}"].tolist() for i in range(_num_prompts(golden))]))


def differences(golden: dict[str, np.ndarray], rows: list[dict]) -> list[str]:
  """Returns one line for each prompt whose new ids are not the golden continuation; an empty list when all are."""
  if len(rows) != _num_prompts(golden):
    return [f"{len(rows)} rows, expected {_num_prompts(golden)}"]
  lines = []
  for i, row in enumerate(rows):
    found, expected = row["ids"], golden[f"greedy_{i}"].tolist()
    if found != expected:
      equal = next((j for j, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), len(found))
      lines.append(f"prompt {i}: {len(found)} ids, expected {len(expected)}; the first {equal} are equal")
  return lines


def _num_prompts(golden: dict[str, np.ndarray]) -> int:
  return sum(name.startswith("tokens_") for name in golden)


def _first_lines(text: str) -> str:
  """Up to the end of the document, which the demo ignores to compare as many tokens of each row."""
  return text.split("[EOS]", 1)[0].rstrip()


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("verb", choices=("prompts", "check"), help="write FILE, or check decode's --out FILE")
  parser.add_argument("golden", type=Path, metavar="GOLDEN.npz")
  parser.add_argument("file", type=Path, metavar="FILE.json")
  args = parser.parse_args()
  with np.load(args.golden) as stored:
    golden = dict(stored)
  if args.verb == "prompts":
    write_prompts(golden, args.file)
    return 0
  rows = json.loads(args.file.read_text())
  wrong = differences(golden, rows)
  if wrong:
    print("not the golden greedy continuation:", *wrong, sep="\n  ", file=sys.stderr)
    return 1
  for prompt, row in zip(json.loads((args.golden.parent / "golden.json").read_text())["prompts"], rows, strict=True):
    print(f"> {prompt}{_first_lines(row['text'])}")
  tokens = sum(golden[f"greedy_{i}"].size for i in range(_num_prompts(golden)))
  case = args.golden.parent.name
  print(f"all {tokens} tokens equal the golden greedy continuation of the numpy reference (case {case})")
  return 0


if __name__ == "__main__":
  sys.exit(main())
