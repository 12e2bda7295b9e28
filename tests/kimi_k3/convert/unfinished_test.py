"""The state of a conversion under way. What a whole run makes of it is output_test's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kimi_k3.convert import plan, slices
from kimi_k3.convert.plan import Options
from kimi_k3.convert.slices import Slices
from kimi_k3.convert.store import Locked
from kimi_k3.convert.unfinished import MARKERS, Entry, Unfinished
from kimi_k3.errors import InputError

PLAN = {"schema": 1, "source": "abc", "options": {"scan": True}}


@pytest.fixture(params=["rename", "marker", "bucket"])
def state(request, tmp_path) -> Unfinished:
  """Of a conversion that is not yet begun."""
  if request.param == "bucket":
    return Unfinished(f"file://{tmp_path}/out", "marker")
  return Unfinished(str(tmp_path / "out"), request.param)


@pytest.fixture
def work(small_sources, monkeypatch) -> Slices:
  monkeypatch.setattr(slices, "MIN_SLICE_BYTES", 60_000)
  source = small_sources["k3"]
  return Slices(plan.make_plan(source, Options()).leaves, source.tensors)


def write_data(state: Unfinished, work: Slices, number: int, missing: int = 0) -> None:
  state.data.write(f"0/items/{slices.file_name(number)}", [bytes(work.size(number) - missing)])


def entry(work: Slices, number: int) -> Entry:
  sums = (2**32 - 1, *range(work.num_chunks_of(number) - 1))
  return Entry(sums, {"a.safetensors": "12-34-ab-cd"})


def test_an_entry_of_another_number_of_chunks_is_none(state, work):
  state.begin(PLAN)
  for number, sums in ((0, ()), (1, (1,) * 99)):
    write_data(state, work, number)
    state.add(number, Entry(sums, {}))
  assert state.entries(work) == {}


def test_the_state_lies_beside_out_or_in_it_and_the_data_where_it_is_renamed_from_or_stays(tmp_path):
  renamed, marked = (Unfinished(str(tmp_path / "out"), commit) for commit in ("rename", "marker"))
  assert (renamed.where, renamed.data.url) == (f"{tmp_path}/out.partial", f"{tmp_path}/out.partial/out")
  assert (marked.where, marked.data.url) == (f"{tmp_path}/out/.unfinished", f"{tmp_path}/out")
  assert Unfinished("gs://bucket/out", "marker").where == "gs://bucket/out/.unfinished"


def test_what_is_begun_is_read_again(state):
  assert state.plan() is None
  assert not state.leftovers()
  state.begin(PLAN)
  assert state.plan() == PLAN
  assert not state.leftovers()  # a plan alone is what a part that has just begun finds
  state.remove()
  assert state.plan() is None
  assert state.state.names() == []


def test_the_journal_tells_checksums_and_shards_of_the_slices_that_are_done(state, work):
  state.begin(PLAN)
  for number in (0, 3):
    write_data(state, work, number)
    state.add(number, entry(work, number))
  write_data(state, work, 1)  # not journaled: under way when the run ended
  for name in ("000001.json.tmp-1-2", "1.txt", "x.json"):
    state.state.write(f"journal/{name}", [b"{}"])
  assert state.num_journaled() == 2
  found = state.entries(work)
  assert sorted(found) == [0, 3]
  assert found[3] == entry(work, 3)


def test_a_slice_without_its_data_is_not_done(state, work):
  state.begin(PLAN)
  state.add(0, entry(work, 0))
  assert state.entries(work) == {}
  if not state.out.startswith("file:"):  # An object is there whole or not at all.
    write_data(state, work, 0, missing=1)
    assert state.entries(work) == {}
  write_data(state, work, 0)
  assert list(state.entries(work)) == [0]


@pytest.mark.parametrize(
  "content",
  [b"", b"{", b"[]", b"5", b"{}", b'{"checksums": [1]}', b'{"checksums": 1, "shards": {}}', b"\xff",
   b'{"checksums": ["1"], "shards": {}}', b'{"checksums": [true], "shards": {}}', b'{"checksums": [1], "shards": []}'],
)  # fmt: skip
def test_an_entry_that_is_not_whole_counts_for_nothing(tmp_path, work, content):
  state = Unfinished(str(tmp_path / "out"), "rename")
  write_data(state, work, 0)
  state.state.write("journal/000000.json", [content])
  assert state.entries(work) == {}


def test_hashes_are_told_by_shard_and_those_that_are_not_whole_count_for_nothing(state):
  state.add_hash(0, "a.safetensors", "12-34-ab", "f" * 64)
  for number, content in enumerate((b"", b"{", b"[]", b'{"shard": "b"}'), 1):
    state.state.write(f"hashes/{number:06d}.json", [content])
  assert state.hashes() == {"a.safetensors": ("12-34-ab", "f" * 64)}


@pytest.mark.parametrize("name", ["thesis.tex", "journals/a", "outer/b", "0/items/d/000000"])
def test_what_no_conversion_left_is_named_and_not_touched(tmp_path, name):
  state = Unfinished(str(tmp_path / "out"), "rename")
  state.state.write(name, [b"years of work"])
  with pytest.raises(InputError, match=f"holds {name} but no plan.json: no conversion under way; remove it or"):
    state.plan()
  assert not state.over()


@pytest.mark.parametrize(
  "name", ["lock", "lock-1-of-3", "journal/000001.json", "hashes/000000.json", "out/0/items/d/000000",
           "plan.json.tmp-1-2", "replaced/conversion.json"],
)  # fmt: skip
def test_what_a_kill_left_is_no_conversion_and_no_hindrance(tmp_path, name):
  state = Unfinished(str(tmp_path / "out"), "rename")
  state.state.write(name, [b"{"])
  assert state.plan() is None
  assert state.empty() == name.startswith("lock")


@pytest.mark.parametrize(
  "content", ["", "{", '{"schema": 1, "opt', '{"schema": 1,\n  "options": {\n    "scan": true\n  ']
)
def test_a_plan_that_was_torn_before_anything_else_was_written_is_none(state, content):
  state.state.write("plan.json", [content.encode()])
  assert state.plan() is None
  assert not state.leftovers()


@pytest.mark.parametrize("content", ["{", '{"a": {}', "[]", "5"])
def test_a_plan_that_cannot_be_read_is_told_where_slices_are_done(state, content):
  state.state.write("plan.json", [content.encode()])
  state.add(0, Entry((1,), {}))
  with pytest.raises(InputError, match=rf"{state.where}/plan\.json: .*remove {state.where} and start again") as error:
    state.plan()
  assert "\n" not in str(error.value)


def test_clearing_leaves_locks_alone_and_takes_the_plan_first(state, work, monkeypatch):
  state.begin(PLAN)
  write_data(state, work, 0)
  state.add(0, Entry((1,), {}))
  state.add_hash(0, "a", "b", "c")
  for marker in MARKERS:
    state.data.write(marker, [b""])
  with state.lock(None):
    deleted: list[str] = []
    for held in (state.state, state.data):
      monkeypatch.setattr(held, "delete", _noting(deleted, held.delete))
    state.clear()
    assert deleted[0] == "plan.json"
    if state.commit == "marker":
      assert deleted[1:3] == [*reversed(MARKERS)]
    assert [name for name in state.state.names() if not name.startswith("lock")] == []
    assert state.empty()
  assert [name for name in state.data.names() if not name.startswith(".unfinished/")] == []


def _noting(deleted: list[str], delete):
  def note(name=""):
    deleted.append(name)
    delete(name)

  return note


def test_what_is_left_after_a_commit_is_told_from_what_is_under_way(state, work):
  assert not state.over()
  state.begin(PLAN)
  state.add(0, Entry((1,), {}))
  if state.commit == "rename":
    assert state.over()  # its data is gone: it was renamed
    state.state.delete("plan.json")
    assert state.over()
    write_data(state, work, 0)
    assert not state.over()
  else:
    write_data(state, work, 0)
    assert not state.over()
    state.state.delete("plan.json")
    assert state.over()


def test_the_whole_keeps_parts_out_and_parts_the_whole(tmp_path):
  state, other = (Unfinished(str(tmp_path / "out"), "rename") for _ in range(2))
  with state.lock(None), pytest.raises(Locked):
    other.lock((1, 2)).__enter__()
  with state.lock((1, 2)):
    with other.lock((2, 2)), other.lock((1, 3)):
      pass
    for part in ((1, 2), None):
      with pytest.raises(Locked):
        other.lock(part).__enter__()
  with other.lock(None):
    pass


def test_a_part_of_a_bucket_has_one_holder(tmp_path, monkeypatch):
  monkeypatch.setattr("kimi_k3.convert.store.SIGN_OF_LIFE_SECONDS", 0.05)
  state, other = (Unfinished(f"file://{tmp_path}/out", "marker") for _ in range(2))
  with state.lock((1, 2)), other.lock((2, 2)), pytest.raises(Locked):
    other.lock((1, 2)).__enter__()
  assert not [path for path in Path(tmp_path).rglob("*") if path.is_file()]


def test_the_journal_is_json_that_people_can_read(tmp_path):
  state = Unfinished(str(tmp_path / "out"), "rename")
  state.add(12, Entry((7,), {"a.safetensors": "12-34-ab"}))
  held = json.loads((tmp_path / "out.partial" / "journal" / "000012.json").read_text())
  assert held == {"checksums": [7], "shards": {"a.safetensors": "12-34-ab"}}
