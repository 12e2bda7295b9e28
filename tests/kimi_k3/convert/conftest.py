"""Sources of the converter's tests: opened checkpoints, synthetic headers, copies that may be damaged."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from kimi_k3.convert import index

ALL_PACKED = "experts+shared+latent"


@pytest.fixture(scope="session")
def maker() -> ModuleType:
  """make_tiny_checkpoint.py, whose `tensor_shapes` lists the released names for a text config."""
  import make_tiny_checkpoint

  return make_tiny_checkpoint


@pytest.fixture(scope="session")
def k3_source(k3_tiny) -> index.Source:
  return index.open_source(k3_tiny.checkpoint)


@pytest.fixture(scope="session")
def kimi_linear_source(kimi_linear_tiny) -> index.Source:
  return index.open_source(kimi_linear_tiny.checkpoint)


@pytest.fixture(scope="session")
def all_packed_source(tiny_checkpoint) -> index.Source:
  """K3 with shared experts and latent projections packed too, as other public checkpoints of the family."""
  return index.open_source(tiny_checkpoint("--packed", ALL_PACKED, "--layers", "6"))


@pytest.fixture(scope="session")
def small_sources(tiny_checkpoint) -> dict[str, index.Source]:
  """Sources with few tensors: five layers with every kind of layer, four experts."""
  few = ("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2")
  made = {"k3": few, "kimi-linear": (*few, "--variant", "kimi-linear"), "all packed": (*few, "--packed", ALL_PACKED)}
  return {name: index.open_source(tiny_checkpoint(*args)) for name, args in made.items()}


@pytest.fixture
def k3_copy(k3_tiny, tmp_path) -> Path:
  """A checkpoint to damage."""
  return shutil.copytree(k3_tiny.checkpoint, tmp_path / "source")


@pytest.fixture(scope="session")
def edited() -> Callable[..., index.Source]:
  """Returns a function: a source with some tensors replaced (None: removed) or another config. No file is touched."""

  def edit(source: index.Source, tensors: Mapping[str, index.StoredTensor | None] | None = None, config=None):
    table = dict(source.tensors) | dict(tensors or {})
    table = {name: tensor for name, tensor in table.items() if tensor is not None}
    if config is None:
      return dataclasses.replace(source, tensors=table)
    return dataclasses.replace(source, tensors=table, config=config, config_bytes=json.dumps(config).encode())

  return edit


@pytest.fixture(scope="session")
def headers() -> Callable[[Iterable[tuple[str, str, tuple[int, ...]]]], dict[str, index.StoredTensor]]:
  """Returns a function: (name, dtype, shape) of tensors to a table as the headers of one shard would give it."""

  def table(described):
    held, offset = {}, 0
    for name, dtype, shape in described:
      nbytes = math.prod(shape) * index.DTYPES[dtype].itemsize
      held[name] = index.StoredTensor(name, dtype, shape, "model.safetensors", offset, nbytes)
      offset += nbytes
    return held

  return table
