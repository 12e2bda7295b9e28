"""`kimi-k3 eval`: what it refuses, what it writes where, and one real model behind it."""

from __future__ import annotations

import base64
import json
import math
import shutil
import types
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_k3.cli.decode import _REFUSED_KEYS
from kimi_k3.cli.main import main
from kimi_k3.evaluate.perplexity import Scores
from kimi_k3.generate.host_loop import decode_by_steps
from kimi_k3.maxtext_adapter import engine, scoring

FLOAT32 = ("dtype=float32", "matmul_precision=highest")
VOCABULARY = 256
BOS, EOS = 252, 254  # of the tiny checkpoint's config


@pytest.fixture(scope="module")
def converted(five_layers, tmp_path_factory) -> Path:
  """The converted checkpoint with a tokenizer beside it: one token a byte. Read only."""
  out = shutil.copytree(five_layers, tmp_path_factory.mktemp("eval") / "out")
  lines = [base64.b64encode(bytes([b])) + b" %d" % b for b in range(VOCABULARY)]
  (out / "tiktoken.model").write_bytes(b"\n".join(lines))
  return out


@pytest.fixture
def config(converted) -> str:
  return str(converted / "decode.yml")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
  """The working directory, with a text, ids, questions and examples."""
  (tmp_path / "text.txt").write_text("one text\r\nof two lines")
  (tmp_path / "rows.json").write_text("[[1, 2, 3], [4, 5]]")
  (tmp_path / "questions.jsonl").write_text(
    "".join(json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) + "\n" for n in (1, 2, 3))
  )
  (tmp_path / "examples.jsonl").write_text(json.dumps({"question": "0 + 1?", "answer": "#### 1"}) + "\n")
  monkeypatch.chdir(tmp_path)
  return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
  ("words", "said"),
  [
    ((), "nothing to measure: give --text FILE.txt, --tokens FILE.json or --questions FILE.jsonl"),
    (("--text", "text.txt", "--tokens", "rows.json"), "give either --text or --tokens, not both"),
    (("--text", "nowhere.txt"), "nowhere.txt: cannot be read: No such file"),
    (("--tokens", "nowhere.json"), "nowhere.json: cannot be read: No such file"),
    (("--questions", "nowhere.jsonl"), "nowhere.jsonl: cannot be read: No such file"),
    (("--questions", "questions.jsonl", "--few-shot", "nowhere.jsonl", "1"), "nowhere.jsonl: cannot be read"),
    (("--questions", "questions.jsonl", "--few-shot", "examples.jsonl", "2"), "holds 1 examples, expected 2"),
    (("--questions", "questions.jsonl", "--few-shot", "examples.jsonl", "-1"), "-1: expected a file and a number of"),
    (("--questions", "questions.jsonl", "--few-shot", "examples.jsonl", "0"), "expected a file and a number of"),
    (("--questions", "questions.jsonl", "--few-shot", "questions.jsonl", "1"), "is the question of line 1"),
    (("--questions", "questions.jsonl", "--limit", "0"), "--limit is 0, expected 1 or more"),
    (("--questions", "questions.jsonl", "--max-new-tokens", "0"), "--max-new-tokens is 0, expected 1 or more"),
    (("--questions", "questions.jsonl", "--prompt", "Q:"), "--prompt is 'Q:', expected a template with {question}"),
    (("--questions", "questions.jsonl", "--stop", ""), "--stop is empty, expected text"),
    (
      ("--questions", "questions.jsonl", "--max-new-tokens", "4090"),
      "questions.jsonl: line 1: 24 tokens and 4090 new ones, expected 4096 at most (max_position_embeddings",
    ),
    (("--text", "text.txt", "--window", "4097"), "--window is 4097, expected 1 to 4096"),
    (("--text", "text.txt", "--window", "8", "--stride", "9"), "--stride is 9, expected 1 to the window of 8"),
    (("--questions", "questions.jsonl", "--window", "8"), "--window given without --text or --tokens: leave it out"),
    (("--text", "text.txt", "--few-shot", "a", "1"), "--few-shot given without --questions: leave it out"),
    (("--text", "text.txt", "--max-new-tokens", "8"), "--max-new-tokens given without --questions: leave it out"),
    (("--text", "text.txt", "--out", "nowhere/x.json"), "nowhere/x.json: its directory does not exist"),
    (("--text", "text.txt", "no_such_key=1"), "unknown key no_such_key"),
    (("--text", "text.txt", "prompt=Hello"), "prompt= given, which eval does not read"),
    (("--text", "text.txt", "scan_layers=false"), "scan_layers is false in the config, true in the checkpoint"),
    (("--text", "text.txt", "per_device_batch_size=0.5"), "per_device_batch_size is 0.5: 0.5 windows at once"),
    (("--text", "text.txt", "--check-placement", "all"), "partitioning is auto"),
    (
      ("--questions", "questions.jsonl", "decode_sampling_strategy=weighted"),
      "decode_sampling_strategy is 'weighted': exact match is greedy, leave it out",
    ),
    (
      ("--questions", "questions.jsonl", "max_prefill_predict_length=4"),
      "row 0 has 24 tokens, longer than the prompt cache: max_prefill_predict_length is 4",
    ),
  ],
)
def test_what_cannot_be_measured_is_refused(refused, config, words, said):
  assert said in refused("eval", config, *words)


@pytest.mark.parametrize(
  ("content", "said"),
  [
    (b"", "text.txt: is empty"),
    (b"a\xff", "text.txt: not UTF-8: invalid start byte at byte 1; convert it first"),
    (b"a", "nothing to predict: no document has a token that another precedes; give a longer text, or --bos"),
  ],
)
def test_a_text_without_anything_to_predict_is_refused(refused, config, here, content, said):
  (here / "text.txt").write_bytes(content)
  assert said in refused("eval", config, "--text", "text.txt")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("key", _REFUSED_KEYS)
def test_what_decode_refuses_is_refused(refused, config, key):
  assert refused("eval", config, "--text", "text.txt", f"{key}=1").startswith(f"{key}: ")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
  ("words", "said"),
  [
    (("--text", "text.txt"), "--text needs a tokenizer: no tiktoken.model or tokenizer.json in "),
    (("--text", "text.txt"), "; --tokens takes ids"),
    (("--questions", "questions.jsonl"), "--questions needs a tokenizer: no tiktoken.model or tokenizer.json in "),
    (("--tokens", "rows.json", "tokenizer_path=x", "--questions", "questions.jsonl"), "tokenizer_path is 'x'"),
  ],
)
def test_a_text_without_a_tokenizer_is_refused_in_one_line(refused, five_layers, words, said):
  assert said in refused("eval", five_layers / "decode.yml", *words)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
  ("content", "said"),
  [("{", "tokenizer_config.json: cannot be read"), ('{"add_bos_token": 1}', "add_bos_token is 1, expected true or")],
)
def test_a_tokenizers_config_that_says_nothing_clear_is_refused(refused, converted, tmp_path, content, said):
  for name in ("decode.yml", "tiktoken.model"):
    shutil.copy(converted / name, tmp_path)
  (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {}}')
  (tmp_path / "tokenizer_config.json").write_text(content)
  assert said in refused("eval", tmp_path / "decode.yml", "--text", "text.txt")


@pytest.fixture
def given(monkeypatch) -> list[np.ndarray]:
  """Another model behind perplexity, and the batches that it is given: 1 nat a token; id 99 is not finite."""
  batches = []

  def make_scorer(_config, _placement):
    def score(inputs, _targets, lengths) -> Scores:
      batches.append(inputs)
      real = np.arange(inputs.shape[1]) < lengths[:, None]
      ones = np.ones(inputs.shape, np.float32)
      return Scores(ones, ones, ~((inputs == 99) & real).any(axis=1))

    return score

  monkeypatch.setattr(scoring, "make_scorer", make_scorer)
  return batches


def measured(capsys, *words: str | Path, code: int = 0) -> dict[str, Any]:
  """The result on stdout."""
  capsys.readouterr()
  assert main(["eval", *map(str, words)]) == code
  return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("here")
def test_perplexity_of_a_text_counts_its_tokens_and_bytes(capsys, config, given):
  result = measured(capsys, config, "--text", "text.txt", "--window", "8", "--stride", "5", *FLOAT32)
  assert result == {
    "schema": 1,
    "config": {
      "file": config, "settings": list(FLOAT32), "dtype": "float32", "matmul_precision": "highest",
      "partitioning": "auto", "scan_layers": True, "devices": 1,
    },
    "perplexity": {
      "perplexity": pytest.approx(math.e), "nats_per_token": 1.0, "nats": 21.0,
      "bits_per_byte": pytest.approx(21 / 22 / math.log(2)),
      "margins": {"smallest": 1.0, "median": 1.0, "share_below": {"0.001": 0.0, "0.01": 0.0, "0.1": 0.0}},
      "tokens": 22, "predicted": 21, "documents": 1, "bos": False, "bytes": 22, "windows": 4, "window": 8, "stride": 5,
      "windows_not_finite": [], "lossless": True,
    },
    "exact_match": None,
  }  # fmt: skip
  assert [batch.shape for batch in given] == [(4, 256)]
  assert bytes(given[0][0, :8].tolist()) == b"one text"


@pytest.mark.usefixtures("here", "given")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_settings_may_stand_anywhere_after_the_config(capsys, config, place):
  words = ["--tokens=rows.json", "--window=8"]
  words.insert(place, "per_device_batch_size=2")
  assert measured(capsys, config, *words)["config"]["settings"] == ["per_device_batch_size=2"]


@pytest.mark.usefixtures("here")
def test_ids_are_documents_of_their_own_and_need_no_tokenizer(capsys, five_layers, given):
  found = measured(capsys, five_layers / "decode.yml", "--tokens", "rows.json", "--bos")["perplexity"]
  names = ("tokens", "predicted", "documents", "bos", "bytes", "lossless", "window")
  assert [found[name] for name in names] == [5, 5, 2, True, None, None, 2048]
  assert given[0][:, :3].tolist() == [[BOS, 1, 2], [BOS, 4, 0]]


@pytest.mark.usefixtures("here")
def test_a_document_starts_as_the_tokenizers_config_says_unless_told(capsys, converted, given, tmp_path):
  out = shutil.copytree(converted, tmp_path / "out")
  (out / "tokenizer_config.json").write_text('{"add_bos_token": true}')
  words = (out / "decode.yml", "--text", "text.txt")
  assert measured(capsys, *words)["perplexity"]["predicted"] == 22
  assert given[-1][0, 0] == BOS
  assert measured(capsys, *words, "--no-bos")["perplexity"]["predicted"] == 21


@pytest.mark.usefixtures("here", "given", "parrot")
def test_ids_start_as_they_are_also_beside_questions_whose_prompts_do_not(capsys, converted, tmp_path):
  out = shutil.copytree(converted, tmp_path / "out")
  (out / "tokenizer_config.json").write_text('{"add_bos_token": true}')
  words = (out / "decode.yml", "--tokens", "rows.json", "--questions", "questions.jsonl", "--max-new-tokens", "2")
  assert measured(capsys, *words)["perplexity"]["bos"] is False
  assert {prompt[0] for prompt in Parrot.prompts} == {BOS}


@pytest.mark.usefixtures("here")
def test_windows_that_are_not_finite_are_named_with_exit_code_1(capsys, five_layers, given, here):
  (here / "rows.json").write_text(json.dumps([[1, 2, 3], [99, 4], [5, 6, 99]]))
  words = ["eval", str(five_layers / "decode.yml"), "--tokens", "rows.json", "--out", "out.json"]
  assert main(words) == 1
  said = capsys.readouterr()
  assert "kimi-k3: window(s) 1 hold logits that are not finite\n" in said.err
  assert said.out == "perplexity: none, 5 of 8 tokens in 3 windows of 2048, stride 2048\n"
  found = json.loads((here / "out.json").read_text())["perplexity"]
  assert (found["windows_not_finite"], found["perplexity"]) == ([1], None)
  assert len(given) == 1


@pytest.mark.usefixtures("given")
def test_a_text_that_the_tokenizer_changes_is_told(capsys, five_layers, here):
  from tokenizers import Tokenizer
  from tokenizers.models import WordLevel
  from tokenizers.pre_tokenizers import Whitespace

  tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "text": 2}, "[UNK]"))
  tokenizer.pre_tokenizer = Whitespace()
  tokenizer.save(str(here / "tokenizer.json"))
  words = (five_layers / "decode.yml", "--text", "text.txt", f"tokenizer_path={here}", "--out", "out.json")
  assert main(["eval", *map(str, words)]) == 0
  assert "note: text.txt: the tokenizer does not give the text back" in capsys.readouterr().err
  assert json.loads((here / "out.json").read_text())["perplexity"]["lossless"] is False


class Parrot:
  """An engine that says what `ANSWERS` hold for the first digit of the last question, a byte at a time; 9 breaks."""

  ANSWERS: ClassVar = {"1": b" 2\n#### 2\n\nQuestion: 5", "2": b" so 3.\xfe", "3": b" 1\n#### 5\xfe", "9": b""}
  num_slots, max_prompt, max_steps = 2, 256, 256
  prompts: ClassVar[list[bytes]] = []

  def __init__(self, _config):
    self.slots = {}
    self.prompts.clear()

  def logits(self, rest: bytes) -> np.ndarray:
    row = np.eye(VOCABULARY, dtype=np.float32)[rest[0] if rest else 0]
    return row if rest else row * np.nan

  def prefill(self, tokens, true_length):
    text = bytes(tokens[:true_length].tolist())
    self.prompts.append(text)
    rest = self.ANSWERS[chr(text[text.rindex(b"Q") :].split(b": ")[1][0])]
    return types.SimpleNamespace(logits=jnp.asarray(self.logits(rest)), rest=rest)

  def rows_together(self, _tokens):
    return 1

  def prefill_together(self, prompts, true_lengths):
    return [self.prefill(*one) for one in zip(prompts, true_lengths, strict=True)]

  def insert(self, prompt, *slots):
    self.slots |= dict.fromkeys(slots, prompt.rest[1:])

  def step(self, _tokens):
    rows = [self.logits(self.slots.get(slot) or b"\0") for slot in range(self.num_slots)]
    self.slots = {slot: rest[1:] for slot, rest in self.slots.items()}
    return jnp.asarray(rows)

  def decode(self, rows, plan, *, buffer):
    used = [slot in self.slots for slot in range(self.num_slots)]
    return decode_by_steps(self.step, rows, used, plan, buffer=buffer)

  def release(self, slot):
    del self.slots[slot]


@pytest.fixture
def parrot(monkeypatch):
  monkeypatch.setattr(engine, "Engine", Parrot)


@pytest.mark.usefixtures("here", "parrot")
def test_answers_are_taken_from_completions_that_end_at_eos_or_a_stop_string(capsys, config):
  found = measured(capsys, config, "--questions", "questions.jsonl", "--max-new-tokens", "50")["exact_match"]
  assert {name: found[name] for name in ("strict", "flexible", "correct", "total")} == {
    "strict": 1 / 3, "flexible": 2 / 3, "correct": {"strict": 1, "flexible": 2}, "total": 3,
  }  # fmt: skip
  assert [row["completion"] for row in found["rows"]] == [" 2\n#### 2\n\n", " so 3.", " 1\n#### 5"]
  assert found["rows"][0] == {
    "id": 1, "prompt": "Question: 1 + 1?\nAnswer:", "completion": " 2\n#### 2\n\n",
    "extracted": {"strict": "2", "flexible": "2"}, "gold": "2", "correct": {"strict": True, "flexible": True},
    "error": None,
  }  # fmt: skip


@pytest.mark.usefixtures("here", "parrot")
def test_template_stop_examples_limit_and_bos_are_as_given(capsys, config):
  words = ("--questions", "questions.jsonl", "--limit", "2", "--max-new-tokens", "30", "--few-shot", "examples.jsonl")
  more = ("1", "--prompt", r"Q: {question}\nA:", "--stop", r"\n", "--stop", "so", "--bos")
  found = measured(capsys, config, *words, *more)["exact_match"]
  assert [row["completion"] for row in found["rows"]] == [" 2", " "]
  assert Parrot.prompts == [bytes([BOS]) + b"Q: 0 + 1?\nA: #### 1\n\nQ: %d + 1?\nA:" % n for n in (1, 2)]


@pytest.mark.usefixtures("parrot")
def test_a_question_that_fails_is_named_with_exit_code_1(capsys, config, here):
  (here / "questions.jsonl").write_text('{"question": "9?", "answer": "#### 9", "id": "nine"}')
  assert main(["eval", config, "--questions", "questions.jsonl", "--out", "out.json"]) == 1
  said = capsys.readouterr()
  assert said.out == "exact match: strict 0 of 1 (0.0%), flexible 0 of 1 (0.0%)\n"
  assert "kimi-k3: question(s) nine failed: logits that are not finite\n" in said.err
  (row,) = json.loads((here / "out.json").read_text())["exact_match"]["rows"]
  assert row["error"] == "logits of new token 0 are not finite"


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint, reference) -> Any:
  """The source of `five_layers` in the reference."""
  return reference.load_checkpoint(
    tiny_checkpoint("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2")
  )


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_perplexity_of_a_real_model_is_the_references(capsys, config, loaded, reference):
  assert main(["eval", config, "--text", "text.txt", "--out", "out.json", *FLOAT32]) == 0
  assert capsys.readouterr().out.startswith("perplexity ")
  found = json.loads(Path("out.json").read_text())["perplexity"]
  tokens = np.array(list(Path("text.txt").read_bytes()))
  logits = reference.forward(loaded, tokens[None, :-1])["logits"][0]
  nats = (np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(len(tokens) - 1), tokens[1:]]).mean()
  # Float32 against float64: a logit is within 1e-4 of the largest, which is some 10 (logits_test.py).
  assert abs(found["nats_per_token"] - nats) <= 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_both_of_a_real_model_in_one_run(capsys, config, loaded, reference):
  words = ("--text", "text.txt", "--questions", "questions.jsonl", "--limit", "2", "--max-new-tokens", "6")
  result = measured(capsys, config, *words, *FLOAT32)
  assert result["perplexity"]["predicted"] == 21
  for row in result["exact_match"]["rows"]:
    ids = reference.greedy(loaded, np.array(list(row["prompt"].encode())), 6)[0].tolist()
    ids = ids[: ids.index(EOS)] if EOS in ids else ids
    assert row["completion"] == bytes(ids).decode("utf-8", "replace")
