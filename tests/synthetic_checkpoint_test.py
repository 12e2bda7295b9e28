"""scripts/synthetic_checkpoint.py lays out what the release lays out, and its random bodies are valid and distinct."""

from __future__ import annotations

import collections
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kimi_k3.convert import index, plan

REPO = Path(__file__).resolve().parents[1]
SIZES = {
  "hidden_size": 64, "vocab_size": 96, "intermediate_size": 64, "moe_intermediate_size": 32,
  "routed_expert_hidden_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
  "qk_rope_head_dim": 8, "v_head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 1,
  "eos_token_id": 2, "pad_token_id": 3, "linear_attn_config.num_heads": 2, "linear_attn_config.head_dim": 32,
}  # fmt: skip
DTYPES = {"F32": "float32", "BF16": "bfloat16", "U8": "uint8"}


@pytest.fixture(scope="module")
def synthetic() -> ModuleType:
  """The script, which is no package."""
  spec = importlib.util.spec_from_file_location("synthetic", REPO / "scripts" / "synthetic_checkpoint.py")
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # dataclasses look their module up
  spec.loader.exec_module(module)
  return module


@pytest.fixture(scope="module")
def written(synthetic, tmp_path_factory) -> Path:
  """Five layers with random bodies in several shards."""
  directory = tmp_path_factory.mktemp("synthetic") / "checkpoint"
  config = synthetic.released_config(5, 4, 2, SIZES)
  synthetic.write(directory, config, sparse=False, seed=1, shard_bytes=100_000, vision=False)
  return directory


def test_the_default_is_the_release(synthetic):
  config = synthetic.released_config()
  tensors = synthetic.tensors(config, vision=True)
  assert len({tensor.name for tensor in tensors}) == len(tensors) == 497_220
  text = [tensor for tensor in tensors if tensor.name.startswith("language_model.")]
  assert len(tensors) - len(text) == 168
  assert collections.Counter(t.dtype for t in text) == {"BF16": 1_954, "F32": 506, "U8": 494_592}
  sizes = collections.Counter()
  for tensor in text:
    sizes[tensor.dtype] += tensor.nbytes
  assert {dtype: round(nbytes / 2**30, 2) for dtype, nbytes in sizes.items()} == {
    "BF16": 105.67,
    "F32": 0.04,
    "U8": 1347.12,
  }
  assert len(synthetic.shards(tensors, synthetic.SHARD_BYTES)) == 96
  assert synthetic.shard_name(0, 96) == "model-00001-of-000096.safetensors"
  linear = config["text_config"]["linear_attn_config"]
  assert linear["full_attn_layers"] == [*range(4, 93, 4), 93]
  assert sum(np.prod(t.shape) for t in tensors if t.name.startswith(("vision_tower.", "mm_projector."))) > 4e8


@pytest.mark.parametrize("layers", [1, 2, 4, 5, 8, 10, 13, 93])
def test_any_number_of_layers_folds(synthetic, tmp_path, layers):
  config = synthetic.released_config(layers, 1, 1, SIZES)
  synthetic.write(tmp_path, config, sparse=True, seed=0, shard_bytes=10**9, vision=False)
  with index.open_source(tmp_path) as source:
    assert plan.make_plan(source, plan.Options()).scan


def test_a_sparse_checkpoint_takes_no_disk(synthetic, tmp_path):
  config = synthetic.released_config(2, 2, 1)
  (name,) = synthetic.write(tmp_path, config, sparse=True, seed=0, shard_bytes=10**11, vision=True)
  status = (tmp_path / name).stat()
  assert status.st_size > 7e9
  assert status.st_blocks * 512 < 200_000
  with index.open_source(tmp_path) as source:
    plan.make_plan(source, plan.Options())


def test_a_file_starts_as_the_library_would_start_it(synthetic, tmp_path):
  tensors = synthetic.tensors(synthetic.released_config(5, 4, 2, SIZES), vision=False)
  (file,) = synthetic.shards(tensors, 10**9)
  save_file({t.name: np.zeros(t.shape, DTYPES[t.dtype]) for t in tensors}, tmp_path / "x", metadata={"format": "pt"})
  expected = synthetic.header(file)
  assert (tmp_path / "x").read_bytes()[: len(expected)] == expected


def test_random_bodies_are_valid_and_differ_from_tensor_to_tensor(written):
  seen: dict[bytes, str] = {}
  with index.open_source(written) as source:
    assert len(source.shards) > 2
    planned = plan.make_plan(source, plan.Options())
    heads = planned.config.kda_num_heads
    for shard in source.shards:
      for name, values in load_file(written / shard).items():
        data = values.tobytes()
        assert data not in seen, (name, seen[data])
        seen[data] = name
        if name.endswith("_scale"):
          assert 112 <= values.min() <= values.max() <= 122
        elif values.dtype != np.uint8:
          assert np.abs(values.astype(np.float64)).max() < 0.25
          padding = name.endswith("A_log")
          assert np.count_nonzero(values) == (heads if padding else values.size)
          assert not padding or not values[heads:].any()
  assert len(seen) == len(source.tensors)


def test_the_same_arguments_give_the_same_bytes_and_another_seed_gives_others(synthetic, written, tmp_path):
  config = synthetic.released_config(5, 4, 2, SIZES)
  for seed in (1, 2):
    synthetic.write(tmp_path / str(seed), config, sparse=False, seed=seed, shard_bytes=100_000, vision=False)
  for path in sorted(written.iterdir()):
    assert path.read_bytes() == (tmp_path / "1" / path.name).read_bytes()
    assert (path.read_bytes() != (tmp_path / "2" / path.name).read_bytes()) == (path.suffix == ".safetensors")


def run(synthetic, monkeypatch, *words) -> int:
  monkeypatch.setattr(sys, "argv", ["synthetic_checkpoint.py", *map(str, words)])
  return synthetic.main()


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(synthetic, monkeypatch, tmp_path, capsys):
  assert run(synthetic, monkeypatch, tmp_path / "x", "--layers", 5, "--experts", 8, "--vision", "--dry-run") == 0
  assert "would hold 488 tensors, 12,668,331,136 bytes, 1 shards" in capsys.readouterr().out
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (("--layers", "0"), "0, expected 1 or more"),
    (("--set", "hidden_size"), "expected FIELD=VALUE"),
    (("--set", "hidden_size=big"), "the value is no JSON"),
    ((), "not an empty directory"),
  ],
)
def test_a_wrong_command_line_is_refused(synthetic, monkeypatch, tmp_path, capsys, words, said):
  (tmp_path / "mine").touch()
  with pytest.raises(SystemExit) as stop:
    run(synthetic, monkeypatch, tmp_path, *words)
  assert stop.value.code == 2
  assert said in capsys.readouterr().err
  assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_sizes_can_be_set(synthetic, monkeypatch, tmp_path):
  sizes = [word for name, value in SIZES.items() for word in ("--set", f"{name}={json.dumps(value)}")]
  assert run(synthetic, monkeypatch, tmp_path / "x", "--layers", 2, "--experts", 2, "--sparse", *sizes) == 0
  with index.open_source(tmp_path / "x") as source:
    assert plan.make_plan(source, plan.Options()).config.hidden_size == 64
