"""Rules about containers, what they are given, and the bucket."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bundle import Bundle, Workload, is_gcsfuse, of_bundles, of_workloads, words

_SAME_ON_ALL_HOSTS = re.compile(r"^(JAX_|XLA_|LIBTPU_)")


@of_workloads("image-pinned")
def _image_pinned(one: Workload, _: Bundle) -> Iterator[str]:
  for container in one.all_containers:
    image = str(container.get("image", ""))
    last = image.rpartition("/")[2]
    if image == "${IMAGE}" or re.fullmatch(r".+@sha256:[0-9a-f]{64}", image):
      continue
    tag = last.partition(":")[2]
    if not tag or tag == "latest":
      found = "no tag" if not tag else "tag latest"
      yield f"image {image or 'not given'} has {found}, expected one that always means the same: give a tag or digest"


@of_workloads("one-image")
def _one_image(one: Workload, bundle: Bundle) -> Iterator[str]:
  images = {c.get("image") for other in bundle.workloads if other.name == one.name for c in other.all_containers}
  if len(images) > 1:
    yield f"images {', '.join(sorted(map(str, images)))}, expected one: hosts with two versions do not agree: use one"


@of_workloads("same-environment")
def _same_environment(one: Workload, bundle: Bundle) -> Iterator[str]:
  for container in one.containers:
    for entry in container.get("env") or []:
      varies = "valueFrom" in entry or "$(" in str(entry.get("value", ""))
      if _SAME_ON_ALL_HOSTS.match(entry.get("name", "")) and varies:
        yield f"{entry['name']} comes from the pod, expected one value on all hosts, or programs differ: write it out"
  mine = _environment(one)
  for other in bundle.workloads:
    if other.name == one.name and (theirs := _environment(other)) != mine:
      names_ = sorted({key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)})
      yield f"{', '.join(names_)} differs between replicated jobs, expected the same on all hosts: make them equal"


def _environment(one: Workload) -> dict[str, str]:
  return {entry.get("name", ""): str(entry) for container in one.containers for entry in container.get("env") or []}


@of_workloads("compile-cache")
def _compile_cache(one: Workload, _: Bundle) -> Iterator[str]:
  if not one.on_tpu:
    return
  kept = {v.get("name") for v in one.pod.get("volumes") or [] if "persistentVolumeClaim" in v or "csi" in v}
  for container in one.containers:
    found = [e.get("value", "") for e in container.get("env") or [] if e.get("name") == "JAX_COMPILATION_CACHE_DIR"]
    mounts = [m.get("mountPath", "") for m in container.get("volumeMounts") or [] if m.get("name") in kept]
    if not found:
      yield "JAX_COMPILATION_CACHE_DIR not set, expected a folder on shared storage: restarts compile anew"
    elif not any(found[0].startswith(mount + "/") for mount in mounts):
      below = ", ".join(mounts) or "a mounted bucket"
      yield f"JAX_COMPILATION_CACHE_DIR is {found[0]}, which ends with the pod, expected one below {below}: move it"


@of_workloads("shared-memory")
def _shared_memory(one: Workload, _: Bundle) -> Iterator[str]:
  if not one.on_tpu:
    return
  in_memory = {
    v.get("name") for v in one.pod.get("volumes") or [] if (v.get("emptyDir") or {}).get("medium") == "Memory"
  }
  for container in one.containers:
    mounts = {m.get("mountPath"): m.get("name") for m in container.get("volumeMounts") or []}
    if mounts.get("/dev/shm") not in in_memory:
      yield "/dev/shm is not an emptyDir with medium Memory, expected one: the default of 64 MiB is too small: mount it"


@of_workloads("wrapped")
def _wrapped(one: Workload, _: Bundle) -> Iterator[str]:
  for container in one.containers:
    if not any(word.endswith("/job.py") for word in words(container)):
      yield f"container {container.get('name')} runs without job.py, which stores its results: wrap the command in it"


@of_bundles("file-cache")
def _file_cache(bundle: Bundle) -> Iterator[tuple[str, str, str]]:
  for file, name, volume in bundle.of_kind("PersistentVolume"):
    if not is_gcsfuse(volume):
      continue
    spec = volume["spec"]
    options = spec.get("mountOptions") or []
    capacity = (spec["csi"].get("volumeAttributes") or {}).get("fileCacheCapacity", "0")
    if "file-cache:max-size-mb:0" not in options or str(capacity) != "0":
      yield (
        file,
        f"PersistentVolume {name}",
        "the file cache is not off: what is read once would be written to disk too: set file-cache:max-size-mb:0",
      )


@of_bundles("implicit-dirs")
def _implicit_dirs(bundle: Bundle) -> Iterator[tuple[str, str, str]]:
  for file, name, volume in bundle.of_kind("PersistentVolume"):
    if is_gcsfuse(volume) and "implicit-dirs" not in (volume["spec"].get("mountOptions") or []):
      yield (
        file,
        f"PersistentVolume {name}",
        "mountOptions without implicit-dirs: folders that gcloud or TensorStore wrote are not seen: add it",
      )


@of_workloads("gcsfuse-sidecar")
def _gcsfuse_sidecar(one: Workload, bundle: Bundle) -> Iterator[str]:
  buckets = {name for _, name, volume in bundle.of_kind("PersistentVolume") if is_gcsfuse(volume)}
  claims = {
    name: (claim.get("spec") or {}).get("volumeName") for _, name, claim in bundle.of_kind("PersistentVolumeClaim")
  }
  uses = any(
    claims.get((v.get("persistentVolumeClaim") or {}).get("claimName", "")) in buckets or is_gcsfuse(v)
    for v in one.pod.get("volumes") or []
  )
  annotations = (one.template.get("metadata") or {}).get("annotations") or {}
  if uses and annotations.get("gke-gcsfuse/volumes") != "true":
    yield 'pod annotation gke-gcsfuse/volumes is not "true": the sidecar is missing and the mount hangs: set it'


@of_workloads("references")
def _references(one: Workload, bundle: Bundle) -> Iterator[str]:
  made = {
    kind: {name for _, name, _ in bundle.of_kind(kind)}
    for kind in ("ConfigMap", "PersistentVolumeClaim", "ServiceAccount")
  }
  wanted = [("ServiceAccount", one.pod.get("serviceAccountName"))]
  for volume in one.pod.get("volumes") or []:
    wanted.append(("ConfigMap", (volume.get("configMap") or {}).get("name")))
    wanted.append(("PersistentVolumeClaim", (volume.get("persistentVolumeClaim") or {}).get("claimName")))
  for kind, name in wanted:
    if name is not None and name not in made[kind]:
      yield f"{kind} {name} is not among the files, found {', '.join(sorted(made[kind])) or 'none'}: name one of them"
  if one.pod.get("serviceAccountName") is None:
    yield "serviceAccountName not given, expected the account that may use the bucket: set it"


@of_bundles("claim-and-volume")
def _claim_and_volume(bundle: Bundle) -> Iterator[tuple[str, str, str]]:
  volumes = {name: one for _, name, one in bundle.of_kind("PersistentVolume")}
  for file, name, claim in bundle.of_kind("PersistentVolumeClaim"):
    volume = volumes.get((claim.get("spec") or {}).get("volumeName", ""))
    bound = ((volume or {}).get("spec") or {}).get("claimRef", {}).get("name")
    if volume is None or bound != name:
      yield (
        file,
        f"PersistentVolumeClaim {name}",
        f"its volume is bound to {bound}, expected each to name the other: the claim would stay pending",
      )
