"""A file of completions, cut off at any byte and gone on with: each row exactly once, and nothing that is not ours."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from kimi_k3.errors import InputError
from kimi_k3.generate import batch_output
from kimi_k3.generate.batch_input import PromptFile, Rules
from kimi_k3.generate.batch_output import FAILED, MISSING, OK, Completions

RULES = Rules(256, 100, 8, lambda text: list(text.encode()), None, lambda _: None)
SETTINGS = {"dtype": '"float32"', "seed": "0"}


def prompts_of(directory: Path, *texts: str, name: str = "in.jsonl") -> PromptFile:
  (directory / name).write_text("".join((json.dumps({"prompt": text}) if text else "") + "\n" for text in texts))
  return PromptFile(str(directory / name), RULES)


def completion(index: int, reason: str = "length") -> dict[str, Any]:
  return {"index": index, "ids": [7] * (index % 5), "text": "o\u00fc", "finish_reason": reason}


def opened(
  directory: Path, prompts: PromptFile, settings: dict[str, str] = SETTINGS, *, retry: bool = False
) -> Completions:
  out = Completions(str(directory / "out.jsonl"))
  out.look(prompts, settings, mended=retry)
  out.repair(prompts, settings, drop_failed=retry)
  return out


def written(directory: Path) -> list[dict[str, Any]]:
  return [json.loads(line) for line in (directory / "out.jsonl").read_bytes().splitlines()]


@pytest.fixture
def five(tmp_path) -> PromptFile:
  return prompts_of(tmp_path, *"abcde")


def test_rows_are_appended_as_they_finish_and_end_in_the_order_of_the_input(tmp_path, five):
  out = opened(tmp_path, five)
  for index in (3, 0, 4, 1, 2):
    out.append(completion(index))
  assert [row["index"] for row in written(tmp_path)] == [3, 0, 4, 1, 2]
  out.close()
  out.sort()
  assert written(tmp_path) == [completion(index) for index in range(5)]
  assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.state.json"]


def test_a_row_is_in_the_file_whole_once_it_is_appended(tmp_path, five):
  out = opened(tmp_path, five)
  for index in range(3):
    out.append(completion(index, "error" if index == 1 else "stop"))
    again = Completions(str(tmp_path / "out.jsonl"))
    again.look(five, SETTINGS)
    assert (again.done, again.torn) == (index + 1, 0)
  assert list(again.status) == [OK, FAILED, OK, MISSING, MISSING]
  assert again.failed == [1]


def test_a_torn_last_line_is_cut_off_at_whatever_byte_it_ends(tmp_path, five):
  out = opened(tmp_path, five)
  out.append(completion(2))
  whole = (tmp_path / "out.jsonl").read_bytes()
  out.append(completion(4))
  both = (tmp_path / "out.jsonl").read_bytes()
  out.close()
  for size in range(len(whole), len(both)):
    (tmp_path / "out.jsonl").write_bytes(both[:size])
    out = opened(tmp_path, five)
    assert (out.torn, out.done) == (size - len(whole), 1)
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    out.close()


@hypothesis.given(st.randoms(use_true_random=False))
@hypothesis.settings(
  max_examples=15, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_cut_off_at_random_bytes_again_and_again_each_row_is_there_once(tmp_path_factory, rng: random.Random):
  directory = tmp_path_factory.mktemp("cut")
  prompts = prompts_of(directory, *("x" * (i % 7) for i in range(1, 40)))
  path = directory / "out.jsonl"
  for _ in range(rng.randrange(6)):
    out = opened(directory, prompts)
    missing = [i for i, kind in enumerate(prompts.kinds) if kind and out.status[i] == MISSING]
    for index in rng.sample(missing, rng.randint(0, len(missing))):
      out.append(completion(index, rng.choice(["stop", "error"])))
    out.close()
    size = path.stat().st_size  # what was there before this run is on the disk
    os.truncate(path, size - rng.randrange(min(size, 60) + 1))
  out = opened(directory, prompts)
  for index, kind in enumerate(prompts.kinds):
    if kind and out.status[index] == MISSING:
      out.append(completion(index))
  out.close()
  out.sort()
  assert [row["index"] for row in written(directory)] == [i for i, kind in enumerate(prompts.kinds) if kind]


@pytest.mark.parametrize(
  ("texts", "said"),
  [
    ("abxde", "line 3 changed"),
    ("xbcdx", "lines 1, 5 changed"),
    ("abc", "it had 5 lines, now 3"),
    ("bcde", "lines 1, 2, 3, 4 changed"),
  ],
)
def test_an_input_that_was_changed_is_refused_with_its_lines(tmp_path, five, texts, said):
  opened(tmp_path, five).append(completion(0))
  before = (tmp_path / "out.jsonl").read_bytes()
  with pytest.raises(InputError, match=f"was made of another input than .*in.jsonl: {said}: lines may be appended"):
    opened(tmp_path, prompts_of(tmp_path, *texts))
  assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.parametrize(
  ("texts", "status"),
  [
    ("aBcde", [OK, MISSING, OK, MISSING, MISSING]),  # it failed
    ("aBcDe", [OK, MISSING, OK, MISSING, MISSING]),  # and one that never ran
    (["a", "", "c", "d", "e", "f"], [OK, MISSING, OK, MISSING, MISSING, MISSING]),  # blank now, and one more
  ],
)
def test_lines_whose_rows_failed_may_be_mended_when_they_are_run_again(tmp_path, five, texts, status):
  out = opened(tmp_path, five)
  for index, reason in ((0, "stop"), (1, "error"), (2, "length")):
    out.append(completion(index, reason))
  out.close()
  mended = prompts_of(tmp_path, *texts)
  before = (tmp_path / "out.jsonl").read_bytes()
  with pytest.raises(InputError, match="with --retry-errors those mended whose rows failed"):
    opened(tmp_path, mended)
  assert (tmp_path / "out.jsonl").read_bytes() == before
  out = opened(tmp_path, mended, retry=True)
  assert list(out.status) == status
  assert written(tmp_path) == [completion(0, "stop"), completion(2)]
  out.close()
  assert list(opened(tmp_path, mended).status) == status, "from now on it is this input's"


@pytest.mark.parametrize("texts", [["a", "b", "C", "d", "e"], ["a", "B", "", "d", "e"], ["a", "B", "c", "d"]])
def test_lines_whose_rows_are_there_may_not_be_mended(tmp_path, five, texts):
  out = opened(tmp_path, five)
  for index, reason in ((0, "stop"), (1, "error"), (2, "length")):
    out.append(completion(index, reason))
  out.close()
  before = (tmp_path / "out.jsonl").read_bytes()
  with pytest.raises(InputError, match="was made of another input"):
    opened(tmp_path, prompts_of(tmp_path, *texts), retry=True)
  assert (tmp_path / "out.jsonl").read_bytes() == before


def test_mending_that_is_killed_before_the_new_input_is_noted_goes_on(tmp_path, five, monkeypatch):
  out = opened(tmp_path, five)
  out.append(completion(1, "error"))
  out.append(completion(0))
  out.close()
  mended = prompts_of(tmp_path, *"aBcde")

  def killed(*_: object) -> None:
    raise KeyboardInterrupt

  with monkeypatch.context() as patched:
    patched.setattr(Completions, "_save", killed)
    with pytest.raises(KeyboardInterrupt):
      opened(tmp_path, mended, retry=True)
  assert written(tmp_path) == [completion(0)]
  assert list(opened(tmp_path, mended, retry=True).status) == [OK, MISSING, MISSING, MISSING, MISSING]


def test_lines_that_were_appended_are_gone_on_with(tmp_path, five):
  out = opened(tmp_path, five)
  for index in range(5):
    out.append(completion(index))
  out.close()
  longer = prompts_of(tmp_path, *"abcdefg")
  out = opened(tmp_path, longer)
  assert list(out.status) == [OK] * 5 + [MISSING] * 2
  out.close()
  with pytest.raises(InputError, match="it had 7 lines, now 5"):
    opened(tmp_path, prompts_of(tmp_path, *"abcde"))


def test_other_settings_are_refused_by_name(tmp_path, five):
  opened(tmp_path, five).append(completion(0))
  with pytest.raises(InputError) as refusal:
    opened(tmp_path, five, {"dtype": '"bfloat16"', "top": "1"})
  assert 'made with other settings: dtype was "float32", is "bfloat16"; seed was 0, is not given; top' in str(
    refusal.value
  )


def test_settings_do_not_matter_where_no_row_is(tmp_path, five):
  opened(tmp_path, five).close()
  assert opened(tmp_path, prompts_of(tmp_path, "other"), {"dtype": '"bfloat16"'}).done == 0


STATE = "out.jsonl.state.json"


@pytest.mark.parametrize(
  ("text", "said"),
  [
    (None, "no out.jsonl.state.json stands beside it: not made by `batch`"),
    ("{", "state.json: not what `batch` wrote"),
    ("[]", "state.json: not what `batch` wrote"),
    ('{"schema": 1, "lines": 5, "settings": {}, "line_digests": "abcd"}', "state.json: not what `batch` wrote"),
    ('{"schema": 99}', "state.json: schema 99, expected 1: made by another version"),
  ],
)
def test_rows_without_their_state_are_refused_and_left_alone(tmp_path, five, text, said):
  opened(tmp_path, five).append(completion(0))
  if text is None:
    (tmp_path / STATE).unlink()
  else:
    (tmp_path / STATE).write_text(text)
  before = (tmp_path / "out.jsonl").read_bytes()
  with pytest.raises(InputError, match=said):
    opened(tmp_path, five)
  assert (tmp_path / "out.jsonl").read_bytes() == before


NO_COMPLETION = "out.jsonl: line 2 is no completion of .*in.jsonl: remove the line, or choose another --out"


@pytest.mark.parametrize(
  ("line", "said"),
  [
    ("{}", NO_COMPLETION),
    ("[]", NO_COMPLETION),
    ("", NO_COMPLETION),
    ("\0\0", NO_COMPLETION),
    ('{"index": 5, "finish_reason": "stop"}', NO_COMPLETION),
    ('{"index": -1, "finish_reason": "stop"}', NO_COMPLETION),
    ('{"index": true, "finish_reason": "stop"}', NO_COMPLETION),
    ('{"index": "1", "finish_reason": "stop"}', NO_COMPLETION),
    ('{"index": 1, "finish_reason": "done"}', NO_COMPLETION),
    ('{"index": 1, "finish_reason": []}', NO_COMPLETION),
    ('{"index": 0, "finish_reason": "stop"}', "line 2 completes line 1 of .*in.jsonl a second time: remove one"),
  ],
)
def test_a_line_that_no_run_wrote_is_refused_and_left_alone(tmp_path, five, line, said):
  opened(tmp_path, five).append(completion(0))
  out = tmp_path / "out.jsonl"
  out.write_text(f"{out.read_text()}{line}\n")
  before = out.read_bytes()
  with pytest.raises(InputError, match=said):
    opened(tmp_path, five)
  assert out.read_bytes() == before


def test_a_blank_line_of_the_input_has_no_completion(tmp_path):
  prompts = prompts_of(tmp_path, "a", "", "b")
  out = opened(tmp_path, prompts)
  out.append(completion(0))
  out.append(completion(1))
  with pytest.raises(InputError, match="line 2 is no completion"):
    opened(tmp_path, prompts)


def test_failed_rows_vanish_when_they_are_to_be_run_again(tmp_path, five):
  out = opened(tmp_path, five)
  for index, reason in ((4, "error"), (1, "stop"), (0, "error"), (2, "length")):
    out.append(completion(index, reason))
  out.close()
  out = opened(tmp_path, five, retry=True)
  assert list(out.status) == [MISSING, OK, OK, MISSING, MISSING]
  assert [row["index"] for row in written(tmp_path)] == [1, 2]
  out.append(completion(4))
  assert [row["index"] for row in written(tmp_path)] == [1, 2, 4]


def test_two_runs_at_once_are_refused_and_the_lock_goes_with_its_run(tmp_path):
  one, other = (Completions(str(tmp_path / "out.jsonl")) for _ in range(2))
  with one.locked():
    with pytest.raises(InputError, match="another run is writing there: wait for it"), other.locked():
      pytest.fail("locked twice")
    assert (tmp_path / "out.jsonl.lock").exists(), "the one that was refused leaves it alone"
  assert list(tmp_path.iterdir()) == []
  (tmp_path / "out.jsonl.lock").touch()  # of a run that was killed
  with other.locked():
    pass


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_whose_files_were_removed_ends_and_leaves_those_of_the_next_alone(tmp_path, five, replaced):
  old, new = (Completions(str(tmp_path / "out.jsonl")) for _ in range(2))
  with contextlib.ExitStack() as held, contextlib.ExitStack() as next_held:
    held.enter_context(old.locked())
    old.look(five, SETTINGS)
    old.repair(five, SETTINGS)
    old.append(completion(3))
    for path in tmp_path.glob("out*"):
      path.unlink()
    if replaced:
      next_held.enter_context(new.locked())
      new.look(five, SETTINGS)
      new.repair(five, SETTINGS)
      new.append(completion(1))
    for go_on in (lambda: old.append(completion(2)), old.close):
      with pytest.raises(
        InputError, match=r"out.jsonl: was removed or replaced while this run wrote to it, and 1 rows"
      ):
        go_on()
    held.close()
    assert (tmp_path / "out.jsonl.lock").exists() == replaced
    assert not replaced or written(tmp_path) == [completion(1)]


def test_the_lock_of_another_run_is_not_taken_away(tmp_path):
  old, new = (Completions(str(tmp_path / "out.jsonl")) for _ in range(2))
  with contextlib.ExitStack() as held:
    with old.locked():
      (tmp_path / "out.jsonl.lock").unlink()
      held.enter_context(new.locked())
    assert (tmp_path / "out.jsonl.lock").exists()
  assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
  def flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(batch_output.fcntl, "flock", flock)
  out = Completions(str(tmp_path / "out.jsonl"))
  with pytest.raises(InputError, match=r"cannot be locked \(No locks available\), so two"), out.locked():
    pytest.fail("not locked")


@pytest.fixture
def limited():
  """Returns a function: bytes that a file may have from now on, as on a full disk: the last write is cut short."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_the_run_with_whole_rows_only(tmp_path, five, limited: Callable[[int], None]):
  out = opened(tmp_path, five)
  out.append(completion(1))
  whole = (tmp_path / "out.jsonl").read_bytes()
  limited(len(whole) + 10)
  with pytest.raises(InputError, match="cannot be written: File too large; 1 rows are kept, the same command"):
    out.append(completion(2))
  assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_a_disk_that_is_full_when_rows_are_put_in_order_loses_none(tmp_path, five, limited: Callable[[int], None]):
  out = opened(tmp_path, five)
  for index in (4, 3, 2, 1, 0):
    out.append(completion(index))
  out.close()
  before = (tmp_path / "out.jsonl").read_bytes()
  limited(20)
  with pytest.raises(InputError, match="cannot be written: File too large; 5 rows are kept"):
    out.sort()
  assert (tmp_path / "out.jsonl").read_bytes() == before
  assert not (tmp_path / "out.jsonl.new").exists()


def test_a_kill_while_rows_are_put_in_order_loses_none(tmp_path, five, monkeypatch):
  out = opened(tmp_path, five)
  for index in (4, 3, 2, 1, 0):
    out.append(completion(index))
  out.close()

  class Killed(BaseException):
    pass

  def killed(*_, **__):
    raise Killed

  with monkeypatch.context() as patched:
    patched.setattr(Path, "replace", killed)
    patched.setattr(Path, "unlink", killed)  # nothing is cleared up
    with pytest.raises(Killed):
      out.sort()
  assert (tmp_path / "out.jsonl.new").exists()
  out = opened(tmp_path, five)
  assert (out.done, (tmp_path / "out.jsonl.new").exists()) == (5, False)
  out.close()
  out.sort()
  assert [row["index"] for row in written(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_link_stands_for_what_it_leads_to(tmp_path, five):
  (tmp_path / "elsewhere").mkdir()
  (tmp_path / "out.jsonl").symlink_to(tmp_path / "elsewhere" / "real.jsonl")
  out = opened(tmp_path, five)
  for index in (4, 3, 2, 1, 0):
    out.append(completion(index))
  out.close()
  out.sort()
  assert (tmp_path / "out.jsonl").is_symlink()
  assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["real.jsonl", "real.jsonl.state.json"]


def test_a_frozen_file_takes_no_row_from_another_thread(tmp_path, five):
  out = opened(tmp_path, five)
  out.freeze()
  assert not out._writing.acquire(blocking=False)


def test_links_that_lead_in_a_circle_are_refused(tmp_path):
  (tmp_path / "out.jsonl").symlink_to(tmp_path / "other")
  (tmp_path / "other").symlink_to(tmp_path / "out.jsonl")
  with pytest.raises(InputError, match="cannot be written: a loop of links"):
    Completions(str(tmp_path / "out.jsonl"))
