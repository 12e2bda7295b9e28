"""Each trap is found in a program that has it, and not in the same program without: texts by the TPU compiler."""

from __future__ import annotations

import dataclasses

import pytest

from kimi_k3.errors import InputError

MIB = 2**20
# Of "residual": the tokens of one of four devices, and the width of the stream.
A_DEVICE = {"tokens": 8192, "width": 1024}

# By the name of a stored text: the trap, what the detail says first, and the same program without it.
PLANTED = {
  "stack_copied": (
    "stack copied at entry",
    "weights bf16[4,4096,4096], 128.0 MiB: compile with xla_tpu_control_large_2nd_minor_layout_for_x16=false",
    "stack",
  ),
  "stack_cast": ("hoisted cast", "weights f32[4,4096,4096] as bf16, 128.0 MiB: store it in the type", "stack"),
  "residual_replicated": (
    "replicated residual",
    "bf16[1,32768,1024] in jit(program)/shard_map/while, 8192 tokens a device would do, 64.0 MiB: set prefill_cut",
    "residual",
  ),
  "table_constant": ("constant in the program", "constant.0.clone f32[512,1024], 2.0 MiB: pass it", "table"),
  "layer_sliced": (
    "stack sliced for a kernel",
    "a layer of weights bf16[4,8192,8192] for multiply, 128.0 MiB, 4 times a run: hand the kernel the whole stack",
    "layer",
  ),
  "attention_copied": (
    "cache copied in a loop",
    "latents bf16[4,64,1024,1024], 128.0 MiB, 4 times a run: read it by one product",
    "attention",
  ),
  "state_copied": (
    "state copied whole",
    "states f32[4,1024,1024] and the result like it both live, 16.0 MiB: donate it",
    "state",
  ),
  # Donated, and copied twice by the SparseCore around a scatter.
  "cache": (
    "state copied whole",
    "latents bf16[3,64,1024,576], 240.0 MiB; 1 more, 456.0 MiB in all: replace parts",
    "attention",
  ),
}


def traps(program, name: str, **loops: int):
  from kimi_k3.capacity.traps import find_traps

  return find_traps(program, loops=loops, **(A_DEVICE if name.startswith("residual") else {}))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_trap_is_the_one_that_is_found_and_its_detail_says_what_how_much_and_what_to_do(compiled, name):
  trap, detail, _ = PLANTED[name]
  (found,) = traps(compiled(name), name)
  assert found.trap == trap
  assert found.detail.startswith(detail), found.detail
  assert "\n" not in found.detail


@pytest.mark.parametrize(
  "name", sorted({without for _, _, without in PLANTED.values()} | {"scan", "kernel", "offloaded"})
)
def test_the_same_program_without_the_trap_has_none(compiled, name):
  assert traps(compiled(name), name) == []


def test_a_loop_that_depends_on_data_needs_its_count(compiled):
  from kimi_k3.capacity.traps import find_traps

  with pytest.raises(InputError, match="depends on data"):
    find_traps(compiled("nested"))
  assert find_traps(compiled("nested"), loops={"jit(program)/shard_map/while": 10}) == []


def test_a_residual_is_not_looked_for_without_tokens_and_half_of_what_it_takes_is_refused(compiled):
  from kimi_k3.capacity.traps import find_traps

  assert find_traps(compiled("residual_replicated")) == []
  with pytest.raises(InputError, match="give both or none"):
    find_traps(compiled("residual_replicated"), tokens=8192)


def test_a_text_without_its_first_line_cannot_show_that_a_state_stays_where_it_is(compiled):
  (found,) = traps(dataclasses.replace(compiled("state"), aliases={}), "state")
  assert found.trap == "state copied whole"


def test_a_smaller_copy_is_no_trap(compiled, monkeypatch):
  from kimi_k3.capacity import traps as module

  monkeypatch.setattr(module, "MIN_COPY_BYTES", 128 * MIB + 1)
  assert traps(compiled("stack_copied"), "stack_copied") == []
