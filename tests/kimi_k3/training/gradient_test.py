"""Gradients of the loss that MaxText's trainer minimises, against numerical ones of the numpy reference in float64.

Central differences of the reference's mean cross-entropy, which runs each document alone, against reverse-mode
gradients of our model in float32 on the same documents packed in one row, with pads behind them. Every leaf of the tree
is compared: along one random direction over all of it, and in single entries.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

# Of the leaf's gradient: float32 rounds each product of the way there and back by 6e-8, and a gradient is a sum over a
# hundred tokens of terms that partly cancel. Seen in two layers: 2e-5. Without the gradient of the norm of queries and
# keys: 7e-2; without that of the combine weights' sum, which K3's norm on the routed sum all but hides: 3e-4.
TOLERANCE = 1e-4
# Of the leaf's root mean square. The error of a central difference falls with its square; that of rounding, in float64,
# is some 1e-7 of the gradient here.
STEP = 5e-6
CONVERGED = TOLERANCE / 10  # between that step and half of it: the error of the half is a third of this
MARGIN = 2e-5  # of the routers' choices, in units of the scores: float32 must not tip one
LOSS_TOLERANCE = 1e-6  # of the loss: float32, a mean over some hundred tokens
WITHOUT_LOSS = re.compile(r"decoder\.(layers|lead)_0\.attention_res\.(norm|proj)")  # layer 0 mixes no snapshots
BIAS = re.compile(r".*\.router\.bias")  # decides only who is chosen, and has a rule of its own: see moe/router.py


@dataclasses.dataclass
class Numerical:
  """Derivatives of the reference's loss.

  Attributes:
    toys: The module.
    toy: The model.
    documents: Which it reads, each alone.
    scan: The form of the tree whose leaves are changed.
  """

  toys: Any
  toy: Any
  documents: list[list[int]]
  scan: bool

  def __post_init__(self) -> None:
    self.leaves = {name: leaf.astype(np.float64) for name, leaf in self.toy.leaves(scan=self.scan).items()}
    self.base = self.toys.reference_loss(self.toy, self.documents, {})

  def derivative(self, name: str, change: np.ndarray) -> tuple[float, float]:
    """Along a change of one leaf: the derivative, and how far it is from the one with twice the step."""
    size = STEP * np.sqrt(np.mean(self.leaves[name] ** 2))
    coarse, fine = ((self._loss(name, h * change) - self._loss(name, -h * change)) / (2 * h) for h in (size, size / 2))
    return fine, abs(fine - coarse)

  def _loss(self, name: str, change: np.ndarray) -> float:
    changed = self.toy.stored({name: self.leaves[name] + change}, scan=self.scan)
    found = self.toys.reference_loss(self.toy, self.documents, changed)
    np.testing.assert_array_equal(found.ids, self.base.ids, f"{name}: a router's choice flips, the step is too large")
    return found.loss


def check(
  toys: Any, toy: Any, loss: Any, documents: list[list[int]], *, scan: bool, entries: int, tolerance: float = TOLERANCE
) -> None:
  """Compares the loss and the gradient of every leaf; `entries` single ones each."""
  exact = Numerical(toys, toy, documents, scan)
  assert exact.base.margin > MARGIN, "another seed"
  found = loss(toy.leaves(scan=scan), toys.pack([documents], loss.shape))
  assert found.weights == sum(len(doc) - 1 for doc in documents)
  assert abs(found.loss - exact.base.loss) <= LOSS_TOLERANCE * exact.base.loss
  assert found.gradients.keys() == {".".join(leaf.path) for leaf in toy.table(scan=scan)}
  check_loads(toy, exact.base.ids, found.gradients, scan=scan)

  faults = []
  for name, gradient in found.gradients.items():
    assert np.isfinite(gradient).all(), name
    if BIAS.fullmatch(name):
      continue
    zero = not np.any(gradient)
    if zero != bool(WITHOUT_LOSS.fullmatch(name)):
      faults.append(f"{name}: {'all zero' if zero else 'not zero'}")
    if zero:
      continue
    for what, change, scale in changes(name, gradient, entries):
      derivative, apart = exact.derivative(name, change)
      assert apart <= CONVERGED * scale, f"{name}, {what}: the differences do not converge, {apart / scale:.1e}"
      error = abs(np.sum(gradient * change, dtype=np.float64) - derivative) / scale
      if not error <= tolerance:
        faults.append(f"{name}, {what}: off by {error:.1e}")
  assert not faults, "\n".join(faults)


def check_loads(toy: Any, ids: np.ndarray, gradients: dict[str, np.ndarray], *, scan: bool) -> None:
  """The selection bias's gradient says how often each expert was chosen, and experts that nobody chose have none."""
  from kimi_k3.moe.router import BIAS_GRADIENT_SCALE

  count = toy.architecture.num_experts
  layers = [i for i, moe in enumerate(toy.architecture.moe_layers) if moe]
  loads = {i: np.bincount(chosen.ravel(), minlength=count) for i, chosen in zip(layers, ids, strict=True)}
  assert all(load[-1] == 0 for load in loads.values())  # its bias is below any score
  for leaf in toy.table(scan=scan):
    name = ".".join(leaf.path)
    for piece in leaf.pieces:
      if BIAS.fullmatch(name):
        load = loads[layer_of(piece)]
        expected = BIAS_GRADIENT_SCALE * (load - load.mean())
        np.testing.assert_allclose(gradients[name][piece.index], expected, rtol=1e-6, atol=0, err_msg=name)
      elif ".experts." in name:
        hit = loads[layer_of(piece)][piece.index[-1]] > 0
        assert np.any(gradients[name][piece.index]) == hit, f"{name} {piece.index}"


def layer_of(piece: Any) -> int:
  """0-based number of the layer whose tensor fills this part of a leaf."""
  return int(piece.names[0].split(".")[2])


def changes(name: str, gradient: np.ndarray, entries: int) -> Iterator[tuple[str, np.ndarray, float]]:
  """What is changed in a leaf: all of it, along a random direction; the entry of the largest gradient; random ones.

  With each, the size of the derivatives along such changes: the norm of the gradient, or its largest entry.
  """
  rng = np.random.default_rng(zlib.crc32(name.encode()))
  yield "direction", rng.standard_normal(gradient.shape), float(np.linalg.norm(gradient))
  largest, others = int(np.abs(gradient).argmax()), rng.integers(0, gradient.size, max(entries - 1, 0))
  for flat in [largest, *others][:entries]:
    place = np.unravel_index(flat, gradient.shape)
    change = np.zeros(gradient.shape)
    change[place] = 1
    yield f"entry {[int(i) for i in place]}", change, float(np.abs(gradient).max())


def test_every_leaf_of_k3_has_the_gradient_of_the_reference(toys, small_k3, small_k3_loss, documents):
  check(toys, small_k3, small_k3_loss, documents, scan=False, entries=0)


@pytest.mark.slow
def test_single_entries_of_k3_have_the_gradients_of_the_reference(toys, small_k3, small_k3_loss, documents):
  check(toys, small_k3, small_k3_loss, documents, scan=False, entries=4)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("variant", "changes"),
  [
    ("kimi-linear", {}),
    ("k3", {"num_experts_per_token": 1, "latent_moe_use_norm": False, "activation_situ_linear_beta": None}),
    ("k3", {"first_k_dense_replace": 0, "num_shared_experts": 1, "mla_use_output_gate": False}),
  ],
)
def test_every_leaf_of_other_models_has_the_gradient_of_the_reference(toys, documents, tmp_path, variant, changes):
  sizes = {"attn_res_block_size": 1} if variant == "k3" else {}
  toy = toys.make_toy(variant, 2, seed=1, **sizes, **changes)
  loss = toys.TrainerLoss(toy.config(tmp_path, scan=False, length=112, rows=2))
  check(toys, toy, loss, documents, scan=False, entries=3)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["k3", "kimi-linear"])
def test_every_leaf_of_folded_layers_has_the_gradient_of_the_reference(toys, documents, tmp_path, variant):
  """Thirteen layers: four, two blocks of four, and one. Leaves of the blocks are changed in both at once."""
  short = [documents[0], documents[2], documents[1][:12]]
  toy = toys.make_toy(variant, 13, **({"attn_res_block_size": 3} if variant == "k3" else {}))
  loss = toys.TrainerLoss(toy.config(tmp_path, scan=True, length=32, rows=1))
  check(toys, toy, loss, short, scan=True, entries=0, tolerance=toys.DEEP_TOLERANCE)
