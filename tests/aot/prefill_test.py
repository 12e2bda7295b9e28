"""A chunk of prefill with history, K3 in every part and narrow, compiled for 8 devices of TPU v7x and read whole."""

from __future__ import annotations

import dataclasses

import pytest

from kimi_k3.capacity import hlo, topology
from kimi_k3.resources import configs_dir
from kimi_k3.spmd.loop_counts import prefill_loops

LAYERS, BLOCKS, MOE_LAYERS, MLA_LAYERS, KDA_LAYERS = 13, 2, 12, 4, 9
DEVICES = 8
TOKENS, START, LENGTH = 32768, 40960, 131072
SIZES = {
  "hidden_size": 1024,
  "num_heads": 16,
  "num_kv_heads": 16,
  "kda_num_heads": 16,
  "dense_mlp_dim": 2048,
  "expert_mlp_dim": 512,
  "expert_latent_dim": 512,
  "num_experts": 128,
  "q_lora_rank": 256,
}


@pytest.fixture(scope="module")
def model():
  from kimi_k3.maxtext_adapter.settings import read_config
  from kimi_k3.maxtext_adapter.spmd_engine import build_model

  config = read_config(str(configs_dir() / "tpu7x-32.yml"), ["model_name=kimi-k3", "partition_mesh=tensor=8"])
  model = build_model(config, topology.tpu_devices("tpu7x:2x2x1")).shortened(LAYERS)
  return dataclasses.replace(model, config=dataclasses.replace(model.config, **SIZES))


@pytest.fixture(scope="module")
def program(model):
  from kimi_k3.spmd import programs

  made = programs.prefill(model, rows=1, tokens=TOKENS, length=LENGTH, cut="sequence", history=True)
  options = topology.FAST_COMPILE_OPTIONS
  return hlo.parse(topology.compile_for(model.mesh, made.function, made.arguments, options=options).text)


@pytest.fixture
def loops(model):
  return prefill_loops(model, tokens=TOKENS, length=LENGTH, start=START)


def test_each_loop_of_a_chunk_with_history_is_counted(program, loops):
  counts = hlo.loop_counts(program, loops)
  assert sorted(counts.values()) == sorted(
    [BLOCKS]  # the scan over the blocks
    + [2] * 8  # 32,768 tokens go to the experts in two pieces: 3 leading layers, one behind, 4 of a block
    + [5] * 8  # 16,384 x 16 choices over 8 devices are 32,768, four chunks to the row; some device has more
    + [4] * 3  # a device has 16,384 positions, all of them in the chunk: 4 windows; one MLA layer of each kind of place
    + [10] * 3  # 40,960 tokens of history in blocks of 4,096
  ), counts


def test_each_kernel_runs_as_often_as_its_loops_say(program, loops):
  assert hlo.kernels(program, loops) == {
    "pallas_kda_fwd_intra_fused": KDA_LAYERS,
    "chunk_kda_fwd_h_o_varlen": KDA_LAYERS,
    "flash_causal": MLA_LAYERS,
    "flash_all": MLA_LAYERS * 10,
    "expert_grouped": MOE_LAYERS * 2 * 5 * 2,  # layers, pieces, chunks; gate and up, then down
  }


def test_every_byte_of_a_chunk_is_told_and_it_has_no_trap(model, program, loops, capsys):
  from kimi_k3.capacity.traps import find_traps
  from kimi_k3.spmd.kernel_bytes import prefill_kernel_bytes

  moved = hlo.hbm_bytes(program, prefill_kernel_bytes(model, tokens=TOKENS, length=LENGTH, start=START), loops)
  by_kernel = {name: sum(row.total for row in moved.rows if row.name == name) for name in hlo.kernels(program, loops)}
  with capsys.disabled():
    print(f"\nHBM {moved.total / 2**30:.1f} GiB", {name: f"{size / 2**30:.2f}" for name, size in by_kernel.items()})
  assert all(by_kernel.values()) and sum(by_kernel.values()) < moved.total
  sums = sum(row.calls * row.bytes for row in hlo.collectives(program, loops) if row.kind == "all-reduce")
  # Each block of history is the sum of one device's latents and zeros of the others.
  assert sums >= MLA_LAYERS * 10 * 4096 * 576 * 2
  found = find_traps(program, loops=loops, tokens=TOKENS // DEVICES, width=model.config.hidden_size)
  assert found == []
