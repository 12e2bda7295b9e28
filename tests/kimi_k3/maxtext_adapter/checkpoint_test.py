"""A checkpoint is loaded if it fits to the last leaf, shape and dtype, and refused with the difference otherwise."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_k3.checksums import array_checksum
from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter import checkpoint
from kimi_k3.maxtext_adapter.checkpoint import (
  Recorded,
  check_content,
  check_cuts,
  check_fit,
  check_settings,
  load_params,
  model_leaves,
  read_record,
  recorded_leaves,
  stored_leaves,
)

SHAPES = {
  ("embedder", "table"): ((8, 4), "bfloat16"),
  ("layer", "experts", "w1_packed"): ((2, 3, 16), "uint8"),
  ("layer", "rate"): ((3,), "float32"),
}
NAMES = {".".join(path): jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for path, (shape, dtype) in SHAPES.items()}


def nested(leaves: dict[tuple[str, ...], Any]) -> dict[str, Any]:
  tree: dict[str, Any] = {}
  for path, value in leaves.items():
    held = tree
    for name in path[:-1]:
      held = held.setdefault(name, {})
    held[path[-1]] = value
  return tree


def arrays() -> dict[tuple[str, ...], jax.Array]:
  rng = np.random.default_rng(0)
  return {path: jnp.asarray(rng.integers(0, 100, shape), dtype) for path, (shape, dtype) in SHAPES.items()}


def abstract() -> nnx.State:
  """Parameters as the engine asks for them: shapes, dtypes and where they go."""
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  wanted = {path: jax.ShapeDtypeStruct(shape, jnp.dtype(d), sharding=place) for path, (shape, d) in SHAPES.items()}
  return nnx.State(nested({path: nnx.Param(leaf) for path, leaf in wanted.items()}))


def save(path: Path, tree: dict[str, Any]) -> str:
  import orbax.checkpoint as ocp

  ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)).save(path, tree)
  return str(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
  """A checkpoint that fits."""
  return save(tmp_path_factory.mktemp("saved") / "items", {"params": {"params": nested(arrays())}})


def test_the_stored_leaves_are_told_without_reading_them(saved):
  assert stored_leaves(saved) == NAMES


def test_a_model_names_its_leaves_as_the_checkpoint_does():
  class Layer(nnx.Module):
    def __init__(self):
      self.rate, self.cache = nnx.Param(jnp.zeros(3)), nnx.Cache(jnp.zeros(5))

  class Model(nnx.Module):
    def __init__(self):
      self.layer = Layer()

  assert model_leaves(nnx.eval_shape(Model)) == {"layer.rate": jax.ShapeDtypeStruct((3,), jnp.float32)}


def test_what_fits_is_loaded_bit_for_bit_where_it_belongs(saved):
  loaded = load_params(saved, abstract())
  for path, expected in arrays().items():
    found: Any = nnx.to_pure_dict(loaded)
    for name in path:
      found = found[name]
    assert found.dtype == expected.dtype
    assert found.sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def with_leaf(path: tuple[str, ...], change) -> dict[str, Any]:
  leaves = arrays()
  leaves[path] = change(leaves[path])
  return {"params": {"params": nested(leaves)}}


TABLE, CODES, RATE = SHAPES
WRONG_LEAVES = {
  "half width": (CODES, lambda x: x[..., :8], "w1_packed is uint8[2, 3, 8], expected uint8[2, 3, 16]"),
  "transposed": (TABLE, lambda x: x.T, "embedder.table is bfloat16[4, 8], expected bfloat16[8, 4]"),
  "fewer axes": (CODES, lambda x: x.reshape(6, 16), "w1_packed is uint8[6, 16], expected uint8[2, 3, 16]"),
  "wider": (TABLE, lambda x: x.astype(jnp.float32), "embedder.table is float32[8, 4], expected bfloat16[8, 4]"),
  "narrower": (RATE, lambda x: x.astype(jnp.bfloat16), "layer.rate is bfloat16[3], expected float32[3]"),
  "signed": (CODES, lambda x: x.astype(jnp.int8), "w1_packed is int8[2, 3, 16], expected uint8[2, 3, 16]"),
}


@pytest.mark.parametrize("change", WRONG_LEAVES)
def test_a_leaf_of_another_shape_or_dtype_is_refused_and_not_cast_repeated_or_transposed(tmp_path, change):
  path, make, said = WRONG_LEAVES[change]
  items = save(tmp_path / "items", with_leaf(path, make))
  with pytest.raises(InputError) as error:
    load_params(items, abstract())
  assert said in str(error.value)
  assert str(error.value).startswith(f"{items} does not fit the config: ")


def test_missing_and_additional_leaves_are_named(tmp_path):
  leaves = arrays()
  del leaves[RATE]
  leaves["layer", "rates"] = jnp.zeros(3)
  items = save(tmp_path / "items", {"params": {"params": nested(leaves)}})
  with pytest.raises(InputError) as error:
    load_params(items, abstract())
  assert "layer.rate is missing; layer.rates is not part of the model." in str(error.value)


def test_an_exact_fit_says_nothing():
  check_fit(NAMES, dict(NAMES), "OUT")
  check_fit({}, {}, "OUT")


def test_all_kinds_of_faults_are_listed_and_the_rest_is_counted():
  stored = dict(NAMES) | {f"extra_{i}": jax.ShapeDtypeStruct((1,), jnp.float32) for i in range(7)}
  del stored["layer.rate"]
  with pytest.raises(InputError) as error:
    check_fit(NAMES, stored, "OUT/0/items")
  assert str(error.value) == (
    "OUT/0/items does not fit the config: layer.rate is missing; extra_0 is not part of the model; "
    "extra_1 is not part of the model; extra_2 is not part of the model; extra_3 is not part of the model; "
    "extra_4 is not part of the model and 2 more. Use the decode.yml that was written with the checkpoint, or the "
    "config that it was trained with"
  )


@pytest.mark.parametrize("folded", [True, False])
def test_the_other_form_of_scan_layers_is_recognised(folded):
  one = jax.ShapeDtypeStruct((1,), jnp.float32)
  scanned = {"decoder.lead_0.w": one, "decoder.blocks.layers_0.w": one}
  unrolled = {f"decoder.layers_{i}.w": one for i in range(8)}
  model, stored = (unrolled, scanned) if folded else (scanned, unrolled)
  with pytest.raises(InputError, match=f"written with scan_layers: {str(folded).lower()}: set that, or convert again"):
    check_fit(model, stored, "OUT")


def trainers(**more: Any) -> dict[str, Any]:
  """The tree of a training run's checkpoint, with more beside it."""
  moments = [{"mu": {"params": nested(arrays())}, "count": jnp.ones(3, jnp.int32)}]
  streams = {"model": {"layer": {"rngs": {"params": {"count": jnp.zeros((), jnp.uint32)}}}}}
  return {"params": {"params": nested(arrays())}, "opt_state": moments, "step": jnp.int32(7), "nnx_aux": streams} | more


def test_of_what_the_trainer_saved_the_parameters_are_loaded(tmp_path):
  items = save(tmp_path / "checkpoints" / "7" / "items", trainers())
  assert stored_leaves(items) == NAMES
  loaded = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(load_params(items, abstract()))}
  expected = {".".join(path): array for path, array in arrays().items()}
  assert loaded.keys() == expected.keys()
  for name, array in expected.items():
    assert (loaded[name].dtype, loaded[name].tolist()) == (array.dtype, array.tolist())


def test_what_neither_a_conversion_nor_the_trainer_writes_is_named(tmp_path):
  tree = trainers(params={"params": nested(arrays()), "tables": {"t": jnp.zeros(3)}}, ema={"w": jnp.zeros(3)})
  with pytest.raises(InputError, match=r"items': holds params\.tables; ema, which this model has not"):
    load_params(save(tmp_path / "items", tree), abstract())


def test_a_step_that_was_being_saved_is_told(saved, tmp_path):
  path = shutil.copytree(saved, tmp_path / "7.orbax-checkpoint-tmp" / "items")
  with pytest.raises(InputError, match="the trainer was killed while it saved that step"):
    load_params(str(path), abstract())


def test_a_path_without_a_checkpoint_is_told(tmp_path):
  for path in (tmp_path / "nowhere", tmp_path):
    with pytest.raises(InputError, match=r"no Orbax checkpoint there \(no _METADATA\); expected OUT/0/items"):
      stored_leaves(str(path))


@pytest.mark.parametrize("tree", [{"params": {"weights": {"w": jnp.zeros(3)}}}, {"state": {"w": jnp.zeros(3)}}])
def test_a_checkpoint_of_something_else_is_told(tmp_path, tree):
  with pytest.raises(InputError, match="not a checkpoint of parameters"):
    stored_leaves(save(tmp_path / "items", tree))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_broken_metadata_is_told(tmp_path, content):
  items = save(tmp_path / "items", {"params": {"params": nested(arrays())}})
  (Path(items) / "_METADATA").write_text(content)
  with pytest.raises(InputError, match="not a checkpoint of parameters"):
    load_params(items, abstract())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # Orbax's readers, left behind
@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_data_that_cannot_be_read_is_told(tmp_path, damage):
  items = Path(save(tmp_path / "items", {"params": {"params": nested(arrays())}}))
  largest = max((p for p in items.rglob("*") if p.parent.name == "d"), key=lambda p: p.stat().st_size)
  if damage == "removed":
    largest.unlink()
  else:
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
  with pytest.raises(InputError, match=r"items: cannot be read|not a checkpoint of parameters") as error:
    load_params(str(items), abstract())
  assert "\n" not in str(error.value)


def test_a_truncated_data_file_is_told_in_one_line_and_nothing_else(tmp_path):
  items = Path(save(tmp_path / "items", {"params": {"params": nested(arrays())}}))
  for data in (path for path in items.rglob("d/*") if path.is_file()):
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
  script = f"from kimi_k3.maxtext_adapter.checkpoint import stored_leaves; stored_leaves({str(items)!r})"
  run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
  assert "Event loop" not in run.stderr
  assert re.match(r"kimi_k3.errors.InputError: .*cannot be read.*convert again", run.stderr.splitlines()[-1])


@pytest.mark.parametrize("keep", [0, 50])
def test_a_damaged_manifest_is_told_in_one_line_and_nothing_else(tmp_path, keep):
  items = Path(save(tmp_path / "items", {"params": {"params": nested(arrays())}}))
  manifest = items / "manifest.ocdbt"
  manifest.write_bytes(manifest.read_bytes()[:keep])
  script = f"from kimi_k3.maxtext_adapter.checkpoint import stored_leaves; stored_leaves({str(items)!r})"
  run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
  assert "Event loop" not in run.stderr
  assert re.match(
    r"kimi_k3.errors.InputError: .*(cannot be read|holds no arrays).*convert again", run.stderr.splitlines()[-1]
  )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's readers, left behind
def test_a_damaged_byte_of_a_converted_checkpoint_is_told_in_one_line(tiny_checkpoint, convert, tmp_path):
  from kimi_k3.maxtext_adapter.engine import make_forward
  from kimi_k3.maxtext_adapter.settings import read_config

  made = convert(tiny_checkpoint("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2"))
  out = shutil.copytree(made, tmp_path / "out")
  largest = max((out / "0" / "items" / "d").iterdir(), key=lambda path: path.stat().st_size)
  data = bytearray(largest.read_bytes())
  data[len(data) // 2] ^= 1
  largest.write_bytes(data)
  with pytest.raises(InputError, match=r"items: cannot be read: DATA_LOSS.*Digest mismatch.*convert again") as error:
    make_forward(read_config(str(out / "decode.yml"), []))
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", ["halved", "retyped"])
def test_a_converted_checkpoint_with_one_changed_leaf_is_refused(tiny_checkpoint, convert, monkeypatch, change):
  """The model asks through its config; the stored metadata is changed on the way."""
  from kimi_k3.maxtext_adapter.engine import make_forward
  from kimi_k3.maxtext_adapter.settings import read_config

  out = convert(tiny_checkpoint("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2"))
  name = "decoder.lead_1.mlp.experts.w1_packed"

  def tampered(path):
    leaves = stored_leaves(path)
    found = leaves[name]
    shape, dtype = found.shape, found.dtype
    shape, dtype = ((*shape[:-1], shape[-1] // 2), dtype) if change == "halved" else (shape, np.dtype("int8"))
    return leaves | {name: jax.ShapeDtypeStruct(shape, dtype)}

  monkeypatch.setattr(checkpoint, "stored_leaves", tampered)
  with pytest.raises(InputError) as error:
    make_forward(read_config(str(out / "decode.yml"), []))
  found = "uint8[4, 32, 8]" if change == "halved" else "int8[4, 32, 16]"
  assert f"{name} is {found}, expected uint8[4, 32, 16]. Use the decode.yml" in str(error.value)


SQUARE = np.arange(16, dtype=np.float32).reshape(4, 4)
CONTENT = {"a.up": SQUARE, "a.gate": SQUARE + 1, "a.norm": np.ones(3, np.float32), "b.norm": np.ones(3, np.float32)}
CHUNKS = {"a.up": (4, 4), "a.gate": (2, 3), "a.norm": (3,), "b.norm": (3,)}


def with_changes(changes: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  return CONTENT | {name.replace("__", "."): array for name, array in changes.items()}


def recorded(**changes: np.ndarray) -> dict[str, Recorded]:
  arrays = with_changes(changes)
  return {n: Recorded(array_checksum(array, CHUNKS[n]), CHUNKS[n]) for n, array in arrays.items()}


def on_device(**changes: np.ndarray) -> dict[str, jax.Array]:
  return {name: jnp.asarray(array) for name, array in with_changes(changes).items()}


def content_refusal(leaves: dict[str, jax.Array], held: dict[str, Recorded]) -> str:
  with pytest.raises(InputError) as error:
    check_content(leaves, held, "OUT")
  assert "\n" not in str(error.value)
  return str(error.value).removeprefix("OUT is not what was converted: ").removesuffix(". Convert again")


def test_leaves_as_they_were_recorded_are_accepted_and_so_are_leaves_without_a_record():
  check_content(on_device(), recorded(), "OUT")
  check_content(on_device(a__up=SQUARE.T), {}, "OUT")


def test_a_square_leaf_that_was_transposed_is_named():
  found, expected = (array_checksum(array, (4, 4)) for array in (SQUARE.T.copy(), SQUARE))
  message = content_refusal(on_device(a__up=SQUARE.T), recorded())
  assert message == f"a.up has checksum {found}, recorded is {expected}"


def test_leaves_that_changed_places_are_named_with_each_other():
  held = recorded() | {"a.gate": Recorded(array_checksum(SQUARE + 1, (4, 4)), (4, 4))}
  message = content_refusal(on_device(a__up=SQUARE + 1, a__gate=SQUARE), held)
  up, gate = message.split("; ")
  assert re.fullmatch(r"a.up has checksum \w{8}, which is a.gate, recorded is \w{8}", up)
  assert re.fullmatch(r"a.gate has checksum \w{8}, which is a.up, recorded is \w{8}", gate)


def test_a_leaf_that_was_never_recorded_is_named():
  held = recorded()
  del held["a.up"]
  assert content_refusal(on_device(), held) == "a.up has checksum none, recorded is none"


def test_a_leaf_recorded_with_other_axes_is_named():
  held = recorded() | {"a.up": Recorded("00000000", (16,))}
  assert content_refusal(on_device(), held) == "a.up has checksum none, recorded is 00000000"


def test_the_smallest_leaves_are_compared_and_no_more_than_so_many_bytes_of_them(monkeypatch):
  monkeypatch.setattr(checkpoint, "CHECKED_BYTES", 2 * 12 + 63)
  check_content(on_device(a__up=SQUARE.T), recorded(), "OUT")  # 64 bytes
  assert content_refusal(on_device(b__norm=np.zeros(3, np.float32)), recorded()).startswith("b.norm has checksum ")


def test_sharded_leaves_are_compared_in_the_order_of_the_whole():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
  check_content({"a.up": jax.device_put(SQUARE, place)}, recorded(), "OUT")


RECORD = {
  "schema": 2, "commit": "rename", "checksums": {"a": "00000000", "b": "01234567"}, "chunks": {"a": [3], "b": []},
  "options": {"scan": True}, "packed_modules": ["experts", "latent"], "fp8_modules": [],
  "stored": {"float32_leaves": ["A_log", "dt_bias"]},
}  # fmt: skip


@pytest.fixture
def items(tmp_path) -> Path:
  """OUT/0/items of a conversion with RECORD."""
  made = tmp_path / "out" / "0" / "items"
  made.mkdir(parents=True)
  (tmp_path / "out" / "conversion.json").write_text(json.dumps(RECORD))
  return made


def test_the_record_of_a_conversion_is_found_two_directories_above_and_other_checkpoints_have_none(items):
  assert read_record(str(items)) == read_record(f"{items}/") == RECORD
  (items.parents[1] / "conversion.json").unlink()
  assert read_record(str(items)) is None
  assert recorded_leaves(None, str(items)) == {}


def test_a_record_tells_checksum_and_chunks_of_each_leaf():
  found = recorded_leaves(RECORD, "OUT")
  assert found == {"a": Recorded("00000000", (3,)), "b": Recorded("01234567", ())}


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "5", "null", '"schema"', "\udcff"])
def test_a_record_that_cannot_be_read_is_told(items, content):
  (items.parents[1] / "conversion.json").write_bytes(content.encode("utf-8", "surrogateescape"))
  with pytest.raises(InputError, match=r"conversion\.json: cannot be read: .*; convert again") as error:
    read_record(str(items))
  assert "\n" not in str(error.value)


def test_a_directory_in_place_of_the_record_is_told(items):
  (items.parents[1] / "conversion.json").unlink()
  (items.parents[1] / "conversion.json").mkdir()
  with pytest.raises(InputError, match=r"conversion\.json: cannot be read: .*; convert again"):
    read_record(str(items))


@pytest.mark.parametrize("schema", [1, 3, "2", None])
def test_a_record_of_another_schema_is_refused(items, schema):
  (items.parents[1] / "conversion.json").write_text(json.dumps(RECORD | {"schema": schema}))
  with pytest.raises(InputError, match=rf"is of schema {schema!r}, this version reads 2; convert again"):
    read_record(str(items))


NO_SHAPES = (
  [[]],
  {"a": [3]},
  {"a": [3], "c": [1]},
  {"a": [3], "b": [0]},
  {"a": [3], "b": [True]},
  {"a": [3], "b": 3},
  None,
)
NO_SUMS = ([], {}, None, 5, ["abc"], {"a": 5, "b": "0"}, {"a": ["0"], "b": "0"})


@pytest.mark.parametrize(
  "change", [*({"chunks": v} for v in NO_SHAPES), *({"checksums": v} for v in NO_SUMS)], ids=repr
)
def test_a_record_whose_checksums_or_chunks_are_not_those_of_leaves_is_refused(change):
  with pytest.raises(InputError, match=r"its conversion\.json lacks checksums and chunks of each leaf; convert again"):
    recorded_leaves(RECORD | change, "OUT")


def test_an_unfinished_conversion_is_refused_and_says_so(items):
  state = items.parents[1] / ".unfinished"
  state.mkdir()
  (state / "lock").touch()
  assert read_record(str(items)) == RECORD  # a removal that was killed after the commit
  (state / "plan.json").touch()
  with pytest.raises(
    InputError, match=r"the conversion that makes it is not finished \(.*plan\.json is there\)"
  ) as error:
    load_params(str(items), abstract())
  assert "finish it first" in str(error.value)


def test_a_copy_without_its_commit_markers_is_refused_and_the_marker_is_named(items):
  out = items.parents[1]
  (out / "conversion.json").write_text(json.dumps(RECORD | {"commit": "marker"}))
  for marker in ("0/items/commit_success.txt", "0/commit_success.txt"):
    with pytest.raises(InputError, match=f"its commit marker .*/out/{marker} is missing: not finished, or not copied"):
      load_params(str(items), abstract())
    (out / marker).touch()
  record = read_record(str(items))
  assert record
  assert record["commit"] == "marker"


SETTINGS = {
  "scan_layers": True, "packed_modules": ["latent", "experts"], "fp8_modules": [],
  "float32_leaves": ("dt_bias", "A_log"),
}  # fmt: skip
OTHERS = {
  "scan_layers": (False, "scan_layers is false in the config, true in the checkpoint"),
  "packed_modules": (
    ["experts"],
    'packed_modules is ["experts"] in the config, ["experts", "latent"] in the checkpoint',
  ),
  "fp8_modules": (["dense"], 'fp8_modules is ["dense"] in the config, [] in the checkpoint'),
  "float32_leaves": ([], 'float32_leaves is [] in the config, ["A_log", "dt_bias"] in the checkpoint'),
}


def test_settings_of_the_record_in_any_order_are_accepted_and_without_a_record_none_is_looked_at():
  check_settings(SETTINGS, RECORD, "OUT")
  check_settings({}, RECORD, "OUT")
  check_settings({name: value for name, (value, _) in OTHERS.items()}, None, "OUT")


@pytest.mark.parametrize("name", OTHERS)
def test_another_setting_than_the_checkpoint_was_made_for_is_refused_with_both_sides(name):
  value, said = OTHERS[name]
  with pytest.raises(InputError) as error:
    check_settings(SETTINGS | {name: value}, RECORD, "OUT")
  advice = "Use the decode.yml written with it, or convert again"
  assert str(error.value) == f"OUT: made for another config: {said}. {advice}"


def test_all_settings_that_differ_are_named():
  with pytest.raises(InputError) as error:
    check_settings({name: value for name, (value, _) in OTHERS.items()}, RECORD, "OUT")
  assert all(said in str(error.value) for _, said in OTHERS.values())


@pytest.mark.parametrize("field", ["options", "packed_modules", "fp8_modules", "stored"])
@pytest.mark.parametrize("value", [None, 5, [], [1, "a"], {}])
def test_a_record_that_does_not_say_how_it_was_made_is_refused(field, value):
  if field == "fp8_modules" and value == []:
    return
  with pytest.raises(InputError, match="made for another config"):
    check_settings(SETTINGS, RECORD | {field: value}, "OUT")


def test_a_converted_checkpoint_is_refused_under_another_setting_before_a_leaf_is_read(
  tiny_checkpoint, convert, monkeypatch
):
  """Shapes alone would not tell all of these: a setting is compared first."""
  from kimi_k3.maxtext_adapter.checkpoint import storage_settings
  from kimi_k3.maxtext_adapter.settings import read_config

  monkeypatch.setattr(checkpoint, "stored_leaves", lambda _: pytest.fail("looked at the leaves"))
  made = convert(tiny_checkpoint("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2"))
  config = read_config(str(made / "decode.yml"), [])
  right = storage_settings(config)
  check_settings(right, read_record(config.load_parameters_path), "OUT")
  assert set(right) == set(OTHERS)
  for name, value in right.items():
    other = (not value) if isinstance(value, bool) else [*value, "dense"]
    with pytest.raises(InputError, match=f"made for another config: {name} is "):
      load_params(config.load_parameters_path, abstract(), right | {name: other})


def test_leaves_that_the_mesh_cuts_unevenly_are_named_and_never_padded():
  """As when a size of -1 takes what is left of the devices, which nobody knows when the config is read."""
  mesh = jax.sharding.AbstractMesh((3, 2), ("expert", "tensor"))

  def leaf(*axes):
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.ShapeDtypeStruct((16, 8), jnp.uint8, sharding=place)

  check_cuts({"a": leaf(None, "tensor"), "b": leaf(("tensor",))})
  with pytest.raises(InputError) as error:
    check_cuts({"a": leaf(None, "tensor"), "mlp.experts.w1": leaf("expert"), "c": leaf(None, ("tensor", "expert"))})
  message = str(error.value)
  assert message.startswith("the mesh does not divide mlp.experts.w1 [16, 8] by ('expert',) of {'expert': 3, 'tensor")
  assert "; c [16, 8] by (None, ('tensor', 'expert')) of " in message
