"""Rules about the commands that make node pools."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bundle import Bundle, Workload, of_bundles


def _pool_scripts(bundle: Bundle) -> Iterator[tuple[str, str, Workload]]:
  """Scripts that make a pool, without comments and line breaks, and the job on TPUs that they are for."""
  for file, text in bundle.scripts.items():
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#")]
    if any("node-pools create" in line for line in lines):
      for one in bundle.workloads:
        if one.topology is not None:
          yield file, "\n".join(lines), one


@of_bundles("pool-of-one-host")
def _pool_of_one_host(bundle: Bundle) -> Iterator[tuple[str, str, str]]:
  for file, text, one in _pool_scripts(bundle):
    if not one.multi_host:
      for flag in ("--tpu-topology", "--placement-policy", "resource-policies create"):
        if flag in text:
          yield file, "node pool", f"{flag} for a slice of one host, expected none: gcloud refuses the pool: remove it"


@of_bundles("workload-policy")
def _workload_policy(bundle: Bundle) -> Iterator[tuple[str, str, str]]:
  for file, text, one in _pool_scripts(bundle):
    if not one.multi_host or one.topology is None:
      continue
    if "resource-policies create group-placement" in text or "--placement-type" in text:
      yield (
        file,
        "node pool",
        "a compact placement policy, with which the pool ends in ERROR, expected a workload policy: create that",
      )
    elif "resource-policies create workload-policy" not in text or "--type=HIGH_THROUGHPUT" not in text:
      yield (
        file,
        "node pool",
        "no workload policy of type HIGH_THROUGHPUT, expected one for several hosts: create it first",
      )
    flag = f"--accelerator-topology={one.topology.name}"
    if not re.search(rf"{re.escape(flag)}(\s|$)", text):
      yield file, "node pool", f"{flag} is missing, which is what the pods select: set it"
    if "--tpu-topology" in text:
      yield (
        file,
        "node pool",
        "--tpu-topology, expected none, for the workload policy of a tpu7x replaces it: remove it",
      )
    if "--placement-policy=" not in text:
      yield file, "node pool", "--placement-policy is missing, expected the workload policy: give it"


@of_bundles("pool-size")
def _pool_size(bundle: Bundle) -> Iterator[tuple[str, str, str]]:
  for file, text, one in _pool_scripts(bundle):
    assert one.topology is not None
    creates = [line for line in text.splitlines() if "node-pools create" in line]
    slices = one.replicated.get("replicas", 1)
    if len(creates) != slices:
      yield file, "node pool", f"{len(creates)} pools, expected {slices}, one a slice: make as many"
    for line in creates:
      flag = "--max-nodes" if "--flex-start" in line else "--num-nodes"
      found = re.search(rf"{flag}=(\d+)", line)
      if found is None or int(found[1]) != one.topology.hosts:
        yield (
          file,
          "node pool",
          f"{flag} {found and found[1]}, expected {one.topology.hosts}, the VMs of {one.topology.name}: set it",
        )
      if f"--machine-type={one.topology.machine_type}" not in line:
        yield file, "node pool", f"machine type, expected {one.topology.machine_type} for {one.topology.name}: set it"


@of_bundles("pool-identity")
def _pool_identity(bundle: Bundle) -> Iterator[tuple[str, str, str]]:
  for file, text in bundle.scripts.items():
    if "node-pools create" in text and "--workload-metadata=GKE_METADATA" not in text:
      yield (
        file,
        "node pool",
        "--workload-metadata=GKE_METADATA is missing: pods would act as their node and be refused the bucket: add it",
      )
