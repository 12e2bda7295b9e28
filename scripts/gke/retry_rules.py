"""Rules about names and fields, and about what is tried again: docs/decisions/0023-gke-retries.md."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bundle import Bundle, Object, Workload, of_bundles, of_workloads

_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1035, which JobSet asks of what it makes
_LONGEST_NAME = 63
_POD_SUFFIX = 6  # a dash and five random characters
_JOBSET_KEYS = {
  "": {"apiVersion", "kind", "metadata", "spec"},
  "spec": {
    "coordinator", "failurePolicy", "managedBy", "network", "replicatedJobs", "startupPolicy", "successPolicy",
    "suspend", "ttlSecondsAfterFinished",
  },
  "network": {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"},
  "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
  "rule": {"name", "action", "onJobFailureReasons", "onJobFailureMessagePatterns", "targetReplicatedJobs"},
  "replicatedJob": {"name", "groupName", "template", "replicas", "dependsOn"},
}  # fmt: skip
_ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
_REASONS = (
  "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy",
)  # fmt: skip
_STRATEGIES = ("Recreate", "BlockingRecreate")  # of JobSet 0.10.1
_FAILED_CODES = (1, 2, 126, 127)  # what `kimi-k3` and a shell exit with when another try ends the same way
_LOST_CODES = (75, 134, 137, 139, 143)  # run again; aborted by JAX; killed; crashed; told to stop


@of_workloads("name-length")
def _name_length(one: Workload, _: Bundle) -> Iterator[str]:
  longest = one.name
  if one.kind == "JobSet":
    replicas, completions = one.replicated.get("replicas", 1), one.job.get("completions", 1)
    longest = f"{one.name}-{one.replicated.get('name', '')}-{replicas - 1}-{completions - 1}"
  else:
    longest = f"{one.name}-{one.job.get('completions', 1) - 1}"
  length = len(longest) + _POD_SUFFIX
  if length > _LONGEST_NAME:
    yield (
      f"pods would be called {longest}-xxxxx, {length} characters, expected at most {_LONGEST_NAME}: "
      f"shorten the name by {length - _LONGEST_NAME}"
    )
  if not _LABEL.fullmatch(one.name) and len(one.name) <= _LONGEST_NAME:
    yield f"name {one.name!r}, expected lower-case letters, digits and -, a letter first: choose another name"


@of_bundles("jobset-field")
def _jobset_field(bundle: Bundle) -> Iterator[tuple[str, str, str]]:
  for file, name, one in bundle.of_kind("JobSet"):
    spec = one.get("spec") or {}
    policy = spec.get("failurePolicy") or {}
    places = [("", one), ("spec", spec), ("network", spec.get("network") or {}), ("failurePolicy", policy)]
    places += [("rule", rule) for rule in policy.get("rules") or []]
    places += [("replicatedJob", entry) for entry in spec.get("replicatedJobs") or []]
    for kind, found in places:
      for key in sorted(found.keys() - _JOBSET_KEYS[kind]):
        yield (
          file,
          f"JobSet {name}",
          f"unknown field {key}, expected one of {', '.join(sorted(_JOBSET_KEYS[kind]))}: remove it",
        )
    if one.get("apiVersion") != "jobset.x-k8s.io/v1alpha2":
      yield file, f"JobSet {name}", f"apiVersion {one.get('apiVersion')}, expected jobset.x-k8s.io/v1alpha2: set it"


@of_workloads("restart-policy")
def _restart_policy(one: Workload, _: Bundle) -> Iterator[str]:
  found = one.pod.get("restartPolicy")
  if found != "Never":
    # JobSet fills in OnFailure, and the Job that it makes is then refused for its podFailurePolicy.
    yield f"restartPolicy {found or 'not given'}, expected Never, as podFailurePolicy needs it: set it"


@of_workloads("disruption-ignored")
def _disruption_ignored(one: Workload, _: Bundle) -> Iterator[str]:
  for i, rule in enumerate(one.pod_rules):
    conditions = [c for c in rule.get("onPodConditions") or [] if c.get("type") == "DisruptionTarget"]
    if not conditions:
      continue
    if rule.get("action") != "Ignore":
      yield f"{rule.get('action')} on DisruptionTarget, expected Ignore, for a node repair is no failure: change it"
    elif i:
      yield f"DisruptionTarget is rule {i + 1}, expected first: an evicted pod's exit code would be judged: move it"
    return
  yield "podFailurePolicy has no rule for DisruptionTarget: a node repair would be a failure: add Ignore, first"


@of_workloads("condition-status")
def _condition_status(one: Workload, _: Bundle) -> Iterator[str]:
  for rule in one.pod_rules:
    for condition in rule.get("onPodConditions") or []:
      if condition.get("status") != "True":
        # Known to be refused inside a JobSet, whose schema has no default for it.
        yield f"status {condition.get('status')!r} of {condition.get('type')}, expected 'True', quoted: set it"


@of_workloads("failed-run-is-not-repeated")
def _failed_run(one: Workload, _: Bundle) -> Iterator[str]:
  repeats = (
    one.job.get("backoffLimit", 6)
    or one.job.get("backoffLimitPerIndex")
    or (one.jobset.get("failurePolicy") or {}).get("maxRestarts")
  )
  if not repeats:
    return
  # The part of a conversion that meets a full disk or a lost connection exits with 1 and goes on when tried again.
  codes = (2,) if one.job.get("backoffLimitPerIndex") is not None else _FAILED_CODES
  for container in one.containers:
    name = container.get("name", "")
    wrong = [code for code in codes if one.action(code, name) not in ("FailJob", "FailIndex")]
    if wrong:
      yield (
        f"exit code {', '.join(map(str, wrong))} of {name} would be repeated up to {repeats} times, expected a rule "
        "that fails the Job: add onExitCodes to podFailurePolicy"
      )


@of_workloads("lost-process-is-repeated")
def _lost_process(one: Workload, _: Bundle) -> Iterator[str]:
  for container in one.containers:
    name = container.get("name", "")
    wrong = [code for code in _LOST_CODES if one.action(code, name) in ("FailJob", "FailIndex")]
    if wrong:
      yield (
        f"exit code {', '.join(map(str, wrong))} of {name} fails the Job, expected a retry, for it means a lost or "
        "killed process: take it out of the rule"
      )


@of_workloads("exit-code-container")
def _exit_code_container(one: Workload, _: Bundle) -> Iterator[str]:
  known = [container.get("name") for container in one.all_containers]
  for rule in one.pod_rules:
    codes = rule.get("onExitCodes")
    if codes is not None and codes.get("containerName") not in known:
      # gcsfuse's sidecar is a container of the pod too.
      yield (
        f"onExitCodes is for container {codes.get('containerName')}, expected one of {', '.join(map(str, known))}: "
        "name it, or a sidecar's exit code is judged"
      )


@of_workloads("processes-restart-together")
def _together(one: Workload, _: Bundle) -> Iterator[str]:
  if not one.multi_host:
    return
  if one.job.get("backoffLimit", 6) != 0:
    yield (
      f"backoffLimit {one.job.get('backoffLimit', 'not given (6)')}, expected 0: the Job would replace one pod, which "
      "cannot join a run that has lost it"
    )
  attempt = {entry.get("name") for c in one.containers for entry in c.get("env") or []}
  if missing := sorted({"KIMI_K3_ATTEMPT", "KIMI_K3_HOSTS", "KIMI_K3_SLICE"} - attempt):
    yield f"{', '.join(missing)} not set, by which job.py sees that it replaces another pod: set it"


@of_workloads("jobset-retries")
def _jobset_retries(one: Workload, _: Bundle) -> Iterator[str]:
  if one.kind != "JobSet":
    return
  policy = one.jobset.get("failurePolicy") or {}
  rules = policy.get("rules") or []
  for rule in rules:
    if rule.get("action") not in _ACTIONS:
      yield f"failurePolicy action {rule.get('action')}, expected one of {', '.join(_ACTIONS)}: change it"
    for reason in sorted(set(rule.get("onJobFailureReasons") or []) - set(_REASONS)):
      yield f"failurePolicy reason {reason}, expected one of {', '.join(_REASONS)}: change it"
  if not policy.get("maxRestarts"):
    yield "maxRestarts 0 or not given, expected some: the first lost process would end the run"
    return
  failed = _first_action(rules, "PodFailurePolicy")
  if failed != "FailJobSet":
    yield (
      f"a Job that failed by its exit code leads to {failed}, expected a first rule FailJobSet for PodFailurePolicy: "
      f"a failed run would be repeated {policy['maxRestarts']} times"
    )
  lost = _first_action(rules, "BackoffLimitExceeded")
  if lost != "RestartJobSet":
    yield f"a lost process leads to {lost}, expected RestartJobSet for BackoffLimitExceeded, which maxRestarts bounds"


def _first_action(rules: list[Object], reason: str) -> str:
  for rule in rules:
    reasons = rule.get("onJobFailureReasons") or []
    if not reasons or reason in reasons:
      return str(rule.get("action"))
  return "RestartJobSet"  # JobSet's default


@of_workloads("restart-strategy")
def _restart_strategy(one: Workload, _: Bundle) -> Iterator[str]:
  if one.kind != "JobSet":
    return
  found = (one.jobset.get("failurePolicy") or {}).get("restartStrategy", "Recreate")
  if found not in _STRATEGIES:
    yield f"restartStrategy {found}, expected one of {', '.join(_STRATEGIES)} of JobSet 0.10.1: change it"
  elif found != "BlockingRecreate":
    yield f"restartStrategy {found}, expected BlockingRecreate: old pods would write the same results as new ones"


@of_workloads("grace-period")
def _grace(one: Workload, _: Bundle) -> Iterator[str]:
  found = one.pod.get("terminationGracePeriodSeconds", 30)
  if found < 60:
    yield f"terminationGracePeriodSeconds {found}, expected 60 or more: job.py stores results after its command ended"
