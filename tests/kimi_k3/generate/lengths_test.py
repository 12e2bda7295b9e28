from __future__ import annotations

import pytest

from kimi_k3.errors import InputError
from kimi_k3.generate.lengths import bucket, cache_lengths


def rows(*lengths: int) -> list[list[int]]:
  return [[1] * n for n in lengths]


def lengths(prefill: int, target: int) -> dict[str, int]:
  return {"max_prefill_predict_length": prefill, "max_target_length": target}


@pytest.mark.parametrize(
  ("length", "expected"), [(1, 256), (255, 256), (256, 256), (257, 512), (512, 512), (513, 1024), (1048576, 1048576)]
)
def test_a_bucket_is_a_power_of_two_from_256_on(length, expected):
  assert bucket(length) == expected


@pytest.mark.parametrize(
  ("length", "limit", "expected"), [(5, 16, 16), (16, 16, 16), (300, 400, 400), (300, 4096, 512)]
)
def test_a_bucket_is_no_longer_than_the_prompt_cache(length, limit, expected):
  assert bucket(length, limit) == expected


@pytest.mark.parametrize(
  ("given", "expected"),
  [
    ({}, lengths(256, 264)),
    ({"max_prefill_predict_length": 30}, lengths(30, 38)),
    ({"max_prefill_predict_length": 100}, lengths(100, 108)),
    ({"max_target_length": 38}, lengths(30, 38)),
    ({"max_target_length": 1000}, lengths(30, 1000)),
    (lengths(30, 38), lengths(30, 38)),
    (lengths(64, 128), lengths(64, 128)),
    ({"max_target_length": None, "max_prefill_predict_length": None}, lengths(256, 264)),
  ],
)
def test_what_is_not_set_is_sized_from_the_longest_row_and_the_new_tokens(given, expected):
  assert cache_lengths(rows(3, 30, 7), 8, given) == expected


@pytest.mark.parametrize(("rows_a_device", "expected"), [(0.5, 264), (0.125, 264), (0.0625, 272), (1.0, 263), (3, 263)])
def test_a_row_over_many_devices_gets_a_length_that_they_divide(rows_a_device, expected):
  given = {"per_device_batch_size": rows_a_device}
  assert cache_lengths(rows(3), 7, given)["max_target_length"] == expected


def test_a_long_prompt_gets_a_bucket_of_its_own_size():
  assert cache_lengths(rows(3, 257), 8, {}) == lengths(512, 520)


@pytest.mark.parametrize(
  ("given", "said"),
  [
    ({"max_prefill_predict_length": 29}, "row 1 has 30 tokens, longer than the prompt cache: .* is 29; raise it"),
    ({"max_target_length": 37}, r"row 1 needs 30 \+ 8 tokens, longer than the cache: max_target_length is 37"),
    (lengths(30, 37), r"row 1 needs 30 \+ 8 tokens"),
    (lengths(33, 40), r"8 new tokens do not fit: max_target_length 40 - max_prefill_predict_length 33 leaves 7"),
    (lengths(100, 50), r"8 new tokens do not fit: .* leaves -50"),
  ],
)
def test_a_row_that_does_not_fit_is_named(given, said):
  with pytest.raises(InputError, match=said):
    cache_lengths(rows(3, 30, 7, 30), 8, given)


@pytest.mark.parametrize("count", [2**31, 10**30])
def test_a_cache_longer_than_an_index_counts_is_refused(count):
  with pytest.raises(InputError, match=r"a cache of \d+ tokens cannot be made"):
    cache_lengths(rows(3), count, {})


@pytest.mark.parametrize("key", ["max_prefill_predict_length", "max_target_length"])
@pytest.mark.parametrize("wrong", [0, -1, True, "64", 64.0, [64]])
def test_a_length_is_a_positive_whole_number(key, wrong):
  with pytest.raises(InputError, match=f"{key} is {wrong!r}, expected a positive whole number".replace("[", r"\[")):
    cache_lengths(rows(3), 8, {key: wrong})
