"""The whole model against the numpy reference: the numerical proof, part of the default run.

Everything is float32 with full-precision products, on weights in their stored dtypes. The tolerances are the golden
cases' own (tests/reference/README.md): float32 noise is 3e-5 of the largest logit there, the smallest misreading of the
model 2.3e-4, and no rounding of that size can tip an expert or a greedy token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

LOGITS_TOLERANCE = 1e-4  # of the largest logit
STATE_TOLERANCE = 1e-4  # of the largest element
NEW_TOKENS = 32

# Places of the layers x storage of the experts. The first and the last differ in both, so the default run has these;
# `make test-slow` has the other two.
SCAN_STORED, UNROLLED_BF16 = ("--scan", "as-stored"), ("--no-scan", "bf16")
FORMS = (SCAN_STORED, ("--no-scan", "as-stored"), ("--scan", "bf16"), UNROLLED_BF16)

GOLDEN_CASES = ("k3_tiny", "k3_hd128", "kimi_linear_tiny", "k3_nano")
# Prompts and steps by default: each case in one form, other shapes below in the last one; the trained one by
# `make demo`, which is a test too.
DECODED = tuple((case, SCAN_STORED) for case in GOLDEN_CASES if case != "k3_nano")


def form_id(form: tuple[str, str]) -> str:
  return "-".join(form).strip("-")


@dataclasses.dataclass
class Expected:
  """What the reference says of one checkpoint.

  Attributes:
    prompts: Token ids of each prompt.
    logits: [T, X] of each.
    experts: Chosen experts [MoE layers, T, S] of each.
    greedy: The continuation of each, the end token ignored.
    states: Of each prompt, the state [H, K, V] after it by 0-based KDA layer.
  """

  prompts: list[list[int]]
  logits: list[np.ndarray]
  experts: list[np.ndarray]
  greedy: list[list[int]]
  states: list[dict[int, np.ndarray]]

  @classmethod
  def of_golden(cls, case: Any) -> Expected:
    a, count = case.arrays, range(len(case.prompts))
    kda = [int(name.split("_")[-1]) for name in a if name.startswith("kda_state_0_")]
    return cls(
      case.prompts,
      [a[f"logits_{i}"] for i in count],
      [a[f"expert_ids_{i}"] for i in count],
      case.greedy,
      [{layer: a[f"kda_state_{i}_{layer}"] for layer in kda} for i in count],
    )

  @classmethod
  def by_reference(cls, reference: Any, checkpoint: Path, prompts: list[list[int]]) -> Expected:
    ckpt = reference.load_checkpoint(checkpoint)
    traces = [reference.forward(ckpt, np.array([p]), trace=True) for p in prompts]
    layers = [t["layers"] for t in traces]
    return cls(
      prompts,
      [t["logits"][0] for t in traces],
      [np.array([x["expert_ids"][0] for x in rows if "expert_ids" in x]) for rows in layers],
      [reference.greedy(ckpt, np.array(p), NEW_TOKENS)[0].tolist() for p in prompts],
      [{i: x["state"][0] for i, x in enumerate(rows) if "state" in x} for rows in layers],
    )


def check_forward(config: Any, expected: Expected) -> None:
  """One pass over each prompt, without caches: every logit, every choice of experts."""
  from kimi_k3.maxtext_adapter.engine import make_forward

  forward = make_forward(config)
  length = max(map(len, expected.prompts))
  for i, prompt in enumerate(expected.prompts):
    tokens = np.full(length, 7, np.int32)  # what stands in the pads must not matter
    tokens[: len(prompt)] = prompt
    logits, chosen = (np.asarray(x)[..., : len(prompt), :] for x in forward(tokens, len(prompt)))
    assert_close(logits, expected.logits[i], LOGITS_TOLERANCE, f"logits of prompt {i}")
    np.testing.assert_array_equal(np.sort(chosen, axis=-1), np.sort(expected.experts[i], axis=-1))


def check_decode(config_of: Callable[..., Any], expected: Expected) -> None:
  """Prefill of padded prompts into slots, states after it, then greedy steps of all slots together."""
  from kimi_k3.generate.clock import CompileClock
  from kimi_k3.generate.loop import Request, generate
  from kimi_k3.maxtext_adapter.config import architecture
  from kimi_k3.maxtext_adapter.engine import Engine

  longest, new_tokens = max(map(len, expected.prompts)), len(expected.greedy[0])
  lengths = {"max_prefill_predict_length": longest, "max_target_length": longest + new_tokens}
  config = config_of(**lengths, per_device_batch_size=len(expected.prompts))
  engine = Engine(config)
  for slot, prompt in enumerate(expected.prompts):
    tokens = np.zeros(longest, np.int32)
    tokens[: len(prompt)] = prompt
    prefilled = engine.prefill(tokens, len(prompt))
    engine.insert(prefilled, slot)
    logits = np.asarray(prefilled.logits)
    largest = np.abs(expected.logits[slot]).max()
    assert np.abs(logits - expected.logits[slot][-1]).max() <= LOGITS_TOLERANCE * largest
  for slot, states in enumerate(expected.states):
    for layer, state in states.items():
      found = kda_state(engine, architecture(config), layer, slot, scan=config.scan_layers)
      assert_close(found, state, STATE_TOLERANCE, f"state of layer {layer} after prompt {slot}")
  for slot in range(len(expected.prompts)):
    engine.release(slot)
  requests = [Request(i, prompt, new_tokens) for i, prompt in enumerate(expected.prompts)]
  rows, _ = generate(engine, requests, stop_ids=(), clock=CompileClock())
  assert [row.ids for row in rows] == expected.greedy


def kda_state(engine: Any, architecture: Any, layer: int, slot: int, *, scan: bool) -> np.ndarray:
  """The state [H, K, V] of one slot in one layer."""
  from kimi_k3.layout import place

  where = place(architecture, layer, scan=scan)
  cache = engine.cache
  for name in where.path.split("."):
    cache = cache[name]
  state = cache["attention"]["cache"]["recurrent_state"]
  return np.asarray(state[slot] if where.index is None else state[where.index, slot])


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
  """Largest difference over largest expected magnitude; NaN is close to nothing."""
  error = np.abs(found - expected).max() / np.abs(expected).max()
  assert error <= tolerance, f"{what}: off by {error:.2e} of the largest, tolerance {tolerance}"


# The trained case is decoded by `make demo` and scored by evaluate/trained_test.py in the default run.
@pytest.fixture(
  scope="session",
  params=[pytest.param(case, marks=pytest.mark.slow if case == "k3_nano" else ()) for case in GOLDEN_CASES],
)
def golden_case(request: pytest.FixtureRequest) -> Any:
  return request.getfixturevalue(request.param)


@pytest.fixture
def golden_form(request: pytest.FixtureRequest, golden_case, convert) -> Path:
  """The golden checkpoint in the form of the test. Nothing of Kimi-Linear is packed: its bf16 is as stored."""
  scan, experts = request.param
  return convert(golden_case.checkpoint, scan, "--experts", experts)


@pytest.mark.parametrize(
  "golden_form",
  [pytest.param(form, marks=[] if form in (SCAN_STORED, UNROLLED_BF16) else pytest.mark.slow) for form in FORMS],
  ids=form_id,
  indirect=True,
)
def test_one_pass_equals_the_golden_case(golden_case, golden_form, float32_config):
  check_forward(float32_config(golden_form), Expected.of_golden(golden_case))


@pytest.mark.slow
def test_one_pass_by_tokamax_equals_the_golden_case(k3_hd128, convert, float32_config):
  config = float32_config(convert(k3_hd128.checkpoint, "--scan"), "kda_implementation=tokamax_xla_chunked")
  check_forward(config, Expected.of_golden(k3_hd128))


@pytest.mark.parametrize(
  ("golden_case", "golden_form"),
  [
    pytest.param(case, form, id=f"{case}-{form_id(form)}", marks=[] if (case, form) in DECODED else pytest.mark.slow)
    for case in GOLDEN_CASES
    for form in FORMS
  ],
  indirect=True,
)
def test_prefill_and_decode_equal_the_golden_case(golden_case, golden_form, float32_config):
  check_decode(lambda **settings: float32_config(golden_form, **settings), Expected.of_golden(golden_case))


# Other shapes than the golden cases': tail lengths 0, 1 and 3, snapshots off the edges of the scanned blocks, a number
# of heads that is no power of two, matrices packed that K3 keeps in bf16.
SHAPES = {
  "8-layers-snapshots-of-3": ("--layers", "8", "--set", "attn_res_block_size=3"),
  "9-layers-3-heads": (
    *("--layers", "9", "--set", "linear_attn_config.num_heads=3"),
    *("--set", "num_attention_heads=3", "--set", "num_key_value_heads=3"),
  ),
  "27-layers-shared-and-latent-packed": ("--layers", "27", "--packed", "experts+shared+latent"),
  "17-layers-snapshots-of-5": ("--layers", "17", "--set", "attn_res_block_size=5"),
}


# The first two in one form each by default, all else by `make test-slow`.
SHAPES_IN_FORMS = [
  pytest.param(shape, form, id=f"{shape}-{form_id(form)}", marks=[] if default else pytest.mark.slow)
  for i, shape in enumerate(SHAPES)
  for form, default in ((SCAN_STORED, i == 0), (UNROLLED_BF16, i == 1))
]


@pytest.mark.parametrize(("shape", "form"), SHAPES_IN_FORMS)
def test_forward_and_decode_equal_the_reference_for_other_shapes(
  shape, form, tiny_checkpoint, reference, convert, float32_config
):
  scan, experts = form
  checkpoint = tiny_checkpoint("--preset", "tiny", "--seed", "5", *SHAPES[shape])
  out = convert(checkpoint, scan, "--experts", experts)
  rng = np.random.default_rng(5)
  prompts = [rng.integers(0, 252, length).tolist() for length in (5, 41)]
  expected = Expected.by_reference(reference, checkpoint, prompts)
  check_forward(float32_config(out), expected)
  check_decode(lambda **settings: float32_config(out, **settings), expected)
