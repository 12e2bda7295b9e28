from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path

import pytest

from kimi_k3.chat import encode_conversation, parse
from kimi_k3.chat.special_tokens import CHAT_CONTROL, NUM_RANKS, RELEASED
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


def test_an_ordinary_token_has_bytes_and_other_ids_have_none(tiktoken):
  assert tiktoken.token_bytes(0xE2) == b"\xe2"
  assert tiktoken.token_bytes(ID["你好"]) == "你好".encode()
  assert tiktoken.token_bytes(OPEN) is tiktoken.token_bytes(999) is None
  assert tiktoken.special_ids == {"<|end_of_msg|>": END, "<|open|>": OPEN}


def released_pieces(text: str) -> list[str]:
  """The rule of the released code, character by character: blocks, and in them no run of one kind beyond 25000."""
  pieces = []
  for first in range(0, len(text), 400_000):
    block = text[first : first + 400_000]
    start, run = 0, 0
    for i, character in enumerate(block):
      run = run + 1 if i and block[i - 1].isspace() == character.isspace() else 1
      if run > 25_000:
        pieces.append(block[start:i])
        start, run = i, 1
    pieces.append(block[start:])
  return pieces


@pytest.mark.parametrize(
  "text",
  [
    "ll" * 12_500,  # one run at the limit
    "ll" * 12_500 + "ll",
    "l" + "ll" * 40_000 + " l",
    " " * 25_001 + "hello",
    "\x1c\u3000\u200b" * 9_000 + " " * 60_000,  # what Python takes for white space, and what it does not
    "he " * 134_000,  # longer than a block
    "x" * 399_999 + "hello" + "  " * 30_000 + "hello",
  ],
  ids=len,
)
def test_long_text_is_cut_where_the_released_tokenizer_cuts_it(tiktoken, text):
  pieces = released_pieces(text)
  assert "".join(pieces) == text
  assert tiktoken.encode(text) == [i for piece in pieces for i in tiktoken._encoding.encode_ordinary(piece)]


def test_a_cut_of_a_long_run_changes_the_ids(tiktoken):
  assert tiktoken.encode("l" * 25_001) == [ID["ll"]] * 12_500 + [ord("l")]
  assert tiktoken.encode("l" + "l" * 25_001) == [ID["ll"]] * 12_501
  assert tiktoken.encode("é" + "l" * 25_001)[-2:] == [ord("l"), ID["ll"]], "the l before the cut is left alone"


@pytest.fixture(scope="module")
def released_size(tmp_path_factory) -> Path:
  """As many ranks as K3 has: the 256 bytes, all pairs of bytes, some of three."""
  directory = tmp_path_factory.mktemp("released")
  tokens = itertools.chain.from_iterable(itertools.product(range(256), repeat=n) for n in (1, 2, 3))
  lines = [b"%s %d\n" % (base64.b64encode(bytes(t)), i) for i, t in enumerate(itertools.islice(tokens, NUM_RANKS))]
  (directory / "tiktoken.model").write_bytes(b"".join(lines))
  return directory


def specials(**changed: int | None) -> str:
  """A tokenizer_config.json with K3's names, some of them elsewhere."""
  names = {name: RELEASED[name] for name in CHAT_CONTROL} | {f"<|{name}|>": i for name, i in changed.items()}
  return json.dumps({"added_tokens_decoder": {str(i): {"content": n} for n, i in names.items() if i is not None}})


def test_k3s_ranks_alone_come_with_k3s_special_tokens(released_size):
  tokenizer = TiktokenTokenizer(released_size)
  assert tokenizer.special_ids == RELEASED
  assert tokenizer.decode([163586, 163592, 163839]) == "<|end_of_msg|><|reserved_token_163592|>[PAD]"
  assert max(tokenizer.encode("<|open|><|reserved_token_163592|>")) < NUM_RANKS


@pytest.mark.parametrize(
  ("config", "said"),
  [
    (
      specials(open=163588, close=163587),
      r"<\|open\|> is 163588, expected 163587, <\|close\|> is 163587, expected 163588",
    ),
    (specials(sep=None), r"<\|sep\|> is missing, expected 163589"),
    (specials(end_of_msg=163585), r"<\|end_of_msg\|> is 163585, expected 163586"),
  ],
)
def test_k3s_ranks_with_control_tokens_elsewhere_are_refused(released_size, config, said):
  path = released_size / "tokenizer_config.json"
  path.write_text(config)
  try:
    with pytest.raises(InputError, match=f"tokenizer_config.json: {said}: not K3's ids"):
      TiktokenTokenizer(released_size)
  finally:
    path.unlink()


def test_the_same_ranks_with_another_models_special_tokens_are_that_models(released_size):
  path = released_size / "tokenizer_config.json"
  path.write_text(json.dumps({"added_tokens_decoder": {"163586": {"content": "<|im_end|>"}}}))
  try:
    tokenizer = TiktokenTokenizer(released_size)
  finally:
    path.unlink()
  assert tokenizer.decode([163586, 163587]) == "<|im_end|><|reserved_token_163587|>"
  with pytest.raises(InputError, match=r"the tokenizer has no <\|end_of_msg\|>"):
    encode_conversation(tokenizer, [{"role": "user", "content": "hi"}])


def test_a_token_with_two_ids_is_refused(tmp_path):
  write_tiktoken(tmp_path)
  twice = {"added_tokens_decoder": {"1000": {"content": "<|open|>"}, "1001": {"content": "<|open|>"}}}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(twice))
  with pytest.raises(InputError, match="two ids to one token"):
    load_tokenizer(tmp_path)


def test_a_changed_file_is_read_anew(tmp_path):
  first = TiktokenTokenizer(write_tiktoken(tmp_path))
  second = TiktokenTokenizer(write_tiktoken(tmp_path, ["lo"]))
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
  assert TiktokenTokenizer(tmp_path).decode([ID["hello"], END]) == f"hello<|{END}|>"


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


@pytest.fixture
def byte_level(tmp_path) -> HuggingFaceTokenizer:
  """A byte-level tokenizer.json with K3's control tokens."""
  from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

  vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
  vocab |= {"he": 256, "\u00f0\u0141": 257}  # the second is half of a character: bytes f0 9f
  made = Tokenizer(models.BPE(vocab, [("h", "e"), ("\u00f0", "\u0141")]))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.Sequence([decoders.ByteLevel()])
  made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CHAT_CONTROL])
  made.save(str(tmp_path / "tokenizer.json"))
  tokenizer = load_tokenizer(tmp_path)
  assert isinstance(tokenizer, HuggingFaceTokenizer)
  return tokenizer


def test_each_token_of_a_byte_level_tokenizer_json_has_its_bytes(byte_level):
  text = "he said: \N{ROCKET} \x00\xad\xff"
  assert b"".join(byte_level.token_bytes(i) for i in byte_level.encode(text)) == text.encode()
  assert byte_level.token_bytes(257) == b"\xf0\x9f"
  assert byte_level.token_bytes(byte_level.special_ids["<|open|>"]) is byte_level.token_bytes(9999) is None


def test_a_byte_level_tokenizer_json_with_k3s_tokens_is_good_for_chat(byte_level):
  said = {"role": "assistant", "content": "<|close|> \N{ROCKET}", "reasoning_content": "he<|open|>"}
  ids = encode_conversation(byte_level, [said], thinking_effort=None, add_generation_prompt=False)
  assert sum(i >= 258 for i in ids) == 13, "two a tag: message, think and response, opened and closed; and the end"
  parsed = parse(byte_level, ids)
  assert parsed.as_message() == said
  assert not parsed.problems


def test_the_bytes_of_a_token_need_a_byte_level_tokenizer_json(huggingface):
  with pytest.raises(InputError, match=r"tokenizer\.json: no byte-level tokenizer"):
    huggingface.token_bytes(0)
