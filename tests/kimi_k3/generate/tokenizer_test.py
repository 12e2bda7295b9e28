from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from kimi_k3.errors import InputError
from kimi_k3.generate.tokenizer import HuggingFaceTokenizer, TiktokenTokenizer, load_tokenizer

# After the 256 bytes, in order of rank.
MERGES = ["he", "ll", "hell", "hello", " w", "or", " wor", "ld", " world", "12", "123", "34", "'s", "é", "你", "你好"]
ID = {text: 256 + i for i, text in enumerate(MERGES)}
END, OPEN = 1000, 1001
SPECIAL = {"added_tokens_decoder": {str(END): {"content": "<|end_of_msg|>"}, str(OPEN): {"content": "<|open|>"}}}


def write_tiktoken(directory: Path, merges: list[str] = MERGES) -> Path:
  tokens = [bytes([b]) for b in range(256)] + [m.encode() for m in merges]
  lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
  (directory / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
  (directory / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
  return directory


@pytest.fixture
def tiktoken(tmp_path) -> TiktokenTokenizer:
  tokenizer = load_tokenizer(write_tiktoken(tmp_path))
  assert isinstance(tokenizer, TiktokenTokenizer)
  return tokenizer


@pytest.mark.parametrize(
  ("text", "ids"),
  [
    ("hello", [ID["hello"]]),
    ("hello world", [ID["hello"], ID[" world"]]),
    ("help", [ID["he"], ord("l"), ord("p")]),
    ("12345", [ID["123"], ord("4"), ord("5")]),  # at most three digits at a time: 345 is never seen as 3|45
    ("he's", [ID["he"], ID["'s"]]),
    ("你好", [ID["你好"]]),
    ("", []),
  ],
)
def test_text_is_split_and_merged_by_rank(tiktoken, text, ids):
  assert tiktoken.encode(text) == ids


@pytest.mark.parametrize("text", ["hello world", "Grüße, 你好!\n\n\tx  = 12345;", "naïve café 🙂", " \r\n ", "\x00"])
def test_text_comes_back(tiktoken, text):
  assert tiktoken.decode(tiktoken.encode(text)) == text


def test_a_special_token_in_text_stays_text(tiktoken):
  ids = tiktoken.encode("<|end_of_msg|>")
  assert END not in ids
  assert len(ids) > 1
  assert tiktoken.decode(ids) == "<|end_of_msg|>"


def test_special_ids_are_shown_by_name(tiktoken):
  assert tiktoken.decode([OPEN, ID["hello"], END]) == "<|open|>hello<|end_of_msg|>"


def test_ids_without_a_token_are_shown_by_number_and_spoil_nothing_else(tiktoken):
  euro = list("€".encode())  # three ids make one character
  assert tiktoken.decode([*euro, 999, *euro]) == "€<|999|>€"


def test_bytes_that_are_no_text_are_replaced(tiktoken):
  assert tiktoken.decode([0xE2, 0x82, ID["hello"]]) == "\N{REPLACEMENT CHARACTER}hello"


def test_a_changed_file_is_read_anew(tmp_path):
  first = load_tokenizer(write_tiktoken(tmp_path))
  second = load_tokenizer(write_tiktoken(tmp_path, ["lo"]))
  assert first.encode("lo") == [ord("l"), ord("o")]
  assert second.encode("lo") == [256]


@pytest.mark.parametrize(
  ("content", "said"),
  [
    (b"aGVsbG8= 0 1\n", "line 1"),
    (b"aGVsbG8= x\n", "line 1"),
    (b"!!! 0\n", "line 1"),
    (b"", "256 of the 256 single bytes have no token"),
    (b"aGVsbG8= 0\n", "256 of the 256 single bytes have no token"),
  ],
)
def test_a_file_that_is_no_tiktoken_file_is_refused(tmp_path, content, said):
  (tmp_path / "tiktoken.model").write_bytes(content)
  with pytest.raises(InputError, match=f"tiktoken.model: not a tiktoken file: .*{said}"):
    load_tokenizer(tmp_path)


@pytest.mark.parametrize(
  "content", ["{", "[]", '{"added_tokens_decoder": {"x": {"content": "a"}}}', '{"added_tokens_decoder": {"7": {}}}']
)
def test_a_broken_tokenizer_config_is_refused(tmp_path, content):
  write_tiktoken(tmp_path)
  (tmp_path / "tokenizer_config.json").write_text(content)
  with pytest.raises(InputError, match=r"tokenizer_config\.json: cannot be read"):
    load_tokenizer(tmp_path)


def test_two_tokens_with_one_id_are_refused(tmp_path):
  write_tiktoken(tmp_path)
  special = {"added_tokens_decoder": {"258": {"content": "<|open|>"}}}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
  with pytest.raises(InputError, match="give an id to two tokens"):
    load_tokenizer(tmp_path)
  write_tiktoken(tmp_path)
  lines = (tmp_path / "tiktoken.model").read_bytes()
  (tmp_path / "tiktoken.model").write_bytes(lines + base64.b64encode(b"xyz") + b" 3\n")
  with pytest.raises(InputError, match="give an id to two tokens"):
    load_tokenizer(tmp_path)


def test_no_special_tokens_are_needed(tmp_path):
  write_tiktoken(tmp_path)
  (tmp_path / "tokenizer_config.json").unlink()
  assert load_tokenizer(tmp_path).decode([ID["hello"], END]) == f"hello<|{END}|>"


def test_without_files_there_is_no_tokenizer(tmp_path):
  assert load_tokenizer(tmp_path) is None


@pytest.fixture
def huggingface(tmp_path) -> HuggingFaceTokenizer:
  words = {"hello": 0, "world": 1, "[UNK]": 2}
  plain = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
  described = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": 3, "content": "<|end_of_msg|>"} | plain, {"id": 4, "content": "<|open|>"} | plain],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": {
      "type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<|open|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
      "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
      "special_tokens": {"<|open|>": {"id": "<|open|>", "ids": [4], "tokens": ["<|open|>"]}},
    },
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
  }  # fmt: skip
  (tmp_path / "tokenizer.json").write_text(json.dumps(described))
  tokenizer = load_tokenizer(tmp_path)
  assert isinstance(tokenizer, HuggingFaceTokenizer)
  return tokenizer


def test_a_tokenizer_json_is_read_and_adds_nothing_of_its_own(huggingface):
  assert huggingface.encode("hello world") == [0, 1]
  assert huggingface.decode([0, 1, 3]) == "hello world <|end_of_msg|>"


def test_a_special_token_in_text_is_not_one_for_a_tokenizer_json_either(huggingface):
  assert huggingface.encode("hello <|end_of_msg|>") == [0, 2]


def test_a_broken_tokenizer_json_is_refused(tmp_path):
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(InputError, match=r"tokenizer\.json: not a tokenizer"):
    load_tokenizer(tmp_path)


def test_the_released_form_comes_before_a_tokenizer_json(huggingface, tmp_path):
  del huggingface
  assert isinstance(load_tokenizer(write_tiktoken(tmp_path)), TiktokenTokenizer)
