"""No switch is parsed and then ignored.

Each changes what is computed, as the reference says, or changes the parameters, so that a checkpoint no longer fits, or
takes one value only. Two layers with every kind of part, in one pass.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from flax.linen import logical_axis_rules

from kimi_k3.config import KimiK3Config
from kimi_k3.errors import InputError
from kimi_k3.maxtext_keys import UPSTREAM_NAMES

# Of the largest logit: float32 noise is 3e-5; without any one of the other values the reference is CHANGE away or more,
# so that the model could not be within TOLERANCE if it ignored one.
TOLERANCE, CHANGE = 1e-4, 1e-3
ROW = np.random.default_rng(3).integers(0, 252, 24)
VARIANTS = ("k3", "kimi-linear")

# Other values of the fields that leave the parameters as they are, by key of config.json, beside MaxText's setting.
# K3's norm on the routed sum hides its scale unless eps is large.
OTHER_VALUES = {
  "k3": {
    "num_experts_per_token": (3, "num_experts_per_tok=3"),
    "moe_renormalize": (False, "moe_renormalize=false"),
    "routed_scaling_factor": (2.5, "routed_scaling_factor=2.5"),
    "linear_attn_config.gate_lower_bound": (-1.0, "kda_gate_lower_bound=-1.0"),
    "attn_res_block_size": (1, "attn_res_block_size=1"),
    "activation_situ_beta": (1.0, "situ_beta=1.0"),
    "activation_situ_linear_beta": (2.0, "situ_linear_beta=2.0"),
    "rms_norm_eps": (0.02, "normalization_layer_epsilon=0.02"),
  },
  "k3, nulls": {
    "num_experts_per_token": (1, "num_experts_per_tok=1"),
    "linear_attn_config.gate_lower_bound": (None, "kda_gate_lower_bound=none"),
    "activation_situ_linear_beta": (None, "situ_linear_beta=none"),
    "activation_situ_beta": (2, "situ_beta=2"),
  },
  "k3, silu": {"hidden_act": ("silu", "hidden_act=silu")},
  "kimi-linear": {
    "num_experts_per_token": (3, "num_experts_per_tok=3"),
    "moe_renormalize": (False, "moe_renormalize=false"),
    "routed_scaling_factor": (1.0, "routed_scaling_factor=1.0"),
    "linear_attn_config.gate_lower_bound": (-2.0, "kda_gate_lower_bound=-2.0"),
    "rms_norm_eps": (1e-3, "normalization_layer_epsilon=0.001"),
  },
}

# Settings that change the parameters, and what is said of a leaf of the checkpoint that then does not fit.
TREE = {
  "base_emb_dim=96": "decoder_norm.scale is bfloat16[64], expected bfloat16[96]",
  "vocab_size=512": "token_embedder.embedding is bfloat16[256, 64], expected bfloat16[512, 64]",
  "base_num_decoder_layers=3 kda_layers=[1,2] full_attention_layers=[3]": "lead_1.attention.A_log is missing",
  "base_num_query_heads=8 base_num_kv_heads=8": "gate.kernel is bfloat16[64, 4, 16], expected bfloat16[64, 8, 16]",
  "base_mlp_dim=128": "lead_0.mlp.up_proj.kernel is bfloat16[64, 192], expected bfloat16[64, 128]",
  "base_moe_mlp_dim=64": "experts.w1_packed is uint8[4, 32, 16], expected uint8[4, 64, 16]",
  "expert_latent_dim=64": "lead_1.mlp.down_proj.kernel is bfloat16[64, 32], expected bfloat16[64, 64]",
  "expert_latent_dim=none latent_moe_use_norm=false": "lead_1.mlp.down_proj.kernel is not part of the model",
  "latent_moe_use_norm=false": "lead_1.mlp.norm.scale is not part of the model",
  "first_num_dense_layers=0": "lead_0.mlp.experts.w1_packed is missing",
  "moe_layer_freq=3": "lead_1.mlp.gate_proj.kernel is missing",
  "num_experts=8": "experts.w1_packed is uint8[4, 32, 16], expected uint8[8, 32, 16]",
  "shared_experts=1": "shared_experts.up_proj.kernel is bfloat16[64, 64], expected bfloat16[64, 32]",
  "shared_experts=0": "shared_experts.up_proj.kernel is not part of the model",
  "q_lora_rank=24": "wq_a.kernel is bfloat16[64, 48], expected bfloat16[64, 24]",
  "q_lora_rank=0": "lead_1.attention.query.kernel is missing",
  "kv_lora_rank=16": "kv_norm.scale is bfloat16[32], expected bfloat16[16]",
  "qk_nope_head_dim=8": "wq_b.kernel is bfloat16[48, 4, 24], expected bfloat16[48, 4, 16]",
  "qk_rope_head_dim=16": "wkv_a.kernel is bfloat16[64, 40], expected bfloat16[64, 48]",
  "v_head_dim=8": "out.kernel is bfloat16[4, 16, 64], expected bfloat16[4, 8, 64]",
  "mla_use_output_gate=false": "lead_1.attention.gate.kernel is not part of the model",
  "kda_num_heads=2": "A_log is float32[4], expected float32[2]",
  "kda_head_dim=16": "dt_bias is float32[4, 32], expected float32[4, 16]",
  "kda_conv_width=3": "q_conv is float32[4, 4, 32], expected float32[3, 4, 32]",
  "kda_full_rank_gate=false": "lead_0.attention.g_a_proj.kernel is missing",
  "kda_layers=[2] full_attention_layers=[1]": "lead_0.attention.gate.kernel is missing",
  "attn_res_block_size=none": "lead_0.attention_res.norm is not part of the model",
  "packed_modules=[]": "experts.w1 is missing",
  "packed_modules=[experts,latent]": "lead_1.mlp.down_proj.packed is missing",
  "float32_leaves=[A_log,dt_bias,e_score_correction_bias,o_norm]": "expected bfloat16[4, 4, 32]. Use the weight_dtype",
  "float32_leaves=[A_log,conv1d,dt_bias,o_norm]": "router.bias is float32[4], expected bfloat16[4]. Use the weight_",
  "float32_leaves=[A_log,conv1d,dt_bias,e_score_correction_bias]": "o_norm.scale is float32[32], expected bfloat16[32]",
  "weight_dtype=float32": "decoder_norm.scale is bfloat16[64], expected float32[64]",
  "scan_layers=false": "written with scan_layers: true",
  "fp8_modules=[dense]": "lead_0.attention.b_proj.kernel_scale_inv is missing",
  "packed_modules=[] fp8_modules=[experts]": "lead_1.mlp.experts.w1_scale_inv is missing",
}  # fmt: skip
BY_DEFAULT = 3  # every third of them in the default run, all in `make test-slow`

# Fields of which nobody computes another value, and such a value.
ONE_VALUE = {
  "num_kv_heads": "base_num_kv_heads=2",
  "router_activation": "router_activation=softmax",
  "topk_method": "topk_method=greedy",
  "num_expert_group": "num_expert_group=2",
  "topk_group": "topk_group=2",
  "mla_use_nope": "mla_use_nope=false",
  "tie_word_embeddings": "logits_via_embedding=true",
  "num_nextn_predict_layers": "mtp_num_layers=1",
}

# What no pass of the model depends on: grouping while there is one group, lengths (nothing is rotated or scaled by
# them), and ids, of which generation stops at one (cli/decode_test.py).
NO_ARITHMETIC = {
  "use_grouped_topk": "use_grouped_topk=false",
  "max_position_embeddings": "max_position_embeddings=64 original_max_position_embeddings=64",
  "bos_token_id": "bos_token_id=1",
  "eos_token_id": "eos_token_id=1",
  "pad_token_id": "pad_token_id=1",
}


@pytest.fixture(scope="session")
def two_layers(tiny_checkpoint, convert) -> dict[str, tuple[Path, Path]]:
  """The released and the converted directory of each variant: KDA with a dense MLP, then MLA with experts."""
  few = ("--layers", "2", "--set", "num_experts=4", "--set", "num_experts_per_token=2")
  made = {variant: tiny_checkpoint(*few, "--variant", variant) for variant in VARIANTS}
  return {variant: (source, convert(source)) for variant, source in made.items()}


@pytest.fixture(scope="session")
def k3_out(two_layers) -> Path:
  return two_layers["k3"][1]


def read(out: Path, setting: str) -> Any:
  from kimi_k3.maxtext_adapter.settings import read_config

  return read_config(str(out / "decode.yml"), setting.split())


@pytest.mark.parametrize("case", OTHER_VALUES)
def test_every_other_value_is_computed_as_the_reference_computes_it(two_layers, reference, float32_config, case):
  from kimi_k3.maxtext_adapter.engine import make_forward

  source, out = two_layers[case.split(",")[0]]
  loaded, values = reference.load_checkpoint(source), OTHER_VALUES[case]

  def expected(*keys: str) -> np.ndarray:
    config = copy.deepcopy(loaded.config)
    for key in keys:
      *parents, name = key.split(".")
      (config[parents[0]] if parents else config)[name] = values[key][0]
    return reference.forward(reference.Checkpoint(config, loaded.tensors), ROW[None])["logits"][0]

  every = expected(*values)
  largest = np.abs(every).max()
  without = {key: np.abs(expected(*(k for k in values if k != key)) - every).max() / largest for key in values}
  assert min(without.values()) > CHANGE, without
  logits, _ = make_forward(float32_config(out, *(setting for _, setting in values.values())))(ROW, len(ROW))
  assert np.abs(np.asarray(logits) - every).max() <= TOLERANCE * largest


@pytest.mark.parametrize(
  "setting", [pytest.param(s, marks=pytest.mark.slow if i % BY_DEFAULT else ()) for i, s in enumerate(TREE)]
)
def test_a_checkpoint_of_other_parameters_is_refused_by_the_name_of_a_leaf(k3_out, setting):
  from kimi_k3.maxtext_adapter.checkpoint import check_fit, model_leaves, stored_leaves
  from kimi_k3.maxtext_adapter.engine import abstract_model

  model = model_leaves(abstract_model(read(k3_out, setting), "train")[1])
  with pytest.raises(InputError) as error:
    check_fit(model, stored_leaves(str(k3_out / "0" / "items")), "OUT")
  assert TREE[setting] in str(error.value)


@pytest.mark.parametrize("field", ONE_VALUE)
def test_a_field_that_takes_one_value_is_refused_by_its_name_at_another(k3_out, field):
  with pytest.raises(InputError, match=rf": {UPSTREAM_NAMES.get(field, field)} is [^;]*(only|expected) [^;]*$"):
    read(k3_out, ONE_VALUE[field])


def test_every_field_of_the_architecture_is_tried_here():
  names = {key.split("=")[0] for settings in TREE for key in settings.split()}
  names |= {setting.split("=")[0] for values in OTHER_VALUES.values() for _, setting in values.values()}
  fields = {f.name for f in dataclasses.fields(KimiK3Config)}
  tried = {field for field in fields if UPSTREAM_NAMES.get(field, field) in names}
  assert tried | set(ONE_VALUE) | set(NO_ARITHMETIC) == fields
  assert not tried & (set(ONE_VALUE) - {"num_kv_heads"} | set(NO_ARITHMETIC))


def program(config: Any) -> str:
  """What would be compiled for one pass of the model, as text."""
  from kimi_k3.maxtext_adapter.engine import abstract_model, concrete_rest

  mesh, abstract = abstract_model(config, "train")
  graph, params, rest = nnx.split(abstract, nnx.Param, ...)

  def forward(params, tokens):
    model: Any = nnx.merge(graph, params, concrete_rest(rest), copy=True)
    positions = jax.numpy.arange(tokens.shape[1])[None]
    return model.decoder.trace(
      model.token_embedder, tokens, positions, None, deterministic=True, model_mode="train"
    )[:1]  # fmt: skip

  with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
    return str(jax.make_jaxpr(forward)(params, jax.ShapeDtypeStruct((1, 8), np.int32)))


@pytest.fixture(scope="session")
def usual_program(k3_out) -> str:
  return program(read(k3_out, ""))


@pytest.mark.parametrize(
  ("setting", "seen"),
  [
    ("dtype=float32", "f32[1,8,64]"),
    ("matmul_precision=highest", "precision=(Precision.HIGHEST, Precision.HIGHEST)"),
    ("kda_implementation=tokamax_xla_chunked", "chunk"),
  ],
)
def test_how_to_compute_is_seen_in_the_program(k3_out, usual_program, setting, seen):
  changed = program(read(k3_out, setting))
  assert changed.count(seen) > usual_program.count(seen)


@pytest.mark.parametrize("setting", NO_ARITHMETIC.values())
def test_what_is_no_arithmetic_leaves_the_program_as_it_is(k3_out, usual_program, setting):
  assert program(read(k3_out, setting)) == usual_program


@pytest.mark.parametrize(
  ("setting", "said"),
  [
    (
      "kda_implementation=fast",
      "kda_implementation: Input should be 'portable', 'tokamax_xla_chunked', 'tokamax_mosaic' or 'tops'",
    ),
    ("kda_implementation=tokamax_mosaic", "tokamax_mosaic needs a TPU, the backend is cpu"),
    (
      "expert_implementation=fast",
      "expert_implementation: Input should be 'reference', 'decode_kernel', 'grouped' or 'dropless' (found 'fast')",
    ),
    ("attention=flash", "attention is flash, which the cpu backend lacks"),
    ("attention=paged", "attention is 'paged': this model supports"),
    ("dtype=float16", "dtype is 'float16': this model supports"),
    ("weight_dtype=float8_e4m3fn", "weight_dtype is 'float8_e4m3fn': this model supports"),
    ("matmul_precision=exact", "matmul_precision: Input should be"),
  ],
)
def test_a_way_to_compute_that_is_not_there_is_refused_by_name(k3_out, setting, said):
  if jax.default_backend() != "cpu":
    pytest.skip("says what a CPU does not have")
  with pytest.raises(InputError) as error:
    program(read(k3_out, setting))
  assert said in str(error.value)
  assert "\n" not in str(error.value)


def test_near_ties_of_experts_are_decided_by_the_float32_bias_from_the_checkpoint_on(two_layers, tmp_path):
  """In bfloat16 the four biases are equal, and the lowest ids would win."""
  from kimi_k3.cli.main import main
  from kimi_k3.convert.index import open_source
  from kimi_k3.maxtext_adapter.engine import make_forward

  source = shutil.copytree(two_layers["k3"][0], tmp_path / "source")
  bias = np.float32(1) + np.arange(4, dtype=np.float32) * np.float32(2**-12)  # an ulp of bfloat16 is 2**-7 there
  values = {"gate.weight": np.zeros((4, 64), ml_dtypes.bfloat16), "gate.e_score_correction_bias": bias}
  for name, tensor in open_source(source).tensors.items():
    for end, value in values.items():
      if name.endswith(f".block_sparse_moe.{end}"):
        assert (value.shape, value.nbytes) == (tensor.shape, tensor.nbytes)
        with (source / tensor.shard).open("r+b") as file:
          file.seek(tensor.offset)
          file.write(value.tobytes())
  assert main(["convert", str(source), str(tmp_path / "out")]) == 0
  _, chosen = make_forward(read(tmp_path / "out", "dtype=bfloat16"))(ROW, len(ROW))
  assert chosen is not None
  np.testing.assert_array_equal(np.asarray(chosen), np.broadcast_to([3, 2], (1, len(ROW), 2)))
