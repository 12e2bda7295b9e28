"""From a YAML config, a topology and a mesh to what capacity planning works on."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kimi_k3.capacity.plan import Setup
from kimi_k3.capacity.topologies import Topology, default_mesh, nearest_mesh
from kimi_k3.config import KimiK3Config
from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter.config import architecture, compute_config, parse_mesh
from kimi_k3.maxtext_adapter.settings import explicit_settings, read_config
from kimi_k3.resources import configs_dir
from kimi_k3.spmd.cuts import Cuts
from kimi_k3.spmd.slices import parts_across

# Used where the config names none: what configs/tpu7x-32.yml names. Planned without kernels, a step would copy its
# caches and a chunk its experts, and nobody would run it so.
KERNELS: Mapping[str, str] = {
  "kda_implementation": "tokamax_mosaic",
  "kda_step_implementation": "pallas",
  "mla_step_implementation": "pallas",
  "mla_prefill_implementation": "flash",
  "expert_implementation": "decode_kernel",
  "prefill_expert_implementation": "grouped",
}
_SIZES = re.compile(r"(ici|dcn)_(\w+)_parallelism")


def read_setup(path: str, settings: Sequence[str], topology: Topology, mesh: str | None) -> Setup:
  """Returns the model of a config on a topology, ready to be planned.

  What the config leaves open is filled in: `partitioning: manual`, the kernels, a mesh. `chosen` of the result says so.

  Args:
    path: A YAML config; one of configs/models too, which names an architecture and nothing else.
    settings: key=value, which win over the file.
    topology: To plan for.
    mesh: "axis=n,axis=n"; None: the config's, or else one that fits the topology.

  Raises:
    InputError: if the config is wrong, or the mesh does not fit topology and model: naming the nearest that works.
  """
  explicit = explicit_settings(path, settings)
  if explicit.get("partitioning", "manual") != "manual":
    raise InputError(
      f"{path}: partitioning is {explicit['partitioning']!r}; programs are planned with the collectives written down: "
      "leave it out, or set partitioning=manual"
    )
  found = _read(path, explicit, settings, {"partitioning": "manual"})
  if str(found.dtype) != "bfloat16":
    raise InputError(
      f"{path}: dtype is {found.dtype}: programs are planned in bfloat16, as TPUs run them: leave dtype out"
    )
  config = architecture(found)
  chosen = {"partitioning": "manual", **kernels(config, topology)}
  sizes = _named_mesh(mesh, explicit, settings)
  if sizes:
    check_devices(config, sizes, topology)
  else:
    sizes = default_mesh(config, topology)
    chosen["partition_mesh"] = as_text(sizes)
  if "expert_implementation" in explicit:  # prefill's is the same then, as where it decodes
    del chosen["prefill_expert_implementation"]
  chosen = {key: value for key, value in chosen.items() if key not in explicit}
  cuts = Cuts.of(sizes, found.partition_rules)
  try:
    cuts.check_fits(config)
  except InputError as error:
    raise InputError(f"{error}; nearest that works on {topology.name}: {_nearest(config, sizes, topology)}") from error
  parts_across(sizes, cuts, topology.slices)
  implementations = {key: value for key, value in chosen.items() if key in KERNELS}
  given = [s for s in settings if not s.startswith("partition_mesh=")]
  if not any(_SIZES.fullmatch(key) for key in explicit):
    given.append(f"partition_mesh={as_text(sizes)}")
  return Setup(
    config=config,
    compute=dataclasses.replace(compute_config(found), **implementations),
    topology=topology,
    sizes=sizes,
    cuts=cuts,
    cache_cut=found.mla_cache_cut if "mla_cache_cut" in explicit else None,
    prefill_cut=found.prefill_cut,
    prefill_chunk=found.prefill_chunk,
    scan=found.scan_layers,
    rows=_rows(explicit, topology),
    context=explicit.get("max_target_length"),
    prompt=explicit.get("max_prefill_predict_length"),
    chosen=chosen,
    builder=functools.partial(_build, path, explicit, given, chosen),
  )


def _build(path: str, explicit: Mapping[str, Any], settings: Sequence[str], chosen: Mapping[str, Any], devices: Any):
  """The model that `decode` would make of these settings on these devices."""
  from kimi_k3.maxtext_adapter.spmd_engine import build_model

  left = {key: value for key, value in chosen.items() if key != "partition_mesh"}
  return build_model(_read(path, explicit, settings, left), devices)


def _read(path: str, explicit: Mapping[str, Any], settings: Sequence[str], derived: Mapping[str, Any]) -> Any:
  """MaxText's config of a file, which may stand on nothing, as one of configs/models: then on decoding's defaults."""
  text = Path(path).read_text()
  if re.search(r"^base_config\s*:", text, re.MULTILINE) or "decoder_block" not in explicit:
    return read_config(path, settings, **derived)
  with tempfile.TemporaryDirectory() as directory:
    whole = Path(directory) / Path(path).name
    whole.write_text(f"base_config: {configs_dir() / 'decode.yml'}\n{text}")
    try:
      return read_config(str(whole), settings, **derived)
    except InputError as error:
      raise InputError(str(error).replace(str(whole), path)) from error


def kernels(config: KimiK3Config, topology: Topology) -> dict[str, str]:
  """Returns the kernels to plan with: those that this architecture can use and these devices can run."""
  found = dict(KERNELS)
  if config.kda_gate_lower_bound is None:  # tokamax's take K3's bounded gate only
    found["kda_implementation"] = "portable"
  if "experts" not in config.packed_modules:
    found |= {"expert_implementation": "reference", "prefill_expert_implementation": "reference"}
  elif topology.kind == "v6e":  # no float4 in its Mosaic
    found["prefill_expert_implementation"] = "reference"
  return found


def check_devices(config: KimiK3Config, sizes: Mapping[str, int], topology: Topology) -> None:
  """Raises InputError if a mesh does not have the topology's number of devices, naming the nearest that does."""
  count = math.prod(sizes.values())
  if count != topology.devices:
    raise InputError(
      f"the mesh {as_text(sizes)} has {count} devices, {topology.name} has {topology.devices}: "
      f"nearest that works: --mesh {_nearest(config, sizes, topology)}"
    )


def as_text(sizes: Mapping[str, int]) -> str:
  """Returns a mesh as --mesh and partition_mesh= take it."""
  return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def _nearest(config: KimiK3Config, sizes: Mapping[str, int], topology: Topology) -> str:
  slices = topology.slices
  inside = nearest_mesh(config, dict(sizes), topology.devices // slices)
  return as_text(inside if slices == 1 else {"data": slices * inside.pop("data", 1), **inside})


def _named_mesh(mesh: str | None, explicit: Mapping[str, Any], settings: Sequence[str]) -> dict[str, int] | None:
  """The mesh that the command line or the config names. --mesh stands above a file, not above another argument."""
  on_command_line = any(s.startswith("partition_mesh=") for s in settings)
  axes = {key: value for key, value in explicit.items() if _SIZES.fullmatch(key) and value not in (1, None)}
  if mesh is not None:
    if others := sorted(axes) + (["partition_mesh"] if on_command_line else []):
      raise InputError(f"--mesh and {', '.join(others)} given: leave one of them out")
    try:
      return parse_mesh(mesh)
    except ValueError as error:
      raise InputError(f"--mesh: {error}") from error
  if named := explicit.get("partition_mesh"):
    try:
      return dict(parse_mesh(named))
    except ValueError as error:
      raise InputError(f"partition_mesh: {error}") from error
  if not axes:
    return None
  if any(not isinstance(value, int) or value < 1 for value in axes.values()):
    raise InputError(f"{', '.join(f'{k}={v}' for k, v in axes.items())}: give sizes of 1 or more, or --mesh axis=n")
  sizes: dict[str, int] = {}
  for key, value in axes.items():
    match = _SIZES.fullmatch(key)
    assert match is not None
    sizes[match[2]] = sizes.get(match[2], 1) * value
  return sizes


def _rows(explicit: Mapping[str, Any], topology: Topology) -> int | None:
  value = explicit.get("per_device_batch_size")
  rows = value * topology.devices if isinstance(value, int | float) else None
  return int(rows) if rows is not None and rows >= 1 and rows == int(rows) else None
