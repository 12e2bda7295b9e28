"""Collectives at the sizes that K3's decoding step sends: alone, beside a product, and inside 92 layers of experts.

    python benchmarks/bench_collectives.py --devices 8 --out collectives.json      8 simulated devices of a CPU
    python benchmarks/bench_collectives.py --preset k3                             all devices of a TPU slice

A program has many calls, each of which needs the one before (chained). `overlapped` adds a chain of products that needs
none of them, and `products` is that chain alone. In the layers, the form without collectives stands beside the one with
them. Before anything is timed the compiled program is read: it must have exactly the collectives that its name says.
Simulated devices share the cores: their figures say that the benchmark works, and nothing of a network.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import harness
import workloads
from checks import Refused, Work

from kimi_k3.errors import InputError

AXIS = "x"
_FLAG = "--xla_force_host_platform_device_count"
_PRODUCT = {"tiny": 32, "k3": 1024}  # rows and columns of the products beside a collective


def main(argv: Sequence[str]) -> int:
  """Runs the workloads of a preset."""
  parser = harness.parser(__doc__)
  harness.add_only(parser)
  parser.add_argument("--devices", type=int, metavar="N", help="use N devices; a CPU simulates them (default: all)")
  args = parser.parse_args(argv)
  simulate(args.devices)
  session = harness.session("collectives", args)
  mesh = make_mesh(args.devices)
  size = mesh.size
  session.note(f"{size} devices on one axis")
  for work in harness.chosen(workloads.MESSAGES, args):
    check_divides(work, size)
    forms = ("chained", "overlapped", "products") if work.overlapped else ("chained",)
    axes = {"bytes": work.operand_bytes, "devices": size}
    session.compare(work.name, [message_program(work, mesh, form) for form in forms], axes=axes)
  for work in harness.chosen(workloads.DUMMIES, args):
    check_divides(work, size)
    forms = [layers_program(work, mesh, with_collectives=there) for there in (True, False)]
    session.compare(work.name, forms, axes={"devices": size})
  return session.finish()


def simulate(devices: int | None) -> None:
  """Makes a CPU simulate devices. To be called before JAX is imported; an accelerator does not look at it.

  Raises:
    InputError: if there is no such number, or XLA_FLAGS says another one.
  """
  if devices is None:
    return
  if devices < 2:
    raise InputError(f"--devices {devices}: expected 2 or more, a collective of one device is none")
  flags = os.environ.get("XLA_FLAGS", "")
  if _FLAG in flags:
    if f"{_FLAG}={devices}" not in flags.split():
      raise InputError(f"--devices {devices}: XLA_FLAGS is {flags!r}: leave one of them out")
    return
  os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={devices}".strip()


def make_mesh(devices: int | None) -> Any:
  """Returns a mesh of one axis. Raises InputError if there are too few devices."""
  import jax

  found = jax.devices()
  count = len(found) if devices is None else devices
  if not 2 <= count <= len(found):
    raise InputError(
      f"{len(found)} {found[0].platform} device(s) found, {max(count, 2)} needed: give --devices N on a CPU"
    )
  return jax.sharding.Mesh(found[:count], (AXIS,))


def check_divides(work: workloads.Message | workloads.DummyMoe, size: int) -> None:
  """Raises InputError if the devices do not divide what they share."""
  if isinstance(work, workloads.DummyMoe):
    number = work.rows
  elif work.kind == "all-to-all":
    number = work.shape[work.cut]
  else:
    return
  if number % size:
    raise InputError(f"{work.name}: {number} parts on {size} devices: use a number of devices that divides them")


def message_program(work: workloads.Message, mesh: Any, form: str) -> harness.Program:
  """Returns the program of `work.calls` collectives in a row, of products, or of both side by side."""
  import jax
  import jax.numpy as jnp

  send = sender(work, mesh.size)
  sends, multiplies = form in ("chained", "overlapped"), form in ("overlapped", "products")

  def body(carry, _):
    x, y, matrix = carry
    if sends:
      x = send(x)
    if multiplies:
      y = (y @ matrix).astype(y.dtype)
    return (x, y, matrix), None

  def run(x, y, matrix):
    (x, y, _), _ = jax.lax.scan(body, (x, y, matrix), None, length=work.calls)
    return (x, y) if form == "overlapped" else x if sends else y

  def on_each(x, y, matrix):
    # Only what the form needs goes in: the harness refuses a program that does not read an argument.
    return jax.shard_map(run, mesh=mesh, in_specs=jax.P(AXIS), out_specs=jax.P(AXIS), check_vma=False)(x, y, matrix)

  function: Callable[..., Any] = on_each
  side = _PRODUCT[work.preset]
  if not multiplies:
    function = lambda x: on_each(x, jnp.zeros((mesh.size, 1)), jnp.zeros((mesh.size, 1)))  # noqa: E731
  elif not sends:
    function = lambda y, matrix: on_each(jnp.zeros((mesh.size, 1)), y, matrix)  # noqa: E731

  def inputs(number: int) -> tuple[Any, ...]:
    whole = (work.shape[0] * mesh.size, *work.shape[1:])
    x = placed(mesh, number, whole, 1.0)
    y, matrix = (placed(mesh, number + i, (side * mesh.size, side), side**-0.5) for i in (2, 4))
    return ((x,) if sends else ()) + ((y, matrix) if multiplies else ())

  expected = {work.kind: work.calls} if sends else {}
  check = collectives_check(f"{work.name}, {form}", expected)
  return harness.Program(form, function, inputs, Work(), times=work.calls, check=check)


def sender(work: workloads.Message, size: int) -> Callable[[Any], Any]:
  """Returns a function of one device's array to one of the same shape, of about the same size."""
  import jax

  if work.kind == "all-to-all":
    # The factor keeps two of them from being simplified away.
    return lambda x: jax.lax.all_to_all(x, AXIS, work.cut, work.cut, tiled=True) * -1
  if work.kind == "all-reduce":
    return lambda x: jax.lax.psum(x, AXIS) * (1 / size**0.5)

  def gather(x):
    parts = jax.lax.all_gather(x, AXIS)  # [devices, ...]: each element is used
    return parts.sum(axis=0) * (1 / size**0.5)

  return gather


def layers_program(work: workloads.DummyMoe, mesh: Any, *, with_collectives: bool) -> harness.Program:
  """Returns the program of all layers: into the experts' width, back, and across the devices."""
  import jax
  import jax.numpy as jnp

  kinds = dict(work.kinds) if with_collectives else {}

  def experts(x, into, out):
    return jax.nn.silu(x @ into) @ out

  def gathered_alone(x, weights):
    # The rows of as many devices, without the others: what is computed is then the same.
    rows = jnp.concatenate([x * (1 + 0.125 * i) for i in range(mesh.size)])
    return experts(rows, *weights).reshape(mesh.size, *x.shape).sum(axis=0)

  def layer(x, weights):
    if "all-to-all" in kinds:  # a device's rows to the experts' devices and back
      there = jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True)
      y = jax.lax.all_to_all(experts(there, *weights), AXIS, 0, 0, tiled=True)
    elif "all-gather" in kinds:
      y = jax.lax.psum_scatter(
        experts(jax.lax.all_gather(x, AXIS, tiled=True), *weights), AXIS, scatter_dimension=0, tiled=True
      )
    elif "all-reduce" in kinds:
      y = jax.lax.psum(experts(x, *weights), AXIS)
    elif "all-gather" in dict(work.kinds):
      y = gathered_alone(x, weights)
    else:
      y = experts(x, *weights)
    return 0.5 * (x + y / (1 + abs(y).max())), None

  def run(x, into, out):
    return jax.lax.scan(layer, x, (into, out))[0]

  # All rows on each device before a sum over the experts; a part of them where rows are sent.
  rows = work.rows * mesh.size if "all-reduce" in dict(work.kinds) or "all-to-all" in dict(work.kinds) else work.rows
  specs = (jax.P(AXIS), jax.P(None, AXIS), jax.P(None, AXIS))

  def inputs(number: int) -> tuple[Any, ...]:
    x = placed(mesh, number, (rows, work.latent), 1.0)
    into = placed(mesh, 2, (work.layers, work.latent * mesh.size, work.width), work.latent**-0.5, specs[1])
    out = placed(mesh, 3, (work.layers, work.width * mesh.size, work.latent), work.width**-0.5, specs[2])
    return x, into, out

  function = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=jax.P(AXIS), check_vma=False)
  name = "with collectives" if with_collectives else "without"
  check = collectives_check(f"{work.name}, {name}", {kind: count * work.layers for kind, count in kinds.items()})
  return harness.Program(name, function, inputs, Work(), times=work.layers, check=check)


def placed(mesh: Any, seed: int, shape: tuple[int, ...], scale: float, spec: Any = None) -> Any:
  """Returns a random bfloat16 array, made where it lies."""
  import jax

  make = _maker(jax.sharding.NamedSharding(mesh, jax.P(AXIS) if spec is None else spec), shape)
  return make(seed, scale)


@functools.cache
def _maker(sharding: Any, shape: tuple[int, ...]) -> Callable[[int, float], Any]:
  """One program for each shape: compiling it takes longer than running it."""
  import jax
  import jax.numpy as jnp

  def make(seed, scale):
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(jnp.bfloat16)

  return jax.jit(make, out_shardings=sharding)


def collectives_check(name: str, expected: Mapping[str, int]) -> Callable[[str], None]:
  """Returns a function of a compiled text that raises Refused unless a run has exactly these collectives."""

  def check(text: str) -> None:
    from kimi_k3.capacity import hlo

    found: Counter[str] = Counter()
    for row in hlo.collectives(hlo.parse(text)):
      found[row.kind] += row.calls
    if dict(found) != dict(expected):
      raise Refused(
        f"{name}: a run of the compiled program has {dict(found) or 'no collectives'}, expected "
        f"{dict(expected) or 'none'}: the time would be another operation's"
      )

  return check


if __name__ == "__main__":
  harness.exit_with(main, __file__)
