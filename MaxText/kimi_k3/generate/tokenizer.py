"""Text to ids and back, by the tokenizer files beside a checkpoint. Ids need none of this."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Protocol, runtime_checkable

from kimi_k3.errors import InputError

TIKTOKEN_FILE = "tiktoken.model"
HF_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"

# How the released tokenizer splits text before merging bytes: runs of Han, words with their contractions, up to three
# digits, punctuation, line ends, spaces. Source: the tokenizer published with Kimi K2, which K3 shares.
_HAN = r"[\p{Han}]+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join((
    _HAN,
    f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
    f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))  # fmt: skip


@runtime_checkable
class Tokenizer(Protocol):
  """What decoding needs of a tokenizer."""

  def encode(self, text: str) -> list[int]:
    """Returns the ids of plain text; nothing in it is read as a special token."""
    ...

  def decode(self, ids: list[int]) -> str:
    """Returns the text of ids, special tokens by name."""
    ...


class TiktokenTokenizer:
  """The released `tiktoken.model`: byte-pair ranks, with special tokens from tokenizer_config.json."""

  def __init__(self, directory: Path):
    import tiktoken

    ranks, special = _ranks(directory / TIKTOKEN_FILE), _special_tokens(directory)
    ids = [*ranks.values(), *special.values()]
    if len(set(ids)) < len(ids):
      raise InputError(f"{directory}: {TIKTOKEN_FILE} and {_CONFIG_FILE} give an id to two tokens")
    self._encoding = tiktoken.Encoding("kimi", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special)

  def encode(self, text: str) -> list[int]:
    """Returns the ids of plain text."""
    return self._encoding.encode(text, disallowed_special=())

  def decode(self, ids: list[int]) -> str:
    """Returns the text; bytes that are no UTF-8 become replacement characters, ids without a token <|id|>."""
    return b"".join(map(self._bytes, ids)).decode("utf-8", errors="replace")

  def _bytes(self, i: int) -> bytes:
    try:
      return self._encoding.decode_single_token_bytes(i)
    except KeyError:
      return f"<|{i}|>".encode()


class HuggingFaceTokenizer:
  """A `tokenizer.json`."""

  def __init__(self, directory: Path):
    import tokenizers

    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / HF_FILE))
    except Exception as error:  # the library raises nothing narrower
      raise InputError(f"{directory / HF_FILE}: not a tokenizer: {error}") from error
    self._tokenizer.encode_special_tokens = True  # a user's text is text, whatever it looks like

  def encode(self, text: str) -> list[int]:
    """Returns the ids of plain text."""
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: list[int]) -> str:
    """Returns the text."""
    return self._tokenizer.decode(ids, skip_special_tokens=False)


def load_tokenizer(directory: Path) -> Tokenizer | None:
  """Returns the tokenizer whose files are in `directory`, or None if there are none."""
  if (directory / TIKTOKEN_FILE).is_file():
    return TiktokenTokenizer(directory)
  if (directory / HF_FILE).is_file():
    return HuggingFaceTokenizer(directory)
  return None


def _ranks(path: Path) -> dict[bytes, int]:
  """Rank of each token. Read here because tiktoken's own reader keeps a copy by path and serves that ever after."""
  ranks = {}
  for number, line in enumerate(path.read_bytes().splitlines(), 1):
    try:
      token, rank = line.split()
      ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError as error:
      raise InputError(f"{path}: not a tiktoken file: line {number}: {error}") from error
  if missing := sum(bytes([b]) not in ranks for b in range(256)):
    raise InputError(f"{path}: not a tiktoken file: {missing} of the 256 single bytes have no token")
  return ranks


def _special_tokens(directory: Path) -> dict[str, int]:
  path = directory / _CONFIG_FILE
  if not path.is_file():
    return {}
  try:
    added = json.loads(path.read_text()).get("added_tokens_decoder", {})
    return {token["content"]: int(i) for i, token in added.items()}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise InputError(f"{path}: cannot be read: {error}") from error
