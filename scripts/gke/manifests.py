"""The Kubernetes objects of a job, as plain dicts. What each field is for stands in docs/gke.md.

Of two retry policies, `retries` gives the one that fits (docs/decisions/0023-gke-retries.md): pods that can start again
alone, and processes that must all start again together.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from topologies import ACCELERATOR, Topology

from kimi_k3.errors import InputError

Object = dict[str, Any]

NAMESPACE = "default"
REPLICATED_JOB = "slice"
CONTAINER = "main"
BUCKET_DIR, CONFIG_DIR, SCRATCH_DIR = "/bucket", "/config", "/scratch"
CONFIG_FILE = "run.yml"
JOB_SCRIPT = "/app/scripts/gke/job.py"
# Of the exit codes that are retried: run again (job.py's 75), and death by a signal. 128 + n fits in a byte.
SIGNALS = range(1, 32)
RETRIED_CODES = (75, *(128 + number for number in SIGNALS))
MAX_RESTARTS = 6
PARTS = 8  # of a conversion
GRACE_SECONDS = 90  # job.py kills its command after 45, and then still copies results
_NODEPOOL_LABEL = "cloud.google.com/gke-nodepool"


@dataclasses.dataclass(frozen=True)
class Job:
  """What is asked for; `${NAME}` stands for what is given when it is applied.

  Attributes:
    topology: None on CPU nodes.
    kind: batch, benchmark or convert.
    command: Of the container, after job.py's own `--`.
    keep: File patterns that job.py stores.
    out: Folder of results in the bucket.
    queue: Kueue's LocalQueue; None for exclusive placement.
    configs: Files of the config map.
    local_checkpoint: Folder in the bucket that is copied to the node's SSD first; None to read it from the bucket.
  """

  name: str
  topology: Topology | None
  slices: int
  kind: str
  bucket: str
  image: str
  command: tuple[str, ...]
  out: str
  keep: tuple[str, ...] = ()
  queue: str | None = None
  configs: tuple[tuple[str, str], ...] = ()
  local_checkpoint: str | None = None

  @property
  def multi_host(self) -> bool:
    return self.topology is not None and self.topology.multi_host

  @property
  def hosts(self) -> int:
    return self.slices * (self.topology.hosts if self.topology else 1)

  @property
  def host_network(self) -> bool:
    """Slices talk over the data center's network: both interfaces of a node are only in the host's own network."""
    return self.slices > 1


def storage(job: Job) -> list[Object]:
  """The service account, and the bucket as a volume."""
  claim = f"{job.name}-bucket"
  attributes = {"skipCSIBucketAccessCheck": "false"}
  if job.host_network:  # a pod in the host's network is its node to the metadata server, unless asked otherwise
    attributes["hostNetworkPodKSA"] = "true"
  volume = {
    "apiVersion": "v1",
    "kind": "PersistentVolume",
    "metadata": {"name": claim, "labels": _labels(job)},
    "spec": {
      "accessModes": ["ReadWriteMany"],
      "capacity": {"storage": "8Ti"},  # asked for by the API, not looked at by gcsfuse
      "claimRef": {"namespace": NAMESPACE, "name": claim},
      "csi": {
        "driver": "gcsfuse.csi.storage.gke.io",
        "volumeHandle": job.bucket,
        "volumeAttributes": attributes,
      },
      # A checkpoint is read once: a file cache would write it to the node's disk beside reading it.
      "mountOptions": ["implicit-dirs", "file-cache:max-size-mb:0", "metadata-cache:negative-ttl-secs:0"],
      "persistentVolumeReclaimPolicy": "Retain",
      "storageClassName": "",
    },
  }
  bound = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": claim, "namespace": NAMESPACE, "labels": _labels(job)},
    "spec": {
      "accessModes": ["ReadWriteMany"],
      "resources": {"requests": {"storage": "8Ti"}},
      "storageClassName": "",
      "volumeName": claim,
    },
  }
  account = {
    "apiVersion": "v1",
    "kind": "ServiceAccount",
    "metadata": {"name": service_account(job), "namespace": NAMESPACE, "labels": _labels(job)},
  }
  return [account, volume, bound]


def config_map(job: Job) -> Object:
  """The YAML files of the run."""
  return {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": f"{job.name}-config", "namespace": NAMESPACE, "labels": _labels(job)},
    "immutable": True,
    "data": dict(job.configs),
  }


def service_account(job: Job) -> str:
  return job.name


def tpu_job(job: Job) -> Object:
  """A JobSet of one Job a slice; on one host a Job."""
  topology = job.topology
  assert topology is not None
  labels = _labels(job)
  queued = labels if job.queue is None else labels | {"kueue.x-k8s.io/queue-name": job.queue}
  spec = {
    "completionMode": "Indexed",
    "completions": topology.hosts,
    "parallelism": topology.hosts,
    **retries(alone=not job.multi_host),
    "template": {"metadata": {"labels": labels, "annotations": _pod_annotations(job)}, "spec": _tpu_pod(job)},
  }
  if not job.multi_host:
    return {
      "apiVersion": "batch/v1",
      "kind": "Job",
      "metadata": {"name": job.name, "namespace": NAMESPACE, "labels": queued},
      "spec": spec | {"ttlSecondsAfterFinished": 43200},
    }
  metadata: Object = {"name": job.name, "namespace": NAMESPACE, "labels": queued}
  if job.queue is None:
    metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": _NODEPOOL_LABEL}
  return {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": metadata,
    "spec": {
      # The headless service is made by JobSet, under this name: hosts find one another before any of them is ready.
      "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": job.name},
      "failurePolicy": {
        "maxRestarts": MAX_RESTARTS,
        "restartStrategy": "BlockingRecreate",
        "rules": [
          {"name": "failed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
          {"name": "lostProcess", "action": "RestartJobSet", "onJobFailureReasons": ["BackoffLimitExceeded"]},
        ],
      },
      "ttlSecondsAfterFinished": 43200,
      "replicatedJobs": [
        {"name": REPLICATED_JOB, "replicas": job.slices, "template": {"metadata": {"labels": labels}, "spec": spec}}
      ],
    },
  }


def retries(*, alone: bool) -> Object:
  """The Job's part of the retry policy.

  Args:
    alone: Whether a pod can start again alone, by the Job. If not, the first loss ends the Job, and JobSet starts all.
  """
  return {
    "backoffLimit": MAX_RESTARTS if alone else 0,
    "podFailurePolicy": {"rules": [_disruption_ignored(), _failed("FailJob")]},
  }


def _disruption_ignored() -> Object:
  # JobSet's schema fills in no status, so that one without it is refused there.
  return {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _failed(action: str) -> Object:
  codes = {"containerName": CONTAINER, "operator": "NotIn", "values": list(RETRIED_CODES)}
  return {"action": action, "onExitCodes": codes}


def _labels(job: Job) -> dict[str, str]:
  return {"app.kubernetes.io/name": "kimi-k3", "app.kubernetes.io/instance": job.name}


def _pod_annotations(job: Job) -> dict[str, str]:
  # The sidecar has the node to itself and the container: 0 is no limit.
  limits = {f"gke-gcsfuse/{name}-limit": "0" for name in ("cpu", "memory", "ephemeral-storage")}
  annotations = {"gke-gcsfuse/volumes": "true"} | limits
  if job.queue is not None and job.multi_host:
    assert job.topology is not None
    if job.slices == 1:
      annotations["kueue.x-k8s.io/podset-required-topology"] = _NODEPOOL_LABEL
    else:
      annotations["kueue.x-k8s.io/podset-slice-required-topology"] = _NODEPOOL_LABEL
      annotations["kueue.x-k8s.io/podset-slice-size"] = str(job.topology.hosts)
  return annotations


def _environment(job: Job) -> list[Object]:
  def label(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

  assert job.topology is not None
  plain = {
    "JAX_PLATFORMS": "tpu,cpu",
    "JAX_COMPILATION_CACHE_DIR": f"{BUCKET_DIR}/compile-cache",
    "KIMI_K3_HOSTS": str(job.hosts),
    "KIMI_K3_IMAGE": job.image,
    "KIMI_K3_TOPOLOGY": f"{ACCELERATOR}:{job.topology.name}",
    "PYTHONUNBUFFERED": "1",
  }
  of_the_pod = [label("KIMI_K3_NODE", "spec.nodeName")]
  if job.multi_host:
    of_the_pod += [
      label("KIMI_K3_ATTEMPT", "metadata.labels['batch.kubernetes.io/controller-uid']"),
      label("KIMI_K3_SLICE", "metadata.labels['jobset.sigs.k8s.io/job-index']"),
    ]
  return [{"name": name, "value": value} for name, value in plain.items()] + of_the_pod


def _tpu_pod(job: Job) -> Object:
  topology = job.topology
  assert topology is not None
  chips = {"google.com/tpu": topology.chips_a_host}
  resources: dict[str, Object] = {"requests": dict(chips), "limits": dict(chips)}
  if job.local_checkpoint is not None:
    resources["requests"]["ephemeral-storage"] = resources["limits"]["ephemeral-storage"] = "1700Gi"
  container: Object = {
    "name": CONTAINER,
    "image": job.image,
    "command": _command(job, settle=20),
    "env": _environment(job),
    "resources": resources,
    "securityContext": {"privileged": True},  # the TPU's devices and locked memory, as in Google's own recipes
    "volumeMounts": [
      {"name": "bucket", "mountPath": BUCKET_DIR},
      {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
      {"name": "scratch", "mountPath": SCRATCH_DIR},
      {"name": "shm", "mountPath": "/dev/shm"},
    ],
  }
  if job.multi_host:
    container["ports"] = [{"name": "coordinator", "containerPort": 8482}, {"name": "tpu", "containerPort": 8471}]
  pod: Object = {
    "restartPolicy": "Never",
    "serviceAccountName": service_account(job),
    "terminationGracePeriodSeconds": GRACE_SECONDS,
    "nodeSelector": {
      "cloud.google.com/gke-tpu-accelerator": ACCELERATOR,
      "cloud.google.com/gke-tpu-topology": topology.name,
    },
    "tolerations": [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}],
    "containers": [container],
    "volumes": [
      {"name": "bucket", "persistentVolumeClaim": {"claimName": f"{job.name}-bucket"}},
      {"name": "config", "configMap": {"name": f"{job.name}-config"}},
      {"name": "scratch", "emptyDir": {}},
      {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ],
  }
  if job.local_checkpoint is not None:
    pod["nodeSelector"]["cloud.google.com/gke-ephemeral-storage-local-ssd"] = "true"
    mounts = [mount for mount in container["volumeMounts"] if mount["name"] in ("bucket", "scratch")]
    pod["initContainers"] = [
      {
        "name": "copy",
        "image": job.image,
        "command": ["cp", "-R", f"{BUCKET_DIR}/{job.local_checkpoint}", f"{SCRATCH_DIR}/checkpoint"],
        "volumeMounts": mounts,
      }
    ]
  if job.host_network:
    pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
  return pod


def _command(job: Job, *, settle: int) -> list[str]:
  keep = [word for pattern in job.keep for word in ("--keep", pattern)]
  wrapper = ["python3", JOB_SCRIPT, "--out", f"{BUCKET_DIR}/{job.out}", "--work", f"{SCRATCH_DIR}/run", *keep]
  return [*wrapper, "--settle", str(settle), "--", *job.command]


def convert_jobs(job: Job, source: str, out: str) -> tuple[Object, Object]:
  """The parts of a conversion, one pod each, and the Job that commits and verifies.

  A part goes on where it was stopped, so it is tried six times whatever happened, but for what was refused (exit code
  2). The second Job is refused, by --finish itself, until every part has ended.

  Args:
    job: Without a topology.
    source: Folder of the released files in the bucket.
    out: URL of the checkpoint.
  """
  reads = f"{BUCKET_DIR}/{source}"
  part = f"exec kimi-k3 convert {reads} {out} --part $((JOB_COMPLETION_INDEX + 1))/{PARTS}"
  report = f"{SCRATCH_DIR}/run/verified.json"
  finish = f"kimi-k3 convert {reads} {out} --finish && exec kimi-k3 verify {reads} {out} --report {report}"
  refused = {"containerName": CONTAINER, "operator": "In", "values": [2]}
  parts = {
    "completionMode": "Indexed",
    "completions": PARTS,
    "parallelism": PARTS,
    "backoffLimitPerIndex": MAX_RESTARTS,
    "maxFailedIndexes": PARTS,  # one part that is refused does not stop the others
    "podFailurePolicy": {
      "rules": [_disruption_ignored(), {"action": "FailIndex", "onExitCodes": refused}],
    },
  }
  end = {"completions": 1, "parallelism": 1, "completionMode": "Indexed", **retries(alone=True)}
  return _cpu_job(job, "convert", parts, part), _cpu_job(job, "finish", end, finish)


def _cpu_job(job: Job, step: str, spec: Object, script: str) -> Object:
  wrapped = dataclasses.replace(job, command=("bash", "-c", script), out=f"{job.out}/{step}", keep=("verified.json",))
  size = {"cpu": "8", "memory": "8Gi"}
  return {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": f"{job.name}-{step}", "namespace": NAMESPACE, "labels": _labels(job)},
    "spec": spec
    | {
      "template": {
        "metadata": {"labels": _labels(job), "annotations": {"gke-gcsfuse/volumes": "true"}},
        "spec": {
          "restartPolicy": "Never",
          "serviceAccountName": service_account(job),
          "terminationGracePeriodSeconds": GRACE_SECONDS,
          "nodeSelector": {_NODEPOOL_LABEL: pool_name(job)},
          "containers": [
            {
              "name": CONTAINER,
              "image": job.image,
              "command": _command(wrapped, settle=0),
              "env": [{"name": "KIMI_K3_IMAGE", "value": job.image}, {"name": "PYTHONUNBUFFERED", "value": "1"}],
              "resources": {"requests": dict(size), "limits": {"memory": size["memory"]}},
              "volumeMounts": [
                {"name": "bucket", "mountPath": BUCKET_DIR},
                {"name": "scratch", "mountPath": SCRATCH_DIR},
              ],
            }
          ],
          "volumes": [
            {"name": "bucket", "persistentVolumeClaim": {"claimName": f"{job.name}-bucket"}},
            {"name": "scratch", "emptyDir": {}},
          ],
        },
      }
    },
  }


def kueue(job: Job) -> list[Object]:
  """A queue for slices of one topology, whose jobs each get one node pool a slice."""
  topology = job.topology
  if topology is None or job.queue is None:
    raise InputError("Kueue's objects are for jobs on TPUs with --scheduling kueue=QUEUE")
  flavor = f"{ACCELERATOR}-{topology.name}"
  version = "kueue.x-k8s.io/v1beta1"
  resources: Object = {"google.com/tpu": job.slices * topology.chips}
  if job.local_checkpoint is not None:  # a resource that the queue does not cover is never admitted
    resources["ephemeral-storage"] = f"{1700 * job.hosts}Gi"
  return [
    {
      "apiVersion": version,
      "kind": "Topology",
      "metadata": {"name": "gke-nodepool"},
      "spec": {"levels": [{"nodeLabel": _NODEPOOL_LABEL}, {"nodeLabel": "kubernetes.io/hostname"}]},
    },
    {
      "apiVersion": version,
      "kind": "ResourceFlavor",
      "metadata": {"name": flavor},
      "spec": {
        "nodeLabels": {
          "cloud.google.com/gke-tpu-accelerator": ACCELERATOR,
          "cloud.google.com/gke-tpu-topology": topology.name,
        },
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}],
        "topologyName": "gke-nodepool",
      },
    },
    {
      "apiVersion": version,
      "kind": "ClusterQueue",
      "metadata": {"name": f"{flavor}-queue"},
      "spec": {
        "namespaceSelector": {},
        "resourceGroups": [
          {
            "coveredResources": list(resources),
            "flavors": [
              {
                "name": flavor,
                "resources": [{"name": name, "nominalQuota": quota} for name, quota in resources.items()],
              }
            ],
          }
        ],
      },
    },
    {
      "apiVersion": version,
      "kind": "LocalQueue",
      "metadata": {"name": job.queue, "namespace": NAMESPACE},
      "spec": {"clusterQueue": f"{flavor}-queue"},
    },
  ]


def pool_name(job: Job) -> str:
  return f"{job.name}-pool"
