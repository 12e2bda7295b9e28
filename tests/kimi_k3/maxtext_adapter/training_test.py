"""What MaxText's trainer is told of this model: who moves the selection bias, what is refused, what a step counts."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter import register
from kimi_k3.maxtext_adapter.config import architecture
from kimi_k3.maxtext_adapter.settings import read_config
from kimi_k3.maxtext_adapter.training import check_trainable, with_selection_bias
from kimi_k3.training.flops import training_flops

TRAINED = (
  "model_name=kimi-k3-tiny", "packed_modules=[]", "override_model_config=true", "expert_implementation=dropless",
  "weight_dtype=float32", "dtype=float32",
)  # fmt: skip
RATE = 0.25


def config(*settings: str) -> Any:
  given = {setting.split("=", 1)[0]: setting for setting in (*TRAINED, *settings)}
  return read_config("configs/decode.yml", [*given.values()])


@pytest.fixture(scope="module")
def trained() -> Any:
  return config(f"routed_bias_update_rate={RATE}", "adam_weight_decay=0.5")


@pytest.fixture
def params() -> dict[str, Any]:
  return {"decoder": {"lead_1": {"mlp": {"router": {"bias": jnp.ones(4), "kernel": jnp.ones((2, 4))}}}}}


def _step(config: Any, params: Any, gradients: Any) -> Any:
  register()
  from maxtext.optimizers import optimizers

  optimizer = optimizers.get_optimizer(config, lambda _: 0.1)
  updates, _ = optimizer.update(gradients, optimizer.init(params), params)
  return optax.apply_updates(params, updates)["decoder"]["lead_1"]["mlp"]["router"]


def test_the_selection_bias_follows_its_rule_and_the_optimizer_has_the_rest(trained, params):
  loads = 1e-30 * jnp.asarray([3.0, -1.0, -1.0, -1.0])
  gradients = {"decoder": {"lead_1": {"mlp": {"router": {"bias": loads, "kernel": jnp.ones((2, 4))}}}}}
  after = _step(trained, params, gradients)
  # sign -1 for the expert with too many, 1 for the others, less their mean of 0.5
  np.testing.assert_allclose(after["bias"], 1 + RATE * (np.asarray([-1.0, 1.0, 1.0, 1.0]) - 0.5), rtol=1e-6)
  # Adam's first step is the learning rate, beside a decay of 0.5 of it
  np.testing.assert_allclose(after["kernel"], 1 - 0.1 * (1 + 0.5), rtol=1e-5)


def test_without_a_rate_the_bias_stays_whatever_the_optimizer_does(params):
  gradients = {"decoder": {"lead_1": {"mlp": {"router": {"bias": jnp.ones(4), "kernel": jnp.ones((2, 4))}}}}}
  after = _step(config("adam_weight_decay=0.5"), params, gradients)
  np.testing.assert_array_equal(after["bias"], np.ones(4))


def test_a_model_whose_bias_is_not_found_is_not_trained(trained):
  optimizer = with_selection_bias(lambda _: optax.sgd(0.1))(trained)
  with pytest.raises(RuntimeError, match="no router/bias among the parameters"):
    optimizer.init({"decoder": {"gate": {"bias": jnp.ones(4)}}})


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    ((), None),
    (("expert_implementation=reference",), "expert_implementation is 'reference', which has no gradient: set it to"),
    (("packed_modules=[shared_experts]",), "shared_experts in a packed format, which has no gradient: set packed_mod"),
    (("load_balance_loss_weight=0.1",), "load_balance_loss_weight is 0.1: this model is trained with 0.0 only"),
    (("remat_policy=minimal",), "remat_policy is 'minimal': this model is trained with 'full' or 'none' only"),
    (("remat_policy=none",), None),
    (("num_vocab_tiling=2",), "num_vocab_tiling is 2"),
    (
      ("weight_dtype=bfloat16", "routed_bias_update_rate=0.001", "float32_leaves=[A_log,dt_bias]"),
      "the selection bias is kept in bfloat16, which rounds such steps away: add e_score_correction_bias",
    ),
    (
      ("dataset_type=grain", "grain_file_type=mmap_npy", "packing=false", "grain_train_files=x|y"),
      "packing is false, but mmap files hold several documents a row",
    ),
  ],
)
def test_what_the_trainer_would_ignore_or_do_wrongly_is_refused(settings, said):
  read = config(*settings)
  if said is None:
    check_trainable(read)
  else:
    with pytest.raises(InputError) as refused:
      check_trainable(read)
    assert said in str(refused.value)


def test_maxtext_counts_the_flops_of_this_model(capsys):
  read = config("per_device_batch_size=2", "max_target_length=64", "gradient_accumulation_steps=3")
  from maxtext.utils import maxtext_utils

  flops = training_flops(architecture(read), 64, 6)
  total, learnable, attention = maxtext_utils.calculate_tflops_training_per_device(read)
  assert (total, learnable, attention) == (flops.total / 1e12, flops.learnable / 1e12, flops.attention / 1e12)
  assert "TFLOPs on each device" in capsys.readouterr().out


def test_a_run_notes_its_architecture_and_goes_on_with_no_other(tmp_path):
  register()
  from maxtext.utils import train_utils

  run = (f"base_output_directory={tmp_path}", "run_name=run", "enable_checkpointing=true", "steps=1")
  train_utils.validate_train_config(config(*run))
  train_utils.validate_train_config(config(*run, "learning_rate=0.5"))  # another optimizer is not another model
  with pytest.raises(
    InputError, match=r"was begun with attn_res_block_size 4 and not 2: its steps are another model's"
  ):
    train_utils.validate_train_config(config(*run, "attn_res_block_size=2"))
  (noted,) = (tmp_path / "run").iterdir()
  noted.write_text("{")
  with pytest.raises(InputError, match=r"kimi_k3_architecture.json: .*: damaged; remove it if the config is"):
    train_utils.validate_train_config(config(*run))


def test_all_faults_of_a_training_config_are_told_before_anything_is_made():
  register()
  from maxtext.utils import train_utils

  read = config("packed_modules=[shared_experts]", "remat_policy=minimal", "load_balance_loss_weight=0.1", "steps=1")
  with pytest.raises(InputError, match=r"shared_experts in a packed.*load_balance_loss_weight.*remat_policy"):
    train_utils.validate_train_config(read)


@pytest.mark.slow
def test_a_token_outside_the_vocabulary_makes_the_loss_nan(k3_nano, convert, float32_config):
  from kimi_k3.maxtext_adapter.engine import make_forward

  forward = make_forward(float32_config(convert(k3_nano.checkpoint, "--scan")))
  for token in (-1, 1024):
    logits = np.asarray(forward(np.array([1, 2, token, 3], np.int32), 4)[0])
    assert np.isnan(logits[2:]).all()
  assert np.isfinite(np.asarray(forward(np.array([1, 2, -1, 1024], np.int32), 2)[0])[:2]).all()  # in pads
