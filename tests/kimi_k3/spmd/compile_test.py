"""K3 folded to 13 layers, at the released widths, compiled for 32 devices of TPU v7x. All of it: tests/aot."""

from __future__ import annotations

import platform
import sys

import pytest

from kimi_k3.capacity import hlo, topology, traffic
from kimi_k3.resources import configs_dir
from kimi_k3.spmd.programs import replicated_leaves

# Not "where libtpu is found": where it can be installed and is not, the tests fail.
ON_LINUX = pytest.mark.skipif(
  (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="libtpu exists for Linux on x86-64 only"
)
GIB, MIB = 2**30, 2**20
LAYERS, MOE_LAYERS, MLA_LAYERS, KDA_LAYERS = 13, 12, 4, 9
ROWS, CONTEXT = 64, 8192


@ON_LINUX
def test_a_step_of_k3_reduces_twice_a_layer_copies_no_weights_and_reads_what_it_must():
  from kimi_k3.maxtext_adapter.settings import read_config
  from kimi_k3.maxtext_adapter.spmd_engine import build_model
  from kimi_k3.spmd import programs
  from kimi_k3.spmd.kernel_bytes import decode_kernel_bytes

  devices = topology.tpu_devices("tpu7x:2x2x4")
  config = read_config(str(configs_dir() / "tpu7x-32.yml"), ["model_name=kimi-k3"])
  model = build_model(config, devices).shortened(LAYERS)
  program = programs.decode_step(model, rows=ROWS, length=CONTEXT, cut=config.mla_cache_cut)
  report = topology.compile_for(model.mesh, program.function, program.arguments, options=topology.FAST_COMPILE_OPTIONS)
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
  cut = {"devices_heads": 32, "devices_experts": 32, "latent_cuts": 32}
  must = traffic.decode_traffic(model.config, batch=ROWS, context=CONTEXT, **cut)
  assert hlo.hbm_bytes(parsed, decode_kernel_bytes()).total <= 1.15 * must.total_worst


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
