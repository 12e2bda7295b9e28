"""Memory and speed of `kimi-k3 convert`, against `cp` of the same files in the same run.

    python benchmarks/bench_convert.py --out convert.json                             the demo's checkpoint, 3 MB
    python benchmarks/bench_convert.py --preset k3 --work /big/disk/bench             the cases below, 30 GB at a time
    python benchmarks/bench_convert.py --preset k3 --work /big/disk/bench --case 12x64 --repeats 3

At released tensor sizes the source is a synthetic checkpoint (scripts/synthetic_checkpoint.py). `cp` and `convert` run
in turns, each with the source dropped from the page cache before it and everything on the disk when the clock stops.
Peak memory is the child's own. What a case leaves is removed before the next.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import harness
from checks import Work

from kimi_k3.errors import InputError
from kimi_k3.resources import demo_dir

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
# Writes the peak memory of a command in KiB into a file.
_STARTER = """
import os, sys
child = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(child, 0)
with open(sys.argv[1], "w") as file:
  file.write(str(usage.ru_maxrss))
sys.exit(os.waitstatus_to_exitcode(status) & 255)
"""
REPEATS = {"tiny": 3, "k3": 1}


def main(argv: Sequence[str]) -> int:
  """Runs the cases."""
  parser = harness.parser(__doc__)
  parser.add_argument("--work", type=Path, metavar="DIR", help="an empty directory on the disk to measure")
  parser.add_argument("--case", action="append", choices=CASES, help="of the preset k3; may be repeated (default: all)")
  parser.add_argument("flags", nargs="*", help="after --: flags for convert, such as --workers 4")
  args = parser.parse_args(argv)
  args.repeats = REPEATS[args.preset] if args.repeats is None else args.repeats
  if args.preset == "k3" and args.work is None:
    raise InputError("--preset k3 needs --work: a directory with room for 30 GB on the disk to measure")
  session = harness.session("convert", args)
  with tempfile.TemporaryDirectory() as temporary:
    work = args.work or Path(temporary)
    work.mkdir(parents=True, exist_ok=True)
    if args.preset == "tiny":
      measure(session, "k3-nano", demo_dir() / "checkpoint", work, args, devices=1)
    for name in (args.case or CASES) if args.preset == "k3" else ():
      layers, experts, devices = CASES[name]
      source = work / "source"
      remove(source)
      make = [sys.executable, str(REPO / "scripts" / "synthetic_checkpoint.py"), str(source)]
      run([*make, "--layers", str(layers), "--experts", str(experts), "--top-k", str(TOP_K)])
      measure(session, name, source, work, args, devices=devices)
      remove(source)
  return session.finish()


def measure(
  session: harness.Session, name: str, source: Path, work: Path, args: argparse.Namespace, *, devices: int
) -> None:
  """Times cp and convert of a source in turns, and notes peak memory and what was written."""
  copy, out = work / "copy", work / "out"
  command = [sys.executable, "-m", "kimi_k3.cli.main", "convert", str(source), str(out), *args.flags]
  environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
  peaks: list[int] = []

  def fresh() -> None:
    remove(copy, out)
    drop(source)

  def cp(_: int) -> int:
    run(["cp", "-r", "--reflink=never", str(source), str(copy)])
    sync(copy)
    return size(copy)

  def convert(_: int) -> int:
    peaks.append(run(command, environment))
    sync(out)
    return size(out)

  nbytes = size(source)
  subjects = [
    harness.Procedure("cp", cp, Work(), before=fresh),
    harness.Procedure("convert", convert, Work(), before=fresh),
  ]
  session.compare(f"convert {name}", subjects, axes={"bytes": nbytes})
  if peaks:
    written = size(out) or size(copy)
    session.note(
      f"convert {name}: source {nbytes / 2**20:.1f} MiB, peak memory of convert {max(peaks) / 2**20:.0f} MiB, the last "
      f"run wrote {written / nbytes:.4f} of the source"
    )
  remove(copy, out)


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
  """Runs a command and returns its peak memory in bytes. Raises RuntimeError, with its last line, if it fails."""
  with tempfile.TemporaryFile() as errors, tempfile.NamedTemporaryFile() as peak:
    # The peak of a child takes over what the process was that started it: so a small one does.
    starter = [sys.executable, "-S", "-c", _STARTER, peak.name, *command]
    code = subprocess.run(starter, env=environment, stdout=subprocess.DEVNULL, stderr=errors, check=False).returncode
    if code:
      errors.seek(0)
      said = errors.read().decode("utf-8", "replace").strip().splitlines()
      raise RuntimeError(f"{command[0]} ended with exit code {code}: {said[-1] if said else 'no message'}")
    return 1024 * int(peak.read())


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
  harness.exit_with(main, __file__)
