from __future__ import annotations

import dataclasses

import pytest

from kimi_k3.convert import plan
from kimi_k3.convert.plan import Options
from kimi_k3.errors import InputError

# Typed out from docs/parameter-tree.md for k3-tiny: D 64, H 4, K = V 32, W 4; layer 1 is KDA with 16 packed experts of
# L = F = 32 and shared experts of M = 64.
K3_TINY_LAYER_1 = {
  "input_norm.scale": ((64,), "bfloat16"),
  "post_attention_norm.scale": ((64,), "bfloat16"),
  "attention_res.norm": ((64,), "bfloat16"),
  "attention_res.proj": ((64,), "bfloat16"),
  "mlp_res.norm": ((64,), "bfloat16"),
  "mlp_res.proj": ((64,), "bfloat16"),
  "attention.q_proj.kernel": ((64, 4, 32), "bfloat16"),
  "attention.k_proj.kernel": ((64, 4, 32), "bfloat16"),
  "attention.v_proj.kernel": ((64, 4, 32), "bfloat16"),
  "attention.q_conv": ((4, 4, 32), "float32"),
  "attention.k_conv": ((4, 4, 32), "float32"),
  "attention.v_conv": ((4, 4, 32), "float32"),
  "attention.f_a_proj.kernel": ((64, 32), "bfloat16"),
  "attention.f_b_proj.kernel": ((32, 4, 32), "bfloat16"),
  "attention.A_log": ((4,), "float32"),
  "attention.dt_bias": ((4, 32), "float32"),
  "attention.b_proj.kernel": ((64, 4), "bfloat16"),
  "attention.g_proj.kernel": ((64, 4, 32), "bfloat16"),
  "attention.o_norm.scale": ((32,), "float32"),
  "attention.o_proj.kernel": ((4, 32, 64), "bfloat16"),
  "mlp.router.kernel": ((64, 16), "bfloat16"),
  "mlp.router.bias": ((16,), "float32"),
  "mlp.experts.w1_packed": ((16, 32, 16), "uint8"),
  "mlp.experts.w1_scale": ((16, 32, 1), "uint8"),
  "mlp.experts.w3_packed": ((16, 32, 16), "uint8"),
  "mlp.experts.w3_scale": ((16, 32, 1), "uint8"),
  "mlp.experts.w2_packed": ((16, 32, 16), "uint8"),
  "mlp.experts.w2_scale": ((16, 32, 1), "uint8"),
  "mlp.down_proj.kernel": ((64, 32), "bfloat16"),
  "mlp.up_proj.kernel": ((32, 64), "bfloat16"),
  "mlp.norm.scale": ((32,), "bfloat16"),
  "mlp.shared_experts.gate_proj.kernel": ((64, 64), "bfloat16"),
  "mlp.shared_experts.up_proj.kernel": ((64, 64), "bfloat16"),
  "mlp.shared_experts.down_proj.kernel": ((64, 64), "bfloat16"),
}
# Layer 3 is MLA: Q 48, C 32, N 16, R 8, V 16.
K3_TINY_MLA = {
  "wq_a.kernel": ((64, 48), "bfloat16"),
  "q_norm.scale": ((48,), "bfloat16"),
  "wq_b.kernel": ((48, 4, 24), "bfloat16"),
  "wkv_a.kernel": ((64, 40), "bfloat16"),
  "kv_norm.scale": ((32,), "bfloat16"),
  "wkv_b.kernel": ((32, 4, 32), "bfloat16"),
  "gate.kernel": ((64, 4, 16), "bfloat16"),
  "out.kernel": ((4, 16, 64), "bfloat16"),
}
K3_TINY_TOP = {
  "token_embedder.embedding": ((256, 64), "bfloat16"),
  "decoder.decoder_norm.scale": ((64,), "bfloat16"),
  "decoder.logits_dense.kernel": ((64, 256), "bfloat16"),
  "decoder.output_res.norm": ((64,), "bfloat16"),
  "decoder.output_res.proj": ((64,), "bfloat16"),
}


def tree(source, **options) -> dict:
  planned = plan.make_plan(source, Options(**options))
  return {".".join(leaf.path): (leaf.shape, leaf.dtype) for leaf in planned.leaves}


def below(held, prefix) -> dict:
  return {path.removeprefix(prefix): leaf for path, leaf in held.items() if path.startswith(prefix)}


def test_unrolled_leaves_are_those_of_the_parameter_tree(k3_source):
  held = tree(k3_source, scan=False)
  assert below(held, "decoder.layers_1.") == K3_TINY_LAYER_1
  assert below(held, "decoder.layers_3.attention.") == K3_TINY_MLA
  assert {path: leaf for path, leaf in held.items() if ".layers_" not in path} == K3_TINY_TOP
  assert below(held, "decoder.layers_0.mlp.") == {
    "gate_proj.kernel": ((64, 192), "bfloat16"),
    "up_proj.kernel": ((64, 192), "bfloat16"),
    "down_proj.kernel": ((192, 64), "bfloat16"),
  }


def test_folded_leaves_have_the_blocks_as_their_first_axis(k3_source):
  held = tree(k3_source, scan=True)
  stacked = {path: ((2, *shape), dtype) for path, (shape, dtype) in K3_TINY_LAYER_1.items()}
  assert below(held, "decoder.blocks.layers_1.") == stacked
  assert below(held, "decoder.lead_1.") == K3_TINY_LAYER_1
  assert below(held, "decoder.tail_0.attention.") == K3_TINY_MLA
  tops = {path.split(".")[1] for path in held if path.startswith("decoder.")}
  assert tops == {
    "lead_0",
    "lead_1",
    "lead_2",
    "lead_3",
    "blocks",
    "tail_0",
    "decoder_norm",
    "logits_dense",
    "output_res",
  }


def test_decoded_experts_are_input_first_and_leave_the_rest_alone(k3_source):
  packed, decoded = tree(k3_source, scan=False), tree(k3_source, scan=False, experts="bf16")
  experts = below(decoded, "decoder.layers_1.mlp.experts.")
  assert experts == dict.fromkeys(("w1", "w2", "w3"), ((16, 32, 32), "bfloat16"))
  assert {p: leaf for p, leaf in decoded.items() if ".experts." not in p} == {
    p: leaf for p, leaf in packed.items() if ".experts." not in p
  }


def test_experts_in_fp8_keep_the_place_of_bfloat16_whatever_they_are_stored_in(k3_source, kimi_linear_source):
  for source in (k3_source, kimi_linear_source):
    decoded, fp8 = (tree(source, scan=False, experts=choice) for choice in ("bf16", "fp8-block"))
    experts = {path: (shape, "float8_e4m3fn") for path, (shape, _) in decoded.items() if ".experts.w" in path}
    assert len(experts) == 3 * 12
    num_experts = next(iter(experts.values()))[0][0]
    experts |= {f"{path}_scale_inv": ((num_experts, 1, 1), "float32") for path in experts}
    assert fp8 == decoded | experts


def test_bfloat16_experts_that_are_packed_get_the_leaves_of_packed_ones(k3_source, kimi_linear_source):
  released = below(tree(k3_source, scan=False), "decoder.layers_1.mlp.experts.")
  packed = below(tree(kimi_linear_source, scan=False, experts="mxfp4"), "decoder.layers_1.mlp.experts.")
  assert packed == {
    "w1_packed": ((8, 32, 32), "uint8"),
    "w1_scale": ((8, 32, 2), "uint8"),
    "w3_packed": ((8, 32, 32), "uint8"),
    "w3_scale": ((8, 32, 2), "uint8"),
    "w2_packed": ((8, 64, 16), "uint8"),
    "w2_scale": ((8, 64, 1), "uint8"),
  }
  assert set(packed) == set(released)


# The matrices that `--dense fp8-block` means, typed out: all of attention but taps and vectors, all of the MLP but the
# router and the routed experts.
KDA_DENSE = {f"attention.{name}_proj.kernel" for name in ("q", "k", "v", "f_a", "f_b", "b", "o")}
MLA_DENSE = {f"attention.{name}.kernel" for name in ("wkv_a", "wkv_b", "out")}
MLP_DENSE = {f"mlp.{name}_proj.kernel" for name in ("gate", "up", "down")}
SHARED = {f"mlp.shared_experts.{name}_proj.kernel" for name in ("gate", "up", "down")}
LATENT = {"mlp.down_proj.kernel", "mlp.up_proj.kernel"}
DENSE = {
  "k3": {
    "layers_0": KDA_DENSE | MLP_DENSE | {"attention.g_proj.kernel"},
    "layers_1": KDA_DENSE | SHARED | LATENT | {"attention.g_proj.kernel"},
    "layers_3": MLA_DENSE | SHARED | LATENT | {f"attention.{name}.kernel" for name in ("wq_a", "wq_b", "gate")},
  },
  "kimi-linear": {
    "layers_0": KDA_DENSE | MLP_DENSE | {"attention.g_a_proj.kernel", "attention.g_b_proj.kernel"},
    "layers_1": KDA_DENSE | SHARED | {"attention.g_a_proj.kernel", "attention.g_b_proj.kernel"},
    "layers_3": MLA_DENSE | SHARED | {"attention.query.kernel"},
  },
  "all packed": {
    "layers_1": KDA_DENSE | {"attention.g_proj.kernel"},
    "layers_3": MLA_DENSE | {f"attention.{name}.kernel" for name in ("wq_a", "wq_b", "gate")},
  },
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_fp8_is_attention_and_mlps_and_nothing_else_and_what_is_packed_stays_packed(small_sources, name):
  plain, fp8 = (tree(small_sources[name], scan=False, dense=choice) for choice in ("as-stored", "fp8-block"))
  assert set(plain) <= set(fp8)
  for layer, expected in DENSE[name].items():
    before, after = (below(held, f"decoder.{layer}.") for held in (plain, fp8))
    codes = {path for path, (_, dtype) in after.items() if dtype == "float8_e4m3fn"}
    assert codes == expected
    assert set(after) - set(before) == {f"{path}_scale_inv" for path in expected}
    assert {path: after[path][0] for path in before} == {path: shape for path, (shape, _) in before.items()}
    assert {path: leaf for path, leaf in after.items() if path in set(before) - codes} == {
      path: leaf for path, leaf in before.items() if path not in codes
    }
  outside = {path for path in plain if ".layers_" not in path}
  assert {path: fp8[path] for path in outside} == {path: plain[path] for path in outside}


def test_a_scale_is_for_128_inputs_times_128_outputs_with_heads_counted_as_one_axis(k3_source):
  held = below(tree(k3_source, scan=False, dense="fp8-block"), "decoder.layers_0.")
  assert held["attention.q_proj.kernel"] == ((64, 4, 32), "float8_e4m3fn")
  assert held["attention.q_proj.kernel_scale_inv"] == ((1, 1), "float32")
  assert held["mlp.gate_proj.kernel_scale_inv"] == ((1, 2), "float32")  # 64 -> 192
  assert held["mlp.down_proj.kernel_scale_inv"] == ((2, 1), "float32")
  folded = tree(k3_source, scan=True, dense="fp8-block")
  assert folded["decoder.blocks.layers_1.attention.o_proj.kernel_scale_inv"] == ((2, 1, 1), "float32")


def test_packed_dense_matrices_become_codes_and_scales(all_packed_source):
  held = below(tree(all_packed_source), "decoder.lead_1.mlp.")
  assert {path: leaf for path, leaf in held.items() if path.startswith(("down_proj", "up_proj", "shared"))} == {
    "down_proj.packed": ((32, 32), "uint8"),
    "down_proj.scale": ((32, 2), "uint8"),
    "up_proj.packed": ((64, 16), "uint8"),
    "up_proj.scale": ((64, 1), "uint8"),
    "shared_experts.gate_proj.packed": ((64, 32), "uint8"),
    "shared_experts.gate_proj.scale": ((64, 2), "uint8"),
    "shared_experts.up_proj.packed": ((64, 32), "uint8"),
    "shared_experts.up_proj.scale": ((64, 2), "uint8"),
    "shared_experts.down_proj.packed": ((64, 32), "uint8"),
    "shared_experts.down_proj.scale": ((64, 2), "uint8"),
  }


def test_kimi_linear_has_the_other_switches(kimi_linear_source):
  held = tree(kimi_linear_source, scan=False)
  kda, mla, moe = (
    below(held, f"decoder.layers_{i}.{part}.") for i, part in ((1, "attention"), (3, "attention"), (1, "mlp"))
  )
  assert (kda["g_a_proj.kernel"], kda["g_b_proj.kernel"]) == (((64, 32), "bfloat16"), ((32, 4, 32), "bfloat16"))
  assert kda["q_conv"] == ((4, 4, 32), "bfloat16")
  assert kda["A_log"] == ((4,), "float32")
  assert set(mla) == {"query.kernel", "wkv_a.kernel", "kv_norm.scale", "wkv_b.kernel", "out.kernel"}
  assert mla["query.kernel"] == ((64, 2, 24), "bfloat16")
  assert moe["experts.w1"] == ((8, 64, 32), "bfloat16")
  assert not {"down_proj.kernel", "up_proj.kernel", "norm.scale"} & set(moe)


@pytest.mark.parametrize("scan", [True, False])
def test_every_stored_tensor_fills_one_place_and_every_place_is_filled_once(k3_source, scan):
  planned = plan.make_plan(k3_source, Options(scan=scan))
  used = []
  for leaf in planned.leaves:
    places = [piece.index for piece in leaf.pieces]
    assert len(set(places)) == len(places)
    axes = leaf.shape[: len(places[0])]
    assert all(len(place) == len(axes) and all(i < n for i, n in zip(place, axes, strict=True)) for place in places)
    total = 1
    for n in axes:
      total *= n
    assert total == len(places)
    used += [piece.names[-1] for piece in leaf.pieces]  # the last: scales also name the codes they are checked with
  text = [name for name in k3_source.tensors if name.startswith("language_model.")]
  assert sorted(used) == sorted(text)


@pytest.mark.parametrize(
  "name",
  [
    "language_model.model.layers.13.input_layernorm.weight",
    "language_model.model.layers.2.block_sparse_moe.experts.16.w1.weight_packed",
    "language_model.model.layers.1.self_attn.q_proj.bias",
    "model.norm.weight",
    "something.else",
  ],
)
def test_a_tensor_that_nothing_uses_is_refused_by_name(k3_source, edited, headers, name):
  extra = headers([(name, "U8", (32, 16))])
  if name.endswith("weight_packed"):
    extra |= headers([(name.replace("_packed", "_scale"), "U8", (32, 1))])
  with pytest.raises(InputError, match=f"{name}: unexpected"):
    plan.make_plan(edited(k3_source, extra), Options())


def test_all_offenders_are_listed_up_to_eight_and_the_rest_is_counted(k3_source, edited):
  norms = [name for name in k3_source.tensors if name.endswith("layernorm.weight")][:11]
  with pytest.raises(InputError) as error:
    plan.make_plan(edited(k3_source, dict.fromkeys(norms[:3])), Options())
  assert all(name in str(error.value) for name in norms[:3])
  with pytest.raises(InputError, match="and 3 more: 11 missing"):
    plan.make_plan(edited(k3_source, dict.fromkeys(norms)), Options())


@pytest.mark.parametrize("shape", [(1, 1, 4, 1), (4,), (32,)])
def test_a_log_is_accepted_in_its_three_forms_if_all_layers_agree(k3_source, edited, shape):
  stored = {n: dataclasses.replace(t, shape=shape) for n, t in k3_source.tensors.items() if n.endswith(".A_log")}
  planned = plan.make_plan(edited(k3_source, stored), Options())
  assert planned.form.a_log_shape == shape
  odd = next(iter(stored))
  with pytest.raises(InputError, match=rf"{odd}: F32 \[2\], expected F32 \[{', '.join(map(str, shape))}\]"):
    plan.make_plan(edited(k3_source, stored | {odd: dataclasses.replace(stored[odd], shape=(2,))}), Options())
