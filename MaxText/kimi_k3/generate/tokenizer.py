"""Text to ids and back, by the tokenizer files beside a checkpoint. Ids need none of this."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from kimi_k3.chat.control import ChatTokenizer
from kimi_k3.chat.special_tokens import CHAT_CONTROL, NUM_RANKS, NUM_SPECIAL, RELEASED, reserved_name
from kimi_k3.errors import InputError

TIKTOKEN_FILE = "tiktoken.model"
HF_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"

# The released tokenizer cuts long text before it splits it, or tiktoken takes quadratic time and may overflow. No merge
# goes across a cut, so the cuts decide ids. Source: tokenization_kimi.py of moonshotai/Kimi-K3, as restated alike by
# NVIDIA-NeMo/Automodel (nemo_automodel/components/models/kimi_k3/tokenization.py at 0a8e1be0b62d) and
# google-deepmind/simply (simply/zoo/kimi_k3/utils/tokenization.py at b5aec4a7b6f3).
_MAX_CHARACTERS = 400_000
_MAX_RUN = 25_000  # characters in a row that are all white space, or all not
_RUN = re.compile(r"\s+|\S+")  # \s is str.isspace here, which the released code asks

# How the released tokenizer splits text before merging bytes: runs of Han, words with their contractions, up to three
# digits, punctuation, line ends, spaces. Source: the tokenizer published with Kimi K2, which K3 shares; the two
# restatements named above have the same pattern for K3.
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
class Tokenizer(ChatTokenizer, Protocol):
  """What decoding needs of a tokenizer."""

  def decode(self, ids: list[int]) -> str:
    """Returns the text of ids, special tokens by name."""
    ...


class TiktokenTokenizer:
  """The released `tiktoken.model`: byte-pair ranks, with special tokens from tokenizer_config.json.

  Without that file a vocabulary of K3's size has K3's special tokens, any other has none. A vocabulary of K3's size
  has a name for each of its 256 special ids, as the released tokenizer has.
  """

  def __init__(self, directory: Path):
    import tiktoken

    ranks = _ranks(directory / TIKTOKEN_FILE)
    special = _special_tokens(directory, len(ranks))
    ids = [*ranks.values(), *special.values()]
    if len(set(ids)) < len(ids):
      raise InputError(f"{directory}: {TIKTOKEN_FILE} and {_CONFIG_FILE} give an id to two tokens")
    self._special = special
    self._bytes_of = {rank: token for token, rank in ranks.items()}
    self._names = {i: name for name, i in special.items()}
    self._encoding = tiktoken.Encoding("kimi", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special)

  @property
  def special_ids(self) -> Mapping[str, int]:
    """Id of each special token."""
    return self._special

  def encode(self, text: str) -> list[int]:
    """Returns the ids of plain text, the released tokenizer's for texts of any length."""
    return [i for piece in _pieces(text) for i in self._encoding.encode(piece, disallowed_special=())]

  def decode(self, ids: list[int]) -> str:
    """Returns the text; bytes that are no UTF-8 become replacement characters, ids without a token <|id|>."""
    return b"".join(map(self._bytes, ids)).decode("utf-8", errors="replace")

  def token_bytes(self, i: int) -> bytes | None:
    """Returns the bytes of an ordinary token, None for a special token and for an id without a token."""
    return self._bytes_of.get(i)

  def _bytes(self, i: int) -> bytes:
    token = self._bytes_of.get(i)
    return self._names.get(i, f"<|{i}|>").encode() if token is None else token


class HuggingFaceTokenizer:
  """A `tokenizer.json`."""

  def __init__(self, directory: Path):
    import tokenizers

    self._path = directory / HF_FILE
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(str(self._path))
    except Exception as error:  # the library raises nothing narrower
      raise InputError(f"{self._path}: not a tokenizer: {error}") from error
    self._tokenizer.encode_special_tokens = True  # a user's text is text, whatever it looks like
    added = self._tokenizer.get_added_tokens_decoder()
    self._special = {token.content: i for i, token in added.items()}
    self._special_ids = frozenset(added)
    self._byte_level = _is_byte_level(json.loads(self._path.read_text(encoding="utf-8")).get("decoder"))

  @property
  def special_ids(self) -> Mapping[str, int]:
    """Id of each added token."""
    return self._special

  def encode(self, text: str) -> list[int]:
    """Returns the ids of plain text."""
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: list[int]) -> str:
    """Returns the text."""
    return self._tokenizer.decode(ids, skip_special_tokens=False)

  def token_bytes(self, i: int) -> bytes | None:
    """Returns the bytes of an ordinary token, None for an added token and for an id without a token.

    Raises:
      InputError: unless the tokenizer is a byte-level one: others have no bytes for an id alone.
    """
    if not self._byte_level:
      raise InputError(f"{self._path}: no byte-level tokenizer, and chat needs the bytes of each token")
    token = None if i in self._special_ids else self._tokenizer.id_to_token(i)
    return None if token is None else bytes(_BYTE_OF_CHARACTER[character] for character in token)


def load_tokenizer(directory: Path) -> Tokenizer | None:
  """Returns the tokenizer whose files are in `directory`, or None if there are none."""
  if (directory / TIKTOKEN_FILE).is_file():
    return TiktokenTokenizer(directory)
  if (directory / HF_FILE).is_file():
    return HuggingFaceTokenizer(directory)
  return None


def _pieces(text: str) -> Iterator[str]:
  """The pieces of a text that the released tokenizer splits on their own: blocks, and these inside of long runs."""
  for block in (text[i : i + _MAX_CHARACTERS] for i in range(0, len(text), _MAX_CHARACTERS)):
    start = 0
    for run in _RUN.finditer(block) if len(block) > _MAX_RUN else ():
      for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
        yield block[start:cut]
        start = cut
    yield block[start:]


def _byte_of_character() -> dict[str, int]:
  """The byte of each character in a byte-level tokenizer.json: GPT-2's table.

  Bytes that print in Latin-1 are their own character, the others are U+0100 and on, in order.
  """
  own = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
  others = [b for b in range(256) if b not in own]
  return {chr(b): b for b in own} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _is_byte_level(decoder: object) -> bool:
  if not isinstance(decoder, dict):
    return False
  return decoder.get("type") == "ByteLevel" or any(map(_is_byte_level, decoder.get("decoders", ())))


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


def _special_tokens(directory: Path, num_ranks: int) -> dict[str, int]:
  path, released_size = directory / _CONFIG_FILE, num_ranks == NUM_RANKS
  if not path.is_file():
    return dict(RELEASED) if released_size else {}
  try:
    added = json.loads(path.read_text()).get("added_tokens_decoder", {})
    names = {int(i): token["content"] for i, token in added.items()}
    special = {name: i for i, name in names.items()}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise InputError(f"{path}: cannot be read: {error}") from error
  if len(special) < len(names):
    raise InputError(f"{path}: added_tokens_decoder gives two ids to one token")
  if released_size:
    _check_control(special, path)
    special |= {reserved_name(i): i for i in range(NUM_RANKS, NUM_RANKS + NUM_SPECIAL) if i not in names}
  return special


def _check_control(special: Mapping[str, int], path: Path) -> None:
  """A file with K3's ranks and K3's names has K3's ids; with none of the names it is another model's, as Kimi K2's."""
  if not any(name in special for name in CHAT_CONTROL):
    return
  if wrong := [name for name in CHAT_CONTROL if special.get(name) != RELEASED[name]]:
    found = ", ".join(f"{name} is {special.get(name, 'missing')}, expected {RELEASED[name]}" for name in wrong)
    raise InputError(f"{path}: {found}: not K3's ids; take the file of the release, or none")
