"""The report of parameters that every device holds whole."""

from __future__ import annotations

import types

import pytest

MESH = types.SimpleNamespace(shape={"data": 2, "model": 4})


def leaves():
  import jax.numpy as jnp
  from jax.sharding import PartitionSpec as P

  return {
    "w": ((64, 128), jnp.bfloat16, P(None, "model")),
    "both": ((64, 128), jnp.float32, P(("data", "model"))),
    "codes": ((8, 64, 32), jnp.float4_e2m1fn, P("model", None, None)),
    "norm": ((128,), jnp.bfloat16, P()),
    "router": ((64, 32), jnp.float32, P(None, None)),
    "scalar": ((), jnp.float32, P()),
  }


def test_rows_are_those_that_no_axis_cuts_the_largest_first():
  from kimi_k3.capacity.replicated import report

  found = report(leaves(), MESH)
  assert [row.name for row in found.rows] == ["router", "norm", "scalar"]
  assert found.bytes == 64 * 32 * 4 + 128 * 2 + 4
  assert {leaf.name: leaf.cuts for leaf in found.leaves if leaf.cuts > 1} == {"w": 4, "both": 8, "codes": 4}


def test_shares_are_of_all_bytes_and_float4_takes_half_a_byte():
  from kimi_k3.capacity.replicated import report

  found = report(leaves(), MESH)
  everything = 64 * 128 * 2 + 64 * 128 * 4 + 8 * 64 * 32 // 2 + found.bytes
  assert found.share == pytest.approx(found.bytes / everything)
  assert found.device_bytes == 64 * 128 * 2 / 4 + 64 * 128 * 4 / 8 + 8 * 64 * 32 / 2 / 4 + found.bytes
  last = found.table().splitlines()[-1]
  assert last.startswith("3 of 6 parameters whole on each of 8 devices: 0.008 MiB, ")


def test_an_axis_of_one_device_cuts_nothing():
  import jax.numpy as jnp
  from jax.sharding import PartitionSpec as P

  from kimi_k3.capacity.replicated import report

  mesh = types.SimpleNamespace(shape={"data": 1, "model": 4})
  assert len(report({"w": ((4,), jnp.bfloat16, P("data"))}, mesh).rows) == 1


def test_a_spec_that_the_mesh_or_the_shape_refuses_is_named():
  import jax.numpy as jnp
  from jax.sharding import PartitionSpec as P

  from kimi_k3.capacity.replicated import report
  from kimi_k3.errors import InputError

  wrong = {
    "a": ((4,), jnp.bfloat16, P("expert")),
    "b": ((6,), jnp.bfloat16, P("model")),
    "c": ((4,), jnp.bfloat16, P(None, "model")),
  }
  with pytest.raises(InputError, match=r"a: .*none of data, model; b: .*does not divide \(6,\); c: .*does not divide"):
    report(wrong, MESH)


def test_a_report_of_nothing_is_zero():
  from kimi_k3.capacity.replicated import report

  assert report({}, MESH).share == 0.0
