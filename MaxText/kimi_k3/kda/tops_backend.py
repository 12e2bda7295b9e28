"""The optional KDA kernels of github.com/primatrix/pallas-kernel: its package `tops`, where somebody has installed it.

The index PyPI has a package of that name which is another project, a simulator of power grids: found is what has the
module `tops.ops.kda`, never what is merely called `tops`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from kimi_k3.errors import InputError

_SOURCE = "github.com/primatrix/pallas-kernel"
_CHUNK = 64  # tokens; whole chunks only


def tops_kda() -> ModuleType:
  """Returns the module `tops.ops.kda`.

  Raises:
    InputError: if it is absent, the package of that name is another one, or its version is too old.
  """
  spec = importlib.util.find_spec("tops")  # which does not import it: another project's code stays unrun
  advice = f'install {_SOURCE}, or use kda_implementation "portable"'
  if spec is None:
    raise InputError(f'kda_implementation "tops" needs the package tops of {_SOURCE}, found none: {advice}')
  places = list(spec.submodule_search_locations or ())
  if not any((Path(place) / "ops" / "kda" / "__init__.py").is_file() for place in places):
    found = places[0] if places else spec.origin
    raise InputError(
      f'kda_implementation "tops" needs the module tops.ops.kda of {_SOURCE}, the package tops in {found} has none '
      f"(PyPI's tops is another project): {advice}"
    )
  module = importlib.import_module("tops.ops.kda")
  if "safe_gate" not in inspect.signature(module.chunk_kda).parameters:
    # Commit d7c3294 of April 2026 was tried: NaN from a head that decays by e^-5 a token for a chunk.
    raise InputError(
      f'kda_implementation "tops": chunk_kda in {module.__file__} has no safe_gate, and without it a decay near the '
      f'bound gives NaN: install a later version of {_SOURCE}, or use kda_implementation "portable"'
    )
  return module


def tops_chunk_kda(
  q: Float32[Array, "B T H K"],
  k: Float32[Array, "B T H K"],
  v: Float[Array, "B T H V"],
  g: Float32[Array, "B T H K"],
  beta: Float[Array, "B T H"],
  state: Float[Array, "B H K V"],
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H K V"]]:
  """Returns each token's output and the state after the last one, by `chunk_kda` of tops.

  Normalisation, gate and pads are the caller's: only what versions with a `safe_gate` have in common is asked for.
  There is no gradient.

  Args:
    q: Normalised queries, not scaled.
    k: Normalised keys.
    v: Values.
    g: Log decay, natural log, in [-5, 0].
    beta: Learning rate of the delta rule.
    state: What the tokens before left behind.
  """
  length = q.shape[1]
  tail = -length % _CHUNK  # its keys, decays and rates are 0, so it changes nothing
  tokens = [jnp.pad(x.astype(jnp.float32), ((0, 0), (0, tail), *((0, 0),) * (x.ndim - 2))) for x in (q, k, v, g, beta)]
  # Without its custom gradient, whose wrapper makes tracers of the flags in some versions: forward only.
  o, after = inspect.unwrap(tops_kda().chunk_kda)(
    *tokens,
    scale=q.shape[-1] ** -0.5,
    initial_state=state.astype(jnp.float32),
    output_final_state=True,
    safe_gate=True,
    chunk_size=_CHUNK,
  )
  return o[:, :length].astype(jnp.float32), after.astype(jnp.float32)
