"""The text of a compiled program, as data."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SMALL = """HloModule jit_f, is_scheduled=true

FileNames
1 "somewhere.py"

%inner (a: f32[4]) -> f32[4] {
  ROOT %a = f32[4]{0} parameter(0)
}, execution_thread="sparsecore"

ENTRY %main (x: f32[4], y: bf16[2,3]) -> (f32[4], bf16[2,3]) {
  %x = f32[4]{0:T(128)} parameter(0), metadata={op_name="x"}
  %y.1 = bf16[2,3]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %literal = s32[2,2]{1,0} constant({
    { 1, 2 },
    { 3, 4 }
  })
  %called = f32[4]{0} call(%x), to_apply=%inner, frontend_attributes={kernel_metadata={
"a": "}"
}}, metadata={op_name="jit(f)/there"}, backend_config={"n":"1"}
  ROOT %out = (f32[4]{0:T(128)}, /*index=1*/bf16[2,3]{1,0}) tuple(%called, /*index=1*/%y.1)
}
"""


@pytest.fixture(scope="module")
def text():
  from kimi_k3.capacity import hlo_text

  return hlo_text


def array_of(text, written: str):
  """The array that a type's text holds."""
  program = text.parse(f"ENTRY %m (p: f32[]) -> f32[] {{\n  ROOT %p = {written} parameter(0)\n}}\n")
  return program.computation("m").root.arrays[0]


def test_a_program_is_its_computations_and_their_instructions_in_order(text):
  program = text.parse(SMALL)
  assert program.entry == "main"
  assert {name: c.thread for name, c in program.computations.items()} == {"inner": "sparsecore", "main": "main"}
  main = program.computation("main")
  assert list(main.instructions) == ["x", "y.1", "literal", "called", "out"]
  assert [p.name for p in main.parameters] == ["x", "y.1"]
  assert main.root.name == "out" and main.root.operands == ("called", "y.1")
  assert [user.name for user in main.users["x"]] == ["called"]


def test_line_breaks_in_literals_and_attributes_end_no_instruction_and_no_computation(text):
  main = text.parse(SMALL).computation("main")
  called = main.instructions["called"]
  assert main.instructions["literal"].literal == "{ { 1, 2 }, { 3, 4 } }"
  assert called.called("to_apply") == ("inner",) and called.op_name == "jit(f)/there"
  assert called.backend_config == '{"n":"1"}'


def test_parts_of_a_tuple_keep_their_arrays_apart(text):
  start = (
    "ENTRY %m (p: f32[]) -> f32[] {\n"
    "  %p = f32[4]{0} parameter(0)\n"
    "  ROOT %s = ((f32[4]{0:T(128)}, s32[]), (f32[2]{0:T(128)}), u32[]{:S(2)}, ()) async-start(%p), calls=%c\n"
    "}\n"
  )
  parts = text.parse(start).computation("m").root.parts
  assert [[array.dims for array in part] for part in parts] == [[(4,), ()], [(2,)], [()], []]
  assert parts[2][0].space == 2 and not parts[2][0].in_hbm


@pytest.mark.parametrize(
  ("written", "bytes_", "padded"),
  [
    ("f32[]", 4, 4),
    ("f32[7]", 28, 28),  # no tiles
    ("f32[7]{0:T(128)}", 28, 512),
    ("bf16[64,1024]{1,0:T(8,128)(2,1)}", 2**17, 2**17),
    # Minor 576 is padded to 640, or the other axis is the minor one and is not: the latent cache.
    ("bf16[3,64,1024,576]{3,2,1,0:T(8,128)(2,1)}", 226492416, 3 * 64 * 1024 * 640 * 2),
    ("bf16[3,64,1024,576]{2,3,1,0:T(8,128)(2,1)}", 226492416, 226492416),
    # Three rows take eight, three lanes take 128: what a convolution remembers, and the projection of beta.
    ("bf16[64,3,1152]{2,1,0:T(8,128)(2,1)}", 64 * 3 * 1152 * 2, 64 * 8 * 1152 * 2),
    ("bf16[7168,3]{1,0:T(8,128)(2,1)}", 7168 * 3 * 2, 7168 * 128 * 2),
    ("bf16[64,3,1152]{2,0,1:T(8,128)(2,1)}", 64 * 3 * 1152 * 2, 64 * 3 * 1152 * 2),
    ("f4e2m1fn[28,3584,3072]{2,1,0:T(32,128)(8,1)}", 28 * 3584 * 1536, 28 * 3584 * 1536),
    ("s32[3]{0:T(128)E(4)}", 2, 64),  # the layout says four bits
    ("f32[5,6]{1,0:T(8)}", 120, 5 * 8 * 4),  # fewer tiles than axes
    ("f32[6]{0:T(2,128)}", 24, 2 * 128 * 4),  # more
    ("f32[3,5,6]{2,1,0:T(*,8)}", 360, 3 * 32 * 4),  # 5 x 6 as one axis
    ("pred[]{:T(512)S(6)}", 1, 1),
    ("token[]", 0, 0),
  ],
)
def test_bytes_are_of_the_elements_and_of_their_tiles(text, written, bytes_, padded):
  array = array_of(text, written)
  assert (array.bytes, array.padded_bytes) == (bytes_, padded)
  assert array.hbm_bytes == (0 if "S(" in written else padded)


@settings(deadline=None)  # the first example imports kimi_k3
@given(
  dims=st.lists(st.integers(1, 40), min_size=2, max_size=4),
  tile=st.tuples(st.sampled_from([1, 2, 8, 16]), st.sampled_from([8, 128])),
  data=st.data(),
)
def test_padding_rounds_the_two_minor_axes_up_to_the_tile(dims, tile, data):
  from kimi_k3.capacity import hlo_text

  order = data.draw(st.permutations(range(len(dims))))
  array = hlo_text.Array("bf16", tuple(dims), tuple(order), tile, 0, 16)
  minor, second, *rest = (dims[axis] for axis in order)
  expected = math.prod(rest) * math.ceil(minor / tile[1]) * tile[1] * math.ceil(second / tile[0]) * tile[0]
  assert array.padded_bytes == 2 * expected >= array.bytes


def test_a_text_of_the_compiler_is_read_whole(compiled):
  program = compiled("scan")
  assert len(program.computation(program.entry).parameters) == 4
  assert all(c.root is not None for c in program.computations.values())
  opcodes = {i.opcode for c in program.computations.values() for i in c.instructions.values()}
  assert {"while", "fusion", "all-reduce", "copy-start", "copy-done", "dynamic-update-slice"} <= opcodes


@pytest.mark.parametrize(
  ("broken", "message"),
  [
    (SMALL.replace("f32[4]", "f31[4]"), "unknown element type f31"),
    (SMALL.replace("ENTRY ", ""), "no ENTRY computation"),
    (SMALL[: SMALL.index("  ROOT %out")], "ends inside a computation"),
    (SMALL.replace("  ROOT %out", "  %out"), "has no ROOT"),
    ("", "no ENTRY computation"),
    (SMALL.replace("  %x = f32", "  what is this\n  %x = f32"), "not an instruction of main"),
  ],
)
def test_a_text_that_cannot_be_read_says_why(text, broken, message):
  with pytest.raises(ValueError, match=message):
    text.parse(broken)


def test_places_in_source_files_are_left_out_of_a_stored_text(text):
  assert "somewhere.py" not in text.strip_locations(SMALL)
  assert text.parse(text.strip_locations(SMALL)) == text.parse(SMALL)
