"""Traps of jobs on GKE's TPUs, each a rule with a name: what was found, what is expected, what to do.

What no schema knows: JobSet's and Kueue's fields, what JobSet's and the Job's webhooks refuse after the manifest was
accepted, and what runs but does harm. Where each comes from stands in docs/gke.md. A module of rules is imported here,
which enters its rules into the table.
"""

from __future__ import annotations

import placement_rules  # noqa: F401
import pod_rules  # noqa: F401
import pool_rules  # noqa: F401
import retry_rules  # noqa: F401
from bundle import BUNDLE_RULES, WORKLOAD_RULES, Bundle, Finding


def names() -> tuple[str, ...]:
  """Returns the names of all rules."""
  return (*WORKLOAD_RULES, *BUNDLE_RULES)


def check(bundle: Bundle) -> list[Finding]:
  """Returns what breaks a rule, each thing once."""
  found = []
  workloads = bundle.workloads
  for rule, check_workload in WORKLOAD_RULES.items():
    for one in workloads:
      found += [Finding(rule, one.file, f"{one.kind} {one.name}", text) for text in check_workload(one, bundle)]
  for rule, check_bundle in BUNDLE_RULES.items():
    found += [Finding(rule, file, where, text) for file, where, text in check_bundle(bundle)]
  return list(dict.fromkeys(found))
