"""Which mesh axes cut what: the one table from logical to mesh axes of the manual partitioning."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from kimi_k3 import sharding
from kimi_k3.config import MXFP4_GROUP, KimiK3Config
from kimi_k3.errors import InputError

Axes = tuple[str, ...]

# The meshes of MaxText's base.yml and of its serving config. An axis that cuts the rows is one of data parallelism: all
# else is whole on each of its devices, but for the experts, which attn_dp_expert cuts too.
_ROWS = ("data", "fsdp", "fsdp_transpose", "attn_dp", "attn_dp_expert")
_MODEL = ("expert", "tensor", "tensor_transpose", "autoregressive", "model")
RULES: dict[str, Axes] = {
  "rows": _ROWS,
  "heads": _MODEL,
  "experts": ("attn_dp", "attn_dp_expert", *_MODEL),
  "expert_width": (),
  "width": _MODEL,
  "vocab": _MODEL,
  "latent": (),
}
KNOWN_AXES = frozenset((*_ROWS, *_MODEL))
_MEANING = {
  "rows": "sequences of the batch, and their caches",
  "heads": "attention heads",
  "experts": "routed experts",
  "expert_width": "the inner width of each routed expert",
  "width": "the inner width of dense and shared MLPs",
  "vocab": "the vocabulary of embedding and head",
  "latent": "the latent of the projections around the routed experts",
}


@dataclasses.dataclass(frozen=True)
class Cuts:
  """For each thing that can be cut, the mesh axes of more than one device that cut it, major first.

  Attributes:
    sizes: Devices along each axis of the mesh, axes of one device left out.
    rows: Of sequences.
    heads: Of attention heads, and with them of the latent cache.
    experts: Of routed experts.
    expert_width: Of the inner width of a routed expert.
    width: Of the inner width of dense and shared MLPs.
    vocab: Of the vocabulary.
    latent: Of the experts' latent in the projections to and from it; none: these are whole on each device.
  """

  sizes: Mapping[str, int]
  rows: Axes
  heads: Axes
  experts: Axes
  expert_width: Axes
  width: Axes
  vocab: Axes
  latent: Axes

  @classmethod
  def of(cls, sizes: Mapping[str, int], rules: Mapping[str, Any] | None = None) -> Cuts:
    """Returns the cuts on a mesh.

    Args:
      sizes: Devices along each axis of the mesh, major first.
      rules: Changes to RULES: {what: mesh axes}.

    Raises:
      InputError: naming every unknown name, and every axis that would cut two things that exclude each other.
    """
    rules = rules or {}
    faults = [f"{key} (known: {', '.join(RULES)})" for key in rules if key not in RULES]
    if faults:
      raise InputError(f"partition_rules: unknown {'; '.join(faults)}")
    cutting = {axis: size for axis, size in sizes.items() if size > 1}
    if idle := [axis for axis in cutting if axis not in KNOWN_AXES]:
      raise InputError(
        f"mesh axis {', '.join(idle)} cuts nothing in the manual partitioning: set its parallelism to 1; the axes it "
        f"knows are {', '.join(sorted(KNOWN_AXES))}"
      )
    cuts = {}
    for what, axes in RULES.items():
      wanted = _as_axes(what, rules[what]) if what in rules else axes
      if strange := [axis for axis in wanted if axis not in sizes and what in rules]:
        raise InputError(
          f"partition_rules: {what} names {', '.join(strange)}, which the mesh lacks: it has {', '.join(sizes)}"
        )
      chosen = [axis for axis in wanted if axis in cutting]
      cuts[what] = tuple(chosen if what in rules else sorted(chosen, key=list(sizes).index))
    found = cls(sizes=cutting, **cuts)
    found._check()
    return found

  def _check(self) -> None:
    faults = []
    for one, other in (
      *(("rows", what) for what in ("heads", "width", "vocab", "latent")),
      ("experts", "expert_width"),
    ):
      if both := [axis for axis in getattr(self, one) if axis in getattr(self, other)]:
        faults.append(f"{', '.join(both)} would cut both {one} ({_MEANING[one]}) and {other} ({_MEANING[other]})")
    if self.latent and self.latent != self.width:
      faults.append(
        f"latent is cut by {list(self.latent)}, which must be nothing or what cuts width, {list(self.width)}"
      )
    idle = [axis for axis in self.sizes if not any(axis in getattr(self, what) for what in RULES)]
    faults += [f"axis {axis} cuts nothing" for axis in idle]
    if faults:
      raise InputError(f"partition_rules: {'; '.join(faults)}")

  def size(self, axes: Axes) -> int:
    """How many parts the axes make."""
    return math.prod(self.sizes[axis] for axis in axes)

  def spec(self, axes: tuple[Any, ...]) -> PartitionSpec:
    """Returns the spec of an array whose axes have these logical names; None is an axis that nothing cuts."""
    cut_by: dict[str, Axes] = {
      sharding.HEADS: self.heads,
      sharding.MLP: self.width,
      sharding.EXPERT: self.experts,
      sharding.EXPERT_MLP: self.expert_width,
      sharding.LATENT: self.latent,
      sharding.VOCAB: self.vocab,
      **dict.fromkeys(
        (
          sharding.EMBED_ATTN,
          sharding.HEAD_DIM,
          sharding.EMBED,
          sharding.EXPERT_EMBED,
          sharding.ROUTER_EMBED,
          sharding.NORM,
        ),
        (),
      ),
    }
    return PartitionSpec(*((cut_by[axis] or None) if axis is not None else None for axis in axes))

  def check_fits(self, config: KimiK3Config) -> None:
    """Raises InputError if the mesh does not divide the model: nothing is padded, and nothing kept whole instead."""
    faults = []

    def check(what: str, total: int, name: str, unit: int = 1) -> None:
      axes: Axes = getattr(self, what)
      parts = self.size(axes)
      if total % parts or total // parts % unit:
        whole = f" into whole groups of {unit} that share a scale" if unit > 1 else ""
        sizes = ", ".join(f"{axis} {self.sizes[axis]}" for axis in axes)
        faults.append(f"{name} is {total}, which {parts} parts ({sizes}) do not divide{whole}")

    check("heads", config.num_heads, "the number of MLA heads")
    check("heads", config.kda_num_heads, "the number of KDA heads")
    check("experts", config.num_experts, "num_experts")
    packed = "experts" in config.packed_modules
    check("expert_width", config.expert_mlp_dim, "the experts' width", MXFP4_GROUP if packed else 1)
    if not all(config.moe_layers):
      check("width", config.dense_mlp_dim, "the width of the dense MLP")
    if config.num_shared_experts:
      check("width", config.shared_mlp_dim, "the width of the shared experts")
    if config.expert_latent_dim is not None:
      check("latent", config.expert_latent_dim, "the experts' latent")
    check("vocab", config.vocab_size, "the vocabulary")
    if faults:
      raise InputError(f"the mesh does not divide the model: {'; '.join(faults)}: choose sizes that do")


def _as_axes(what: str, value: Any) -> Axes:
  axes = [value] if isinstance(value, str) else value
  if not isinstance(axes, list | tuple) or not all(isinstance(axis, str) for axis in axes):
    raise InputError(f"partition_rules: {what} is {value!r}, expected a list of mesh axes")
  if len(set(axes)) != len(axes):
    raise InputError(f"partition_rules: {what} names an axis twice: {value!r}")
  return tuple(axes)
