"""Fixtures of the tests of training: toy models, and the loss that MaxText's trainer differentiates."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
# Tokens of the documents of one packed row: shorter than the taps of a convolution, and longer than a chunk of KDA's.
LENGTHS = (1, 37, 3, 65, 2)
ROW, ROWS = 112, 8  # tokens: the documents and 4 pads; rows for 8 devices


@pytest.fixture(scope="session")
def toys() -> ModuleType:
  """The module of that name beside this file."""
  spec = importlib.util.spec_from_file_location("toys", HERE / "toys.py")
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # dataclasses look it up
  spec.loader.exec_module(module)
  return module


@pytest.fixture(scope="session")
def documents() -> list[list[int]]:
  """Ids, one more a document than it has targets; 0, the pad, and the last of the vocabulary are not among them."""
  import numpy as np

  rng = np.random.default_rng(5)
  return [rng.integers(1, 47, length + 1).tolist() for length in LENGTHS]


@pytest.fixture(scope="session")
def small_k3(toys) -> Any:
  """K3 with every feature in two layers: KDA with a dense MLP, then MLA with experts; a snapshot before each."""
  return toys.make_toy("k3", 2, attn_res_block_size=1)


@pytest.fixture(scope="session")
def small_k3_loss(toys, small_k3, tmp_path_factory) -> Any:
  """The trainer's loss of it on ROWS x ROW tokens, one compiled program."""
  directory = tmp_path_factory.mktemp("small_k3")
  return toys.TrainerLoss(small_k3.config(directory, scan=False, length=ROW, rows=ROWS))
