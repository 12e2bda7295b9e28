"""The search asks about the answer and its neighbour, and the advice for what does not fit fits."""

from __future__ import annotations

import math

import pytest

from kimi_k3.capacity import fit
from kimi_k3.errors import InputError

LIMIT = 1000


class Asked:
  """Programs whose bytes are a function of their size."""

  def __init__(self, total):
    self.total, self.sizes = total, []

  def __call__(self, size: int) -> dict:
    self.sizes.append(size)
    total = math.ceil(self.total(size))
    return {"total_bytes": total, "fits": total <= LIMIT}


@pytest.mark.parametrize("start", [0, 1, 8, 96, 104, 112, 400, 10**5])
@pytest.mark.parametrize(
  ("total", "answer"),
  [
    (lambda n: 200 + 7 * n, 112),  # 1000 at 114.3
    (lambda n: 200 + 7 * n + (300 if n > 64 else 0), 64),  # a step that no slope knows of
    (lambda n: 100 + n * n // 20, 128),
    (lambda n: 990 + n / 100, 1000),
    (lambda n: 1001 + n, 0),
  ],
)
def test_the_largest_that_fits_and_the_next_were_both_asked_about(total, answer, start):
  asked = Asked(total)
  found = fit.search(asked, start, step=8, most=10**6, budget_bytes=LIMIT, slope=7.0)
  assert found.size == answer
  assert found.next_size == answer + 8
  assert {answer, answer + 8} - {0} <= set(asked.sizes)
  assert found.programs == len(asked.sizes) == len(set(asked.sizes))


def test_a_good_start_takes_two_programs():
  asked = Asked(lambda n: 200 + 7 * n)
  assert fit.search(asked, 113, step=1, most=10**6, budget_bytes=LIMIT, slope=7.0).programs <= 3
  assert fit.search(Asked(lambda n: 200 + 7 * n), 114, step=1, most=10**6, budget_bytes=LIMIT, slope=7.0).programs == 2


def test_the_largest_of_all_needs_no_next():
  found = fit.search(Asked(lambda n: n), 60, step=8, most=50, budget_bytes=LIMIT, slope=1.0)
  assert (found.size, found.next_size, found.programs) == (48, None, 1)


def test_a_budget_below_the_limit_is_what_counts():
  assert fit.search(Asked(lambda n: n), 5, step=1, most=10**6, budget_bytes=600, slope=1.0).size == 600


def test_a_search_that_does_not_end_says_so():
  calls = iter(range(100))

  def never(_size):
    return {"total_bytes": 0 if next(calls) % 2 == 0 else 2000, "fits": True}

  with pytest.raises(InputError, match="--fit: 24 programs do not tell"):
    fit.search(never, 10**5, step=1, most=10**9, budget_bytes=LIMIT, slope=1e-6)
