"""Ways to compute the same step have the same loss and gradients: folded layers, rematerialisation, accumulation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def batch(toys, documents, small_k3_loss) -> Any:
  """Rows of unequal numbers of tokens, some packed, one empty."""
  parts = [
    [documents[3], documents[0]],
    [documents[1]],
    [2, documents[2], 5, documents[4]],
    [],
    *([d] for d in documents),
  ]
  return toys.pack(parts[: small_k3_loss.shape[0]], small_k3_loss.shape)


@pytest.fixture(scope="module")
def expected(small_k3, small_k3_loss, batch) -> Any:
  return small_k3_loss(small_k3.leaves(scan=False), batch)


def by_tensor(toy: Any, found: Any, *, scan: bool) -> Any:
  """The same with the gradients under the released names, in which folded and unrolled trees agree."""
  return dataclasses.replace(found, gradients=toy.stored(found.gradients, scan=scan))


@pytest.mark.parametrize("variant", ["k3", "kimi-linear"])
def test_folded_layers_are_the_unrolled_ones(toys, documents, tmp_path, variant):
  """Four leading layers, two blocks of four and a tail; K3 takes snapshots at other places of each block."""
  toy = toys.make_toy(variant, 13, **({"attn_res_block_size": 3} if variant == "k3" else {}))
  found = {}
  for scan in (True, False):
    loss = toys.TrainerLoss(toy.config(tmp_path, scan=scan, length=48, rows=2))
    batch = toys.pack([[documents[0], documents[1], documents[2]], [documents[2], documents[4]]], loss.shape)
    found[scan] = by_tensor(toy, loss(toy.leaves(scan=scan), batch), scan=scan)
  toys.assert_same(found[True], found[False], tolerance=toys.DEEP_TOLERANCE)


def test_without_rematerialisation_nothing_changes(toys, small_k3, batch, expected, tmp_path):
  rows, length = batch["inputs"].shape
  loss = toys.TrainerLoss(small_k3.config(tmp_path, "remat_policy=none", scan=False, length=length, rows=rows))
  toys.assert_same(loss(small_k3.leaves(scan=False), batch), expected)


@pytest.mark.parametrize("steps", [2, 8])
def test_accumulated_parts_of_a_batch_are_the_batch(toys, small_k3, batch, expected, tmp_path, steps):
  rows, length = batch["inputs"].shape
  settings = f"gradient_accumulation_steps={steps}"
  loss = toys.TrainerLoss(small_k3.config(tmp_path, settings, scan=False, length=length, rows=rows // steps))
  assert loss.shape == (rows, length)
  found = loss(small_k3.leaves(scan=False), batch)
  toys.assert_same(found, expected, biases_by_sign=True)
