"""How often the loops of a prefill program run whose counts depend on data, for reading the compiled program.

`kimi_k3.capacity.hlo` reads the counts of all other loops from the program's text. These hang on the tokens that a row
has already, on where a device's part of the cache begins, and on how many tokens choose its experts. A device waits
for the others in every layer, so each count is the one of the device that has most to do.
"""

from __future__ import annotations

from kimi_k3 import mla_prefill
from kimi_k3.capacity.traffic import expected_hits
from kimi_k3.config import LayerKind
from kimi_k3.errors import InputError
from kimi_k3.moe import grouped
from kimi_k3.moe.latent_moe import _pieces
from kimi_k3.spmd.cuts import Axes
from kimi_k3.spmd.model import SpmdModel

_BODY = "/while/body/eval_jaxpr"  # the path of a loop's body, as JAX 0.12 traces it


def prefill_loops(
  model: SpmdModel, *, tokens: int, length: int, start: int, cut: str = "sequence", history: bool | None = None
) -> dict[str, int]:
  """Returns runs each time a loop is entered, by pattern of its path, for `loops` of `capacity.hlo`.

  Of one row of `tokens` real tokens, `programs.prefill(rows=1)`. The experts' loop counts for tokens that choose
  uniformly, see `expert_chunks`.

  Args:
    model: On its mesh.
    tokens: Of the chunk, all real.
    length: Tokens that the row's latents have room for.
    start: Tokens that the row has already.
    cut: How the tokens are cut: "sequence" or "whole".
    history: Whether the program was made for rows that have tokens already; None: where start is not 0.

  Raises:
    InputError: if the chunk does not fit behind `start`, or an implementation is named whose loops are not known here.
  """
  _check(model, tokens, length, start)
  found: dict[str, int] = {}
  kinds = {unit.kind for unit in model.units}
  if LayerKind.MLA in kinds:
    devices = model.cuts.size(model.cuts.heads)
    found["*/write_chunk/while*"] = written_windows(tokens, length // devices, start)
    if start > 0 if history is None else history:
      found["*/mla_history/while*"] = history_blocks(length // devices, start)
  pieces = expert_pieces(model, tokens, cut)
  around = {"" if unit.count is None else _BODY for unit in model.units if unit.moe}
  inside = _BODY if pieces > 1 else ""
  for place in sorted(around):
    found[f"jit(chunk)/shard_map{place}{inside}/while"] = expert_chunks(model, tokens // pieces, cut)
  return found


def written_windows(tokens: int, part: int, start: int) -> int:
  """Returns how many windows of latents the device writes that has most of them.

  Args:
    tokens: Of the chunk.
    part: Positions of a row's cache that a device holds.
    start: Tokens that the row has already.
  """
  window = min(mla_prefill.WRITE_BLOCK, tokens, part)
  ends = range(start // part * part, start + tokens, part)  # where the parts begin that hold some of the chunk
  most = max(min(start + tokens, begin + part) - max(start, begin) for begin in ends)
  return -(-most // window)


def history_blocks(part: int, start: int) -> int:
  """Returns how many blocks of history are fetched before a chunk. All devices go through all of them.

  A block lies in one device's part, so that the last of a part may be short; where parts are small it is several whole
  parts.
  """
  if start == 0:
    return 0
  blocks = -(-part // mla_prefill.HISTORY_BLOCK)
  owners = max(1, mla_prefill.HISTORY_BLOCK // part)
  last = start - 1
  return (last // part * blocks + last % part // min(mla_prefill.HISTORY_BLOCK, part)) // owners + 1


def expert_pieces(model: SpmdModel, tokens: int, cut: str = "sequence") -> int:
  """Returns in how many pieces the tokens of a chunk go to the experts."""
  parts = model.cuts.size(_token_axes(model, cut))
  return _pieces(tokens // parts, parts)


def expert_choices(model: SpmdModel, tokens: int, cut: str = "sequence") -> float:
  """Returns how many (token, choice) pairs of a piece a device's experts get, if tokens choose uniformly: the mean."""
  return _gathered(model, tokens, cut) * model.config.num_experts_per_token / model.cuts.size(model.cuts.experts)


def expert_chunks(model: SpmdModel, tokens: int, cut: str = "sequence") -> int:
  """Returns in how many chunks of rows the busiest device walks through the choices of a piece.

  Choices are uniform but not even: some device has more than the mean. So where the mean fills whole chunks, as that of
  16,384 tokens on 32 devices does to the row, there is one more.
  """
  config, groups = model.config, model.cuts.size(model.cuts.experts)
  gathered, choices = _gathered(model, tokens, cut), config.num_experts_per_token
  chunk = min(grouped.CHUNK_ROWS, gathered * choices)
  most = -(-gathered * min(choices, config.num_experts // groups) // chunk)
  return min(most, int(expert_choices(model, tokens, cut) // chunk) + 1)


def expert_hits(model: SpmdModel, tokens: int, cut: str = "sequence") -> float:
  """Returns the part of a device's experts that a piece's tokens hit, as expected of uniform choices."""
  experts, choices = model.config.num_experts, model.config.num_experts_per_token
  return expected_hits(experts, choices, _gathered(model, tokens, cut)) / experts


def _token_axes(model: SpmdModel, cut: str) -> Axes:
  """Axes that cut the tokens of a chunk."""
  return model.cuts.rows + model.cuts.heads if cut == "sequence" else ()


def _gathered(model: SpmdModel, tokens: int, cut: str) -> int:
  """Tokens of a piece that a device's experts see: those of devices along axes that cut no experts stay away."""
  cuts = model.cuts
  alone = [axis for axis in _token_axes(model, cut) if axis not in cuts.experts + cuts.expert_width]
  return tokens // cuts.size(tuple(alone))


def _check(model: SpmdModel, tokens: int, length: int, start: int) -> None:
  compute = model.compute
  wanted = {"prefill_expert_implementation": "grouped", "mla_prefill_implementation": "flash"}
  faults = [
    f"{name} {getattr(compute, name)} (known: {known})"
    for name, known in wanted.items()
    if getattr(compute, name) != known
  ]
  if faults:
    raise InputError(f"how often the loops of a prefill program run is not known with {', '.join(faults)}")
  if tokens < 1 or start < 0 or start + tokens > length:
    raise InputError(
      f"a chunk of {tokens} tokens behind {start}: expected at least one, that end within the {length} of the cache"
    )
