"""The optional backend: what it hands over, on a stand-in with the real conventions, and the real one where it is."""

from __future__ import annotations

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_reference import delta_rule, l2_norm, sigmoid
from kimi_k3.errors import InputError
from kimi_k3.kda.kernel import run_kda
from kimi_k3.kda.tops_backend import tops_kda

BATCH, HEADS, KEY_DIM, VALUE_DIM, LENGTH = 3, 2, 16, 24, 70
LENGTHS = (70, 33, 0)
TOLERANCE = 1e-5  # of the largest value: the stand-in is the recurrence in float32; the real one's exponents are split

STAND_IN = '''
"""chunk_kda with the arguments and layouts of github.com/primatrix/pallas-kernel, token by token."""

import jax
import jax.numpy as jnp

calls = []


def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, safe_gate=False,
              chunk_size=64):
  calls.append((q.shape, v.shape, scale, chunk_size, {x.dtype.name for x in (q, k, v, g, beta, initial_state)}))
  assert q.shape[1] % chunk_size == 0 and output_final_state and safe_gate
  assert initial_state.shape == (q.shape[0], q.shape[2], q.shape[3], v.shape[3])

  def step(state, token):
    q, k, v, g, beta = token
    state = state * jnp.exp(g)[..., None]
    rest = v - jnp.einsum("bhk,bhkv->bhv", k, state)
    state = state + (beta[..., None] * k)[..., None] * rest[:, :, None]
    return state, scale * jnp.einsum("bhk,bhkv->bhv", q, state)

  tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)]
  state, o = jax.lax.scan(step, initial_state, tokens)
  return jnp.moveaxis(o, 0, 1), state
'''


@pytest.fixture
def install(tmp_path, monkeypatch):
  """Returns a function: a package `tops` with the given files, gone after the test."""

  def forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "tops"]:
      monkeypatch.delitem(sys.modules, name)

  def make(files):
    for name, text in {"tops/__init__.py": "", **files}.items():
      (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
      (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    forget()

  yield make
  for name in [name for name in sys.modules if name.split(".")[0] == "tops"]:
    del sys.modules[name]


def make_case(key_dim=KEY_DIM, value_dim=VALUE_DIM):
  """q, k, v, a, a_log, dt_bias, beta, state and valid; the second head decays at the floor, pads hold NaN."""
  rng = np.random.default_rng(0)
  shape = (BATCH, LENGTH, HEADS)
  q, k, a = rng.standard_normal((3, *shape, key_dim))
  v, beta = rng.standard_normal((*shape, value_dim)), sigmoid(rng.standard_normal(shape))
  a_log, dt_bias = np.log([1.0, 4.0]), rng.uniform(-6.5, -2.0, (HEADS, key_dim))
  dt_bias[1] += 12.0
  state = rng.standard_normal((BATCH, HEADS, key_dim, value_dim))
  valid = np.arange(LENGTH) < np.array(LENGTHS)[:, None]
  for x in (q, k, v, a, beta):
    x[~valid] = np.nan
  return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v, a, a_log, dt_bias, beta, state)), jnp.asarray(valid)


def assert_equals_the_reference(case, valid):
  from tokamax import config

  with config.cross_compile(True):  # no TPU is asked for
    o, state = jax.jit(run_kda, static_argnames=("lower_bound", "implementation"))(
      *case, lower_bound=-5.0, valid=valid, resets=None, implementation="tops"
    )
  q, k, v, a, a_log, dt_bias, beta, before = (np.asarray(x, np.float64) for x in case)
  g = -5.0 * sigmoid(np.exp(a_log)[:, None] * (a + dt_bias))
  for row, length in enumerate(LENGTHS):
    tokens = [x[row : row + 1, :length] for x in (l2_norm(q), l2_norm(k), v, g, beta)]
    expected, after = delta_rule(*tokens, before[row : row + 1])
    np.testing.assert_allclose(o[row, :length], expected[0], rtol=0, atol=TOLERANCE * np.abs(expected).max(initial=1.0))
    np.testing.assert_allclose(state[row], after[0], rtol=0, atol=TOLERANCE * np.abs(after).max())
    np.testing.assert_array_equal(o[row, length:], 0.0)


def test_the_arguments_are_in_the_layouts_of_the_stand_in(install):
  install({"tops/ops/__init__.py": "", "tops/ops/kda/__init__.py": STAND_IN})
  case, valid = make_case()
  assert_equals_the_reference(case, valid)
  (call,) = tops_kda().calls
  padded = (BATCH, 128, HEADS)
  assert call == ((*padded, KEY_DIM), (*padded, VALUE_DIM), KEY_DIM**-0.5, 64, {"float32"})


def test_another_package_of_that_name_is_refused_and_not_imported(install):
  install({"tops/__init__.py": "raise AssertionError('imported')"})
  with pytest.raises(InputError, match=r"needs the module tops.ops.kda .* has none \(PyPI's tops is another project\)"):
    run_kda(*make_case()[0], lower_bound=-5.0, valid=None, resets=None, implementation="tops")


def test_a_version_that_gives_nan_at_the_bound_is_refused(install):
  old = STAND_IN.replace("safe_gate=False,", "").replace(" and safe_gate", "")
  install({"tops/ops/__init__.py": "", "tops/ops/kda/__init__.py": old})
  with pytest.raises(InputError, match=r"has no safe_gate.*install a later version"):
    run_kda(*make_case()[0], lower_bound=-5.0, valid=None, resets=None, implementation="tops")


def test_the_absence_is_named(monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
  message = (
    'needs the package tops of github.com/primatrix/pallas-kernel, found none.*use kda_implementation "portable"'
  )
  with pytest.raises(InputError, match=message):
    run_kda(*make_case()[0], lower_bound=-5.0, valid=None, resets=None, implementation="tops")


def test_the_real_one_equals_the_reference_where_it_is_installed(monkeypatch):
  try:
    tops_kda()
  except InputError as error:
    pytest.skip(str(error))
  monkeypatch.setenv("PALLAS_INTERPRET", "1")  # its own switch
  with jax.numpy_rank_promotion("allow"):
    assert_equals_the_reference(*make_case(128, 128))
