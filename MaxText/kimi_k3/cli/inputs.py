"""Files that users hand in and get back: prompts as JSON, results written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from kimi_k3.errors import InputError

_SHOWN = 5
_MAX_LINKS = 40  # As the kernel.
_PREFIX_LENGTH = 100  # characters of a temporary file's name


def read_rows(path: str) -> list[list[int]]:
  """Returns the id lists of a JSON file.

  Raises:
    InputError: if the file is missing or is not a non-empty list of non-empty lists of integers, naming the rows.
  """
  try:
    rows = json.loads(Path(path).read_text())
  except OSError as error:
    raise InputError(f"{path}: cannot be read: {error.strerror}") from error
  except (ValueError, RecursionError) as error:
    raise InputError(f"{path}: not JSON: {error}") from error
  if not isinstance(rows, list) or not rows:
    raise InputError(f"{path}: expected a non-empty list of lists of token ids, such as [[1, 2, 3], [4, 5]]")
  faulty = [i for i, row in enumerate(rows) if not _is_row(row)]
  if faulty:
    shown = ", ".join(map(str, faulty[:_SHOWN])) + (" ..." if len(faulty) > _SHOWN else "")
    raise InputError(f"{path}: row(s) {shown}: expected a non-empty list of integer token ids")
  return rows


def _is_row(row: object) -> bool:
  return isinstance(row, list) and bool(row) and all(isinstance(i, int) and not isinstance(i, bool) for i in row)


def check_vocabulary(rows: list[list[int]], vocab_size: int, source: str) -> None:
  """Raises InputError naming the first ids outside the vocabulary: they would be clamped to its last row in silence."""
  faults = [
    f"row {i} position {j}: {t}" for i, row in enumerate(rows) for j, t in enumerate(row) if not 0 <= t < vocab_size
  ]
  if faults:
    more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    raise InputError(f"{source}: token ids outside the vocabulary of {vocab_size}: {'; '.join(faults[:_SHOWN])}{more}")


def check_writable(path: str, outside: Sequence[str | Path] = ()) -> None:
  """Raises InputError, before the work rather than after it, if a result could not be written to `path`.

  Args:
    path: Where. A link stands for what it leads to. What is open already, such as /dev/stdout, a pipe or a terminal may
      be written to; a disk or a socket may not.
    outside: Directories that are only read: no result goes below them. URLs among them are left alone.
  """
  if descriptor_of(path) is not None:
    return
  target = _target(path)
  try:
    if target.is_dir():
      raise InputError(f"{path}: is a directory, expected a file to write")
    if not target.parent.is_dir():
      raise InputError(f"{path}: its directory does not exist")
    for directory in outside:
      if "://" not in str(directory) and target.is_relative_to(os.path.realpath(directory)):
        raise InputError(f"{path}: is inside {directory}, which is only read; choose another file")
    if _is_stream(target):
      if not os.access(target, os.W_OK):
        raise InputError(f"{path}: cannot be written: Permission denied")
      return
    if target.exists() and not target.is_file():
      raise InputError(f"{path}: a disk or a socket, expected a file to write")
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=_prefix(target)):
      pass
  except OSError as error:
    raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def _target(path: str) -> Path:
  """The file that a path leads to, which need not exist."""
  if not path:
    raise InputError("an empty path was given, expected a file to write")
  try:
    target = Path(path).resolve()
    loop = target.is_symlink()
  except (OSError, RuntimeError, ValueError) as error:
    reason = "a loop of links" if isinstance(error, RuntimeError) else getattr(error, "strerror", None) or str(error)
    raise InputError(f"{path}: cannot be written: {reason}") from error
  if loop:
    raise InputError(f"{path}: cannot be written: a loop of links")
  return target


def _is_stream(target: Path) -> bool:
  """Whether it is a pipe or a device without contents, such as a terminal: never replaced, only written to."""
  mode = target.stat().st_mode if target.exists() else 0
  return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def descriptor_of(path: str) -> int | None:
  """What a name such as /dev/stdout or /dev/fd/3 stands for in this process; None for any other path.

  Behind it may be a file that a shell has opened: replacing that file would lose what else goes there.
  """
  for _ in range(_MAX_LINKS):
    parent, name = os.path.split(os.path.abspath(path))  # noqa: PTH100 (follows no link)
    parent = os.path.realpath(parent)
    if parent == f"/proc/{os.getpid()}/fd" and name.isdigit():
      return int(name)
    path = os.path.join(parent, name)  # noqa: PTH118
    if not os.path.islink(path):  # noqa: PTH114
      return None
    path = os.path.join(parent, os.readlink(path))  # noqa: PTH115, PTH118
  return None


def _prefix(target: Path) -> str:
  return f".{target.name[:_PREFIX_LENGTH]}."


def write_whole(path: str, write: Callable[[BinaryIO], object]) -> None:
  """Writes a file so that it either appears complete or not at all. A pipe or a device gets all of it in the end.

  Raises:
    InputError: if it cannot be written, the disk being full among others.
  """
  descriptor = descriptor_of(path)
  target = None if descriptor is not None else _target(path)
  try:
    if target is None or _is_stream(target):
      _write_through(path if descriptor is None else descriptor, write)
    else:
      _write_file(target, write)
  except BrokenPipeError:
    raise
  except OSError as error:
    raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def _write_through(where: str | int, write: Callable[[BinaryIO], object]) -> None:
  with tempfile.TemporaryFile() as made:
    write(made)
    made.seek(0)
    sys.stdout.flush()  # What was printed before comes before.
    with open(where, "wb", closefd=not isinstance(where, int)) as stream:
      shutil.copyfileobj(made, stream)


def _write_file(target: Path, write: Callable[[BinaryIO], object]) -> None:
  descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=_prefix(target))
  try:
    with os.fdopen(descriptor, "wb") as file:
      write(file)
    Path(temporary).chmod(0o644)
    if target.exists() and not target.is_file():
      raise InputError(f"{target}: is no file any more, not replaced")
    Path(temporary).replace(target)
  except BaseException:
    Path(temporary).unlink(missing_ok=True)
    raise
