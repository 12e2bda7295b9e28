"""What MaxText's trainer needs to know of this model: the optimizer of the selection bias, and the FLOPs of a step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import optax

from kimi_k3.config import TRAINED_EXPERTS
from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter.config import architecture
from kimi_k3.maxtext_keys import DECODER_BLOCK
from kimi_k3.training import record
from kimi_k3.training.bias import selection_bias_update
from kimi_k3.training.flops import training_flops

_SELECTION_BIAS, _LEARNT = "selection_bias", "learnt"


def with_selection_bias(upstream: Callable[..., optax.GradientTransformation]) -> Callable[..., Any]:
  """MaxText's maker of optimizers, whose result leaves this model's selection biases to their own rule.

  Adam would scale their step and weight decay would pull them to 0: they are no weights, and have no loss. With
  `routed_bias_update_rate` 0 they stay as they are.
  """

  @functools.wraps(upstream)
  def make(config: Any, *args: Any, **kwargs: Any) -> optax.GradientTransformation:
    optimizer = upstream(config, *args, **kwargs)
    if config.decoder_block.value != DECODER_BLOCK:
      return optimizer
    check_trainable(config)
    rate = config.routed_bias_update_rate
    rule = selection_bias_update(rate) if rate else optax.set_to_zero()
    expected = sum(architecture(config).moe_layers) > 0
    return optax.multi_transform(
      {_LEARNT: optimizer, _SELECTION_BIAS: rule}, functools.partial(_labels, expected=expected)
    )

  return make


def _labels(params: Any, *, expected: bool) -> Any:
  """Which rule each parameter follows. Raises RuntimeError if no selection bias is found where the model has one."""

  def label(path: Any, _: Any) -> str:
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return _SELECTION_BIAS if ("router", "bias") in itertools.pairwise(names) else _LEARNT

  labels = jax.tree_util.tree_map_with_path(label, params)
  if expected and _SELECTION_BIAS not in jax.tree.leaves(labels):
    raise RuntimeError("no router/bias among the parameters: the selection bias would be trained as a weight")
  return labels


def with_checks(upstream: Callable[[Any], None]) -> Callable[[Any], None]:
  """MaxText's check of a training config, before anything is made, which for this model checks what is ours too.

  The run's architecture is noted beside its steps; a run that goes on must have the same.
  """

  @functools.wraps(upstream)
  def validate(config: Any) -> None:
    upstream(config)
    if config.decoder_block.value == DECODER_BLOCK:
      check_trainable(config)
      if config.enable_checkpointing:
        _note_architecture(config)

  return validate


def _note_architecture(config: Any) -> None:
  from etils import epath

  run = epath.Path(config.base_output_directory) / config.run_name
  noted, model = run / record.NAME, architecture(config)
  if not noted.exists():
    if jax.process_index() == 0:
      run.mkdir(parents=True, exist_ok=True)
      noted.write_text(record.encode(model))
    return
  try:
    differing = record.differences(noted.read_text(), model)
  except ValueError as error:
    raise InputError(f"{noted}: {error}: damaged; remove it if the config is that of the run") from error
  if differing:
    raise InputError(
      f"{run} was begun with {'; '.join(differing)}: its steps are another model's; set these as they were, or another "
      "run_name"
    )


def with_flops(upstream: Callable[..., tuple[float, float, float]]) -> Callable[..., tuple[float, float, float]]:
  """MaxText's count of a step's TFLOPs on one device, which for this model is kimi_k3.training.flops."""

  @functools.wraps(upstream)
  def count(config: Any, log: bool = True) -> tuple[float, float, float]:
    if config.decoder_block.value != DECODER_BLOCK:
      return upstream(config, log)
    rows = config.per_device_batch_size * config.gradient_accumulation_steps
    flops = training_flops(architecture(config), config.max_target_length, rows)
    total, learnable, attention = (x / 1e12 for x in (flops.total, flops.learnable, flops.attention))
    if log:
      print(
        f"A training step: {total:.4g} TFLOPs on each device, {learnable / total:.1%} with weights and "
        f"{attention / total:.1%} in attention"
      )
    return total, learnable, attention

  return count


def check_trainable(config: Any) -> None:
  """Raises InputError, naming all of it, if a config of this model asks the trainer for what it does not do."""
  model = architecture(config)
  faults = []
  if packed := [*model.packed_modules, *model.fp8_modules]:
    faults.append(
      f"{', '.join(packed)} in a packed format, which has no gradient: set packed_modules=[] fp8_modules=[] "
      "override_model_config=true"
    )
  if any(model.moe_layers) and config.expert_implementation not in TRAINED_EXPERTS:
    faults.append(
      f"expert_implementation is {config.expert_implementation!r}, which has no gradient: set it to one of "
      f"{', '.join(TRAINED_EXPERTS)}"
    )
  if config.partitioning != "auto":
    faults.append(f"partitioning is {config.partitioning!r}: training needs 'auto'")
  for key, only in _ONLY_IN_TRAINING.items():
    value = getattr(config, key)
    value = getattr(value, "value", value)
    if value not in only:
      known = " or ".join("'none'" if x is None else repr(x) for x in only)
      faults.append(f"{key} is {value!r}: this model is trained with {known} only")
  lost = config.routed_bias_update_rate and "e_score_correction_bias" not in model.float32_leaves
  if any(model.moe_layers) and lost and config.weight_dtype != "float32":
    faults.append(
      f"routed_bias_update_rate is {config.routed_bias_update_rate}, and the selection bias is kept in "
      f"{config.weight_dtype}, which rounds such steps away: add e_score_correction_bias to float32_leaves"
    )
  if not config.packing and "mmap" in str(getattr(config, "grain_file_type", "")) and config.dataset_type == "grain":
    faults.append("packing is false, but mmap files hold several documents a row: set packing=true")
  if faults:
    raise InputError("; ".join(faults))


# Keys of MaxText's trainer that other models look at and this one would ignore: (key, values that mean what is done).
_ONLY_IN_TRAINING: dict[str, tuple[Any, ...]] = {
  "load_balance_loss_weight": (0.0,),
  "num_vocab_tiling": (1,),
  "remat_policy": ("full", None),  # as MaxText reads "none"; its other policies save by names that our layers lack
  "capacity_factor": (-1.0,),
  "use_random_routing": (False,),
  "record_internal_nn_metrics": (0,),
  "use_dpo": (False,),
  "te_moe_block": (False,),
}
