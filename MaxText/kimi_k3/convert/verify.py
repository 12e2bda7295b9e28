"""Whether a finished conversion is what its source gives: every key accounted for, every value compared bit for bit.

What convert should have written is `transforms.apply` on the source, so nothing here has a tolerance. Of weights in FP8
the rounding itself is measured too, and held against the format's own bound. Chunks are compared in the order of the
source. A worker holds one chunk: some stored rows, what they become, and what OUT has.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import yaml

from kimi_k3 import checksums, maxtext_keys
from kimi_k3.convert import chunks, diagnose, output, plan, rounding, write
from kimi_k3.convert.database import Arrays, UnreadableError, chunk_faults, differing_arrays
from kimi_k3.convert.explain import Explainer, Tally, expected_chunk, line
from kimi_k3.convert.faults import MAX_LISTED, listed
from kimi_k3.convert.index import Source
from kimi_k3.convert.mapping import Leaf
from kimi_k3.convert.progress import Progress
from kimi_k3.convert.reader import Output
from kimi_k3.convert.slices import Placed, Slices
from kimi_k3.convert.storage import WEIGHT_DTYPE
from kimi_k3.convert.unfinished import ITEMS
from kimi_k3.convert.write import leaf_name, run_all

REPORT_SCHEMA = 1
_STEP_METADATA = "0/_CHECKPOINT_METADATA"
_SEED = 0  # The same sample each time, so that a fault found once is found again.


class Check(NamedTuple):
  """One thing that was looked at."""

  name: str
  ok: bool
  detail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """What came of it.

  Attributes:
    compared: leaves, chunks, values, bytes, and share of all bytes.
    keys: expected and found, numbers of leaves; missing, unexpected and different, their names.
    checks: All that were made.
    worst: The leaf of which the largest share differs, and what that looks like; None if none differs.
    faults: Lines, the gravest of each check first.
    rounding: Of each leaf in FP8, how far it is from the source's weights.
    seconds: That it took.
  """

  compared: Mapping[str, Any]
  keys: Mapping[str, Any]
  checks: tuple[Check, ...]
  worst: Mapping[str, Any] | None
  faults: tuple[str, ...]
  rounding: Mapping[str, Mapping[str, int | float]]
  seconds: float

  @property
  def ok(self) -> bool:
    """Whether every check passed."""
    return all(check.ok for check in self.checks)

  def as_json(self) -> dict[str, Any]:
    """The report as one JSON object."""
    fields = dataclasses.asdict(self) | {"checks": [check._asdict() for check in self.checks]}
    return {"schema": REPORT_SCHEMA, "ok": self.ok} | fields


def verify(source: Source, out: Output, *, sample: int | None, workers: int) -> Report:
  """Compares a conversion with its source.

  Args:
    source: The checkpoint it should have been made from.
    out: The conversion.
    sample: How many chunks to compare; None for all. The same ones each time, one of every leaf first.
    workers: Chunks compared at a time.

  Raises:
    InputError: if the source has no plan, holds a value that cannot be represented, or cannot be read.
  """
  return _Verification(source, out, sample, workers).run()


class _Verification:
  """One run: the plan, what was found so far, and the checks in their order."""

  def __init__(self, source: Source, out: Output, sample: int | None, workers: int):
    self.source, self.out, self.sample, self.workers = source, out, sample, workers
    options = out.options
    chosen = plan.Options(scan=options["scan"], experts=options["experts"], dense=options["dense"])
    self.plan = plan.make_plan(source, chosen)
    self.leaves = {leaf_name(leaf): leaf for leaf in self.plan.leaves}
    self.checks: list[Check] = []
    self.faults: list[list[str]] = []  # of each check
    self.errors = rounding.Errors()
    self.arrays: Arrays | None = None  # Unless the keys cannot be listed.
    self.num_bytes = 0
    self._lock = threading.Lock()

  def run(self) -> Report:
    started = time.monotonic()
    keys, key_faults, comparable = self._keys()
    self.work = Slices(self.plan.leaves, self.source.tensors)
    self.tallies = {number: Tally(self.plan.leaves[number]) for number in comparable}
    self._compare_all()
    sums = self._checksums() if self.sample is None else {}
    stale = _stale(self.out, self.source, self.plan) or self._changed_since(sums)
    self._check("stale", stale, "made from this source")
    self._check("shards", _shards(self.out, self.source), f"{len(self.source.shards)} headers as recorded")
    self._check(
      "files",
      _files(self.out, self.source, self.plan),
      "config.json and tokenizer files as in SRC, decode.yml describes it",
    )
    self._check("keys", key_faults, f"{len(self.leaves)} leaves, none missing, none unexpected")
    worst = self._values()
    if self.sample is None:
      self._check("checksums", list(sums.values()), f"{len(self.tallies)} leaves as recorded")
      self._hashes()
    if self.errors.leaves:
      self._check("rounding", self.errors.faults(), self.errors.summary())
    return Report(
        compared=self.compared, keys=keys, checks=tuple(self.checks), worst=worst,
        # In turns, so that the first few name something of every check that failed.
        faults=tuple(f for turn in itertools.zip_longest(*self.faults) for f in turn if f is not None),
        rounding=self.errors.as_json(), seconds=round(time.monotonic() - started, 3),
    )  # fmt: skip

  def _check(self, name: str, faults: list[str], fine: str) -> None:
    self.faults.append(faults)
    self.checks.append(Check(name, not faults, listed(faults) if faults else fine))

  def _keys(self) -> tuple[dict[str, Any], list[str], list[int]]:
    """What is said of the keys, their faults, and the numbers of the leaves that can be compared."""
    named = [leaf_name(leaf) for leaf in self.plan.leaves]
    report: dict[str, Any] = {"expected": len(named), "found": 0, "missing": [], "unexpected": [], "different": []}
    try:
      arrays = self.arrays = self.out.arrays
    except UnreadableError as error:
      # Some arrays may still open by themselves.
      return report, [str(error)], list(range(len(named)))
    report["found"] = len(arrays.held) + len(arrays.damaged)
    report["missing"] = [name for name in named if name not in arrays.held and name not in arrays.damaged]
    report["unexpected"] = [name for name in (*arrays.held, *arrays.damaged) if name not in self.leaves]
    faults = [f"{name}: missing, no key of it is there" for name in report["missing"]]
    faults += [f"{name}: unexpected, the source gives no such leaf" for name in report["unexpected"]]
    faults += [f"{name}: {reason}" for name, reason in arrays.damaged.items() if name in self.leaves]
    different = differing_arrays(self.plan.leaves, arrays)
    report["different"] = list(different)
    faults += [f"{name}: {text}" for name, text in different.items()]
    faults += [f"{name}: {reason}" for name, reason in chunk_faults(arrays).items() if name in self.leaves]
    faults += [f"key {key}: belongs to no leaf" for key in arrays.strays]
    faults += _record_faults(self.out, self.plan, arrays)
    fits = [i for i, name in enumerate(named) if name in arrays.held and name not in different]
    return report, faults, fits

  def _compare_all(self) -> None:
    chosen = _sampled(self.work, self.tallies, self.sample) if self.sample is not None else None
    tasks = range(len(self.work)) if chosen is None else sorted(chosen)
    places = (placed for n in tasks for placed in self._placed(n, chosen))
    if chosen is None:
      total = sum(plan.leaf_bytes(tally.leaf) for tally in self.tallies.values())
    else:
      total = sum(_nbytes(self.tallies[placed.leaf].leaf, placed.chunk) for placed in places)
    with Progress("verify", total) as progress:

      def work(number: int) -> None:
        for placed in self._placed(number, chosen):
          nbytes = self._compare(self.tallies[placed.leaf], placed.chunk)
          with self._lock:
            self.num_bytes += nbytes
          progress.add(nbytes)

      run_all(tasks, work, self.workers)

  def _placed(self, number: int, chosen: Mapping[int, set[int]] | None) -> Iterator[Placed]:
    """The chunks of a slice that are to be compared."""
    for position, placed in enumerate(self.work.chunks(number)):
      if placed.leaf in self.tallies and (chosen is None or position in chosen[number]):
        yield placed

  def _compare(self, tally: Tally, chunk: chunks.Chunk) -> int:
    """Compares one chunk and returns its bytes."""
    leaf, number = tally.leaf, tally.number(chunk)
    expected, found, reason = expected_chunk(self.source, leaf, chunk), None, ""
    try:
      found = self.out.read_chunk(leaf, chunk)
    except UnreadableError as error:
      reason = str(error).removeprefix(f"{tally.name}: ")
    equal = found is not None and diagnose.same(found, expected)
    different = 0 if equal else expected.size if found is None else diagnose.num_different(found, expected)
    shape = chunks.chunk_shape(leaf)
    tally.expected[number] = checksums.chunk_checksum(checksums.filled(expected, shape))
    tally.known[number] = True
    if found is not None:
      same = tally.expected[number]
      tally.found[number] = same if equal else checksums.chunk_checksum(checksums.filled(found, shape))
      self.errors.add(leaf, chunk, found, self.source, self.out)
    with self._lock:
      tally.seen[number] = True
      tally.values += expected.size
      tally.different += different
      if found is None:
        tally.unreadable[number] = reason
      elif not equal:
        tally.differing.append(number)
    return expected.nbytes

  @property
  def compared(self) -> dict[str, Any]:
    touched = [tally for tally in self.tallies.values() if tally.seen.any()]
    return {
        "leaves": len(touched), "chunks": sum(int(tally.seen.sum()) for tally in touched),
        "values": sum(tally.values for tally in touched), "bytes": self.num_bytes,
        "share": self.num_bytes / max(1, self.plan.nbytes),
    }  # fmt: skip

  def _values(self) -> dict[str, Any] | None:
    """The check of values. Returns what the worst leaf looks like."""
    faulty = sorted((t for t in self.tallies.values() if t.faulty), key=lambda tally: -tally.share)
    explainer = Explainer(self.source, self.out, self.tallies.values())
    seen = [explainer.difference(tally) for tally in faulty[:MAX_LISTED]]
    faults = [line(entry) for entry in seen]
    faults += [f"{t.name}: {t.different:,} of {t.values:,} values differ" for t in faulty[MAX_LISTED:]]
    if self.sample is None:
      # Our own loop must not have left anything out.
      short = [t for t in self.tallies.values() if t.values != math.prod(t.leaf.shape)]
      faults += [f"{t.name}: only {t.values:,} of {math.prod(t.leaf.shape):,} values were compared" for t in short]
    c = self.compared
    fine = f"{c['leaves']} leaves, {c['chunks']:,} chunks, {c['values']:,} values equal"
    self._check("values", faults, fine if self.tallies else "nothing to compare")
    return seen[0] if seen else None

  def _changed_since(self, sums: Mapping[str, str]) -> list[str]:
    """Where OUT is what convert wrote and SRC gives something else: the recorded sample of a shard need not show it."""
    if self.sample is not None:
      return []
    changed = [t.name for t in self.tallies.values() if t.differing and not t.unreadable and t.name not in sums]
    if not changed:
      return []
    what = f"{len(changed)} leaves that differ from SRC still have the checksums that convert recorded"
    return [f"stale: {what}: a shard of SRC has changed since; convert again ({listed(changed)})"]

  def _checksums(self) -> dict[str, str]:
    """By name, leaves whose stored chunks do not give the recorded checksum."""
    recorded, faults = self.out.record[checksums.FIELD], {}
    for tally in self.tallies.values():
      if tally.unreadable:
        continue  # Its value is unknown, and a fault already.
      found = checksums.leaf_checksum(map(int, tally.found))
      held = self.arrays.held.get(tally.name) if self.arrays is not None else None
      if held is not None and held.chunk_shape != chunks.chunk_shape(tally.leaf):  # Cut by another version.
        found = checksums.array_checksum(self.out.read(tally.name), held.chunk_shape)
      if found != recorded.get(tally.name):
        faults[tally.name] = f"{tally.name}: checksum {found}, recorded {recorded.get(tally.name, 'none')}"
    return faults | {name: f"{name}: checksum recorded, no such leaf" for name in recorded if name not in self.leaves}

  def _hashes(self) -> None:
    """Compares the recorded SHA-256 of shards, where there are any."""
    recorded = {
      name: said["sha256"]
      for name, said in self.out.record["source"]["shards"].items()
      if isinstance(said, Mapping) and "sha256" in said and name in self.source.shards
    }
    if not recorded:
      return
    names, faults = sorted(recorded), []
    total = sum(self.source.shards[name].size for name in names)
    with Progress("sha256", total) as progress:

      def work(number: int) -> None:
        name = names[number]
        found = output.file_sha256(self.source.directory / name, progress.add)
        if found != recorded[name]:
          faults.append(f"{name}: SHA-256 {found[:12]}..., recorded {recorded[name][:12]}...")

      run_all(range(len(names)), work, self.workers)
    self._check("sha256", sorted(faults), f"{len(names)} shards as recorded")


def _stale(out: Output, source: Source, planned: plan.Plan) -> list[str]:
  recorded = out.record["source"]
  if recorded["fingerprint"] != planned.fingerprint:
    return ["stale: OUT was made from another source: names, shapes, places or config.json differ; convert again"]
  if recorded["sample"] != source.sample():
    return ["stale: OUT was made from another source of the same shapes, or a shard has changed since; convert again"]
  return []


def _shards(out: Output, source: Source) -> list[str]:
  recorded, faults = out.record["source"]["shards"], []
  for name, shard in source.shards.items():
    said = recorded.get(name)
    if not isinstance(said, Mapping):
      faults.append(f"{name}: a shard that the record does not name")
    elif (said.get("size"), said.get("header")) != (shard.size, shard.header):
      what = "size" if said.get("size") != shard.size else "header"
      faults.append(f"{name}: its {what} is not the recorded one")
  return faults + [f"{name}: recorded, not in SRC" for name in recorded if name not in source.shards]


def _files(out: Output, source: Source, planned: plan.Plan) -> list[str]:
  faults = []
  for name in output.COPIED_FILES:
    path = source.directory / name
    there, here = (path.read_bytes() if path.is_file() else None), out.file(name)
    if there != here:
      what = "missing in OUT" if here is None else "not in SRC" if there is None else "differs from SRC's"
      faults.append(f"{name}: {what}")
  faults += [f"decode.yml: {fault}" for fault in _decode_faults(out, planned)]
  return faults + _metadata_faults(out, planned)


def _metadata_faults(out: Output, planned: plan.Plan) -> list[str]:
  """Orbax's two files, without which nothing loads OUT."""
  tree, step = (_json(out.file(name)) for name in (f"{ITEMS}/_METADATA", _STEP_METADATA))
  expected_tree = _json(write.tree_metadata(planned.leaves))
  # It repeats parts of the record.
  custom = step.get("custom_metadata")
  custom = custom if isinstance(custom, dict) else {}
  repeated = {key: out.record.get(key) for key in custom if key != "scan_layers"}
  expected_step = _json(write.checkpoint_metadata({"scan_layers": planned.scan, **repeated}))
  faults = []
  for name, found, expected in (
    (f"{ITEMS}/_METADATA", tree, expected_tree),
    (_STEP_METADATA, step, expected_step),
  ):
    if found != expected:
      odd = [key for key in {**found, **expected} if found.get(key) != expected.get(key)]
      faults.append(f"{name}: not what convert writes ({listed(odd)}): missing, damaged or of another conversion")
  return faults


def _json(content: bytes | None) -> dict[str, Any]:
  """A JSON object; empty if it is none."""
  try:
    value = json.loads(content or b"")
  except (ValueError, RecursionError):
    return {}
  return value if isinstance(value, dict) else {}


def _decode_faults(out: Output, planned: plan.Plan) -> list[str]:
  """Keys of decode.yml that describe another model than SRC. Any other key is the user's to change."""
  expected = maxtext_keys.to_maxtext(planned.config, scan_layers=planned.scan, dtype=WEIGHT_DTYPE)
  expected = {**expected, "load_parameters_path": output.PARAMETERS}
  content = out.file("decode.yml")
  try:
    found = yaml.safe_load(content or b"")
  except (yaml.YAMLError, UnicodeDecodeError, ValueError):
    found = None
  if not isinstance(found, dict):
    return ["missing in OUT" if content is None else "damaged, no YAML"]
  expected = yaml.safe_load(yaml.safe_dump(expected))  # Tuples become lists, as in the file.
  odd = [key for key, value in expected.items() if found.get(key) != value]
  return [f"{key} is {str(found.get(key))[:40]}, SRC gives {str(expected[key])[:40]}" for key in odd]


def _record_faults(out: Output, planned: plan.Plan, arrays: Arrays) -> list[str]:
  """Where the record says another tree than the source gives, or other chunks than the arrays have."""
  faults, record = [], out.record
  stored = {leaf_name(leaf): (leaf.shape, leaf.dtype) for leaf in out.leaves}
  expected = {leaf_name(leaf): (leaf.shape, leaf.dtype) for leaf in planned.leaves}
  if stored != expected:
    names = [name for name in {**stored, **expected} if stored.get(name) != expected.get(name)]
    faults.append(f"{output.RECORD}: implies another tree than SRC gives: {listed(names)}")
  if (out.form, out.config) != (planned.form, planned.config):
    faults.append(
      f"{output.RECORD}: says that SRC is stored otherwise than it is: stored, packed_modules or fp8_modules"
    )
  layout = output.LAYOUTS[planned.scan]
  for field, value in (("leaves", len(expected)), ("bytes", planned.nbytes), ("layout", layout)):
    if record.get(field) != value:
      faults.append(f"{output.RECORD}: {field} is {record.get(field)}, SRC gives {value}")
  cut = record[checksums.CHUNKS_FIELD]
  odd = [name for name, held in arrays.held.items() if name in expected and cut.get(name) != list(held.chunk_shape)]
  faults += [f"{name}: not cut into chunks as {output.RECORD} says" for name in odd]
  return faults + [f"{name}: in the record's list of chunks, no such leaf" for name in cut if name not in expected]


def _sampled(work: Slices, tallies: Mapping[int, Tally], count: int) -> dict[int, set[int]]:
  """Which chunks of which slices to compare: one of every leaf as far as that goes, then any."""
  places = [
    (number, position, placed.leaf)
    for number in range(len(work))
    for position, placed in enumerate(work.chunks(number))
    if placed.leaf in tallies
  ]
  order = np.random.default_rng(_SEED).permutation(len(places)).tolist()
  firsts, rest, leaves = [], [], set()
  for i in order:
    (rest if places[i][2] in leaves else firsts).append(i)
    leaves.add(places[i][2])
  chosen = collections.defaultdict(set)
  for i in (*firsts, *rest)[:count]:
    chosen[places[i][0]].add(places[i][1])
  return dict(chosen)


def _nbytes(leaf: Leaf, chunk: chunks.Chunk) -> int:
  return math.prod(chunk.shape) * np.dtype(leaf.dtype).itemsize
