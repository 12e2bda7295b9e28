"""Completions as lines of JSON, one for each prompt, appended as rows finish, through any number of kills.

FILE.jsonl holds completions and nothing else. Beside it:

    FILE.jsonl.state.json  what it is made of: a digest of each input line, and the settings; before the first row
    FILE.jsonl.lock        held while a run writes; gone when the run ends by itself
    FILE.jsonl.new         while the file is put in order; takes its place whole

What a kill leaves is whole lines and at most one torn one at the end, which is cut off.
"""

from __future__ import annotations

import array
import base64
import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from kimi_k3.errors import InputError
from kimi_k3.generate.batch_input import BLANK, DIGEST_BYTES, PromptFile, encode_digests, named_lines

SCHEMA = 1
SYNC_SECONDS = 10.0  # a power cut loses what finished since; a kill of the process loses nothing
MISSING, OK, FAILED = range(3)
_STATE, _LOCK, _NEW = ".state.json", ".lock", ".new"
_SUFFIXES = (_STATE, _STATE + _NEW, _LOCK, _NEW)
_REASONS = {"stop": OK, "length": OK, "error": FAILED}
_SHOWN = 4
_QUOTED = 60  # characters of a setting in a message


@dataclasses.dataclass(frozen=True)
class State:
  """What a file of completions is made of.

  Attributes:
    digests: Of the input's lines.
    settings: By name; what changes tokens.
  """

  digests: bytes
  settings: Mapping[str, str]


class Completions:
  """A file of completions and which rows it holds.

  Attributes:
    path: As it was given.
    status: MISSING, OK or FAILED, of each input line.
    torn: Bytes of a torn last line, which `repair` cuts off.
  """

  def __init__(self, path: str):
    """Opens nothing. A link stands for what it leads to, in every name made of it.

    Raises:
      InputError: if links lead in a circle.
    """
    try:
      self.path, self._target = path, Path(path).resolve()
    except (OSError, RuntimeError) as error:
      raise InputError(f"{path}: cannot be written: a loop of links") from error
    except ValueError as error:  # a NUL in it
      raise InputError(f"{path!r}: cannot be written: {error}") from error
    self.status = bytearray()
    self.torn = 0
    self._offsets = array.array("q")
    self._size = 0
    self._descriptor: int | None = None
    self._writing = threading.Lock()
    self._synced = time.monotonic()

  @property
  def beside(self) -> list[Path]:
    """Names of files that come and go beside it."""
    return [self._beside(suffix) for suffix in _SUFFIXES]

  @property
  def done(self) -> int:
    """Rows that are there, failed ones included."""
    return len(self.status) - self.status.count(MISSING)

  @property
  def failed(self) -> list[int]:
    """Input lines whose rows ended as "error"."""
    return [index for index, status in enumerate(self.status) if status == FAILED]

  @contextlib.contextmanager
  def locked(self) -> Iterator[None]:
    """Keeps other runs out. The kernel lets go of it when the process ends, however it ends.

    Raises:
      InputError: if another run writes there, or nothing can be locked.
    """
    path = self._beside(_LOCK)
    with self._writes(path):
      descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        raise InputError(f"{self.path}: another run is writing there: wait for it or choose another --out") from error
      except OSError as error:
        raise InputError(
          f"{self.path}: cannot be locked ({error.strerror}), so two runs could write at once: choose an --out on "
          "another file system"
        ) from error
      if not _is_at(descriptor, path):  # removed since it was opened
        raise InputError(f"{self.path}: another run was writing there and has just ended: start again")
      try:
        yield
      finally:
        with contextlib.suppress(OSError):
          if _is_at(descriptor, path):  # else it is another run's
            path.unlink()
    finally:
      os.close(descriptor)

  def look(self, prompts: PromptFile, settings: Mapping[str, str], *, mended: bool = False) -> None:
    """Finds out which rows are there. Writes nothing.

    Args:
      prompts: The input.
      settings: By name; what changes tokens.
      mended: Whether lines may have changed whose rows ended as "error" or are missing; `repair` then drops the former.

    Raises:
      InputError: if the file is not made of this input with these settings, or holds what no run wrote.
    """
    self.status = bytearray(len(prompts.kinds))
    self._offsets = array.array("q", [-1]) * len(prompts.kinds)
    self._size = self.torn = 0
    state, held = self._state(), self._held()
    if not held:
      return
    if state is None:
      raise InputError(
        f"{self.path}: holds {held} bytes, and no {self._beside('.state.json').name} stands beside it: not made by "
        "`batch`; choose another --out"
      )
    self._check(state, settings)
    changed = self._changed(state, prompts)
    if changed and not mended:
      raise self._another_input(prompts, changed)
    self._scan(prompts, changed)
    if done := [index for index in changed if self.status[index] == OK]:
      raise self._another_input(prompts, done)

  def repair(self, prompts: PromptFile, settings: Mapping[str, str], *, drop_failed: bool = False) -> None:
    """Makes the file ready to be appended to, after `look` and under the lock.

    Args:
      prompts: As `look` was given.
      settings: The same.
      drop_failed: Whether rows that ended as "error" are to be run again: their lines vanish.
    """
    state = State(bytes(prompts.digests), settings)
    with self._writes(self._target):
      self._beside(_NEW).unlink(missing_ok=True)
      if self.torn:
        os.truncate(self._target, self._size)
      if drop_failed and FAILED in self.status:
        for index in self.failed:
          self.status[index], self._offsets[index] = MISSING, -1
        self._rewrite()
      if self._state() != state:
        self._save(state)
      self._descriptor = os.open(self._target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
      self._sync()

  def append(self, completion: Mapping[str, Any]) -> None:
    """Writes a row, whole.

    Raises:
      InputError: if it cannot be written, the disk being full among others; what is there stays.
    """
    assert self._descriptor is not None
    index = completion["index"]
    assert self.status[index] == MISSING, index
    line = json.dumps(completion, ensure_ascii=False).encode() + b"\n"
    with self._writing, self._writes(self._target):
      self._check_link(self._descriptor)
      try:
        left = memoryview(line)
        while left:
          left = left[os.write(self._descriptor, left) :]
      except OSError:
        with contextlib.suppress(OSError):  # else the next run cuts it off
          os.ftruncate(self._descriptor, self._size)
        raise
      self._offsets[index] = self._size
      self._size += len(line)
      self.status[index] = _REASONS[completion["finish_reason"]]
      if time.monotonic() - self._synced > SYNC_SECONDS:
        self._sync()

  def close(self) -> None:
    """Brings all rows to the disk. No row can be written after that."""
    with self._writing, self._writes(self._target):
      if self._descriptor is not None:
        self._sync()
        self._check_link(self._descriptor)
        descriptor, self._descriptor = self._descriptor, None
        os.close(descriptor)

  def freeze(self, timeout_seconds: float = 1.0) -> None:
    """Brings all rows to the disk and keeps other threads from writing ever after: the process is about to end."""
    if self._writing.acquire(timeout=timeout_seconds) and self._descriptor is not None:
      with contextlib.suppress(OSError):
        os.fsync(self._descriptor)

  def sort(self) -> None:
    """Puts the rows in the order of the input, if they are not, after `close`. The file is whole at every moment."""
    assert self._descriptor is None
    places = [place for place in self._offsets if place >= 0]
    if places != sorted(places):
      with self._writes(self._target):
        self._rewrite()

  def _check_link(self, descriptor: int) -> None:
    """Refuses to go on with a file that has lost its name: another run may write under it by now."""
    if not os.fstat(descriptor).st_nlink:
      raise InputError(
        f"{self.path}: was removed or replaced while this run wrote to it, and {self.done} rows with it: start again"
      )

  def _beside(self, suffix: str) -> Path:
    return self._target.with_name(self._target.name + suffix)

  def _held(self) -> int:
    """Bytes of the file, 0 if there is none."""
    try:
      return self._target.stat().st_size
    except FileNotFoundError:
      return 0

  def _state(self) -> State | None:
    path = self._beside(_STATE)
    try:
      found = json.loads(path.read_bytes())
      if found["schema"] != SCHEMA:
        raise InputError(f"{path}: schema {found['schema']!r}, expected {SCHEMA}: made by another version of kimi-k3")
      state = State(base64.b64decode(found["line_digests"], validate=True), found["settings"])
      if len(state.digests) != found["lines"] * DIGEST_BYTES or not isinstance(state.settings, dict):
        raise ValueError(f"{found['lines']} lines")
    except FileNotFoundError:
      return None
    except OSError as error:
      raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except InputError:
      raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
      raise InputError(f"{path}: not what `batch` wrote ({error}): choose another --out") from error
    return state

  def _check(self, state: State, settings: Mapping[str, str]) -> None:
    before, now = state.settings, settings
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if names:
      said = [
        f"{name} was {_short(before.get(name))}, is {_short(now.get(name))}" for name in names[:_SHOWN]
      ]  # fmt: skip
      more = f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
      raise InputError(
        f"{self.path}: was made with other settings: {'; '.join(said)}{more}: give the same or choose another --out"
      )

  def _changed(self, state: State, prompts: PromptFile) -> list[int]:
    """Lines that are not what they were."""
    if prompts.digests.startswith(state.digests):
      return []
    old, new = len(state.digests) // DIGEST_BYTES, len(prompts.kinds)
    places = [slice(i * DIGEST_BYTES, (i + 1) * DIGEST_BYTES) for i in range(min(old, new))]
    changed = [i for i, place in enumerate(places) if state.digests[place] != prompts.digests[place]]
    if new < old:
      raise self._another_input(prompts, changed, f"it had {old} lines, now {new}")
    return changed

  def _another_input(self, prompts: PromptFile, changed: list[int], lost: str = "") -> InputError:
    said = f"{named_lines(changed, len(changed))} changed" if changed else lost
    return InputError(
      f"{self.path}: was made of another input than {prompts.path}: {said}: lines may be appended, and with "
      "--retry-errors those mended whose rows failed: put it back or choose another --out"
    )

  def _scan(self, prompts: PromptFile, changed: Collection[int]) -> None:
    """Reads the file. Lines that changed may be blank now."""
    changed = frozenset(changed)
    try:
      with self._target.open("rb") as file:
        for number, line in enumerate(file, 1):
          if not line.endswith(b"\n"):
            self.torn = len(line)
            return
          try:
            row = json.loads(line)
            index, status = row["index"], _REASONS[row["finish_reason"]]
            blank = prompts.kinds[index] == BLANK and index not in changed
            if isinstance(index, bool) or blank or index < 0:
              raise ValueError
          except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise InputError(
              f"{self.path}: line {number} is no completion of {prompts.path}: remove the line, or choose another --out"
            ) from error
          if self.status[index] != MISSING:
            raise InputError(
              f"{self.path}: line {number} completes line {index + 1} of {prompts.path} a second time: remove one of "
              "the two"
            )
          self.status[index], self._offsets[index] = status, self._size
          self._size += len(line)
    except OSError as error:
      raise InputError(f"{self.path}: cannot be read: {error.strerror}") from error

  def _rewrite(self) -> None:
    """Replaces the file by its rows that have a place, in the order of the input."""
    path, size, offsets = self._beside(_NEW), 0, array.array("q", self._offsets)
    try:
      with self._target.open("rb") as old, path.open("wb") as new:
        for index, place in enumerate(self._offsets):
          if place >= 0:
            old.seek(place)
            line = old.readline()
            new.write(line)
            offsets[index] = size
            size += len(line)
        new.flush()
        os.fsync(new.fileno())
      shutil.copymode(self._target, path)
      path.replace(self._target)
    except BaseException:
      path.unlink(missing_ok=True)
      raise
    self._size, self._offsets = size, offsets
    self._sync_directory()

  def _save(self, state: State) -> None:
    value = {
      "schema": SCHEMA,
      "lines": len(state.digests) // DIGEST_BYTES,
      "settings": dict(state.settings),
      "line_digests": encode_digests(state.digests),
    }
    path = self._beside(_STATE)
    new = path.with_name(path.name + _NEW)
    with new.open("w") as file:
      json.dump(value, file, indent=1)
      file.flush()
      os.fsync(file.fileno())
    new.replace(path)
    self._sync_directory()

  def _sync(self) -> None:
    assert self._descriptor is not None
    os.fsync(self._descriptor)
    self._synced = time.monotonic()

  def _sync_directory(self) -> None:
    descriptor = os.open(self._target.parent, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)

  @contextlib.contextmanager
  def _writes(self, path: Path) -> Iterator[None]:
    try:
      yield
    except OSError as error:
      kept = f"; {self.done} rows are kept, the same command goes on from there" if self.done else ""
      raise InputError(f"{path}: cannot be written: {error.strerror}{kept}") from error


def _is_at(descriptor: int, path: Path) -> bool:
  try:
    return os.path.samestat(os.fstat(descriptor), path.stat())
  except FileNotFoundError:
    return False


def _short(value: str | None) -> str:
  if value is None:
    return "not given"
  return value if len(value) <= _QUOTED else f"{value[:_QUOTED]}..."
