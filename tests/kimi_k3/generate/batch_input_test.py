"""Lines of prompts: what each kind of bad line says of itself, what a file of them is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from kimi_k3.errors import InputError
from kimi_k3.generate.batch_input import BAD, BLANK, KEYS, SOUND, Line, PromptFile, Rules, named_lines, read_line

VOCABULARY = 256
LONGEST = 100


def encode_messages(messages: list[Any], options: Mapping[str, Any]) -> list[int]:
  if not isinstance(messages[0], dict) or messages[0].get("role") != "user":
    raise InputError(f"message 0: role is {messages[0]!r}, expected user")
  return [1, len(messages), len(options)]


def check_sampling(given: Mapping[str, Any]) -> None:
  if given.get("temperature", 0.0) < 0:
    raise InputError("temperature is below 0")


RULES = Rules(VOCABULARY, LONGEST, 8, lambda text: list(text.encode()), encode_messages, check_sampling)
WITHOUT_TOKENIZER = Rules(VOCABULARY, LONGEST, 8, None, None, check_sampling)


def read(value: Any, rules: Rules = RULES) -> Line:
  line = read_line(4, value if isinstance(value, bytes) else json.dumps(value).encode(), rules)
  assert line is not None
  return line


@pytest.mark.parametrize(
  ("value", "expected"),
  [
    ({"prompt": "Hi"}, Line(4, None, "prompt", [72, 105], 8)),
    ({"prompt_ids": [0, 255], "id": 7}, Line(4, 7, "prompt_ids", [0, 255], 8)),
    ({"prompt_ids": [1], "id": "", "max_new_tokens": 3}, Line(4, "", "prompt_ids", [1], 3)),
    (
      {"prompt_ids": [1], "temperature": 1, "top_k": 4, "top_p": 0.5, "seed": 2},
      Line(4, None, "prompt_ids", [1], 8, {"temperature": 1.0, "top_k": 4, "top_p": 0.5, "seed": 2}),
    ),
    ({"messages": [{"role": "user"}], "tools": []}, Line(4, None, "messages", [1, 1, 1], 8)),
    ({"messages": [{"role": "user"}], "thinking": False}, Line(4, None, "messages", [1, 1, 1], 8, {}, False)),
    (dict.fromkeys(KEYS) | {"prompt": "Hi"}, Line(4, None, "prompt", [72, 105], 8)),  # null is not there
  ],
)
def test_a_sound_line_gives_its_ids_and_options(value, expected):
  assert read(value) == expected


@pytest.mark.parametrize(
  ("value", "said"),
  [
    (b'{"prompt": "Hi"', "not JSON: Expecting ',' delimiter (column 16)"),
    (b'{"prompt": "Hi"} {}', "not JSON: Extra data (column 18)"),
    (b"\xff", "not UTF-8: invalid start byte at byte 0"),
    (b'\xef\xbb\xbf{"prompt": "Hi"}', "starts with a byte order mark (EF BB BF), expected plain UTF-8"),
    ({"messages": [{"role": "robot" * 10_000}]}, "robotrobot"),
    (b"[" * 100_000, "not JSON: "),
    (b'{"prompt_ids": [%s]}' % (b"9" * 5000), "not JSON: "),
    (b'{"prompt": "a", "prompt": "b"}', '"prompt" given twice in an object'),
    (b'{"prompt": "a", "top_p": NaN}', "not JSON: NaN is no number there"),
    (b'{"prompt": "a", "top_p": 1e999}', "top_p is Infinity, expected a number"),
    (b'{"prompt": "\\ud800"}', "holds half of a surrogate pair, which is no character"),
    (["a"], 'found ["a"], expected an object such as {"prompt": "The capital of France is"}'),
    ({"prompt": "a", "promt": 1}, 'unknown key "promt", expected any of: prompt, prompt_ids, messages, tools'),
    ({"id": 1}, "expected one of prompt, prompt_ids, messages, found none"),
    ({"prompt": "a", "prompt_ids": [1]}, "expected one of prompt, prompt_ids, messages, found prompt and prompt_ids"),
    ({"prompt": 3}, "prompt is 3, expected text"),
    ({"prompt": ""}, "prompt is empty, expected text"),
    ({"prompt_ids": []}, "prompt_ids is [], expected a list of token ids, one or more"),
    ({"prompt_ids": "12"}, 'prompt_ids is "12", expected a list of token ids, one or more'),
    ({"prompt_ids": [1, 2.0]}, "prompt_ids: 2.0 at position 1, expected a token id"),
    ({"prompt_ids": [True]}, "prompt_ids: true at position 0, expected a token id"),
    ({"prompt_ids": [1, 256, -1]}, "prompt_ids: 256 at position 1, -1 at position 2: outside the vocabulary of 256"),
    ({"prompt_ids": [300] * 9}, " at position 4 and 4 more: outside the vocabulary of 256"),
    ({"messages": []}, "messages is [], expected a list of messages, one or more"),
    ({"messages": [{"role": "robot"}]}, "message 0: role is {'role': 'robot'}, expected user"),
    ({"messages": [{"role": "user"}], "tools": {}}, "tools is {}, expected a list"),
    ({"messages": [{"role": "user"}], "thinking": "no"}, 'thinking is "no", expected true or false'),
    ({"prompt": "a", "tools": []}, "tools given with prompt, expected with messages only"),
    ({"prompt": "a", "id": 1.5}, "id is 1.5, expected text or a whole number"),
    ({"prompt": "a", "id": False}, "id is false, expected text or a whole number"),
    ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens is 0, expected a whole number, 1 or more"),
    ({"prompt": "a", "max_new_tokens": "8"}, 'max_new_tokens is "8", expected a whole number, 1 or more'),
    (
      {"prompt": "a", "max_new_tokens": 100},
      "1 tokens and 100 new ones, expected 100 at most (max_position_embeddings",
    ),
    ({"prompt": "a", "temperature": "hot"}, 'temperature is "hot", expected a number'),
    ({"prompt": "a", "temperature": -1}, "temperature is below 0"),
    ({"prompt": "a", "temperature": 10**400}, "temperature is 1000"),
    ({"prompt": "a", "top_k": 1.0}, "top_k is 1.0, expected a whole number"),
    ({"prompt": "a", "seed": True}, "seed is true, expected a whole number"),
  ],
)
def test_a_bad_line_says_what_is_wrong_and_has_nothing_to_run(value, said):
  line = read(value)
  assert line.error is not None
  assert said in line.error
  assert "\n" not in line.error
  assert len(line.error) < 600
  assert (line.prompt_ids, line.max_new_tokens) == ([], 0)


@pytest.mark.parametrize("key", ["prompt", "messages"])
def test_text_without_a_tokenizer_is_a_bad_line_and_ids_are_not(key):
  said = read({key: [{"role": "user"}] if key == "messages" else "a"}, WITHOUT_TOKENIZER).error
  assert said is not None and "tokenizer, and there is none beside the config: give prompt_ids" in said
  assert read({"prompt_ids": [1]}, WITHOUT_TOKENIZER).error is None


def test_a_bad_line_keeps_its_id():
  assert read({"id": "x", "prompt": ""}) == Line(4, "x", "prompt", error="prompt is empty, expected text")


def test_a_tokenizer_of_another_model_is_found_out():
  rules = Rules(VOCABULARY, LONGEST, 8, lambda _: [5, 300], None, check_sampling)
  said = "prompt: the tokenizer gives id 300, outside the vocabulary of 256: it is another model's"
  assert read({"prompt": "a"}, rules).error == said


# Mostly what a line may hold, so that it gets past the first checks.
JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(KEYS),
  lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(), inner, max_size=4),
  max_leaves=12,
)


@hypothesis.given(
  st.binary() | JSON.map(lambda value: json.dumps(value).encode()) | JSON.map(lambda value: repr(value).encode())
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_whatever_bytes_a_line_has_they_are_a_prompt_or_a_reason(content):
  line = read_line(0, content, RULES)
  if line is None:
    assert not content.strip()
    return
  assert (line.error is None) == bool(line.prompt_ids) == (line.max_new_tokens > 0)
  json.dumps([line.id, line.error], ensure_ascii=False).encode()  # as a completion has them


@pytest.fixture
def file_of(tmp_path):
  """Returns a function: lines to the path of a file of them."""

  def write(*lines: Any, end: str = "\n") -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(texts) + end)
    return path

  return write


def indices(prompts: PromptFile, **options) -> list[int]:
  return [line.index for line in prompts.read(options.get("wanted", lambda _: True))]


def test_lines_are_counted_from_0_blank_ones_included(file_of):
  path = file_of({"prompt": "a"}, "", "{", "  ", {"prompt": "abc", "max_new_tokens": 2}, end="")
  prompts = PromptFile(str(path), RULES)
  assert list(prompts.kinds) == [SOUND, BLANK, BAD, BLANK, SOUND]
  assert (prompts.rows, prompts.bad) == (3, 1)
  assert (list(prompts.prompt_tokens), list(prompts.new_tokens)) == ([1, 0, 0, 0, 3], [8, 0, 0, 0, 2])
  assert prompts.faults == {2: "not JSON: Expecting property name enclosed in double quotes (column 2)"}
  assert indices(prompts) == [0, 2, 4]
  assert indices(prompts, wanted=lambda index: index > 2) == [4]


def test_the_second_line_of_an_id_is_bad_also_when_the_first_is_not_read_again(file_of):
  path = file_of(*({"prompt": "a", "id": name} for name in ("x", 1, "1", "x", None, None)))
  prompts = PromptFile(str(path), RULES)
  assert prompts.faults == {3: 'id "x" is that of line 1'}
  (line,) = prompts.read(lambda index: index == 3)
  assert (line.id, line.error) == ("x", 'id "x" is that of line 1')


def test_lines_whose_lengths_are_refused_are_bad(file_of):
  prompts = PromptFile(str(file_of({"prompt": "a"}, {"prompt": "abcd"}, "{")), RULES)
  prompts.refuse(lambda tokens, new: f"{tokens} + {new}" if tokens > 3 else None)
  assert list(prompts.kinds) == [SOUND, BAD, BAD]
  assert prompts.faults[1] == "4 + 8"
  assert [line.error for line in prompts.read(lambda index: index < 2)] == [None, "4 + 8"]


@pytest.mark.parametrize(
  ("changed", "line"), [(["x", "b", "c"], 1), (["a", "b", "x"], 3), (["a", "b"], 3), (["a", "c"], 2)]
)
def test_a_file_that_changes_while_it_is_read_is_refused(file_of, changed, line):
  prompts = PromptFile(str(file_of(*({"prompt": text} for text in "abc"))), RULES)
  file_of(*({"prompt": text} for text in changed))
  with pytest.raises(InputError, match=f"in.jsonl: line {line} has changed since it was checked: put it back"):
    indices(prompts)


def test_lines_that_are_appended_while_it_is_read_are_for_the_next_run(file_of):
  prompts = PromptFile(str(file_of({"prompt": "a"})), RULES)
  file_of({"prompt": "a"}, {"prompt": "b"})
  assert indices(prompts) == [0]


def test_line_ends_are_not_part_of_a_line(file_of):
  digests = PromptFile(str(file_of({"prompt": "a"}, end="")), RULES).digests
  assert PromptFile(str(file_of({"prompt": "a"}, end="\r\n")), RULES).digests == digests
  assert PromptFile(str(file_of({"prompt": "b"})), RULES).digests != digests


@pytest.mark.parametrize(
  ("make", "said"),
  [
    (lambda _: None, "in.jsonl: cannot be read: No such file or directory"),
    (Path.mkdir, "in.jsonl: is no file, expected one that can be read twice: save it first"),
    (os.mkfifo, "in.jsonl: is no file, expected one that can be read twice: save it first"),
    (lambda path: path.write_text("\n \n"), "in.jsonl: holds no prompt, expected a line such as"),
  ],
)
def test_what_is_no_file_of_prompts_is_refused(tmp_path, make, said):
  make(tmp_path / "in.jsonl")
  with pytest.raises(InputError, match=said):
    PromptFile(str(tmp_path / "in.jsonl"), RULES)


@pytest.mark.parametrize(
  ("given", "total", "said"),
  [([2], 1, "line 3"), ([0, 4], 2, "lines 1, 5"), (range(9), 9, "lines 1, 2, 3, 4, 5 and 4 more")],
)
def test_lines_are_named_from_1_a_few_of_many(given, total, said):
  assert named_lines(list(given), total) == said
