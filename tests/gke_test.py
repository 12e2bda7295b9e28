"""scripts/gke: what is rendered, what the rules catch, and how a job ends."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes_validate.utils
import pytest
import yaml

REPO = Path(__file__).resolve().parents[1]
SCRIPTS = REPO / "scripts" / "gke"
MODULES = ("bundle", "goldens", "job", "manifests", "render", "rules", "shell", "topologies", "validate")
MODULES += ("placement_rules", "pod_rules", "pool_rules", "retry_rules")


@pytest.fixture(scope="module")
def gke() -> Iterator[SimpleNamespace]:
  """The scripts as modules. Their names are common ones, so that they leave again."""
  before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
  sys.path.insert(0, str(SCRIPTS))
  read = kubernetes_validate.utils.schema_contents
  kubernetes_validate.utils.schema_contents = functools.cache(read)  # it reads megabytes for each object
  try:
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
  finally:
    kubernetes_validate.utils.schema_contents = read
    sys.path.remove(str(SCRIPTS))
    for name in MODULES:
      sys.modules.pop(name, None)
    sys.modules.update(before)


def rendered(gke: SimpleNamespace, *argv: str) -> dict[str, str]:
  files, _ = gke.render.render(gke.render._parser().parse_args([*argv, "--dry-run"]))
  return files


# What is rendered


def test_rendered_files_are_the_goldens(gke):
  for name, argv in gke.goldens.GOLDENS.items():
    files = rendered(gke, *argv)
    folder = gke.goldens.DIRECTORY / name
    stored = {path.name: path.read_text() for path in folder.iterdir()}
    assert files.keys() == stored.keys(), f"{name}: python scripts/gke/goldens.py"
    for file, text in files.items():
      assert text == stored[file], f"{name}/{file}: python scripts/gke/goldens.py, and look at the difference"


def test_goldens_are_valid_as_files_on_disk(gke, capsys):
  for name in gke.goldens.GOLDENS:
    assert gke.validate.main([str(gke.goldens.DIRECTORY / name)]) == 0, capsys.readouterr().out


EVERY = [
  f"--topology {topology} {more}"
  for topology in ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "8x8x8")
  for more in (
    "",
    "--job benchmark --scheduling kueue=tpus --capacity flex-start",
    "--storage local-ssd --capacity reservation=mine --bucket gs://my-bucket --image eu-docker.pkg.dev/p/r/k3:1",
  )
]
EVERY += ["--topology 2x2x4 --slices 3", "--topology 4x4x4 --slices 2 --scheduling kueue=q --storage local-ssd"]
EVERY += [
  "--job convert --in hub/k3 --out k3-bf16 --project p --zone us-central1-c --cluster c --bucket gs://my-bucket"
]


def test_every_combination_is_valid_and_its_scripts_parse(gke, tmp_path):
  for i, line in enumerate(EVERY):
    for name, text in rendered(gke, *line.split()).items():  # render() itself raises for what breaks a rule
      if name.endswith(".sh"):
        (tmp_path / f"{i}-{name}").write_text(text)
  scripts = sorted(map(str, tmp_path.iterdir()))
  parsed = subprocess.run(
    ["bash", "-c", 'for file; do bash -n "$file" || exit 1; done', "bash", *scripts],
    capture_output=True,
    text=True,
    check=False,
  )
  assert parsed.returncode == 0, parsed.stderr


def test_one_host_has_no_field_of_several(gke):
  text = "\n".join(rendered(gke, "--topology", "2x2x1").values())
  for field in ("subdomain", "JobSet", "exclusive-topology", "--multihost", "KIMI_K3_ATTEMPT", "hostNetwork", "8482"):
    assert field not in text, field
  for flag in ("--tpu-topology", "--placement-policy", "workload-policy"):
    assert flag not in text, flag


def test_pods_hosts_and_quota_follow_the_topology(gke):
  for name, topology in gke.topologies.TOPOLOGIES.items():
    files = rendered(gke, "--topology", name)
    (file,) = [file for file in files if file.startswith("20-")]
    one = yaml.safe_load(files[file])
    job = one["spec"]["replicatedJobs"][0]["template"]["spec"] if one["kind"] == "JobSet" else one["spec"]
    assert job["completions"] == job["parallelism"] == topology.hosts
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["google.com/tpu"] * topology.hosts == topology.chips
    assert f"--num-nodes={topology.hosts} " in files["00-pool.sh"]


def test_the_mesh_has_all_devices_and_is_the_documented_one(gke):
  for name, topology in gke.topologies.TOPOLOGIES.items():
    for slices in (1, 2):
      axes = gke.render.mesh(topology, slices)
      devices = 1
      for size in axes.values():
        devices *= size
      assert devices == slices * topology.devices, name
  assert gke.render.mesh(gke.topologies.find("2x2x4"), 1) == {"tensor": 32}
  assert gke.render.mesh(gke.topologies.find("2x2x4"), 2) == {"data": 2, "tensor": 32}
  assert gke.render.mesh(gke.topologies.find("4x4x4"), 1) == {"attn_dp_expert": 4, "model": 32}


def test_own_config_is_rendered_with_its_bases(gke, tmp_path):
  (tmp_path / "mine.yml").write_text("base_config: below.yml\nmodel_name: kimi-linear-48b-a3b\n")
  (tmp_path / "below.yml").write_text("base_config: base.yml\nload_parameters_path: gs://else/0/items\n")
  files = rendered(gke, "--topology", "2x2x1", "--config", str(tmp_path / "mine.yml"), "--", "dtype=float32")
  data = yaml.safe_load(files["11-config.yaml"])["data"]
  assert data == {"run.yml": (tmp_path / "mine.yml").read_text(), "below.yml": (tmp_path / "below.yml").read_text()}
  command = yaml.safe_load(files["20-job.yaml"])["spec"]["template"]["spec"]["containers"][0]["command"]
  assert "dtype=float32" in command
  assert "model_name=kimi-k3" not in command
  assert not [word for word in command if word.startswith("load_parameters_path=")]


def test_values_given_are_in_the_files_and_those_left_out_are_demanded(gke):
  given = ["--project", "my project", "--zone", "z-a", "--cluster", "c", "--bucket", "gs://b-1", "--image", "r/k3:1"]
  files = rendered(gke, "--topology", "2x2x4", *given)
  assert not [name for name, text in files.items() if ":-}" in text]
  assert "PROJECT='my project'" in files["00-pool.sh"]
  assert "gs://b-1/k3/0/items" in files["20-jobset.yaml"]
  assert "image: r/k3:1" in files["20-jobset.yaml"]
  text = "\n".join(rendered(gke, "--topology", "2x2x4").values())
  assert set(re.findall(r"\$\{([A-Z_]+):-\}", text)) == {"PROJECT", "ZONE", "CLUSTER", "BUCKET", "IMAGE"}


@pytest.mark.parametrize(
  ("words", "loads"),
  [
    (("2x2x4",), ["serve-1k-8k-c64", "serve-8k-1k-c64"]),
    (("4x4x4",), ["serve-1k-8k-c256", "serve-8k-1k-c256"]),
    (("2x2x4", "--", "--workload", "serve-1k-8k-c8"), ["serve-1k-8k-c8"]),
  ],
)
def test_a_benchmark_runs_loads_that_the_slice_can_hold(gke, words, loads):
  text = rendered(gke, "--job", "benchmark", "--topology", *words)["20-jobset.yaml"]
  assert re.findall(r"serve-\d\w-\d\w-c\d+", text) == loads


REFUSED = {
  "": "--topology is missing",
  "--topology 2x2x3": "expected one of 1x1x1",
  "--topology tpu7x-32": "tpu7x-32 is --topology 2x2x4",
  "--topology 2x2x1 --slices 2": "which is one host",
  "--topology 2x2x4 --slices 0": "expected 1 or more",
  "--topology 2x2x4 --capacity reservation": "expected reservation=NAME",
  "--topology 2x2x4 --capacity spot=x": "expected reservation=NAME",
  "--topology 2x2x4 --scheduling kueue": "expected exclusive or kueue=QUEUE",
  "--topology 2x2x4 --bucket my-bucket": "expected gs://BUCKET",
  "--topology 2x2x4 --bucket gs://my-bucket/folder": "expected gs://BUCKET and no folder",
  "--topology 2x2x4 --bucket gs://my-bucket --in gs://other/x.jsonl": "outside of --bucket",
  "--topology 2x2x4 --out ../x": "expected a path in the bucket",
  "--topology 2x2x4 --in a$b": "expected a path in the bucket",
  "--topology 2x2x4 --job benchmark --in x.jsonl": "makes its own prompts",
  "--topology 2x2x4 --image r/k3:latest": "[image-pinned]",
  "--topology 2x2x4 --image r/k3": "[image-pinned]",
  "--topology 2x2x4 --name a-name-that-is-so-long-that-no-pod-could-have-it": "[name-length]",
  "--topology 2x2x4 --name 2x2x4": "[name-length]",
  "--topology 2x2x4 --image r/k3:a|b": "--image is 'r/k3:a|b', expected a name and tag",
  "--topology 2x2x4 --project=": "--project is empty",
  "--topology 2x2x4 --image=": "--image is empty",
  "--topology 2x2x4 -- --out mine.jsonl": "--out given behind --, expected none of",
  "--topology 2x2x4 --job benchmark -- --summary=x": "--summary=x given behind --",
  "--topology 2x2x4 --config no-such.yml": "cannot be read",
  "--job convert --topology 2x2x4": "runs on CPU nodes",
  "--job convert -- x=1": "runs on CPU nodes",
  "--job train": "invalid choice",
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused_with_one_line_and_exit_code_2(gke, capsys, line):
  before = "--dry-run "
  assert gke.render.main((before + line).split()) == 2
  captured = capsys.readouterr()
  assert captured.out == ""
  assert captured.err.startswith("render: error: ")
  assert captured.err.count("\n") == 1
  assert REFUSED[line] in captured.err


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("a: [1", "is no YAML"),
    ("- 1", "expected lines of key: value"),
    ("base_config: ../x.yml", "config maps have no folders"),
    ("base_config: gone.yml", "cannot be read"),
    ("base_config: run.yml", "config maps have no folders"),
    ("base_config: '\u00fc.yml'", "its name of letters, digits and . _ -"),
    ("a: " + "[" * 5000, "is no YAML"),
    (f"a: '{'\u00fc' * 500_000}'", "1000005 bytes, expected at most 900000"),
  ],
)
def test_a_config_that_cannot_be_is_refused(gke, tmp_path, capsys, text, said):
  (tmp_path / "c.yml").write_text(text)
  assert gke.render.main(["--topology", "2x2x1", "--dry-run", "--config", str(tmp_path / "c.yml")]) == 2
  assert said in capsys.readouterr().err


def test_texts_stay_texts_for_kubectl_which_reads_yaml_by_other_rules(gke):
  # PyYAML leaves these plain, as YAML 1.1 has it, and go-yaml takes them for truth values or numbers.
  texts = ["y", "N", "1e3", "12E+4", "08", "0o17", "-1e-5", "0X1F", "1_0", "1.5"]
  for text in (*texts, "null", "yes", "1", ""):
    (line,) = gke.render._dump([[text]]).splitlines()
    assert line == f"- '{text}'"
  for text in ("2x2x4", "k3:1", "e3", "1e3x", "no-1"):
    assert gke.render._dump([[text]]) == f"- {text}\n"
  command = main_container(
    objects_of(rendered(gke, "--topology", "2x2x1", "--", "--max-new-tokens", "08", "a=$(HOME)"))
  )
  assert command["command"][-4:-1] == ["--max-new-tokens", "08", "a=$$(HOME)"], "Kubernetes makes $( of $$("
  assert "- '08'" in rendered(gke, "--topology", "2x2x1", "--", "--max-new-tokens", "08")["20-job.yaml"]


def test_a_setting_of_the_command_takes_the_place_of_the_rendered_one(gke):
  words = ("model_name=kimi-linear-48b-a3b", "load_parameters_path=gs://b/linear/0/items")
  command = main_container(objects_of(rendered(gke, "--topology", "2x2x1", "--", *words)))["command"]
  for key in ("model_name", "load_parameters_path"):
    assert [word for word in command if word.startswith(f"{key}=")] == [word for word in words if word.startswith(key)]


def test_dry_run_writes_nothing_and_to_writes_only_into_an_empty_directory(gke, tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert gke.render.main(["--topology", "2x2x4", "--dry-run"]) == 0
  shown = capsys.readouterr().out
  assert not list(tmp_path.iterdir())
  assert gke.render.main(["--topology", "2x2x4", "--to", "jobs/k3"]) == 0
  written = {path.name: path.read_text() for path in (tmp_path / "jobs" / "k3").iterdir()}
  assert shown == "".join(f"==> {name} <==\n{written[name]}\n" for name in sorted(written))
  assert all(os.access(path, os.X_OK) == (path.suffix == ".sh") for path in (tmp_path / "jobs" / "k3").iterdir())
  assert gke.render.main(["--topology", "2x2x4", "--to", "jobs/k3"]) == 2
  assert "expected is an empty directory" in capsys.readouterr().err
  assert gke.render.main(["--topology", "2x2x4"]) == 2
  assert gke.render.main(["--topology", "2x2x4", "--dry-run", "--to", "x"]) == 2


def objects_of(files: dict[str, str]) -> dict[str, Any]:
  (file,) = [file for file in files if file.startswith("20-")]
  one = yaml.safe_load(files[file])
  return {one["kind"]: one}


# The rules


def jobset(objects: dict[str, Any]) -> dict[str, Any]:
  return objects["JobSet"]


def job(objects: dict[str, Any]) -> dict[str, Any]:
  if "JobSet" in objects:
    return objects["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
  return objects["Job"]["spec"]


def pod(objects: dict[str, Any]) -> dict[str, Any]:
  return job(objects)["template"]["spec"]


def main_container(objects: dict[str, Any]) -> dict[str, Any]:
  return pod(objects)["containers"][0]


def variables(objects: dict[str, Any]) -> dict[str, Any]:
  return {entry["name"]: entry for entry in main_container(objects)["env"]}


def pod_rules(objects: dict[str, Any]) -> list[Any]:
  return job(objects)["podFailurePolicy"]["rules"]


def policy(objects: dict[str, Any]) -> dict[str, Any]:
  return jobset(objects)["spec"]["failurePolicy"]


def pool(old: str, new: str) -> Callable[[dict[str, Any]], None]:
  def change(objects: dict[str, Any]) -> None:
    assert old in objects["00-pool.sh"]
    objects["00-pool.sh"] = objects["00-pool.sh"].replace(old, new)

  return change


def setting(find: Callable[[dict[str, Any]], Any], key: Any, value: Any) -> Callable[[dict[str, Any]], None]:
  def change(objects: dict[str, Any]) -> None:
    where = find(objects)
    assert isinstance(where, list) or where.get(key) != value, "the fixture changes nothing"
    where[key] = value

  return change


def without(find: Callable[[dict[str, Any]], Any], key: Any) -> Callable[[dict[str, Any]], None]:
  def change(objects: dict[str, Any]) -> None:
    del find(objects)[key]

  return change


def service(**spec: Any) -> Callable[[dict[str, Any]], None]:
  def change(objects: dict[str, Any]) -> None:
    good = {
      "clusterIP": "None",
      "publishNotReadyAddresses": True,
      "selector": {"jobset.sigs.k8s.io/jobset-name": "k3-batch-2x2x4"},
    }
    name = spec.pop("name", "k3-batch-2x2x4")
    objects["Service"] = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": good | spec}

  return change


def as_job(objects: dict[str, Any]) -> None:
  entry = jobset(objects)["spec"]["replicatedJobs"][0]["template"]
  objects["JobSet"] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "k3-batch-2x2x4"},
    "spec": entry["spec"],
  }


def as_jobset(objects: dict[str, Any]) -> None:
  del job(objects)["ttlSecondsAfterFinished"]
  entry = {"name": "slice", "replicas": 1, "template": {"spec": job(objects)}}
  objects["Job"] = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": "k3-batch-2x2x1"},
    "spec": {"replicatedJobs": [entry]},
  }


def second_replicated_job(**variables_: str) -> Callable[[dict[str, Any]], None]:
  def change(objects: dict[str, Any]) -> None:
    other = copy.deepcopy(jobset(objects)["spec"]["replicatedJobs"][0]) | {"name": "other"}
    container = other["template"]["spec"]["template"]["spec"]["containers"][0]
    if image := variables_.pop("image", None):
      container["image"] = image
    container["env"] += [{"name": name, "value": value} for name, value in variables_.items()]
    jobset(objects)["spec"]["replicatedJobs"].append(other)

  return change


def pod_annotations(objects: dict[str, Any]) -> dict[str, Any]:
  return job(objects)["template"]["metadata"]["annotations"]


def mount_options(objects: dict[str, Any]) -> list[str]:
  return objects["PersistentVolume"]["spec"]["mountOptions"]


def exit_codes(objects: dict[str, Any]) -> dict[str, Any]:
  return pod_rules(objects)[1]["onExitCodes"]


MANY, ONE = "--topology 2x2x4", "--topology 2x2x1"
KUEUE, SLICES = "--topology 2x2x4 --scheduling kueue=q", "--topology 2x2x4 --slices 2 --scheduling kueue=q"
CONVERT = "--job convert"


@dataclasses.dataclass(frozen=True)
class Trap:
  """A good bundle with one change, and what must be said of it."""

  rule: str
  good: str
  change: Callable[[dict[str, Any]], None]
  said: str


TRAPS = {
  "name of 60 characters": Trap(
    "name-length", MANY, setting(lambda o: o["JobSet"]["metadata"], "name", "a" * 60), "at most 63"
  ),
  "name with capitals": Trap(
    "name-length", MANY, setting(lambda o: o["JobSet"]["metadata"], "name", "K3"), "lower-case"
  ),
  "name of a Job": Trap("name-length", ONE, setting(lambda o: o["Job"]["metadata"], "name", "a" * 58), "shorten"),
  "typo in a JobSet": Trap("jobset-field", MANY, setting(policy, "maxRestart", 3), "unknown field maxRestart"),
  "field of a newer JobSet": Trap(
    "jobset-field", MANY, setting(lambda o: jobset(o)["spec"], "volumeClaimPolicies", []), "unknown field"
  ),
  "other version of JobSet": Trap(
    "jobset-field", MANY, setting(jobset, "apiVersion", "jobset.x-k8s.io/v1alpha1"), "v1alpha2"
  ),
  "OnFailure": Trap("restart-policy", MANY, setting(pod, "restartPolicy", "OnFailure"), "expected Never"),
  "restartPolicy left to JobSet": Trap("restart-policy", MANY, without(pod, "restartPolicy"), "not given"),
  "OnFailure on one host": Trap("restart-policy", ONE, setting(pod, "restartPolicy", "OnFailure"), "expected Never"),
  "no rule for node repairs": Trap(
    "disruption-ignored", MANY, lambda o: pod_rules(o).pop(0), "no rule for DisruptionTarget"
  ),
  "node repairs counted": Trap(
    "disruption-ignored", ONE, lambda o: pod_rules(o)[0].update(action="Count"), "Count on DisruptionTarget"
  ),
  "node repairs judged last": Trap("disruption-ignored", MANY, lambda o: pod_rules(o).reverse(), "expected first"),
  "no status": Trap(
    "condition-status", MANY, lambda o: pod_rules(o)[0]["onPodConditions"][0].pop("status"), "expected 'True'"
  ),
  "no rule for exit codes": Trap(
    "failed-run-is-not-repeated", MANY, lambda o: pod_rules(o).pop(), "exit code 1, 2, 126, 127"
  ),
  "refused runs repeated": Trap(
    "failed-run-is-not-repeated",
    ONE,
    lambda o: exit_codes(o).update(operator="In", values=[1, 126, 127]),
    "exit code 2 of",
  ),
  "refused parts repeated": Trap("failed-run-is-not-repeated", CONVERT, lambda o: pod_rules(o).pop(), "exit code 2 of"),
  "killed process not repeated": Trap(
    "lost-process-is-repeated", MANY, lambda o: exit_codes(o)["values"].remove(137), "exit code 137"
  ),
  "lost peer not repeated": Trap(
    "lost-process-is-repeated", MANY, lambda o: exit_codes(o)["values"].remove(75), "exit code 75"
  ),
  "exit codes of a sidecar": Trap("exit-code-container", MANY, lambda o: exit_codes(o).pop("containerName"), "sidecar"),
  "exit codes of nobody": Trap(
    "exit-code-container", MANY, setting(exit_codes, "containerName", "typo"), "container typo"
  ),
  "one pod replaced": Trap("processes-restart-together", MANY, setting(job, "backoffLimit", 6), "expected 0"),
  "backoffLimit left out": Trap("processes-restart-together", MANY, without(job, "backoffLimit"), "not given (6)"),
  "no attempt": Trap(
    "processes-restart-together",
    MANY,
    lambda o: main_container(o)["env"].remove(variables(o)["KIMI_K3_ATTEMPT"]),
    "ATTEMPT",
  ),
  "maxRestarts without a rule": Trap("jobset-retries", MANY, setting(policy, "rules", []), "would be repeated 6 times"),
  "rules in the wrong order": Trap(
    "jobset-retries",
    MANY,
    lambda o: policy(o)["rules"].insert(0, {"name": "all", "action": "RestartJobSet"}),
    "FailJobSet",
  ),
  "no restarts": Trap("jobset-retries", MANY, setting(policy, "maxRestarts", 0), "first lost process"),
  "restarts without bound": Trap(
    "jobset-retries", MANY, lambda o: policy(o)["rules"][1].update(action="RestartJobSetAndIgnoreMaxRestarts"), "bounds"
  ),
  "unknown action": Trap(
    "jobset-retries", MANY, lambda o: policy(o)["rules"][1].update(action="Restart"), "action Restart"
  ),
  "unknown reason": Trap(
    "jobset-retries", MANY, lambda o: policy(o)["rules"][0]["onJobFailureReasons"].append("Evicted"), "reason Evicted"
  ),
  "old and new pods at once": Trap("restart-strategy", MANY, without(policy, "restartStrategy"), "BlockingRecreate"),
  "strategy of a newer JobSet": Trap(
    "restart-strategy", MANY, setting(policy, "restartStrategy", "InPlaceRestart"), "0.10.1"
  ),
  "default grace period": Trap("grace-period", MANY, without(pod, "terminationGracePeriodSeconds"), "60 or more"),
  "neither exclusive nor queued": Trap(
    "exclusive-or-kueue", MANY, without(lambda o: o["JobSet"]["metadata"], "annotations"), "neither"
  ),
  "exclusive and queued": Trap(
    "exclusive-or-kueue",
    MANY,
    setting(lambda o: o["JobSet"]["metadata"]["labels"], "kueue.x-k8s.io/queue-name", "q"),
    "both",
  ),
  "exclusive by host": Trap(
    "exclusive-topology",
    MANY,
    setting(
      lambda o: o["JobSet"]["metadata"]["annotations"],
      "alpha.jobset.sigs.k8s.io/exclusive-topology",
      "kubernetes.io/hostname",
    ),
    "gke-nodepool",
  ),
  "queued over two pools": Trap(
    "kueue-one-pool", KUEUE, without(pod_annotations, "kueue.x-k8s.io/podset-required-topology"), "in two slices"
  ),
  "slices of the wrong size": Trap(
    "kueue-one-pool", SLICES, setting(pod_annotations, "kueue.x-k8s.io/podset-slice-size", "2"), "expected '4'"
  ),
  "resource outside of the quota": Trap(
    "kueue-covers", KUEUE, lambda o: main_container(o)["resources"]["requests"].update(cpu="8"), "never admitted"
  ),
  "unknown flavor": Trap(
    "kueue-covers", KUEUE, setting(lambda o: o["ResourceFlavor"]["metadata"], "name", "x"), "is not there"
  ),
  "flavor without topology": Trap(
    "kueue-covers", KUEUE, without(lambda o: o["ResourceFlavor"]["spec"], "topologyName"), "spread"
  ),
  "queue of no ClusterQueue": Trap(
    "kueue-covers", KUEUE, setting(lambda o: o["LocalQueue"]["spec"], "clusterQueue", "x"), "not there"
  ),
  "unknown accelerator": Trap(
    "node-selector",
    MANY,
    setting(lambda o: pod(o)["nodeSelector"], "cloud.google.com/gke-tpu-accelerator", "tpu-v7x"),
    "tpu7x",
  ),
  "topology in devices": Trap(
    "node-selector",
    MANY,
    setting(lambda o: pod(o)["nodeSelector"], "cloud.google.com/gke-tpu-topology", "4x4x2"),
    "4x4x2",
  ),
  "no toleration": Trap("toleration", MANY, without(pod, "tolerations"), "stay pending"),
  "a host too few": Trap("hosts", MANY, setting(job, "completions", 3), "completions 3, expected 4"),
  "chips for hosts": Trap(
    "hosts", MANY, lambda o: job(o).update(parallelism=16, completions=16), "parallelism 16, expected 4"
  ),
  "not indexed": Trap("indexed", MANY, without(job, "completionMode"), "expected Indexed"),
  "two chips asked for": Trap(
    "chips", MANY, setting(lambda o: main_container(o)["resources"], "limits", {"google.com/tpu": 2}), "limits 2"
  ),
  "requests left out": Trap(
    "chips", MANY, without(lambda o: main_container(o)["resources"], "requests"), "requests None"
  ),
  "two containers": Trap(
    "chips",
    MANY,
    lambda o: pod(o)["containers"].append(copy.deepcopy(main_container(o)) | {"name": "b"}),
    "2 containers",
  ),
  "a Job for four hosts": Trap("jobset-for-many-hosts", MANY, as_job, "expected a JobSet"),
  "a JobSet for one host": Trap("jobset-for-many-hosts", ONE, as_jobset, "expected a Job"),
  "subdomain on one host": Trap("fields-of-many-hosts", ONE, setting(pod, "subdomain", "x"), "subdomain x"),
  "coordinator on one host": Trap(
    "fields-of-many-hosts", ONE, lambda o: main_container(o)["command"].extend(["--multihost", "auto"]), "--multihost"
  ),
  "each host alone": Trap(
    "multihost-flag", MANY, lambda o: main_container(o)["command"].remove("--multihost"), "run alone"
  ),
  "addresses when ready": Trap(
    "not-ready-addresses", MANY, without(lambda o: jobset(o)["spec"]["network"], "publishNotReadyAddresses"), "for ever"
  ),
  "no host names": Trap(
    "not-ready-addresses",
    MANY,
    setting(lambda o: jobset(o)["spec"]["network"], "enableDNSHostnames", False),
    "no names",
  ),
  "a Service when ready": Trap("not-ready-addresses", MANY, service(publishNotReadyAddresses=False), "Service"),
  "a Service with an address": Trap("not-ready-addresses", MANY, service(clusterIP="10.0.0.1"), "headless"),
  "other Service": Trap("subdomain", MANY, service(name="workers"), "would not resolve"),
  "no subdomain": Trap("subdomain", MANY, without(lambda o: jobset(o)["spec"]["network"], "subdomain"), "not given"),
  "other subdomain of pods": Trap("subdomain", MANY, setting(pod, "subdomain", "workers"), "expected one name"),
  "DNS in the host's network": Trap("host-network-dns", SLICES, without(pod, "dnsPolicy"), "ClusterFirstWithHostNet"),
  "identity in the host's network": Trap(
    "host-network-identity",
    SLICES,
    without(lambda o: o["PersistentVolume"]["spec"]["csi"]["volumeAttributes"], "hostNetworkPodKSA"),
    "hostNetworkPodKSA",
  ),
  "latest": Trap("image-pinned", MANY, setting(main_container, "image", "r.io:5000/k3:latest"), "tag latest"),
  "no tag": Trap("image-pinned", MANY, setting(main_container, "image", "r.io:5000/k3"), "no tag"),
  "two images": Trap("one-image", MANY, second_replicated_job(image="r/k3:2"), "expected one"),
  "environment differs": Trap("same-environment", MANY, second_replicated_job(XLA_FLAGS="--x"), "XLA_FLAGS differs"),
  "environment from the pod": Trap(
    "same-environment",
    MANY,
    lambda o: main_container(o)["env"].append({"name": "LIBTPU_INIT_ARGS", "value": "--id=$(KIMI_K3_SLICE)"}),
    "LIBTPU_INIT_ARGS comes from the pod",
  ),
  "no compile cache": Trap(
    "compile-cache",
    MANY,
    lambda o: main_container(o)["env"].remove(variables(o)["JAX_COMPILATION_CACHE_DIR"]),
    "not set",
  ),
  "compile cache in the pod": Trap(
    "compile-cache",
    ONE,
    lambda o: variables(o)["JAX_COMPILATION_CACHE_DIR"].update(value="/scratch/cache"),
    "ends with the pod",
  ),
  "small shared memory": Trap("shared-memory", MANY, lambda o: pod(o)["volumes"][3].update(emptyDir={}), "/dev/shm"),
  "no wrapper": Trap(
    "wrapped", MANY, setting(main_container, "command", ["kimi-k3", "batch", "--multihost"]), "job.py"
  ),
  "file cache on": Trap("file-cache", MANY, lambda o: mount_options(o).remove("file-cache:max-size-mb:0"), "read once"),
  "file cache with a size": Trap(
    "file-cache",
    MANY,
    setting(lambda o: o["PersistentVolume"]["spec"]["csi"]["volumeAttributes"], "fileCacheCapacity", "1Ti"),
    "read once",
  ),
  "folders not seen": Trap("implicit-dirs", MANY, lambda o: mount_options(o).remove("implicit-dirs"), "not seen"),
  "no sidecar": Trap("gcsfuse-sidecar", MANY, without(pod_annotations, "gke-gcsfuse/volumes"), "hangs"),
  "config map of another name": Trap(
    "references", MANY, setting(lambda o: o["ConfigMap"]["metadata"], "name", "x"), "ConfigMap"
  ),
  "no service account": Trap("references", MANY, without(pod, "serviceAccountName"), "serviceAccountName"),
  "claim of another volume": Trap(
    "claim-and-volume", MANY, setting(lambda o: o["PersistentVolume"]["spec"]["claimRef"], "name", "x"), "stay pending"
  ),
  "topology flag on one host": Trap(
    "pool-of-one-host", ONE, pool("--num-nodes=1", "--num-nodes=1 --tpu-topology=2x2x1"), "--tpu-topology"
  ),
  "policy on one host": Trap(
    "pool-of-one-host", ONE, pool("--num-nodes=1", "--num-nodes=1 --placement-policy=p"), "--placement-policy"
  ),
  "compact placement policy": Trap(
    "workload-policy", MANY, pool("create workload-policy", "create group-placement"), "compact placement policy"
  ),
  "no throughput policy": Trap("workload-policy", MANY, pool("--type=HIGH_THROUGHPUT", ""), "HIGH_THROUGHPUT"),
  "policy of another topology": Trap(
    "workload-policy", MANY, pool("--accelerator-topology=2x2x4", "--accelerator-topology=2x2x42"), "missing"
  ),
  "topology flag beside the policy": Trap(
    "workload-policy", MANY, pool("--num-nodes=4", "--num-nodes=4 --tpu-topology=2x2x4"), "replaces it"
  ),
  "policy not used": Trap(
    "workload-policy", MANY, pool("--placement-policy=", "--policy="), "--placement-policy is missing"
  ),
  "nodes as chips": Trap("pool-size", MANY, pool("--num-nodes=4", "--num-nodes=16"), "expected 4"),
  "machine of one chip": Trap("pool-size", MANY, pool("tpu7x-standard-4t", "tpu7x-standard-1t"), "machine type"),
  "one pool for two slices": Trap(
    "pool-size", MANY, setting(lambda o: jobset(o)["spec"]["replicatedJobs"][0], "replicas", 2), "1 pools, expected 2"
  ),
  "pods as nodes": Trap("pool-identity", MANY, pool("--workload-metadata=GKE_METADATA", ""), "as their node"),
  "typo in a pod": Trap("schema", MANY, setting(pod, "nodeSelectors", {}), "nodeSelectors"),
  "typo in a Job": Trap("schema", ONE, setting(job, "backofLimit", 3), "backofLimit"),
  "a number as an environment variable": Trap(
    "schema", MANY, lambda o: variables(o)["KIMI_K3_HOSTS"].update(value=4), "string"
  ),
  "status missing for the schema": Trap(
    "schema", CONVERT, lambda o: pod_rules(o)[0]["onPodConditions"][0].pop("status"), "'status' is a required property"
  ),
  "kind of no version": Trap(
    "schema", MANY, setting(lambda o: o["ConfigMap"], "apiVersion", "v2"), "no kind ConfigMap"
  ),
}


@pytest.fixture(scope="module")
def good(gke) -> Callable[[str], dict[str, Any]]:
  """Objects by kind and scripts by name of a rendered bundle, to be changed."""
  made: dict[str, dict[str, Any]] = {}

  def of(line: str) -> dict[str, Any]:
    if line not in made:
      made[line] = {}
      for name, text in rendered(gke, *line.split()).items():
        if name.endswith(".sh"):
          made[line][name] = text
        else:
          for one in yaml.safe_load_all(text):
            made[line].setdefault(one["kind"], one)  # of a conversion's two Jobs the first
    return copy.deepcopy(made[line])

  return of


def findings(gke: SimpleNamespace, objects: dict[str, Any], *, schemas: bool = True) -> list[Any]:
  scripts = {name: text for name, text in objects.items() if name.endswith(".sh")}
  bundle = gke.bundle.Bundle([("x.yaml", one) for name, one in objects.items() if name not in scripts], scripts)
  return [*(gke.validate._against_schemas(bundle) if schemas else ()), *gke.rules.check(bundle)]


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_found_by_its_rule(gke, good, trap):
  case = TRAPS[trap]
  objects = good(case.good)
  case.change(objects)
  found = [one for one in findings(gke, objects, schemas=case.rule == "schema") if one.rule == case.rule]
  assert found, f"{case.rule} found nothing"
  said = " | ".join(map(str, found))
  assert case.said in said
  assert "\n" not in said


@pytest.mark.parametrize("line", [MANY, ONE, KUEUE, SLICES, CONVERT])
def test_what_traps_are_made_from_has_no_finding(gke, good, line):
  assert findings(gke, good(line)) == []


def test_every_rule_has_a_failing_fixture(gke):
  assert {trap.rule for trap in TRAPS.values()} == {"schema", *gke.rules.names()}


def test_validate_reads_files_and_says_what_it_found(gke, tmp_path, capsys):
  folder = gke.goldens.DIRECTORY / "2x2x4"
  for path in folder.iterdir():
    (tmp_path / path.name).write_text(path.read_text().replace("restartPolicy: Never", "restartPolicy: OnFailure"))
  assert gke.validate.main([str(tmp_path)]) == 1
  (line,) = capsys.readouterr().out.splitlines()
  assert line.endswith("[restart-policy]")
  assert gke.validate.main([str(tmp_path), "--json"]) == 1
  (found,) = json.loads(capsys.readouterr().out)
  assert found["rule"] == "restart-policy"
  assert found["where"] == "JobSet k3-batch-2x2x4"
  assert gke.validate.main(["--list"]) == 0
  assert capsys.readouterr().out.split() == ["schema", *gke.rules.names()]


@pytest.mark.parametrize(
  ("name", "text", "said"),
  [
    ("x.yaml", "a: [", "is no YAML"),
    ("x.yaml", "- 1", "expected an object"),
    ("x.yaml", "kind: Job", "expected an object"),
    ("x.txt", "", "expected .yaml"),
    ("", "", "no .yaml"),
    ("gone.yaml", None, "cannot be read"),
  ],
)
def test_files_that_cannot_be_validated_are_refused(gke, tmp_path, capsys, name, text, said):
  path = tmp_path / name
  if name and text is not None:
    path.write_text(text)
  assert gke.validate.main([str(path)]) == 2
  assert said in capsys.readouterr().err
  assert gke.validate.main([]) == 2


JOB, JOBSET = "apiVersion: batch/v1\nkind: Job\n", "apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\n"


@pytest.mark.parametrize(
  ("text", "code", "said"),
  [
    ("", 2, "holds no object"),
    ("---\n---\n", 2, "holds no object"),
    ("a: " + "[" * 5000, 2, "is no YAML"),
    ("apiVersion: 5\nkind: Job\nmetadata: {}\n", 2, "expected an object with apiVersion"),
    ("apiVersion: ../../x\nkind: Job\nmetadata: {}\n", 2, "expected an object with apiVersion"),
    (f"{JOB}metadata: {{name: x}}\nspec: 5\n", 1, "spec: 5 is not of type 'object'"),
    (
      f"{JOB}metadata: {{name: x}}\nspec: {{template: {{spec: {{nodeSelector: [a], containers: [5]}}}}}}\n",
      1,
      "[schema]",
    ),
    (f"{JOBSET}metadata: {{name: [x]}}\n", 1, "metadata.name is no text"),
    (f"{JOBSET}metadata: {{name: x}}\nspec: []\n", 1, "spec.replicatedJobs is no list of one or more"),
    (f"{JOBSET}metadata: {{name: x}}\nspec: {{replicatedJobs: []}}\n", 1, "a JobSet without them runs nothing"),
    (f"{JOBSET}metadata: {{name: x}}\nspec: {{replicatedJobs: [1, {{}}]}}\n", 1, "the template of a Job"),
  ],
)
def test_what_is_not_shaped_as_an_object_is_told_and_never_called_valid(gke, tmp_path, capsys, text, code, said):
  (tmp_path / "x.yaml").write_text(text)
  assert gke.validate.main([str(tmp_path / "x.yaml")]) == code
  captured = capsys.readouterr()
  assert said in captured.err + captured.out


def test_without_the_schemas_nothing_is_called_valid(gke, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "kubernetes_validate", None)
  assert gke.render.main(["--topology", "2x2x4", "--dry-run"]) == 2
  captured = capsys.readouterr()
  assert captured.out == ""
  assert "kubernetes-validate is not installed" in captured.err


# What the retry policy does


def outcome(spec: dict[str, Any], code: int, *, disrupted: bool) -> str:
  """What becomes of a run when a pod ends: the rules of Kubernetes and JobSet, in short.

  Returns:
    "ignored", "all again", "pod again" or "failed".
  """
  jobset_ = spec.get("replicatedJobs")
  job_ = jobset_[0]["template"]["spec"] if jobset_ else spec
  reason = None
  for rule in job_["podFailurePolicy"]["rules"]:
    if "onPodConditions" in rule:
      matches = disrupted
    else:
      matches = (code in rule["onExitCodes"]["values"]) == (rule["onExitCodes"]["operator"] == "In")
    if matches and rule["action"] == "Ignore":
      return "ignored"
    if matches:
      reason = "PodFailurePolicy"
      break
  if reason is None:
    if job_["backoffLimit"] > 0:
      return "pod again"
    reason = "BackoffLimitExceeded"
  for rule in spec["failurePolicy"]["rules"] if jobset_ else ():
    if reason in rule["onJobFailureReasons"]:
      return "failed" if rule["action"] == "FailJobSet" else "all again"
  return "failed"


@pytest.mark.parametrize(
  ("code", "disrupted", "many", "one"),
  [
    (0 + 1, False, "failed", "failed"),  # done, but a row failed
    (2, False, "failed", "failed"),  # refused
    (127, False, "failed", "failed"),  # the command is not in the image
    (75, False, "all again", "pod again"),  # run again
    (134, False, "all again", "pod again"),  # JAX misses another process
    (137, False, "all again", "pod again"),  # killed
    (143, False, "all again", "pod again"),  # told to stop
    (143, True, "ignored", "ignored"),  # evicted: the pod that replaces it ends with 75, see job.py
    (1, True, "ignored", "ignored"),
    (137, True, "ignored", "ignored"),  # its node is gone
  ],
)
def test_a_lost_process_is_repeated_and_a_failed_run_is_not(good, code, disrupted, many, one):
  assert outcome(good(MANY)["JobSet"]["spec"], code, disrupted=disrupted) == many
  assert outcome(good(ONE)["Job"]["spec"], code, disrupted=disrupted) == one


def test_the_retried_codes_of_the_manifests_and_of_the_wrapper_are_the_same(gke):
  assert [code for code in range(1, 256) if gke.job.is_retried(code)] == list(gke.manifests.RETRIED_CODES)


# The wrapper


@pytest.fixture
def host(monkeypatch) -> Callable[..., None]:
  """Sets what the manifest sets in the environment of a pod."""
  for name in ("JOB_COMPLETION_INDEX", "KIMI_K3_SLICE", "KIMI_K3_HOSTS", "KIMI_K3_ATTEMPT", "KIMI_K3_TOPOLOGY"):
    monkeypatch.delenv(name, raising=False)

  def be(index: int = 0, slice_: int = 0, hosts: int = 1, attempt: str = "a1") -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
    monkeypatch.setenv("KIMI_K3_SLICE", str(slice_))
    monkeypatch.setenv("KIMI_K3_HOSTS", str(hosts))
    monkeypatch.setenv("KIMI_K3_ATTEMPT", attempt)
    monkeypatch.setenv("KIMI_K3_TOPOLOGY", "tpu7x:2x2x4")

  return be


@pytest.fixture
def run_job(gke, tmp_path) -> Iterator[Callable[..., int]]:
  handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
  count = iter(range(100))

  def run(
    script: str, *, out: str = "out", keep: str = "done.jsonl*", copy_every: str = "60", settle: str = "0"
  ) -> int:
    words = ["--out", str(tmp_path / out), "--work", str(tmp_path / f"work-{next(count)}"), "--keep", keep]
    return gke.job.main([*words, "--copy-every", copy_every, "--settle", settle, "--", "bash", "-c", script])

  yield run
  for number, handler in handlers.items():
    signal.signal(number, handler)


def test_results_log_and_summary_are_stored_and_the_exit_code_passed_on(run_job, host, tmp_path, capfdbinary):
  host(hosts=4)
  assert (
    run_job("echo row >done.jsonl; echo half >done.jsonl.state; echo no >other; echo out; echo err >&2; exit 1") == 1
  )
  out = tmp_path / "out"
  assert (out / "done.jsonl").read_text() == "row\n"
  assert (out / "done.jsonl.state").read_text() == "half\n"
  assert not (out / "other").exists()
  assert (out / "hosts" / "0-0" / "log.txt").read_text() == "out\nerr\n"
  assert capfdbinary.readouterr().out == b"out\nerr\n"
  summary = json.loads((out / "summary.json").read_text())
  assert summary == json.loads((out / "hosts" / "0-0" / "summary.json").read_text())
  assert summary["schema"] == 1
  assert summary["exit_code"] == 1
  assert summary["command"][:2] == ["bash", "-c"]
  assert summary["topology"] == "tpu7x:2x2x4"
  assert summary["host"]["name"] == "0-0"
  assert summary["host"]["hosts"] == 4
  assert summary["versions"]["jax"]
  assert summary["started"] <= summary["ended"]
  assert not list(out.rglob("*.part"))


def test_other_hosts_store_a_log_and_a_summary_of_their_own_only(run_job, host, tmp_path):
  host(index=3, slice_=1, hosts=8)
  assert run_job("echo row >done.jsonl; echo out") == 0
  stored = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
  assert stored == ["attempts/a1/1-3", "hosts/1-3/log.txt", "hosts/1-3/summary.json"]


@pytest.mark.parametrize(
  ("script", "code"), [("exit 0", 0), ("exit 2", 2), ("exit 75", 75), ("kill -9 $$", 137), ("kill -ABRT $$", 134)]
)
def test_exit_codes_are_those_of_the_command_as_a_shell_gives_them(run_job, host, tmp_path, script, code):
  host()
  assert run_job(script) == code
  assert json.loads((tmp_path / "out" / "summary.json").read_text())["exit_code"] == code


def test_a_command_that_is_not_there_is_127_and_in_the_summary(gke, host, tmp_path, capsys, run_job):
  del run_job  # for the handlers
  host()
  words = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--", "no-such-command"]
  assert gke.job.main(words) == 127
  assert json.loads((tmp_path / "out" / "summary.json").read_text())["exit_code"] == 127
  assert "no-such-command" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_the_command_runs(run_job, host, tmp_path, capsys):
  host()
  (tmp_path / "file").write_text("not a folder")
  assert run_job(f"touch {tmp_path}/ran", out="file") == 2
  assert not (tmp_path / "ran").exists()
  error = capsys.readouterr().err
  assert error.count("\n") == 1
  assert "cannot be written" in error


def test_a_bucket_that_is_not_mounted_is_refused_and_its_place_is_not_made(gke, host, capsys):
  host()
  words = ["--out", "/no-such-bucket/runs/k3", "--work", "/tmp", "--", "true"]
  assert gke.job.main(words) == 2
  assert "there is no /no-such-bucket: mount the bucket there" in capsys.readouterr().err
  assert not Path("/no-such-bucket").exists()


def test_a_run_that_starts_again_finds_its_rows_and_a_new_attempt_goes_on(run_job, host, tmp_path):
  host(hosts=4, attempt="first")
  assert run_job("echo 1 >done.jsonl; kill -9 $$") == 137
  host(hosts=4, attempt="second")
  assert run_job("cat done.jsonl; echo 2 >>done.jsonl") == 0
  assert (tmp_path / "out" / "done.jsonl").read_text() == "1\n2\n"
  host(hosts=4, attempt="third", index=2)  # hosts that do not write read the same
  assert run_job('test "$(cat done.jsonl)" = "$(printf "1\\n2")"') == 0


def test_a_pod_that_replaces_another_of_its_attempt_does_not_join(run_job, host, tmp_path, capsys):
  host(hosts=4, index=3)
  assert run_job("exit 143") == 143
  assert run_job(f"touch {tmp_path}/ran") == 75
  assert not (tmp_path / "ran").exists()
  assert "all 4 start again together" in capsys.readouterr().err
  host(hosts=1)
  assert run_job("exit 143") == 143
  assert run_job("exit 0") == 0  # alone there is nobody to wait for


def test_a_code_that_is_retried_is_passed_on_after_those_that_are_not(run_job, host):
  host(hosts=4)
  started = time.monotonic()
  assert run_job("exit 75", settle="0.3") == 75
  assert time.monotonic() - started >= 0.3
  host(hosts=4, index=1)
  started = time.monotonic()
  assert run_job("exit 1", settle="30") == 1
  assert time.monotonic() - started < 30


def test_what_must_be_there_first_is_stored_first(gke, tmp_path):
  for name in ("rows", "rows.state", "rows.lock"):
    (tmp_path / name).touch()
  assert [path.name for path in gke.job._matching(tmp_path, ["rows.state", "rows*"])] == ["rows.state", "rows"]
  kept = gke.render._KEPT["batch"]
  assert kept.index("completions.jsonl.state.json") < kept.index("completions.jsonl")


def test_several_hosts_without_an_attempt_are_refused(run_job, host, capsys):
  host(hosts=4, attempt="")
  assert run_job("exit 0") == 2
  assert "KIMI_K3_ATTEMPT is not set" in capsys.readouterr().err


def test_rows_are_stored_while_the_command_runs(run_job, host, tmp_path):
  host()
  seen = f"while ! grep -q 2 {tmp_path}/out/done.jsonl 2>/dev/null; do sleep 0.02; done"
  assert run_job(f"echo 1 >done.jsonl; echo 2 >>done.jsonl; {seen}", copy_every="0.05") == 0


def test_results_that_cannot_be_stored_at_the_end_are_no_success(run_job, host, tmp_path, capsys):
  host()
  (tmp_path / "out" / "done.jsonl").mkdir(parents=True)
  assert run_job("echo row >done.jsonl", copy_every="0.5") == 75
  assert "results cannot be stored" in capsys.readouterr().err


def test_sigterm_ends_the_command_and_the_summary_is_still_written(host, tmp_path):
  host(hosts=4)
  words = [sys.executable, str(SCRIPTS / "job.py"), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
  script = (
    f"trap 'echo told; exit 143' TERM; echo row >done.jsonl; touch {tmp_path}/up; while true; do sleep 0.05; done"
  )
  started = time.monotonic()
  process = subprocess.Popen([*words, "--settle", "60", "--keep", "done.jsonl", "--", "bash", "-c", script])
  while not (tmp_path / "up").exists():
    assert time.monotonic() - started < 60
    time.sleep(0.02)
  process.send_signal(signal.SIGTERM)
  assert process.wait(50) == 143  # a pod that is told to stop waits for nobody
  assert json.loads((tmp_path / "out" / "summary.json").read_text())["outcome"] == "signal 15"
  assert (tmp_path / "out" / "hosts" / "0-0" / "log.txt").read_text() == "told\n"
  assert (tmp_path / "out" / "done.jsonl").read_text() == "row\n"


# Scripts, image, documents


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["--work", "file"], "file cannot be written ("),
    (["--work", "w", "--keep", "/etc/hosts"], "'/etc/hosts' is no pattern of file names"),
    (["--work", "w", "--keep", "../x"], "'../x' is no pattern of file names"),
    (["--work", "w", "--keep", ""], "'' is no pattern of file names"),
    (["--work", "w", "--copy-every", "0"], "0 s between two copies"),
    (["--work", "w", "--copy-every", "nan"], "nan is no number of seconds"),
    (["--work", "w", "--settle", "-1"], "-1 is no number of seconds"),
  ],
)
def test_arguments_of_the_wrapper_that_cannot_be_end_with_2_before_the_command(
  gke, host, tmp_path, monkeypatch, capsys, words, said
):
  host()
  monkeypatch.chdir(tmp_path)
  Path("file").touch()
  try:
    code = gke.job.main(["--out", "out", *words, "--", "touch", str(tmp_path / "ran")])
  except SystemExit as end:
    code = end.code
  assert code == 2
  assert said in capsys.readouterr().err
  assert not Path("ran").exists()


@pytest.mark.parametrize("name", ["JOB_COMPLETION_INDEX", "KIMI_K3_SLICE", "KIMI_K3_HOSTS"])
def test_a_variable_that_is_no_number_ends_with_2(run_job, host, tmp_path, monkeypatch, capsys, name):
  host()
  monkeypatch.setenv(name, "two")
  assert run_job("echo row >done.jsonl") == 2
  assert f"job: error: {name} is 'two', expected a whole number" in capsys.readouterr().err
  assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written_or_shown_stops_no_command(gke, run_job, host, tmp_path, monkeypatch, capsys):
  host()

  def opened(path: Any, mode: str, **options: Any) -> Any:
    return open("/dev/full" if Path(path).name == "log.txt" else path, mode, **options)

  monkeypatch.setattr(gke.job, "open", opened, raising=False)
  monkeypatch.setattr(sys, "stdout", None)
  run_job("for i in 1 2 3; do echo $i; sleep 0.05; done; echo whole >done.jsonl")
  assert (tmp_path / "out" / "done.jsonl").read_text() == "whole\n"
  assert capsys.readouterr().err.count("cannot be written (") == 1


STUB = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$LOG"
case "$*" in ${FAILING:-nothing}) echo failed >&2; exit 1 ;; esac
case "$1 $2" in
  "get jobset/"*)
    if [ -n "${GONE:-}" ] && [[ "$*" == *"-o name" ]]; then exit; fi
    if grep -q "^kind: JobSet" "$LOG"; then echo "${CONDITIONS:-Completed}"; else echo "${BEFORE:-}"; fi ;;
  "apply "*) cat >>"$LOG" ;;
  "delete "*) cat >/dev/null ;;
esac
"""


@pytest.fixture
def cluster(tmp_path) -> Callable[..., tuple[int, str, str]]:
  """Runs a golden script with stand-ins for kubectl and gcloud; returns exit code, stderr and what they were told."""
  for name in ("kubectl", "gcloud"):
    (tmp_path / name).write_text(STUB)
    (tmp_path / name).chmod(0o755)
  (tmp_path / "envsubst").write_text(
    f"#!{sys.executable}\nimport os, re, sys\n"
    "names = re.findall(r'\\$\\{(\\w+)\\}', sys.argv[1])\ntext = sys.stdin.read()\n"
    "for name in names: text = text.replace('${%s}' % name, os.environ[name])\nsys.stdout.write(text)\n"
  )
  (tmp_path / "envsubst").chmod(0o755)

  def run(script: str, **environment: str) -> tuple[int, str, str]:
    log = tmp_path / "log"
    log.unlink(missing_ok=True)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    file = REPO / "tests" / "golden" / "gke" / script
    ran = subprocess.run(
      ["bash", str(file)],
      env={"PATH": path, "LOG": str(log)} | environment,
      capture_output=True,
      text=True,
      timeout=60,
      check=False,
    )
    return ran.returncode, ran.stderr, log.read_text() if log.exists() else ""

  return run


def test_the_run_script_puts_values_in_applies_and_tells_how_it_ended(cluster):
  values = {"BUCKET": "my-bucket", "IMAGE": "r.io:5000/k3:1"}
  code, _, told = cluster("2x2x4/40-run.sh", **values)
  assert code == 0
  assert "load_parameters_path=gs://my-bucket/k3/0/items" in told
  assert "image: r.io:5000/k3:1" in told
  assert "${" not in told
  assert told.splitlines()[-1] == "gcloud storage cat gs://my-bucket/runs/k3-batch-2x2x4/summary.json"
  assert cluster("2x2x4/40-run.sh", CONDITIONS="Suspended Failed", **values)[0] == 1
  code, error, _ = cluster("2x2x4/40-run.sh", GONE="yes", **values)
  assert code == 1
  assert "jobset/k3-batch-2x2x4: gone" in error
  code, error, told = cluster("2x2x4/40-run.sh", BEFORE="StartupPolicyCompleted Completed", **values)
  assert code == 2
  assert "has ended before" in error
  assert "kind: JobSet" not in told


def test_scripts_demand_what_was_not_given_and_refuse_an_image_without_a_tag(cluster):
  code, error, told = cluster("2x2x4/40-run.sh", BUCKET="b")
  assert (code, told) == (2, "")
  assert error.startswith("set IMAGE: image with a tag")
  for script in ("40-run.sh", "01-access.sh"):
    code, error, told = cluster(f"2x2x4/{script}", BUCKET="gs://b", PROJECT="p", IMAGE="r/k3:1")
    assert (code, told, error) == (2, "", "BUCKET is gs://b: give the name alone, without gs://\n")
  for image in ("r.io:5000/k3", "k3:latest"):
    code, error, told = cluster("2x2x4/40-run.sh", BUCKET="b", IMAGE=image)
    assert (code, told) == (2, "")
    assert error.startswith(f"IMAGE is {image}")


@pytest.mark.parametrize("failing", ["delete*", "container*pool-0*", "nothing"])
def test_what_cannot_be_deleted_stops_no_other_deletion(cluster, failing):
  values = {"PROJECT": "p", "ZONE": "us-central1-c", "CLUSTER": "c", "FAILING": failing}
  code, error, told = cluster("4x4x4-two-slices-kueue/90-clean-up.sh", **values)
  for pool_ in ("pool-0", "pool-1"):
    assert f"node-pools delete k3-batch-4x4x4-{pool_} " in told
  assert "gcloud compute resource-policies delete k3-batch-4x4x4-policy" in told
  assert code == (0 if failing == "nothing" else 1)
  assert ("see above" in error) == (code == 1)


def test_the_image_is_pinned_and_built_from_files_that_exist():
  text = (SCRIPTS / "Dockerfile").read_text()
  (base,) = re.findall(r"^FROM (\S+)$", text, flags=re.MULTILINE)
  assert re.fullmatch(r"python:3\.12\.\d+-slim-[a-z]+", base)
  assert "latest" not in text
  for name in ("requirements/base.txt", "requirements/plan.txt"):
    assert name in text
    assert (REPO / name).is_file()
  assert len(re.findall(r"^libtpu==", (REPO / "requirements" / "plan.txt").read_text(), flags=re.MULTILINE)) == 1


def test_the_commands_of_the_document_run(gke, capsys, tmp_path, monkeypatch):
  text = (REPO / "docs" / "gke.md").read_text()
  commands = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("python scripts/gke/")
  ]
  assert len(commands) >= 4
  monkeypatch.chdir(tmp_path)
  for command in commands:
    _, script, *argv = shlex.split(command)
    assert getattr(gke, Path(script).stem).main(argv) == 0, f"{command}\n{capsys.readouterr().err}"


def test_the_document_names_every_rule_and_variable(gke):
  text = (REPO / "docs" / "gke.md").read_text()
  assert not [rule for rule in gke.rules.names() if f"`{rule}`" not in text]
  assert not [name for name in gke.shell.VARIABLES if f"`{name}`" not in text]


def test_rendering_loads_no_jax():
  program = "import sys, render; code = render.main(sys.argv[1:]); print(*sys.modules); sys.exit(code)"
  ran = subprocess.run(
    [sys.executable, "-c", program, "--topology", "2x2x4", "--dry-run"],
    cwd=SCRIPTS,
    capture_output=True,
    text=True,
    check=False,
  )
  assert ran.returncode == 0, ran.stderr
  assert not {"jax", "maxtext", "numpy"} & set(ran.stdout.splitlines()[-1].split())


@pytest.mark.slow
def test_the_jobs_of_a_conversion_convert_finish_and_verify(gke, tmp_path):
  source = REPO / "tests" / "golden" / "kimi-linear-tiny" / "checkpoint"
  files = rendered(gke, "--job", "convert")
  path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

  def run(file: str, index: int) -> int:
    command = yaml.safe_load(files[file])["spec"]["template"]["spec"]["containers"][0]["command"]
    words = [
      word.replace("/bucket/release", str(source)).replace("gs://${BUCKET}/k3", str(tmp_path / "k3"))
      .replace("/bucket", str(tmp_path / "bucket")).replace("/scratch", str(tmp_path / "scratch"))
      .replace("/app", str(REPO))
      for word in command
    ]  # fmt: skip
    environment = os.environ | {"PATH": path, "JOB_COMPLETION_INDEX": str(index)}
    ran = subprocess.run([sys.executable, *words[1:]], env=environment, capture_output=True, timeout=300, check=False)
    return ran.returncode

  assert run("30-finish.yaml", 0) == 2  # while a part is missing
  for index in range(gke.manifests.PARTS):
    assert run("20-convert.yaml", index) == 0
  assert run("30-finish.yaml", 0) == 0
  assert (tmp_path / "k3" / "decode.yml").is_file()
  report = json.loads((tmp_path / "bucket" / "runs" / "k3" / "finish" / "verified.json").read_text())
  assert report
