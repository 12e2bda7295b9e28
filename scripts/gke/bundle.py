"""Manifests and scripts that are applied together, as the rules look at them, and the table of rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import topologies
from topologies import Topology

Object = dict[str, Any]

NODE = "cloud.google.com/"
TPU = "google.com/tpu"


@dataclasses.dataclass(frozen=True)
class Finding:
  """A broken rule.

  Attributes:
    file: In which.
    where: Kind and name of the object.
  """

  rule: str
  file: str
  where: str
  message: str

  def __str__(self) -> str:
    return f"{self.file}: {self.where}: {self.message} [{self.rule}]"


def resources(container: Object, kind: str) -> Object:
  """Returns the requests or limits of a container."""
  return (container.get("resources") or {}).get(kind) or {}


def words(container: Object) -> list[str]:
  """Returns the command line of a container."""
  return [*(container.get("command") or []), *(container.get("args") or [])]


def is_gcsfuse(volume: Object) -> bool:
  """Whether a volume, of a pod or persistent, is a bucket mounted by gcsfuse."""
  return ((volume.get("spec") or volume).get("csi") or {}).get("driver") == "gcsfuse.csi.storage.gke.io"


@dataclasses.dataclass(frozen=True)
class Workload:
  """A Job, alone or inside a JobSet.

  Attributes:
    file: Of the object.
    kind: Job or JobSet.
    name: Of the object.
    metadata: Of the object.
    jobset: Its spec; empty for a Job.
    replicated: The entry of replicatedJobs; empty for a Job.
    job: Spec of the Job.
  """

  file: str
  kind: str
  name: str
  metadata: Object
  jobset: Object
  replicated: Object
  job: Object

  @property
  def template(self) -> Object:
    return self.job.get("template") or {}

  @property
  def pod(self) -> Object:
    return self.template.get("spec") or {}

  @property
  def containers(self) -> list[Object]:
    return self.pod.get("containers") or []

  @property
  def all_containers(self) -> list[Object]:
    return [*(self.pod.get("initContainers") or []), *self.containers]

  @property
  def on_tpu(self) -> bool:
    selector = self.pod.get("nodeSelector") or {}
    asks = any(TPU in (resources(c, "limits") | resources(c, "requests")) for c in self.containers)
    return asks or any(key.startswith(f"{NODE}gke-tpu") for key in selector)

  @property
  def topology(self) -> Topology | None:
    """None on CPU nodes, and where the name is unknown, which is a finding of its own."""
    return topologies.TOPOLOGIES.get((self.pod.get("nodeSelector") or {}).get(f"{NODE}gke-tpu-topology", ""))

  @property
  def multi_host(self) -> bool:
    return self.topology is not None and self.topology.multi_host

  @property
  def pod_rules(self) -> list[Object]:
    return (self.job.get("podFailurePolicy") or {}).get("rules") or []

  def action(self, code: int, container: str) -> str | None:
    """Which action the pod failure policy takes for an exit code; None: the default, which counts."""
    for rule in self.pod_rules:
      codes = rule.get("onExitCodes")
      if codes is None or codes.get("containerName", container) != container:
        continue
      if (code in codes.get("values", ())) == (codes.get("operator") == "In"):
        return rule.get("action")
    return None


@dataclasses.dataclass(frozen=True)
class Bundle:
  """Files that are applied together.

  Attributes:
    objects: File and object.
    scripts: Text of shell scripts by file.
  """

  objects: list[tuple[str, Object]]
  scripts: dict[str, str]

  def of_kind(self, *kinds: str) -> Iterator[tuple[str, str, Object]]:
    """File, name and object."""
    for file, one in self.objects:
      if one.get("kind") in kinds:
        yield file, str((one.get("metadata") or {}).get("name", "")), one

  @property
  def workloads(self) -> list[Workload]:
    found = []
    for file, name, one in self.of_kind("Job", "JobSet"):
      spec, metadata = one.get("spec") or {}, one.get("metadata") or {}
      if one["kind"] == "Job":
        found.append(Workload(file, "Job", name, metadata, {}, {}, spec))
        continue
      for entry in spec.get("replicatedJobs") or []:
        job = (entry.get("template") or {}).get("spec") or {}
        found.append(Workload(file, "JobSet", name, metadata, spec, entry, job))
    return found


_Check = Callable[[Workload, Bundle], Iterator[str]]
_BundleCheck = Callable[[Bundle], Iterator[tuple[str, str, str]]]
WORKLOAD_RULES: dict[str, _Check] = {}
BUNDLE_RULES: dict[str, _BundleCheck] = {}


def of_workloads(name: str) -> Callable[[_Check], _Check]:
  """Enters a rule that looks at one Job, alone or in a JobSet; it yields messages."""

  def register(check: _Check) -> _Check:
    WORKLOAD_RULES[name] = check
    return check

  return register


def of_bundles(name: str) -> Callable[[_BundleCheck], _BundleCheck]:
  """Enters a rule that looks at everything; it yields file, object and message."""

  def register(check: _BundleCheck) -> _BundleCheck:
    BUNDLE_RULES[name] = check
    return check

  return register
