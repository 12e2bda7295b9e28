"""What a checkpoint is, from headers and metadata alone: counts, bytes, kinds, what a conversion would make of it.

`audit_source` counts a released checkpoint by what is stored, even where `plan.make_plan` refuses it: then the counts
help to see why. `audit_output` describes a finished conversion from its record and the metadata of its arrays. Neither
reads a tensor's data.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes  # noqa: F401  (numpy learns the name bfloat16 from it)
import numpy as np
import yaml

from kimi_k3 import checksums, layout, maxtext_keys, resources
from kimi_k3.config import KimiK3Config, text_config
from kimi_k3.convert import appear, plan, slicing, storage
from kimi_k3.convert.faults import MAX_LISTED
from kimi_k3.convert.index import INDEX_FILE, Source, StoredTensor
from kimi_k3.errors import InputError

# Names within the language model, in the order in which they are reported. Attention is told apart by its layer.
_LAYER = r"model\.layers\.\d+\."
_WEIGHT = r"\.weight(?:_packed|_scale)?"
_KINDS = {
  "embedding": r"model\.embed_tokens\.weight",
  "KDA attention": _LAYER + r"self_attn\.(?:A_log|dt_bias|o_norm\.weight|[qkv]_conv1d\.weight"
  rf"|(?:[qkvobg]|f_[ab]|g_[ab])_proj{_WEIGHT})",
  "MLA attention": _LAYER + r"self_attn\.(?:(?:q_a|kv_a)_layernorm\.weight"
  rf"|(?:q|q_a|q_b|kv_a|kv_b|g|o)_proj(?:_with_mqa)?{_WEIGHT})",
  "dense MLP": rf"{_LAYER}mlp\.(?:gate|up|down)_proj{_WEIGHT}",
  "router": _LAYER + r"block_sparse_moe\.gate\.(?:weight|e_score_correction_bias)",
  "routed experts": rf"{_LAYER}block_sparse_moe\.experts\.\d+\.w[123]{_WEIGHT}",
  "shared experts": rf"{_LAYER}block_sparse_moe\.shared_experts\.(?:gate|up|down)_proj{_WEIGHT}",
  "latent projections": rf"{_LAYER}block_sparse_moe\.routed_expert_(?:down|up)_proj{_WEIGHT}",
  "norms": rf"(?:{_LAYER}(?:input_layernorm|post_attention_layernorm|block_sparse_moe\.routed_expert_norm)|model\.norm)"
  r"\.weight",
  "attention residuals": rf"(?:{_LAYER}(?:self_attention|mlp)_res|model\.output_attn_res)_(?:norm|proj)\.weight",
  "head": r"lm_head\.weight",
}
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in _KINDS.items()}
VISION, UNKNOWN = "vision", "unknown"
KINDS = (*_KINDS, VISION, UNKNOWN)
_PACKABLE = {"routed experts": "experts", "latent projections": "latent", "shared experts": "shared_experts"}
_LAYER_NUMBER = re.compile(r"model\.layers\.(\d+)\.")
# One tensor that only this kind of attention has.
_KDA_MARK, _MLA_MARK = ".self_attn.A_log", ".self_attn.kv_a_proj_with_mqa."
_DENSE_MARK, _EXPERTS_MARK = ".mlp.", ".block_sparse_moe."

# The released K3, counted from its headers.
RELEASED = {
  "BF16 tensors": 1_954,
  "F32 tensors": 506,
  "U8 tensors": 494_592,
  "vision tensors": 168,
  "all tensors": 497_220,
  "packed pairs": 247_296,
}


@dataclasses.dataclass(frozen=True)
class Count:
  """How many tensors, and how many bytes of data they have."""

  tensors: int = 0
  bytes: int = 0

  def __add__(self, other: Count) -> Count:
    return Count(self.tensors + other.tensors, self.bytes + other.bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceAudit:
  """A released checkpoint by its headers.

  Attributes:
    directory: Where it is.
    shards: Files.
    total: Everything that is stored.
    by_dtype: The text path, by safetensors' name of the dtype.
    by_kind: Everything, by KINDS; those that occur.
    layers: 0-based numbers of the layers by "KDA", "MLA", "dense" and "experts", from the tensors that they have.
    experts: Routed experts by how many layers have so many, as strings, since JSON has no other keys.
    packed: MXFP4 pairs by module as storage.storage names it, "other" for those that nothing can read.
    packed_pairs: All of them.
    unpaired: Packed halves without the other half.
    float32: Tensors by kind of float32 leaf, and "other".
    skipped: What no conversion takes along, by the prefix of its names, which is the rule.
    unknown: The first names of no kind; `by_kind` has their number.
    parameters: Weights of the text path: two a byte of packed codes, none for scales or the padding of A_log.
    vision_parameters: Weights that are skipped.
    release: What differs from the released K3, empty when nothing does; None for a config of other sizes.
    fold: How the layers would fold; None when refused.
    refused: Why a conversion refuses it; None when it does not.
  """

  directory: str
  shards: int
  total: Count
  by_dtype: dict[str, Count]
  by_kind: dict[str, Count]
  layers: dict[str, list[int]]
  experts: dict[str, int]
  packed: dict[str, int]
  packed_pairs: int
  unpaired: int
  float32: dict[str, int]
  skipped: dict[str, Count]
  unknown: list[str]
  parameters: int
  vision_parameters: int
  release: list[str] | None
  fold: str | None
  refused: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputAudit:
  """A finished conversion by its record and the metadata of its arrays.

  Attributes:
    directory: Where it is.
    schema: Of the record.
    version: Of the package that made it.
    source: Of the record: directory, fingerprint and so on, without the list of shards.
    options: What it was made with.
    scanned: Whether layers are folded.
    stored: How modules are stored that are not bfloat16: "mxfp4" or "fp8-block" by module.
    by_dtype: Leaves and bytes by dtype.
    total: All leaves.
    faults: Where record and arrays disagree.
  """

  directory: str
  schema: Any
  version: str
  source: dict[str, Any]
  options: dict[str, Any]
  scanned: bool
  stored: dict[str, str]
  by_dtype: dict[str, Count]
  total: Count
  faults: list[str]


def is_output(directory: str | Path) -> bool:
  """Returns whether this is a conversion, finished or not, rather than a released checkpoint.

  Raises:
    InputError: if it is neither, or what a killed `slice` left.
  """
  if "://" in str(directory):  # Only conversions are read from buckets.
    return True
  appear.local(directory)  # Refuses what is no path at all.
  directory = Path(directory)
  if not directory.is_dir():
    _refuse_absent(directory)
  if (directory / slicing.MARKER).exists():
    raise InputError(f"{directory}: what an unfinished `kimi-k3 slice` left; run the same command again")
  own = (checksums.RECORD, "0", ".unfinished/plan.json", "plan.json")
  if any((directory / name).exists() for name in own):
    if (directory / "plan.json").exists() and not (directory / checksums.RECORD).exists():
      raise InputError(f"{directory}: an unfinished conversion; run the same `kimi-k3 convert` again")
    return True
  if (directory / "config.json").exists() or (directory / INDEX_FILE).exists() or any(directory.glob("*.safetensors")):
    return False
  raise InputError(
    f"{directory}: no checkpoint: neither config.json with *.safetensors (released) nor {checksums.RECORD} with "
    "0/items (converted)"
  )


def _refuse_absent(directory: Path) -> NoReturn:
  if directory.exists():
    raise InputError(f"{directory}: a file, expected the directory of a released checkpoint or of a conversion")
  partial = directory.with_name(f"{directory.name}.partial")
  if partial.is_dir():
    raise InputError(f"{directory}: an unfinished conversion or slice ({partial.name} beside it); run it again")
  raise InputError(f"{directory}: no such directory, expected a released checkpoint or a conversion")


def audit_source(source: Source) -> SourceAudit:
  """Returns what a released checkpoint holds, and whether it can be converted."""
  text, skipped = _split(source)
  prefix = storage.text_prefix(source) if _has_text_config(source) else ""
  named = {name.removeprefix(prefix): tensor for name, tensor in text.items()}
  layers = _layers(named)
  kinds = _kinds(named, set(layers["KDA"]))
  by_kind: collections.Counter[str] = collections.Counter(kinds.values())
  sizes = collections.Counter()
  for name, kind in kinds.items():
    sizes[kind] += named[name].nbytes
  by_kind[VISION], sizes[VISION] = len(skipped), sum(tensor.nbytes for tensor in skipped.values())
  packed, unpaired = _packed(kinds)
  fold, refused = _planned(source)
  result = SourceAudit(
    directory=str(source.directory),
    shards=len({tensor.shard for tensor in source.tensors.values()}),
    total=_count(source.tensors.values()),
    by_dtype=_by_dtype(text.values()),
    by_kind={kind: Count(by_kind[kind], sizes[kind]) for kind in KINDS if by_kind[kind]},
    layers=layers,
    experts=_experts(named),
    packed=packed,
    packed_pairs=sum(packed.values()),
    unpaired=unpaired,
    float32=_float32(text.values()),
    skipped={
      rule: _count(tensor for name, tensor in skipped.items() if name.startswith(rule))
      for rule in storage.VISION_PREFIXES
      if any(name.startswith(rule) for name in skipped)
    },
    unknown=[name for name, kind in kinds.items() if kind == UNKNOWN][:MAX_LISTED],
    parameters=_parameters(named, _kda_heads(source)),
    vision_parameters=sum(math.prod(tensor.shape) for tensor in skipped.values()),
    release=None,
    fold=fold,
    refused=refused,
  )
  return dataclasses.replace(result, release=_differences(result)) if _has_released_sizes(source) else result


def _has_text_config(source: Source) -> bool:
  """Whether `text_config` can be read: an audit goes on where a plan stops."""
  try:
    text_config(source.config)
  except InputError:
    return False
  return True


def _split(source: Source) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
  """Tensors of the text path, and those that are skipped, by stored name."""
  text = storage.text_tensors(source) if _has_text_config(source) else dict(source.tensors)
  return text, {name: tensor for name, tensor in source.tensors.items() if name not in text}


def _count(held: Iterable[StoredTensor]) -> Count:
  sizes = [tensor.nbytes for tensor in held]
  return Count(len(sizes), sum(sizes))


def _by_dtype(held: Iterable[StoredTensor]) -> dict[str, Count]:
  groups = collections.defaultdict(list)
  for tensor in held:
    groups[tensor.dtype].append(tensor)
  return {dtype: _count(groups[dtype]) for dtype in sorted(groups)}


def _layers(named: Mapping[str, StoredTensor]) -> dict[str, list[int]]:
  marks = {"KDA": _KDA_MARK, "MLA": _MLA_MARK, "dense": _DENSE_MARK, "experts": _EXPERTS_MARK}
  found: dict[str, set[int]] = {kind: set() for kind in marks}
  for name in named:
    if match := _LAYER_NUMBER.match(name):
      for kind, mark in marks.items():
        if mark in name:
          found[kind].add(int(match[1]))
  return {kind: sorted(layers) for kind, layers in found.items()}


def _kinds(named: Mapping[str, StoredTensor], kda: set[int]) -> dict[str, str]:
  """Kind of each tensor by name: `self_attn.g_proj.weight` names two things, told apart by the layer."""
  kinds = {}
  for name in named:
    match = _LAYER_NUMBER.match(name)
    if match and ".self_attn." in name:
      choices = ("KDA attention",) if int(match[1]) in kda else ("MLA attention",)
    else:
      choices = _PATTERNS
    kinds[name] = next((kind for kind in choices if _PATTERNS[kind].fullmatch(name)), UNKNOWN)
  return kinds


def _experts(named: Mapping[str, StoredTensor]) -> dict[str, int]:
  """Layers by their number of routed experts."""
  held: dict[str, set[str]] = collections.defaultdict(set)
  for name in named:
    layer, experts, rest = name.partition(".experts.")
    if experts:
      held[layer].add(rest.partition(".")[0])
  return {str(n): layers for n, layers in sorted(collections.Counter(len(held[layer]) for layer in held).items())}


def _packed(kinds: Mapping[str, str]) -> tuple[dict[str, int], int]:
  """Pairs of codes and scales by module, and the number of halves without the other."""
  codes = {name.removesuffix(".weight_packed") for name in kinds if name.endswith(".weight_packed")}
  scales = {name.removesuffix(".weight_scale") for name in kinds if name.endswith(".weight_scale")}
  modules = collections.Counter(_PACKABLE.get(kinds[f"{stem}.weight_packed"], "other") for stem in codes & scales)
  return dict(sorted(modules.items())), len(codes ^ scales)


def _float32(text: Iterable[StoredTensor]) -> dict[str, int]:
  counts: collections.Counter[str] = collections.Counter()
  for tensor in text:
    if tensor.dtype == "F32":
      suffixes = storage.FLOAT32_SUFFIXES.items()
      counts[next((kind for kind, suffix in suffixes if tensor.name.endswith(suffix)), "other")] += 1
  return dict(sorted(counts.items()))


def _kda_heads(source: Source) -> int | None:
  scope = text_config(source.config)[0] if _has_text_config(source) else {}
  linear = scope.get("linear_attn_config")
  heads = linear.get("num_heads") if isinstance(linear, Mapping) else None
  return heads if type(heads) is int else None


def _parameters(named: Mapping[str, StoredTensor], kda_heads: int | None) -> int:
  total = 0
  for name, tensor in named.items():
    size = math.prod(tensor.shape)
    if name.endswith(".weight_packed"):
      size *= 2
    elif name.endswith(".weight_scale"):
      size = 0
    elif name.endswith(_KDA_MARK) and kda_heads is not None:
      size = min(size, kda_heads)
    total += size
  return total


def _planned(source: Source) -> tuple[str | None, str | None]:
  """How `convert` would fold it, or why it would refuse it."""
  try:
    planned = plan.make_plan(source, plan.Options())
  except InputError as error:
    return None, " ".join(str(error).split())
  if not planned.scan:
    return "the layers do not fold", None
  fold = layout.fold(planned.config)
  blocks = f"{fold.num_blocks} blocks of {layout.BLOCK_LAYERS}"
  return f"{fold.num_lead} leading layers, {blocks}, tail of {fold.num_tail}", None


def _has_released_sizes(source: Source) -> bool:
  """Whether config.json describes the released K3, as the shipped config does."""
  shipped = yaml.safe_load((resources.configs_dir() / "models" / "kimi-k3.yml").read_text())
  released = maxtext_keys.from_maxtext(shipped)
  stored = {"packed_modules": released.packed_modules, "float32_leaves": released.float32_leaves}
  try:
    return KimiK3Config.from_hf(source.config, **stored) == released
  except InputError:
    return False


def _differences(audit: SourceAudit) -> list[str]:
  found = {f"{dtype} tensors": count.tensors for dtype, count in audit.by_dtype.items()}
  found |= {"vision tensors": audit.by_kind.get(VISION, Count()).tensors, "all tensors": audit.total.tensors}
  found["packed pairs"] = audit.packed_pairs
  names = [*RELEASED, *(name for name in found if name not in RELEASED)]
  return [
    f"{name}: {found.get(name, 0):,}, the release has {RELEASED.get(name, 0):,}"
    for name in names
    if found.get(name, 0) != RELEASED.get(name, 0)
  ]


def audit_output(out: str | Path) -> OutputAudit:
  """Returns what a finished conversion, at a local path or a URL, holds by its metadata.

  Raises:
    InputError: if it is unfinished, or if its record or the list of its arrays cannot be read.
  """
  from kimi_k3.convert import reader  # Late: TensorStore is slow to import, and released checkpoints need none.

  opened = reader.open_output(out)
  content = {name: opened.file(f"0/{name}") for name in ("items/_METADATA", "_CHECKPOINT_METADATA")}
  for name, data in content.items():
    if data is None:
      raise InputError(f"{out}: 0/{name} is missing: an unfinished conversion; run the same `kimi-k3 convert` again")
  tree, checkpoint = (_object_of(f"{out}/0/{name}", data or b"") for name, data in content.items())
  arrays = opened.arrays
  by_dtype: dict[str, Count] = collections.defaultdict(Count)
  for array in arrays.held.values():
    by_dtype[array.dtype] += Count(1, math.prod(array.shape) * _item_bytes(array.dtype))
  total = sum(by_dtype.values(), Count())
  record = opened.record
  faults = [*_array_faults(opened), *_listed_faults(tree, arrays.held), *opened.data_faults()]
  for what, said, found in (("leaves", record["leaves"], total.tensors), ("bytes", record["bytes"], total.bytes)):
    if said != found:
      faults.append(f"{checksums.RECORD} says {said} {what}, the arrays have {found}")
  custom = checkpoint.get("custom_metadata")
  scanned = custom.get("scan_layers") if isinstance(custom, Mapping) else None
  if scanned != opened.scan:
    faults.append(f"{checksums.RECORD} says scan is {opened.scan}, 0/_CHECKPOINT_METADATA says {scanned}")
  return OutputAudit(
    directory=str(out),
    schema=record["schema"],
    version=str(record.get("version")),
    source={key: value for key, value in record["source"].items() if key != "shards"},
    options=dict(opened.options),
    scanned=opened.scan,
    stored=dict.fromkeys(opened.config.packed_modules, "mxfp4") | dict.fromkeys(opened.config.fp8_modules, "fp8-block"),
    by_dtype=dict(sorted(by_dtype.items())),
    total=total,
    faults=faults,
  )


def _item_bytes(dtype: str) -> int:
  """Size of an element; 0 for a dtype that numpy does not know, which no leaf has."""
  try:
    return np.dtype(dtype).itemsize
  except TypeError:
    return 0


def _object_of(what: str, data: bytes) -> dict[str, Any]:
  try:
    value = json.loads(data)
  except (ValueError, RecursionError) as error:
    raise InputError(f"{what}: no JSON ({' '.join(str(error).split())}), convert again") from error
  if not isinstance(value, dict):
    raise InputError(f"{what}: holds a JSON {type(value).__name__}, expected an object; convert again")
  return value


def _array_faults(opened: Any) -> Iterator[str]:
  """Where the arrays are not those that record and config imply."""
  arrays = opened.arrays
  expected = {".".join(leaf.path): (tuple(leaf.shape), leaf.dtype) for leaf in opened.leaves}
  for name, (shape, dtype) in expected.items():
    array = arrays.held.get(name)
    if name in arrays.damaged:
      yield f"{name}: {arrays.damaged[name]}"
    elif array is None:
      yield f"{name}: missing, expected {dtype} {list(shape)}"
    elif (array.shape, array.dtype) != (shape, dtype):
      yield f"{name}: {array.dtype} {list(array.shape)}, expected {dtype} {list(shape)}"
    elif array.missing:
      yield f"{name}: {len(array.missing)} chunk(s) missing, {array.missing[0]} among them"
  yield from (f"{name}: unexpected, no leaf has that name" for name in arrays.held if name not in expected)
  yield from (f"{key}: a key of no array" for key in arrays.strays)


def _listed_faults(tree: Mapping[str, Any], held: Iterable[str]) -> Iterator[str]:
  """Where Orbax's list of arrays, by which a checkpoint is loaded, is not the list of those that are there."""
  entries = tree.get("tree_metadata")
  paths = [entry.get("key_metadata") for entry in entries.values()] if isinstance(entries, Mapping) else []
  names = {".".join(str(key.get("key")) for key in path[2:]) for path in paths if isinstance(path, list)}
  held = set(held)
  yield from (f"{name}: listed in 0/items/_METADATA, but there is no array" for name in sorted(names - held))
  yield from (f"{name}: not listed in 0/items/_METADATA" for name in sorted(held - names))
