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


@pytest.fixture(scope="session")
def trained_step(convert, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
  """Returns a function: a released checkpoint to RUN/checkpoints/7, as MaxText's trainer saves such a model.

  `trained_step(checkpoint, "--no-scan", weight_dtype="float32")`, once a session; RUN/train.yml is the config. Routed
  experts are decoded, Adam's moments are zeros, and nothing is compiled.
  """

  @functools.cache
  def run(checkpoint: Path, *options: str, weight_dtype: str = "float32") -> Path:
    out, run = convert(checkpoint, "--experts", "bf16", *options), tmp_path_factory.mktemp("run")
    text = (out / "decode.yml").read_text()
    lines = [s for s in text.splitlines() if not s.startswith(("load_parameters_path:", "weight_dtype:"))]
    (run / "train.yml").write_text("\n".join([*lines, f"weight_dtype: {weight_dtype}", ""]))
    return _saved_by_the_trainer(out, run)

  return run


def _saved_by_the_trainer(out: Path, run: Path, step: int = 7) -> Path:
  """Saves a conversion's weights through MaxText's own checkpoint manager, in the dtypes of RUN/train.yml."""
  import jax
  import optax
  from flax import nnx
  from flax.linen import logical_axis_rules

  from kimi_k3.convert import reader
  from kimi_k3.maxtext_adapter.engine import concrete_rest, make_mesh
  from kimi_k3.maxtext_adapter.quiet import quiet
  from kimi_k3.maxtext_adapter.settings import read_config

  config = read_config(
      str(run / "train.yml"), [], enable_checkpointing=True, async_checkpointing=False, checkpoint_period=1,
      base_output_directory=str(run.parent), run_name=run.name,
  )  # fmt: skip
  from maxtext.common import checkpointing, train_state_nnx
  from maxtext.utils import model_creation_utils, train_utils

  mesh, weights = make_mesh(config), reader.open_output(out)
  create, _ = model_creation_utils.create_nnx_abstract_model(config, mesh)

  def initial() -> nnx.State:
    model = create()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    return nnx.state(train_state_nnx.TrainStateNNX(model, optimizer))

  with quiet(), jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
    parameters, others = nnx.split_state(nnx.eval_shape(initial), nnx.All(nnx.Param, nnx.PathContains("model")), ...)
    held = {
      path: leaf.replace(jax.numpy.asarray(weights.read(".".join(map(str, path[1:]))), leaf.dtype))
      for path, leaf in nnx.to_flat_state(parameters)
    }
    state = nnx.merge_state(nnx.from_flat_state(held), concrete_rest(others))
    manager = train_utils.create_checkpoint_manager(config, mesh, initial)
    checkpointing.save_checkpoint(manager, step, state, config)
    checkpointing.wait_until_finished(manager)
  return run / "checkpoints" / str(step)
