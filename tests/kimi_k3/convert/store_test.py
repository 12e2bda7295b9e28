"""Both kinds of stores keep the same promises: a file is there whole or not at all, and a lock has one holder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from kimi_k3.convert import store
from kimi_k3.convert.store import BucketStore, LocalStore, Locked, Store, Unwritable, in_directory, open_store
from kimi_k3.errors import InputError


@pytest.fixture(params=["directory", "without renames", "bucket"])
def made(request, tmp_path) -> Store:
  """A store of each kind, empty. TensorStore's file driver stands in for a bucket."""
  if request.param == "bucket":
    return open_store(f"file://{tmp_path}/held")
  return open_store(tmp_path / "held", rename=request.param == "directory")


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> BucketStore:
  """A bucket whose owners give a sign of life every 20 ms."""
  monkeypatch.setattr(store, "SIGN_OF_LIFE_SECONDS", 0.02)
  return BucketStore(f"file://{tmp_path}/held")


def test_a_path_is_a_directory_and_a_url_a_bucket(tmp_path):
  assert isinstance(open_store(tmp_path), LocalStore)
  assert isinstance(open_store(str(tmp_path)), LocalStore)
  assert isinstance(open_store(f"file://{tmp_path}"), BucketStore)
  assert in_directory("gs://bucket/out/", "0/items") == in_directory("gs://bucket/out", "0/items")


@pytest.mark.parametrize("url", ["gopher://bucket/out", "gs://", "gs://UPPER_CASE/out"])
def test_a_url_that_no_store_has_is_refused_in_one_line(url):
  with pytest.raises(InputError, match=f"^{url}: cannot be opened: ") as error:
    open_store(url)
  assert "\n" not in str(error.value)


def test_what_is_written_is_read_listed_and_deleted(made):
  assert not made.exists()
  assert made.names() == []
  assert made.read("a/b") is None
  assert made.write("a/b", [b"12", memoryview(b"345"), bytearray()]) == 5
  made.write("a/c/d", [])
  made.write("ab", [b"x"])
  assert made.exists()
  assert (made.read("a/b"), made.read("a/c/d"), made.read("ab")) == (b"12345", b"", b"x")
  assert made.names() == ["a/b", "a/c/d", "ab"]
  assert made.names("a/") == ["a/b", "a/c/d"]
  assert list(made.read_all(["ab", "b", "a/b"])) == [("ab", b"x"), ("b", None), ("a/b", b"12345")]
  assert set(made.sizes("a/")) == {"a/b", "a/c/d"}
  made.write("a/b", [b"another"])
  assert made.read("a/b") == b"another"
  made.delete("a/b")
  made.delete("never/there")
  assert made.names() == ["a/c/d", "ab"]
  made.delete("a/")
  assert made.names() == ["ab"]
  made.delete()
  assert made.names() == []


def test_buffers_of_any_type_are_written_as_their_bytes(made):
  import numpy as np

  made.write("a", [np.arange(6, dtype=np.uint8).reshape(2, 3), np.array([1], np.uint8)])
  assert made.read("a") == bytes((0, 1, 2, 3, 4, 5, 1))


def test_what_is_below_a_file_is_not_there(made):
  made.write("a", [b"1"])
  if isinstance(made, LocalStore):
    assert made.read("a/b") is None
  made.delete("a")
  assert made.names() == []


def test_a_directory_tells_the_size_of_its_files_and_takes_those_away_that_it_leaves_empty(tmp_path):
  held = LocalStore(tmp_path / "held")
  held.write("a/b/c", [b"123"])
  held.write("a/d", [b""])
  assert held.sizes("a/") == {"a/b/c": 3, "a/d": 0}
  held.delete("a/b/c")
  assert [path.name for path in (tmp_path / "held" / "a").iterdir()] == ["d"]
  held.delete("a/d")
  assert list((tmp_path / "held").iterdir()) == []


def test_a_file_appears_only_when_it_is_whole_and_on_stable_storage(tmp_path, monkeypatch):
  held, seen = LocalStore(tmp_path), []

  def sync(descriptor):
    seen.append((os.fstat(descriptor).st_size, (tmp_path / "a").exists()))

  monkeypatch.setattr(store.os, "fsync", sync)

  def parts():
    yield b"12"
    assert not (tmp_path / "a").exists()
    yield b"34"

  held.write("a", parts())
  assert seen == [(4, False)]


def test_each_part_is_made_when_the_one_before_is_written(tmp_path):
  held = LocalStore(tmp_path, rename=False)

  def parts():
    for number in range(3):
      assert (tmp_path / "a").stat().st_size == number
      yield b"x"

  held.write("a", parts())


@pytest.mark.parametrize("rename", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), InputError("model.layers.1.A_log: 4 heads expected")])
def test_a_write_that_is_stopped_leaves_no_file_and_the_error_as_it_was(tmp_path, rename, error):
  held = LocalStore(tmp_path, rename=rename)

  def parts():
    yield b"12"
    raise error

  with pytest.raises(type(error)) as raised:
    held.write("a", parts())
  assert raised.value is error
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "advice"), [(errno.ENOSPC, "make room"), (errno.EIO, "check the disk")])
def test_a_disk_that_takes_no_more_is_told_in_one_line_and_what_was_there_stays(tmp_path, monkeypatch, number, advice):
  held, real, left = LocalStore(tmp_path), os.write, [5]
  held.write("a", [b"old"])

  def write(descriptor, data):
    if left[0] == 0:
      raise OSError(number, os.strerror(number))
    count = real(descriptor, data[: left[0]])
    left[0] -= count
    return count

  monkeypatch.setattr(store.os, "write", write)
  with pytest.raises(Unwritable, match=rf"^{tmp_path}/a: cannot be written \(.*\): .*{advice}"):
    held.write("a", [b"123", b"456"])
  assert held.read("a") == b"old"
  assert held.names() == ["a"]


def test_a_write_of_less_than_was_asked_for_goes_on(tmp_path, monkeypatch):
  real = os.write
  monkeypatch.setattr(store.os, "write", lambda descriptor, data: real(descriptor, data[:3]))
  assert LocalStore(tmp_path).write("a", [b"12345678"]) == 8
  assert (tmp_path / "a").read_bytes() == b"12345678"


def test_a_file_that_cannot_be_read_is_not_taken_for_one_that_is_not_there(tmp_path):
  (tmp_path / "a").mkdir()
  with pytest.raises(InputError, match=rf"^{tmp_path}/a: cannot be read \(Is a directory\)"):
    LocalStore(tmp_path).read("a")


def test_a_directory_below_a_file_cannot_be_made(tmp_path):
  (tmp_path / "a").touch()
  for attempt in (lambda held: held.write("b", [b""]), lambda held: held.lock("lock").__enter__()):
    with pytest.raises(InputError, match="cannot be written"):
      attempt(LocalStore(tmp_path / "a"))


def test_a_links_target_is_not_deleted_with_it(tmp_path):
  (tmp_path / "elsewhere").mkdir()
  (tmp_path / "elsewhere" / "thesis.tex").touch()
  (tmp_path / "held").mkdir()
  (tmp_path / "held" / "link").symlink_to(tmp_path / "elsewhere")
  LocalStore(tmp_path / "held").delete()
  assert (tmp_path / "elsewhere" / "thesis.tex").exists()


def test_free_space_is_told_before_the_directory_is_there(tmp_path):
  free = LocalStore(tmp_path / "not" / "yet").free()
  assert free == pytest.approx(LocalStore(tmp_path).free(), rel=0.1)


# Locks


def test_a_lock_has_one_holder_and_is_free_after_it(made, monkeypatch):
  monkeypatch.setattr(store, "SIGN_OF_LIFE_SECONDS", 0.02)
  refusal = pytest.raises(Locked, match="another conversion is writing there, wait for it or choose another OUT")
  with made.lock("lock"), made.lock("other"), refusal:
    made.lock("lock").__enter__()
  with made.lock("lock"):
    pass


def test_a_shared_lock_is_shared_and_keeps_others_out(tmp_path):
  held = LocalStore(tmp_path)
  with held.lock("lock", shared=True), held.lock("lock", shared=True), pytest.raises(Locked):
    held.lock("lock").__enter__()
  with held.lock("lock"), pytest.raises(Locked):
    held.lock("lock", shared=True).__enter__()


def test_the_kernel_frees_the_lock_of_a_process_that_is_killed(tmp_path):
  script = (
    "import sys, time; from pathlib import Path; from kimi_k3.convert.store import LocalStore\n"
    "with LocalStore(Path(sys.argv[1])).lock('lock'):\n  print(flush=True)\n  time.sleep(60)"
  )
  with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as process:
    assert process.stdout
    process.stdout.readline()
    with pytest.raises(Locked):
      LocalStore(tmp_path).lock("lock").__enter__()
    process.kill()
  with LocalStore(tmp_path).lock("lock"):
    pass


def test_a_lock_that_is_removed_while_it_is_taken_is_not_taken(tmp_path, monkeypatch):
  """Its holder has just finished, and removed the directory: what comes after would not see this lock."""
  real = store.fcntl.flock

  def flock(descriptor, flags):
    real(descriptor, flags)
    (tmp_path / "lock").unlink()

  monkeypatch.setattr(store.fcntl, "flock", flock)
  with pytest.raises(Locked, match="has just ended, start again"):
    LocalStore(tmp_path).lock("lock").__enter__()


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch, capsys):
  def flock(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

  monkeypatch.setattr(store.fcntl, "flock", flock)
  with LocalStore(tmp_path).lock("lock"):
    pass
  assert "no file locks here (No locks available): never start two on one part" in capsys.readouterr().err


def owner(**changes) -> bytes:
  return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "thread": 1, "time": 0} | changes).encode()


def dead_pid() -> int:
  process = subprocess.Popen(["true"])
  process.wait()
  return process.pid


def test_the_lock_of_a_process_of_this_machine_that_has_ended_is_taken_at_once(bucket, monkeypatch, capsys):
  monkeypatch.setattr(store, "SIGN_OF_LIFE_SECONDS", 60)
  bucket.write("lock", [owner(pid=dead_pid())])
  started = time.monotonic()
  with bucket.lock("lock"):
    assert json.loads(bucket.read("lock"))["pid"] == os.getpid()
  assert time.monotonic() - started < 10
  assert capsys.readouterr().err == ""
  assert bucket.names() == []


@pytest.mark.parametrize(
  "content",
  [owner(host="another", pid=2**22), owner(pid=1), b"torn {", b"[]", b'{"host": 1}'],
  ids=["another host", "alive", "torn", "list", "number"],
)
def test_a_lock_without_signs_of_life_is_taken_after_a_wait_that_is_said(bucket, capsys, content):
  bucket.write("lock", [content])
  started = time.monotonic()
  with bucket.lock("lock"):
    assert time.monotonic() - started >= 0.06
  assert "waiting 0 s for a sign of life" in capsys.readouterr().err
  assert bucket.names() == []


def test_a_lock_that_is_given_up_during_the_wait_is_taken_at_once(bucket, monkeypatch):
  monkeypatch.setattr(store, "SIGN_OF_LIFE_SECONDS", 2)
  bucket.write("lock", [owner(host="another")])
  threading.Timer(0.1, bucket.delete, ["lock"]).start()
  started = time.monotonic()
  with bucket.lock("lock"):
    assert time.monotonic() - started < 4


def test_the_owner_renews_its_lock_until_it_gives_it_up(bucket):
  with bucket.lock("lock"):
    first = bucket.read("lock")
    deadline = time.monotonic() + 10
    while bucket.read("lock") == first and time.monotonic() < deadline:
      time.sleep(0.005)
    renewed = json.loads(bucket.read("lock"))
    assert renewed["time"] > json.loads(first)["time"]
    assert renewed | {"time": 0} == json.loads(first) | {"time": 0}
  time.sleep(0.05)
  assert bucket.names() == []


def test_an_owner_whose_lock_was_taken_over_takes_it_back_neither_then_nor_at_the_end(bucket):
  with bucket.lock("lock"):
    bucket.write("lock", [owner(host="another")])
    time.sleep(0.1)
    assert json.loads(bucket.read("lock"))["host"] == "another"
  assert json.loads(bucket.read("lock"))["host"] == "another"


def test_an_owner_that_removed_its_lock_does_not_make_it_again(bucket):
  with bucket.lock("lock"):
    bucket.delete()
    time.sleep(0.1)
    assert bucket.names() == []


def test_of_two_who_find_a_free_lock_one_gets_it(bucket, monkeypatch):
  real, second = bucket._await, BucketStore(bucket.url)

  def slow(future, name, *rest):
    result = real(future, name, *rest)
    if rest == ():  # The other one reads and writes between this one's read and write.
      monkeypatch.undo()
      stack.enter_context(second.lock("lock"))
    return result

  with contextlib.ExitStack() as stack:
    monkeypatch.setattr(bucket, "_await", slow)
    with pytest.raises(Locked, match="another conversion has just started there"):
      bucket.lock("lock").__enter__()


def test_shared_locks_of_a_bucket_are_not_looked_at(bucket):
  with bucket.lock("lock", shared=True), bucket.lock("lock", shared=True), bucket.lock("lock"):
    pass


def test_a_bucket_that_answers_with_an_error_is_told_in_one_line(tmp_path):
  (tmp_path / "held").touch()  # nothing can be made below a file
  held = BucketStore(f"file://{tmp_path}/held")
  with pytest.raises(Unwritable, match=rf"^file://{tmp_path}/held/a: cannot be written: \.\.\.") as error:
    held.write("a", [b"1"])
  assert "\n" not in str(error.value)
  assert len(str(error.value)) < 300 + len(str(tmp_path))


def test_names_with_the_characters_that_a_listing_goes_by_are_told_apart(made):
  names = ["a-b", "a/b", "a/c/d", "a0b"]  # "-" comes before "/" and "0" after it
  for name in names:
    made.write(name, [b""])
  assert made.names() == names
  assert made.names("a/") == names[1:3]
