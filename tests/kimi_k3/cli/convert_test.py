from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kimi_k3.cli import convert, sizes
from kimi_k3.cli.main import main
from kimi_k3.convert import index
from kimi_k3.errors import InputError

VERB = "convert"


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
  """Stable storage is store_test's; here it would cost half the time."""
  monkeypatch.setattr(os, "fsync", lambda _: None)


def run(*words) -> int:
  parser = argparse.ArgumentParser(prog="kimi-k3")
  convert.add_parser(parser.add_subparsers(required=True))
  args = parser.parse_args([VERB, *map(str, words)])
  return args.run(args)


@pytest.fixture(scope="module")
def converted(k3_tiny, tmp_path_factory):
  """A finished conversion of the golden checkpoint."""
  out = tmp_path_factory.mktemp("converted") / "out"
  assert run(k3_tiny.checkpoint, out) == 0
  return out


def test_the_result_is_one_line_on_stdout_and_the_log_goes_to_stderr(k3_tiny, tmp_path, capsys):
  out = tmp_path / "out"
  assert run(k3_tiny.checkpoint, out, "--no-scan", "--workers", "1") == 0
  said = capsys.readouterr()
  assert said.out.startswith(f"{out}: 412 leaves, 1976848 bytes, ")
  assert said.out.count("\n") == 1
  assert "1,406,084 weights; --no-scan" in said.err
  header = (out / "decode.yml").read_text().splitlines()[0]
  words = f"kimi-k3 convert {k3_tiny.checkpoint} OUT --no-scan --experts as-stored --dense as-stored"
  assert header == f"# Written by: {words}"
  summary = said.err.splitlines()[-1]
  assert re.fullmatch(
    r"(\d+) of \1 slices written, 0 were done before; 1\.89\d? MiB, \S+ \w*B/s, peak memory \S+ [MG]iB", summary
  )


def test_a_dry_run_prints_the_plan_and_writes_nothing(k3_tiny, tmp_path, capsys):
  assert run(k3_tiny.checkpoint, tmp_path / "out", "--dry-run") == 0
  said = capsys.readouterr().out
  assert "13: 9 KDA, 4 MLA, 12 with 16 experts" in said
  assert "4 leading layers, 2 blocks of 4, tail of 1" in said
  assert "282 from 1,492 pieces" in said
  assert "bfloat16 1.527 MiB, float32 60.52 KiB, uint8 306 KiB" in said
  assert not list(tmp_path.iterdir())


def test_a_second_run_says_so_and_writes_nothing(k3_tiny, converted, capsys):
  before = sorted((path, path.stat().st_mtime_ns) for path in converted.rglob("*"))
  assert run(k3_tiny.checkpoint, converted, "--scan") == 0
  assert "already holds this conversion, nothing written" in capsys.readouterr().err
  assert sorted((path, path.stat().st_mtime_ns) for path in converted.rglob("*")) == before


def test_other_options_are_refused_without_overwrite_and_obeyed_with_it(k3_tiny, converted, tmp_path):
  out = shutil.copytree(converted, tmp_path / "out")
  with pytest.raises(InputError, match=r"experts=as-stored.*asked for.*experts=bf16"):
    run(k3_tiny.checkpoint, out, "--experts", "bf16")
  assert run(k3_tiny.checkpoint, out, "--experts", "bf16", "--overwrite") == 0
  assert "packed_modules: []" in (out / "decode.yml").read_text()


@pytest.fixture(scope="module")
def few(tiny_checkpoint) -> Path:
  """A checkpoint of thirteen slices."""
  return tiny_checkpoint("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2")


@pytest.fixture(scope="module")
def few_converted(few, convert) -> Path:
  return convert(few)


@pytest.fixture
def stopped(few, tmp_path, monkeypatch, capsys) -> Path:
  """OUT of a conversion that was interrupted with five slices done."""
  from kimi_k3.convert.unfinished import Unfinished

  real, out = Unfinished.add, tmp_path / "out"

  def add(unfinished, number, *rest):
    if number >= 5:
      raise KeyboardInterrupt
    real(unfinished, number, *rest)

  with monkeypatch.context() as patch:
    patch.setattr(Unfinished, "add", add)
    assert main([VERB, str(few), str(out), "--workers", "1"]) == 130
  assert capsys.readouterr().err.splitlines()[-1] == "kimi-k3: interrupted"
  return out


def test_an_interruption_has_an_exit_code_of_its_own_and_the_next_run_goes_on(few, stopped, few_converted, capsys):
  assert not stopped.exists()
  assert run(few, stopped) == 0
  said = capsys.readouterr().err
  assert re.search(r"out\.partial: 5 of (\d+) slices are done, going on from there", said)
  assert re.search(r"(\d+) of \d+ slices written, 5 were done before", said)
  assert items(stopped) == items(few_converted)


def items(out: Path) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in (out / "0" / "items").rglob("*") if path.is_file()}


def test_a_dry_run_shows_slices_what_is_done_memory_and_disk(few, stopped, tmp_path, capsys, monkeypatch):
  before = sorted(tmp_path.rglob("*"))
  assert run(few, stopped, "--dry-run", "--workers", "3") == 0
  said = capsys.readouterr().out
  work = re.search(r"^slices +(\d+) of up to [\d.]+ KiB, 5 done$", said, re.MULTILINE)
  assert work
  assert re.search(r"^to write +[\d,]{7} \([\d.]+ KiB\)$", said, re.MULTILINE)
  memory = r"^memory +3 worker\(s\), up to 256 MiB each; up to 1 GiB for plan and libraries$"
  assert re.search(memory, said, re.MULTILINE)
  assert re.search(r"^disk +\S+ [GT]iB free: enough$", said, re.MULTILINE)
  monkeypatch.setattr("kimi_k3.convert.store.LocalStore.free", lambda _: 9)
  assert run(few, stopped, "--dry-run") == 0
  assert re.search(r"^disk +9 B free: NOT ENOUGH$", capsys.readouterr().out, re.MULTILINE)
  assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_of_what_is_there_says_so_and_one_of_a_bucket_has_no_disk(few, few_converted, tmp_path, capsys):
  assert run(few, few_converted, "--dry-run") == 0
  said = capsys.readouterr()
  assert "already holds this conversion, nothing written" in said.err
  assert "slices" not in said.out
  assert run(few, f"file://{tmp_path}/bucket", "--dry-run") == 0
  said = capsys.readouterr().out
  assert re.search(r"^slices +\d+ of up to .*, 0 done$", said, re.MULTILINE)
  assert "disk" not in said
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "part", ["0/4", "5/4", "x", "1", "1/0", "0/0", "-1/4", "1/4/4", "1.5/2", "1 /4", "", "1/1000000000000", "\u0661/4"]
)
def test_a_part_that_is_none_is_refused(few, tmp_path, refused, part):
  said = refused(VERB, few, tmp_path / "out", f"--part={part}")
  assert said == f"--part is {part!r}, expected i/n with i from 1 to n, such as 1/4"
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("workers", [(), ("--workers", "8")])
def test_a_budget_that_is_no_size_is_refused(few, tmp_path, refused, workers):
  said = refused(VERB, few, tmp_path / "out", "--ram-budget", "lots", *workers)
  assert said == "--ram-budget is 'lots', expected a size such as 2GiB, 500MB or a number of bytes"


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (("--ram-budget", "255MiB"), "--ram-budget is 255 MiB, 1 worker(s) take up to 256 MiB: raise it"),
    (
      ("--ram-budget", "1GiB", "--workers", "5"),
      "is 1 GiB, 5 worker(s) take up to 1.25 GiB: raise it or lower --workers",
    ),
    (("--workers", "0"), "--workers is 0, expected 1 or more"),
    (("--workers", "-2"), "--workers is -2, expected 1 or more"),
  ],
)
def test_workers_for_which_the_budget_does_not_suffice_are_refused(few, tmp_path, refused, words, said):
  assert refused(VERB, few, tmp_path / "out", *words).endswith(said)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("budget", "cpus", "workers"), [("256MiB", 4, 1), ("700MiB", 4, 2), ("2GiB", 4, 4), ("1TiB", 99, 8)]
)
def test_the_default_is_as_many_workers_as_cpus_and_budget_allow(monkeypatch, budget, cpus, workers):
  from kimi_k3.convert import output, write

  assert convert.WORKER_BYTES == write.WORKER_BYTES
  monkeypatch.setattr(output.os, "cpu_count", lambda: cpus)
  assert output.default_workers(sizes.parse("--ram-budget", budget)) == workers


def test_a_bucket_has_no_renames(few, refused):
  said = refused(VERB, few, "gs://bucket/out", "--commit", "rename")
  assert said == "--commit rename: gs://bucket/out has no renames, expected marker"


@pytest.mark.parametrize("flags", [("--commit", "marker"), ("--hash",), ()])
def test_the_flags_change_where_and_how_not_what(few, tmp_path, few_converted, flags):
  out = tmp_path / "out" if flags else f"file://{tmp_path}/out"
  assert run(few, out, *flags) == 0
  out = tmp_path / "out"
  record, other = (json.loads((path / "conversion.json").read_text()) for path in (out, few_converted))
  assert record["commit"] == ("rename" if flags == ("--hash",) else "marker")
  assert (out / "0" / "commit_success.txt").exists() == (record["commit"] == "marker")
  assert all(("sha256" in shard) == (flags == ("--hash",)) for shard in record["source"]["shards"].values())
  assert record["checksums"] == other["checksums"]
  assert {k: v for k, v in items(out).items() if k != "commit_success.txt"} == items(few_converted)


def test_parts_are_converted_apart_and_finished_together(few, tmp_path, few_converted, capsys):
  out = tmp_path / "out"
  assert run(few, out, "--part", "2/3") == 0
  said = capsys.readouterr()
  assert re.fullmatch(rf"{out}: part 2/3 is done; of other parts, \d+ of \d+ slices are not\n", said.out)
  assert not out.exists()
  with pytest.raises(InputError, match=r"convert --part 1/3; --part 3/3 before --finish$"):
    run(few, out, "--finish")
  assert run(few, out, "--part", "1/3") == 0
  assert run(few, out, "--part", "3/3") == 0
  assert ", 0 of " in capsys.readouterr().out
  assert not out.exists()
  assert run(few, out, "--finish") == 0
  said = capsys.readouterr()
  assert re.match(rf"{out}: \d+ leaves, \d+ bytes, ", said.out)
  assert "slices written" not in said.err
  assert items(out) == items(few_converted)
  assert run(few, out, "--part", "1/3") == 0
  assert "already holds this conversion" in capsys.readouterr().err


def test_the_last_part_may_finish_and_finish_alone_needs_something_to_finish(few, tmp_path, few_converted):
  out = tmp_path / "out"
  with pytest.raises(InputError, match=r"nothing to finish; convert first$"):
    run(few, out, "--finish")
  assert not list(tmp_path.iterdir())
  assert run(few, out, "--part", "1/1", "--finish") == 0
  assert items(out) == items(few_converted)


def test_a_full_disk_is_one_line_and_exit_code_2(few, tmp_path, monkeypatch, capsys):
  from kimi_k3.convert import store

  real, left = os.write, [300_000]

  def write(descriptor, data):
    left[0] -= len(data)  # Once it is full nothing goes in any more, however small.
    if left[0] < 0:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return real(descriptor, data)

  monkeypatch.setattr(store.os, "write", write)
  assert main([VERB, str(few), str(tmp_path / "out")]) == 2
  last = capsys.readouterr().err.splitlines()[-1]
  assert re.fullmatch(
    r"kimi-k3: error: .*: cannot be written \(No space left on device\): the disk takes no more: make room; \d+ of \d+ "
    r"slices are done and kept in .*/out\.partial: the same command goes on from there", last
  )  # fmt: skip
  assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]


def test_a_run_whose_log_nobody_takes_any_more_goes_on(few, tmp_path, few_converted):
  """As when a pipe's reader ends, or the disk of the log is full."""
  command = [sys.executable, "-m", "kimi_k3.cli.main", VERB, str(few), str(tmp_path / "out")]
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
    assert process.stderr
    process.stderr.readline()
    process.stderr.close()
    assert process.wait(60) == 0
  assert items(tmp_path / "out") == items(few_converted)
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_help_teaches_with_an_example(capsys):
  with pytest.raises(SystemExit) as stop:
    run("--help")
  assert stop.value.code == 0
  assert "kimi-k3 convert Kimi-K3/ k3-maxtext/ --dry-run" in capsys.readouterr().out


def test_help_says_what_each_flag_means(capsys):
  with pytest.raises(SystemExit):
    run("--help")
  said = " ".join(capsys.readouterr().out.split())
  flags = {
    "--scan, --no-scan": "scanned blocks of four",
    "--experts {as-stored,mxfp4,fp8-block,bf16}": "routed experts",
    "--dense {as-stored,fp8-block}": "shared experts",
    "--dry-run": "write nothing",
    "--overwrite": "convert anew",
    "--workers N": "slices written at a time",
    "--ram-budget BYTES": "256 MiB a worker",
    "--part i/n": "the i-th of n shares",
    "--finish": "commit what the parts have written",
    "--hash": "SHA-256 of every shard",
    "--commit {auto,rename,marker}": "how OUT appears",
  }
  options = said[said.index("options:") :]
  for flag, meaning in flags.items():
    explained = options[options.index(f" {flag} ") + len(flag) + 2 :][:400]
    assert meaning in explained, flag


def test_help_does_not_wait_for_the_libraries():
  script = (
    "import sys; from kimi_k3.cli.main import main\n"
    "try: main(['convert', '--help'])\nexcept SystemExit: pass\n"
    "sys.exit(bool({'tensorstore', 'jax', 'orbax'} & set(sys.modules)))"
  )
  assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.parametrize(
  ("suffix", "at", "message"),
  [
    (".w2.weight_scale", 0, "scale byte 255 at row 0, group 0 means NaN"),
    (".A_log", -1, "4 heads then zero padding expected, 1 of 28 non-zero past row 4"),
  ],
)
def test_bad_data_is_refused_by_name_and_leaves_nothing(k3_tiny, tmp_path, suffix, at, message):
  src = shutil.copytree(k3_tiny.checkpoint, tmp_path / "source")
  shard = src / "model-00001-of-000003.safetensors"
  tensor = next(t for t in index.read_header(src, shard.name)[1] if t.name.endswith(suffix))
  data = bytearray(shard.read_bytes())
  data[tensor.offset + at % tensor.nbytes] = 255
  shard.write_bytes(data)
  for experts in ("as-stored", "bf16"):
    with pytest.raises(InputError, match=f"{tensor.name}: {message}"):
      run(src, tmp_path / "out", "--experts", experts)
  assert [path.name for path in tmp_path.iterdir()] == ["source"]


FIRST, SECOND = (f"model-0000{i}-of-000003.safetensors" for i in (1, 2))


def remove(src: Path) -> None:
  (src / SECOND).unlink()


def truncate(src: Path) -> None:
  (src / SECOND).write_bytes((src / SECOND).read_bytes()[:-1000])


def name_a_missing_shard(src: Path) -> None:
  edit_index(src, lambda shards: shards | {"language_model.lm_head.weight": "model-00004-of-000003.safetensors"})


def store_twice(src: Path) -> None:
  edit_shards(src, lambda held, _: held.update({"language_model.lm_head.weight": np.zeros(1, np.float32)}))


def edit_index(src: Path, edit: Callable[[dict], dict]) -> None:
  content = json.loads((src / index.INDEX_FILE).read_text())
  (src / index.INDEX_FILE).write_text(json.dumps(content | {"weight_map": edit(content["weight_map"])}))


def edit_shards(src: Path, edit: Callable[[dict, str], object]) -> None:
  """Rewrites every shard after edit(its tensors, its name)."""
  for path in src.glob("*.safetensors"):
    held = load_file(path)
    edit(held, path.name)
    save_file(held, path)


DAMAGED_FILES = {
  "a shard is missing": (remove, f"{SECOND}: cannot be read (No such file or directory)"),
  "a shard is truncated": (truncate, f"{SECOND}: "),
  "the index names a shard that is not there": (name_a_missing_shard, "model-00004-of-000003.safetensors: cannot be"),
  "a tensor stands in several shards": (store_twice, f"language_model.lm_head.weight: stored in {FIRST} and in "),
}


@pytest.mark.parametrize("damage", DAMAGED_FILES)
def test_damaged_files_are_refused_in_one_line_and_nothing_is_written(k3_tiny, tmp_path, refused, damage):
  src = shutil.copytree(k3_tiny.checkpoint, tmp_path / "source")
  make, said = DAMAGED_FILES[damage]
  make(src)
  assert said in refused("convert", src, tmp_path / "out")
  assert [path.name for path in tmp_path.iterdir()] == ["source"]


DAMAGED = "model.layers.1.self_attn.f_b_proj.weight"  # bfloat16 [128, 32] in both golden cases
DAMAGED_TENSORS = {
  "deleted": lambda held, name: held.pop(name),
  "renamed": lambda held, name: held.update({name.replace("layers.1.", "layers.3."): held.pop(name)}),
  "retyped": lambda held, name: held.update({name: held[name].astype(np.float32)}),
  "transposed": lambda held, name: held.update({name: np.ascontiguousarray(held[name].T)}),
  "halved": lambda held, name: held.update({name: held[name][:64]}),
}


@pytest.mark.parametrize("damage", DAMAGED_TENSORS)
@pytest.mark.parametrize("case", ["k3_tiny", "kimi_linear_tiny"])
def test_a_damaged_tensor_is_refused_by_name_and_nothing_is_written(request, tmp_path, refused, case, damage):
  src = shutil.copytree(request.getfixturevalue(case).checkpoint, tmp_path / "source")
  name = DAMAGED if case == "kimi_linear_tiny" else f"language_model.{DAMAGED}"
  edit_shards(src, lambda held, _: DAMAGED_TENSORS[damage](held, name) if name in held else None)
  (src / index.INDEX_FILE).unlink()  # or it would name the tensor that is gone
  assert name in refused("convert", src, tmp_path / "out").replace(":", "").split()
  assert [path.name for path in tmp_path.iterdir()] == ["source"]
