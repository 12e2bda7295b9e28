"""Files that ship with the package: inside it in a wheel, where people edit them in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parents[1]


def configs_dir() -> Path:
  """Returns the directory of the shipped YAML configs, `models/` among them."""
  return _find(_PACKAGE / "configs", _CHECKOUT / "configs")


def demo_dir() -> Path:
  """Returns the golden case behind `make demo`: `checkpoint/` in the released layout, `golden.npz`, `golden.json`."""
  return _find(_PACKAGE / "demo", _CHECKOUT / "tests" / "golden" / "k3-nano")


def _find(in_wheel: Path, in_checkout: Path) -> Path:
  for directory in (in_wheel, in_checkout):
    if directory.is_dir():
      return directory
  raise FileNotFoundError(f"neither {in_wheel} nor {in_checkout} exists: the installation is incomplete, reinstall it")
