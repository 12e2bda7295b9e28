"""The trainer's step for many devices: its state by shapes alone, and the answers of train_compile.

That the step compiles is in tests/aot/train_compile_test.py.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from kimi_k3.capacity import topology
from kimi_k3.capacity.oom import OutOfMemory
from kimi_k3.errors import InputError
from kimi_k3.resources import configs_dir
from kimi_k3.sharding import with_divisible_latents

GIB = 2**30
DEVICES = 1024


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One abstract array of the trainer's state; `cut` is among how many devices."""

  name: str
  size: int
  itemsize: int
  cut: int

  @property
  def bytes_here(self) -> int:
    return self.size // self.cut * self.itemsize


@pytest.fixture(scope="module")
def full_state() -> dict[str, list[Leaf]]:
  """Weights and moments of the optimizer in configs/train-full.yml, cut as its rules say."""
  import jax
  from flax import nnx
  from flax.linen.spmd import logical_to_mesh_axes
  from maxtext.optimizers import optimizers
  from maxtext.utils import maxtext_utils

  from kimi_k3.maxtext_adapter.engine import abstract_model
  from kimi_k3.maxtext_adapter.settings import read_config

  path = str(configs_dir() / "train-full.yml")
  config = read_config(path, ["attention=dot_product"])  # the backend here has no other
  sizes = {"fsdp": config.ici_fsdp_parallelism, "expert": config.ici_expert_parallelism}
  assert math.prod(sizes.values()) == DEVICES
  # The rules are those of 1024 devices, the model is made on the one that is here.
  single = read_config(path, ["attention=dot_product", "ici_fsdp_parallelism=1", "ici_expert_parallelism=1"])
  _, model = abstract_model(single, "train")
  params = nnx.state(model, nnx.Param)
  cuts: dict[str, int] = {}
  for keys, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, nnx.Variable)):
    spec = logical_to_mesh_axes(leaf.get_metadata()["out_sharding"], rules=config.logical_axis_rules)
    assert spec is not None
    cut = 1
    for length, axes in zip(leaf.shape, (*spec, *(None,) * len(leaf.shape)), strict=False):
      here = math.prod(sizes.get(a, 1) for a in ((axes,) if isinstance(axes, str) else axes or ()))
      assert length % here == 0, (keys, leaf.shape, spec)
      cut *= here
    cuts[_name(keys)] = cut

  def leaves(tree: Any) -> list[Leaf]:
    found = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
      name = _name(keys)
      param = next((p for p in cuts if name.endswith(p)), None)
      found.append(Leaf(name, math.prod(leaf.shape), np.dtype(leaf.dtype).itemsize, cuts[param] if param else 1))
    return found

  optimizer = optimizers.get_optimizer(config, maxtext_utils.create_learning_rate_schedule(config), model)
  moments = jax.eval_shape(optimizer.init, nnx.to_pure_dict(params))
  return {"weights": leaves(nnx.to_pure_dict(params)), "moments": leaves(moments)}


def _name(keys: Any) -> str:
  import jax

  return jax.tree_util.keystr(keys, simple=True, separator="/").removesuffix("/value")


def test_the_state_of_full_k3_is_six_bytes_a_parameter_and_16_gib_on_each_of_1024_devices(full_state):
  total = collections.Counter({kind: sum(x.size * x.itemsize for x in leaves) for kind, leaves in full_state.items()})
  assert total["weights"] == pytest.approx(2 * 2.7795e12, rel=1e-4)  # float32 leaves are 1e-5 of it
  assert total["moments"] == pytest.approx(2 * total["weights"], rel=1e-4)
  here = {kind: sum(x.bytes_here for x in leaves) / GIB for kind, leaves in full_state.items()}
  assert here == pytest.approx({"weights": 5.49, "moments": 10.95}, abs=0.01)


def test_no_matrix_of_full_k3_but_the_decays_second_is_whole_on_every_device(full_state):
  """Whole are vectors, taps, and `f_b_proj` [128, 96, 128], which tensor parallelism alone would cut: 0.66 GiB."""
  whole = [x for x in full_state["weights"] if x.cut == 1]
  kinds = {"/".join(x.name.split("/")[-2:]) for x in whole}
  assert kinds == {
    "f_b_proj/kernel", "attention/q_conv", "attention/k_conv", "attention/v_conv", "attention/A_log",
    "attention/dt_bias",
    "o_norm/scale", "input_norm/scale", "post_attention_norm/scale", "q_norm/scale", "kv_norm/scale", "norm/scale",
    "attention_res/norm", "attention_res/proj", "mlp_res/norm", "mlp_res/proj", "output_res/norm", "output_res/proj",
    "router/bias", "decoder_norm/scale",
  }  # fmt: skip
  assert 3 * sum(x.bytes_here for x in whole) < 0.8 * GIB
  partly = {"/".join(x.name.split("/")[-2:]): x.cut for x in full_state["weights"] if 1 < x.cut < DEVICES}
  assert partly == {"router/kernel": 16, "wq_b/kernel": 16, "wkv_b/kernel": 16}


LATENTS = {"q_lora": 1536, "kv_lora": 512}


def test_the_mla_latents_are_cut_by_the_axes_that_divide_them():
  rules = [("q_lora", ("fsdp", "expert")), ("kv_lora", ("fsdp", "expert")), ("embed", ("fsdp", "expert"))]
  found = with_divisible_latents(rules, LATENTS, {"fsdp": 64, "expert": 16})
  assert found == [("q_lora", ("fsdp",)), ("kv_lora", ("fsdp",)), ("embed", ("fsdp", "expert"))]
  assert with_divisible_latents(rules, LATENTS, {"fsdp": 64, "expert": 8}) == rules
  assert with_divisible_latents(rules, LATENTS | {"q_lora": 0}, {"fsdp": 64, "expert": 16})[0] == rules[0]


def test_a_rule_with_an_axis_of_unknown_size_stays():
  rules = [("q_lora", ("fsdp", "expert"))]
  assert with_divisible_latents(rules, LATENTS, {"expert": 1024}) == rules


def test_a_latent_that_nothing_would_cut_is_refused():
  with pytest.raises(InputError, match="q_lora is 1536 wide, which fsdp parallelism of 1024 does not divide"):
    with_divisible_latents([("q_lora", ("fsdp", "expert"))], LATENTS, {"fsdp": 1024, "expert": 1})


def taken(*, temp: float) -> topology.Memory:
  return topology.Memory(
    argument_bytes=16 * GIB, output_bytes=16 * GIB, alias_bytes=15 * GIB, temp_bytes=int(temp * GIB), code_bytes=0
  )


def test_a_step_that_fits_is_told_with_its_parts():
  from kimi_k3.maxtext_adapter.train_compile import judge

  assert judge(taken(temp=3), 94 * GIB, 1024) == (
    "the training step fits on 1024 devices: each holds 20.00 GiB of 94.00 "
    "(arguments 16.00, temporaries 3.00, new results 1.00, code 0.00)"
  )
  assert judge(taken(temp=3), None, 4).startswith("on 4 devices the training step takes 20.00 GiB of each")


def test_a_step_that_does_not_fit_is_refused_with_what_it_needs_has_and_lacks():
  from kimi_k3.maxtext_adapter.train_compile import judge, too_large

  with pytest.raises(InputError, match=r"each needs 100.00 GiB \(.*\) and has 94.00, over by 6.00: take more devices"):
    judge(taken(temp=83), 94 * GIB, 1024)
  line = too_large(OutOfMemory(needed_bytes=120 * GIB, limit_bytes=94 * GIB), 32)
  assert "does not fit on 32 devices: each needs at least 120.00 GiB and has 94.00, over by 26.00: take" in line


def test_what_the_compiler_refuses_for_memory_becomes_an_input_error():
  import types

  from kimi_k3.maxtext_adapter.train_compile import _judged

  said = (
    "Ran out of memory on HBM, the total memory required for HLO temporaries (1.04T) exceeds available HBM (94.74G)"
  )

  def jit_and_compile(func, mesh):  # noqa: ARG001 (named as upstream's)
    raise RuntimeError(said if func == "large" else "another fault")

  module = types.SimpleNamespace(jit_and_compile=jit_and_compile)
  mesh = types.SimpleNamespace(size=8)
  with _judged(module):
    with pytest.raises(InputError, match=r"8 devices: each needs at least 1064\.96 GiB and has 94\.74"):
      module.jit_and_compile("large", mesh=mesh)
    with pytest.raises(RuntimeError, match="another fault"):
      module.jit_and_compile("other", mesh)
  assert module.jit_and_compile is jit_and_compile
