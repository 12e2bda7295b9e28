"""What counts as an answer, and files of questions."""

from __future__ import annotations

import json

import pytest

from kimi_k3.errors import InputError
from kimi_k3.evaluate import exact_match
from kimi_k3.evaluate.exact_match import DEFAULT_PROMPT, Question, cut_at, flexible, grade, prompts, read_questions


@pytest.mark.parametrize(
  ("completion", "strict", "any_number"),
  [
    (" 5 + 7 = 12\n#### 12", "12", "12"),
    (" #### 12.", "12", "12"),
    (" #### 1,234", "1234", "1234"),
    (" #### $18", "18", "18"),
    (" #### -3", "-3", "-3"),
    (" #### 0.50", "0.50", "0.50"),
    (" #### .5", ".5", ".5"),
    (" #### 12 apples, 7 pears", "12", "12"),
    (" #### 12\n\n#### 13", "12", "12"),
    (" #### 12\nThat is 3 more.", "12", "12"),
    (" ####12", None, "12"),
    (" #### twelve", None, None),
    (" #### twelve or 11", None, "11"),
    (" ### 12", None, "12"),
    (" The answer is 18.", None, "18"),
    (" He pays $1,234.50.", None, "1234.50"),
    (" He loses -$5", None, "-5"),
    (" 3, 4, 5", None, "5"),
    (" 10 ... $ , .", None, "10"),
    (" 12 is the answer\n", None, "12"),
    ("", None, None),
    (" no number", None, None),
  ],
)
def test_an_answer_is_found(completion, strict, any_number):
  assert (exact_match.strict(completion), flexible(completion)) == (strict, any_number)


@pytest.mark.parametrize(
  ("one", "other", "same"),
  [
    ("12", "12", True),
    ("12.0", "12", True),
    ("012", "12", True),
    (".5", "0.50", True),
    ("-0", "0", True),
    ("1e2", "100", True),
    ("12", "13", False),
    ("0.1", "0.10000000000000001", False),
    ("-12", "12", False),
    ("1.2.3", "1.2.3", False),
    ("NaN", "NaN", False),
    ("Infinity", "Infinity", False),
    ("", "", False),
  ],
)
def test_answers_are_compared_as_numbers(one, other, same):
  assert exact_match.equal(one, other) is same


@pytest.mark.parametrize(
  ("text", "stops", "kept"),
  [
    (" 12\n\nQuestion: next", ["Question:"], " 12\n\n"),
    (" 12", ["Question:"], " 12"),
    ("a b c", ["c", "b"], "a "),
    ("Question:", ["Question:"], ""),
  ],
)
def test_a_completion_is_cut_at_the_first_stop_string(text, stops, kept):
  assert cut_at(text, stops) == kept


def line(question: str = "What is 5 plus 7?", answer: str = "5 + 7 = 12\n#### 12", **more) -> str:
  return json.dumps({"question": question, "answer": answer, **more})


@pytest.fixture
def read(tmp_path):
  def of(content: str | bytes):
    path = tmp_path / "q.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_questions(str(path))

  return of


def test_questions_have_the_number_of_their_line_or_their_own_id(read):
  found = read(f"{line()}\n\n{line('Q\u2028?', 'x #### $1,000.', id='seven')}\n")
  assert found == [
    Question(1, 1, "What is 5 plus 7?", "5 + 7 = 12\n#### 12", "12"),
    Question("seven", 3, "Q\u2028?", "x #### $1,000.", "1000"),
  ]


@pytest.mark.parametrize(
  ("content", "said"),
  [
    ("", 'q.jsonl: holds no question, expected {"question"'),
    ("\n \n", "holds no question"),
    (b"\xff", "q.jsonl: not UTF-8: invalid start byte at byte 0"),
    (line() + "\n{", "q.jsonl: line 2: not JSON: "),
    (line() + "\n[1]", "line 2: expected an object with question and answer"),
    ('{"question": "q"}', "line 1: answer is null, expected text"),
    ('{"question": 5, "answer": "#### 1"}', "line 1: question is 5, expected text"),
    ('{"question": " ", "answer": "#### 1"}', 'line 1: question is " ", expected text'),
    (line(answer="12"), "line 1: answer has no ####, expected #### and a number at its end"),
    (line(answer="#### twelve"), 'line 1: answer has "twelve" after ####, expected a number'),
    (line(answer="#### 1_000"), 'line 1: answer has "1_000" after ####, expected a number such as -1,234.5'),
    (line(answer="#### 1e5"), 'line 1: answer has "1e5" after ####'),
    (line(answer="#### +5"), 'line 1: answer has "+5" after ####'),
    (line(answer="#### \uff11\uff12"), "line 1: answer has"),
    (line(answer="#### "), 'line 1: answer has "" after ####, expected a number'),
    (f"{line()}\n{{\n{line()}\n[]", "line 2: not JSON"),
    (f"{line()}\n{{\n{line()}\n[]", "line 4: expected an object"),
    ("{\n" * 7, "line 5: not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); and 2"),
    ("[" * 100_000, "line 1: "),
  ],
)
def test_lines_of_another_form_are_named(read, content, said):
  with pytest.raises(InputError) as raised:
    read(content)
  assert said in str(raised.value)


def test_a_file_that_is_not_there_is_named():
  with pytest.raises(InputError, match=r"nowhere\.jsonl: cannot be read: No such file"):
    read_questions("nowhere.jsonl")


def asked(text: str, answer: str = "#### 1", number: int = 1) -> Question:
  return Question(number, number, text, answer, "1")


def test_examples_stand_before_the_question_with_their_answers():
  assert prompts([asked("C?")], DEFAULT_PROMPT, [asked("A?", "a #### 1"), asked("B?", "b #### 2\n")]) == [
    "Question: A?\nAnswer: a #### 1\n\nQuestion: B?\nAnswer: b #### 2\n\nQuestion: C?\nAnswer:"
  ]


def test_braces_and_places_in_a_question_are_text():
  assert prompts([asked("{x} {question} %s")], "Q {question} {y}", []) == ["Q {x} {question} %s {y}"]


def test_a_template_without_a_place_is_refused():
  with pytest.raises(InputError, match=r"--prompt is 'Answer:', expected a template with \{question\} in it"):
    prompts([asked("A?")], "Answer:", [])


def test_an_example_that_gives_the_answer_away_is_refused():
  with pytest.raises(InputError, match="--few-shot: example 2 is the question of line 7: its answer would be given"):
    prompts([asked("A?", number=4), asked("B?", number=7)], DEFAULT_PROMPT, [asked("C?"), asked(" B?\n")])


def test_a_grade_counts_both_ways_and_a_row_that_failed_is_wrong():
  questions = [asked("A?", number=i) for i in (1, 2, 3, 4)]
  completions = [" #### 1", " so 1.", " #### 2", " #### 1"]
  found = grade(questions, ["P"] * 4, completions, [None, None, None, "logits are not finite"])
  assert {name: found[name] for name in ("strict", "flexible", "correct", "total")} == {
    "strict": 0.25, "flexible": 0.5, "correct": {"strict": 1, "flexible": 2}, "total": 4,
  }  # fmt: skip
  assert found["rows"][1] == {
    "id": 2, "prompt": "P", "completion": " so 1.", "extracted": {"strict": None, "flexible": "1"}, "gold": "1",
    "correct": {"strict": False, "flexible": True}, "error": None,
  }  # fmt: skip
  assert found["rows"][3]["correct"] == {"strict": False, "flexible": False}
