"""benchmarks/: faults planted in what is measured are refused, sizes are the released ones, the page is made."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_k3.cli import sizes

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
BENCHES = sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))
TOKENS = 8  # of a program below: its rows
SIDE = 256  # of the matrices that are multiplied


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    yield


@pytest.fixture(scope="module")
def harness() -> Any:
  return importlib.import_module("harness")


@pytest.fixture(scope="module")
def checks() -> Any:
  return importlib.import_module("checks")


@pytest.fixture(scope="module")
def workloads() -> Any:
  return importlib.import_module("workloads")


@pytest.fixture(scope="module")
def one_session(harness) -> Any:
  """A session of few repeats; making one measures the bandwidth."""
  return harness.Session("a test", preset="tiny", repeats=4, out=None)


@pytest.fixture
def session(one_session) -> Any:
  """The session without results."""
  for name in ("results", "ratios", "absent", "refused", "notes"):
    one_session.result[name] = []
  return one_session


@pytest.fixture(scope="module")
def product(harness, checks) -> Any:
  """Returns a function: changes to a sound program of one product."""
  import jax

  @functools.cache
  def inputs(number: int) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(number), 2)
    return jax.random.normal(keys[0], (TOKENS, SIDE)), jax.random.normal(keys[1], (SIDE, SIDE)) / SIDE**0.5

  work = checks.Work(TOKENS, None, 4 * (2 * TOKENS * SIDE + SIDE**2), 2 * TOKENS * SIDE**2)
  sound = harness.Program("product", lambda x, w: x @ w, inputs, work)
  return lambda **changes: dataclasses.replace(sound, **changes)


def refusal(session: Any, *subjects: Any, **options: Any) -> str:
  """Why the session refuses what it is to measure; it has no figure of it then."""
  session.compare("a workload", list(subjects), **options)
  (found,) = session.result["refused"]
  assert not session.result["results"]
  assert not session.result["ratios"]
  assert found["workload"] == "a workload"
  return found["reason"]


def test_a_sound_program_gets_a_row_and_its_ratio_is_of_pairs(session, product):
  import jax.numpy as jnp

  twice = product(name="twice", function=lambda x, w: (x @ w + jnp.roll(x, 1, 0) @ w + x @ (2 * w)) / 4 + x @ w / 4)
  session.compare("a workload", [product(), twice], tolerance=None, axes={"batch": TOKENS})
  assert not session.result["refused"]
  first, second = session.result["results"]
  seconds = first["seconds"]
  assert 0 < seconds["least"] <= seconds["p10"] <= seconds["median"] <= seconds["p90"] <= seconds["most"]
  assert first["tokens_per_second"] == pytest.approx(TOKENS / seconds["median"])
  assert first["ratio_to_bound"] == pytest.approx(seconds["median"] / first["bound_seconds"])
  assert first["repeats"] == second["repeats"] == 4
  (ratio,) = session.result["ratios"]
  assert (ratio["name"], ratio["against"], ratio["pairs"]) == ("twice", "product", 4)


# (a) Pads counted as tokens.


def test_pads_counted_as_tokens_are_refused(session, product):
  work = dataclasses.replace(product().work, tokens=TOKENS, lengths=(5, 1))
  assert "8 tokens counted, the rows hold 6 real ones" in refusal(session, product(work=work))


def test_more_tokens_than_the_results_hold_are_refused(session, harness, checks):
  rows = [[3, 4, 5], [6, 7]]
  padded = harness.Procedure("rows", lambda _: rows, checks.Work(6), count=lambda found: sum(map(len, found)))
  assert "6 tokens counted, 5 are in the results" in refusal(session, padded)


# (b) Results that are not awaited.


def _lazily() -> Iterator[int]:
  yield 1


@pytest.mark.parametrize(
  "result",
  [lambda: None, list, _lazily, concurrent.futures.Future, lambda: [lambda: 1], lambda: map(int, "12")],
  ids=["None", "an empty list", "a generator", "a future", "a function", "a map"],
)
def test_a_result_whose_work_may_be_ahead_is_refused(session, harness, checks, result):
  lazy = harness.Procedure("lazy", lambda _: result(), checks.Work())
  assert "not awaited" in refusal(session, lazy)


@pytest.mark.parametrize("dropped", [True, False])
def test_work_that_a_call_leaves_on_the_device_is_refused(session, harness, checks, dropped):
  import jax
  import jax.numpy as jnp

  slow = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: y @ y / 300, x))
  x = jnp.ones((300, 300))

  def call(i: int) -> Any:
    result = slow(x + i)
    return 1 if dropped else result

  subject = harness.Procedure("slow", call, checks.Work())
  if dropped:
    assert "left its device" in refusal(session, subject)
  else:
    session.compare("a workload", [subject])
    assert not session.result["refused"]


# (c) Compiling inside what is timed.


def test_compiling_inside_what_is_timed_is_refused(session, harness, checks):
  import jax
  import jax.numpy as jnp

  length = iter(range(2, 100))
  jitted = jax.jit(lambda x: x * 2)
  subject = harness.Procedure("grows", lambda _: jitted(jnp.ones(next(length))), checks.Work())
  assert "compiling inside what is timed" in refusal(session, subject)


# (d) An operation that the compiler has left out.


def test_an_argument_that_the_compiled_program_does_not_read_is_refused(session, product):
  def dead(x, w):
    _ = x @ w
    return x * 2

  assert "does not read argument(s) [1]" in refusal(session, product(function=dead))


def test_a_product_that_is_left_out_though_its_arguments_are_read_is_refused(session, product):
  def dead(x, w):
    _ = x @ w
    return x.sum() + w.sum()

  assert "a part of it is not computed" in refusal(session, product(function=dead))


def test_results_that_do_not_depend_on_the_inputs_are_refused(session, product):
  import jax.numpy as jnp

  same = product(function=lambda x, w: jnp.zeros(3) * jnp.isnan(x @ w).any())
  assert "same for other inputs" in refusal(session, same)


def test_results_that_are_not_finite_are_refused(session, product):
  import jax.numpy as jnp

  assert "not finite" in refusal(session, product(function=lambda x, w: jnp.log(-abs(x @ w)), name="log"))


def test_another_operation_than_the_first_is_refused(session, product):
  other = product(name="other", function=lambda x, w: x @ w.T)
  assert "not the same operation" in refusal(session, product(), other, tolerance=1e-5)


def test_a_collective_that_the_compiler_has_left_out_is_refused(session, workloads):
  import jax

  bench = importlib.import_module("bench_collectives")
  mesh = jax.sharding.Mesh(jax.devices()[:1], (bench.AXIS,))
  work = workloads.named(workloads.of_preset(workloads.MESSAGES, "tiny"), "all-reduce one row")
  products = bench.message_program(work, mesh, "products")
  elided = dataclasses.replace(products, check=bench.message_program(work, mesh, "chained").check)
  assert "has no collectives, expected {'all-reduce': 8}" in refusal(session, elided)


def test_another_collective_than_the_one_that_is_named_is_refused(session, workloads):
  import jax

  bench = importlib.import_module("bench_collectives")
  mesh = jax.sharding.Mesh(jax.devices()[:1], (bench.AXIS,))
  messages = workloads.of_preset(workloads.MESSAGES, "tiny")
  sums, gathers = (workloads.named(messages, f"{kind} hidden states") for kind in ("all-reduce", "all-gather"))
  other = bench.message_program(gathers, mesh, "chained").check
  named = dataclasses.replace(bench.message_program(sums, mesh, "chained"), check=other)
  assert "has {'all-reduce': 8}, expected {'all-gather': 8}" in refusal(session, named)


def test_a_time_that_the_device_cannot_reach_is_refused(checks):
  machine = importlib.import_module("machine")
  roof = machine.Roof(1e12, 1e15, "data sheet", 9e11)
  work = checks.Work(1, None, 1e12, 1e12)
  roof.refuse_faster("a step", work, 0.95, "tpu")  # clocks are not exact
  with pytest.raises(checks.Refused, match="memory alone takes 1 s"):
    roof.refuse_faster("a step", work, 0.5, "tpu")


def test_no_repeats_are_refused(harness):
  from kimi_k3.errors import InputError

  with pytest.raises(InputError, match="--repeats 0: expected 1 or more"):
    harness.Session("a test", preset="tiny", repeats=0, out=None)
  with pytest.raises(harness.Refused, match="nothing would be measured"):
    harness.time_in_turns([], 0, None, None)


def test_what_cannot_run_here_is_absent_by_name_and_the_others_are_measured(session, product, harness):
  def run(x, w):
    harness.needs_tpu("a kernel")
    return x @ w

  session.compare("a workload", [product(), product(name="kernel", function=run)])
  assert [row["name"] for row in session.result["results"]] == ["product"]
  assert session.result["absent"] == [{"name": "kernel", "reason": "a kernel needs a TPU, the backend is cpu"}]


# Workloads.


def test_names_are_unique_and_every_kind_has_both_presets(workloads):
  kinds = {type(one) for one in workloads.ALL}
  for preset in workloads.PRESETS:
    assert {type(one) for one in workloads.of_preset(workloads.ALL, preset)} == kinds
  for kind in kinds:
    names = [(one.preset, one.name) for one in workloads.ALL if type(one) is kind]
    if kind is not workloads.Generation:  # the decode loop and the model share them
      assert len(set(names)) == len(names)


def test_the_released_sizes_are_those_of_the_facts(workloads):
  chunk, step = workloads.of_preset(workloads.KDA_CHUNKS, "k3")[0], workloads.of_preset(workloads.KDA_STEPS, "k3")[0]
  assert (chunk.heads, chunk.channels) == (step.heads, step.channels) == (96, 128)
  kda_layers = 69
  assert kda_layers * workloads.state_bytes(step.heads, step.channels) == pytest.approx(434e6, rel=1e-3)
  mla = workloads.of_preset(workloads.MLA_DECODES, "k3")[0]
  assert (mla.heads, mla.latent, mla.tail) == (96, 512, 64)
  experts = workloads.of_preset(workloads.EXPERT_MATMULS, "k3")[0]
  weights = 3 * experts.latent * experts.width
  assert weights == pytest.approx(33.03e6, rel=1e-3)
  assert experts.expert_bytes == weights * 17 // 32  # 4 bits, and 8 for each 32
  assert {work.layers for work in workloads.of_preset(workloads.DUMMIES, "k3")} == {92}


@pytest.mark.parametrize("preset", ["tiny", "k3"])
def test_a_routing_hits_as_many_experts_as_it_says(workloads, preset):
  for work in workloads.of_preset(workloads.EXPERT_MATMULS, preset):
    ids = work.ids()
    here = [expert for row in ids for expert in row if expert < work.held]
    assert len(ids) == work.tokens
    assert {len(row) for row in ids} == {work.choices}
    assert len(here) == work.pairs
    assert len(set(here)) == work.hit
    assert all(len(set(chosen)) == len(chosen) for row in ids if (chosen := [e for e in row if e < work.held]))


def test_at_released_size_kda_gives_shapes_and_bytes_of_the_workload(workloads):
  import jax

  bench = importlib.import_module("bench_kda")
  for work in workloads.of_preset(workloads.KDA_CHUNKS, "k3"):
    given = jax.eval_shape(lambda w=work: bench.chunk_inputs.__wrapped__(w, 0))
    o, state = jax.eval_shape(bench.chunk_program(work, "portable").function, *given)
    assert o.shape == (len(work.lengths), work.padded, work.heads, work.channels)
    tokens = [*given[:4], given[6], o]
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in tokens) * work.tokens // work.positions
    moved += 2 * math.prod(state.shape) * state.dtype.itemsize
    assert moved == work.hbm_bytes


@pytest.mark.slow
def test_at_released_size_experts_take_the_bytes_of_the_workload(workloads):
  import jax

  bench = importlib.import_module("bench_experts")
  for work in workloads.of_preset(workloads.EXPERT_MATMULS, "k3"):
    leaves = jax.eval_shape(lambda w=work: bench.stored.__wrapped__(w.held, w.latent, w.width))
    assert sum(math.prod(x.shape) for x in leaves) == work.held * work.expert_bytes


# Serving.


def served(**changes: Any) -> dict[str, Any]:
  """Arguments of figures_of: two rows of 3 and 2 tokens in 2 s, with changes."""
  rows = [
    SimpleNamespace(index=0, prompt_ids=[1] * 5, ids=[1, 2, 3], finish_reason="length", error=None,
                    started_s=10.0, first_token_s=10.5, ended_s=11.5),
    SimpleNamespace(index=1, prompt_ids=[1] * 7, ids=[4, 5], finish_reason="length", error=None,
                    started_s=10.5, first_token_s=11.0, ended_s=12.0),
  ]  # fmt: skip
  calls = [SimpleNamespace(seconds=0.5, steps=1, tokens=1), SimpleNamespace(seconds=1.0, steps=1, tokens=2)]
  requests = [SimpleNamespace(index=0, max_new_tokens=3), SimpleNamespace(index=1, max_new_tokens=2)]
  timing = SimpleNamespace(first_token=[0.5, 0.5], calls=calls)
  return {"requests": requests, "rows": rows, "timing": timing, "wall": 2.0, "num_chips": 2.0} | changes


def test_latencies_and_throughput_are_of_the_tokens_in_the_rows(workloads):
  serve = importlib.import_module("serve")
  work = workloads.of_preset(workloads.SERVINGS, "tiny")[0]
  found = serve.figures_of(work, **served())
  assert (found["output_tokens"], found["prompt_tokens"], found["rows"], found["failed_rows"]) == (5, 12, 2, 0)
  assert found["output_tokens_per_second"] == 2.5
  assert found["output_tokens_per_second_per_chip"] == 1.25
  assert found["ttft_seconds"] == {"p50": 0.5, "p90": 0.5, "p99": 0.5}
  assert found["tpot_seconds"]["p50"] == 0.75  # 1 s for 2 tokens after the first, 1 s for 1
  assert found["end_to_end_seconds"] == {"p50": 1.5, "p90": 1.5, "p99": 1.5}
  assert found["itl_seconds"]["p50"] == 0.75


def test_a_serving_figure_with_tokens_of_no_row_is_refused(workloads, checks):
  serve = importlib.import_module("serve")
  work = workloads.of_preset(workloads.SERVINGS, "tiny")[0]
  twice = served()
  twice["timing"].calls[0].tokens = 2
  with pytest.raises(checks.Refused, match="6 tokens were given out, the rows hold 5"):
    serve.figures_of(work, **twice)
  early = served()
  early["rows"][0].ids = [1, 2]
  with pytest.raises(checks.Refused, match="row 0 has 2 tokens, 3 were asked for"):
    serve.figures_of(work, **early)
  missing = served()
  missing["rows"] = missing["rows"][:1]
  with pytest.raises(checks.Refused, match="1 rows ended, 2 were asked for"):
    serve.figures_of(work, **missing)


def test_prompts_are_the_same_for_a_seed_and_within_the_range(workloads):
  serve = importlib.import_module("serve")
  work = workloads.named(workloads.of_preset(workloads.SERVINGS, "k3"), "serve-8k-1k-c8")
  draw = serve.draw_requests(work, 3)
  assert draw(1000) == draw(1000)
  assert len(draw(1000)) == work.requests
  for prompt, new in draw(1000):
    assert work.range_ratio * work.prompt <= len(prompt) <= work.prompt
    assert work.range_ratio * work.new_tokens <= new <= work.new_tokens
  assert draw(1000) != serve.draw_requests(work, 4)(1000)


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--range-ratio", "0"], "--range-ratio 0.0: expected more than 0, and 1 at most"),
    (["--requests", "0"], "--requests 0: expected 1 or more"),
    (["--repeats", "3"], "--repeats: a load is run once"),
    (["--workload", "serve-9k"], "workload 'serve-9k': unknown, expected one of serve-tiny-c4"),
  ],
)
def test_a_load_that_cannot_be_is_refused_before_anything_runs(flags, message):
  from kimi_k3.errors import InputError

  serve = importlib.import_module("serve")
  with pytest.raises(InputError, match=message):
    serve.main(["decode.yml", "--preset", "tiny", *flags])


def test_without_a_preset_the_standard_loads_are_run_and_settings_may_stand_anywhere():
  serve = importlib.import_module("serve")
  args = serve.command_line().parse_intermixed_args(["decode.yml", "a=1", "--out", "serve.json", "b=2"])
  assert args.settings == ["a=1", "b=2"]
  names = [work.name for work in serve.chosen_workloads(args)]
  assert names == [f"serve-{label}-c{rows}" for label in ("1k-8k", "8k-1k") for rows in (8, 64, 256)]


def test_forms_of_a_loop_that_give_other_tokens_are_refused(checks, workloads):
  import numpy as np

  bench = importlib.import_module("bench_decode_loop")
  engine = SimpleNamespace(config=SimpleNamespace(vocab_size=1024))
  loop = bench.Loop(engine, workloads.of_preset(workloads.DECODE_LOOPS, "tiny")[0])
  assert loop._count(np.array([[5, 6, 7]])) == 3
  assert loop._count(np.array([[5]])) == 1
  with pytest.raises(checks.Refused, match="other tokens from step 1 on"):
    loop._count(np.array([[5, 9, 7]]))


def test_peak_memory_of_a_child_is_not_that_of_the_process_that_starts_it():
  held = bytearray(300 * 2**20)
  held[::4096] = b"x" * len(held[::4096])  # so that it is there
  convert = importlib.import_module("bench_convert")
  assert sizes.peak_bytes() > len(held)
  assert 2**20 < convert.run([sys.executable, "-S", "-c", "pass"]) < 100 * 2**20
  script = "from kimi_k3.cli import sizes; print(sizes.peak_bytes())"
  child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
  assert 2**20 < int(child.stdout) < 100 * 2**20


def test_a_command_that_fails_is_told_with_its_last_line():
  convert = importlib.import_module("bench_convert")
  with pytest.raises(RuntimeError, match="ended with exit code 3: no room"):
    convert.run([sys.executable, "-S", "-c", "import sys; print('no room', file=sys.stderr); sys.exit(3)"])


# The page.


@pytest.fixture
def results(session, product, tmp_path) -> Path:
  """A directory with the result of a benchmark and of a load."""
  for batch, context in ((1, 64), (2, 64), (1, 128)):
    session.compare(f"B{batch} S{context}", [product()], axes={"batch": batch, "context": context})
  writer, machine = importlib.import_module("results"), importlib.import_module("machine")
  serve, workloads = importlib.import_module("serve"), importlib.import_module("workloads")
  memory = {"peak_memory": machine.peak_memory()}
  writer.write(str(tmp_path / "product.json"), session.result | memory)
  row = serve.figures_of(workloads.of_preset(workloads.SERVINGS, "tiny")[0], **served())
  row |= memory | {"load_seconds": 1.0, "compile_seconds": 2.0, "warm_up_seconds": 0.5}
  assert "serve-tiny-c4: 2 rows on 4 slots" in serve.lines(row)
  common = {"schema": 1, "subject": "serve", "preset": "tiny", "refused": [], "environment": machine.environment()}
  writer.write(str(tmp_path / "serve.json"), common | {"kind": "serving", "results": [row]})
  return tmp_path


def test_the_page_has_every_result_and_its_plots_beside_it(results, capsys):
  report = importlib.import_module("report")
  page = results / "page.md"
  assert report.main([str(results), "--out", str(page)]) == 0
  text = page.read_text()
  assert "| B1 S128 | product |" in text
  assert "| serve-tiny-c4 | 4 | 2 | 0 | 12 | 5 | 2.5 | 1.25 |" in text
  assert "Measured on a CPU whose cores are shared" in text
  plots = sorted(path.name for path in results.glob("*.svg"))
  assert plots == ["page-batch.svg", "page-context.svg", "page-memory.svg", "page-roofline.svg"]
  assert all(f"]({name})" in text for name in plots)
  assert "2 results, 4 plots" in capsys.readouterr().out


def _changed(**changes: Any):
  return lambda text: json.dumps(json.loads(text) | changes)


@pytest.mark.parametrize(
  ("fault", "message"),
  [
    (lambda _: "{", "product.json: not JSON"),
    (lambda _: "[1]", "product.json: found list, expected schema 1"),
    (_changed(schema=2), "found {'schema': 2, 'kind': 'benchmark'}, expected schema 1"),
    (_changed(kind="tea"), "expected schema 1 and a kind of benchmark, serving"),
    (_changed(results=[{}]), r"results\[0\].workload is missing"),
    (_changed(ratios=3), "ratios is int, expected another type"),
    (_changed(environment={}), "environment has no date"),
    (lambda text: text.replace('"median"', '"mean"'), r"results\[0\].seconds.median is None, expected a time above 0"),
  ],
)
def test_a_file_that_is_no_result_is_one_line_and_no_page(results, fault, message):
  from kimi_k3.errors import InputError

  report = importlib.import_module("report")
  path = results / "product.json"
  path.write_text(fault(path.read_text()))
  with pytest.raises(InputError, match=message) as caught:
    report.main([str(results), "--out", str(results / "page.md")])
  assert "\n" not in str(caught.value)
  assert not (results / "page.md").exists()


def test_an_empty_directory_is_refused(tmp_path):
  from kimi_k3.errors import InputError

  report = importlib.import_module("report")
  with pytest.raises(InputError, match=r"no \*.json in it"):
    report.main([str(tmp_path), "--out", str(tmp_path / "page.md")])


# The scripts.


@pytest.mark.parametrize("script", [*BENCHES, "serve", "report", "run_tiny"])
def test_every_script_explains_itself(script, capsys):
  with pytest.raises(SystemExit) as ended:
    importlib.import_module(script).main(["--help"])
  assert ended.value.code == 0
  assert "usage:" in capsys.readouterr().out


def test_bad_input_is_one_line_and_exit_code_2():
  command = [sys.executable, str(BENCHMARKS / "bench_model.py"), "--preset", "huge"]
  run = subprocess.run(command, capture_output=True, text=True, check=False)
  assert run.returncode == 2
  (line,) = run.stderr.splitlines()
  assert line.startswith("bench_model.py: error: argument --preset: invalid choice: 'huge'")


@pytest.mark.slow
def test_all_tiny_benchmarks_and_the_page_are_made_and_the_loop_on_the_device_is_the_faster_one(tmp_path):
  out = tmp_path / "bench"
  run = subprocess.run(
    [sys.executable, str(BENCHMARKS / "run_tiny.py"), str(out)], capture_output=True, text=True, check=False
  )
  assert run.returncode == 0, run.stderr[-2000:]
  assert (out / "report.md").exists()
  loop = json.loads((out / "decode_loop.json").read_text())
  (ratio,) = [
    one["speed_up"]["median"]
    for one in loop["ratios"]
    if one["name"] == "on-device loop" and one["workload"].startswith("model B1 ")
  ]
  assert ratio > 1, "benchmarks/results/ has how much: a figure, not a test, on cores that are shared"
