"""Writes documents as token ids in the indexed form of Megatron-LM, which MaxText's input pipeline reads.

    python scripts/train_tiny/write_ids.py OUT/train --tokenizer DIR --text FILE.txt --questions FILE.jsonl

OUT/train.bin holds the ids of all documents, uint16, [EOS] behind each; OUT/train.idx where each begins. MaxText cuts
it into windows, and says by segment ids where a document ends (`grain_file_type: mmap_npy`).
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path

import numpy as np
from corpus import SEPARATOR
from questions import DOCUMENT

from kimi_k3.generate.tokenizer import TiktokenTokenizer

# The header of an .idx file: magic, version, code of the dtype, sequences, documents.
MAGIC = b"MMIDIDX\0\0"
VERSION = 1
UINT16 = 8


def main() -> None:
  """Writes both files and says how many documents and tokens they hold."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
  parser.add_argument("out", type=Path, help="without a suffix")
  parser.add_argument("--tokenizer", type=Path, required=True, help="where tiktoken.model is")
  parser.add_argument("--text", type=Path, required=True, help="documents parted by two empty lines")
  parser.add_argument("--questions", type=Path, help="JSON lines; each becomes a document")
  options = parser.parse_args()
  documents = options.text.read_text().removesuffix("\n").split(SEPARATOR)
  if options.questions:
    documents += [DOCUMENT.format(**json.loads(line)) for line in options.questions.read_text().splitlines()]
  tokenizer = TiktokenTokenizer(options.tokenizer)
  end = end_of_document(options.tokenizer)
  ids = [np.array([*tokenizer.encode(text), end], np.uint16) for text in documents]
  write(options.out, ids)
  print(f"{options.out}: {len(ids)} documents, {sum(map(len, ids))} tokens")


def end_of_document(directory: Path) -> int:
  """Returns the id of [EOS]."""
  added = json.loads((directory / "tokenizer_config.json").read_text())["added_tokens_decoder"]
  return next(int(i) for i, token in added.items() if token["content"] == "[EOS]")


def write(out: Path, documents: list[np.ndarray]) -> None:
  """Writes OUT.bin and OUT.idx: one sequence a document."""
  out.parent.mkdir(parents=True, exist_ok=True)
  out.with_suffix(".bin").write_bytes(np.concatenate(documents).tobytes())
  sizes = np.array([len(d) for d in documents], np.int32)
  starts = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64)]) * np.dtype(np.uint16).itemsize
  header = MAGIC + struct.pack("<QBQQ", VERSION, UINT16, len(documents), len(documents) + 1)
  documents_start = np.arange(len(documents) + 1, dtype=np.int64)
  body = sizes.tobytes() + starts.astype(np.int64).tobytes() + documents_start.tobytes()
  out.with_suffix(".idx").write_bytes(header + body)


if __name__ == "__main__":
  main()
