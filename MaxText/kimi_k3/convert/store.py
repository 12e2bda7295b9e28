"""Where a conversion is written: a local directory, or a bucket through TensorStore's key-value stores.

Both know the same few operations, and `write` puts a file there whole or not at all. A bucket has no rename and no
lock, so its owners leave a sign of life instead.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kimi_k3.convert.progress import say
from kimi_k3.errors import InputError

SIGN_OF_LIFE_SECONDS = 20.0  # How often the owner of a bucket's lock renews it; three missed ones free it.
_REQUESTS = 256  # to a bucket at a time, where each is small
_REASON_LENGTH = 160  # characters of TensorStore's message, which names the file at every level and the reason last


class Locked(InputError):
  """Another process holds the lock."""


class Unwritable(InputError):
  """A disk or a bucket takes no more."""


class Store(abc.ABC):
  """Files under one root. Names are relative, with forward slashes."""

  url: str

  @abc.abstractmethod
  def read(self, name: str) -> bytes | None:
    """Content of a file; None if there is none."""

  def read_all(self, names: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
    """Each file's name and content, in order."""
    return ((name, self.read(name)) for name in names)

  @abc.abstractmethod
  def write(self, name: str, parts: Iterable[Any]) -> int:
    """Makes or replaces a file of these buffers, on stable storage when it returns, and returns its size in bytes."""

  @abc.abstractmethod
  def names(self, prefix: str = "") -> list[str]:
    """All files below, sorted; those that start with `prefix`, a directory with its slash or nothing."""

  @abc.abstractmethod
  def delete(self, prefix: str = "") -> None:
    """Removes all files below `prefix`, a directory with its slash, a file's name or nothing for everything."""

  def delete_all(self, names: Iterable[str]) -> None:
    """Removes files, in order where that matters to who is killed meanwhile."""
    for name in names:
      self.delete(name)

  @abc.abstractmethod
  def sizes(self, prefix: str) -> dict[str, int | None]:
    """Bytes of all files below a directory, given with its slash; None where the size is not told without reading."""

  @abc.abstractmethod
  def lock(self, name: str, *, shared: bool = False) -> contextlib.AbstractContextManager[None]:
    """Holds the lock `name` for the block; a shared one with others who share it. Raises Locked if another holds it."""

  def exists(self) -> bool:
    """Whether there is anything at all."""
    return bool(self.names())


def is_url(path: str) -> bool:
  """Whether a path names a bucket or another of TensorStore's stores rather than a local directory."""
  return "://" in path


def open_store(path: str | Path, *, rename: bool = True) -> Store:
  """Returns the store at a local path or at a URL such as gs://bucket/directory.

  Args:
    path: Where.
    rename: Whether a local file may be written under another name first, which a file system over a bucket would copy.

  Raises:
    InputError: for a URL that TensorStore does not know.
  """
  path = str(path)
  return BucketStore(path) if is_url(path) else LocalStore(Path(path), rename=rename)


def in_directory(url: str, name: str) -> str:
  """A name below a local path or a URL."""
  return f"{url.rstrip('/')}/{name}"


@contextlib.contextmanager
def _storing(where: str, what: str = "written") -> Iterator[None]:
  """Turns what a disk or a bucket answers into one line."""
  try:
    yield
  except InputError:  # Of the source, while its values were made: a ValueError too.
    raise
  except OSError as error:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = "the disk takes no more: make room" if full else "check the disk and the permissions"
    raise Unwritable(f"{where}: cannot be {what} ({error.strerror}): {advice}") from error
  except ValueError as error:  # TensorStore knows one kind of error. The reason stands last.
    raise Unwritable(f"{where}: cannot be {what}: ...{' '.join(str(error).split())[-_REASON_LENGTH:]}") from error


class LocalStore(Store):
  """A directory of the file system."""

  def __init__(self, root: Path, *, rename: bool = True):
    self.root, self.url, self.rename = root, str(root), rename

  def _path(self, name: str) -> Path:
    return self.root / name

  def read(self, name: str) -> bytes | None:
    """See Store."""
    with _storing(str(self._path(name)), "read"):
      try:
        return self._path(name).read_bytes()
      except (FileNotFoundError, NotADirectoryError):
        return None

  def write(self, name: str, parts: Iterable[Any]) -> int:
    """See Store. Each part is written before the next is asked for.

    A file appears by its renaming. Without that a killed write leaves a part of it, which the journal does not know.
    """
    path, total = self._path(name), 0
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{threading.get_ident()}") if self.rename else path
    with _storing(str(path)):
      path.parent.mkdir(parents=True, exist_ok=True)
      try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
          for part in parts:
            view = memoryview(part).cast("B")
            total += len(view)
            while view:
              view = view[os.write(descriptor, view) :]
          os.fsync(descriptor)
        finally:
          os.close(descriptor)
        if self.rename:
          temporary.rename(path)
      except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return total

  def names(self, prefix: str = "") -> list[str]:
    """See Store."""
    start = self._path(prefix) if prefix else self.root
    return sorted(
      str(Path(directory, file).relative_to(self.root)) for directory, _, files in os.walk(start) for file in files
    )

  def delete(self, prefix: str = "") -> None:
    """See Store."""
    path = self._path(prefix) if prefix else self.root
    with _storing(str(path)):
      if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        return
      path.unlink(missing_ok=True)
      with contextlib.suppress(OSError):  # Directories that it leaves empty go too.
        while (path := path.parent) != self.root:
          path.rmdir()

  def sizes(self, prefix: str) -> dict[str, int | None]:
    """See Store."""
    found: dict[str, int | None] = {}
    for name in self.names(prefix):
      with contextlib.suppress(FileNotFoundError):  # The temporary file of another part, renamed meanwhile.
        found[name] = self._path(name).stat().st_size
    return found

  def free(self) -> int:
    """Bytes that the file system has left for this user."""
    root = self.root.absolute()
    while not root.exists():
      root = root.parent
    return shutil.disk_usage(root).free

  @contextlib.contextmanager
  def lock(self, name: str, *, shared: bool = False) -> Iterator[None]:
    """See Store. The kernel lets go of it when the process ends, however it ends."""
    path = self._path(name)
    with _storing(str(path)):
      path.parent.mkdir(parents=True, exist_ok=True)
      descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
      try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
      except BlockingIOError as error:
        raise Locked(f"{self.url}: another conversion is writing there, wait for it or choose another OUT") from error
      except OSError as error:  # A file system without locks: nothing can be told.
        say(f"{self.url}: no file locks here ({error.strerror}): never start two on one part")
      if not path.exists() or path.stat().st_ino != os.fstat(descriptor).st_ino:  # Removed between opening and locking.
        raise Locked(f"{self.url}: another conversion was writing there and has just ended, start again")
      yield
    finally:
      os.close(descriptor)


class BucketStore(Store):
  """A prefix of an object store: whatever URL TensorStore's key-value stores take, such as gs:// or s3://."""

  def __init__(self, url: str):
    import tensorstore as ts

    self.url = url.rstrip("/")
    try:
      self._kvstore: Any = ts.KvStore.open(f"{self.url}/").result()
    except (ValueError, OSError) as error:
      raise InputError(f"{url}: cannot be opened: {' '.join(str(error).split())[:_REASON_LENGTH]}") from error

  def _await(self, future: Any, name: str, what: str = "written") -> Any:
    with _storing(f"{self.url}/{name}", what):
      return future.result()

  def read(self, name: str) -> bytes | None:
    """See Store."""
    result = self._await(self._kvstore.read(name), name, "read")
    return result.value if result.state == "value" else None

  def read_all(self, names: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
    """See Store. Many requests are under way at a time: each alone takes as long as hundreds of them."""
    for name, result in self._together(names, self._kvstore.read, "read"):
      yield name, result.value if result.state == "value" else None

  def _together(self, names: Iterable[str], ask: Callable[[str], Any], what: str) -> Iterator[tuple[str, Any]]:
    for some in itertools.batched(names, _REQUESTS):
      futures = [(name, ask(name)) for name in some]
      for name, future in futures:
        yield name, self._await(future, name, what)

  def write(self, name: str, parts: Iterable[Any]) -> int:
    """See Store. The whole object is held in memory until the bucket has it."""
    data = b"".join(bytes(memoryview(part).cast("B")) for part in parts)
    self._await(self._kvstore.write(name, data), name)
    return len(data)

  def names(self, prefix: str = "") -> list[str]:
    """See Store."""
    import tensorstore as ts

    interval = ts.KvStore.KeyRange(prefix, _after(prefix)) if prefix else None
    return sorted(key.decode() for key in self._await(self._kvstore.list(interval), prefix, "listed"))

  def delete(self, prefix: str = "") -> None:
    """See Store."""
    self.delete_all(self.names(prefix) if not prefix or prefix.endswith("/") else (prefix,))

  def delete_all(self, names: Iterable[str]) -> None:
    """See Store."""
    for _ in self._together(names, lambda name: self._kvstore.write(name, None), "removed"):
      pass

  def sizes(self, prefix: str) -> dict[str, int | None]:
    """See Store. An object is there whole or not at all."""
    return dict.fromkeys(self.names(prefix))

  @contextlib.contextmanager
  def lock(self, name: str, *, shared: bool = False) -> Iterator[None]:
    """See Store: an object that says who holds it, renewed as a sign of life. Shared locks are not looked at."""
    if shared:
      yield
      return
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "thread": threading.get_ident()}
    held, stop = self._take(name, owner), threading.Event()

    def renew() -> None:
      nonlocal held
      while not stop.wait(SIGN_OF_LIFE_SECONDS):
        with contextlib.suppress(ValueError, OSError):  # A bucket that is out of reach fails the writes, not this.
          renewed = self._kvstore.write(name, _signed(owner), if_equal=held).result().generation
          if not renewed:  # Removed at the end, or taken by another who saw no sign of life. Never taken back.
            return
          held = renewed

    beat = threading.Thread(target=renew, daemon=True)
    beat.start()
    try:
      yield
    finally:
      stop.set()
      beat.join()
      with contextlib.suppress(ValueError, OSError):
        self._kvstore.write(name, None, if_equal=held).result()

  def _take(self, name: str, owner: dict[str, Any]) -> bytes:
    """Takes a free lock, or one whose owner gives no sign of life, and returns the object's generation."""
    found = self._await(self._kvstore.read(name), name)
    if found.state == "value" and not _ended_here(found.value):
      wait = 3 * SIGN_OF_LIFE_SECONDS
      say(f"{self.url}: locked by {found.value.decode(errors='replace')}; waiting {wait:.0f} s for a sign of life")
      until, generation = time.monotonic() + wait, found.stamp.generation
      while time.monotonic() < until:
        time.sleep(min(1.0, wait / 10))
        now = self._await(self._kvstore.read(name), name)
        if now.state != "value":
          found = now
          break
        if now.stamp.generation != generation:
          raise Locked(f"{self.url}: another conversion is writing there, wait for it or choose another OUT")
    written = self._await(self._kvstore.write(name, _signed(owner), if_equal=found.stamp.generation), name)
    if not written.generation:  # Someone else was quicker.
      raise Locked(f"{self.url}: another conversion has just started there, wait for it or choose another OUT")
    return written.generation


def _after(prefix: str) -> str:
  """The first key after all that start with `prefix`."""
  return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _signed(owner: dict[str, Any]) -> bytes:
  return json.dumps(owner | {"time": time.time_ns()}).encode()


def _ended_here(content: bytes) -> bool:
  """Whether the owner was a process of this machine that has ended: no need to wait for it."""
  try:
    owner = json.loads(content)
    if owner["host"] != socket.gethostname():
      return False
    os.kill(owner["pid"], 0)
  except ProcessLookupError:
    return True
  except (ValueError, KeyError, TypeError, OSError):
    return False
  return False
