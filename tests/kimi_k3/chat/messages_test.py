from __future__ import annotations

import pytest

from kimi_k3.chat import render
from kimi_k3.errors import InputError

USER = {"role": "user", "content": "go"}


def assistant(*calls, **fields) -> dict:
  return {"role": "assistant", "content": "", "tool_calls": list(calls)} | fields


def function(name="f", arguments=None, **fields) -> dict:
  return {"function": {"name": name, "arguments": arguments} | fields}


@pytest.mark.parametrize(
  ("messages", "said"),
  [
    ([], r"messages: found an empty list, expected a list of at least one message"),
    ([USER, "hi"], r"messages\[1\]: found str, expected an object with a role"),
    ([USER, {"content": "x"}], r"messages\[1\].role: found None, expected one of system, user, assistant, tool"),
    ([{"role": "developer", "content": "x"}], r"messages\[0\].role: found 'developer'"),
    ([{"role": ["user"], "content": "x"}], r"messages\[0\].role: found \['user'\]"),
    ([{"role": "user"}], r"messages\[0\].content: missing"),
    ([{"role": "system", "content": None}], r"messages\[0\].content: missing"),
    ([assistant(function()), {"role": "tool", "tool": "f"}], r"messages\[1\].content: missing"),
    ([{"role": "assistant"}], r"messages\[0\].content: missing, and there are no tool_calls"),
    ([{"role": "user", "content": 3}], r"messages\[0\].content: found int, expected a string or a list"),
    ([{"role": "user", "content": {"text": "x"}}], r"messages\[0\].content: found an object"),
    ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\]: found str"),
    ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\].text: found nothing"),
    ([{"role": "user", "content": [{"type": "audio"}]}], r"messages\[0\].content\[0\].type: found 'audio'"),
    (
      [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]}],
      r"messages\[0\].content\[1\]: found an image or video: vision is not supported here",
    ),
    ([{"role": "user", "content": "a\ud83d"}], r"messages\[0\].content: character 1 is '.ud83d', half of a surrogate"),
    ([USER | {"name": 7}], r"messages\[0\].name: found int"),
    ([USER | {"tool_calls": []}], r"messages\[0\]: found tool_calls, which K3's format has no place for"),
    ([USER | {"reasoning_content": "x"}], r"messages\[0\]: found reasoning_content"),
    ([assistant(partial=True)], r"messages\[0\]: found partial"),
    ([assistant(reasoning_content=["x"])], r"messages\[0\].reasoning_content: found a list"),
    ([assistant(reasoning_content="a", reasoning="b")], r"messages\[0\]: reasoning_content and reasoning differ"),
    ([assistant(tool_calls={})], r"messages\[0\].tool_calls: found an object, expected a list"),
    ([assistant("f")], r"messages\[0\].tool_calls\[0\]: found str"),
    ([assistant({"function": "f"})], r"messages\[0\].tool_calls\[0\].function: found str"),
    ([assistant({"id": "a"})], r"messages\[0\].tool_calls\[0\].name: found nothing"),
    ([assistant(function(""))], r"tool_calls\[0\].function.name: found an empty string"),
    ([assistant(function() | {"type": "custom"})], r"tool_calls\[0\].type: found 'custom', expected 'function'"),
    ([assistant(function() | {"id": 7})], r"tool_calls\[0\].id: found int"),
    ([assistant(function(argument="{}"))], r"tool_calls\[0\].function: found argument, which"),
    ([assistant(function(), function("g", 3))], r"tool_calls\[1\].function.arguments: found int, expected an object"),
    ([assistant(function("g", "[1]"))], r"tool_calls\[0\].function.arguments: found a list, expected an object"),
    ([assistant(function("g", '{"a": NaN}'))], r"tool_calls\[0\].function.arguments.a: no JSON data"),
    ([assistant(function("g", {"a": {1}}))], r"tool_calls\[0\].function.arguments.a: no JSON data"),
    ([assistant(function("g", {"a": "\udc00"}))], r"tool_calls\[0\].function.arguments.a: character"),
    ([assistant(function("g", '{"a": ' + "9" * 5000 + "}"))], r"tool_calls\[0\].function.arguments: cannot be read"),
    ([{"role": "system", "tools": {}}], r"messages\[0\].tools: found an object, expected a list of objects"),
    ([{"role": "system", "tools": []}], r"messages\[0\].tools: found an empty list"),
    ([{"role": "system", "content": "x", "tools": [{}]}], r"messages\[0\]: a system message with tools only declares"),
    ([USER, {"role": "tool", "content": "r"}], r"messages\[1\]: a tool result that answers no call: 0 calls"),
    (
      [assistant(function()), *[{"role": "tool", "content": "r"}] * 2],
      r"messages\[2\]: a tool result that answers no call: 1 calls .* this is result 2; give tool_call_id",
    ),
    (
      [assistant(function()), {"role": "tool", "content": "r", "tool_call_id": 1}],
      r"messages\[1\].tool_call_id: found int",
    ),
  ],
)
def test_what_the_format_cannot_carry_is_refused_with_its_place(messages, said):
  with pytest.raises(InputError, match=said):
    render(messages)


def test_fields_that_are_null_are_as_if_they_were_not_there():
  given = assistant(refusal=None, audio=None, reasoning_content=None, name=None)
  assert render([given]) == render([{"role": "assistant", "content": ""}])


def test_the_callers_messages_are_left_as_they_were():
  calls = [
    function("f", '{"b": 1, "a": {"d": 1, "c": 2}}') | {"id": "a"},
    function("g", {"y": 1, "x": 2}) | {"id": "b"},
  ]
  results = [{"role": "tool", "tool_call_id": i, "name": "stale", "content": i} for i in "ba"]
  messages = [assistant(*calls), *results, {"role": "system", "tools": [{"z": 1, "a": 2}]}]
  before = repr(messages)
  render(messages, tools=[{"z": 1, "a": 2}])
  assert repr(messages) == before
