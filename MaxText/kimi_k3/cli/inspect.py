"""`kimi-k3 inspect`: what a checkpoint holds, from headers and metadata alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from kimi_k3.convert.audit import Count, OutputAudit, SourceAudit

DESCRIPTION = """\
Counts what a checkpoint holds, without reading the data of any tensor: tensors and bytes by dtype and by kind, layers,
packed pairs, what a conversion leaves out and by which rule, parameters, and whether `kimi-k3 convert` accepts it.
Where config.json has the sizes of Kimi K3, the counts are compared with those of the release.

DIR is a released checkpoint (config.json and *.safetensors) or what `kimi-k3 convert` made of one. Of a conversion its
data files must be there and as long as its index says; what is in them, only `kimi-k3 verify` reads.

Exit codes: 0 accepted; 1 refused by `convert`, or a conversion with faults (the audit is printed all the same); 2 DIR
is no checkpoint, is damaged or is unfinished.
"""
EPILOG = """\
examples:
  kimi-k3 inspect Kimi-K3/            is the download whole, is it the release, would it convert?
  kimi-k3 inspect k3-maxtext/         what it was made from, with which options
  kimi-k3 inspect Kimi-K3/ --json     one JSON object, sizes in bytes
"""
_SHOWN_FAULTS = 8
_NAME_WIDTH = 26  # of the first column


def add_parser(subparsers) -> argparse.ArgumentParser:
  """Adds the verb to the command line."""
  parser = subparsers.add_parser(
      "inspect", help="what a checkpoint holds, from its headers", description=DESCRIPTION, epilog=EPILOG,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )  # fmt: skip
  parser.add_argument("directory", metavar="DIR", help="a released checkpoint, or the OUT of a conversion")
  parser.add_argument("--json", action="store_true", help="print one JSON object (default: a table)")
  parser.set_defaults(run=run)
  return parser


def run(args: argparse.Namespace) -> int:
  """Prints the audit. Returns the exit code.

  Raises:
    InputError: if DIR is no checkpoint, is damaged or is unfinished.
  """
  from kimi_k3.convert import audit, index  # Late: --help must not wait for numpy.
  from kimi_k3.convert.progress import say

  if audit.is_output(args.directory):
    found = audit.audit_output(args.directory)
    _print(args, "conversion", found, _output_lines(found))
    return 1 if found.faults else 0
  with index.open_source(args.directory) as source:
    for note in source.notes:
      say(note)
    found = audit.audit_source(source)
  _print(args, "released checkpoint", found, _source_lines(found))
  return 1 if found.refused else 0


def _print(args: argparse.Namespace, what: str, found: Any, lines: Iterator[tuple[str, str]]) -> None:
  if args.json:
    print(json.dumps({"schema": 1, "what": what} | dataclasses.asdict(found)))
    return
  for name, value in lines:
    print(f"{name:<{_NAME_WIDTH}} {value}".rstrip())
  sys.stdout.flush()


def _source_lines(found: SourceAudit) -> Iterator[tuple[str, str]]:
  yield "released checkpoint", f"{found.directory}: {found.shards} shard(s), {_spelled(found.total)}"
  for dtype, count in found.by_dtype.items():
    yield f"  {dtype}", _spelled(count)
  for rule, count in found.skipped.items():
    yield f"  skipped, {rule}*", f"{_spelled(count)}: vision, not part of the text path"
  yield "kinds", ""
  for kind, count in found.by_kind.items():
    yield f"  {kind}", _spelled(count)
  if found.unknown:
    yield "  unknown among them", ", ".join(found.unknown)
  yield "layers", _layer_line(found.layers)
  yield "routed experts", ", ".join(f"{n} in {layers} layer(s)" for n, layers in found.experts.items()) or "none"
  modules = ", ".join(f"{module} {pairs:,}" for module, pairs in found.packed.items()) or "nothing"
  unpaired = f"; {found.unpaired} half pair(s)" if found.unpaired else ""
  yield "packed pairs", f"{found.packed_pairs:,}: {modules}{unpaired}"
  yield "float32", ", ".join(f"{kind} {n}" for kind, n in found.float32.items()) or "nothing"
  vision = f", and {found.vision_parameters:,} of vision" if found.vision_parameters else ""
  yield "parameters", f"{found.parameters:,}{vision}"
  if found.release is not None:
    yield "Kimi K3's sizes", "; ".join(found.release) or "equal to the release"
  if found.refused is not None:
    yield "convert", f"REFUSED: {found.refused}"
  else:
    yield "convert", f"accepted; scan: {found.fold}"


def _layer_line(layers: Mapping[str, Sequence[int]]) -> str:
  """As in `9 KDA, 4 MLA (3, 7, 11, 12), 1 dense (0), 12 with experts`, numbers from 0."""
  words = []
  for kind, word in (("KDA", "KDA"), ("MLA", "MLA"), ("dense", "dense"), ("experts", "with experts")):
    numbers = layers[kind]
    named = f" ({', '.join(map(str, numbers))})" if kind in ("MLA", "dense") and numbers else ""
    words.append(f"{len(numbers)} {word}{named}")
  return ", ".join(words)


def _output_lines(found: OutputAudit) -> Iterator[tuple[str, str]]:
  yield "conversion", f"{found.directory}: {_spelled(found.total, 'leaf', 'leaves')}"
  for dtype, count in found.by_dtype.items():
    yield f"  {dtype}", _spelled(count, "leaf", "leaves")
  yield "layers", "scanned" if found.scanned else "not scanned"
  yield "options", ", ".join(f"{name} {str(value).lower()}" for name, value in found.options.items())
  yield "not bfloat16", ", ".join(f"{module} {form}" for module, form in found.stored.items()) or "nothing packed"
  for name, value in found.source.items():
    yield f"source {name}", str(value)
  yield "made by", f"version {found.version}, schema {found.schema}"
  for fault in found.faults[:_SHOWN_FAULTS]:
    yield "FAULT", fault
  if len(found.faults) > _SHOWN_FAULTS:
    yield "FAULT", f"and {len(found.faults) - _SHOWN_FAULTS} more"


def _spelled(count: Count, one: str = "tensor", many: str = "tensors") -> str:
  return f"{count.tensors:,} {one if count.tensors == 1 else many}, {count.bytes:,} bytes ({_human(count.bytes)})"


def _human(nbytes: int) -> str:
  size, units = float(nbytes), ["B", "KiB", "MiB", "GiB"]
  while size >= 1024 and len(units) > 1:
    size /= 1024
    units.pop(0)
  return f"{size:.2f} {units[0]}" if units[0] != "B" else f"{nbytes} B"
