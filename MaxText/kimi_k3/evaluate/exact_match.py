"""Exact match over questions in gsm8k's form: the number after "####" is the answer."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from kimi_k3.errors import InputError

DEFAULT_PROMPT = "Question: {question}\nAnswer:"
DEFAULT_STOP = "Question:"
PLACE = "{question}"
MARK = "####"

_SHOWN = 5
_STRICT = re.compile(r"#### (-?[$0-9.,]*[0-9][0-9.,]*)")
# A run of what numbers are written with, which must hold a digit: "-$1,234.50", "18.", ".5".
_NUMBER = re.compile(r"-?[$0-9.,]*[0-9][0-9.,]*")


@dataclasses.dataclass(frozen=True)
class Question:
  """A line of a file.

  Attributes:
    id: Its "id", or else the number of its line, from 1.
    line: The number of its line, from 1.
    question: What is asked.
    answer: All of the answer, for examples in front of a question.
    gold: The number in it, normalised.
  """

  id: Any
  line: int
  question: str
  answer: str
  gold: str


def normalise(text: str) -> str:
  """Returns an answer as it is compared: without commas, dollar signs, spaces around it and a period at its end."""
  return text.strip().replace(",", "").replace("$", "").rstrip(".")


def equal(one: str, other: str) -> bool:
  """Whether two normalised answers are the same number: "12.0" is "12"."""
  left, right = _number(one), _number(other)
  return left is not None and left == right


def strict(completion: str) -> str | None:
  """Returns the normalised number after the first "#### ", None if there is none."""
  found = _STRICT.search(completion)
  return None if found is None else normalise(found[1])


def flexible(completion: str) -> str | None:
  """Returns what `strict` finds, or else the last number in the completion, normalised."""
  if (found := strict(completion)) is not None:
    return found
  numbers = _NUMBER.findall(completion)
  return normalise(numbers[-1]) if numbers else None


def cut_at(text: str, stops: Iterable[str]) -> str:
  """Returns the text up to the first of the stop strings."""
  return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def read_questions(path: str) -> list[Question]:
  """Returns the questions of a JSONL file, {"question": ..., "answer": "... #### 12"} a line; empty lines are left out.

  Raises:
    InputError: if it cannot be read, holds no question or has lines of another form, naming them.
  """
  try:
    text = Path(path).read_bytes().decode()
  except OSError as error:
    raise InputError(f"{path}: cannot be read: {error.strerror}") from error
  except UnicodeDecodeError as error:
    raise InputError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error
  found, faults = [], []
  for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may hold other line separators
    if line.strip():
      try:
        found.append(_question(line, number))
      except (ValueError, RecursionError) as error:
        faults.append(f"line {number}: {error}")
  if faults:
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    raise InputError(f"{path}: {'; '.join(faults[:_SHOWN])}{more}")
  if not found:
    raise InputError(f'{path}: holds no question, expected {{"question": ..., "answer": "... #### 12"}} a line')
  return found


def prompts(questions: Sequence[Question], template: str, examples: Sequence[Question]) -> list[str]:
  """Returns what is put to the model: the examples with their answers, and the question.

  Args:
    questions: To ask.
    template: Holds "{question}".
    examples: Put in front of each, in this order.

  Raises:
    InputError: if the template has no place for the question, or an example is among the questions.
  """
  if PLACE not in template:
    raise InputError(f"--prompt is {template!r}, expected a template with {PLACE} in it")
  asked = {question.question.strip(): question.line for question in reversed(questions)}
  given = [(n, asked[e.question.strip()]) for n, e in enumerate(examples, 1) if e.question.strip() in asked]
  if given:
    shown = ", ".join(f"example {n} is the question of line {line}" for n, line in given[:_SHOWN])
    raise InputError(f"--few-shot: {shown}: its answer would be given away; take other examples")
  before = "".join(f"{template.replace(PLACE, e.question)} {e.answer.strip()}\n\n" for e in examples)
  return [before + template.replace(PLACE, question.question) for question in questions]


def grade(
  questions: Sequence[Question], asked: Sequence[str], completions: Sequence[str], failures: Sequence[str | None]
) -> dict[str, Any]:
  """Returns accuracies from 0 to 1 and a row for each question, as JSON. A row that failed is wrong.

  Args:
    questions: What was asked.
    asked: The prompts.
    completions: What came, cut at stop strings.
    failures: Of each row, None where there was none.
  """
  rows = []
  for question, prompt, completion, failure in zip(questions, asked, completions, failures, strict=True):
    extracted = {"strict": strict(completion), "flexible": flexible(completion)}
    correct = {
      name: failure is None and answer is not None and equal(answer, question.gold)
      for name, answer in extracted.items()
    }
    row = {"id": question.id, "prompt": prompt, "completion": completion, "extracted": extracted}
    rows.append(row | {"gold": question.gold, "correct": correct, "error": failure})
  right = {name: sum(row["correct"][name] for row in rows) for name in ("strict", "flexible")}
  shares = {name: count / len(rows) for name, count in right.items()}
  return shares | {"correct": right, "total": len(rows), "rows": rows}


def _question(line: str, number: int) -> Question:
  try:
    value = json.loads(line)
  except json.JSONDecodeError as error:
    raise ValueError(f"not JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError("expected an object with question and answer")
  for key in ("question", "answer"):
    if not isinstance(value.get(key), str) or not value[key].strip():
      raise ValueError(f"{key} is {json.dumps(value.get(key))}, expected text")
  _, mark, tail = value["answer"].rpartition(MARK)
  gold = normalise(tail)
  if not mark:
    raise ValueError(f"answer has no {MARK}, expected {MARK} and a number at its end")
  if _number(gold) is None or strict(f"{MARK} {tail.strip()}") != gold:  # no completion could be right
    raise ValueError(f"answer has {json.dumps(tail.strip())} after {MARK}, expected a number such as -1,234.5")
  return Question(value.get("id", number), number, value["question"], value["answer"], gold)


def _number(text: str) -> Decimal | None:
  try:
    number = Decimal(text)
  except InvalidOperation:
    return None
  return number if number.is_finite() else None
