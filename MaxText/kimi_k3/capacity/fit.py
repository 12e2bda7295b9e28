"""The largest batch, context and chunk that fit, found by compiling; and what would make room, by arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kimi_k3.capacity.plan import Arithmetic, Facts, Planner, Setup, engine_bytes
from kimi_k3.capacity.topologies import default_mesh, larger_topologies
from kimi_k3.errors import InputError
from kimi_k3.spmd.cuts import Cuts

RESERVE_BYTES = 4 * 2**30  # for what is beside a step: a prompt's caches, a chunk's temporaries, the runtime
CONTEXT_STEP = 1024  # tokens: a context is found to this
CHUNK_STEP = 2048
MAX_COMPILES = 24  # of one search; two are usual
_MOST_ROWS = 2**20
_GUESSES = 5  # along a straight line, before the rest is halved


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

  start, slope = _start(total, budget_bytes, step, _MOST_ROWS)
  asking = planner.changed(cache_cut=cut)
  return search(
    lambda batch: asking.decode(batch, context),
    start,
    step=step,
    most=_MOST_ROWS,
    budget_bytes=budget_bytes,
    slope=slope,
  )


def largest_context(planner: Planner, setup: Setup, batch: int, budget_bytes: int) -> Largest:
  """Returns the longest rows of which `batch` decode together."""
  most = setup.config.max_position_embeddings
  step = min(CONTEXT_STEP, most)

  def total(context: int) -> int:
    return Arithmetic(setup).decode(batch, context)["total_bytes"]

  start, slope = _start(total, budget_bytes, step, most)
  return search(
    lambda context: planner.decode(batch, context), start, step=step, most=most, budget_bytes=budget_bytes, slope=slope
  )


def largest_chunk(planner: Planner, setup: Setup, budget_bytes: int) -> Largest:
  """Returns the most tokens of a prompt that can be run at a time."""
  whole = dataclasses.replace(setup, prefill_chunk=None)
  most = setup.config.max_position_embeddings
  parts = setup.cuts.size(setup.cuts.rows + setup.cuts.heads) if setup.prefill_cut == "sequence" else 1
  step = math.lcm(parts, min(CHUNK_STEP, most))

  def total(tokens: int) -> int:
    return Arithmetic(whole).prefill(tokens)["total_bytes"]

  start, slope = _start(total, budget_bytes, step, most)
  asking = planner.changed(prefill_chunk=None)
  return search(
    asking.prefill,
    start,
    step=step,
    most=most,
    budget_bytes=budget_bytes,
    slope=slope,
  )


def _start(total: Callable[[int], int], budget_bytes: int, step: int, most: int) -> tuple[int, float]:
  """The largest size that fits by arithmetic, at least one step, and what one more costs from there on."""
  start = max(step, largest_size(lambda size: total(size) <= budget_bytes, most, step))
  far = min(most // step * step, start + 64 * step)
  return start, max((total(far) - total(start)) / max(far - start, 1), 1e-3)


def largest_size(fits: Callable[[int], bool], most: int, step: int) -> int:
  """Returns the largest multiple of the step, at most `most`, that fits; 0 if none does. What is larger takes more."""
  low, high = 0, most // step
  while low < high:
    middle = (low + high + 1) // 2
    low, high = (middle, high) if fits(middle * step) else (low, middle - 1)
  return low * step


Asked = Mapping[str, tuple[int, ...]]  # "decode": (batch, context), "prefill": (tokens,): one of them or both


def remedies(setup: Setup, asked: Asked) -> list[str]:
  """Returns what would make programs fit that do not, each alone and both in one engine, by arithmetic.

  Each is one change to what was asked for, the largest of its kind that fits, with nothing to spare.

  Args:
    setup: In which they do not fit.
    asked: Their sizes.
  """
  return [*_smaller(setup, asked), *_settings(setup, asked), *_more_devices(setup, asked)]


def fit_together(setup: Setup, asked: Asked) -> bool:
  """Whether the programs fit by arithmetic, each alone and both in one engine; not if one cannot be made."""
  arithmetic, limit = Arithmetic(setup), setup.topology.limit_bytes
  try:
    programs = {name: getattr(arithmetic, name)(*size) for name, size in asked.items()}
  except InputError:
    return False
  both = engine_bytes(programs)
  return all(facts["fits"] for facts in programs.values()) and (both is None or both <= limit)


def _smaller(setup: Setup, asked: Asked) -> Iterator[str]:
  if "decode" in asked:
    batch, context = asked["decode"]
    rows = largest_size(
      lambda n: fit_together(setup, {**asked, "decode": (n, context)}), batch - 1, _row_step(setup, batch)
    )
    if rows:
      yield f"{rows} rows of {context} tokens"
    tokens = largest_size(lambda n: fit_together(setup, {**asked, "decode": (batch, n)}), context - 1, 1024)
    if tokens:
      yield f"{batch} rows of {tokens} tokens"
  if "prefill" in asked:
    length = asked["prefill"][0]

    def in_chunks(tokens: int) -> bool:
      return fit_together(dataclasses.replace(setup, prefill_chunk=tokens), asked)

    if tokens := largest_size(in_chunks, min(length, setup.prefill_chunk or length) - 1, CHUNK_STEP):
      yield f"prefill_chunk={tokens}, so many tokens of a prompt at a time"


def _row_step(setup: Setup, batch: int) -> int:
  """Rows that the mesh takes at a time; where the config names no cut of the latents, any cut will do."""
  by_batch = setup.cache_cut is not None and setup.cut_of(batch) == "batch"
  return setup.cuts.size(setup.cuts.rows + (setup.cuts.heads if by_batch else ()))


def _settings(setup: Setup, asked: Asked) -> Iterator[str]:
  cuts = setup.cuts
  changes: list[tuple[str, Setup]] = []
  narrow = dataclasses.replace(cuts, latent=cuts.width)
  if not cuts.latent and cuts.width and setup.config.expert_latent_dim is not None and not has_rules(setup):
    rule = f"partition_rules='{{latent: [{', '.join(cuts.width)}]}}'"
    changes.append((rule, setup.at(cuts=narrow)))
  if setup.latent_bytes > 1 and "decode" in asked and setup.topology.kind == "tpu7x":
    changes.append(("mla_cache_dtype=float8_e4m3fn", setup.at(latent_dtype="float8_e4m3fn")))
  if len(changes) == 2:
    both = f"{changes[0][0]} with {changes[1][0]}"
    changes.append((both, setup.at(cuts=narrow, latent_dtype="float8_e4m3fn")))
  for name, changed in changes:
    if fit_together(changed, asked):
      yield name
      return


def has_rules(setup: Setup) -> bool:
  """Whether the config changes what the mesh axes cut."""
  return setup.cuts != Cuts.of(setup.sizes)


def _more_devices(setup: Setup, asked: Asked) -> Iterator[str]:
  for topology in larger_topologies(setup.topology):
    sizes = default_mesh(setup.config, topology)
    cuts = Cuts.of(sizes)
    larger = dataclasses.replace(setup.at(cuts=cuts), topology=topology, sizes=sizes)
    if fit_together(larger, asked):
      mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items())
      slices = f" --slices {topology.slices}" if topology.slices > 1 else ""
      without = " without partition_rules" if has_rules(setup) else ""
      yield f"--topology {topology.name}{slices} --mesh {mesh}{without} ({topology.chips} chips)"
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
