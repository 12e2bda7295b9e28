"""Why this package folds its layers: K3's decoding step with the layers unrolled, depth by depth.

    python benchmarks/capacity/unrolled.py --depths 8,16,24,32,48 --out unrolled.json
    python benchmarks/capacity/unrolled.py --depths 48,93 --case folded --case in-order --out unrolled.json

A feasibility report unrolled the layers in Python, left the collectives to the compiler, kept every matrix but the
experts' in float32, and decoded all experts of a device to float32 in front of their products. Its temporaries stood
still up to 32 layers and then ran away: 348 GiB a device at 93. The case `report` makes these choices out of this
package's modules; each other case changes one of them, `preset` all. What was found:
docs/decisions/0016-the-unrolled-cliff.md.

Compiles for TPUs that this machine does not have: needs libtpu and no TPU. The compiler assigns memory before it makes
code, which is most of its work: it is stopped there, and the figures are those of its buffer assignment. So 48 layers
take a minute or two and 2 GB. Each depth is a process of its own. With --out, what the file has is not done again.

Exit code 0: every depth has a figure. 1: one was stopped, by time or RAM. 2: bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from kimi_k3.activations import gated_activation
from kimi_k3.block import Layer, Stream
from kimi_k3.capacity import hlo, topology
from kimi_k3.capacity.hlo_text import Computation, Instruction
from kimi_k3.config import MXFP4_GROUP
from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter.settings import read_config
from kimi_k3.maxtext_adapter.spmd_engine import build_model
from kimi_k3.moe.experts import Experts
from kimi_k3.moe.latent_moe import LatentMoE
from kimi_k3.moe.packed import Form
from kimi_k3.resources import configs_dir
from kimi_k3.spmd import programs
from kimi_k3.spmd.cuts import Cuts
from kimi_k3.spmd.model import SpmdModel

GIB = 2**30
ROWS = 64
CONTEXT = 128  # of the caches, small beside the experts
PRESET_CONTEXT = 8192
DEPTHS = (8, 16, 24, 32, 48)
MAX_DEPTH = 93
# configs/tpu7x-32.yml without its kernels, every matrix cut on heads or width.
SETTINGS = (
  "model_name=kimi-k3",
  "partition_rules={latent: [tensor]}",
  "matmul_precision=highest",  # at the default one XLA makes bfloat16 of float32 matrices
  "expert_implementation=reference",
  "prefill_expert_implementation=reference",
  "kda_implementation=portable",
  "kda_step_implementation=portable",
  "mla_step_implementation=portable",
  "mla_prefill_implementation=portable",
)
DECODED = "decoded_experts"  # in the op_name of what decoding makes
POLL_SECONDS = 0.5
SETTLED_POLLS = 6
_F32_MANTISSA_BITS = 23


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """What is chosen; the defaults are the report's choices.

  Attributes:
    change: What is other than in the report, in words.
    by_hand: Every collective written down (partitioning: manual), instead of left to the compiler.
    folded: Four layers, then a scan over blocks of four, instead of all layers one after the other.
    dtype: Of matrices, activations and decoded experts.
    all_experts: Whether a layer decodes all its experts at once, instead of one at a time.
    in_order: Whether a layer's experts cannot be decoded before their input is there.
    options: Of the compiler.
    preset: configs/tpu7x-32.yml as it is, and none of the above.
  """

  change: str
  by_hand: bool = False
  folded: bool = False
  dtype: str = "float32"
  all_experts: bool = True
  in_order: bool = False
  options: Mapping[str, str] = dataclasses.field(default_factory=dict)
  preset: bool = False


CASES: Mapping[str, Case] = {
  "report": Case(change="nothing: unrolled, float32, all experts decoded, collectives by the compiler"),
  "folded": Case(change="the layers are folded into a scan", folded=True),
  "bfloat16": Case(change="matrices and decoded experts are bfloat16", dtype="bfloat16"),
  "in-order": Case(change="experts are decoded only when their input is there", in_order=True),
  "by-hand": Case(change="every collective is written down", by_hand=True),
  # Left to the compiler, the loop over experts makes it cut all experts anew, across the devices.
  "by-hand-one": Case(
    change="every collective is written down, and one expert is decoded at a time", by_hand=True, all_experts=False
  ),
  "no-overlap": Case(
    change="XLA's latency-hiding scheduler is off", options={"xla_tpu_enable_latency_hiding_scheduler": "false"}
  ),
  "half-limit": Case(
    change="that scheduler may fill half of the HBM, not 95 %",
    options={"xla_tpu_scheduler_percent_shared_memory_limit": "50"},
  ),
  "no-limit": Case(
    change="that scheduler does not look at memory",
    options={"xla_tpu_enable_scheduler_memory_pressure_tracking": "false"},
  ),
  "preset": Case(change="all: configs/tpu7x-32.yml, with its kernels and caches of 8192 tokens", preset=True),
}


class DecodedExperts(nnx.Module):
  """A layer's experts as in the report: all of the device are decoded, and every token goes to each of them.

  An expert that a token has not chosen gets the weight 0.
  """

  def __init__(self, experts: Experts, *, in_order: bool):
    self.packed, self.in_order = experts, in_order

  @property
  def num_here(self) -> int:
    """Experts of a layer on this device."""
    return self.packed.num_here

  def partial(
    self,
    x: Float[Array, "N L"],
    ids: Int[Array, "N S"],
    weights: Float[Array, "N S"],
    index: Int[Array, ""],
    *,
    many: bool,
  ) -> Float[Array, "N L"]:
    """Returns what `Experts.partial` returns, with the same arguments."""
    del many
    dtype = self.packed.compute.dtype
    product = functools.partial(jnp.einsum, precision=self.packed.compute.precision, preferred_element_type=jnp.float32)
    w1_ELF, w3_ELF, w2_EFL = (self._decode(name, index, x) for name in ("w1", "w3", "w2"))
    gate_ENF, up_ENF = product("nl,elf->enf", x, w1_ELF), product("nl,elf->enf", x, w3_ELF)
    hidden_ENF = gated_activation(self.packed.config, gate_ENF, up_ENF).astype(dtype)
    y_ENL = product("enf,efl->enl", hidden_ENF, w2_EFL)
    chosen_NSE = ids[..., None] == jnp.arange(self.num_here)[None, None]
    weight_NE = jnp.sum(jnp.where(chosen_NSE, weights[..., None], 0), axis=1)
    return product("enl,ne->nl", y_ENL, weight_NE)

  def _decode(self, name: str, index: Int[Array, ""], x: Array) -> Float[Array, "E I O"]:
    """One matrix of every expert, from float4 codes [E, I, O] and E8M0 scales [E, I/32, O]; axis 0 layers in a fold."""
    codes, scale = (getattr(self.packed, f"{name}_{part}")[...] for part in ("packed", "scale"))
    if codes.ndim == 4:
      codes, scale = (jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False) for leaf in (codes, scale))
    if self.in_order:  # what leaves a barrier waits for all that enters it
      codes, scale, _ = jax.lax.optimization_barrier((codes, scale, x))
    with jax.named_scope(DECODED):
      bits = scale.astype(jnp.uint32) << _F32_MANTISSA_BITS
      factor = jax.lax.bitcast_convert_type(bits, jnp.float32).astype(self.packed.compute.dtype)
      groups = codes.astype(factor.dtype).reshape(*scale.shape[:2], MXFP4_GROUP, scale.shape[2])
      return (groups * factor[:, :, None]).reshape(codes.shape)


@dataclasses.dataclass(frozen=True)
class CaseModel(SpmdModel):
  """This package's model with the experts of a case, their codes as float4."""

  case: Case = CASES["report"]

  @property
  def expert_form(self) -> Form:
    """float4, whatever implementation reads it."""
    return "float4"

  def _layer(self, unit: Any, params: Mapping[str, Any]) -> Layer:
    layer = super()._layer(unit, params)
    if unit.moe and self.case.all_experts:
      mlp = cast(LatentMoE, layer.mlp)
      mlp.experts = cast(Experts, DecodedExperts(mlp.experts, in_order=self.case.in_order))
    return layer

  def _one(self, *arguments: Any) -> Stream:
    stream = super()._one(*arguments)
    if self.case.by_hand:
      return stream
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, _everywhere(self)), stream)


def make_step(case: Case, devices: Sequence[Any], depth: int) -> programs.Program:
  """Returns the decoding step of K3's first `depth` layers, cut by one axis over all the devices.

  Raises:
    InputError: if the model does not have so many layers or the devices do not divide it.
  """
  if case.preset:
    model = _shortened(build_model(_config("model_name=kimi-k3"), devices), depth)
    return programs.decode_step(model, rows=ROWS, length=PRESET_CONTEXT, cut="batch")
  choices = (f"dtype={case.dtype}", f"weight_dtype={case.dtype}", f"scan_layers={str(case.folded).lower()}")
  model = build_model(_config(*SETTINGS, *choices, f"partition_mesh=tensor={len(devices)}"), devices)
  fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
  model = _shortened(CaseModel(**fields, case=case), depth)
  return _by_hand(model) if case.by_hand else _by_compiler(model)


def _config(*settings: str) -> Any:
  return read_config(str(configs_dir() / "tpu7x-32.yml"), settings)


def _shortened[Model: SpmdModel](model: Model, depth: int) -> Model:
  if not 1 <= depth <= model.config.num_layers:
    raise InputError(f"depth {depth}: expected 1 to {model.config.num_layers} layers")
  return model if depth == model.config.num_layers else cast(Model, model.shortened(depth))


def _by_hand(model: CaseModel) -> programs.Program:
  """The step of the manual partitioning, without the compiler options that this package gives to every program."""
  program = programs.decode_step(model, rows=ROWS, length=CONTEXT, cut="batch")
  local: Any = program.function.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
  return _jitted(local, program.arguments)


def _by_compiler(model: CaseModel) -> programs.Program:
  """The step of one device, on arrays that lie on many: XLA puts the collectives in."""
  one_device = dataclasses.replace(model, cuts=Cuts.of({}))
  step = inspect.unwrap(programs.decode_step(one_device, rows=ROWS, length=CONTEXT, cut="batch").function)
  everywhere = _everywhere(model)
  row = jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=everywhere)
  cache = {
    # A row is written at its own position, which XLA does not do to an array that is cut.
    name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere) if name.endswith(".latents") else leaf
    for name, leaf in model.cache(ROWS, CONTEXT, cut="batch").items()
  }
  return _jitted(step, (model.params, cache, row, row))


def _jitted(function: Any, arguments: tuple[Any, ...]) -> programs.Program:
  """A program whose caches are donated and stay where they are; its logits are cut by vocabulary."""
  given = jax.tree.map(lambda leaf: leaf.sharding, arguments)
  caches = given[1]
  (mesh,) = {sharding.mesh for sharding in caches.values()}
  results = (NamedSharding(mesh, PartitionSpec(None, mesh.axis_names)), caches)
  return programs.Program(jax.jit(function, in_shardings=given, out_shardings=results, donate_argnums=(1,)), arguments)


def _everywhere(model: SpmdModel) -> NamedSharding:
  return NamedSharding(model.mesh, PartitionSpec())


def compile_point(name: str, depth: int, topology_name: str) -> topology.Report:
  """Returns a compiled program: what each process does, until it is stopped."""
  devices = topology.tpu_devices(topology_name)
  case = CASES[name]
  program = make_step(case, devices, depth)
  (mesh,) = {leaf.sharding.mesh for leaf in jax.tree.leaves(program.arguments)}
  return topology.compile_for(mesh, program.function, program.arguments, options=case.options)


# What the compiler writes before it makes code.


def dump_flags(directory: Path) -> str:
  """Returns XLA_FLAGS that make it write into a directory, beside those of the environment."""
  return f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={directory} --xla_dump_hlo_as_text=true".strip()


def find_dump(directory: Path) -> tuple[Path, Path] | None:
  """Returns the buffer assignment and the scheduled program; None as long as one is not there or empty."""
  texts = list(directory.glob("*.after_optimizations.txt"))
  if not texts:
    return None
  (text,) = texts
  files = (text.with_name(text.name.replace(".txt", "-buffer-assignment.txt")), text)
  return files if all(file.exists() and file.stat().st_size for file in files) else None


def memory_of(assignment: str) -> dict[str, int]:
  """Returns bytes of arguments and of temporaries in HBM, from a buffer assignment.

  Raises:
    InputError: if the text is no such thing.
  """
  sizes = {"argument_bytes": 0, "temp_bytes": 0}
  for size, rest in re.findall(r"^allocation \d+: size (\d+), page \d+, (.*)", assignment, flags=re.MULTILINE):
    if rest.startswith("parameter "):  # one in another memory has its color first
      sizes["argument_bytes"] += int(size)
    elif rest.startswith("preallocated-temp"):
      sizes["temp_bytes"] += int(size)
  if not sizes["argument_bytes"]:
    raise InputError(f"buffer assignment: no parameter among its {assignment.count('allocation ')} allocations")
  return sizes


def alive_at_once(text: str, min_bytes: int = 64 * 2**20) -> dict[str, int]:
  """Returns how many decoded matrices a program makes, and how many of them are alive at one time at most.

  Read off the schedule: a matrix is alive from the instruction that makes it to the last that reads it. Those in the
  body of a loop are counted there.

  Args:
    text: The compiled program.
    min_bytes: What is smaller is not a whole matrix of all experts.
  """
  program = hlo.parse(text)
  made = most = most_bytes = 0
  instructions = [i for computation in program.computations.values() for i in computation.instructions.values()]
  fused = {name for i in instructions if i.opcode == "fusion" for name in i.called("calls")}
  for computation in program.computations.values():
    if computation.name in fused:
      continue
    spans = list(_decoded_spans(computation, min_bytes))
    made += len(spans)
    for at, _, _ in spans:
      alive = [size for first, last, size in spans if first <= at <= last]
      most, most_bytes = max(most, len(alive)), max(most_bytes, sum(alive))
  return {"made": made, "most": most, "most_bytes": most_bytes}


def _decoded_spans(computation: Computation, min_bytes: int) -> Iterator[tuple[int, int, int]]:
  """First and last place in the schedule, and bytes, of the decoded matrices that a computation makes."""
  places = {name: place for place, name in enumerate(computation.instructions)}

  def last_use(instruction: Instruction) -> int:
    users = computation.users.get(instruction.name, ())
    renamed = ("bitcast", "get-tuple-element", "tuple")
    return max([places[instruction.name], *(last_use(u) if u.opcode in renamed else places[u.name] for u in users)])

  for instruction in computation.instructions.values():
    size = sum(array.hbm_bytes for array in instruction.arrays)
    if DECODED in instruction.op_name and instruction.opcode == "fusion" and size >= min_bytes:
      yield places[instruction.name], last_use(instruction), size


# What the command does with many of them.


def run(
  points: Sequence[tuple[str, int]], args: argparse.Namespace, rows: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
  """Yields the row of each (case, depth): out of `rows` if it is there, else measured in a process of its own."""
  for name, depth in points:
    key = {"case": name, "depth": depth, "topology": args.topology, "libtpu": topology.libtpu_version()}
    known = [row for row in rows if key.items() <= row.items()]
    if known:
      yield known[0]
      continue
    print(f"{name}, {depth} layers: compiling", file=sys.stderr, flush=True)
    row = key | run_one(child_command(name, depth, args.topology), args.timeout, args.ram_gib)
    print(f"{name}, {depth} layers: {row.get('stopped') or summary(row)}", file=sys.stderr, flush=True)
    yield row


def child_command(name: str, depth: int, topology_name: str) -> list[str]:
  """Returns the command that compiles one point."""
  return [sys.executable, str(Path(__file__).resolve()), "--one", f"{name}:{depth}", "--topology", topology_name]


def run_one(command: Sequence[str], timeout: float, ram_gib: float) -> dict[str, Any]:
  """Returns the figures of a compiling process, which ends there; {"stopped": why} if it takes too long or too much.

  Raises:
    InputError: with the process's last line, if it failed before it had assigned memory.
  """
  start, peak, written = time.monotonic(), 0, [0]
  with tempfile.TemporaryDirectory() as directory:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": dump_flags(Path(directory))}
    errors = Path(directory) / "stderr"
    with (
      errors.open("w") as stderr,
      subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr) as process,
    ):
      try:
        while True:
          ended = process.poll() is not None
          peak = max(peak, _peak_ram_bytes(process.pid))
          seconds = time.monotonic() - start
          if found := find_dump(Path(directory)):
            written.append(sum(file.stat().st_size for file in found))
            # They are written side by side: done when they grow no more.
            if ended or set(written[-SETTLED_POLLS:]) == {written[-1]}:
              process.kill()
              figures = memory_of(found[0].read_text()) | {"alive": alive_at_once(found[1].read_text())}
              return figures | {"seconds": seconds, "peak_ram_bytes": peak}
          elif ended:
            raise InputError((errors.read_text().strip().splitlines() or [f"exit code {process.returncode}"])[-1])
          if peak > ram_gib * GIB:
            return {"stopped": f"stopped at {peak / GIB:.1f} GiB of RAM, --ram-gib is {ram_gib:g}"}
          if seconds > timeout:
            return {"stopped": f"stopped after {timeout:g} s, --timeout"}
          time.sleep(POLL_SECONDS)
      finally:
        process.kill()


def _peak_ram_bytes(pid: int) -> int:
  """The most RAM a process has had, on Linux; 0 where there is no /proc, and no libtpu either, and once it ended."""
  status = Path(f"/proc/{pid}/status")
  found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
  return 1024 * int(found[1]) if found else 0


def summary(row: Mapping[str, Any]) -> str:
  """Returns a row in words."""
  return f"temp {row['temp_bytes'] / GIB:.2f} GiB, {row['seconds']:.0f} s"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns the rows as a table, in the order given."""
  names = ("case", "depth", "arguments", "temp", "decoded alive", "seconds", "RAM")
  units = ("", "", "GiB", "GiB", "of all, GiB", "", "GiB")
  lines = ["{:12} {:>5} {:>9} {:>8} {:>22} {:>8} {:>6}".format(*words) for words in (names, units)]
  for row in rows:
    if stopped := row.get("stopped"):
      lines.append(f"{row['case']:12} {row['depth']:5} {stopped}")
      continue
    alive = row["alive"]
    living = f"{alive['most']} of {alive['made']}, {alive['most_bytes'] / GIB:.2f}"
    lines.append(
      f"{row['case']:12} {row['depth']:5} {row['argument_bytes'] / GIB:9.2f} {row['temp_bytes'] / GIB:8.2f} "
      f"{living:>22} {row['seconds']:8.0f} {row['peak_ram_bytes'] / GIB:6.2f}"
    )
  return "\n".join(lines)


def depths(text: str) -> tuple[int, ...]:
  """Returns the depths that a list names.

  Raises:
    InputError: if it is no list of numbers from 1 to MAX_DEPTH.
  """
  parts = text.split(",")
  if not all(part.strip().isdecimal() and 1 <= int(part) <= MAX_DEPTH for part in parts):
    raise InputError(f"--depths {text}: expected numbers from 1 to {MAX_DEPTH} such as 8,16,24")
  return tuple(dict.fromkeys(int(part) for part in parts))


def read_rows(path: Path) -> list[dict[str, Any]]:
  """Returns the rows of a file, none if it is absent.

  Raises:
    InputError: if the file is of another kind.
  """
  if not path.exists():
    return []
  try:
    rows = json.loads(path.read_text())["rows"]
    for row in rows:
      _ = row["case"], row["depth"], row["topology"], row["libtpu"]
  except (ValueError, KeyError, TypeError) as error:
    raise InputError(f"{path}: not written by this script ({error!r}): name another --out") from error
  return rows


def parser() -> argparse.ArgumentParser:
  """Returns the command line."""
  found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  listed = ",".join(map(str, DEPTHS))
  found.add_argument("--depths", default=listed, metavar="N,...", help=f"how many layers (default: {listed})")
  cases = "; ".join(f"{name}: {case.change}" for name, case in CASES.items()).replace("%", "%%")
  found.add_argument("--case", action="append", choices=CASES, help=f"repeatable (default: report). {cases}")
  found.add_argument("--topology", default="tpu7x:2x2x4", help="what to compile for (default: tpu7x:2x2x4)")
  found.add_argument("--out", metavar="FILE.json", help="keep the figures, and take those that are there already")
  found.add_argument("--timeout", type=float, default=3600, metavar="S", help="seconds a depth (default: 3600)")
  found.add_argument("--ram-gib", type=float, default=10, metavar="GIB", help="RAM a depth may take (default: 10)")
  found.add_argument("--one", help=argparse.SUPPRESS)  # CASE:DEPTH, what each process is started with
  return found


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the table."""
  args = parser().parse_args(argv)
  try:
    if args.one:
      name, depth = args.one.split(":")
      compile_point(name, int(depth), args.topology)
      return 0
    points = [(name, depth) for name in args.case or ["report"] for depth in depths(args.depths)]
    stored = read_rows(Path(args.out)) if args.out else []
    found = []
    for row in run(points, args, stored):
      found.append(row)
      if args.out and row not in stored and not row.get("stopped"):
        stored.append(row)
        Path(args.out).write_text(json.dumps({"rows": stored}, indent=1) + "\n")
    print(table(found))
    return 1 if any(row.get("stopped") for row in found) else 0
  except InputError as error:
    print(f"unrolled.py: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
  sys.exit(main())
