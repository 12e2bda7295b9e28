"""The table from logical to mesh axes: what it gives on the meshes in use, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
from jax.sharding import PartitionSpec

from kimi_k3 import sharding
from kimi_k3.errors import InputError
from kimi_k3.spmd.cuts import RULES, Cuts


@pytest.mark.parametrize(
  ("sizes", "rules", "expected"),
  [
    ({"tensor": 32}, None, {"heads": 32, "experts": 32, "width": 32, "vocab": 32, "rows": 1, "latent": 1}),
    ({"expert": 8, "tensor": 4}, None, {"heads": 32, "experts": 32, "expert_width": 1}),
    (
      {"expert": 8, "tensor": 4},
      {"experts": ["expert"], "expert_width": ["tensor"]},
      {"heads": 32, "experts": 8, "expert_width": 4},
    ),
    ({"data": 2, "fsdp": 2, "tensor": 8}, None, {"rows": 4, "heads": 8, "experts": 8}),
    ({"attn_dp_expert": 4, "model": 8}, None, {"rows": 4, "heads": 8, "experts": 32, "width": 8}),
    (
      {"data": 2, "attn_dp": 2, "model": 2, "expert": 2, "attn_dp_expert": 2},
      None,
      {"rows": 8, "heads": 4, "experts": 16},
    ),
    ({"model": 8}, {"latent": "model"}, {"latent": 8}),
    ({"stage": 1, "tensor": 1}, None, dict.fromkeys(RULES, 1)),
  ],
)
def test_the_meshes_of_maxtext_and_of_serving_are_in_the_table(sizes, rules, expected):
  cuts = Cuts.of(sizes, rules)
  assert {what: cuts.size(getattr(cuts, what)) for what in expected} == expected


@pytest.mark.parametrize(
  ("sizes", "rules", "message"),
  [
    ({"context": 2}, None, "mesh axis context cuts nothing"),
    ({"tensor": 2}, {"head": ["tensor"]}, "partition_rules: unknown head"),
    ({"tensor": 2}, {"heads": ["tenser"]}, "heads names tenser, which the mesh lacks"),
    ({"tensor": 2}, {"heads": ["tensor", "tensor"]}, "names an axis twice"),
    ({"tensor": 2}, {"heads": 3}, "heads is 3, expected a list of mesh axes"),
    ({"tensor": 2}, {"rows": ["tensor"]}, "tensor would cut both rows .* and heads"),
    ({"tensor": 2}, {"expert_width": ["tensor"]}, "tensor would cut both experts .* and expert_width"),
    ({"expert": 2, "tensor": 2}, {"latent": ["tensor"]}, "latent is cut by"),
    (
      {"tensor": 2},
      {key: [] for key in ("heads", "experts", "width", "vocab")},
      "axis tensor cuts nothing",
    ),
  ],
)
def test_what_the_table_cannot_mean_is_refused_by_name(sizes, rules, message):
  with pytest.raises(InputError, match=message):
    Cuts.of(sizes, rules)


@pytest.mark.parametrize(
  ("sizes", "rules", "changes", "message"),
  [
    ({"tensor": 3}, None, {}, "the number of MLA heads is 4, which 3 parts .tensor 3. do not divide"),
    ({"tensor": 32}, None, {}, "num_experts is 16, which 32 parts"),
    (
      {"expert": 2, "tensor": 2},
      {"experts": ["expert"], "expert_width": ["tensor"]},
      {},
      "the experts' width is 32, which 2 parts .* into whole groups of 32 that share a scale",
    ),
    ({"tensor": 2}, None, {"vocab_size": 257}, "the vocabulary is 257, which 2 parts"),
    ({"tensor": 64}, {"latent": ["tensor"]}, {}, "the experts' latent is 32, which 64 parts"),
  ],
)
def test_a_size_that_the_mesh_does_not_divide_is_an_error_naming_the_axis(k3_config, sizes, rules, changes, message):
  with pytest.raises(InputError, match=message):
    Cuts.of(sizes, rules).check_fits(dataclasses.replace(k3_config, **changes))


def test_a_spec_has_the_axes_of_each_name_and_nothing_is_guessed():
  cuts = Cuts.of({"expert": 4, "tensor": 2}, {"experts": ["expert"], "expert_width": ["tensor"]})
  axes = (None, sharding.EXPERT, sharding.EXPERT_EMBED, sharding.EXPERT_MLP)
  assert cuts.spec(axes) == PartitionSpec(None, ("expert",), None, ("tensor",))
  with pytest.raises(KeyError):
    cuts.spec(("a_new_axis",))
