"""Memory and speed of `kimi-k3 convert` at released tensor sizes, against `cp` of the same files in the same run.

    python benchmarks/convert.py --work /big/disk/bench                      the cases below, about 30 GB at a time
    python benchmarks/convert.py --work /big/disk/bench --case 12x64 --repeat 3

Lays out a synthetic checkpoint (scripts/synthetic_checkpoint.py), then times `cp` and `convert` in turns, each with the
source dropped from the page cache before it and everything on the disk when the clock stops. Peak memory is the child's
(ru_maxrss). Prints a table; --json FILE keeps the figures. What a case leaves is removed before the next.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
# Layers x experts of the layout, and simulated devices. The first: layer 0 is dense, layer 1 has all 896 experts.
CASES = {
  "2x896": (2, 896, 1),
  "3x64": (3, 64, 1),
  "6x64": (6, 64, 1),
  "12x64": (12, 64, 1),
  "12x64 on 8 devices": (12, 64, 8),
}
TOP_K = 16


def main() -> int:
  """Runs the cases and prints the table."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument(
    "--work", type=Path, required=True, metavar="DIR", help="an empty directory on the disk to measure"
  )
  parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be repeated (default: all)")
  parser.add_argument("--repeat", type=int, default=1, metavar="N", help="pairs of cp and convert a case (default: 1)")
  parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
  parser.add_argument("flags", nargs="*", help="after --: flags for convert, such as --workers 4")
  args = parser.parse_args()
  results = []
  for name in args.case or CASES:
    results.append(measure(name, args.work, args.repeat, args.flags))
    print(line(results[-1]), flush=True)
  if args.json:
    args.json.write_text(json.dumps(results, indent=2) + "\n")
  return 0


def measure(name: str, work: Path, repeat: int, flags: list[str]) -> dict[str, Any]:
  """Returns the figures of one case: bytes, seconds of each run, ratio of the medians, peak memory in bytes."""
  layers, experts, devices = CASES[name]
  source, copy, out = work / "source", work / "copy", work / "out"
  work.mkdir(parents=True, exist_ok=True)
  remove(source, copy, out)
  make = [sys.executable, str(REPO / "scripts" / "synthetic_checkpoint.py"), str(source)]
  run([*make, "--layers", str(layers), "--experts", str(experts), "--top-k", str(TOP_K)])
  convert = [sys.executable, "-m", "kimi_k3.cli.main", "convert", str(source), str(out), *flags]
  environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
  seconds: dict[str, list[float]] = {"cp": [], "convert": []}
  peaks = []
  for _ in range(repeat):
    drop(source)
    start = time.monotonic()
    run(["cp", "-r", "--reflink=never", str(source), str(copy)])
    sync(copy)
    seconds["cp"].append(time.monotonic() - start)
    remove(copy)
    drop(source)
    start = time.monotonic()
    peaks.append(run(convert, environment))
    sync(out)
    seconds["convert"].append(time.monotonic() - start)
    written = size(out)
    remove(out)
  nbytes = size(source)
  remove(source)
  ratio = statistics.median(seconds["cp"]) / statistics.median(seconds["convert"])
  return {
    "case": name, "layers": layers, "experts": experts, "devices": devices, "source_bytes": nbytes,
    "written_bytes": written, "seconds": seconds, "throughput_to_cp": ratio, "peak_bytes": max(peaks),
  }  # fmt: skip


def line(result: dict[str, Any]) -> str:
  """A row of the table."""
  cp, convert = (statistics.median(result["seconds"][name]) for name in ("cp", "convert"))
  gib = result["source_bytes"] / 2**30
  return (
    f"{result['case']:20} {gib:6.1f} GiB  cp {cp:6.1f} s {gib / cp:5.2f} GiB/s  convert {convert:6.1f} s "
    f"{gib / convert:5.2f} GiB/s  ratio {result['throughput_to_cp']:.2f}  peak {result['peak_bytes'] / 2**20:.0f} MiB  "
    f"written {result['written_bytes'] / result['source_bytes']:.4f} of the source"
  )


def run(command: list[str], environment: dict[str, str] | None = None) -> int:
  """Runs a command and returns its peak memory in bytes. Raises if it fails."""
  child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
  _, status, usage = os.wait4(child.pid, 0)
  child.returncode = os.waitstatus_to_exitcode(status)
  if child.returncode:
    raise subprocess.CalledProcessError(child.returncode, command)
  return usage.ru_maxrss * 1024


def files(directory: Path) -> list[Path]:
  """All files below."""
  return [path for path in directory.rglob("*") if path.is_file()]


def size(directory: Path) -> int:
  """Bytes of all files below."""
  return sum(path.stat().st_size for path in files(directory))


def sync(directory: Path) -> None:
  """Puts every file on stable storage."""
  for path in files(directory):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def drop(directory: Path) -> None:
  """Takes the files out of the page cache: first onto the disk, as only clean pages go."""
  sync(directory)
  for path in files(directory):
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def remove(*directories: Path) -> None:
  """Removes what a run has made, an unfinished conversion too."""
  for directory in directories:
    shutil.rmtree(directory, ignore_errors=True)
    shutil.rmtree(directory.with_name(directory.name + ".partial"), ignore_errors=True)


if __name__ == "__main__":
  sys.exit(main())
