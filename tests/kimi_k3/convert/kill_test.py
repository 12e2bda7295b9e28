"""`kimi-k3 convert` killed at twenty moments, as the machines of a long conversion are, and gone on with each time."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

KILLS = 20
WORKERS = 2
LOST = 0.05  # of all slices, written twice: at most WORKERS a kill, of at least KILLS * WORKERS / LOST slices
SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "synthetic_checkpoint.py"
# Wide enough for a thousand slices of 64 KiB and more, small enough for seconds: 71 MB.
SIZES = {
  "hidden_size": 512, "vocab_size": 8192, "intermediate_size": 1024, "moe_intermediate_size": 256,
  "routed_expert_hidden_size": 256, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
  "qk_rope_head_dim": 16, "v_head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 4,
  "linear_attn_config.num_heads": 4, "linear_attn_config.head_dim": 64,
  "bos_token_id": 8000, "eos_token_id": 8001, "pad_token_id": 8002,
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
  made = tmp_path_factory.mktemp("synthetic") / "source"
  command = [sys.executable, str(SCRIPT), str(made), "--layers", "9", "--experts", "64", "--top-k", "2"]
  command += ["--shard-bytes", "20000000"]
  for field, value in SIZES.items():
    command += ["--set", f"{field}={value}"]
  subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)
  return made


def started(source: Path, directory: Path, *words: str) -> subprocess.Popen[str]:
  """A conversion to `out` in the directory. OUT is spelled the same everywhere, as decode.yml holds the command."""
  directory.mkdir(exist_ok=True)
  command = [sys.executable, "-m", "kimi_k3.cli.main", "convert", str(source), "out", "--workers", str(WORKERS), *words]
  return subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
  """Exit code and stderr."""
  with process:
    _, said = process.communicate(timeout=300)
  return process.returncode, said


def files(directory: Path) -> dict[str, bytes]:
  return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def undisturbed(source, tmp_path_factory) -> Callable[[str], dict[str, bytes]]:
  made: dict[str, dict[str, bytes]] = {}

  def convert(commit: str) -> dict[str, bytes]:
    if commit not in made:
      directory = tmp_path_factory.mktemp("undisturbed") / commit
      code, said = ended(started(source, directory, "--commit", commit))
      assert code == 0, said
      made[commit] = files(directory / "out")
    return made[commit]

  return convert


class State:
  """What is done of a conversion that may be under way."""

  def __init__(self, directory: Path, commit: str):
    self.journal = directory / ("out/.unfinished/journal" if commit == "marker" else "out.partial/journal")
    self.data = directory / ("out/0/items/d" if commit == "marker" else "out.partial/out/0/items/d")

  def done(self) -> set[str]:
    return {path.stem for path in self.journal.glob("*.json")} if self.journal.exists() else set()

  def begun(self, pid: int, since: float) -> set[str]:
    """Slices with any byte of a data file written by a process, journaled or not."""
    paths = [path for path in self.data.glob("[0-9]*") if path.stat().st_mtime >= since] if self.data.exists() else []
    ours = (path.name for path in paths if ".tmp-" not in path.name or f".tmp-{pid}-" in path.name)
    return {name.split(".")[0] for name in ours}


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
  until = time.monotonic() + 120
  while not condition() and process.poll() is None and time.monotonic() < until:
    time.sleep(0.002)


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_killed_at_twenty_moments_the_files_are_those_of_an_undisturbed_run_and_little_is_written_twice(
  source, undisturbed, tmp_path, commit
):
  expected = undisturbed(commit)
  total = sum(bool(re.fullmatch(r"0/items/d/\d+", name)) for name in expected)
  assert total >= KILLS * WORKERS / LOST
  rng, state = random.Random(2026), State(tmp_path, commit)
  # From the start-up to the commit: shares of all slices, and one in the middle of what comes after them.
  shares, killed, lost = [0.0, *sorted(rng.random() for _ in range(KILLS - 2)), 1.0], 0, 0
  for share in shares:
    before, since = state.done(), time.time() - 1
    process = started(source, tmp_path, "--commit", commit)
    if share == 0.0:
      time.sleep(rng.random())
    elif share == 1.0:
      wait_for((state.data / "index").exists, process)
    else:
      wait_for(lambda share=share: len(state.done()) >= share * total, process)
      time.sleep(rng.random() * 0.03)
    process.kill()
    code, said = ended(process)
    if share == 1.0 and code == 0:  # The end came first.
      break
    assert code == -signal.SIGKILL, said
    killed += 1
    now = state.done()
    assert before <= now
    assert not (tmp_path / "out" / "conversion.json").exists() or commit == "marker"
    lost += len(state.begun(process.pid, since) - now)
  code, said = ended(started(source, tmp_path, "--commit", commit))
  assert code == 0, said
  assert files(tmp_path / "out") == expected
  assert [path.name for path in tmp_path.iterdir()] == ["out"]
  print(f"\n{commit}: {killed} kills, {total} slices, {lost} of them written twice ({100 * lost / total:.1f} %)")
  assert killed >= KILLS - 1
  assert lost <= LOST * total


def test_an_interrupted_conversion_ends_with_130_and_goes_on_from_there(source, undisturbed, tmp_path):
  state, process = State(tmp_path, "rename"), started(source, tmp_path)
  wait_for(lambda: len(state.done()) > 100, process)
  process.send_signal(signal.SIGINT)
  code, said = ended(process)
  assert (code, said.splitlines()[-1]) == (130, "kimi-k3: interrupted")
  done = len(state.done())
  assert done > 100
  assert not state.begun(process.pid, 0) - state.done()  # those under way were ended
  code, said = ended(started(source, tmp_path))
  assert code == 0, said
  assert f"{done:,} were done before" in said
  assert files(tmp_path / "out") == undisturbed("rename")


def test_a_conversion_whose_parent_is_killed_holds_its_lock_and_ends(source, undisturbed, tmp_path):
  """As under a shell or a scheduler that dies. Nobody reads its progress any more."""
  state = State(tmp_path, "rename")
  script = (
    "import subprocess, sys\nwith open('log', 'w') as log:\n"
    "  process = subprocess.Popen(sys.argv[1:], stdout=log, stderr=log)\n"
    "print(process.pid, flush=True)\nprocess.wait()"
  )
  command = [sys.executable, "-m", "kimi_k3.cli.main", "convert", str(source), "out", "--workers", str(WORKERS)]
  parent = subprocess.Popen([sys.executable, "-c", script, *command], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
  wait_for(lambda: len(state.done()) > 50, parent)
  parent.kill()
  parent.wait()
  assert parent.stdout
  child = int(parent.stdout.readline())
  parent.stdout.close()
  code, said = ended(started(source, tmp_path))
  assert code == 2, said
  assert said.splitlines()[-1].endswith("another conversion is writing there, wait for it or choose another OUT")
  until = time.monotonic() + 120
  while Path(f"/proc/{child}").exists() and not _is_zombie(child) and time.monotonic() < until:
    time.sleep(0.05)
  code, said = ended(started(source, tmp_path))
  assert code == 0, said
  assert "already holds this conversion" in said
  assert files(tmp_path / "out") == undisturbed("rename")


def _is_zombie(pid: int) -> bool:
  try:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
  except OSError:
    return True
