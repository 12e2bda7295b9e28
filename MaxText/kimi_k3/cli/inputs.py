"""Files that users hand in and get back: prompts as JSON, results written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from kimi_k3.errors import InputError

_SHOWN = 5


def read_rows(path: str) -> list[list[int]]:
  """Returns the id lists of a JSON file.

  Raises:
    InputError: if the file is missing or is not a non-empty list of non-empty lists of integers, naming the rows.
  """
  try:
    rows = json.loads(Path(path).read_text())
  except OSError as error:
    raise InputError(f"{path}: cannot be read: {error.strerror}") from error
  except (ValueError, RecursionError) as error:
    raise InputError(f"{path}: not JSON: {error}") from error
  if not isinstance(rows, list) or not rows:
    raise InputError(f"{path}: expected a non-empty list of lists of token ids, such as [[1, 2, 3], [4, 5]]")
  faulty = [i for i, row in enumerate(rows) if not _is_row(row)]
  if faulty:
    shown = ", ".join(map(str, faulty[:_SHOWN])) + (" ..." if len(faulty) > _SHOWN else "")
    raise InputError(f"{path}: row(s) {shown}: expected a non-empty list of integer token ids")
  return rows


def _is_row(row: object) -> bool:
  return isinstance(row, list) and bool(row) and all(isinstance(i, int) and not isinstance(i, bool) for i in row)


def check_vocabulary(rows: list[list[int]], vocab_size: int, source: str) -> None:
  """Raises InputError naming the first ids outside the vocabulary: they would be clamped to its last row in silence."""
  faults = [
    f"row {i} position {j}: {t}" for i, row in enumerate(rows) for j, t in enumerate(row) if not 0 <= t < vocab_size
  ]
  if faults:
    more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    raise InputError(f"{source}: token ids outside the vocabulary of {vocab_size}: {'; '.join(faults[:_SHOWN])}{more}")


def check_writable(path: str) -> None:
  """Raises InputError, before the work rather than after it, if a result could not be written to `path`."""
  target = Path(path)
  try:
    if target.is_dir():
      raise InputError(f"{path}: is a directory, expected a file to write")
    if not target.absolute().parent.is_dir():
      raise InputError(f"{path}: its directory does not exist")
    with tempfile.NamedTemporaryFile(dir=target.absolute().parent, prefix=_prefix(target)):
      pass
  except OSError as error:
    raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def _prefix(target: Path) -> str:
  return f".{target.name}."


def write_whole(path: str, write: Callable[[BinaryIO], object]) -> None:
  """Writes a file so that it either appears complete or not at all."""
  target = Path(path)
  descriptor, temporary = tempfile.mkstemp(dir=target.absolute().parent, prefix=_prefix(target))
  try:
    with os.fdopen(descriptor, "wb") as file:
      write(file)
    Path(temporary).chmod(0o644)
    Path(temporary).replace(target)
  except BaseException:
    Path(temporary).unlink(missing_ok=True)
    raise
