from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path

import pytest

from kimi_k3 import checksums
from kimi_k3.convert import audit, index, plan
from kimi_k3.convert.audit import Count
from kimi_k3.errors import InputError

INV_FREQ = "language_model.model.layers.1.self_attn.rotary_emb.inv_freq"


def with_text(source, **settings) -> dict:
  """The source's config with other settings of the language model."""
  config = copy.deepcopy(source.config)
  config["text_config"] |= settings
  return config


@pytest.mark.parametrize("fixture", ["k3_source", "kimi_linear_source", "all_packed_source"])
def test_kinds_and_dtypes_account_for_every_tensor_and_parameters_are_the_plans(request, fixture):
  source = request.getfixturevalue(fixture)
  found = audit.audit_source(source)
  assert sum(found.by_kind.values(), Count()) == found.total
  assert sum([*found.by_dtype.values(), *found.skipped.values()], Count()) == found.total
  assert found.total == Count(len(source.tensors), sum(t.nbytes for t in source.tensors.values()))
  assert found.parameters == plan.make_plan(source, plan.Options()).num_parameters
  assert "unknown" not in found.by_kind
  assert (found.unknown, found.unpaired, found.refused, found.release) == ([], 0, None, None)


def test_the_golden_k3_is_counted(k3_source):
  found = audit.audit_source(k3_source)
  assert {kind: count.tensors for kind, count in found.by_kind.items()} == {
    "embedding": 1, "KDA attention": 9 * 14, "MLA attention": 4 * 8, "dense MLP": 3, "router": 12 * 2,
    "routed experts": 12 * 16 * 3 * 2, "shared experts": 12 * 3, "latent projections": 12 * 2,
    "norms": 13 * 2 + 12 + 1, "attention residuals": 13 * 4 + 2, "head": 1, "vision": 12,
  }  # fmt: skip
  assert found.layers == {
    "KDA": [0, 1, 2, 4, 5, 6, 8, 9, 10], "MLA": [3, 7, 11, 12], "dense": [0], "experts": list(range(1, 13))
  }  # fmt: skip
  assert found.experts == {"16": 12}
  assert (found.packed, found.packed_pairs) == ({"experts": 576}, 576)
  assert found.float32 == {"A_log": 9, "conv1d": 27, "dt_bias": 9, "e_score_correction_bias": 12, "o_norm": 9}
  assert {rule: count.tensors for rule, count in found.skipped.items()} == {"mm_projector.": 3, "vision_tower.": 9}
  assert found.fold == "4 leading layers, 2 blocks of 4, tail of 1"


def test_packed_modules_are_told_apart(all_packed_source, kimi_linear_source):
  found = audit.audit_source(all_packed_source)
  assert found.packed == {"experts": 5 * 16 * 3, "latent": 5 * 2, "shared_experts": 5 * 3}
  assert audit.audit_source(kimi_linear_source).packed == {}


def test_what_convert_refuses_is_still_counted(k3_source, edited):
  codes = next(name for name in k3_source.tensors if name.endswith("experts.3.w1.weight_packed"))
  odd = index.StoredTensor(INV_FREQ, "F32", (4,), "model.safetensors", 0, 16)
  found = audit.audit_source(edited(k3_source, {INV_FREQ: odd, codes: None}))
  assert found.by_kind["unknown"] == Count(1, 16)
  assert found.unknown == [INV_FREQ.removeprefix("language_model.")]
  assert (found.unpaired, found.packed_pairs) == (1, 575)
  assert found.float32["other"] == 1
  assert codes in (found.refused or "")
  assert found.fold is None


@pytest.mark.parametrize(
  ("config", "said"),
  [
    ({"text_config": {}}, "dtype is missing"),
    ({"text_config": {}, "audio_config": {}}, "audio_config"),
    ({}, "dtype is missing"),
  ],
)
def test_a_config_that_nobody_can_read_is_refused_and_the_tensors_are_counted(k3_source, edited, config, said):
  found = audit.audit_source(edited(k3_source, config=config))
  assert said in (found.refused or "")
  assert found.total.tensors == len(k3_source.tensors)
  assert found.release is None


def test_a_checkpoint_with_the_sizes_of_k3_is_compared_with_the_release(k3_source, edited):
  sizes = {
    "hidden_size": 7168, "vocab_size": 163840, "num_hidden_layers": 93, "intermediate_size": 33792,
    "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "num_experts": 896, "num_experts_per_token": 16,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_attention_heads": 96, "num_key_value_heads": 96, "attn_res_block_size": 12,
    "max_position_embeddings": 1048576, "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
  }  # fmt: skip
  config = with_text(k3_source, **sizes)
  full = [layer for layer in range(1, 94) if layer % 4 == 0 or layer == 93]
  kda = [layer for layer in range(1, 94) if layer not in full]
  config["text_config"]["linear_attn_config"] |= {
    "num_heads": 96, "head_dim": 128, "full_attn_layers": full, "kda_layers": kda
  }  # fmt: skip
  config |= {key: sizes[key] for key in config if key in sizes}
  found = audit.audit_source(edited(k3_source, config=config))
  assert found.release == [
    "BF16 tensors: 274, the release has 1,954",
    "F32 tensors: 66, the release has 506",
    "U8 tensors: 1,152, the release has 494,592",
    "vision tensors: 12, the release has 168",
    "all tensors: 1,504, the release has 497,220",
    "packed pairs: 576, the release has 247,296",
  ]


@pytest.fixture(scope="module")
def converted(tiny_checkpoint, convert) -> Path:
  """A finished conversion of five layers. Read only."""
  return convert(tiny_checkpoint("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2"))


@pytest.fixture
def out(converted, tmp_path) -> Path:
  """A finished conversion to damage."""
  return shutil.copytree(converted, tmp_path / "out")


def test_a_conversion_is_described_by_its_record_and_its_arrays(converted):
  found = audit.audit_output(converted)
  record = json.loads((converted / checksums.RECORD).read_text())
  assert found.total == Count(record["leaves"], record["bytes"])
  assert set(found.by_dtype) == {"bfloat16", "float32", "uint8"}
  assert (found.scanned, found.stored) == (True, {"experts": "mxfp4"})
  assert found.options == record["options"]
  assert found.source["fingerprint"] == record["source"]["fingerprint"]
  assert "shards" not in found.source
  assert found.faults == []


def test_a_record_that_disagrees_with_the_arrays_is_a_fault(out):
  record = json.loads((out / checksums.RECORD).read_text())
  (out / checksums.RECORD).write_text(json.dumps(record | {"bytes": record["bytes"] + 1}))
  assert [fault.split(",")[0] for fault in audit.audit_output(out).faults] == [
    f"conversion.json says {record['bytes'] + 1} bytes"
  ]


def test_an_array_that_orbax_would_not_find_is_a_fault(out):
  metadata = json.loads((out / "0" / "items" / "_METADATA").read_text())
  path = next(path for path in metadata["tree_metadata"] if "embedding" in path)
  entry = metadata["tree_metadata"].pop(path)
  entry["key_metadata"][-1]["key"] = "nothing"
  metadata["tree_metadata"]["other"] = entry
  (out / "0" / "items" / "_METADATA").write_text(json.dumps(metadata))
  assert audit.audit_output(out).faults == [
    "token_embedder.nothing: listed in 0/items/_METADATA, but there is no array",
    "token_embedder.embedding: not listed in 0/items/_METADATA",
  ]


def test_data_files_that_are_missing_or_cut_short_are_faults(out):
  data = out / "0/items/d"
  (data / "000003").unlink()
  with (data / "000005").open("r+b") as file:
    file.truncate(100)
  faults = audit.audit_output(out).faults
  assert [re.sub("[0-9,]+ bytes of|least [0-9,]+", "N", fault) for fault in faults] == [
    "0/items/d/000003: missing, N data expected",
    "0/items/d/000005: 100 bytes, at N expected: cut short",
  ]


def test_an_empty_state_directory_is_no_conversion(tmp_path):
  (tmp_path / ".unfinished").mkdir()
  with pytest.raises(InputError, match="no checkpoint"):
    audit.is_output(tmp_path)


def test_a_path_that_is_none_is_refused_in_words(tmp_path):
  (tmp_path / "loop").symlink_to("loop")
  for path, said in (("", "an empty path"), (tmp_path / "loop", "a loop of links"), ("x" * 300, "File name too long")):
    with pytest.raises(InputError, match=said):
      audit.is_output(path)


def remove_record(out: Path) -> Path:
  (out / checksums.RECORD).unlink()
  return out


def remove_metadata(out: Path) -> Path:
  (out / "0" / "items" / "_METADATA").unlink()
  return out


def mark(out: Path) -> Path:
  (out / ".unfinished").mkdir()
  (out / ".unfinished/plan.json").touch()
  return out


def call_partial(out: Path) -> Path:
  return out.rename(out.with_name("out.partial"))


@pytest.mark.parametrize("change", [remove_metadata, mark, call_partial])
def test_an_unfinished_conversion_is_called_so(out, change):
  out = change(out)
  assert audit.is_output(out)
  with pytest.raises(InputError, match="an unfinished conversion"):
    audit.audit_output(out)


def test_a_conversion_without_its_record_is_refused(out):
  with pytest.raises(InputError, match=r"conversion\.json"):
    audit.audit_output(remove_record(out))


@pytest.mark.parametrize("content", ["nothing", "a file", "a killed slice", "plan.json", "absent"])
def test_what_is_no_checkpoint_is_refused(tmp_path, content):
  directory = tmp_path / "x"
  match content:
    case "a file":
      directory.touch()
    case "a killed slice":
      directory.mkdir()
      (directory / ".unfinished-slice").touch()
    case "plan.json":
      directory.mkdir()
      (directory / "plan.json").touch()
    case "absent":
      directory.with_name("x.partial").mkdir()
    case _:
      directory.mkdir()
  said = {
    "a killed slice": "unfinished `kimi-k3 slice`", "plan.json": "unfinished conversion", "a file": "a file,",
    "absent": r"unfinished conversion or slice \(x\.partial beside it\)",
  }  # fmt: skip
  with pytest.raises(InputError, match=said.get(content, "no checkpoint")):
    audit.is_output(directory)
