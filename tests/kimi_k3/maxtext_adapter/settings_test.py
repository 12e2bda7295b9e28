from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter.quiet import quiet
from kimi_k3.maxtext_adapter.settings import explicit_settings, read_config
from kimi_k3.resources import configs_dir

DECODE = str(configs_dir() / "decode.yml")
TINY = "model_name=kimi-k3-tiny"


def refusal(path: str | Path, *settings: str) -> str:
  with pytest.raises(InputError) as error:
    read_config(str(path), settings)
  assert "\n" not in str(error.value)
  return str(error.value)


@pytest.fixture
def written(tmp_path):
  """Returns a function: text to the path of a config that holds it."""

  def write(text: str) -> str:
    path = tmp_path / "decode.yml"
    path.write_text(text)
    return str(path)

  return write


def test_what_was_said_is_the_file_with_its_bases_and_the_settings_but_not_maxtexts_defaults(tmp_path):
  (tmp_path / "base_of_mine.yml").write_text("base_config: base.yml\nvocab_size: 8\ndtype: float32\n")
  path = tmp_path / "mine.yml"
  path.write_text("base_config: base_of_mine.yml\ndtype: bfloat16\n")
  found = explicit_settings(str(path), ["vocab_size=9", "kda_layers=[1,2]", "run_name=a=b"])
  assert found == {"vocab_size": 9, "dtype": "bfloat16", "kda_layers": [1, 2], "run_name": "a=b"}
  assert explicit_settings(str(path), []) == {"vocab_size": 8, "dtype": "bfloat16"}


def test_a_setting_wins_over_the_file():
  config = read_config(DECODE, [TINY, "dtype=float32", "scan_layers=false"])
  assert (config.dtype, config.scan_layers) == ("float32", False)


def test_derived_settings_give_way_to_explicit_ones():
  derived = {"max_target_length": 64, "max_prefill_predict_length": 32}
  config = read_config(DECODE, [TINY, "max_target_length=128"], **derived)
  assert (config.max_target_length, config.max_prefill_predict_length) == (128, 32)


def test_a_run_needs_no_run_directory_or_checkpoint_manager():
  config = read_config(DECODE, [TINY])
  assert config.run_name == "kimi-k3"
  assert not config.enable_checkpointing


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    (("no_such_key=1",), "unknown key no_such_key"),
    (("max_target_length=abc",), "max_target_length: Input should be a valid integer"),
    (("scan_layers=maybe",), "scan_layers: Input should be a valid boolean"),
    (
      ("kda_implementation=fastest",),
      "kda_implementation: Input should be 'portable', 'tokamax_xla_chunked', 'tokamax_mosaic' or 'tops'",
    ),
    (("matmul_precision=exact",), "matmul_precision: Input should be 'default', 'high', 'highest'"),
    (("run_name=${nowhere}",), "Interpolation key 'nowhere' not found"),
    (("hidden_act=gelu", "override_model_config=true"), "hidden_act is 'gelu': only 'situ' and 'silu' are supported"),
  ],
)
def test_a_bad_setting_is_one_line_that_names_it(settings, said):
  assert said in refusal(DECODE, TINY, *settings)


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    (("vocab_size",), "vocab_size: expected key=value after"),
    (("=1",), "=1: expected key=value after"),
    (("a.b=1",), "a.b=1: expected key=value after"),
    (("run_name=a", "dtype=float32", "run_name=b"), "run_name given twice"),
    (("kda_layers=[1,",), "cannot be read as YAML"),
  ],
)
def test_settings_are_key_value_and_given_once(settings, said):
  assert said in refusal(DECODE, TINY, *settings)


def test_a_model_that_does_not_exist_is_told_those_that_do():
  assert "model_name is 'kimi-k4': unknown; the models of this family are kimi-k3, kimi-linear" in refusal(
    DECODE, "model_name=kimi-k4"
  )


@pytest.mark.parametrize("model", ["llama2-7b", "default"])
def test_a_model_of_another_family_is_refused(model):
  said = "decoder_block is llama2, expected kimi_k3: give model_name=kimi-k3 or use the decode.yml"
  assert said in refusal(DECODE, f"model_name={model}")


def test_a_missing_file_is_told(tmp_path):
  message = refusal(tmp_path / "nowhere.yml")
  assert "nowhere.yml: no such file; expected a YAML config such as the decode.yml" in message


def test_a_file_that_maxtext_would_not_take_for_a_config_is_refused(tmp_path):
  path = tmp_path / "decode.yaml"
  path.write_text(Path(DECODE).read_text())
  assert "decode.yaml: expected a file that ends in .yml" in refusal(path, TINY)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1,\n", "a: b: c\n", "\x00"])
def test_a_file_that_holds_no_settings_is_refused(written, text):
  assert "cannot be read as YAML" in refusal(written(text))


def test_a_file_of_words_is_a_file_of_unknown_keys(written):
  assert "unknown key just words" in refusal(written("just words\n"))


def test_an_empty_file_is_no_model_of_ours(written):
  assert "decoder_block" in refusal(written(""))


def test_a_base_that_does_not_exist_is_told(written):
  assert "nowhere.yml" in refusal(written("base_config: nowhere.yml\n"), TINY)


def test_an_unknown_key_in_the_file_is_named(written):
  assert "unknown key no_such_key" in refusal(written("base_config: base.yml\nno_such_key: 1\n"), TINY)


def test_nothing_is_printed_or_logged_while_a_config_is_read(capfd):
  read_config(DECODE, [TINY])
  assert capfd.readouterr() == ("", "")


def test_quiet_drops_chatter_and_ends_with_it(capfd, caplog):
  with quiet():
    print("chatter")
    logging.getLogger("maxtext").warning("chatter")
    warnings.warn("chatter", stacklevel=1)
  assert capfd.readouterr().out == ""
  assert not caplog.records
  logging.getLogger("maxtext").warning("news")
  print("news")
  assert capfd.readouterr().out == "news\n"
  assert [record.message for record in caplog.records] == ["news"]


def test_quiet_passes_errors_on():
  with pytest.raises(ZeroDivisionError), quiet():
    1 / 0  # noqa: B018
  assert logging.root.manager.disable < logging.WARNING


def test_a_base_that_leads_back_is_told(tmp_path):
  for name, base in (("a", "b"), ("b", "a")):
    (tmp_path / f"{name}.yml").write_text(f"base_config: {base}.yml\n")
  assert "base_config leads back to" in refusal(tmp_path / "a.yml")


def test_a_base_or_a_checkpoint_that_is_no_path_is_told_by_its_key(written):
  assert "base_config is 5, expected a file" in refusal(written("base_config: 5\n"))
  assert "load_parameters_path: Input should be a valid string" in refusal(
    written(Path(DECODE).read_text() + "load_parameters_path: 5\n"), TINY
  )


def test_a_checkpoints_path_is_relative_to_the_file_that_names_it(tmp_path):
  (tmp_path / "out").mkdir()
  (tmp_path / "out" / "decode.yml").write_text(f"{Path(DECODE).read_text()}\nload_parameters_path: 0/items\n")
  (tmp_path / "mine").mkdir()
  mine = tmp_path / "mine" / "mine.yml"
  mine.write_text("base_config: ../out/decode.yml\n")
  for path in (mine, tmp_path / "out" / "decode.yml"):
    assert read_config(str(path), [TINY]).load_parameters_path == str(tmp_path / "out" / "0" / "items")


@pytest.mark.parametrize(
  "rules",
  ["5", "mlp", "{mlp: tensor}", "[[mlp]]", "[[mlp,tensor,1]]", "[[mlp,3]]", "[[mlp,[[tensor]]]]", "[[[mlp],tensor]]"]
  + ["[null]", "[[mlp,true]]", "[[mlp,null]]", "[[mlp,[tensor,tensor]]]"],
)
def test_rules_of_another_form_are_refused_by_the_key(rules):
  message = refusal(DECODE, TINY, f"logical_axis_rules={rules}")
  assert "logical_axis_rules" in message
  assert "expected a list of [logical axis, mesh axis or list of mesh axes]" in message


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    (("per_device_batch_size=nan",), "per_device_batch_size is nan, expected a number"),
    (
      ("per_device_batch_size=0.5", "max_target_length=259"),
      "max_target_length is 259: times per_device_batch_size 0.5",
    ),
  ],
)
def test_a_number_of_rows_that_cannot_be_is_refused_by_its_key(settings, said):
  assert said in refusal(DECODE, TINY, *settings)
