"""A directory that is made beside its target and appears there when it is complete, whenever the work is killed.

    TARGET.partial/STATE       what is being made, and the names of its files
    TARGET.partial/out/        becomes TARGET
    TARGET.partial/replaced/   what was at TARGET, until it is removed

Nothing is removed here that the state does not name, so a directory of somebody else is refused, not emptied.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kimi_k3.convert import appear, store
from kimi_k3.convert.faults import listed
from kimi_k3.convert.progress import say
from kimi_k3.convert.unfinished import PARTIAL_SUFFIX
from kimi_k3.errors import InputError

_LOCK, _OUT, _REPLACED = "lock", "out", "replaced"
_TEMPORARY = ".tmp"  # What follows the name of a file that is being written.


class Kept(InputError):
  """The work is done and kept, but cannot appear at its target."""


class Beside:
  """The directory beside `target`.

  Attributes:
    target: Absolute.
    root: Beside it.
    out: Where to write.
    notes: Of the work, for what a resumed run must know of each file; not part of the result.
  """

  def __init__(self, target: Path, state: str, what: str):
    """Touches nothing.

    Args:
      target: Where the directory shall appear, as `appear.local` returns it.
      state: Name of the state's file.
      what: Is made, for messages: "export".

    Raises:
      InputError: if `target` is too long a name for what stands beside it.
    """
    self.target, self.root = target, appear.local(target.with_name(target.name + PARTIAL_SUFFIX))
    self.out, self.notes, self._replaced = self.root / _OUT, self.root / "notes", self.root / _REPLACED
    self._state, self._what = state, what
    self._store = store.LocalStore(self.root)

  def state(self) -> dict[str, Any] | None:
    """What `begin` recorded: `identity`, `files` and more. None if there is none; empty if it cannot be read."""
    content = self._store.read(self._state)
    if content is None:
      return None
    try:
      value = json.loads(content)
      return value if isinstance(value["files"], dict) else {}
    except (ValueError, KeyError, TypeError, RecursionError):
      return {}

  def check(self) -> None:
    """Raises InputError if anything is there that no run of ours left."""
    if not os.path.lexists(self.root):
      return
    if self.root.is_symlink() or not self.root.is_dir():
      raise InputError(f"{self.root}: not a directory, where the {self._what} is made; remove it or choose another")
    if self.committed():
      return
    state = self.state()
    ours = {_LOCK, self._state} | ({_OUT, _REPLACED, self.notes.name} if state else set())
    odd = [name for name in _names(self.root) if name not in ours and not name.startswith(self._state + _TEMPORARY)]
    odd += [f"{_OUT}/{name}" for name in self._strangers((state or {}).get("files", {}))]
    if self._replaced.exists() and os.path.lexists(self.target):
      odd.append(f"{_REPLACED}, which was at {self.target} before what is there now")
    if odd:
      raise InputError(
        f"{self.root}: holds {listed(odd)}, which no unfinished {self._what} left: remove it or choose another target"
      )

  def _strangers(self, files: Iterable[str]) -> list[str]:
    """Names in `out` that are neither files of ours nor on their way to be."""
    if self.out.is_symlink() or (self.out.exists() and not self.out.is_dir()):
      return ["."]
    known, found = set(files), _names(self.out)
    return [n for n in found if n not in known and n.partition(_TEMPORARY)[0] not in known]

  def committed(self) -> bool:
    """Whether what stands at the target came from here: only the removal of what was there is left to do."""
    made = (self.state() or {}).get("made")
    return made is not None and made == _inode(self.target)

  @contextlib.contextmanager
  def lock(self) -> Iterator[None]:
    """Holds the place for the block. What a kill between two renames took away is at the target again then.

    Raises:
      InputError: if another run holds it, or if it is not ours.
    """
    self.check()
    with contextlib.ExitStack() as stack:
      try:
        stack.enter_context(self._store.lock(_LOCK))
      except store.Locked as error:
        raise InputError(
          f"{self.root}: another {self._what} is being written there, wait for it or choose another target"
        ) from error
      self.check()
      if self._replaced.is_dir() and not os.path.lexists(self.target):
        self._replaced.rename(self.target)
        appear.sync(self.target.parent)
      if self.committed():
        self._remove_replaced()
        self._clear()
        self._store.delete(self._state)
      yield

  def begin(self, identity: Any, files: Iterable[str]) -> None:
    """Removes what is left of other work and records what is made, before anything of it is."""
    self._clear()
    self._write({"identity": identity, "files": dict.fromkeys(files), "made": None})
    self.out.mkdir()

  def finish(self, sums: dict[str, Any] | None = None) -> None:
    """Records that `out` is complete, with what is known of each file, and puts it on stable storage."""
    state = self.state()
    assert state
    odd = sorted(set(state["files"]) ^ set(_names(self.out)))
    if odd:
      raise InputError(f"{self.out}: {listed(odd)} appeared or vanished while the {self._what} was written")
    appear.sync(self.out)
    self._write(state | {"files": sums or state["files"], "made": _inode(self.out)})

  def put(self, before: appear.Contents) -> None:
    """Lets `out` appear at the target, after `finish`, and removes what was there.

    Args:
      before: `appear.contents` of the target from before the work.

    Raises:
      Kept: if the target is not as it was.
    """
    try:
      appear.put(self.out, self.target, before, self._replaced)
    except InputError as error:
      raise Kept(f"{error}; the finished {self._what} is kept in {self.root}") from error
    self.remove()

  def remove(self) -> None:
    """Removes everything, the state after what it names, so that what a kill leaves is told from strangers."""
    if self.committed():
      self._remove_replaced()
    with contextlib.suppress(OSError):
      self._clear()
    for path in (*self.root.glob(f"{self._state}*"), self.root / _LOCK):
      with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
      self.root.rmdir()
    if self.root.exists():
      say(f"{self.root}: holds what could not be removed ({listed(_names(self.root))}): look at it and remove it")

  def tidy(self) -> None:
    """Removes what a kill after the commit left, and nothing else."""
    if self.root.is_dir() and (self.committed() or set(_names(self.root)) <= {_LOCK}):
      with contextlib.suppress(InputError), self.lock():
        self.remove()

  def resume(self) -> None:
    """Goes on with the work that `begin` recorded: files that were being written are removed."""
    self.out.mkdir(exist_ok=True)
    files = (self.state() or {}).get("files", {})
    for name in _names(self.out):
      if name not in files:
        (self.out / name).unlink()

  def _remove_replaced(self) -> None:
    """After the commit: what was at the target, which is still in `out` right after an exchange."""
    for path in (self.out, self._replaced):
      shutil.rmtree(path, ignore_errors=True)

  def _clear(self) -> None:
    """Removes `out` and `notes`, in them what the state names."""
    files = (self.state() or {}).get("files", {})
    strangers = self._strangers(files)
    for name in _names(self.out):
      if name not in strangers:
        (self.out / name).unlink()
    if self.out.exists():
      self.out.rmdir()
    if self.notes.exists():
      shutil.rmtree(self.notes)

  def _write(self, state: dict[str, Any]) -> None:
    self._store.write(self._state, [json.dumps(state).encode()])


def _names(directory: Path) -> list[str]:
  """Everything in a directory, files or not; nothing where there is none."""
  return sorted(os.listdir(directory)) if directory.is_dir() else []  # noqa: PTH208 (names alone)


def _inode(path: Path) -> int | None:
  return path.stat().st_ino if path.exists() else None
