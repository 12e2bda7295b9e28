"""What stands between a mistake and a figure: each check refuses a measurement that is not what it says.

docs/benchmarks.md lists them with the fault that each is there for; tests/benchmarks_test.py plants these faults.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import statistics
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any

_COMPARED_BYTES = 64 * 2**20  # 64 MiB of each result, the first ones
# A fence behind a call waits for what the call has left running. Below 0.2 ms it is the noise of starting it.
_DRAIN_SECONDS = 2e-4
# XLA counts a product's FLOPs exactly, and the least that a definition takes leaves out what an implementation adds. So
# less than half of them means that a part of the work is not in the program.
_LEAST_WORK = 0.5


class Refused(Exception):
  """A measurement that is not what it claims to be: not awaited, compiled while timed, elided, pads counted."""


@dataclasses.dataclass(frozen=True)
class Work:
  """What one run of a program is worth: the least that its definition takes. `None` is what is not known.

  Attributes:
    tokens: Real ones. Pads are positions of arrays, and never counted.
    lengths: Real tokens of each row, where rows are padded: `tokens` is checked against them.
    hbm_bytes: Read and written.
    flops: Multiplications and additions.
  """

  tokens: int | None = None
  lengths: tuple[int, ...] | None = None
  hbm_bytes: float | None = None
  flops: float | None = None


def check_tokens(work: Work, counted: int | None = None, times: int = 1) -> None:
  """Raises Refused if tokens are claimed that are none: pads, or what no row has got.

  Args:
    work: What is claimed.
    counted: Tokens in the results, where these were looked at.
    times: How often the work was done for these results.
  """
  if work.lengths is not None and work.tokens != sum(work.lengths):
    raise Refused(
      f"{work.tokens} tokens counted, the rows hold {sum(work.lengths)} real ones: pads are no tokens, and none "
      "is left out"
    )
  if counted is not None and work.tokens is not None and counted != work.tokens * times:
    raise Refused(f"{work.tokens * times} tokens counted, {counted} are in the results: count what was made")


def await_results(results: Any) -> list[Any]:
  """Waits for every array in results and returns their leaves.

  Raises:
    Refused: if there is nothing to wait for, or something whose work may still be ahead.
  """
  import jax

  lazy = (Iterator, Awaitable, concurrent.futures.Future)
  if isinstance(results, lazy):
    raise Refused(f"not awaited: a call returned {type(results).__name__}, whose work may be ahead: return its results")
  leaves = jax.tree.leaves(results)
  if not leaves:
    raise Refused(f"not awaited: a call returned {results!r}, nothing to wait for: return every result it computes")
  for leaf in leaves:
    if callable(leaf) or isinstance(leaf, lazy):
      raise Refused(f"not awaited: a call returned {type(leaf).__name__}, whose work may be ahead: return its results")
  return list(jax.block_until_ready(leaves))


class Fence:
  """A tiny program on every device, started behind a call: it ends when what the call left running has ended."""

  def __init__(self) -> None:
    import jax
    import jax.numpy as jnp

    self._function = jax.jit(lambda x: x + 1)
    self._arrays = [jax.device_put(jnp.zeros(8), device) for device in jax.local_devices()]
    self.seconds()  # compiles
    self.at_rest = statistics.median(self.seconds() for _ in range(9))

  def seconds(self) -> float:
    """Runs it and returns how long that took."""
    import jax

    start = time.perf_counter()
    jax.block_until_ready([self._function(x) for x in self._arrays])
    return time.perf_counter() - start


def to_numpy(leaf: Any) -> Any:
  """Returns a leaf on the host; of a large one the first part, which is what results are compared by."""
  import numpy as np

  while getattr(leaf, "nbytes", 0) > _COMPARED_BYTES and leaf.ndim and leaf.shape[0] > 1:
    leaf = leaf[0]
  array = np.asarray(leaf)
  return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def check_compiled(compiled: Any, arguments: tuple[Any, ...], name: str, work: Work, times: int) -> None:
  """Raises Refused if the compiled program is not the one that was asked for.

  Each argument must be read, as one that is not belongs to work that was elided. The compiler's own count of FLOPs must
  be of the size that the workload states, where the compiler can count: not in loops, whose body it counts once, and
  not in calls of kernels and libraries.

  Args:
    compiled: JAX's object.
    arguments: It was lowered with, all of them kept.
    name: Of the implementation.
    work: Of one application.
    times: Applications in the program.
  """
  import jax

  text = compiled.as_text()
  leaves = jax.tree_util.tree_flatten_with_path(arguments)[0]
  if unread := sorted(set(range(len(leaves))) - read_arguments(text)):
    names = ", ".join(jax.tree_util.keystr(leaves[i][0]) for i in unread)
    raise Refused(f"elided: the compiled program of {name} does not read argument(s) {names}")
  cost = compiled.cost_analysis() or {}
  countable = not any(word in text for word in (" while(", " custom-call(", " conditional("))
  if countable and work.flops is not None:
    counted = cost.get("flops", 0.0) + cost.get("transcendentals", 0.0)
    if counted < _LEAST_WORK * work.flops * times:
      raise Refused(
        f"elided: the compiled program of {name} has {counted:.3g} FLOPs, the workload "
        f"{work.flops * times:.3g}: a part of it is not computed"
      )


def read_arguments(text: str) -> set[int]:
  """Returns the arguments that a compiled program reads, by number."""
  from kimi_k3.capacity import hlo

  program = hlo.parse(text)
  entry = program.computation(program.entry)
  return {i.index for i in entry.parameters if entry.users.get(i.name) or i.is_root}


def check_outputs(outputs: Sequence[Sequence[Any]], name: str) -> None:
  """Raises Refused if results are not finite, or are the same for other inputs: then nothing need be computed."""
  import numpy as np

  for leaf in outputs[0]:
    if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
      raise Refused(f"{name}: its results are not finite, which other hardware may compute at another speed")
  if all(np.array_equal(a, b) for a, b in zip(*outputs, strict=True)):
    raise Refused(f"elided: the results of {name} are the same for other inputs: they do not depend on them")


def check_agreement(found: Mapping[str, Sequence[Any]], reference: str, tolerance: float | None) -> dict[str, float]:
  """Returns how far each subject's results are from those of one, as a part of the largest; within the tolerance.

  Args:
    found: Name of a subject -> its results, on the host.
    reference: Name of the one that others are compared with.
    tolerance: None: they are not comparable.

  Raises:
    Refused: if one is further away: it computes something else, and its time means nothing.
  """
  import numpy as np

  if tolerance is None:
    return {}
  distances = {}
  for name, results in found.items():
    if name == reference:
      continue
    worst = 0.0
    for a, b in zip(found[reference], results, strict=True):
      if a.shape != b.shape:
        raise Refused(f"{name}: results {b.shape}, those of {reference} are {a.shape}")
      a, b = a.astype(np.float64), b.astype(np.float64)
      worst = max(worst, float(np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(a), initial=0.0), 1e-30)))
    if not worst <= tolerance:
      raise Refused(
        f"{name}: results differ from those of {reference} by {worst:.2g} of the largest, {tolerance:.2g} allowed: not "
        "the same operation"
      )
    distances[name] = worst
  return distances


def check_drained(name: str, called: Sequence[float], left: Sequence[float], fence: Fence) -> None:
  """Raises Refused if a device was still at work when calls had ended: something was not awaited.

  Args:
    name: Of the subject.
    called: Seconds of each call.
    left: Seconds of the fence behind each call.
    fence: It.
  """
  seconds, behind = statistics.median(called), statistics.median(left) - fence.at_rest
  if behind > max(_DRAIN_SECONDS, seconds / 2):
    raise Refused(
      f"not awaited: {name} ended after {seconds:.3g} s and left its device {behind:.3g} s of work: return every "
      "result it computes"
    )
