#!/usr/bin/env python3
"""Renders all that a run of Kimi K3 on GKE takes: scripts for image, access and node pools, manifests, clean-up.

    python scripts/gke/render.py --topology 2x2x4 --dry-run
    python scripts/gke/render.py --topology 2x2x4 --bucket gs://my-bucket --image REGISTRY/kimi-k3:0.1.0 --to jobs/
    python scripts/gke/render.py --topology 2x2x4 --job benchmark --capacity reservation=NAME --to jobs/
    python scripts/gke/render.py --job convert --in release --out k3 --to jobs/
    python scripts/gke/render.py --topology 4x4x4 --slices 2 --scheduling kueue=tpus --to jobs/ -- --max-new-tokens 512

What is left out of --project, --zone, --cluster, --bucket and --image is a variable, ${PROJECT} and so on, there.
The rendered scripts ask for those that they need when they are run; 40-run.sh puts BUCKET and IMAGE into the manifests.
Everything is validated before it is shown or written (scripts/gke/validate.py); what breaks a rule is not rendered.

Exit codes: 0 rendered; 2 refused, with one line.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import manifests
import shell
import topologies
import validate
import yaml
from manifests import BUCKET_DIR, CONFIG_DIR, CONFIG_FILE, SCRATCH_DIR, Job

from kimi_k3.errors import InputError
from kimi_k3.resources import configs_dir

JOBS = ("batch", "benchmark", "convert")
_STORED_GIB, _LIMIT_GIB = 1452.83, 94.74  # of the released K3; of one device (docs/plan.md)
_MOST_TENSOR = 32
_HEADS = 96
_CHIPS_OF_64_ROWS = 16  # 32 devices, of which each takes two rows' latents
_MULTIHOST = ("--multihost", "auto", "--multihost-timeout", "1800")  # nodes of a repaired slice come one by one
_RESULTS = ("--out", "completions.jsonl", "--summary", "batch.json")
# The state first: completions without it are refused when the run starts again.
_KEPT = {"batch": ("completions.jsonl.state.json", "completions.jsonl", "batch.json"), "benchmark": ("serve.json",)}
_CONFIG_BYTES = 900_000  # a config map holds 1 MiB
_CONFIG_KEY = r"[-._a-zA-Z0-9]+"
_IMAGE = r"[A-Za-z0-9][A-Za-z0-9._:/@-]*"
# Set by this script: given a second time they would win, and results be written where nothing is stored from.
_OWN_FLAGS = ("--in", "--out", "--summary", "--multihost", "--multihost-timeout")
# Texts that PyYAML leaves plain and kubectl, which follows other rules, reads as truth values or numbers.
_LOOKS_OTHERWISE = re.compile(r"[yYnN]|[-+]?\.?[0-9][0-9_.]*([eE][-+]?[0-9]+)?|[-+]?0[xXoObB][0-9a-fA-F_]+")
_MAXTEXT_CONFIG = "base.yml"


def main(argv: Sequence[str] | None = None) -> int:
  try:
    return _main(sys.argv[1:] if argv is None else argv)
  except InputError as error:
    print(f"render: error: {error}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
  def error(self, message: str):
    raise InputError(f"{message} (see --help)")


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(
    prog="render.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  add = parser.add_argument
  add("--topology", help=f"of a slice, in chips: {', '.join(topologies.TOPOLOGIES)}; not for --job convert")
  add("--slices", type=int, default=1, metavar="N", help="slices of that topology, over which rows lie (default: 1)")
  add("--job", choices=JOBS, default="batch", help="default: %(default)s")
  add("--name", help="of the job and of all that belongs to it (default: k3-JOB-TOPOLOGY; k3 for convert)")
  add("--project", help="Google Cloud project")
  add("--zone", help="of the TPUs; the cluster is in its region")
  add("--cluster", help="GKE cluster")
  add("--bucket", metavar="gs://BUCKET", help="of checkpoint, prompts, results and compile cache")
  add("--image", help="with a tag or digest; what 02-image.sh pushes and the pods run")
  add(
    "--capacity",
    default="on-demand",
    metavar="KIND",
    help="reservation=NAME, flex-start, spot, on-demand (the default)",
  )
  add(
    "--scheduling", default="exclusive", metavar="KIND",
    help="exclusive: a node pool for each slice, by JobSet (default); kueue=QUEUE: admitted by Kueue",
  )  # fmt: skip
  add(
    "--storage", choices=("bucket", "local-ssd"), default="bucket",
    help="where the checkpoint is read from: the bucket (default), or each node's SSD, copied there first",
  )  # fmt: skip
  add("--checkpoint", default="k3", metavar="FOLDER", help="in the bucket, as `convert` made it (default: %(default)s)")
  add(
    "--config", type=Path, metavar="FILE.yml", help="of the run (default: configs/tpu7x-32.yml with this slice's mesh)"
  )
  add(
    "--in", dest="input", metavar="PATH",
    help="in the bucket: prompts of batch (default: prompts.jsonl), released files of convert (default: release)",
  )  # fmt: skip
  add(
    "--out",
    metavar="FOLDER",
    help="in the bucket: results (default: runs/NAME), the checkpoint of convert (default: k3)",
  )
  add("--to", type=Path, metavar="DIR", help="directory to write into; must not exist or be empty")
  add("--dry-run", action="store_true", help="print the files, write nothing")
  add("extra", nargs="*", metavar="-- ARGUMENT", help="for the command, such as key=value or --max-new-tokens 512")
  return parser


def _main(argv: Sequence[str]) -> int:
  args = _parser().parse_args(argv)
  if args.dry_run == (args.to is not None):
    raise InputError("expected one of --dry-run, which prints, and --to DIR, which writes")
  files, notes = render(args)
  if args.dry_run:
    for name, text in files.items():
      print(f"==> {name} <==\n{text}")
  else:
    _write(args.to, files)
    notes.append(f"wrote {len(files)} files to {args.to}")
  for note in notes:
    print(f"render: {note}", file=sys.stderr)
  return 0


def _write(directory: Path, files: dict[str, str]) -> None:
  try:
    directory.mkdir(parents=True, exist_ok=True)
    if found := sorted(path.name for path in directory.iterdir()):
      raise InputError(f"--to {directory} holds {found[0]} and expected is an empty directory: name another")
    for name, text in files.items():
      path = directory / name
      path.write_text(text)
      if name.endswith(".sh"):
        path.chmod(0o755)
  except OSError as error:
    raise InputError(f"--to {directory}: {error.strerror}: name a directory that can be written") from error


def render(args: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
  """Returns the text of each file by name, validated, and what the user should be told.

  Raises:
    InputError: naming the flag that cannot be.
  """
  _check_words(args)
  job, notes = _job(args)
  capacity, reservation = shell.parse_capacity(args.capacity)
  place = shell.Place(args.project, args.zone, args.cluster, _bucket(args.bucket), args.image, capacity, reservation)
  documents: dict[str, list[Any]] = {"10-storage.yaml": manifests.storage(job)}
  if job.configs:
    documents["11-config.yaml"] = [manifests.config_map(job)]
  if job.queue is not None:
    documents["12-kueue.yaml"] = manifests.kueue(job)
  if job.kind == "convert":
    parts, end = manifests.convert_jobs(job, _input(args, "release"), f"gs://{job.bucket}/{_checkpoint(args)}")
    documents |= {"20-convert.yaml": [parts], "30-finish.yaml": [end]}
  else:
    documents["jobset.yaml" if job.multi_host else "job.yaml"] = [manifests.tpu_job(job)]
  documents = {name if name[0].isdigit() else f"20-{name}": found for name, found in documents.items()}
  names = list(documents)
  files = {
    "00-pool.sh": shell.pool(job, place, local_ssd=job.local_checkpoint is not None),
    "01-access.sh": shell.access(job, place),
    "02-image.sh": shell.image(place),
    **{name: _dump(found) for name, found in documents.items()},
    "40-run.sh": shell.run(job, place, names),
    "90-clean-up.sh": shell.clean_up(job, place, names),
  }
  if findings := validate.check(files):
    raise InputError(f"{len(findings)} rules are broken: {'; '.join(map(str, findings))}")
  missing = [name for name in shell.VARIABLES if any(f"${{{name}:-}}" in text for text in files.values())]
  if missing:
    notes.append(f"to be set when the scripts are run: {', '.join(missing)}")
  return files, notes


def _check_words(args: argparse.Namespace) -> None:
  """Refuses what was left empty, what is no image, and arguments of the command that this script sets."""
  given = {f"--{name}": getattr(args, name) for name in ("name", "project", "zone", "cluster", "image", "out")}
  given |= {"--in": args.input, "--topology": args.topology, "--checkpoint": args.checkpoint}
  for flag, value in given.items():
    if value == "":  # a variable of the shell that was not set
      raise InputError(f"{flag} is empty, expected a value: give one, or leave the flag out")
  if args.image is not None and not re.fullmatch(_IMAGE, args.image):
    raise InputError(f"--image is {args.image!r}, expected a name and tag such as us-docker.pkg.dev/P/R/kimi-k3:0.1.0")
  for word in args.extra:
    if word.partition("=")[0] in _OWN_FLAGS:
      raise InputError(f"{word} given behind --, expected none of {', '.join(_OWN_FLAGS)}: they are set here")


def _dump(documents: Sequence[Any]) -> str:
  return "---\n".join(yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=120) for one in documents)


class _Dumper(yaml.SafeDumper):
  """Texts of several lines as blocks, no anchors, lists of numbers on one line."""

  def ignore_aliases(self, data: Any) -> bool:
    del data
    return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
  style = "|" if "\n" in text else "'" if _LOOKS_OTHERWISE.fullmatch(text) else None
  return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
  numbers = bool(values) and all(isinstance(value, int) for value in values)
  return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=numbers)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)


def _job(args: argparse.Namespace) -> tuple[Job, list[str]]:
  notes: list[str] = []
  if args.slices < 1:
    raise InputError(f"--slices is {args.slices}, expected 1 or more")
  bucket = _bucket(args.bucket) or "${BUCKET}"
  image = args.image or "${IMAGE}"
  if args.job == "convert":
    if given := [flag for flag, value in _of_tpus(args).items() if value]:
      raise InputError(f"{given[0]} given with --job convert, which runs on CPU nodes: leave it out")
    name = args.name or "k3"
    return Job(name, None, 1, "convert", bucket, image, (), f"runs/{name}"), notes
  if args.topology is None:
    raise InputError(f"--topology is missing, expected one of {', '.join(topologies.TOPOLOGIES)}")
  topology = topologies.find(args.topology)
  if args.slices > 1 and not topology.multi_host:
    raise InputError(
      f"--slices is {args.slices} with --topology {topology.name}, which is one host: slices of several hosts only"
    )
  name = args.name or f"k3-{args.job}-{topology.name}"
  configs, settings = _configs(args, topology, notes)
  local = _path(args.checkpoint, "--checkpoint", args.bucket) if args.storage == "local-ssd" else None
  out = _path(args.out or f"runs/{name}", "--out", args.bucket)
  job = Job(
    name=name, topology=topology, slices=args.slices, kind=args.job, bucket=bucket, image=image,
    command=_command(args, topology, settings, bucket),
    out=out, keep=_KEPT[args.job],
    queue=_queue(args.scheduling), configs=configs, local_checkpoint=local,
  )  # fmt: skip
  return job, notes


def _of_tpus(args: argparse.Namespace) -> dict[str, Any]:
  return {
    "--topology": args.topology, "--slices": args.slices != 1, "--config": args.config, "-- ARGUMENT": args.extra,
    "--storage": args.storage != "bucket", "--scheduling": args.scheduling != "exclusive",
    "--capacity": args.capacity != "on-demand", "--checkpoint": args.checkpoint != "k3",
  }  # fmt: skip


def _bucket(url: str | None) -> str | None:
  if url is None:
    return None
  match = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]{1,61}[a-z0-9])/?", url)
  if not match:
    raise InputError(
      f"--bucket is {url!r}, expected gs://BUCKET and no folder: folders are given by --in, --out, --checkpoint"
    )
  return match[1]


def _path(text: str, flag: str, bucket: str | None) -> str:
  """Returns a path inside the bucket, which may be given as a URL in it."""
  if text.startswith("gs://"):
    root, _, path = text.removeprefix("gs://").partition("/")
    if bucket is None or root != _bucket(bucket):
      raise InputError(
        f"{flag} is {text}, outside of --bucket {bucket or '(not given)'}: one bucket is mounted, put it there"
      )
    text = path
  parts = text.strip("/").split("/")
  if not re.fullmatch(r"[A-Za-z0-9._/-]+", text) or any(part in ("", ".", "..") for part in parts):
    raise InputError(
      f"{flag} is {text!r}, expected a path in the bucket of letters, digits, dots, - and _, such as runs/a"
    )
  return "/".join(parts)


def _input(args: argparse.Namespace, default: str) -> str:
  return _path(args.input or default, "--in", args.bucket)


def _checkpoint(args: argparse.Namespace) -> str:
  return _path(args.out or "k3", "--out", args.bucket)


def _queue(text: str) -> str | None:
  kind, _, queue = text.partition("=")
  if text == "exclusive":
    return None
  if kind == "kueue" and re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", queue):
    return queue
  raise InputError(f"--scheduling is {text!r}, expected exclusive or kueue=QUEUE with the name of a LocalQueue")


def _command(
  args: argparse.Namespace, topology: topologies.Topology, settings: dict[str, Any], bucket: str
) -> tuple[str, ...]:
  words = [f"{CONFIG_DIR}/{CONFIG_FILE}"]
  if args.config is None and not _sets(args.extra, "model_name"):
    words.append("model_name=kimi-k3")
  if not settings.get("load_parameters_path") and not _sets(args.extra, "load_parameters_path"):
    folder = _path(args.checkpoint, "--checkpoint", args.bucket)
    root = f"{SCRATCH_DIR}/checkpoint" if args.storage == "local-ssd" else f"gs://{bucket}/{folder}"
    words.append(f"load_parameters_path={root}/0/items")
  multihost = _MULTIHOST if topology.multi_host else ()
  extra = [word.replace("$(", "$$(") for word in args.extra]  # Kubernetes puts variables in for $(NAME), and undoes $$
  if args.job == "batch":
    rows = f"{BUCKET_DIR}/{_input(args, 'prompts.jsonl')}"
    return ("kimi-k3", "batch", *words, "--in", rows, *_RESULTS, *multihost, *extra)
  if args.input is not None:
    raise InputError("--in given with --job benchmark, which makes its own prompts: leave it out")
  loads = () if "--workload" in extra else _loads(topology.chips * args.slices)
  return ("python3", "/app/benchmarks/serve.py", *words, *loads, "--out", "serve.json", *multihost, *extra)


def _loads(chips: int) -> tuple[str, ...]:
  """The standard loads of serve.py that fit rows cut over all devices: each makes an engine of its own."""
  slots = 64 if chips <= _CHIPS_OF_64_ROWS else 256
  return tuple(word for shape in ("1k-8k", "8k-1k") for word in ("--workload", f"serve-{shape}-c{slots}"))


def _sets(words: Sequence[str], key: str) -> bool:
  return any(word.startswith(f"{key}=") for word in words)


def _configs(
  args: argparse.Namespace, topology: topologies.Topology, notes: list[str]
) -> tuple[tuple[tuple[str, str], ...], dict[str, Any]]:
  """Returns the files of the config map, a config and its bases side by side, and the settings of the first."""
  first = configs_dir() / "tpu7x-32.yml" if args.config is None else args.config
  found: dict[str, str] = {}
  settings: dict[str, Any] = {}
  path, name = first, CONFIG_FILE
  while True:
    text, read = _read_config(path)
    if args.config is None and path == first:
      text = _with_mesh(text, topology, args.slices)
    settings = read | settings  # what a base says counts where the file above is silent
    found[name] = text
    base = read.get("base_config")
    if base is None or (base == _MAXTEXT_CONFIG and not (path.parent / base).is_file()):
      break
    if not isinstance(base, str) or not re.fullmatch(_CONFIG_KEY, base) or base in found:
      raise InputError(
        f"{path}: base_config is {base!r}, expected another file beside it, its name of letters, digits and . _ -: "
        "config maps have no folders"
      )
    path, name = path.parent / base, base
  if (size := sum(len(text.encode()) for text in found.values())) > _CONFIG_BYTES:
    raise InputError(f"{first}: {size} bytes, expected at most {_CONFIG_BYTES}: config maps hold no more")
  devices = topology.devices
  if args.config is None and _STORED_GIB / devices > _LIMIT_GIB:
    notes.append(
      f"NOTE: the whole K3 takes {_STORED_GIB / devices:.0f} GiB on each of {devices} devices of {_LIMIT_GIB}: "
      "this slice is for a smaller model; give its --config"
    )
  return tuple(found.items()), settings


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
  try:
    text = path.read_text(encoding="utf-8")
    settings = yaml.safe_load(text)
  except (OSError, UnicodeDecodeError) as error:
    raise InputError(f"--config {path} cannot be read: {error}") from error
  except (yaml.YAMLError, RecursionError) as error:
    raise InputError(f"--config {path} is no YAML: {error}") from error
  if not isinstance(settings, dict):
    raise InputError(f"--config {path} holds {type(settings).__name__}, expected lines of key: value")
  return text, settings


def mesh(topology: topologies.Topology, slices: int) -> dict[str, int]:
  """The mesh that docs/plan.md recommends: heads over up to 32 devices, rows over what is left, slices along rows."""
  devices = topology.devices
  tensor = max(n for n in range(1, _MOST_TENSOR + 1) if devices % n == 0 and _HEADS % n == 0)
  inside = {"tensor": tensor} if devices == tensor else {"attn_dp_expert": devices // tensor, "model": tensor}
  return ({"data": slices} if slices > 1 else {}) | inside


def _with_mesh(text: str, topology: topologies.Topology, slices: int) -> str:
  axes = ", ".join(f"{axis}: {size}" for axis, size in mesh(topology, slices).items())
  text, count = re.subn(r"^partition_mesh: .*$", f"partition_mesh: {{{axes}}}", text, flags=re.MULTILINE)
  assert count == 1, "configs/tpu7x-32.yml has one partition_mesh"
  shape = f"{topologies.ACCELERATOR}:{topology.name}"
  return f"# configs/tpu7x-32.yml with the mesh of {slices} x {shape}, {slices * topology.devices} devices.\n{text}"


if __name__ == "__main__":
  sys.exit(main())
