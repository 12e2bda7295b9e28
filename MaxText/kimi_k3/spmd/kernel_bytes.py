"""What the TPU kernels of a program read and write, for counting a compiled program's HBM traffic."""

from __future__ import annotations

from collections.abc import Mapping

from kimi_k3.capacity.hlo import KernelBytes, KernelCall, layer_of_stack
from kimi_k3.config import LayerKind
from kimi_k3.errors import InputError
from kimi_k3.mla_flash import BLOCK
from kimi_k3.moe import tokamax_gmm
from kimi_k3.spmd import loop_counts
from kimi_k3.spmd.model import SpmdModel

_EXPERT_WEIGHTS = range(8, 14)  # codes and scales of three matrices, after scalars, choices and rows
_KDA_STATES = 8
_LATENTS = 6

# Operands of the kernels of prefill, prefetched scalars counted.
_GROUPED_SCALARS, _GROUPED_ROWS = 3, 3
_FLASH_SCALARS = 2
_FLASH_QUERIES, _FLASH_NOPE, _FLASH_TAIL, _FLASH_VALUES, _FLASH_STATE = range(2, 7)


def decode_kernel_bytes(*, hit: float = 1.0, filled: float = 1.0) -> dict[str, KernelBytes]:
  """Returns bytes a call by pattern of the kernel's name, for `capacity.hlo.hbm_bytes`.

  Args:
    hit: Part of a device's experts that tokens have chosen: only these are read.
    filled: Part of the latent cache that rows have filled: only this is read. One token is written.
  """
  return {
    "kda_step*": layer_of_stack({_KDA_STATES}),
    "expert_decode": layer_of_stack(_EXPERT_WEIGHTS, share=dict.fromkeys(_EXPERT_WEIGHTS, hit)),
    "latent_step": layer_of_stack({_LATENTS}, share={_LATENTS: filled, -1 - 2: 0.0}),
  }


def prefill_kernel_bytes(
  model: SpmdModel, *, tokens: int, length: int, start: int, cut: str = "sequence", history: bool | None = None
) -> dict[str, KernelBytes]:
  """Returns the same of a chunk of prefill, to be counted with the loops of `loop_counts.prefill_loops`.

  Approximate in this: experts are hit and loaded as expected of tokens that choose uniformly; a tile of rows is read
  whole at its end; of two blocks of a grid that follow each other and are the same one counts twice where the causal
  grid turns from one block of queries to the next, once a head.

  Args:
    model: On its mesh.
    tokens: As for prefill_loops; so are the other arguments.

  Raises:
    InputError: as prefill_loops, and for a KDA implementation whose kernels are not known here.
  """
  loops = loop_counts.prefill_loops(model, tokens=tokens, length=length, start=start, cut=cut, history=history)
  kinds, found = {unit.kind for unit in model.units}, {}
  if LayerKind.KDA in kinds:
    found |= _kda_kernels(model.compute.kda_implementation)
  if any(unit.moe for unit in model.units):
    found["expert_grouped"] = _grouped(model, tokens // loop_counts.expert_pieces(model, tokens, cut), cut)
  if LayerKind.MLA in kinds:
    found["flash_causal"] = _flash_causal
    if blocks := next((count for pattern, count in loops.items() if "mla_history" in pattern), 0):
      found["flash_all"] = _flash_all(start / blocks)
  return found


def _kda_kernels(implementation: str) -> Mapping[str, KernelBytes]:
  """Of tokamax's two kernels: both visit each chunk of 64 tokens of each head once, and keep the state in VMEM between.

  What the first makes of a chunk (keys, queries and values within it) the second reads again.
  """
  if implementation == "tokamax_mosaic":
    return {"pallas_kda_fwd_intra_fused": layer_of_stack(), "chunk_kda_fwd_h_o_varlen": layer_of_stack()}
  if implementation in ("portable", "tokamax_xla_chunked"):
    return {}  # no kernels: all is in the program's text
  raise InputError(f"what the kernels of kda_implementation {implementation} move is not known: use tokamax_mosaic")


def _grouped(model: SpmdModel, tokens: int, cut: str) -> KernelBytes:
  """Of tokamax's grouped product, on one piece of tokens: columns outside, tiles of rows inside.

  The rows are read again for each tile of columns. A tile of weights stays while the next rows are of the same expert,
  so that each expert that is hit is read once; an expert whose rows end in the next chunk is read there again.
  """
  chunks = loop_counts.expert_chunks(model, tokens, cut)
  rows_a_run = loop_counts.expert_choices(model, tokens, cut) / chunks
  experts = model.config.num_experts // model.cuts.size(model.cuts.experts)
  hit = loop_counts.expert_hits(model, tokens, cut) * experts
  read_a_run = min(experts, (hit + chunks - 1) / chunks)

  def count(call: KernelCall) -> tuple[float, float]:
    rows, weights = call.operands[_GROUPED_ROWS], call.operands[_GROUPED_ROWS + 1 :]
    columns = call.results[0].dims[1]
    real = min(1.0, rows_a_run / rows.dims[0])
    part = read_a_run / experts
    read = sum(array.hbm_bytes for array in call.operands[:_GROUPED_SCALARS])
    read += rows.hbm_bytes * real * -(-columns // min(tokamax_gmm._TILE_COLUMNS, columns))
    # Codes [n, E, in, out] of all layers; factors [E, in/32, 1, out] of this one.
    codes, factors = weights[: len(weights) // 2], weights[len(weights) // 2 :]
    read += part * sum(array.hbm_bytes / array.dims[0] for array in codes)
    read += part * sum(array.hbm_bytes for array in factors)
    return read, call.results[0].hbm_bytes * real

  return count


def _flash_causal(call: KernelCall) -> tuple[float, float]:
  """Block i of the queries meets blocks 0 to i of the keys, for each head; each reads the tail that all heads share."""
  heads, tokens = call.operands[_FLASH_QUERIES].dims[1], call.operands[_FLASH_QUERIES].dims[3]
  times = (-(-tokens // BLOCK) + 1) / 2
  return _flash_read(call, times, heads), float(sum(array.hbm_bytes for array in call.results))


def _flash_all(seen: float) -> KernelBytes:
  """Every block of queries meets all blocks of the keys that hold history; the state is read and written once.

  Args:
    seen: Real positions of a block of history, on average over the calls.
  """

  def count(call: KernelCall) -> tuple[float, float]:
    heads, tokens = call.operands[_FLASH_QUERIES].dims[1], call.operands[_FLASH_QUERIES].dims[3]
    positions = call.operands[_FLASH_NOPE].dims[2]
    blocks = -(-positions // BLOCK)
    used = max(1.0, seen / positions * blocks)
    # One block alone stays where it is while the queries pass.
    times = used / blocks * (-(-tokens // BLOCK) if used > 1 else 1)
    return _flash_read(call, times, heads), float(sum(array.hbm_bytes for array in call.results))

  return count


def _flash_read(call: KernelCall, times: float, heads: int) -> float:
  """Queries and the state once, keys and values so many times, their tail for each head."""
  o = call.operands
  read = sum(array.hbm_bytes for array in (*o[: _FLASH_QUERIES + 1], *o[_FLASH_STATE:]))
  return read + times * (o[_FLASH_NOPE].hbm_bytes + o[_FLASH_VALUES].hbm_bytes + heads * o[_FLASH_TAIL].hbm_bytes)
