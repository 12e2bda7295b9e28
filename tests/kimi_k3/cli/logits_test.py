"""`kimi-k3 logits`: one file of arrays, or one line that says why not."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_k3.cli.main import main
from kimi_k3.maxtext_adapter import engine

ROWS = [[1, 2, 3], [255], [7] * 30]


@pytest.fixture(scope="module")
def logits(five_layers, tmp_path_factory):
  """What a real run wrote."""
  directory = tmp_path_factory.mktemp("logits")
  (directory / "rows.json").write_text(json.dumps(ROWS))
  out = directory / "logits.npz"
  words = ("--tokens", directory / "rows.json", "--out", out, "dtype=float32", "matmul_precision=highest")
  assert main(["logits", str(five_layers / "decode.yml"), *map(str, words)]) == 0
  assert sorted(path.name for path in directory.iterdir()) == ["logits.npz", "rows.json"]
  with np.load(out) as stored:
    return dict(stored)


def test_each_row_has_the_logits_of_its_own_positions_in_float32(logits):
  assert {name: array.shape for name, array in logits.items()} == {
    "logits_0": (3, 256),
    "logits_1": (1, 256),
    "logits_2": (30, 256),
  }
  assert {array.dtype for array in logits.values()} == {np.dtype("float32")}
  assert all(np.isfinite(array).all() for array in logits.values())


def test_logits_are_the_references(logits, tiny_checkpoint, reference):
  checkpoint = tiny_checkpoint("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2")
  loaded = reference.load_checkpoint(checkpoint)
  for i, row in enumerate(ROWS):
    expected = reference.forward(loaded, np.array([row]))["logits"][0]
    np.testing.assert_allclose(logits[f"logits_{i}"], expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.fixture
def forward(monkeypatch):
  """Another model behind the verb: ones, and NaN at a pad or after token 99."""

  def make_forward(config, placement):
    del placement

    def run(tokens, true_length):
      found = np.ones((len(tokens), config.vocab_size), np.float32)
      found[true_length:] = np.nan
      found[tokens == 99] = np.nan
      return jnp.asarray(found), None

    return run

  monkeypatch.setattr(engine, "make_forward", make_forward)


@pytest.mark.usefixtures("forward")
def test_the_result_is_one_line_on_stdout_and_progress_goes_to_stderr(five_layers, ids_file, tmp_path, capsys):
  out = tmp_path / "logits.npz"
  assert main(["logits", str(five_layers / "decode.yml"), "--tokens", ids_file(), "--out", str(out)]) == 0
  said = capsys.readouterr()
  assert said.out == f"{out}: 2 rows, 5 positions, vocabulary 256\n"
  assert said.err == "row 0: 3 tokens\nrow 1: 2 tokens\n"


@pytest.mark.usefixtures("forward")
def test_logits_that_are_not_finite_are_written_and_told_with_exit_code_1(five_layers, ids_file, tmp_path, capsys):
  out = tmp_path / "logits.npz"
  words = ("--tokens", ids_file([[1], [2, 99], [3]]), "--out", str(out))
  assert main(["logits", str(five_layers / "decode.yml"), *words]) == 1
  assert "kimi-k3: row(s) 1 hold logits that are not finite" in capsys.readouterr().err
  with np.load(out) as stored:
    assert np.isfinite(stored["logits_0"]).all()
    assert np.isnan(stored["logits_1"][1]).all()


@pytest.mark.parametrize(
  ("value", "settings", "said"),
  [
    ([[1], []], (), "row(s) 1: expected a non-empty list of integer token ids"),
    ([[True]], (), "row(s) 0: expected a non-empty list"),
    ([[256]], (), "token ids outside the vocabulary of 256: row 0 position 0: 256"),
    ([[1]], ("no_such_key=1",), "unknown key no_such_key"),
    ([[1]], ("scan_layers=false",), "scan_layers is false in the config, true in the checkpoint"),
    ([[1]], ("enable_prefix_caching=true",), "enable_prefix_caching is True"),
  ],
)
def test_bad_input_is_refused_and_the_old_file_stays(five_layers, ids_file, refused, tmp_path, value, settings, said):
  out = tmp_path / "logits.npz"
  out.write_text("old")
  words = ("--tokens", ids_file(value), "--out", out, *settings)
  assert said in refused("logits", five_layers / "decode.yml", *words)
  assert out.read_text() == "old"
  assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.json", "logits.npz"]


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (("--tokens", "nowhere.json", "--out", "x.npz"), "nowhere.json: cannot be read"),
    (("--tokens", "ids.json", "--out", "nowhere/x.npz"), "nowhere/x.npz: its directory does not exist"),
    (("--tokens", "ids.json", "--out", "."), ".: is a directory"),
  ],
)
def test_files_that_cannot_be_used_are_refused(five_layers, ids_file, refused, tmp_path, monkeypatch, words, said):
  ids_file()
  monkeypatch.chdir(tmp_path)
  assert said in refused("logits", five_layers / "decode.yml", *words)


def test_a_missing_config_is_refused(ids_file, refused, tmp_path):
  words = ("--tokens", ids_file(), "--out", tmp_path / "x.npz")
  assert "nowhere.yml: no such file" in refused("logits", "nowhere.yml", *words)
