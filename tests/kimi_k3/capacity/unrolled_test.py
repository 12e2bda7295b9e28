"""benchmarks/capacity/unrolled.py: its experts give what the package's give, its figures are the compiler's."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "capacity" / "unrolled.py"
GIB = 2**30
MIB = 2**20


@pytest.fixture(scope="module")
def unrolled() -> ModuleType:
  """The script as a module."""
  spec = importlib.util.spec_from_file_location("unrolled_benchmark", SCRIPT)
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # its dataclasses look there for their annotations
  spec.loader.exec_module(module)
  return module


ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, page 0, thread-local:
 value: <120 reduce_sum.140 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 4194304, page 0, parameter 36, shape |f4e2m1fn[8,1024,1024]| at ShapeIndex {}:
 value: <1905 param.99 @0> (size=4194304,offset=0): f4e2m1fn[8,1024,1024]{2,1,0:T(64,128)(8,1)E(4)}
allocation 2: size 1048576, page 0, parameter 56, shape |f32[512,512]| at ShapeIndex {}, maybe-live-out:
allocation 3: size 134217728, page 0, preallocated-temp:
allocation 4: size 52, color 2, page 0, preallocated-temp:
allocation 5: size 66032128, color 1, page 0, preallocated-temp:
"""


def schedule(scope: str) -> str:
  """Three matrices of 64 MiB, of which the first two are alive together; the first through another name."""

  def made(name: str) -> str:
    metadata = f'metadata={{op_name="jit(step)/{scope}/mul"}}'
    return f"  %{name} = f32[16,1024,1024]{{2,1,0}} fusion(%x), kind=kLoop, calls=%body, {metadata}"

  return "\n".join(
    [
      "HloModule m, is_scheduled=true",
      "",
      "%body (p: f32[16,1024,1024]) -> f32[16,1024,1024] {",
      "  ROOT %p = f32[16,1024,1024]{2,1,0} parameter(0)",
      "}",
      "",
      "ENTRY %main (x: f32[16,1024,1024]) -> f32[16,1024,1024] {",
      "  %x = f32[16,1024,1024]{2,1,0} parameter(0)",
      made("first"),
      "  %renamed = f32[16,1024,1024]{2,1,0} bitcast(%first)",
      made("second"),
      "  %a = f32[16,1024,1024]{2,1,0} add(%second, %renamed)",
      made("third"),
      "  ROOT %b = f32[16,1024,1024]{2,1,0} add(%a, %third)",
      "}",
    ]
  )


FIGURES = {
  "argument_bytes": 3 * GIB,
  "temp_bytes": 7 * GIB,
  "alive": {"made": 21, "most": 6, "most_bytes": 6 * GIB},
  "seconds": 60.0,
  "peak_ram_bytes": 2 * GIB,
}


@pytest.mark.parametrize("in_order", [False, True])
def test_all_experts_decoded_at_once_give_what_one_at_a_time_gives(unrolled, in_order, k3_config, float32_compute):
  import jax
  import jax.numpy as jnp
  from flax import nnx

  from kimi_k3.moe.experts import Experts
  from kimi_k3.moe.packed import prepare

  with nnx.use_eager_sharding(False):
    experts, as_float4 = (Experts(k3_config, float32_compute, nnx.Rngs(0)) for _ in range(2))
  for name in ("w1", "w3", "w2"):
    leaves = [getattr(as_float4, f"{name}_{part}") for part in ("packed", "scale")]
    for leaf, value in zip(leaves, prepare(leaves[0][...], leaves[1][...], "float4"), strict=True):
      leaf.set_value(value)
  tokens, chosen = 5, k3_config.num_experts_per_token
  x = jax.random.normal(jax.random.key(1), (tokens, k3_config.expert_dim))
  # One of each token's experts is another device's: a number past the last.
  ids = (
    jax.lax.top_k(jax.random.uniform(jax.random.key(2), (tokens, k3_config.num_experts)), chosen)[1].at[:, 0].set(99)
  )
  weights = jax.random.uniform(jax.random.key(3), (tokens, chosen))
  arguments = (x, ids, weights, jnp.int32(0))
  expected = experts.partial(*arguments, many=False)
  found = unrolled.DecodedExperts(as_float4, in_order=in_order).partial(*arguments, many=False)
  # Float32 sums of a few hundred products in another order.
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(expected))))


@pytest.mark.parametrize("name", ["report", "by-hand"])
def test_the_reports_choices_are_float32_matrices_packed_experts_and_layers_one_after_the_other(unrolled, name):
  import jax
  import jax.numpy as jnp

  program = unrolled.make_step(unrolled.CASES[name], jax.devices("cpu")[:1], 5)
  params, cache, *_ = program.arguments
  logits, caches = jax.eval_shape(program.function, *program.arguments)
  assert logits.shape == (64, 163840) and logits.dtype == jnp.float32
  assert jax.tree.map(jnp.shape, caches) == jax.tree.map(jnp.shape, cache)
  experts = {leaf for leaf in params if ".experts." in leaf}
  assert {leaf for leaf in params if params[leaf].dtype != jnp.float32} == experts
  codes = [params[f"decoder.layers_{i}.mlp.experts.w1_packed"] for i in range(1, 5)]
  assert {(leaf.shape, leaf.dtype) for leaf in codes} == {((896, 3584, 3072), jnp.dtype(jnp.float4_e2m1fn))}
  assert [leaf for leaf in cache if leaf.endswith(".latents")] == ["layers_3.latents", "layers_4.latents"]


def test_every_other_case_changes_one_choice_of_the_reports_or_of_the_partitioning_by_hand(unrolled):
  fields = [field.name for field in dataclasses.fields(unrolled.Case) if field.name != "change"]

  def changes(name: str, other: str) -> int:
    case, base = unrolled.CASES[name], unrolled.CASES[other]
    return sum(getattr(case, field) != getattr(base, field) for field in fields)

  for name in set(unrolled.CASES) - {"report"}:
    assert 1 in (changes(name, "report"), changes(name, "by-hand")), name


def test_a_decoded_matrix_is_alive_from_its_making_to_its_last_use_through_renames(unrolled):
  assert unrolled.alive_at_once(schedule(unrolled.DECODED)) == {"made": 3, "most": 2, "most_bytes": 128 * MIB}
  assert unrolled.alive_at_once(schedule("other")) == {"made": 0, "most": 0, "most_bytes": 0}


def test_arguments_and_temporaries_are_those_in_hbm(unrolled):
  assert unrolled.memory_of(ASSIGNMENT) == {"argument_bytes": 5 * MIB, "temp_bytes": 128 * MIB}
  with pytest.raises(unrolled.InputError, match="no parameter among its 0 allocations"):
    unrolled.memory_of("something else")


WRITE = """
import os, pathlib, sys, time
flag = [flag for flag in os.environ["XLA_FLAGS"].split() if flag.startswith("--xla_dump_to=")][-1]
stem = pathlib.Path(flag.partition("=")[2]) / "module_0000.jit_step.after_optimizations"
stem.with_name(stem.name + "-buffer-assignment.txt").write_text(sys.argv[1])
stem.with_name(stem.name + ".txt").write_text(sys.argv[2])
time.sleep(60)
"""


def test_a_compile_ends_once_memory_is_assigned(unrolled, monkeypatch):
  monkeypatch.setattr(unrolled, "POLL_SECONDS", 0.05)
  command = [sys.executable, "-c", WRITE, ASSIGNMENT, schedule(unrolled.DECODED)]
  found = unrolled.run_one(command, timeout=30, ram_gib=1)
  assert found["argument_bytes"] == 5 * MIB and found["temp_bytes"] == 128 * MIB and found["alive"]["most"] == 2
  assert found["seconds"] < 30


def test_depths_that_the_file_has_are_not_compiled_again(unrolled, tmp_path, monkeypatch, capsys):
  out = tmp_path / "out.json"
  place = {"topology": "tpu7x:2x2x4", "libtpu": "1.2"}
  rows = [{"case": "report", "depth": 8, **place}, {"case": "report", "depth": 16, **place, "libtpu": "1.1"}]
  out.write_text(json.dumps({"rows": [row | FIGURES for row in rows]}))
  started = []

  def run_one(command, *_):
    started.append(command[command.index("--one") + 1])
    return FIGURES | {"temp_bytes": 8 * GIB}

  monkeypatch.setattr(unrolled, "run_one", run_one)
  monkeypatch.setattr(unrolled.topology, "libtpu_version", lambda: "1.2")
  assert unrolled.main(["--depths", "8,16", "--out", str(out)]) == 0
  assert started == ["report:16"]
  assert [row["temp_bytes"] // GIB for row in json.loads(out.read_text())["rows"]] == [7, 7, 8]
  lines = capsys.readouterr().out.splitlines()
  assert [line.split()[:4] for line in lines[2:]] == [["report", "8", "3.00", "7.00"], ["report", "16", "3.00", "8.00"]]
  assert "6 of 21, 6.00" in lines[2]
  assert unrolled.main(["--depths", "8,16", "--out", str(out)]) == 0
  assert started == ["report:16"]


def test_a_depth_that_takes_too_long_or_too_much_is_stopped_said_and_not_kept(unrolled, tmp_path, monkeypatch, capsys):
  out = tmp_path / "out.json"
  monkeypatch.setattr(unrolled, "child_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
  monkeypatch.setattr(unrolled, "POLL_SECONDS", 0.05)
  monkeypatch.setattr(unrolled.topology, "libtpu_version", lambda: "1.2")
  assert unrolled.main(["--depths", "8", "--out", str(out), "--timeout", "0.1"]) == 1
  assert "report           8 stopped after 0.1 s, --timeout" in capsys.readouterr().out
  assert unrolled.main(["--depths", "8", "--out", str(out), "--ram-gib", "0.000001"]) == 1
  assert "GiB of RAM, --ram-gib is 1e-06" in capsys.readouterr().out
  assert not out.exists()


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("--depths", "8,x"), "--depths 8,x: expected numbers from 1 to 93 such as 8,16,24"),
    (("--depths", "94"), "--depths 94: expected numbers from 1 to 93"),
    (("--out", "{tmp}/other.json"), "other.json: not written by this script"),
  ],
)
def test_bad_input_is_one_line_and_exit_code_2(unrolled, arguments, message, tmp_path, capsys):
  (tmp_path / "other.json").write_text('{"rows": [{"depth": 8}]}')
  assert unrolled.main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line


def test_help_names_every_case_with_what_it_changes(unrolled, capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "2000")  # argparse breaks lines at hyphens too
  with pytest.raises(SystemExit) as ended:
    unrolled.main(["--help"])
  assert ended.value.code == 0
  text = " ".join(capsys.readouterr().out.split())
  assert not [name for name, case in unrolled.CASES.items() if f"{name}: {case.change}" not in text]


def test_a_process_that_fails_gives_its_last_line(unrolled):
  with pytest.raises(unrolled.InputError, match="no such topology"):
    unrolled.run_one([sys.executable, "-c", "raise SystemExit('trace\\nno such topology')"], 60, 1)


@pytest.mark.aot
def test_memory_before_code_is_made_is_that_of_the_finished_program(unrolled):
  found = unrolled.run_one(unrolled.child_command("report", 2, "tpu7x:2x2x4"), 1800, 8)
  # 28 experts of 3584 x 3072 in float32.
  assert found["alive"]["made"] == 3
  assert found["alive"]["most_bytes"] == found["alive"]["most"] * 28 * 3584 * 3072 * 4
  memory = unrolled.compile_point("report", 2, "tpu7x:2x2x4").memory
  # Making code adds to the temporaries: 1.31 GiB where 1.27 were assigned, seen with the collectives by hand.
  assert found["temp_bytes"] == pytest.approx(memory.temp_bytes, rel=0.05)
  assert found["argument_bytes"] == pytest.approx(memory.argument_bytes, rel=0.01)


@pytest.mark.aot
def test_unrolled_layers_hold_the_decoded_experts_of_several_layers_and_none_where_the_input_comes_first(unrolled):
  per_layer = 3 * 28 * 3584 * 3072 * 4
  report, in_order = (
    unrolled.run_one(unrolled.child_command(name, 16, "tpu7x:2x2x4"), 1800, 8) for name in ("report", "in-order")
  )
  assert report["alive"]["most_bytes"] >= 4 * per_layer  # seen: 5 layers
  assert in_order["alive"]["most_bytes"] <= per_layer
