"""Bytes of single fusions, written out by hand."""

from __future__ import annotations

import pytest

# Every array is whole tiles of float32, so that bytes are elements times four.
STACK, LAYER, ROW = "f32[6,8,128]{2,1,0:T(8,128)}", "f32[1,8,128]{2,1,0:T(8,128)}", 4 * 8 * 128
FLAT = "f32[8,128]{1,0:T(8,128)}"


def fusion(body: str, result: str, operands: str = "%s, %i", extra: str = "") -> str:
  """A program of one fusion over a stack of six layers, a number and one layer."""
  parameters = {"%s": STACK, "%i": "s32[]{:T(128)S(6)}", "%u": LAYER}
  names = operands.split(", ")
  inner = "".join(f"  {name} = {parameters[name]} parameter({i})\n" for i, name in enumerate(names))
  outer = "".join(f"  {name} = {parameters[name]} parameter({i})\n" for i, name in enumerate(names))
  return (
    f"{extra}%fused (a: f32[]) -> f32[] {{\n{inner}{body}\n}}\n"
    f"ENTRY %main (a: f32[]) -> f32[] {{\n{outer}"
    f"  ROOT %f = {result} fusion({operands}), kind=kLoop, calls=%fused\n}}\n"
  )


def slice_of(name: str, result: str = "d", root: bool = False) -> str:
  head = "ROOT " if root else ""
  return f"  {head}%{result} = {LAYER} dynamic-slice({name}, %i, %z, %z), dynamic_slice_sizes={{1,8,128}}"


ZERO = "  %z = s32[] constant(0)\n"
NESTED = (
  f"%inner (a: f32[]) -> f32[] {{\n  %p = {STACK} parameter(0)\n  %q = s32[] parameter(1)\n{ZERO}"
  f"  ROOT %e = {LAYER} dynamic-slice(%p, %q, %z, %z), dynamic_slice_sizes={{1,8,128}}\n}}\n"
)
HANDED_ON = f"%inner (a: f32[]) -> f32[] {{\n  %p = {STACK} parameter(0)\n  ROOT %e = {STACK} bitcast(%p)\n}}\n"

CASES = {
  "a slice of a stack": (fusion(ZERO + slice_of("%s", root=True), LAYER), ROW, ROW),
  "two slices of it": (
    fusion(f"{ZERO}{slice_of('%s')}\n{slice_of('%s', 'e')}\n  ROOT %r = {LAYER} add(%d, %e)", LAYER),
    2 * ROW,
    ROW,
  ),
  "more slices than it is large": (
    fusion(
      ZERO
      + "\n".join(slice_of("%s", f"d{n}") for n in range(8))
      + f"\n  ROOT %r = {LAYER} add({', '.join(f'%d{n}' for n in range(8))})",
      LAYER,
    ),
    6 * ROW,
    ROW,
  ),
  "a slice of its cast": (
    fusion(
      f"{ZERO}  %h = f32[6,8,128]{{2,1,0:T(8,128)}} convert(%s)\n{slice_of('%h', root=True)}",
      LAYER,
    ),
    ROW,
    ROW,
  ),
  "a slice in a fusion in it": (
    fusion(f"  ROOT %r = {LAYER} fusion(%s, %i), kind=kLoop, calls=%inner", LAYER, extra=NESTED),
    ROW,
    ROW,
  ),
  "a slice of what a fusion in it hands on": (
    fusion(
      f"{ZERO}  %b = {STACK} fusion(%s), kind=kLoop, calls=%inner\n{slice_of('%b', root=True)}", LAYER, extra=HANDED_ON
    ),
    ROW,
    ROW,
  ),
  "all of it": (fusion(f"  ROOT %r = {STACK} negate(%s)", STACK, "%s"), 6 * ROW, 6 * ROW),
  "all of it under another name": (fusion(f"  ROOT %r = {STACK} bitcast(%s)", STACK, "%s"), 6 * ROW, 6 * ROW),
  "an update in place": (
    fusion(f"{ZERO}  ROOT %r = {STACK} dynamic-update-slice(%s, %u, %i, %z, %z)", STACK, "%s, %i, %u"),
    ROW,
    ROW,
  ),
  "an update in place of what it was": (
    fusion(
      f"{ZERO}{slice_of('%s')}\n  %n = {LAYER} negate(%d)\n"
      f"  ROOT %r = {STACK} dynamic-update-slice(%s, %n, %i, %z, %z)",
      STACK,
    ),
    ROW,
    ROW,
  ),
  "an update in place and its slice": (
    fusion(
      f"{ZERO}  %n = {STACK} dynamic-update-slice(%s, %u, %i, %z, %z)\n{slice_of('%n')}\n"
      f"  ROOT %r = ({STACK}, {LAYER}) tuple(%n, %d)",
      f"({STACK}, {LAYER})",
      "%s, %i, %u",
    ),
    2 * ROW,
    2 * ROW,
  ),
  "an update of zeros, which is no update in place": (
    fusion(
      f"{ZERO}  %f = f32[] constant(0)\n  %o = {STACK} broadcast(%f), dimensions={{}}\n"
      f"  ROOT %r = {STACK} dynamic-update-slice(%o, %u, %i, %z, %z)",
      STACK,
      "%i, %u",
    ),
    ROW,
    6 * ROW,
  ),
  "a result in VMEM": (fusion(ZERO + slice_of("%s", root=True), LAYER.replace(")}", ")S(1)}")), ROW, 0),
  "one result of two in VMEM": (
    fusion(
      f"{ZERO}{slice_of('%s')}\n  %n = {LAYER} negate(%d)\n  ROOT %r = ({LAYER}, {LAYER}) tuple(%d, %n)",
      f"({LAYER}, {LAYER.replace(')}', ')S(1)}')})",
    ),
    ROW,
    ROW,
  ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fusion_moves_what_it_uses_of_its_operands_and_what_it_changes_of_its_results(name):
  from kimi_k3.capacity import hlo

  text, read, written = CASES[name]
  found = hlo.hbm_bytes(hlo.parse(text))
  assert (found.read, found.written) == (read, written)


def whole(instructions: str) -> str:
  return (
    f"ENTRY %main (s: f32[]) -> f32[] {{\n  %s = {STACK} parameter(0)\n  %i = s32[]{{:T(128)S(6)}} parameter(1)\n"
    f"  %u = {LAYER} parameter(2)\n  %v = {FLAT.replace(')}', ')S(1)}')} parameter(3)\n{instructions}\n}}\n"
  )


@pytest.mark.parametrize(
  ("instruction", "read", "written"),
  [
    (f"ROOT %r = {LAYER} dynamic-slice(%s, %i, %i, %i)", ROW, ROW),
    (f"ROOT %r = {STACK} dynamic-update-slice(%s, %u, %i, %i, %i)", ROW, ROW),
    (f"ROOT %r = ({FLAT}, {FLAT.replace(')}', ')S(1)}')}, u32[]{{:S(2)}}) copy-start(%v)", 0, ROW),
    (f"ROOT %r = ({LAYER.replace(')}', ')S(1)}')}, {LAYER}, u32[]{{:S(2)}}) copy-start(%u)", ROW, 0),
    (f"ROOT %r = {FLAT} iota(), iota_dimension=0", 0, ROW),
    (f"ROOT %r = {FLAT} bitcast(%u)", 0, 0),
    (f"ROOT %r = ({STACK}, {LAYER}) tuple(%s, %u)", 0, 0),
    (f'ROOT %r = {FLAT} custom-call(), custom_call_target="AllocateBuffer"', 0, 0),
    (f"ROOT %r = {FLAT} add(%u, %v)", ROW, ROW),
  ],
)
def test_an_instruction_moves_what_lives_in_hbm(instruction, read, written):
  from kimi_k3.capacity import hlo

  found = hlo.hbm_bytes(hlo.parse(whole(f"  {instruction}")))
  assert (found.read, found.written) == (read, written)


@pytest.mark.parametrize(
  ("body", "result", "kind"),
  [
    (ZERO + slice_of("%s", root=True), LAYER, "dynamic-slice"),
    (f"  ROOT %r = {STACK} copy(%s)", STACK, "copy"),
    (f"  %t = {STACK} transpose(%s), dimensions={{0,1,2}}\n  ROOT %r = {STACK} bitcast(%t)", STACK, "transpose"),
    ("  ROOT %r = bf16[6,8,128]{2,1,0:T(8,128)(2,1)} convert(%s)", "bf16[6,8,128]{2,1,0:T(8,128)(2,1)}", "convert"),
    (f"  ROOT %r = {STACK} bitcast(%s)", STACK, None),
    (f"  ROOT %r = {STACK} negate(%s)", STACK, None),
  ],
)
def test_a_fusion_that_only_copies_casts_or_slices_is_a_copy(body, result, kind):
  from kimi_k3.capacity import hlo

  found = hlo.copies(hlo.parse(fusion(body, result)), min_bytes=1)
  assert [copy.kind for copy in found] == ([kind] if kind else [])
  assert [copy.source.dims for copy in found] == ([(6, 8, 128)] if kind else [])


def test_a_slice_in_a_fusion_in_a_fusion_is_a_copy_of_the_outer_operand():
  from kimi_k3.capacity import hlo

  text = fusion(f"  ROOT %r = {LAYER} fusion(%s, %i), kind=kLoop, calls=%inner", LAYER, extra=NESTED)
  (copy,) = hlo.copies(hlo.parse(text), min_bytes=1)
  assert (copy.kind, copy.source.dims, copy.result.dims) == ("dynamic-slice", (6, 8, 128), (1, 8, 128))
