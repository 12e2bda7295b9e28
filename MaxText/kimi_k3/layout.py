"""Where each layer of the stack lives in the parameter tree, unrolled or folded. Pure arithmetic."""

from __future__ import annotations

import dataclasses

from kimi_k3.config import KimiK3Config
from kimi_k3.errors import InputError

LEAD_LAYERS = 4
BLOCK_LAYERS = 4
MAX_TAIL_LAYERS = 4


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a layer lives: under `decoder.<path>`, and at `index` of axis 0 of its leaves when it is in a block."""

  path: str
  index: int | None = None


@dataclasses.dataclass(frozen=True)
class Fold:
  """How `num_layers` layers fold into leading layers, scanned blocks of four and tail layers."""

  num_lead: int
  num_blocks: int
  num_tail: int

  @property
  def first_tail(self) -> int:
    """0-based number of the first layer after the blocks."""
    return self.num_lead + BLOCK_LAYERS * self.num_blocks

  def place(self, layer: int) -> Place:
    """Where the 0-based `layer` lives."""
    if layer < self.num_lead:
      return Place(f"lead_{layer}")
    if layer < self.first_tail:
      block, position = divmod(layer - self.num_lead, BLOCK_LAYERS)
      return Place(f"blocks.layers_{position}", block)
    return Place(f"tail_{layer - self.first_tail}")


def fold(config: KimiK3Config) -> Fold:
  """Returns the fold of the config's layer lists: blocks repeat the pattern of layers 4 to 7, the rest is the tail.

  Raises:
    InputError: if more than four layers are left over, which no scan of four-layer blocks can hold.
  """
  patterns = list(zip(config.layer_kinds, config.moe_layers, strict=True))
  num_lead = min(LEAD_LAYERS, len(patterns))
  rest = patterns[num_lead:]
  num_blocks = 0
  while len(block := rest[num_blocks * BLOCK_LAYERS :][:BLOCK_LAYERS]) == BLOCK_LAYERS and block == rest[:BLOCK_LAYERS]:
    num_blocks += 1
  num_tail = len(rest) - num_blocks * BLOCK_LAYERS
  if num_tail > MAX_TAIL_LAYERS:
    raise InputError(
      f"scan_layers: true needs blocks of four equal layers after the fourth; layers {config.num_layers - num_tail} to "
      f"{config.num_layers - 1} (0-based) do not repeat the pattern of layers 4 to 7: set scan_layers: false"
    )
  return Fold(num_lead, num_blocks, num_tail)


def place(config: KimiK3Config, layer: int, *, scan: bool) -> Place:
  """Returns where the 0-based `layer` lives in the tree."""
  return fold(config).place(layer) if scan else Place(f"layers_{layer}")
