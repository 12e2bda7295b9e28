"""The directory a conversion makes: what is in it, when it may be written, and how it appears all at once.

    OUT/0/items        what load_parameters_path takes          OUT/decode.yml   a complete MaxText config
    OUT/config.json    the source's, and its tokenizer files    OUT/conversion.json   source, options, checksums

Everything is written to a directory beside OUT and renamed at the end, so an OUT that exists is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tqdm
import yaml

from kimi_k3 import checksums, maxtext_keys
from kimi_k3.convert import write
from kimi_k3.convert.index import Source
from kimi_k3.convert.plan import Plan
from kimi_k3.convert.storage import WEIGHT_DTYPE
from kimi_k3.errors import InputError

DISTRIBUTION = "maxtext-kimi-k3"
SCHEMA = 1
RECORD = checksums.RECORD
STEP = "0"
PARAMETERS = f"{STEP}/items"
COPIED_FILES = (
    "config.json", "generation_config.json", "special_tokens_map.json", "tiktoken.model", "tokenizer.json",
    "tokenizer_config.json",
)  # fmt: skip


def check_output(out: Path, source: Source, plan: Plan, *, overwrite: bool) -> bool:
  """Returns whether `out` already holds this very conversion.

  Raises:
    InputError: if `out` holds anything else that must not be replaced, or lies in the source (or the source in it).
  """
  here, there = out.resolve(), source.directory.resolve()
  if here.is_relative_to(there) or there.is_relative_to(here):
    raise InputError(f"{out}: OUT and SRC ({source.directory}) are the same or inside each other, choose another OUT")
  if not out.exists() and not out.is_symlink():
    return False
  if not out.is_dir() or out.is_symlink():
    raise InputError(f"{out}: not a directory, choose another OUT")
  if not any(out.iterdir()):
    return False
  if not (out / RECORD).is_file():
    raise InputError(f"{out}: holds files but no {RECORD}: not a conversion, never overwritten; choose another OUT")
  difference = _difference(out, source, plan)
  if difference and not overwrite:
    raise InputError(f"{out}: holds {difference}; give --overwrite to replace it or choose another OUT")
  return not difference


def _difference(out: Path, source: Source, plan: Plan) -> str:
  """What sets an existing conversion apart from the plan; empty when nothing does."""
  try:
    record = json.loads((out / RECORD).read_bytes())
    found = (record["schema"], (record["source"]["fingerprint"], record["source"]["sample"]), record["options"])
  except (ValueError, KeyError, TypeError, OSError):
    return f"a conversion whose {RECORD} cannot be read"
  if found[0] != SCHEMA:
    return f"a conversion of schema {found[0]}, this version writes {SCHEMA}"
  if found[1] != (plan.fingerprint, source.sample()):
    return "a conversion of another source"
  if found[2] != plan.options:
    return f"a conversion with other options ({_spelled(found[2])}; asked for {_spelled(plan.options)})"
  return "" if (out / PARAMETERS / "_METADATA").is_file() else f"a conversion without its {PARAMETERS}"


def _spelled(options: Any) -> str:
  if not isinstance(options, Mapping):
    return repr(options)
  return ", ".join(f"{name}={str(value).lower()}" for name, value in options.items())


def convert(out: Path, source: Source, plan: Plan, *, workers: int, command: str) -> None:
  """Carries out the plan and puts the result at `out`, replacing what is there.

  Call `check_output` before. An error or Ctrl-C leaves `out` as it was and nothing beside it; so does an `out` that
  another conversion is making or has made meanwhile.

  Args:
    out: Where to.
    source: What the plan was made from.
    plan: What to write.
    workers: Leaves written at a time.
    command: The command line, for the header of decode.yml.
  """
  decode = _decode_yml(source, plan, command)  # First: it costs nothing and may fail.
  out = out.resolve()  # TensorStore takes no path with `..` in it.
  with _appearing(out, plan) as temporary:
    sums = _write_arrays(temporary, source, plan, workers)
    for name in COPIED_FILES:
      if (source.directory / name).is_file():
        shutil.copyfile(source.directory / name, temporary / name)
    (temporary / "decode.yml").write_text(decode)
    (temporary / RECORD).write_text(json.dumps(_record(source, plan, sums), indent=2) + "\n")


@contextlib.contextmanager
def _appearing(out: Path, plan: Plan) -> Iterator[Path]:
  """A fresh directory beside `out` that becomes `out` at the end, or vanishes on an error.

  Its name holds the source's fingerprint: a later version may find it again and resume.
  """
  temporary = out.parent / f"{out.name}.partial-{plan.fingerprint[:12]}"
  replaced = _inode(out)
  try:
    temporary.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(temporary, os.O_RDONLY)
  except OSError as error:
    raise InputError(f"{temporary}: cannot be created ({error.strerror}), choose another OUT") from error
  try:
    _lock(descriptor, temporary)
    try:
      _make_empty(temporary, plan.nbytes)
      yield temporary
      _swap(temporary, out, replaced)
    except BaseException:  # Ctrl-C too
      shutil.rmtree(temporary, ignore_errors=True)
      raise
  finally:
    os.close(descriptor)


def _inode(path: Path) -> int | None:
  return path.stat().st_ino if path.exists() else None


def _lock(descriptor: int, directory: Path) -> None:
  """Makes the open `directory` ours, until it is closed or we are killed. Two writers would ruin each other's files."""
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise InputError(f"{directory}: another conversion is writing there, wait for it or choose another OUT") from error
  except OSError:
    pass  # A file system without locks: nothing can be told.
  if _inode(directory) != os.fstat(descriptor).st_ino:  # It was renamed between opening and locking.
    raise InputError(f"{directory}: another conversion was writing there and has just ended, start again")


def _make_empty(directory: Path, nbytes: int) -> None:
  """Removes what a killed conversion left, and checks that the disk has room for `nbytes`."""
  try:
    for path in directory.iterdir():
      shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    free = shutil.disk_usage(directory).free
  except OSError as error:
    raise InputError(f"{directory}: cannot be emptied ({error.strerror}), choose another OUT") from error
  if free < nbytes:
    raise InputError(f"{directory.parent}: {free:,} bytes free, the conversion takes {nbytes:,}; choose another OUT")


def _swap(temporary: Path, out: Path, replaced: int | None) -> None:
  """Renames `temporary` to `out`; what was there, the directory with inode `replaced`, goes away only after that."""
  if _inode(out) != replaced:
    raise InputError(f"{out}: changed while the conversion ran, nothing written; start again or choose another OUT")
  if replaced is None:
    temporary.rename(out)
    return
  old = out.parent / f"{temporary.name}.replaced"
  out.rename(old)
  try:
    temporary.rename(out)
  except BaseException:
    old.rename(out)
    raise
  shutil.rmtree(old)


def _write_arrays(directory: Path, source: Source, plan: Plan, workers: int) -> dict[str, str]:
  step, lock = directory / STEP, threading.Lock()
  step.mkdir()
  with tqdm.tqdm(total=plan.nbytes, unit="B", unit_scale=True, unit_divisor=1024, desc="convert") as bar:

    def progress(nbytes: int) -> None:
      with lock:
        bar.update(nbytes)

    return write.write_checkpoint(step, source, plan.leaves, scan=plan.scan, workers=workers, progress=progress)


def _record(source: Source, plan: Plan, sums: Mapping[str, str]) -> dict[str, Any]:
  """conversion.json: enough to recognise the conversion, to undo it, and to recognise every leaf."""
  return {
    "schema": SCHEMA,
    "source": {
      "directory": str(source.directory.resolve()),
      "fingerprint": plan.fingerprint,
      "sample": source.sample(),
    },
    "options": plan.options,
    "stored": dataclasses.asdict(plan.form) | {"float32_leaves": plan.config.float32_leaves},
    "packed_modules": plan.config.packed_modules,
    "version": _version(),
    "leaves": len(plan.leaves),
    "bytes": plan.nbytes,
    checksums.FIELD: sums,
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
  header = (
    f"# Written by: {command}\n# Source: {source.directory.resolve()}\n# Its fingerprint: {plan.fingerprint}\n"
    "# Paths are relative to this file.\n"
  )
  return header + yaml.safe_dump(keys, sort_keys=False, default_flow_style=None, width=100)


def default_workers() -> int:
  """Leaves to write at a time: each worker holds about half a GiB, and four keep a disk busy."""
  return min(4, os.cpu_count() or 1)
