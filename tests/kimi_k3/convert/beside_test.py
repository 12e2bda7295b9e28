"""Killed before any change of the disk that it makes, a run can be started again, and nobody else's file is lost."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kimi_k3.convert import appear, beside, export, index, reader, shards, slicing
from kimi_k3.convert.beside import Beside
from kimi_k3.errors import InputError

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "open"}


class Killed(BaseException):
  """What stands for SIGKILL: from then on every change fails, those of handlers too."""


class Killer:
  """Counts the changes below a directory and fails from one of them on."""

  def __init__(self) -> None:
    self.below, self.left, self.dead = "", 0, False
    sys.addaudithook(self._see)

  def arm(self, below: Path, changes: int) -> None:
    self.below, self.left, self.dead = str(below), changes, False

  def disarm(self) -> bool:
    """Whether it struck."""
    self.below = ""
    return self.dead

  def _see(self, event: str, args: tuple) -> None:
    if not self.below or event not in CHANGES:
      return
    path = args[0] if isinstance(args[0], str | bytes | os.PathLike) else ""
    reading = event == "open" and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
    # The temporary names of shutil.rmtree are relative to a directory's descriptor.
    inside = os.fsdecode(path).startswith(self.below) or (event != "open" and not Path(os.fsdecode(path)).is_absolute())
    if reading or not inside:
      return
    self.left -= 1
    if self.left < 0:
      self.dead = True
      raise Killed


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
  made = Killer()
  yield made
  made.disarm()


@pytest.fixture(params=["exchange", "two renames"])
def renaming(request, monkeypatch) -> str:
  if request.param == "two renames":
    monkeypatch.setattr(appear, "_exchanged", lambda *_: False)
  return request.param


def make(target: Path, text: str, *, overwrite: bool = True) -> None:
  """As export and slice do it: two files that say `text`."""
  place = Beside(target, "state.json", "thing")
  place.check()
  if target.exists() and place.committed():
    place.tidy()
    return
  with place.lock():
    before = appear.contents(target)
    if before is not None and not overwrite:
      raise InputError("there is one")
    state = place.state()
    if state and state.get("identity") == text:
      place.resume()
    else:
      place.begin(text, ["a", "b"])
    for name in ("a", "b"):
      (place.out / f"{name}.tmp").write_text(text)
      (place.out / f"{name}.tmp").rename(place.out / name)
    place.finish()
    place.put(before)


def content(directory: Path) -> dict[str, bytes] | None:
  if not directory.exists():
    return None
  return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def killed_everywhere(
  killer: Killer, root: Path, prepare: Callable[[Path], Path], run: Callable[[Path], None], new: dict[str, bytes]
) -> int:
  """Kills `run` before each of its changes and lets it run again. Returns how many there were."""
  for changes in itertools.count():
    where = root / str(changes)
    where.mkdir()
    target = prepare(where)
    old = content(target)
    killer.arm(where, changes)
    try:
      run(target)
    except Killed:
      pass
    finally:
      struck = killer.disarm()
    seen = content(target)
    assert seen in (old, new) or (seen is None and (where / f"{target.name}.partial/replaced").is_dir())
    run(target)
    assert content(target) == new
    assert sorted(path.name for path in where.iterdir()) == ["bystander", target.name]
    if not struck:
      return changes
  raise AssertionError


def bystander(where: Path) -> Path:
  """`X.replaced` was the name of something else once: nobody touches it."""
  (where / "bystander").mkdir()
  return where / "x"


@pytest.mark.usefixtures("renaming")
@pytest.mark.parametrize("there", [False, True])
def test_a_run_killed_before_any_change_ends_well_when_started_again(killer, tmp_path, there):
  def prepare(where: Path) -> Path:
    target = bystander(where)
    if there:
      make(target, "old")
    return target

  count = killed_everywhere(killer, tmp_path, prepare, lambda x: make(x, "new"), {"a": b"new", "b": b"new"})
  assert count > 15


def test_a_change_at_the_target_keeps_both(tmp_path):
  target, place = tmp_path / "x", Beside(tmp_path / "x", "state.json", "thing")
  with place.lock():
    place.begin("new", ["a"])
    (place.out / "a").write_text("new")
    place.finish()
    target.mkdir()
    (target / "mine").mkdir()
    with pytest.raises(beside.Kept, match=r"changed meanwhile .*the finished thing is kept in .*x\.partial"):
      place.put(None)
  assert content(place.out) == {"a": b"new"}
  assert (target / "mine").is_dir()


def link(root: Path) -> None:
  root.mkdir()
  (root / "link").symlink_to("/etc")


def directory(root: Path) -> None:
  (root / "empty").mkdir(parents=True)


def file(root: Path) -> None:
  root.touch()


@pytest.mark.parametrize(
  ("prepare", "said"), [(link, "holds link, which no"), (directory, "holds empty, which no"), (file, "not a directory")]
)
def test_what_no_run_left_is_refused_and_nothing_is_added_to_it(tmp_path, prepare, said):
  prepare(tmp_path / "x.partial")
  before = sorted(tmp_path.rglob("*"))
  with pytest.raises(InputError, match=said):
    make(tmp_path / "x", "new")
  assert sorted(tmp_path.rglob("*")) == before


def test_what_was_replaced_is_not_lost_when_something_else_takes_its_place(tmp_path):
  target = tmp_path / "x"
  make(target, "old")
  place = Beside(target, "state.json", "thing")
  with place.lock():
    place.begin("new", ["a", "b"])
    for name in ("a", "b"):
      (place.out / name).write_text("new")
    place.finish()
  target.rename(place.root / "replaced")  # Where a kill between the two renames leaves it.
  target.mkdir()
  with pytest.raises(InputError, match="holds replaced, which was at"):
    make(target, "new")
  target.rmdir()
  make(target, "new")
  assert content(target) == {"a": b"new", "b": b"new"}


@pytest.mark.slow  # Some sixty whole runs each.
@pytest.mark.usefixtures("renaming")
@pytest.mark.parametrize("there", [False, True])
def test_a_slice_killed_before_any_change_ends_well_when_started_again(killer, small_sources, tmp_path, there):
  source = small_sources["k3"]
  first, cut = (slicing.make_slice(source, slicing.Options(layers=(0, last), shard_bytes=300_000)) for last in (1, 3))
  slicing.write_slice(tmp_path / "undisturbed", cut, lambda _: None)

  def prepare(where: Path) -> Path:
    target = bystander(where)
    if there:
      slicing.write_slice(target, first, lambda _: None)
    return target

  def run(target: Path) -> None:
    if slicing.check_output(target, source, cut, overwrite=there):
      slicing.tidy(target)
    else:
      slicing.write_slice(target, cut, lambda _: None, overwrite=there)

  new = content(tmp_path / "undisturbed")
  assert new
  assert killed_everywhere(killer, tmp_path, prepare, run, new) > 15


@pytest.mark.slow  # Some sixty whole runs each.
@pytest.mark.usefixtures("renaming")
@pytest.mark.parametrize("there", [False, True])
def test_an_export_killed_before_any_change_ends_well_when_started_again(
  killer, small_sources, convert, tmp_path, there
):
  out = reader.open_output(convert(small_sources["k3"].directory))
  first, planned = (export.plan_export(out, None, shard_bytes=size) for size in (10**9, 200_000))

  def run(target: Path, planned=planned) -> None:
    if export.check_target(target, planned, overwrite=there):
      shards.tidy(target)
    else:
      export.export(target, planned, workers=1, overwrite=there)

  def prepare(where: Path) -> Path:
    target = bystander(where)
    if there:
      run(target, first)
    return target

  run(tmp_path / "undisturbed")
  new = content(tmp_path / "undisturbed")
  assert new
  assert killed_everywhere(killer, tmp_path, prepare, run, new) > 20
  with index.open_source(tmp_path / "undisturbed") as back:
    assert len(back.shards) == len(planned.shards) > 2
