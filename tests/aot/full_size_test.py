"""Kimi K3 whole, 93 layers folded, compiled for 32 devices of TPU v7x: memory, collectives, traffic, nothing copied.

Each limit stands beside what was seen with libtpu 0.0.50.1. docs/sharding.md has the table.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from kimi_k3.capacity import hlo, topology, traffic
from kimi_k3.resources import configs_dir

GIB = 2**30
TOPOLOGY = "tpu7x:2x2x4"
ROWS, CONTEXT = 64, 8192
NUM_MOE, NUM_MLA = 92, 24


@dataclasses.dataclass(frozen=True)
class Layout:
  """A way to cut the model, and its limits.

  Attributes:
    settings: Added to configs/tpu7x-32.yml.
    arguments: GiB of weights and caches at most, in a decoding step of 64 rows of 8192 tokens.
    collectives: Calls at most in that step.
    traffic: Arguments of `traffic.decode_traffic`.
  """

  settings: tuple[str, ...]
  arguments: float
  collectives: int
  traffic: dict[str, int]


LAYOUTS = {
  "tp32-ep32": Layout((), 58.0, 240, {"devices_heads": 32, "devices_experts": 32, "latent_cuts": 32}),
  "latent-sharded": Layout(
    ("partition_rules={latent: [tensor]}",),
    50.0,
    4 * NUM_MOE + 2 + 2 * NUM_MLA + 2,
    {"devices_heads": 32, "devices_experts": 32, "latent_cuts": 32, "latent_projection_cuts": 32},
  ),
  "ep8-tp4": Layout(
    ("partition_mesh=expert=8,tensor=4", "partition_rules={experts: [expert], expert_width: [tensor]}"),
    58.0,
    240,
    {"devices_heads": 32, "devices_experts": 8, "expert_width_cuts": 4, "latent_cuts": 32},
  ),
  "dp4-tp8": Layout(
    ("partition_mesh=attn_dp_expert=4,model=8",),
    90.0,
    4 * NUM_MOE + 2 + 2 * NUM_MLA + 2,
    {"devices_heads": 8, "devices_experts": 32, "rows_cuts": 4, "latent_cuts": 8},
  ),
}


def build(*settings: str) -> tuple[Any, Any]:
  """The config, and the model on the topology."""
  from kimi_k3.maxtext_adapter.settings import read_config
  from kimi_k3.maxtext_adapter.spmd_engine import build_model

  config = read_config(str(configs_dir() / "tpu7x-32.yml"), ["model_name=kimi-k3", *settings])
  return config, build_model(config, topology.tpu_devices(TOPOLOGY))


def compile_program(model: Any, program: Any, options=topology.COMPILE_OPTIONS) -> topology.Report:
  return topology.compile_for(model.mesh, program.function, program.arguments, options=options)


@functools.cache
def decode(name: str) -> tuple[topology.Report, Any]:
  from kimi_k3.spmd import programs

  config, model = build(*LAYOUTS[name].settings)
  program = programs.decode_step(model, rows=ROWS, length=CONTEXT, cut=config.mla_cache_cut)
  report = compile_program(model, program)
  return report, model


def decode_bytes(report: topology.Report) -> tuple[hlo.Program, hlo.HbmBytes]:
  from kimi_k3.spmd.kernel_bytes import decode_kernel_bytes

  parsed = hlo.parse(report.text)
  return parsed, hlo.hbm_bytes(parsed, decode_kernel_bytes())


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_decoding_step_fits_reduces_twice_a_layer_and_reads_little_more_than_it_must(name, capsys):
  layout = LAYOUTS[name]
  report, model = decode(name)
  parsed, moved = decode_bytes(report)
  calls = sum(row.calls for row in hlo.collectives(parsed))
  must = traffic.decode_traffic(model.config, batch=ROWS, context=CONTEXT, **layout.traffic)
  ratio = moved.total / must.total_worst
  memory = report.memory
  with capsys.disabled():
    print(
      f"\n{name}: lower {report.lower_seconds:.0f} s, compile {report.compile_seconds:.0f} s, arguments "
      f"{memory.argument_bytes / GIB:.2f} GiB, temp {memory.temp_bytes / GIB:.3f} GiB, {calls:g} collective calls, "
      f"HBM {moved.total / GIB:.1f} GiB a step, {must.total_worst / GIB:.1f} must move, ratio {ratio:.3f}"
    )
  assert memory.argument_bytes <= layout.arguments * GIB
  assert memory.temp_bytes <= 0.6 * GIB
  assert calls <= layout.collectives
  assert ratio <= 1.15
  big = [copy for copy in hlo.copies(parsed) if copy.result.padded_bytes > 64 * 2**20]
  assert not big, [str(copy) for copy in big]


@pytest.mark.parametrize(
  ("name", "tokens", "temp"),
  [
    ("tp32-ep32", 32768, 2.0),  # seen: 1.35 GiB
    ("latent-sharded", 32768, 2.0),
    ("ep8-tp4", 32768, 2.0),
    ("dp4-tp8", 32768, 5.0),  # seen: 4.72; every group of devices runs the attention of the whole chunk
    ("tp32-ep32", 131072, 9.0),  # seen: 7.83
  ],
)
def test_a_chunk_of_prefill_fits(name, tokens, temp, capsys):
  from kimi_k3.spmd import programs

  config, model = build(*LAYOUTS[name].settings)
  program = programs.prefill(model, rows=1, tokens=tokens, length=tokens, cut=config.prefill_cut, history=False)
  report = compile_program(model, program)
  memory = report.memory
  with capsys.disabled():
    print(
      f"\n{name}, prefill {tokens}: lower {report.lower_seconds:.0f} s, compile {report.compile_seconds:.0f} s, "
      f"arguments {memory.argument_bytes / GIB:.2f} GiB, temp {memory.temp_bytes / GIB:.2f} GiB"
    )
  assert memory.temp_bytes <= temp * GIB
  assert memory.total_bytes <= topology.device_kind(model.mesh).hbm_bytes
