"""One refusal for many faults: all of them are looked for, and the message stays one readable line."""

from __future__ import annotations

from collections.abc import Iterable

from kimi_k3.errors import InputError

MAX_LISTED = 8  # A released checkpoint has half a million tensors: the first few tell what happened.


def listed(items: Iterable[str]) -> str:
  """The items on one line, the first MAX_LISTED of them and how many more there are."""
  items = [item.replace("\n", "\\n").replace("\r", "\\r") for item in items]
  more = f"; and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
  return "; ".join(items[:MAX_LISTED]) + more


def refuse_any(faults: Iterable[str], advice: str) -> None:
  """Raises an InputError that lists the faults and then says what to do, unless there are none."""
  faults = list(faults)
  if faults:
    raise InputError(f"{listed(faults)}: {advice}")
