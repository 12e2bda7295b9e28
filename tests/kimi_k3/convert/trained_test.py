"""A trainer's step in the released layout: what is written is what was trained, and nothing else passes for a step."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

from kimi_k3.config import FLOAT32_KINDS, KimiK3Config
from kimi_k3.convert import index, mxfp4, plan, reader, shards, storage, trained, training_step
from kimi_k3.errors import InputError
from kimi_k3.training import record

FEW = ("--set", "num_experts=4", "--set", "num_experts_per_token=2")
FOLDED = ("--layers", "12", *FEW)  # 4 leading layers, 2 blocks of 4
UNROLLED = ("--layers", "5", *FEW)
LINEAR = (*UNROLLED, "--variant", "kimi-linear")
W1 = "decoder.lead_1.mlp.experts.w1"
NORM = "decoder.lead_0.attention.o_norm.scale"  # float32 in a release


def architecture(source: Path) -> KimiK3Config:
  """Of the model that a released checkpoint was trained as: nothing is packed."""
  with index.open_source(source) as opened:
    return plan.make_plan(opened, plan.Options(experts="bf16")).config


def opened(step: Path, source: Path, *, scan: bool, weight_dtype: str = "float32") -> training_step.Training:
  return training_step.open_training(step, architecture(source), scan=scan, weight_dtype=weight_dtype)


def exported(
  training: training_step.Training,
  target: Path,
  *,
  experts: trained.Experts | None = None,
  shard_bytes=10**9,
  **more: Any,
) -> trained.Packing:
  planned = trained.plan_export(training, experts=experts, shard_bytes=shard_bytes)
  return trained.export(target, planned, workers=2, overwrite=False, **more)


def text(directory: Path) -> dict[str, tuple]:
  """Everything of the text tensors: dtype, shape, bytes."""
  with index.open_source(directory) as source:
    names = storage.text_tensors(source)
    return {name: (t.dtype, t.shape, source.read(name).tobytes()) for name, t in names.items()}


def array(step: Path, name: str) -> Any:
  """An array of a step, to be read or written."""
  kvstore = {"driver": "ocdbt", "base": f"file://{step}/items/", "path": f"params.params.{name}/"}
  return ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()


def keys(step: Path) -> Any:
  """The database below a step's items."""
  return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{step}/items/"}).result()


def replace(step: Path, name: str, value: np.ndarray, chunk_shape: tuple[int, ...] | None = None) -> None:
  """Puts another array in the place of a leaf, or a new one, as Orbax stores it."""
  store, prefix = keys(step), f"params.params.{name}/"
  store.delete_range(ts.KvStore.KeyRange(prefix, prefix[:-1] + "0")).result()
  kvstore = {"driver": "ocdbt", "base": f"file://{step}/items/", "path": prefix}
  chunk = list(chunk_shape or value.shape)
  codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd", "configuration": {"level": 3}}]
  spec = {
      "driver": "zarr3", "kvstore": kvstore, "dtype": value.dtype.name,
      "metadata": {
          "shape": list(value.shape), "codecs": codecs, "data_type": value.dtype.name,
          "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
      },
      "store_data_equal_to_fill_value": True,
  }  # fmt: skip
  ts.open(spec, create=True).result().write(value).result()


@pytest.fixture(scope="module")
def folded(tiny_checkpoint, trained_step) -> tuple[Path, Path]:
  """K3 and a step of its training with folded layers, in float32."""
  source = tiny_checkpoint(*FOLDED)
  return source, trained_step(source, "--scan")


@pytest.fixture
def step(folded, tmp_path) -> Path:
  """A step to damage."""
  return shutil.copytree(folded[1], tmp_path / "run" / "checkpoints" / "7")


def refusal(step: Path, folded: tuple[Path, Path], *, scan: bool = True, weight_dtype: str = "float32") -> str:
  """What is said of a step that is refused before anything is written."""
  with pytest.raises(InputError) as caught:
    opened(step, folded[0], scan=scan, weight_dtype=weight_dtype)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_another_model_of_the_same_shapes_is_refused_by_what_the_run_noted(folded, step, capsys):
  config = architecture(folded[0])
  noted = step.parent.parent / record.NAME
  noted.write_text(record.encode(config))
  opened(step, folded[0], scan=True)
  assert record.NAME not in capsys.readouterr().err
  other = dataclasses.replace(config, attn_res_block_size=2, routed_scaling_factor=2.5)
  with pytest.raises(InputError, match=r"trained with .*routed_scaling_factor 1.0 and not 2.5.*: give the config"):
    training_step.open_training(step, other, scan=True, weight_dtype="float32")
  noted.write_bytes(b"[]")
  assert "holds list, expected an object: damaged" in refusal(step, folded)
  noted.unlink()
  opened(step, folded[0], scan=True)
  assert f"no {record.NAME} two directories up: what shapes do not show" in capsys.readouterr().err


def test_a_release_among_the_steps_is_refused(folded, step):
  planned = trained.plan_export(opened(step, folded[0], scan=True), experts=None, shard_bytes=10**9)
  with pytest.raises(InputError):
    shards.check_target(step.parent / "8", planned, overwrite=False)


def test_a_model_of_representable_weights_comes_back_byte_for_byte(folded, tmp_path):
  source, step = folded
  packing = exported(opened(step, source, scan=True), tmp_path / "hf", shard_bytes=200_000)
  assert text(tmp_path / "hf") == text(source)
  assert packing.rms_relative == packing.largest_of_group == 0.0
  assert packing.weight_squares > 0
  with index.open_source(source) as first, index.open_source(tmp_path / "hf") as back:
    assert plan.make_plan(back, plan.Options()).config == plan.make_plan(first, plan.Options()).config
    said, released = back.config["text_config"], first.config["text_config"]
    assert back.config["model_type"] == first.config["model_type"] == "kimi_k3"
    assert said["quantization_config"] == released["quantization_config"]
    assert {key: said[key] for key in released if key != "initializer_range"} == {
      key: value for key, value in released.items() if key != "initializer_range"
    }
    assert len(back.shards) > 1
    layers = [back.tensors[f"language_model.model.layers.{i}.input_layernorm.weight"].shard for i in range(12)]
    assert layers == sorted(layers)


@pytest.mark.slow
def test_kimi_linear_comes_back_flat_and_in_bfloat16_from_unrolled_layers(tiny_checkpoint, trained_step, tmp_path):
  source = tiny_checkpoint(*LINEAR)
  step = trained_step(source, "--no-scan", weight_dtype="bfloat16")
  exported(opened(step, source, scan=False, weight_dtype="bfloat16"), tmp_path / "hf")
  assert text(tmp_path / "hf") == text(source)
  config = json.loads((tmp_path / "hf/config.json").read_text())
  assert config["model_type"] == "kimi_linear"
  assert not {"text_config", "quantization_config"} & config.keys()
  with index.open_source(tmp_path / "hf") as back:
    assert back.tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 4, 1)


@pytest.mark.slow
def test_experts_in_bfloat16_are_the_trained_weights_and_packing_them_later_is_packing_them_now(
  folded, step, tmp_path, convert
):
  weights = np.random.default_rng(0).normal(size=(4, 32, 32)).astype(np.float32)
  weights[0] *= 1e-30  # small, but of a normal float
  weights[1, :, 0] = 0
  array(step, W1).write(weights).result()
  training = opened(step, folded[0], scan=True)
  packing = exported(training, tmp_path / "packed", experts="mxfp4")
  exported(training, tmp_path / "plain", experts="bf16")
  stem = "language_model.model.layers.1.block_sparse_moe.experts.2.w1.weight"
  with index.open_source(tmp_path / "plain") as plain, index.open_source(tmp_path / "packed") as packed:
    rounded = weights[2].T.astype(ml_dtypes.bfloat16)
    assert plain.read(stem).tobytes() == rounded.tobytes()
    assert "quantization_config" not in plain.config["text_config"]
    decoded = mxfp4.decode(packed.read(f"{stem}_packed"), packed.read(f"{stem}_scale"), np.float32)
    error = np.abs(decoded - rounded.astype(np.float32))
    largest = np.abs(rounded.astype(np.float32)).max(axis=1, keepdims=True)
    assert (error <= largest / 4).all()  # A number between two codes, or above the last: see trained._PACKING_BOUND.
    assert error.max() > 0
    assert 0.1 < packing.largest_of_group <= 0.25
  later = reader.open_output(convert(tmp_path / "plain", "--experts", "mxfp4"))
  now = reader.open_output(convert(tmp_path / "packed"))
  for leaf in now.leaves:
    name = ".".join(leaf.path)
    assert later.read(name).tobytes() == now.read(name).tobytes(), name


def test_a_step_of_a_mesh_is_read_whatever_its_chunks_each_of_them_once_and_never_the_optimizers_state(
  folded, step, tmp_path
):
  for name, chunk in (
    ("decoder.blocks.layers_1.mlp.experts.w1", (1, 2, 16, 32)),
    ("decoder.blocks.layers_2.mlp.experts.w2", (2, 4, 32, 8)),
    ("token_embedder.embedding", (64, 32)),
    ("decoder.blocks.layers_0.attention.q_conv", (2, 4, 2, 32)),
  ):
    replace(step, name, array(step, name).read().result(), chunk)
  training = opened(step, folded[0], scan=True)
  (leaf,) = [leaf for leaf in training.leaves if leaf.path[1:3] == ("blocks", "layers_1") and leaf.path[-1] == "w1"]
  cells = list(trained._cells(training, leaf))
  assert [len(cell.pieces) for cell in cells] == [2] * 4  # By block, and by two experts.
  assert {cell.nbytes for cell in cells} == {2 * 32 * 32 * 4}
  planned = trained.plan_export(training, experts=None, shard_bytes=10**9)
  assert planned.cell_bytes == 256 * 64 * 4  # The embedding, in whole rows.
  _ = training.database.arrays
  before = _bytes_read()
  trained.export(tmp_path / "hf", planned, workers=2, overwrite=False)
  read = _bytes_read() - before
  assert text(tmp_path / "hf") == text(folded[0])
  store = keys(step)
  held = {key: len(store.read(key).result().value) for key in store.list().result()}
  stored, moments = (sum(size for key, size in held.items() if key.startswith(p)) for p in (b"params.", b"opt_state."))
  assert moments > stored / 10
  assert read < stored, (read, stored)  # Descriptions of the arrays were read before.


def _bytes_read() -> int:
  found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
  return sum(int(value["value"]) for metric in found for value in metric["values"])


def test_every_leaf_that_is_missing_extra_or_of_another_shape_or_dtype_is_named(folded, step):
  store, norm = keys(step), "decoder.decoder_norm.scale"
  store.delete_range(ts.KvStore.KeyRange(f"params.params.{norm}/", f"params.params.{norm}0")).result()
  replace(step, "decoder.extra.kernel", np.zeros((2, 2), np.float32))
  replace(step, W1, np.zeros((4, 32, 16), np.float32))
  replace(step, NORM, np.zeros(32, ml_dtypes.bfloat16))
  store.write("params.frozen.table/zarr.json", b"{}").result()
  store.write("nnx_aux.model.decoder.table/zarr.json", b"{}").result()
  said = refusal(step, folded)
  for fault in (
    f"{norm}: missing, expected float32 [64]",
    "decoder.extra.kernel: unexpected, no such leaf in the model",
    f"{W1}: float32 [4, 32, 16], expected float32 [4, 32, 32]",
    f"{NORM}: bfloat16 [32], expected float32 [32]",
    "params.frozen.table: unexpected, neither a parameter nor the optimizer's state",
    "nnx_aux.model.decoder.table: unexpected",
    "is not a whole step of the config's model: give the config of the training run",
  ):
    assert fault in said


def test_missing_chunks_and_files_that_end_early_are_named(folded, step):
  (key,) = [k for k in keys(step).list().result() if k.startswith(f"params.params.{W1}/c".encode())]
  keys(step).write(key, None).result()
  largest = max((step / "items").rglob("d/*"), key=lambda path: path.stat().st_size)
  os.truncate(largest, largest.stat().st_size // 2)
  said = refusal(step, folded)
  assert f"{W1}: 1 of its chunks missing: c/0/0/0" in said
  assert f"{largest.relative_to(step)}: {largest.stat().st_size:,} bytes, at least" in said


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({"scan": False}, "was trained with scan_layers=true, the config says false: set it as trained"),
    ({"weight_dtype": "bfloat16"}, "token_embedder.embedding: float32 [256, 64], expected bfloat16 [256, 64]"),
  ],
)
def test_a_config_of_another_run_is_refused(folded, options, expected):
  assert expected in refusal(folded[1], folded, **options)


def test_a_config_with_packed_experts_is_refused_before_the_step_is_compared(folded):
  with index.open_source(folded[0]) as source:
    config = plan.make_plan(source, plan.Options()).config
  with pytest.raises(InputError, match=r"stores experts packed, which is not trained: set packed_modules=\[\]"):
    training_step.open_training(folded[1], config, scan=True, weight_dtype="float32")


def test_what_is_no_finished_step_is_refused_and_says_what_it_is(folded, step, tmp_path, convert):
  assert "no step of a trainer there, expected RUN/checkpoints/STEP" in refusal(tmp_path / "nothing", folded)
  assert refusal(step.parent, folded).endswith("STEP; the last step below it is 7")
  assert "what `kimi-k3 convert` made is exported without --config" in refusal(convert(folded[0]), folded)
  killed = step.rename(step.with_name("7.orbax-checkpoint-tmp-12"))
  assert "by its name the trainer was killed while it saved it" in refusal(killed, folded)
  step = killed.rename(step)
  for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
    content = (step / name).read_bytes()
    (step / name).unlink()
    assert f"{name} missing: not finished, or not copied to the end" in refusal(step, folded)
    (step / name).write_bytes(content)
  metadata = json.loads((step / "_CHECKPOINT_METADATA").read_text())
  (step / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata | {"commit_timestamp_nsecs": None}))
  assert "has no time of commit: not finished" in refusal(step, folded)
  (step / "_CHECKPOINT_METADATA").write_text("[]")
  assert "a JSON list where an object was expected" in refusal(step, folded)
  (step / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata))
  tree = (step / "items/_METADATA").read_text()
  (step / "items/_METADATA").write_text(tree.replace('"use_zarr3": true', '"use_zarr3": false'))
  assert "checkpoint_storage_use_zarr3 false: set both to true" in refusal(step, folded)
  (step / "items/_METADATA").write_text(tree)
  (step / "items/manifest.ocdbt").unlink()
  assert "items/manifest.ocdbt missing" in refusal(step, folded)


def test_the_items_of_a_step_stand_for_it(folded):
  assert opened(folded[1] / "items", folded[0], scan=True).path == str(folded[1])


def test_every_leaf_that_no_release_can_hold_is_named_and_nothing_appears(folded, step, tmp_path):
  weights = array(step, W1).read().result()
  weights[3, 5, 7], weights[0, 0, 0], weights[1, 1, 1] = np.nan, -np.inf, 3.4e38  # The last rounds up to an infinity.
  array(step, W1).write(weights).result()
  norm = array(step, NORM).read().result()
  norm[3] = np.inf
  array(step, NORM).write(norm).result()
  embedding = array(step, "token_embedder.embedding").read().result()
  embedding[-1, -1] = -3.4e38
  array(step, "token_embedder.embedding").write(embedding).result()
  with pytest.raises(InputError) as caught:
    exported(opened(step, folded[0], scan=True), tmp_path / "hf")
  said = str(caught.value)
  assert f"{W1}: 2 value(s) are NaN or infinite and 1 value(s) are beyond bfloat16's largest, 3.39e38" in said
  assert f"{NORM}: 1 value(s) are NaN or infinite" in said
  assert "token_embedder.embedding: 1 value(s) are beyond bfloat16's largest" in said
  assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_an_array_that_cannot_be_read_ends_the_export_and_nothing_appears(folded, step, tmp_path):
  (key,) = [k for k in keys(step).list().result() if k.startswith(f"params.params.{W1}/c".encode())]
  keys(step).write(key, b"no zstd frame").result()
  training = opened(step, folded[0], scan=True)
  with pytest.raises(InputError, match=W1):
    exported(training, tmp_path / "hf")
  assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.slow
def test_what_stands_at_the_target_decides(folded, tmp_path, monkeypatch):
  target = tmp_path / "hf"
  training = opened(folded[1], folded[0], scan=True)
  planned = trained.plan_export(training, experts=None, shard_bytes=10**9)
  trained.export(target, planned, workers=2, overwrite=False)
  assert shards.check_target(target, planned, overwrite=False)
  other = trained.plan_export(training, experts="bf16", shard_bytes=10**9)
  with pytest.raises(InputError, match="holds another export; give --overwrite"):
    shards.check_target(target, other, overwrite=False)
  before = text(target)
  with monkeypatch.context() as patched:
    patched.setattr(trained, "check_result", _interrupt)
    with pytest.raises(KeyboardInterrupt):
      trained.export(target, other, workers=2, overwrite=True)
  assert text(target) == before
  assert [path.name for path in tmp_path.iterdir()] == ["hf"]
  trained.export(target, other, workers=2, overwrite=True)
  assert text(target) != before
  with pytest.raises(InputError, match="inside each other"):
    shards.check_target(folded[1] / "items/hf", planned, overwrite=False)


def _interrupt(*_: object) -> None:
  raise KeyboardInterrupt


def test_an_export_of_a_conversion_under_way_is_left_alone(folded, tmp_path):
  training = opened(folded[1], folded[0], scan=True)
  planned = trained.plan_export(training, experts=None, shard_bytes=10**9)
  place = trained.Beside(tmp_path / "hf", shards.STATE_FILE, "export")
  place.root.mkdir()
  place.begin({"of": "another"}, ["model.safetensors"])
  (place.out / "model.safetensors").write_bytes(b"half")
  with pytest.raises(InputError, match="an unfinished export of something else; --overwrite gives it up"):
    trained.export(tmp_path / "hf", planned, workers=1, overwrite=False)
  assert (place.out / "model.safetensors").read_bytes() == b"half"


def test_tokenizer_files_come_along(folded, tmp_path):
  training = opened(folded[1], folded[0], scan=True)
  with pytest.raises(InputError, match=r"holds none of .*tiktoken\.model.*leave --tokenizer-from out"):
    trained.plan_export(training, experts=None, shard_bytes=10**9, tokenizer=tmp_path)
  (tmp_path / "tiktoken.model").write_bytes(b"AA== 0\n")
  (tmp_path / "config.json").write_text("{}")  # Never in the place of what is written.
  planned = trained.plan_export(training, experts=None, shard_bytes=10**9, tokenizer=tmp_path)
  assert planned.files["tiktoken.model"] == b"AA== 0\n"
  assert json.loads(planned.files["config.json"])["model_type"] == "kimi_k3"


def test_widths_that_cannot_be_packed_are_refused_by_name(folded):
  training = opened(folded[1], folded[0], scan=True)
  config = dataclasses.replace(training.config, expert_mlp_dim=48)
  with pytest.raises(InputError, match="moe_intermediate_size is 48, not a multiple of the MXFP4 group of 32"):
    trained.plan_export(dataclasses.replace(training, config=config), experts="mxfp4", shard_bytes=10**9)


def test_k3_trained_with_other_float32_leaves_is_refused(folded):
  training = opened(folded[1], folded[0], scan=True)
  config = dataclasses.replace(training.config, float32_leaves=("A_log", "dt_bias"))
  assert set(training.config.float32_leaves) == set(FLOAT32_KINDS)
  with pytest.raises(InputError, match="stores conv1d, e_score_correction_bias, o_norm in float32 too"):
    trained.plan_export(dataclasses.replace(training, config=config), experts=None, shard_bytes=10**9)
