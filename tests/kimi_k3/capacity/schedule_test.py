"""Schedules of kernels, from texts as libtpu dumps them."""

from __future__ import annotations

from pathlib import Path

import pytest

# A grid's loop with a loop of four bundles in it, of which one is empty and one holds code of the outer loop.
BUNDLES = """= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = inlined_call_operand.<no memory space> [shape: s32[1]] }
   0x1   :  { %2 = vsyncpa [#allocation6], 0 }
   0x2 LB: > { %s3 = sadd.s32 1, %s2 }
   0x3   : > { %s4 = sld [smem:[#allocation3]]
second_minor_factor: 1 */ }
   0x4 PF: > { %s5 = smov 0 }
   0x5 LB: >> { %v1 = vld [vmem:[%s2] sm:$0xff]  ;;  %v2 = vmul.f32 2.0, %v3 }
   0x6   : > { %s6 = smov (%p1), [#allocation8] }
   0x7   :  {}
   0x8   : >> { %7 = vst [vmem:[%s9] sm:$0xff] %v2 }
   0x9   : > { %10 = sbr.rel (!%p2) target = $region160 }
   0xa   :  { %11 = vsyncpa [#allocation7], 1 }
"""
UTILIZATION = """== CAPACTIY:
MXU, XLU, VALU, VLOAD, VSTORE, SALU
    2     2     4     3     2     2
== UTILIZATION:
0 0 0 0 0 0
0 0 0 0 0 1
0 0 0 0 0 1
0 0 0 0 0 2
0 0 0 0 0 1
0 0 1 1 0 0
0 0 0 0 0 1
0 0 0 0 0 0
0 0 0 0 1 0
0 0 0 0 0 1
0 0 0 0 0 1
hlo: my_kernel.1
 */ }
"""


@pytest.fixture(scope="module")
def schedule():
  from kimi_k3.capacity import schedule

  return schedule


def test_bundles_belong_to_the_innermost_loop_they_are_issued_in(schedule):
  found = schedule.schedule_of("my_kernel.1", BUNDLES, UTILIZATION)
  assert [(loop.depth, loop.first, loop.bundles, loop.empty) for loop in found.loops] == [
    (0, 0, 3, 1),
    (1, 2, 4, 0),
    (2, 5, 4, 1),
  ]
  assert found.bundles == 11


def test_the_busiest_unit_is_the_fullest_of_its_slots(schedule):
  outside, grid, inner = schedule.schedule_of("my_kernel.1", BUNDLES, UTILIZATION).loops
  assert grid.used == {"MXU": 0, "XLU": 0, "VALU": 0, "VLOAD": 0, "VSTORE": 0, "SALU": 5}
  assert grid.busiest == ("SALU", 5 / (2 * 4))
  # One operation each, but a bundle has only two slots for stores and for scalars.
  assert inner.busiest == ("VSTORE", 1 / (2 * 4))
  assert outside.busiest == ("SALU", 2 / (2 * 3))


def test_the_longest_body_is_the_hottest_and_takes_its_bundles_at_the_inferred_clock(schedule):
  found = schedule.schedule_of("my_kernel.1", BUNDLES, UTILIZATION)
  assert found.hottest.depth == 1
  assert found.hottest.seconds == 4 / 2.2e9
  assert found.table().splitlines()[2].startswith("  depth 1 at 0x2: 4 bundles (0 empty), 0.002 us, SALU 62% full")


def test_texts_that_do_not_belong_together_are_refused(schedule):
  with pytest.raises(ValueError, match="11 bundles, but a utilization of 10"):
    schedule.schedule_of("k", BUNDLES, UTILIZATION.replace("0 0 1 1 0 0\n", ""))
  with pytest.raises(ValueError, match="no line of units"):
    schedule.schedule_of("k", BUNDLES, "")


def test_a_dump_is_read_by_the_names_of_its_files(schedule, tmp_path):
  for number, name in enumerate(["my_kernel.1", "fusion.3.clone"]):
    (tmp_path / f"17-{name}-7{number}-final_bundles.txt").write_text(BUNDLES)
    (tmp_path / f"17-{name}-69-schedule-analysis_final_bundles.txt").write_text("Schedule analysis:")
    (tmp_path / f"17-{name}-68-final_hlo-static-per-bundle-utilization.txt").write_text(UTILIZATION)
  assert set(schedule.read_dump(tmp_path)) == {"my_kernel.1", "fusion.3.clone"}


def test_a_dump_without_schedules_is_an_error(schedule, tmp_path):
  from kimi_k3.errors import InputError

  with pytest.raises(InputError, match=r"no \*-final_bundles.txt"):
    schedule.read_dump(tmp_path)


@pytest.mark.parametrize(
  ("spec", "message"),
  [
    ("no_colon", "expected package.module:function"),
    ("kimi_k3.capacity.traffic:absent", "kimi_k3.capacity.traffic has no absent"),
    ("kimi_k3.nowhere:f", "No module named 'kimi_k3.nowhere'"),
    ("nowhere.py:f", "no file nowhere.py"),
  ],
)
def test_a_function_that_is_not_there_is_named(schedule, spec, message):
  from kimi_k3.errors import InputError

  with pytest.raises(InputError, match=message):
    schedule.function_of(spec)


def test_a_function_is_found_in_a_module_and_in_a_file(schedule, tmp_path: Path):
  (tmp_path / "bench_something.py").write_text("def compile_it(rows):\n  return rows + 1\n")
  assert schedule.function_of(f"{tmp_path / 'bench_something.py'}:compile_it")(1) == 2
  assert schedule.function_of("kimi_k3.capacity.traffic:expected_hits")(4, 4, 1) == 4
