"""Logical axis names of every parameter and cache, as MaxText's rules name them.

A name that no rule knows is replicated without a word, so `check_rules` refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

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


def mesh_axes(rules: Rules, name: str) -> tuple[str, ...]:
  """Returns the mesh axes of a logical axis: those of its first rule."""
  return next((_as_tuple(axes) for n, axes in rules if n == name), ())


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
