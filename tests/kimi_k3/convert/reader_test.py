"""A finished conversion is opened and read; anything else is refused with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from kimi_k3.convert import database, index, plan, reader
from kimi_k3.convert.write import leaf_name
from kimi_k3.errors import InputError

EXPERTS = "decoder.lead_1.mlp.experts.w1_packed"
FEW = ("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2")


@pytest.fixture(scope="module")
def few(tiny_checkpoint, convert) -> tuple[Path, Path]:
  src = tiny_checkpoint(*FEW)
  return src, convert(src)


@pytest.fixture
def out(few, tmp_path) -> Path:
  """A conversion to damage."""
  return shutil.copytree(few[1], tmp_path / "out")


def change_record(out: Path, **fields) -> None:
  record = json.loads((out / "conversion.json").read_text())
  (out / "conversion.json").write_text(json.dumps(record | fields))


def refusal(out: Path | str) -> str:
  with pytest.raises(InputError) as caught:
    reader.open_output(out)
  return str(caught.value)


@pytest.mark.parametrize("url", [False, True])
@pytest.mark.parametrize("options", [(), ("--no-scan", "--experts", "fp8-block", "--dense", "fp8-block")])
def test_the_record_implies_the_tree_that_is_there(few, convert, url, options):
  src = few[0]
  path = convert(src, *options)
  opened = reader.open_output(f"file://{path}" if url else path)
  chosen = {"experts": "fp8-block", "dense": "fp8-block"} if options else {}
  with index.open_source(src) as source:
    planned = plan.make_plan(source, plan.Options(scan=not options, **chosen))
  assert (opened.config, opened.form, opened.scan) == (planned.config, planned.form, planned.scan)
  assert opened.leaves == planned.leaves
  assert opened.config_bytes == (src / "config.json").read_bytes()
  arrays = opened.arrays
  assert {name: (held.shape, held.dtype) for name, held in arrays.held.items()} == {
    leaf_name(leaf): (leaf.shape, leaf.dtype) for leaf in planned.leaves
  }
  assert (arrays.damaged, arrays.strays) == ({}, ())
  assert database.chunk_faults(arrays) == database.differing_arrays(planned.leaves, arrays) == {}


def test_parts_of_leaves_are_read(few):
  with index.open_source(few[0]) as source:
    embedding = source.read("language_model.model.embed_tokens.weight")
    codes = source.read("language_model.model.layers.1.block_sparse_moe.experts.2.w1.weight_packed")
  opened = reader.open_output(few[1])
  assert opened.read("token_embedder.embedding").tobytes() == embedding.tobytes()
  part = opened.read("token_embedder.embedding", (slice(3, 7), slice(1, 5)))
  assert part.tobytes() == np.ascontiguousarray(embedding[3:7, 1:5]).tobytes()
  assert part.dtype == embedding.dtype
  assert opened.read(EXPERTS, (slice(2, 3),))[0].tobytes() == codes.tobytes()
  assert opened.file("decode.yml")
  assert opened.file("nothing") is None


def test_a_missing_chunk_is_an_error_and_not_zeros(out):
  kvstore = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{out}/0/items/"}).result()
  kvstore.write(f"params.params.{EXPERTS}/c/2/0/0", None).result()
  opened = reader.open_output(out)
  assert opened.arrays.held[EXPERTS].missing == ("c/2/0/0",)
  with pytest.raises(database.UnreadableError, match=f"{EXPERTS}: is missing"):
    opened.read(EXPERTS, (slice(2, 3),))
  assert opened.read(EXPERTS, (slice(1, 2),)).any()
  with pytest.raises(database.UnreadableError, match=r"decoder\.nothing: is missing"):
    opened.read("decoder.nothing")


def test_what_is_no_finished_conversion_is_refused_with_what_to_do(out, tmp_path):
  assert "nothing there, expected what `kimi-k3 convert SRC OUT` made" in refusal(tmp_path / "nothing")
  assert "nothing there" in refusal(f"file://{tmp_path}/nothing")
  (tmp_path / "later.partial").mkdir()
  (tmp_path / "later.partial/plan.json").write_text("{}")
  assert "unfinished" in refusal(tmp_path / "later")
  assert "unfinished conversion by its name; run the same `kimi-k3 convert` again" in refusal(
    tmp_path / "later.partial"
  )
  (out / ".unfinished").mkdir()
  reader.open_output(out)  # Only a plan is a conversion under way.
  (out / ".unfinished/plan.json").touch()
  assert "holds .unfinished: an unfinished conversion" in refusal(out)
  shutil.rmtree(out / ".unfinished")
  change_record(out, commit="marker")
  assert "commit_success.txt missing: an unfinished conversion" in refusal(out)
  (out / "conversion.json").unlink()
  assert "no conversion.json" in refusal(out)


def test_a_path_that_tensorstore_cannot_take_is_refused(tmp_path):
  with pytest.raises(InputError, match=r"udcff': a path that is not UTF-8"):
    reader.open_output(f"{tmp_path}/\udcff")


@pytest.mark.parametrize(
  ("fields", "said"),
  [
    (
      {"schema": 1, "version": "0.1.0"},
      "made by version 0.1.0 with schema 1, this version reads schema 2: convert again",
    ),
    ({"schema": None}, "with schema None"),
    ({"packed_modules": None, "leaves": True}, "packed_modules is None; leaves is True"),
    ({"packed_modules": ["experts", "nothing"]}, "packed_modules is ['experts', 'nothing']"),
    ({"stored": {}}, "stored.prefix is None"),
    ({"source": 3}, "source is 3"),
    ({"packed_modules": [[]]}, "conversion.json is damaged"),
  ],
)
def test_a_record_of_another_schema_or_a_damaged_one_is_refused(out, fields, said):
  change_record(out, **fields)
  assert said in refusal(out)


def test_files_that_are_no_json_are_refused(out):
  (out / "config.json").write_text("{")
  assert "config.json: damaged, not JSON" in refusal(out)
  (out / "config.json").write_text("[]")
  assert "config.json: damaged, a JSON list" in refusal(out)
  (out / "config.json").unlink()
  assert "config.json is missing" in refusal(out)
  (out / "conversion.json").write_text("\x00")
  assert "conversion.json: damaged" in refusal(out)
