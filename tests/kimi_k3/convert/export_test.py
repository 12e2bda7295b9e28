"""SRC -> OUT -> SRC gives every text tensor back, byte for byte, and nothing half-written stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kimi_k3.convert import database, export, index, plan, reader, storage
from kimi_k3.errors import InputError

FEW = ("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2")


def exported(
  out: Path, target: Path, *, vision: index.Source | None = None, overwrite=False, **options
) -> export.Export:
  planned = export.plan_export(reader.open_output(out), vision, **options)
  if not export.check_target(target, planned, overwrite=overwrite):
    export.export(target, planned, workers=2, overwrite=overwrite)
  return planned


def text(source: index.Source) -> dict[str, tuple]:
  """Everything of the text tensors: dtype, shape, bytes."""
  names = storage.text_tensors(source)
  return {name: (t.dtype, t.shape, source.read(name).tobytes()) for name, t in names.items()}


def check_round_trip(src: Path, out: Path, target: Path, **options) -> index.Source:
  exported(out, target, **options)
  with index.open_source(src) as source, index.open_source(target) as back:
    assert text(back) == text(source)
    assert back.config_bytes == source.config_bytes
    assert plan.make_plan(back, plan.Options()).config == plan.make_plan(source, plan.Options()).config
    return back


@pytest.fixture(scope="module")
def few(tiny_checkpoint, convert) -> tuple[Path, Path]:
  src = tiny_checkpoint(*FEW)
  return src, convert(src)


@pytest.mark.slow
def test_k3_comes_back(k3_tiny, convert, tmp_path):
  src = k3_tiny.checkpoint
  back = check_round_trip(src, convert(src), tmp_path / "hf", shard_bytes=300_000)
  assert list(back.shards) == [f"model-{n:05d}-of-000007.safetensors" for n in range(1, 8)]
  assert not any(name.startswith(storage.VISION_PREFIXES) for name in back.tensors)


@pytest.mark.parametrize(
  ("name", "scan"), [("k3", "--no-scan"), ("k3", "--scan"), ("kimi-linear", "--scan"), ("all packed", "--scan")]
)
def test_each_kind_comes_back(small_sources, convert, tmp_path, name, scan):
  src = small_sources[name].directory
  back = check_round_trip(src, convert(src, scan), tmp_path / "hf", shard_bytes=150_000)
  if name == "kimi-linear":
    assert back.tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 4, 1)


@pytest.mark.slow
@pytest.mark.parametrize("scan", ["--scan", "--no-scan"])
def test_every_checkpoint_comes_back(
  k3_tiny, kimi_linear_tiny, k3_hd128, small_sources, all_packed_source, convert, tmp_path, scan
):
  cases = [case.checkpoint for case in (k3_tiny, kimi_linear_tiny, k3_hd128)]
  sources = (*cases, all_packed_source.directory, *(source.directory for source in small_sources.values()))
  for number, src in enumerate(sources):
    check_round_trip(src, convert(src, scan), tmp_path / f"hf-{number}", shard_bytes=200_000)


def test_the_order_is_the_models_and_every_tensor_is_aligned(few, tmp_path):
  exported(few[1], tmp_path / "hf", shard_bytes=100_000)
  with index.open_source(tmp_path / "hf") as back:
    first, *_, last = sorted(back.shards)
    assert back.tensors["language_model.model.embed_tokens.weight"].shard == first
    assert back.tensors["language_model.lm_head.weight"].shard == last
    layers = [back.tensors[f"language_model.model.layers.{i}.self_attn.o_proj.weight"].shard for i in range(5)]
    assert layers == sorted(layers)
    for tensor in back.tensors.values():
      assert tensor.offset % index.DTYPES[tensor.dtype].itemsize == 0
    assert max(sum(t.nbytes for t in back.tensors.values() if t.shard == s) for s in back.shards) <= 100_000


@pytest.mark.parametrize("packed", [(), ("--packed", "experts+shared+latent")])
def test_decoded_experts_come_out_in_bfloat16_and_config_says_so(tiny_checkpoint, convert, tmp_path, reference, packed):
  src = tiny_checkpoint(*FEW, *packed)
  exported(convert(src, "--experts", "bf16"), tmp_path / "hf")
  with index.open_source(src) as source, index.open_source(tmp_path / "hf") as back:
    stem = "language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight"
    weights = reference.mxfp4_decode(source.read(f"{stem}_packed"), source.read(f"{stem}_scale"))
    assert back.read(stem).tobytes() == weights.astype(ml_dtypes.bfloat16).tobytes()
    others = {name: held for name, held in text(source).items() if ".experts." not in name}
    assert {name: held for name, held in text(back).items() if ".experts." not in name} == others
    declared = back.config["text_config"].get("quantization_config")
    assert (declared is None) == (not packed)
    again = plan.make_plan(back, plan.Options())  # The ignore list exempts no packed matrix.
    assert again.config.packed_modules == (("latent", "shared_experts") if packed else ())


@pytest.mark.parametrize(
  ("options", "said"),
  [
    (("--experts", "fp8-block"), "--experts fp8-block: weights were rounded to FP8"),
    (("--dense", "fp8-block"), "--dense fp8-block: weights were rounded to FP8"),
  ],
)
def test_rounded_weights_are_refused_by_name(few, convert, options, said):
  with pytest.raises(InputError, match="export the as-stored conversion") as caught:
    export.plan_export(reader.open_output(convert(few[0], *options)), None)
  assert said in str(caught.value)


def test_weights_packed_from_bfloat16_are_refused(small_sources, convert):
  out = convert(small_sources["kimi-linear"].directory, "--experts", "mxfp4")
  with pytest.raises(InputError, match="--experts mxfp4: weights were rounded to MXFP4"):
    export.plan_export(reader.open_output(out), None)


def test_vision_is_copied_from_the_same_checkpoint_only(few, small_sources, convert, edited, tmp_path, monkeypatch):
  out = reader.open_output(few[1])
  with index.open_source(few[0]) as source:
    exported(few[1], tmp_path / "hf", vision=source, shard_bytes=150_000)
    with index.open_source(tmp_path / "hf") as back:
      assert set(back.tensors) == set(source.tensors)
      for name in source.tensors:
        assert back.read(name).tobytes() == source.read(name).tobytes()
    with pytest.raises(InputError, match="is not that of"):
      export.plan_export(out, edited(source, config={**source.config, "bos_token_id": 1}))
    none = edited(source, {name: None for name in source.tensors if name.startswith(storage.VISION_PREFIXES)})
    with pytest.raises(InputError, match="holds no vision tensors"):
      export.plan_export(out, none)
    monkeypatch.setattr(index.Source, "sample", lambda _: "of other weights")
    with pytest.raises(InputError, match="its headers or weights are not those that"):
      export.plan_export(out, source)
    flat = reader.open_output(convert(small_sources["kimi-linear"].directory))
    with pytest.raises(InputError, match="has no vision part"):
      export.plan_export(flat, source)


def test_a_damaged_chunk_leaves_nothing_and_the_next_run_keeps_the_shards_that_were_done(few, tmp_path, capsys):
  out = shutil.copytree(few[1], tmp_path / "out")
  opened = reader.open_output(out)
  head = opened.read("decoder.logits_dense.kernel")
  (path,) = [p for p in (out / "0/items/d").iterdir() if head.tobytes() in p.read_bytes()]
  whole = path.read_bytes()
  at = whole.index(head.tobytes())
  path.write_bytes(whole[: at + 40] + bytes([whole[at + 40] ^ 1]) + whole[at + 41 :])
  target, partial = tmp_path / "hf", tmp_path / "hf.partial"
  with pytest.raises(database.UnreadableError, match=r"decoder\.logits_dense\.kernel: fails its own checksum"):
    exported(out, target, shard_bytes=100_000)
  assert not target.exists()
  done = {path.name: path.stat().st_mtime_ns for path in partial.glob("out/*.safetensors")}
  assert done
  assert not list(partial.glob("out/*.tmp"))
  path.write_bytes(whole)
  planned = exported(out, target, shard_bytes=100_000)
  assert f"{len(done)} of {len(planned.shards)} shards were done before and are kept" in capsys.readouterr().err
  assert not partial.exists()
  assert {name: (target / name).stat().st_mtime_ns for name in done} == done
  assert sorted(path.name for path in target.iterdir()) == sorted(
    [shard.name for shard in planned.shards] + ["config.json", "model.safetensors.index.json"]
  )
  exported(few[1], tmp_path / "at once", shard_bytes=100_000)
  for path in target.iterdir():
    assert path.read_bytes() == (tmp_path / "at once" / path.name).read_bytes()


def test_a_value_that_was_not_converted_fails_by_the_name_of_its_leaf_though_it_is_spread_over_shards(few, tmp_path):
  import tensorstore as ts

  out, leaf = shutil.copytree(few[1], tmp_path / "out"), "decoder.lead_1.mlp.experts.w1_packed"
  kvstore = {"driver": "ocdbt", "base": f"file://{out}/0/items/", "path": f"params.params.{leaf}/"}
  array = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()
  kept = array.read().result()
  array[2] = 77  # With checksums of its chunks that are right.
  with pytest.raises(
    InputError, match=rf"{leaf}: checksum \w{{8}}, recorded \w{{8}}: OUT is not what was converted: run"
  ):
    exported(out, tmp_path / "hf", shard_bytes=4_000)
  assert not (tmp_path / "hf").exists()
  assert list((tmp_path / "hf.partial/out").glob("*.safetensors"))
  array[...] = kept  # Shards that hold other leaves are kept, those of this one written again.
  exported(out, tmp_path / "hf", shard_bytes=4_000)
  with index.open_source(few[0]) as source, index.open_source(tmp_path / "hf") as back:
    assert text(back) == text(source)


def test_what_appears_at_hf_dir_meanwhile_stays_and_a_kept_shard_that_changed_is_written_again(
  few, tmp_path, monkeypatch, capsys
):
  put = export.Beside.put

  def strange(place: export.Beside, before) -> None:
    place.target.mkdir()
    (place.target / "mine").write_text("precious")
    put(place, before)

  target = tmp_path / "hf"
  with monkeypatch.context() as patched:
    patched.setattr(export.Beside, "put", strange)
    with pytest.raises(InputError, match=r"changed meanwhile \(mine\).*the finished export is kept in"):
      exported(few[1], target, shard_bytes=100_000)
  assert (target / "mine").read_text() == "precious"
  with pytest.raises(InputError, match="never overwritten"):
    exported(few[1], target, shard_bytes=100_000, overwrite=True)
  shutil.rmtree(target)
  shards = sorted((tmp_path / "hf.partial/out").glob("*.safetensors"))
  content = bytearray(shards[2].read_bytes())
  content[-5] ^= 1
  shards[2].write_bytes(content)
  capsys.readouterr()
  planned = exported(few[1], target, shard_bytes=100_000)
  assert f"{len(shards) - 1} of {len(shards)} shards were done before" in capsys.readouterr().err
  content[-5] ^= 1
  assert (target / shards[2].name).read_bytes() == content
  assert export.check_target(target, planned, overwrite=False)
  assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_limit_above_all_tensors_is_the_same_for_every_size(few):
  out = reader.open_output(few[1])
  large, larger = (export.plan_export(out, None, shard_bytes=size).identity for size in (10**12, 10**30))
  assert large == larger


def test_nothing_is_written_into_the_checkpoint_that_was_converted(few, tmp_path):
  planned = export.plan_export(reader.open_output(few[1]), None)
  for place in (few[0] / "sub", few[0].parent):
    with pytest.raises(InputError, match="inside each other"):
      export.check_target(place, planned, overwrite=True)
  (tmp_path / "loop").symlink_to("loop")
  with pytest.raises(InputError, match="a loop of links"):
    export.check_target(tmp_path / "loop/x", planned, overwrite=True)
  with pytest.raises(InputError, match="File name too long"):
    export.check_target(tmp_path / ("x" * 250), planned, overwrite=True)


def test_a_failure_before_the_first_shard_leaves_nothing_at_all(few, tmp_path, monkeypatch):
  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(export.os, "pwrite", full)
  with pytest.raises(InputError, match="No space left on device"):
    exported(few[1], tmp_path / "hf")
  assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_lacks_something_is_refused_before_anything_is_written(few, tmp_path):
  import tensorstore as ts

  out = shutil.copytree(few[1], tmp_path / "out")
  kvstore = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{out}/0/items/"}).result()
  gone, less = "params.params.decoder.decoder_norm.scale/", "params.params.decoder.lead_1.mlp.experts.w1_packed/"
  kvstore.delete_range(ts.KvStore.KeyRange(gone, gone[:-1] + "0")).result()
  kvstore.write(f"{less}c/3/0/0", None).result()
  with pytest.raises(InputError, match="is damaged or not what its") as caught:
    export.plan_export(reader.open_output(out), None)
  assert "decoder.decoder_norm.scale: missing" in str(caught.value)
  assert "w1_packed: 1 of its chunks missing: c/3/0/0" in str(caught.value)


def test_what_stands_at_the_target_decides(few, tmp_path, monkeypatch):
  out, target = few[1], tmp_path / "hf"
  planned = exported(out, target)
  assert export.check_target(target, planned, overwrite=False)  # The very same: nothing to do.
  other = export.plan_export(reader.open_output(out), None, shard_bytes=100_000)
  with pytest.raises(InputError, match="holds another export; give --overwrite"):
    export.check_target(target, other, overwrite=False)
  exported(out, target, shard_bytes=100_000, overwrite=True)
  assert len(list(target.glob("*.safetensors"))) == len(other.shards) > 1
  assert [path.name for path in tmp_path.iterdir()] == ["hf"]
  next(target.glob("*.safetensors")).unlink()
  with pytest.raises(
    InputError, match=r"holds this export, but model-.* is missing or not what was written; give --over"
  ):
    export.check_target(target, other, overwrite=False)
  exported(out, target, shard_bytes=100_000, overwrite=True)
  assert export.check_target(target, other, overwrite=False)
  (target / "config.json").write_text("{}")
  with pytest.raises(InputError, match=r"holds this export, but config\.json is missing or not"):
    export.check_target(target, other, overwrite=False)
  released = shutil.copytree(few[0], tmp_path / "released")
  with pytest.raises(InputError, match="never overwritten"):
    export.check_target(released, planned, overwrite=True)
  for place in (Path(out), Path(out) / "inside", Path(out).parent):
    with pytest.raises(InputError, match="inside each other"):
      export.check_target(place, planned, overwrite=True)
  (tmp_path / "file").write_text("")
  with pytest.raises(InputError, match="not a directory"):
    export.check_target(tmp_path / "file", planned, overwrite=True)
  with pytest.raises(InputError, match="no URL"):
    export.check_target("gs://bucket/hf", planned, overwrite=True)
  (tmp_path / "new.partial").mkdir()
  (tmp_path / "new.partial/mine").write_text("")
  with pytest.raises(InputError, match="holds mine, which no unfinished export left"):
    export.export(tmp_path / "new", planned, workers=1, overwrite=True)
  monkeypatch.setattr(export.store.LocalStore, "free", lambda _: 1000)
  with pytest.raises(InputError, match="1,000 bytes free, the export takes"):
    export.export(tmp_path / "big", planned, workers=1, overwrite=False)
  assert not list(tmp_path.glob("big*"))


def test_an_unfinished_export_of_something_else_is_given_up_only_when_told(few, tmp_path):
  partial = tmp_path / "hf.partial"
  partial.mkdir()
  (partial / "out").mkdir()
  state = {"identity": {}, "files": {"model-00001-of-000001.safetensors": None}, "made": None}
  (partial / "export.json").write_text(json.dumps(state))
  (partial / "out/model-00001-of-000001.safetensors").write_text("old")
  with pytest.raises(InputError, match="an unfinished export of something else"):
    exported(few[1], tmp_path / "hf")
  assert (partial / "out/model-00001-of-000001.safetensors").read_text() == "old"
  exported(few[1], tmp_path / "hf", overwrite=True)
  assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_two_exports_to_one_place_are_refused(few, tmp_path):
  planned = export.plan_export(reader.open_output(few[1]), None)
  with (
    export.Beside(tmp_path / "hf", export.STATE_FILE, "export").lock(),
    pytest.raises(InputError, match="another export is being written there"),
  ):
    export.export(tmp_path / "hf", planned, workers=1, overwrite=False)


def test_the_index_names_every_tensor_and_their_total_size(few, tmp_path):
  exported(few[1], tmp_path / "hf", shard_bytes=100_000)
  content = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
  with index.open_source(tmp_path / "hf") as back:
    assert content["weight_map"] == {name: tensor.shard for name, tensor in back.tensors.items()}
    assert content["metadata"]["total_size"] == sum(tensor.nbytes for tensor in back.tensors.values())
    for shard in back.shards.values():
      assert shard.header_bytes % 8 == 0


def test_the_safetensors_library_reads_the_shards(few, tmp_path):
  from safetensors.numpy import load_file

  exported(few[1], tmp_path / "hf")
  (path,) = (tmp_path / "hf").glob("*.safetensors")
  loaded = load_file(path)
  with index.open_source(few[0]) as source:
    assert set(loaded) == set(storage.text_tensors(source))
    for name, array in loaded.items():
      assert np.array_equal(array.view(np.uint8), source.read(name).view(np.uint8))
