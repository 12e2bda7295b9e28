"""The trainer's step at K3's full widths, by MaxText's train_compile as `kimi-k3 run` starts it: nine layers.

Each limit stands beside what was seen with libtpu 0.0.50.1. docs/training-full-size.md has all 93 layers.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from kimi_k3.capacity import hlo, topology
from kimi_k3.cli.main import main
from kimi_k3.resources import configs_dir

GIB = 2**30
MODULE = "maxtext.trainers.pre_train.train_compile"
# Four leading layers, one block of four and a tail: the program of 93 layers but for the length of its loop.
NINE_LAYERS = ("base_num_decoder_layers=9", "kda_layers=[1,2,3,5,6,7]", "full_attention_layers=[4,8,9]")
DEVICES, TOKENS = 64, 4096
MESH = ("compile_topology=tpu7x-64", "ici_fsdp_parallelism=8", "ici_expert_parallelism=8")


@pytest.fixture
def run(monkeypatch, capfd):
  """Returns a function: settings to the exit code, what was said on stderr by us, and what was compiled."""
  from kimi_k3.maxtext_adapter import train_compile

  compiled: list[Any] = []
  monkeypatch.setattr(train_compile, "memory", lambda c: compiled.append(c) or topology.memory(c))
  monkeypatch.setattr(sys, "argv", list(sys.argv))

  def run(*settings: str) -> tuple[int, list[str], list[Any]]:
    try:
      code = main(["run", MODULE, str(configs_dir() / "train-full.yml"), "log_config=false", *settings])
    except SystemExit as stop:
      code = int(stop.code or 0)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("kimi-k3: ")]
    return code, said, compiled

  return run


def test_nine_layers_at_full_widths_fit_and_no_activation_is_whole_on_a_device(run):
  code, said, (compiled,) = run(*NINE_LAYERS, *MESH)
  assert code == 0, said
  assert said[0].startswith("kimi-k3: compiling for TPUs with libtpu ")
  assert re.fullmatch(r"kimi-k3: the training step fits on 64 devices: each holds [\d.]+ GiB of 94\.74 \(.*\)", said[1])
  memory = topology.memory(compiled)
  # 244.7 B parameters of 6 bytes among 64 devices.
  assert memory.argument_bytes / GIB == pytest.approx(21.5, abs=1.0)
  text = compiled.as_text()
  # A batch of 64 rows, or its tokens in one axis, in front of a width: an activation of all devices on one.
  whole = re.findall(rf"(?:bf16|f32)\[(?:{DEVICES},{TOKENS}|{DEVICES * TOKENS}),\d+[\d,]*\]", text)
  assert not whole, sorted(set(whole))
  kinds = {row.kind for row in hlo.collectives(hlo.parse(text))}
  assert {"all-gather", "reduce-scatter"} <= kinds


def test_a_step_that_does_not_fit_ends_with_exit_code_2_and_by_how_much(run):
  code, said, _ = run(*NINE_LAYERS, "compile_topology=tpu7x-16", "ici_fsdp_parallelism=8", "ici_expert_parallelism=2")
  assert code == 2
  assert re.fullmatch(
    r"kimi-k3: error: the training step does not fit on 16 devices: each needs at least [\d.]+ GiB and has 94\.74, "
    r"over by [\d.]+: .*",
    said[-1],
  )
