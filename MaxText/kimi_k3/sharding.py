"""Logical axis names of every parameter and cache, as MaxText's rules name them.

A name that no rule knows is replicated without a word, so `check_rules` refuses it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from flax.linen.spmd import logical_to_mesh_axes

from kimi_k3.errors import InputError

EMBED_ATTN = "embed_attn"  # hidden axis of attention projections
HEADS = "q_heads"
HEAD_DIM = "kv"
EMBED = "embed"  # hidden axis of dense and shared MLPs
MLP = "mlp"
EXPERT = "exp"
EXPERT_EMBED = "embed_moe"  # input axis of the routed experts
EXPERT_MLP = "mlp_moe"
ROUTER_EMBED = "embed_router"
LATENT = "moe_latent"  # of the projections to the experts' latent and back
NORM = "norm"
VOCAB = "vocab"
TOKEN_BATCH = "activation_batch"  # rows of a batch of tokens
CACHE_BATCH_PREFILL = "cache_batch_prefill"
CACHE_BATCH = "cache_batch"
CACHE_HEADS = "cache_heads"

USED_AXES = frozenset(
  (EMBED_ATTN, HEADS, HEAD_DIM, EMBED, MLP, EXPERT, EXPERT_EMBED, EXPERT_MLP, ROUTER_EMBED, NORM)
  + (CACHE_BATCH_PREFILL, CACHE_BATCH, CACHE_HEADS, LATENT)
)

# MaxText's rule for the rows of a cache cuts nothing: each device of a data axis would hold every row's state. These
# are the axes by which MaxText cuts the rows of everything else.
_ROW_AXES = ("data", "fsdp", "fsdp_transpose", "expert")

Rules = Sequence[Sequence[Any]]  # (logical axis, mesh axes)


def with_own_rules(rules: Rules) -> Rules:
  """Returns the rules with what MaxText's lack: the rows of the caches cut, and the experts' latent cut as an MLP.

  A rule of the user's for either stands.
  """
  found = list(rules)
  if LATENT not in {name for name, _ in found}:
    # Beside those of MLP: a rule is passed over where an earlier one has taken one of its axes, so their order counts.
    copies = [[rule, (LATENT, rule[1])] if rule[0] == MLP else [rule] for rule in found]
    found = [rule for pair in copies for rule in pair]
  if any(name == CACHE_BATCH and _as_tuple(axes) for name, axes in found):
    return found
  return [(n, axes) for n, axes in found if n != CACHE_BATCH] + [(CACHE_BATCH, _ROW_AXES)]


def with_divisible_latents(rules: Rules, latents: Mapping[str, int | None], sizes: Mapping[str, int]) -> Rules:
  """Returns the rules with MLA's two latents cut by as many of their mesh axes, from the first, as divide them.

  MaxText cuts them by all axes that cut the hidden size. That is 7168 in K3, which 1024 devices divide, and these are
  1536 and 512, which they do not: JAX would refuse the arrays.

  Args:
    rules: MaxText's or the user's.
    latents: Width by logical axis; None or 0 for a latent that is not there.
    sizes: Of the mesh axes, as far as they are known; a rule with an unknown one is left as it is.

  Raises:
    InputError: if not even the first axis divides: the leaf would be whole on every device.
  """
  found = []
  for name, axes in rules:
    used = tuple(axis for axis in _as_tuple(axes) if sizes.get(axis) != 1)
    width = latents.get(name)
    if not width or not all(axis in sizes for axis in used) or width % math.prod(sizes[axis] for axis in used) == 0:
      found.append((name, axes))
      continue
    fitting = next(used[:n] for n in range(len(used), -1, -1) if width % math.prod(sizes[a] for a in used[:n]) == 0)
    if not fitting:
      raise InputError(
        f"the MLA latent {name} is {width} wide, which {used[0]} parallelism of {sizes[used[0]]} does not divide: "
        f"set {used[0]} parallelism to a divisor of it"
      )
    found.append((name, fitting))
  return found


def mesh_axes(rules: Rules, name: str) -> tuple[str, ...]:
  """Returns the mesh axes of a logical axis: those of its first rule."""
  return next((_as_tuple(axes) for n, axes in rules if n == name), ())


@dataclasses.dataclass(frozen=True)
class Placement:
  """Where the compiler partitions: by which axes of the mesh tokens and routed experts are cut, each of size > 1.

  Attributes:
    mesh: The devices.
    tokens: Cut the rows of a batch.
    experts: Cut the experts.
    widths: Cut the inner width of each expert.
    inputs: Cut the input of w1 and w3, which is the output of w2.
  """

  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
  tokens: tuple[str, ...]
  experts: tuple[str, ...]
  widths: tuple[str, ...]
  inputs: tuple[str, ...]

  def check_divides(self, **sizes: int) -> None:
    """Raises InputError unless each of the sizes, by what is cut, is one that the devices share evenly."""
    faults = []
    for name, size in sizes.items():
      axes = getattr(self, name)
      if size % (devices := math.prod(self.mesh.shape[axis] for axis in axes)):
        faults.append(f"{size} {name} among {devices} devices ({', '.join(axes)})")
    if faults:
      raise InputError(
        f"expert_implementation 'dropless' cuts evenly, found {'; '.join(faults)}: choose a batch or mesh that divides"
      )


def cut_axes(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, rules: Rules, *names: str) -> list[tuple[str, ...]]:
  """Returns the mesh axes of size > 1 that cut each logical axis of one array.

  Args:
    mesh: The devices.
    rules: Logical axis rules, which an array's axes pass through together: what one axis took, no other gets.
    names: Logical axes of the array.
  """
  spec = logical_to_mesh_axes(names, rules=tuple((name, cut) for name, cut in rules))
  assert spec is not None
  parts = (*map(_as_tuple, spec), *((),) * len(names))  # the end of a spec may be left out
  return [tuple(axis for axis in part if mesh.shape[axis] > 1) for part in parts[: len(names)]]


def expert_placement(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, rules: Rules) -> Placement | None:
  """Returns where the rules put tokens and routed experts; None on a single device.

  Args:
    mesh: Of the model.
    rules: Logical axis rules, which a parameter's axes pass through together: what one axis took, no other gets.
  """
  if mesh.size == 1:
    return None
  (tokens,) = cut_axes(mesh, rules, TOKEN_BATCH)
  experts, inputs, widths = cut_axes(mesh, rules, EXPERT, EXPERT_EMBED, EXPERT_MLP)
  return Placement(mesh, tokens, experts, widths, inputs)


def rows_cut(x: jax.Array, placement: Placement | None, *, axis: int = 0) -> jax.Array:
  """Returns `x`, told to be cut by the rows of the batch alone. Without a placement, or if none divides, as it is.

  Weights are cut by the same devices, along the hidden size. Left to itself the compiler cuts activations that way too
  and adds up products of whole batches, where it should gather weights.

  Args:
    x: Activations.
    placement: The devices.
    axis: Of the rows.
  """
  if placement is None or x.shape[axis] % math.prod(placement.mesh.shape[name] for name in placement.tokens):
    return x
  spec = jax.sharding.PartitionSpec(*(None,) * axis, placement.tokens)
  return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(placement.mesh, spec))


def check_form(rules: Any) -> None:
  """Raises InputError unless `rules` are what MaxText takes: a list of [logical axis, mesh axis or list of them]."""
  fault = "expected a list of [logical axis, mesh axis or list of mesh axes]"
  if not isinstance(rules, list | tuple):
    raise InputError(f"logical_axis_rules is {rules!r}, {fault}")
  for rule in rules:
    if not (isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[0], str) and _names_once(rule[1])):
      raise InputError(f"logical_axis_rules holds {rule!r}, {fault}, each once")


def _names_once(axes: Any) -> bool:
  if isinstance(axes, str):
    return True
  is_list = isinstance(axes, list | tuple) and all(isinstance(axis, str) for axis in axes)
  return is_list and len(set(axes)) == len(axes)


def check_rules(rules: Rules, mesh_axis_names: Iterable[str]) -> None:
  """Raises InputError if a logical axis that the model uses has no rule, or a rule names no axis of the mesh.

  Either would be replicated in silence.
  """
  missing = sorted(USED_AXES - {name for name, _ in rules})
  if missing:
    raise InputError(
      f"logical_axis_rules has no rule for {', '.join(missing)}: these axes would be replicated; "
      "add [name, []] to mean that"
    )
  known = set(mesh_axis_names)
  unknown = sorted({f"{axis} (of {name})" for name, axes in rules for axis in _as_tuple(axes) if axis not in known})
  if unknown:
    raise InputError(
      f"logical_axis_rules names {', '.join(unknown)}: not among mesh_axes, which are {', '.join(sorted(known))}"
    )


def check_known(leaves: Iterable[tuple[str, tuple[str | None, ...]]], rules: Rules) -> None:
  """Raises InputError if a leaf is laid out by a logical axis that no rule knows. `leaves` are (name, logical axes)."""
  known = {name for name, _ in rules}
  faults = [f"{axis} (of {leaf})" for leaf, axes in leaves for axis in axes if axis is not None and axis not in known]
  if faults:
    raise InputError(f"logical_axis_rules has no rule for {', '.join(faults[:6])}: they would be replicated")


def _as_tuple(axes: Any) -> tuple[str, ...]:
  return (axes,) if isinstance(axes, str) else tuple(axes or ())
