"""The shell scripts around the manifests: image, access, node pools, applying, clean-up.

What was not given to the renderer is a variable of the shell there, which must be set: each script says so and ends.
"""

from __future__ import annotations

import dataclasses
import shlex

import manifests
from manifests import NAMESPACE, Job, pool_name, service_account

from kimi_k3.errors import InputError

# What `${NAME}` in a rendered file stands for.
VARIABLES = {
  "PROJECT": "Google Cloud project",
  "ZONE": "zone of the TPUs, such as us-central1-c",
  "CLUSTER": "GKE cluster, in the region of ZONE",
  "BUCKET": "bucket without gs://",
  "IMAGE": "image with a tag, such as us-docker.pkg.dev/PROJECT/REPOSITORY/kimi-k3:0.1.0",
  "NODE_SERVICE_ACCOUNT": "e-mail of the service account of the nodes, which reads the checkpoint for several slices",
  "LOCAL_SSD_COUNT": "local SSDs of a node, 375 GiB each; the checkpoint takes 1453 GiB",
}


@dataclasses.dataclass(frozen=True)
class Place:
  """Where it runs. None: a variable of the shell.

  Attributes:
    capacity: reservation, flex-start, spot or on-demand.
    reservation: Its name.
  """

  project: str | None
  zone: str | None
  cluster: str | None
  bucket: str | None
  image: str | None
  capacity: str
  reservation: str | None = None

  def assignments(self, *names: str) -> str:
    """The head of a script: each name set, or demanded."""
    given = {
      "PROJECT": self.project, "ZONE": self.zone, "CLUSTER": self.cluster, "BUCKET": self.bucket, "IMAGE": self.image,
    }  # fmt: skip
    lines = []
    for name in names:
      value = given.get(name)
      if value is None:
        told = shlex.quote(f"set {name}: {VARIABLES[name]}")
        lines.append(f'[ -n "${{{name}:-}}" ] || {{ echo {told} >&2; exit 2; }}')
        if name == "BUCKET":
          lines.append(
            'case $BUCKET in */*) echo "BUCKET is $BUCKET: give the name alone, without gs://" >&2; exit 2 ;; esac'
          )
      else:
        lines.append(f"{name}={shlex.quote(value)}")
    return "\n".join(lines) + "\n"


def parse_capacity(text: str) -> tuple[str, str | None]:
  """Returns kind and name of a reservation.

  Raises:
    InputError: if it is none of the four.
  """
  kind, equals, name = text.partition("=")
  if kind == "reservation" and name:
    return kind, name
  if kind in ("flex-start", "spot", "on-demand") and not equals:
    return kind, None
  raise InputError(f"--capacity is {text!r}, expected reservation=NAME, flex-start, spot or on-demand")


def _script(purpose: str, body: str) -> str:
  return f"#!/usr/bin/env bash\n# {purpose}\nset -euo pipefail\n{body}"


def pool(job: Job, place: Place, *, local_ssd: bool) -> str:
  """Commands that make the node pools: one a slice, or one of CPU nodes."""
  names = ["PROJECT", "ZONE", "CLUSTER"]
  names += ["NODE_SERVICE_ACCOUNT"] if job.host_network else []
  names += ["LOCAL_SSD_COUNT"] if local_ssd else []
  head = place.assignments(*names) + 'REGION=${ZONE%-*}\nwhere=(--project="$PROJECT")\n'
  where = '"${where[@]}" --cluster="$CLUSTER" --location="$REGION"'
  if job.topology is None:
    flags = [f"--machine-type=n2-standard-16 --num-nodes={manifests.PARTS // 2} --disk-size=100"]
    flags += ["--workload-metadata=GKE_METADATA --enable-gvnic"]
    return _script(
      "Makes a pool of CPU nodes; two parts of the conversion fit a node.", head + _create(pool_name(job), where, flags)
    )
  topology = job.topology
  flags = [f"--machine-type={topology.machine_type}"]
  policy = ""
  if topology.multi_host:
    policy_name = f"{job.name}-policy"
    # A workload policy. With a compact placement policy the pool ends in ERROR.
    policy = (
      f'gcloud compute resource-policies describe {policy_name} "${{where[@]}}" --region="$REGION" >/dev/null 2>&1 ||\n'
      f'  gcloud compute resource-policies create workload-policy {policy_name} "${{where[@]}}" --region="$REGION" \\\n'
      f"    --type=HIGH_THROUGHPUT --accelerator-topology={topology.name}\n"
    )
    # The policy holds the topology. --tpu-topology, of other TPUs, does not go with it.
    flags.append(f"--placement-policy={policy_name}")
  flags.append(_capacity(place, topology.hosts))
  flags.append("--workload-metadata=GKE_METADATA --enable-gvnic --host-maintenance-interval=AS_NEEDED")
  flags.append("--max-pods-per-node=15")
  if local_ssd:
    flags.append('--ephemeral-storage-local-ssd="count=$LOCAL_SSD_COUNT"')
  if job.host_network:
    flags.append('--service-account="$NODE_SERVICE_ACCOUNT" --scopes=cloud-platform')
  body = head + policy
  body += "".join(_create(name, where, flags) for name in pool_names(job))
  what = f"{topology.hosts} VM{'s' * topology.multi_host}, {topology.chips} chips, {topology.devices} devices"
  return _script(f"Makes the node pools: {job.slices} x {topology.name}, each {what}.", body)


def pool_names(job: Job) -> list[str]:
  return [pool_name(job)] if job.slices == 1 else [f"{pool_name(job)}-{i}" for i in range(job.slices)]


def _create(name: str, where: str, flags: list[str]) -> str:
  return (
    f"gcloud container node-pools describe {name} {where} >/dev/null 2>&1 ||\n"
    f"  gcloud container node-pools create {name} {where} \\\n"
    '    --node-locations="$ZONE" ' + " \\\n    ".join(flags) + "\n"
  )


def _capacity(place: Place, hosts: int) -> str:
  if place.capacity == "flex-start":
    return (
      f"--flex-start --enable-autoscaling --num-nodes=0 --min-nodes=0 --max-nodes={hosts} --reservation-affinity=none"
    )
  nodes = f"--num-nodes={hosts}"
  if place.capacity == "reservation":
    assert place.reservation is not None
    return f"{nodes} --reservation-affinity=specific --reservation={shlex.quote(place.reservation)}"
  return f"{nodes} --spot" if place.capacity == "spot" else f"{nodes} --reservation-affinity=none"


def access(job: Job, place: Place) -> str:
  """Commands that let the pods read and write the bucket."""
  names = ["PROJECT", "BUCKET"] + (["NODE_SERVICE_ACCOUNT"] if job.host_network else [])
  member = (
    "principal://iam.googleapis.com/projects/$number/locations/global/workloadIdentityPools/"
    f"$PROJECT.svc.id.goog/subject/ns/{NAMESPACE}/sa/{service_account(job)}"
  )
  body = place.assignments(*names)
  body += 'number=$(gcloud projects describe "$PROJECT" --format="value(projectNumber)")\n'
  body += _grant(member)
  if job.host_network:
    # In the host's network the metadata server answers for the node, not for the pod.
    body += _grant("serviceAccount:$NODE_SERVICE_ACCOUNT")
  return _script("Lets the job's service account use the bucket.", body)


def _grant(member: str) -> str:
  return (
    'gcloud storage buckets add-iam-policy-binding "gs://$BUCKET" --role=roles/storage.objectUser \\\n'
    f'  --member="{member}"\n'
  )


def image(place: Place) -> str:
  """Commands that build the image of what is committed, and push it."""
  body = place.assignments("IMAGE") + _TAGGED
  body += (
    'cd "$(git rev-parse --show-toplevel)"\n'
    'if [ -n "$(git status --porcelain --untracked-files=no)" ]; then\n'
    '  echo "the working tree has changes, and the image would be without them: commit them" >&2\n'
    "  exit 2\n"
    "fi\n"
    "git archive HEAD |\n"
    "  docker build --platform=linux/amd64 --file=scripts/gke/Dockerfile \\\n"
    '    --build-arg=COMMIT="$(git rev-parse HEAD)" --tag="$IMAGE" -\n'
    'docker push "$IMAGE"\n'
  )
  return _script("Builds the image from the last commit and pushes it. Run it in the checkout.", body)


_TAGGED = """\
case ${IMAGE##*/} in
  *:latest) echo "IMAGE is $IMAGE: give a tag that will always mean this image" >&2; exit 2 ;;
  *:* | *@sha256:*) ;;
  *) echo "IMAGE is $IMAGE: a tag is missing" >&2; exit 2 ;;
esac
"""
_WAIT = """\
jsonpath='{.status.conditions[?(@.status=="True")].type}'
conditions() { kubectl get "$@" --namespace="$namespace" -o "jsonpath=$jsonpath"; }
refuse_ended() {  # KIND/NAME; one that runs is waited for
  case " $(conditions "$1" --ignore-not-found) " in
    *" Complete "* | *" Completed "* | *" Failed "*)
      echo "$1 has ended before, and applying it again runs nothing: kubectl delete $1, then start this again" >&2
      exit 2 ;;
  esac
}
wait_for() {  # KIND/NAME; ends with 1 when it has failed, or is not there any more
  local found
  while true; do
    if found=$(kubectl get "$1" --namespace="$namespace" --ignore-not-found -o name) && [ -z "$found" ]; then
      echo "$1: gone: deleted, or its time after the end is over; what it wrote is in gs://$BUCKET" >&2
      exit 1
    fi
    case " $(conditions "$1" --ignore-not-found || true) " in  # the API server may be away for a while
      *" Complete "* | *" Completed "*) echo "$1: done"; return ;;
      *" Failed "*) echo "$1: failed: kubectl describe $1" >&2; exit 1 ;;
    esac
    sleep 30
  done
}
"""


def run(job: Job, place: Place, files: list[str]) -> str:
  """Applies the manifests in order and waits for what runs.

  Args:
    files: Names of manifests. One that runs has a number from 20 on, and is waited for before the next.
  """
  body = place.assignments("BUCKET", "IMAGE") + _TAGGED
  body += 'export BUCKET IMAGE\ncd "$(dirname "${BASH_SOURCE[0]}")"\n'
  body += f"namespace={NAMESPACE}\n{_WAIT}"
  # Only these two variables: every other dollar sign belongs to the files.
  body += 'apply() { envsubst \'${BUCKET} ${IMAGE}\' <"$1" | kubectl apply --namespace="$namespace" -f -; }\n'
  for file in files:
    if file.startswith(("2", "3")):
      body += f"refuse_ended {_resource(job, file)}\napply {file}\nwait_for {_resource(job, file)}\n"
    else:
      body += f"apply {file}\n"
  body += f'gcloud storage cat "gs://$BUCKET/{job.out}/{"finish/" if job.kind == "convert" else ""}summary.json"\n'
  return _script("Applies the manifests and waits. Exit code 0: done; 1: failed; 2: refused.", body)


def _resource(job: Job, file: str) -> str:
  if job.kind == "convert":
    return f"job/{job.name}-{file.removesuffix('.yaml').partition('-')[2]}"
  return f"{'jobset' if job.multi_host else 'job'}/{job.name}"


def clean_up(job: Job, place: Place, files: list[str]) -> str:
  """Deletes what the other scripts made, but for the bucket and the image."""
  body = place.assignments("PROJECT", "ZONE", "CLUSTER")
  body += 'REGION=${ZONE%-*}\nexport BUCKET=deleted IMAGE=deleted:0\ncd "$(dirname "${BASH_SOURCE[0]}")"\nleft=0\n'
  commands = [
    f"envsubst '${{BUCKET}} ${{IMAGE}}' <{file} | kubectl delete --namespace={NAMESPACE} --ignore-not-found -f -"
    for file in reversed(files)
    if "kueue" not in file  # a queue is other jobs' too
  ]
  commands += [
    f'gcloud container node-pools delete {name} --quiet --project="$PROJECT" --cluster="$CLUSTER" --location="$REGION"'
    for name in pool_names(job)
  ]
  if job.multi_host:
    commands.append(
      f'gcloud compute resource-policies delete {job.name}-policy --quiet --project="$PROJECT" --region="$REGION"'
    )
  # One that fails stops no other: what stays costs as long as it stands.
  body += "".join(f"{command} || left=1\n" for command in commands)
  body += 'if [ "$left" = 1 ]; then\n  echo "not all was there or could be deleted: see above" >&2\n  exit 1\nfi\n'
  return _script("Deletes the job and its node pools. Bucket, results and image stay.", body)
