"""Results of benchmarks as one Markdown page, with plots beside it.

    python benchmarks/report.py RESULTS_DIR --out PAGE.md

Reads every *.json in the directory; a file that is no result of these benchmarks is an error, as it would be missed
otherwise. Exit codes: 0 done; 2 bad input, in one line.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
from results import SCHEMA, machine_line, shown

from kimi_k3.cli.inputs import check_writable, write_whole
from kimi_k3.cli.main import Parser
from kimi_k3.errors import InputError

Result = Mapping[str, Any]
KINDS = ("benchmark", "serving")
# What a result must have; of `results`, every row.
_FIELDS = {
  "benchmark": {"subject": str, "preset": str, "environment": dict, "roof": dict, "results": list, "ratios": list,
                "absent": list, "refused": list, "notes": list, "peak_memory": dict},
  "serving": {"subject": str, "preset": str, "environment": dict, "results": list, "refused": list},
}  # fmt: skip
_ROWS = {
  "benchmark": {"workload": str, "name": str, "axes": dict, "seconds": dict},
  "serving": {"workload": str, "load": dict, "output_tokens_per_second": (int, float), "peak_memory": dict},
}
_SHARES = ("p50", "p90", "p99")
_LATENCIES = ("ttft", "tpot", "itl", "end_to_end")
_SPREAD = ("median", "p10", "p90")
_ENVIRONMENT = ("date", "platform", "device", "devices", "cpu", "cores", "load", "versions", "commit")


def main(argv: Sequence[str]) -> int:
  """Writes the page."""
  parser = Parser(description=__doc__)
  parser.add_argument("results", metavar="RESULTS_DIR", type=Path, help="holds the *.json of benchmarks")
  parser.add_argument("--out", metavar="PAGE.md", required=True, help="the page; its plots are PAGE-*.svg beside it")
  parser.add_argument("--title", default="Benchmarks", help="first line of the page (default: %(default)s)")
  args = parser.parse_args(argv)
  check_writable(args.out)
  found = read_results(args.results)
  page = Path(args.out)
  pictures = draw_all(found, page)
  text = render(found, pictures, args.title)
  write_whole(args.out, lambda file: file.write(text.encode()))
  print(f"{page}: {len(found)} results, {len(pictures)} plots")
  return 0


def read_results(directory: Path) -> list[Result]:
  """Returns the results of a directory by file name.

  Raises:
    InputError: if there are none, or a file is no result, saying what is wrong with it.
  """
  if not directory.is_dir():
    raise InputError(f"{directory}: no such directory, expected one with the *.json of benchmarks")
  paths = sorted(directory.glob("*.json"))
  if not paths:
    raise InputError(f"{directory}: no *.json in it: run a benchmark with --out {directory}/NAME.json")
  return [read_result(path) for path in paths]


def read_result(path: Path) -> Result:
  """Returns one result. Raises InputError, naming the file and the field, if it is none."""
  try:
    result = json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise InputError(f"{path}: cannot be read: {error.strerror}") from error
  except (ValueError, RecursionError) as error:
    raise InputError(f"{path}: not JSON: {error}") from error
  if not isinstance(result, dict) or result.get("schema") != SCHEMA or result.get("kind") not in KINDS:
    found = {key: result.get(key) for key in ("schema", "kind")} if isinstance(result, dict) else type(result).__name__
    raise InputError(f"{path}: found {found}, expected schema {SCHEMA} and a kind of {', '.join(KINDS)}: take it away")
  kind = result["kind"]
  _check_fields(path, "", result, _FIELDS[kind])
  if missing := [name for name in _ENVIRONMENT if name not in result["environment"]]:
    raise InputError(f"{path}: environment has no {', '.join(missing)}")
  for i, row in enumerate(result["results"]):
    if not isinstance(row, dict):
      raise InputError(f"{path}: results[{i}] is {type(row).__name__}, expected an object")
    _check_fields(path, f"results[{i}].", row, _ROWS[kind])
    spreads = [row["seconds"]] if kind == "benchmark" else []
    for spread in spreads:
      for name in _SPREAD:
        value = spread.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
          raise InputError(f"{path}: results[{i}].seconds.{name} is {value!r}, expected a time above 0")
  return result


def _check_fields(path: Path, where: str, found: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
  for name, kind in fields.items():
    if name not in found:
      raise InputError(f"{path}: {where}{name} is missing")
    if not isinstance(found[name], kind) or isinstance(found[name], bool):
      raise InputError(f"{path}: {where}{name} is {type(found[name]).__name__}, expected another type")


def render(found: Sequence[Result], pictures: Sequence[tuple[str, Path]], title: str) -> str:
  """Returns the page."""
  parts = [f"# {title}", warning(found), machines(found)]
  parts += [f"## {caption}\n\n![{caption}]({path.name})" for caption, path in pictures]
  parts += [benchmark_section(one) for one in found if one["kind"] == "benchmark"]
  if served := [one for one in found if one["kind"] == "serving"]:
    parts.append(serving_section(served))
  return "\n\n".join(part for part in parts if part) + "\n"


def warning(found: Sequence[Result]) -> str:
  """Returns what a reader must know who takes figures of a CPU for more than they are."""
  if any(one["environment"]["platform"] != "cpu" for one in found):
    return ""
  return (
    "**Measured on a CPU whose cores are shared with other work, at sizes of a model of 3 M parameters.** The figures "
    "show that the benchmarks run and what they print. They say nothing about K3 on a TPU. Ratios are each of one run, "
    "taken in turns, and absolute times mean little."
  )


def machines(found: Sequence[Result]) -> str:
  """Returns a table of what each result was measured on, with the versions once for each set of them."""
  rows = []
  for one in found:
    env = one["environment"]
    where = machine_line(one) if "roof" in one else f"{env['devices']} x {env['device']}, load {env['load']}"
    rows.append((one["subject"], one["preset"], env["date"], short(env["commit"]), where))
  lines = [table(("subject", "preset", "date", "commit", "machine"), rows)]
  versions = {", ".join(f"{k} {v or 'none'}" for k, v in one["environment"]["versions"].items()) for one in found}
  lines += [f"Versions: {text}." for text in sorted(versions)]
  return "\n\n".join(lines)


def short(commit: str | None) -> str:
  """Returns the first digits of a commit, with the sign of changed files."""
  return "unknown" if commit is None else commit[:12] + ("+" if commit.endswith("+") else "")


def benchmark_section(result: Result) -> str:
  """Returns the tables of one benchmark."""
  lines = [f"## {result['subject']}, preset {result['preset']}"]
  rows = []
  for row in result["results"]:
    bound, ratio = row.get("bound_seconds"), row.get("ratio_to_bound")
    speed = row.get("tokens_per_second")
    rows.append((
      row["workload"], row["name"], *(shown(row["seconds"][name]) for name in _SPREAD),
      "" if speed is None else f"{speed:.4g}", "" if not row.get("padding") else str(row["padding"]),
      "" if bound is None else f"{shown(bound)} ({row['bound_by']})", "" if ratio is None else f"{ratio:.3g}",
    ))  # fmt: skip
  if rows:
    header = ("workload", "name", "median", "p10", "p90", "tok/s", "pads", "bound", "median / bound")
    lines.append(table(header, rows))
  ratios = [
    (one["workload"], one["name"], one["against"], f"{one['speed_up']['median']:.2f}",
     f"{one['speed_up']['p10']:.2f} to {one['speed_up']['p90']:.2f}", str(one["pairs"]))
    for one in result["ratios"]
  ]  # fmt: skip
  if ratios:
    lines.append(table(("workload", "name", "times as fast as", "median", "p10 to p90", "pairs"), ratios))
  for kind, heading in (("absent", "Absent"), ("refused", "Refused")):
    if result[kind]:
      items = [f"- {one.get('name') or one.get('workload')}: {one['reason']}" for one in result[kind]]
      lines.append("\n".join([f"{heading}:", "", *items]))
  lines += [f"Note: {text}." for text in result["notes"]]
  memory = result["peak_memory"]
  lines.append(f"Peak memory of {memory['of']}: {memory['bytes'] / 2**30:.2f} GiB.")
  return "\n\n".join(lines)


def serving_section(found: Sequence[Result]) -> str:
  """Returns throughput and latencies of all loads."""
  speeds, latencies = [], []
  for row in (row for one in found for row in one["results"]):
    load, memory = row["load"], row["peak_memory"]
    speeds.append((
      row["workload"], str(load["concurrency"]), str(row["rows"]), str(row["failed_rows"]), str(row["prompt_tokens"]),
      str(row["output_tokens"]), f"{row['output_tokens_per_second']:.4g}",
      f"{row['output_tokens_per_second_per_chip']:.4g}", shown(row["load_seconds"]), shown(row["compile_seconds"]),
      f"{memory['bytes'] / 2**30:.2f} GiB of {memory['of']}",
    ))  # fmt: skip
    for name in _LATENCIES:
      spread = row.get(f"{name}_seconds")
      if spread is not None:
        latencies.append((row["workload"], name, *map(shown, (spread[share] for share in _SHARES))))
  counts = ("workload", "slots", "rows", "failed", "tokens in", "out")
  header = (*counts, "tok/s", "tok/s a chip", "load", "compile", "peak memory")
  lines = ["## Serving", table(header, speeds), table(("workload", "latency", *_SHARES), latencies)]
  refused = [f"- {row['workload']}: {row['reason']}" for one in found for row in one["refused"]]
  return "\n\n".join([*lines, *(["Refused:\n\n" + "\n".join(refused)] if refused else [])])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Returns a Markdown table."""
  body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
  return "\n".join(["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *body])


Lines = Mapping[str, Sequence[tuple[float, float, float, float]]]


def lines_over(found: Iterable[Result], axis: str) -> Lines:
  """Returns (x, median, p10, p90) in ms over an axis, by label: of points that differ in it alone, two or more."""
  groups: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
  for one in found:
    for row in one["results"] if one["kind"] == "benchmark" else ():
      axes = row["axes"]
      if axis not in axes:
        continue
      others = ", ".join(f"{key} {value}" for key, value in axes.items() if key != axis)
      label = f"{one['subject']} {row['name']}" + (f" ({others})" if others else "")
      point = tuple(1e3 * row["seconds"][name] for name in _SPREAD)
      groups[label].append((float(axes[axis]), *point))
  return {label: sorted(points) for label, points in groups.items() if len({x for x, *_ in points}) > 1}


def draw_all(found: Sequence[Result], page: Path) -> list[tuple[str, Path]]:
  """Writes the plots that the results have points for, and returns their captions and files."""
  pictures = []
  for name, caption, label, axis in (
    ("batch", "Latency by rows", "rows (or tokens of a step)", "batch"),
    ("context", "Latency by context", "tokens of context", "context"),
  ):
    if lines := lines_over(found, axis):
      pictures.append((caption, _figure(page, name, lambda axes, x=lines, y=label: _draw_lines(axes, x, y))))
  if bars := memory_bars(found):
    pictures.append(("Peak memory", _figure(page, "memory", lambda axes: _draw_memory(axes, bars))))
  if points := roofline_points(found):
    pictures.append(("Roofline", _figure(page, "roofline", lambda axes: _draw_roofline(axes, points))))
  return pictures


def memory_bars(found: Iterable[Result]) -> dict[str, float]:
  """Returns GiB by label."""
  bars = {}
  for one in found:
    if one["kind"] == "benchmark":
      bars[one["subject"]] = one["peak_memory"]["bytes"] / 2**30
    for row in one["results"] if one["kind"] == "serving" else ():
      bars[row["workload"]] = row["peak_memory"]["bytes"] / 2**30
  return bars


def roofline_points(found: Iterable[Result]) -> dict[str, list[tuple[float, float]]]:
  """Returns (bound, median) in seconds by subject."""
  points: dict[str, list[tuple[float, float]]] = defaultdict(list)
  for one in found:
    for row in one["results"] if one["kind"] == "benchmark" else ():
      if row.get("bound_seconds"):
        points[one["subject"]].append((row["bound_seconds"], row["seconds"]["median"]))
  return dict(points)


def _figure(page: Path, name: str, draw: Callable[[Any], None]) -> Path:
  import matplotlib as mpl
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  # No date and no random ids, and text as text: the same results give the same bytes.
  with mpl.rc_context({"svg.hashsalt": "kimi-k3", "svg.fonttype": "none"}):
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure.add_subplot())
    path = page.with_name(f"{page.stem}-{name}.svg")
    write_whole(str(path), lambda file: figure.savefig(file, format="svg", metadata={"Date": None}))
  return path


def _draw_lines(axes: Any, lines: Lines, label: str) -> None:
  for name, points in lines.items():
    x, median, p10, p90 = zip(*points, strict=True)
    errors = [[m - low for m, low in zip(median, p10, strict=True)], [h - m for m, h in zip(median, p90, strict=True)]]
    axes.errorbar(x, median, yerr=errors, marker=".", capsize=2, label=name)
  axes.set_xscale("log", base=2)
  axes.set_yscale("log")
  axes.set_xlabel(label)
  axes.set_ylabel("ms, median with p10 to p90")
  axes.grid(alpha=0.3)
  axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_memory(axes: Any, bars: Mapping[str, float]) -> None:
  axes.barh(list(bars), list(bars.values()))
  axes.set_xlabel("GiB: of a device where it tells, else of the process")
  axes.grid(alpha=0.3, axis="x")


def _draw_roofline(axes: Any, points: Mapping[str, Sequence[tuple[float, float]]]) -> None:
  for name, pairs in points.items():
    axes.plot(*zip(*pairs, strict=True), ".", label=name)
  least, most = (pick(bound for pairs in points.values() for bound, _ in pairs) for pick in (min, max))
  axes.plot([least, most], [least, most], color="black", label="the bound")
  axes.set_xscale("log")
  axes.set_yscale("log")
  axes.set_xlabel("bound, s")
  axes.set_ylabel("median, s")
  axes.grid(alpha=0.3)
  axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


if __name__ == "__main__":
  harness.exit_with(main, __file__)
