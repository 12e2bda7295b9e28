"""A conversion under way: its plan, its journal and its locks, kept so that it can be stopped at any moment.

    rename mode   OUT.partial/plan.json      OUT.partial/journal/      OUT.partial/out/ becomes OUT at the end
    marker mode   OUT/.unfinished/plan.json  OUT/.unfinished/journal/  OUT itself; OUT/0/commit_success.txt comes last

The journal has a file a slice, written when the slice's data file is on stable storage: its checksums, and which state
of which shards it was made from. A kill loses the slices under way and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from kimi_k3.convert.slices import DATA_DIRECTORY, Slices, file_name
from kimi_k3.convert.store import Store, in_directory, is_url, open_store
from kimi_k3.errors import InputError

Commit = Literal["rename", "marker"]
ITEMS = "0/items"  # A step directory and its item, as Orbax and MaxText name them.
PARTIAL_SUFFIX = ".partial"
STATE_DIRECTORY = ".unfinished"
PLAN = "plan.json"
# Orbax's name: its loader looks into the item's directory, its checkpoint manager into the step's. The last commits.
MARKERS = (f"{ITEMS}/commit_success.txt", "0/commit_success.txt")
_JOURNAL = "journal"
_HASHES = "hashes"
_LOCK = "lock"
REPLACED = "replaced"  # What was at OUT before, between the two renames.
# A removal, or the very first write, that was killed leaves some of them.
_DIRECTORY = "directory"  # The inode of what becomes OUT: after a kill it tells which of the two that is.
_PARTS = "parts"
_OURS = (_LOCK, PLAN, _DIRECTORY, f"{_PARTS}/", f"{_JOURNAL}/", f"{_HASHES}/", "out/", f"{REPLACED}/")


@dataclasses.dataclass(frozen=True)
class Entry:
  """What the journal says of a slice: its checksums, and a stamp of each shard it was made from."""

  checksums: tuple[int, ...]
  shards: Mapping[str, str]


class Unfinished:
  """The state of one conversion beside (or inside) its OUT."""

  def __init__(self, out: str, commit: Commit):
    self.out, self.commit = out, commit
    where = in_directory(out, STATE_DIRECTORY) if commit == "marker" else out.rstrip("/") + PARTIAL_SUFFIX
    self.where = where
    self.state: Store = open_store(where, rename=commit == "rename")
    self.data: Store = open_store(out if commit == "marker" else in_directory(where, "out"), rename=commit == "rename")

  def plan(self) -> dict[str, Any] | None:
    """What is being converted here; None when nothing is.

    Raises:
      InputError: if there are files that no conversion left, or its plan cannot be read.
    """
    content = self.state.read(PLAN)
    if content is not None and not content.endswith(b"}") and not self.state.names(f"{_JOURNAL}/"):
      content = None  # Killed while it was written, before anything else.
    if content is None:
      strangers = [name for name in self.state.names() if not name.startswith(_OURS)]
      if strangers:
        raise InputError(
          f"{self.where}: holds {strangers[0]} but no {PLAN}: no conversion under way; remove it or choose another OUT"
        )
      return None
    try:
      plan = json.loads(content)
    except (ValueError, RecursionError) as error:
      raise InputError(f"{self.where}/{PLAN}: cannot be read ({error}): remove {self.where} and start again") from error
    if not isinstance(plan, dict):
      raise InputError(f"{self.where}/{PLAN}: not an object: remove {self.where} and start again")
    return plan

  def leftovers(self) -> bool:
    """Whether there are files without a plan: of a killed removal or, in marker mode, of what OUT held before."""
    names = [name for name in self.state.names() if not name.startswith((_LOCK, PLAN, _DIRECTORY, _PARTS))]
    return bool(names) or (self.commit == "marker" and any(self._data_names()))

  def empty(self) -> bool:
    """Whether there is nothing but locks."""
    return all(name.startswith(_LOCK) for name in self.state.names())

  def over(self) -> bool:
    """Whether all that is there is what a kill right after the commit left of the state."""
    names = self.state.names()
    if self.commit == "marker":
      return PLAN not in names and bool(names) and not (is_url(self.out) and self.empty())
    return bool(names) and not self.data.exists() and all(name.startswith(_OURS) for name in names)

  def committed(self) -> bool:
    """Whether OUT is what was made here: a kill came between the commit and the removal of the state."""
    if is_url(self.out) or self.commit == "marker":
      return False
    recorded = self.state.read(_DIRECTORY)
    return recorded is not None and Path(self.out).exists() and recorded == _inode(Path(self.out))

  def _data_names(self) -> list[str]:
    return [name for name in self.data.names() if not name.startswith(f"{STATE_DIRECTORY}/")]

  def begin(self, plan: Mapping[str, Any]) -> None:
    """Records what is being converted."""
    if self.commit == "rename":
      made = Path(self.where) / "out"
      made.mkdir(parents=True, exist_ok=True)
      self.state.write(_DIRECTORY, [_inode(made)])
    self.state.write(PLAN, [json.dumps(plan, indent=2).encode()])

  def clear(self) -> None:
    """Removes everything but the lock: the plan first, so that what is left is never taken for a conversion."""
    self._bring_back()
    self.state.delete(PLAN)
    if self.commit == "marker":
      for marker in reversed(MARKERS):  # First: from here on OUT is not complete.
        self.data.delete(marker)
      self.data.delete_all(self._data_names())
    self.state.delete_all(name for name in self.state.names() if not name.startswith(_LOCK))

  def _bring_back(self) -> None:
    """What OUT held, where a kill between the two renames of the commit left it here."""
    out, replaced = Path(self.out), Path(self.where) / REPLACED
    if self.commit == "rename" and replaced.is_dir() and not out.exists():
      replaced.rename(out)

  def remove(self) -> None:
    """Removes the whole state, after the commit."""
    self.state.delete(PLAN)
    self.state.delete()

  @contextlib.contextmanager
  def lock(self, part: tuple[int, int] | None) -> Iterator[None]:
    """Holds the conversion, or one part of it.

    Raises:
      Locked: if another process holds it, this part of it or, for the whole, any part.
    """
    with contextlib.ExitStack() as stack:
      stack.enter_context(self.state.lock(_LOCK, shared=part is not None))
      if part is not None:
        stack.enter_context(self.state.lock(f"{_LOCK}-{part[0]}-of-{part[1]}"))
      yield

  def begin_part(self, part: tuple[int, int]) -> None:
    """Records that a part was begun, so that what is missing can be named."""
    self.state.write(f"{_PARTS}/{part[0]}-of-{part[1]}", [b""])

  def part_counts(self) -> list[int]:
    """Into how many parts the work was shared out: the n of every part i/n that was begun."""
    names = (name.removeprefix(f"{_PARTS}/").split("-of-") for name in self.state.names(f"{_PARTS}/"))
    return sorted({int(name[1]) for name in names if len(name) == 2 and name[1].isdigit()})

  def entries(self, work: Slices) -> dict[int, Entry]:
    """The slices that are done: journaled, and with a data file of the right size. What is torn counts as not done."""
    found, sizes = {}, self.data.sizes(f"{ITEMS}/{DATA_DIRECTORY}/")
    for name, content in self.state.read_all(self._journaled()):
      number, entry = _number(name), _entry(content)
      file = f"{ITEMS}/{file_name(number)}"
      if entry is None or number >= len(work) or len(entry.checksums) != work.num_chunks_of(number):
        continue
      if file in sizes and sizes[file] in (None, work.size(number)):
        found[number] = entry
    return found

  def num_journaled(self) -> int:
    """How many slices have an entry, by their names alone."""
    return len(self._journaled())

  def _journaled(self) -> list[str]:
    return [name for name in self.state.names(f"{_JOURNAL}/") if _number(name) >= 0]

  def add(self, number: int, entry: Entry) -> None:
    """Writes down that a slice is done."""
    content = json.dumps({"checksums": list(entry.checksums), "shards": dict(entry.shards)})
    self.state.write(f"{_JOURNAL}/{number:06d}.json", [content.encode()])

  def hashes(self) -> dict[str, tuple[str, str]]:
    """Of each shard that is hashed: its stamp then, and the hex SHA-256 of its bytes."""
    found = {}
    for name in self.state.names(f"{_HASHES}/"):
      with contextlib.suppress(ValueError, KeyError, TypeError):
        value = json.loads(self.state.read(name) or b"")
        found[str(value["shard"])] = (str(value["stamp"]), str(value["sha256"]))
    return found

  def add_hash(self, number: int, shard: str, stamp: str, sha256: str) -> None:
    """Writes down the hash of a shard."""
    content = json.dumps({"shard": shard, "stamp": stamp, "sha256": sha256})
    self.state.write(f"{_HASHES}/{number:06d}.json", [content.encode()])


def _inode(directory: Path) -> bytes:
  return str(directory.stat().st_ino).encode()


def _number(name: str) -> int:
  """The slice of a journal entry; -1 for a file that is none."""
  number = name.removeprefix(f"{_JOURNAL}/").removesuffix(".json")
  return int(number) if name.endswith(".json") and number.isascii() and number.isdigit() else -1


def _entry(content: bytes | None) -> Entry | None:
  try:
    value = json.loads(content or b"")
    sums, shards = value["checksums"], value["shards"]
  except (ValueError, KeyError, TypeError, RecursionError):
    return None
  if not isinstance(sums, list) or not all(type(s) is int and 0 <= s < 2**32 for s in sums):
    return None
  if not isinstance(shards, dict) or not all(isinstance(stamp, str) for stamp in shards.values()):
    return None
  return Entry(tuple(sums), shards)
