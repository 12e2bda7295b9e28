"""The engine of the manual partitioning: the same prefill, insert, step and release, on programs of our own."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Float

from kimi_k3.errors import InputError
from kimi_k3.generate.device_loop import NOT_FINITE, Decoded, Plan, Rows, decoded
from kimi_k3.maxtext_adapter.checkpoint import bytes_read, load_params, storage_settings
from kimi_k3.maxtext_adapter.config import architecture, compute_config
from kimi_k3.maxtext_adapter.engine import (
  Forward,
  check_rows,
  check_tokens,
  checkpoint_path,
  make_mesh,
  number_of_slots,
)
from kimi_k3.maxtext_adapter.placement import check_placement
from kimi_k3.moe.decode_kernel import MAX_TOKENS
from kimi_k3.spmd import programs, slices
from kimi_k3.spmd.cuts import Cuts
from kimi_k3.spmd.model import SpmdModel

LATENT_TILE = 128  # positions side by side in a TPU's memory, which the kernels read and write whole
TOKENS_TOGETHER = 8192  # of several prompts: more do not make better use of the weights that are read for them
EMPTY = -1  # position of a slot that holds no row


class SpmdPrefilled:
  """A prompt that has been run and waits for a slot.

  Attributes:
    logits: Of its next token [X], float32.
    length: Its tokens.
    number: Which it is of the prompts that were run together.
  """

  def __init__(self, logits: Float[Array, " X"], length: int, cache: dict[str, Array], number: int = 0):
    self.logits, self.length, self.number = logits, length, number
    self._cache: dict[str, Array] | None = cache

  def take(self) -> dict[str, Array]:
    """Returns the caches of all that were run together, once."""
    if self._cache is None:
      raise ValueError("this prompt has been inserted before: name all its slots in one call, or prefill it again")
    cache, self._cache = self._cache, None
    return cache


class SpmdEngine:
  """Prefill, insert, step and release. A row of the caches is a slot, empty until a prompt is inserted.

  In several processes each makes one and makes the same calls with the same values: all arrays are of all devices.
  """

  def __init__(self, config: Any, placement: str | None = None, devices: Sequence[Any] | None = None):
    """Loads the checkpoint. Communicates with no other process.

    Args:
      config: MaxText's HyperParameters.
      placement: How far the loaded weights are compared with the checkpoint, one of placement.MODES; None: "sample" in
        several processes, "none" in one.
      devices: In the order of the mesh; None: all, in an order of JAX's.
    """
    self.config = config
    self.model = build_model(config, devices)
    self._num_slots = number_of_slots(config, self.model.mesh.size)
    self._check_chunk()
    self._prompt_length = cache_length(self.model, config.max_prefill_predict_length, cut="sequence")
    # A prompt is inserted whole, pads at its end included.
    longest = max(config.max_target_length, self._prompt_length)
    self._length = cache_length(self.model, longest, cut=config.mla_cache_cut)
    abstract = self.model.cache(self._num_slots, self._length, cut=config.mla_cache_cut)
    self._params = load(self.model, config, placement)
    self._cache = programs.make_empty(abstract)()
    self._step = programs.decode_step(self.model, rows=self._num_slots, length=self._length, cut=config.mla_cache_cut)
    shardings = {name: leaf.sharding for name, leaf in abstract.items()}
    self._insert = jax.jit(programs.insert, donate_argnums=(0,), out_shardings=shardings)
    self._positions = np.full(self._num_slots, EMPTY, np.int32)

  @property
  def num_slots(self) -> int:
    """Rows that decode at the same time."""
    return self._num_slots

  @property
  def max_prompt(self) -> int:
    """Tokens of a prompt, at most."""
    return self.config.max_prefill_predict_length

  @property
  def max_steps(self) -> int:
    """Steps that a row can take after the longest prompt."""
    return self.config.max_target_length - self.config.max_prefill_predict_length

  @property
  def params(self) -> dict[str, Array]:
    """The parameters by their names in the tree, each where its sharding puts it."""
    return self._params

  @property
  def cache(self) -> dict[str, Array]:
    """The caches of all slots by the place of their layer; leaves [layers, slots, ...]."""
    return self._cache

  def prefill(self, tokens: np.ndarray, true_length: int) -> SpmdPrefilled:
    """Runs a prompt, in chunks of `prefill_chunk` if it is longer.

    Args:
      tokens: The prompt [T], whole numbers, padded on the right.
      true_length: Tokens that are no pads.

    Raises:
      ValueError: if `true_length` is not a length of `tokens`, they are longer than the prompt cache, or one is no
        token id.
    """
    self._check_prompt(tokens, true_length)
    cache = self._empty_prompts(1)()
    chunk = self.config.prefill_chunk or tokens.shape[0]
    logits: Any = None
    size = self._padded(min(chunk, tokens.shape[0]))  # of every part: two programs at most, whatever the length
    for start in range(0, true_length, chunk):
      part = tokens[start : min(start + chunk, true_length)]
      padded = np.zeros((1, size), np.int32)
      padded[0, : part.shape[0]] = part
      run = self._prefill(1, size, start > 0)
      inputs = (padded, _row(start), _row(part.shape[0]))
      logits, cache = run.function(self._params, cache, *placed(run, inputs))
    return SpmdPrefilled(logits[0], true_length, cache)

  def rows_together(self, tokens: int) -> int:
    """Prompts of so many tokens, pads included, that are run together: a power of two, `prefill_rows` at most.

    They have no more tokens in all than `prefill_chunk`, or without one than the longest prompt may have or
    TOKENS_TOGETHER.
    """
    room = self.config.prefill_chunk or max(self.config.max_prefill_predict_length, TOKENS_TOGETHER)
    return 1 << max(0, min(self.config.prefill_rows, room // self._padded(tokens)).bit_length() - 1)

  def prefill_together(self, prompts: Sequence[np.ndarray], true_lengths: Sequence[int]) -> list[SpmdPrefilled]:
    """Runs prompts of one padded length in one program, which reads the weights once.

    Args:
      prompts: Each [T], padded on the right; 1 to `rows_together(T)`. One alone is run by `prefill`.
      true_lengths: Of each.

    Raises:
      ValueError: as `prefill` does, or if the prompts are of several padded lengths, or too many.
    """
    if len(prompts) == 1:
      return [self.prefill(prompts[0], true_lengths[0])]
    if len({prompt.shape for prompt in prompts}) != 1:
      raise ValueError(f"prompts of shapes {[prompt.shape for prompt in prompts]}: expected one padded length")
    size = prompts[0].shape[0]
    rows = self.rows_together(size)
    if len(prompts) > rows:
      raise ValueError(f"{len(prompts)} prompts of {size} tokens together, expected {rows} at most")
    for prompt, length in zip(prompts, true_lengths, strict=True):
      self._check_prompt(prompt, length)
    padded, lengths = np.zeros((rows, self._padded(size)), np.int32), np.zeros(rows, np.int32)
    for number in range(rows):  # rows that are left over repeat the first: no row is without tokens
      source = number if number < len(prompts) else 0
      padded[number, : true_lengths[source]] = prompts[source][: true_lengths[source]]
      lengths[number] = true_lengths[source]
    run = self._prefill(rows, padded.shape[1], False)
    logits, cache = run.function(
      self._params, self._empty_prompts(rows)(), *placed(run, (padded, np.zeros(rows, np.int32), lengths))
    )
    return [SpmdPrefilled(logits[i], length, cache, i) for i, length in enumerate(true_lengths)]

  def insert(self, prompt: SpmdPrefilled, *slots: int) -> None:
    """Puts a prompt into an empty slot, or into several: rows that go on differently.

    Raises:
      ValueError: if a slot does not exist, is in use or is named twice, or the prompt was inserted before.
    """
    self._check_slots(slots)
    if used := [slot for slot in slots if self._positions[slot] != EMPTY]:
      raise ValueError(f"slot {', '.join(map(str, used))} is in use: release it first")
    cache = prompt.take()
    for slot in slots:
      self._cache = self._insert(self._cache, cache, prompt.number, slot)
      self._positions[slot] = prompt.length

  def step(self, tokens: np.ndarray) -> Float[Array, "B X"]:
    """Feeds one token [B] a slot and returns the logits of the next ones. Empty slots are left alone and mean nothing.

    Raises:
      ValueError: naming the rows whose cache is full, or if `tokens` is not one token id a slot.
    """
    check_tokens(tokens, f"for {self.num_slots} slots", self.config.vocab_size)
    if tokens.shape != (self.num_slots,):
      raise ValueError(f"{tokens.shape[0]} tokens for {self.num_slots} slots: expected one a slot")
    limit = self.config.max_target_length
    if full := np.flatnonzero(self._positions == limit).tolist():
      raise ValueError(
        f"slot {', '.join(map(str, full))}: the cache holds {limit} tokens (max_target_length) and is full"
      )
    inputs = placed(self._step, (tokens.astype(np.int32), self._positions.copy()))
    logits, self._cache = self._step.function(self._params, self._cache, *inputs)
    self._positions[self._positions != EMPTY] += 1
    return logits

  def decode(self, rows: Rows, plan: Plan, *, buffer: int) -> Decoded:
    """Decodes all rows in slots on the devices until the plan says to end.

    Args:
      rows: Of all slots.
      plan: When to end. None of it is compiled in.
      buffer: Steps that the program has room for: another number is another program.

    Raises:
      ValueError: naming the rows whose cache would be full before their limit, or if `rows` are not of all slots.
    """
    steps = check_rows(rows, (self._positions != EMPTY).tolist(), self.config.vocab_size)
    limit = self.config.max_target_length
    if full := np.flatnonzero(self._positions + steps > limit).tolist():
      raise ValueError(
        f"slot {', '.join(map(str, full))}: the cache holds {limit} tokens (max_target_length), fewer than the row may "
        "still get"
      )
    program = self._loop(buffer)
    inputs = placed(program, (self._positions.copy(), rows, plan))
    self._cache, packed = program.function(self._params, self._cache, *inputs)
    found = decoded(np.asarray(packed))
    fed = found.counts + (found.status == NOT_FINITE)
    self._positions = np.where(self._positions == EMPTY, EMPTY, self._positions + fed).astype(np.int32)
    return found

  def release(self, slot: int) -> None:
    """Empties a slot. What its caches hold is not read again: the next prompt's replace it.

    Raises:
      ValueError: if there is no such slot, or it is empty.
    """
    self._check_slots([slot])
    if self._positions[slot] == EMPTY:
      raise ValueError(f"slot {slot} is empty")
    self._positions[slot] = EMPTY

  def _check_chunk(self) -> None:
    """Refuses a kernel for few tokens where prompts may have more, before the first long one comes."""
    longest = self.config.max_prefill_predict_length
    tokens = self._padded(min(self.config.prefill_chunk or longest, longest))
    if self.model.compute.prefill_expert_implementation == "decode_kernel" and tokens > MAX_TOKENS:
      raise InputError(
        f"prefill_expert_implementation decode_kernel takes at most {MAX_TOKENS} tokens at a time, and a chunk of a "
        f"prompt may have {tokens}: set prefill_chunk={MAX_TOKENS}, or grouped or reference"
      )

  def _check_prompt(self, tokens: np.ndarray, true_length: int) -> None:
    check_tokens(tokens, "of a prompt", self.config.vocab_size)
    if not 1 <= true_length <= tokens.shape[0]:
      raise ValueError(f"true_length is {true_length}, expected 1 to the {tokens.shape[0]} tokens given")
    if true_length > self.config.max_prefill_predict_length:
      raise ValueError(
        f"a prompt of {true_length} tokens, longer than the prompt cache of {self.config.max_prefill_predict_length}"
      )

  def _check_slots(self, slots: Any) -> None:
    if not slots:
      raise ValueError("no slot named")
    if bad := [slot for slot in slots if not 0 <= slot < self.num_slots]:
      raise ValueError(f"slot {', '.join(map(str, bad))}: there are slots 0 to {self.num_slots - 1}")
    if len(set(slots)) < len(slots):
      raise ValueError(f"slots {list(slots)}: one is named twice")

  @functools.lru_cache(maxsize=4)  # noqa: B019 - an engine lives as long as its programs
  def _loop(self, buffer: int) -> programs.Program:
    cut = self.config.mla_cache_cut
    return programs.decode_loop(self.model, rows=self._num_slots, length=self._length, cut=cut, buffer=buffer)

  @functools.lru_cache(maxsize=8)  # noqa: B019 - an engine lives as long as its programs
  def _empty_prompts(self, rows: int) -> Callable[[], dict[str, Array]]:
    return programs.make_empty(self.model.cache(rows, self._prompt_length, cut="sequence", cut_rows=False))

  def _padded(self, tokens: int) -> int:
    return padded_length(self.model, self.config.prefill_cut, tokens)

  @functools.lru_cache(maxsize=64)  # noqa: B019 - an engine lives as long as its programs
  def _prefill(self, rows: int, tokens: int, history: bool) -> programs.Program:
    return programs.prefill(
      self.model, rows=rows, tokens=tokens, length=self._prompt_length, cut=self.config.prefill_cut, history=history
    )


def make_spmd_forward(config: Any, placement: str | None = None) -> Forward:
  """Returns (padded tokens [T], true length) -> (logits [T, X], None): see `make_forward`."""
  model = build_model(config)
  params = load(model, config, placement)

  @functools.cache
  def program(tokens: int) -> tuple[programs.Program, Callable[[], dict[str, Array]]]:
    length = cache_length(model, tokens, cut="sequence")
    made = programs.prefill(
      model, rows=1, tokens=tokens, length=length, cut=config.prefill_cut, history=False, all_logits=True
    )
    return made, programs.make_empty(made.arguments[1])

  def run(tokens: np.ndarray, true_length: int) -> tuple[Array, Array | None]:
    size = padded_length(model, config.prefill_cut, tokens.shape[0])
    padded = np.zeros((1, size), np.int32)
    padded[0, : tokens.shape[0]] = tokens
    to_run, empty = program(size)
    logits, _ = to_run.function(params, empty(), *placed(to_run, (padded, _row(0), _row(true_length))))
    return logits[0, : tokens.shape[0]], None

  return run


def cache_length(model: SpmdModel, tokens: int, *, cut: str) -> int:
  """Returns how many tokens of latents a row is given: at least `tokens`, cut evenly, and whole tiles on a device.

  Args:
    model: On its mesh.
    tokens: To hold.
    cut: How the latents are cut, "sequence" or "batch".
  """
  parts = model.cuts.size(model.cuts.heads) if cut == "sequence" else 1
  here = -(-tokens // parts)
  if here > LATENT_TILE:
    here = -(-here // LATENT_TILE) * LATENT_TILE
  return here * parts


def padded_length(model: SpmdModel, cut: str, tokens: int) -> int:
  """Returns the next number of tokens that the mesh cuts evenly."""
  parts = model.cuts.size(model.cuts.rows + model.cuts.heads) if cut == "sequence" else 1
  return -(-tokens // parts) * parts


def build_model(config: Any, devices: Sequence[Any] | None = None) -> SpmdModel:
  """Returns the model of a MaxText config on a mesh of these devices; of all there are without.

  Raises:
    InputError: if the mesh cannot be made or does not divide the model.
  """
  mesh, cuts = _manual_mesh(config, devices)
  slices.check_slices(mesh, cuts)
  programs.check_prefill_cut(cuts, config.prefill_cut)
  return SpmdModel(architecture(config), compute_config(config), mesh, cuts, scan=config.scan_layers)


def load(model: SpmdModel, config: Any, placement: str | None = None) -> dict[str, Array]:
  """Returns the checkpoint's parameters where they belong, packed experts in the form that the programs take.

  Args:
    model: On its mesh. Each process reads what the sharding puts on its devices, and says how much that was.
    config: MaxText's HyperParameters.
    placement: See SpmdEngine.

  Raises:
    InputError: if the checkpoint does not fit, or a device does not hold what it should.
  """
  state: Any = {}
  for name, leaf in model.stored_params.items():
    node = state
    *path, last = name.split(".")
    for part in path:
      node = node.setdefault(part, {})
    node[last] = nnx.Param(leaf, eager_sharding=False)
  path, before = checkpoint_path(config), bytes_read()
  loaded = load_params(path, nnx.State(state), storage_settings(config))
  flat = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(loaded)}
  several = jax.process_count() > 1
  if several:
    stored = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in model.stored_params.values())
    read = bytes_read() - before
    _say(f"read {_said(read)} of {_said(stored)} ({100 * read / stored:.1f} %)")
  mode = placement or ("sample" if several else "none")
  if mode != "none":
    compared = check_placement(path, flat, mode)
    _say(f"{compared.leaves} leaves are where they belong, {_said(compared.num_bytes)} compared")
  return programs.prepare_experts(model, flat)


def _manual_mesh(config: Any, devices: Sequence[Any] | None) -> tuple[Mesh, Cuts]:
  sizes: dict[str, int] | None = config.partition_mesh
  if not sizes:
    mesh = make_mesh(config, devices)
    return mesh, Cuts.of(dict(mesh.shape), config.partition_rules)
  found = jax.devices() if devices is None else devices
  if math.prod(sizes.values()) != len(found):
    said = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    raise InputError(f"partition_mesh is {said}: {math.prod(sizes.values())} devices, found {len(found)}")
  cuts = Cuts.of(sizes, config.partition_rules)
  return slices.make_mesh(sizes, cuts, found), cuts


def placed(program: programs.Program, inputs: Sequence[Any]) -> tuple[Any, ...]:
  """Returns a program's last arguments, trees of numpy arrays, on its devices. Every process gives the same values."""
  wanted = program.arguments[-len(inputs) :]
  return jax.tree.map(lambda value, leaf: _global(np.asarray(value, leaf.dtype), leaf.sharding), tuple(inputs), wanted)


def _global(value: np.ndarray, sharding: Sharding) -> Any:
  if sharding.is_fully_addressable:
    return value  # the program puts it where it belongs
  return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _row(value: int) -> np.ndarray:
  return np.array([value], np.int32)


def _say(text: str) -> None:
  print(f"process {jax.process_index()} of {jax.process_count()}: {text}", file=sys.stderr, flush=True)


def _said(num_bytes: int) -> str:
  return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
