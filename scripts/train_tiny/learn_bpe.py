"""Learns a byte-pair vocabulary of the form that K3 ships: tiktoken.model and tokenizer_config.json.

    python scripts/train_tiny/learn_bpe.py OUT --vocab-size 1024 --text FILE.txt --questions FILE.jsonl

256 bytes, then the pairs that are most frequent in the text as the released tokenizer splits it, then 16 ids of which
the special tokens take the places that they have at the end of the released vocabulary: [BOS], [EOS],
<|end_of_msg|>, <|open|>, <|close|>, <|sep|> first, [PAD] last. Ties go to the pair of smaller ids, so the same
text gives the same vocabulary.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import regex
from questions import DOCUMENT

from kimi_k3.generate.tokenizer import SPLIT_PATTERN, TIKTOKEN_FILE, TiktokenTokenizer

SPECIAL_PLACES = 16
# Offsets from the first special id. Released: 163584 and on, 163605 for media, 163839 for the pad.
SPECIAL = {
  0: "[BOS]",
  1: "[EOS]",
  2: "<|end_of_msg|>",
  3: "<|open|>",
  4: "<|close|>",
  5: "<|sep|>",
  6: "<|media_pad|>",
  SPECIAL_PLACES - 1: "[PAD]",
}


def main() -> None:
  """Writes both files and says how many bytes a token has."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
  parser.add_argument("out", type=Path)
  parser.add_argument("--vocab-size", type=int, required=True)
  parser.add_argument("--text", type=Path, required=True)
  parser.add_argument("--questions", type=Path, required=True)
  options = parser.parse_args()
  texts = [options.text.read_text()]
  texts += [DOCUMENT.format(**json.loads(line)) for line in options.questions.read_text().splitlines()]
  tokens = learn(texts, options.vocab_size - SPECIAL_PLACES)
  write(options.out, tokens)
  encoded = len(TiktokenTokenizer(options.out).encode(texts[0]))
  print(f"{options.out}: {len(tokens)} tokens, {len(texts[0].encode()) / encoded:.2f} bytes a token")


def learn(texts: Iterable[str], size: int) -> list[bytes]:
  """Returns `size` tokens in the order of their ids: the 256 bytes, then the pairs, most frequent first."""
  split = regex.compile(SPLIT_PATTERN, regex.V1)
  counts = Counter(word.group().encode() for text in texts for word in split.finditer(text))
  words, weights = [list(word) for word in counts], list(counts.values())
  tokens = [bytes([b]) for b in range(256)]
  frequency: Counter[tuple[int, int]] = Counter()
  holders: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
  for i, word in enumerate(words):
    _count(word, i, weights[i], frequency, holders)
  while len(tokens) < size:
    pair = min(frequency, key=lambda p: (-frequency[p], p))
    for i in list(holders[pair]):
      _count(words[i], i, -weights[i], frequency, holders)
      words[i] = _merged(words[i], pair, len(tokens))
      _count(words[i], i, weights[i], frequency, holders)
    tokens.append(tokens[pair[0]] + tokens[pair[1]])
  if len(set(tokens)) < len(tokens):
    raise AssertionError("two pairs made the same token: a rank would be lost")
  return tokens


def _count(word: list[int], i: int, weight: int, frequency: Counter, holders: defaultdict) -> None:
  """Adds the pairs of a word, or takes them away with a negative weight."""
  for pair in pairwise(word):
    frequency[pair] += weight
    (holders[pair].add if weight > 0 else holders[pair].discard)(i)


def _merged(word: list[int], pair: tuple[int, int], token: int) -> list[int]:
  merged, i = [], 0
  while i < len(word):
    if tuple(word[i : i + 2]) == pair:
      merged.append(token)
      i += 2
    else:
      merged.append(word[i])
      i += 1
  return merged


def write(out: Path, tokens: list[bytes]) -> None:
  """Writes tiktoken.model and tokenizer_config.json."""
  out.mkdir(parents=True, exist_ok=True)
  lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
  (out / TIKTOKEN_FILE).write_text("".join(lines))
  flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False) | {"special": True}
  config = {
    "added_tokens_decoder": {str(len(tokens) + i): {"content": name} | flags for i, name in SPECIAL.items()},
    "additional_special_tokens": [name for name in SPECIAL.values() if name.startswith("<|")],
    "bos_token": "[BOS]",
    "clean_up_tokenization_spaces": False,
    "eos_token": "[EOS]",
    "pad_token": "[PAD]",
    "tokenizer_class": "TikTokenTokenizer",
  }
  (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
  main()
