"""MaxText's config class with the fields of this family, and the rules MaxText does not check for us."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

import pydantic
from maxtext.common.common_types import DecoderBlockType
from maxtext.configs import types

from kimi_k3.config import (
  TRAINED_EXPERTS,
  ComputeConfig,
  ExpertImplementation,
  KdaImplementation,
  KimiK3Config,
  LatentDtype,
  PrefillImplementation,
  StepImplementation,
)
from kimi_k3.errors import InputError
from kimi_k3.maxtext_keys import DECODER_BLOCK, from_maxtext, type_faults
from kimi_k3.sharding import check_rules, with_divisible_latents, with_own_rules

ModelNames = Literal["kimi-k3", "kimi-linear-48b-a3b", "kimi-k3-tiny", "kimi-k3-nano"]
MODEL_NAMES: tuple[str, ...] = get_args(ModelNames)

TOKENIZERS = {
  "kimi-k3": "moonshotai/Kimi-K3",
  "kimi-linear-48b-a3b": "moonshotai/Kimi-Linear-48B-A3B-Instruct",
  "kimi-k3-tiny": "moonshotai/Kimi-K3",
  "kimi-k3-nano": "moonshotai/Kimi-K3",
}


def parse_mesh(value: Any) -> Any:
  """Returns the sizes of the mesh axes that "axis=n,axis=n" names; what is no text is left to the type check.

  Raises:
    ValueError: if the text names no sizes, or an axis twice.
  """
  if isinstance(value, dict) and (bad := [axis for axis, size in value.items() if type(size) is not int or size < 1]):
    raise ValueError(f"{', '.join(map(str, bad))}: expected a size of 1 or more, as in {{model: 8}} or 'model=8'")
  if not isinstance(value, str):
    return value
  pairs = [part.strip().partition("=") for part in value.split(",")]
  if not all(axis.isidentifier() and size.isdigit() and int(size) for axis, _, size in pairs):
    raise ValueError(f"found {value!r}, expected sizes of 1 or more as in model=8,expert=4")
  if len({axis for axis, _, _ in pairs}) < len(pairs):
    raise ValueError(f"{value!r} names an axis twice")
  return {axis: int(size) for axis, _, size in pairs}


def _decoder_block(name: Any) -> DecoderBlockType:
  return DecoderBlockType(name)


class KimiMaxTextConfig(types.MaxTextConfig):
  """MaxTextConfig plus what Kimi K3 needs. Other models go through it unchanged: their new fields stay None."""

  # Looked up when a config is read, so that it does not matter whether register() ran before this class was made.
  decoder_block: Annotated[DecoderBlockType, pydantic.PlainValidator(_decoder_block)] = pydantic.Field(
    DecoderBlockType.LLAMA2, description="The layers of the decoder."
  )
  model_name: types.ModelName | ModelNames = pydantic.Field("default", description="Name of the model's YAML.")
  expert_latent_dim: int | None = pydantic.Field(None, description="Width of the experts' latent; null: no latent.")
  latent_moe_use_norm: bool | None = pydantic.Field(None, description="RMSNorm on the sum of the routed experts.")
  moe_layer_freq: int | None = pydantic.Field(None, description="Every n-th layer past the dense ones has experts.")
  moe_renormalize: bool | None = pydantic.Field(None, description="Divide the chosen scores by their sum.")
  router_activation: str | None = pydantic.Field(None, description="'sigmoid'.")
  topk_method: str | None = pydantic.Field(None, description="'noaux_tc': the bias takes part in the choice only.")
  num_expert_group: int | None = pydantic.Field(None, description="1.")
  topk_group: int | None = pydantic.Field(None, description="1.")
  use_grouped_topk: bool | None = pydantic.Field(None, description="Without effect while there is one group.")
  mla_use_nope: bool | None = pydantic.Field(None, description="True: nothing is rotated.")
  mla_use_output_gate: bool | None = pydantic.Field(None, description="sigmoid(g_proj h) on the attention's output.")
  kda_num_heads: int | None = pydantic.Field(None, description="KDA heads.")
  kda_head_dim: int | None = pydantic.Field(None, description="Key and value channels of a KDA head.")
  kda_conv_width: int | None = pydantic.Field(None, description="Taps of the short convolutions.")
  kda_gate_lower_bound: float | None = pydantic.Field(None, description="Most negative log decay; null: softplus gate.")
  kda_full_rank_gate: bool | None = pydantic.Field(None, description="Output gate g_proj instead of g_a, g_b.")
  kda_layers: list[int] | None = pydantic.Field(None, description="1-based numbers of the KDA layers.")
  full_attention_layers: list[int] | None = pydantic.Field(None, description="1-based numbers of the MLA layers.")
  attn_res_block_size: int | None = pydantic.Field(None, description="Layers between AttnRes snapshots; null: none.")
  hidden_act: str | None = pydantic.Field(None, description="'situ' or 'silu'.")
  situ_beta: float | None = pydantic.Field(None, description="Bound of SiTU's gate branch.")
  situ_linear_beta: float | None = pydantic.Field(None, description="Bound of SiTU's linear branch; null: none.")
  bos_token_id: int | None = pydantic.Field(None, description="Start of a document.")
  eos_token_id: int | None = pydantic.Field(None, description="The token that ends generation.")
  pad_token_id: int | None = pydantic.Field(None, description="Padding.")
  packed_modules: list[str] | None = pydantic.Field(None, description="Modules whose matrices are stored in MXFP4.")
  fp8_modules: list[str] | None = pydantic.Field(
    None, description="Modules whose matrices are stored in float8_e4m3fn, with a scale for each 128 x 128 block."
  )
  float32_leaves: list[str] | None = pydantic.Field(None, description="Kinds of leaves stored in float32.")
  kda_implementation: KdaImplementation = pydantic.Field(
    "portable", description="Chunked KDA, by name: never chosen by a failure of another."
  )
  expert_implementation: ExpertImplementation = pydantic.Field("reference", description="Routed experts, by name.")
  partitioning: Literal["auto", "manual"] = pydantic.Field(
    "auto", description="Who writes the collectives: the compiler, or kimi_k3.spmd. The keys below need 'manual'."
  )
  partition_mesh: Annotated[dict[str, int] | None, pydantic.BeforeValidator(parse_mesh)] = pydantic.Field(
    None,
    description="Mesh axes and their sizes, major first: {model: 8} or 'model=8,expert=4'; null: MaxText's own mesh.",
  )
  partition_rules: dict[str, Any] | None = pydantic.Field(
    None, description="What the mesh axes cut, where it is not the default (kimi_k3.spmd.cuts.RULES)."
  )
  mla_cache_cut: Literal["sequence", "batch"] = pydantic.Field(
    "sequence", description="How the devices of a row share its MLA latents: by tokens, for few rows, or by rows."
  )
  mla_cache_dtype: LatentDtype | None = pydantic.Field(
    None, description="Of the MLA latents: float8_e4m3fn takes half of bfloat16; null: dtype."
  )
  prefill_cut: Literal["sequence", "whole"] = pydantic.Field(
    "sequence", description="Whether the residual stream of prefill is cut by tokens."
  )
  prefill_chunk: int | None = pydantic.Field(
    None, gt=0, strict=True, description="Tokens of a prompt that are run at a time; null: all."
  )
  prefill_rows: int = pydantic.Field(
    1,
    gt=0,
    strict=True,
    description="Waiting prompts of one padded length that are run together, at most: in one program, which reads the "
    "weights once.",
  )
  prefill_expert_implementation: ExpertImplementation | None = pydantic.Field(
    None, description="Routed experts in prefill; null: as in expert_implementation."
  )
  kda_step_implementation: StepImplementation = pydantic.Field("portable", description="One step of KDA, by name.")
  mla_step_implementation: StepImplementation = pydantic.Field("portable", description="One step of MLA, by name.")
  mla_prefill_implementation: PrefillImplementation = pydantic.Field(
    "portable", description="Attention of MLA over a chunk, by name."
  )
  interpret_kernels: bool = pydantic.Field(
    False, description="Run Pallas kernels in interpret mode: a test of theirs without a TPU, very slow."
  )
  decode_sampling_seed: int = pydantic.Field(0, description="Of the draws when decode_sampling_strategy is weighted.")

  @pydantic.model_validator(mode="before")
  @classmethod
  def check_as_written(cls, data: Any) -> Any:
    """Names values of a wrong type, and axes this model cannot be cut along, before MaxText computes with them."""
    if isinstance(data, dict) and data.get("decoder_block") == DECODER_BLOCK:
      if faults := type_faults(data):
        raise ValueError("; ".join(faults))
      given = [f"{kind}_{axis}_parallelism" for kind in ("ici", "dcn") for axis in _NOT_SUPPORTED_PARALLELISM]
      if faults := [f"{key} is {data[key]}" for key in given if data.get(key, 1) not in (1, None)]:
        raise ValueError(f"{'; '.join(faults)}: not supported by this model, set it to 1")
      if fault := _batch_fault(data):
        raise ValueError(fault)
      if rules := data.get("logical_axis_rules"):
        return data | {"logical_axis_rules": with_own_rules(_with_divisible_latents(rules, data))}
    return data

  @pydantic.model_validator(mode="after")
  def check_kimi(self) -> KimiMaxTextConfig:
    """Refuses what would be computed wrongly or ignored in silence. A model of another family is left alone."""
    if self.decoder_block.value != DECODER_BLOCK:
      if self.model_name in MODEL_NAMES:
        raise ValueError(
          f"model_name is {self.model_name}, but its YAML was not found: decoder_block is {self.decoder_block.value}"
        )
      return self
    try:
      architecture(self)
      check_rules(self.logical_axis_rules, self.mesh_axes)
    except InputError as error:
      raise ValueError(str(error)) from error
    faults = [*_unsupported(self), *_mesh_faults(self)]
    if faults:
      raise ValueError("; ".join(faults))
    return self


def _with_divisible_latents(rules: Any, data: dict[str, Any]) -> Any:
  """The rules, for the mesh that the settings name; where its size is left to the devices (-1) they stay."""
  if data.get("partitioning") == "manual":
    return rules
  sizes = {}
  for axis in data.get("mesh_axes") or ():
    ici, dcn = (data.get(f"{kind}_{axis}_parallelism", 1) for kind in ("ici", "dcn"))
    if type(ici) is int and type(dcn) is int and ici > 0 and dcn > 0:
      sizes[axis] = ici * dcn
  latents = {"q_lora": data.get("q_lora_rank"), "kv_lora": data.get("kv_lora_rank")}
  try:
    return with_divisible_latents(rules, latents, sizes)
  except InputError as error:
    raise ValueError(str(error)) from error


def _batch_fault(data: dict[str, Any]) -> str | None:
  """What MaxText would say in words of training, or not at all."""
  rows, length = data.get("per_device_batch_size"), data.get("max_target_length")
  if isinstance(rows, str):  # YAML spells it .nan; "nan" is a word, which MaxText's types turn into the number
    rows = math.nan if rows.strip().lower().lstrip("+-") in ("nan", "inf", "infinity") else None
  if isinstance(rows, bool) or not isinstance(rows, int | float):
    return None
  if not math.isfinite(rows):
    return f"per_device_batch_size is {rows}, expected a number"
  if isinstance(length, int) and rows > 0 and rows * length % 1:
    return f"max_target_length is {length}: times per_device_batch_size {rows} it must be a whole number of tokens"
  return None


def architecture(config: Any) -> KimiK3Config:
  """Returns our frozen config, from MaxText's HyperParameters or from the pydantic object behind it."""
  pydantic_config = getattr(config, "_pydantic_config", config)
  return from_maxtext({name: getattr(pydantic_config, name) for name in type(pydantic_config).model_fields})


def compute_config(config: Any) -> ComputeConfig:
  """Returns how to compute, from MaxText's HyperParameters."""
  return ComputeConfig(
    dtype=config.dtype,
    weight_dtype=config.weight_dtype,
    precision=str(getattr(config.matmul_precision, "value", config.matmul_precision)),
    kda_implementation=config.kda_implementation,
    expert_implementation=config.expert_implementation,
    prefill_expert_implementation=config.prefill_expert_implementation or config.expert_implementation,
    kda_step_implementation=config.kda_step_implementation,
    mla_step_implementation=config.mla_step_implementation,
    mla_prefill_implementation=config.mla_prefill_implementation,
    interpret_kernels=config.interpret_kernels,
    mla_cache_dtype=config.mla_cache_dtype,
  )


# Switches of MaxText that would be parsed and ignored by this model, or mean something else: (key, the only value).
_ONLY = {
  "global_parameter_scale": 1,
  "attention_type": "mla",
  "mla_naive_kvcache": False,
  "use_mla_absorbed_mqa": False,
  "use_multimodal": False,
  "use_audio": False,
  "quantization": "",
  "quantize_kvcache": False,
  "use_indexer": False,
  "stack_prefill_result_cache": False,
  "enable_dropout": False,
  "use_untrainable_positional_embedding": False,
  "trainable_position_size": -1,
  "final_logits_soft_cap": None,
  "attn_logits_soft_cap": None,
  "normalize_embedding_logits": True,
  "fused_qkv": False,
  "fused_mlp": False,
  "use_qk_norm": False,
  "use_qk_clip": False,
  "param_scan_axis": 0,
  "mhc_expansion_rate": 1,
  "engram_layers": [],
  "enable_prefix_caching": False,
  "use_chunked_prefill": False,
}

_NOT_SUPPORTED_PARALLELISM = (
    "pipeline", "context", "context_usp_ulysses", "context_autoregressive", "sequence", "tensor_sequence", "diloco",
)  # fmt: skip


# Of MaxText's values, those that this model computes with.
_CHOICES = {
  "attention": ("autoselected", "dot_product", "flash"),
  "dtype": ("bfloat16", "float32"),
  "weight_dtype": ("bfloat16", "float32"),
}


# Keys that would be parsed and ignored where the compiler partitions: (key, the values that are known there).
_MANUAL_ONLY: dict[str, tuple[Any, ...]] = {
  "partition_mesh": (None,),
  "partition_rules": (None,),
  "mla_cache_cut": ("sequence",),
  "mla_cache_dtype": (None,),
  "prefill_cut": ("sequence",),
  "prefill_chunk": (None,),
  "prefill_rows": (1,),
  "expert_implementation": ("reference", *TRAINED_EXPERTS),
  "prefill_expert_implementation": (None,),
  "kda_step_implementation": ("portable",),
  "mla_step_implementation": ("portable",),
  "mla_prefill_implementation": ("portable",),
  "interpret_kernels": (False,),
}


def _unsupported(config: KimiMaxTextConfig):
  if config.partitioning == "auto":
    for key, known in _MANUAL_ONLY.items():
      if (value := getattr(config, key)) not in known:
        yield f"{key} is {value!r}, which partitioning 'auto' does not know: set partitioning=manual"
  for key, only in _ONLY.items():
    value = _plain(getattr(config, key))
    if value != only and (value or only):
      yield f"{key} is {value!r}: this model supports {only!r} only"
  for key, choices in _CHOICES.items():
    value = _plain(getattr(config, key))
    if value not in choices:
      yield f"{key} is {value!r}: this model supports {', '.join(map(repr, choices))} only"
  if config.original_max_position_embeddings != config.max_position_embeddings:
    yield "original_max_position_embeddings differs from max_position_embeddings: this model scales nothing by length"


def _plain(value: Any) -> Any:
  return getattr(value, "value", value)  # MaxText's enums


def _mesh_faults(config: KimiMaxTextConfig):
  """Sizes that the mesh would have to cut unevenly. An automatic size (-1) is checked when the mesh is made."""
  if config.partition_mesh:
    return  # another mesh, which is checked when it is made
  tensor, autoregressive, expert = (
    max(1, getattr(config, f"ici_{axis}_parallelism")) * max(1, getattr(config, f"dcn_{axis}_parallelism"))
    for axis in ("tensor", "autoregressive", "expert")
  )
  heads = tensor * autoregressive  # both cut the heads
  for key in ("base_num_query_heads", "kda_num_heads"):
    if getattr(config, key) % heads:
      yield f"{key} is {getattr(config, key)}, which tensor parallelism of {heads} does not divide"
  if expert > 1 and config.num_experts % expert:
    yield f"num_experts is {config.num_experts}, which expert parallelism of {expert} does not divide"
