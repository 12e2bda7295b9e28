"""Golden case of the trained model: text prompts run by the numpy reference, with its margins.

    python scripts/train_tiny/golden.py CHECKPOINT OUT --prompts PROMPTS.json

PROMPTS.json is a list of texts. OUT/golden.npz is what tests/reference/make_golden.py stores of prompts,
OUT/golden.json the smallest gaps that rounding would have to bridge, the hashes of the checkpoint, and the texts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "MaxText"), str(ROOT / "tests" / "reference")]

from k3_reference import load_checkpoint  # noqa: E402
from kimi_k3.generate.tokenizer import load_tokenizer  # noqa: E402
from make_golden import make_golden  # noqa: E402


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("checkpoint", type=Path)
  parser.add_argument("out", type=Path)
  parser.add_argument("--prompts", type=Path, required=True, metavar="FILE.json", help="a list of texts")
  parser.add_argument("--greedy", type=int, default=48, help="new tokens of each prompt")
  args = parser.parse_args()
  texts = json.loads(args.prompts.read_text())
  tokenizer = load_tokenizer(args.checkpoint)
  prompts = [np.array(tokenizer.encode(text), np.int32) for text in texts]
  arrays, gaps = make_golden(load_checkpoint(args.checkpoint), prompts, args.greedy)
  hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(args.checkpoint.iterdir())}
  notes = {
    "prompt_lengths": [len(prompt) for prompt in prompts],
    "prompts": texts,
    "continuations": [tokenizer.decode(arrays[f"greedy_{i}"].tolist()) for i in range(len(prompts))],
    "checkpoint": {"sha256": hashes},
  }
  args.out.mkdir(parents=True, exist_ok=True)
  np.savez_compressed(args.out / "golden.npz", **arrays)
  (args.out / "golden.json").write_text(json.dumps(notes | gaps, indent=2) + "\n")
  for text, continuation in zip(texts, notes["continuations"], strict=True):
    print(f"{text!r} -> {continuation!r}")
  print(gaps)


if __name__ == "__main__":
  main()
