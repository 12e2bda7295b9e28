"""Rules about where pods run, and how they find one another."""

from __future__ import annotations

from collections.abc import Iterator

import topologies
from bundle import NODE, TPU, Bundle, Workload, is_gcsfuse, of_bundles, of_workloads, resources, words
from topologies import ACCELERATOR

_EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
_QUEUE = "kueue.x-k8s.io/queue-name"
_REQUIRED = "kueue.x-k8s.io/podset-required-topology"
_SLICE_REQUIRED = "kueue.x-k8s.io/podset-slice-required-topology"
_SLICE_SIZE = "kueue.x-k8s.io/podset-slice-size"


@of_workloads("exclusive-or-kueue")
def _exclusive_or_kueue(one: Workload, _: Bundle) -> Iterator[str]:
  if one.kind != "JobSet" or not one.multi_host:
    return
  exclusive = _EXCLUSIVE in (one.metadata.get("annotations") or {})
  queued = _QUEUE in (one.metadata.get("labels") or {})
  if exclusive == queued:
    yield (
      f"{'both' if exclusive else 'neither'} of annotation {_EXCLUSIVE} and label {_QUEUE}, expected one of them: "
      f"{'take one out' if exclusive else 'pods of two jobs could share a slice'}"
    )


@of_workloads("exclusive-topology")
def _exclusive_topology(one: Workload, _: Bundle) -> Iterator[str]:
  found = (one.metadata.get("annotations") or {}).get(_EXCLUSIVE)
  if found is not None and found != f"{NODE}gke-nodepool":
    yield f"exclusive placement by {found}, expected {NODE}gke-nodepool, which is what a slice is: set it"


@of_workloads("kueue-one-pool")
def _kueue_one_pool(one: Workload, _: Bundle) -> Iterator[str]:
  if not one.multi_host or _QUEUE not in (one.metadata.get("labels") or {}):
    return
  annotations = (one.template.get("metadata") or {}).get("annotations") or {}
  key = _REQUIRED if one.replicated.get("replicas", 1) == 1 else _SLICE_REQUIRED
  if annotations.get(key) != f"{NODE}gke-nodepool":
    yield f"annotation {key} is {annotations.get(key)}, expected {NODE}gke-nodepool: a Job could lie in two slices"
  hosts = str(one.job.get("completions"))
  if key == _SLICE_REQUIRED and annotations.get(_SLICE_SIZE) != hosts:
    yield f"{_SLICE_SIZE} is {annotations.get(_SLICE_SIZE)}, expected {hosts!r}, the hosts of a slice: set it"


@of_bundles("kueue-covers")
def _kueue_covers(bundle: Bundle) -> Iterator[tuple[str, str, str]]:
  asked = set()
  for one in bundle.workloads:
    if _QUEUE in (one.metadata.get("labels") or {}):
      asked |= {name for c in one.all_containers for name in resources(c, "requests")}
  flavors = {name: one for _, name, one in bundle.of_kind("ResourceFlavor")}
  topologies_made = {name for _, name, _ in bundle.of_kind("Topology")}
  queues = {name for _, name, _ in bundle.of_kind("ClusterQueue")}
  for file, name, one in bundle.of_kind("ClusterQueue"):
    groups = (one.get("spec") or {}).get("resourceGroups") or []
    covered = {resource for group in groups for resource in group.get("coveredResources") or []}
    if missing := sorted(asked - covered):
      yield (
        file,
        f"ClusterQueue {name}",
        f"{', '.join(missing)} not in coveredResources, expected all that pods ask for: never admitted",
      )
    for flavor in [flavor for group in groups for flavor in group.get("flavors") or []]:
      if flavor.get("name") not in flavors:
        yield (
          file,
          f"ClusterQueue {name}",
          f"flavor {flavor.get('name')} is not there, expected one of {sorted(flavors)}: name it",
        )
  for name, one in flavors.items():
    topology = (one.get("spec") or {}).get("topologyName")
    if topology not in topologies_made:
      yield (
        "",
        f"ResourceFlavor {name}",
        f"topologyName {topology}, expected one of {sorted(topologies_made)}: pods would spread over pools",
      )
  for file, name, one in bundle.of_kind("LocalQueue"):
    if (queue := (one.get("spec") or {}).get("clusterQueue")) not in queues:
      yield file, f"LocalQueue {name}", f"clusterQueue {queue} is not there, expected one of {sorted(queues)}: name it"


@of_workloads("node-selector")
def _node_selector(one: Workload, _: Bundle) -> Iterator[str]:
  if not one.on_tpu:
    return
  selector = one.pod.get("nodeSelector") or {}
  accelerator, topology = selector.get(f"{NODE}gke-tpu-accelerator"), selector.get(f"{NODE}gke-tpu-topology")
  if accelerator != ACCELERATOR:
    yield f"accelerator {accelerator}, expected {ACCELERATOR}: set {NODE}gke-tpu-accelerator"
  if topology not in topologies.TOPOLOGIES:
    yield f"topology {topology}, expected one of {', '.join(topologies.TOPOLOGIES)} (chips): set {NODE}gke-tpu-topology"


@of_workloads("toleration")
def _toleration(one: Workload, _: Bundle) -> Iterator[str]:
  if one.on_tpu and not any(t.get("key") == TPU for t in one.pod.get("tolerations") or []):
    yield f"no toleration of {TPU}, expected one: nodes with TPUs are tainted, and the pod would stay pending"


@of_workloads("hosts")
def _hosts(one: Workload, _: Bundle) -> Iterator[str]:
  if one.topology is None:
    return
  found = {key: one.job.get(key) for key in ("parallelism", "completions")}
  for key, value in found.items():
    if value != one.topology.hosts:
      yield f"{key} {value}, expected {one.topology.hosts}, the hosts of {one.topology.name}: set it"


@of_workloads("indexed")
def _indexed(one: Workload, _: Bundle) -> Iterator[str]:
  if one.job.get("completionMode") != "Indexed":
    yield f"completionMode {one.job.get('completionMode')}, expected Indexed, which gives each host its number: set it"


@of_workloads("chips")
def _chips(one: Workload, _: Bundle) -> Iterator[str]:
  if one.topology is None:
    return
  expected = one.topology.chips_a_host
  asking = [c for c in one.containers if TPU in (resources(c, "limits") | resources(c, "requests"))]
  if len(asking) != 1:
    yield f"{len(asking)} containers ask for {TPU}, expected one: one process drives all chips of a host: merge them"
  for container in asking:
    requests, limits = (resources(container, kind).get(TPU) for kind in ("requests", "limits"))
    if requests != limits or limits != expected:
      yield f"{TPU} requests {requests}, limits {limits}, expected {expected} for both, all chips of the host: set them"


@of_workloads("jobset-for-many-hosts")
def _jobset_for_many(one: Workload, _: Bundle) -> Iterator[str]:
  if one.topology is None:
    return
  if one.multi_host and one.kind != "JobSet":
    yield f"a Job for {one.topology.hosts} hosts, expected a JobSet, which restarts all of them together: wrap it"
  if not one.multi_host and one.kind == "JobSet":
    yield "a JobSet for one host, expected a Job, whose retries suffice and need no JobSet: unwrap it"


@of_workloads("fields-of-many-hosts")
def _fields_of_many(one: Workload, _: Bundle) -> Iterator[str]:
  if one.multi_host:
    return
  if one.pod.get("subdomain"):
    yield f"subdomain {one.pod['subdomain']} on one host, expected none: remove it"
  if _EXCLUSIVE in (one.metadata.get("annotations") or {}):
    yield f"annotation {_EXCLUSIVE} on one host, expected none: remove it"
  if any("--multihost" in words(container) for container in one.containers):
    yield "--multihost on one host, expected none: remove it"


@of_workloads("multihost-flag")
def _multihost_flag(one: Workload, _: Bundle) -> Iterator[str]:
  if one.multi_host and not any("--multihost" in words(container) for container in one.containers):
    yield "no --multihost in the command, expected it on several hosts: each would run alone: add --multihost auto"


@of_workloads("not-ready-addresses")
def _not_ready(one: Workload, bundle: Bundle) -> Iterator[str]:
  if not one.multi_host:
    return
  network = one.jobset.get("network") or {}
  if one.kind == "JobSet" and network.get("publishNotReadyAddresses") is not True:
    yield "network.publishNotReadyAddresses is not true: hosts would wait for one another for ever: set it"
  if one.kind == "JobSet" and network.get("enableDNSHostnames") is not True:
    yield "network.enableDNSHostnames is not true, expected true: hosts have no names: set it"
  for _, name, service in bundle.of_kind("Service"):
    spec = service.get("spec") or {}
    if name == _subdomain(one) and spec.get("publishNotReadyAddresses") is not True:
      yield f"publishNotReadyAddresses of Service {name} is not true: hosts would wait for one another for ever: set it"
    if name == _subdomain(one) and spec.get("clusterIP") != "None":
      yield f"Service {name} has clusterIP {spec.get('clusterIP')}, expected None (headless): set it"


def _subdomain(one: Workload) -> str | None:
  return one.pod.get("subdomain") or (one.jobset.get("network") or {}).get("subdomain")


@of_workloads("subdomain")
def _subdomain_matches(one: Workload, bundle: Bundle) -> Iterator[str]:
  if not one.multi_host:
    return
  network = (one.jobset.get("network") or {}).get("subdomain")
  pod = one.pod.get("subdomain")
  if network is None and one.kind == "JobSet":
    yield "network.subdomain not given, expected the name of the headless service: set it"
  if pod is not None and network is not None and pod != network:
    yield f"the pods' subdomain is {pod}, the JobSet's {network}, expected one name: remove the pods'"
  services = [name for _, name, _ in bundle.of_kind("Service")]
  if services and _subdomain(one) not in services:
    yield f"subdomain {_subdomain(one)}, Service {', '.join(services)}: names would not resolve: use one name for both"


@of_workloads("host-network-dns")
def _host_network_dns(one: Workload, _: Bundle) -> Iterator[str]:
  if one.pod.get("hostNetwork") and one.pod.get("dnsPolicy") != "ClusterFirstWithHostNet":
    found = one.pod.get("dnsPolicy", "ClusterFirst")
    yield f"hostNetwork with dnsPolicy {found}, expected ClusterFirstWithHostNet: names would not resolve: set it"


@of_workloads("host-network-identity")
def _host_network_identity(one: Workload, bundle: Bundle) -> Iterator[str]:
  if not one.pod.get("hostNetwork"):
    return
  for _, name, volume in bundle.of_kind("PersistentVolume"):
    attributes = ((volume.get("spec") or {}).get("csi") or {}).get("volumeAttributes") or {}
    if is_gcsfuse(volume) and attributes.get("hostNetworkPodKSA") != "true":
      yield f'hostNetwork, and {name} has no hostNetworkPodKSA: "true": the bucket would be opened as the node: set it'
