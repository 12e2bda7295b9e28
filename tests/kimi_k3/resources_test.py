"""Configs and the demo's checkpoint are found in a checkout and in a wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kimi_k3 import resources

REPO = Path(__file__).resolve().parents[2]


def names(directory: Path) -> set[str]:
  return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_a_checkout_uses_its_own_files():
  assert resources.configs_dir() == REPO / "configs"
  assert resources.demo_dir() == REPO / "tests" / "golden" / "k3-nano"


def test_a_wheel_holds_the_same_files(tmp_path):
  build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
  subprocess.run(build, cwd=REPO, check=True, capture_output=True, timeout=120)
  (wheel,) = tmp_path.glob("*.whl")
  installed = tmp_path / "installed"
  zipfile.ZipFile(wheel).extractall(installed)
  program = "from kimi_k3 import resources as r; print(r.__file__, r.configs_dir(), r.demo_dir(), sep='\\n')"
  run = subprocess.run([sys.executable, "-c", program], cwd=installed, check=True, capture_output=True, text=True)
  module, configs, demo = (Path(line) for line in run.stdout.splitlines())
  assert module.parent == installed / "kimi_k3"
  assert configs.is_relative_to(installed)
  assert demo.is_relative_to(installed)
  assert names(configs) == names(resources.configs_dir())
  assert names(demo) == names(resources.demo_dir())
  assert (module.parent / "py.typed").is_file()


def test_an_incomplete_installation_says_where_it_looked(monkeypatch, tmp_path):
  monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "kimi_k3")
  monkeypatch.setattr(resources, "_CHECKOUT", tmp_path)
  with pytest.raises(FileNotFoundError, match=r"kimi_k3/configs nor .*/configs exists.*reinstall"):
    resources.configs_dir()
