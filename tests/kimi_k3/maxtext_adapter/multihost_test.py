"""Two processes of four devices answer as one, each reads its share, and a part in the wrong place is found."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

IN_PROCESSES = Path(__file__).parent / "in_processes.py"
DEVICES = 8
STEPS = 6
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # a third less of it
# Experts dominate as in K3: 98 % of the bytes, each in whole chunks. Eight heads, so that eight devices divide them.
CHECKPOINT = (
  *("--preset", "tiny", "--seed", "12", "--layers", "2"),
  *("--set", "num_attention_heads=8", "--set", "num_key_value_heads=8", "--set", "linear_attn_config.num_heads=8"),
  *("--set", "num_experts=64", "--set", "moe_intermediate_size=2048", "--set", "routed_expert_hidden_size=256"),
  *("--set", "num_shared_experts=1"),
)
# 50 % are this process's experts; the rest is what every device holds whole, chunks that both need a part of, and the
# index of the store.
MOST_READ = 55.0
EXPERTS = "decoder.lead_1.mlp.experts.w1_packed"
HEADS = "decoder.lead_0.attention.q_proj.kernel"
# Ids of JAX's CPU devices: 2048 apart from process to process.
IDS = ((0, 1, 2, 3), (2048, 2049, 2050, 2051))
SECONDS_TO_END = 150  # of the others after one has died: what JAX waits for a sign of life, 60, and some


@pytest.fixture(scope="module")
def converted(tiny_checkpoint, convert) -> Path:
  return convert(tiny_checkpoint(*CHECKPOINT))


@dataclasses.dataclass(frozen=True)
class Golden:
  prompts: list[list[int]]
  greedy: list[list[int]]


@pytest.fixture(scope="module")
def golden(tiny_checkpoint, tmp_path_factory) -> Golden:
  out = tmp_path_factory.mktemp("golden")
  script = Path(__file__).parents[2] / "reference" / "make_golden.py"
  command = [sys.executable, str(script), str(tiny_checkpoint(*CHECKPOINT)), str(out), "--greedy", str(STEPS)]
  subprocess.run([*command, "--lengths", "9", "4", "--seed", "12"], check=True, timeout=300, capture_output=True)
  with np.load(out / "golden.npz") as arrays:
    return Golden(*([arrays[f"{name}_{i}"].tolist() for i in range(2)] for name in ("tokens", "greedy")))


@contextlib.contextmanager
def started(commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]) -> Iterator[list[Any]]:
  """Processes of one run, each with its output in its pipes. All are gone when the block ends."""
  running = []
  try:
    for command, environment in zip(commands, environments, strict=True):
      flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // len(commands)} {QUICK_COMPILE}"}
      running.append(
        subprocess.Popen(
          command, env=os.environ | flags | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
      )
    yield running
  finally:
    for process in running:
      process.kill()
      process.communicate()


def free_port() -> int:
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


@dataclasses.dataclass(frozen=True)
class Ended:
  """What a process left."""

  code: int
  out: str
  err: str


def finished(running: Sequence[Any], timeout: float = 600) -> list[Ended]:
  """Waits for all. Their pipes are read one after the other: none of them writes more than a pipe holds."""
  end = time.monotonic() + timeout
  said = [process.communicate(timeout=max(1.0, end - time.monotonic())) for process in running]
  return [Ended(process.returncode, *texts) for process, texts in zip(running, said, strict=True)]


@pytest.fixture
def run(converted, golden, tmp_path) -> Callable[..., tuple[list[Any], list[Ended]]]:
  """Returns a function: what differs in a request to the answers of its processes, and what they printed."""

  def ask(
    count: int = 2, environments: Sequence[dict[str, str]] = (), reverse: bool = False, **request: Any
  ) -> tuple[list[Any], list[Ended]]:
    asked = {
      "converted": str(converted),
      "settings": ["partition_mesh=tensor=8"],
      "prompts": golden.prompts,
      "steps": STEPS,
      "order": None,
      "temperature": None,
      "swaps": [],
    } | request
    (tmp_path / "request.json").write_text(json.dumps(asked))
    answers = [tmp_path / f"answer{i}.json" for i in range(count)]
    where = f"127.0.0.1:{free_port()},{count}"
    commands = [
      [sys.executable, str(IN_PROCESSES), str(tmp_path / "request.json"), str(answers[i]), f"{where},{i}"]
      for i in range(count)
    ]
    given = list(environments) or [{}] * count
    if reverse:
      commands.reverse()
    with started(commands, given) as running:
      ended = finished(running)
    if reverse:
      ended.reverse()
    assert [process.code for process in ended] == [0] * count, "\n".join(process.err[-3000:] for process in ended)
    return [json.loads(answer.read_text()) for answer in answers], ended

  return ask


def check_reading(ended: Sequence[Ended]) -> None:
  """Each process says what it read, at most MOST_READ percent, and that everything is where it belongs."""
  for number, process in enumerate(ended):
    said = re.search(rf"^process {number} of 2: read (\S+) MiB of (\S+) MiB \((\S+) %\)$", process.err, re.MULTILINE)
    assert said, process.err[-3000:]
    read, stored, percent = map(float, said.groups())
    assert percent == pytest.approx(100 * read / stored, abs=0.1)
    assert 45 < percent <= MOST_READ
    assert re.search(rf"^process {number} of 2: 56 leaves are where they belong, ", process.err, re.MULTILINE)


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_the_reference_each_reads_its_share_and_swapped_shards_are_caught(run, golden):
  (first, second), across = IDS, (IDS[0][2], IDS[1][1])
  swaps = [[EXPERTS, *first[:2]], [EXPERTS, *across], [HEADS, *across], [HEADS, *second[:2]]]
  answers, ended = run(swaps=swaps)
  check_reading(ended)
  for number, answer in enumerate(answers):
    assert answer["ids"] == golden.greedy
    assert answer["process"] == number
    assert answer["devices"] == list(IDS[number])
  inside_first, experts, heads, inside_second = zip(*(answer["swaps"] for answer in answers), strict=True)
  assert inside_first[1] == inside_second[0] == ""  # each process looks at its own devices
  assert (
    f"{EXPERTS} on device 0 of process 0 at [0:1, 0:2048, 0:128]: " in inside_first[0]
    and "it is the content of [8:9, 0:2048, 0:128], which belongs on device 1 of process 0" in inside_first[0]
  )
  assert f"{HEADS} on device 2048 of process 1 at [0:64, 4:5, 0:32]: " in inside_second[1]
  assert re.search(r": \d+ of 2048 elements differ: ", inside_second[1])
  # Of a shard over a MiB one expert is compared, another one on each device: place and origin, in each process.
  codes = [f"[{expert}:{expert + 1}, 0:2048, 0:128]" for expert in (18, 42, 41, 17)]
  head = ["[0:64, 2:3, 0:32]", "[0:64, 5:6, 0:32]"]
  for said, name, places in ((experts, EXPERTS, codes), (heads, HEADS, [*head, *reversed(head)])):
    at_first, of_second, at_second, of_first = places
    assert f"{name} on device 2 of process 0 at {at_first}: " in said[0]
    assert f"it is the content of {of_second}, which belongs on device 2049 of process 1" in said[0]
    assert f"{name} on device 2049 of process 1 at {at_second}: " in said[1]
    assert f"it is the content of {of_first}, which belongs on device 2 of process 0" in said[1]


@pytest.mark.slow
def test_one_process_and_two_draw_the_same_tokens(run):
  (alone,), _ = run(1, temperature=0.8)
  answers, ended = run(temperature=0.8)
  check_reading(ended)
  assert answers[0]["ids"] == answers[1]["ids"] == alone["ids"]
  assert len({token for row in alone["ids"] for token in row}) > STEPS


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["partition_mesh=data=2,tensor=4", "partition_mesh=tensor=4,data=2"])
def test_rows_and_heads_may_be_cut_across_processes(run, golden, settings):
  answers, _ = run(settings=[settings])
  assert [answer["ids"] for answer in answers] == [golden.greedy] * 2


@pytest.mark.slow
def test_the_launchers_numbers_mean_nothing(run, golden):
  names = ("TPU_WORKER_ID", "JOB_COMPLETION_INDEX", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
  answers, ended = run(environments=[dict.fromkeys(names, "1"), dict.fromkeys(names, "0")])
  check_reading(ended)
  assert [answer["process"] for answer in answers] == [0, 1]
  assert [answer["ids"] for answer in answers] == [golden.greedy] * 2


@pytest.mark.slow
def test_the_order_in_which_processes_start_means_nothing(run, golden):
  answers, ended = run(reverse=True)
  check_reading(ended)
  assert [answer["process"] for answer in answers] == [0, 1]
  assert [answer["ids"] for answer in answers] == [golden.greedy] * 2


@pytest.mark.slow
def test_the_mesh_may_take_devices_of_the_processes_in_turn(run, golden):
  order = [number for pair in zip(*IDS, strict=True) for number in reversed(pair)]
  answers, ended = run(order=order, swaps=[[EXPERTS, *order[:2]]])
  check_reading(ended)
  for answer in answers:
    assert answer["owners"] == [1, 0] * 4
    assert answer["ids"] == golden.greedy
    assert "which belongs on device" in answer["swaps"][0]


@pytest.mark.slow
def test_the_first_process_alone_keeps_compiled_programs_and_finds_them_again(run, tmp_path):
  # JAX 0.12.0.1: process 0 writes. The key of a CPU program has the process in it, so the others compile anew there.
  cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
  (cold, other), _ = run(environments=[cache] * 2)
  kept = sorted(path.name for path in (tmp_path / "cache").iterdir() if path.name.endswith("-cache"))
  misses, hits = "/jax/compilation_cache/cache_misses", "/jax/compilation_cache/cache_hits"
  assert cold["events"][misses] == len(kept) > 10
  assert misses not in other["events"]
  (warm, _), _ = run(environments=[cache] * 2)
  assert misses not in warm["events"]
  assert warm["events"][hits] == warm["events"]["/jax/compilation_cache/compile_requests_use_cache"]
  assert kept == sorted(path.name for path in (tmp_path / "cache").iterdir() if path.name.endswith("-cache"))


# The verbs.

DECODE = ("partitioning=manual", "partition_mesh=tensor=8", "dtype=float32", "matmul_precision=highest")


def command(words: Sequence[Any], where: str) -> list[str]:
  return [sys.executable, "-m", "kimi_k3", *map(str, words), "--multihost", where]


@pytest.fixture
def verb(converted) -> Callable[..., list[Ended]]:
  """Returns a function: a verb, and the words of each process, to what they left."""

  def ask(name: str, *words: Sequence[Any], hosts: Sequence[dict[str, str]] = ({}, {})) -> list[Ended]:
    where = f"127.0.0.1:{free_port()},{len(words)}"
    commands = [command([name, converted / "decode.yml", *own], f"{where},{i}") for i, own in enumerate(words)]
    with started(commands, hosts) as running:
      return finished(running)

  return ask


@pytest.mark.slow
def test_decode_prints_on_the_first_process_alone(verb, golden, tmp_path):
  (tmp_path / "prompts.json").write_text(json.dumps(golden.prompts))
  words = ("--prompt-ids", tmp_path / "prompts.json", "--max-new-tokens", STEPS, "--ignore-eos", *DECODE)
  first, second = verb("decode", words, words)
  assert (first.code, second.code) == (0, 0), first.err + second.err
  assert [row["ids"] for row in json.loads(first.out)] == golden.greedy
  assert second.out == ""
  check_reading([first, second])
  assert "tok/s" in first.err and "tok/s" not in second.err


@pytest.mark.slow
def test_batch_writes_on_the_first_process_alone_and_all_go_on_where_it_stopped(verb, golden, tmp_path):
  lines = [{"prompt_ids": golden.prompts[0]}, [], {"prompt_ids": golden.prompts[1]}]
  (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
  out = tmp_path / "out.jsonl"
  words = ("--in", tmp_path / "in.jsonl", "--out", out, "--max-new-tokens", STEPS, "--ignore-eos", *DECODE)
  first, second = verb("batch", words, words)
  assert (first.code, second.code, second.out) == (1, 1, ""), first.err + second.err
  found = [json.loads(line) for line in out.read_text().splitlines()]
  assert [row["ids"] for row in found] == [golden.greedy[0], [], golden.greedy[1]]
  assert "in.jsonl: line 2: found [], expected an object" in first.err
  assert "in.jsonl: line 2" not in second.err
  out.write_text("".join(line + "\n" for line in out.read_text().splitlines()[:2]) + '{"index": 2, ')
  first, second = verb("batch", words, words)
  assert (first.code, second.code, second.out) == (1, 1, ""), first.err + second.err
  assert first.out.startswith("3 rows (1 failed, 2 of them before) on ")
  assert "bytes of a torn last line cut off" in first.err
  assert [json.loads(line) for line in out.read_text().splitlines()] == found


@pytest.mark.slow
def test_logits_of_two_processes_are_those_of_one(verb, golden, tmp_path, converted):
  (tmp_path / "rows.json").write_text(json.dumps(golden.prompts))
  words = ("--tokens", tmp_path / "rows.json", *DECODE)
  out, alone = tmp_path / "out.npz", tmp_path / "alone.npz"
  first, second = verb("logits", (*words, "--out", out), (*words, "--out", out))
  assert (first.code, second.code, second.out) == (0, 0, ""), first.err + second.err
  one = [sys.executable, "-m", "kimi_k3", "logits", converted / "decode.yml", *words, "--out", alone]
  with started([one], [{}]) as running:
    assert finished(running)[0].code == 0
  with np.load(out) as found, np.load(alone) as expected:
    for i in range(len(golden.prompts)):
      # The same program on the same devices; Gloo adds in another order than XLA inside a process.
      np.testing.assert_allclose(found[f"logits_{i}"], expected[f"logits_{i}"], rtol=0, atol=1e-5)


def refused(ended: Sequence[Ended]) -> str:
  """The one line that all processes end with."""
  lines = {line for one in ended for line in one.err.splitlines() if line.startswith("kimi-k3: error: ")}
  assert [(one.code, one.out) for one in ended] == [(2, "")] * len(ended), "\n".join(one.err[-2000:] for one in ended)
  assert all(one.err.count("kimi-k3: error: ") == 1 for one in ended)
  assert len(lines) == 1
  return lines.pop().removeprefix("kimi-k3: error: ")


@pytest.mark.slow
def test_what_differs_between_processes_is_refused_on_all_of_them(verb, golden, tmp_path):
  for i, rows in enumerate((golden.prompts, [golden.prompts[0], [1, 2, 3, 4]])):
    (tmp_path / f"prompts{i}.json").write_text(json.dumps(rows))
  words = [("--prompt-ids", tmp_path / f"prompts{i}.json", "--max-new-tokens", 4 + i, *DECODE) for i in range(2)]
  hosts = [{"JAX_DEFAULT_MATMUL_PRECISION": name} for name in ("high", "highest")]
  said = refused(verb("decode", (*words[0], "kda_implementation=tokamax_xla_chunked"), words[1], hosts=hosts))
  assert said.startswith("the processes differ: ")
  assert re.search(r"flag --max-new-tokens is 4 on process 0 \(\S+\), 5 on process 1 \(\S+\); ", said)
  assert re.search(r"environment variable JAX_DEFAULT_MATMUL_PRECISION is high on process 0 \(\S+\), highest on ", said)
  assert re.search(r'kda_implementation is "tokamax_xla_chunked" on process 0 \(\S+\), "portable" on process 1 ', said)
  assert said.endswith("; and 1 more: start all with the same")  # the second row, behind max_target_length


@pytest.mark.slow
@pytest.mark.parametrize(
  ("own", "said"),
  [
    (
      ("--prompt-ids", "/nowhere.json", *DECODE),
      "process 1 of 2: /nowhere.json: cannot be read: No such file or direc",
    ),
    (("no_such_key=1", *DECODE), "unknown key no_such_key"),
  ],
)
def test_what_one_process_refuses_ends_all_with_its_words(verb, golden, tmp_path, own, said):
  (tmp_path / "prompts.json").write_text(json.dumps(golden.prompts))
  words = ("--prompt-ids", tmp_path / "prompts.json", *DECODE)
  own = own if "--prompt-ids" in own else (*own, "--prompt-ids", tmp_path / "prompts.json")
  assert said in refused(verb("decode", words, own))


@pytest.mark.slow
def test_a_copy_that_is_damaged_on_one_host_ends_all_while_a_copy_elsewhere_is_as_good(
  verb, golden, tmp_path, converted
):
  (tmp_path / "prompts.json").write_text(json.dumps(golden.prompts))
  shutil.copytree(converted, copy := tmp_path / "copy")
  for file in (copy / "0/items/d").iterdir():
    if file.stat().st_size == 2048 * 128 + 4:  # the codes of one expert, and their checksum
      content = bytearray(file.read_bytes())
      content[1000] ^= 1
      file.write_bytes(content)
  words = ("--prompt-ids", tmp_path / "prompts.json", *DECODE)
  said = refused(verb("decode", words, (*words, f"load_parameters_path={copy}/0/items")))
  assert said.startswith(f"process 1 of 2: {copy}/0/items: cannot be read: ")
  assert said.endswith("convert again")


@pytest.mark.slow
def test_the_compilers_partitioning_is_refused_on_two_processes(verb, golden, tmp_path):
  (tmp_path / "prompts.json").write_text(json.dumps(golden.prompts))
  words = ("--prompt-ids", tmp_path / "prompts.json")
  assert refused(verb("decode", words, words)) == (
    "process 0, 1 of 2: partitioning is auto on 2 processes, expected one: set partitioning=manual"
  )


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_is_told_to_stop_takes_the_others_with_it(converted, golden, tmp_path, number):
  (tmp_path / "prompts.json").write_text(json.dumps(golden.prompts))
  words = ("decode", converted / "decode.yml", "--prompt-ids", tmp_path / "prompts.json", *DECODE)
  where = f"127.0.0.1:{free_port()},2"
  # So long that they are at it when one is told to stop.
  commands = [command([*words, "--max-new-tokens", 100_000, "--ignore-eos"], f"{where},{i}") for i in range(2)]
  with started(commands, [{}, {}]) as running:
    for line in running[number].stderr:
      if "where they belong" in line:
        break
    time.sleep(10)
    running[number].send_signal(signal.SIGTERM)
    begin = time.monotonic()
    assert running[number].wait(timeout=30) == -signal.SIGTERM
    other = running[1 - number]
    assert other.wait(timeout=SECONDS_TO_END) != 0
    assert time.monotonic() - begin < SECONDS_TO_END


@pytest.mark.parametrize("number", [0, 1])
def test_who_waits_for_others_in_vain_says_one_line_after_the_time_given(tmp_path, number):
  where = f"127.0.0.1:{free_port()},2,{number}"
  words = command(["decode", tmp_path / "none.yml", "--multihost-timeout", "2"], where)
  begin = time.monotonic()
  with started([words], [{}]) as running:
    (ended,) = finished(running, timeout=120)
  assert ended.code == 2
  assert ended.out == ""
  assert ended.err == (
    f"kimi-k3: error: --multihost {where}: not all processes came, or the coordinator cannot be reached within 2 s: "
    "start one process for each ID, all with the address of process 0; --multihost-timeout sets the time\n"
  )
  assert time.monotonic() - begin < 100
