from __future__ import annotations

import pytest

from kimi_k3.cli import sizes
from kimi_k3.errors import InputError


@pytest.mark.parametrize(
  ("text", "nbytes"),
  [
    ("1", 1), ("1073741824", 2**30), ("1G", 2**30), ("1GiB", 2**30), ("1gib", 2**30), ("1GI", 2**30), ("1GB", 10**9),
    ("2 MiB", 2**21), (" 3K ", 3 * 1024), ("1.5GiB", 3 * 2**29), ("0.5k", 512), ("7B", 7), ("1TB", 10**12),
    ("999999999999999999", 10**18 - 1),
  ],
)  # fmt: skip
def test_a_size_is_read_as_people_write_it(text, nbytes):
  assert sizes.parse("--ram-budget", text) == nbytes


@pytest.mark.parametrize(
  "text",
  [
    "",
    "GiB",
    "-1",
    "0",
    "0.1",
    "1e9",
    "1,000",
    "1PiB",
    "1 Gi B",
    "0x10",
    "1.GiB",
    ".5G",
    "inf",
    "nan",
    "1" * 19,
    "2GiBs",
    "\u0661G",
  ],
)
def test_anything_else_is_refused_with_the_flag_and_an_example(text):
  with pytest.raises(InputError) as error:
    sizes.parse("--ram-budget", text)
  assert str(error.value) == f"--ram-budget is {text!r}, expected a size such as 2GiB, 500MB or a number of bytes"


@pytest.mark.parametrize(
  ("nbytes", "text"),
  [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (2**31, "2 GiB"), (1.5 * 2**20, "1.5 MiB"), (2**52, "4096 TiB")],
)
def test_a_size_is_spelled_with_four_digits_and_a_unit(nbytes, text):
  assert sizes.spelled(nbytes) == text


def test_what_is_spelled_is_read_again():
  for power in range(0, 44, 3):
    assert sizes.parse("--x", sizes.spelled(2**power)) == 2**power
