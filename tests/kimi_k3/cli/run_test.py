"""`kimi-k3 run`: modules of MaxText, with this model registered."""

from __future__ import annotations

import sys

import pytest

from kimi_k3.cli.main import main
from kimi_k3.maxtext_adapter import register


@pytest.fixture
def entry_point(tmp_path, monkeypatch):
  """A module `maxtext.entry_point` that reads its config as MaxText's own do."""
  register()
  import maxtext

  (tmp_path / "entry_point.py").write_text(
    "import sys\n"
    "from maxtext.configs import pyconfig\n"
    "assert __name__ == '__main__'\n"
    "config = pyconfig.initialize(sys.argv)\n"
    "print(config.decoder_block.value, config.load_parameters_path, sys.argv[2:])\n"
    "sys.exit(config.steps)\n"
  )
  monkeypatch.setattr(maxtext, "__path__", [*maxtext.__path__, str(tmp_path)])
  monkeypatch.setattr(sys, "argv", list(sys.argv))
  return "maxtext.entry_point"


def test_a_module_runs_as_the_main_one_with_its_arguments_and_its_exit_code(entry_point, five_layers, capsys):
  settings = ["run_name=x", "steps=3", "skip_jax_distributed_system=true", "log_config=false"]
  with pytest.raises(SystemExit) as stop:
    main(["run", entry_point, str(five_layers / "decode.yml"), *settings])
  assert stop.value.code == 3
  last = capsys.readouterr().out.splitlines()[-1]
  assert last == f"kimi_k3 {five_layers / '0' / 'items'} {settings}"


@pytest.mark.parametrize(
  ("module", "said"),
  [
    ("json.tool", "json.tool: expected a module of maxtext, such as maxtext.trainers.pre_train.train"),
    ("maxtextual", "maxtextual: expected a module of maxtext"),
    ("maxtext.nowhere", "maxtext.nowhere: MaxText has no such module"),
    ("maxtext.nowhere.train", "maxtext.nowhere.train: MaxText has no such module"),
  ],
)
def test_what_is_no_module_of_maxtext_is_refused(refused, module, said):
  assert said in refused("run", module, "config.yml")


def test_train_compile_without_the_tpu_compiler_is_refused_in_one_line(refused, monkeypatch):
  monkeypatch.setattr("kimi_k3.capacity.topology.has_libtpu", lambda: False)
  said = refused("run", "maxtext.trainers.pre_train.train_compile", "configs/train-full.yml")
  assert said.startswith(
    "train_compile: no libtpu found, expected the TPU compiler in this environment: `make install`"
  )


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    (["no_such_key=1"], "unknown key no_such_key"),
    (["steps=many"], "steps: Input should be a valid integer"),
    (["ici_pipeline_parallelism=2"], "ici_pipeline_parallelism is 2: not supported by this model"),
  ],
)
def test_a_config_that_is_refused_is_one_line(entry_point, refused, five_layers, settings, said):
  message = refused("run", entry_point, str(five_layers / "decode.yml"), "run_name=x", *settings)
  assert said in message
