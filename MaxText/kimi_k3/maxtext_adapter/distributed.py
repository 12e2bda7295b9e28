"""Several processes that run one model: how they find each other, and what they must agree on.

Nothing here, and nothing that loads, asks which process it is: what a process reads and holds is what the sharding says
of its devices. Three numberings differ (the launcher's, `jax.process_index()`, the order of the mesh) and none is
mapped to another. The number of a process says who prints, and stands in messages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from kimi_k3.checksums import RECORD
from kimi_k3.errors import InputError

_Result = TypeVar("_Result")

AUTO = "auto"
# A process that dies without a word is missed after this time, and the others are ended by JAX.
HEARTBEAT_SECONDS = 60
# How long a process that leaves early waits for the others before JAX ends them. A run ends together.
SHUTDOWN_SECONDS = 30
_SHOWN = 4  # differences named in full
_VALUE_LENGTH = 120  # characters of a value in a message

# Left out: where things lie on a host, and what MaxText makes of it. Checkpoint and rows are compared by their content.
_PLACES = ("_dir", "_path", "_directory")
_NAMES_OF_PLACES = frozenset(("run_name", "dump_hlo_xla_flags"))
_PACKAGES = ("jax", "jaxlib", "libtpu", "maxtext", "maxtext-kimi-k3", "tokamax")
# What decides what JAX and XLA compile, less what tells a process who and where it is.
_VARIABLES = ("JAX_", "XLA_", "LIBTPU_INIT_ARGS")
_OWN_VARIABLES = frozenset(
  (
    *("JAX_PROCESS_ID", "JAX_PROCESS_INDEX", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"),
    *("JAX_LOCAL_DEVICE_IDS", "JAX_PARTITION_INDEX", "JAX_SLICE_INDEX", "JAX_COMPILATION_CACHE_DIR"),
  )
)


class NotMet(InputError):
  """The processes have not met in time. JAX goes on waiting in a thread of this one, and complains when it ends."""


@dataclasses.dataclass(frozen=True)
class Address:
  """Where the processes meet, for those that JAX cannot find.

  Attributes:
    coordinator: HOST:PORT of process 0.
    count: Processes.
    number: Of this one, 0 to count - 1.
  """

  coordinator: str
  count: int
  number: int


def parse_address(text: str) -> Address | None:
  """Returns what --multihost says; None for "auto".

  Raises:
    InputError: if it is neither "auto" nor HOST:PORT,COUNT,ID.
  """
  if text == AUTO:
    return None
  parts = text.split(",")
  host, _, port = parts[0].rpartition(":")
  if len(parts) != 3 or not host or not all(part.isascii() and part.isdigit() for part in (port, *parts[1:])):
    raise InputError(f"--multihost is {text!r}, expected auto or ADDRESS:PORT,COUNT,ID such as 10.0.0.2:8476,4,0")
  count, number = int(parts[1]), int(parts[2])
  if not 0 < int(port) < 2**16:
    raise InputError(f"--multihost is {text!r}: port {port}, expected 1 to {2**16 - 1}")
  if not count:
    raise InputError(f"--multihost is {text!r}: 0 processes, expected 1 or more")
  if number >= count:
    raise InputError(f"--multihost is {text!r}: process {number} of {count}, expected 0 to {count - 1}")
  return Address(parts[0], count, number)


@dataclasses.dataclass(frozen=True)
class Processes:
  """The processes of a run.

  Attributes:
    number: Of this process.
    count: Of all.
  """

  number: int = 0
  count: int = 1

  @property
  def first(self) -> bool:
    """Whether this process writes the results."""
    return self.number == 0

  def gather(self, value: bytes) -> list[bytes]:
    """Returns what each process gave, in the order of their numbers. All must call."""
    if self.count == 1:
      return [value]
    from jax.experimental.multihost_utils import process_allgather

    sizes = np.asarray(process_allgather(np.array([len(value)], np.int32))).reshape(-1)
    if not (longest := int(sizes.max())):
      return [b""] * self.count
    padded = np.zeros(longest, np.uint8)
    padded[: len(value)] = np.frombuffer(value, np.uint8)
    found = np.asarray(process_allgather(padded)).reshape(self.count, longest)
    return [row[:size].tobytes() for row, size in zip(found, sizes, strict=True)]

  def together(self, work: Callable[[], _Result]) -> _Result:
    """Returns what `work` returns here, once every process is done with it. It must not communicate.

    Raises:
      InputError: in every process, if `work` failed in one: with its number, and what it said.
    """
    if self.count == 1:
      return work()
    result: Any = None
    failure: Exception | None = None
    try:
      result = work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait for this process
      failure = error
    said = "" if failure is None else " ".join(str(failure).split()) or type(failure).__name__
    if failure is not None and not isinstance(failure, InputError):
      said = f"{type(failure).__name__}: {said}"
    answers = [answer.decode() for answer in self.gather(said.encode())]
    if failure is not None and not isinstance(failure, InputError | OSError):
      raise failure  # a fault of ours: its trace is worth more than a line
    if any(answers):
      raise InputError(_by_process(answers)) from failure
    return result

  def agree(self, shown: Mapping[str, str]) -> None:
    """Compares what the processes were started with.

    Args:
      shown: What this one was, as `what_decides` gives it.

    Raises:
      InputError: in every process, naming what differs, with each process's value.
    """
    if self.count == 1:
      return
    mine = json.dumps({"host": socket.gethostname(), "shown": dict(shown)})
    answers = [json.loads(answer) for answer in self.gather(mine.encode())]
    hosts = [answer["host"] for answer in answers]
    faults = differences([answer["shown"] for answer in answers], hosts)
    if faults:
      more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
      raise InputError(f"the processes differ: {'; '.join(faults[:_SHOWN])}{more}: start all with the same")


ALONE = Processes()


def start(address: Address | None, timeout_seconds: float) -> Processes:
  """Joins the processes of the run. Before anything that asks JAX for a device.

  Args:
    address: Where they meet; None: JAX finds the cluster (Cloud TPU, GKE, Slurm).
    timeout_seconds: For all to come.

  Raises:
    NotMet: if they do not in that time.
    InputError: if there is no cluster to be found, or JAX refuses.
  """
  # JAX would take SIGTERM for a notice of preemption, and the process would stay.
  jax.config.update("jax_enable_preemption_service", False)
  where: dict[str, Any] = {}
  if address is not None:
    where = {
      "coordinator_address": address.coordinator,
      "num_processes": address.count,
      "process_id": address.number,
      "cluster_detection_method": "deactivate",
    }
  failures: list[BaseException] = []
  done = threading.Event()

  def join() -> None:
    try:
      jax.distributed.initialize(
        **where,
        # Longer than ours: at the end of its own, JAX aborts the process with a stack trace.
        initialization_timeout=int(timeout_seconds) + 600,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
      )
    except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
      failures.append(error)
    done.set()

  threading.Thread(target=join, daemon=True).start()
  name = AUTO if address is None else f"{address.coordinator},{address.count},{address.number}"
  if not done.wait(timeout_seconds):
    raise NotMet(
      f"--multihost {name}: not all processes came, or the coordinator cannot be reached within {timeout_seconds:g} s: "
      "start one process for each ID, all with the address of process 0; --multihost-timeout sets the time"
    )
  if failures:
    reason = " ".join(str(failures[0]).split())[:300]
    advice = "give ADDRESS:PORT,COUNT,ID where JAX finds no cluster" if address is None else "check address and numbers"
    raise InputError(f"--multihost {name}: {reason}: {advice}") from failures[0]
  return Processes(jax.process_index(), jax.process_count())


def what_decides(
  config: Any, flags: Mapping[str, Any], rows: Sequence[Sequence[int]], checkpoint: str
) -> dict[str, str]:
  """Returns all that must be the same in every process, by name.

  Left out are the number of a process and where things lie on its host: paths, of which the content counts.

  Args:
    config: MaxText's HyperParameters.
    flags: Of the command line, by name, less those of the processes.
    rows: Token ids.
    checkpoint: The `items` directory.
  """
  shown = {f"flag --{name.replace('_', '-')}": _plain(value) for name, value in flags.items()}
  settings = getattr(config, "_pydantic_config", config)
  for key in type(settings).model_fields:
    if not key.endswith(_PLACES) and key not in _NAMES_OF_PLACES:
      shown[key] = _plain(getattr(settings, key))
  for i, row in enumerate(rows):
    shown[f"row {i}"] = f"{len(row)} ids {_digest(json.dumps(list(row)).encode())}"
  for package in _PACKAGES:
    shown[f"version of {package}"] = _version(package)
  for name, value in os.environ.items():
    if name.startswith(_VARIABLES) and name not in _OWN_VARIABLES:
      shown[f"environment variable {name}"] = value
  return shown | checkpoint_files(checkpoint)


def differences(shown: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[str]:
  """Returns one text for each name whose values are not the same: every value and the processes that have it."""
  found = []
  for name in sorted({name for one in shown for name in one}):
    holders: dict[str, list[int]] = {}
    for process, one in enumerate(shown):
      holders.setdefault(one.get(name, "not given"), []).append(process)
    if len(holders) > 1:
      values = (f"{_short(value)} on {_names(numbers, hosts)}" for value, numbers in holders.items())
      found.append(f"{name} is {', '.join(values)}")
  return found


def _names(numbers: Sequence[int], hosts: Sequence[str]) -> str:
  which = ", ".join(dict.fromkeys(hosts[number] for number in numbers))
  return f"process {', '.join(map(str, numbers))} ({which})"


def _by_process(answers: Sequence[str]) -> str:
  said: dict[str, list[int]] = {}
  for number, answer in enumerate(answers):
    if answer:
      said.setdefault(answer, []).append(number)
  return "; ".join(
    f"process {', '.join(map(str, numbers))} of {len(answers)}: {text}" for text, numbers in said.items()
  )


def checkpoint_files(path: str) -> dict[str, str]:
  """Digests of the small files that stand for a checkpoint's content: its record, its tree, the root of its store."""
  from etils import epath

  items = epath.Path(path)
  files = {RECORD: items.parent.parent / RECORD} | {name: items / name for name in ("_METADATA", "manifest.ocdbt")}
  return {
    f"{name} of the checkpoint": _digest(file.read_bytes()) if file.exists() else "absent"
    for name, file in files.items()
  }


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "not installed"


def _plain(value: Any) -> str:
  return json.dumps(getattr(value, "value", value), default=str, sort_keys=True)


def _digest(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()[:16]


def _short(value: str) -> str:
  return value if len(value) <= _VALUE_LENGTH else f"{value[:_VALUE_LENGTH]}..."
