"""What the chat format needs of a tokenizer: plain text to ids, bytes of an id, and the four control tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kimi_k3.chat.special_tokens import CHAT_CONTROL, CLOSE, END_OF_MSG, OPEN, SEP
from kimi_k3.errors import InputError


@runtime_checkable
class ChatTokenizer(Protocol):
  """What chat needs of a tokenizer; `kimi_k3.generate.tokenizer` has two."""

  @property
  def special_ids(self) -> Mapping[str, int]:
    """Id of each special token."""
    ...

  def encode(self, text: str) -> list[int]:
    """Returns the ids of plain text; nothing in it is read as a special token."""
    ...

  def token_bytes(self, i: int) -> bytes | None:
    """Returns the bytes of an ordinary token, None for a special token and for an id without a token."""
    ...


@dataclass(frozen=True)
class ControlIds:
  """Ids of the control tokens in one vocabulary."""

  open: int
  close: int
  sep: int
  end_of_msg: int

  @classmethod
  def of(cls, tokenizer: ChatTokenizer) -> ControlIds:
    """Returns the ids in a tokenizer's vocabulary. Raises InputError if it lacks one: then it is not K3's."""
    ids = tokenizer.special_ids
    if missing := [name for name in CHAT_CONTROL if name not in ids]:
      raise InputError(
        f"the tokenizer has no {', '.join(missing)}: K3's chat format needs K3's special tokens; "
        "check tokenizer_config.json, or give prompts as text or ids"
      )
    return cls(open=ids[OPEN], close=ids[CLOSE], sep=ids[SEP], end_of_msg=ids[END_OF_MSG])


def stop_ids(tokenizer: ChatTokenizer | None, config_eos: int | Collection[int] | None) -> frozenset[int]:
  """Returns the ids that end a message: the tokenizer's <|end_of_msg|> and the config's eos_token_id.

  For K3 both are 163586. The tokenizer's own [EOS], 163585, ends a document and is not among them.

  Args:
    tokenizer: None if there is none: then the config alone decides.
    config_eos: `eos_token_id` of the checkpoint's config: an id, several, or None.

  Raises:
    InputError: if neither names an id: generation would never stop on its own.
  """
  configured = () if config_eos is None else (config_eos,) if isinstance(config_eos, int) else config_eos
  end = None if tokenizer is None else tokenizer.special_ids.get(END_OF_MSG)
  ids = frozenset(configured) | (frozenset() if end is None else {end})
  if not ids:
    raise InputError(
      f"no stop token: the config has no eos_token_id and the tokenizer no {END_OF_MSG}; set eos_token_id"
    )
  return ids
