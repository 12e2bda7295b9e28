"""What a decoding step and a chunk of prefill take on a topology: compiled for it, or by arithmetic.

A program's facts are a dict of plain values, the form in which they are printed as JSON and kept between runs. Bytes
are one device's. Keys that arithmetic cannot know are None there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from kimi_k3.capacity import hlo, memory, topology
from kimi_k3.capacity.oom import OutOfMemory, read_out_of_memory
from kimi_k3.capacity.results import Results
from kimi_k3.capacity.topologies import Topology
from kimi_k3.capacity.traffic import expected_hits
from kimi_k3.capacity.traps import Trap, find_traps
from kimi_k3.config import ComputeConfig, KimiK3Config
from kimi_k3.errors import InputError
from kimi_k3.spmd.cuts import Cuts

Facts = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """A model on a topology, ready to be planned.

  Attributes:
    config: The architecture.
    compute: How to compute.
    topology: The devices.
    sizes: Devices along each axis of the mesh, major first.
    cuts: Which axes cut what.
    cache_cut: How the latents of a step are cut; None: by batch where the rows divide, else by sequence.
    prefill_cut: How the tokens of a chunk are.
    prefill_chunk: Tokens of a prompt that are run at a time; None: all.
    scan: Whether the blocks of layers are stacked.
    rows: Rows that decode together, if the config says so.
    context: Tokens of a row, likewise.
    prompt: Tokens of a prompt, likewise.
    chosen: Settings that the config left open and planning filled in.
    builder: Makes the model on devices.
  """

  config: KimiK3Config
  compute: ComputeConfig
  topology: Topology
  sizes: Mapping[str, int]
  cuts: Cuts
  cache_cut: str | None
  prefill_cut: str
  prefill_chunk: int | None
  scan: bool
  rows: int | None
  context: int | None
  prompt: int | None
  chosen: Mapping[str, Any]
  builder: Callable[[Sequence[Any]], Any]

  @functools.cached_property
  def model(self) -> Any:
    """The SpmdModel on devices of the topology, as good for compiling as real ones."""
    model = self.builder(topology.tpu_devices(self.topology.name, slices=self.topology.slices))
    assert (model.compute, model.cuts) == (self.compute, self.cuts)  # what arithmetic and cached results go by
    return model

  @property
  def latent_bytes(self) -> int:
    """Bytes of an element of the latent cache."""
    import jax.numpy as jnp

    return jnp.dtype(self.compute.mla_cache_dtype or self.compute.dtype).itemsize

  def cut_of(self, batch: int) -> str:
    """How the latents of so many rows are cut."""
    if self.cache_cut is not None:
      return self.cache_cut
    return "sequence" if batch % self.cuts.size(self.cuts.rows + self.cuts.heads) else "batch"

  def length_of(self, batch: int, context: int) -> int:
    """How many tokens of latents the rows of a step are given, which is at least their context."""
    parts = self.cuts.size(self.cuts.heads) if self.cut_of(batch) == "sequence" else 1
    return memory.latent_tokens(context, parts)

  def at(self, *, cache_cut: str | None = None, latent_dtype: str | None = None, cuts: Cuts | None = None) -> Setup:
    """Returns the setup with other cuts or another latent cache, for arithmetic: its model stays as it was."""
    compute = self.compute if latent_dtype is None else dataclasses.replace(self.compute, mla_cache_dtype=latent_dtype)
    return dataclasses.replace(self, cache_cut=cache_cut or self.cache_cut, compute=compute, cuts=cuts or self.cuts)


@runtime_checkable
class Planner(Protocol):
  """Tells a program's facts. Both kinds raise InputError for sizes that the mesh does not divide."""

  def decode(self, batch: int, context: int) -> Facts:
    """Of a step of `batch` rows of up to `context` tokens."""
    ...

  def prefill(self, tokens: int) -> Facts:
    """Of a prompt of so many tokens, or of a chunk of it where the config has `prefill_chunk`."""
    ...

  def changed(self, **fields: Any) -> Planner:
    """Returns the same with fields of the setup changed that its model does not depend on."""
    ...


class Arithmetic:
  """Facts by arithmetic: no compiler is asked, none is needed."""

  def __init__(self, setup: Setup):
    self.setup = setup

  def changed(self, **fields: Any) -> Arithmetic:
    return Arithmetic(dataclasses.replace(self.setup, **fields))

  def decode(self, batch: int, context: int) -> Facts:
    s = self.setup
    cut = s.cut_of(batch)
    found = memory.estimate_decode(
      s.config,
      s.cuts,
      batch=batch,
      context=s.length_of(batch, context),
      cache_cut=cut,
      latent_dtype_bytes=s.latent_bytes,
      device_kind=s.topology.device_kind,
    )
    worst, expected = must_move(s, batch, context)
    return (
      {"batch": batch, "context": context, "cache_cut": cut}
      | _estimated(found, s)
      | _bound(worst, s)
      | _expected(expected, s, batch)
      | {"must_move_bytes_per_step": round(worst), "reductions_per_layer": None}
    )

  def prefill(self, tokens: int) -> Facts:
    s = self.setup
    chunk, history = chunk_of(s, tokens)
    found = memory.estimate_prefill(
      s.config,
      s.cuts,
      tokens=chunk,
      length=memory.latent_tokens(max(tokens, chunk), s.cuts.size(s.cuts.heads)),
      history=history,
      prefill_cut=s.prefill_cut,
      device_kind=s.topology.device_kind,
      latent_dtype_bytes=s.latent_bytes,
    )
    return (
      {"tokens": chunk, "length": tokens, "history": history}
      | _estimated(found, s)
      | {"hbm_bytes_per_step": None, "reductions_per_layer": None}
      | {"bound_ms": flops_ms(s, chunk, max(0, tokens - chunk)), "bound_by": "matrix products"}
    )


class Compiler:
  """Facts by the TPU compiler, each program compiled once for a version of everything that it depends on."""

  def __init__(self, setup: Setup, results: Results, say: Callable[[str], object] = lambda _: None):
    """Args: the setup; where results are kept; what takes a line of progress."""
    self.setup, self._results, self._say = setup, results, say

  def changed(self, **fields: Any) -> Compiler:
    changed = dataclasses.replace(self.setup, **fields)
    changed.__dict__["model"] = self.setup.model  # a cached property: made once
    return Compiler(changed, self._results, self._say)

  def decode(self, batch: int, context: int) -> Facts:
    s = self.setup
    cut = s.cut_of(batch)
    length = s.length_of(batch, context)
    key = {"program": "decode", "batch": batch, "length": length, "cut": cut}

    def make() -> Facts:
      from kimi_k3.spmd import programs

      program = programs.decode_step(s.model, rows=batch, length=length, cut=cut)
      report = self._compile(program)
      kept = _weights(s) | _caches(program.arguments[1])
      if isinstance(report, dict):
        return kept | report
      return kept | _memory(report, s) | _counted(lambda: _decode_program(s, report, batch, context))

    sizes = {"batch": batch, "context": context, "cache_cut": cut}
    return sizes | self._kept(key, f"decode {batch} x {context}", make)

  def prefill(self, tokens: int) -> Facts:
    s = self.setup
    chunk, history = chunk_of(s, tokens)
    length = memory.latent_tokens(max(tokens, chunk), s.cuts.size(s.cuts.heads))
    before = max(0, tokens - chunk)
    sizes = {"tokens": chunk, "length": length, "start": before, "cut": s.prefill_cut, "history": history}

    def make() -> Facts:
      from kimi_k3.spmd import programs

      program = programs.prefill(s.model, rows=1, tokens=chunk, length=length, cut=s.prefill_cut, history=history)
      report = self._compile(program)
      kept = _weights(s) | _caches(program.arguments[1])
      if isinstance(report, dict):
        return kept | report
      return kept | _memory(report, s) | _counted(lambda: _prefill_program(s, report, sizes))

    return {"tokens": chunk, "length": tokens, "history": history} | self._kept(
      {"program": "prefill", **sizes}, f"prefill {chunk}", make
    )

  def _kept(self, key: Mapping[str, Any], what: str, make: Callable[[], Facts]) -> Facts:
    s = self.setup
    whole = {
      **key,
      "config": dataclasses.asdict(s.config),
      "compute": {k: str(v) for k, v in dataclasses.asdict(s.compute).items()},
      "topology": [s.topology.name, s.topology.slices],
      "mesh": dict(s.sizes),
      "cuts": dataclasses.asdict(s.cuts),
      "scan": s.scan,
      "options": dict(topology.COMPILE_OPTIONS),
    }

    def said() -> Facts:
      self._say(f"compiling {what} for {s.topology.name}: some minutes")
      return make()

    found = self._results.of(whole, said)
    how = "compiled before" if found["cached"] else f"compiled in {found['compile_s']:.0f} s"
    self._say(f"{what}: {how}, " + ("fits" if found["fits"] else "does not fit"))
    return found

  def _compile(self, program: Any) -> topology.Report | Facts:
    """The report, of a program that does not fit too; or what is known of one that cannot be scheduled at all."""
    mesh, function, arguments = self.setup.model.mesh, program.function, program.arguments
    start = time.perf_counter()
    try:
      with _without_notes():
        return topology.compile_for(mesh, function, arguments)
    except jax.errors.JaxRuntimeError as error:
      found = _out_of_memory(error)
    try:
      self._say("it does not fit: compiling on without the limit, to know by how much")
      with _without_notes():
        return topology.compile_for(mesh, function, arguments, options=_WITHOUT_LIMIT)
    except jax.errors.JaxRuntimeError as error:
      _out_of_memory(error)
    return {
      "fits": False,
      "total_bytes": found.needed_bytes,
      "exceeds_bytes": found.exceeded_bytes,
      "warnings": [],
      "compile_s": time.perf_counter() - start,
      **dict.fromkeys(_OF_A_PROGRAM),
    }


@contextlib.contextmanager
def _without_notes() -> Iterator[None]:
  """Silences a warning of tokamax for each kernel that nobody has tuned on the device, which is absent here anyway."""
  logger = logging.getLogger("absl")
  before = logger.level
  logger.setLevel(logging.ERROR)
  try:
    yield
  finally:
    logger.setLevel(before)


def _out_of_memory(error: Exception) -> OutOfMemory:
  """What the compiler says of memory; whatever else it says is an error of its own."""
  found = read_out_of_memory(error)
  if found is None:
    raise InputError(f"the TPU compiler refuses the program: {' '.join(str(error).split())[:400]}") from error
  return found


_WITHOUT_LIMIT = {**topology.COMPILE_OPTIONS, **topology.UNLIMITED_HBM_OPTIONS}
_OF_THE_TEXT = ("collectives", "reductions_per_layer", "hbm_bytes_per_step", "bound_ms", "kernels")
_OF_A_PROGRAM = ("argument_bytes", "temp_bytes", "code_bytes", "output_bytes", *_OF_THE_TEXT)
NOT_COUNTED = "not counted"


def _counted(read: Callable[[], Facts]) -> Facts:
  """What the text says; with a loop or a kernel in it that cannot be counted, that as a warning, and no figures."""
  try:
    return read()
  except InputError as error:
    return dict.fromkeys(_OF_THE_TEXT) | {"warnings": [{"trap": NOT_COUNTED, "detail": str(error)}]}


def engine_bytes(programs: Mapping[str, Facts]) -> int | None:
  """Returns what a device holds that decodes and takes prompts; None without the facts of both programs.

  Weights once, the caches of both, the larger temporaries, both codes.
  """
  if set(programs) != {"decode", "prefill"} or any(facts["argument_bytes"] is None for facts in programs.values()):
    return None
  decode, prefill = programs["decode"], programs["prefill"]
  return (
    decode["argument_bytes"]
    + prefill["latent_cache_bytes"]
    + prefill["kda_state_bytes"]
    + max(facts["temp_bytes"] + facts["output_bytes"] for facts in (decode, prefill))
    + decode["code_bytes"]
    + prefill["code_bytes"]
  )


def chunk_of(setup: Setup, tokens: int) -> tuple[int, bool]:
  """Returns how many tokens of a prompt are run at a time, and whether any chunk has others before it."""
  parts = setup.cuts.size(setup.cuts.rows + setup.cuts.heads) if setup.prefill_cut == "sequence" else 1
  chunk = min(tokens, setup.prefill_chunk or tokens)
  return -(-chunk // parts) * parts, chunk < tokens


def must_move(setup: Setup, batch: int, context: int) -> tuple[float, float]:
  """Returns the bytes of HBM that any program must move in a step: with every expert hit that can be, and as expected.

  Expected is of tokens that choose their experts uniformly and independently.
  """
  traffic = memory.traffic_of(
    setup.config, setup.cuts, batch=batch, context=context, latent_dtype_bytes=setup.latent_bytes
  )
  return traffic.total_worst, traffic.total


def hit_part(config: KimiK3Config, batch: int) -> float:
  """Returns the part of the experts that a step of so many tokens hits, if they choose uniformly."""
  return expected_hits(config.num_experts, config.num_experts_per_token, batch) / config.num_experts


def flops_ms(setup: Setup, tokens: int, before: int) -> float:
  """Returns the milliseconds that a chunk's matrix products take at the devices' peak, shared evenly."""
  flops = memory.prefill_flops(setup.config, tokens=tokens, history=before)
  return flops / setup.topology.devices / setup.topology.flops_per_second * 1e3


def _estimated(found: memory.Estimate, s: Setup) -> Facts:
  exceeds = found.total_bytes - s.topology.limit_bytes
  return {
    "estimated": True,
    "fits": exceeds <= 0,
    "exceeds_bytes": max(0, exceeds),
    "total_bytes": found.total_bytes,
    "argument_bytes": found.argument_bytes,
    "temp_bytes": found.temp_bytes,
    "code_bytes": found.code_bytes,
    "output_bytes": found.output_bytes,
    "weights_bytes": dict(found.weights_bytes),
    "latent_cache_bytes": found.latent_cache_bytes,
    "kda_state_bytes": found.kda_state_bytes,
    "collectives": None,
    "kernels": None,
    "compile_s": None,
    "warnings": [],
  }


def _weights(s: Setup) -> Facts:
  """Weights by kind on one device, without padding."""
  leaves = {}
  for name, leaf in s.model.params.items():
    cuts = math.prod(leaf.shape) // math.prod(leaf.sharding.shard_shape(leaf.shape))
    leaves[name] = (leaf.shape, str(leaf.dtype), cuts)
  return {"estimated": False, "weights_bytes": memory.weights_by_kind(leaves)}


def _caches(cache: Mapping[str, Any]) -> Facts:
  found = {"latent_cache_bytes": 0, "kda_state_bytes": 0}
  for name, leaf in cache.items():
    kind = "latent_cache_bytes" if name.endswith(".latents") else "kda_state_bytes"
    found[kind] += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
  return found


def _memory(report: topology.Report, s: Setup) -> Facts:
  m = report.memory
  exceeds = m.total_bytes - s.topology.limit_bytes
  return {
    "fits": exceeds <= 0,
    "exceeds_bytes": max(0, exceeds),
    "total_bytes": m.total_bytes,
    "argument_bytes": m.argument_bytes,
    "temp_bytes": m.temp_bytes,
    "code_bytes": m.code_bytes,
    "output_bytes": m.output_bytes - m.alias_bytes,
    "compile_s": report.lower_seconds + report.compile_seconds,
  }


def _decode_program(s: Setup, report: topology.Report, batch: int, context: int) -> Facts:
  from kimi_k3.spmd.kernel_bytes import decode_kernel_bytes

  program = hlo.parse(report.text)
  rows = hlo.collectives(program)
  moved = hlo.hbm_bytes(program, decode_kernel_bytes()).total
  expected = hlo.hbm_bytes(program, decode_kernel_bytes(hit=hit_part(s.config, batch))).total
  return (
    _read(program, rows, {}, find_traps(program))
    | {"must_move_bytes_per_step": round(must_move(s, batch, context)[0])}
    | _bound(moved, s)
    | _expected(expected, s, batch)
  )


def _prefill_program(s: Setup, report: topology.Report, sizes: Mapping[str, Any]) -> Facts:
  """Of a chunk; sizes as `prefill_loops` takes them."""
  from kimi_k3.spmd.kernel_bytes import prefill_kernel_bytes
  from kimi_k3.spmd.loop_counts import prefill_loops

  chunk = sizes["tokens"]
  here = chunk // s.cuts.size(s.cuts.rows + s.cuts.heads)  # where the residual stream is cut by tokens
  loops = prefill_loops(s.model, **sizes)
  program = hlo.parse(report.text)
  rows = hlo.collectives(program, loops)
  moved = hlo.hbm_bytes(program, prefill_kernel_bytes(s.model, **sizes), loops=loops)
  found = _read(
    program, rows, loops, find_traps(program, tokens=here, width=s.config.hidden_size, loops=loops)
  ) | _bound(moved.total, s)
  products = flops_ms(s, chunk, sizes["start"])
  if products > found["bound_ms"]:
    found |= {"bound_ms": products, "bound_by": "matrix products"}
  return found


def _read(
  program: hlo.Program,
  rows: Sequence[hlo.Collective],
  loops: Mapping[str, int],
  traps: Sequence[Trap],
) -> Facts:
  kinds = sorted({row.kind for row in rows})
  calls = hlo.kernels(program, loops)
  return {
    "collectives": [
      {
        "kind": kind,
        "count": sum(row.calls for row in rows if row.kind == kind),
        "bytes": sum(row.calls * row.bytes for row in rows if row.kind == kind),
      }
      for kind in kinds
    ],
    "reductions_per_layer": None if loops else hlo.reductions_per_layer(rows),  # it cannot be told of prefill
    "kernels": sorted(calls),
    "kernel_calls": calls,
    "warnings": [dataclasses.asdict(trap) for trap in traps],
  }


def _expected(moved: float, s: Setup, batch: int) -> Facts:
  """The same with the experts that tokens hit if they choose uniformly."""
  bound = _bound(moved, s)
  return {
    "expected_hit": hit_part(s.config, batch),
    "expected_hbm_bytes_per_step": bound["hbm_bytes_per_step"],
    "expected_bound_ms": bound["bound_ms"],
  }


def _bound(moved: float, s: Setup) -> Facts:
  """The least time that the bytes take, which is no promise of a speed."""
  return {
    "hbm_bytes_per_step": round(moved),
    "bound_ms": moved / s.topology.hbm_bytes_per_second * 1e3,
    "bound_by": "HBM",
  }
