"""Toy models for gradients: weights in float32, the loss that MaxText's trainer differentiates, and its gradients.

A toy's tensors are held under their released names, as the numpy reference wants them, and become leaves of the
parameter tree by the converter's own table. Imported by the fixtures and by on_devices.py; what needs kimi_k3 is
imported late, after the type checker of --jaxtyping-packages is in place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
  from kimi_k3.config import KimiK3Config
  from kimi_k3.convert.mapping import Leaf

Arrays = dict[str, np.ndarray]

# Sizes differ where they may, so that none can stand for another. Eight devices divide what a mesh cuts.
SIZES = {
  "hidden_size": 32,
  "vocab_size": 48,
  "intermediate_size": 40,
  "num_attention_heads": 2,
  "num_key_value_heads": 2,
  "q_lora_rank": 24,
  "kv_lora_rank": 16,
  "qk_nope_head_dim": 8,
  "qk_rope_head_dim": 4,
  "v_head_dim": 6,
  "moe_intermediate_size": 16,
  "num_experts": 8,
  "num_experts_per_token": 2,
}
KDA_SIZES = {"num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4}
LATENT = 24  # width of K3's experts
UNCHOSEN = -4.0  # a selection bias below any score: nobody chooses such an expert


@dataclasses.dataclass(frozen=True, eq=False)
class Toy:
  """A model small enough for numerical gradients.

  Attributes:
    text_config: As in a released config.json.
    tensors: float32, by released name, `language_model.` removed.
  """

  text_config: dict[str, Any]
  tensors: Arrays

  @functools.cached_property
  def architecture(self) -> KimiK3Config:
    from kimi_k3.config import FLOAT32_KINDS, KimiK3Config

    wrapped = self.text_config["hidden_act"] == "situ"
    config = {"text_config": self.text_config} if wrapped else self.text_config
    return KimiK3Config.from_hf(config, packed_modules=(), float32_leaves=FLOAT32_KINDS)

  @functools.cache  # noqa: B019 (a toy lives as long as the session)
  def table(self, *, scan: bool) -> tuple[Leaf, ...]:
    """The tree, as the converter spells it out."""
    from kimi_k3.convert.mapping import StoredForm, leaves

    shape = self.tensors[f"model.layers.{self.architecture.kda_layers[0] - 1}.self_attn.A_log"].shape
    return leaves(self.architecture, StoredForm(prefix="", packed_modules=(), a_log_shape=shape), scan=scan)

  def leaves(self, *, scan: bool) -> Arrays:
    """The tensors as leaves of the tree."""
    from kimi_k3.convert import transforms

    def read(name: str, start: int, stop: int) -> np.ndarray:
      return self.tensors[name][start:stop]

    result = {}
    for leaf in self.table(scan=scan):
      array = result[".".join(leaf.path)] = np.zeros(leaf.shape, np.float32)
      for piece in leaf.pieces:
        rows = (0, self.tensors[piece.names[0]].shape[0])
        array[piece.index] = transforms.apply(leaf.transform, piece.names, read, leaf.slice_shape, rows)
    return result

  def stored(self, leaves: Mapping[str, np.ndarray], *, scan: bool) -> Arrays:
    """The way back: leaves of the tree, all or some, as tensors."""
    from kimi_k3.convert import transforms

    result = {}
    for leaf in self.table(scan=scan):
      if (name := ".".join(leaf.path)) in leaves:
        for piece in leaf.pieces:
          part = np.ascontiguousarray(leaves[name][piece.index])
          result[piece.names[0]] = transforms.invert(leaf.transform, part, leaf.stored[0][1])
    return result

  def config(self, directory: Path, *settings: str, scan: bool, length: int, rows: int, devices: int = 1) -> Any:
    """MaxText's config of the toy, for training in float32 on batches [rows, length].

    Args:
      directory: Where its YAML file may be written.
      settings: key=value on top.
      scan: Whether layers are folded.
      length: Of a row, in tokens.
      rows: Of a batch, over all devices; of one that is accumulated, if several are.
      devices: How many there are.
    """
    import yaml

    from kimi_k3.maxtext_adapter.settings import read_config
    from kimi_k3.maxtext_keys import to_maxtext

    keys = {"base_config": "base.yml", **to_maxtext(self.architecture, scan_layers=scan, dtype="float32")}
    keys |= {"attention": "dot_product", "matmul_precision": "highest", "expert_implementation": "dropless"}
    path = directory / f"toy-{zlib.crc32(repr((keys, settings)).encode()):08x}.yml"
    path.write_text(yaml.safe_dump(keys))
    return read_config(str(path), settings, max_target_length=length, per_device_batch_size=rows / devices)


def make_toy(variant: str, layers: int, *, seed: int = 0, **changes: Any) -> Toy:
  """Returns a toy with weights of variance 1 / fan_in, norms near 1, and biases and rates that matter.

  Args:
    variant: "k3" or "kimi-linear".
    layers: Of which the last is MLA, and every fourth.
    seed: Of the weights.
    changes: Keys of text_config.
  """
  import make_tiny_checkpoint

  text = make_tiny_checkpoint.text_config(variant, "tiny", layers)
  linear = text["linear_attn_config"] | KDA_SIZES
  sizes = SIZES if variant == "k3" else SIZES | {"q_lora_rank": None}
  text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **sizes, "linear_attn_config": linear}
  if variant == "k3":
    text |= {"routed_expert_hidden_size": LATENT, "attn_res_block_size": 2}
  text |= changes
  shapes = make_tiny_checkpoint.tensor_shapes(text)
  return Toy(text, {name: _draw(name, shape, linear["num_heads"], seed).astype(np.float32) for name, shape in shapes})


def _draw(name: str, shape: tuple[int, ...], heads: int, seed: int) -> np.ndarray:
  rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
  field = name.removesuffix(".weight").split(".")[-1]
  if field == "A_log":
    values = np.zeros(shape)
    values.flat[:heads] = np.log(rng.uniform(0.5, 4.0, heads))
    return values
  if field == "dt_bias":
    return rng.uniform(-4.0, 1.0, shape)  # decays from nearly none to nearly all
  if field == "e_score_correction_bias":
    values = 0.1 * rng.standard_normal(shape)
    values[-1] = UNCHOSEN
    return values
  if "norm" in field:
    return 1.0 + 0.2 * rng.standard_normal(shape)
  if field == "embed_tokens":
    return rng.standard_normal(shape)
  return rng.standard_normal(shape) / math.sqrt(math.prod(shape[1:]))


def pack(rows: Sequence[Sequence[Sequence[int] | int]], shape: tuple[int, int]) -> Arrays:
  """Returns the trainer's batch [rows, length] of rows that hold several documents each, one after the other.

  Args:
    rows: Of documents, each of n + 1 ids for n tokens with a target, and of numbers of pads between them. Those not
      given are all pads, as is the rest of a row.
    shape: Rows and length.
  """
  inputs, targets, positions, segments = (np.zeros(shape, np.int32) for _ in range(4))
  for r, row in enumerate(rows):
    start, number = 0, 0
    for doc in row:
      if isinstance(doc, int):
        start += doc
        continue
      tokens, number = len(doc) - 1, number + 1
      assert start + tokens <= shape[1], "the row is too short"
      here = (r, slice(start, start := start + tokens))
      inputs[here], targets[here], segments[here] = doc[:-1], doc[1:], number
      positions[here] = np.arange(tokens)
  return {
    "inputs": inputs,
    "inputs_position": positions,
    "inputs_segmentation": segments,
    "targets": targets,
    "targets_position": positions,
    "targets_segmentation": segments,
  }


@dataclasses.dataclass(frozen=True)
class Differentiated:
  """A loss with its gradients.

  Attributes:
    loss: What the trainer minimises.
    xent_sum: Cross-entropy summed over the targets.
    weights: Number of targets.
    gradients: Of the loss, by leaf.
  """

  loss: float
  xent_sum: float
  weights: int
  gradients: Arrays


class TrainerLoss:
  """The loss of MaxText's trainer and its gradients, compiled once.

  Attributes:
    shape: Of a batch: rows and length.
  """

  def __init__(self, config: Any):
    import jax
    from flax import nnx

    from kimi_k3.maxtext_adapter.engine import abstract_model, concrete_rest
    from kimi_k3.maxtext_adapter.quiet import quiet

    with quiet():
      from maxtext.trainers.pre_train import train
      from maxtext.utils import sharding
      from maxtext.utils.gradient_accumulation import gradient_accumulation_loss_and_grad as accumulate

    self._config = config
    self.shape = (int(config.global_batch_size_to_train_on), config.max_target_length)
    self._mesh, abstract = abstract_model(config, "train")
    graph, self._abstract, rest = nnx.split(abstract, nnx.Param, ...)
    rest = concrete_rest(rest)
    self._placed = sharding.get_input_data_sharding(config, self._mesh, rules=config.logical_axis_rules)

    def loss(params, data):
      model = nnx.merge(graph, params, rest, copy=True)
      value, aux = train.loss_fn(model, config, dict(data), None, None, is_train=True)
      return value, (aux["xent_sum"], aux["total_weights"])

    def accumulated(params, data):
      model, shardings = nnx.merge(graph, params, rest, copy=True), jax.tree.map(lambda p: p.sharding, self._abstract)
      value, aux, gradients = accumulate(train.loss_fn, config, model, None, shardings, dict(data), None)
      return (value, (aux["xent_sum"], aux["total_weights"])), gradients

    several = config.gradient_accumulation_steps > 1
    # LLVM's share of the time to compile is halved; XLA's own passes run as ever, and a toy takes milliseconds anyway.
    options: Any = {"xla_backend_optimization_level": 0}
    self._step = jax.jit(accumulated if several else jax.value_and_grad(loss, has_aux=True), compiler_options=options)

  def __call__(self, leaves: Mapping[str, np.ndarray], data: Arrays) -> Differentiated:
    """Returns loss and gradients at these leaves on a batch."""
    import jax
    from flax.linen import logical_axis_rules

    with jax.set_mesh(self._mesh), logical_axis_rules(self._config.logical_axis_rules):
      held = {name: jax.device_put(array, self._placed) for name, array in data.items()}
      (value, (xent, weights)), gradients = self._step(load(self._abstract, leaves), held)
    return Differentiated(float(value), float(xent), int(weights), flat(gradients))


def load(abstract: Any, leaves: Mapping[str, np.ndarray]) -> Any:
  """Returns the abstract state with these leaves in it, each where its sharding puts it. Both name the same ones."""
  import jax
  from flax import nnx

  state = jax.tree.map(lambda leaf: leaf, abstract)
  names = [(path, ".".join(map(str, path)), leaf) for path, leaf in nnx.to_flat_state(state)]
  assert {name for _, name, _ in names} == leaves.keys(), {name for _, name, _ in names} ^ leaves.keys()
  for _, name, leaf in names:
    assert (leaf.shape, leaf.dtype) == (leaves[name].shape, leaves[name].dtype), name
  arrays = {path: jax.device_put(leaves[name], leaf.sharding) for path, name, leaf in names}
  nnx.replace_by_pure_dict(state, nnx.traversals.unflatten_mapping(arrays))
  return state


def flat(state: Any) -> Arrays:
  """Returns a state's arrays on the host, by name."""
  from flax import nnx

  return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}


# Of the largest entry of a leaf's gradient: float32 both times, but sums are taken in another order.
TOLERANCE = 2e-5
# The same of a dozen layers, which swell the noise: to round all weights of such a toy otherwise, by 6e-8, moves its
# gradients by 2e-5 (the median of the leaves' norms) to 3e-4. A layer in a wrong place is off by 1.
DEEP_TOLERANCE = 1e-3


def assert_same(
  found: Differentiated, expected: Differentiated, *, tolerance: float = TOLERANCE, biases_by_sign: bool = False
) -> None:
  """Checks that the sum of losses and every gradient are the same, entry by entry.

  Args:
    found: To be checked.
    expected: Of the same tokens.
    tolerance: Of the largest entry of each gradient.
    biases_by_sign: Compare of the selection biases' gradients only the signs, which are all that is read of them.
  """
  assert found.weights == expected.weights > 0
  assert abs(found.xent_sum - expected.xent_sum) <= 1e-6 * expected.xent_sum
  assert abs(found.loss - expected.loss) <= 1e-6 * expected.loss
  assert found.gradients.keys() == expected.gradients.keys()
  faults = {}
  for name, gradient in expected.gradients.items():
    other = found.gradients[name]
    if biases_by_sign and name.endswith(".router.bias"):
      other, gradient = np.sign(other), np.sign(gradient)
    assert np.isfinite(other).all(), name
    largest = np.abs(gradient).max()
    error = np.abs(other - gradient).max() / largest if largest else np.abs(other).max()
    if not error <= tolerance:
      faults[name] = float(error)
  assert not faults, faults


def reference_loss(toy: Toy, documents: Sequence[Sequence[int]], changed: Mapping[str, np.ndarray]) -> SimpleNamespace:
  """Returns the cross-entropy of documents by the numpy reference in float64, each run alone, and its routers' choices.

  The fields: loss, the mean over all targets; ids [MoE layers, all tokens, S]; margin, the smallest by which a choice
  was made.

  Args:
    toy: The model.
    documents: Of n + 1 ids for n targets.
    changed: Tensors in place of the toy's, float64.
  """
  import k3_reference

  checkpoint = k3_reference.Checkpoint(toy.text_config, toy.tensors | dict(changed))
  xent, ids, margin = [], [], math.inf
  for doc in documents:
    out = k3_reference.forward(checkpoint, np.array([doc[:-1]]), trace=True)
    logits = out["logits"][0]
    largest = logits.max(axis=-1, keepdims=True)
    logsumexp = np.log(np.sum(np.exp(logits - largest), axis=-1)) + largest[:, 0]
    xent.append(logsumexp - np.take_along_axis(logits, np.array(doc[1:])[:, None], axis=-1)[:, 0])
    moe = [layer for layer in out["layers"] if "expert_ids" in layer]
    ids.append(np.sort([layer["expert_ids"][0] for layer in moe], axis=-1))
    margin = min([margin, *(float(layer["router_margin"].min()) for layer in moe)])
  return SimpleNamespace(loss=float(np.concatenate(xent).mean()), ids=np.concatenate(ids, axis=1), margin=margin)
