"""All benchmarks at the preset tiny, and the report on them: two minutes on two CPU cores.

    python benchmarks/run_tiny.py out/bench

Writes a JSON file for each subject into the directory, and report.md with its plots. What can share a process does:
importing and compiling take longer than measuring. Exit codes: 0 done; 1 something was refused; 2 bad input.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import harness
import models
import workloads

from kimi_k3.cli.main import Parser
from kimi_k3.errors import InputError

# In one process, in this order: those of the model come last and share its programs.
KERNELS = ("kda", "mla_decode", "experts", "attn_res")
WITH_MODEL = ("load", "decode_loop", "model")
# In processes of their own: simulated devices, child processes that are measured, memory that is read off the process.
DEVICES = "8"
SAME_PROGRAM = ("--steps-per-call", str(workloads.of_preset(workloads.DECODE_LOOPS, "tiny")[0].new_tokens))
COMPILE_CACHE = {
  "JAX_COMPILATION_CACHE_DIR": str(harness.REPO / ".cache" / "jax"),
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
}


def main(argv: Sequence[str]) -> int:
  """Runs all and returns the largest exit code of them."""
  parser = Parser(description=__doc__)
  parser.add_argument("out", metavar="DIR", type=Path, help="made if it is not there; results in it are replaced")
  args = parser.parse_args(argv)
  try:
    args.out.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise InputError(f"{args.out}: cannot be made: {error.strerror}") from error
  # The decode loop's programs serve the model and the server too: compiled once, where nobody has set another place.
  for name, value in COMPILE_CACHE.items():
    os.environ.setdefault(name, value)
  environment = dict(os.environ)  # MaxText adds flags to it, with which children would compile everything again
  config = args.out / "k3-nano" / "decode.yml"
  if not config.exists():
    with contextlib.redirect_stderr(io.StringIO()):
      models.convert_demo(config.parent)
  codes, seconds = [], {}
  for subject, run in steps(args.out, config, environment).items():
    begin = time.monotonic()
    codes.append(run())
    seconds[subject] = time.monotonic() - begin
  print("seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))
  print(f"all of it took {sum(seconds.values()):.0f} s")
  return max(codes)


def steps(out: Path, config: Path, environment: Mapping[str, str]) -> dict[str, Callable[[], int]]:
  """Returns what is run, in order, by name."""

  def here(subject: str) -> Callable[[], int]:
    flags = ["--config", str(config)] if subject in WITH_MODEL else []
    return lambda: importlib.import_module(f"bench_{subject}").main([*flags, "--out", str(out / f"{subject}.json")])

  def apart(name: str, script: str, *flags: str) -> Callable[[], int]:
    command = [sys.executable, str(Path(__file__).with_name(script)), *flags, "--out", str(out / name)]

    def run() -> int:
      sys.stdout.flush()
      return subprocess.run(command, env=environment, check=False).returncode

    return run

  return {subject: here(subject) for subject in (*KERNELS, *WITH_MODEL)} | {
    "collectives": apart("collectives.json", "bench_collectives.py", "--devices", DEVICES),
    "convert": apart("convert.json", "bench_convert.py"),
    "serve": apart("serve.json", "serve.py", str(config), *models.FLOAT32, "--preset", "tiny", *SAME_PROGRAM),
    "report": apart("report.md", "report.py", str(out)),
  }


if __name__ == "__main__":
  harness.exit_with(main, __file__)
