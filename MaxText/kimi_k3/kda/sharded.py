"""KDA's kernels where the compiler partitions everything else: one jax.shard_map over rows and heads.

The compiler cannot cut a kernel: a Mosaic call under it is refused on several devices. Rows and heads are independent,
so each device runs its own and there is no collective, but for the gradients of what the rows share.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from kimi_k3.errors import InputError
from kimi_k3.kda.kernel import run_kda
from kimi_k3.sharding import HEADS, TOKEN_BATCH, Rules, cut_axes


@dataclasses.dataclass(frozen=True)
class KdaPlacement:
  """By which axes of the mesh the rows of a batch and the heads are cut, each of size > 1.

  Attributes:
    mesh: The devices.
    rows: Cut the rows.
    heads: Cut the heads.
  """

  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
  rows: tuple[str, ...]
  heads: tuple[str, ...]


def kda_placement(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, rules: Rules) -> KdaPlacement | None:
  """Returns where the rules put rows and heads; None on a single device.

  Args:
    mesh: Of the model.
    rules: Logical axis rules.
  """
  if mesh.size == 1:
    return None
  rows, heads = cut_axes(mesh, rules, TOKEN_BATCH, HEADS)
  return KdaPlacement(mesh, rows, heads)


def run_kda_sharded(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T H V"],
  a: Float[Array, "B T H K"],
  a_log: Float[Array, " H"],
  dt_bias: Float[Array, "H K"],
  beta: Float[Array, "B T H"],
  state: Float[Array, "B H K V"],
  placement: KdaPlacement,
  *,
  lower_bound: float | None,
  valid: Bool[Array, "B T"] | None,
  resets: Bool[Array, "B T"] | None,
  implementation: str,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
  """Returns what `run_kda` does, of arrays on many devices, under jit. Arguments are as there.

  Raises:
    InputError: as there, and if the mesh does not divide rows or heads.
  """
  for name, size, axes in (("rows", q.shape[0], placement.rows), ("heads", q.shape[2], placement.heads)):
    if size % (devices := math.prod(placement.mesh.shape[axis] for axis in axes)):
      raise InputError(
        f"kda_implementation {implementation!r} cuts evenly, found {size} {name} among {devices} devices "
        f'({", ".join(axes)}): choose a batch or mesh that divides, or "portable"'
      )

  def local(*arrays):
    *arrays, valid, resets = arrays
    return run_kda(*arrays, lower_bound=lower_bound, valid=valid, resets=resets, implementation=implementation)

  rows, heads = placement.rows, placement.heads
  token, state_spec = P(rows, None, heads), P(rows, heads)
  specs = (token, token, token, token, P(heads), P(heads), token, state_spec, P(rows), P(rows))
  # The kernels' results do not say along which axes they vary, so that is not checked.
  run = functools.partial(jax.shard_map, mesh=placement.mesh, check_vma=False)
  return run(local, in_specs=specs, out_specs=(token, state_spec))(
    q, k, v, a, a_log, dt_bias, beta, state, valid, resets
  )
