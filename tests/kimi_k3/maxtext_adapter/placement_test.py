"""A device's content is compared with the checkpoint element by element; multihost_test.py has several devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter import placement
from kimi_k3.maxtext_adapter.placement import check_placement

CHUNKED = (6, 5, 4)  # chunks of [1, 2, 4]: five is no multiple of two


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> tuple[str, dict[str, jax.Array]]:
  """A checkpoint of three leaves, one of them in chunks, and what it holds."""
  import tensorstore as ts

  rng = np.random.default_rng(0)
  leaves = {
    "a.codes": rng.integers(0, 256, CHUNKED).astype(np.uint8),
    "a.rate": np.array([1.5, np.nan, -0.0], np.float32),
    "table": np.asarray(jnp.asarray(rng.normal(size=(4, 3)), jnp.bfloat16)),
  }
  path = tmp_path_factory.mktemp("placement") / "items"
  for name, value in leaves.items():
    spec = {
      "driver": "zarr3",
      "kvstore": {"driver": "ocdbt", "base": f"file://{path}", "path": f"params.params.{name}/"},
    }
    chunk = [1, 2, 4] if value.ndim == 3 else list(value.shape)
    array = ts.open(
      spec, create=True, dtype=value.dtype, shape=value.shape, chunk_layout=ts.ChunkLayout(chunk_shape=chunk)
    ).result()
    array.write(value).result()
  return str(path), {name: jnp.asarray(value) for name, value in leaves.items()}


def changed(leaf: jax.Array, *index: int) -> jax.Array:
  return leaf.at[index].set(leaf[index] + 1)


@pytest.mark.parametrize("mode", ["all", "sample"])
def test_what_is_in_its_place_passes_nan_and_negative_zero_among_it(stored, mode):
  path, leaves = stored
  compared = check_placement(path, leaves, mode)
  assert (compared.leaves, compared.num_bytes) == (3, 120 + 12 + 24)


def test_one_element_is_enough_and_every_faulty_leaf_is_named(stored):
  path, leaves = stored
  faulty = leaves | {"a.codes": changed(leaves["a.codes"], 3, 4, 1), "a.rate": leaves["a.rate"].at[2].set(0.0)}
  with pytest.raises(InputError) as found:
    check_placement(path, faulty, "sample")
  assert str(found.value) == (
    f"{path} is not what the devices hold: "
    "a.codes on device 0 of process 0 at [0:6, 0:5, 0:4]: 1 of 120 elements differ; "
    "a.rate on device 0 of process 0 at [0:3]: 1 of 3 elements differ. Report this fault"
  )


def test_another_shape_or_dtype_is_a_difference(stored):
  path, leaves = stored
  with pytest.raises(InputError, match=r"a.rate .* float16\[3\] there, expected float32\[3\]"):
    check_placement(path, {"a.rate": leaves["a.rate"].astype(jnp.float16)}, "all")


def test_none_reads_nothing():
  assert check_placement("/nowhere", {"a": jnp.zeros(3)}, "none").leaves == 0


def test_large_shards_are_compared_chunk_by_chunk_all_of_them_or_one(stored, monkeypatch):
  path, leaves = stored
  monkeypatch.setattr(placement, "SMALL_BYTES", 24)
  assert check_placement(path, leaves, "all").num_bytes == 120 + 12 + 24
  assert check_placement(path, leaves, "sample").num_bytes == 8 + 12 + 24
  for index in np.ndindex(CHUNKED):
    with pytest.raises(InputError, match=r"a.codes on device 0 of process 0 at .*: 1 of [48] elements differ"):
      check_placement(path, {"a.codes": changed(leaves["a.codes"], *index)}, "all")


def test_devices_are_sampled_at_different_chunks(stored, monkeypatch):
  monkeypatch.setattr(placement, "SMALL_BYTES", 24)
  array = placement._Stored(stored[0], "a.codes")
  whole = tuple((0, size) for size in CHUNKED)
  (every,) = zip(*(array.boxes(whole, "sample", number) for number in range(18)), strict=True)
  assert len(set(every)) == 18  # as many as there are chunks
  assert set(every) == set(array.boxes(whole, "all", 0))


def test_a_part_that_starts_inside_a_chunk_is_cut_at_the_chunks(stored, monkeypatch):
  monkeypatch.setattr(placement, "SMALL_BYTES", 1)
  array = placement._Stored(stored[0], "a.codes")
  assert list(array.boxes(((2, 3), (1, 5), (0, 4)), "all", 0)) == [
    ((2, 3), (1, 2), (0, 4)),
    ((2, 3), (2, 4), (0, 4)),
    ((2, 3), (4, 5), (0, 4)),
  ]
