from __future__ import annotations

import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter import register_engine
from kimi_k3.maxtext_adapter.engine import Engine, abstract_model, checkpoint_path, concrete_rest
from kimi_k3.maxtext_adapter.settings import read_config
from kimi_k3.resources import configs_dir


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
  for given, found in (("OUT/0/items", str(Path("OUT/0/items").absolute())), ("gs://b/items", "gs://b/items")):
    assert checkpoint_path(types.SimpleNamespace(load_parameters_path=given)) == found
  with pytest.raises(InputError, match="load_parameters_path is empty"):
    checkpoint_path(types.SimpleNamespace(load_parameters_path=""))


def test_what_is_neither_parameter_nor_cache_becomes_an_array():
  rest = nnx.state(nnx.eval_shape(lambda: nnx.Dropout(0.1, rngs=nnx.Rngs(0))))
  leaves = jax.tree.leaves(concrete_rest(rest))
  assert len(leaves) == len(jax.tree.leaves(rest)) > 0
  assert all(isinstance(leaf, jax.Array) for leaf in leaves)
  assert {str(leaf.dtype) for leaf in leaves} == {"key<fry>", str(jnp.dtype("uint32"))}


def tiny(*settings: str):
  return read_config(str(configs_dir() / "decode.yml"), ["model_name=kimi-k3-tiny", *settings])


@pytest.mark.parametrize(
  "settings",
  [
    ("ici_fsdp_parallelism=3",),
    ("ici_tensor_parallelism=2",),
    ("ici_data_parallelism=-1", "ici_fsdp_parallelism=-1"),
  ],
)
def test_a_mesh_that_the_devices_do_not_make_is_refused_in_one_line(settings):
  if jax.device_count() > 1:
    pytest.skip("the settings are wrong for one device")
  for make in (lambda c: abstract_model(c, "train"), Engine):
    with pytest.raises(InputError, match=r"no mesh of 1 device\(s\) can be made: .*multiply to the number"):
      make(tiny(*settings))


@pytest.mark.parametrize("size", ["0", "-1", "0.5"])
def test_an_engine_without_a_slot_is_refused(size):
  with pytest.raises(InputError, match=f"per_device_batch_size is {size}: no row fits"):
    Engine(tiny(f"per_device_batch_size={size}"))


def test_prompts_packed_in_one_row_are_refused_as_they_would_share_a_state():
  register_engine()
  from kimi_k3.maxtext_adapter.max_engine import KimiMaxEngine

  engine = object.__new__(KimiMaxEngine)
  with pytest.raises(NotImplementedError, match=r"packed prefill \(prefill_concat\) is not supported"):
    engine.prefill_concat(params=None, padded_tokens=jnp.zeros(8, jnp.int32))
