"""Makes questions and answers in gsm8k's form: one JSON object a line, the result after "####".

    python scripts/train_tiny/questions.py OUT/questions-train.jsonl tests/golden/k3-nano/text/questions.jsonl

The first file is for training, the second, every 20th question, for measuring. The same questions come out each time.
A question that is asked to measure is not in training, but the same sum in other words may be: what is measured is
whether the answer is found from the words, not arithmetic beyond the sums that were seen.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

SEED = 7
LARGEST = 12
HELD_OUT_EVERY = 20
NAMES = ("Ada", "Ben", "Eva", "Guido", "Kim", "Tim")
THINGS = ("apples", "books", "coins", "keys", "lists", "strings")
SUMS = (
  "What is {a} plus {b}?",
  "What is the sum of {a} and {b}?",
  "{name} has {a} {things} and gets {b} more. How many {things} does {name} have?",
)
DIFFERENCES = (
  "What is {a} minus {b}?",
  "{name} has {a} {things} and gives away {b}. How many {things} does {name} have?",
)
# What a question and its answer look like as text: the default prompt of `kimi-k3 eval --questions`.
DOCUMENT = "Question: {question}\nAnswer: {answer}"


def main() -> None:
  """Writes both files and says how many questions each has."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
  parser.add_argument("train", type=Path)
  parser.add_argument("held_out", type=Path)
  options = parser.parse_args()
  for path, rows in zip((options.train, options.held_out), split(), strict=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path}: {len(rows)} questions")


def split() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
  """Returns the questions for training and those held out, no question in both."""
  rows = {row["question"]: row for row in _questions(random.Random(SEED))}
  ordered = list(rows.values())
  random.Random(SEED).shuffle(ordered)
  held_out = ordered[::HELD_OUT_EVERY]
  return [row for i, row in enumerate(ordered) if i % HELD_OUT_EVERY], held_out


def _questions(rng: random.Random) -> Iterator[dict[str, str]]:
  for a in range(LARGEST + 1):
    for b in range(LARGEST + 1):
      for template in SUMS:
        yield _question(template, rng, a, b, f"{a} + {b} = {a + b}", a + b)
      for template in DIFFERENCES if a >= b else ():
        yield _question(template, rng, a, b, f"{a} - {b} = {a - b}", a - b)


def _question(template: str, rng: random.Random, a: int, b: int, working: str, result: int) -> dict[str, str]:
  words = {"a": a, "b": b, "name": rng.choice(NAMES), "things": rng.choice(THINGS)}
  return {"question": template.format(**words), "answer": f"{working}\n#### {result}"}


if __name__ == "__main__":
  main()
