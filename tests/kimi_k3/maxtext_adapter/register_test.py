"""Registration: what is patched, when, and that nothing else changes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kimi_k3 import resources
from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter import register
from kimi_k3.maxtext_adapter.register import _key_faults, check_version
from kimi_k3.maxtext_keys import REQUIRED_KEYS, to_maxtext

RUN = {
  "run_name": "test",
  "base_output_directory": "maxtext_output",
  "enable_checkpointing": False,
  "log_config": False,
  "skip_jax_distributed_system": True,
}

# In a process of its own, as each claim is about MaxText before or right after registration.
PROGRAM = """
import importlib, json, pkgutil, sys

from maxtext.common import common_types
from maxtext.configs import pyconfig, types
from maxtext.layers import nnx_decoders
from maxtext.models import models
from maxtext.optimizers import optimizers
from maxtext.utils import globals as maxtext_globals
from maxtext.utils import maxtext_utils, train_utils

READERS = ("initialize", "initialize_pydantic", "_initialize_pydantic", "_prepare_for_pydantic")
UPSTREAM_READERS = {name: getattr(pyconfig, name) for name in READERS}
block, tokenizers = common_types.DecoderBlockType, maxtext_globals.HF_IDS

def snapshot():
  return {
    "decoder": id(models.NNXDecoder),
    "upstream decoder": id(nnx_decoders.NNXDecoder),
    "decoder attributes": sorted(name for name in vars(nnx_decoders.NNXDecoder) if not name.startswith("__")),
    "readers": [id(getattr(pyconfig, name, None)) for name in READERS],
    "defaults": [repr(f.__defaults__) for f in UPSTREAM_READERS.values()],
    "pyconfig": sorted(vars(pyconfig)),
    "config class": id(types.MaxTextConfig),
    "config fields": sorted(types.MaxTextConfig.model_fields),
    "blocks": [str(member) for member in block],
    "tokenizers": sorted(tokenizers),
    "optimizer": id(getattr(optimizers, "get_optimizer", None)),
    "training checks": id(getattr(train_utils, "validate_train_config", None)),
    "FLOPs": id(getattr(maxtext_utils, "calculate_tflops_training_per_device", None)),
  }

def changed(before):
  return sorted(k for k, v in snapshot().items() if v != before[k])

found, before = {}, snapshot()
assert not [m for m in sys.modules if m.startswith("kimi_k3")]

import kimi_k3, kimi_k3.maxtext_adapter
found["import of the package"] = changed(before)
from kimi_k3.maxtext_adapter import register
from kimi_k3.maxtext_adapter.quiet import quiet
with quiet():
  for module in pkgutil.walk_packages(kimi_k3.__path__, "kimi_k3."):
    if not module.name.endswith("__main__"):
      importlib.import_module(module.name)
found["import of every module"] = changed(before)

class Moved:
  def __init__(self, owner, name, value=None, *, delete=False):
    self.owner, self.name, self.value, self.delete = owner, name, value, delete
  def __enter__(self):
    self.kept = getattr(self.owner, self.name)
    delattr(self.owner, self.name) if self.delete else setattr(self.owner, self.name, self.value)
  def __exit__(self, *_):
    setattr(self.owner, self.name, self.kept)

seams = [Moved(models, "NNXDecoder", object), Moved(common_types, "DecoderBlockType", type("Plain", (), {}))]
seams += [Moved(f, "__defaults__", None) for f in UPSTREAM_READERS.values()]
methods = ("_init_decoder_layers", "_apply_embedding", "apply_output_head", "get_remat_policy", "get_norm_layer")
seams += [Moved(nnx_decoders.NNXDecoder, name, delete=True) for name in methods]
seams += [Moved(pyconfig, name, delete=True) for name in ("_resolve_or_infer_config", "_load_config", *READERS)]
seams += [Moved(maxtext_globals, "HF_IDS", delete=True)]
seams += [Moved(optimizers, "get_optimizer", delete=True)]
seams += [Moved(train_utils, "validate_train_config", delete=True)]
seams += [Moved(maxtext_utils, "calculate_tflops_training_per_device", lambda config: 0)]
found["moved seams"] = {}
for seam in seams:
  with seam:
    moved = snapshot()
    try:
      register()
      said = None
    except RuntimeError as error:
      said = str(error)
    owner = getattr(seam.owner, "__name__", "").split(".")[-1]
    found["moved seams"][f"{owner}.{seam.name}"] = [said, changed(moved)]
found["after the refusals"] = changed(before)

register()
found["registration"] = changed(before)
once = snapshot()
register()
found["second registration"] = changed(once)
found["new blocks"] = sorted(set(once["blocks"]) - set(before["blocks"]))
found["new tokenizers"] = sorted(set(once["tokenizers"]) - set(before["tokenizers"]))
defaults = [d for f in UPSTREAM_READERS.values() for d in f.__defaults__]
found["config class of the readers"] = sorted({d.__name__ for d in defaults if isinstance(d, type)})
member = block("kimi_k3")
found["member"] = [
  member is block.KIMI_K3 is block["KIMI_K3"], member in list(block), isinstance(member, block), member.name,
  member.value, member == block.LLAMA2, len(set(block)) == len(list(block)), repr(block("llama2")),
]
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
  """What PROGRAM saw."""
  environment = os.environ | {"DECOUPLE_GCLOUD": "TRUE", "PYTHONPATH": str(Path(resources.__file__).parents[1])}
  run = subprocess.run(
    [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=False
  )
  assert run.returncode == 0, run.stderr
  return json.loads(run.stdout.splitlines()[-1])


def test_importing_the_package_changes_nothing_in_maxtext(found):
  assert found["import of the package"] == []
  assert found["import of every module"] == []


def test_registration_changes_these_places_only(found):
  assert found["registration"] == [
    *("FLOPs", "blocks", "decoder", "defaults", "optimizer", "readers", "tokenizers", "training checks")
  ]
  assert found["new blocks"] == ["DecoderBlockType.KIMI_K3"]
  assert found["new tokenizers"] == ["kimi-k3", "kimi-k3-nano", "kimi-k3-tiny", "kimi-linear-48b-a3b"]
  assert found["config class of the readers"] == ["KimiMaxTextConfig"]


def test_registering_twice_is_registering_once(found):
  assert found["second registration"] == []


def test_our_block_is_a_member_of_the_enum_like_any_other(found):
  is_one, listed, instance, name, value, equals_other, distinct, other = found["member"]
  assert is_one and listed and instance and distinct
  assert (name, value) == ("KIMI_K3", "kimi_k3")
  assert not equals_other
  assert other == "<DecoderBlockType.LLAMA2: 'llama2'>"


@pytest.mark.parametrize(
  ("seam", "said"),
  [
    ("models.NNXDecoder", "models.NNXDecoder is not nnx_decoders.NNXDecoder"),
    ("common_types.DecoderBlockType", "common_types.DecoderBlockType is no plain enum"),
    ("initialize.__defaults__", "pyconfig.initialize has no default config class"),
    ("initialize_pydantic.__defaults__", "pyconfig.initialize_pydantic has no default config class"),
    ("_initialize_pydantic.__defaults__", "pyconfig._initialize_pydantic has no default config class"),
    ("_prepare_for_pydantic.__defaults__", "pyconfig._prepare_for_pydantic has no default config class"),
    ("NNXDecoder._init_decoder_layers", "NNXDecoder._init_decoder_layers is missing"),
    ("NNXDecoder._apply_embedding", "NNXDecoder._apply_embedding is missing"),
    ("NNXDecoder.apply_output_head", "NNXDecoder.apply_output_head is missing"),
    ("NNXDecoder.get_remat_policy", "NNXDecoder.get_remat_policy is missing"),
    ("NNXDecoder.get_norm_layer", "NNXDecoder.get_norm_layer is missing"),
    ("pyconfig._resolve_or_infer_config", "pyconfig._resolve_or_infer_config is missing"),
    ("pyconfig._load_config", "pyconfig._load_config is missing"),
    ("pyconfig.initialize", "pyconfig.initialize has no default config class"),
    ("pyconfig.initialize_pydantic", "pyconfig.initialize_pydantic has no default config class"),
    ("pyconfig._initialize_pydantic", "pyconfig._initialize_pydantic has no default config class"),
    ("pyconfig._prepare_for_pydantic", "pyconfig._prepare_for_pydantic has no default config class"),
    ("globals.HF_IDS", "globals.HF_IDS is no dict"),
    (
      "optimizers.get_optimizer",
      "maxtext.optimizers.optimizers.get_optimizer takes None, expected "
      + str(["config", "learning_rate_schedule", "model", "mesh"]),
    ),
    (
      "train_utils.validate_train_config",
      "maxtext.utils.train_utils.validate_train_config takes None, expected ['config']",
    ),
    (
      "maxtext_utils.calculate_tflops_training_per_device",
      "maxtext.utils.maxtext_utils.calculate_tflops_training_per_device takes ['config'], expected ['config', 'log']",
    ),
  ],
)
def test_a_seam_that_has_moved_is_named_and_nothing_is_patched(found, seam, said):
  message, changed = found["moved seams"][seam]
  assert message == f"MaxText's seams have moved: {said}"
  assert changed == []


def test_refusals_leave_no_trace(found):
  assert len(found["moved seams"]) == 21
  assert found["after the refusals"] == []


@pytest.mark.parametrize("version", ["0.2.4", "0.2.50", "1.0"])
def test_another_maxtext_is_refused(monkeypatch, version):
  monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
  expected = f"maxtext {version} is installed, this package is tested with 0.2.5: install maxtext==0.2.5"
  with pytest.raises(InputError, match=expected.replace(".", r"\.")):
    register()


def test_an_absent_maxtext_is_told(monkeypatch):
  def absent(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, "version", absent)
  with pytest.raises(InputError, match=r"maxtext is not installed; install maxtext==0\.2\.5"):
    check_version()


@pytest.fixture(scope="module")
def base_yml() -> str:
  register()
  from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

  return str(Path(MAXTEXT_CONFIGS_DIR) / "base.yml")


def initialize(path: str | Path, *settings: str, **overrides: Any) -> Any:
  """Reads a config as any of MaxText's entry points does, with the model registered."""
  register()
  from maxtext.configs import pyconfig

  return pyconfig.initialize(["", str(path), *settings], **RUN | overrides)


def test_a_model_of_maxtexts_own_is_still_built_from_its_decoder(base_yml):
  from maxtext.layers import nnx_decoders

  from kimi_k3.maxtext_adapter.decoder import KimiDecoder
  from kimi_k3.maxtext_adapter.engine import abstract_model

  small = {"base_emb_dim": 64, "base_mlp_dim": 64, "base_num_decoder_layers": 2, "vocab_size": 256}
  lengths = {"max_target_length": 16, "max_prefill_predict_length": 8, "per_device_batch_size": 1}
  overrides = small | lengths | {"override_model_config": True, "head_dim": 16}
  config = initialize(base_yml, "model_name=llama2-7b", **overrides)
  assert config.decoder_block.value == "llama2"
  assert config.kda_num_heads is None
  decoder = abstract_model(config, "train")[1].decoder
  assert type(decoder) is nnx_decoders.NNXDecoder
  assert not isinstance(decoder, KimiDecoder)


def test_a_model_of_ours_is_found_from_maxtexts_own_base(base_yml):
  config = initialize(base_yml, "model_name=kimi-k3-tiny")
  tiny = yaml.safe_load((resources.configs_dir() / "models" / "kimi-k3-tiny.yml").read_text())
  assert config.decoder_block.value == "kimi_k3"
  assert {key: getattr(config._pydantic_config, key) for key in tiny} == tiny | {
    "decoder_block": config.decoder_block,
    "attention_type": config.attention_type,
  }


def test_a_setting_that_contradicts_the_model_is_refused_unless_overriding_is_on(base_yml):
  with pytest.raises(ValueError, match=r"vocab_size given, but the model's YAML says otherwise.*override_model_config"):
    initialize(base_yml, "model_name=kimi-k3-tiny", "vocab_size=512")
  with pytest.raises(ValueError, match="kda_num_heads, vocab_size given"):
    initialize(base_yml, "model_name=kimi-k3-tiny", vocab_size=512, kda_num_heads=8)
  settings = ("model_name=kimi-k3-tiny", "vocab_size=512", "override_model_config=true")
  config = initialize(base_yml, *settings)
  assert (config.vocab_size, config.kda_num_heads) == (512, 4)


@pytest.mark.parametrize("models", ["shipped", "beside the config"])
def test_a_config_file_that_contradicts_the_model_is_refused_unless_overriding_is_on(configs, tmp_path, models):
  path = configs / "decode.yml"
  if models == "shipped":
    path = Path(shutil.move(path, tmp_path / "alone.yml"))
  edit(path, model_name="kimi-k3-tiny", vocab_size=512)
  with pytest.raises(ValueError, match=r"vocab_size given, but the model's YAML says otherwise"):
    initialize(path)
  edit(path, override_model_config=True)
  assert initialize(path).vocab_size == 512
  assert initialize(path, "vocab_size=1024").vocab_size == 1024


def test_repeating_what_the_model_says_is_no_contradiction(base_yml):
  assert initialize(base_yml, "model_name=kimi-k3-tiny", "vocab_size=256").vocab_size == 256


def test_a_model_of_ours_whose_yaml_is_nowhere_is_an_error(base_yml, monkeypatch, tmp_path):
  monkeypatch.setattr(resources, "configs_dir", lambda: tmp_path)
  with pytest.raises(ValueError, match=r"model_name is kimi-k3, but kimi-k3\.yml is neither in .*/models nor"):
    initialize(base_yml, "model_name=kimi-k3")


@pytest.fixture
def configs(tmp_path) -> Path:
  """A copy of our configs, to be changed."""
  return shutil.copytree(resources.configs_dir(), tmp_path / "configs")


def edit(path: Path, **changes: Any) -> Path:
  """Sets keys of a YAML file; None removes one."""
  settings = yaml.safe_load(path.read_text()) | changes
  path.write_text(yaml.safe_dump({k: v for k, v in settings.items() if v is not None}))
  return path


def test_a_model_yaml_beside_the_config_wins_over_the_shipped_one(configs):
  edit(configs / "models" / "kimi-k3-tiny.yml", vocab_size=300)
  assert initialize(configs / "decode.yml", "model_name=kimi-k3-tiny").vocab_size == 300


@pytest.mark.parametrize("key", sorted(REQUIRED_KEYS - {"decoder_block"}))
def test_a_key_the_model_yaml_lacks_is_named(configs, key):
  edit(configs / "models" / "kimi-k3-tiny.yml", **{key: None})
  with pytest.raises(ValueError, match=rf"missing {key} \(model_name is kimi-k3-tiny\): MaxText's own"):
    initialize(configs / "decode.yml", "model_name=kimi-k3-tiny")


@pytest.fixture(params=["k3_config", "kimi_linear_config"])
def decode_keys(request) -> dict[str, Any]:
  """What a conversion writes into decode.yml."""
  return to_maxtext(request.getfixturevalue(request.param), scan_layers=True, dtype="bfloat16")


def test_every_required_key_of_a_converted_checkpoint_deleted_or_renamed_is_named(decode_keys):
  assert set(decode_keys) >= REQUIRED_KEYS
  assert _key_faults(decode_keys, "default") == []
  for key in REQUIRED_KEYS:
    others = {k: v for k, v in decode_keys.items() if k != key}
    missing = f"missing {key} (model_name is default): MaxText's own defaults would be used"
    assert _key_faults(others, "default") == [missing]
    assert _key_faults(others | {f"{key}_v2": decode_keys[key]}, "default") == [missing, f"unknown key {key}_v2"]


def test_all_missing_and_all_unknown_keys_are_named_at_once(decode_keys):
  del decode_keys["vocab_size"], decode_keys["kda_layers"]
  missing, unknown = _key_faults(decode_keys | {"vocab": 1, "kda_layer": [1]}, "default")
  assert missing.startswith("missing kda_layers, vocab_size (")
  assert unknown == "unknown key kda_layer, vocab"


def test_keys_of_other_models_are_left_to_maxtext():
  assert _key_faults({"decoder_block": "llama2", "no_such_key": 1}, "default") == []
  assert _key_faults({"base_emb_dim": 8}, "default") == []


# What decode.yml says beyond the required keys. Left out, MaxText's default is refused, or it is the same.
NOT_REQUIRED = {
  "mla_naive_kvcache": "mla_naive_kvcache is True: this model supports False only",
  "enable_dropout": "enable_dropout is True: this model supports False only",
  "param_scan_axis": "param_scan_axis is 1: this model supports 0 only",
  "use_mla_absorbed_mqa": None,
  "inhomogeneous_layer_cycle_interval": None,
  "scan_layers": None,
  "dtype": None,
  "weight_dtype": None,  # float32, which no converted checkpoint fits: refused on loading (switches_test.py)
}


def test_a_key_that_may_be_left_out_is_refused_at_maxtexts_default_or_has_the_same(decode_keys, tmp_path):
  assert set(decode_keys) - REQUIRED_KEYS == set(NOT_REQUIRED)
  path = tmp_path / "decode.yml"
  for key, said in NOT_REQUIRED.items():
    path.write_text(yaml.safe_dump({"base_config": "base.yml"} | {k: v for k, v in decode_keys.items() if k != key}))
    if said:
      with pytest.raises(ValueError, match=said):
        initialize(path)
    elif key not in ("weight_dtype", "inhomogeneous_layer_cycle_interval"):
      assert getattr(initialize(path), key) == decode_keys[key]


def test_a_model_yaml_without_its_block_is_an_error(configs):
  edit(configs / "models" / "kimi-k3-tiny.yml", decoder_block=None)
  with pytest.raises(ValueError, match=r"^missing decoder_block \(model_name is kimi-k3-tiny\): MaxText's own"):
    initialize(configs / "decode.yml", "model_name=kimi-k3-tiny")
  edit(configs / "models" / "kimi-k3-tiny.yml", decoder_block="llama2")
  with pytest.raises(ValueError, match="model_name is kimi-k3-tiny, but its YAML was not found"):
    initialize(configs / "decode.yml", "model_name=kimi-k3-tiny")


def test_a_checkpoints_path_is_relative_to_the_file_that_names_it(configs, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  path = edit(configs / "decode.yml", model_name="kimi-k3-tiny", load_parameters_path="0/items")
  assert initialize(path.relative_to(tmp_path)).load_parameters_path == str(configs / "0" / "items")
  assert initialize(path, "load_parameters_path=elsewhere").load_parameters_path == "elsewhere"
  edit(path, load_parameters_path="/absolute/items")
  assert initialize(path).load_parameters_path == "/absolute/items"
  edit(path, load_parameters_path="gs://bucket/items")
  assert initialize(path).load_parameters_path == "gs://bucket/items"
