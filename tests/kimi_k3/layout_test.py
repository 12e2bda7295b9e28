from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from kimi_k3.config import KimiK3Config
from kimi_k3.errors import InputError
from kimi_k3.layout import Fold, Place, fold, place

ConfigOf = Callable[..., KimiK3Config]


@pytest.fixture(scope="module")
def config_of(k3_config) -> ConfigOf:
  """Returns a function: the number of layers and the 1-based MLA layers (default: as released) to a config."""

  def make(layers: int, full: tuple[int, ...] | None = None, dense: int = 1) -> KimiK3Config:
    if full is None:
      full = tuple(i for i in range(1, layers + 1) if i % 4 == 0 or i == layers)
    kda = tuple(i for i in range(1, layers + 1) if i not in full)
    return dataclasses.replace(
      k3_config, num_layers=layers, kda_layers=kda, full_attention_layers=full, first_k_dense_replace=dense
    )

  return make


# The last layer is MLA whatever its number, as released: with a tail of 1 to 3 it breaks the pattern.
@pytest.mark.parametrize(
  ("layers", "lead", "blocks", "tail"),
  [
    (1, 1, 0, 0),
    (3, 3, 0, 0),
    (4, 4, 0, 0),
    (5, 4, 0, 1),
    (7, 4, 0, 3),
    (8, 4, 1, 0),
    (9, 4, 1, 1),
    (12, 4, 2, 0),
    (13, 4, 2, 1),
    (17, 4, 3, 1),
    (27, 4, 5, 3),
    (93, 4, 22, 1),
  ],
)
def test_layers_fold_into_lead_blocks_and_tail(config_of, layers, lead, blocks, tail):
  assert fold(config_of(layers)) == Fold(lead, blocks, tail)


def test_nine_layers_have_these_places(config_of):
  config = config_of(9)
  assert [place(config, i, scan=True) for i in range(9)] == [
    Place("lead_0"),
    Place("lead_1"),
    Place("lead_2"),
    Place("lead_3"),
    Place("blocks.layers_0", 0),
    Place("blocks.layers_1", 0),
    Place("blocks.layers_2", 0),
    Place("blocks.layers_3", 0),
    Place("tail_0"),
  ]
  assert [place(config, i, scan=False) for i in (0, 4, 8)] == [Place("layers_0"), Place("layers_4"), Place("layers_8")]


@pytest.mark.parametrize(
  ("layer", "expected"),
  [
    (3, Place("lead_3")),
    (4, Place("blocks.layers_0", 0)),
    (50, Place("blocks.layers_2", 11)),
    (91, Place("blocks.layers_3", 21)),
    (92, Place("tail_0")),
  ],
)
def test_where_the_layers_of_the_released_model_live(config_of, layer, expected):
  assert place(config_of(93), layer, scan=True) == expected


@pytest.mark.parametrize("layers", [1, 4, 7, 8, 9, 12, 13, 17, 27, 93])
@pytest.mark.parametrize("scan", [True, False])
def test_no_two_layers_share_a_place(config_of, layers, scan):
  config = config_of(layers)
  assert len({place(config, i, scan=scan) for i in range(layers)}) == layers


@pytest.mark.parametrize("layers", [8, 9, 17, 27, 93])
def test_layers_of_one_path_are_of_one_kind(config_of, layers):
  config, kinds = config_of(layers), {}
  for i, kind in enumerate(zip(config.layer_kinds, config.moe_layers, strict=True)):
    assert kinds.setdefault(place(config, i, scan=True).path, kind) == kind


def test_blocks_may_differ_from_the_leading_layers(config_of):
  # MLA first in a block; the leading layers hold none.
  assert fold(config_of(16, full=(5, 9, 13))) == Fold(4, 3, 0)


def test_a_pattern_that_breaks_off_leaves_up_to_four_layers_for_the_tail(config_of):
  assert fold(config_of(16, full=(4, 8, 12))) == Fold(4, 2, 4)
  assert fold(config_of(12, dense=6)) == Fold(4, 1, 4)  # layers 4 and 5 dense, 8 and 9 not


@pytest.mark.parametrize(
  ("arguments", "first", "last"),
  [
    ({"layers": 17, "full": (4, 8, 12)}, 12, 16),
    ({"layers": 13, "dense": 6}, 8, 12),
    ({"layers": 20, "full": (8, 11, 16, 20)}, 8, 19),
  ],
)
def test_more_than_four_left_over_do_not_fold_and_are_named(config_of, arguments, first, last):
  message = rf"scan_layers: true .*layers {first} to {last} \(0-based\) do not repeat .*set scan_layers: false"
  with pytest.raises(InputError, match=message):
    fold(config_of(**arguments))
  assert place(config_of(**arguments), last, scan=False) == Place(f"layers_{last}")
