"""Conversations to ids, as the released encoder makes them.

A message is <|open|>message role="user"<|sep|>TEXT<|close|>message<|sep|><|end_of_msg|>. Control tokens go in by id.
Everything else is text, which is tokenized without special tokens, piece by piece: the name of a tag, and of each
attribute its name, =", its value and ". What is tokenized together decides the ids.

Sources, which agree unless docs/chat.md says otherwise: google-deepmind/simply, simply/zoo/kimi_k3/utils/testdata at
b5aec4a7b6f3: pieces and ids that the released encoder made; NVIDIA-NeMo/Automodel, nemo_automodel/components/models/
kimi_k3/encoding.py at 00ef9ca241e8; vllm-project/vllm, vllm/renderers/kimi_k3.py at 04be64cf59b5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kimi_k3.chat.control import ChatTokenizer, ControlIds
from kimi_k3.chat.messages import Call, Message, read_messages, read_tools, sorted_keys, to_json
from kimi_k3.chat.special_tokens import CLOSE, END_OF_MSG, OPEN, SEP
from kimi_k3.errors import InputError

THINKING_EFFORTS = ("low", "high", "max")

_DECLARED = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{tools}\n```"
_DECLARED_LATER = (
  "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
  "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
  "```json\n{tools}\n```"
)
# It names a value, medium, that the released encoder does not take.
_EFFORT = (
  "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
  "supported values include `low`, `medium`, `high`, and `max`.\n"
  "Now the system is invoked with `thinking_effort={effort}`."
)
_TOOL_CHOICE = {
  "required": ("The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."),
  "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_RAW_JSON = (
  "The system is invoked with `response_format={kind}`.\nYour response must be raw JSON data without markdown code "
  "blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{schema}\n```"


class Segment(NamedTuple):
  """A piece of a rendered conversation: a control token by its name, or text that is tokenized on its own."""

  text: str
  control: bool = False


def encode_conversation(
  tokenizer: ChatTokenizer,
  messages: Any,
  *,
  tools: Any = None,
  thinking: Any = True,
  thinking_effort: Any = "max",
  tool_choice: Any = None,
  response_format: Any = None,
  add_generation_prompt: bool = True,
) -> list[int]:
  """Returns the ids of a conversation; generation goes on from its end.

  What is typed Any may be any JSON data: it is checked here.

  Args:
    tokenizer: With K3's control tokens.
    messages: OpenAI's: role system, user, assistant or tool; content a string or a list of text parts; of assistants
      reasoning_content and tool_calls; of tool results tool_call_id or the tool's name. A system message with `tools`
      in place of content declares tools at that point.
    tools: Declarations of tools, in front of all messages; their keys are sorted.
    thinking: Whether assistants think. If not, reasoning_content of earlier turns is left out.
    thinking_effort: low, high or max; None to not speak of it. Without thinking it has no effect.
    tool_choice: required or none, said in front of the answer; auto and None say nothing.
    response_format: OpenAI's: {"type": "text" | "json_object"}, or "json_schema" with a schema.
    add_generation_prompt: Whether to open the assistant's message and in it its first section, think or response.

  Raises:
    InputError: for what the format cannot carry, with message and field; for a tokenizer that is not K3's.

  Source: the released tokenizer's apply_chat_template, whose thinking effort is max unless said otherwise.
  """
  segments = render(
    messages,
    tools=tools,
    thinking=thinking,
    thinking_effort=thinking_effort,
    tool_choice=tool_choice,
    response_format=response_format,
    add_generation_prompt=add_generation_prompt,
  )
  return encode_segments(tokenizer, segments)


def encode_segments(tokenizer: ChatTokenizer, segments: Sequence[Segment]) -> list[int]:
  """Returns the ids of segments, each tokenized on its own. No text makes a special token."""
  control = ControlIds.of(tokenizer)
  by_name = {OPEN: control.open, CLOSE: control.close, SEP: control.sep, END_OF_MSG: control.end_of_msg}
  special = frozenset(tokenizer.special_ids.values())
  ids = []
  for segment in segments:
    if segment.control:
      ids.append(by_name[segment.text])
      continue
    piece = tokenizer.encode(segment.text)
    if not special.isdisjoint(piece):
      raise InputError(f"the tokenizer makes special tokens of the text {segment.text[:80]!r}: not fit for chat")
    ids += piece
  return ids


def render(
  messages: Any,
  *,
  tools: Any = None,
  thinking: Any = True,
  thinking_effort: Any = "max",
  tool_choice: Any = None,
  response_format: Any = None,
  add_generation_prompt: bool = True,
) -> list[Segment]:
  """Returns a conversation as segments. Arguments and errors are those of `encode_conversation`."""
  if thinking_effort is not None and thinking_effort not in THINKING_EFFORTS:
    raise InputError(
      f"thinking_effort: found {thinking_effort!r}, expected one of {', '.join(THINKING_EFFORTS)} or None"
    )
  if not isinstance(thinking, bool):
    raise InputError(f"thinking: found {thinking!r}, expected true or false")
  out = _Writer()
  if tools is not None and (declared := read_tools(tools, "tools")):
    out.system("tool-declare", _DECLARED.format(tools=to_json(declared, "tools", compact=True)))
  if thinking and thinking_effort is not None:
    out.system("thinking-effort", _EFFORT.format(effort=thinking_effort))
  _render_messages(out, read_messages(messages), thinking)
  if tool_choice not in (None, "auto"):
    if not isinstance(tool_choice, str) or tool_choice not in _TOOL_CHOICE:
      raise InputError(f"tool_choice: found {tool_choice!r}, expected auto, required or none")
    out.system("tool-choice", _TOOL_CHOICE[tool_choice])
  if (asked := _response_format(response_format)) is not None:
    out.system("response-format", asked)
  if add_generation_prompt:
    out.open("message", role="assistant")
    out.open("think" if thinking else "response")
  return out.segments


class _Writer:
  """Collects segments."""

  def __init__(self):
    self.segments: list[Segment] = []

  def open(self, tag: str, **attributes: object) -> None:
    self._control(OPEN)
    self.text(tag)
    for key, value in attributes.items():
      self.text(f" {key}", '="', str(value).replace("&", "&amp;").replace('"', "&quot;"), '"')
    self._control(SEP)

  def close(self, tag: str) -> None:
    self._control(CLOSE)
    self.text(tag)
    self._control(SEP)

  def text(self, *pieces: str) -> None:
    self.segments += [Segment(piece) for piece in pieces if piece]

  def section(self, tag: str, *pieces: str, **attributes: object) -> None:
    self.open(tag, **attributes)
    self.text(*pieces)
    self.close(tag)

  def end(self) -> None:
    self.close("message")
    self._control(END_OF_MSG)

  def system(self, kind: str, body: str) -> None:
    self.open("message", role="system", type=kind)
    self.text(body)
    self.end()

  def _control(self, name: str) -> None:
    self.segments.append(Segment(name, control=True))


def _render_messages(out: _Writer, messages: Sequence[Message], thinking: bool) -> None:
  calls, results = (), 0  # of the last assistant; a result is numbered by its place behind it
  for message in messages:
    if message.tools is not None:
      tools = to_json(message.tools, f"{message.place}.tools", compact=True)
      out.system("tool-declare", _DECLARED_LATER.format(tools=tools))
      continue
    if message.role == "tool":
      results += 1
      out.open("message", role="tool", tool=_tool_name(message, calls, results), index=results)
    else:
      out.open("message", role=message.role, **({"name": message.name} if message.name else {}))
    if message.role == "assistant":
      calls, results = message.calls, 0
      _render_assistant(out, message, thinking)
    else:
      out.text(*message.content)
    out.end()


def _tool_name(message: Message, calls: Sequence[Call], number: int) -> str:
  if message.name is not None:
    return message.name
  if number > len(calls):
    raise InputError(
      f"{message.place}: a tool result that answers no call: {len(calls)} calls in the assistant's message before it, "
      f"this is result {number}; give tool_call_id of one of them, or the tool's name"
    )
  return calls[number - 1].name


def _render_assistant(out: _Writer, message: Message, thinking: bool) -> None:
  if thinking:  # the section is there whether it thought or not
    out.section("think", message.reasoning if message.reasoning.strip() else "")
  out.section("response", *message.content)
  if message.calls:
    out.open("tools")
    for number, call in enumerate(message.calls, 1):
      _render_call(out, call, number, message.place)
    out.close("tools")


def _render_call(out: _Writer, call: Call, number: int, place: str) -> None:
  out.open("call", tool=call.name, index=number)
  if call.raw is not None:
    out.section("json", call.raw, type="object")
  for key, value in call.arguments.items():
    text = value if isinstance(value, str) else to_json(value, f"{place}.tool_calls[{number - 1}]")
    out.section("argument", text, key=key, type=type_name(value))
  out.close("call")


def type_name(value: Any) -> str:
  """Returns the type that an argument is marked with."""
  if isinstance(value, bool):  # before numbers: True is an int
    return "boolean"
  if isinstance(value, (int, float)):
    return "number"
  if isinstance(value, (list, tuple)):
    return "array"
  return {type(None): "null", str: "string"}.get(type(value), "object")


def _response_format(asked: Any) -> str | None:
  if asked is None:
    return None
  kind = asked.get("type") if isinstance(asked, Mapping) else asked
  if not isinstance(asked, Mapping) or kind not in ("text", "json_object", "json_schema"):
    raise InputError(f'response_format: found {kind!r}, expected {{"type": "text", "json_object" or "json_schema"}}')
  known = ("type", "json_schema") if kind == "json_schema" else ("type",)
  if unknown := [str(key) for key, item in asked.items() if key not in known and item is not None]:
    raise InputError(
      f"response_format: found {', '.join(unknown)} with type {kind}, expected {' and '.join(known)} only"
    )
  if kind == "text":
    return None
  if kind == "json_object":
    return _RAW_JSON.format(kind=kind)
  schema = asked.get("json_schema")
  if not isinstance(schema, Mapping):
    raise InputError('response_format.json_schema: missing: expected {"schema": {...}}')
  schema = schema.get("schema", schema.get("json_schema", schema))  # named, or the schema itself
  place = "response_format.json_schema"
  if not isinstance(schema, (Mapping, bool)):
    raise InputError(f"{place}.schema: found {schema!r}, expected an object")
  to_json(schema, place)  # before sorting: keys that are no text cannot be sorted
  return _RAW_JSON.format(kind=kind) + _SCHEMA.format(schema=to_json(sorted_keys(schema), place, compact=True))
