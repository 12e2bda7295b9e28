"""Index and manifest of `ocdbt.database`, read by TensorStore: it lists and returns what was put in, and no more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tensorstore as ts

from kimi_k3.convert import ocdbt
from kimi_k3.convert.ocdbt import MANIFEST, Database, Reference

UUID = bytes(range(16))
INDEX = "d/index"


def values(count: int, seed: int = 0) -> dict[str, bytes]:
  """Keys as a checkpoint has them, with values of zero to some hundred bytes."""
  rng = random.Random(seed)
  keys = (
    f"params.params.decoder.layers_{i % 7}.leaf_{i // 7}/{rng.choice(('zarr.json', 'c', 'c/0/11'))}"
    for i in range(count)
  )
  return {f"{key}.{i}": rng.randbytes(rng.choice((0, 1, 90, 300))) for i, key in enumerate(keys)}


def entries(
  held: dict[str, bytes], files: dict[str, bytearray], *, inline: float
) -> list[tuple[bytes, bytes | Reference]]:
  """Entries for the database: some of the values stand in it, the others go into one of three data files."""
  rng, made = random.Random(1), []
  for key, value in held.items():
    if rng.random() < inline:
      made.append((key.encode(), value))
      continue
    file = f"d/{rng.randrange(3):06d}"
    data = files.setdefault(file, bytearray(b"before"))  # a value need not start at 0
    made.append((key.encode(), Reference(file, len(data), len(value))))
    data += value
  return made


def put(directory: Path, database: Database, files: dict[str, bytearray]) -> None:
  for name, data in {**files, INDEX: database.index, MANIFEST: database.manifest}.items():
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(data)


def store(directory: Path) -> ts.KvStore:
  return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{directory}/"}).result()


def found(directory: Path) -> dict[str, bytes]:
  """Everything that TensorStore lists, read by its key."""
  opened = store(directory)
  reads = {key: opened.read(key) for key in opened.list().result()}
  return {key.decode(): read.result().value for key, read in reads.items()}


def made(directory: Path, held: dict[str, bytes], *, inline: float = 0.3) -> Database:
  files: dict[str, bytearray] = {}
  database = ocdbt.database(entries(held, files, inline=inline), index_path=INDEX, uuid=UUID)
  put(directory, database, files)
  return database


@pytest.mark.parametrize("inline", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3, 5000])
def test_tensorstore_lists_and_reads_exactly_what_was_put_in(tmp_path, count, inline):
  held = values(count)
  made(tmp_path, held, inline=inline)
  assert found(tmp_path) == held


@pytest.mark.parametrize(("node_bytes", "height"), [(1, 6), (200, 2), (2000, 1), (10**6, 0)])
def test_a_tree_of_any_height_is_read(tmp_path, monkeypatch, node_bytes, height):
  monkeypatch.setattr(ocdbt, "NODE_BYTES", node_bytes)
  held = values(65)
  database = made(tmp_path, held)
  assert found(tmp_path) == held
  # Behind the header (14 bytes), the UUID and the sizes the manifest names the root's file and then its height.
  at = database.manifest.index(INDEX.encode()) + len(INDEX)
  assert database.manifest[at + 2] == height


@pytest.mark.parametrize("node_bytes", [1, 128 * 1024])
def test_ranges_and_single_keys_are_found_and_others_are_not(tmp_path, monkeypatch, node_bytes):
  monkeypatch.setattr(ocdbt, "NODE_BYTES", node_bytes)
  held = values(300)
  made(tmp_path, held)
  opened, ordered = store(tmp_path), sorted(held)
  first, last = ordered[17], ordered[203]
  listed = opened.list(ts.KvStore.KeyRange(first, last)).result()
  assert sorted(key.decode() for key in listed) == ordered[17:203]
  for key in (ordered[0][:-1], ordered[-1] + "a", "params", "", "zzz"):
    assert opened.read(key).result().state == "missing"


def test_keys_that_are_prefixes_of_each_other_stay_apart(tmp_path, monkeypatch):
  held = {"a" * n: b"%d" % n for n in range(1, 40)} | {"a" * n + "/c": b"" for n in range(1, 40)} | {"b": b"b"}
  for node_bytes in (1, 128 * 1024):
    monkeypatch.setattr(ocdbt, "NODE_BYTES", node_bytes)
    made(tmp_path, held)
    assert found(tmp_path) == held


def test_keys_and_paths_of_any_length_are_read(tmp_path):
  """Past 127 and 16,383 a length takes another byte."""
  held = {"k" * n: b"%d" % n for n in (1, 127, 128, 129, 16383, 16384)}
  made(tmp_path, held, inline=0.5)
  assert found(tmp_path) == held


def test_offsets_beyond_4_gib_are_kept(tmp_path):
  (tmp_path / "d").mkdir()
  with open(tmp_path / "d" / "000000", "wb") as file:
    file.seek(5 * 2**30)
    file.write(b"far out")  # the rest is a hole
  database = ocdbt.database([(b"key", Reference("d/000000", 5 * 2**30, 7))], index_path=INDEX, uuid=UUID)
  put(tmp_path, database, {})
  assert found(tmp_path) == {"key": b"far out"}


def test_what_is_given_in_another_order_makes_the_same_bytes():
  files: dict[str, bytearray] = {}
  given = entries(values(500), files, inline=0.3)
  first = ocdbt.database(given, index_path=INDEX, uuid=UUID)
  random.Random(3).shuffle(given)
  assert ocdbt.database(iter(given), index_path=INDEX, uuid=UUID) == first
  assert ocdbt.database(given, index_path=INDEX, uuid=UUID[::-1]).index == first.index


def test_a_key_given_twice_is_refused():
  with pytest.raises(ValueError, match="key b'b' given twice"):
    ocdbt.database([(b"b", b"1"), (b"a", b"2"), (b"b", b"1")], index_path=INDEX, uuid=UUID)


def test_nothing_at_all_is_refused():
  with pytest.raises(ValueError, match="no entries"):
    ocdbt.database([], index_path=INDEX, uuid=UUID)


def test_a_uuid_of_another_length_is_refused():
  with pytest.raises(ValueError, match="uuid of 15 bytes, expected 16"):
    ocdbt.database([(b"a", b"1")], index_path=INDEX, uuid=UUID[1:])


@pytest.mark.parametrize("name", [INDEX, MANIFEST])
def test_a_flipped_bit_anywhere_in_index_or_manifest_is_noticed(tmp_path, monkeypatch, name):
  monkeypatch.setattr(ocdbt, "NODE_BYTES", 400)
  held = values(20)
  made(tmp_path, held)
  whole = (tmp_path / name).read_bytes()
  step = max(1, len(whole) // 60)  # in a file of one node the first and the last bytes are its frame
  for at in {*range(0, len(whole), step), *range(4), *range(len(whole) - 4, len(whole))}:
    damaged = bytearray(whole)
    damaged[at] ^= 1 << at % 8
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises(ValueError, match=r"Error (decoding|reading)"):
      found(tmp_path)


@pytest.mark.parametrize("name", [INDEX, MANIFEST])
def test_a_truncated_index_or_manifest_is_noticed(tmp_path, name):
  made(tmp_path, values(20))
  whole = (tmp_path / name).read_bytes()
  for length in (1, len(whole) // 2, len(whole) - 1):
    (tmp_path / name).write_bytes(whole[:length])
    with pytest.raises(ValueError, match=r"Error (decoding|reading)"):
      found(tmp_path)


def test_a_database_of_tensorstores_own_reads_the_same(tmp_path):
  held = values(200)
  theirs = store(tmp_path / "theirs")
  for write in [theirs.write(key, value) for key, value in held.items()]:
    write.result()
  made(tmp_path / "ours", held)
  assert found(tmp_path / "theirs") == found(tmp_path / "ours") == held
  magic, version = slice(0, 4), slice(12, 13)
  manifests = [(tmp_path / name / MANIFEST).read_bytes() for name in ("ours", "theirs")]
  assert manifests[0][magic] == manifests[1][magic]
  assert manifests[0][version] == manifests[1][version]


def test_a_further_writer_adds_to_it(tmp_path):
  """TensorStore takes it for a database of its own: it writes another generation on top."""
  held = values(50)
  made(tmp_path, held)
  store(tmp_path).write("zzz", b"added").result()
  assert found(tmp_path) == held | {"zzz": b"added"}
