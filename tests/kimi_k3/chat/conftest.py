"""The small vocabulary with K3's special tokens, and conversations with what must become of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "chat"
CONTROL = re.compile(r"(<\|open\|>|<\|close\|>|<\|sep\|>|<\|end_of_msg\|>)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
  """Runs a test with the argument `conversation` once for each of the golden ones."""
  if "conversation" in metafunc.fixturenames:
    conversations = json.loads((GOLDEN / "conversations.json").read_text())
    metafunc.parametrize("conversation", conversations, ids=[c["name"] for c in conversations])


@pytest.fixture(scope="session")
def tokenizer() -> Any:
  """K3's special tokens at their released ids, 1000 others."""
  from kimi_k3.generate.tokenizer import TiktokenTokenizer

  return TiktokenTokenizer(GOLDEN)


@pytest.fixture(scope="session")
def markup(tokenizer) -> Callable[[str], list[int]]:
  """Returns a function: what a model may have put out, written as text, to ids. Names of control tokens become them."""

  def ids(text: str) -> list[int]:
    made = []
    for piece in CONTROL.split(text):
      made += [tokenizer.special_ids[piece]] if CONTROL.fullmatch(piece) else tokenizer.encode(piece)
    return made

  return ids
