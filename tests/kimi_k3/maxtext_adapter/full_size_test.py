"""The released models at full size, by shapes alone: parameters, what is active, caches, and how leaves are cut."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from kimi_k3.resources import configs_dir

CONTEXT, SLOTS = 4096, 2  # a cache of this size; states do not depend on it


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One abstract parameter or cache variable, its name split at the dots."""

  path: tuple[str, ...]
  shape: tuple[int, ...]
  dtype: np.dtype
  axes: tuple[str | None, ...]

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def weights(self) -> int:
    """Weights it holds: two in a byte of codes, none in a scale."""
    if self.path[-1].endswith("packed"):
      return 2 * self.size
    return 0 if self.dtype == np.uint8 else self.size

  @property
  def nbytes(self) -> int:
    return self.size * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Model:
  """A model whose arrays are shapes."""

  architecture: Any
  params: list[Leaf]
  cache: list[Leaf]
  rules: dict[str, set[str]]

  def weights(self, *names: str) -> int:
    """Weights of the leaves whose path holds all of the names."""
    return sum(leaf.weights for leaf in self.params if set(names) <= set(leaf.path))


@pytest.fixture(scope="module")
def build():
  """Returns a function: a model's name and scan_layers to its Model."""
  from flax import nnx

  from kimi_k3.maxtext_adapter.config import architecture
  from kimi_k3.maxtext_adapter.engine import abstract_model
  from kimi_k3.maxtext_adapter.settings import read_config

  def leaves(state) -> list[Leaf]:
    return [
      Leaf(tuple(map(str, path)), v.shape, np.dtype(v.dtype), tuple(v.get_metadata().get("out_sharding") or ()))
      for path, v in nnx.to_flat_state(state)
    ]

  made: dict[tuple[str, bool], Model] = {}

  def make(name: str, *, scan: bool) -> Model:
    if (name, scan) not in made:
      lengths = {"max_prefill_predict_length": CONTEXT // 2, "max_target_length": CONTEXT}
      settings = [f"model_name={name}", f"scan_layers={str(scan).lower()}"]
      config = read_config(str(configs_dir() / "decode.yml"), settings, per_device_batch_size=SLOTS, **lengths)
      _, model = abstract_model(config, "autoregressive")
      rules = collections.defaultdict(set)
      for axis, mesh_axes in config.logical_axis_rules:
        rules[axis] |= {mesh_axes} if isinstance(mesh_axes, str) else set(mesh_axes or ())
      params, cache = (leaves(nnx.state(model, kind)) for kind in (nnx.Param, nnx.Cache))
      made[name, scan] = Model(architecture(config), params, cache, rules)
    return made[name, scan]

  return make


@pytest.fixture(scope="module")
def k3(build) -> Model:
  return build("kimi-k3", scan=True)


@pytest.fixture(scope="module")
def kimi_linear(build) -> Model:
  return build("kimi-linear-48b-a3b", scan=True)


def active(model: Model) -> int:
  """Weights that one token meets: all but the experts it does not choose, and the embedding table."""
  a = model.architecture
  routed = model.weights("experts")
  return model.weights() - model.weights("token_embedder") - routed + routed // a.num_experts * a.num_experts_per_token


def test_kimi_k3_has_2_78_trillion_parameters_of_which_104_billion_are_active(k3):
  assert k3.weights() == pytest.approx(2.7795e12, rel=1e-4)
  assert active(k3) == pytest.approx(104.19e9, rel=1e-4)
  assert active(k3) + k3.weights("token_embedder") == pytest.approx(105.36e9, rel=1e-4)


def test_kimi_linear_has_49_billion_parameters_of_which_3_billion_are_active(kimi_linear):
  assert kimi_linear.weights() == pytest.approx(49.12e9, rel=1e-3)
  assert active(kimi_linear) == pytest.approx(3.11e9, rel=1e-2)


def test_one_attention_layer_of_each_kind_and_one_expert_have_the_published_size(k3):
  assert k3.weights("lead_0", "attention") == pytest.approx(443.7e6, rel=1e-3)
  assert k3.weights("lead_3", "attention") == pytest.approx(232.2e6, rel=1e-3)
  assert k3.weights("lead_1", "experts") / 896 == pytest.approx(33.03e6, rel=1e-3)


def test_kimi_linears_total_is_the_sum_of_its_parts(kimi_linear):
  hidden, heads, width = 2304, 32, 128
  kda = 4 * hidden * heads * width + 3 * 4 * heads * width  # q, k, v, o and their taps
  kda += 2 * (hidden * width + width * heads * width)  # low-rank decay and output gate
  kda += hidden * heads + heads + heads * width + width  # beta, A_log, dt_bias, o_norm
  mla = hidden * heads * 192 + hidden * (512 + 64) + 512 + 512 * heads * 256 + heads * 128 * hidden
  moe = 256 * 3 * hidden * 1024 + hidden * 256 + 256 + 3 * hidden * 1024
  dense = 3 * hidden * 9216
  norms = 27 * 2 * hidden + hidden
  expected = 20 * kda + 7 * mla + 26 * moe + dense + norms + 2 * 163840 * hidden
  assert kimi_linear.weights() == expected


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear-48b-a3b"])
def test_scanned_and_unrolled_hold_the_same_weights_and_bytes(build, name):
  folded, unrolled = build(name, scan=True), build(name, scan=False)
  assert folded.weights() == unrolled.weights()
  for kind in ("params", "cache"):
    assert sum(x.nbytes for x in getattr(folded, kind)) == sum(x.nbytes for x in getattr(unrolled, kind))
  assert len(folded.params) < len(unrolled.params) / 2


def test_the_released_storage_is_1453_gib(k3):
  assert sum(leaf.nbytes for leaf in k3.params) / 2**30 == pytest.approx(1452.8, rel=1e-4)
  by_dtype = collections.Counter()
  for leaf in k3.params:
    by_dtype[str(leaf.dtype)] += leaf.nbytes / 2**30
  assert by_dtype == pytest.approx({"bfloat16": 105.67, "float32": 0.04, "uint8": 1347.12}, abs=0.006)


def test_float32_leaves_are_those_of_the_release(k3):
  names = collections.Counter()
  for leaf in k3.params:
    if leaf.dtype == np.float32:
      stacked = leaf.shape[0] if leaf.axes[:1] == ("layers",) else 1
      names[leaf.path[-1] if leaf.path[-1] != "scale" else leaf.path[-2]] += stacked
  assert names == {"A_log": 69, "dt_bias": 69, "q_conv": 69, "k_conv": 69, "v_conv": 69, "o_norm": 69, "bias": 92}


def layers_of(leaf: Leaf) -> int:
  """Layers a cache leaf stands for: a scanned block's leaf has them as its first axis."""
  return leaf.shape[0] if "blocks" in leaf.path else 1


def numbers_of(leaf: Leaf, layers: int) -> list[int]:
  """0-based numbers of the layers a leaf belongs to: lead_3, tail_0, layers_17, or all of a place in the blocks."""
  name = next(part for part in leaf.path if "_" in part and part.split("_")[-1].isdigit())
  number = int(name.split("_")[-1])
  if "blocks" in leaf.path:
    return [4 + 4 * block + number for block in range(leaf.shape[0])]
  return [number + (4 + 4 * ((layers - 5) // 4) if name.startswith("tail") else 0)]


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(("name", "mla_layers"), [("kimi-k3", 24), ("kimi-linear-48b-a3b", 7)])
def test_a_layer_has_the_cache_of_its_kind_and_no_other(build, name, mla_layers, scan):
  """24 latent caches and 69 states of K3, where a cache for each of 93 layers would take four times the room."""
  model = build(name, scan=scan)
  a = model.architecture
  mla, kda = (sorted(i - 1 for i in layers) for layers in (a.full_attention_layers, a.kda_layers))
  assert (len(mla), len(kda)) == (mla_layers, a.num_layers - mla_layers)
  found = collections.defaultdict(list)
  sizes = collections.Counter()
  for leaf in model.cache:
    found[leaf.path[-1]] += numbers_of(leaf, a.num_layers)
    sizes[leaf.path[-1]] += leaf.nbytes
  states = {"recurrent_state", "conv_state"}
  assert {n: sorted(layers) for n, layers in found.items()} == {n: kda if n in states else mla for n in found}
  assert states < set(found)
  state_bytes = len(kda) * a.kda_num_heads * a.kda_head_dim**2 * 4
  assert sizes["recurrent_state"] == SLOTS * state_bytes
  latents = {n for n, size in sizes.items() if n not in states and size > SLOTS * CONTEXT * len(mla) * 8}
  latent_bytes = (a.kv_lora_rank + a.qk_rope_head_dim) * len(mla) * 2  # a token, in bfloat16
  assert sum(sizes[n] for n in latents) == SLOTS * CONTEXT * latent_bytes
  if name == "kimi-k3":
    assert (state_bytes, latent_bytes) == (434_110_464, 27_648)
  # What else there is counts and masks the tokens: 16 bytes a token and layer at most.
  assert sum(sizes[n] for n in set(found) - states - latents) <= SLOTS * (CONTEXT + 16) * len(mla) * 16


def test_latents_are_576_elements_a_token_a_layer_over_24_layers(k3):
  latents = [x for x in k3.cache if x.path[-1].startswith("cached_") and x.path[-1].endswith(("key", "value"))]
  assert sum(layers_of(x) for x in latents) == 4 * 24  # latent and tail, of prompt and generated tokens
  assert sum(x.size for x in latents) == 576 * 24 * CONTEXT * SLOTS
  assert {str(x.dtype) for x in latents} == {"bfloat16"}


def test_kda_state_is_434_megabytes_a_sequence_whatever_the_length(k3):
  states = [x for x in k3.cache if x.path[-1] == "recurrent_state"]
  assert sum(layers_of(x) for x in states) == 69
  assert {x.shape[-3:] for x in states} == {(96, 128, 128)}
  assert {str(x.dtype) for x in states} == {"float32"}
  assert sum(x.nbytes for x in states) / SLOTS == pytest.approx(434e6, rel=1e-2)


def test_convolution_history_is_the_last_three_inputs_of_q_k_and_v(k3):
  histories = [x for x in k3.cache if x.path[-1] == "conv_state"]
  assert sum(layers_of(x) for x in histories) == 69
  assert {x.shape[-4:] for x in histories} == {(3, 3, 96, 128)}
  assert sum(x.nbytes for x in histories) / SLOTS == 69 * 3 * 3 * 96 * 128 * 2


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear-48b-a3b"])
@pytest.mark.parametrize("scan", [True, False])
def test_every_leaf_names_its_axes_and_every_name_has_a_rule(build, name, scan):
  model = build(name, scan=scan)
  for leaf in model.params:
    assert len(leaf.axes) == len(leaf.shape), leaf
    assert {axis for axis in leaf.axes if axis} <= set(model.rules), leaf


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear-48b-a3b"])
@pytest.mark.parametrize("scan", [True, False])
def test_no_large_leaf_is_replicated_over_both_tensor_and_expert_axes(build, name, scan):
  """Large: more than 10 million weights a layer. Full replication would show as a leaf that no chip can hold."""
  model, checked = build(name, scan=scan), 0
  for leaf in model.params:
    stacked = leaf.shape[0] if leaf.axes[:1] == ("layers",) else 1
    if leaf.size / stacked > 1e7:
      cut_by = set().union(*(model.rules[axis] for axis in leaf.axes if axis and axis != "layers"))
      assert cut_by & {"tensor", "expert"}, leaf
      checked += 1
  assert checked > 30


def test_experts_are_cut_by_expert_and_attention_by_heads(k3):
  for leaf in k3.params:
    axes = leaf.axes[1:] if leaf.axes[:1] == ("layers",) else leaf.axes
    if "experts" in leaf.path:
      assert axes[0] == "exp", leaf
    if leaf.path[-2:] in {(f"{m}_proj", "kernel") for m in "qkvg"} and "attention" in leaf.path:
      assert axes == ("embed_attn", "q_heads", "kv"), leaf


def test_layers_are_stacked_on_axis_0_and_not_cut(k3):
  blocks = [leaf for leaf in k3.params if "blocks" in leaf.path]
  assert {leaf.shape[0] for leaf in blocks} == {22}
  assert {leaf.axes[0] for leaf in blocks} == {"layers"}
  assert k3.rules["layers"] <= {"stage"}  # pipeline parallelism, which is refused
