from __future__ import annotations

import pytest

from kimi_k3.chat import stop_ids
from kimi_k3.chat.control import ControlIds
from kimi_k3.errors import InputError


class Plain:
  """A tokenizer of bytes, with the special tokens given."""

  def __init__(self, **special_ids: int):
    self.special_ids = {f"<|{name}|>": i for name, i in special_ids.items()}

  def encode(self, text: str) -> list[int]:
    return list(text.encode())

  def token_bytes(self, i: int) -> bytes | None:
    return bytes([i]) if i < 256 else None


def test_the_control_ids_are_the_vocabularys_own(tokenizer):
  assert ControlIds.of(tokenizer) == ControlIds(open=163587, close=163588, sep=163589, end_of_msg=163586)
  assert ControlIds.of(Plain(open=300, close=301, sep=302, end_of_msg=303)).open == 300


def test_a_tokenizer_without_control_tokens_is_refused_with_their_names():
  with pytest.raises(InputError, match=r"has no <\|end_of_msg\|>, <\|close\|>: K3's chat format needs"):
    ControlIds.of(Plain(open=300, sep=302))


@pytest.mark.parametrize(
  ("eos", "stops"), [(163586, {163586}), ([163586], {163586}), (None, {163586}), ([7, 8], {7, 8, 163586})]
)
def test_generation_stops_at_the_end_of_a_message_and_where_the_config_says(tokenizer, eos, stops):
  assert stop_ids(tokenizer, eos) == stops


def test_generation_does_not_stop_at_the_tokenizers_own_end(tokenizer):
  assert tokenizer.special_ids["[EOS]"] not in stop_ids(tokenizer, 163586)


def test_without_a_tokenizer_the_config_decides():
  assert stop_ids(None, 5) == {5}
  assert stop_ids(Plain(), [5, 6]) == {5, 6}


@pytest.mark.parametrize("eos", [None, []])
def test_no_stop_at_all_is_refused(eos):
  with pytest.raises(InputError, match="no stop token"):
    stop_ids(Plain(), eos)
