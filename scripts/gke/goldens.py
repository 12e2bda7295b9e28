#!/usr/bin/env python3
"""Writes tests/golden/gke anew: the rendered files that a test compares. Look at the difference before you commit it.

python scripts/gke/goldens.py
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import render

DIRECTORY = Path(__file__).resolve().parents[2] / "tests" / "golden" / "gke"
# Folder and command line.
GOLDENS: dict[str, tuple[str, ...]] = {
  "2x2x1": ("--topology", "2x2x1"),
  "2x2x4": ("--topology", "2x2x4"),
  "4x4x4": ("--topology", "4x4x4"),
  "4x4x4-two-slices-kueue": ("--topology", "4x4x4", "--slices", "2", "--scheduling", "kueue=tpus"),
  "convert": ("--job", "convert"),
}


def main(argv: Sequence[str] | None = None) -> int:
  if rest := sys.argv[1:] if argv is None else argv:
    print(f"goldens: error: unexpected {rest[0]}: it takes no arguments", file=sys.stderr)
    return 2
  for name, arguments in GOLDENS.items():
    shutil.rmtree(DIRECTORY / name, ignore_errors=True)
    if code := render.main([*arguments, "--to", str(DIRECTORY / name)]):
      return code
  return 0


if __name__ == "__main__":
  sys.exit(main())
