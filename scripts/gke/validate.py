#!/usr/bin/env python3
"""Checks manifests and scripts of jobs on GKE, offline: the core kinds by Kubernetes' schemas, the rest by named rules.

    python scripts/gke/validate.py jobs/
    python scripts/gke/validate.py manifest.yaml 00-pool.sh --json
    python scripts/gke/validate.py --list

Files that are applied together are given together, for some rules look from one to another. The Job inside a JobSet is
checked as a Job; JobSet's and Kueue's own fields by scripts/gke/rules.py. The schemas come with kubernetes-validate,
which `make install` installs; without it nothing is called valid.

Exit codes: 0 nothing found; 1 something found, a line each; 2 a file cannot be read, or kubernetes-validate is missing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rules
import yaml
from bundle import Bundle, Finding

from kimi_k3.errors import InputError

KUBERNETES_VERSION = "1.34"  # of GKE 1.34.0-gke.2201000, the first with tpu7x
_OWN = ("jobset.x-k8s.io/", "kueue.x-k8s.io/")


def main(argv: Sequence[str] | None = None) -> int:
  try:
    return _main(sys.argv[1:] if argv is None else argv)
  except InputError as error:
    print(f"validate: error: {error}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
  def error(self, message: str):
    raise InputError(f"{message} (see --help)")


def _main(argv: Sequence[str]) -> int:
  parser = _Parser(
    prog="validate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument(
    "files", nargs="*", type=Path, help="manifests (.yaml, .yml), scripts (.sh), or a directory of them"
  )
  parser.add_argument("--json", action="store_true", help="print a list of findings as JSON")
  parser.add_argument("--list", action="store_true", help="print the names of the rules")
  args = parser.parse_args(argv)
  if args.list:
    print("\n".join(("schema", *rules.names())))
    return 0
  if not args.files:
    raise InputError("no files given, expected manifests, or the directory that render.py wrote")
  findings = check({str(path): _read(path) for path in _listed(args.files)})
  if args.json:
    print(json.dumps([vars(one) for one in findings], indent=2))
  else:
    for one in findings:
      print(one)
  return 1 if findings else 0


def _listed(paths: Sequence[Path]) -> Iterator[Path]:
  for path in paths:
    if not path.is_dir():
      yield path
      continue
    found = sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml", ".sh"))
    if not found:
      raise InputError(f"{path} holds no .yaml, .yml or .sh: name the directory that render.py wrote")
    yield from found


def _read(path: Path) -> str:
  if path.suffix not in (".yaml", ".yml", ".sh"):
    raise InputError(f"{path}: expected .yaml, .yml or .sh")
  try:
    return path.read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise InputError(f"{path} cannot be read: {error}") from error


def check(files: Mapping[str, str]) -> list[Finding]:
  """Returns what is wrong with files that are applied together, by name and text.

  Raises:
    InputError: for what is no YAML, or where kubernetes-validate is missing.
  """
  bundle = parse(files)
  found = _against_schemas(bundle)
  try:
    return [*found, *rules.check(bundle)]
  except (AttributeError, TypeError, ValueError, LookupError):
    # Rules read fields as the API has them. What they stumbled over is among the findings, or it is a fault of ours.
    if not found:
      raise
    return found


def parse(files: Mapping[str, str]) -> Bundle:
  """Returns the objects and scripts of files.

  Raises:
    InputError: for what is no YAML, or no object of Kubernetes.
  """
  objects, scripts = [], {}
  for name, text in files.items():
    if name.endswith(".sh"):
      scripts[name] = text
      continue
    try:
      found = [one for one in yaml.safe_load_all(text) if one is not None]
    except (yaml.YAMLError, RecursionError) as error:
      raise InputError(f"{name} is no YAML: {error}") from error
    if not found:
      raise InputError(f"{name} holds no object, expected one or more: was it written whole?")
    for one in found:
      if not _is_object(one):
        raise InputError(f"{name}: expected an object with apiVersion, kind and metadata, found {str(one)[:60]!r}")
      objects.append((name, one))
  return Bundle(objects, scripts)


def _is_object(one: object) -> bool:
  if not isinstance(one, dict) or not isinstance(one.get("kind"), str) or not isinstance(one.get("metadata"), dict):
    return False
  version = one.get("apiVersion", "v1")  # without one, the schema says so
  return isinstance(version, str) and re.fullmatch(r"([a-z0-9.-]+/)?v[a-z0-9]+", version) is not None


def _against_schemas(bundle: Bundle) -> list[Finding]:
  found = []
  for file, one in bundle.objects:
    where = f"{one['kind']} {one['metadata'].get('name', '')}"
    if fault := _jobset_fault(one):
      found.append(Finding("schema", file, where, fault))
      continue
    for part, inside in _core_objects(one):
      if fault := _schema_fault(inside):
        found.append(Finding("schema", file, where, f"{part}{fault}"))
  return found


def _jobset_fault(one: dict[str, Any]) -> str | None:
  """What no rule could go on from: JobSet has no schema here."""
  if one["kind"] != "JobSet":
    return None
  entries = one["spec"].get("replicatedJobs") if isinstance(one.get("spec"), dict) else None
  if not isinstance(one["metadata"].get("name"), str):
    return "metadata.name is no text: correct it"
  if not isinstance(entries, list) or not entries:
    return "spec.replicatedJobs is no list of one or more: a JobSet without them runs nothing: correct it"
  if not all(isinstance(entry, dict) and isinstance(entry.get("template"), dict) for entry in entries):
    return "spec.replicatedJobs: each must have a name and the template of a Job: correct it"
  return None


def _core_objects(one: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
  """The object, or the Jobs inside a JobSet; nothing of Kueue, which has no core kind inside."""
  if not str(one.get("apiVersion", "")).startswith(_OWN):
    yield "", one
  elif one["kind"] == "JobSet":
    for entry in (one.get("spec") or {}).get("replicatedJobs") or []:
      yield f"{entry.get('name')}: ", {"apiVersion": "batch/v1", "kind": "Job", **(entry.get("template") or {})}


def _schema_fault(one: dict[str, Any]) -> str | None:
  try:
    import kubernetes_validate
  except ImportError as error:
    raise InputError(
      "kubernetes-validate is not installed, expected the release of requirements/dev.txt: run `make install`"
    ) from error
  try:
    kubernetes_validate.validate(one, KUBERNETES_VERSION, strict=True)
  except kubernetes_validate.ValidationError as error:
    path = ".".join(map(str, error.path))
    return f"{path or 'the object'}: {error.message}: as Kubernetes {KUBERNETES_VERSION} has it"
  except kubernetes_validate.SchemaNotFoundError:
    return (
      f"apiVersion {one.get('apiVersion')} has no kind {one['kind']} in Kubernetes {KUBERNETES_VERSION}: correct it"
    )
  except KeyError as error:
    return f"{error} is missing: add it"
  return None


if __name__ == "__main__":
  sys.exit(main())
