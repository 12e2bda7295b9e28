"""Fixtures of the whole suite: golden cases, tiny checkpoints, the numpy reference.

Nothing here imports kimi_k3 or jax at the top: the type checker of `--jaxtyping-packages` must be installed before the
first import of kimi_k3, and many tests need no JAX at all.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parent
REPO = TESTS.parent
REFERENCE = TESTS / "reference"
GOLDEN = TESTS / "golden"

# Of numpy.testing, all that compare two values.
NUMPY_COMPARISONS = (
  "assert_allclose",
  "assert_almost_equal",
  "assert_approx_equal",
  "assert_array_almost_equal",
  "assert_array_almost_equal_nulp",
  "assert_array_equal",
  "assert_array_less",
  "assert_array_max_ulp",
  "assert_equal",
)

# Read by JAX when it is first imported, here and in every subprocess a test starts. A caller's own setting wins.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPO / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


@dataclasses.dataclass(frozen=True)
class GoldenCase:
  """One stored result of the reference and the checkpoint it was computed from.

  Attributes:
    name: Directory name under tests/golden.
    checkpoint: Directory in the released layout: config.json, safetensors, index. Read only.
    arrays: Contents of golden.npz; what they mean stands at the top of tests/reference/make_golden.py.
    info: Contents of golden.json: hashes, tolerances, smallest margins.
  """

  name: str
  checkpoint: Path
  arrays: dict[str, np.ndarray]
  info: dict[str, Any]

  @property
  def prompts(self) -> list[list[int]]:
    """Token ids of each prompt."""
    return [self.arrays[f"tokens_{i}"].tolist() for i in range(len(self.info["prompt_lengths"]))]

  @property
  def greedy(self) -> list[list[int]]:
    """Greedy continuation of each prompt, which ignores the end-of-turn token."""
    return [self.arrays[f"greedy_{i}"].tolist() for i in range(len(self.info["prompt_lengths"]))]


def pytest_configure() -> None:
  """Replaces numpy's comparisons before any test module can import them: they take NaN for equal to NaN."""
  for name in NUMPY_COMPARISONS:
    setattr(np.testing, name, _without_nan(getattr(np.testing, name)))


_running_test = SimpleNamespace(nan_expected=False)


@pytest.fixture(autouse=True)
def _nan_is_equal_to_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
  """Lets NaN pass for equal in tests marked `nan_expected`, and in no other."""
  _running_test.nan_expected = request.node.get_closest_marker("nan_expected") is not None
  yield
  _running_test.nan_expected = False


def _without_nan(compare: Callable[..., Any]) -> Callable[..., Any]:
  """Returns numpy's comparison, which then fails where both sides hold NaN or a tolerance lets everything pass."""
  signature = inspect.signature(compare)

  @functools.wraps(compare)
  def guarded(*args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    arguments = signature.bind(*args, **kwargs).arguments
    loose = {name: arguments[name] for name in ("rtol", "atol") if not np.isfinite(arguments.get(name, 0)).all()}
    if loose:
      raise AssertionError(f"finite tolerances expected, found {loose}: everything is within an infinite one")
    result = compare(*args, **kwargs)
    found, expected = list(arguments.values())[:2]
    if not _running_test.nan_expected and _holds_nan(found) and _holds_nan(expected):
      raise AssertionError("NaN on both sides, which this suite takes for different; mark the test nan_expected if not")
    return result

  return guarded


def _holds_nan(value: Any) -> bool:
  if isinstance(value, dict):
    return any(_holds_nan(item) for item in value.values())
  if isinstance(value, list | tuple):
    return any(_holds_nan(item) for item in value)
  array = np.asarray(value)
  return bool(np.any(array != array))


@pytest.fixture(autouse=True)
def _strict_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
  """Makes implicit rank promotion an error in tests marked `strict_ranks`."""
  if request.node.get_closest_marker("strict_ranks") is None:
    yield
    return
  import jax

  with jax.numpy_rank_promotion("raise"):
    yield


@pytest.fixture(scope="session")
def golden_dir() -> Path:
  """The directory of all golden cases."""
  return GOLDEN


@pytest.fixture(scope="session")
def reference() -> ModuleType:
  """The numpy reference, tests/reference/k3_reference.py."""
  import k3_reference

  return k3_reference


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
  """Returns a function: arguments of make_tiny_checkpoint.py, without OUT, to the checkpoint's directory.

  `tiny_checkpoint("--preset", "tiny", "--layers", "9")`. The same arguments give the same directory for the whole
  session, so a test that changes files works on a copy.
  """

  @functools.cache
  def build(*args: str) -> Path:
    out = tmp_path_factory.mktemp("tiny_checkpoint") / "checkpoint"
    command = [sys.executable, str(REFERENCE / "make_tiny_checkpoint.py"), str(out), *args]
    subprocess.run(command, check=True, timeout=120)
    return out

  return build


@pytest.fixture(scope="session")
def k3_tiny() -> GoldenCase:
  """K3 with 13 layers and MXFP4 experts, KDA heads of 32."""
  return _stored_case("k3-tiny")


@pytest.fixture(scope="session")
def k3_nano() -> GoldenCase:
  """K3 with 9 layers, trained, and a tokenizer: what `make demo` decodes (docs/training.md)."""
  return _stored_case("k3-nano")


@pytest.fixture(scope="session")
def kimi_linear_tiny() -> GoldenCase:
  """Kimi-Linear: nothing packed, softplus decay, no latent, no attention residuals."""
  return _stored_case("kimi-linear-tiny")


@pytest.fixture(scope="session")
def k3_hd128(tiny_checkpoint: Callable[..., Path]) -> GoldenCase:
  """K3 with KDA heads of 128; its checkpoint is built by the command in golden.json."""
  script, out, *args = shlex.split(_golden_info("k3-hd128")["checkpoint"]["command"])
  assert (script, out) == ("make_tiny_checkpoint.py", "OUT")
  return _checked_case("k3-hd128", tiny_checkpoint(*args))


def _stored_case(name: str) -> GoldenCase:
  return _checked_case(name, GOLDEN / name / "checkpoint")


def _golden_info(name: str) -> dict[str, Any]:
  return json.loads((GOLDEN / name / "golden.json").read_text())


def _checked_case(name: str, checkpoint: Path) -> GoldenCase:
  """Returns the case after comparing every file of its checkpoint with the stored hash."""
  info = _golden_info(name)
  found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(checkpoint.iterdir())}
  assert found == info["checkpoint"]["sha256"], f"{checkpoint} is not the checkpoint that {name} was computed from"
  with np.load(GOLDEN / name / "golden.npz") as stored:
    return GoldenCase(name, checkpoint, dict(stored), info)
