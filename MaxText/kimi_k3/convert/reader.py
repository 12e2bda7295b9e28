"""A finished conversion, read back: what its record says it is, and what its arrays hold.

Everything is read through `database` or `store`, so a bucket's URL works as a directory does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kimi_k3 import checksums
from kimi_k3.config import KimiK3Config
from kimi_k3.convert import appear, chunks, mapping, output, store, unfinished
from kimi_k3.convert.database import Arrays, Database
from kimi_k3.convert.faults import listed
from kimi_k3.convert.mapping import Leaf, StoredForm
from kimi_k3.errors import InputError

_REASON_LENGTH = 160  # characters of a parser's message
_AGAIN = "convert again"


@dataclasses.dataclass(frozen=True)
class Output:
  """A finished conversion. Nothing is ever written to it.

  Attributes:
    path: Local path or URL.
    record: conversion.json.
    record_bytes: As it stands there.
    hf_config: config.json, the source's.
    config_bytes: As it stands there.
    config: Of the model, as it is stored here.
    form: How the source stored its tensors.
    scan: Whether layers are folded.
    leaves: What the record and the config imply, in the order of the model.
    database: Its arrays.
  """

  path: str
  record: Mapping[str, Any]
  record_bytes: bytes
  hf_config: Mapping[str, Any]
  config_bytes: bytes
  config: KimiK3Config
  form: StoredForm
  scan: bool
  leaves: tuple[Leaf, ...]
  database: Database

  @property
  def options(self) -> Mapping[str, Any]:
    """What convert was told: scan, experts, dense."""
    return self.record["options"]

  def file(self, name: str) -> bytes | None:
    """Returns a file beside the arrays; None if there is none."""
    return _read(store.open_store(self.path), name)

  @property
  def arrays(self) -> Arrays:
    """See Database."""
    return self.database.arrays

  def data_faults(self) -> list[str]:
    """See Database. The files are named below OUT."""
    return [f"{unfinished.ITEMS}/{fault}" for fault in self.database.data_faults()]

  def read(self, name: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
    """See Database."""
    return self.database.read(name, slices)

  def read_chunk(self, leaf: Leaf, chunk: chunks.Chunk) -> np.ndarray:
    """See Database."""
    return self.database.read_chunk(leaf, chunk)


def open_output(out: str | Path) -> Output:
  """Returns the finished conversion at a local path or a URL. Its arrays are not looked at yet.

  Raises:
    InputError: if there is none, if it is unfinished or of another schema, or if its record or config is damaged.
  """
  path = str(out)
  if not store.is_url(path):
    path = str(appear.local(path))
    _check_utf8(path)
  where, held = str(out), store.open_store(path)
  _refuse_unfinished(where, path, held)
  record_bytes = _read(held, output.RECORD)
  if record_bytes is None:
    _refuse_missing(where, path, held)
  assert record_bytes is not None
  record = _record(where, record_bytes)
  missing = [name for name in unfinished.MARKERS if _read(held, name) is None] if record["commit"] == "marker" else []
  if missing:
    raise InputError(
      f"{where}: commit marker {' and '.join(missing)} missing: an unfinished conversion or a copy of a part; {_AGAIN}"
    )
  config_bytes = _read(held, "config.json")
  if config_bytes is None:
    raise InputError(f"{where}: config.json is missing, expected in every conversion; {_AGAIN}")
  hf_config = _json_object(f"{where}/config.json", config_bytes)
  with _malformed(f"{where}: {output.RECORD}"):
    config, form = _stored_config(hf_config, record)
    scan = bool(record["options"]["scan"])
    leaves = mapping.leaves(config, form, scan=scan)
  database = Database(store.in_directory(path, unfinished.ITEMS), _AGAIN)
  return Output(path, record, record_bytes, hf_config, config_bytes, config, form, scan, leaves, database)


def _check_utf8(path: str) -> None:
  try:
    path.encode()
  except UnicodeEncodeError as error:
    raise InputError(f"{path!a}: a path that is not UTF-8, which TensorStore does not take: rename it") from error


def _refuse_unfinished(where: str, path: str, held: store.Store) -> None:
  if path.rstrip("/").endswith(unfinished.PARTIAL_SUFFIX):
    raise InputError(f"{where}: an unfinished conversion by its name; run the same `kimi-k3 convert` again")
  state = unfinished.STATE_DIRECTORY
  if _read(held, f"{state}/{unfinished.PLAN}") is not None:
    raise InputError(f"{where}: holds {state}: an unfinished conversion; run the same `kimi-k3 convert` again")


def _refuse_missing(where: str, path: str, held: store.Store) -> None:
  """Says what is there in the place of a conversion."""
  if not held.exists():
    partial = path.rstrip("/") + unfinished.PARTIAL_SUFFIX
    if store.open_store(partial).exists():
      raise InputError(f"{where}: unfinished, {partial} is there; run the same `kimi-k3 convert` again")
    raise InputError(f"{where}: nothing there, expected what `kimi-k3 convert SRC OUT` made")
  raise InputError(f"{where}: no {output.RECORD}, expected what `kimi-k3 convert SRC OUT` made")


def _read(held: store.Store, name: str) -> bytes | None:
  try:
    return held.read(name)
  except OSError as error:
    raise InputError(f"{held.url}/{name}: cannot be read ({error.strerror}): check the disk and permissions") from error


def _json_object(what: str, data: bytes) -> dict[str, Any]:
  try:
    value = json.loads(data)
  except (ValueError, RecursionError) as error:
    raise InputError(f"{what}: damaged, not JSON ({str(error)[:_REASON_LENGTH]}); {_AGAIN}") from error
  if not isinstance(value, dict):
    raise InputError(f"{what}: damaged, a JSON {type(value).__name__} where an object was expected; {_AGAIN}")
  return value


def _record(where: str, data: bytes) -> dict[str, Any]:
  """conversion.json, after a check of its schema and of every field that is used."""
  record = _json_object(f"{where}/{output.RECORD}", data)
  if record.get("schema") != output.SCHEMA:
    raise InputError(
      f"{where}: made by version {record.get('version', 'unknown')} with schema {record.get('schema')!r}, this version "
      f"reads schema {output.SCHEMA}: {_AGAIN}"
    )
  faults = [
    f"{field} is {str(_at(record, field))[:40]}" for field, kind in _FIELDS.items() if not _is(record, field, kind)
  ]
  if faults:
    raise InputError(f"{where}: {output.RECORD} is damaged ({listed(faults)}); {_AGAIN}")
  return record


_FIELDS: Mapping[str, type] = {
    "source": dict, "source.fingerprint": str, "source.sample": str, "source.shards": dict, "options": dict,
    "options.scan": bool, "options.experts": str, "options.dense": str, "stored": dict, "stored.prefix": str,
    "stored.packed_modules": list, "stored.a_log_shape": list, "stored.float32_leaves": list, "packed_modules": list,
    "fp8_modules": list, "leaves": int, "bytes": int, "commit": str, checksums.FIELD: dict,
    checksums.CHUNKS_FIELD: dict,
}  # fmt: skip


def _at(record: Mapping[str, Any], field: str) -> Any:
  value: Any = record
  for key in field.split("."):
    value = value.get(key) if isinstance(value, Mapping) else None
  return value


def _is(record: Mapping[str, Any], field: str, kind: type) -> bool:
  value = _at(record, field)
  return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


@contextlib.contextmanager
def _malformed(what: str) -> Iterator[None]:
  """Around what is made of a record: a field of a wrong kind inside it is no fault of ours."""
  try:
    yield
  except InputError:
    raise
  except (KeyError, TypeError, ValueError, IndexError) as error:
    raise InputError(f"{what} is damaged ({error!r}); {_AGAIN}") from error


def _stored_config(hf_config: Mapping[str, Any], record: Mapping[str, Any]) -> tuple[KimiK3Config, StoredForm]:
  """The config of what is stored in OUT, and how its source stored it."""
  stored = record["stored"]
  form = StoredForm(
    prefix=stored["prefix"],
    packed_modules=tuple(stored["packed_modules"]),
    a_log_shape=tuple(stored["a_log_shape"]),
  )
  source = KimiK3Config.from_hf(
    hf_config, packed_modules=form.packed_modules, float32_leaves=tuple(stored["float32_leaves"])
  )
  here = {"packed_modules": tuple(record["packed_modules"]), "fp8_modules": tuple(record["fp8_modules"])}
  return dataclasses.replace(source, **here), form
