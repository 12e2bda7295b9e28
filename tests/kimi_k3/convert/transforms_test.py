from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kimi_k3.convert import fp8_block, mxfp4, transforms
from kimi_k3.convert.transforms import Transform
from kimi_k3.errors import InputError


def apply(transform, shape, rows=None, **stored):
  """What some rows of the stored tensors become; all of them by default."""
  rows = rows or (0, len(next(iter(stored.values()))))
  return transforms.apply(transform, tuple(stored), lambda name, start, stop: stored[name][start:stop], shape, rows)


def random_weights(*shape) -> np.ndarray:
  return np.random.default_rng(0).standard_normal(shape).astype(ml_dtypes.bfloat16)


def random_packed(outputs, inputs) -> tuple[np.ndarray, np.ndarray]:
  rng = np.random.default_rng(0)
  codes = rng.integers(0, 256, (outputs, inputs // 2), np.uint8)
  return codes, rng.integers(100, 130, (outputs, inputs // 32), np.uint8)


@pytest.mark.parametrize(
  ("transform", "stored", "leaf"),
  [
    (Transform.RESHAPE, (1, 8), (8,)),
    (Transform.RESHAPE, (1, 1, 4, 1), (4,)),
    (Transform.TRANSPOSE, (6, 8), (8, 6)),
    (Transform.TRANSPOSE, (6, 8), (8, 2, 3)),
    (Transform.TRANSPOSE, (8, 6), (2, 3, 8)),
    (Transform.TRANSPOSE, (6, 1, 4), (4, 2, 3)),
  ],
)
def test_a_layout_change_is_undone_byte_for_byte(transform, stored, leaf):
  tensor = np.random.default_rng(0).standard_normal(stored).astype(np.float32)
  found = apply(transform, leaf, x=tensor)
  assert found.shape == leaf
  assert transforms.invert(transform, np.ascontiguousarray(found), stored).tobytes() == tensor.tobytes()


def test_heads_become_an_axis_of_their_own_behind_the_input():
  weight = np.arange(2 * 3 * 4).reshape(6, 4)  # [H * K, D]: rows of head 0, then of head 1
  kernel = apply(Transform.TRANSPOSE, (4, 2, 3), x=weight)
  assert kernel[:, 1, 0].tolist() == weight[3].tolist()
  assert kernel[:, 1, 2].tolist() == weight[5].tolist()


def test_taps_come_first_in_a_convolution():
  weight = np.arange(6 * 4).reshape(6, 1, 4)
  taps = apply(Transform.TRANSPOSE, (4, 2, 3), x=weight)
  assert taps[3, 1, 0] == weight[3, 0, 3]


def test_zero_padding_is_dropped_and_comes_back():
  stored = np.array([1.5, -0.0, np.nan, 0, 0], np.float32)
  found = apply(Transform.NARROW, (3,), x=stored)
  assert transforms.invert(Transform.NARROW, found, (5,)).tobytes() == stored.tobytes()


@pytest.mark.parametrize("value", [1e-45, -0.0, np.nan, -1.0])
def test_padding_that_is_not_all_zero_bits_is_refused_by_name(value):
  stored = np.zeros(8, np.float32)
  stored[5] = value
  with pytest.raises(InputError, match=r"A_log: 4 heads then zero padding expected, 1 of 4 non-zero past row 4"):
    apply(Transform.NARROW, (4,), A_log=stored)


def test_decoding_is_transposed_and_cannot_be_undone(reference):
  rng = np.random.default_rng(0)
  codes, scales = rng.integers(0, 256, (6, 32), np.uint8), rng.integers(100, 130, (6, 2), np.uint8)
  found = apply(Transform.DECODE, (64, 6), codes=codes, scales=scales)
  assert np.array_equal(found.astype(np.float64), reference.mxfp4_decode(codes, scales).T)
  with pytest.raises(ValueError, match="cannot be packed again"):
    transforms.invert(Transform.DECODE, found, codes.shape)


@pytest.mark.parametrize(("transform", "shape"), [(Transform.SCALES, (6, 2)), (Transform.DECODE, (64, 6))])
def test_a_nan_scale_is_refused_kept_packed_or_decoded(transform, shape):
  codes, scales = np.zeros((6, 32), np.uint8), np.full((6, 2), 120, np.uint8)
  scales[2, 1] = 255
  with pytest.raises(InputError, match="w1_scale: scale byte 255"):
    apply(transform, shape, w1_packed=codes, w1_scale=scales)


def test_scales_are_kept_without_reading_the_codes_when_none_is_suspect():
  scales = np.full((6, 2), 252, np.uint8)
  found = transforms.apply(
    Transform.SCALES, ("codes", "scales"), lambda name, *_: {"scales": scales}[name], (6, 2), (0, 6)
  )
  assert found.tobytes() == scales.tobytes()


def test_packing_gives_codes_and_scales_as_a_release_stores_them():
  weights = random_weights(6, 96)
  codes, scales = mxfp4.pack(weights, "w")
  assert np.array_equal(apply(Transform.PACK_CODES, (6, 48), w=weights), codes)
  assert np.array_equal(apply(Transform.PACK_SCALES, (6, 3), w=weights), scales)


@pytest.mark.parametrize("transform", [Transform.PACK_CODES, Transform.PACK_SCALES])
def test_packing_inputs_that_are_no_whole_groups_is_refused_by_name(transform):
  with pytest.raises(InputError, match=r"experts\.w1\.weight: 48 inputs, expected a multiple of 32"):
    apply(transform, (6, 24), **{"experts.w1.weight": random_weights(6, 48)})


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "bf16"])
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 128), (130, 288), (5, 32)])
def test_fp8_codes_and_scales_are_input_first_whether_the_source_is_packed_or_not(packed, outputs, inputs):
  weights, stored = random_weights(outputs, inputs), {"w": random_weights(outputs, inputs)}
  if packed:
    codes, scales = random_packed(outputs, inputs)
    weights, stored = mxfp4.decode(codes, scales), {"codes": codes, "scales": scales}
  codes, scales = fp8_block.encode(weights, "w")
  found = apply(Transform.FP8_CODES, (inputs, outputs), **stored)
  assert found.dtype == ml_dtypes.float8_e4m3fn
  assert found.tobytes() == codes.T.tobytes()
  shape = (fp8_block.num_blocks(inputs), fp8_block.num_blocks(outputs))
  found = apply(Transform.FP8_SCALES, shape, **stored)
  assert found.dtype == np.float32
  assert np.array_equal(found, scales.T)


@pytest.mark.parametrize(("transform", "first"), [(Transform.FP8_CODES, 128), (Transform.PACK_CODES, 3)])
def test_rows_of_a_rounded_matrix_are_those_of_the_whole(transform, first):
  weights, shape = random_weights(200, 64), {Transform.FP8_CODES: (64, 200), Transform.PACK_CODES: (200, 32)}[transform]
  rows_last = transform is Transform.FP8_CODES
  whole = apply(transform, shape, w=weights).view(np.uint8)
  for rows in ((0, first), (first, 200)):
    count = rows[1] - rows[0]
    part = apply(transform, (64, count) if rows_last else (count, 32), rows, w=weights).view(np.uint8)
    assert np.array_equal(part, whole[:, slice(*rows)] if rows_last else whole[slice(*rows)])


def test_the_scales_of_a_large_matrix_are_found_from_a_few_rows_at_a_time(monkeypatch):
  weights, asked = random_weights(700, 32), []

  def read(_, start, stop):
    asked.append((start, stop))
    return weights[start:stop]

  monkeypatch.setattr(transforms, "_SCALED_BYTES", 2 * 128 * 256)  # 256 rows of one block
  found = transforms.apply(Transform.FP8_SCALES, ("w",), read, (1, 6), (0, 700))
  assert asked == [(0, 256), (256, 512), (512, 700)]
  assert np.array_equal(found, fp8_block.block_scales(weights, "w").T)


@pytest.mark.parametrize("transform", [t for t in Transform if t.value.startswith(("pack", "fp8"))])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name_where_it_would_be_rounded(transform, value):
  weights = random_weights(6, 64)
  weights[5, 40] = value
  with pytest.raises(InputError, match=r"experts\.w1\.weight: 1 weight\(s\) are NaN"):
    apply(transform, (1, 1), **{"experts.w1.weight": weights})


@pytest.mark.parametrize("transform", transforms.LOSSY)
def test_what_was_rounded_or_decoded_cannot_be_undone(transform):
  with pytest.raises(ValueError, match=f"{transform} cannot be undone"):
    transforms.invert(transform, np.zeros((4, 4), np.uint8), (4, 4))


def test_every_transform_is_either_undone_or_lossy():
  for transform in set(Transform) - set(transforms.LOSSY):
    assert transforms.invert(transform, np.zeros(4, np.uint8), (4,)).shape == (4,)
