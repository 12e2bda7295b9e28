"""Counts of loops that depend on data, against walking through what each device does. tests/aot has a program's."""

from __future__ import annotations

import functools
import platform
import sys

import pytest

from kimi_k3.errors import InputError

# Not "where libtpu is found": where it can be installed and is not, the tests fail.
ON_LINUX = pytest.mark.skipif(
  (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="libtpu exists for Linux on x86-64 only"
)
LAYERS = "jit(chunk)/shard_map/while/body/eval_jaxpr"  # what is once below the scan over blocks, or over pieces


@functools.cache
def model(*settings: str):
  """K3's first 13 layers on 32 devices, by shapes: nothing is compiled."""
  from kimi_k3.capacity import topology
  from kimi_k3.maxtext_adapter.settings import read_config
  from kimi_k3.maxtext_adapter.spmd_engine import build_model
  from kimi_k3.resources import configs_dir

  config = read_config(str(configs_dir() / "tpu7x-32.yml"), ["model_name=kimi-k3", *settings])
  return build_model(config, topology.tpu_devices("tpu7x:2x2x4")).shortened(13)


@pytest.mark.parametrize(
  ("tokens", "part", "start"),
  [(32768, 1024, 0), (32768, 4096, 4096), (32768, 32768, 32000), (5000, 8192, 7000), (5000, 8192, 8191), (64, 64, 32)],
)
def test_the_device_with_most_windows_to_write_counts(tokens, part, start):
  from kimi_k3.mla_prefill import WRITE_BLOCK
  from kimi_k3.spmd.loop_counts import written_windows

  window = min(WRITE_BLOCK, tokens, part)
  devices = range((start + tokens - 1) // part + 2)
  held = [len(range(max(start, i * part), min(start + tokens, (i + 1) * part))) for i in devices]
  assert sum(held) == tokens
  assert written_windows(tokens, part, start) == max(-(-n // window) for n in held)


@pytest.mark.parametrize(
  ("part", "start"), [(1024, 1), (1024, 4096), (1024, 4097), (1000, 9999), (4096, 4096), (5000, 5001), (32768, 100000)]
)
def test_history_takes_the_blocks_that_hold_any_of_it(part, start):
  from kimi_k3.mla_prefill import HISTORY_BLOCK
  from kimi_k3.spmd.loop_counts import history_blocks

  together = max(1, HISTORY_BLOCK // part)  # parts of devices in one block
  blocks = {
    ((at // part) // together, 0) if part <= HISTORY_BLOCK else (at // part, at % part // HISTORY_BLOCK)
    for at in range(start)
  }
  assert history_blocks(part, start) == len(blocks)
  assert history_blocks(part, 0) == 0


@ON_LINUX
def test_each_loop_that_depends_on_data_is_named_once():
  from kimi_k3.spmd.loop_counts import prefill_loops

  # 32,768 tokens go to the experts in two pieces, so that below a piece (leading layers) and below a block and a piece
  # there is a loop over chunks of 8,192 choices: 16,384 x 16 choices over 32 devices fill one to the row, which some
  # device always exceeds.
  alone = {"*/write_chunk/while*": 1, f"{LAYERS}/while": 2, f"{LAYERS}/while/body/eval_jaxpr/while": 2}
  assert prefill_loops(model(), tokens=32768, length=32768, start=0) == alone
  # One piece; the choices of 8,192 tokens fill half a chunk.
  few = {"*/write_chunk/while*": 1, "jit(chunk)/shard_map/while": 1, f"{LAYERS}/while": 1}
  assert prefill_loops(model(), tokens=8192, length=32768, start=0) == few
  # 8,192 positions a device: two windows of 4,096 to write, and of 98,304 positions behind 24 blocks of 4,096.
  after = prefill_loops(model(), tokens=32768, length=262144, start=98304)
  assert after == alone | {"*/write_chunk/while*": 2, "*/mla_history/while*": 24}
  first = prefill_loops(model(), tokens=32768, length=262144, start=0, history=True)
  assert first == alone | {"*/write_chunk/while*": 2, "*/mla_history/while*": 0}


@ON_LINUX
def test_a_quarter_of_each_of_112_experts_is_asked_for_four_times_as_often():
  from kimi_k3.spmd.loop_counts import expert_choices, expert_chunks

  narrow = model("partition_mesh=expert=8,tensor=4", "partition_rules={experts: [expert], expert_width: [tensor]}")
  assert (expert_choices(narrow, 16384), expert_chunks(narrow, 16384)) == (32768, 5)
  groups = model("partition_mesh=attn_dp_expert=4,model=8")
  assert (expert_choices(groups, 16384), expert_chunks(groups, 16384)) == (8192, 2)
  apart = model("partition_mesh=data=4,model=8")  # copies of the experts: each sees a quarter of the tokens
  assert expert_choices(apart, 16384) == 8192


@ON_LINUX
def test_what_is_not_known_or_does_not_fit_is_refused():
  from kimi_k3.spmd.loop_counts import prefill_loops

  unknown = model("prefill_expert_implementation=reference", "expert_implementation=reference")
  with pytest.raises(InputError, match=r"not known with prefill_expert_implementation reference \(known: grouped\)"):
    prefill_loops(unknown, tokens=8192, length=8192, start=0)
  with pytest.raises(InputError, match=r"a chunk of 8192 tokens behind 1: .* within the 8192"):
    prefill_loops(model(), tokens=8192, length=8192, start=1)
  with pytest.raises(InputError, match="behind -24"):
    prefill_loops(model(), tokens=1024, length=8192, start=-24)
