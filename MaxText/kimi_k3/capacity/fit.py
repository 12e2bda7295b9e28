"""The largest batch, context and chunk that fit, found by compiling; and what would make room, by arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from kimi_k3.capacity.plan import Arithmetic, Facts, Planner, Setup
from kimi_k3.capacity.topologies import default_mesh, larger_topologies
from kimi_k3.errors import InputError
from kimi_k3.spmd.cuts import Cuts

RESERVE_BYTES = 4 * 2**30  # for what is beside a step: a prompt's caches, a chunk's temporaries, the runtime
CONTEXT_STEP = 8192  # tokens: a context is found to this
CHUNK_STEP = 2048
MAX_COMPILES = 24  # of one search; two are usual
_GUESSES = 5  # along a straight line, before the rest is halved
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Largest:
  """The largest size that fits.

  Attributes:
    size: A multiple of `step`; 0 if not even one step fits.
    facts: Of the program of that size; None if none fits.
    next_size: The next one, which does not fit; None if `size` is the largest that the model has.
    next_bytes: Its total on one device.
    programs: How many were asked about.
  """

  size: int
  facts: Facts | None
  next_size: int | None
  next_bytes: int | None
  programs: int


def search(
  ask: Callable[[int], Facts], start: int, *, step: int, most: int, budget_bytes: int, slope: float
) -> Largest:
  """Returns the largest multiple of `step` whose program takes no more than the budget.

  A size that fits and its neighbour that does not are both asked about: nothing is concluded from a slope.

  Args:
    ask: Facts of the program of a size.
    start: Where to begin: near the answer, by arithmetic.
    step: Of the sizes.
    most: Largest size of all.
    budget_bytes: For one device.
    slope: Bytes that one more of the size costs, roughly.

  Raises:
    InputError: if MAX_COMPILES programs do not find it.
  """
  last = most // step * step
  size = min(max(start // step * step, step), last)
  fits: tuple[int, Facts] | None = None
  fails: tuple[int, int] | None = None
  for asked in range(1, MAX_COMPILES + 1):
    facts = ask(size)
    total = facts["total_bytes"]
    if facts["fits"] and total <= budget_bytes:
      fits = (size, facts)
    else:
      fails = (size, total)
    if fits and fits[0] == last:
      return Largest(last, fits[1], None, None, asked)
    if fails and fails[0] == step:
      return Largest(0, None, step, fails[1], asked)
    if fits and fails and fails[0] - fits[0] == step:
      return Largest(*fits, *fails, asked)
    if fits and fails and asked > _GUESSES:  # no straight line: halve
      size = (fits[0] + fails[0]) // 2 // step * step
      continue
    if fits and fails:
      slope = (fails[1] - fits[1]["total_bytes"]) / (fails[0] - fits[0])
    away = math.floor((budget_bytes - total) / max(slope, 1e-9) / step)
    away = max(1, away) if total <= budget_bytes else min(-1, away)
    if not (fits and fails):
      away *= 2 ** max(0, asked - 2)  # the slope is too steep: further each time
    guess = size + step * away
    size = min(max(guess, fits[0] + step if fits else step), fails[0] - step if fails else last)
  raise InputError(f"--fit: {MAX_COMPILES} programs do not tell the largest size: give another --decode or --prefill")


def largest_batch(planner: Planner, setup: Setup, context: int, budget_bytes: int) -> Largest:
  """Returns the most rows of `context` tokens that decode together."""
  cut = setup.cut_of(1)  # by sequence where the config does not say: it takes any number of rows
  axes = setup.cuts.rows + (setup.cuts.heads if cut == "batch" else ())
  step = setup.cuts.size(axes)
  fixed = setup.at(cache_cut=cut)

  def total(batch: int) -> int:
    return Arithmetic(fixed).decode(batch, context)["total_bytes"]

  slope = (total(2 * step) - total(step)) / step
  start = step + int((budget_bytes - total(step)) / slope)
  asking = planner.changed(cache_cut=cut)
  return search(
    lambda batch: asking.decode(batch, context), start, step=step, most=2**20, budget_bytes=budget_bytes, slope=slope
  )


def largest_context(planner: Planner, setup: Setup, batch: int, budget_bytes: int) -> Largest:
  """Returns the longest rows of which `batch` decode together."""
  most = setup.config.max_position_embeddings
  step = min(CONTEXT_STEP, most)

  def total(context: int) -> int:
    return Arithmetic(setup).decode(batch, context)["total_bytes"]

  slope = max((total(2 * step) - total(step)) / step, 1e-9)
  start = step + int((budget_bytes - total(step)) / slope)
  return search(
    lambda context: planner.decode(batch, context), start, step=step, most=most, budget_bytes=budget_bytes, slope=slope
  )


def largest_chunk(planner: Planner, setup: Setup, budget_bytes: int) -> Largest:
  """Returns the most tokens of a prompt that can be run at a time."""
  whole = dataclasses.replace(setup, prefill_chunk=None)
  most = setup.config.max_position_embeddings
  parts = setup.cuts.size(setup.cuts.rows + setup.cuts.heads) if setup.prefill_cut == "sequence" else 1
  step = math.lcm(parts, min(CHUNK_STEP, most))
  arithmetic = Arithmetic(whole)
  low, high = 0, most // step
  while low < high:  # temporaries are no straight line
    middle = (low + high + 1) // 2
    low, high = (
      (middle, high) if arithmetic.prefill(middle * step)["total_bytes"] <= budget_bytes else (low, middle - 1)
    )
  start = max(low, 1) * step
  slope = (arithmetic.prefill(start + step)["total_bytes"] - arithmetic.prefill(start)["total_bytes"]) / step
  asking = planner.changed(prefill_chunk=None)
  return search(
    asking.prefill,
    start,
    step=step,
    most=most,
    budget_bytes=budget_bytes,
    slope=max(slope, 1e-9),
  )


def remedies(setup: Setup, program: str, size: tuple[int, ...]) -> list[str]:
  """Returns what would make a program fit that does not, by arithmetic: the first of each kind of change that does.

  Args:
    setup: In which it does not fit.
    program: "decode" or "prefill".
    size: (batch, context), or (tokens,).
  """
  found = [*_smaller(setup, program, size), *_settings(setup, program, size), *_more_devices(setup, program, size)]
  return found[: _SHOWN + 1]


def _total(setup: Setup, program: str, size: tuple[int, ...]) -> int | None:
  """Bytes of a program by arithmetic; None where it cannot be made."""
  try:
    arithmetic = Arithmetic(setup)
    facts = arithmetic.decode(*size) if program == "decode" else arithmetic.prefill(*size)
  except InputError:
    return None
  return facts["total_bytes"]


def _fits(setup: Setup, program: str, size: tuple[int, ...]) -> bool:
  total = _total(setup, program, size)
  return total is not None and total <= setup.topology.limit_bytes


def _smaller(setup: Setup, program: str, size: tuple[int, ...]) -> Iterator[str]:
  if program == "prefill":

    def in_chunks(tokens: int) -> bool:
      return _fits(dataclasses.replace(setup, prefill_chunk=tokens), program, size)

    if tokens := _largest(in_chunks, min(size[0], setup.prefill_chunk or size[0]), CHUNK_STEP):
      yield f"prefill_chunk={tokens}, so many tokens at a time"
    return
  batch, context = size
  if rows := _largest(lambda n: _fits(setup, program, (n, context)), batch, _row_step(setup, batch)):
    yield f"{rows} rows of {context} tokens"
  if tokens := _largest(lambda n: _fits(setup, program, (batch, n)), context, min(1024, context)):
    yield f"{batch} rows of {tokens} tokens"


def _row_step(setup: Setup, batch: int) -> int:
  """Rows that the mesh takes at a time; where the config names no cut of the latents, any cut will do."""
  by_batch = setup.cache_cut is not None and setup.cut_of(batch) == "batch"
  return setup.cuts.size(setup.cuts.rows + (setup.cuts.heads if by_batch else ()))


def _largest(fits: Callable[[int], bool], below: int, step: int) -> int:
  """The largest multiple of the step, less than `below`, that fits; 0 if none does."""
  low, high = 0, (below - 1) // step
  while low < high:
    middle = (low + high + 1) // 2
    low, high = (middle, high) if fits(middle * step) else (low, middle - 1)
  return low * step


def _settings(setup: Setup, program: str, size: tuple[int, ...]) -> Iterator[str]:
  cuts = setup.cuts
  changes: list[tuple[str, Setup]] = []
  narrow = dataclasses.replace(cuts, latent=cuts.width)
  if not cuts.latent and cuts.width and setup.config.expert_latent_dim is not None:
    rule = f"partition_rules='{{latent: [{', '.join(cuts.width)}]}}'"
    changes.append((rule, setup.at(cuts=narrow)))
  if setup.latent_bytes > 1:
    changes.append(("mla_cache_dtype=float8_e4m3fn", setup.at(latent_dtype="float8_e4m3fn")))
  if len(changes) == 2:
    both = f"{changes[0][0]} with {changes[1][0]}"
    changes.append((both, setup.at(cuts=narrow, latent_dtype="float8_e4m3fn")))
  for name, changed in changes:
    if _fits(changed, program, size):
      yield name
      return


def _more_devices(setup: Setup, program: str, size: tuple[int, ...]) -> Iterator[str]:
  for topology in larger_topologies(setup.topology):
    try:
      sizes = default_mesh(setup.config, topology)
      cuts = Cuts.of(sizes)
      cuts.check_fits(setup.config)
    except InputError:
      continue
    larger = dataclasses.replace(setup.at(cuts=cuts), topology=topology, sizes=sizes, cache_cut=None)
    if _fits(larger, program, size):
      yield f"--topology {topology.name} ({topology.chips} chips)"
      return


def as_json(found: Largest, **fixed: Any) -> dict[str, Any]:
  """Returns a result of a search as plain values, with what was fixed in it."""
  total = None if found.facts is None else found.facts["total_bytes"]
  return fixed | {
    "largest": found.size,
    "total_bytes": total,
    "next": found.next_size,
    "next_total_bytes": found.next_bytes,
    "programs_compiled": found.programs,
  }
