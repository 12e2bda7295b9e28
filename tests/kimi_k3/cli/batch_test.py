"""`kimi-k3 batch` on an engine whose language is arithmetic, killed and gone on with; one real model behind it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from kimi_k3.cli.main import main
from kimi_k3.generate import batch_output

VOCABULARY = 1024  # of k3-nano
STOP = 1009
BROKEN = 99  # a prompt that starts with it gives NaN
NEW = 6
FLOAT32 = ("dtype=float32", "matmul_precision=highest")


def next_token(history: list[int]) -> int:
  return (3 * history[-1] + sum(history) + 1) % 500


def continuation(prompt: list[int], count: int) -> list[int]:
  history = list(prompt)
  for _ in range(count):
    history.append(next_token(history))
  return history[len(prompt) :]


def logits(history: list[int]) -> np.ndarray:
  return np.eye(VOCABULARY, dtype=np.float32)[next_token(history)] * (np.nan if history[0] == BROKEN else 1)


class ArithmeticEngine:
  """Keeps each slot's history on the host.

  Attributes:
    made: All of this test.
    before_call: Called before each call of the decoding program.
  """

  made: ClassVar[list[ArithmeticEngine]] = []
  before_call: ClassVar[Callable[[], object]] = staticmethod(lambda: None)

  def __init__(self, config: Any, _: Any = None):
    self.num_slots = int(config.per_device_batch_size)
    self.max_prompt = config.max_prefill_predict_length
    self.max_steps = config.max_target_length - self.max_prompt
    self.histories: dict[int, list[int]] = {}
    self.made.append(self)

  def prefill(self, tokens, true_length):
    history = tokens[:true_length].tolist()
    return types.SimpleNamespace(logits=jnp.asarray(logits(history)), history=history)

  def rows_together(self, _tokens):
    return 1

  def prefill_together(self, prompts, true_lengths):
    return [self.prefill(*one) for one in zip(prompts, true_lengths, strict=True)]

  def insert(self, prompt, *slots):
    (slot,) = slots
    assert slot not in self.histories
    self.histories[slot] = prompt.history

  def decode(self, rows, plan, *, buffer):
    from kimi_k3.generate.device_loop import LENGTH, NOT_FINITE, RUNNING, STOP, Decoded

    type(self).before_call()
    tokens = np.full((self.num_slots, buffer), -1, np.int32)
    counts, status = np.zeros(self.num_slots, np.int32), np.full(self.num_slots, RUNNING, np.int32)
    steps = finished = 0
    while steps < min(plan.max_steps, buffer) and finished < min(plan.until_finished, len(self.histories)):
      for slot, history in self.histories.items():
        if status[slot] == RUNNING:
          history.append(int(tokens[slot, steps - 1] if steps else rows.tokens[slot]))
          row = logits(history)
          if not np.isfinite(row).all():
            status[slot] = NOT_FINITE
          else:
            tokens[slot, steps] = token = int(row.argmax())
            counts[slot] += 1
            ended = rows.counts[slot] + counts[slot] >= rows.limits[slot]
            status[slot] = STOP if token in plan.stop_ids else LENGTH if ended else RUNNING
          finished += status[slot] != RUNNING
      steps += 1
    return Decoded(tokens, counts, status, steps)

  def release(self, slot):
    del self.histories[slot]


@pytest.fixture(scope="module")
def nano(convert, k3_nano) -> Path:
  return convert(k3_nano.checkpoint) / "decode.yml"


@pytest.fixture(scope="module")
def read_once(nano) -> Callable[..., Any]:
  """Reads the config once for all these tests, which is most of their time; settings are laid over it."""
  from kimi_k3.maxtext_adapter.settings import read_config

  base = read_config(str(nano), [])

  class Laid:
    def __init__(self, values: dict[str, Any]):
      vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
      return getattr(base, name)

  def read(_: str, settings: list[str], **derived: Any) -> Laid:
    return Laid(derived | {key: yaml.safe_load(value) for key, value in (s.split("=") for s in settings)})

  return read


@pytest.fixture
def arithmetic(monkeypatch, read_once) -> type[ArithmeticEngine]:
  """The verb with another engine: all but the model itself is real."""
  from kimi_k3.maxtext_adapter import engine, settings

  class Engine(ArithmeticEngine):
    made: ClassVar[list[ArithmeticEngine]] = []

  monkeypatch.setattr(engine, "make_engine", Engine)
  monkeypatch.setattr(settings, "read_config", read_once)
  return Engine


@pytest.fixture
def batch(nano, tmp_path, monkeypatch) -> Callable[..., int]:
  """Returns a function: lines, None for those that are there, and more words, to the exit code."""
  monkeypatch.chdir(tmp_path)

  def run(lines: list[Any] | None, *words: str, new: int = NEW) -> int:
    if lines is not None:
      texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
      Path("in.jsonl").write_text("".join(f"{text}\n" for text in texts))
    files = ("--in", "in.jsonl", "--out", "out.jsonl", "--max-new-tokens", str(new))
    return main(["batch", str(nano), *files, *words])

  return run


def rows() -> list[dict[str, Any]]:
  return [json.loads(line) for line in Path("out.jsonl").read_bytes().splitlines()]


def files() -> list[str]:
  return sorted(path.name for path in Path().iterdir())


WHOLE = ["in.jsonl", "out.jsonl", "out.jsonl.state.json"]


class Killed(BaseException):
  """What no code of ours catches."""


def many_prompts(rng: random.Random) -> list[list[int]]:
  lengths = [1 + i % 130 for i in range(200)]
  rng.shuffle(lengths)
  return [[rng.randrange(100, 500) for _ in range(length)] for length in lengths]


def test_200_prompts_through_4_slots_killed_at_random_bytes_equal_each_row_alone(batch, arithmetic, monkeypatch):
  rng = random.Random(1)
  prompts, news = many_prompts(rng), [rng.randint(1, 40) for _ in range(200)]
  lines = [{"prompt_ids": p, "max_new_tokens": n, "id": f"r{i}"} for i, (p, n) in enumerate(zip(prompts, news))]  # noqa: B905
  write = os.write
  for left in (rng.randint(1, 60), rng.randint(1, 60), None):

    def killed(descriptor: int, data: bytes, count: list[int | None] = [left]) -> int:  # noqa: B006
      if count[0] is not None and bytes(data[:9]) == b'{"index":':
        count[0] -= 1
        if not count[0]:
          write(descriptor, data[: rng.randrange(len(data))])
          raise Killed
      return write(descriptor, data)

    monkeypatch.setattr(os, "write", killed)
    if left is None:
      assert batch(lines, "per_device_batch_size=4") == 0
    else:
      with pytest.raises(Killed):
        batch(lines, "per_device_batch_size=4")
  assert files() == WHOLE
  assert [row["index"] for row in rows()] == list(range(200))
  for row, prompt, new in zip(rows(), prompts, news, strict=True):
    assert (row["id"], row["prompt_ids"]) == (f"r{row['index']}", prompt)
    assert row["ids"] == continuation(prompt, new)
    assert (row["finish_reason"], row["error"]) == ("length", None)
  assert [engine.histories for engine in arithmetic.made] == [{}] * 3, "all slots are free"
  assert {engine.num_slots for engine in arithmetic.made} == {4}


def test_a_row_that_is_not_finite_fails_alone_and_is_run_again_when_asked(batch, arithmetic, capsys):
  lines = [{"prompt_ids": [i + 100]} for i in range(9)]
  lines[4] = {"prompt_ids": [BROKEN, 5], "id": 44}
  assert batch(lines) == 1
  expected = [continuation(line["prompt_ids"], NEW) for line in lines]
  assert [row["ids"] for row in rows()] == [*expected[:4], [], *expected[5:]]
  assert (rows()[4]["id"], rows()[4]["finish_reason"]) == (44, "error")
  assert rows()[4]["error"] == "logits of new token 0 are not finite"
  said = capsys.readouterr()
  assert said.out.startswith("9 rows (1 failed) on 9 slots: time to first token ")
  assert "out.jsonl: 1 row(s) failed: line 5 of in.jsonl; --retry-errors runs them again, and " in said.err
  before = rows()
  assert batch(None) == 1, "the same exit code as the run that wrote it"
  assert capsys.readouterr().out == "out.jsonl: all 9 rows are there, 1 of them failed: nothing to do\n"
  assert len(arithmetic.made) == 1, "nothing is loaded"
  ArithmeticEngine.prefill, prefill = (lambda self, tokens, n: prefill(self, tokens + 1, n)), ArithmeticEngine.prefill
  try:
    assert batch(None, "--retry-errors") == 0
  finally:
    ArithmeticEngine.prefill = prefill
  assert [row for row in rows() if row["index"] != 4] == [row for row in before if row["index"] != 4]
  assert rows()[4]["finish_reason"] == "length"
  assert batch(None) == 0
  assert files() == WHOLE


BAD = {
  1: ("{", "not JSON: Expecting property name enclosed in double quotes (column 2)"),
  2: ({"id": "x"}, "expected one of prompt, prompt_ids, messages, found none"),
  4: ({"prompt_ids": [1024]}, "prompt_ids: 1024 at position 0: outside the vocabulary of 1024"),
  6: ({"prompt": "a", "temperature": -1}, "temperature is -1.0, expected 0 (greedy) or a positive number"),
  7: ({"messages": [{"role": "robot", "content": "a"}]}, "robot"),
  8: ({"prompt_ids": [1], "max_new_tokens": 4096}, "1 tokens and 4096 new ones, expected 4096 at most"),
  9: ({"prompt": "a", "seed": 2**40}, "seed is 1099511627776, expected 0 to 4294967295"),
}  # fmt: skip


def lines_with_bad_ones() -> list[Any]:
  return [BAD[i][0] if i in BAD else "" if i == 3 else {"prompt_ids": [100 + i]} for i in range(11)]


@pytest.mark.usefixtures("arithmetic")
def test_bad_lines_are_named_and_stop_no_other(batch, capsys):
  assert batch(lines_with_bad_ones()) == 1
  said = capsys.readouterr().err
  found = {row["index"]: row for row in rows()}
  assert list(found) == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]
  for index, (_, reason) in BAD.items():
    assert reason in found[index]["error"]
    assert f"in.jsonl: line {index + 1}: {found[index]['error']}\n" in said
    assert (found[index]["finish_reason"], found[index]["prompt_ids"], found[index]["ids"]) == ("error", [], [])
  assert found[2]["id"] == "x"
  assert all(found[i]["ids"] == continuation([100 + i], NEW) for i in (0, 5, 10))


def test_with_strict_a_bad_line_refuses_all_before_anything_is_loaded_or_written(batch, arithmetic, capsys):
  assert batch(lines_with_bad_ones(), "--strict") == 2
  said = capsys.readouterr().err
  assert said.startswith("kimi-k3: error: in.jsonl: 7 bad line(s): line 2: not JSON: ")
  assert said.endswith("; and 2 more: mend them or leave out --strict\n")
  assert said.count("\n") == 1
  assert files() == ["in.jsonl"]
  assert arithmetic.made == []


def test_lines_that_are_all_bad_load_nothing(batch, arithmetic):
  assert batch(["{", "[]"]) == 1
  assert [row["finish_reason"] for row in rows()] == ["error", "error"]
  assert arithmetic.made == []


@pytest.mark.usefixtures("arithmetic")
def test_a_row_that_is_too_long_for_explicit_caches_fails_alone(batch, capsys):
  lines = [{"prompt_ids": [5] * 4}, {"prompt_ids": [5] * 5}, {"prompt_ids": [5], "max_new_tokens": 7}]
  lengths = ("max_prefill_predict_length=4", "max_target_length=10")
  assert batch(lines, *lengths, "--strict") == 2
  assert "2 bad line(s): line 2: the prompt has 5 tokens, longer than the prompt cache: max" in capsys.readouterr().err
  assert batch(None, *lengths) == 1
  assert [row["error"] for row in rows()] == [
    None,
    "the prompt has 5 tokens, longer than the prompt cache: max_prefill_predict_length is 4",
    "7 new tokens do not fit: max_target_length 10 - max_prefill_predict_length 4 leaves 6",
  ]
  Path("out.jsonl").unlink()
  assert batch(None, "max_target_length=12") == 0, "prompts get what the new tokens leave"
  assert batch(None, "max_prefill_predict_length=300") == 0


def test_a_dry_run_checks_every_line_and_neither_loads_nor_writes(batch, arithmetic, capsys):
  assert batch(lines_with_bad_ones(), "--dry-run") == 1
  said = capsys.readouterr()
  assert said.out == (
    "in.jsonl: 10 rows, 7 of them bad lines\n"
    "prompts of 1 to 1 tokens, 3 in all; up to 6 new ones a row, 18 in all\n"
    "caches of 262 tokens, 256 of them for prompts, in 10 slots\n"
    "out.jsonl: 0 rows are there, 0 of them failed\n"
    "would run 10 rows; nothing is loaded or written\n"
  )
  assert said.err.count("in.jsonl: line ") == 7
  assert files() == ["in.jsonl"]
  assert batch([{"prompt_ids": [100]}], "--dry-run") == 0
  assert batch(None) == 0
  with Path("out.jsonl").open("a") as file:
    file.write('{"index": 1')
  before = Path("out.jsonl").read_bytes()
  capsys.readouterr()
  assert batch([{"prompt_ids": [100]}, {"prompt_ids": [101]}], "--dry-run") == 0
  said = capsys.readouterr()
  assert said.err == "out.jsonl: 11 bytes of a torn last line would be cut off; its row is run again\n"
  assert said.out.endswith(
    "out.jsonl: 1 rows are there, 0 of them failed\nwould run 1 rows; nothing is loaded or written\n"
  )
  assert Path("out.jsonl").read_bytes() == before
  assert len(arithmetic.made) == 1


@pytest.mark.usefixtures("arithmetic")
def test_a_completion_is_refused_for_another_input_or_other_settings(batch, capsys):
  lines = [{"prompt_ids": [100]}, {"prompt_ids": [101]}]
  assert batch(lines) == 0
  for words, changed, said in (
    (
      (),
      [lines[0], {"prompt_ids": [7]}],
      "was made of another input than in.jsonl: line 2 changed: lines may be appended",
    ),
    (("dtype=float32",), lines, 'was made with other settings: dtype was "bfloat16", is "float32": give the same'),
    (("--ignore-eos",), lines, "stop tokens was ["),
  ):
    capsys.readouterr()
    assert batch(changed, *words) == 2
    assert said in capsys.readouterr().err
  assert batch(lines, "per_device_batch_size=1") == 0, "how wide a run is changes no token"
  assert batch([*lines, {"prompt_ids": [102]}]) == 0
  assert [row["ids"] for row in rows()] == [continuation([i], NEW) for i in (100, 101, 102)]


@pytest.mark.usefixtures("arithmetic")
def test_text_and_messages_are_encoded_and_decoded(batch):
  messages = [{"role": "user", "content": "Hi"}]
  lines = [{"prompt": "The file"}, {"messages": messages, "id": "m"}, {"messages": messages, "thinking": False}]
  assert batch(lines) == 0
  text, thinking, answering = rows()
  assert "message" not in text
  assert text["text"]
  assert sorted(thinking) == sorted([*text, "message", "problems"])
  # Bytes at the end that may still become a character are in the text and not in the message.
  assert thinking["message"]["content"] == ""
  assert (
    thinking["text"].startswith(thinking["message"]["reasoning_content"]) and thinking["message"]["reasoning_content"]
  )
  assert answering["message"].keys() == {"role", "content"}
  assert answering["text"].startswith(answering["message"]["content"]) and answering["message"]["content"]
  assert thinking["prompt_ids"] != answering["prompt_ids"]


@pytest.mark.usefixtures("arithmetic")
def test_a_summary_counts_this_run_and_all_rows(batch):
  lines = [{"prompt_ids": [100]}, {"prompt_ids": [BROKEN]}]
  assert batch(lines, "--summary", "s.json") == 1
  said = json.loads(Path("s.json").read_text())
  assert {key: said[key] for key in ("rows", "ok", "errors", "missing", "done_before", "tokens", "slots")} == {
    "rows": 2, "ok": 1, "errors": 1, "missing": 0, "done_before": 0, "tokens": NEW, "slots": 2,
  }  # fmt: skip
  assert said["tokens_per_second"] == pytest.approx(NEW / (said["seconds"] - said["compile_seconds"]))
  assert batch([*lines, {"prompt_ids": [101]}], "--summary", "s.json") == 1
  said = json.loads(Path("s.json").read_text())
  assert (said["rows"], said["done_before"], said["tokens"]) == (3, 2, NEW)


@pytest.mark.parametrize(
  ("number", "code", "said"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "inte")]
)
def test_a_signal_ends_the_run_with_what_is_done_and_the_same_command_goes_on(
  batch, arithmetic, capsys, number, code, said
):
  assert threading.current_thread() is threading.main_thread()
  calls = []

  def signalled():
    calls.append(0)
    if len(calls) == 3:
      os.kill(os.getpid(), number)
      time.sleep(0.3)  # until the thread that handles it has done so

  arithmetic.before_call = staticmethod(signalled)
  lines = [{"prompt_ids": [100 + i]} for i in range(8)]
  before = signal.getsignal(number)
  assert batch(lines, "per_device_batch_size=2", "--summary", "s.json") == code
  assert signal.getsignal(number) == before
  assert arithmetic.made[0].histories == {}
  err = capsys.readouterr().err
  assert f"kimi-k3: {said}" in err
  assert err.endswith("6 of 8 rows are in out.jsonl; the same command goes on\n")
  assert len(rows()) == 6
  assert json.loads(Path("s.json").read_text())["missing"] == 2
  arithmetic.before_call = staticmethod(lambda: None)
  assert batch(lines, "per_device_batch_size=2") == 0
  assert [row["ids"] for row in rows()] == [continuation([100 + i], NEW) for i in range(8)]


@pytest.mark.usefixtures("arithmetic")
def test_a_full_disk_ends_the_run_in_one_line_and_keeps_what_is_done(batch, monkeypatch, capsys):
  write = os.write

  def full(descriptor: int, data: bytes) -> int:
    if bytes(data[:11]) == b'{"index": 3':
      if len(data) > 9:
        return write(descriptor, data[:9])
    elif bytes(data[:2]) != b'{"' and b"prompt_ids" in bytes(data):
      raise OSError(28, "No space left on device")
    return write(descriptor, data)

  lines = [{"prompt_ids": [100 + i]} for i in range(6)]
  with monkeypatch.context() as patched:
    patched.setattr(os, "write", full)
    assert batch(lines, "per_device_batch_size=1") == 2
  said = capsys.readouterr().err.splitlines()[-1]
  assert said.endswith(
    "out.jsonl: cannot be written: No space left on device; 3 rows are kept, the same command goes on from there"
  )
  assert [row["index"] for row in rows()] == [0, 1, 2]
  assert batch(None, "per_device_batch_size=1") == 0
  assert [row["index"] for row in rows()] == list(range(6))


@pytest.mark.usefixtures("arithmetic")
def test_a_second_run_on_one_file_is_refused(batch, capsys):
  assert batch([{"prompt_ids": [100]}]) == 0
  with batch_output.Completions("out.jsonl").locked():
    assert batch(None) == 2
  assert "out.jsonl: another run is writing there" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (("--out", "in.jsonl"), "--in and --out are one file: "),
    (("--summary", "out.jsonl"), "--out and --summary are one file: "),
    (("--summary", "out.jsonl.state.json"), "--summary and out.jsonl.state.json beside --out are one file: "),
    (("--summary", "out.jsonl.lock"), "--summary and out.jsonl.lock beside --out are one file: "),
    (("--out", "."), ".: is a directory, expected a file to write"),
    (("--out", "nowhere/out.jsonl"), "nowhere/out.jsonl: its directory does not exist"),
    (("--out", "/dev/stdout"), "/dev/stdout: is no file, expected one that can be gone on with"),
    (("--out", ""), "an empty path was given, expected a file to write"),
    (("--in", "nowhere.jsonl"), "nowhere.jsonl: cannot be read: No such file or directory"),
    (("--max-new-tokens", "0"), "--max-new-tokens is 0, expected 1 or more"),
    (("--max-new-tokens", "4096"), "--max-new-tokens is 4096, expected less than 4096, which a prompt and its new"),
    (("decode_sampling_temperature=0.5",), "decode_sampling_temperature is 0.5, which decode_sampling_strategy greedy"),
    (("prompt=a",), "prompt= given, which batch does not read: give --in FILE.jsonl"),
    (("use_chunked_prefill=true",), "use_chunked_prefill: chunked prefill is not supported yet"),
    (("max_prefill_predict_length=8", "max_target_length=8"), "1 new tokens do not fit: max_target_length 8 - max"),
  ],
)
@pytest.mark.usefixtures("arithmetic")
def test_what_cannot_be_met_is_refused_and_nothing_is_written(batch, capsys, words, said):
  assert batch([{"prompt_ids": [100]}], *words) == 2
  assert capsys.readouterr().err.startswith(f"kimi-k3: error: {said}")
  assert files() == ["in.jsonl"]
  assert Path("in.jsonl").read_text() == '{"prompt_ids": [100]}\n'


@pytest.mark.parametrize("suffix", ["", ".new", ".lock", ".state.json", ".state.json.new"])
@pytest.mark.usefixtures("arithmetic")
def test_an_input_with_a_name_of_our_own_files_is_refused_and_stays(batch, capsys, suffix):
  text = '{"prompt_ids": [100]}\n'
  Path(f"out.jsonl{suffix}").write_text(text)
  assert batch(None, "--in", f"out.jsonl{suffix}") == 2
  assert f"are one file: {Path.cwd()}/out.jsonl{suffix}\n" in capsys.readouterr().err
  assert files() == [f"out.jsonl{suffix}"]
  assert Path(f"out.jsonl{suffix}").read_text() == text


@pytest.mark.usefixtures("arithmetic")
def test_a_bad_line_is_mended_and_run_with_the_failed_rows(batch, capsys):
  lines = [{"prompt_ids": [100]}, {"prompt_ids": []}, {"prompt_ids": [102]}]
  assert batch(lines) == 1
  before = rows()
  lines[1] = {"prompt_ids": [101]}
  assert batch(lines) == 2
  assert "line 2 changed: lines may be appended, and with --retry-errors those mended" in capsys.readouterr().err
  assert batch(lines, "--retry-errors", "--dry-run") == 0
  assert "would run 1 rows" in capsys.readouterr().out
  assert rows() == before
  assert batch(lines, "--retry-errors") == 0
  assert [row["ids"] for row in rows()] == [continuation([i], NEW) for i in (100, 101, 102)]
  assert batch(lines) == 0


@pytest.mark.slow
def test_200_prompts_of_a_real_model_killed_twice_equal_each_row_alone(nano, tmp_path):
  rng = random.Random(5)
  lines = [{"prompt_ids": prompt, "max_new_tokens": rng.randint(2, 24)} for prompt in many_prompts(rng)]
  (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

  def start(out: str, slots: int) -> subprocess.Popen[str]:
    words = ("--in", "in.jsonl", "--out", out, "--ignore-eos", f"per_device_batch_size={slots}", *FLOAT32)
    command = [str(Path(sys.executable).parent / "kimi-k3"), "batch", str(nano), *words]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

  out = tmp_path / "out.jsonl"
  for wanted in (30, 110):
    process = start(out.name, 4)
    while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < wanted):
      time.sleep(0.02)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert out.read_bytes().count(b"\n") < 200
  process = start(out.name, 4)
  said, err = process.communicate(timeout=600)
  assert process.returncode == 0, err
  assert said.startswith("200 rows (0 failed, ")
  alone = start("alone.jsonl", 1)
  alone.communicate(timeout=600)
  assert alone.returncode == 0
  found, expected = (
    [json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in (out.name, "alone.jsonl")
  )
  assert [row["index"] for row in found] == list(range(200))
  assert found == expected
