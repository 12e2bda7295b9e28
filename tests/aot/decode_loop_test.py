"""The loop of many decoding steps, of Kimi K3 whole on 32 devices of TPU v7x: what it holds beside one step."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BUFFER = 128
# Three projections [22, 7168, 3] that a step copies to another layout and drops, and the loop holds: 3.6 MiB and pads,
# and the logits of one step on their way to the tokens.
HELD_MORE = 8 * 2**20
MIB = 2**20


@pytest.fixture(scope="module")
def full_size() -> Iterator[ModuleType]:
  """The tests beside this one, which compile one step."""
  spec = importlib.util.spec_from_file_location("step_of_full_size", Path(__file__).with_name("full_size_test.py"))
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # its dataclasses look for their module there
  spec.loader.exec_module(module)
  yield module
  del sys.modules[spec.name]


def test_the_loop_holds_no_more_than_one_step(full_size):
  from kimi_k3.spmd import programs

  config, model = full_size.build()
  sizes = {"rows": full_size.ROWS, "length": full_size.CONTEXT, "cut": config.mla_cache_cut}
  step = full_size.compile_program(model, programs.decode_step(model, **sizes))
  loop = full_size.compile_program(model, programs.decode_loop(model, **sizes, buffer=BUFFER))
  one, many = step.compiled.memory_analysis(), loop.compiled.memory_analysis()
  assert abs(many.argument_size_in_bytes - one.argument_size_in_bytes) <= MIB, "the rows' numbers"
  assert many.alias_size_in_bytes >= one.alias_size_in_bytes, "the caches are updated where they lie"
  assert many.output_size_in_bytes - many.alias_size_in_bytes <= MIB
  assert many.temp_size_in_bytes <= one.temp_size_in_bytes + HELD_MORE
