#!/usr/bin/env python3
"""Runs one command in a pod: results and log reach the output folder, the exit code reaches the retry policy.

    python scripts/gke/job.py --out /bucket/runs/a --work /scratch --keep 'completions.jsonl*' -- kimi-k3 batch ...

In a bucket that gcsfuse mounts, a file that is open and appended to becomes an object only when it is closed; a node
that is lost takes it along. So the command writes under --work, on the node, and --keep files are copied whole to --out
every --copy-every seconds and at the end; a run that starts again finds them back under --work.

Before the command: --out must take a file, or it ends with one line and exit code 2. In a run of several hosts, a pod
that replaces one of the same attempt ends at once with 75: the others belong to a run that has lost a process, and all
must start again together (docs/decisions/0023-gke-retries.md).

Exit codes: the command's own; 128 + n after signal n; 2 if --out cannot be written; 75 (EX_TEMPFAIL) if it is to be run
again. Codes that are retried are passed on --settle seconds late in a run of several hosts, so that the process that is
the cause, should it have failed for good, is seen first.

Written with the standard library alone: it also runs where the package does not import.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1
REFUSED = 2
LAST_SIGNAL = 31  # scripts/gke/manifests.py has the same codes in the retry policy
AGAIN = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong with the input, run it again
PACKAGES = ("jax", "jaxlib", "libtpu", "maxtext", "maxtext-kimi-k3", "orbax-checkpoint", "tokamax")
_COPY_ATTEMPTS = 5
_MOST_SECONDS_BETWEEN_ATTEMPTS = 30.0


class Host:
  """Which pod of the run this is, by the variables that the manifest sets.

  Attributes:
    index: Of the host in its slice, from the Indexed Job.
    slice: Of the slice in the run.
    hosts: In the run, over all slices.
    attempt: Changes whenever all pods start again: the UID of the Job. Empty where nothing tells.
    topology: Of a slice; empty on CPU nodes.
  """

  def __init__(self, environment: Mapping[str, str]):
    self.index = _whole(environment, "JOB_COMPLETION_INDEX", 0)
    self.slice = _whole(environment, "KIMI_K3_SLICE", 0)
    self.hosts = _whole(environment, "KIMI_K3_HOSTS", 1)
    self.attempt = environment.get("KIMI_K3_ATTEMPT", "")
    self.topology = environment.get("KIMI_K3_TOPOLOGY", "")

  @property
  def name(self) -> str:
    return f"{self.slice}-{self.index}"

  @property
  def first(self) -> bool:
    """Whether results are stored from here. JAX numbers GKE's processes by slice and index, and process 0 writes."""
    return self.slice == 0 and self.index == 0


class Refused(Exception):
  """Ends the run before the command starts; its text is one line."""


def _whole(environment: Mapping[str, str], name: str, default: int) -> int:
  text = environment.get(name) or str(default)
  if not text.isdecimal():
    raise Refused(f"{name} is {text!r}, expected a whole number: the manifest sets it")
  return int(text)


def main(argv: Sequence[str] | None = None) -> int:
  args = _parse(sys.argv[1:] if argv is None else argv)
  started = time.time()
  try:
    host = Host(os.environ)
    _check_writable(args.out, host)
    if not _first_of_its_attempt(args.out, host):
      _say(f"this pod replaces one of the same attempt: exit {AGAIN}, so that all {host.hosts} start again together")
      return AGAIN
    _make_work(args.work)
    _restore(args.out, args.work, args.keep)
  except Refused as refusal:
    _say(f"error: {refusal}")
    return REFUSED
  run = _Run(args, host, started)
  code = run.finish(run.wait())
  if host.hosts > 1 and is_retried(code) and not run.told_to_stop:
    _say(f"exit code {code} in {args.settle:g} s")
    time.sleep(args.settle)
  return code


def is_retried(code: int) -> bool:
  """Whether the manifests' retry policy runs again what ended with this code: 75, and death by a signal."""
  return code == AGAIN or 128 < code <= 128 + LAST_SIGNAL


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="job.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument("--out", type=Path, required=True, help="folder of results; a mounted bucket, or any directory")
  parser.add_argument("--work", type=Path, required=True, help="directory on the node, where the command runs")
  parser.add_argument(
    "--keep",
    action="append",
    default=[],
    type=_pattern,
    metavar="PATTERN",
    help="files of --work to store, in this order; repeat",
  )
  parser.add_argument("--copy-every", type=_seconds, default=60.0, metavar="SECONDS", help="default: %(default)g")
  parser.add_argument(
    "--grace", type=_seconds, default=45.0, metavar="SECONDS", help="from SIGTERM to SIGKILL of the command"
  )
  parser.add_argument(
    "--settle", type=_seconds, default=20.0, metavar="SECONDS", help="see above; default: %(default)g"
  )
  parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="what to run")
  args = parser.parse_args(argv)
  if args.copy_every == 0:
    parser.error("argument --copy-every: 0 s between two copies, expected more")
  return args


def _pattern(text: str) -> str:
  if text in ("", ".", "..") or "/" in text or "**" in text:
    raise argparse.ArgumentTypeError(f"{text!r} is no pattern of file names: files in folders are not stored")
  return text


def _seconds(text: str) -> float:
  seconds = float(text)
  if not 0 <= seconds < math.inf:
    raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
  return seconds


def _say(text: str) -> None:
  print(f"job: {' '.join(text.split())}", file=sys.stderr, flush=True)


def _check_writable(out: Path, host: Host) -> None:
  """Writes, reads and deletes a file, as a bucket may be mounted and yet refuse one of the three."""
  folder = out / "hosts" / host.name
  probe = folder / "probe"
  word = f"{host.name} {time.time_ns()}"
  top = Path(*out.absolute().parts[:2])  # such as /bucket
  if not top.is_dir():
    raise Refused(f"{out}: there is no {top}: mount the bucket there")
  try:
    folder.mkdir(parents=True, exist_ok=True)
    probe.write_text(word)
    found = probe.read_text()
    probe.unlink()
  except OSError as error:
    raise Refused(f"{out} cannot be written ({error}): give the pod's service account access to the bucket") from error
  if found != word:
    raise Refused(f"{probe} reads {found!r} after {word!r} was written: mount the bucket without caches of content")


def _make_work(work: Path) -> None:
  try:
    work.mkdir(parents=True, exist_ok=True)
    (work / "log.txt").open("ab").close()
  except OSError as error:
    raise Refused(f"{work} cannot be written ({error}): give a directory on the node") from error


def _first_of_its_attempt(out: Path, host: Host) -> bool:
  if host.hosts == 1:
    return True
  if not host.attempt:
    raise Refused(
      f"KIMI_K3_ATTEMPT is not set and there are {host.hosts} hosts: set it to what all pods change together"
    )
  mark = out / "attempts" / host.attempt / host.name
  try:
    mark.parent.mkdir(parents=True, exist_ok=True)
    with open(mark, "x") as file:
      file.write(_utc(time.time()))
  except FileExistsError:
    return False
  except OSError as error:
    raise Refused(f"{mark} cannot be written ({error})") from error
  return True


def _restore(out: Path, work: Path, patterns: Sequence[str]) -> None:
  """Brings back what an earlier attempt stored. Every host does, for all must see the same rows as done."""
  for path in _matching(out, patterns):
    try:
      shutil.copyfile(path, work / path.name)
    except OSError as error:
      raise Refused(f"{path} of an earlier attempt cannot be read ({error})") from error
    _say(f"{path.name} of an earlier attempt: {path.stat().st_size} bytes")


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
  """Files in the order of the patterns: what must be there before another is stored before it."""
  found = dict.fromkeys(path for pattern in patterns for path in sorted(folder.glob(pattern)))
  # Locks and halves of our own copies are nobody's result.
  return [path for path in found if path.is_file() and path.suffix not in (".lock", ".part")]


def store(path: Path, folder: Path) -> None:
  """Copies a file so that a reader sees the old content or the new one.

  Raises:
    OSError: if it cannot be copied.
  """
  part = folder / f"{path.name}.part"
  shutil.copyfile(path, part)
  part.replace(folder / path.name)


class _Run:
  """The command, while it runs and when it has ended."""

  def __init__(self, args: argparse.Namespace, host: Host, started: float):
    self.args, self.host, self.started = args, host, started
    self.told_to_stop = False
    self.folder = args.out / "hosts" / host.name
    self.log = args.work / "log.txt"
    self._said: set[str] = set()
    self._stored: dict[Path, tuple[int, int]] = {}
    try:
      self.process = subprocess.Popen(
        args.command, cwd=args.work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
      )
    except OSError as error:
      _say(f"error: {args.command[0]}: {error}")
      self.process = None
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._forward)
    self._tee = threading.Thread(target=self._copy_output, daemon=True)
    self._tee.start()

  def _forward(self, number: int, _frame: object) -> None:
    self.told_to_stop = True
    if self.process is None or self.process.poll() is not None:
      return
    self.process.send_signal(number)
    timer = threading.Timer(self.args.grace, self.process.kill)  # the summary must be written before the pod is killed
    timer.daemon = True
    timer.start()

  def _copy_output(self) -> None:
    if self.process is None or self.process.stdout is None:
      return
    with self.process.stdout as output, open(self.log, "ab", buffering=0) as log:
      while piece := os.read(output.fileno(), 1 << 16):
        # The command must not end because its words find no place.
        try:
          log.write(piece)
        except OSError as error:
          self._say_once(f"{self.log} cannot be written ({error}): the pod's own log goes on")
        with contextlib.suppress(OSError, AttributeError):  # no stdout; the log on the node is the one that counts
          sys.stdout.buffer.write(piece)
          sys.stdout.buffer.flush()

  def _say_once(self, text: str) -> None:
    if text not in self._said:
      self._said.add(text)
      _say(text)

  def wait(self) -> int:
    """Returns the command's exit code as a shell gives it: 128 + n for signal n, 127 if it could not be started."""
    if self.process is None:
      return 127
    while True:
      try:
        code = self.process.wait(self.args.copy_every)
      except subprocess.TimeoutExpired:
        try:
          self._store_changed()
        except OSError as error:
          _say(f"not stored, tried again in {self.args.copy_every:g} s: {error}")
        continue
      self._tee.join(5.0)  # a child of the command may hold the pipe open
      return 128 - code if code < 0 else code

  def _store_changed(self) -> None:
    kept = _matching(self.args.work, self.args.keep) if self.host.first else []
    for path, folder in [*((path, self.args.out) for path in kept), (self.log, self.folder)]:
      if not path.exists():
        continue
      state = path.stat()
      if self._stored.get(path) != (state.st_size, state.st_mtime_ns):
        store(path, folder)
        self._stored[path] = (state.st_size, state.st_mtime_ns)

  def finish(self, code: int) -> int:
    """Stores results, log and summary; returns the code to exit with."""
    for attempt in range(_COPY_ATTEMPTS):
      try:
        self._store_changed()
        self._write_summary(code)
        return code
      except OSError as error:
        failure = error
        if self.told_to_stop:
          break
        if attempt + 1 < _COPY_ATTEMPTS:
          time.sleep(min(2.0**attempt * self.args.copy_every / 60.0, _MOST_SECONDS_BETWEEN_ATTEMPTS))
    _say(f"error: {self.args.out}: results cannot be stored ({failure}): run again, which goes on from what is there")
    return code if is_retried(code) or code == REFUSED else AGAIN

  def _write_summary(self, code: int) -> None:
    ended = time.time()
    summary: dict[str, Any] = {
      "schema": SCHEMA,
      "command": self.args.command,
      "exit_code": code,
      "outcome": _outcome(code),
      "started": _utc(self.started),
      "ended": _utc(ended),
      "seconds": round(ended - self.started, 3),
      "host": {"name": self.host.name, "node": os.environ.get("KIMI_K3_NODE", ""), "hosts": self.host.hosts},
      "topology": self.host.topology,
      "attempt": self.host.attempt,
      "commit": os.environ.get("KIMI_K3_COMMIT", ""),
      "image": os.environ.get("KIMI_K3_IMAGE", ""),
      "versions": {package: _version(package) for package in PACKAGES} | {"python": sys.version.split()[0]},
    }
    text = json.dumps(summary, indent=2) + "\n"
    file = self.args.work / "summary.json"
    file.write_text(text)
    for folder in (self.folder, self.args.out) if self.host.first else (self.folder,):
      store(file, folder)


def _outcome(code: int) -> str:
  if code == AGAIN:
    return "to be run again"
  if is_retried(code):
    return f"signal {code - 128}"
  return {0: "done", 1: "failed, or done with failed rows", REFUSED: "refused"}.get(code, "failed")


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _utc(seconds: float) -> str:
  return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
  sys.exit(main())
