"""One damaged tensor of a checkpoint, or one damaged leaf of a converted one, is refused by its name.

Exhaustive over the golden checkpoints, on headers and metadata in memory. What these cannot show, the content of arrays
of one shape, is listed here too: nothing can be held against it before the conversion; after it the checksums of
conversion.json can (maxtext_adapter/checkpoint_test.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from kimi_k3.convert import faults, index, mapping, plan, storage
from kimi_k3.convert.plan import Options
from kimi_k3.errors import InputError
from kimi_k3.maxtext_keys import from_maxtext
from kimi_k3.resources import configs_dir

VISION = storage.VISION_PREFIXES
STORED_DTYPES = ("BF16", "F16", "F32", "I8", "U8")
LEAF_DTYPES = ("bfloat16", "float16", "float32", "int8", "uint8")
NUM_EXPERTS = 16  # where only shapes matter: the release has a list of half a million pieces
MANY = 3  # of the tensors of a class every third is damaged at once: less than half, as some rules go by the majority

ALL_PACKED = "experts+shared+latent"

Shape = tuple[int, ...]


def other_shapes(shape: Shape) -> Iterator[tuple[str, Shape]]:
  """Every transposition that shows, and each axis halved."""
  turned = {tuple(shape[i] for i in order) for order in itertools.permutations(range(len(shape)))} - {shape}
  yield from ((f"transposed to {list(other)}", other) for other in sorted(turned))
  for axis, size in enumerate(shape):
    if size > 1:
      yield f"axis {axis} halved", (*shape[:axis], size // 2, *shape[axis + 1 :])


def other_names(name: str, names: Any) -> Iterator[tuple[str, str]]:
  """A typo, a layer that has no such tensor, no suffix, no prefix (or one too many)."""
  yield "typo", name[:-1]
  if match := re.search(r"(?<=\.layers\.)\d+(?=\.)", name):
    moved = (f"{name[: match.start()]}{layer}{name[match.end() :]}" for layer in range(14))
    yield "another layer", next(other for other in moved if other not in names)
  yield "no suffix", re.sub(r"(\.weight|_packed|_scale|\.[^.]+)$", "", name)
  prefix = storage.TEXT_PREFIX
  yield "other prefix", name.removeprefix(prefix) if name.startswith(prefix) else prefix + name


def damages(tensor: index.StoredTensor, names: Any) -> Iterator[tuple[str, dict[str, index.StoredTensor | None]]]:
  """What can happen to one tensor, as changes of the table of headers."""
  name = tensor.name
  yield "deleted", {name: None}
  for kind, other in other_names(name, names):
    yield f"renamed: {kind}", {name: None, other: dataclasses.replace(tensor, name=other)}
  for dtype in STORED_DTYPES:
    if dtype != tensor.dtype:
      yield f"dtype {dtype}", {name: dataclasses.replace(tensor, dtype=dtype)}
  for kind, shape in other_shapes(tensor.shape):
    yield kind.split(" to ")[0], {name: dataclasses.replace(tensor, shape=shape)}


def class_of(tensor: index.StoredTensor) -> str:
  """Tensors whose damages are found by the same rule, so that a message names them all."""
  if tensor.name.endswith(tuple(storage.FLOAT32_SUFFIXES.values())):
    return "float32 kinds"
  return tensor.name.rsplit("_", 1)[-1] if tensor.dtype == "U8" else "plain"


def words(message: str) -> set[str]:
  return set(re.findall(r"[\w.]+", message))


def refuse(source: index.Source, leaves: Any, what: str, *names: str) -> None:
  """Checks that a damaged source is refused with one line that names the tensors."""

  def check() -> None:
    storage.storage(source)
    mapping.compare(leaves, storage.text_tensors(source))

  with pytest.raises(InputError) as error:
    check()
  message = str(error.value)
  assert not set(names) - words(message), (what, message[:1000])
  assert "\n" not in message


FEW = ("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2")
# Five layers with every kind of layer, four experts.
SMALL = {"k3": FEW, "kimi-linear": (*FEW, "--variant", "kimi-linear"), "all packed": (*FEW, "--packed", ALL_PACKED)}


@pytest.fixture(params=["k3_tiny", "kimi_linear_tiny", "all packed"])
def source(request, tiny_checkpoint) -> index.Source:
  """A golden checkpoint, or one with all packed that may be."""
  name = request.param
  return index.open_source(tiny_checkpoint(*SMALL[name]) if name in SMALL else request.getfixturevalue(name).checkpoint)


@pytest.fixture(params=["k3", "kimi-linear"])
def small_source(request, tiny_checkpoint) -> index.Source:
  return index.open_source(tiny_checkpoint(*SMALL[request.param]))


def text_tensors(source: index.Source) -> list[index.StoredTensor]:
  return [tensor for name, tensor in source.tensors.items() if not name.startswith(VISION)]


def with_changes(source: index.Source, changes: dict[str, index.StoredTensor | None]) -> index.Source:
  table = {name: tensor for name, tensor in (dict(source.tensors) | changes).items() if tensor is not None}
  return dataclasses.replace(source, tensors=table)


def check_each_alone(source: index.Source) -> None:
  leaves, count = plan.make_plan(source, Options()).leaves, 0  # what one tensor is cannot change them
  for tensor in text_tensors(source):
    for what, changes in damages(tensor, source.tensors):
      refuse(with_changes(source, changes), leaves, what, tensor.name)
      count += 1
  assert count > 9 * len(text_tensors(source))


def test_each_tensor_damaged_alone_in_each_way_is_refused_by_name(small_source):
  check_each_alone(small_source)


@pytest.mark.slow
def test_each_tensor_of_a_whole_checkpoint_damaged_alone_in_each_way_is_refused_by_name(source):
  check_each_alone(source)


def test_every_tensor_damaged_in_each_way_is_named_among_others(source, monkeypatch):
  monkeypatch.setattr(faults, "MAX_LISTED", 10**6)
  leaves = plan.make_plan(source, Options()).leaves
  by_damage: dict[tuple[str, str], list[tuple[str, dict]]] = {}
  for tensor in text_tensors(source):
    for what, changes in damages(tensor, source.tensors):
      by_damage.setdefault((class_of(tensor), what), []).append((tensor.name, changes))
  count = 0
  for (_, what), damaged in by_damage.items():
    for first in range(MANY):
      some = damaged[first::MANY]
      changes = {other: tensor for _, change in some for other, tensor in change.items()}
      if some:
        refuse(with_changes(source, changes), leaves, what, *(name for name, _ in some))
        count += len(some)
  assert count > 9 * len(text_tensors(source))


def test_a_plan_makes_the_two_checks_that_the_tests_above_make(small_source):
  for name in [tensor.name for tensor in text_tensors(small_source)][::5]:
    with pytest.raises(InputError) as error:
      plan.make_plan(with_changes(small_source, {name: None}), Options())
    assert name in words(str(error.value))


def test_how_weights_are_stored_does_not_depend_on_shapes(source):
  flat = {name: dataclasses.replace(tensor, shape=()) for name, tensor in source.tensors.items()}
  assert storage.storage(with_changes(source, flat)) == storage.storage(source)


def test_vision_tensors_are_left_out_by_their_prefix_alone(k3_tiny):
  source = index.open_source(k3_tiny.checkpoint)
  made = plan.make_plan(source, Options())
  vision = [tensor for name, tensor in source.tensors.items() if name.startswith(VISION)]
  assert vision
  for tensor in vision:
    assert plan.make_plan(with_changes(source, {tensor.name: None}), Options()).leaves == made.leaves
    other = f"x{tensor.name}"
    with pytest.raises(InputError, match=f"{re.escape(other)}: unexpected, nothing uses it"):
      plan.make_plan(with_changes(source, {other: dataclasses.replace(tensor, name=other)}), Options())


# Each golden case in one form by default, in the other by `make test-slow`.
FORMS = [
  pytest.param((case, scan), id=f"{case}{scan}", marks=() if default else pytest.mark.slow)
  for case, scan, default in (
    ("k3_tiny", "--scan", True),
    ("kimi_linear_tiny", "--no-scan", True),
    ("k3_tiny", "--no-scan", False),
    ("kimi_linear_tiny", "--scan", False),
  )
]


@pytest.fixture(params=FORMS)
def model_and_stored(request, convert) -> tuple[dict, dict]:
  """The leaves that the model of a converted golden checkpoint asks for, and those that are stored."""
  from kimi_k3.maxtext_adapter.checkpoint import model_leaves, stored_leaves
  from kimi_k3.maxtext_adapter.engine import abstract_model
  from kimi_k3.maxtext_adapter.settings import read_config

  case, scan = request.param
  config = read_config(str(convert(request.getfixturevalue(case).checkpoint, scan) / "decode.yml"), [])
  return model_leaves(abstract_model(config, "train")[1]), stored_leaves(config.load_parameters_path)


def leaf_damages(name: str, leaf: jax.ShapeDtypeStruct) -> Iterator[tuple[str, dict[str, Any]]]:
  yield "deleted", {name: None}
  *parents, last = name.split(".")
  layer = ".".join(re.sub(r"_\d+$", "_99", part) for part in parents)
  for other in (f"{name}s", ".".join(parents), f"params.{name}", *([f"{layer}.{last}"] if layer not in name else [])):
    yield f"renamed to {other}", {name: None, other: leaf}
  for dtype in LEAF_DTYPES:
    if dtype != leaf.dtype.name:
      yield f"dtype {dtype}", {name: jax.ShapeDtypeStruct(leaf.shape, np.dtype(dtype))}
  yield from ((kind, {name: jax.ShapeDtypeStruct(shape, leaf.dtype)}) for kind, shape in other_shapes(leaf.shape))


def test_every_leaf_of_a_converted_checkpoint_damaged_in_each_way_is_refused_by_name(model_and_stored):
  from kimi_k3.maxtext_adapter.checkpoint import check_fit

  model, stored = model_and_stored
  check_fit(model, stored, "OUT/0/items")
  count = 0
  for name, leaf in stored.items():
    for what, change in leaf_damages(name, leaf):
      damaged = {k: v for k, v in (stored | change).items() if v is not None}
      with pytest.raises(InputError) as error:
        check_fit(model, damaged, "OUT/0/items")
      message = str(error.value)
      assert not set(change) - words(message), (what, message)
      assert "\n" not in message
      count += 1
  assert count > 9 * len(stored)


def architecture(name: str) -> Any:
  return from_maxtext(yaml.safe_load((configs_dir() / "models" / f"{name}.yml").read_text()))


def leaves_of(name: str, *, scan: bool) -> tuple[mapping.Leaf, ...]:
  config = dataclasses.replace(architecture(name), num_experts=NUM_EXPERTS, num_experts_per_token=1)
  a_log = (max(config.kda_head_dim, config.kda_num_heads),)
  form = mapping.StoredForm(prefix="", packed_modules=config.packed_modules, a_log_shape=a_log)
  return mapping.leaves(config, form, scan=scan)


def reads_the_same_transposed(shape: Shape) -> bool:
  sizes = [size for size in shape if size > 1]
  return len(set(sizes)) < len(sizes)


# Stored matrices and leaves that keep their shape when two of their axes are swapped, by the end of their names.
SQUARE_STORED = {
  "kimi-k3": set(),
  "kimi-linear-48b-a3b": set(),
  "kimi-k3-tiny": {
    "shared_experts.gate_proj.weight", "shared_experts.up_proj.weight", "shared_experts.down_proj.weight",
    "self_attn.g_proj.weight", "self_attn.o_proj.weight",
  },
}  # fmt: skip
SQUARE_LEAVES = {
  "kimi-k3": {"f_b_proj.kernel"},
  "kimi-linear-48b-a3b": {"f_b_proj.kernel", "g_b_proj.kernel"},
  "kimi-k3-tiny": {
    "attention.q_conv", "attention.k_conv", "attention.v_conv", "f_b_proj.kernel", "wkv_b.kernel", "experts.w1_packed",
    "experts.w2_packed", "experts.w3_packed", "gate_proj.kernel", "up_proj.kernel", "down_proj.kernel",
  },
}  # fmt: skip


def holds(ends: set[str], name: str) -> bool:
  return name.endswith(tuple(ends)) if ends else False


@pytest.mark.parametrize("name", SQUARE_STORED)
def test_these_stored_matrices_alone_can_be_transposed_unseen(name):
  leaves = leaves_of(name, scan=False)
  stored = {
    tensor: shape
    for leaf in leaves
    for piece in leaf.pieces
    for tensor, (_, shape) in zip(piece.names, leaf.stored, strict=True)
  }
  square = {tensor for tensor, shape in stored.items() if reads_the_same_transposed(shape)}
  assert {end for end in SQUARE_STORED[name] if any(tensor.endswith(end) for tensor in square)} == SQUARE_STORED[name]
  assert all(holds(SQUARE_STORED[name], tensor) for tensor in square)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("name", SQUARE_LEAVES)
def test_every_leaf_that_can_be_transposed_unseen_is_among_those_whose_content_is_compared(name, scan):
  from kimi_k3.maxtext_adapter.checkpoint import CHECKED_BYTES

  more_experts = architecture(name).num_experts // NUM_EXPERTS
  left, square = CHECKED_BYTES, set()

  def size(leaf: mapping.Leaf) -> int:
    return plan.leaf_bytes(leaf) * (more_experts if "experts" in leaf.path else 1)

  for leaf in sorted(leaves_of(name, scan=scan), key=size):
    left -= size(leaf)
    if reads_the_same_transposed(leaf.shape):
      assert left >= 0, leaf.path
      square.add(".".join(leaf.path))
  assert {end for end in SQUARE_LEAVES[name] if any(leaf.endswith(end) for leaf in square)} == SQUARE_LEAVES[name]
  assert all(holds(SQUARE_LEAVES[name], leaf) for leaf in square)
