"""Parsing, help and exit codes of the whole command line."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from kimi_k3.cli import main as cli
from kimi_k3.cli.main import VERBS, main
from kimi_k3.errors import InputError


def run(*words: str) -> subprocess.CompletedProcess[str]:
  command = [sys.executable, "-m", "kimi_k3", *words]
  return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_each_verb_has_an_example(verb, capsys):
  with pytest.raises(SystemExit) as stop:
    main([verb, "--help"])
  assert stop.value.code == 0
  said = capsys.readouterr()
  assert f"  kimi-k3 {verb} " in said.out
  assert "example" in said.out
  assert said.err == ""


def test_the_help_names_every_verb_with_an_example(capsys):
  with pytest.raises(SystemExit) as stop:
    main(["--help"])
  assert stop.value.code == 0
  said = capsys.readouterr().out
  assert all(f"  kimi-k3 {verb} " in said for verb in VERBS)


def test_help_imports_neither_jax_nor_maxtext():
  program = (
    "import sys; from kimi_k3.cli.main import main\n"
    "try: main(['decode', '--help'])\n"
    "finally: print(sorted({'jax', 'maxtext', 'orbax', 'transformers'} & set(sys.modules)))"
  )
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
  assert done.stdout.splitlines()[-1] == "[]"


def test_the_module_is_the_command():
  done = run("decode", "nowhere.yml")
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith("kimi-k3: error: nowhere.yml: no such file")
  assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
  ("words", "said"),
  [
    ((), "the following arguments are required: VERB"),
    (("transcribe",), "invalid choice: 'transcribe'"),
    (("serve", "OUT"), "serve: there is no server; use batch for many prompts"),
    (("--frobnicate",), "VERB"),
    (("decode",), "the following arguments are required: CONFIG.yml"),
    (("decode", "c.yml", "--frobnicate"), "unrecognized arguments: --frobnicate (settings are key=value"),
    (("decode", "c.yml", "--frobnicate=3"), "unrecognized arguments: --frobnicate=3"),
    (("decode", "c.yml", "second.yml"), "unrecognized arguments: second.yml"),
    (("decode", "c.yml", "--max-new", "3"), "unrecognized arguments: --max-new 3"),  # no guessing of a flag's rest
    (("decode", "c.yml", "--max-new-tokens", "many"), "argument --max-new-tokens: invalid int value: 'many'"),
    (("decode", "c.yml", "--prompt-ids"), "argument --prompt-ids: expected one argument"),
    (("logits", "c.yml", "--out", "x.npz"), "the following arguments are required: --tokens"),
    (("logits", "c.yml", "--tokens", "x.json"), "the following arguments are required: --out"),
    (("convert", "a", "b", "--frobnicate"), "unrecognized arguments: --frobnicate"),
    (("convert", "a", "b", "dtype=float32"), "unrecognized arguments: dtype=float32"),
    (("convert", "a"), "the following arguments are required: OUT"),
    (("run",), "the following arguments are required: maxtext.MODULE"),
  ],
)
def test_a_wrong_command_line_is_refused_in_one_line(refused, words, said):
  assert said in refused(*words)


def test_a_refusal_is_one_line_whatever_it_quotes(refused):
  assert refused("decode", "two\nlines.yml").startswith("two lines.yml: no such file")


@pytest.mark.parametrize(
  ("raised", "code", "said"),
  [
    (InputError("no"), 2, "kimi-k3: error: no\n"),
    (KeyboardInterrupt(), 130, "kimi-k3: interrupted\n"),
  ],
)
def test_what_ends_a_verb_becomes_an_exit_code(monkeypatch, capsys, raised, code, said):
  def fail(_):
    raise raised

  parser = cli.build_parser()
  monkeypatch.setattr(cli, "build_parser", lambda: parser)
  monkeypatch.setattr(cli, "_parse", lambda *_: type("Args", (), {"verb": "verb", "run": staticmethod(fail)}))
  assert main(["decode"]) == code
  assert capsys.readouterr().err == said


def test_an_error_of_our_own_is_not_hidden(monkeypatch):
  def fail(_):
    raise ZeroDivisionError

  monkeypatch.setattr(cli, "_parse", lambda *_: type("Args", (), {"verb": "verb", "run": staticmethod(fail)}))
  with pytest.raises(ZeroDivisionError):
    main(["decode"])


@pytest.mark.parametrize(("verb", "swallowed"), [("plan", True), ("decode", True), ("convert", False)])
def test_an_interrupt_ends_what_runs_jax_even_where_an_exception_would_be_dropped(verb, swallowed):
  script = f"""
import time
from kimi_k3.cli.main import _ended_by_interrupt

class Dropping:
  def __del__(self):  # Python drops an exception that is raised in here
    print("ready", flush=True)
    time.sleep(30)

with _ended_by_interrupt({verb!r}):
  Dropping()
print("went on", flush=True)
"""
  process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  assert process.stdout is not None
  assert process.stdout.readline() == "ready\n"
  process.send_signal(signal.SIGINT)
  out, err = process.communicate(timeout=60)
  assert (process.returncode, out) == ((130, "") if swallowed else (0, "went on\n"))
  assert ("kimi-k3: interrupted\n" in err) == swallowed
