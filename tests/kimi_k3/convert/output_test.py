"""How OUT comes about, what is kept of a run that is stopped, and that nothing but the plan decides a byte of OUT."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from kimi_k3.convert import appear, index, output, plan, slices, store, write
from kimi_k3.convert.plan import Options
from kimi_k3.convert.store import BucketStore, LocalStore, Locked
from kimi_k3.convert.unfinished import MARKERS, Unfinished
from kimi_k3.errors import InputError
from kimi_k3.maxtext_keys import to_maxtext

COMMAND = "kimi-k3 convert SRC OUT"
DATA, JOURNAL = "0/items/d/0", "journal/"
FEW = ("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2")


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
  """Stable storage is store_test's; here it would cost half the time."""
  monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(autouse=True)
def _slices_of_some_kilobytes(monkeypatch):
  monkeypatch.setattr(slices, "MIN_SLICE_BYTES", 3_000)


@pytest.fixture
def source(small_sources) -> index.Source:
  return small_sources["k3"]


@pytest.fixture
def copied(small_sources, tmp_path) -> Path:
  """A source to change, in three shards."""
  return shutil.copytree(small_sources["k3"].directory, tmp_path / "source")


_PLANNED: dict[tuple, tuple[index.Source, plan.Plan]] = {}


def planned(source, **options) -> plan.Plan:
  """The first leaves of a plan: a dozen slices, each in a millisecond."""
  key = (id(source), *sorted(options.items()))
  if key not in _PLANNED:
    made = plan.make_plan(source, Options(**options))
    _PLANNED[key] = (source, dataclasses.replace(made, leaves=made.leaves[:14]))  # The source is kept with its id.
  return _PLANNED[key][1]


def convert(out, source, made, *, commit: Any = "rename", workers=2, **job) -> output.Outcome:
  return output.convert(out, source, made, output.Job(commit=commit, workers=workers, command=COMMAND, **job))


def run(out, source, made, *, overwrite=False, commit: Any = "rename", **job) -> Any:
  """As the verb does: its outcome, or None where OUT already holds this conversion."""
  if output.check_output(out, source, made, overwrite=overwrite):
    output.tidy(out, commit)
    return None
  return convert(out, source, made, overwrite=overwrite, commit=commit, **job)


def files(directory: Path) -> dict[str, bytes]:
  return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def kept(directory: Path) -> dict[str, bytes]:
  """All files but locks, which every run leaves while a conversion is under way."""
  return {name: data for name, data in files(directory).items() if not Path(name).name.startswith("lock")}


def snapshot(directory):
  return sorted((str(path.relative_to(directory)), path.stat().st_mtime_ns) for path in directory.rglob("*"))


@pytest.fixture(scope="module")
def whole(small_sources, tmp_path_factory) -> Callable[..., dict[str, bytes]]:
  """Returns a function: rename or marker to the files of a conversion that nothing disturbed."""

  @functools.cache
  def undisturbed(commit: str = "rename") -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    convert(out, small_sources["k3"], planned(small_sources["k3"]), commit=commit)
    return files(out)

  return undisturbed


@pytest.fixture(scope="module")
def converted(small_sources, tmp_path_factory) -> Path:
  """A finished conversion; tests that change it copy it."""
  out = tmp_path_factory.mktemp("converted") / "out"
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(slices, "MIN_SLICE_BYTES", 3_000)  # as in the tests
    convert(out, small_sources["k3"], planned(small_sources["k3"]))
  return out


class Killed(BaseException):
  """Ends a run as a kill does: nothing that catches errors catches it."""


class Writes:
  """What all stores write, in order, until `stop`: a name and whether "before", "after" or in it ("torn")."""

  def __init__(self) -> None:
    self.names: list[str] = []
    self._stop: tuple[str, str] | None = None
    self._dead = False

  def stop(self, name: str, moment: str = "before") -> None:
    self._stop, self._dead = (name, moment), False

  def go_on(self) -> None:
    """Forgets the stop and what was written."""
    self._stop, self._dead, self.names = None, False, []

  def count(self, start: str) -> int:
    return sum(name.startswith(start) for name in self.names)

  def watched(self, write):
    def watch(held, name, parts):
      moment = self._stop[1] if self._stop and name == self._stop[0] else ""
      if self._dead or moment == "before":
        self._dead = True
        raise Killed
      if moment == "torn":
        self._dead = True
        data = b"".join(bytes(part) for part in parts)
        write(held, name, [data[: len(data) // 2]])
        raise Killed
      nbytes = write(held, name, parts)
      self.names.append(name)
      if moment == "after":
        self._dead = True
        raise Killed
      return nbytes

    return watch


@pytest.fixture
def writes(monkeypatch) -> Writes:
  log = Writes()
  for kind in (LocalStore, BucketStore):
    monkeypatch.setattr(kind, "write", log.watched(kind.write))
  return log


def journaled(state: Path) -> int:
  return len(list((state / "journal").glob("*.json"))) if state.exists() else 0


def state_of(out: Path, commit: str) -> Path:
  return out / ".unfinished" if commit == "marker" else out.with_name(f"{out.name}.partial")


def half_done(out, source, made, writes, *, slice_number=7, **job) -> int:
  """Stops a conversion, and returns how many slices it has done."""
  writes.stop(f"{DATA}{slice_number:05d}")
  with pytest.raises(Killed):
    run(out, source, made, workers=1, **job)
  writes.go_on()
  return journaled(state_of(Path(out), job.get("commit", "rename")))


# What is in OUT, and what may be written over


def test_out_holds_the_checkpoint_the_config_the_record_and_the_sources_small_files(small_sources, tmp_path):
  src = shutil.copytree(small_sources["k3"].directory, tmp_path / "source")
  for name in ("tiktoken.model", "tokenizer_config.json", "README.md"):
    (src / name).write_text(name)
  source = index.open_source(src)
  convert(tmp_path / "deep" / "out", source, planned(source))
  assert sorted(path.name for path in (tmp_path / "deep" / "out").iterdir()) == [
    "0", "config.json", "conversion.json", "decode.yml", "tiktoken.model", "tokenizer_config.json",
  ]  # fmt: skip
  assert (tmp_path / "deep" / "out" / "config.json").read_bytes() == (src / "config.json").read_bytes()
  assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_decode_yml_is_the_config_in_maxtexts_words_with_a_relative_path(converted, source):
  made = planned(source)
  keys = yaml.safe_load((converted / "decode.yml").read_text())
  assert keys.pop("base_config") == "base.yml"
  assert (converted / keys.pop("load_parameters_path") / "_METADATA").is_file()
  assert keys == to_maxtext(made.config, scan_layers=made.scan, dtype="bfloat16")
  assert COMMAND in (converted / "decode.yml").read_text().splitlines()[0]


def test_the_record_names_source_options_and_size(converted, source):
  record, made = json.loads((converted / "conversion.json").read_text()), planned(source)
  assert record["schema"] == 2
  assert record["source"]["fingerprint"] == plan.fingerprint(source)
  assert record["options"] == {"scan": True, "experts": "as-stored", "dense": "as-stored"}
  assert (record["leaves"], record["bytes"]) == (len(made.leaves), made.nbytes)
  assert record["stored"]["a_log_shape"] == [32]
  assert record["commit"] == "rename"
  assert list(record["checksums"]) == list(record["chunks"]) == [".".join(leaf.path) for leaf in made.leaves]
  for name, shard in source.shards.items():
    assert record["source"]["shards"][name] == {"size": shard.size, "header": shard.header}


def test_the_same_conversion_is_recognised(converted, source):
  assert output.check_output(converted, source, planned(source, experts="mxfp4"), overwrite=False)


@pytest.mark.parametrize("change", ["source", "options", "record", "schema", "items", "marker"])
def test_another_conversion_needs_overwrite_and_the_difference_is_said(converted, source, edited, tmp_path, change):
  out, made = shutil.copytree(converted, tmp_path / "out"), planned(source)
  record = json.loads((out / "conversion.json").read_text())
  if change == "source":
    made = planned(edited(source, config=dict(source.config) | {"ignore_index": 7}))
  elif change == "options":
    made = planned(source, scan=False)
  elif change == "record":
    (out / "conversion.json").write_text("{")
  elif change == "schema":
    (out / "conversion.json").write_text(json.dumps(record | {"schema": 1}))
  elif change == "marker":
    (out / "conversion.json").write_text(json.dumps(record | {"commit": "marker"}))
  else:
    shutil.rmtree(out / "0")
  said = {"source": "another source", "options": "scan=true.*asked for scan=false", "record": "cannot be read"}
  said |= {"schema": "schema 1, this version writes 2", "items": "without its 0/items"}
  said |= {"marker": "without its commit marker 0/items/commit_success.txt"}
  with pytest.raises(InputError, match=f"{said[change]}.*--overwrite"):
    output.check_output(out, source, made, overwrite=False)
  assert not output.check_output(out, source, made, overwrite=True)


def test_another_training_of_the_same_shapes_is_another_source(tiny_checkpoint, tmp_path):
  first, second = (index.open_source(tiny_checkpoint(*FEW, "--seed", seed)) for seed in ("1", "2"))
  assert plan.fingerprint(first) == plan.fingerprint(second)  # every header is the same
  convert(tmp_path / "out", first, planned(first))
  assert output.check_output(tmp_path / "out", first, planned(first), overwrite=False)
  with pytest.raises(InputError, match="holds a conversion of another source"):
    output.check_output(tmp_path / "out", second, planned(second), overwrite=False)


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_overwriting_replaces_the_whole_directory(converted, source, tmp_path, commit):
  out = shutil.copytree(converted, tmp_path / "out")
  (out / "note.txt").write_text("of the old conversion")
  (out / "0" / "items" / "d" / "999999").write_text("of the old conversion")
  run(out, source, planned(source, scan=False), overwrite=True, commit=commit)
  assert not json.loads((out / "conversion.json").read_text())["options"]["scan"]
  assert not (out / "note.txt").exists()
  assert not (out / "0" / "items" / "d" / "999999").exists()
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_overwritten_stays_complete_until_the_new_is(converted, source, tmp_path, writes):
  out, made = shutil.copytree(converted, tmp_path / "out"), planned(source, scan=False)
  before = snapshot(out)
  for stop in ((f"{DATA}00003", "before"), ("conversion.json", "after")):
    writes.stop(*stop)
    with pytest.raises(Killed):
      run(out, source, made, overwrite=True)
    assert snapshot(out) == before
    assert output.check_output(out, source, planned(source), overwrite=False)
  writes.go_on()
  run(out, source, made, overwrite=True)
  assert output.check_output(out, source, made, overwrite=False)
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_that_is_no_conversion_is_never_overwritten(source, tmp_path):
  (tmp_path / "thesis.tex").write_text("years of work")
  for overwrite in (False, True):
    with pytest.raises(InputError, match="not a conversion, never overwritten"):
      output.check_output(tmp_path, source, planned(source), overwrite=overwrite)
  with pytest.raises(InputError, match="not a directory"):
    output.check_output(tmp_path / "thesis.tex", source, planned(source), overwrite=True)


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_lies_at_the_partials_place_and_is_no_conversion_is_not_touched(source, tmp_path, overwrite):
  (tmp_path / "out.partial").mkdir()
  (tmp_path / "out.partial" / "thesis.tex").write_text("years of work")
  with pytest.raises(InputError, match=r"holds thesis\.tex but no plan\.json"):
    run(tmp_path / "out", source, planned(source), overwrite=overwrite)
  assert (tmp_path / "out.partial" / "thesis.tex").exists()


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_an_empty_directory_is_used(source, tmp_path, commit):
  out = tmp_path / "out"
  out.mkdir()
  assert not output.check_output(out, source, planned(source), overwrite=False)
  convert(out, source, planned(source), commit=commit)
  assert (out / "0" / "items" / "_METADATA").is_file()


def test_out_and_src_may_not_be_inside_each_other(k3_copy):
  source = index.open_source(k3_copy)
  for out in (k3_copy, k3_copy / "out", k3_copy / "a" / ".." / "out", k3_copy.parent):
    with pytest.raises(InputError, match="the same or inside each other"):
      output.check_output(out, source, planned(source), overwrite=True)


def test_the_source_is_only_read(k3_copy, tmp_path):
  before = snapshot(k3_copy)
  for path in k3_copy.iterdir():
    path.chmod(0o444)
  source = index.open_source(k3_copy)
  convert(tmp_path / "out", source, planned(source), hash_shards=True)
  assert snapshot(k3_copy) == before


@pytest.mark.parametrize("spelled", ["../out", "a/../../out", "./../here/../out", "../out/"])
def test_out_may_be_spelled_with_dots(source, tmp_path, monkeypatch, spelled):
  (tmp_path / "here" / "a").mkdir(parents=True)
  monkeypatch.chdir(tmp_path / "here")
  convert(spelled, source, planned(source))
  assert (tmp_path / "out" / "0" / "items" / "_METADATA").is_file()
  assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "out"]


@pytest.mark.parametrize("existed", [False, True])
def test_what_appears_meanwhile_is_not_replaced_and_the_slices_are_kept(
  converted, source, tmp_path, monkeypatch, existed
):
  out = tmp_path / "out"
  if existed:
    out.mkdir()

  def finish_another(*arguments, **keywords):
    shutil.move(out, tmp_path / "moved") if existed else None
    shutil.copytree(converted, out)
    return real(*arguments, **keywords)

  real = write.run_all
  monkeypatch.setattr(write, "run_all", finish_another)
  with pytest.raises(InputError, match=r"changed meanwhile .*, so it is not replaced.* slices are done and kept in "):
    convert(out, source, planned(source, scan=False))
  assert json.loads((out / "conversion.json").read_text())["options"]["scan"]
  shutil.rmtree(out)
  monkeypatch.setattr(write, "run_all", real)
  outcome = convert(out, source, planned(source, scan=False))
  assert (outcome.found, outcome.written) == (outcome.slices, 0)


# Nothing but the plan decides a byte


class Way(NamedTuple):
  """How a conversion may be carried out: parts in this order of so many, then the rest."""

  parts: tuple[int, ...] = ()
  count: int = 0
  workers: int = 2
  finish_with_part: bool = False


WAYS = {
  "one worker": Way(workers=1),
  "five workers": Way(workers=5),
  "1/3, 3/3, 2/3, finish": Way((1, 3, 2), 3),
  "more parts than slices": Way(tuple(range(1, 17)), 16),
  "the last part finishes": Way((2, 1), 2, finish_with_part=True),
  "one part, then the whole": Way((2,), 3),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_the_same_source_gives_the_same_bytes(source, tmp_path, whole, commit, way):
  how, out, made = WAYS[way], tmp_path / "out", planned(source)
  for number in how.parts:
    last = how.finish_with_part and number == how.parts[-1]
    part = convert(out, source, made, commit=commit, workers=how.workers, part=(number, how.count), finish=last)
    assert part.finished == last
  if not how.finish_with_part:
    complete = len(how.parts) == how.count and how.count > 0
    assert convert(out, source, made, commit=commit, workers=how.workers, convert=not complete).finished
  assert files(out) == whole(commit)
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_both_ways_to_commit_give_the_same_items(whole):
  renamed, marked = whole("rename"), whole("marker")
  assert set(marked) - set(renamed) == set(MARKERS)
  record, other = (json.loads(held["conversion.json"]) for held in (renamed, marked))
  assert record | {"commit": "marker"} == other
  for name in renamed.keys() - {"conversion.json"}:
    assert renamed[name] == marked[name], name


def test_nothing_in_a_result_tells_the_time_or_the_place(source, tmp_path, whole, monkeypatch):
  import time

  held = whole()
  monkeypatch.setattr(time, "time", lambda: 1.0)
  monkeypatch.setattr(time, "time_ns", lambda: 10**9)
  convert(tmp_path / "elsewhere" / "under-another-name", source, planned(source))
  assert files(tmp_path / "elsewhere" / "under-another-name") == held
  assert not [name for name, data in held.items() if str(tmp_path).encode() in data]


# Stopped at any point, and gone on from there


def all_writes(source, tmp_path, commit, writes) -> list[str]:
  """The names of the files that an undisturbed conversion by one worker writes, in order."""
  writes.go_on()
  convert(tmp_path / "log" / "out", source, planned(source), commit=commit, workers=1)
  return writes.names


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_stopped_before_in_or_after_any_write_a_conversion_goes_on_from_there(source, tmp_path, whole, writes, commit):
  made, expected, names = planned(source), whole(commit), all_writes(source, tmp_path, commit, writes)
  work = slices.Slices(made.leaves, source.tensors)
  of_slices = [name for name in names if name.startswith((DATA, JOURNAL))]
  assert len(of_slices) == 2 * len(work) > 16
  few = [name for name in names if name not in of_slices] + of_slices[8:10]
  assert {"plan.json", "decode.yml", "conversion.json", "0/items/manifest.ocdbt"} < set(few)
  # Before a write is after the one before it. A write in place can be torn; the temporary file of one that is not has a
  # name of its own.
  torn = [(name, "torn") for name in few] if commit == "marker" else []
  after = [(name, "after") for name in few if not torn or name in (*MARKERS, "plan.json", *of_slices)]
  points = [("plan.json", "before"), *torn, *after]
  for number, (name, moment) in enumerate(points):
    out = tmp_path / str(number) / "out"
    writes.stop(name, moment)
    with pytest.raises(Killed):
      run(out, source, made, commit=commit, workers=1)
    assert (out / MARKERS[-1]).exists() == (name == MARKERS[-1] and moment != "before")
    assert commit == "marker" or not out.exists()
    done = journaled(state_of(out, commit)) - ((name, moment) in [(n, "torn") for n in names if n.startswith(JOURNAL)])
    writes.go_on()
    outcome = run(out, source, made, commit=commit, workers=1)
    assert outcome
    assert (outcome.found, outcome.written) == (done, len(work) - done), (name, moment)
    assert writes.count(DATA) == len(work) - done
    assert files(out) == expected, (name, moment)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_stopped_again_and_again_a_conversion_writes_no_slice_twice(source, tmp_path, whole, writes, commit):
  made, out = planned(source), tmp_path / "out"
  for number in range(1, 8, 2):
    assert half_done(out, source, made, writes, slice_number=number, commit=commit) == number
  outcome = run(out, source, made, commit=commit)
  assert outcome and outcome.found == 7
  assert files(out) == whole(commit)


def test_the_temporary_file_of_a_killed_write_is_gone_at_the_end(source, tmp_path, whole, writes):
  out, made = tmp_path / "out", planned(source)
  half_done(out, source, made, writes)
  for name in ("0/items/d/000009.tmp-17-4", "0/items/.nfs01", "0/items/d/123456", "conversion.json.tmp-1-1"):
    path = tmp_path / "out.partial" / "out" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half a slice")
  (tmp_path / "out.partial" / "journal" / "000009.json.tmp-17-4").write_text("{")
  run(out, source, made)
  assert files(out) == whole()
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_killed_during_its_very_first_write_a_conversion_begins_anew(source, tmp_path, whole, overwrite):
  (tmp_path / "out.partial").mkdir()
  (tmp_path / "out.partial" / "lock").touch()
  (tmp_path / "out.partial" / "plan.json.tmp-17-4").write_text('{"schema": 1, "wri')
  run(tmp_path / "out", source, planned(source), overwrite=overwrite)
  assert files(tmp_path / "out") == whole()
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
  "damage", ["torn entry", "empty entry", "no entry", "other entry", "no data", "short data", "long data"]
)
def test_a_slice_whose_entry_or_data_is_not_whole_is_written_again_and_no_other(
  source, tmp_path, whole, writes, damage
):
  commit = "marker" if damage.startswith(("torn", "short")) else "rename"  # as a write in place may leave them
  out, made = tmp_path / "out", planned(source)
  half_done(out, source, made, writes, commit=commit)
  entry = state_of(out, commit) / "journal" / "000002.json"
  data = (out if commit == "marker" else tmp_path / "out.partial" / "out") / f"{DATA}00002"
  held = data.read_bytes()
  {
    "torn entry": lambda: entry.write_bytes(entry.read_bytes()[:-9]),
    "empty entry": lambda: entry.write_bytes(b""),
    "no entry": entry.unlink,
    "other entry": lambda: entry.write_text('{"checksums": [1.5], "shards": {}}'),
    "no data": data.unlink,
    "short data": lambda: data.write_bytes(held[:-1]),
    "long data": lambda: data.write_bytes(held + b"\0"),
  }[damage]()
  outcome = run(out, source, made, commit=commit)
  assert outcome and outcome.found == 6
  assert writes.names.count(f"{DATA}00002") == 1
  assert files(out) == whole(commit)


def test_the_journal_of_a_slice_that_the_plan_does_not_have_is_nothing(source, tmp_path, whole, writes):
  out, made = tmp_path / "out", planned(source)
  half_done(out, source, made, writes)
  journal = tmp_path / "out.partial" / "journal"
  for name in ("999999.json", "notes.txt", "000003.json.bak"):
    shutil.copy(journal / "000003.json", journal / name)
  assert run(out, source, made)
  assert files(out) == whole()


# What cannot be gone on with


def test_slices_of_a_shard_that_has_changed_are_written_again_which_is_said(copied, tmp_path, writes, capsys):
  source = index.open_source(copied)
  made = plan.make_plan(source, Options())
  made = dataclasses.replace(made, leaves=made.leaves[::6])  # of all shards
  out, work = tmp_path / "out", slices.Slices(made.leaves, source.tensors)
  writes.stop("decode.yml")  # all slices are done
  with pytest.raises(Killed):
    run(out, source, made)
  writes.go_on()
  shard = "model-00002-of-000003.safetensors"
  os.utime(copied / shard, ns=(1, 1))
  touched = [number for number in range(len(work)) if shard in work.shards(number)]
  assert 0 < len(touched) < len(work)
  capsys.readouterr()
  source = index.open_source(copied)
  outcome = run(out, source, made)
  assert (
    f"{len(touched)} finished slice(s) are written again: their shards have changed since" in capsys.readouterr().err
  )
  assert outcome and outcome.written == len(touched) == writes.count(DATA)
  convert(tmp_path / "again" / "out", source, made)
  assert files(out) == files(tmp_path / "again" / "out")


def test_changed_headers_are_refused_with_both_ways_out(source, edited, tmp_path, writes):
  out = tmp_path / "out"
  half_done(out, source, planned(source), writes)
  other = edited(source, config=dict(source.config) | {"ignore_index": 7})
  before = kept(tmp_path)
  with pytest.raises(
    InputError, match=r"unfinished conversion of another source .*: finish it, give --overwrite to"
  ) as e:
    run(out, other, planned(other))
  assert "choose another OUT" in str(e.value)
  assert kept(tmp_path) == before
  assert run(out, other, planned(other), overwrite=True).found == 0


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_other_options_are_refused_and_with_overwrite_begun_anew(source, tmp_path, writes, commit):
  out = tmp_path / "out"
  half_done(out, source, planned(source), writes, commit=commit)
  other, before = planned(source, scan=False), kept(tmp_path)
  refusal = r"with other options \(scan=true.*asked for scan=false.*finish it, give --overwrite to start anew"
  for job in ({}, {"part": (1, 2), "finish": False}, {"convert": False}):
    with pytest.raises(InputError, match=refusal):
      run(out, source, other, commit=commit, **job)
  with pytest.raises(InputError, match=refusal):
    output.progress_so_far(out, source, other, commit)
  assert kept(tmp_path) == before
  outcome = run(out, source, other, commit=commit, overwrite=True)
  assert outcome and outcome.found == 0
  convert(tmp_path / "again" / "out", source, other, commit=commit)
  assert files(out) == files(tmp_path / "again" / "out")


def test_overwrite_gives_up_nothing_that_is_the_same(source, tmp_path, writes):
  done = half_done(tmp_path / "out", source, planned(source), writes)
  assert run(tmp_path / "out", source, planned(source), overwrite=True).found == done > 0


@pytest.mark.parametrize("job", [{"part": (1, 2), "finish": False}, {"convert": False}])
def test_neither_a_part_nor_finish_gives_up_what_is_under_way(source, tmp_path, writes, job):
  out = tmp_path / "out"
  half_done(out, source, planned(source), writes)
  before = kept(tmp_path)
  with pytest.raises(InputError, match="unfinished conversion"):
    run(out, source, planned(source, scan=False), overwrite=True, **job)
  assert kept(tmp_path) == before


def test_slices_of_another_version_of_the_writer_are_refused(source, tmp_path, writes, monkeypatch):
  half_done(tmp_path / "out", source, planned(source), writes)
  monkeypatch.setattr(output, "WRITER", 99)
  with pytest.raises(InputError, match=r"by another version \(writer 1, expected 99\)"):
    run(tmp_path / "out", source, planned(source))


@pytest.mark.parametrize("content", ["{", "[]", "", '{"schema": 1}'])
def test_a_plan_that_cannot_be_read_is_told(source, tmp_path, writes, content):
  half_done(tmp_path / "out", source, planned(source), writes)
  (tmp_path / "out.partial" / "plan.json").write_text(content)
  with pytest.raises(InputError, match=r"out\.partial.*(remove|--overwrite)"):
    run(tmp_path / "out", source, planned(source))


# What stops a run from within


def out_of_space(monkeypatch, nbytes: int, number: int = errno.ENOSPC) -> None:
  """The disk takes so many bytes more."""
  real, left, lock = os.write, [nbytes], threading.Lock()

  def write_some(descriptor, data):
    with lock:
      if len(data) > left[0]:
        left[0] = 0
        raise OSError(number, os.strerror(number))
      left[0] -= len(data)
    return real(descriptor, data)

  monkeypatch.setattr(store.os, "write", write_some)


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_a_full_disk_keeps_what_is_done_and_the_next_run_goes_on(source, tmp_path, whole, monkeypatch, commit):
  out, made = tmp_path / "out", planned(source)
  with monkeypatch.context() as patch:
    out_of_space(patch, 40_000)
    with pytest.raises(InputError, match=r"No space left on device\): the disk takes no more: make room; \d+ of") as e:
      run(out, source, made, commit=commit)
  assert "\n" not in str(e.value)
  assert "the same command goes on from there" in str(e.value)
  done = journaled(state_of(out, commit))
  assert 0 < done < 20
  outcome = run(out, source, made, commit=commit)
  assert outcome and outcome.found == done
  assert files(out) == whole(commit)


def test_a_disk_that_is_full_from_the_start_leaves_nothing(source, tmp_path, monkeypatch):
  out_of_space(monkeypatch, 300)  # enough for the plan
  with pytest.raises(InputError, match=r"the disk takes no more: make room$"):
    run(tmp_path / "out", source, planned(source))
  assert not list(tmp_path.iterdir())


def test_too_little_space_is_said_before_anything_is_written_and_takes_nothing_away(
  source, tmp_path, monkeypatch, writes, whole
):
  expected, free = whole(), {"bytes": 9}
  monkeypatch.setattr(store.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=free["bytes"]))
  with pytest.raises(InputError, match=r"9 bytes free, the conversion takes [\d,]+; make room or choose another OUT"):
    run(tmp_path / "out", source, planned(source))
  assert not list(tmp_path.iterdir())
  free["bytes"] = 10**9
  half_done(tmp_path / "out", source, planned(source), writes)
  free["bytes"] = 9
  before = kept(tmp_path)
  with pytest.raises(InputError, match=r"9 bytes free.* 7 of .* slices are done and kept in "):
    run(tmp_path / "out", source, planned(source))
  assert kept(tmp_path) == before
  # What is left to write counts, not the whole.
  work = slices.Slices(planned(source).leaves, source.tensors)
  free["bytes"] = sum(work.size(number) for number in range(7, len(work)))
  run(tmp_path / "out", source, planned(source))
  assert files(tmp_path / "out") == expected


def test_a_shard_that_cannot_be_read_keeps_what_is_done(source, tmp_path, whole, monkeypatch):
  real, count, lock = os.preadv, [0], threading.Lock()

  def preadv(*arguments):
    with lock:
      count[0] += 1
      if count[0] > 8:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return real(*arguments)

  with monkeypatch.context() as patch:
    patch.setattr(index.os, "preadv", preadv)
    with pytest.raises(InputError, match=r"cannot be read \(Input/output error\); \d+ of \d+ slices are done and kept"):
      run(tmp_path / "out", source, planned(source), workers=1)
  assert run(tmp_path / "out", source, planned(source)).found > 0
  assert files(tmp_path / "out") == whole()


def test_a_shard_that_changes_during_the_run_is_refused(copied, tmp_path, monkeypatch):
  source = index.open_source(copied)
  made, shard = plan.make_plan(source, Options()), "model-00002-of-000003.safetensors"
  real = Unfinished.add

  def add(unfinished, number, *rest):
    real(unfinished, number, *rest)
    os.utime(copied / shard, ns=(1, 1)) if number == 5 else None

  monkeypatch.setattr(Unfinished, "add", add)
  with pytest.raises(InputError, match=rf"{shard}: changed while it was read: .*slices are done and kept"):
    run(tmp_path / "out", source, made, workers=1)
  assert not (tmp_path / "out").exists()
  monkeypatch.setattr(Unfinished, "add", real)
  again = index.open_source(copied)
  outcome = run(tmp_path / "out", again, made)
  assert outcome and outcome.found > 5
  convert(tmp_path / "other" / "out", again, made)
  assert files(tmp_path / "out") == files(tmp_path / "other" / "out")


def failing_value(source, number: int, error: BaseException) -> index.Source:
  """The source, with an error at its n-th read."""
  count, lock = [0], threading.Lock()

  class Failing(index.Source):
    def read(self, name, start=0, stop=None):
      with lock:
        count[0] += 1
        if count[0] == number:
          raise error
      return super().read(name, start, stop)

  return Failing(source.directory, source.config, source.config_bytes, source.tensors, source.shards)


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_a_source_that_cannot_be_converted_leaves_nothing(source, tmp_path, commit):
  bad = failing_value(source, 8, InputError("model.layers.1.A_log: 4 heads then zero padding expected"))
  with pytest.raises(InputError, match=r"^model.layers.1.A_log: 4 heads then zero padding expected$"):
    run(tmp_path / "out", bad, planned(source), commit=commit)
  assert not [path for path in tmp_path.rglob("*") if path != tmp_path / "out"]


def test_a_source_that_cannot_be_converted_keeps_much_work_and_that_of_other_parts(source, tmp_path, monkeypatch):
  error = InputError("model.layers.1.A_log: 4 heads then zero padding expected")
  convert(tmp_path / "parts", source, planned(source), part=(1, 2), finish=False)
  with pytest.raises(InputError, match=r"padding expected; \d+ of \d+ slices are done and kept in .*/parts\.partial"):
    run(tmp_path / "parts", failing_value(source, 2, error), planned(source), part=(2, 2), finish=False)
  monkeypatch.setattr(output, "_KEPT_BYTES", 5_000)
  with pytest.raises(InputError, match=r"padding expected; \d+ of \d+ slices are done and kept in .*/much\.partial"):
    run(tmp_path / "much", failing_value(source, 9, error), planned(source), workers=1)
  assert sorted(path.name for path in tmp_path.iterdir()) == ["much.partial", "parts.partial"]


def test_ctrl_c_keeps_what_is_done(source, tmp_path, whole):
  interrupted = failing_value(source, 8, KeyboardInterrupt())
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path / "out", interrupted, planned(source), workers=1)
  assert not (tmp_path / "out").exists()
  assert run(tmp_path / "out", source, planned(source)).found > 0
  assert files(tmp_path / "out") == whole()


# Removals that are stopped


def killed_removals(monkeypatch, *, keep: int) -> None:
  """From here on a directory's removal ends when so many of its files are left."""

  def rmtree(path):
    for file in sorted(p for p in Path(path).rglob("*") if p.is_file())[: -keep or None]:
      file.unlink()
    raise Killed

  monkeypatch.setattr(store.shutil, "rmtree", rmtree)


@pytest.mark.parametrize("keep", [1, 3, 100])
@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_killed_after_the_commit_the_next_run_ends_the_removal(source, tmp_path, whole, monkeypatch, commit, keep):
  out, made = tmp_path / "out", planned(source)
  with monkeypatch.context() as patch:
    killed_removals(patch, keep=keep)
    with pytest.raises(Killed):
      run(out, source, made, commit=commit)
  assert state_of(out, commit).exists()
  assert run(out, source, made, commit=commit) is None
  assert files(out) == whole(commit)
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_between_the_marker_and_the_removal_the_next_run_ends_it(source, tmp_path, whole, monkeypatch, writes):
  out, made = tmp_path / "out", planned(source)
  with monkeypatch.context() as patch:
    patch.setattr(Unfinished, "remove", lambda _: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
      run(out, source, made, commit="marker")
  assert (out / MARKERS[-1]).exists()
  assert not output.check_output(out, source, made, overwrite=False)  # under way: plan.json is there
  writes.names.clear()
  outcome = run(out, source, made, commit="marker")
  assert outcome and outcome.finished and writes.count(DATA) == 0
  assert files(out) == whole("marker")


def test_killed_between_the_rename_and_the_removal_the_next_run_ends_it(source, tmp_path, monkeypatch, converted):
  for name, old in (("new", None), ("replacing", converted)):
    out, made = tmp_path / name / "out", planned(source, scan=False)
    if old:
      shutil.copytree(old, out)
    with monkeypatch.context() as patch:
      patch.setattr(Unfinished, "remove", lambda _: (_ for _ in ()).throw(Killed()))
      with pytest.raises(Killed):
        run(out, source, made, overwrite=True)
    assert run(out, source, made) is None
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_killed_between_the_two_renames_the_next_run_ends_the_second(source, tmp_path, converted, monkeypatch):
  out, made = shutil.copytree(converted, tmp_path / "out"), planned(source, scan=False)
  with monkeypatch.context() as patch:
    patch.setattr(output, "_swap", lambda *_: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
      run(out, source, made, overwrite=True)
  out.rename(tmp_path / "out.partial" / "replaced")
  outcome = run(out, source, made)
  assert outcome and outcome.written == 0
  assert output.check_output(out, source, made, overwrite=False)
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_rename_that_fails_brings_back_what_was_there(source, tmp_path, converted, monkeypatch):
  out, made = shutil.copytree(converted, tmp_path / "out"), planned(source, scan=False)
  before, real = files(out), Path.rename

  def rename(path, target):
    if path.name == "out" and path.parent.name == "out.partial":
      raise OSError(errno.EIO, os.strerror(errno.EIO))
    return real(path, target)

  with monkeypatch.context() as patch:
    patch.setattr(appear, "_exchanged", lambda *_: False)
    patch.setattr(Path, "rename", rename)
    with pytest.raises(InputError, match=r"out: cannot be made \(Input/output error\); .* slices are done and kept"):
      run(out, source, made, overwrite=True)
  assert files(out) == before
  assert run(out, source, made, overwrite=True).written == 0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_killed_while_it_makes_room_for_another_a_conversion_in_place_goes_on(
  source, tmp_path, monkeypatch, share, whole
):
  """The old one is not complete any more, and nothing of it is taken for the new one."""
  out, made, real = tmp_path / "out", planned(source), LocalStore.delete
  convert(out, source, planned(source, scan=False), commit="marker")
  left = [2 + int(share * len(files(out)))]  # after the plan, which is not there, and the last marker

  def delete(held, prefix=""):
    left[0] -= 1
    if left[0] < 0:
      raise Killed
    real(held, prefix)

  with monkeypatch.context() as patch:
    patch.setattr(LocalStore, "delete", delete)
    with pytest.raises(Killed):
      run(out, source, made, overwrite=True, commit="marker")
  assert not all((out / marker).exists() for marker in MARKERS)
  assert run(out, source, made, overwrite=True, commit="marker").found == 0
  assert files(out) == whole("marker")


# Parts


def test_finish_names_what_is_missing_and_keeps_everything(source, tmp_path, whole):
  out, made = tmp_path / "out", planned(source)
  work = slices.Slices(made.leaves, source.tensors)
  convert(out, source, made, part=(2, 4), finish=False)
  before, (first, *_, last) = kept(tmp_path), work.part(2, 4)
  with pytest.raises(InputError) as error:
    run(out, source, made, convert=False)
  assert f"slices are not done (0 to {first - 1}; {last + 1} to {len(work) - 1}): convert " in str(error.value)
  assert "--part 1/4; --part 3/4; --part 4/4 before --finish" in str(error.value)
  assert kept(tmp_path) == before
  for part in (1, 3, 4):
    convert(out, source, made, part=(part, 4), finish=False)
  run(out, source, made, convert=False)
  assert files(out) == whole()


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_finish_without_a_conversion_is_refused_and_leaves_nothing(source, tmp_path, commit):
  with pytest.raises(InputError, match="no conversion is under way there, nothing to finish; convert first"):
    run(tmp_path / "out", source, planned(source), convert=False, commit=commit)
  assert not [path for path in tmp_path.rglob("*") if path != tmp_path / "out"]


def test_a_part_says_what_is_missing_of_the_others(source, tmp_path):
  made = planned(source)
  work = slices.Slices(made.leaves, source.tensors)
  first = convert(tmp_path / "out", source, made, part=(1, 2), finish=False)
  assert not first.finished
  assert (first.written, first.missing) == (len(work.part(1, 2)), len(work.part(2, 2)))
  again = convert(tmp_path / "out", source, made, part=(1, 2), finish=False)
  assert (again.found, again.written) == (first.written, 0)


def test_parts_that_begin_at_the_same_time_share_one_plan(source, tmp_path, monkeypatch, whole):
  """The second begins, and writes, between the look for a plan and the look for files of the first."""
  out, made, real, begun = tmp_path / "out", planned(source), Unfinished.leftovers, []

  def leftovers(unfinished):
    if not begun:
      begun.append(True)
      convert(out, source, made, part=(2, 2), finish=False)
    return real(unfinished)

  monkeypatch.setattr(Unfinished, "leftovers", leftovers)
  convert(out, source, made, part=(1, 2), finish=False)
  convert(out, source, made, convert=False)
  assert files(out) == whole()


# Locks


@contextlib.contextmanager
def holder(out: Path, part: str, commit: str = "rename") -> Iterator[None]:
  """Another process that holds a conversion, or one part of it."""
  script = (
    "import sys\nfrom kimi_k3.convert.unfinished import Unfinished\n"
    f"with Unfinished({str(out)!r}, {commit!r}).lock({part}):\n  print(flush=True)\n  sys.stdin.read()"
  )
  command = [sys.executable, "-c", script]
  with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
    assert process.stdout
    process.stdout.readline()
    yield
    process.kill()


def test_two_processes_never_write_the_same_and_two_parts_do_not_wait(source, tmp_path, whole):
  out, made = tmp_path / "out", planned(source)
  with holder(out, "None"):
    before = kept(tmp_path)
    for job in ({}, {"part": (1, 2), "finish": False}, {"convert": False}):
      with pytest.raises(Locked, match="another conversion is writing there, wait for it or choose another OUT"):
        run(out, source, made, **job)
    assert kept(tmp_path) == before
  with holder(out, "(1, 2)"):
    for job in ({}, {"part": (1, 2), "finish": False}, {"convert": False}):
      with pytest.raises(Locked):
        run(out, source, made, **job)
    run(out, source, made, part=(2, 2), finish=False)
  run(out, source, made)  # The holder was killed, and its locks with it.
  assert files(out) == whole()


# In place, with a marker


def test_until_its_marker_is_there_a_conversion_in_place_is_under_way(source, tmp_path, writes):
  out, made = tmp_path / "out", planned(source)
  for name in ("conversion.json", MARKERS[0]):
    writes.stop(name, "after")
    with pytest.raises(Killed):
      run(out, source, made, commit="marker")
    assert (out / "0" / "items" / "manifest.ocdbt").exists()
    assert not output.check_output(out, source, made, overwrite=False)
    assert not (out / MARKERS[-1]).exists()
  writes.go_on()
  run(out, source, made, commit="marker")
  assert writes.names[-1] == MARKERS[-1]
  assert output.check_output(out, source, made, overwrite=False)


@pytest.mark.parametrize("first", ["rename", "marker"])
def test_both_ways_to_commit_at_one_place_refuse_each_other(source, tmp_path, writes, first):
  other = {"rename": "marker", "marker": "rename"}[first]
  half_done(tmp_path / "out", source, planned(source), writes, commit=first)
  before = kept(tmp_path)
  for job in ({}, {"part": (1, 2), "finish": False}, {"convert": False}):
    with pytest.raises(InputError, match=f"unfinished conversion that commits by {first}: give --commit {first}, or"):
      run(tmp_path / "out", source, planned(source), commit=other, **job)
  assert kept(tmp_path) == before


def test_a_file_is_written_in_place_where_nothing_is_renamed(source, tmp_path, monkeypatch):
  monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(AssertionError("a rename")))
  convert(tmp_path / "out", source, planned(source), commit="marker")


# A bucket, for which TensorStore's file driver stands in


def test_a_bucket_gets_what_a_directory_gets_that_is_committed_by_a_marker(source, tmp_path, whole):
  url, made = f"file://{tmp_path}/bucket/out", planned(source)
  assert not output.check_output(url, source, made, overwrite=False)
  outcome = convert(url, source, made, commit="marker")
  assert outcome.finished
  assert files(tmp_path / "bucket" / "out") == whole("marker")
  assert output.check_output(f"{url}/", source, made, overwrite=False)


def test_a_conversion_to_a_bucket_is_gone_on_with_and_shared_out(source, tmp_path, whole, writes):
  url, made = f"file://{tmp_path}/bucket/out", planned(source)
  writes.stop(f"{DATA}00007")
  with pytest.raises(Killed):
    convert(url, source, made, commit="marker", workers=1)
  writes.go_on()
  assert not output.check_output(url, source, made, overwrite=False)
  _, done, _ = output.progress_so_far(url, source, made, "marker")
  assert done == 7
  first = convert(url, source, made, commit="marker", part=(1, 2), finish=False)
  assert first.found == 7 and not first.finished
  last = convert(url, source, made, commit="marker", part=(2, 2))
  assert last.finished
  assert files(tmp_path / "bucket" / "out") == whole("marker")


def test_a_bucket_that_holds_something_else_is_not_written_to(source, tmp_path):
  url = f"file://{tmp_path}/bucket"
  (tmp_path / "bucket").mkdir()
  (tmp_path / "bucket" / "thesis.tex").write_text("years of work")
  with pytest.raises(InputError, match="not a conversion, never overwritten"):
    output.check_output(url, source, planned(source), overwrite=True)


# Hashes of the shards


def test_hashes_of_the_shards_are_recorded_once_each(k3_copy, tmp_path, monkeypatch):
  source, hashed = index.open_source(k3_copy), []
  made, real = planned(source), output.file_sha256
  monkeypatch.setattr(output, "file_sha256", lambda path, *rest: hashed.append(path.name) or real(path, *rest))
  for part in (1, 2):
    convert(tmp_path / "out", source, made, part=(part, 2), finish=False, hash_shards=True)
  convert(tmp_path / "out", source, made, convert=False, hash_shards=True)
  shards = json.loads((tmp_path / "out" / "conversion.json").read_text())["source"]["shards"]
  assert sorted(hashed) == sorted(shards) == sorted(source.shards)
  for name, shard in shards.items():
    assert shard["sha256"] == hashlib.sha256((k3_copy / name).read_bytes()).hexdigest()


def test_finish_asks_for_the_hashes_that_no_part_has_made_and_keeps_everything(k3_copy, tmp_path):
  source = index.open_source(k3_copy)
  made = planned(source)
  convert(tmp_path / "out", source, made, part=(1, 2), finish=False, hash_shards=True)
  convert(tmp_path / "out", source, made, part=(2, 2), finish=False)
  before = kept(tmp_path / "out.partial")
  with pytest.raises(InputError, match=r"no hash of model-00002-of-000003\.safetensors: give --hash to every part"):
    run(tmp_path / "out", source, made, convert=False, hash_shards=True)
  assert kept(tmp_path / "out.partial") == before
  convert(tmp_path / "out", source, made, convert=False)
  assert "sha256" not in (tmp_path / "out" / "conversion.json").read_text()


def test_the_hash_of_a_shard_that_has_changed_is_made_again(k3_copy, tmp_path):
  source = index.open_source(k3_copy)
  convert(tmp_path / "out", source, planned(source), part=(1, 1), finish=False, hash_shards=True)
  os.utime(k3_copy / "model-00001-of-000003.safetensors", ns=(1, 1))
  source = index.open_source(k3_copy)
  with pytest.raises(InputError, match="slices are not done"):
    run(tmp_path / "out", source, planned(source), convert=False, hash_shards=True)
  assert run(tmp_path / "out", source, planned(source), hash_shards=True).finished


def test_giving_up_a_commit_that_was_killed_between_its_renames_brings_back_what_was_there(
  source, tmp_path, converted, monkeypatch
):
  out, made = shutil.copytree(converted, tmp_path / "out"), planned(source, scan=False)
  before = files(out)
  with monkeypatch.context() as patch:
    patch.setattr(output, "_swap", lambda *_: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
      run(out, source, made, overwrite=True)
  out.rename(tmp_path / "out.partial" / "replaced")
  with monkeypatch.context() as patch:
    patch.setattr(output, "_write_slices", lambda *_: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
      run(out, source, planned(source, scan=False, experts="bf16"), overwrite=True)
  assert files(out) == before


# What someone else put there


@pytest.mark.parametrize("existed", [False, True])
def test_what_someone_puts_into_out_meanwhile_is_not_removed(source, tmp_path, whole, monkeypatch, existed):
  out, real = tmp_path / "out", write.run_all
  if existed:
    out.mkdir()

  def busy(*arguments):
    real(*arguments)
    out.mkdir(exist_ok=True)
    (out / "thesis.tex").write_text("years of work")

  with monkeypatch.context() as patch:
    patch.setattr(write, "run_all", busy)
    with pytest.raises(InputError, match=r"changed meanwhile \(thesis\.tex\), so it is not replaced: move away"):
      run(out, source, planned(source))
  assert (out / "thesis.tex").read_text() == "years of work"
  with pytest.raises(InputError, match="not empty, but no"):
    run(out, source, planned(source))
  shutil.rmtree(out)
  outcome = run(out, source, planned(source))
  assert outcome and outcome.written == 0
  assert files(out) == whole()


def test_what_someone_puts_beside_the_files_of_a_conversion_in_place_stays(source, tmp_path, whole):
  out = tmp_path / "out"
  convert(out, source, planned(source), part=(1, 2), finish=False, commit="marker")
  (out / "notes.txt").write_text("mine")
  convert(out, source, planned(source), commit="marker")
  assert (out / "notes.txt").read_text() == "mine"
  assert {name: data for name, data in files(out).items() if name != "notes.txt"} == whole("marker")


@pytest.mark.parametrize(
  "make", [lambda out: (out / "a" / "b").mkdir(parents=True), lambda out: (out / "l").symlink_to(out)]
)
def test_an_out_with_a_directory_or_a_link_is_not_empty(source, tmp_path, make):
  out = tmp_path / "out"
  out.mkdir()
  make(out)
  for overwrite in (False, True):
    with pytest.raises(InputError, match="not empty, but no conversion"):
      output.check_output(out, source, planned(source), overwrite=overwrite)


@pytest.mark.parametrize("damage", ["d/000003 gone", "d/000003 short", "d/index gone", "decode.yml gone"])
@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_a_damaged_conversion_is_refused_by_the_file_and_made_anew_when_asked(source, tmp_path, whole, damage, commit):
  out = tmp_path / "out"
  convert(out, source, planned(source), commit=commit)
  name, how = damage.split()
  path = out / name if name == "decode.yml" else out / "0" / "items" / name
  path.write_bytes(path.read_bytes()[:-1]) if how == "short" else path.unlink()
  with pytest.raises(InputError, match=rf"damaged conversion: missing or of another size: .*{name}; give --overwrite"):
    run(out, source, planned(source), commit=commit)
  assert run(out, source, planned(source), commit=commit, overwrite=True).written
  assert files(out) == whole(commit)


def test_killed_right_after_the_commit_nothing_is_written_again_and_the_state_goes(
  source, tmp_path, converted, whole, monkeypatch
):
  out = shutil.copytree(converted, tmp_path / "out")
  for overwrite in (True, False):
    with monkeypatch.context() as patch:
      patch.setattr(Unfinished, "remove", lambda _: (_ for _ in ()).throw(Killed()))
      with pytest.raises(Killed):
        run(out, source, planned(source, scan=overwrite), overwrite=True)
    before = files(out)
    assert output.check_output(out, source, planned(source, scan=overwrite), overwrite=False)
    output.tidy(out, "rename")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert files(out) == before
  # Asked to write it anew in that moment, it does not take the old one's slices for its own.
  with monkeypatch.context() as patch:
    patch.setattr(Unfinished, "remove", lambda _: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
      run(out, source, planned(source), overwrite=True)
  outcome = run(out, source, planned(source), overwrite=True)
  assert (outcome.found, outcome.written) == (0, outcome.slices)
  assert files(out) == whole()


def test_machines_with_copies_of_their_own_share_the_work_out(copied, tmp_path, monkeypatch):
  other = shutil.copytree(copied, tmp_path / "copy")
  for path in other.iterdir():
    os.utime(path, ns=(1, 1))
  first, second = index.open_source(copied), index.open_source(other)
  convert(tmp_path / "out", first, plan.make_plan(first, Options()), part=(1, 2), finish=False)
  monkeypatch.setattr(index.socket, "gethostname", lambda: "another")
  outcome = convert(tmp_path / "out", second, plan.make_plan(second, Options()))
  assert outcome.found > 0
  convert(tmp_path / "alone" / "out", second, plan.make_plan(second, Options()))
  assert files(tmp_path / "out") == files(tmp_path / "alone" / "out")


def test_a_path_with_a_line_break_or_bytes_that_are_no_text_stays_in_its_comment(source, tmp_path):
  out = tmp_path / "a\nscan_layers: 7\n#\udcff"
  output.convert(
    out, source, planned(source), output.Job(commit="rename", workers=1, command=f"kimi-k3 convert SRC {out}")
  )
  assert yaml.safe_load((out / "decode.yml").read_text())["scan_layers"] is True
