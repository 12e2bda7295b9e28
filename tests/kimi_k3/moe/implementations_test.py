"""One suite for every implementation of the routed experts: each equals a loop over tokens in float64."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3_reference
from kimi_k3 import mxfp4_jax
from kimi_k3.errors import InputError
from kimi_k3.moe.decode_kernel import MAX_TOKENS, VISIT_ROWS
from kimi_k3.moe.grouped import activation_name, grouped_experts
from kimi_k3.moe.implementations import (
  EXPERT_IMPLEMENTATIONS,
  ExpertStack,
  form_of,
  prepare,
  run_experts,
  shared_form,
)

LAYERS, EXPERTS, LATENT, WIDTH, CHOICES = 3, 5, 96, 160, 4  # neither size is a power of two, nor a whole tile
LAYER = 1
TOLERANCE = 1e-5  # of the largest value: sums of a hundred products in float32
RUNS = ("reference", "decode_kernel/float4", "decode_kernel/nibbles", "grouped")
# Everywhere: a scale that leaves outputs near 1, and the products of the largest codes far from overflow.
SCALES = (118, 124)


def slow(*values):
  """A case of the slow run: compiling the kernel for interpret mode takes two seconds."""
  return pytest.param(*values, marks=pytest.mark.slow)


# The nibbles are for a TPU without float4; their kernel differs in how codes are widened only.
MOST = [slow(name) if name.endswith("nibbles") else name for name in RUNS]


def make_stack(scales=SCALES, seed: int = 0) -> ExpertStack:
  rng = np.random.default_rng(seed)
  leaves = []
  for out, into in ((WIDTH, LATENT), (WIDTH, LATENT), (LATENT, WIDTH)):
    leaves.append(rng.integers(0, 256, (LAYERS, EXPERTS, out, into // 2), dtype=np.uint8))
    leaves.append(rng.integers(*scales, (LAYERS, EXPERTS, out, into // 32), dtype=np.uint8))
  return ExpertStack(*leaves)


@functools.partial(jax.jit, static_argnums=1)
def in_form(stack: ExpertStack, form: str) -> ExpertStack:
  pairs = (prepare(stack[i], stack[i + 1], form) for i in range(0, len(stack), 2))
  return ExpertStack(*(leaf for pair in pairs for leaf in pair))


def make_rows(rows: int, experts=range(-3, EXPERTS + 4), seed: int = 0):
  """Rows, ids out of those given and all different, combine weights."""
  rng = np.random.default_rng(1000 * rows + seed)
  ids = np.array([rng.permutation(list(experts))[:CHOICES] for _ in range(rows)], np.int32)
  x = rng.standard_normal((rows, LATENT)).astype(np.float32)
  return x, ids, rng.random(ids.shape).astype(np.float32)


def released(config) -> dict:
  """What the numpy reference reads of a config, under the names of config.json."""
  return {
    "hidden_act": config.hidden_act,
    "activation_situ_beta": config.situ_beta,
    "activation_situ_linear_beta": config.situ_linear_beta,
  }


def loop(config, stack: ExpertStack, layer: int, x, ids, weights) -> np.ndarray:
  """Every token and every chosen expert by itself, in float64."""
  y = np.zeros(x.shape, np.float64)
  decoded = [
    np.asarray(
      mxfp4_jax.decode(jnp.asarray(stack[i][layer]), jnp.asarray(stack[i + 1][layer]), jnp.float32), np.float64
    )
    for i in range(0, len(stack), 2)
  ]
  for t, s in np.ndindex(*ids.shape):
    if 0 <= ids[t, s] < EXPERTS:
      w1, w3, w2 = (w[ids[t, s]] for w in decoded)
      hidden = k3_reference.gated_activation(
        released(config), w1 @ x[t].astype(np.float64), w3 @ x[t].astype(np.float64)
      )
      y[t] += weights[t, s] * (w2 @ hidden)
  return y


def plain_product(rows, weights, sizes, layer, /, *, activation):
  """The grouped product without a TPU: all experts decoded, each row's own picked. Rows past the last group are NaN."""
  expert = jnp.sum(jnp.arange(rows.shape[0])[:, None] >= jnp.cumsum(sizes)[None, :], axis=1)
  products = []
  for codes, scales in weights:
    factors = jax.lax.bitcast_convert_type(scales[layer].astype(jnp.int32) << 23, jnp.float32)
    matrix = codes[layer].astype(jnp.float32) * jnp.repeat(factors, 32, axis=1)
    mine = matrix[jnp.minimum(expert, matrix.shape[0] - 1)]
    products.append(jnp.einsum("ci,cio->co", rows.astype(jnp.float32), mine, precision="highest"))
  y = products[0]
  if activation is not None:
    y = by_name(activation, *products).astype(rows.dtype)
  return jnp.where((expert < matrix.shape[0])[:, None], y, jnp.nan)


def by_name(activation: str, gate, up):
  """The gated activation that tokamax has under a name."""
  kind, *numbers = activation.split(":", maxsplit=2)
  if kind == "silu":
    return jax.nn.silu(gate) * up
  assert kind == "situ"
  beta = float(numbers[0])
  linear = up if numbers[1] == "none" else float(numbers[1]) * jnp.tanh(up / float(numbers[1]))
  return beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate) * linear


@functools.cache
def runner(name: str, config, compute):
  """A jitted function (stack in the run's form, layer, x, ids, weights) of one of RUNS."""
  settings = {"config": config, "compute": compute}

  def run(stack, layer, x, ids, weights):
    if name == "grouped":
      outside = jnp.where((ids >= 0) & (ids < EXPERTS), ids, EXPERTS)
      return grouped_experts(x, outside, weights, stack, layer, **settings, product=plain_product, chunk_rows=32)
    implementation = name.split("/", maxsplit=1)[0]
    return run_experts(
      x, ids, weights, stack, layer, **settings, implementation=implementation, interpret=name != "reference"
    )

  return jax.jit(run)


def form(name: str) -> str:
  return {"reference": "stored", "grouped": "float4"}.get(name) or name.split("/")[1]


def check(name: str, config, compute, stack: ExpertStack, x, ids, weights):
  """Runs one implementation and compares it with the loop."""
  found = runner(name, config, compute)(in_form(stack, form(name)), jnp.int32(LAYER), x, ids, weights)
  assert found.dtype == jnp.float32
  expected = loop(config, stack, LAYER, x, ids, weights)
  np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
  return np.asarray(found)


@pytest.fixture(scope="module")
def stack() -> ExpertStack:
  return make_stack()


@pytest.mark.parametrize(
  ("rows", "name"),
  [
    (rows, name) if rows == 7 and name in MOST else slow(rows, name)
    for rows, name in itertools.product((1, 2, 7, 64, 65), RUNS)
  ],
)
def test_any_number_of_tokens(k3_config, float32_compute, stack, name, rows):
  check(name, k3_config, float32_compute, stack, *make_rows(rows))


@pytest.mark.parametrize("name", MOST)
@pytest.mark.parametrize(
  "experts",
  [range(EXPERTS, EXPERTS + 4), range(EXPERTS - 1, EXPERTS + 3), range(1, 5), range(EXPERTS), range(-3, 1)],
  ids=["none", "the last only", "all but the first", "all", "the first only"],
)
def test_any_number_of_hit_experts(k3_config, float32_compute, stack, name, experts):
  x, ids, weights = make_rows(7, experts)
  found = check(name, k3_config, float32_compute, stack, x, ids, weights)
  idle = ~((ids >= 0) & (ids < EXPERTS)).any(axis=1)
  np.testing.assert_array_equal(found[idle], 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_one_expert_may_take_every_token(k3_config, float32_compute, stack, name):
  rows = 65
  assert rows > 8 * VISIT_ROWS
  x, ids, weights = make_rows(rows, range(EXPERTS, EXPERTS + 4))
  ids[:, 2] = 3
  check(name, k3_config, float32_compute, stack, x, ids, weights)


@pytest.mark.parametrize("name", MOST)
def test_the_lowest_scale_bytes_count_as_next_to_nothing(k3_config, float32_compute, stack, name):
  """2**-127 is no normal float, a TPU takes it for 0: far below what float32 shows beside ordinary groups."""
  rng = np.random.default_rng(0)
  scales = {}
  for key in ("s1", "s3", "s2"):
    ordinary = getattr(stack, key)
    scales[key] = np.where(rng.random(ordinary.shape) < 0.5, ordinary, rng.integers(0, 2, ordinary.shape, np.uint8))
  check(name, k3_config, float32_compute, stack._replace(**scales), *make_rows(7, range(EXPERTS)))


@pytest.mark.parametrize("name", MOST)
@pytest.mark.parametrize(
  ("keys", "rows_by", "weights_by"), [(("1", "3"), -122, 0), (("2",), -8, -110)], ids=["gate and up", "down"]
)
def test_the_highest_scale_bytes_are_exact(k3_config, float32_compute, name, keys, rows_by, weights_by):
  """252 to 254, with the codes 0 and +-0.5 that float32 can hold then; rows and weights bring the results near 1."""
  stack, rng = make_stack(), np.random.default_rng(0)
  for key in keys:
    scales = rng.integers(252, 255, getattr(stack, f"s{key}").shape, dtype=np.uint8)
    stack = stack._replace(**{f"s{key}": scales, f"w{key}": getattr(stack, f"w{key}") & 0x99})
  x, ids, weights = make_rows(7, range(EXPERTS))
  # Rows of one size: the products of smaller numbers would leave float32's normal range, where CPUs round to 0.
  check(name, k3_config, float32_compute, stack, np.ldexp(np.sign(x), rows_by), ids, np.ldexp(weights, weights_by))


@pytest.mark.parametrize("name", ["decode_kernel/float4", *map(slow, ("reference", *RUNS[2:]))])
def test_bfloat16_rows_lose_no_more_than_their_own_rounding(k3_config, float32_compute, stack, name):
  compute = dataclasses.replace(float32_compute, dtype=jnp.bfloat16)
  x, ids, weights = make_rows(7)
  x = np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))
  arguments = (in_form(stack, form(name)), jnp.int32(LAYER), x, ids, weights)
  expected = loop(k3_config, stack, LAYER, x, ids, weights)
  found = runner(name, k3_config, compute)(*arguments)
  # What is rounded is the hidden value, to 8 bits: 2**-9 of each of its products, of random sign.
  np.testing.assert_allclose(found, expected, rtol=0, atol=2**-8 * np.abs(expected).max())


@pytest.mark.parametrize(
  ("rows", "name"),
  [(rows, name) if rows == 7 and name in MOST else slow(rows, name) for rows, name in itertools.product((7, 65), RUNS)],
)
def test_a_row_with_no_expert_here_may_hold_nan(k3_config, float32_compute, stack, name, rows):
  x, ids, weights = make_rows(rows)
  clean = check(name, k3_config, float32_compute, stack, x, ids, weights)
  pads = np.arange(rows) % 3 == 1
  x[pads], ids[pads], weights[pads] = np.nan, EXPERTS, np.nan
  found = np.asarray(
    runner(name, k3_config, float32_compute)(in_form(stack, form(name)), jnp.int32(LAYER), x, ids, weights)
  )
  np.testing.assert_array_equal(found[pads], 0)
  np.testing.assert_allclose(found[~pads], clean[~pads], rtol=0, atol=TOLERANCE * np.abs(clean).max())


@pytest.mark.parametrize("name", MOST)
def test_nan_in_a_token_stays_in_that_token(k3_config, float32_compute, stack, name):
  x, ids, weights = make_rows(7, range(EXPERTS))
  x[3] = np.nan
  found = np.asarray(
    runner(name, k3_config, float32_compute)(in_form(stack, form(name)), jnp.int32(LAYER), x, ids, weights)
  )
  np.testing.assert_array_equal(np.isnan(found).any(axis=1), np.arange(7) == 3)


@pytest.mark.parametrize("name", ["reference", *map(slow, RUNS[1:])])
@pytest.mark.parametrize("activation", ["silu", "situ without linear_beta"])
def test_every_gated_activation(k3_config, float32_compute, stack, name, activation):
  changes = {"hidden_act": "silu"} if activation == "silu" else {"situ_linear_beta": None}
  config = dataclasses.replace(k3_config, **changes)
  check(name, config, float32_compute, stack, *make_rows(7))


@pytest.mark.parametrize("name", ["grouped", *map(slow, RUNS[:-1])])
def test_a_scan_over_layers_takes_each_layer_of_the_stack(k3_config, float32_compute, stack, name):
  x, ids, weights = make_rows(7)
  run, shaped = runner(name, k3_config, float32_compute), in_form(stack, form(name))
  step = lambda _, layer: (None, run(shaped, layer, x, ids, weights))  # noqa: E731
  found = jax.jit(lambda: jax.lax.scan(step, None, jnp.arange(LAYERS, dtype=jnp.int32))[1])()
  for layer in range(LAYERS):
    expected = loop(k3_config, stack, layer, x, ids, weights)
    np.testing.assert_allclose(found[layer], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("other", ["float4", slow("nibbles")])
def test_the_reference_gives_the_same_bits_in_every_form(k3_config, float32_compute, stack, other):
  run, rows = runner("reference", k3_config, float32_compute), make_rows(7)
  stored, found = (run(in_form(stack, f), jnp.int32(LAYER), *rows) for f in ("stored", other))
  np.testing.assert_array_equal(stored, found)


def test_the_reference_copies_no_layer_out_of_the_stack(k3_config, float32_compute):
  shapes = jax.eval_shape(lambda: in_form(make_stack(), "stored"))
  big = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((LAYERS, 64, *leaf.shape[2:]), leaf.dtype), shapes)
  x, ids, weights = make_rows(7)
  compiled = runner("reference", k3_config, float32_compute).lower(big, jnp.int32(0), x, ids, weights).compile()
  layer = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(big)) // LAYERS
  assert compiled.memory_analysis().temp_size_in_bytes < layer / 2


def test_each_implementation_has_a_form_on_each_device_that_runs_it():
  assert {name: form_of(name, "TPU7x") for name in EXPERT_IMPLEMENTATIONS} == {
    "reference": "stored",
    "decode_kernel": "float4",
    "grouped": "float4",
  }
  assert form_of("decode_kernel", "TPU v6 lite") == "nibbles"
  assert form_of("decode_kernel", "cpu", interpret=True) == "float4"
  assert form_of("reference", "NVIDIA H200") == "stored"


@pytest.mark.parametrize(
  ("name", "kind", "message"),
  [
    ("decode_kernel", "cpu", "'decode_kernel' needs a TPU, found 'cpu': use 'reference'"),
    ("decode_kernel", "NVIDIA H200", "'decode_kernel' needs a TPU, found 'NVIDIA H200'"),
    ("grouped", "TPU v6 lite", r"'grouped' needs a TPU with float4 \(TPU7x\), found 'TPU v6 lite'"),
    ("grouped", "cpu", "'grouped' needs a TPU with float4"),
    ("ragged", "TPU7x", "'ragged', expected one of reference, decode_kernel, grouped"),
  ],
)
def test_an_implementation_that_a_device_cannot_run_is_refused_by_name(name, kind, message):
  with pytest.raises(InputError, match=message):
    form_of(name, kind)


def test_implementations_that_share_the_experts_share_a_form():
  assert shared_form(["decode_kernel", "grouped"], "TPU7x") == "float4"
  assert shared_form(["decode_kernel", "reference"], "TPU v6 lite") == "nibbles"
  assert shared_form(["reference", "decode_kernel"], "cpu", interpret=True) == "float4"
  assert shared_form(["reference", "reference"], "cpu") == "stored"


def attempt(stack, rows, config, compute, **settings):
  x, ids, weights = rows
  return jax.eval_shape(
    functools.partial(run_experts, config=config, compute=compute, **settings), x, ids, weights, stack, jnp.int32(0)
  )


@pytest.mark.parametrize(
  ("settings", "kind", "message"),
  [
    ({"implementation": "portable"}, "stored", "is 'portable', expected one of reference, decode_kernel, grouped"),
    ({"implementation": "decode_kernel"}, "stored", "reads experts as float4 or nibbles, found stored"),
    ({"implementation": "grouped"}, "nibbles", "reads experts as float4, found nibbles"),
    ({"implementation": "grouped", "interpret": True}, "float4", "'grouped' has no interpret mode, it needs a TPU"),
    ({"implementation": "grouped"}, "float4", "'grouped' computes in bfloat16, found dtype float32"),
  ],
)
def test_what_an_implementation_cannot_do_is_refused_by_name(
  k3_config, float32_compute, stack, settings, kind, message
):
  with pytest.raises(InputError, match=message):
    attempt(in_form(stack, kind), make_rows(7), k3_config, float32_compute, **settings)


def test_grouped_refuses_matrices_that_do_not_fill_whole_lanes(k3_config, float32_compute, stack):
  compute = dataclasses.replace(float32_compute, dtype="bfloat16")
  with pytest.raises(InputError, match=r"multiples of 128, found \[96, 160\]: use 'reference'"):
    attempt(in_form(stack, "float4"), make_rows(7), k3_config, compute, implementation="grouped")


def test_the_decode_kernel_says_how_many_tokens_it_takes(k3_config, float32_compute, stack):
  settings = {"implementation": "decode_kernel", "interpret": True}
  shaped = in_form(stack, "float4")
  assert attempt(shaped, make_rows(MAX_TOKENS), k3_config, float32_compute, **settings).shape == (MAX_TOKENS, LATENT)
  with pytest.raises(
    InputError, match=f"takes at most {MAX_TOKENS} tokens a call, found {MAX_TOKENS + 1}: use 'grouped'"
  ):
    attempt(shaped, make_rows(MAX_TOKENS + 1), k3_config, float32_compute, **settings)


def test_experts_in_no_known_form_are_refused(k3_config, float32_compute, stack):
  wrong = stack._replace(w1=stack.w1[..., : LATENT // 4].astype(np.int8))
  with pytest.raises(InputError, match=r"codes int8\[3, 5, 160, 24\] with scales .* in none of the forms"):
    attempt(wrong, make_rows(7), k3_config, float32_compute, implementation="reference")


def test_tokamax_knows_the_activations_by_these_names(k3_config):
  gmm_v2 = pytest.importorskip("tokamax._src.ops.gmm_v2.gmm_v2")
  assert activation_name(k3_config) == "situ:4.0:25.0"
  changes = ({}, {"hidden_act": "silu"}, {"situ_linear_beta": None})
  gate, up = jnp.linspace(-9, 9, 64), jnp.linspace(40, -40, 64)
  for config in (dataclasses.replace(k3_config, **change) for change in changes):
    name = activation_name(config)
    expected = k3_reference.gated_activation(released(config), np.float64(gate), np.float64(up))
    np.testing.assert_allclose(by_name(name, gate, up), expected, rtol=1e-5)
    if name == "silu":
      continue
    _, beta, linear = name.split(":")
    found = gmm_v2.situ_and_mul(gate, up, float(beta), None if linear == "none" else float(linear))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
