"""The architecture as data: one frozen dataclass, read from a released config.json or from MaxText's config.

Array axes, used in names and annotations throughout the package:

  B batch            D hidden              H heads              K, V key and value channels of a KDA head
  T tokens           Q query latent        C KV latent          N, R 128- and 64-wide parts of an MLA key (not rotated)
  W convolution taps E experts             S selected experts   L expert latent
  F expert MLP       M dense or shared MLP J AttnRes candidates X vocabulary

Lower case is one shard's part. The KDA state is always [..., K, V].
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal

from kimi_k3.errors import InputError
from kimi_k3.hf_keys import HARMLESS_KEYS, HARMLESS_WRAPPER_KEYS

MXFP4_GROUP = 32
PACKABLE_MODULES = ("experts", "latent", "shared_experts")
FP8_BLOCK = 128  # a scale is for this many inputs times this many outputs
# "dense": every matrix of a layer but the router and the routed experts, where it is not packed (convert/mapping.py).
FP8_MODULES = ("dense", "experts")
FLOAT32_KINDS = ("A_log", "conv1d", "dt_bias", "e_score_correction_bias", "o_norm")
ALWAYS_FLOAT32 = ("A_log", "dt_bias")
MLA_INNER_EPS = 1e-6  # of the norms on MLA's two latents, whatever rms_norm_eps is
_MAX_SIZE = 2**31 - 1  # what an index holds
_SHOWN_LAYERS = 100  # of those that no list names


KdaImplementation = Literal["portable", "tokamax_xla_chunked", "tokamax_mosaic", "tops"]
ExpertImplementation = Literal["reference", "decode_kernel", "grouped", "dropless"]
TRAINED_EXPERTS: tuple[ExpertImplementation, ...] = ("dropless",)  # those that have a gradient
StepImplementation = Literal["portable", "pallas"]
PrefillImplementation = Literal["portable", "flash"]
LatentDtype = Literal["bfloat16", "float8_e4m3fn"]


class LayerKind(enum.StrEnum):
  """What mixes tokens in a layer."""

  KDA = "kda"
  MLA = "mla"


@dataclasses.dataclass(frozen=True)
class _Key:
  """Where one field stands in a released text config. `k3_only` fields may be absent outside the K3 wrapper."""

  hf: str
  types: tuple[type, ...]
  nullable: bool = False
  k3_only: bool = False
  absent: Any = None


def _field(hf: str, *types: type, nullable: bool = False, k3_only: bool = False, absent: Any = None) -> Any:
  return dataclasses.field(metadata={"key": _Key(hf, types, nullable, k3_only, absent)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiK3Config:
  """Architecture of Kimi K3 and of Kimi-Linear: every difference between the two is a field, never a name.

  The metadata of each field names the key of the released `text_config` it is read from. No field has a
  default: what the checkpoint defines is never guessed.
  """

  hidden_size: int = _field("hidden_size", int)
  vocab_size: int = _field("vocab_size", int)
  num_layers: int = _field("num_hidden_layers", int)
  num_heads: int = _field("num_attention_heads", int)
  num_kv_heads: int = _field("num_key_value_heads", int)
  dense_mlp_dim: int = _field("intermediate_size", int)
  expert_mlp_dim: int = _field("moe_intermediate_size", int)
  expert_latent_dim: int | None = _field("routed_expert_hidden_size", int, nullable=True, k3_only=True)
  latent_moe_use_norm: bool = _field("latent_moe_use_norm", bool, k3_only=True, absent=False)
  first_k_dense_replace: int = _field("first_k_dense_replace", int)
  moe_layer_freq: int = _field("moe_layer_freq", int)
  num_experts: int = _field("num_experts", int)
  num_experts_per_token: int = _field("num_experts_per_token", int)
  num_shared_experts: int = _field("num_shared_experts", int)
  moe_renormalize: bool = _field("moe_renormalize", bool)
  routed_scaling_factor: float = _field("routed_scaling_factor", int, float)
  router_activation: str = _field("moe_router_activation_func", str)
  topk_method: str = _field("topk_method", str, k3_only=True, absent="noaux_tc")
  num_expert_group: int = _field("num_expert_group", int)
  topk_group: int = _field("topk_group", int)
  use_grouped_topk: bool = _field("use_grouped_topk", bool)
  q_lora_rank: int | None = _field("q_lora_rank", int, nullable=True)
  kv_lora_rank: int = _field("kv_lora_rank", int)
  qk_nope_head_dim: int = _field("qk_nope_head_dim", int)
  qk_rope_head_dim: int = _field("qk_rope_head_dim", int)
  v_head_dim: int = _field("v_head_dim", int)
  mla_use_nope: bool = _field("mla_use_nope", bool)
  mla_use_output_gate: bool = _field("mla_use_output_gate", bool, k3_only=True, absent=False)
  kda_num_heads: int = _field("linear_attn_config.num_heads", int)
  kda_head_dim: int = _field("linear_attn_config.head_dim", int)
  kda_conv_width: int = _field("linear_attn_config.short_conv_kernel_size", int)
  kda_gate_lower_bound: float | None = _field(
    "linear_attn_config.gate_lower_bound", int, float, nullable=True, k3_only=True
  )
  kda_full_rank_gate: bool = _field("linear_attn_config.use_full_rank_gate", bool, k3_only=True, absent=False)
  kda_layers: tuple[int, ...] = _field("linear_attn_config.kda_layers", list)
  full_attention_layers: tuple[int, ...] = _field("linear_attn_config.full_attn_layers", list)
  attn_res_block_size: int | None = _field("attn_res_block_size", int, nullable=True, k3_only=True)
  hidden_act: str = _field("hidden_act", str)
  situ_beta: float | None = _field("activation_situ_beta", int, float, nullable=True, k3_only=True)
  situ_linear_beta: float | None = _field("activation_situ_linear_beta", int, float, nullable=True, k3_only=True)
  rms_norm_eps: float = _field("rms_norm_eps", int, float)
  max_position_embeddings: int = _field("max_position_embeddings", int)
  tie_word_embeddings: bool = _field("tie_word_embeddings", bool)
  num_nextn_predict_layers: int = _field("num_nextn_predict_layers", int)
  bos_token_id: int = _field("bos_token_id", int)
  eos_token_id: int = _field("eos_token_id", int)
  pad_token_id: int = _field("pad_token_id", int)
  # How the weights are stored. Read off the tensors, not off config.json (see convert/storage.py).
  packed_modules: tuple[str, ...]
  fp8_modules: tuple[str, ...]
  float32_leaves: tuple[str, ...]

  def __post_init__(self) -> None:
    faults = [*_size_faults(self), *_layer_faults(self), *_support_faults(self), *_storage_faults(self)]
    if faults:
      raise InputError("; ".join(faults))

  @property
  def layer_kinds(self) -> tuple[LayerKind, ...]:
    """Kind of each layer, 0-based (the lists of the config are 1-based)."""
    kda = set(self.kda_layers)
    return tuple(LayerKind.KDA if i + 1 in kda else LayerKind.MLA for i in range(self.num_layers))

  @property
  def moe_layers(self) -> tuple[bool, ...]:
    """Whether each layer, 0-based, has routed experts rather than one dense MLP."""
    return tuple(i >= self.first_k_dense_replace and i % self.moe_layer_freq == 0 for i in range(self.num_layers))

  @property
  def expert_dim(self) -> int:
    """Width of an expert's input and output: the latent's, or the hidden size without a latent."""
    return self.hidden_size if self.expert_latent_dim is None else self.expert_latent_dim

  @property
  def shared_mlp_dim(self) -> int:
    """Width of the one MLP that holds all shared experts; 0 without any."""
    return self.expert_mlp_dim * self.num_shared_experts

  @property
  def num_snapshots(self) -> int:
    """AttnRes snapshots taken over the depth; 0 without attention residuals."""
    return 0 if self.attn_res_block_size is None else -(-self.num_layers // self.attn_res_block_size)

  @classmethod
  def from_hf(
    cls,
    config: Mapping[str, Any],
    *,
    packed_modules: tuple[str, ...],
    float32_leaves: tuple[str, ...],
    fp8_modules: tuple[str, ...] = (),
  ) -> KimiK3Config:
    """Returns the config that a released config.json describes.

    Args:
      config: The parsed file: K3's wrapper with `text_config`, or Kimi-Linear's flat form.
      packed_modules: Modules whose matrices are stored in MXFP4, out of PACKABLE_MODULES.
      float32_leaves: Kinds of leaves stored in float32, out of FLOAT32_KINDS.
      fp8_modules: Modules converted to float8_e4m3fn in blocks, out of FP8_MODULES. No release stores any so.

    Raises:
      InputError: naming every key that is unknown, missing, of a wrong type or of a value nobody can compute.
    """
    text, wrapped = text_config(config)
    values = _read_keys(text, wrapped)
    return cls(**values, packed_modules=packed_modules, fp8_modules=fp8_modules, float32_leaves=float32_leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeConfig:
  """How to compute, which the checkpoint leaves open.

  Attributes:
    dtype: Activations and matrix products.
    weight_dtype: Stored matrices, embeddings and norms that are not float32 leaves.
    precision: Matmul precision of XLA: "default", "high" or "highest".
    kda_implementation: Chunked KDA: "portable" (any length, both gates) or a named tokamax one.
    expert_implementation: Routed experts: "reference" (one active expert at a time, on any backend), "decode_kernel" (a
      TPU kernel for few tokens), "grouped" (tokamax's grouped matmul) or "dropless" (with a gradient, for training with
      experts in bfloat16 or float32, where the compiler partitions).
    prefill_expert_implementation: The same for chunks of prefill; only looked at in the manual partitioning.
    kda_step_implementation: One step of KDA in the manual partitioning: "portable" or "pallas".
    mla_step_implementation: One step of MLA there: "portable" or "pallas".
    mla_prefill_implementation: Prefill of MLA there: "portable" or "flash".
    interpret_kernels: Run Pallas kernels in interpret mode: for tests without a TPU.
    mla_cache_dtype: Of the latents of MLA there; None: `dtype`. See kimi_k3.cache.as_cached.
  """

  dtype: Any
  weight_dtype: Any
  precision: str
  kda_implementation: KdaImplementation
  expert_implementation: ExpertImplementation
  prefill_expert_implementation: ExpertImplementation = "reference"
  kda_step_implementation: StepImplementation = "portable"
  mla_step_implementation: StepImplementation = "portable"
  mla_prefill_implementation: PrefillImplementation = "portable"
  interpret_kernels: bool = False
  mla_cache_dtype: LatentDtype | None = None


def text_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
  """Returns the language model's part of a config.json and whether it stood in K3's multimodal wrapper."""
  if "text_config" not in config:
    return config, False
  unknown = sorted(set(config) - HARMLESS_WRAPPER_KEYS - HARMLESS_KEYS)
  if unknown:
    raise InputError(
      f"config.json: unknown key(s) {', '.join(unknown)} beside text_config: a new feature? Not supported"
    )
  text = config["text_config"]
  if not isinstance(text, Mapping):
    raise InputError(f"config.json: text_config is {type(text).__name__}, expected an object")
  for key in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"):
    if key in config and key in text and config[key] != text[key]:
      raise InputError(f"config.json: {key} is {config[key]!r} at the top and {text[key]!r} in text_config")
  return text, True


def _read_keys(text: Mapping[str, Any], wrapped: bool) -> dict[str, Any]:
  """Values by field name. Lists every unknown, missing and mistyped key."""
  faults, values, known = [], {}, {"linear_attn_config", "quantization_config", "model_max_length"}
  linear = text.get("linear_attn_config")
  if not isinstance(linear, Mapping):
    raise InputError(
      f"config.json: linear_attn_config is {linear!r}, expected an object with the KDA sizes and layer lists"
    )
  known_linear = set()
  for field in dataclasses.fields(KimiK3Config):
    key: _Key | None = field.metadata.get("key")
    if key is None:
      continue
    scope, name = (linear, key.hf.split(".")[1]) if "." in key.hf else (text, key.hf)
    (known_linear if "." in key.hf else known).add(name)
    known_as = key.hf
    if name == "max_position_embeddings" and name not in text and not wrapped:
      name, known_as = "model_max_length", f"{name} or model_max_length"  # Kimi-Linear's name for it
    if name not in scope:
      if key.k3_only and not wrapped:
        values[field.name] = key.absent
      else:
        faults.append(f"missing key {known_as}")
      continue
    values[field.name] = _typed(scope[name], key, faults)
  faults += [f"unknown key {k}" for k in sorted(set(text) - known - HARMLESS_KEYS)]
  faults += [f"unknown key linear_attn_config.{k}" for k in sorted(set(linear) - known_linear)]
  if faults:
    raise InputError(f"config.json: {'; '.join(faults)}")
  return values


def _typed(value: Any, key: _Key, faults: list[str]) -> Any:
  if fault := type_fault(key.hf, value, key):
    faults.append(fault)
    return value
  if isinstance(value, list):
    return tuple(value)
  return float(value) if float in key.types and type(value) is int else value


def type_fault(name: str, value: Any, key: _Key) -> str | None:
  """What is wrong with the type of a value, under the name given. Whole numbers are floats too; true is not 1."""
  if value is None and key.nullable:
    return None
  if isinstance(value, bool) != (key.types == (bool,)) or not isinstance(value, key.types):
    expected = " or ".join(t.__name__ for t in key.types) + (" or null" if key.nullable else "")
    return f"{name} is {'null' if value is None else repr(value)}, expected {expected}"
  if isinstance(value, list) and not all(type(v) is int for v in value):
    return f"{name} holds other things than layer numbers"
  return None


def _name(field: str) -> str:
  """The config.json key of a field, for messages."""
  return KimiK3Config.__dataclass_fields__[field].metadata["key"].hf


_POSITIVE = (
    "hidden_size", "vocab_size", "num_layers", "num_heads", "num_kv_heads", "dense_mlp_dim", "expert_mlp_dim",
    "expert_latent_dim", "moe_layer_freq", "num_experts", "num_experts_per_token", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kda_num_heads", "kda_head_dim", "attn_res_block_size",
    "rms_norm_eps", "max_position_embeddings", "routed_scaling_factor", "situ_beta", "situ_linear_beta",
)  # fmt: skip


def _size_faults(c: KimiK3Config):
  for field in _POSITIVE:
    value = getattr(c, field)
    if value is not None and not 0 < value < math.inf:
      yield f"{_name(field)} is {value}, expected a positive number"
    elif isinstance(value, int) and value > _MAX_SIZE:
      yield f"{_name(field)} is {value}, expected at most {_MAX_SIZE}"
  for field in ("first_k_dense_replace", "num_shared_experts"):
    if getattr(c, field) < 0:
      yield f"{_name(field)} is {getattr(c, field)}, expected 0 or more"
  if c.kda_conv_width < 2:
    yield f"{_name('kda_conv_width')} is {c.kda_conv_width}, expected 2 or more taps"
  if c.num_kv_heads != c.num_heads:
    yield f"num_key_value_heads is {c.num_kv_heads}, expected num_attention_heads = {c.num_heads}: MLA shares nothing"
  if c.num_experts_per_token > c.num_experts:
    yield f"num_experts_per_token is {c.num_experts_per_token}, more than num_experts = {c.num_experts}"
  for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
    if not 0 <= getattr(c, field) < c.vocab_size:
      yield f"{field} is {getattr(c, field)}, outside the vocabulary of {c.vocab_size}"


def _layer_faults(c: KimiK3Config):
  counts = collections.Counter((*c.kda_layers, *c.full_attention_layers))
  twice = sorted(i for i, count in counts.items() if count > 1)
  beyond = sorted(i for i in counts if not 1 <= i <= c.num_layers)
  # Counted lazily: num_hidden_layers may be any number at all.
  missing = list(itertools.islice((i for i in range(1, c.num_layers + 1) if i not in counts), _SHOWN_LAYERS))
  if missing or twice or beyond:
    yield (
      f"linear_attn_config.kda_layers and full_attn_layers must cover layers 1 to num_hidden_layers = {c.num_layers} "
      f"exactly once: missing {missing}, twice {twice}, beyond {beyond}"
    )


def _support_faults(c: KimiK3Config):
  only = {
      "router_activation": "sigmoid", "topk_method": "noaux_tc", "num_expert_group": 1, "topk_group": 1,
      "mla_use_nope": True, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
  }  # fmt: skip
  for field, value in only.items():
    if getattr(c, field) != value:
      yield f"{_name(field)} is {getattr(c, field)!r}: only {value!r} is supported"
  if c.hidden_act not in ("situ", "silu"):
    yield f"hidden_act is {c.hidden_act!r}: only 'situ' and 'silu' are supported"
  if c.hidden_act == "situ" and c.situ_beta is None:
    yield "activation_situ_beta is missing, hidden_act 'situ' needs it"
  if c.kda_gate_lower_bound is not None and not -math.inf < c.kda_gate_lower_bound < 0:
    yield f"{_name('kda_gate_lower_bound')} is {c.kda_gate_lower_bound}, expected a negative number or null"
  if c.latent_moe_use_norm and c.expert_latent_dim is None:
    yield "latent_moe_use_norm is true without routed_expert_hidden_size: there is no latent to normalise"


def _storage_faults(c: KimiK3Config):
  stored = {"packed_modules": PACKABLE_MODULES, "fp8_modules": FP8_MODULES, "float32_leaves": FLOAT32_KINDS}
  for name, known in stored.items():
    value = getattr(c, name)
    unknown = sorted(set(value) - set(known))
    if unknown or list(value) != sorted(set(value)):
      yield f"{name} is {list(value)}, expected a sorted choice of {list(known)}"
  if not set(ALWAYS_FLOAT32) <= set(c.float32_leaves):
    yield f"float32_leaves is {list(c.float32_leaves)}: {' and '.join(ALWAYS_FLOAT32)} are always stored in float32"
  if both := sorted(set(c.packed_modules) & set(c.fp8_modules)):
    yield f"packed_modules and fp8_modules both name {', '.join(both)}: a matrix is stored in one way"
  if "latent" in c.packed_modules and c.expert_latent_dim is None:
    yield "packed_modules names latent, but there is no routed_expert_hidden_size"
  if "shared_experts" in c.packed_modules and not c.num_shared_experts:
    yield "packed_modules names shared_experts, but num_shared_experts is 0"
  latent = (_name("expert_latent_dim"), c.expert_latent_dim or 0)
  hidden = (_name("hidden_size"), c.hidden_size)
  expert = (_name("expert_mlp_dim"), c.expert_mlp_dim)
  inputs = {
    "experts": (hidden if c.expert_latent_dim is None else latent, expert),
    "latent": (hidden, latent),
    "shared_experts": (hidden, (f"{expert[0]} * {_name('num_shared_experts')}", c.shared_mlp_dim)),
  }
  for name, size in sorted({pair for module in c.packed_modules for pair in inputs.get(module, ())}):
    if size % MXFP4_GROUP:
      yield f"{name} is {size}, not a multiple of the MXFP4 group of {MXFP4_GROUP}"
