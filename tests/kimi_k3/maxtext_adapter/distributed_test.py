"""What processes are told and show each other, and what they say of differences; multihost_test.py starts some."""

from __future__ import annotations

import functools
import shutil

import pytest

from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter import distributed
from kimi_k3.maxtext_adapter.distributed import ALONE, Address, Processes, differences, parse_address, what_decides


@pytest.mark.parametrize(
  ("text", "address"),
  [
    ("auto", None),
    ("10.0.0.2:8476,4,0", Address("10.0.0.2:8476", 4, 0)),
    ("[::1]:80,2,1", Address("[::1]:80", 2, 1)),
  ],
)
def test_an_address_is_where_how_many_and_which(text, address):
  assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "Auto", "host,2,0", ":80,2,0", "host:80", "host:80,2", "host:80,2,-1", "h:x,2,0"])
def test_another_form_is_refused_with_an_example(text):
  with pytest.raises(InputError, match=r"expected auto or ADDRESS:PORT,COUNT,ID such as 10\.0\.0\.2:8476,4,0"):
    parse_address(text)


@pytest.mark.parametrize(
  ("text", "said"),
  [("host:80,2,2", "process 2 of 2, expected 0 to 1"), ("host:0,2,0", "port 0, expected 1 to 65535")],
)
def test_a_number_out_of_range_is_named(text, said):
  with pytest.raises(InputError, match=said):
    parse_address(text)


def test_differences_name_every_value_and_who_has_it():
  shown = [{"dtype": "a", "same": "x"}, {"dtype": "b", "same": "x"}, {"dtype": "a", "same": "x", "more": "y"}]
  assert differences(shown, ["h0", "h1", "h1"]) == [
    "dtype is a on process 0, 2 (h0, h1), b on process 1 (h1)",
    "more is not given on process 0, 1 (h0, h1), y on process 2 (h1)",
  ]
  assert differences([shown[0]] * 3, ["h"] * 3) == []


def test_a_long_value_is_shortened():
  (said,) = differences([{"a": "x" * 500}, {"a": "y"}], ["h", "h"])
  assert len(said) < 200


def test_alone_there_is_nothing_to_wait_for():
  assert ALONE.first
  assert ALONE.gather(b"x") == [b"x"]
  assert ALONE.together(lambda: 3) == 3
  ALONE.agree({"a": "b"})
  with pytest.raises(InputError, match=r"^as it was$"):
    ALONE.together(lambda: (_ for _ in ()).throw(InputError("as it was")))


@pytest.fixture
def others(monkeypatch):
  """Returns a function: what the others answer to the process that is the first of them all."""

  def answer(*answers: bytes) -> Processes:
    monkeypatch.setattr(Processes, "gather", lambda _, value: [value, *answers])
    return Processes(0, 1 + len(answers))

  return answer


def test_what_another_process_refused_is_refused_here(others):
  with pytest.raises(InputError, match=r"^process 1, 2 of 4: no such file; process 3 of 4: full$"):
    others(b"no such file", b"no such file", b"full").together(lambda: 3)
  assert others(b"", b"").together(lambda: 3) == 3


def test_a_disk_that_fails_here_is_told_as_the_others_hear_it(others):
  def work():
    raise OSError("disk full")

  with pytest.raises(InputError, match=r"^process 0 of 2: OSError: disk full$"):
    others(b"").together(work)


def test_a_fault_of_the_program_keeps_its_trace_where_it_happened(others):
  with pytest.raises(ZeroDivisionError):
    others(b"").together(lambda: 1 // 0)


@pytest.fixture(scope="module")
def converted(convert, k3_tiny):
  return convert(k3_tiny.checkpoint)


@pytest.fixture(scope="module")
def read(converted):
  """Returns a function: settings to the config, each read once."""
  from kimi_k3.maxtext_adapter.settings import read_config

  return functools.cache(lambda *settings: read_config(str(converted / "decode.yml"), settings))


@pytest.fixture
def shown(read):
  """Returns a function: settings, flags, rows and where the checkpoint lies to what a process shows of them."""

  def show(*settings: str, flags=(), rows=((1, 2),), path=None) -> dict[str, str]:
    config = read(*settings)
    return what_decides(config, dict(flags), rows, str(path or config.load_parameters_path))

  return show


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
  return [said.partition(" is ")[0] for said in differences([one, other], ["h", "h"])]


def test_every_setting_counts_but_where_things_lie(shown):
  places = ("run_name=a", "base_output_directory=b", "jax_cache_dir=c")
  counts = ("dtype=float32", "partitioning=manual", "partition_rules={latent: [model]}")
  assert differing(shown(), shown(*places, *counts)) == ["dtype", "partition_rules", "partitioning"]


def test_rows_flags_and_what_is_compiled_for_count(shown, monkeypatch):
  assert differing(shown(), shown()) == []
  assert differing(shown(rows=[[1, 2], [3]]), shown(rows=[[1, 2], [4]])) == ["row 1"]
  assert differing(shown(rows=[[1, 2]]), shown(rows=[[1, 2], [4]])) == ["row 1"]
  assert differing(shown(flags={"max_new_tokens": 3}), shown(flags={"max_new_tokens": 4})) == ["flag --max-new-tokens"]
  before = shown()
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "--x")
  monkeypatch.setenv("JAX_PROCESS_ID", "7")
  assert differing(before, shown()) == ["environment variable LIBTPU_INIT_ARGS"]
  monkeypatch.setattr(distributed, "_version", lambda package: "0" if package == "jax" else "not installed")
  assert "version of jax" in differing(before, shown())


def test_a_checkpoint_is_its_content_wherever_it_lies(shown, converted, tmp_path):
  copy = tmp_path / "copy"
  shutil.copytree(converted, copy)
  items = copy / "0/items"
  assert differing(shown(), shown(path=items)) == []
  record = copy / "conversion.json"
  record.write_text(record.read_text() + " ")
  assert differing(shown(), shown(path=items)) == ["conversion.json of the checkpoint"]
  (items / "manifest.ocdbt").write_bytes(b"x")
  assert "manifest.ocdbt of the checkpoint" in differing(shown(), shown(path=items))
