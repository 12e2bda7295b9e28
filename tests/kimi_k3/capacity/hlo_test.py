"""Collectives, bytes, kernels and copies of programs that the TPU compiler made, against counting by hand."""

from __future__ import annotations

import re

import pytest

MIB = 2**20
OUTER = "jit(program)/shard_map/while"  # of "nested": it runs as often as an argument says


@pytest.fixture(scope="module")
def hlo():
  from kimi_k3.capacity import hlo

  return hlo


def kinds(rows) -> list[tuple]:
  return sorted((row.kind, row.where, row.calls, row.operand_bytes, row.result_bytes) for row in rows)


def test_a_collective_in_a_scan_counts_once_a_layer(hlo, compiled):
  (row,) = hlo.collectives(compiled("scan"))
  assert (row.kind, row.calls, row.bytes, row.where) == ("all-reduce", 5, 64 * 1024 * 2, "tensorcore")
  assert row.groups == "mesh['x'=4] {'x'}"
  assert row.op_name.endswith("/psum")


def test_what_the_sparse_core_runs_counts_once_though_the_text_has_a_start_an_update_and_an_end(hlo, compiled):
  whole, part = 16384 * 4096 * 2, 512 * 4096 * 2
  assert kinds(hlo.collectives(compiled("offloaded"))) == [
    ("all-gather", "sparsecore", 4, part, whole),
    ("all-reduce", "sparsecore", 4, part, part),
    ("all-to-all", "tensorcore", 4, part, part),
    ("all-to-all", "tensorcore", 4, part, part),
    ("reduce-scatter", "sparsecore", 4, whole, part),
  ]


def test_a_fused_reduce_scatter_is_named_so_and_an_asynchronous_pair_counts_once(hlo, compiled):
  rows = hlo.collectives(compiled("not_offloaded"))
  assert [(row.kind, row.where) for row in rows].count(("reduce-scatter", "fusion")) == 1
  (permute,) = [row for row in rows if row.kind == "collective-permute"]
  assert permute.operand_bytes == permute.result_bytes == 496 * 4096 * 2  # context words are left out
  assert permute.groups.startswith("{{0,1},{1,2},")
  assert sum(row.calls for row in rows) == 24


def test_the_table_ends_with_calls_and_bytes(hlo, compiled):
  lines = hlo.collective_table(hlo.collectives(compiled("offloaded"))).splitlines()
  assert len(lines) == 1 + 5 + 1
  assert lines[-1] == "20 calls, 1124.07 MB a device"


def test_of_a_conditional_the_branch_with_more_calls_counts_for_collectives_and_with_more_bytes_for_traffic(
  hlo, compiled
):
  rows = hlo.collectives(compiled("nested"), {OUTER: 10})
  assert sorted((row.calls, row.bytes) for row in rows) == [(10, 64 * 1024 * 2), (70, 64 * 1024 * 4)]
  traffic = hlo.hbm_bytes(compiled("nested"), loops={OUTER: 10})
  # The matrix once in each of 70 inner steps and once in the branch that multiplies; the other branch stays in VMEM.
  assert sum(row.runs for row in traffic.rows if row.read == 2 * MIB) == 70 + 10


def test_a_fusion_reads_the_slice_of_a_stack_and_an_update_in_place_writes_the_update(hlo, compiled):
  rows = {row.op_name.rpartition("/")[2]: row for row in hlo.hbm_bytes(compiled("scan")).rows if row.total > MIB}
  assert set(rows) == {"dot_general", "dynamic_update_slice"}
  matrices, update = rows["dot_general"], rows["dynamic_update_slice"]
  assert (matrices.runs, matrices.read, matrices.written) == (5, 2 * 1024 * 1024 * 2, 0)  # the activations are in VMEM
  assert (update.runs, update.read, update.written) == (5, 64 * 8 * 1024 * 4, 64 * 8 * 1024 * 4)


def test_a_scan_moves_each_weight_once_and_each_state_twice(hlo, compiled):
  found = hlo.hbm_bytes(compiled("scan"))
  weights, states, x = 5 * 2 * 1024 * 1024 * 2, 5 * 64 * 8 * 1024 * 4, 64 * 1024 * 2
  assert found.read == pytest.approx(weights + states + x, rel=1e-3)  # counters and indices are the rest
  assert found.written == pytest.approx(states + x, rel=1e-3)
  assert found.total == found.read + found.written
  assert found.table(top=1).splitlines()[-1] == "read 30.1 MiB, written 10.1 MiB"


def test_a_kernel_on_a_stack_reads_one_layer_of_it_and_updates_it_in_place(hlo, compiled):
  program = compiled("kernel")
  assert hlo.kernels(program) == {"multiply_and_count": 5}
  (call,) = hlo.kernel_calls(program)
  assert [array.dims for array in call.operands] == [(1,), (64, 1024), (5, 1024, 1024), (5, 64, 8, 128)]
  assert call.aliases == {1: 3}
  matrix, state = 1024 * 1024 * 2, 64 * 8 * 128 * 4
  one = hlo.layer_of_stack({2, 3})(call)
  assert one == (matrix + state + call.operands[0].hbm_bytes, state)  # x and the product are in VMEM
  half = hlo.layer_of_stack({2, 3}, share={2: 0.5, -2: 0.25})(call)
  assert half == (matrix / 2 + state + call.operands[0].hbm_bytes, state / 4)
  (row,) = [row for row in hlo.hbm_bytes(program, {"multiply_*": hlo.layer_of_stack({2, 3})}).rows if row.total > MIB]
  assert (row.name, row.runs, row.read, row.written) == ("multiply_and_count", 5, *one)


@pytest.mark.parametrize(
  ("op_name", "expected"),
  [
    ("jit(step)/while/body/decode_experts/pallas_call", "decode_experts"),
    ("jit(step)/jit(chunk_kda)/pallas_call", "chunk_kda"),
    ("jit(step)/jit(gmm_v2)/gmm_v2-g_28-act_situ:4.0:25.0/mpmd_map", "gmm_v2-g_28-act_situ:4.0:25.0"),
    ("pallas_call", "k"),
    ("", "k"),
  ],
)
def test_a_kernel_has_its_name_in_the_program_or_else_its_instructions(hlo, op_name, expected):
  text = (
    "ENTRY %main (x: f32[1024]) -> f32[1024] {\n  %x = f32[1024]{0:T(1024)} parameter(0)\n"
    '  ROOT %k.12 = f32[1024]{0:T(1024)} custom-call(%x), custom_call_target="tpu_custom_call", '
    f'metadata={{op_name="{op_name}"}}\n}}\n'
  )
  assert hlo.kernels(hlo.parse(text)) == {expected: 1}


@pytest.mark.parametrize(
  ("patterns", "message"),
  [
    ((), r"kernel\(s\) multiply_and_count: .*exactly one pattern.*found none"),
    (("other",), r"kernel\(s\) multiply_and_count: .*found other"),
    (("multiply*", "*count"), r"multiply_and_count \(multiply\*, \*count\)"),
    (("multiply*", "spare"), r"kernels: spare matches none"),
  ],
)
def test_a_kernel_without_exactly_one_pattern_and_a_pattern_without_a_kernel_are_errors(
  hlo, compiled, patterns, message
):
  from kimi_k3.errors import InputError

  with pytest.raises(InputError, match=message):
    hlo.hbm_bytes(compiled("kernel"), {pattern: hlo.layer_of_stack() for pattern in patterns})


def test_a_stacked_operand_that_a_kernel_lacks_is_an_error(hlo, compiled):
  from kimi_k3.errors import InputError

  with pytest.raises(InputError, match=r"multiply_and_count: operands \[4\] named, 4 found"):
    hlo.hbm_bytes(compiled("kernel"), {"*": hlo.layer_of_stack({4})})


def test_copies_of_a_whole_cache_are_found_wherever_they_run(hlo, compiled):
  found = hlo.copies(compiled("cache"))
  cache = (3, 64, 1024, 576)
  assert [(copy.kind, copy.runs, copy.result.dims) for copy in found] == [("copy", 1, cache)] * 2
  # One of them into a layout that pads 576 channels to 640.
  assert [copy.result.padded_bytes for copy in found] == [3 * 64 * 1024 * 640 * 2, 3 * 64 * 1024 * 576 * 2]
  assert str(found[0]).startswith("1 x copy of bf16[3,64,1024,576] to bf16[3,64,1024,576], 240.0 MiB")


def test_a_scatter_writes_rows_and_a_gather_reads_rows(hlo, compiled):
  rows = {row.op_name.rpartition("/")[2]: row for row in hlo.hbm_bytes(compiled("cache")).rows}
  assert (rows["scatter"].read, rows["scatter"].written) == (64 * 640 * 2, 64 * 640 * 2)
  assert (rows["gather"].read, rows["gather"].written) == (64 * 1024 * 2, 64 * 1024 * 2)


def test_prefetches_into_vmem_are_reads_and_no_copies(hlo, compiled):
  program = compiled("offloaded")
  back = hlo.copies(program, min_bytes=4 * MIB)
  assert [(copy.runs, copy.source.space, copy.result.space) for copy in back] == [(4, 1, 0), (4, 0, 0), (1, 1, 0)]
  assert {copy.result.space for copy in hlo.copies(program, min_bytes=4 * MIB, into_vmem=True)} == {0, 1}


def test_the_largest_arrays_that_are_made_are_those_of_the_matrix_products_and_collectives(hlo, compiled):
  largest = hlo.buffers(compiled("offloaded"), top=2)
  assert [(array.dims, array.padded_bytes) for _, array, _ in largest] == [((16384, 4096), 128 * MIB)] * 2
  # The state that a scan updates in place is nobody's temporary.
  assert all(array.dims != (5, 64, 8, 1024) for _, array, _ in hlo.buffers(compiled("scan")))


BRANCHES = """%one (a: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0:T(1024)} parameter(0)
  ROOT %r = f32[1024]{0:T(1024)} all-reduce(%a), replica_groups={}, to_apply=%sum
}
%other (b: f32[1024]) -> f32[1024] {
  %b = f32[1024]{0:T(1024)} parameter(0)
  %big = f32[1024,1024]{1,0:T(8,128)} broadcast(%b), dimensions={0}
  %moved = f32[1024,1024]{0,1:T(8,128)} copy(%big), metadata={op_name="here"}
  ROOT %s = f32[1024]{0:T(1024)} reduce(%moved, %b), dimensions={1}, to_apply=%sum
}
ENTRY %main (p: pred[], x: f32[1024]) -> f32[1024] {
  %p = pred[]{:T(512)} parameter(0)
  %x = f32[1024]{0:T(1024)} parameter(1)
  ROOT %c = f32[1024]{0:T(1024)} conditional(%p, %x, %x), BRANCHES
}
"""


@pytest.mark.parametrize(
  "written", ["branch_computations={%one, %other}", "true_computation=%one, false_computation=%other"]
)
def test_each_question_takes_the_branch_that_costs_it_most_and_copies_take_all(hlo, written):
  program = hlo.parse(BRANCHES.replace("BRANCHES", written))
  assert [row.kind for row in hlo.collectives(program)] == ["all-reduce"]
  assert {row.opcode for row in hlo.hbm_bytes(program).rows} == {"broadcast", "copy", "reduce"}
  assert [copy.op_name for copy in hlo.copies(program)] == ["here"]


ASYNCHRONOUS = """%wrapped (q: f32[8,1024]) -> f32[1,1024] {
  %q = f32[8,1024]{1,0:T(8,128)} parameter(0)
  ROOT %s = f32[1,1024]{1,0:T(1,128)S(1)} slice(%q), slice={[0:1], [0:1024]}
}
ENTRY %main (x: f32[8,1024]) -> f32[1,1024] {
  %x = f32[8,1024]{1,0:T(8,128)} parameter(0)
  START
  ROOT %end = f32[1,1024]{1,0:T(1,128)S(1)} DONE(%begin)
}
"""
TYPE = "((f32[8,1024]{1,0:T(8,128)}), f32[1,1024]{1,0:T(1,128)S(1)}, s32[]{:T(128)S(2)})"


@pytest.mark.parametrize(
  ("start", "done"),
  [
    (f"%begin = {TYPE} async-start(%x), calls=%wrapped", "async-done"),
    (f"%begin = {TYPE} slice-start(%x), slice={{[0:1], [0:1024]}}", "slice-done"),
    (f"%begin = {TYPE} call-start(%x), to_apply=%wrapped", "call-done"),
    (f"%w = {TYPE} async-start(%x), calls=%wrapped\n  %begin = {TYPE} async-update(%w)", "async-done"),
  ],
)
def test_an_asynchronous_slice_reads_the_slice_once_in_every_form(hlo, start, done):
  program = hlo.parse(ASYNCHRONOUS.replace("START", start).replace("DONE", done))
  found = hlo.hbm_bytes(program)
  assert (found.read, found.written) == (4096, 0)


def test_a_custom_call_that_is_no_kernel_is_named_by_its_target(hlo):
  from kimi_k3.errors import InputError

  text = (
    "ENTRY %main (x: f32[1024]) -> f32[1024] {\n  %x = f32[1024]{0:T(1024)} parameter(0)\n"
    '  %b = f32[1024]{0:T(1024)} custom-call(), custom_call_target="AllocateBuffer"\n'
    '  ROOT %c = f32[1024]{0:T(1024)} custom-call(%x, %b), custom_call_target="Strange"\n}\n'
  )
  program = hlo.parse(text)
  with pytest.raises(InputError, match=r"kernel\(s\) Strange"):
    hlo.hbm_bytes(program)
  assert hlo.hbm_bytes(program, {"Strange": hlo.layer_of_stack()}).total == 3 * 4096


def test_every_stored_text_is_counted_without_an_error(hlo, compiled):
  kernels, loops = {"multiply_and_count": hlo.layer_of_stack({2, 3})}, {OUTER: 1}
  for name in ("scan", "offloaded", "not_offloaded", "kernel", "nested", "cache"):
    given = loops if name == "nested" else {}
    found = hlo.hbm_bytes(compiled(name), kernels if name == "kernel" else {}, given)
    assert found.total > 0 and re.search(r"read .* MiB, written .* MiB$", found.table())


BODY = "jit(step)/shard_map/while/body/eval_jaxpr"


@pytest.mark.parametrize(
  ("kinds", "expected"),
  [
    (["all-reduce"] * 8, 2.0),  # heads and experts cut: one after attention, one after the experts
    (["all-reduce"] * 12 + ["all-gather"] * 4, 4.0),  # the experts' latent cut too: its parts are joined
    (["all-reduce"] * 8 + ["all-gather"] * 4 + ["reduce-scatter"] * 4, 3.0),  # tokens gathered, their sums scattered
    (["all-to-all"] * 2 + ["all-reduce"] * 8, 2.0),  # latents cut by rows
  ],
)
def test_reductions_of_a_layer_are_those_below_the_scan_over_blocks_of_four(hlo, kinds, expected):
  def row(kind: str, calls: int, op_name: str):
    return hlo.Collective(kind, calls, 8, 8, "", op_name, "tensorcore", "")

  outside = [row("all-reduce", 1, "jit(step)/shard_map/psum")] * 11 + [row("all-gather", 1, "")]
  assert hlo.reductions_per_layer(outside + [row(kind, 22, f"{BODY}/{kind}") for kind in kinds]) == expected
  assert hlo.reductions_per_layer(outside) is None
