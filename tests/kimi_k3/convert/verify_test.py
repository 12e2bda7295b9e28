"""A conversion passes, and each planted fault is found, named and described."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from kimi_k3.convert import index, reader, verify

FEW = ("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2")
NINE = ("--layers", "9", *FEW[2:])  # Leading layers, one block, a tail.
LEAVES = 282
EXPERTS = "decoder.blocks.layers_0.mlp.experts.w1_packed"
SCALES = "decoder.blocks.layers_0.mlp.experts.w2_scale"
KEY = "params.params."
GONE = "decoder.tail_0.attention.out.kernel"
SQUARES = {
  "decoder.lead_1.mlp.shared_experts.up_proj.kernel": (1, 0),
  "decoder.lead_3.attention.gate.kernel": (1, 2, 0),
}


def verified(src: Path, out: Path, **options) -> verify.Report:
  with index.open_source(src) as source:
    return verify.verify(source, reader.open_output(out), **({"sample": None, "workers": 2} | options))


def failed(report: verify.Report) -> set[str]:
  """The checks that failed, after a look at what every failed report must hold."""
  assert report.ok == (not report.faults)
  assert json.loads(json.dumps(report.as_json()))["ok"] == report.ok
  return {check.name for check in report.checks if not check.ok}


def database(out: Path, path: str = "") -> dict:
  return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{out}/0/items/"}, "path": path}


def array(out: Path, leaf: str):
  """A leaf of a copy, to write valid chunks to."""
  spec = {"driver": "zarr3", "kvstore": database(out, f"{KEY}{leaf}/"), "store_data_equal_to_fill_value": True}
  return ts.open(spec, open=True).result()


def flip(path: Path, at: int) -> None:
  data = bytearray(path.read_bytes())
  data[at] ^= 1
  path.write_bytes(data)


def place_of(out: Path, key: str) -> tuple[Path, int]:
  """The data file that holds a key's value, and where."""
  value = ts.KvStore.open(database(out)).result().read(KEY + key).result().value
  for path in sorted((out / "0/items/d").iterdir()):
    if (at := path.read_bytes().find(value)) >= 0:
      return path, at
  raise AssertionError(f"{key}: in no data file")


@pytest.fixture(scope="module")
def k3(tiny_checkpoint, convert) -> tuple[Path, Path]:
  src = tiny_checkpoint(*NINE)
  return src, convert(src)


@pytest.fixture
def copy(k3, tmp_path) -> tuple[Path, Path]:
  """A K3 of nine layers and a conversion of it to damage."""
  return k3[0], shutil.copytree(k3[1], tmp_path / "out")


def check_passes(src: Path, out: Path) -> verify.Report:
  report = verified(src, out)
  assert report.faults == ()
  assert failed(report) == set()
  assert report.worst is None
  assert report.compared["share"] == 1
  assert report.compared["leaves"] == report.keys["expected"] == report.keys["found"]
  return report


def test_a_conversion_of_k3_passes(k3_tiny, convert):
  check_passes(k3_tiny.checkpoint, convert(k3_tiny.checkpoint))


@pytest.mark.parametrize(
  ("name", "options"),
  [("k3", ("--no-scan",)), ("kimi-linear", ("--experts", "mxfp4")), ("all packed", ("--experts", "bf16"))],
)
def test_a_conversion_of_each_kind_passes(small_sources, convert, name, options):
  src = small_sources[name].directory
  check_passes(src, convert(src, *options))


@pytest.mark.slow
@pytest.mark.parametrize("scan", ["--scan", "--no-scan"])
@pytest.mark.parametrize("dense", ["as-stored", "fp8-block"])
@pytest.mark.parametrize("experts", ["as-stored", "mxfp4", "fp8-block", "bf16"])
def test_every_format_of_every_golden_checkpoint_passes(
  k3_tiny, kimi_linear_tiny, k3_hd128, small_sources, all_packed_source, convert, scan, dense, experts
):
  cases = [case.checkpoint for case in (k3_tiny, kimi_linear_tiny, k3_hd128)]
  for src in (*cases, all_packed_source.directory, *(source.directory for source in small_sources.values())):
    check_passes(src, convert(src, scan, "--dense", dense, "--experts", experts))


def test_the_rounding_of_fp8_is_measured_and_stays_within_its_bound(tiny_checkpoint, convert):
  check_rounding(tiny_checkpoint(*FEW), convert)


@pytest.mark.slow
def test_the_rounding_of_fp8_is_measured_where_a_matrix_has_many_blocks(k3_hd128, convert):
  check_rounding(k3_hd128.checkpoint, convert)


def check_rounding(src, convert) -> None:
  out = convert(src, "--dense", "fp8-block", "--experts", "fp8-block")
  report = check_passes(src, out)
  leaves = {name for name, held in reader.open_output(out).arrays.held.items() if held.dtype == "float8_e4m3fn"}
  assert set(report.rounding) == leaves
  assert {"decoder.lead_0.attention.q_proj.kernel", "decoder.lead_1.mlp.experts.w1"} <= leaves
  for name, errors in report.rounding.items():
    assert errors["violations"] == 0
    # Half a unit in the last place of a value just above a power of two is 2**-4 of it, in the worst case.
    assert 0 <= errors["max_of_block"] <= 2**-4
    # Experts come from MXFP4, of which every value is an E4M3 number times a power of two.
    assert (errors["max_abs"] == 0) == (".experts." in name)
    assert (errors["rms_relative"] == 0) == (errors["max_abs"] == 0)


def test_a_code_that_is_not_the_nearest_breaks_the_bound_of_fp8(tiny_checkpoint, convert, tmp_path):
  src = tiny_checkpoint(*FEW)
  out = shutil.copytree(convert(src, "--dense", "fp8-block"), tmp_path / "out")
  leaf = "decoder.lead_0.attention.q_proj.kernel"
  codes = array(out, leaf)
  codes[3, 1, 2] = np.asarray(-448, codes.dtype.numpy_dtype)
  report = verified(src, out)
  assert failed(report) == {"values", "checksums", "rounding"}
  assert report.rounding[leaf]["violations"] == 1
  assert any(leaf in fault and "1 of 8,192 values are further" in fault for fault in report.faults)


@pytest.fixture(scope="module")
def planted(k3, tmp_path_factory) -> verify.Report:
  """Many faults at once, each in a leaf of its own and all in valid chunks."""
  src, out = k3[0], shutil.copytree(k3[1], tmp_path_factory.mktemp("planted") / "out")
  bit = array(out, "decoder.lead_2.mlp.experts.w1_packed")
  bit[3, 5, 7] = int(bit[3, 5, 7].read().result()) ^ 16
  experts = array(out, EXPERTS)
  one, three = (experts[0, e].read().result() for e in (1, 3))
  experts[0, 1], experts[0, 3] = three, one
  for leaf, order in SQUARES.items():
    matrix = array(out, leaf).read().result()
    array(out, leaf)[...] = matrix.transpose(order).reshape(matrix.shape)
  scales = array(out, SCALES)
  scales[0, 2] = np.roll(scales[0, 2].read().result(), 1, axis=0)
  array(out, "decoder.lead_1.input_norm.scale")[...] = array(out, "decoder.lead_2.input_norm.scale").read().result()
  norm = array(out, "decoder.decoder_norm.scale")
  norm[...] = np.zeros_like(norm.read().result())
  return verified(src, out)


def line_of(report: verify.Report, leaf: str) -> str:
  (line,) = (fault for fault in report.faults if fault.startswith(f"{leaf}: ") and "values differ" in fault)
  return line


def test_valid_chunks_with_other_values_fail_values_and_checksums_and_nothing_else(planted):
  assert failed(planted) == {"values", "checksums"}
  assert len(planted.faults) == 2 * 7


def test_one_bit_is_named_with_its_index_and_both_values(planted):
  line = line_of(planted, "decoder.lead_2.mlp.experts.w1_packed")
  assert ": 1 of 2,048 values differ" in line
  assert "one value, 1 bit; at [3, 5, 7] " in line


def test_two_experts_exchanged_are_named(planted):
  assert "exchanged: block 0, expert 1 and block 0, expert 3" in line_of(planted, EXPERTS)


@pytest.mark.parametrize("leaf", SQUARES)
def test_a_square_matrix_transposed_is_named(planted, leaf):
  assert ": transposed" in line_of(planted, leaf)


def test_shifted_rows_of_scales_are_named(planted):
  line = line_of(planted, SCALES)
  assert "shifted: rows along axis 0 stand 1 place(s) too far, around the end (block 0, expert 2)" in line


def test_the_content_of_another_leaf_is_named(planted):
  line = line_of(planted, "decoder.lead_1.input_norm.scale")
  assert "the content of another leaf, decoder.lead_2.input_norm.scale" in line


def test_the_worst_leaf_comes_first(planted):
  lines = [fault for fault in planted.faults if "values differ" in fault]
  shares = [float(line.partition("values differ (")[2].partition(" %")[0]) for line in lines]
  assert shares == sorted(shares, reverse=True)
  assert planted.worst is not None
  assert lines[0].startswith(f"{planted.worst['leaf']}: ")
  assert planted.worst["share"] == 1
  assert lines[-1] == line_of(planted, "decoder.lead_2.mlp.experts.w1_packed")
  assert "all values are 0; at [0] 0.0, expected" in line_of(planted, "decoder.decoder_norm.scale")


def test_a_damaged_byte_in_a_data_file_is_a_chunk_that_cannot_be_read(copy):
  src, out = copy
  path, at = place_of(out, f"{EXPERTS}/c/0/2/0/0")
  flip(path, at + 9)
  report = verified(src, out)
  assert failed(report) == {"values"}
  (fault,) = report.faults
  assert f"{EXPERTS}: " in fault
  assert "chunk c/0/2/0/0 cannot be read: fails its own checksum" in fault


def test_a_damaged_index_fails_the_keys_and_ends_in_no_error(copy):
  src, out = copy
  flip(out / "0/items/d/index", 5000)
  report = verified(src, out)
  assert "keys" in failed(report)
  assert any("index of its keys cannot be read" in fault for fault in report.faults)


def test_a_sample_names_exchanged_experts_though_it_saw_one_of_them_only(copy):
  src, out = copy
  leaf = array(out, EXPERTS)
  moved = np.roll(leaf[:, :].read().result(), 1, axis=1)
  leaf[...] = moved
  report = verified(src, out, sample=LEAVES + 30)
  assert "values" in failed(report)
  assert report.worst is not None
  assert "has the content of block " in report.worst["looks_like"]


@pytest.fixture
def other(k3, tmp_path) -> Path:
  """The source with other values in one tensor, so few that the record's sample of the shard does not show them."""
  src = shutil.copytree(k3[0], tmp_path / "src")
  with index.open_source(src) as source:
    tensor = source.tensors["language_model.lm_head.weight"]
  data = bytearray((src / tensor.shard).read_bytes())
  data[tensor.offset : tensor.offset + 8] = bytes(8)
  (src / tensor.shard).write_bytes(data)
  return src


def test_a_source_that_changed_after_the_conversion_is_named_stale(k3, other):
  report = verified(other, k3[1])
  assert failed(report) == {"stale", "values"}
  assert report.faults[0].startswith("stale: 1 leaves that differ from SRC still have the checksums")
  assert report.worst is not None
  assert report.worst["leaf"] == "decoder.logits_dense.kernel"


def test_a_conversion_of_another_source_is_stale_and_what_fits_is_compared(k3, kimi_linear_tiny):
  report = verified(kimi_linear_tiny.checkpoint, k3[1])
  assert {"stale", "shards", "files", "keys", "values"} <= failed(report)
  assert 0 < report.compared["share"] < 1
  assert "decoder.lead_0.attention.g_a_proj.kernel" in report.keys["missing"]
  assert "decoder.lead_0.attention.g_proj.kernel" in report.keys["unexpected"]
  assert report.faults[0].startswith("stale: ")


def test_a_data_file_of_an_older_conversion_is_found(copy, other, convert):
  src, out = copy
  for path in (convert(other) / "0/items/d").iterdir():
    shutil.copyfile(path, out / "0/items/d" / path.name)
  report = verified(src, out)
  # Its chunks are valid in themselves: only the values and the recorded checksums tell.
  assert failed(report) == {"values", "checksums"}
  assert "4 of 16,384 values differ" in line_of(report, "decoder.logits_dense.kernel")


@pytest.fixture(scope="module")
def broken(k3, tmp_path_factory) -> verify.Report:
  """Keys deleted, added and damaged."""
  src, out = k3[0], shutil.copytree(k3[1], tmp_path_factory.mktemp("broken") / "out")
  kvstore = ts.KvStore.open(database(out)).result()
  kvstore.delete_range(ts.KvStore.KeyRange(f"{KEY}{GONE}/", f"{KEY}{GONE}0")).result()
  kvstore.write(f"{KEY}decoder.blocks.layers_1.input_norm.scale/c/0/0", None).result()
  norm = f"{KEY}decoder.decoder_norm.scale/zarr.json"
  metadata = json.loads(kvstore.read(norm).result().value)
  kvstore.write(norm, json.dumps(metadata | {"shape": [32]}).encode()).result()
  kvstore.write(f"{KEY}decoder.stranger/c/0", b"1").result()
  kvstore.write("elsewhere", b"1").result()
  kvstore.write(f"{KEY}token_embedder.embedding/zarr.json", b"{").result()
  return verified(src, out)


def test_a_dropped_leaf_is_named(broken):
  assert failed(broken) == {"keys", "values"}
  assert broken.keys["missing"] == [GONE]
  assert f"{GONE}: missing, no key of it is there" in broken.faults
  assert broken.compared["share"] < 1


def test_a_missing_chunk_of_a_block_is_named(broken):
  leaf = "decoder.blocks.layers_1.input_norm.scale"
  assert f"{leaf}: 1 of its chunks missing: c/0/0" in broken.faults
  assert "chunk c/0/0 cannot be read: is missing" in line_of(broken, leaf)


def test_a_leaf_of_another_shape_a_stranger_and_a_damaged_description_are_named(broken):
  assert broken.keys["different"] == ["decoder.decoder_norm.scale"]
  assert broken.keys["unexpected"] == ["decoder.stranger"]
  keys = next(check for check in broken.checks if check.name == "keys").detail
  for text in (
    "decoder.stranger: unexpected",
    "decoder.decoder_norm.scale: bfloat16 [32], expected bfloat16 [64]",
    "key elsewhere: belongs to no leaf",
    "token_embedder.embedding: its zarr.json cannot be read",
  ):
    assert text in keys


def test_files_the_record_and_the_hashes_of_shards_are_compared(copy):
  src, out = copy
  with (out / "config.json").open("a") as file:
    file.write("\n")
  (out / "tokenizer.json").write_text("{}")
  (out / "0/items/_METADATA").write_text(
    (out / "0/items/_METADATA").read_text().replace("decoder_norm", "decoder_nrom", 1)
  )
  (out / "0/_CHECKPOINT_METADATA").unlink()
  decode = out / "decode.yml"
  decode.write_text(decode.read_text().replace("num_experts: 4", "num_experts: 5") + "per_device_batch_size: 3\n")
  record = json.loads((out / "conversion.json").read_text())
  record["checksums"]["decoder.decoder_norm.scale"] = "00000000"
  record["source"]["shards"]["model-00002-of-000003.safetensors"]["header"] = "0"
  record["leaves"] += 1
  record["stored"]["a_log_shape"] = [4]
  for name, shard in record["source"]["shards"].items():
    shard["sha256"] = hashlib.sha256((src / name).read_bytes()).hexdigest()
  record["source"]["shards"]["model-00003-of-000003.safetensors"]["sha256"] = "0" * 64
  (out / "conversion.json").write_text(json.dumps(record))
  report = verified(src, out)
  assert failed(report) == {"files", "shards", "keys", "checksums", "sha256"}
  text = "\n".join(report.faults)
  for part in (
    "config.json: differs from SRC's",
    "tokenizer.json: not in SRC",
    "0/items/_METADATA: not what convert writes (tree_metadata)",
    "0/_CHECKPOINT_METADATA: not what convert writes (",
    "decode.yml: num_experts is 5, SRC gives 4",
    "conversion.json: says that SRC is stored otherwise than it is",
    "decoder.decoder_norm.scale: checksum",
    "model-00002-of-000003.safetensors: its header",
    "model-00003-of-000003.safetensors: SHA-256",
    f"leaves is {LEAVES + 1}, SRC gives {LEAVES}",
  ):
    assert part in text
  assert (text.count("SHA-256"), text.count("decode.yml")) == (1, 1)


def test_a_sample_takes_one_chunk_of_every_leaf_and_says_its_share(k3):
  report = verified(*k3, sample=LEAVES + 8)
  assert (report.compared["leaves"], report.compared["chunks"]) == (LEAVES, LEAVES + 8)
  assert 0 < report.compared["share"] < 1
  assert "checksums" not in {check.name for check in report.checks}
  few = verified(*k3, sample=5)
  assert (few.compared["leaves"], few.compared["chunks"]) == (5, 5)


@pytest.mark.slow
def test_the_result_depends_neither_on_workers_nor_on_the_chunks_of_this_version(k3, monkeypatch):
  from kimi_k3.convert import chunks

  as_cut = check_passes(*k3).compared
  monkeypatch.setattr(chunks, "CHUNK_BYTES", 3000)  # OUT was cut otherwise.
  report = check_passes(*k3)
  assert report.compared["chunks"] > as_cut["chunks"]
  assert report.compared["values"] == as_cut["values"]
  assert verified(*k3, workers=1).compared == report.compared
