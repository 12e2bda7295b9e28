"""What the parser gives: an assistant's message, its tool calls, events of a stream; and bytes to text as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class ToolCall(NamedTuple):
  """A call of a tool.

  Attributes:
    id: Made here, as the format has none: NAME:0 for the first call of the message, NAME:1 for the second.
    name: Name of the tool.
    arguments: JSON text of an object; if the model gave one piece of JSON, that text as it is, valid or not.
  """

  id: str
  name: str
  arguments: str


class Event(NamedTuple):
  """What came of the ids just fed.

  Attributes:
    kind: A piece of thinking or of text, a whole tool call, a problem, or the end of the message.
    text: The piece, or the problem.
    call: The call.
  """

  kind: Literal["thinking", "text", "tool_call", "problem", "end"]
  text: str = ""
  call: ToolCall | None = None


@dataclass(frozen=True)
class ParsedMessage:
  """An assistant's message.

  Attributes:
    thinking: Text of its think section.
    text: Text of its response section.
    tool_calls: Those that were closed.
    complete: Whether it ended with <|end_of_msg|>.
    open_section: Where it broke off if not complete: think, response, tools, or message between the sections.
    unfinished_call: The call it broke off in, with the arguments up to there: not to be executed. Or None.
    broken_off: The tag it broke off in, as far as it came, or the bytes of a character, in hex; "" if neither.
    problems: What was not of the format, with the text concerned.
  """

  thinking: str = ""
  text: str = ""
  tool_calls: tuple[ToolCall, ...] = ()
  complete: bool = False
  open_section: str | None = None
  unfinished_call: ToolCall | None = None
  broken_off: str = ""
  problems: tuple[str, ...] = ()

  def as_message(self) -> dict[str, Any]:
    """Returns it as OpenAI's message; `encode_conversation` takes it."""
    message: dict[str, Any] = {"role": "assistant", "content": self.text}
    if self.thinking:
      message["reasoning_content"] = self.thinking
    if self.tool_calls:
      message["tool_calls"] = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in self.tool_calls
      ]
    return message


class Utf8Decoder:
  """Bytes to text as they come; what may still become a character waits."""

  def __init__(self):
    self.waiting = b""

  def feed(self, data: bytes) -> tuple[str, bytes]:
    """Returns the text of the characters that are whole, and the bytes that cannot be text."""
    text, bad, data = "", b"", self.waiting + data
    while True:
      try:
        text, self.waiting = text + data.decode(), b""
        return text, bad
      except UnicodeDecodeError as error:
        text += data[: error.start].decode()
        if error.end == len(data) and error.reason == "unexpected end of data":
          self.waiting = data[error.start :]
          return text, bad
        text, bad, data = text + "\N{REPLACEMENT CHARACTER}", bad + data[error.start : error.end], data[error.end :]

  def flush(self) -> bytes:
    """Returns the bytes that wait for more, and forgets them."""
    waiting, self.waiting = self.waiting, b""
    return waiting
