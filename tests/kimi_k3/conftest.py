"""Fixtures of the whole-model tests: converted checkpoints, and configs that compute in float32."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # imported late at run time, after the type checker of --jaxtyping-packages is in place
  from kimi_k3.config import ComputeConfig, KimiK3Config

FLOAT32 = ("dtype=float32", "matmul_precision=highest")


@pytest.fixture(scope="session")
def convert(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
  """Returns a function: a released checkpoint to the directory it is converted to, once a session."""
  from kimi_k3.cli.main import main

  @functools.cache
  def run(checkpoint: Path, *options: str) -> Path:
    out = tmp_path_factory.mktemp("converted") / "out"
    assert main(["convert", str(checkpoint), str(out), *options]) == 0
    return out

  return run


@pytest.fixture(scope="session")
def float32_config() -> Callable[..., Any]:
  """Returns a function: a converted directory and settings to MaxText's config with float32 arithmetic."""
  from kimi_k3.maxtext_adapter.settings import read_config

  def read(out: Path, *settings: str, **derived: Any) -> Any:
    return read_config(str(out / "decode.yml"), [*FLOAT32, *settings], **derived)

  return read


@pytest.fixture(scope="session")
def k3_config(k3_tiny) -> KimiK3Config:
  """The architecture of the golden K3."""
  from kimi_k3.config import FLOAT32_KINDS

  return _architecture(k3_tiny, packed_modules=("experts",), float32_leaves=FLOAT32_KINDS)


@pytest.fixture(scope="session")
def kimi_linear_config(kimi_linear_tiny) -> KimiK3Config:
  """The architecture of the golden Kimi-Linear."""
  from kimi_k3.config import ALWAYS_FLOAT32

  return _architecture(kimi_linear_tiny, packed_modules=(), float32_leaves=ALWAYS_FLOAT32)


def _architecture(case, **storage) -> KimiK3Config:
  from kimi_k3.config import KimiK3Config

  return KimiK3Config.from_hf(json.loads((case.checkpoint / "config.json").read_text()), **storage)


@pytest.fixture(scope="session")
def float32_compute() -> ComputeConfig:
  """Float32 arithmetic on float32 weights."""
  from kimi_k3.config import ComputeConfig

  return ComputeConfig(
    dtype="float32",
    weight_dtype="float32",
    precision="highest",
    kda_implementation="portable",
    expert_implementation="reference",
  )


@pytest.fixture
def unsharded() -> Iterator[None]:
  """Lets layers be made without a mesh: their sharding annotations stay names."""
  from flax import nnx

  with nnx.use_eager_sharding(False):
    yield
