from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter.engine import Engine, checkpoint_path, concrete_rest


@pytest.fixture
def two_slots() -> Engine:
  """An engine without a model: what is refused is refused before one is asked."""
  engine = object.__new__(Engine)
  engine._engine = types.SimpleNamespace(max_concurrent_decodes=2)
  return engine


@pytest.mark.parametrize("slot", [-1, 2, 99])
def test_a_slot_that_does_not_exist_is_refused_as_it_would_be_clamped_onto_another_row(two_slots, slot):
  assert two_slots.num_slots == 2
  with pytest.raises(ValueError, match=f"slot {slot}: there are 2"):
    two_slots.prefill(slot, np.zeros(4, np.int32), 4)


@pytest.mark.parametrize("true_length", [0, -1, 5])
def test_a_true_length_that_cannot_be_is_refused(two_slots, true_length):
  with pytest.raises(ValueError, match=f"true_length {true_length} of 4 tokens"):
    two_slots.prefill(0, np.zeros(4, np.int32), true_length)


def test_there_is_no_model_without_a_checkpoint():
  assert checkpoint_path(types.SimpleNamespace(load_parameters_path="OUT/0/items")) == "OUT/0/items"
  with pytest.raises(InputError, match="load_parameters_path is empty"):
    checkpoint_path(types.SimpleNamespace(load_parameters_path=""))


def test_what_is_neither_parameter_nor_cache_becomes_an_array():
  rest = nnx.state(nnx.eval_shape(lambda: nnx.Dropout(0.1, rngs=nnx.Rngs(0))))
  leaves = jax.tree.leaves(concrete_rest(rest))
  assert len(leaves) == len(jax.tree.leaves(rest)) > 0
  assert all(isinstance(leaf, jax.Array) for leaf in leaves)
  assert {str(leaf.dtype) for leaf in leaves} == {"key<fry>", str(jnp.dtype("uint32"))}
