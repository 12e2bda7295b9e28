"""The flags of verbs that run on several processes, and what becomes of their output."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kimi_k3.errors import InputError, LostProcess

if TYPE_CHECKING:
  from kimi_k3.maxtext_adapter.distributed import Processes

HELP = """\
On several hosts: start the same command on each, with --multihost (docs/multihost.md). Process 0 prints and writes.
"""
_DEFAULT_TIMEOUT_SECONDS = 300.0
_MOST_SECONDS = 1_000_000
# Of argparse's, and what may differ between processes: the config file stands for what is read from it, and so do the
# rows. That --multihost is the same but for the number is checked by its parts.
_FILES_OF_ROWS = ("input", "prompt_ids", "tokens", "text", "questions", "few_shot")
_NOT_COMPARED = ("run", "verb", "config", "settings", "multihost", *_FILES_OF_ROWS)


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags."""
  parser.add_argument(
    "--multihost",
    metavar="auto|ADDRESS:PORT,COUNT,ID",
    help="join the processes of a run: auto on Cloud TPU, GKE and Slurm; else where process 0 listens, how many "
    "processes there are and which this is",
  )
  parser.add_argument(
    "--multihost-timeout",
    type=float,
    metavar="SECONDS",
    help=f"for all processes to come (default: {_DEFAULT_TIMEOUT_SECONDS:g})",
  )
  parser.add_argument(
    "--check-placement",
    choices=("all", "sample", "none"),
    help="compare the weights on every device with the checkpoint: all of it, or of large shards one chunk (default: "
    "sample with --multihost, else none; partitioning=manual only)",
  )


@contextlib.contextmanager
def joined(args: argparse.Namespace) -> Iterator[Processes]:
  """Joins the processes of the run, first of all; alone without --multihost. Process 0 alone has a stdout.

  Raises:
    InputError: if they do not meet.
  """
  from kimi_k3.maxtext_adapter import distributed

  timeout = args.multihost_timeout
  if args.multihost is None:
    if timeout is not None:
      raise InputError("--multihost-timeout given without --multihost: leave it out, or say where the processes meet")
    yield distributed.ALONE
    return
  timeout = _DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
  if not 0 < timeout < _MOST_SECONDS:
    raise InputError(f"--multihost-timeout is {timeout:g}, expected seconds above 0 and below {_MOST_SECONDS}")
  address = distributed.parse_address(args.multihost)
  with _own_stdout() as results:
    try:
      processes = distributed.start(address, timeout)
    except distributed.NotMet as error:
      print(f"kimi-k3: error: {error}", file=sys.stderr, flush=True)
      os._exit(2)  # at an ordinary exit JAX, which still waits, would add lines of its own
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(results if processes.first else nowhere):
      yield processes


def shown_by(
  processes: Processes, config: Any, args: argparse.Namespace, rows: Sequence[Sequence[int]]
) -> dict[str, str]:
  """Returns what this process shows the others; nothing where it is alone."""
  if processes.count == 1:
    return {}
  from kimi_k3.maxtext_adapter.distributed import what_decides
  from kimi_k3.maxtext_adapter.engine import checkpoint_path

  flags = {name: value for name, value in vars(args).items() if name not in _NOT_COMPARED}
  flags["multihost"] = args.multihost.rpartition(",")[0] or args.multihost
  return what_decides(config, flags, rows, checkpoint_path(config))


@contextlib.contextmanager
def lost_processes(processes: Processes) -> Iterator[None]:
  """Says in one line that a collective failed, which is how the end of another process shows first."""
  if processes.count == 1:
    yield
    return
  import jax

  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    reason = " ".join(str(error).split())[:200]
    raise LostProcess(
      f"process {processes.number} of {processes.count}: stopped, another may have ended: {reason}"
    ) from error


@contextlib.contextmanager
def _own_stdout() -> Iterator[Any]:
  """A stream to where stdout goes, while what libraries print in C++ (Gloo does) goes to stderr."""
  sys.stdout.flush()
  try:
    saved = os.dup(1)
  except OSError:  # closed: there is nothing to protect
    yield sys.stdout
    return
  os.dup2(2, 1)
  try:
    with open(saved, "w", encoding=sys.stdout.encoding, errors="backslashreplace", closefd=False) as results:
      yield results
  finally:
    os.dup2(saved, 1)
    os.close(saved)
