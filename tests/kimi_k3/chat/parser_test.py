from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3.chat import ParsedMessage, StreamingParser, ToolCall, encode_conversation, parse
from kimi_k3.errors import InputError
from kimi_k3.generate.tokenizer import HuggingFaceTokenizer

END = "<|close|>message<|sep|><|end_of_msg|>"
ANSWER = "<|close|>think<|sep|><|open|>response<|sep|>"
SAID = f"<|close|>response<|sep|>{END}"
CALLED = f"<|close|>tools<|sep|>{END}"
TOOLS = f"{ANSWER}<|close|>response<|sep|><|open|>tools<|sep|>"
CALL = '<|open|>call tool="f" index="1"<|sep|>'
CALL_END = "<|close|>call<|sep|>"


def argument(key: str, kind: str, value: str) -> str:
  return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def in_pieces(tokenizer, ids: list[int], cuts: list[int], **options) -> tuple[ParsedMessage, list]:
  parser, events = StreamingParser(tokenizer, **options), []
  for start, end in pairwise([0, *sorted(cuts), len(ids)]):
    events += parser.feed(ids[start:end])
  return parser.message(), events


def test_thinking_text_and_calls_are_told_apart(tokenizer, markup):
  ids = markup(
    f"Let me see.{ANSWER}On it.<|close|>response<|sep|><|open|>tools<|sep|>"
    f"{CALL}{argument('city', 'string', 'Oslo')}{argument('days', 'number', '2')}{CALL_END}"
    f'<|open|>call tool="g" index="2"<|sep|>{CALL_END}{CALLED}'
  )
  assert parse(tokenizer, ids) == ParsedMessage(
    thinking="Let me see.",
    text="On it.",
    tool_calls=(ToolCall("f:0", "f", '{"city": "Oslo", "days": 2}'), ToolCall("g:1", "g", "{}")),
    complete=True,
  )


def test_a_message_comes_as_openais(tokenizer, markup):
  ids = markup(f"a{ANSWER}b<|close|>response<|sep|><|open|>tools<|sep|>{CALL}{CALL_END}{CALLED}")
  assert parse(tokenizer, ids).as_message() == {
    "role": "assistant",
    "content": "b",
    "reasoning_content": "a",
    "tool_calls": [{"id": "f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
  }
  assert parse(tokenizer, markup(f"b{SAID}"), thinking=False).as_message() == {
    "role": "assistant",
    "content": "b",
  }


def test_text_that_looks_like_a_control_token_is_text(tokenizer, markup):
  fake = "<|close|>think<|sep|><|end_of_msg|>"
  ids = [*tokenizer.encode(fake), *markup(ANSWER), *tokenizer.encode(fake), *markup(f"{SAID}")]
  assert parse(tokenizer, ids) == ParsedMessage(thinking=fake, text=fake, complete=True)


@pytest.mark.parametrize(
  ("kind", "text", "value"),
  [
    ("string", "3", "3"),
    ("string", ' "a"\n', ' "a"\n'),
    ("string", "", ""),
    ("number", "3", 3),
    ("number", "-1.5e3", -1500.0),
    ("boolean", "true", True),
    ("null", "null", None),
    ("object", '{"k": "\u00e4"}', {"k": "\u00e4"}),
    ("array", '[1, "two", null]', [1, "two", None]),
  ],
)
def test_an_argument_has_the_value_of_its_type(tokenizer, markup, kind, text, value):
  parsed = parse(tokenizer, markup(f"{TOOLS}{CALL}{argument('k', kind, text)}{CALL_END}{CALLED}"))
  assert json.loads(parsed.tool_calls[0].arguments) == {"k": value}
  assert not parsed.problems


def test_names_and_keys_lose_their_escapes_once(tokenizer, markup):
  call = '<|open|>call tool="a&amp;quot;&quot;" index="1"<|sep|>'
  parsed = parse(tokenizer, markup(f"{TOOLS}{call}{argument('&amp;amp; =', 'string', '&amp;')}{CALL_END}{CALLED}"))
  assert parsed.tool_calls == (ToolCall('a&quot;":0', 'a&quot;"', '{"&amp; =": "&amp;"}'),)


def test_arguments_in_one_piece_of_json_are_passed_on_as_they_are(tokenizer, markup):
  block = '<|open|>json type="object"<|sep|>{"a": 1<|close|>json<|sep|>'
  parsed = parse(tokenizer, markup(f"{TOOLS}{CALL}{block}{CALL_END}{CALLED}"))
  assert parsed.tool_calls[0].arguments == '{"a": 1'
  assert not parsed.problems


def assistants(conversation) -> list[dict]:
  return [message for message in conversation["messages"] if message["role"] == "assistant" and "name" not in message]


def test_what_is_encoded_is_parsed_and_encoded_again_to_the_same(conversation, tokenizer):
  options = {"thinking_effort": None, "add_generation_prompt": False}
  thinking = conversation.get("options", {}).get("thinking", True)
  for message in assistants(conversation):
    ids = encode_conversation(tokenizer, [message], thinking=thinking, **options)
    parsed = parse(tokenizer, ids, thinking=thinking)
    assert parsed.complete
    assert not parsed.problems
    assert encode_conversation(tokenizer, [parsed.as_message()], thinking=thinking, **options) == ids


@pytest.mark.parametrize("thinking", [True, False])
def test_the_prompt_opens_the_first_section(tokenizer, markup, thinking):
  prompt = encode_conversation(tokenizer, [{"role": "user", "content": "go"}], thinking=thinking)
  rest = markup(f"a{ANSWER}b{SAID}" if thinking else f"b{SAID}")
  opened = len(markup(f'<|open|>message role="assistant"<|sep|><|open|>{"think" if thinking else "response"}<|sep|>'))
  expected = ParsedMessage(thinking="a" * thinking, text="b", complete=True)
  again = prompt[-len(markup("<|open|>think<|sep|>")) :]
  for start in ([], again, prompt[-opened:]):
    assert parse(tokenizer, [*start, *rest], thinking=thinking) == expected


def test_a_character_waits_for_its_last_byte(tokenizer):
  parser = StreamingParser(tokenizer)
  hand = tokenizer.encode(" \N{WAVING HAND SIGN}")
  assert len(hand) == 2, "the small vocabulary cuts it, as the released one does"
  assert [event.text for event in parser.feed(hand[:1])] == [" "]
  assert parser.message().broken_off == "f09f91"
  assert [event.text for event in parser.feed(hand[1:])] == ["\N{WAVING HAND SIGN}"]
  assert parser.message() == ParsedMessage(thinking=" \N{WAVING HAND SIGN}", open_section="think")


def test_events_come_in_order_and_pieces_are_joined(tokenizer, markup):
  ids = markup(f"a b{ANSWER}c<|sep|>d<|close|>response<|sep|><|open|>tools<|sep|>{CALL}{CALL_END}{CALLED}")
  events = StreamingParser(tokenizer).feed(ids)
  assert [(event.kind, event.text) for event in events] == [
    ("thinking", "a b"),
    ("text", "c"),
    ("problem", "<|sep|> outside of a tag in response"),
    ("text", "d"),
    ("tool_call", ""),
    ("end", ""),
  ]
  assert events[4].call == ToolCall("f:0", "f", "{}")


@pytest.mark.parametrize(
  ("output", "section", "call", "broken_off"),
  [
    ("", "think", None, ""),
    ("a", "think", None, ""),
    ("<|close|>think", "think", None, "<|close|>think"),
    ("<|close|>think<|sep|>", "message", None, ""),
    (f"{ANSWER}a", "response", None, ""),
    (TOOLS, "tools", None, ""),
    (f'{TOOLS}<|open|>call tool="', "tools", None, '<|open|>call tool="'),
    (f"{TOOLS}{CALL}", "tools", "{}", ""),
    (f"{TOOLS}{CALL}{argument('a', 'number', '1')}", "tools", '{"a": 1}', ""),
    (f"{TOOLS}{CALL}{argument('a', 'number', '1')[:-24]}", "tools", '{"a": "1"}', ""),
    (f'{TOOLS}{CALL}<|open|>json type="object"<|sep|>{{"a', "tools", '{"a', ""),
    (f"{TOOLS}{CALL}{CALL_END}<|close|>tools<|sep|>", "message", None, ""),
    (f"{ANSWER}<|close|>response<|sep|><|close|>message<|sep|>", "message", None, ""),
  ],
)
def test_an_output_that_breaks_off_says_where_and_gives_what_there_is(
  tokenizer, markup, output, section, call, broken_off
):
  parsed = parse(tokenizer, markup(output))
  assert (parsed.complete, parsed.open_section, parsed.broken_off) == (False, section, broken_off)
  assert parsed.unfinished_call == (call and ToolCall("f:0", "f", call))
  assert not parsed.problems


@pytest.mark.parametrize(
  ("output", "problems", "kept"),
  [
    (f"a{ANSWER}b{END}", ["response not closed before <|close|>message<|sep|>"], {"thinking": "a", "text": "b"}),
    (
      "a<|end_of_msg|>",
      ["think not closed before the end", "the message ends without its closing tag"],
      {"thinking": "a"},
    ),
    (f"a<|open|>response<|sep|>b{SAID}", ["think not closed before <|open|>response<|sep|>"], {"text": "b"}),
    (f"{ANSWER}a<|close|>response<|sep|>b{END}", ["text outside of a section: 'b'"], {"text": "a"}),
    (
      f"{ANSWER}a<|open|>b<|sep|>c<|close|>b<|sep|>d{SAID}",
      ["<|open|>b<|sep|> in response", "b did not belong there: 'c'"],
      {"text": "ad"},
    ),
    (
      f"{ANSWER}a<|open|>b<|open|>c<|sep|>d{SAID}",
      [
        "a tag without <|sep|>: '<|open|>b'",
        "<|open|>c<|sep|> in response",
        "c not closed before <|close|>response<|sep|>: 'd'",
      ],
      {"text": "a"},
    ),
    (f"{ANSWER}a<|open|>b", [], {"text": "a", "broken_off": "<|open|>b"}),
    (
      f"{ANSWER}a<|open|>b<|end_of_msg|>",
      [
        "a tag without <|sep|>: '<|open|>b'",
        "response not closed before the end",
        "the message ends without its closing tag",
      ],
      {"text": "a"},
    ),
    (f"{ANSWER}a<|open|>b c<|sep|>d{SAID}", ["not a tag: '<|open|>b c<|sep|>'"], {"text": "ad"}),
    (f"{ANSWER}a<|close|>b<|sep|>c{SAID}", ["<|close|>b<|sep|> closes nothing, in response"], {"text": "ac"}),
    (
      f"{ANSWER}a<|close|>response<|sep|><|open|>response<|sep|>b{SAID}",
      ["<|open|>response<|sep|> once more or too late"],
      {"text": "ab"},
    ),
    (f"{ANSWER}a{SAID}<|open|>b", ["behind the end of the message: '<|open|>b'"], {"text": "a"}),
    (
      f"{ANSWER}a<|close|>response<|sep|><|close|>message<|sep|><|open|>tools<|sep|><|close|>tools<|sep|><|end_of_msg|>",
      ["<|open|>tools<|sep|> behind the end of the message"],
      {"text": "a"},
    ),
    (
      f"{TOOLS}a{CALL}b{CALL_END}{CALLED}",
      ["text outside of a section: 'a'", "text outside of a section: 'b'"],
      {"tool_calls": (ToolCall("f:0", "f", "{}"),)},
    ),
    (
      f"{TOOLS}{CALL}{argument('a', 'number', '1')}{CALL}{CALL_END}{CALLED}",
      [f"call not closed before {CALL}: ('f', '{{\"a\": 1}}')"],
      {"tool_calls": (ToolCall("f:0", "f", "{}"),)},
    ),
    (
      f"{TOOLS}{CALL}{argument('a', 'number', '1')[:-24]}<|end_of_msg|>",
      [
        "argument not closed before the end: {'key': 'a', 'type': 'number'} '1'",
        "call not closed before the end: ('f', '{}')",
        "tools not closed before the end",
        "the message ends without its closing tag",
      ],
      {},
    ),
    (
      f"{ANSWER}a{CALL}{argument('a', 'number', '1')}{CALL_END}b{SAID}",
      [f"{CALL} in response", "call did not belong there: ('f', '{\"a\": 1}')"],
      {"text": "ab"},
    ),
    (
      f"{ANSWER}a{argument('a', 'number', '1')}{SAID}",
      [
        '<|open|>argument key="a" type="number"<|sep|> in response',
        "argument did not belong there: {'key': 'a', 'type': 'number'} '1'",
      ],
      {"text": "a"},
    ),
    (
      f'{TOOLS}<|open|>call tool="f" index="2"<|sep|>{CALL_END}{CALLED}',
      ['<|open|>call tool="f" index="2"<|sep|> is call 1 of the message'],
      {"tool_calls": (ToolCall("f:0", "f", "{}"),)},
    ),
    (
      f'{TOOLS}<|open|>call tool="f"<|sep|>{CALL_END}{CALLED}',
      ['attributes of <|open|>call tool="f"<|sep|>: expected tool, index'],
      {"tool_calls": (ToolCall("f:0", "f", "{}"),)},
    ),
    (
      f'{TOOLS}<|open|>call tool="" index="1"<|sep|>{argument("a", "null", "null")}{CALL_END}{CALLED}',
      ['a call without a tool: {"a": null}'],
      {},
    ),
    (
      f'{TOOLS}<|open|>call tool="f" tool="g" index="1"<|sep|>{CALL_END}{CALLED}',
      ['an attribute twice: \'<|open|>call tool="f" tool="g" index="1"<|sep|>\''],
      {"tool_calls": (ToolCall("g:0", "g", "{}"),)},
    ),
    (
      f"{TOOLS}{CALL}{argument('a', 'number', 'x')}{CALL_END}{CALLED}",
      ["argument a is no JSON of type number: 'x'"],
      {"tool_calls": (ToolCall("f:0", "f", '{"a": "x"}'),)},
    ),
    (
      f"{TOOLS}{CALL}{argument('a', 'number', 'NaN')}{CALL_END}{CALLED}",
      ["argument a is no JSON of type number: 'NaN'"],
      {"tool_calls": (ToolCall("f:0", "f", '{"a": "NaN"}'),)},
    ),
    (
      f"{TOOLS}{CALL}{argument('a', 'array', chr(34) + chr(92) + 'ud800' + chr(34))}{CALL_END}{CALLED}",
      [f"argument a is no JSON of type array: {chr(34) + chr(92) + 'ud800' + chr(34)!r}"],
      {"tool_calls": (ToolCall("f:0", "f", json.dumps({"a": '"\\ud800"'})),)},
    ),
    (
      f"{TOOLS}{CALL}{argument('a', 'number', 'true')}{CALL_END}{CALLED}",
      ["argument a is no number: 'true'"],
      {"tool_calls": (ToolCall("f:0", "f", '{"a": true}'),)},
    ),
    (
      f"{TOOLS}{CALL}{argument('a', 'string', 'x')}{argument('a', 'string', 'y')}{CALL_END}{CALLED}",
      ["argument a twice: 'x'"],
      {"tool_calls": (ToolCall("f:0", "f", '{"a": "y"}'),)},
    ),
  ],
)
def test_what_is_not_of_the_format_is_reported_and_the_rest_is_kept(tokenizer, markup, output, problems, kept):
  parsed = parse(tokenizer, markup(output))
  assert list(parsed.problems) == problems
  for field, value in kept.items():
    assert getattr(parsed, field) == value


def test_other_special_tokens_and_ids_without_a_token_are_reported(tokenizer, markup):
  ids = [
    *markup("a"),
    tokenizer.special_ids["[EOS]"],
    163000,
    *markup(f"b{ANSWER}{SAID}"),
    163585,
  ]
  parsed = parse(tokenizer, ids)
  assert parsed.thinking == "ab"
  assert parsed.problems == (
    "[EOS] in think",
    "<|163000|> in think",
    "behind the end of the message: '[EOS]'",
  )


def test_bytes_that_are_no_text_are_replaced_and_reported(tokenizer, markup):
  (lead,) = [i for i in range(256) if tokenizer.token_bytes(i) == b"\xf0"]
  ids = [*markup("a"), lead, *markup("b"), lead, *markup(f"{ANSWER}{SAID}")]
  parsed = parse(tokenizer, ids)
  assert parsed.thinking == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
  assert parsed.problems == ("bytes that are no text in think: f0",) * 2


def test_a_replacement_character_that_the_model_wrote_is_text(tokenizer, markup):
  parsed = parse(tokenizer, markup(f"\N{REPLACEMENT CHARACTER}{ANSWER}{SAID}"))
  assert parsed == ParsedMessage(thinking="\N{REPLACEMENT CHARACTER}", complete=True)


def test_a_tokenizer_that_is_not_k3s_is_refused(tmp_path):
  tokenizer_json = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
  }
  (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json))
  with pytest.raises(InputError, match="K3's special tokens"):
    StreamingParser(HuggingFaceTokenizer(tmp_path))


def test_the_example_of_the_docs_runs(monkeypatch):
  repository = Path(__file__).resolve().parents[3]
  monkeypatch.chdir(repository)
  (example,) = re.findall(r"^```python\n(.*?)^```", Path("docs/chat.md").read_text(), flags=re.MULTILINE | re.DOTALL)
  exec(compile(example, "docs/chat.md", "exec"), {})


JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
  max_leaves=5,
)
ASSISTANT = st.builds(
  lambda text, thought, calls: {
    "role": "assistant",
    "content": text,
    "reasoning_content": thought,
    "tool_calls": [
      {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}} for name, arguments in calls
    ],
  },
  st.text(),
  st.text().map(lambda text: f"{text}."),  # blank thinking is left out
  st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=3)), max_size=2),
)
CUTS = st.lists(st.floats(0, 1), max_size=6)


@settings(max_examples=40, deadline=None)
@given(message=ASSISTANT, cuts=CUTS)
def test_any_message_comes_back_wherever_its_ids_are_cut(message, cuts, tokenizer):
  ids = encode_conversation(tokenizer, [message], thinking_effort=None, add_generation_prompt=False)
  parsed, events = in_pieces(tokenizer, ids, [round(cut * len(ids)) for cut in cuts])
  assert parsed == parse(tokenizer, ids)
  assert (parsed.complete, parsed.problems) == (True, ())
  assert (parsed.text, parsed.thinking) == (message["content"], message["reasoning_content"])
  calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
  assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == calls
  assert "".join(event.text for event in events if event.kind == "text") == message["content"]
  assert "".join(event.text for event in events if event.kind == "thinking") == message["reasoning_content"]
  assert [event.call for event in events if event.kind == "tool_call"] == list(parsed.tool_calls)


CONTROL = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
OF_THE_FORMAT = [
  *("message", "think", "response", "tools", "call", "argument", "json", 'message role="assistant"'),
  *('call tool="WORD" index="1"', 'argument key="WORD" type="string"', 'argument key="WORD" type="number"'),
  *('json type="object"', "{", "[EOS]", " ", "\n", '"'),
]
TAG = st.tuples(st.sampled_from(CONTROL[:2]), st.sampled_from(OF_THE_FORMAT)).map(
  lambda tag: f"{tag[0]}{tag[1]}<|sep|>"
)
OUTPUT = st.lists(st.one_of(TAG, st.sampled_from([*CONTROL, *OF_THE_FORMAT, "WORD", "WORD"])), max_size=25)


@settings(max_examples=150, deadline=None)
@given(pieces=OUTPUT, cuts=CUTS, thinking=st.booleans())
def test_whatever_comes_nothing_raises_nothing_is_lost_and_cuts_change_nothing(
  pieces, cuts, thinking, tokenizer, markup
):
  words = []
  while "WORD" in (output := "".join(pieces)):
    words.append(f"w{len(words)}w")
    pieces = output.replace("WORD", words[-1], 1)
  ids = markup("".join(pieces))
  parsed, events = in_pieces(tokenizer, ids, [round(cut * len(ids)) for cut in cuts], thinking=thinking)
  assert parsed == parse(tokenizer, ids, thinking=thinking)
  assert [word for word in words if word not in repr(parsed)] == []
  told = [event.text for event in events if event.kind == "problem"]
  assert list(parsed.problems)[: len(told)] == told
  assert "".join(event.text for event in events if event.kind == "text") == parsed.text
  assert "".join(event.text for event in events if event.kind == "thinking") == parsed.thinking
  assert parsed.complete == ("<|end_of_msg|>" in output)
  json.dumps(parsed.as_message(), ensure_ascii=False).encode()


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 255), st.integers(163584, 163592)), max_size=40), cuts=CUTS)
def test_any_ids_parse_the_same_wherever_they_are_cut(ids, cuts, tokenizer):
  parsed, events = in_pieces(tokenizer, ids, [round(cut * len(ids)) for cut in cuts])
  assert parsed == parse(tokenizer, ids)
  assert "".join(event.text for event in events if event.kind == "thinking") == parsed.thinking
