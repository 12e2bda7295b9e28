"""docs/faults.md names tests: they exist, every kind has a row, and no cell is left open."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "faults.md"
# Words by which to know each kind, in the order of the page.
KINDS = (
  "state axes swapped",
  "changed by later tokens",
  "padded end",
  "left pads",
  "short tail",
  "neighbours' lengths",
  "slot's former state",
  "clamping",
  "uninitialised state",
  "nan in pad rows",
  "packed documents",
  "silently in bf16",
  "all 93 layers",
  "padded experts",
  "explicit `false`",
  "optional config keys",
  "parsed but not wired",
  "bias stored in bf16",
  "stop id",
  "nan = nan",
)


def rows() -> list[list[str]]:
  """The cells of each row of the table, without its head."""
  lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
  return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names_of_tests(path: Path) -> set[str]:
  return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_kind_has_a_row_of_four_cells_in_order():
  found = rows()
  assert len(found) == len(KINDS)
  for cells, kind in zip(found, KINDS, strict=True):
    assert kind in cells[0].lower()
    assert len(cells) == 4
    assert all(cells), f"an empty cell in the row of {kind!r}"


def test_every_test_that_the_page_names_exists():
  named = re.findall(r"`(tests/[^`\s]+)::([^`\s]+)`", PAGE.read_text())
  missing = [
    f"{path}::{name}"
    for path, name in named
    if not name.startswith("test_") or not (REPO / path).is_file() or name not in names_of_tests(REPO / path)
  ]
  assert len(named) > 50
  assert not missing, f"named in {PAGE.name}, but not there: {missing}"


def test_no_cell_is_left_open():
  assert not [cells[0] for cells in rows() if "TODO" in " ".join(cells)]
