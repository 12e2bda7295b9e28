"""Documents packed in a row are the documents alone, to the trainer's loss and to every gradient; pads are nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def leaves(small_k3) -> Any:
  return small_k3.leaves(scan=False)


@pytest.fixture(scope="module")
def separate(toys, small_k3_loss, leaves, documents) -> Any:
  """Each document in a row of its own."""
  return small_k3_loss(leaves, toys.pack([[doc] for doc in documents], small_k3_loss.shape))


@pytest.mark.parametrize(
  "layout",
  [
    [[0, 1, 2, 3, 4]],
    [[3, 4, 0, 1, 2]],
    [[4, 2, 1, 0, 3]],
    [[(62,), 4, 2, 0, 1], [3]],
    [[(63,), 4, 0, 2], [1, 3]],
    [[(64,), 1, 0], [(1,), 3, (1,), 2, (3,), 4]],
    [[0, (45,), 3], [(15,), 2, 1, 4]],
    [[], [(111,), 0], [], [(46,), 3], [], [(50,), 1, 2, (17,), 4]],
  ],
  ids=str,
)
def test_documents_in_one_row_are_the_documents_alone(toys, small_k3_loss, leaves, documents, separate, layout):
  """A layout lists the numbers of each row's documents, and (n,) for n pads. A chunk of KDA's ends at token 64."""
  assert sorted(part for row in layout for part in row if isinstance(part, int)) == [0, 1, 2, 3, 4]
  rows = [[part[0] if isinstance(part, tuple) else documents[part] for part in row] for row in layout]
  toys.assert_same(small_k3_loss(leaves, toys.pack(rows, small_k3_loss.shape)), separate)


@pytest.mark.parametrize("value", [1e30, np.inf, np.nan])
def test_what_stands_in_pads_changes_no_bit(toys, small_k3_loss, leaves, documents, value):
  batch = toys.pack([[documents[1], 3, documents[2], 60, documents[4]], [5, documents[3]]], small_k3_loss.shape)
  pads = batch["inputs_segmentation"] == 0
  expected = small_k3_loss(leaves, batch)

  rng = np.random.default_rng(0)
  unused = 47
  assert not np.any(batch["inputs"][~pads] == unused)
  embedding = leaves["token_embedder.embedding"].copy()
  embedding[unused] = value
  changed = {name: np.where(pads & (rng.random(pads.shape) < 0.5), unused, array) for name, array in batch.items()}
  changed |= {name: batch[name] for name in ("inputs_segmentation", "targets_segmentation")}
  found = small_k3_loss(leaves | {"token_embedder.embedding": embedding}, changed)
  assert found.xent_sum == expected.xent_sum
  for name, gradient in expected.gradients.items():
    np.testing.assert_array_equal(found.gradients[name], gradient, name)
