from __future__ import annotations

import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kimi_k3.errors import InputError
from kimi_k3.maxtext_adapter.engine import (
  Engine,
  abstract_model,
  check_axes,
  check_slots,
  checkpoint_path,
  concrete_rest,
)
from kimi_k3.maxtext_adapter.settings import read_config
from kimi_k3.resources import configs_dir


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
    ("ici_fsdp_parallelism=4",),
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


@pytest.mark.parametrize("size", ["0", "-1", "0.5", "1.5"])
def test_an_engine_without_a_whole_number_of_slots_is_refused(size):
  with pytest.raises(
    InputError, match=rf"per_device_batch_size is {size}.*: {size} rows over 1 device\(s\); expected a whole"
  ):
    Engine(tiny(f"per_device_batch_size={size}"))


@pytest.mark.parametrize(
  ("slots", "parts", "fits"), [(4, 2, True), (3, 2, False), (1, 2, False), (6, 4, False), (8, 4, True)]
)
def test_slots_that_the_mesh_does_not_cut_evenly_are_refused(slots, parts, fits):
  rules = [("cache_batch", ("data", "fsdp"))]
  mesh = {"data": parts, "fsdp": 1, "tensor": 3}
  if fits:
    check_slots(slots, rules, mesh)
  else:
    with pytest.raises(InputError, match=rf"{slots} slots .* over {parts} parts of the mesh \(data {parts}\)"):
      check_slots(slots, rules, mesh)


def test_an_axis_of_a_leaf_that_no_rule_knows_is_refused_by_the_leafs_name():
  _, model = abstract_model(tiny(), "train")
  rules = tiny().logical_axis_rules
  check_axes((model,), rules)
  without = [rule for rule in rules if rule[0] != "q_lora_up_proj"]
  with pytest.raises(InputError, match=r"no rule for q_lora_up_proj \(of decoder\.[a-z0-9_.]*wq_a\.kernel\)"):
    check_axes((model,), without)
