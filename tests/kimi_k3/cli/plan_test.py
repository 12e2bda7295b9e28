"""`kimi-k3 plan`: what it prints, what it refuses with which advice, and that what does not fit is a table."""

from __future__ import annotations

import json
import sys

import jax
import pytest

from kimi_k3.capacity import plan, topology
from kimi_k3.cli.main import main
from kimi_k3.maxtext_adapter import planning
from kimi_k3.maxtext_adapter.settings import read_config
from kimi_k3.resources import configs_dir

K3 = str(configs_dir() / "models" / "kimi-k3.yml")
GIB = 2**30


@pytest.fixture(autouse=True)
def own_results(tmp_path, monkeypatch):
  monkeypatch.setenv("KIMI_K3_PLAN_CACHE", str(tmp_path / "results"))


@pytest.fixture(autouse=True, scope="module")
def configs_read_once():
  """MaxText takes half a second for a config, and the same few are read again and again."""
  kept = {}

  def read(path, settings, **derived):
    key = (path, tuple(settings), tuple(derived.items()))
    if key not in kept:
      kept[key] = read_config(path, settings, **derived)
    return kept[key]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(planning, "read_config", read)
    yield


def plan_k3(capsys, *arguments: str, config: str = K3) -> tuple[int, str, str]:
  code = main(["plan", config, *arguments])
  out, err = capsys.readouterr()
  return code, out, err


def test_json_is_one_object_with_the_fields_of_the_interface(capsys):
  code, out, _ = plan_k3(
    capsys, "--topology", "tpu7x:2x2x4", "--decode", "64,8192", "--prefill", "32768", "--quick", "--json"
  )
  found = json.loads(out)
  assert code == 0
  assert {"schema", "topology", "mesh", "limit_bytes", "programs", "fit", "warnings"} <= found.keys()
  assert (found["schema"], found["topology"], found["mesh"], found["fit"]) == (1, "tpu7x:2x2x4", {"tensor": 32}, None)
  assert found["limit_bytes"] == int(94.74 * GIB)
  fields = (
    "argument_bytes temp_bytes code_bytes output_bytes weights_bytes latent_cache_bytes kda_state_bytes collectives "
    "reductions_per_layer hbm_bytes_per_step bound_ms kernels compile_s"
  ).split()
  decode, prefill = found["programs"]["decode"], found["programs"]["prefill"]
  assert {*fields, "batch", "context"} <= decode.keys()
  assert {*fields, "tokens"} <= prefill.keys()
  assert (decode["batch"], decode["context"], prefill["tokens"]) == (64, 8192, 32768)
  assert sum(decode["weights_bytes"].values()) == pytest.approx(55.77 * GIB, rel=0.001)
  assert decode["latent_cache_bytes"] == 24 * 64 * 8192 * 576 * 2 // 32  # 24 MLA layers, bfloat16, 32 devices
  assert decode["kda_state_bytes"] == 69 * 64 * 96 * 128 * (128 * 4 + 3 * 3 * 2) // 32


def test_the_table_says_what_is_held_and_what_is_left(capsys):
  code, out, err = plan_k3(capsys, "--topology", "tpu7x:2x2x4", "--quick")
  assert (code, err) == (0, "")
  for line in (
    "16 chips, 32 devices, 4 hosts, mesh tensor=32",
    "weights: experts",
    "latent cache",
    "KDA states",
    "GiB left",
  ):
    assert line in out
  assert "decode 64 x 8192" in out
  assert "prefill 32768" in out
  assert "387 ms a token, 18.35 tok/s" in out
  assert "chosen here (decode takes them too): partitioning=manual" in out


ON_16_CHIPS = "--topology tpu7x:2x2x4 "


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (f"{ON_16_CHIPS} --mesh tensor=16", "has 16 devices, tpu7x:2x2x4 has 32: nearest that works: --mesh tensor=32"),
    ("--topology tpu7x:2x4x4 --mesh tensor=64", "96, which 64 parts (tensor 64) do not divide"),
    ("--topology tpu7x:2x4x4 --mesh tensor=64", "nearest that works on tpu7x:2x4x4: attn_dp_expert=2,model=32"),
    ("--topology tpu7x:3x3x3", "the nearest that works is tpu7x:2x4x4"),
    ("--topology tpu9", "unknown kind 'tpu9', expected one of tpu7x, v6e"),
    (f"{ON_16_CHIPS} --slices 0", "0 slices, expected 1 or more"),
    (f"{ON_16_CHIPS} --decode 64", "--decode is '64', expected rows,tokens such as 64,8192"),
    (f"{ON_16_CHIPS} --decode 0,8192", "--decode is '0,8192'"),
    (f"{ON_16_CHIPS} --prefill many", "--prefill is 'many', expected a number of tokens"),
    (f"{ON_16_CHIPS} --prefill 2000000", "2000000 tokens, the model knows 1048576"),
    (f"{ON_16_CHIPS} --reserve much", "--reserve is 'much', expected a size"),
    (f"{ON_16_CHIPS} --mesh tensor", "--mesh: found 'tensor', expected sizes"),
    (f"{ON_16_CHIPS} --mesh cake=32", "mesh axis cake cuts nothing in the manual partitioning"),
    (f"{ON_16_CHIPS} partitioning=auto", "partitioning is 'auto'"),
    (f"{ON_16_CHIPS} no_such_key=1", "kimi-k3.yml: unknown key no_such_key"),
    (f"{ON_16_CHIPS} --plot no/where.png", "no/where.png: its directory does not exist"),
    (f"{ON_16_CHIPS} --decode 33,8192 mla_cache_cut=batch", "the nearest that works is 32"),
    (f"{ON_16_CHIPS} --mesh tensor=32 ici_tensor_parallelism=32", "--mesh and ici_tensor_parallelism given"),
    (f"{ON_16_CHIPS} --mesh tensor=32 partition_mesh=tensor=32", "--mesh and partition_mesh given"),
  ],
)  # fmt: skip
def test_bad_input_is_one_line_with_what_works(capsys, arguments, said):
  code, out, err = plan_k3(capsys, *arguments.split(), "--quick")
  assert (code, out) == (2, "")
  assert err.count("\n") == 1
  assert said in err


def test_a_mesh_that_the_config_names_is_not_replaced(capsys):
  preset = str(configs_dir() / "tpu7x-32.yml")
  arguments = ("--topology", "tpu7x:2x2x2", "model_name=kimi-k3", "--quick")
  code, _, err = plan_k3(capsys, *arguments, config=preset)
  assert code == 2
  assert "tensor=32 has 32 devices, tpu7x:2x2x2 has 16: nearest that works: --mesh tensor=16" in err


@pytest.mark.parametrize(
  ("arguments", "advice"),
  [
    (("--topology", "tpu7x:2x2x2", "--decode", "64,8192"), ["--topology tpu7x:2x2x4 --mesh tensor=32 (16 chips)"]),
    (
      ("--topology", "tpu7x:2x2x4", "--decode", "128,1048576"),
      ["rows of 1048576 tokens", "128 rows of", "--topology tpu7x:2x4x4"],
    ),
    (("--topology", "tpu7x:2x2x4", "--decode", "60,1048576"), ["mla_cache_dtype=float8_e4m3fn"]),
    (("--topology", "v6e:8x8", "--decode", "64,8192"), ["partition_rules='{latent: [model]}'", "--topology v6e:8x16"]),
    (("--topology", "tpu7x:2x2x4", "--prefill", "1000000"), ["prefill_chunk="]),
  ],
)
def test_what_does_not_fit_says_by_how_much_and_what_would(capsys, arguments, advice):
  code, out, err = plan_k3(capsys, *arguments, "--quick")
  assert code == 2
  assert "DOES NOT FIT by" in out
  assert err.count("\n") == 1
  assert "GiB on a device" in err
  for part in advice:
    assert part in err


def test_advice_that_is_followed_works(capsys):
  code, _, err = plan_k3(capsys, "--topology", "tpu7x:2x2x4", "--prefill", "1000000", "--quick")
  chunk = int(err.split("prefill_chunk=")[1].split(",")[0])
  assert code == 2
  following = ("--topology", "tpu7x:2x2x4", "--prefill", "1000000", "--quick", f"prefill_chunk={chunk}")
  assert plan_k3(capsys, *following)[0] == 0


def test_two_programs_that_fit_alone_and_not_together_are_refused(capsys):
  code, out, err = plan_k3(
    capsys, "--topology", "tpu7x:2x2x4", "--decode", "40,1048576", "--prefill", "262144", "--quick"
  )
  assert code == 2
  assert "in one engine: " in out
  assert "DOES NOT FIT by" in out
  assert "in one engine take" in err


def test_advice_for_two_programs_looks_at_both_and_is_there_with_a_search_too(capsys):
  asked = ("--topology", "tpu7x:2x2x4", "--prefill", "32768", "--quick")
  for more in ((), ("--fit",)):
    code, _, err = plan_k3(capsys, *asked, "--decode", "2000,8192", *more)
    assert code == 2
    rows = int(err.split("these fit: ")[1].split(" rows")[0])
    assert plan_k3(capsys, *asked, "--decode", f"{rows},8192")[0] == 0
    assert plan_k3(capsys, *asked, "--decode", f"{rows + 32},8192")[0] == 2


def test_a_larger_topology_is_named_with_a_mesh_that_works_there(capsys):
  preset = str(configs_dir() / "tpu7x-32.yml")
  asked = ("model_name=kimi-k3", "--decode", "64,1048576", "--quick")
  code, _, err = plan_k3(capsys, *asked, "--topology", "tpu7x:2x2x4", config=preset)
  assert code == 2
  advice = err.split("; ")[-1].split(" (")[0].split()
  assert advice[0] == "--topology"
  assert plan_k3(capsys, *asked, *advice, config=preset)[0] == 0


@pytest.mark.parametrize(
  "arguments", [("--topology", "tpu7x:2x2x1"), ("--topology", "tpu7x:2x2x4", "--reserve", "95GiB")]
)
def test_a_search_that_finds_nothing_is_an_error(capsys, arguments):
  code, _, err = plan_k3(capsys, *arguments, "--fit", "--quick")
  assert code == 2
  assert "nothing fits on tpu7x:2x2x1" in err or "leave some of it" in err


def test_a_million_tokens_forty_times_by_arithmetic(capsys):
  code, out, _ = plan_k3(capsys, "--topology", "tpu7x:2x2x4", "--fit", "--quick", "--json")
  fit = json.loads(out)["fit"]
  assert code == 0
  assert (fit["batch"]["context"], fit["reserve_bytes"]) == (1048576, 4 * GIB)
  assert fit["batch"]["largest"] >= 40
  assert fit["batch"]["next"] == fit["batch"]["largest"] + 1
  assert fit["prefill"]["largest"] >= 131072


def test_a_plot_is_drawn(capsys, tmp_path):
  target = tmp_path / "memory.png"
  assert plan_k3(capsys, "--topology", "tpu7x:2x2x4", "--quick", "--plot", str(target))[0] == 0
  assert target.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_plot_is_refused_before_the_work(capsys, monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  code, _, err = plan_k3(capsys, "--topology", "tpu7x:2x2x4", "--plot", str(tmp_path / "memory.png"))
  assert code == 2
  assert "--plot: no matplotlib found: pip install" in err
  assert not list(tmp_path.glob("*.png"))


OUT_OF_MEMORY = (
  "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
  "temporaries (193.53G) exceeds available HBM (94.74G). HLO module: jit_step.\nSee https://openxla.org/xla/errors"
)


def test_an_out_of_memory_compile_is_a_table_and_one_line(capsys, monkeypatch):
  def refuse(*_, **__):
    raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)

  monkeypatch.setattr(topology, "compile_for", refuse)
  code, out, err = plan_k3(capsys, "--topology", "tpu7x:2x2x1", "--decode", "64,8192")
  assert code == 2
  assert "weights: experts" in out
  assert "DOES NOT FIT by 98.79" in out
  assert "193.53" in out
  assert err.splitlines()[-1].startswith("kimi-k3: error: decode 64 x 8192 takes 193.53 GiB on a device")
  assert "Traceback" not in out + err


def test_another_refusal_of_the_compiler_is_one_line(capsys, monkeypatch):
  def refuse(*_, **__):
    raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed to compile TPU kernel: no such layout")

  monkeypatch.setattr(topology, "compile_for", refuse)
  code, out, err = plan_k3(capsys, "--topology", "tpu7x:2x2x4", "--decode", "64,8192")
  assert (code, out) == (2, "")
  assert "the TPU compiler refuses the program: INTERNAL: Mosaic failed" in err


def test_a_result_is_compiled_once(capsys, monkeypatch, tmp_path):
  compiled = []

  def made(_self, program):
    compiled.append(program)
    known = {"fits": True, "exceeds_bytes": 0, "total_bytes": 57 * GIB, "warnings": [], "compile_s": 3.0}
    return known | dict.fromkeys(plan._OF_A_PROGRAM)

  monkeypatch.setattr(plan.Compiler, "_compile", made)
  asked = ("--topology", "tpu7x:2x2x4", "--decode", "64,8192", "--json")
  for _ in range(2):
    code, out, err = plan_k3(capsys, *asked)
    assert code == 0
  assert len(compiled) == 1
  assert "compiled before" in err
  assert json.loads(out)["programs"]["decode"]["cached"]
  plan_k3(capsys, *asked, "mla_cache_cut=sequence")
  assert len(compiled) == 2
  plan_k3(capsys, *asked, "--no-cache")
  assert len(compiled) == 3
  for number, damaged in enumerate(("{", "{}", "[]"), 4):  # made again, not believed
    for file in (tmp_path / "results").glob("*.json"):
      file.write_text(damaged)
    plan_k3(capsys, *asked)
    assert len(compiled) == number
