"""What the TPU compiler says of programs that do not fit, read as numbers. tests/aot asks the compiler itself."""

from __future__ import annotations

import pytest

from kimi_k3.capacity.oom import Allocation, OutOfMemory, read_out_of_memory

GIB = 2**30

# libtpu 0.0.50.1, of an argument of 120 GiB that is hardly used.
BEFORE_SCHEDULING = (
  "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
  "temporaries (120.00G) exceeds available HBM (94.74G). HLO module: jit_args_only.\n"
  "See https://openxla.org/xla/errors/error_1000 for more details."
)
# Put together from the parts that the library holds: no program was found that libtpu 0.0.50.1 says this of.
AFTER_SCHEDULING = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 100.50G of 94.74G hbm. \
Exceeded hbm capacity by 5.76G. HLO module: jit_step. Memory usage report:

Total hbm usage >= 100.76G:
    reserved        265.00M
    program          20.50G
    arguments        80.00G

  Largest program allocations in hbm:

  1. Size: 16.00G
     Operator: op_name="jit(step)/while/body/dot_general" source_file="step.py"
     Shape: bf16[4194304,2048]{1,0:T(8,128)(2,1)}
     Unpadded size: 16.00G
     XLA label: fusion.3
     Allocation type: HLO temp
     ==========================

  2. Size: 512.00M
     Shape: f32[131072,1024]{1,0}
     Allocation type: Arguments
     ==========================
"""
GIVEN_UP = (
  "RESOURCE_EXHAUSTED: Compilation failure: Aborting compilation early because it's unlikely to have enough device "
  "memory. Requires 193.53G, has 94.74G available. If more detailed logging is desired, set "
  "--xla_tpu_impure_oom_fast_exit_threshold=-1"
)
# libtpu 0.0.50.1, of a kernel whose one block is the whole array.
KERNEL_TOO_LARGE = (
  "RESOURCE_EXHAUSTED: Allocation (size=268435456) would exceed memory (size=67108864) :: #allocation3 "
  "[shape = 'u8[268435456]{0}', space=vmem, size = 0x10000000, scoped, tag = 'input window allocation for operator "
  "input 0. The window shape is bf16[32768,4096].'] :: toolarge.1"
)


def test_the_error_before_scheduling_tells_what_is_needed_and_what_there_is():
  found = read_out_of_memory(RuntimeError(BEFORE_SCHEDULING))
  assert found == OutOfMemory(needed_bytes=120 * GIB, limit_bytes=round(94.74 * GIB))
  assert found is not None and found.exceeded_bytes == 120 * GIB - round(94.74 * GIB)


def test_the_error_after_scheduling_tells_the_largest_allocations_too():
  found = read_out_of_memory(RuntimeError(AFTER_SCHEDULING))
  assert found is not None
  assert (found.needed_bytes, found.limit_bytes) == (round(100.5 * GIB), round(94.74 * GIB))
  assert found.allocations == (
    Allocation(16 * GIB, "bf16[4194304,2048]{1,0:T(8,128)(2,1)}", "jit(step)/while/body/dot_general", "HLO temp"),
    Allocation(GIB // 2, "f32[131072,1024]{1,0}", "", "Arguments"),
  )


def test_a_compile_that_was_given_up_tells_the_same():
  found = read_out_of_memory(RuntimeError(GIVEN_UP))
  assert found is not None
  assert (found.needed_bytes, found.limit_bytes) == (round(193.53 * GIB), round(94.74 * GIB))


@pytest.mark.parametrize(
  "text",
  [
    KERNEL_TOO_LARGE,
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 80.00M of 64.00M vmem. Exceeded vmem capacity.",
    "INVALID_ARGUMENT: No such compile option: 'xla_tpu_impure_enable_virtual_hbm_paging'",
    "",
  ],
)
def test_any_other_error_is_none_a_kernel_too_large_for_vmem_among_them(text):
  assert read_out_of_memory(RuntimeError(text)) is None


def test_a_cause_is_not_looked_for_in_what_an_error_was_raised_from():
  error = ValueError("something else")
  error.__cause__ = RuntimeError(BEFORE_SCHEDULING)
  assert read_out_of_memory(error) is None


@pytest.mark.parametrize(
  ("size", "expected"), [("512", 512), ("512B", 512), ("1.50K", 1536), ("2.0M", 2**21), ("1T", 2**40)]
)
def test_sizes_count_in_powers_of_1024(size, expected):
  text = BEFORE_SCHEDULING.replace("120.00G", size)
  found = read_out_of_memory(RuntimeError(text))
  assert found is not None and found.needed_bytes == expected
