"""Compiled results kept between runs: what the TPU compiler said of a program, under a hash of all it depends on.

A key holds the architecture, how it is computed and cut, the program's sizes, the compiler's options, the releases of
what makes the program, and this package's own source: after any change the program is compiled anew.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kimi_k3.capacity.topology import libtpu_version

VARIABLE = "KIMI_K3_PLAN_CACHE"
_SOURCE = Path(__file__).resolve().parents[1]
# What no compiled program depends on: other verbs, and how results are searched and shown.
_APART = ("cli/", "convert/", "generate/", "capacity/fit.py", "capacity/plot.py", "capacity/report.py")
_NEEDED = {"fits", "total_bytes", "compile_s", "warnings"}  # a file without them is none of ours
_RELEASES = ("jax", "jaxlib", "flax", "tokamax", "qwix")


def default_directory() -> Path:
  """Returns where results are kept: $KIMI_K3_PLAN_CACHE, or kimi-k3/plan in the user's cache directory."""
  if named := os.environ.get(VARIABLE):
    return Path(named)
  base = os.environ.get("XDG_CACHE_HOME")
  return (Path(base) if base else Path.home() / ".cache") / "kimi-k3" / "plan"


class Results:
  """A directory of results, one JSON file each. None: nothing is kept for later runs."""

  def __init__(self, directory: Path | None, say: Callable[[str], object] = lambda _: None):
    self.directory, self._say = directory, say
    self._made: dict[str, dict[str, Any]] = {}

  def of(self, key: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what was kept under the key, marked `cached`, or makes it and keeps it.

    A file that cannot be read is made again; a directory that cannot be written to keeps nothing, and that is said.

    Args:
      key: All that the result depends on, of plain values.
      make: Compiles.
    """
    name = digest(key)
    found = self._made.get(name) or self._kept(name)
    if found is not None:
      return found | {"cached": True}
    found = self._made[name] = make()
    if self.directory is not None:
      self._keep(name, found)
    return found | {"cached": False}

  def _kept(self, name: str) -> dict[str, Any] | None:
    if self.directory is None:
      return None
    try:
      found = json.loads((self.directory / f"{name}.json").read_text())
    except (OSError, ValueError):
      return None
    return found if isinstance(found, dict) and found.keys() >= _NEEDED else None

  def _keep(self, name: str, found: dict[str, Any]) -> None:
    assert self.directory is not None
    path = self.directory / f"{name}.json"
    try:
      self.directory.mkdir(parents=True, exist_ok=True)
      part = path.with_suffix(f".{os.getpid()}")
      part.write_text(json.dumps(found))
      part.replace(path)
    except OSError as error:
      self._say(f"{path}: not kept for later runs: {error.strerror}")


def digest(key: Mapping[str, Any]) -> str:
  """Returns a name for the key, the releases involved and this package's source."""
  whole = {"key": key, "releases": _releases(), "source": source_digest()}
  return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _releases() -> dict[str, str]:
  return {name: importlib.metadata.version(name) for name in _RELEASES} | {"libtpu": libtpu_version()}


@functools.cache
def source_digest() -> str:
  """Returns a hash of every source file of this package that a compiled program can depend on."""
  found = hashlib.sha256()
  for path in sorted(_SOURCE.rglob("*.py")):
    name = path.relative_to(_SOURCE).as_posix()
    if not name.startswith(_APART):
      found.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
  return found.hexdigest()
