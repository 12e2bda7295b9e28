"""Prompts as lines of JSON: one pass checks and counts them, later passes read them one at a time.

A file may have millions of lines. What is kept of each is its digest, its lengths and whether it is sound, 25 bytes,
and its id where it has one.
"""

from __future__ import annotations

import array
import base64
import contextlib
import dataclasses
import hashlib
import json
import math
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kimi_k3.errors import InputError

PROMPTS = ("prompt", "prompt_ids", "messages")
SAMPLING = ("temperature", "top_k", "top_p", "seed")
CHAT = ("tools", "thinking", "thinking_effort", "tool_choice", "response_format")  # go with messages
KEYS = (*PROMPTS, *CHAT, "id", "max_new_tokens", *SAMPLING)
DIGEST_BYTES = 8  # of a line: two that differ have one digest once in 2**64
MOST_TOKENS = 2**31 - 1
_SHOWN = 5
_QUOTED = 60  # characters of a value in a message
_SAID = 500  # characters of what is wrong with a line: it goes into the completion and to stderr
_BOM = "\ufeff".encode()
_FAULTS_KEPT = 100

Kind = Literal["prompt", "prompt_ids", "messages"]
BLANK, SOUND, BAD = range(3)


@dataclasses.dataclass(frozen=True)
class Rules:
  """What a line is held to.

  Attributes:
    vocab_size: Ids are below it.
    longest: Tokens of a prompt and its new ones together, at most.
    max_new_tokens: Of a line that says nothing.
    encode: Text to ids; None where there is no tokenizer.
    encode_messages: Messages, and those of CHAT that the line has, to ids, or InputError; None where there is no
      tokenizer.
    check_sampling: Raises InputError if the line's sampling options (those of SAMPLING it has) cannot be.
  """

  vocab_size: int
  longest: int
  max_new_tokens: int
  encode: Callable[[str], list[int]] | None
  encode_messages: Callable[[list[Any], Mapping[str, Any]], list[int]] | None
  check_sampling: Callable[[Mapping[str, Any]], object]


@dataclasses.dataclass(frozen=True)
class Line:
  """A line that is not blank.

  Attributes:
    index: Number of the line, from 0. Messages to people count from 1.
    id: What the user calls it, None where that is nothing or not valid.
    kind: Which of PROMPTS it has; None if that is not one.
    prompt_ids: Empty if it is bad.
    max_new_tokens: At most.
    sampling: Those of SAMPLING that it has.
    thinking: What it says of it, true if nothing.
    error: Why it cannot be run; None if it can.
  """

  index: int
  id: str | int | None = None
  kind: Kind | None = None
  prompt_ids: list[int] = dataclasses.field(default_factory=list)
  max_new_tokens: int = 0
  sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  thinking: bool = True
  error: str | None = None


def read_line(index: int, content: bytes, rules: Rules) -> Line | None:
  """Returns what a line says, None for a blank one. What is wrong with it becomes its `error`: nothing is raised."""
  if not content.strip():
    return None
  try:
    value = _object(content)
  except InputError as error:
    return Line(index, error=_short(error))
  known: dict[str, Any] = {"id": value["id"] if _is_id(value.get("id")) else None, "kind": _kind(value)}
  try:
    return _sound_line(index, value, known, rules)
  except InputError as error:
    return Line(index, **known, error=_short(error))


class PromptFile:
  """A file of prompts that has been looked through once.

  Attributes:
    path: As it was given.
    digests: DIGEST_BYTES of each line, blank ones too.
    kinds: BLANK, SOUND or BAD, of each line.
    prompt_tokens: Of each line; 0 if it is not sound.
    new_tokens: At most, of each line; 0 if it is not sound.
    faults: Reasons of the first bad lines, by index.
    messages: Whether a line has messages.
  """

  def __init__(self, path: str, rules: Rules):
    """Reads and checks every line.

    Raises:
      InputError: if the file cannot be read, is no file, or has no line that is not blank.
    """
    self.path, self._rules = path, rules
    self.digests, self.kinds = bytearray(), bytearray()
    self.prompt_tokens, self.new_tokens = array.array("q"), array.array("q")
    self.faults: dict[int, str] = {}
    self.messages = False
    self._refused: Callable[[int, int], str | None] = _never
    self._repeated: dict[int, int] = {}  # lines whose id a line before has, and that line
    ids: dict[str | int, int] = {}
    for index, content in _lines(path):
      line = read_line(index, content, rules)
      if line is not None and line.id is not None and ids.setdefault(line.id, index) != index:
        self._repeated[index] = ids[line.id]
        line = self._checked(line)
      self._note(content, line)
    if not self.rows:
      raise InputError(f'{path}: holds no prompt, expected a line such as {{"prompt": "The capital of France is"}}')

  @property
  def rows(self) -> int:
    """Lines that are not blank, bad ones included."""
    return len(self.kinds) - self.kinds.count(BLANK)

  @property
  def bad(self) -> int:
    """Lines that cannot be run."""
    return self.kinds.count(BAD)

  @property
  def longest_prompt(self) -> int:
    """Tokens; 0 if no line is sound."""
    return max(self.prompt_tokens)

  @property
  def most_new_tokens(self) -> int:
    """That a line asks for; 0 if no line is sound."""
    return max(self.new_tokens)

  def refuse(self, reason: Callable[[int, int], str | None]) -> None:
    """Makes sound lines bad.

    Args:
      reason: Tokens of a prompt and new ones at most, to what is wrong with them, None if nothing is.
    """
    self._refused = reason
    for index, kind in enumerate(self.kinds):
      if kind == SOUND and (said := reason(self.prompt_tokens[index], self.new_tokens[index])) is not None:
        self.kinds[index] = BAD
        self._keep(index, said)

  def read(self, wanted: Callable[[int], bool]) -> Iterator[Line]:
    """Yields the lines that are wanted by index, in order, one at a time.

    Raises:
      InputError: if the file is not what it was.
    """
    index = -1
    for index, content in _lines(self.path):
      if index >= len(self.kinds):
        return  # appended since: for another run
      if self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] != digest(content):
        raise InputError(self._changed(index))
      if self.kinds[index] != BLANK and wanted(index):
        line = read_line(index, content, self._rules)
        assert line is not None
        yield self._checked(line)
    if index + 1 < len(self.kinds):
      raise InputError(self._changed(index + 1))

  def _note(self, content: bytes, line: Line | None) -> None:
    self.digests += digest(content)
    sound = line is not None and line.error is None
    self.kinds.append(BLANK if line is None else SOUND if sound else BAD)
    self.prompt_tokens.append(len(line.prompt_ids) if line is not None and sound else 0)
    self.new_tokens.append(line.max_new_tokens if line is not None and sound else 0)
    if line is not None:
      self.messages = self.messages or line.kind == "messages"
      if line.error is not None:
        self._keep(line.index, line.error)

  def _keep(self, index: int, reason: str) -> None:
    if len(self.faults) < _FAULTS_KEPT:
      self.faults[index] = reason

  def _checked(self, line: Line) -> Line:
    """The line, bad if another has its id or its lengths are refused."""
    error = line.error
    if error is None and line.index in self._repeated:
      error = f"id {_quoted(line.id)} is that of line {self._repeated[line.index] + 1}"
    if error is None:
      error = self._refused(len(line.prompt_ids), line.max_new_tokens)
    return line if error == line.error else dataclasses.replace(line, error=error)

  def _changed(self, index: int) -> str:
    return (
      f"{self.path}: line {index + 1} has changed since it was checked: put it back and start the same command again"
    )


def digest(content: bytes) -> bytes:
  """Returns what stands for a line, its line end aside."""
  return hashlib.blake2b(content.rstrip(b"\r\n"), digest_size=DIGEST_BYTES).digest()


def encode_digests(digests: bytes) -> str:
  """Returns digests as text."""
  return base64.b64encode(digests).decode()


def named_lines(indices: Sequence[int], total: int) -> str:
  """Returns "line 3" or "lines 3, 5 and 9 more": the first indices of so many, counted from 1."""
  shown = ", ".join(str(index + 1) for index in indices[:_SHOWN])
  more = total - min(len(indices), _SHOWN)
  return f"line{'s' if total > 1 else ''} {shown}" + (f" and {more} more" if more else "")


def _never(*_: int) -> None:
  return None


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
  try:
    if not stat.S_ISREG(Path(path).stat().st_mode):
      raise InputError(f"{path}: is no file, expected one that can be read twice: save it first")
    with open(path, "rb") as file:
      yield from enumerate(file)
  except OSError as error:
    raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _short(error: InputError) -> str:
  said = " ".join(str(error).split())
  return said if len(said) <= _SAID else f"{said[:_SAID]}..."


def _object(content: bytes) -> dict[str, Any]:
  if content.startswith(_BOM):
    raise InputError("starts with a byte order mark (EF BB BF), expected plain UTF-8: save the file without it")
  try:
    text = content.rstrip(b"\r\n").decode()
  except UnicodeDecodeError as error:
    raise InputError(f"not UTF-8: {error.reason} at byte {error.start}") from error
  try:
    value = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    if "\\ud" in text or "\\uD" in text:
      json.dumps(value, ensure_ascii=False).encode()  # as it is written
  except UnicodeEncodeError as error:
    raise InputError("holds half of a surrogate pair, which is no character") from error
  except json.JSONDecodeError as error:
    raise InputError(f"not JSON: {error.msg} (column {error.colno})") from error
  except InputError:
    raise
  except (ValueError, RecursionError) as error:
    raise InputError(f"not JSON: {error}") from error
  if not isinstance(value, dict):
    raise InputError(f'found {_quoted(value)}, expected an object such as {{"prompt": "The capital of France is"}}')
  # As tables are often written: what a row lacks is null.
  return {key: found for key, found in value.items() if found is not None}


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  value: dict[str, Any] = {}
  for key, found in pairs:
    if key in value:
      raise InputError(f"{_quoted(key)} given twice in an object")
    value[key] = found
  return value


def _no_constant(name: str) -> Any:
  raise InputError(f"not JSON: {name} is no number there")


def _is_id(value: Any) -> bool:
  return isinstance(value, str) or _is_integer(value)


def _is_integer(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Mapping[str, Any]) -> Kind | None:
  given = [key for key in PROMPTS if key in value]
  return given[0] if len(given) == 1 else None  # pyright: ignore[reportReturnType]


def _sound_line(index: int, value: dict[str, Any], known: dict[str, Any], rules: Rules) -> Line:
  if unknown := [key for key in value if key not in KEYS]:
    raise InputError(f"unknown key {', '.join(map(_quoted, unknown[:_SHOWN]))}, expected any of: {', '.join(KEYS)}")
  if known["kind"] is None:
    given = " and ".join(key for key in PROMPTS if key in value) or "none"
    raise InputError(f"expected one of {', '.join(PROMPTS)}, found {given}")
  if "id" in value and known["id"] is None:
    raise InputError(f"id is {_quoted(value['id'])}, expected text or a whole number")
  new = value.get("max_new_tokens", rules.max_new_tokens)
  if not _is_integer(new) or new < 1:
    raise InputError(f"max_new_tokens is {_quoted(new)}, expected a whole number, 1 or more")
  sampling = _sampling(value, rules)
  ids = _prompt_ids(known["kind"], value, rules)
  if len(ids) + new > rules.longest:
    raise InputError(
      f"{len(ids)} tokens and {new} new ones, expected {rules.longest} at most (max_position_embeddings of the model)"
    )
  return Line(
    index, **known, prompt_ids=ids, max_new_tokens=new, sampling=sampling, thinking=value.get("thinking", True)
  )


def _sampling(value: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
  given = {key: value[key] for key in SAMPLING if key in value}
  for key in ("top_k", "seed"):
    if key in given and not _is_integer(given[key]):
      raise InputError(f"{key} is {_quoted(given[key])}, expected a whole number")
  for key in ("temperature", "top_p"):
    if key in given:
      given[key] = _number(key, given[key])
  rules.check_sampling(given)
  return given


def _number(key: str, found: Any) -> float:
  if _is_integer(found) or isinstance(found, float):
    with contextlib.suppress(OverflowError):
      if math.isfinite(found := float(found)):
        return found
  raise InputError(f"{key} is {_quoted(found)}, expected a number")


def _prompt_ids(kind: Kind, value: Mapping[str, Any], rules: Rules) -> list[int]:
  found = value[kind]
  chat = {key: value[key] for key in CHAT if key in value}
  if chat and kind != "messages":
    raise InputError(f"{', '.join(chat)} given with {kind}, expected with messages only")
  if kind == "prompt_ids":
    return _checked_ids(found, rules.vocab_size)
  if kind == "prompt":
    if not isinstance(found, str):
      raise InputError(f"prompt is {_quoted(found)}, expected text")
    if rules.encode is None:
      raise InputError("prompt needs a tokenizer, and there is none beside the config: give prompt_ids")
    ids = rules.encode(found)
    if not ids:
      raise InputError("prompt is empty, expected text")
  else:
    if not isinstance(found, list) or not found:
      raise InputError(f"messages is {_quoted(found)}, expected a list of messages, one or more")
    for key, kind_of, expected in (("tools", list, "a list"), ("thinking", bool, "true or false")):
      if key in chat and not isinstance(chat[key], kind_of):
        raise InputError(f"{key} is {_quoted(chat[key])}, expected {expected}")
    if rules.encode_messages is None:
      raise InputError("messages need a tokenizer, and there is none beside the config: give prompt_ids")
    ids = rules.encode_messages(found, chat)
  if not 0 <= max(ids) < rules.vocab_size:
    raise InputError(
      f"{kind}: the tokenizer gives id {max(ids)}, outside the vocabulary of {rules.vocab_size}: it is another model's"
    )
  return ids


def _checked_ids(found: Any, vocab_size: int) -> list[int]:
  if not isinstance(found, list) or not found:
    raise InputError(f"prompt_ids is {_quoted(found)}, expected a list of token ids, one or more")
  for place, i in enumerate(found):
    if not _is_integer(i):
      raise InputError(f"prompt_ids: {_quoted(i)} at position {place}, expected a token id")
  faulty = [(place, i) for place, i in enumerate(found) if not 0 <= i < vocab_size]
  if faulty:
    shown = ", ".join(f"{_quoted(i)} at position {place}" for place, i in faulty[:_SHOWN])
    more = f" and {len(faulty) - _SHOWN} more" if len(faulty) > _SHOWN else ""
    raise InputError(f"prompt_ids: {shown}{more}: outside the vocabulary of {vocab_size}")
  return found


def _quoted(value: Any) -> str:
  try:
    text = json.dumps(value)
  except (ValueError, RecursionError):  # a number of thousands of digits
    return f"a {type(value).__name__} too long to show"
  return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."
