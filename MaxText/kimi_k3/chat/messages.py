"""OpenAI-style messages, checked: whatever the format cannot carry is refused with its place, nothing is dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kimi_k3.errors import InputError

_FIELDS = {
  "system": ("role", "content", "name", "tools"),
  "user": ("role", "content", "name"),
  "assistant": ("role", "content", "name", "reasoning_content", "reasoning", "tool_calls"),
  "tool": ("role", "content", "name", "tool", "tool_call_id", "id"),
}
_IMAGE_TYPES = ("image", "image_url", "input_image", "video", "video_url")


@dataclass(frozen=True)
class Call:
  """One tool call of an assistant.

  Attributes:
    id: What results refer to; None if it has none.
    name: Name of the tool.
    arguments: In the order given.
    raw: The arguments' text if that is no JSON, which the format carries as it is; None otherwise.
  """

  id: str | None
  name: str
  arguments: Mapping[str, Any]
  raw: str | None


@dataclass(frozen=True)
class Message:
  """One message, checked.

  Attributes:
    place: Where it stands, for errors: messages[3].
    role: system, user, assistant or tool.
    content: Pieces of text; each is tokenized on its own.
    name: Of the speaker; of a tool message: the name it gives for its tool.
    reasoning: Assistant: what it thought, "" for nothing.
    calls: Assistant.
    call_id: Tool: the call it answers, None if it names none.
    tools: System: tools declared at this point; None for an ordinary message.
  """

  place: str
  role: str
  content: tuple[str, ...] = ()
  name: str | None = None
  reasoning: str = ""
  calls: tuple[Call, ...] = ()
  call_id: str | None = None
  tools: Sequence[Any] | None = None


def read_messages(messages: object) -> list[Message]:
  """Returns the messages, checked, tool results in the order of the calls they answer.

  Raises:
    InputError: naming the message, counted from 0, and the field.
  """
  if not isinstance(messages, (list, tuple)) or not messages:
    raise InputError(f"messages: found {_kind(messages)}, expected a list of at least one message")
  return in_order_of_calls([_message(message, f"messages[{i}]") for i, message in enumerate(messages)])


def read_tools(tools: object, place: str) -> list[Any]:
  """Returns declarations of tools with the keys of all objects sorted, as the format has them."""
  if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
    raise InputError(f"{place}: found {_kind(tools)}, expected a list of objects, each the declaration of a tool")
  to_json(list(tools), place)  # before sorting: keys that are no text cannot be sorted
  return [sorted_keys(tool) for tool in tools]


def sorted_keys(value: Any) -> Any:
  """Returns JSON data with the keys of all objects sorted."""
  if isinstance(value, Mapping):
    return {key: sorted_keys(value[key]) for key in sorted(value)}
  return [sorted_keys(item) for item in value] if isinstance(value, (list, tuple)) else value


def to_json(value: Any, place: str, *, compact: bool = False) -> str:
  """Returns `value` as JSON, non-ASCII as it is. Raises InputError if it is no JSON data."""
  try:
    _check_keys(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":") if compact else None)
  except (TypeError, ValueError, RecursionError) as error:
    raise InputError(f"{place}: no JSON data: {error}") from error
  return check_text(text, place)


def check_text(value: object, place: str) -> str:
  """Returns a string that is text. Raises InputError for other types and for half a surrogate pair."""
  if not isinstance(value, str):
    raise InputError(f"{place}: found {_kind(value)}, expected a string")
  try:
    value.encode()
  except UnicodeEncodeError as error:
    raise InputError(
      f"{place}: character {error.start} is {value[error.start]!a}, half of a surrogate pair: no text has that"
    ) from error
  return value


def _check_keys(value: Any) -> None:
  """json.dumps turns keys that are numbers into text, silently."""
  if isinstance(value, Mapping):
    if odd := [key for key in value if not isinstance(key, str)]:
      raise TypeError(f"key {odd[0]!r} is no string")
    for item in value.values():
      _check_keys(item)
  elif isinstance(value, (list, tuple)):
    for item in value:
      _check_keys(item)


def _kind(value: object) -> str:
  if value is None:
    return "nothing"
  if isinstance(value, Mapping):
    return "an object"
  if isinstance(value, (list, tuple)):
    return "a list" if value else "an empty list"
  return type(value).__name__


def _message(message: object, place: str) -> Message:
  if not isinstance(message, Mapping):
    raise InputError(f"{place}: found {_kind(message)}, expected an object with a role")
  role = message.get("role")
  if not isinstance(role, str) or role not in _FIELDS:
    raise InputError(f"{place}.role: found {role!r}, expected one of {', '.join(_FIELDS)}")
  _only(message, _FIELDS[role], place)
  read = Message(place, role, name=_optional(message, "name", place))
  if role == "assistant":
    return _assistant(message, read)
  if role == "system" and message.get("tools") is not None:
    return _declaration(message, read)
  read = replace(read, content=_content(message.get("content"), f"{place}.content"))
  return _result(message, read) if role == "tool" else read


def _only(value: Mapping, known: Sequence[str], place: str) -> None:
  if unknown := [str(key) for key, item in value.items() if key not in known and item is not None]:
    raise InputError(
      f"{place}: found {', '.join(unknown)}, which K3's format has no place for; known: {', '.join(known)}"
    )


def _optional(value: Mapping, key: str, place: str) -> str | None:
  return None if value.get(key) is None else check_text(value[key], f"{place}.{key}")


def _content(content: object, place: str) -> tuple[str, ...]:
  if content is None:
    raise InputError(f'{place}: missing: expected a string or a list of text parts; "" for an empty message')
  if isinstance(content, str):
    return (check_text(content, place),)
  if not isinstance(content, (list, tuple)):
    raise InputError(f"{place}: found {_kind(content)}, expected a string or a list of text parts")
  return tuple(_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def _part(part: object, place: str) -> str:
  if not isinstance(part, Mapping):
    raise InputError(f'{place}: found {_kind(part)}, expected {{"type": "text", "text": ...}}')
  if part.get("type") in _IMAGE_TYPES:
    raise InputError(f"{place}: found an image or video: vision is not supported here, text parts only")
  if part.get("type") != "text":
    raise InputError(f"{place}.type: found {part.get('type')!r}, expected 'text'")
  _only(part, ("type", "text"), place)
  return check_text(part.get("text"), f"{place}.text")


def _assistant(message: Mapping, read: Message) -> Message:
  place = read.place
  thought, other = (_optional(message, key, place) for key in ("reasoning_content", "reasoning"))
  if thought and other and thought != other:
    raise InputError(f"{place}: reasoning_content and reasoning differ: give one of them")
  calls = message.get("tool_calls")
  if calls is not None and not isinstance(calls, (list, tuple)):
    raise InputError(f"{place}.tool_calls: found {_kind(calls)}, expected a list")
  if "content" not in message and not calls and not thought and not other:
    raise InputError(
      f"{place}.content: missing, and there are no tool_calls: expected a string, a list of text parts or null"
    )
  content = message.get("content")
  return replace(
    read,
    content=() if content is None else _content(content, f"{place}.content"),
    reasoning=thought or other or "",
    calls=tuple(_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls or ())),
  )


def _call(call: object, place: str) -> Call:
  if not isinstance(call, Mapping):
    raise InputError(f"{place}: found {_kind(call)}, expected an object")
  if call.get("type") not in (None, "function"):
    raise InputError(f"{place}.type: found {call.get('type')!r}, expected 'function'")
  if "function" in call:
    _only(call, ("id", "type", "function"), place)
    function, where = call["function"], f"{place}.function"
    if not isinstance(function, Mapping):
      raise InputError(f"{where}: found {_kind(function)}, expected an object with name and arguments")
    _only(function, ("name", "arguments"), where)
  else:
    _only(call, ("id", "type", "name", "arguments"), place)
    function, where = call, place
  name = check_text(function.get("name"), f"{where}.name")
  if not name:
    raise InputError(f"{where}.name: found an empty string, expected the name of a tool")
  return Call(_optional(call, "id", place), name, *_arguments(function.get("arguments"), f"{where}.arguments"))


def _arguments(arguments: object, place: str) -> tuple[Mapping[str, Any], str | None]:
  """Arguments as an object, or its JSON text; text that is no JSON at all is carried as it is."""
  if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
    return {}, None
  raw = None
  if isinstance(arguments, str):
    raw = check_text(arguments, place)
    try:
      arguments = json.loads(raw)
    except json.JSONDecodeError:
      return {}, raw
    except (ValueError, RecursionError) as error:  # an integer of too many digits, nested too deep
      raise InputError(f"{place}: cannot be read: {error}") from error
  if not isinstance(arguments, Mapping):
    raise InputError(f"{place}: found {_kind(arguments)}, expected an object or the JSON text of one")
  for key, value in arguments.items():
    to_json({check_text(key, f"{place}: a key"): value}, f"{place}.{key}")
  return arguments, None


def _declaration(message: Mapping, read: Message) -> Message:
  tools = read_tools(message["tools"], f"{read.place}.tools")
  if not tools:
    raise InputError(f"{read.place}.tools: found an empty list, expected at least one tool; or leave it out")
  if message.get("content") or read.name:
    raise InputError(
      f"{read.place}: a system message with tools only declares them: put content and name into a message of its own"
    )
  return replace(read, tools=tools)


def _result(message: Mapping, read: Message) -> Message:
  place = read.place
  named = [key for key in ("tool_call_id", "id") if message.get(key) is not None]
  call_id = None if not named else check_text(message[named[0]], f"{place}.{named[0]}")
  tool = _optional(message, "tool", place)
  return replace(read, name=read.name if tool is None else tool, call_id=call_id)


def in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
  """Returns the messages with each run of tool results in the order of the last assistant's calls, and named by them.

  A result answers the first call with its id. Runs with a result that answers no call stay as they are.
  """
  ordered, run, calls = [], [], ()
  for message in (*messages, None):
    if message is not None and message.role == "tool":
      run.append(message)
      continue
    ordered += _ordered_run(run, calls)
    run = []
    if message is not None:
      calls = message.calls if message.role == "assistant" else calls
      ordered.append(message)
  return ordered


def _ordered_run(run: list[Message], calls: Sequence[Call]) -> list[Message]:
  ids = [call.id for call in calls]
  if not all(result.call_id is not None and result.call_id in ids for result in run):
    return run
  return [
    replace(result, name=calls[ids.index(result.call_id)].name)
    for result in sorted(run, key=lambda result: ids.index(result.call_id))
  ]
