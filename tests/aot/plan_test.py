"""`kimi-k3 plan` of K3 whole, on 32 devices of TPU v7x, against other readings of the same programs."""

from __future__ import annotations

import collections
import json
import re

import pytest

from kimi_k3.capacity import topology
from kimi_k3.cli.main import main
from kimi_k3.resources import configs_dir

K3 = str(configs_dir() / "models" / "kimi-k3.yml")
ON_16_CHIPS = ("--topology", "tpu7x:2x2x4")
GIB = 2**30
BLOCKS = 22  # of four layers, in one loop


@pytest.fixture
def plan(capsys, monkeypatch):
  """Runs the verb; the object it prints, and the reports of the programs that it compiled."""
  reports = []
  real = topology.compile_for

  def recorded(*args, **kwargs):
    reports.append(real(*args, **kwargs))
    return reports[-1]

  monkeypatch.setattr(topology, "compile_for", recorded)

  def run(*arguments: str, code: int = 0) -> tuple[dict, list[topology.Report]]:
    assert main(["plan", K3, *ON_16_CHIPS, *arguments, "--json", "--no-cache"]) == code
    return json.loads(capsys.readouterr().out), reports

  return run


def collectives_by_line(text: str) -> dict[str, int]:
  """Calls by kind, told by the lines alone: what has the loop's body in its path runs once a block."""
  found: collections.Counter[str] = collections.Counter()
  pattern = r"\s*(?:ROOT )?%?\S+ = .*?[\])}] (all-reduce|all-to-all|all-gather|reduce-scatter)(?:-start)?\("
  for line in text.splitlines():
    if match := re.match(pattern, line):
      found[match[1]] += BLOCKS if "/while/body/" in line else 1
  return dict(found)


def test_a_plan_agrees_with_another_reading_of_the_same_programs_and_with_what_was_measured_before(plan):
  found, (decode, prefill) = plan("--decode", "64,8192", "--prefill", "32768")
  for facts, report in ((found["programs"]["decode"], decode), (found["programs"]["prefill"], prefill)):
    analysis = report.compiled.memory_analysis()
    assert facts["argument_bytes"] == analysis.argument_size_in_bytes
    assert facts["temp_bytes"] == analysis.temp_size_in_bytes
    assert facts["code_bytes"] == analysis.generated_code_size_in_bytes
    known = sum(facts["weights_bytes"].values()) + facts["latent_cache_bytes"] + facts["kda_state_bytes"]
    assert 0 <= facts["argument_bytes"] - known <= 0.01 * known  # padding
    for kernel in facts["kernels"]:
      assert kernel in report.text
  facts = found["programs"]["decode"]
  assert {c["kind"]: c["count"] for c in facts["collectives"]} == collectives_by_line(decode.text)
  # docs/sharding.md.
  assert facts["argument_bytes"] == pytest.approx(57.03 * GIB, rel=1e-3)
  assert facts["temp_bytes"] == pytest.approx(0.047 * GIB, rel=0.05)
  assert sum(c["count"] for c in facts["collectives"]) == 235
  assert facts["reductions_per_layer"] == 2
  assert facts["hbm_bytes_per_step"] == pytest.approx(61.5 * GIB, rel=0.02)  # 60.8 without collectives on SparseCores
  assert facts["bound_ms"] == pytest.approx(facts["hbm_bytes_per_step"] / 3.69e12 * 1e3)
  assert {"expert_decode", "latent_step"} < set(facts["kernels"])
  facts = found["programs"]["prefill"]
  assert facts["argument_bytes"] == pytest.approx(55.82 * GIB, rel=1e-3)
  assert facts["temp_bytes"] == pytest.approx(1.84 * GIB, rel=0.1)  # 1.35 without collectives on SparseCores
  assert facts["collectives"]
  assert found["warnings"] == []


@pytest.mark.parametrize(
  ("settings", "least"),
  [
    ((), 40),
    (("partition_rules={latent: [tensor]}",), 50),
    (("mla_cache_dtype=float8_e4m3fn",), 80),
  ],
)
def test_contexts_of_a_million_tokens_that_fit_by_compiling(plan, settings, least):
  found, reports = plan("--decode", f"{least},1048576", "--fit", *settings)
  batch = found["fit"]["batch"]
  assert batch["largest"] >= least
  assert batch["next"] == batch["largest"] + 1
  limit = found["limit_bytes"] - found["fit"]["reserve_bytes"]
  assert batch["total_bytes"] <= limit < batch["next_total_bytes"]
  assert 2 <= len(reports) <= 6


def test_what_does_not_fit_is_a_table_of_the_compiler_too(plan):
  found, _ = plan("--decode", "44,1048576", code=2)
  facts = found["programs"]["decode"]
  assert not facts["fits"]
  assert facts["exceeds_bytes"] == facts["total_bytes"] - found["limit_bytes"]
  assert facts["temp_bytes"] is not None
