"""The suite's own set-up: what the fixtures promise, and that shape checking is on when it is asked for."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parent
NAN = np.array([1.0, np.nan])


def test_a_wrong_shape_raises_under_jaxtyping_packages(pytestconfig):
  if not pytestconfig.getoption("jaxtyping_packages"):
    pytest.skip("needs --jaxtyping-packages=kimi_k3,beartype.beartype, as make test gives it")
  import jax.numpy as jnp
  import jaxtyping

  from kimi_k3.kda.gate import decay_gate

  a, a_log, dt_bias = jnp.zeros((1, 2, 3, 4)), jnp.zeros(3), jnp.zeros((3, 4))
  assert decay_gate(a, a_log, dt_bias, lower_bound=-5.0).shape == a.shape
  with pytest.raises(jaxtyping.TypeCheckError):
    decay_gate(a, jnp.zeros(5), dt_bias, lower_bound=-5.0)


@pytest.mark.strict_ranks
def test_rank_promotion_raises_under_its_marker():
  import jax.numpy as jnp

  with pytest.raises(ValueError, match="rank"):
    jnp.zeros((2, 3)) + jnp.zeros(3)


def test_rank_promotion_passes_without_the_marker():
  import jax.numpy as jnp

  assert (jnp.zeros((2, 3)) + jnp.zeros(3)).shape == (2, 3)


def test_jax_computes_on_cpu_with_full_precision_products():
  import jax

  assert {device.platform for device in jax.devices()} == {"cpu"}
  assert jax.config.jax_default_matmul_precision == "highest"


def test_the_reference_reproduces_a_golden_case(k3_tiny, reference):
  checkpoint = reference.load_checkpoint(k3_tiny.checkpoint)
  logits = reference.forward(checkpoint, [k3_tiny.prompts[0]])["logits"][0]
  # float64 on both sides, stored in float32
  np.testing.assert_allclose(logits, k3_tiny.arrays["logits_0"], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", ["k3_tiny", "kimi_linear_tiny", "k3_hd128"])
def test_each_golden_case_has_its_prompts_and_continuations(name, request):
  case = request.getfixturevalue(name)
  assert [len(prompt) for prompt in case.prompts] == case.info["prompt_lengths"]
  assert [len(ids) for ids in case.greedy] == [32] * len(case.prompts)
  assert (case.checkpoint / "model.safetensors.index.json").is_file()


def test_equal_arguments_share_one_tiny_checkpoint(tiny_checkpoint):
  first = tiny_checkpoint("--layers", "5", "--seed", "3")
  assert tiny_checkpoint("--layers", "5", "--seed", "3") == first
  assert tiny_checkpoint("--layers", "6", "--seed", "3") != first


# What to call each comparison with beside the two values.
COMPARISONS = {
  "assert_allclose": {"rtol": 1e-3},
  "assert_almost_equal": {},
  "assert_approx_equal": {},
  "assert_array_almost_equal": {},
  "assert_array_almost_equal_nulp": {},
  "assert_array_equal": {},
  "assert_array_less": {},
  "assert_array_max_ulp": {},
  "assert_equal": {},
}


def test_every_comparison_of_numpy_is_guarded():
  """A comparison that a later numpy brings would take NaN for equal to NaN again."""
  others = {"assert_", "assert_array_compare", "assert_string_equal", "assert_no_gc_cycles", "assert_no_warnings"}
  others |= {"assert_raises", "assert_raises_regex", "assert_warns"}
  assert {name for name in dir(np.testing) if name.startswith("assert_")} - others == set(COMPARISONS)


@pytest.mark.parametrize("name", COMPARISONS)
def test_nan_on_both_sides_is_a_failure(name):
  value = np.float64(np.nan) if name == "assert_approx_equal" else NAN
  with pytest.raises(AssertionError):
    getattr(np.testing, name)(value, value, **COMPARISONS[name])


@pytest.mark.nan_expected
def test_nan_is_equal_to_nan_under_its_marker():
  np.testing.assert_allclose(NAN, NAN)
  np.testing.assert_array_equal(NAN, NAN)
  np.testing.assert_equal({"a": [NAN]}, {"a": [NAN]})


def test_nan_is_found_in_lists_and_in_jax_arrays_and_under_keywords():
  import jax.numpy as jnp

  for value in ([NAN, "a"], {"a": (1, NAN)}):
    with pytest.raises(AssertionError, match="NaN on both sides"):
      np.testing.assert_equal(value, value)
  with pytest.raises(AssertionError, match="NaN on both sides"):
    np.testing.assert_array_equal(desired=jnp.asarray(NAN), actual=jnp.asarray(NAN), err_msg="x")


def test_comparisons_without_nan_are_left_alone():
  for value in (np.arange(3), ["a", "b"], np.array(["a"]), np.array([None, 1], object), np.array([np.inf])):
    np.testing.assert_array_equal(value, value)
  with pytest.raises(AssertionError, match="nan location mismatch"):
    np.testing.assert_array_equal(NAN, [1.0, 2.0])


@pytest.mark.parametrize("tolerance", [np.inf, np.nan])
def test_a_tolerance_that_everything_is_within_is_a_failure(tolerance):
  # A bound of 1e-4 times the largest expected value is infinite when that is.
  for name in ("rtol", "atol"):
    with pytest.raises(AssertionError):
      np.testing.assert_allclose([1.0], [2.0], **{name: tolerance})


def passes_on_nan(source: str) -> list[int]:
  """Lines of assertions that deny an inequality: `not error > bound` holds when the error is NaN."""
  return [
    node.lineno
    for statement in ast.walk(ast.parse(source))
    if isinstance(statement, ast.Assert)
    for node in ast.walk(statement.test)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and denies_an_inequality(node.operand)
  ]


def denies_an_inequality(node: ast.expr) -> bool:
  """Whether the expression is an inequality, or `any` or `.any()` of one."""
  if isinstance(node, ast.Call):
    of_method = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "any" else None
    called = ast.unparse(node.func).split(".")[-1] == "any"
    return called and any(denies_an_inequality(a) for a in [*node.args, *([of_method] if of_method else [])])
  if isinstance(node, ast.GeneratorExp | ast.ListComp):
    return denies_an_inequality(node.elt)
  if isinstance(node, ast.BoolOp):
    return any(denies_an_inequality(value) for value in node.values)
  return isinstance(node, ast.Compare) and any(isinstance(op, ast.Gt | ast.GtE | ast.Lt | ast.LtE) for op in node.ops)


def test_no_test_denies_an_inequality_as_nan_would_pass():
  sources = {str(path.relative_to(TESTS)): path.read_text() for path in sorted(TESTS.rglob("*_test.py"))}
  found = [f"{name}:{line}" for name, source in sources.items() for line in passes_on_nan(source)]
  assert sources
  assert not found, f"write `assert error <= bound`: {found}"


@pytest.mark.parametrize(
  "line",
  [
    "assert not error > bound",
    "assert not np.any(np.abs(a - b) > bound)",
    "assert not (np.abs(a - b) > bound).any()",
    "assert not any(e >= bound for e in errors)",
    "assert not (a > b or c)",
  ],
)
def test_the_search_for_denied_inequalities_finds(line):
  assert passes_on_nan(line) == [1]


@pytest.mark.parametrize(
  "line", ["assert not found", "assert not np.isnan(a).any()", "assert not any(x in y for x in z)"]
)
def test_the_search_for_denied_inequalities_lets_pass(line):
  assert passes_on_nan(line) == []
