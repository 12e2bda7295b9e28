"""A directory that appears at a path all at once, in the place of what was there, and only of that.

What stands at the path is looked at before the work and again when it is done: nothing that someone put there meanwhile
is replaced. Linux exchanges two directories in one step, so that at no moment there is neither the old nor the new one.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from kimi_k3.errors import InputError

Contents = frozenset[tuple[str, int, int]] | None

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# A file system without it, or a kernel.
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def local(path: str | Path) -> Path:
  """Returns the absolute form of a path that a user gave, links followed.

  Raises:
    InputError: for an empty path, a loop of links, a name that is too long, a current directory that is gone.
  """
  if not str(path):
    raise InputError("an empty path was given, expected a directory")
  try:
    resolved = Path(path).resolve()
    resolved.exists()
    if Path(path).is_symlink() and resolved.is_symlink():
      raise InputError(f"{path}: a loop of links")
  except RuntimeError as error:
    raise InputError(f"{path}: a loop of links") from error
  except (OSError, ValueError) as error:
    reason = getattr(error, "strerror", None) or str(error)
    raise InputError(f"{path}: no path that can be used ({reason})") from error
  return resolved


def contents(path: Path) -> Contents:
  """What is at a path: of everything below, its name, inode and time of modification. None where nothing is."""
  if not path.exists() and not path.is_symlink():
    return None
  found = {(".", path.lstat().st_ino, 0)}
  for directory, directories, files in os.walk(path):
    for name in (*directories, *files):
      status = Path(directory, name).lstat()
      entry = str(Path(directory, name).relative_to(path))
      # A directory's time changes with what it holds, which is listed itself.
      found.add((entry, status.st_ino, 0 if name in directories else status.st_mtime_ns))
  return frozenset(found)


def put(made: Path, target: Path, before: Contents, aside: Path) -> Path | None:
  """Lets `made` appear at `target`, and returns where that put what was there.

  Args:
    made: The finished directory, on the file system of `target`.
    target: Where it shall be.
    before: `contents(target)` from before the work.
    aside: A name on that file system for what is replaced, not in use. Only where nothing can be exchanged in one step:
      otherwise what was there is at `made` then.

  Raises:
    InputError: if something else is at `target` now, or it cannot be replaced; then nothing has changed.
  """
  now = contents(target)
  if now != before:
    news = sorted({entry[0] for entry in (now or frozenset()) ^ (before or frozenset())} - {"."})[:3]
    raise InputError(
      f"{target}: changed meanwhile ({', '.join(news) or 'another directory'}), so it is not replaced: move "
      "away what is there and start again"
    )
  try:
    if before is None:
      made.rename(target)
      return None
    if _exchanged(made, target):
      return made
    target.rename(aside)
    try:
      made.rename(target)
    except BaseException:
      aside.rename(target)
      raise
  except OSError as error:
    raise InputError(f"{target}: cannot be made ({error.strerror})") from error
  finally:
    sync(target.parent)
  return aside


def _exchanged(a: Path, b: Path) -> bool:
  """Exchanges two directories in one step; False where the system cannot."""
  try:
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
  except (OSError, AttributeError):
    return False
  if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
    return True
  code = ctypes.get_errno()
  if code in _NO_EXCHANGE:
    return False
  raise OSError(code, os.strerror(code), str(b))


def sync(directory: Path) -> None:
  """Puts a directory's entries on stable storage, where the file system can."""
  descriptor = os.open(directory, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  except OSError:
    pass  # Some file systems know no such thing.
  finally:
    os.close(descriptor)
