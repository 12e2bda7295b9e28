"""The model's ids to thinking, text and tool calls.

Control tokens are told by id, so text that looks like one is text. Each id is taken on its own, so the result is the
same wherever the stream is cut. Nothing raises and nothing is lost: what is not of the format is in `problems`.

    output   = [think] response [tools] <|close|>message<|sep|><|end_of_msg|>      the prompt opens the first section
    tools    = <|open|>tools<|sep|> call+ <|close|>tools<|sep|>
    call     = <|open|>call tool="NAME" index="1"<|sep|> (argument* | json) <|close|>call<|sep|>
    argument = <|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>

A string argument is its value, any other is JSON; a json element is the text of all arguments. Sources: as the
encoder's; the ids of calls, NAME:0 and on, are those of vllm-project/vllm (its Kimi K3 parsers).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from kimi_k3.chat.control import ChatTokenizer, ControlIds
from kimi_k3.chat.encoder import type_name
from kimi_k3.chat.parsed import Event, ParsedMessage, ToolCall, Utf8Decoder
from kimi_k3.chat.special_tokens import CLOSE, OPEN, SEP

_TAG = re.compile(r'(?P<name>[^\s"=]+)(?P<attributes>(?:\s+[^\s"=]+="[^"]*")*)\s*')
_ATTRIBUTE = re.compile(r'([^\s"=]+)="([^"]*)"')
_SECTIONS = ("think", "response", "tools")


def parse(tokenizer: ChatTokenizer, ids: Iterable[int], *, thinking: bool = True) -> ParsedMessage:
  """Returns the message in `ids`, all at once. Arguments and errors are those of `StreamingParser`."""
  parser = StreamingParser(tokenizer, thinking=thinking)
  parser.feed(ids)
  return parser.message()


@dataclass
class _Element:
  """An element that is open."""

  tag: str
  attributes: dict[str, str] = field(default_factory=dict)
  pieces: list[str] = field(default_factory=list)
  arguments: dict[str, Any] = field(default_factory=dict)  # of a call
  raw: str | None = None  # of a call
  expected: bool = True  # whether the format has this tag at this place

  @property
  def text(self) -> str:
    return "".join(self.pieces)


class StreamingParser:
  """Takes the ids of one assistant's message, in pieces of any size; `message()` is what they make so far."""

  def __init__(self, tokenizer: ChatTokenizer, *, thinking: bool = True):
    """Starts in the section that the prompt has opened.

    Args:
      tokenizer: The one the prompt was encoded with.
      thinking: As for `encode_conversation`: whether the prompt ends in an open think section, or in a response. The
        section may also be opened once more at the start, with or without the message's own tag before it.

    Raises:
      InputError: if the tokenizer is not K3's.
    """
    self._control = ControlIds.of(tokenizer)
    self._names = {i: name for name, i in tokenizer.special_ids.items()}
    self._tokenizer = tokenizer
    self._stack = [_Element("think" if thinking else "response")]
    self._utf8 = Utf8Decoder()
    self._tag: str | None = None  # text since <|open|> or <|close|>, that one included
    self._untouched = True  # whether nothing has come but tags that the prompt has given already
    self._latest = _SECTIONS.index(self._stack[0].tag)  # the section that came last, opened or closed
    self._closed = self._complete = False
    self._thinking: list[str] = []
    self._text: list[str] = []
    self._calls: list[ToolCall] = []
    self._problems: list[str] = []
    self._stray: list[str] = []  # text outside of any section, until something else comes
    self._events: list[Event] = []
    self._delta: tuple[Literal["thinking", "text"], list[str]] = ("text", [])  # of an event that may grow

  def feed(self, ids: Iterable[int]) -> list[Event]:
    """Returns what the ids make known: pieces of text joined, in order."""
    self._events = []
    for i in ids:
      self._take(i)
    self._end_delta()
    return self._events

  def message(self) -> ParsedMessage:
    """Returns what the ids so far make. Nothing changes: more may be fed."""
    problems, call = list(self._problems), None
    if self._stray:
      problems.append(_stray(self._stray, self._complete))
    for element, inner in pairwise([*self._stack, None]):
      assert element is not None  # only the last of them is
      if element.tag == "call" and call is None:
        call = self._unfinished(element, inner, problems)
      elif element.tag not in _SECTIONS and (not element.expected or element.tag == "call"):
        problems.append(f"{element.tag} is open{self._lost(element)}")
    section = next((element.tag for element in self._stack if element.tag in _SECTIONS), "message")
    return ParsedMessage(
      thinking="".join(self._thinking),
      text="".join(self._text),
      tool_calls=tuple(self._calls),
      complete=self._complete,
      open_section=None if self._complete else section,
      unfinished_call=call,
      broken_off=(self._tag or "") + self._utf8.waiting.hex(),
      problems=tuple(problems),
    )

  def _unfinished(self, call: _Element, inner: _Element | None, problems: list[str]) -> ToolCall:
    """The call that is open, with what its open argument or JSON has so far."""
    raw, arguments = call.raw, dict(call.arguments)
    if inner is not None and inner.tag == "json" and inner.expected:
      if raw is not None:
        problems.append(f"json twice in a call: {raw!r}")
      raw = inner.text
    elif inner is not None and inner.expected:
      key = inner.attributes.get("key", "")
      if key in arguments:
        problems.append(f"argument {key} twice: {arguments[key]!r}")
      arguments[key] = inner.text
    if raw is not None and arguments:
      problems.append(f"a call with both json and arguments: {arguments}")
    return self._tool_call(call, arguments, raw)

  # What one id does.

  def _take(self, i: int) -> None:
    if self._complete:
      data = self._tokenizer.token_bytes(i)
      self._stray.append(self._name(i) if data is None else self._decode(data))
    elif i == self._control.open:
      self._begin_tag(OPEN)
    elif i == self._control.close:
      self._begin_tag(CLOSE)
    elif i == self._control.sep:
      self._end_tag()
    elif i == self._control.end_of_msg:
      self._end()
    elif (data := self._tokenizer.token_bytes(i)) is not None:
      self._add(self._decode(data))
    else:
      self._flush()
      self._untouched = False
      self._problem(f"{self._name(i)} in {self._where()}")

  def _name(self, i: int) -> str:
    return self._names.get(i, f"<|{i}|>")

  def _where(self) -> str:
    return "a tag" if self._tag is not None else self._stack[-1].tag if self._stack else "message"

  def _decode(self, data: bytes) -> str:
    text, bad = self._utf8.feed(data)
    if bad:
      self._problem(f"bytes that are no text in {self._where()}: {bad.hex()}")
    return text

  def _flush(self) -> None:
    """Ends a run of text: what still waits for the rest of its character will not get it."""
    if bad := self._utf8.flush():
      self._problem(f"bytes that are no text in {self._where()}: {bad.hex()}")
      self._add("\N{REPLACEMENT CHARACTER}")
    if self._tag is None and self._stray:
      self._problem(_stray(self._stray, self._complete))
      self._stray = []

  def _add(self, text: str) -> None:
    if not text:
      return
    if self._tag is not None:
      self._tag += text
      return
    self._untouched = False
    top = self._stack[-1] if self._stack else None
    if top is None or top.tag in ("tools", "call"):
      self._stray.append(text)
    elif top.tag == "think":
      self._thinking.append(text)
      self._grow("thinking", text)
    elif top.tag == "response":
      self._text.append(text)
      self._grow("text", text)
    else:
      top.pieces.append(text)

  def _grow(self, kind: Literal["thinking", "text"], text: str) -> None:
    if self._delta[0] != kind:
      self._end_delta()
      self._delta = (kind, [])
    self._delta[1].append(text)

  def _end_delta(self) -> None:
    kind, pieces = self._delta
    if pieces:
      self._events.append(Event(kind, "".join(pieces)))
      self._delta = (kind, [])

  def _emit(self, event: Event) -> None:
    self._end_delta()
    self._events.append(event)

  def _problem(self, text: str) -> None:
    self._problems.append(text)
    self._emit(Event("problem", text))

  # Tags.

  def _begin_tag(self, control: str) -> None:
    self._flush()
    if self._tag is not None:
      self._problem(f"a tag without {SEP}: {self._tag!r}")
    self._tag = control

  def _end_tag(self) -> None:
    self._flush()
    tag, self._tag = self._tag, None
    if tag is None:
      self._problem(f"{SEP} outside of a tag in {self._where()}")
      return
    opens = tag.startswith(OPEN)
    found = _TAG.fullmatch(tag.removeprefix(OPEN if opens else CLOSE))
    if found is None or (found["attributes"] and not opens):
      self._problem(f"not a tag: {tag + SEP!r}")
      return
    pairs = [(key, _unescape(value)) for key, value in _ATTRIBUTE.findall(found["attributes"])]
    if len(dict(pairs)) < len(pairs):
      self._problem(f"an attribute twice: {tag + SEP!r}")
    if opens:
      self._open(_Element(found["name"], dict(pairs)), tag + SEP)
    else:
      self._close(found["name"], tag + SEP)

  def _open(self, element: _Element, tag: str) -> None:
    if self._untouched and self._opened_by_the_prompt(element):
      return
    self._untouched = False
    if self._closed:
      self._problem(f"{tag} behind the end of the message")
    parent = {"call": "tools", "argument": "call", "json": "call"}.get(element.tag)
    if element.tag in _SECTIONS:
      self._close_down_to(0, tag)
      number = _SECTIONS.index(element.tag)
      if number <= self._latest:
        self._problem(f"{tag} once more or too late")
      self._latest = max(self._latest, number)
    elif parent is not None and any(e.tag == parent for e in self._stack):
      self._close_down_to(next(n for n, e in enumerate(self._stack) if e.tag == parent) + 1, tag)
    else:
      self._problem(f"{tag} in {self._where()}")
      element.expected = False
    self._check_attributes(element, tag)
    self._stack.append(element)

  def _opened_by_the_prompt(self, element: _Element) -> bool:
    """Whether a tag at the start only repeats what the prompt has opened."""
    if element == _Element("message", {"role": "assistant"}):
      self._stack, self._latest = [], -1
      return True
    return bool(self._stack) and element == self._stack[-1]

  def _check_attributes(self, element: _Element, tag: str) -> None:
    if not element.expected:
      return
    found, number = element.attributes, str(len(self._calls) + 1)
    expected = {"call": ("tool", "index"), "argument": ("key", "type"), "json": ("type",)}.get(element.tag, ())
    if set(found) != set(expected):
      self._problem(f"attributes of {tag}: expected {', '.join(expected) or 'none'}")
    elif element.tag == "call" and found["index"] != number:
      self._problem(f"{tag} is call {number} of the message")
    elif element.tag == "json" and found["type"] != "object":
      self._problem(f"{tag}: expected type object")

  def _close(self, name: str, tag: str) -> None:
    self._untouched = False
    if name == "message" and not self._closed:
      self._close_down_to(0, tag)
      self._closed = True
      return
    depth = next((n for n in reversed(range(len(self._stack))) if self._stack[n].tag == name), None)
    if depth is None:
      self._problem(f"{tag} closes nothing, in {self._where()}")
      return
    self._close_down_to(depth + 1, tag)
    self._finish(self._stack.pop())

  def _end(self) -> None:
    self._flush()
    if self._tag is not None:
      self._problem(f"a tag without {SEP}: {self._tag!r}")
      self._tag = None
    self._close_down_to(0, "the end")
    if not self._closed:
      self._problem("the message ends without its closing tag")
    self._complete = True
    self._emit(Event("end"))

  def _close_down_to(self, depth: int, tag: str) -> None:
    """Takes off what is open above `depth`: it was not closed, so a call among it does not count."""
    for element in reversed(self._stack[depth:]):
      self._problem(f"{element.tag} not closed before {tag}" + self._lost(element))
    del self._stack[depth:]

  def _lost(self, element: _Element) -> str:
    if element.tag == "call":
      both = (element.arguments,) if element.raw is not None and element.arguments else ()
      return f": {(*self._tool_call(element, element.arguments, element.raw)[1:], *both)}"
    attributes = f" {element.attributes}" if element.attributes else ""
    return "" if element.tag in _SECTIONS else f":{attributes} {element.text!r}"

  # Elements that were closed.

  def _finish(self, element: _Element) -> None:
    call = self._stack[-1] if self._stack else None
    if not element.expected:
      self._problem(f"{element.tag} did not belong there{self._lost(element)}")
    elif element.tag == "argument" and call is not None:
      self._finish_argument(element, call)
    elif element.tag == "json" and call is not None:
      if call.raw is not None:
        self._problem(f"json twice in a call: {call.raw!r}")
      call.raw = element.text
    elif element.tag == "call":
      self._finish_call(element)

  def _finish_argument(self, argument: _Element, call: _Element) -> None:
    key, declared = argument.attributes.get("key", ""), argument.attributes.get("type", "string")
    value: Any = argument.text
    if declared != "string":
      try:
        value = json.loads(argument.text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # NaN, or half of a surrogate pair
      except (ValueError, RecursionError):
        value = argument.text
        self._problem(f"argument {key} is no JSON of type {declared}: {argument.text!r}")
      else:
        if type_name(value) != declared:
          self._problem(f"argument {key} is no {declared}: {argument.text!r}")
    if key in call.arguments:
      self._problem(f"argument {key} twice: {call.arguments[key]!r}")
    call.arguments[key] = value

  def _finish_call(self, element: _Element) -> None:
    if element.raw is not None and element.arguments:
      self._problem(f"a call with both json and arguments: {element.arguments}")
    call = self._tool_call(element, element.arguments, element.raw)
    if not call.name:
      self._problem(f"a call without a tool: {call.arguments}")
      return
    self._calls.append(call)
    self._emit(Event("tool_call", call=call))

  def _tool_call(self, element: _Element, arguments: dict[str, Any], raw: str | None) -> ToolCall:
    name = element.attributes.get("tool", "")
    text = raw if raw is not None else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"{name}:{len(self._calls)}", name, text)


def _stray(pieces: list[str], complete: bool) -> str:
  text = "".join(pieces)
  return f"behind the end of the message: {text!r}" if complete else f"text outside of a section: {text!r}"


def _unescape(value: str) -> str:
  """Undoes the encoder's escapes: in this order, or &amp;quot; would become a quote."""
  return value.replace("&quot;", '"').replace("&amp;", "&")
