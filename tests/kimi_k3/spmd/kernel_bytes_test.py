"""Bytes of the kernels of prefill, against walking through their grids block by block."""

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
HEADS, WIDTH, TAIL, VALUES = 3, 192, 64, 128
LANES = 128


def array(dtype: str, *dims: int, space: int = 0):
  """An array without padding, unless its last axis is narrower than the lanes."""
  from kimi_k3.capacity.hlo_text import ELEMENT_BITS, Array

  return Array(dtype, dims, tuple(range(len(dims)))[::-1], (8, LANES), space, ELEMENT_BITS[dtype])


def call(name: str, operands: list, results: list, aliases: dict[int, int] | None = None):
  from kimi_k3.capacity.hlo import KernelCall

  return KernelCall(name, 1, tuple(operands), tuple(results), aliases or {}, "")


@functools.cache
def kernels(*settings: str, tokens: int = 32768, length: int = 32768, start: int = 0):
  """Of K3's first 13 layers on 32 devices."""
  from kimi_k3.capacity import topology
  from kimi_k3.maxtext_adapter.settings import read_config
  from kimi_k3.maxtext_adapter.spmd_engine import build_model
  from kimi_k3.resources import configs_dir
  from kimi_k3.spmd.kernel_bytes import prefill_kernel_bytes

  config = read_config(str(configs_dir() / "tpu7x-32.yml"), ["model_name=kimi-k3", *settings])
  model = build_model(config, topology.tpu_devices("tpu7x:2x2x4")).shortened(13)
  return prefill_kernel_bytes(model, tokens=tokens, length=length, start=start)


def fetches(blocks: list) -> int:
  """How often a pipeline reads: not again where the next step has the same block."""
  return sum(i == 0 or block != blocks[i - 1] for i, block in enumerate(blocks))


def flash(name: str, tokens: int, positions: int, state: bool):
  scalars = [array("s32", 1), array("s32", 1)]
  q = array("bf16", 1, HEADS, WIDTH, tokens)
  keys = [array("bf16", 1, HEADS, positions, LANES), array("bf16", 1, positions, TAIL)]
  keys.append(array("bf16", 1, HEADS, VALUES, positions))
  softmax = [array("f32", 1, HEADS, rows, tokens) for rows in (VALUES, 1, 1)]
  results = softmax if state else [array("bf16", 1, HEADS, VALUES, tokens)]
  return call(name, [*scalars, q, *keys, *(softmax if state else [])], results)


def key_bytes(positions: int) -> dict[str, int]:
  """Of a head: its keys, the tail that heads share (padded to the lanes), its values."""
  return {"nope": positions * LANES * 2, "tail": positions * LANES * 2, "values": positions * VALUES * 2}


@ON_LINUX
@pytest.mark.parametrize("tokens", [1024, 2048, 3072, 32768])
def test_the_causal_kernel_reads_the_triangle_of_blocks_of_each_head(tokens):
  from kimi_k3.mla_flash import BLOCK

  read, written = kernels()["flash_causal"](flash("flash_causal", tokens, tokens, state=False))
  count, steps = tokens // BLOCK, []
  for i in range(-(-count // 2)):
    for j in range(count + 1):
      first = j <= i
      used = first or count - 1 - i != i
      steps.append((j if first else j - i - 1) if used else 0)
  exact = HEADS * fetches(steps) * sum(key_bytes(BLOCK).values())
  exact += HEADS * WIDTH * tokens * 2  # the queries
  assert written == HEADS * VALUES * tokens * 2
  # At most a block of keys a head more or less, see prefill_kernel_bytes; and the scalars.
  assert abs(read - exact) <= HEADS * sum(key_bytes(BLOCK).values()) + 2**14


@ON_LINUX
def test_the_kernel_of_history_reads_the_blocks_that_hold_some_for_each_block_of_queries_and_the_state_once():
  from kimi_k3.mla_flash import BLOCK

  tokens, positions, start = 32768, 4096, 4096 * 2 + 2048
  read, written = kernels(length=262144, start=start)["flash_all"](flash("flash_all", tokens, positions, state=True))
  # Three calls: two of four blocks, one of two.
  used = [4, 4, 2]
  blocks = sum(fetches([j for _ in range(tokens // BLOCK) for j in range(n)]) for n in used) / len(used)
  state = HEADS * (VALUES + 8 + 8) * tokens * 4  # a row of numbers takes the eight of a tile
  exact = HEADS * blocks * sum(key_bytes(BLOCK).values()) + HEADS * WIDTH * tokens * 2 + state
  assert written == state
  assert read == pytest.approx(exact, rel=1e-4)  # the scalars


@ON_LINUX
def test_the_grouped_product_reads_each_hit_expert_once_and_the_rows_for_each_tile_of_columns():
  E, L, F, rows = 28, 3584, 3072, 8192
  scalars = [array("s32", 28), array("s32", 1), array("s32", 1)]
  codes, factors = array("u8", 22, E, L, F // 2), array("f32", E, L // 32, 8, F)
  one = call(
    "expert_grouped",
    [*scalars, array("bf16", rows, L), codes, codes, factors, factors],
    [array("bf16", rows, F)],
  )
  read, written = kernels()["expert_grouped"](one)
  # 16,384 x 16 choices over 32 devices are 8,192 rows, in two runs; the expert at the border of the two is read twice.
  experts = (E + 1) / 2 * (2 * L * F // 2 + 2 * L // 32 * 8 * F * 4)
  assert written == rows / 2 * F * 2
  assert read == pytest.approx(experts + rows / 2 * L * 2 * F // 512, rel=1e-4)  # the scalars, experts not hit


@ON_LINUX
def test_what_lives_in_vmem_is_not_read_from_hbm():
  given = flash("flash_causal", 2048, 2048, state=False)
  inside = [array(x.dtype, *x.dims, space=1) for x in given.operands]
  assert kernels()["flash_causal"](call("flash_causal", inside, list(given.results)))[0] == 0


@ON_LINUX
def test_kernels_that_are_not_known_are_refused_and_history_has_a_kernel_of_its_own():
  assert set(kernels()) == {
    "pallas_kda_fwd_intra_fused",
    "chunk_kda_fwd_h_o_varlen",
    "expert_grouped",
    "flash_causal",
  }
  assert set(kernels(length=262144, start=4096)) - set(kernels()) == {"flash_all"}
  assert set(kernels()) - set(kernels("kda_implementation=portable")) == {
    "pallas_kda_fwd_intra_fused",
    "chunk_kda_fwd_h_o_varlen",
  }
  with pytest.raises(InputError, match="prefill_expert_implementation reference"):
    kernels("prefill_expert_implementation=reference", "expert_implementation=reference")


def test_a_step_reads_the_experts_that_are_hit_and_the_latents_that_are_filled():
  from kimi_k3.spmd.kernel_bytes import decode_kernel_bytes

  kernels = decode_kernel_bytes(hit=0.5, filled=0.25)
  latents = array("bf16", 22, 2, 576, 8192)
  small = [array("s32", 1, space=1)] * 6
  read, written = kernels["latent_step"](call("latent_step", [*small, latents], [small[0], small[0], latents], {2: 6}))
  assert (read, written) == (2 * 576 * 8192 * 2 / 4, 0)
  weights = [array("u8", 22, 28, 3584, 1536)] * 6
  read, _ = kernels["expert_decode"](call("expert_decode", [array("s32", 1, space=1)] * 8 + weights, []))
  assert read == 6 * 28 * 3584 * 1536 / 2
