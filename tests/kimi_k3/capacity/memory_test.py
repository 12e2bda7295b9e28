"""The quick estimate of memory against the model's own bytes and against the compiler's figures."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kimi_k3.errors import InputError

GIB = 2**30
COMPILED = json.loads((Path(__file__).parent / "compiled.json").read_text())
WHOLE = [name for name, point in COMPILED.items() if not point["layers"]]
ERROR = 0.02  # of a program's HBM: what --quick promises


@functools.cache
def k3():
  """The architecture of K3 whole."""
  from kimi_k3.maxtext_keys import from_maxtext
  from kimi_k3.resources import configs_dir

  return from_maxtext(yaml.safe_load((configs_dir() / "models" / "kimi-k3.yml").read_text()))


def cuts_of(mesh, rules=None):
  from kimi_k3.spmd.cuts import Cuts

  return Cuts.of(mesh, rules)


TP32 = {"tensor": 32}


def estimate(point):
  """The estimate of a stored point."""
  from kimi_k3.capacity import memory, topologies

  cuts = cuts_of(point["mesh"], point["rules"])
  kind = topologies.parse_topology(point["topology"]).device_kind
  if point["program"] == "decode":
    return memory.estimate_decode(k3(), cuts, **point["sizes"], device_kind=kind)
  return memory.estimate_prefill(k3(), cuts, **point["sizes"], prefill_cut="sequence", device_kind=kind)


@pytest.mark.parametrize("name", WHOLE)
def test_an_estimate_is_within_two_percent_of_the_compiled_hbm(name, capsys):
  point = COMPILED[name]
  found, compiled = estimate(point).total_bytes, point["memory"]["total_bytes"]
  with capsys.disabled():
    print(f"\n{name}: {found / GIB:.3f} GiB, compiled {compiled / GIB:.3f}, {found / compiled - 1:+.2%}", end="")
  assert abs(found / compiled - 1) <= ERROR


@pytest.mark.parametrize("name", WHOLE)
def test_arguments_are_the_compilers_to_a_thousandth_and_new_results_too(name):
  point = COMPILED[name]
  found, compiled = estimate(point), point["memory"]
  assert abs(found.argument_bytes / compiled["argument_bytes"] - 1) <= 1e-3  # of tiles that are not modelled
  new = compiled["output_bytes"] - compiled["alias_bytes"]
  assert abs(found.output_bytes - new) <= 2**17  # the table of the results


# Programs on tpu7x:2x2x4 compiled with FAST_COMPILE_OPTIONS, none of which made a constant: GiB of arguments and of
# temporaries, to the digits of docs/sharding.md. A reduction that the TensorCore runs has its temporaries reused
# sooner: 1.35 GiB where the options of a real run take 1.84.
LATENT = {"latent": ["tensor"]}
EP8 = {"experts": ["expert"], "expert_width": ["tensor"]}
FAST = [
  (TP32, LATENT, (64, 8192, "batch"), 48.51, 0.049),
  ({"expert": 8, "tensor": 4}, EP8, (64, 8192, "batch"), 57.03, 0.047),
  ({"attn_dp_expert": 4, "model": 8}, None, (64, 8192, "batch"), 65.94, 0.040),
  (TP32, None, (40, 2**20, "sequence"), 90.05, 0.038),
  (TP32, LATENT, 32768, 47.29, 1.35),
  ({"expert": 8, "tensor": 4}, EP8, 32768, 55.82, 1.35),
  (TP32, None, 131072, 55.89, 7.83),
  ({"attn_dp_expert": 4, "model": 8}, None, 32768, 64.84, 4.72),
]


@pytest.mark.parametrize(("mesh", "rules", "sizes", "arguments", "temp"), FAST)
def test_the_other_layouts_are_within_two_percent_too(mesh, rules, sizes, arguments, temp):
  from kimi_k3.capacity import memory

  cuts = cuts_of(mesh, rules)
  if isinstance(sizes, tuple):
    batch, context, cut = sizes
    found = memory.estimate_decode(k3(), cuts, batch=batch, context=context, cache_cut=cut)
  else:
    found = memory.estimate_prefill(k3(), cuts, tokens=sizes, length=sizes, history=False, prefill_cut="sequence")
  assert abs(found.argument_bytes / GIB - arguments) <= 0.01  # the digits of the table
  assert abs((found.argument_bytes + found.temp_bytes) / GIB / (arguments + temp) - 1) <= ERROR


@pytest.mark.parametrize("program", ["decode", "prefill"])
def test_the_figures_are_of_three_topologies(program):
  assert len({point["topology"] for point in COMPILED.values() if point["program"] == program}) >= 3
  assert {point["libtpu"] for point in COMPILED.values()} == {"0.0.50.1"}


def test_weights_by_kind_are_those_of_the_models_leaves():
  from kimi_k3.capacity import memory, shapes

  cuts = cuts_of(TP32)
  leaves = shapes.parameters(k3(), cuts, expert_form="float4")
  found = memory.weights_by_kind(
    {name: (leaf.shape, leaf.dtype, math.prod(leaf.cuts)) for name, leaf in leaves.items()}
  )
  assert tuple(found) == memory.KINDS
  assert sum(found.values()) == sum(leaf.device_bytes for leaf in leaves.values())
  assert found["experts"] == 92 * 28 * 3 * 3584 * 3072 * 17 // 32  # 4 bits, and a byte for 32
  assert found["latent_projections"] == 92 * (2 * 7168 * 3584 + 3584) * 2
  assert found["dense_mlp"] == 3 * 7168 * 33792 * 2 // 32
  assert found["shared_experts"] == 92 * 3 * 7168 * 6144 * 2 // 32
  assert found["embedding"] == found["head"] == 7168 * 163840 * 2 // 32
  assert found["router"] == 92 * 896 * (7168 * 2 + 4)


@pytest.mark.parametrize("architecture", ["k3_config", "kimi_linear_config"])
def test_every_parameter_of_the_golden_models_has_a_kind(architecture, request):
  from kimi_k3.capacity import memory, shapes

  leaves = shapes.parameters(request.getfixturevalue(architecture), cuts_of({}), expert_form="stored")
  found = memory.weights_by_kind({name: (leaf.shape, leaf.dtype, 1) for name, leaf in leaves.items()})
  assert sum(found.values()) == sum(leaf.device_bytes for leaf in leaves.values())
  assert all(found[kind] > 0 for kind in ("experts", "kda", "mla", "dense_mlp", "router", "norms", "embedding", "head"))


def test_a_parameter_of_no_kind_is_an_error_and_an_ambiguous_one_too():
  from kimi_k3.capacity.memory import kind_of

  for name in ("decoder.lead_0.attention.rotary", "decoder.lead_0", "vision.patch", "decoder.lead_0.mlp.experts_"):
    with pytest.raises(InputError, match=re.escape(f"{name}: a parameter of no known kind")):
      kind_of(name)
  with pytest.raises(InputError, match="expected `names` with the layer's others"):
    kind_of("decoder.lead_1.mlp.up_proj.kernel")
  others = ["decoder.lead_0.mlp.gate_proj.kernel", "decoder.lead_1.mlp.router.kernel"]
  assert kind_of("decoder.lead_1.mlp.up_proj.kernel", others) == "latent_projections"
  assert kind_of("decoder.lead_0.mlp.up_proj.kernel", others) == "dense_mlp"


def test_numbers_that_other_modules_own_are_theirs():
  from kimi_k3.capacity import memory
  from kimi_k3.maxtext_adapter import spmd_engine
  from kimi_k3.moe import grouped, implementations, latent_moe
  from kimi_k3.spmd import model, programs

  assert memory.LATENT_TILE == spmd_engine.LATENT_TILE
  assert memory.TOKENS_AT_A_TIME == latent_moe._TOKENS_AT_A_TIME
  assert memory.GROUPED_ROWS == grouped.CHUNK_ROWS
  assert (memory.CACHE_CUTS, memory.PREFILL_CUTS) == (model.CACHE_CUTS, programs.PREFILL_CUTS)
  for kind, form in memory.EXPERT_FORMS.items():
    names = ["decode_kernel", "grouped" if kind == "TPU7x" else "reference"]
    assert implementations.shared_form(names, kind) == form


@pytest.mark.parametrize("tokens", [1, 31, 32, 4096, 4097, 8192, 100_000, 2**20])
@pytest.mark.parametrize("cut", ["sequence", "batch"])
def test_room_for_latents_is_what_the_engine_gives(tokens, cut, k3_config, float32_compute):
  import jax
  import numpy as np

  from kimi_k3.capacity.memory import latent_tokens
  from kimi_k3.maxtext_adapter.spmd_engine import cache_length
  from kimi_k3.spmd.model import SpmdModel

  cuts = cuts_of({"tensor": 2})
  mesh = jax.sharding.Mesh(np.array([jax.devices()[0]] * 2), ("tensor",))  # sizes need no second device
  model = SpmdModel(k3_config, float32_compute, mesh, cuts)
  parts = cuts.size(cuts.heads) if cut == "sequence" else 1
  assert latent_tokens(tokens, parts) == cache_length(model, tokens, cut=cut)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"batch": 48}, "a batch of 48 rows: the mesh cuts it into 32, the nearest that works is 64"),
    ({"batch": 0}, "the nearest that works is 32"),
    (
      {"batch": 3, "cache_cut": "sequence", "context": 1000},
      "a context of 1000 tokens: .* the nearest that works is 992",
    ),
    ({"cache_cut": "rows"}, "mla_cache_cut is 'rows', expected one of: sequence, batch"),
    ({"device_kind": "TPU v4"}, "device kind 'TPU v4', expected one of: TPU7x, TPU v6 lite"),
    ({"latent_dtype_bytes": 4}, "latents of 4 bytes an element, expected 2"),
  ],
)
def test_what_a_step_cannot_be_names_the_nearest_that_works(settings, message):
  from kimi_k3.capacity.memory import estimate_decode

  with pytest.raises(InputError, match=message):
    estimate_decode(k3(), cuts_of(TP32), **{"batch": 64, "context": 8192, "cache_cut": "batch"} | settings)


def test_what_a_chunk_cannot_be_names_the_nearest_that_works():
  from kimi_k3.capacity.memory import estimate_prefill

  sizes: dict[str, Any] = {"length": 32768, "history": False, "prefill_cut": "sequence"}
  with pytest.raises(InputError, match=r"a chunk of 32760 tokens: .* into 32, the nearest that works is 32768"):
    estimate_prefill(k3(), cuts_of(TP32), tokens=32760, **sizes)
  with pytest.raises(InputError, match="prefill_cut is 'heads', expected one of: sequence, whole"):
    estimate_prefill(k3(), cuts_of(TP32), tokens=32768, **dict(sizes, prefill_cut="heads"))
  with pytest.raises(InputError, match="96, which 64 parts"):
    estimate_prefill(k3(), cuts_of({"tensor": 64}), tokens=32768, **sizes)
  uneven = cuts_of({"expert": 8, "tensor": 4}, {"vocab": ["tensor"]})
  with pytest.raises(InputError, match="needs heads, width and vocab cut by the same axes"):
    estimate_prefill(k3(), uneven, tokens=32768, **sizes)


def test_float8_latents_take_half_of_the_bytes():
  from kimi_k3.capacity.memory import estimate_decode

  sizes: dict[str, Any] = {"batch": 64, "context": 2**17, "cache_cut": "batch"}
  wide, narrow = (estimate_decode(k3(), cuts_of(TP32), **sizes, latent_dtype_bytes=n) for n in (2, 1))
  assert narrow.latent_cache_bytes * 2 == wide.latent_cache_bytes == 24 * 2 * 2**17 * 576 * 2
  assert wide.argument_bytes - narrow.argument_bytes == narrow.latent_cache_bytes


@pytest.mark.parametrize(
  ("mesh", "rules", "by_hand"),
  [
    (TP32, None, {"devices_heads": 32, "devices_experts": 32, "latent_cuts": 32}),
    (
      {"expert": 8, "tensor": 4},
      {"experts": ["expert"], "expert_width": ["tensor"]},
      {"devices_heads": 32, "devices_experts": 8, "expert_width_cuts": 4, "latent_cuts": 32},
    ),
    (
      {"attn_dp_expert": 4, "model": 8},
      None,
      {"devices_heads": 8, "devices_experts": 32, "rows_cuts": 4, "latent_cuts": 8},
    ),
  ],
)
def test_traffic_is_that_of_the_cuts_written_by_hand(mesh, rules, by_hand):
  from kimi_k3.capacity import memory, traffic

  sizes: dict[str, Any] = {"batch": 64, "context": 8192}
  found = memory.traffic_of(k3(), cuts_of(mesh, rules), **sizes)
  assert found == traffic.decode_traffic(k3(), **sizes, **by_hand)


def test_traffic_of_uneven_cuts_is_refused():
  from kimi_k3.capacity.memory import traffic_of

  with pytest.raises(InputError, match="where heads, width and vocab are cut by the same axes"):
    traffic_of(k3(), cuts_of({"expert": 8, "tensor": 4}, {"vocab": ["tensor"]}), batch=32, context=64)


def test_operations_of_prefill_are_two_for_each_active_parameter_and_those_of_attention():
  from kimi_k3.capacity.memory import prefill_flops

  per_token = prefill_flops(k3(), tokens=1000) / 1000
  # 104.19 B active, of which the head, 1.17 B, is for one token; attention within 1000 tokens adds 3 GFLOP of 207.
  assert 2 * (104.19e9 - 1.17e9) < per_token < 2.04 * (104.19e9 - 1.17e9)
  pairs = 24 * 96 * (128 + 64 + 128) * 2
  more = prefill_flops(k3(), tokens=1000, history=4096) - prefill_flops(k3(), tokens=1000)
  assert more == pytest.approx(1000 * 4096 * pairs + 24 * 4096 * 2 * 512 * 96 * 256)
