"""How a checkpoint stores its language model: which modules are packed, which kinds of leaves are float32.

Decided by what is stored. The quantization_config of the release declares by exclusion and does not name everything
that is BF16, so it is checked one way only: what is packed must be declared so and must not be ignored.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kimi_k3.config import ALWAYS_FLOAT32, FLOAT32_KINDS, MXFP4_GROUP, text_config
from kimi_k3.convert.faults import listed, refuse_any
from kimi_k3.convert.index import Source, StoredTensor
from kimi_k3.errors import InputError

TEXT_PREFIX = "language_model."  # In K3's multimodal wrapper; a flat checkpoint has no prefix.
VISION_PREFIXES = ("vision_tower.", "mm_projector.")  # Not part of the text path: left where they are, by this rule.
WEIGHT_DTYPE = "bfloat16"
QUANTIZATION_FORMAT = "mxfp4-pack-quantized"

FLOAT32_SUFFIXES = {
  "A_log": ".self_attn.A_log",
  "conv1d": "_conv1d.weight",
  "dt_bias": ".self_attn.dt_bias",
  "e_score_correction_bias": ".gate.e_score_correction_bias",
  "o_norm": ".self_attn.o_norm.weight",
}
assert tuple(FLOAT32_SUFFIXES) == FLOAT32_KINDS

_PACKABLE = re.compile(
  r"model\.layers\.\d+\.block_sparse_moe\.(?:(?P<experts>experts\.\d+\.w[123])"
  r"|(?P<latent>routed_expert_(?:down|up)_proj)|(?P<shared_experts>shared_experts\.(?:gate|up|down)_proj))"
)
# What the stored codes and scales mean. Each field must be there with this value.
_QUANTIZED_WEIGHTS = {"group_size": MXFP4_GROUP, "num_bits": 4, "type": "float", "symmetric": True}
# What would change their meaning if it were set to anything else; older files leave some of it out.
_QUANTIZED_WEIGHTS_IF_SET = {
  "actorder": (None,),
  "block_structure": (None,),
  "dynamic": (False,),
  "scale_dtype": (None, "torch.uint8"),
  "strategy": ("group",),
  "zp_dtype": (None,),
}
_DECLARATION_IF_SET = {"kv_cache_scheme": (None,), "quant_method": ("compressed-tensors",)}


def text_prefix(source: Source) -> str:
  """What the names of the language model's tensors start with."""
  return TEXT_PREFIX if text_config(source.config)[1] else ""


def text_tensors(source: Source) -> dict[str, StoredTensor]:
  """The tensors the text path must account for, by stored name: all but the vision tensors of a wrapper."""
  if not text_prefix(source):
    return dict(source.tensors)
  return {name: tensor for name, tensor in source.tensors.items() if not name.startswith(VISION_PREFIXES)}


def storage(source: Source) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns (packed modules, kinds of float32 leaves) of the stored language model, both sorted.

  Raises:
    InputError: naming every tensor that is packed where nothing is packed, packed unlike the rest of its module,
      without its other half, or declared otherwise by quantization_config, and every tensor in float32 (or not)
      against the rule of its kind; and if the weight dtype is not bfloat16.
  """
  prefix, tensors = text_prefix(source), text_tensors(source)
  _check_weight_dtype(source.config)
  # A dict rather than a set: messages list the tensors in the order of the files.
  stems = {name.removesuffix(".weight_packed"): None for name in tensors if name.endswith(".weight_packed")}
  refuse_any(
    [*_half_packed(tensors, stems), *_mixed_modules(tensors, stems, prefix)],
    "a packed matrix is one weight_packed and one weight_scale, for all matrices of experts, latent or shared_experts",
  )
  if stems:
    _check_quantization(source.config, stems, prefix)
  packed = {module for stem in stems if (module := _module(stem, prefix))}
  return tuple(sorted(packed)), _float32_kinds(tensors, wrapped=bool(prefix))


def _check_weight_dtype(config: Mapping[str, Any]) -> None:
  scopes = (config, text_config(config)[0])
  found = {str(scope[key]) for scope in scopes for key in ("dtype", "torch_dtype") if scope.get(key) is not None}
  if found != {WEIGHT_DTYPE}:
    said = " and ".join(sorted(found)) or "missing"
    raise InputError(f"config.json: dtype is {said}: only {WEIGHT_DTYPE} weights are supported for now")


def _half_packed(tensors: Mapping[str, StoredTensor], stems: Mapping[str, None]) -> Iterator[str]:
  for stem in stems:
    if f"{stem}.weight_scale" not in tensors:
      yield f"{stem}.weight_packed: stored without {stem}.weight_scale"
    if f"{stem}.weight" in tensors:
      yield f"{stem}: stored both as weight_packed and as weight"
  for name in tensors:
    if name.endswith(".weight_scale") and (stem := name.removesuffix(".weight_scale")) not in stems:
      yield f"{name}: stored without {stem}.weight_packed"


def _module(stem: str, prefix: str) -> str | None:
  """The packable module that a matrix belongs to, or None."""
  match = _PACKABLE.fullmatch(stem, len(prefix)) if stem.startswith(prefix) else None
  return match.lastgroup if match else None


def _mixed_modules(tensors: Mapping[str, StoredTensor], stems: Mapping[str, None], prefix: str) -> Iterator[str]:
  """Packed matrices outside the packable modules, and the fewer ones of a module that is packed in part."""
  if not stems:
    return
  packed, plain = collections.defaultdict(list), collections.defaultdict(list)
  for stem in stems:
    packed[_module(stem, prefix)].append(stem)
  for name in tensors:
    if name.endswith(".weight") and (module := _module(stem := name.removesuffix(".weight"), prefix)):
      plain[module].append(stem)
  for stem in packed.pop(None, []):
    yield f"{stem}.weight_packed: packing is supported in experts, latent and shared_experts only"
  for module, held in packed.items():
    others = plain[module]
    odd, form = (held, "packed") if len(held) < len(others) else (others, "not packed")
    yield from (f"{stem}: {form}, unlike the other matrices of {module}" for stem in odd)


def _check_quantization(config: Mapping[str, Any], stems: Iterable[str], prefix: str) -> None:
  """What is packed must be declared as MXFP4 and must not be declared ignored."""
  declared = _quantization_config(config)
  faults = [f"quantization_config.{fault}" for fault in _declaration_faults(declared)]
  refuse_any(faults, f"config.json does not describe the packed weights: only {QUANTIZATION_FORMAT} is supported")
  ignored = list(_ignored(declared.get("ignore") or [], stems, prefix))
  refuse_any(ignored, "config.json and the shards are not of the same release")


def _quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """The quantization_config of the text part or, where others write it, of the top level."""
  scopes = {"text_config": text_config(config)[0], "the top level": config}
  held = {where: scope["quantization_config"] for where, scope in scopes.items() if scope.get("quantization_config")}
  values = list(held.values())
  if not values:
    raise InputError(
      "config.json: quantization_config is missing, but there are weight_packed tensors: wrong config.json?"
    )
  if any(value != values[0] for value in values):
    raise InputError("config.json: quantization_config of text_config and of the top level differ, expected one")
  if not isinstance(values[0], Mapping):
    raise InputError(f"config.json: quantization_config is {values[0]!r}, expected an object")
  return values[0]


def _declaration_faults(declared: Mapping[str, Any]) -> Iterator[str]:
  if declared.get("format") != QUANTIZATION_FORMAT:
    yield f"format is {declared.get('format')!r}, expected {QUANTIZATION_FORMAT!r}"
  yield from _if_set(declared, _DECLARATION_IF_SET, "")
  ignore = declared.get("ignore") or []
  if not isinstance(ignore, list) or not all(isinstance(pattern, str) for pattern in ignore):
    yield f"ignore is {str(ignore)[:80]}, expected a list of names and of patterns"
  groups = declared.get("config_groups")
  if not isinstance(groups, Mapping) or not groups:
    yield "config_groups is missing, expected the group of the packed weights"
    return
  for name, group in groups.items():
    group = group if isinstance(group, Mapping) else {}
    if group.get("format", QUANTIZATION_FORMAT) not in (None, QUANTIZATION_FORMAT):
      yield f"config_groups.{name}.format is {group['format']!r}, expected {QUANTIZATION_FORMAT!r}"
    for field in ("input_activations", "output_activations"):
      if group.get(field) is not None:
        yield f"config_groups.{name}.{field} is set, expected null: only weights are quantized"
    weights = group.get("weights")
    weights = weights if isinstance(weights, Mapping) else {}
    for field, expected in _QUANTIZED_WEIGHTS.items():
      if weights.get(field) != expected:
        yield f"config_groups.{name}.weights.{field} is {weights.get(field)!r}, expected {expected!r}"
    yield from _if_set(weights, _QUANTIZED_WEIGHTS_IF_SET, f"config_groups.{name}.weights.")


def _if_set(values: Mapping[str, Any], choices: Mapping[str, tuple], where: str) -> Iterator[str]:
  for field, allowed in choices.items():
    if field in values and not any(values[field] is a or values[field] == a for a in allowed):
      yield f"{where}{field} is {str(values[field])[:80]}, expected {' or '.join(str(a) for a in allowed)}"


def _ignored(patterns: Iterable[str], stems: Iterable[str], prefix: str) -> Iterator[str]:
  """Packed matrices that the ignore list exempts. An entry is a name, or a regex after `re:`."""
  patterns = list(patterns)
  exact = {pattern for pattern in patterns if not pattern.startswith("re:")}
  regexes = [(pattern, _compiled(pattern)) for pattern in patterns if pattern.startswith("re:")]
  for stem in stems:
    for pattern in exact.intersection((stem, stem.removeprefix(prefix))):
      yield f"{stem}.weight_packed: packed, but quantization_config.ignore names {pattern}"
    for pattern, regex in regexes:
      if regex.match(stem):
        yield f"{stem}.weight_packed: packed, but quantization_config.ignore exempts it by {pattern}"


def _compiled(pattern: str) -> re.Pattern[str]:
  try:
    return re.compile(pattern.removeprefix("re:"))
  except re.error as error:
    raise InputError(
      f"config.json: quantization_config.ignore: {pattern!r} is no regular expression ({error})"
    ) from error


def _float32_kinds(tensors: Mapping[str, StoredTensor], *, wrapped: bool) -> tuple[str, ...]:
  """The kinds stored in float32. K3 has all of them; a flat checkpoint at least A_log and dt_bias."""
  kinds: set[str] = set(FLOAT32_KINDS if wrapped else ALWAYS_FLOAT32)
  faults = []
  for kind, suffix in FLOAT32_SUFFIXES.items():
    by_dtype = collections.defaultdict(list)
    for name, tensor in tensors.items():
      if name.endswith(suffix):
        by_dtype[tensor.dtype].append(name)
    if kind not in kinds and set(by_dtype) == {"F32"}:
      kinds.add(kind)
    elif kind in kinds or set(by_dtype) not in (set(), {"BF16"}):
      faults += _odd_dtypes(kind, by_dtype, always=kind in kinds)
  if faults:
    raise InputError(
      f"{listed(faults)}: float32 leaves keep their dtype, a converted copy of the release cannot be used"
    )
  return tuple(sorted(kinds))


def _odd_dtypes(kind: str, by_dtype: Mapping[str, list[str]], *, always: bool) -> Iterator[str]:
  """The tensors of a kind whose dtype breaks its rule: always F32, or all F32 or all BF16."""
  usual = "F32" if always else max(("F32", "BF16"), key=lambda dtype: len(by_dtype.get(dtype, ())))
  rule = "F32" if always else f"{usual} as the other {kind} tensors"
  for dtype, names in by_dtype.items():
    if dtype != usual:
      yield from (f"{name}: stored as {dtype}, expected {rule}" for name in names)
