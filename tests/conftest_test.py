"""The suite's own set-up: what the fixtures promise, and that shape checking is on when it is asked for."""

from __future__ import annotations

import numpy as np
import pytest


def test_a_wrong_shape_raises_under_jaxtyping_packages(pytestconfig):
  if not pytestconfig.getoption("jaxtyping_packages"):
    pytest.skip("needs --jaxtyping-packages=kimi_k3,beartype.beartype, as make test gives it")
  import jax.numpy as jnp
  import jaxtyping

  from kimi_k3.kda.gate import decay_gate

  a, a_log, dt_bias = jnp.zeros((1, 2, 3, 4)), jnp.zeros(3), jnp.zeros((3, 4))
  assert decay_gate(a, a_log, dt_bias, lower_bound=-5.0).shape == a.shape
  with pytest.raises(jaxtyping.TypeCheckError):
    decay_gate(a, jnp.zeros(5), dt_bias, lower_bound=-5.0)


@pytest.mark.strict_ranks
def test_rank_promotion_raises_under_its_marker():
  import jax.numpy as jnp

  with pytest.raises(ValueError, match="rank"):
    jnp.zeros((2, 3)) + jnp.zeros(3)


def test_rank_promotion_passes_without_the_marker():
  import jax.numpy as jnp

  assert (jnp.zeros((2, 3)) + jnp.zeros(3)).shape == (2, 3)


def test_jax_computes_on_cpu_with_full_precision_products():
  import jax

  assert {device.platform for device in jax.devices()} == {"cpu"}
  assert jax.config.jax_default_matmul_precision == "highest"


def test_the_reference_reproduces_a_golden_case(k3_tiny, reference):
  checkpoint = reference.load_checkpoint(k3_tiny.checkpoint)
  logits = reference.forward(checkpoint, [k3_tiny.prompts[0]])["logits"][0]
  # float64 on both sides, stored in float32
  np.testing.assert_allclose(logits, k3_tiny.arrays["logits_0"], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", ["k3_tiny", "kimi_linear_tiny", "k3_hd128"])
def test_each_golden_case_has_its_prompts_and_continuations(name, request):
  case = request.getfixturevalue(name)
  assert [len(prompt) for prompt in case.prompts] == case.info["prompt_lengths"]
  assert [len(ids) for ids in case.greedy] == [32] * len(case.prompts)
  assert (case.checkpoint / "model.safetensors.index.json").is_file()


def test_equal_arguments_share_one_tiny_checkpoint(tiny_checkpoint):
  first = tiny_checkpoint("--layers", "5", "--seed", "3")
  assert tiny_checkpoint("--layers", "5", "--seed", "3") == first
  assert tiny_checkpoint("--layers", "6", "--seed", "3") != first
