from __future__ import annotations

import os
from pathlib import Path

import pytest

from kimi_k3.cli.inputs import check_vocabulary, check_writable, read_rows, write_whole
from kimi_k3.errors import InputError


def test_rows_are_lists_of_ids_of_any_lengths(ids_file):
  assert read_rows(ids_file([[1, 2, 3], [0], [5] * 300])) == [[1, 2, 3], [0], [5] * 300]


@pytest.mark.parametrize(
  ("value", "said"),
  [
    ([], "expected a non-empty list of lists of token ids, such as"),
    ({}, "expected a non-empty list of lists of token ids"),
    ({"0": [1]}, "expected a non-empty list of lists of token ids"),
    ("text", "expected a non-empty list of lists of token ids"),
    (7, "expected a non-empty list of lists of token ids"),
    (None, "expected a non-empty list of lists of token ids"),
    ([1, 2, 3], "row(s) 0, 1, 2: expected a non-empty list of integer token ids"),
    ([[1], [], [2], []], "row(s) 1, 3: expected"),
    ([[1], [True]], "row(s) 1: expected"),
    ([[False]], "row(s) 0: expected"),
    ([[1.0]], "row(s) 0: expected"),
    ([["1"]], "row(s) 0: expected"),
    ([[None]], "row(s) 0: expected"),
    ([[[1]]], "row(s) 0: expected"),
    ([[]] * 9, "row(s) 0, 1, 2, 3, 4 ...: expected"),
  ],
)
def test_anything_else_is_refused_and_the_rows_are_named(ids_file, value, said):
  with pytest.raises(InputError) as error:
    read_rows(ids_file(value))
  assert said in str(error.value)


@pytest.mark.parametrize("text", ["", "[[1, 2]", "[[1 2]]", "[[0x1]]", "\x00", "[" * 100_000])
def test_text_that_is_no_json_is_refused(ids_file, text):
  with pytest.raises(InputError, match=r"ids\.json: not JSON: "):
    read_rows(ids_file(text=text))


def test_bytes_that_are_no_text_are_refused(tmp_path):
  (tmp_path / "ids.json").write_bytes(b"\xff\xfe[[1]]")
  with pytest.raises(InputError, match=r"ids\.json: not JSON: "):
    read_rows(str(tmp_path / "ids.json"))


def test_a_file_that_cannot_be_read_is_told(tmp_path):
  with pytest.raises(InputError, match="nowhere: cannot be read: No such file or directory"):
    read_rows(str(tmp_path / "nowhere"))
  with pytest.raises(InputError, match="cannot be read: Is a directory"):
    read_rows(str(tmp_path))


def test_ids_of_the_vocabulary_pass():
  check_vocabulary([[0, 255], [7]], 256, "ids.json")


def test_ids_outside_the_vocabulary_are_named_by_row_and_position():
  with pytest.raises(InputError) as error:
    check_vocabulary([[0, 256], [7], [-1, 3, 1000]], 256, "ids.json")
  expected = "ids.json: token ids outside the vocabulary of 256: row 0 position 1: 256; row 2 position 0: -1; "
  assert str(error.value) == expected + "row 2 position 2: 1000"


def test_many_ids_outside_the_vocabulary_are_counted():
  with pytest.raises(InputError, match=r"row 0 position 4: 300 and 7 more$"):
    check_vocabulary([[300] * 12], 256, "ids.json")


def test_a_file_is_written_whole_and_leaves_nothing_else(tmp_path):
  target = tmp_path / "out.json"
  target.write_text("old")
  check_writable(str(target))
  assert target.read_text() == "old"
  write_whole(str(target), lambda file: file.write(b"new"))
  assert target.read_text() == "new"
  assert os.listdir(tmp_path) == ["out.json"]  # noqa: PTH208


@pytest.mark.parametrize("failure", [ZeroDivisionError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, failure):
  target = tmp_path / "out.json"
  target.write_text("old")

  def fail(file):
    file.write(b"half")
    raise failure

  with pytest.raises(failure):
    write_whole(str(target), fail)
  assert target.read_text() == "old"
  assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize(
  ("path", "said"),
  [
    (".", "is a directory, expected a file to write"),
    ("nowhere/out.json", "its directory does not exist"),
    ("file/out.json", "its directory does not exist"),
    ("x" * 300, "cannot be written: File name too long"),
  ],
)
def test_a_path_that_cannot_be_written_is_told_before_the_work(tmp_path, monkeypatch, path, said):
  monkeypatch.chdir(tmp_path)
  Path("file").touch()
  with pytest.raises(InputError, match=said):
    check_writable(path)


def test_a_directory_that_takes_no_files_is_told(tmp_path, monkeypatch):
  def refuse(**_):
    raise PermissionError(13, "Permission denied")

  monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
  with pytest.raises(InputError, match="cannot be written: Permission denied"):
    check_writable(str(tmp_path / "out.json"))


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path):
  (tmp_path / "old").mkdir()
  (tmp_path / "link").symlink_to("old/file")
  check_writable(str(tmp_path / "link"))
  write_whole(str(tmp_path / "link"), lambda file: file.write(b"new"))
  assert (tmp_path / "link").is_symlink()
  assert (tmp_path / "old/file").read_bytes() == b"new"


def test_a_pipe_gets_all_of_it_or_nothing(tmp_path):
  path = tmp_path / "pipe"
  os.mkfifo(path)
  check_writable(str(path))
  reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

  def fail(file):
    file.write(b"half")
    raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    write_whole(str(path), fail)
  write_whole(str(path), lambda file: file.write(b"whole"))
  assert os.read(reader, 100) == b"whole"
  os.close(reader)
  assert path.is_fifo()


def test_a_device_is_written_to_and_never_replaced():
  before = Path("/dev/full").stat()
  check_writable("/dev/full")
  with pytest.raises(InputError, match="/dev/full: cannot be written: No space left on device"):
    write_whole("/dev/full", lambda file: file.write(b"new"))
  assert Path("/dev/full").stat().st_rdev == before.st_rdev


def test_what_is_open_already_is_written_to_where_it_stands(tmp_path):
  with (tmp_path / "file").open("wb", buffering=0) as file:
    file.write(b"first, ")
    for path in (f"/dev/fd/{file.fileno()}", f"/proc/self/fd/{file.fileno()}"):
      check_writable(path)
      write_whole(path, lambda made: made.write(b"then, "))
    file.write(b"last")
  assert (tmp_path / "file").read_bytes() == b"first, then, then, last"


def test_directories_that_are_only_read_and_loops_are_refused(tmp_path):
  (tmp_path / "loop").symlink_to("loop")
  (tmp_path / "out").mkdir()
  (tmp_path / "link").symlink_to("out/file")
  for path, said in (("loop", "a loop of links"), ("out/file", "which is only read"), ("link", "which is only read")):
    with pytest.raises(InputError, match=said):
      check_writable(str(tmp_path / path), outside=("gs://bucket/x", tmp_path / "out"))
