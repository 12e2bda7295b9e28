"""The machine that figures belong to: its device, its bandwidth, its versions, its memory."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checks import Refused, Work

from kimi_k3.cli.sizes import peak_bytes

REPO = Path(__file__).resolve().parents[1]
PACKAGES = ("jax", "jaxlib", "libtpu", "maxtext", "tokamax", "flax", "numpy")
# Bytes a second and bfloat16 FLOP/s of GPUs that figures were taken on; those of TPUs are in kimi_k3.capacity. Source:
# NVIDIA's data sheets of H200 and H100 SXM, dense.
_GPUS: Mapping[str, tuple[float, float]] = {"NVIDIA H200": (4.8e12, 989e12), "NVIDIA H100 80GB HBM3": (3.35e12, 989e12)}
_COPY_BYTES = 64 * 2**20  # of the array that is copied to measure the bandwidth: beyond the caches of most processors
# What is smaller may stay in a cache, whose bandwidth is another; a processor's can be larger than any such bound.
_BEYOND_CACHES = 256 * 2**20
_BOUND_SLACK = 0.9  # clocks and data sheets are not exact to a tenth


@dataclasses.dataclass(frozen=True)
class Roof:
  """What one device can do in a second.

  Attributes:
    bytes_per_second: Of its memory.
    flops_per_second: In bfloat16; None where it is not known.
    source: Where the first is from.
    copied: Bytes a second, read and written, of a copy in this run.
  """

  bytes_per_second: float
  flops_per_second: float | None
  source: str
  copied: float

  def bound(self, work: Work) -> tuple[float | None, str | None]:
    """Returns the seconds that work takes at the least, and what bounds it; None where it is not known."""
    times = {}
    if work.hbm_bytes is not None:
      times["memory"] = work.hbm_bytes / self.bytes_per_second
    if work.flops is not None and self.flops_per_second is not None:
      times["arithmetic"] = work.flops / self.flops_per_second
    if not times:
      return None, None
    longest = max(times, key=lambda name: times[name])
    return times[longest], longest

  def refuse_faster(self, name: str, work: Work, seconds: float, platform: str) -> None:
    """Raises Refused for a time that the device cannot reach."""
    bound, by = self.bound(work)
    certain = platform != "cpu" and (by == "arithmetic" or (work.hbm_bytes or 0) >= _BEYOND_CACHES)
    if bound is not None and certain and seconds < _BOUND_SLACK * bound:
      raise Refused(
        f"{name}: {seconds:.3g} s, {by} alone takes {bound:.3g} s on this device: not awaited, elided, or "
        "the workload's bytes are wrong"
      )


def measure_copy(repeats: int = 5) -> float:
  """Returns the bytes a second, read and written, at which this device copies an array; the median of some runs."""
  import jax
  import jax.numpy as jnp

  copy = jax.jit(lambda x: x + 1, donate_argnums=0)
  x = jax.block_until_ready(copy(jnp.zeros(_COPY_BYTES // 4, jnp.float32)))
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    x = jax.block_until_ready(copy(x))
    seconds.append(time.perf_counter() - start)
  return 2 * _COPY_BYTES / statistics.median(seconds)


def roof_of(device: Any) -> Roof:
  """Returns the roof of a device: its data sheet's where the kind is known, or else the copy's bandwidth alone."""
  from kimi_k3.capacity.topologies import parse_topology

  copied = measure_copy()
  tpus = {one.device_kind: one for one in map(parse_topology, ("tpu7x:1x1x1", "v6e:1x1"))}
  if device.device_kind in tpus:
    kind = tpus[device.device_kind]
    return Roof(kind.hbm_bytes_per_second, kind.flops_per_second, "data sheet", copied)
  if device.device_kind in _GPUS:
    return Roof(*_GPUS[device.device_kind], "data sheet", copied)
  return Roof(copied, None, "copy in this run", copied)


def environment() -> dict[str, Any]:
  """Returns what a figure depends on besides the workload: device, machine, versions, our commit. No path, no name."""
  import jax

  device = jax.devices()[0]
  with contextlib.suppress(OSError):
    models = [s for s in Path("/proc/cpuinfo").read_text().splitlines() if s.startswith("model name")]
  return {
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "platform": device.platform,
    "device": device.device_kind,
    "devices": jax.device_count(),
    "processes": jax.process_count(),
    "cpu": models[0].split(":", 1)[1].strip() if models else None,
    "cores": os.cpu_count(),
    "load": round(os.getloadavg()[0], 2),
    "versions": versions(),
    "commit": commit(),
    "matmul_precision": jax.config.jax_default_matmul_precision,
  }


def versions() -> dict[str, str | None]:
  """Returns the release of each of PACKAGES; None: it is not installed."""
  found: dict[str, str | None] = {"python": ".".join(map(str, sys.version_info[:3]))}
  for name in PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = None
  return found


def commit() -> str | None:
  """Returns the commit of this checkout, with "+" where tracked files differ from it; None outside of one."""

  def git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

  try:
    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
  except (OSError, subprocess.SubprocessError):
    return None


def peak_memory() -> dict[str, Any]:
  """Returns the most memory of this process so far, in bytes, and whose it is: the device's, or the process's."""
  import jax

  stats = jax.local_devices()[0].memory_stats()
  if stats and "peak_bytes_in_use" in stats:
    return {"bytes": stats["peak_bytes_in_use"], "of": "one device"}
  return {"bytes": peak_bytes(), "of": "the process (resident set)"}
