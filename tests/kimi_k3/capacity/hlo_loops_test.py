"""How often loops run, against counting."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

COMPARISONS = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "NE": operator.ne}
MOST = 200


def loop(start: int, step: int, bound: int, direction: str, *, fused: bool, passed: bool, mirrored: bool) -> str:
  """A loop over (counter, bound), its comparison and step in fusions or not, its bound a constant or handed in."""
  limit = "  %limit = s32[] get-tuple-element(%c), index=1" if passed else f"  %limit = s32[] constant({bound})"
  sides = "%limit, %i" if mirrored else "%i, %limit"
  compare = f"  ROOT %more = pred[] compare({sides}), direction={direction}"
  condition = f"  %i = s32[] get-tuple-element(%c), index=0\n{limit}\n{compare}"
  move = f"  %step = s32[] constant({step})\n  %next = s32[] add(%j, %step)"
  extra = ""
  if fused:
    extra = (
      f"%less (i: s32[], limit: s32[]) -> pred[] {{\n  %i = s32[] parameter(0)\n  %limit = s32[] parameter(1)\n"
      f"{compare}\n}}\n"
      f"%plus (i: s32[]) -> s32[] {{\n  %i = s32[] parameter(0)\n  %step = s32[] constant({step})\n"
      "  ROOT %sum = s32[] add(%step, %i)\n}\n"
    )
    condition = condition.replace(compare, "  ROOT %more = pred[] fusion(%i, %limit), kind=kLoop, calls=%less")
    move = "  %next = s32[] fusion(%j), kind=kLoop, calls=%plus"
  return f"""{extra}%condition (c: (s32[], s32[])) -> pred[] {{
  %c = (s32[], s32[]) parameter(0)
{condition}
}}
%body (b: (s32[], s32[])) -> (s32[], s32[]) {{
  %b = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %kept = s32[] get-tuple-element(%b), index=1
{move}
  ROOT %t = (s32[], s32[]) tuple(%next, %kept)
}}
ENTRY %main (n: s32[]) -> s32[] {{
  %n = s32[] parameter(0)
  %start = s32[] constant({start})
  %copied = s32[] copy(%start)
  %bound = s32[] constant({bound})
  %init = (s32[], s32[]) tuple(%copied, %bound)
  %loop.1 = (s32[], s32[]) while(%init), condition=%condition, body=%body, metadata={{op_name="jit(f)/while"}}
  ROOT %r = s32[] get-tuple-element(%loop.1), index=0
}}
"""


def counted(start: int, step: int, bound: int, direction: str) -> int | None:
  """By running it; None if it has not ended after MOST steps."""
  value = start
  for count in range(MOST):
    if not COMPARISONS[direction](value, bound):
      return count
    value += step
  return None


@settings(deadline=None, max_examples=60)  # the first example imports kimi_k3
@given(
  start=st.integers(-9, 9),
  step=st.integers(-4, 4),
  bound=st.integers(-30, 30),
  direction=st.sampled_from(sorted(COMPARISONS)),
  fused=st.booleans(),
  passed=st.booleans(),
  mirrored=st.booleans(),
)
def test_the_count_of_a_counter_is_what_running_it_gives(start, step, bound, direction, fused, passed, mirrored):
  from kimi_k3.capacity import hlo
  from kimi_k3.errors import InputError

  written = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}[direction] if mirrored else direction
  program = hlo.parse(loop(start, step, bound, written, fused=fused, passed=passed, mirrored=mirrored))
  expected = counted(start, step, bound, direction)
  if expected is None or step == 0:  # it never ends, or its counter does not move: nothing to read
    with pytest.raises(InputError, match=r"loop\.1 \(jit\(f\)/while\)"):
      hlo.loop_counts(program)
  else:
    assert hlo.loop_counts(program) == {"loop.1 (jit(f)/while)": expected}


def test_what_the_compiler_states_wins():
  from kimi_k3.capacity import hlo

  text = loop(0, 1, 5, "LT", fused=False, passed=False, mirrored=False)
  stated = text.replace('op_name="jit(f)/while"}', 'op_name="w"}, backend_config={"known_trip_count":{"n":"9"}}')
  assert hlo.loop_counts(hlo.parse(stated)) == {"loop.1 (w)": 9}


def test_loops_in_loops_multiply_and_constants_reach_the_inner_one(compiled):
  from kimi_k3.capacity import hlo

  outer = "jit(program)/shard_map/while"
  counts = hlo.loop_counts(compiled("nested"), {outer: 3})
  assert sorted(counts.values()) == [3, 7]
  (inner,) = [c for c in hlo.collectives(compiled("nested"), {outer: 3}) if "while/body/while" in c.op_name]
  assert inner.calls == 21


def test_a_loop_that_depends_on_data_is_an_error_that_names_it(compiled):
  from kimi_k3.capacity import hlo
  from kimi_k3.errors import InputError

  for ask in (hlo.loop_counts, hlo.collectives, hlo.kernels, hlo.hbm_bytes, hlo.copies):
    with pytest.raises(InputError, match=r"loop\(s\) while\.\d+ \(jit\(program\)/shard_map/while\).* count in `loops`"):
      ask(compiled("nested"))


@pytest.mark.parametrize(
  ("loops", "message"),
  [
    ({"*shard_map/while": 2, "jit(other)": 3}, r"jit\(other\) matches no loop"),
    ({"*/while": 2, "while.*": 3}, r"\[2, 3\] runs given by several patterns"),
  ],
)
def test_patterns_that_match_nothing_or_contradict_each_other_are_errors(compiled, loops, message):
  from kimi_k3.capacity import hlo
  from kimi_k3.errors import InputError

  with pytest.raises(InputError, match=message):
    hlo.loop_counts(compiled("nested"), loops)


def test_loops_of_another_backend_are_counted_too():
  import jax
  import jax.numpy as jnp
  from jax import lax

  from kimi_k3.capacity import hlo

  def program(x):
    def layer(x, index):
      return lax.fori_loop(2, 9, lambda j, y: jnp.sin(y) * j, x) + index, None

    return lax.scan(layer, x, jnp.arange(5.0))[0]

  text = str(jax.jit(program).lower(jnp.ones(8)).compile().as_text())
  assert sorted(hlo.loop_counts(hlo.parse(text)).values()) == [5, 7]
