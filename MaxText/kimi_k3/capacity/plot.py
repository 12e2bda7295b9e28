"""Memory of one device by context and batch, as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

from kimi_k3.capacity.plan import Arithmetic, Facts, Setup
from kimi_k3.errors import InputError

_GIB = 2**30
_SHORTEST = 1024  # tokens
_MOST_BATCHES = 6


def check_matplotlib() -> None:
  """Raises InputError without matplotlib: before the compiling, not after it."""
  try:
    import matplotlib  # noqa: F401
  except ImportError as error:
    raise InputError("--plot: no matplotlib found: pip install 'maxtext-kimi-k3[plot]'") from error


def lines(setup: Setup, batches: Sequence[int]) -> dict[int, list[tuple[int, float]]]:
  """Returns (context, GiB on one device) of a decoding step by arithmetic, for each batch.

  A batch that the mesh does not divide is left out.
  """
  found = {}
  for batch in batches:
    arithmetic = Arithmetic(setup)
    try:
      points = [(context, arithmetic.decode(batch, context)["total_bytes"] / _GIB) for context in _contexts(setup)]
    except InputError:
      continue
    found[batch] = points
  return found


def batches_of(setup: Setup, programs: Mapping[str, Facts]) -> list[int]:
  """Returns the batches to draw: the planned one, and others by fours."""
  planned = [programs["decode"]["batch"]] if "decode" in programs else []
  rows = setup.cuts.size(setup.cuts.rows)
  return sorted({*planned, *(rows * 4**power for power in range(_MOST_BATCHES - 1))})


def _contexts(setup: Setup) -> Iterator[int]:
  context, most = _SHORTEST, setup.config.max_position_embeddings
  while context < most:
    yield context
    context *= 2
  yield most


def _short(tokens: int) -> str:
  for power, unit in ((20, "M"), (10, "K")):
    if tokens % 2**power == 0:
      return f"{tokens >> power}{unit}"
  return str(tokens)


def draw(file: BinaryIO, setup: Setup, programs: Mapping[str, Facts], *, reserve_bytes: int) -> None:
  """Writes a PNG: a line for each batch, the device's limit, and what was planned as points."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.add_subplot()
  limit = setup.topology.limit_bytes / _GIB
  for batch, points in lines(setup, batches_of(setup, programs)).items():
    axes.plot(*zip(*points, strict=True), marker=".", label=f"{batch} rows")
  axes.axhline(limit, color="black", label=f"limit, {limit:.2f} GiB")
  axes.axhline(
    limit - reserve_bytes / _GIB, color="black", linestyle=":", label=f"with {reserve_bytes / _GIB:g} GiB in reserve"
  )
  for name, facts in programs.items():
    context = facts["context"] if name == "decode" else facts["length"]
    how = "arithmetic" if facts["estimated"] else "compiled"
    axes.plot([context], [facts["total_bytes"] / _GIB], "*", markersize=14, label=f"{name}, {how}")
  axes.set_xscale("log", base=2)
  ticks = list(_contexts(setup))
  axes.set_xticks(ticks, [_short(tick) for tick in ticks])
  points = [facts["total_bytes"] / _GIB for facts in programs.values()]
  axes.set_ylim(0, max(limit * 1.4, *(1.1 * point for point in points), 0.0))
  axes.set_xlabel("tokens of context in each row")
  axes.set_ylabel("GiB on one device")
  mesh = ", ".join(f"{axis} {size}" for axis, size in setup.sizes.items())
  slices = f"{setup.topology.slices} x " if setup.topology.slices > 1 else ""
  axes.set_title(
    f"{setup.config.num_layers} layers, decoding on {slices}{setup.topology.name}, mesh {mesh}; lines by arithmetic"
  )
  axes.legend(loc="lower left")
  axes.grid(alpha=0.3)
  figure.savefig(file, format="png")
