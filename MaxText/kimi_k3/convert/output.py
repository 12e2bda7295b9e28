"""The directory a conversion makes: what is in it, when it may be written, and how it appears all at once.

    OUT/0/items        what load_parameters_path takes          OUT/decode.yml   a complete MaxText config
    OUT/config.json    the source's, and its tokenizer files    OUT/conversion.json   source, options, checksums

Where a directory can be renamed, everything is written to OUT.partial and renamed at the end, so an OUT that exists is
complete. Where it cannot, in a bucket or on a file system over one, files are written to OUT itself and the last of
them, OUT/0/commit_success.txt, says that it is complete; until then readers refuse it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from kimi_k3 import checksums, maxtext_keys
from kimi_k3.convert import appear, chunks, ocdbt, write
from kimi_k3.convert.faults import listed
from kimi_k3.convert.index import ShardError, Source, same_state
from kimi_k3.convert.plan import Plan
from kimi_k3.convert.progress import Progress, say
from kimi_k3.convert.slices import Slices, file_name
from kimi_k3.convert.storage import WEIGHT_DTYPE
from kimi_k3.convert.store import LocalStore, Locked, Store, Unwritable, is_url, open_store
from kimi_k3.convert.unfinished import (
  ITEMS,
  MARKERS,
  PARTIAL_SUFFIX,
  PLAN,
  REPLACED,
  STATE_DIRECTORY,
  Commit,
  Entry,
  Unfinished,
)
from kimi_k3.errors import InputError

DISTRIBUTION = "maxtext-kimi-k3"
SCHEMA = 2
WRITER = 1  # Of the bytes: slices of another writer cannot be joined to this one's.
RECORD = checksums.RECORD
PARAMETERS = ITEMS
LAYOUTS = {True: "scanned", False: "unscanned"}
COPIED_FILES = (
    "config.json", "generation_config.json", "special_tokens_map.json", "tiktoken.model", "tokenizer.json",
    "tokenizer_config.json",
)  # fmt: skip
_KEPT_BYTES = 256 * 1024 * 1024  # 256 MiB: less is written anew in a second, and a bad SRC then leaves nothing at all.
_HASH_BYTES = 16 * 1024 * 1024  # Read at a time: large enough for any disk.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """How to carry out a plan, which changes nothing in the result.

  Attributes:
    commit: How OUT appears.
    workers: Slices written at a time.
    part: (i, n): only the i-th share of n, counted from 1; None for all.
    convert: Write slices; otherwise only commit what is there.
    finish: Commit, which needs all slices.
    hash_shards: Record the SHA-256 of every shard.
    overwrite: Replace what is at OUT, and give up an unfinished conversion of something else.
    command: The command line, for the header of decode.yml.
  """

  commit: Commit
  workers: int
  part: tuple[int, int] | None = None
  convert: bool = True
  finish: bool = True
  hash_shards: bool = False
  overwrite: bool = False
  command: str = "kimi-k3 convert"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """What a run did.

  Attributes:
    finished: Whether OUT is complete.
    slices: Of the whole conversion.
    found: Slices that earlier runs had done.
    written: Slices of this run, and `nbytes` their size.
    missing: Slices that are not done.
  """

  finished: bool
  slices: int
  found: int
  written: int
  nbytes: int
  missing: int


def check_output(out: str | Path, source: Source, plan: Plan, *, overwrite: bool) -> bool:
  """Returns whether `out` already holds this very conversion.

  Raises:
    InputError: if `out` holds anything else that must not be replaced, or lies in the source (or the source in it).
  """
  out = str(out)
  if not is_url(out):
    _check_local(out, source)
  store = open_store(out)
  if store.read(f"{STATE_DIRECTORY}/{PLAN}") is not None:
    return False
  record = store.read(RECORD)
  if record is None and (not _holds_anything(store) or store.names(f"{STATE_DIRECTORY}/")):
    return False  # Or what is left of a removal that was killed.
  if record is None:
    raise InputError(f"{out}: not empty, but no {RECORD}: not a conversion, never overwritten; choose another OUT")
  difference = _difference(store, record, source, plan)
  if difference and not overwrite:
    raise InputError(f"{out}: holds {difference}; give --overwrite to replace it or choose another OUT")
  return not difference and not overwrite


def _check_local(path: str, source: Source) -> None:
  out, here, there = Path(path), appear.local(path), appear.local(source.directory)
  if here.is_relative_to(there) or there.is_relative_to(here):
    raise InputError(f"{out}: OUT and SRC ({source.directory}) are the same or inside each other, choose another OUT")
  if (out.exists() or out.is_symlink()) and (not out.is_dir() or out.is_symlink()):
    raise InputError(f"{out}: not a directory, choose another OUT")
  if here.name.endswith(PARTIAL_SUFFIX):
    raise InputError(f"{out}: a name that ends in {PARTIAL_SUFFIX} is an unfinished conversion's, choose another OUT")


def _holds_anything(store: Store) -> bool:
  """Whether there is more than the state of a conversion under way: empty directories and links count too."""
  if isinstance(store, LocalStore):
    return store.root.is_dir() and any(path.name != STATE_DIRECTORY for path in store.root.iterdir())
  return any(not name.startswith(f"{STATE_DIRECTORY}/") for name in store.names())


def _difference(store: Store, content: bytes, source: Source, plan: Plan) -> str:
  """What sets an existing conversion apart from the plan; empty when nothing does."""
  try:
    record = json.loads(content)
    schema = record["schema"]
    found = ((record["source"]["fingerprint"], record["source"]["sample"]), record["options"], record.get("commit"))
  except (ValueError, KeyError, TypeError):
    return f"a conversion whose {RECORD} cannot be read"
  if schema != SCHEMA:
    return f"a conversion of schema {schema}, this version writes {SCHEMA}"
  if found[0] != (plan.fingerprint, source.sample()):
    return "a conversion of another source"
  if found[1] != plan.options:
    return f"a conversion with other options ({_spelled(found[1])}; asked for {_spelled(plan.options)})"
  if store.read(f"{PARAMETERS}/{ocdbt.MANIFEST}") is None or store.read(f"{PARAMETERS}/_METADATA") is None:
    return f"a conversion without its {PARAMETERS}"
  missing = [name for name in MARKERS if store.read(name) is None] if found[2] == "marker" else []
  if missing:
    return f"a conversion without its commit marker {missing[0]} (a copy that is not complete?)"
  # Files of another writer are cut in another way; the arrays are the same.
  return _missing_files(store, source, plan) if record.get("writer") == WRITER else ""


def _missing_files(store: Store, source: Source, plan: Plan) -> str:
  """What a damaged conversion lacks, from names and sizes: what stands in its files is for `verify`."""
  work, sizes = Slices(plan.leaves, source.tensors), store.sizes("")
  expected: dict[str, int | None] = {f"{ITEMS}/{file_name(n)}": work.size(n) for n in range(len(work))}
  small = (f"{ITEMS}/{write.INDEX_FILE}", "0/_CHECKPOINT_METADATA", "config.json", "decode.yml")
  expected |= dict.fromkeys(small)
  faults = [
    name
    for name, size in expected.items()
    if name not in sizes or (size is not None and sizes[name] is not None and sizes[name] != size)
  ]
  return f"a damaged conversion: missing or of another size: {listed(faults)}" if faults else ""


def _spelled(options: Any) -> str:
  if not isinstance(options, Mapping):
    return repr(options)
  return ", ".join(f"{name}={str(value).lower()}" for name, value in options.items())


def progress_so_far(out: str | Path, source: Source, plan: Plan, commit: Commit) -> tuple[Slices, int, int]:
  """Returns the slices of a conversion, how many of them are done and their bytes, without changing anything.

  Raises:
    InputError: if the conversion of something else is under way there.
  """
  work = Slices(plan.leaves, source.tensors)
  unfinished = Unfinished(_absolute(out), commit)
  under_way = unfinished.plan()
  if under_way is None:
    return work, 0, 0
  _check_same(unfinished, under_way, _identity(plan, work))
  done, _ = _valid(unfinished, work, source)
  return work, len(done), sum(work.size(number) for number in done)


def convert(out: str | Path, source: Source, plan: Plan, job: Job) -> Outcome:
  """Carries out the plan, or what is left of it, and puts the result at `out`.

  Call `check_output` before. An error, Ctrl-C or a kill leaves `out` as it was; the slices that are done are kept, and
  the next run with the same source and options goes on from there.

  Raises:
    InputError: naming what stopped it: a value, a file, the disk, another conversion.
  """
  out = _absolute(out)
  before = None if is_url(out) else appear.contents(Path(out))
  decode = _decode_yml(source, plan, job.command)  # First: it costs nothing and may fail.
  work = Slices(plan.leaves, source.tensors)
  unfinished = Unfinished(out, job.commit)
  _check_other_mode(out, job.commit)
  todo: list[int] = []
  with unfinished.lock(job.part):
    try:
      done = _begin(unfinished, source, plan, work, job)
    except InputError:
      if job.part is None and unfinished.empty():
        unfinished.remove()
      raise
    writing, found = job.convert, len(done)
    try:
      if job.convert:
        todo = [n for n in (work.part(*job.part) if job.part else range(len(work))) if n not in done]
        _check_space(unfinished, work, todo)
        _write_slices(unfinished, source, work, todo, done, job.workers)
        writing = False
        if job.hash_shards:
          _hash_shards(unfinished, source, job)
      if job.finish and job.part is None:
        _commit(unfinished, source, plan, work, done, decode, job, before)
    except InputError as error:
      raise _resumable(error, unfinished, work, done, job, values=writing) from error
  if job.finish and job.part is not None:
    with unfinished.lock(None):
      done, _ = _valid(unfinished, work, source)
      _commit(unfinished, source, plan, work, done, decode, job, before)
  return Outcome(
    finished=job.finish,
    slices=len(work),
    found=found,
    written=len(todo),
    nbytes=sum(map(work.size, todo)),
    missing=0 if job.finish else len(work) - unfinished.num_journaled(),
  )


def _absolute(out: str | Path) -> str:
  return str(out).rstrip("/") if is_url(str(out)) else str(appear.local(out))


def _check_other_mode(out: str, commit: Commit) -> None:
  """Raises if a conversion that commits in the other way is under way at `out`."""
  if is_url(out):
    return
  other: Commit = "marker" if commit == "rename" else "rename"
  unfinished = Unfinished(out, other)
  if unfinished.state.read(PLAN) is not None:
    raise InputError(
      f"{unfinished.where}: holds an unfinished conversion that commits by {other}: give --commit {other}, or remove it"
    )


def tidy(out: str | Path, commit: Commit) -> None:
  """Removes what a kill right after the commit left beside a finished `out`: the journal."""
  unfinished = Unfinished(_absolute(out), commit)
  if unfinished.over() or unfinished.committed():
    with contextlib.suppress(Locked), unfinished.lock(None):
      if unfinished.over() or unfinished.committed():  # Nobody has begun another one meanwhile.
        unfinished.remove()


def _identity(plan: Plan, work: Slices) -> dict[str, Any]:
  """What must be equal for slices of several runs to be joined."""
  return {
    "schema": 1,
    "writer": WRITER,
    "source": plan.fingerprint,
    "options": plan.options,
    "slices": len(work),
    "bytes": work.nbytes,
  }


def _check_same(unfinished: Unfinished, found: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
  """Raises unless the conversion under way is the one asked for."""
  differences = {
    "source": "of another source (its headers differ)",
    "options": f"with other options ({_spelled(found.get('options'))}; asked for {_spelled(asked['options'])})",
  }
  for field, value in asked.items():
    if found.get(field) != value:
      what = differences.get(field, f"by another version ({field} {found.get(field)}, expected {value})")
      raise InputError(
        f"{unfinished.where}: holds an unfinished conversion {what}: finish it, give --overwrite to start anew, or "
        "choose another OUT"
      )


def _begin(unfinished: Unfinished, source: Source, plan: Plan, work: Slices, job: Job) -> dict[int, Entry]:
  """Takes up the conversion under way, or begins one. Returns the slices that are done."""
  if unfinished.committed():  # Killed right after that; what OUT holds is to be written once more.
    _check_alone(unfinished, job, "what a commit left")
    unfinished.clear()
  identity, under_way = _identity(plan, work), unfinished.plan()
  given_up = under_way is not None and job.convert and job.overwrite and under_way != identity
  if given_up:
    _check_alone(unfinished, job, "an unfinished conversion of something else")
  elif under_way is not None:
    _check_same(unfinished, under_way, identity)
    done, changed = _valid(unfinished, work, source)
    if changed:
      say(f"{unfinished.where}: {changed} finished slice(s) are written again: their shards have changed since")
    if done:
      say(f"{unfinished.where}: {len(done):,} of {len(work):,} slices are done, going on from there")
    if job.part is not None:
      unfinished.begin_part(job.part)
    return done
  if not job.convert:
    raise InputError(f"{unfinished.where}: no conversion is under way there, nothing to finish; convert first")
  if unfinished.leftovers():
    if not given_up and unfinished.plan() is not None:  # Another part has begun meanwhile.
      return _begin(unfinished, source, plan, work, job)
    _check_alone(unfinished, job, "what a removal left")
    unfinished.clear()
  unfinished.begin(identity)
  if job.part is not None:
    unfinished.begin_part(job.part)
  return {}


def _check_alone(unfinished: Unfinished, job: Job, what: str) -> None:
  """Parts share what they find, so none of them may remove it."""
  if job.part is not None:
    raise InputError(f"{unfinished.where}: holds {what}, which no --part may remove: remove it before the first part")


def _valid(unfinished: Unfinished, work: Slices, source: Source) -> tuple[dict[int, Entry], int]:
  """The slices that are done, and how many more were made from a shard that has changed since."""
  now: dict[str, str] = {}
  valid, changed = {}, 0
  for number, entry in unfinished.entries(work).items():
    for shard in entry.shards:
      if shard in source.shards and shard not in now:
        now[shard] = source.stamp(shard)
    if all(shard in now and same_state(now[shard], stamp) for shard, stamp in entry.shards.items()):
      valid[number] = entry
    else:
      changed += 1
  return valid, changed


def _resumable(
  error: InputError, unfinished: Unfinished, work: Slices, done: Mapping[int, Entry], job: Job, *, values: bool
) -> InputError:
  """The error, with what is kept: nothing where the source's `values` may be at fault and that is little work."""
  if not job.convert:  # Nothing was begun here.
    return error
  values = values and not isinstance(error, ShardError | Unwritable)
  little = values and job.part is None and sum(map(work.size, done)) < _KEPT_BYTES
  if done and not little:
    return InputError(
      f"{error}; {len(done):,} of {len(work):,} slices are done and kept in {unfinished.where}: the same command goes "
      "on from there"
    )
  if job.part is None:
    unfinished.clear()
    unfinished.remove()
  return error


def _check_space(unfinished: Unfinished, work: Slices, todo: list[int]) -> None:
  if not isinstance(unfinished.data, LocalStore):
    return
  needed, free = sum(work.size(number) for number in todo), unfinished.data.free()
  if free < needed:
    where = unfinished.data.root.parent
    raise Unwritable(f"{where}: {free:,} bytes free, the conversion takes {needed:,}; make room or choose another OUT")


def _write_slices(
  unfinished: Unfinished, source: Source, work: Slices, todo: list[int], done: dict[int, Entry], workers: int
) -> None:
  """Writes slices and adds their entries to `done`."""
  stamps = {shard: source.stamp(shard) for shard in source.shards}
  initial = sum(work.size(number) for number in done)
  total = initial + sum(work.size(number) for number in todo)
  with Progress("convert", total, done=initial) as progress:

    def write_one(number: int) -> None:
      sums: list[int] = []
      unfinished.data.write(f"{ITEMS}/{file_name(number)}", write.slice_parts(work, number, source, sums))
      shards = work.shards(number)
      for shard in shards:
        source.check_unchanged(shard)
      entry = Entry(tuple(sums), {shard: stamps[shard] for shard in shards})
      unfinished.add(number, entry)
      done[number] = entry
      progress.add(work.size(number))

    write.run_all(todo, write_one, workers)


def _hash_shards(unfinished: Unfinished, source: Source, job: Job) -> None:
  """Records the SHA-256 of every shard, or of this part's, unless an earlier run has."""
  known, shards = unfinished.hashes(), sorted(source.shards)
  share, count = job.part or (1, 1)
  todo = [i for i in range(share - 1, len(shards), count) if known.get(shards[i], ("",))[0] != source.stamp(shards[i])]
  with Progress("hash", sum(source.shards[shards[i]].size for i in todo)) as progress:

    def hash_one(number: int) -> None:
      shard = shards[number]
      digest = file_sha256(source.directory / shard, progress.add)
      source.check_unchanged(shard)
      unfinished.add_hash(number, shard, source.stamp(shard), digest)

    write.run_all(todo, hash_one, job.workers)


def file_sha256(path: Path, progress: Callable[[int], Any] = lambda _: None) -> str:
  """Returns the hex SHA-256 of a file's bytes.

  Args:
    path: The file.
    progress: Called with the number of bytes read, time after time.

  Raises:
    InputError: if it cannot be read.
  """
  digest, buffer = hashlib.sha256(), bytearray(_HASH_BYTES)
  try:
    with path.open("rb", buffering=0) as file:
      while count := file.readinto(buffer):
        digest.update(memoryview(buffer)[:count])
        progress(count)
  except OSError as error:
    raise InputError(f"{path}: cannot be read ({error.strerror})") from error
  return digest.hexdigest()


def _commit(
  unfinished: Unfinished,
  source: Source,
  plan: Plan,
  work: Slices,
  done: Mapping[int, Entry],
  decode: str,
  job: Job,
  before: appear.Contents,
) -> None:
  """Makes the checkpoint of the slices that are `done`, which must be all, and lets OUT appear."""
  missing = [number for number in range(len(work)) if number not in done]
  if missing:
    raise InputError(f"{unfinished.where}: {_missing(unfinished, work, missing)}")
  hashes = _hashes(unfinished, source) if job.hash_shards else {}
  sums = write.leaf_checksums(work, {number: entry.checksums for number, entry in done.items()})
  identity = json.dumps(_identity(plan, work), sort_keys=True).encode()
  index = write.database(work, uuid=hashlib.sha256(identity).digest()[:16])
  record = _record(source, plan, sums, job.commit, hashes)
  custom = {"scan_layers": plan.scan} | {name: record[name] for name in ("layout", "options", "source", "version")}
  files: list[tuple[str, bytes]] = [
    (f"{ITEMS}/{write.INDEX_FILE}", index.index),
    (f"{ITEMS}/_METADATA", write.tree_metadata(plan.leaves)),
    ("0/_CHECKPOINT_METADATA", write.checkpoint_metadata(custom)),
    *((name, content) for name in COPIED_FILES if (content := _content(source.directory / name)) is not None),
    ("decode.yml", decode.encode()),
    (f"{ITEMS}/{ocdbt.MANIFEST}", index.manifest),  # From here on the arrays can be read.
    (RECORD, (json.dumps(record, indent=2) + "\n").encode()),
  ]
  expected = {name for name, _ in files} | {f"{ITEMS}/{file_name(number)}" for number in range(len(work))}
  for name in unfinished.data.names():
    ours = name.startswith(f"{ITEMS}/") or (".tmp-" in name and not name.startswith(f"{STATE_DIRECTORY}/"))
    if ours and name not in expected:
      unfinished.data.delete(name)  # Of a killed write.
  for name, content in files:
    unfinished.data.write(name, [content])
  if job.commit == "marker":
    for name in MARKERS:
      unfinished.data.write(name, [b"This checkpoint is complete.\n"])
  else:
    _swap(unfinished, Path(unfinished.out), before)
  unfinished.remove()


def _missing(unfinished: Unfinished, work: Slices, missing: list[int]) -> str:
  """What a commit waits for, by part where the work was shared out."""
  stretches = [f"{a} to {b}" if a < b else str(a) for a, b in _stretches(missing)]
  said = f"{len(missing):,} of {len(work):,} slices are not done ({listed(stretches)})"
  changed = len(set(missing) & set(unfinished.entries(work)))
  if changed:
    said += f", {changed:,} of them because their shards have changed since"
  parts = [
    f"--part {i}/{n}"
    for n in unfinished.part_counts()
    for i in range(1, n + 1)
    if not set(work.part(i, n)).isdisjoint(missing)
  ]
  return f"{said}: convert {listed(parts) if parts else 'what is missing'} before --finish"


def _stretches(numbers: list[int]) -> list[tuple[int, int]]:
  """Runs of consecutive numbers, as first and last."""
  found: list[tuple[int, int]] = []
  for number in numbers:
    if found and found[-1][1] == number - 1:
      found[-1] = (found[-1][0], number)
    else:
      found.append((number, number))
  return found


def _hashes(unfinished: Unfinished, source: Source) -> dict[str, str]:
  known = unfinished.hashes()
  missing = [shard for shard in source.shards if known.get(shard, ("",))[0] != source.stamp(shard)]
  if missing:
    raise InputError(
      f"{unfinished.where}: no hash of {listed(missing)}: give --hash to every part, or leave it out of --finish"
    )
  return {shard: known[shard][1] for shard in source.shards}


def _content(path: Path) -> bytes | None:
  try:
    return path.read_bytes() if path.exists() else None
  except OSError as error:
    raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def _swap(unfinished: Unfinished, out: Path, before: appear.Contents) -> None:
  """Lets what was written appear at `out`. What was there moves into the state, which is removed after that."""
  made = Path(unfinished.where) / "out"
  for directory in {made, *(path.parent for path in made.rglob("*"))}:
    appear.sync(directory)
  appear.put(made, out, before, Path(unfinished.where) / REPLACED)


def _record(
  source: Source, plan: Plan, sums: Mapping[str, str], commit: Commit, hashes: Mapping[str, str]
) -> dict[str, Any]:
  """conversion.json: enough to recognise the conversion, to undo it, and to recognise every leaf."""
  shards = {}
  for name, shard in sorted(source.shards.items()):
    shards[name] = {"size": shard.size, "header": shard.header} | ({"sha256": hashes[name]} if name in hashes else {})
  return {
    "schema": SCHEMA,
    "source": {
      "directory": str(source.directory.resolve()),
      "fingerprint": plan.fingerprint,
      "sample": source.sample(),
      "shards": shards,
    },
    "options": plan.options,
    "layout": LAYOUTS[plan.scan],
    "stored": dataclasses.asdict(plan.form) | {"float32_leaves": plan.config.float32_leaves},
    "packed_modules": plan.config.packed_modules,
    "fp8_modules": plan.config.fp8_modules,
    "version": _version(),
    "writer": WRITER,
    "commit": commit,
    "leaves": len(plan.leaves),
    "bytes": plan.nbytes,
    checksums.FIELD: sums,
    checksums.CHUNKS_FIELD: {write.leaf_name(leaf): chunks.chunk_shape(leaf) for leaf in plan.leaves},
  }


def _version() -> str:
  try:
    return importlib.metadata.version(DISTRIBUTION)
  except importlib.metadata.PackageNotFoundError:
    return "source tree"


def _decode_yml(source: Source, plan: Plan, command: str) -> str:
  """A complete MaxText config. Its one path is relative to the file, so that OUT can be moved."""
  keys = maxtext_keys.to_maxtext(plan.config, scan_layers=plan.scan, dtype=WEIGHT_DTYPE)
  keys = {"base_config": "base.yml"} | keys | {"load_parameters_path": PARAMETERS}
  lines = (
    f"Written by: {command}",
    f"Source: {source.directory.resolve()}",
    f"Its fingerprint: {plan.fingerprint}",
    "Paths are relative to this file.",
  )
  # A path may hold a line break, or bytes that are no text: escaped, or it would not stay a comment.
  header = "".join(f"# {''.join(c if c.isprintable() else ascii(c)[1:-1] for c in line)}\n" for line in lines)
  return header + yaml.safe_dump(keys, sort_keys=False, default_flow_style=None, width=100)


def default_workers(ram_budget: int) -> int:
  """Slices to write at a time: up to eight keep a disk busy; fewer with few CPUs or little memory."""
  return max(1, min(8, os.cpu_count() or 1, ram_budget // write.WORKER_BYTES))
