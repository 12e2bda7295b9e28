"""Where values of compiled programs come from, and what takes them."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def origins():
  from kimi_k3.capacity.hlo_origin import Origins

  return Origins


def test_the_copy_that_a_sparse_core_makes_comes_from_the_argument_that_it_is_given_after_its_start(compiled, origins):
  program = compiled("stack_copied")
  found = origins(program)
  place, copy = next(
    (computation, i)
    for computation in program.computations.values()
    for i in computation.instructions.values()
    if i.opcode == "copy" and computation.thread != "main"
  )
  argument = found.argument(place, copy.name)
  assert argument is not None and argument.op_name == "weights"
  assert "while" in [user.opcode for _, user in found.users(place, copy.name)]
  assert not found.in_loop(place)


def test_a_slice_in_a_loop_comes_from_what_the_loop_was_started_with(compiled, origins):
  program = compiled("layer_sliced")
  found = origins(program)
  fusions = [
    (computation, i)
    for computation in program.computations.values()
    for i in computation.instructions.values()
    if i.arrays and i.arrays[0].dims == (1, 8192, 8192) and i.opcode in ("fusion", "dynamic-slice", "copy-done")
    if computation.thread == "main" and found.in_loop(computation)
  ]
  assert fusions
  assert {found.argument(place, i.name).op_name for place, i in fusions} == {"weights"}


def test_what_is_computed_comes_from_no_argument(compiled, origins):
  program = compiled("stack")
  entry = program.computation(program.entry)
  ((number, loop),) = [(i.name, i) for i in entry.instructions.values() if i.opcode == "while"]
  body = program.computation(loop.called("body")[0])
  results = [origins(program).argument(body, name) for name in body.root.operands]
  named = [argument.op_name for argument in results if argument is not None]
  assert number and named.count("weights") == 1 and "x" not in named  # x is another x behind a layer


def test_results_that_take_the_place_of_an_argument_are_read_from_the_first_line(compiled):
  assert compiled("state").aliases == {0: 0}
  assert compiled("attention").aliases == {1: 0}
  assert compiled("state_copied").aliases == {}
