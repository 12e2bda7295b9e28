from __future__ import annotations

from kimi_k3.chat.special_tokens import CHAT_CONTROL, NAMED, RELEASED


def test_each_of_the_256_ids_behind_the_ranks_has_a_name_of_its_own():
  assert list(RELEASED.values()) == list(range(163584, 163840))


def test_ids_without_a_name_are_reserved_by_their_number():
  assert RELEASED["<|reserved_token_163592|>"] == 163592
  assert "<|reserved_token_163839|>" not in RELEASED, "that is [PAD]"
  assert len(RELEASED) - len(NAMED) == 240


def test_control_tokens_follow_each_other():
  assert [RELEASED[name] for name in CHAT_CONTROL] == [163586, 163587, 163588, 163589]


def test_the_names_are_those_of_the_golden_vocabulary(tokenizer):
  assert {i: name for name, i in tokenizer.special_ids.items()} == NAMED
