from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3.chat import encode_conversation, render
from kimi_k3.chat.encoder import Segment, encode_segments
from kimi_k3.errors import InputError

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "chat"
RELEASED = json.loads((GOLDEN / "released.json").read_text())
SIZE = len(json.loads((GOLDEN / "conversations.json").read_text()))
FIRST_SPECIAL = 163584
USER = {"role": "user", "content": "go"}


def expected_segments(conversation) -> list[Segment]:
  """A string is a control token, a list holds pieces of text."""
  pieces = ([Segment(e, True)] if isinstance(e, str) else [Segment(t) for t in e] for e in conversation["expected"])
  return list(chain.from_iterable(pieces))


def arguments(conversation) -> dict:
  return {"tools": conversation.get("tools")} | conversation.get("options", {})


def test_there_are_enough_conversations():
  assert SIZE >= 20


@pytest.mark.parametrize("text", RELEASED)
def test_the_small_vocabulary_has_the_released_ids_of_the_released_texts(tokenizer, text):
  assert tokenizer.encode(text) == RELEASED[text]


def test_a_conversation_becomes_the_pieces_that_the_rules_say(conversation):
  assert render(conversation["messages"], **arguments(conversation)) == expected_segments(conversation)


def test_a_conversation_becomes_the_ids_of_its_pieces(conversation, tokenizer):
  special = tokenizer.special_ids
  ids = [
    i
    for segment in expected_segments(conversation)
    for i in ([special[segment.text]] if segment.control else tokenizer.encode(segment.text))
  ]
  assert encode_conversation(tokenizer, conversation["messages"], **arguments(conversation)) == ids


def test_a_released_conversation_has_the_released_ids(conversation, tokenizer):
  if conversation["source"] != "release":
    assert "released_ids" not in conversation
    return
  special = tokenizer.special_ids
  released = [
    i
    for segment in expected_segments(conversation)
    for i in ([special[segment.text]] if segment.control else RELEASED[segment.text])
  ]
  ids = encode_conversation(tokenizer, conversation["messages"], **arguments(conversation))
  assert ids == released
  assert ids == conversation.get("released_ids", ids)


def test_pieces_are_tokenized_on_their_own(tokenizer):
  parts = [{"type": "text", "text": text} for text in ("wor", "ld")]
  (together, apart) = (
    encode_conversation(tokenizer, [{"role": "user", "content": content}]) for content in ("world", parts)
  )
  assert RELEASED["world \N{WAVING HAND SIGN}"][0] in together
  assert RELEASED["world \N{WAVING HAND SIGN}"][0] not in apart


TEXT = st.one_of(
  st.text(),
  st.lists(
    st.sampled_from(["<|open|>", "<|close|>message<|sep|>", "<|end_of_msg|>", "[EOS]", '"', "&", "<|", " "])
  ).map("".join),
)
JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
  max_leaves=5,
)
CALL = st.fixed_dictionaries(
  {"id": TEXT, "function": st.fixed_dictionaries({"name": TEXT.filter(bool), "arguments": st.dictionaries(TEXT, JSON)})}
)
CONVERSATION = st.fixed_dictionaries(
  {
    "system": TEXT,
    "user": TEXT,
    "name": TEXT,
    "parts": st.lists(TEXT, max_size=3),
    "thinking": TEXT,
    "response": TEXT,
    "calls": st.lists(CALL, min_size=1, max_size=2),
    "result": TEXT,
    "tool": JSON,
  }
)


@settings(max_examples=40, deadline=None)
@given(said=CONVERSATION)
def test_no_string_in_any_field_becomes_a_special_token(said, tokenizer):
  messages = [
    {"role": "system", "content": said["system"], "name": said["name"]},
    {"role": "user", "content": [{"type": "text", "text": text} for text in said["parts"]]},
    {
      "role": "assistant",
      "content": said["response"],
      "reasoning_content": said["thinking"],
      "tool_calls": said["calls"],
    },
    {"role": "tool", "tool": said["name"], "content": said["result"]},
    {"role": "user", "content": said["user"], "name": said["name"]},
  ]
  segments = render(messages, tools=[{"name": said["tool"]}])
  ids = encode_segments(tokenizer, segments)
  special = [i for i in ids if i >= FIRST_SPECIAL]
  assert special == [tokenizer.special_ids[segment.text] for segment in segments if segment.control]
  blank = render(
    [
      {"role": "system", "content": "", "name": "n" if said["name"] else ""},
      {"role": "user", "content": ""},
      {
        "role": "assistant",
        "content": "",
        "tool_calls": [
          {"function": {"name": "f", "arguments": {str(n): "" for n in range(len(call["function"]["arguments"]))}}}
          for call in said["calls"]
        ],
      },
      {"role": "tool", "tool": "", "content": ""},
      {"role": "user", "content": "", "name": "n" if said["name"] else ""},
    ],
    tools=[{"name": ""}],
  )
  assert [s for s in segments if s.control] == [s for s in blank if s.control], "the structure is that of empty strings"


class Careless:
  """A tokenizer that reads control tokens in text, as a tokenizer.json may."""

  def __init__(self, tokenizer):
    self.special_ids = tokenizer.special_ids
    self.token_bytes = tokenizer.token_bytes
    self._tokenizer = tokenizer

  def encode(self, text: str) -> list[int]:
    return [self.special_ids[text]] if text in self.special_ids else self._tokenizer.encode(text)


def test_a_tokenizer_that_makes_special_tokens_of_text_is_refused(tokenizer):
  with pytest.raises(InputError, match=r"makes special tokens of the text '\[EOS\]'"):
    encode_conversation(Careless(tokenizer), [{"role": "user", "content": "[EOS]"}])


@pytest.mark.parametrize(
  ("options", "said"),
  [
    ({"thinking": "low"}, "thinking: found 'low', expected true or false"),
    ({"thinking_effort": ["low"]}, "thinking_effort: found"),
    ({"thinking_effort": "medium"}, "thinking_effort: found 'medium', expected one of low, high, max"),
    ({"thinking_effort": "medium", "thinking": False}, "thinking_effort: found 'medium'"),
    ({"tool_choice": "f"}, "tool_choice: found 'f', expected auto, required or none"),
    ({"tools": [{"a": float("nan")}]}, "tools: no JSON data"),
    ({"tool_choice": {"type": "function"}}, "tool_choice: found {'type': 'function'}"),
    ({"tools": {"a": 1}}, "tools: found an object, expected a list of objects"),
    ({"tools": ["f"]}, "tools: found a list, expected a list of objects"),
    ({"tools": [{1: 2}]}, "tools: no JSON data: key 1 is no string"),
    ({"tools": [{"a": "\ud800"}]}, "tools: character .* half of a surrogate pair"),
    ({"response_format": {"type": "xml"}}, "response_format: found 'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: missing"),
    ({"response_format": {"type": "text", "strict": True}}, "response_format: found strict with type text, expected"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "found json_schema with type json_object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "json_schema.schema: found 5, exp"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": None}}}, "json_schema.schema: found None"),
    ({"response_format": {"type": "json_schema", "json_schema": {"a": {1, 2}}}}, "json_schema: no JSON data"),
  ],
)
def test_an_option_that_the_format_has_not_is_refused(options, said):
  with pytest.raises(InputError, match=said):
    render([USER], **options)


def test_options_that_say_nothing_are_taken():
  plain = render([USER])
  assert render([USER], tool_choice="auto", response_format={"type": "text"}, tools=[]) == plain


@pytest.mark.parametrize("schema", [{"schema": {"b": 1, "a": 2}}, {"json_schema": {"b": 1, "a": 2}}, {"b": 1, "a": 2}])
def test_a_schema_may_be_named_or_stand_alone(schema):
  segments = render([USER], response_format={"type": "json_schema", "json_schema": schema})
  assert any(segment.text.endswith('```json\n{"a":2,"b":1}\n```') for segment in segments)
