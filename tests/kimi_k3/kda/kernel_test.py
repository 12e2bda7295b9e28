import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_reference import delta_rule, l2_norm, sigmoid
from kimi_k3.errors import InputError
from kimi_k3.kda.kernel import run_kda

pytestmark = pytest.mark.strict_ranks

BATCH, HEADS, KEY_DIM, VALUE_DIM = 4, 3, 32, 48
LENGTH = 65
LENGTHS = [65, 17, 1, 0]  # of the rows, when padded; the last is a slot with nothing in it
PORTABLE_TOLERANCE = 2e-6  # see chunked_test.py
# Its exponents are differences of running sums of up to 64 * 5, where a unit in the last place is 3e-5.
TOKAMAX_TOLERANCE = 2e-5
TOLERANCES = {"portable": PORTABLE_TOLERANCE, "tokamax_xla_chunked": TOKAMAX_TOLERANCE}

_run = jax.jit(run_kda, static_argnames=("lower_bound", "implementation"))
portable = functools.partial(_run, implementation="portable")


@functools.cache
def padded_program(implementation):
  """The compiled (args, valid) -> (o, state), gradients: one program, which is slow to compile, for several tests."""

  def loss(args, valid):
    o, state = run_kda(*args, lower_bound=-5.0, valid=valid, resets=None, implementation=implementation)
    return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(state)), (o, state)

  def run(args, valid):
    (_, out), grads = jax.value_and_grad(loss, has_aux=True)(args, valid)
    return out, grads

  return jax.jit(run)


@pytest.fixture(scope="module")
def args():
  """q, k, v, a, a_log, dt_bias, beta, state over LENGTH tokens; q and k are not normalised."""
  rng = np.random.default_rng(0)
  shape = (BATCH, LENGTH, HEADS)
  q, k, a = rng.standard_normal((3, *shape, KEY_DIM))
  v, beta = rng.standard_normal((*shape, VALUE_DIM)), sigmoid(rng.standard_normal(shape))
  a_log, dt_bias = np.log([1.0, 4.0, 16.0]), rng.uniform(-6.5, -2.0, (HEADS, KEY_DIM))
  state = rng.standard_normal((BATCH, HEADS, KEY_DIM, VALUE_DIM))
  # A head that decays at the floor all the time, beside one with little decay.
  dt_bias[1] += 12.0
  return tuple(jnp.asarray(x, jnp.float32) for x in (3 * q, 0.2 * k, v, a, a_log, dt_bias, beta, state))


@pytest.fixture(scope="module")
def valid():
  return jnp.arange(LENGTH)[None] < jnp.array(LENGTHS)[:, None]


def cut(args, length):
  q, k, v, a, a_log, dt_bias, beta, state = args
  return (*(x[:, :length] for x in (q, k, v, a)), a_log, dt_bias, beta[:, :length], state)


def with_garbage(args, valid, garbage):
  """The arguments with every input of every pad replaced."""
  tokens = [jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, garbage) for x in (*args[:4], args[6])]
  return (*tokens[:4], *args[4:6], tokens[4], args[7])


def exact(args, row, length, lower_bound):
  """Output and state of one row, in float64."""
  q, k, v, a, a_log, dt_bias, beta, state = (np.asarray(x, np.float64) for x in args)
  q, k, v, a, beta = (x[row : row + 1, :length] for x in (q, k, v, a, beta))
  rate = np.exp(a_log)[:, None]
  g = -rate * np.logaddexp(0.0, a + dt_bias) if lower_bound is None else lower_bound * sigmoid(rate * (a + dt_bias))
  o, state = delta_rule(l2_norm(q), l2_norm(k), v, g, beta, state[row : row + 1])
  return o[0], state[0]


def assert_close(found, expected, tolerance):
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max(initial=1.0))


@pytest.mark.parametrize("implementation", TOLERANCES)
def test_rows_of_differing_lengths_equal_the_reference_alone(args, valid, implementation):
  (o, state), _ = padded_program(implementation)(args, valid)
  for row, length in enumerate(LENGTHS):
    expected, after = exact(args, row, length, -5.0)
    assert_close(o[row, :length], expected, TOLERANCES[implementation])
    assert_close(state[row], after, TOLERANCES[implementation])


def test_softplus_gate_rows_of_differing_lengths_equal_the_reference_alone(args, valid):
  o, state = portable(*args, lower_bound=None, valid=valid, resets=None)
  for row, length in enumerate(LENGTHS):
    expected, after = exact(args, row, length, None)
    assert_close(o[row, :length], expected, PORTABLE_TOLERANCE)
    assert_close(state[row], after, PORTABLE_TOLERANCE)


@pytest.mark.parametrize("implementation", TOLERANCES)
@pytest.mark.parametrize("garbage", [1e6, jnp.nan])
def test_content_of_pads_changes_no_bit_and_an_empty_row_keeps_its_state(args, valid, implementation, garbage):
  (o, state), grads = padded_program(implementation)(args, valid)
  (o_garbage, state_garbage), grads_garbage = padded_program(implementation)(with_garbage(args, valid, garbage), valid)
  np.testing.assert_array_equal(o_garbage, o)
  np.testing.assert_array_equal(state_garbage, state)
  for found, expected in zip(grads_garbage, grads, strict=True):
    np.testing.assert_array_equal(found, expected)
  np.testing.assert_array_equal(state[LENGTHS.index(0)], args[-1][LENGTHS.index(0)])
  np.testing.assert_array_equal(jnp.where(valid[..., None, None], 0, o), jnp.zeros_like(o))


def test_tokamax_equals_portable_at_a_length_that_is_no_multiple_of_its_chunk(args):
  names = ("tokamax_xla_chunked", "portable")
  results = (_run(*cut(args, 63), lower_bound=-5.0, valid=None, resets=None, implementation=name) for name in names)
  for found, expected in zip(*results, strict=True):
    assert_close(found, expected, TOKAMAX_TOLERANCE)


@pytest.mark.parametrize("implementation", ["portable", "tokamax_xla_chunked"])
def test_one_token_is_one_step_under_any_name(args, implementation):
  token = cut(args, 1)
  valid = jnp.array([True, True, False, False])[:, None]
  o, state = _run(
    *with_garbage(token, valid, jnp.nan), lower_bound=-5.0, valid=valid, resets=None, implementation=implementation
  )
  for row in (0, 1):
    expected, after = exact(token, row, 1, -5.0)
    assert_close(o[row], expected, PORTABLE_TOLERANCE)
    assert_close(state[row], after, PORTABLE_TOLERANCE)
  np.testing.assert_array_equal(state[2:], args[-1][2:])


@pytest.mark.parametrize("length", [1, LENGTH])
def test_packed_documents_see_an_empty_state_and_starts_in_pads_do_nothing(args, valid, length):
  args, valid, empty = cut(args, length), valid[:, :length], (*args[:-1], 0 * args[-1])
  starts = (0, 5, 40)
  resets = jnp.asarray(np.stack([np.isin(np.arange(length), starts)] * BATCH))
  o, state = portable(*args, lower_bound=-5.0, valid=valid, resets=resets)
  for row, real in enumerate(LENGTHS):
    bounds = [*(s for s in starts if s < min(real, length)), min(real, length)]
    after = np.asarray(args[-1][row])
    for start, stop in itertools.pairwise(bounds):
      document = (*(x[:, start:] for x in empty[:4]), *empty[4:6], empty[6][:, start:], empty[7])
      expected, after = exact(document, row, stop - start, -5.0)
      assert_close(o[row, start:stop], expected, PORTABLE_TOLERANCE)
    assert_close(state[row], after, PORTABLE_TOLERANCE)


def test_state_is_keys_by_values():
  """One token on an empty state writes beta k v^T, and two orthogonal keys fill two rows."""
  k = jnp.array([[0.0, 3.0, 0.0], [0.0, 0.0, 5.0]])[None, :, None]
  v, beta = jnp.array([[1.0, 2.0], [3.0, 4.0]])[None, :, None], jnp.full((1, 2, 1), 0.5)
  closed = jnp.full(k.shape, -1e4)  # no decay
  rest = (closed, jnp.zeros(1), jnp.zeros((1, 3)), beta, jnp.zeros((1, 1, 3, 2)))
  expected = np.array([[[0.0, 0.0], [0.5, 1.0], [1.5, 2.0]]])
  for implementation, length in (("portable", 1), ("portable", 2), ("tokamax_xla_chunked", 2)):
    options = {"lower_bound": -5.0, "valid": None, "resets": None, "implementation": implementation}
    _, state = _run(*cut((k, k, v, *rest), length), **options)
    assert_close(state[0], np.where(np.arange(3)[None, :, None] <= length, expected, 0.0), TOKAMAX_TOLERANCE)


def tokens_from(args, starts, count):
  """`count` tokens of each row from where each row's prompt ends."""
  places = np.asarray(starts)[:, None] + np.arange(count)
  q, k, v, a, a_log, dt_bias, beta, state = args
  q, k, v, a, beta = (x[np.arange(BATCH)[:, None], places] for x in (q, k, v, a, beta))
  return q, k, v, a, a_log, dt_bias, beta, state


@pytest.mark.parametrize("implementation", TOLERANCES)
def test_steps_after_padded_prompts_carry_the_chunked_state_on(args, implementation):
  """K and V differ, so a state that one of the two forms holds transposed does not even fit."""
  prompts, steps = [61, 17, 1, 0], 4
  valid = jnp.arange(LENGTH)[None] < jnp.array(prompts)[:, None]
  (_, state), _ = padded_program(implementation)(args, valid)
  assert state.shape == (BATCH, HEADS, KEY_DIM, VALUE_DIM)
  tokens, outputs = tokens_from(args, prompts, steps), []
  for t in range(steps):
    token = (*(x[:, t : t + 1] for x in tokens[:4]), *tokens[4:6], tokens[6][:, t : t + 1], state)
    o, state = _run(*token, lower_bound=-5.0, valid=None, resets=None, implementation=implementation)
    outputs.append(o)
  found = jnp.concatenate(outputs, axis=1)
  for row, length in enumerate(prompts):
    expected, after = exact(args, row, length + steps, -5.0)
    assert_close(found[row], expected[length:], TOLERANCES[implementation])
    assert_close(state[row], after, TOLERANCES[implementation])


@pytest.mark.parametrize("implementation", TOLERANCES)
def test_a_tail_of_one_to_three_tokens_on_a_carried_state_equals_the_reference_padded_or_not(args, implementation):
  """Not padded: three, as one token is a step; chunked_test.py has more."""
  lengths = [1, 2, 3, 0]
  padded, _ = padded_program(implementation)(args, jnp.arange(LENGTH)[None] < jnp.array(lengths)[:, None])
  bare = _run(*cut(args, 3), lower_bound=-5.0, valid=None, resets=None, implementation=implementation)
  for (o, state), reals in ((padded, lengths), (bare, [3] * BATCH)):
    for row, length in enumerate(reals):
      expected, after = exact(args, row, length, -5.0)
      assert_close(o[row, :length], expected, TOLERANCES[implementation])
      assert_close(state[row], after, TOLERANCES[implementation])


@pytest.mark.parametrize("implementation", TOLERANCES)
def test_later_tokens_change_no_earlier_output(args, implementation):
  """At the edges of tokens, of sub-chunks (16), of the two chunks of 48 that 65 tokens take, and of 64."""
  everything = jnp.ones((BATCH, LENGTH), bool)
  (o, _), _ = padded_program(implementation)(args, everything)
  other = [x[::-1] for x in (*args[:4], args[6])]  # each row goes on as another
  for t in (1, 15, 16, 17, 47, 48, 49, 63, 64):
    early = jnp.arange(LENGTH)[None] < t
    mixed = [
      jnp.where(early.reshape(1, LENGTH, *(1,) * (x.ndim - 2)), x, y)
      for x, y in zip((*args[:4], args[6]), other, strict=True)
    ]
    (found, _), _ = padded_program(implementation)((*mixed[:4], *args[4:6], mixed[4], args[7]), everything)
    assert_close(found[:, :t], o[:, :t], 1e-6)
    assert np.abs(found[:, t] - o[:, t]).max() > 1e-3  # the change is seen from t on


# -0.0 and subnormals are changed by adding 0, a NaN's bits by any arithmetic.
STRANGE = np.array([-0.0, 0.0, 1e-42, -1e-42, 1.5, np.inf, -np.inf, np.nan], np.float32)


def bits(x):
  return np.asarray(x).view(np.uint32)


@pytest.mark.parametrize(
  ("implementation", "length"), [("portable", 1), ("portable", LENGTH), ("tokamax_xla_chunked", LENGTH)]
)
def test_a_row_without_a_real_token_keeps_every_bit_of_its_state(args, valid, implementation, length):
  strange = jnp.asarray(np.resize(STRANGE, args[-1].shape[1:]))
  valid = valid[:, :length].at[1].set(False)
  empty = np.flatnonzero(~np.asarray(valid).any(axis=1))
  assert set(empty) == {1, 3}
  state = args[-1].at[empty].set(strange)
  for garbage in (jnp.nan, jnp.inf, -0.0):
    given = (*with_garbage(cut(args, length), valid, garbage)[:-1], state)
    if length == 1:
      o, after = _run(*given, lower_bound=-5.0, valid=valid, resets=None, implementation=implementation)
    else:
      (o, after), _ = padded_program(implementation)(given, valid)
    np.testing.assert_array_equal(bits(after[empty]), bits(state[empty]))
    np.testing.assert_array_equal(o[empty], 0.0)
    others = np.array([0, 2])
    assert np.isfinite(o[others]).all()
    assert np.isfinite(after[others]).all()


@pytest.mark.parametrize("implementation", TOLERANCES)
def test_a_nan_in_one_row_changes_no_bit_of_the_others(args, valid, implementation):
  (o, state), _ = padded_program(implementation)(args, valid)
  poisoned = tuple(x.at[0].set(jnp.nan) for x in args[:4])
  (o_found, state_found), _ = padded_program(implementation)((*poisoned, *args[4:]), valid)
  np.testing.assert_array_equal(o_found[1:], o[1:])
  np.testing.assert_array_equal(state_found[1:], state[1:])
  assert np.isnan(state_found[0]).any()


def test_small_updates_are_not_lost_in_a_large_state_when_the_inputs_are_bfloat16(args):
  """A token adds 2^-11 of the state: in bfloat16, which holds 2^-8, a hundred of them would add nothing."""
  token = cut(args, 1)
  k = jnp.ones((BATCH, 1, HEADS, KEY_DIM), jnp.bfloat16)
  v = jnp.full((BATCH, 1, HEADS, VALUE_DIM), KEY_DIM**0.5 + 1.0, jnp.bfloat16)
  closed, state = jnp.full(k.shape, -1e4, jnp.bfloat16), jnp.ones_like(args[-1])
  beta = jnp.full((BATCH, 1, HEADS), 2.0**-9)
  expected = 1.0
  for _ in range(100):
    o, state = portable(k, k, v, closed, *token[4:6], beta, state, lower_bound=-5.0, valid=None, resets=None)
    expected += 2.0**-9 * KEY_DIM**-0.5 * (float(v[0, 0, 0, 0]) - KEY_DIM**0.5 * expected)
  assert (o.dtype, state.dtype) == (jnp.float32, jnp.float32)
  assert expected > 1.02
  assert_close(state, np.full(state.shape, expected), 100 * 6e-8)  # each step rounds the state


def test_gradients_are_finite_and_the_same_in_both_implementations(args, valid):
  (_, expected), (_, found) = (padded_program(name)(args, valid) for name in TOLERANCES)
  for a, b in zip(found, expected, strict=True):
    assert np.all(np.isfinite(b))
    # tokamax's backward pass repeats its forward sums and adds its own.
    assert_close(a, b, 5 * TOKAMAX_TOLERANCE)


def test_exactly_the_named_tokamax_implementation_is_asked_for(args, monkeypatch):
  from tokamax import ops

  asked = []

  def record(*_args, implementation, **_kwargs):
    asked.append(implementation)
    raise NotImplementedError("no")

  monkeypatch.setattr(ops, "kimi_delta_attention", record)
  with pytest.raises(NotImplementedError):
    run_kda(*args, lower_bound=-5.0, valid=None, resets=None, implementation="tokamax_xla_chunked")
  assert asked == ["xla_chunked"]


def test_mosaic_kernel_interpreted_equals_the_reference(args, valid, monkeypatch):
  import tokamax
  from jax.experimental.pallas import tpu as pallas_tpu

  chip = types.SimpleNamespace(generation=7, vmem_capacity_bytes=64 * 2**20, num_sublanes=8, num_lanes=128)
  monkeypatch.setattr(pallas_tpu, "get_tpu_info", lambda: chip)
  monkeypatch.setenv("PALLAS_INTERPRET", "1")
  with tokamax.config.cross_compile(True), jax.numpy_rank_promotion("allow"):
    o, state = run_kda(*args, lower_bound=-5.0, valid=valid, resets=None, implementation="tokamax_mosaic")
  for row, length in enumerate(LENGTHS):
    expected, after = exact(args, row, length, -5.0)
    assert_close(o[row, :length], expected, TOKAMAX_TOLERANCE)
    assert_close(state[row], after, TOKAMAX_TOLERANCE)


@pytest.mark.parametrize(
  ("implementation", "lower_bound", "packed", "message"),
  [
    ("pallas", -5.0, False, "'pallas', expected one of: portable, tokamax_mosaic, tokamax_xla_chunked, tops"),
    ("tokamax_xla_chunked", None, False, 'needs a gate_lower_bound.*use kda_implementation "portable"'),
    ("tokamax_xla_chunked", -6.0, False, 'gate_lower_bound of at least -5.0, found -6.0.*"portable"'),
    ("tokamax_xla_chunked", -5.0, True, 'does not take packed documents.*"portable"'),
    ("tokamax_mosaic", -6.0, False, 'gate_lower_bound of at least -5.0, found -6.0.*"portable"'),
    ("tokamax_mosaic", -5.0, True, 'does not take packed documents.*"portable"'),
    ("tokamax_mosaic", -5.0, False, 'needs a TPU, the backend is cpu.*"portable"'),
    ("tokamax_mosaic", None, False, 'needs a gate_lower_bound.*use kda_implementation "portable"'),
  ],
)
@pytest.mark.parametrize("length", [1, LENGTH])
def test_what_an_implementation_cannot_do_is_refused(args, implementation, lower_bound, packed, message, length):
  args = cut(args, length)
  resets = jnp.zeros(args[0].shape[:2], bool) if packed else None
  with pytest.raises(InputError, match=message):
    run_kda(*args, lower_bound=lower_bound, valid=None, resets=resets, implementation=implementation)


def compiled(topology, devices, heads, rows, length, dtype=jnp.bfloat16):
  """Report of a prefill chunk by tokamax's TPU kernel, `heads` on each device."""
  from kimi_k3.capacity.topology import compile_for, tpu_mesh

  mesh, width, P = tpu_mesh(topology, {"x": devices}), 128, jax.P
  heads *= devices

  def chunk(*case):
    *case, valid = case
    return run_kda(*case, lower_bound=-5.0, valid=valid, resets=None, implementation="tokamax_mosaic")

  token, tokens = P(None, None, "x"), (rows, length, heads, width)
  cases = [
    *[(tokens, dtype, token)] * 4,
    ((heads,), jnp.float32, P("x")),
    ((heads, width), jnp.float32, P("x")),
    (tokens[:3], jnp.float32, token),
    ((rows, heads, width, width), jnp.float32, P(None, "x")),
    ((rows, length), jnp.bool_, P()),
  ]
  specs = [spec for *_, spec in cases]
  args = [jax.ShapeDtypeStruct(s, t, sharding=jax.NamedSharding(mesh, spec)) for s, t, spec in cases]
  # tokamax says nothing of what varies over the mesh.
  function = jax.shard_map(chunk, mesh=mesh, in_specs=tuple(specs), out_specs=(token, P(None, "x")), check_vma=False)
  with jax.numpy_rank_promotion("allow"):
    return compile_for(mesh, function, args, donate=(7,))


@pytest.mark.aot
@pytest.mark.parametrize(("rows", "length"), [(1, 32768), (4, 8192)])
@pytest.mark.parametrize(
  ("topology", "devices", "heads"),
  [("tpu7x:2x2x4", 32, 3), ("tpu7x:2x2x1", 1, 6), ("tpu7x:2x2x1", 1, 12), ("tpu7x:2x2x1", 1, 96), ("v6e:2x2", 1, 3)],
)
def test_mosaic_kernel_compiles_on_local_heads(topology, devices, heads, rows, length):
  report = compiled(topology, devices, heads, rows, length)
  assert report.memory.temp_bytes < heads * 130 * 2**20  # 4 KiB a token and head
  # With the rates' transposition unrolled over the tokens it was ten times as much, and minutes of compiling.
  assert report.memory.code_bytes < 8 * 2**20
