"""What a conversion will do, decided from headers alone: pure, so a full-size plan costs seconds and no data."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math

import ml_dtypes  # noqa: F401  (numpy learns the name bfloat16 from it)
import numpy as np

from kimi_k3 import layout
from kimi_k3.config import FP8_BLOCK, KimiK3Config
from kimi_k3.convert import mapping, storage
from kimi_k3.convert.index import Source
from kimi_k3.convert.transforms import Transform
from kimi_k3.errors import InputError

EXPERT_CHOICES = ("as-stored", "mxfp4", "fp8-block", "bf16")
DENSE_CHOICES = ("as-stored", "fp8-block")
_SAID = {
  "as-stored": "as-stored",
  "mxfp4": "rounded to MXFP4",
  "fp8-block": f"rounded to float8_e4m3fn, with a scale for each {FP8_BLOCK} x {FP8_BLOCK} block",
  "bf16": "decoded to bfloat16",
}
# Leaves that hold scales, not weights.
_SCALES = (Transform.SCALES, Transform.PACK_SCALES, Transform.FP8_SCALES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """What the user chose.

  Attributes:
    scan: Fold the layers into blocks; None folds them where they fold.
    experts: One of EXPERT_CHOICES.
    dense: One of DENSE_CHOICES.
  """

  scan: bool | None = None
  experts: str = "as-stored"
  dense: str = "as-stored"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """A conversion, ready to be carried out.

  Attributes:
    config: Of the result: its packed_modules and fp8_modules say how matrices will be stored.
    form: How the source stores its tensors.
    scan: Whether layers are folded.
    experts: The choice that counts: "as-stored" when the one on the command line changes nothing.
    dense: Likewise.
    leaves: Everything that will be written.
    fingerprint: Hex digest of the source's config.json and of every header.
  """

  config: KimiK3Config
  form: mapping.StoredForm
  scan: bool
  experts: str
  dense: str
  leaves: tuple[mapping.Leaf, ...]
  fingerprint: str

  @property
  def nbytes(self) -> int:
    """Size of all leaves."""
    return sum(leaf_bytes(leaf) for leaf in self.leaves)

  @property
  def num_parameters(self) -> int:
    """Weights of the language model: two a byte of packed codes, none for their scales."""
    return sum(_num_weights(leaf) for leaf in self.leaves)

  @property
  def options(self) -> dict[str, object]:
    """What decides the result besides the source, as conversion.json records it."""
    return {"scan": self.scan, "experts": self.experts, "dense": self.dense}


def make_plan(source: Source, options: Options) -> Plan:
  """Returns how to convert `source`.

  Raises:
    InputError: for a config nobody can compute, for any tensor that does not fit it, and for refused options.
  """
  _check_choices(options)
  packed, float32 = storage.storage(source)
  stored = KimiK3Config.from_hf(source.config, packed_modules=packed, float32_leaves=float32)
  experts = _choice_of_experts(options.experts, stored)
  config = _converted(stored, experts, options.dense)
  _check_expert_count(source, config)
  scan = options.scan if options.scan is not None else _folds(config)
  form = mapping.StoredForm(
    prefix=storage.text_prefix(source), packed_modules=packed, a_log_shape=_a_log_shape(source, config)
  )
  leaves = mapping.leaves(config, form, scan=scan)
  mapping.compare(leaves, storage.text_tensors(source))
  return Plan(
      config=config, form=form, scan=scan, experts=experts, dense=options.dense,
      leaves=leaves, fingerprint=fingerprint(source),
  )  # fmt: skip


def _choice_of_experts(choice: str, stored: KimiK3Config) -> str:
  """The choice, or "as-stored" where that is the same."""
  same = "mxfp4" if "experts" in stored.packed_modules else "bf16"
  return "as-stored" if choice == same or not any(stored.moe_layers) else choice


def _converted(stored: KimiK3Config, experts: str, dense: str) -> KimiK3Config:
  """The config of the result. It refuses, by their names, sizes that cannot be packed."""
  packed, fp8 = set(stored.packed_modules), {"dense"} if dense == "fp8-block" else set()
  if experts != "as-stored":
    packed.discard("experts")
    packed |= {"experts"} if experts == "mxfp4" else set()
    fp8 |= {"experts"} if experts == "fp8-block" else set()
  return dataclasses.replace(stored, packed_modules=tuple(sorted(packed)), fp8_modules=tuple(sorted(fp8)))


def fingerprint(source: Source) -> str:
  """Digest of config.json and of every tensor's name, dtype, shape and place. The data itself is not read."""
  digest = hashlib.sha256(source.config_bytes)
  for name in sorted(source.tensors):
    tensor = source.tensors[name]
    digest.update(f"\n{name}\0{tensor.dtype}\0{tensor.shape}\0{tensor.shard}\0{tensor.offset}".encode())
  return digest.hexdigest()


def leaf_bytes(leaf: mapping.Leaf) -> int:
  """Size of a leaf."""
  return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def summary(plan: Plan) -> str:
  """What --dry-run prints: the plan in a few lines."""
  by_dtype = collections.Counter()
  for leaf in plan.leaves:
    by_dtype[leaf.dtype] += leaf_bytes(leaf)
  c, kda = plan.config, len(plan.config.kda_layers)
  sizes = ", ".join(f"{dtype} {_human(nbytes)}" for dtype, nbytes in sorted(by_dtype.items()))
  lines = {
    "layers": f"{c.num_layers}: {kda} KDA, {c.num_layers - kda} MLA, {sum(c.moe_layers)} with {c.num_experts} experts",
    "parameters": f"{plan.num_parameters:,}",
    "packed": ", ".join(c.packed_modules) or "nothing",
    "float32": ", ".join(c.float32_leaves),
    "experts": _SAID[plan.experts],
    "dense": _SAID[plan.dense],
    "scan": _fold_summary(plan),
    "leaves": f"{len(plan.leaves)} from {sum(len(leaf.pieces) for leaf in plan.leaves):,} pieces",
    "bytes": f"{plan.nbytes:,} ({sizes})",
    "source": plan.fingerprint,
  }
  return "\n".join(f"{name:<11}{value}" for name, value in lines.items())


def _human(nbytes: int) -> str:
  size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
  while size >= 1024 and len(units) > 1:
    size /= 1024
    units.pop(0)
  return f"{size:.4g} {units[0]}"


def _fold_summary(plan: Plan) -> str:
  if not plan.scan:
    return "no"
  fold = layout.fold(plan.config)
  return f"{fold.num_lead} leading layers, {fold.num_blocks} blocks of {layout.BLOCK_LAYERS}, tail of {fold.num_tail}"


def _check_choices(options: Options) -> None:
  for flag, value, choices in (("experts", options.experts, EXPERT_CHOICES), ("dense", options.dense, DENSE_CHOICES)):
    if value not in choices:
      raise InputError(f"--{flag} {value}: unknown, expected one of {', '.join(choices)}")


def _check_expert_count(source: Source, config: KimiK3Config) -> None:
  """Before a table of all experts is made, which a wrong number could make larger than memory."""
  expected = config.num_experts * sum(config.moe_layers)
  if expected > len(source.tensors):
    raise InputError(
      f"config.json: num_experts is {config.num_experts} in {sum(config.moe_layers)} layers, the checkpoint holds only "
      f"{len(source.tensors)} tensors: do config.json and the shards belong together?"
    )


def _folds(config: KimiK3Config) -> bool:
  try:
    layout.fold(config)
  except InputError:
    return False
  return True


def _a_log_shape(source: Source, config: KimiK3Config) -> mapping.Shape:
  """The known form that most A_log tensors have, or the release's padded vector when none is in a known one."""
  heads, padded = config.kda_num_heads, max(config.kda_head_dim, config.kda_num_heads)
  known = ((padded,), (1, 1, heads, 1), (heads,))
  suffix = storage.FLOAT32_SUFFIXES["A_log"]
  shapes = (tensor.shape for name, tensor in source.tensors.items() if name.endswith(suffix))
  common = collections.Counter(shape for shape in shapes if shape in known).most_common(1)
  return common[0][0] if common else known[0]


def _num_weights(leaf: mapping.Leaf) -> int:
  if leaf.transform in _SCALES:
    return 0
  return math.prod(leaf.shape) * (2 if leaf.dtype == "uint8" else 1)
