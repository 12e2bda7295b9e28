"""K3 folded to 13 layers, at the released widths, compiled for 32 devices of TPU v7x. All of it: tests/aot."""

from __future__ import annotations

import dataclasses
import platform
import re
import sys
from typing import Any

import pytest

from kimi_k3.capacity import hlo, topology, traffic
from kimi_k3.config import KimiK3Config
from kimi_k3.resources import configs_dir
from kimi_k3.spmd.programs import replicated_leaves

# Not "where libtpu is found": where it can be installed and is not, the tests fail.
ON_LINUX = pytest.mark.skipif(
  (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="libtpu exists for Linux on x86-64 only"
)
GIB, MIB = 2**30, 2**20
TOPOLOGY = "tpu7x:2x2x4"
LAYERS, MOE_LAYERS, MLA_LAYERS, KDA_LAYERS = 13, 12, 4, 9
ROWS, CONTEXT = 64, 8192


@pytest.fixture(scope="module")
def planned() -> tuple[dict[str, Any], topology.Report]:
  """A decoding step of the first layers as `kimi-k3 plan` compiles and reads it, and the compiler's report of it."""
  from kimi_k3.capacity import plan, results
  from kimi_k3.capacity.topologies import parse_topology
  from kimi_k3.maxtext_adapter.planning import read_setup

  whole = read_setup(str(configs_dir() / "tpu7x-32.yml"), ["model_name=kimi-k3"], parse_topology(TOPOLOGY), None)
  model = whole.model.shortened(LAYERS)
  setup = dataclasses.replace(whole, config=model.config, builder=lambda _devices: model)
  reports = []
  real = topology.compile_for

  def compile_for(mesh: Any, function: Any, args: Any) -> topology.Report:
    reports.append(real(mesh, function, args, options=topology.FAST_COMPILE_OPTIONS))
    return reports[-1]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(topology, "compile_for", compile_for)
    facts = plan.Compiler(setup, results.Results(None)).decode(ROWS, CONTEXT)
  return facts, reports[0]


@pytest.mark.slow  # the compiler takes half a minute
@ON_LINUX
def test_a_step_of_k3_reduces_twice_a_layer_copies_no_weights_and_reads_what_it_must(planned):
  facts, report = planned
  parsed = hlo.parse(report.text)

  collectives = hlo.collectives(parsed)
  kinds = {kind: sum(c.calls for c in collectives if c.kind == kind) for kind in {c.kind for c in collectives}}
  assert kinds == {"all-reduce": 2 * LAYERS + 1, "all-to-all": 2 * MLA_LAYERS}  # the one is the embedding's
  kernels = hlo.kernels(parsed)
  assert [n for name, n in kernels.items() if name.startswith("kda_step")] == [KDA_LAYERS]
  assert (kernels["expert_decode"], kernels["latent_step"]) == (MOE_LAYERS, MLA_LAYERS)

  assert report.memory.temp_bytes <= 0.1 * GIB  # seen: 0.035
  assert report.memory.output_bytes - report.memory.alias_bytes <= 4 * MIB  # the logits; caches stay where they are
  assert not [str(copy) for copy in hlo.copies(parsed) if copy.result.padded_bytes > 16 * MIB]
  assert facts["hbm_bytes_per_step"] <= 1.15 * facts["must_move_bytes_per_step"]


@pytest.mark.slow  # the compiler takes half a minute
@ON_LINUX
def test_a_plan_says_what_the_compiler_and_other_readings_of_the_program_say(planned):
  facts, report = planned
  analysis = report.compiled.memory_analysis()
  assert facts["argument_bytes"] == analysis.argument_size_in_bytes
  assert facts["temp_bytes"] == analysis.temp_size_in_bytes
  assert facts["output_bytes"] == analysis.output_size_in_bytes - analysis.alias_size_in_bytes
  known = sum(facts["weights_bytes"].values()) + facts["latent_cache_bytes"] + facts["kda_state_bytes"]
  assert 0 <= facts["argument_bytes"] - known <= 0.01 * known  # padding
  # Calls told by the lines alone: what has the loop's body in its path runs once for each block of four layers.
  blocks = (LAYERS - 5) // 4
  calls: dict[str, int] = {}
  for line in report.text.splitlines():
    if match := re.match(r"\s*(?:ROOT )?%\S+ = .*?[\])}] (all-reduce|all-to-all)(?:-start)?\(", line):
      calls[match[1]] = calls.get(match[1], 0) + (blocks if "/while/body/" in line else 1)
  assert {c["kind"]: c["count"] for c in facts["collectives"]} == calls
  assert facts["reductions_per_layer"] == 2
  assert facts["warnings"] == []
  assert facts["fits"]
  cut = {"devices_heads": 32, "devices_experts": 32, "latent_cuts": 32}
  must = traffic.decode_traffic(k3_of(LAYERS), batch=ROWS, context=CONTEXT, **cut)
  assert facts["must_move_bytes_per_step"] == round(must.total_worst)
  hit = 1 - (1 - 16 / 896) ** ROWS
  fewer = (1 - hit) * must.experts_worst
  moved, expected = facts["hbm_bytes_per_step"], facts["expected_hbm_bytes_per_step"]
  assert moved - expected == pytest.approx(fewer, rel=0.01)
  assert facts["bound_ms"] == pytest.approx(moved / 3.69e12 * 1e3)


def k3_of(layers: int) -> KimiK3Config:
  from kimi_k3.maxtext_adapter.config import architecture
  from kimi_k3.maxtext_adapter.settings import read_config

  c = architecture(read_config(str(configs_dir() / "decode.yml"), ["model_name=kimi-k3"]))
  kda = tuple(i for i in c.kda_layers if i < layers)
  mla = (*(i for i in c.full_attention_layers if i < layers), layers)
  return dataclasses.replace(c, num_layers=layers, kda_layers=kda, full_attention_layers=mla)


# Why a parameter is whole on every device, by the end of its name.
REASONS = {
  "router.kernel": "a choice must be the same everywhere",
  "router.bias": "a choice must be the same everywhere",
  "mlp.down_proj.kernel": "cutting the latent projections costs two collectives a layer; partition_rules can",
  "mlp.up_proj.kernel": "cutting the latent projections costs two collectives a layer; partition_rules can",
  "wq_a.kernel": "a latent that all heads read",
  "wkv_a.kernel": "a latent that all heads read",
  "f_a_proj.kernel": "a low rank that all heads read",
  ".scale": "a norm",
  "_res.norm": "a norm",
  "_res.proj": "one row",
}


@pytest.mark.slow  # the compiler takes half a minute
@ON_LINUX
def test_less_than_a_hundredth_of_the_whole_model_is_on_every_device_and_each_such_leaf_has_a_reason():
  from kimi_k3.maxtext_adapter.settings import read_config
  from kimi_k3.maxtext_adapter.spmd_engine import build_model

  devices = topology.tpu_devices("tpu7x:2x2x4")
  model = build_model(read_config(str(configs_dir() / "tpu7x-32.yml"), ["model_name=kimi-k3"]), devices)
  report = replicated_leaves(model)
  assert 0.005 < report.share < 0.01
  assert 55 * GIB < report.device_bytes < 56 * GIB
  unexplained = [row.name for row in report.rows if not row.name.endswith(tuple(REASONS))]
  assert not unexplained
