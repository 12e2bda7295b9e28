"""scripts/train_tiny: the stored text and questions, the vocabulary learnt from them, the ids that MaxText reads.

The script that uses them all has its tests in train_tiny_script_test.py.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import regex
import yaml

from kimi_k3.generate.tokenizer import SPLIT_PATTERN, TiktokenTokenizer
from kimi_k3.maxtext_keys import from_maxtext

REPO = Path(__file__).resolve().parents[1]
TEXT = REPO / "tests" / "golden" / "k3-nano" / "text"
MODEL = REPO / "configs" / "models" / "kimi-k3-nano.yml"
TRAINING = REPO / "configs" / "train-nano.yml"


@pytest.fixture
def script(monkeypatch):
  """Imports a script of scripts/train_tiny, where they find each other."""
  monkeypatch.syspath_prepend(REPO / "scripts" / "train_tiny")
  return importlib.import_module


@pytest.fixture
def learn_bpe(script) -> ModuleType:
  return script("learn_bpe")


@pytest.fixture(scope="module")
def learnt() -> list[bytes]:
  """The vocabulary of the held-out text: as large as that of the model, from a twentieth of the text."""
  sys.path.insert(0, str(REPO / "scripts" / "train_tiny"))
  try:
    return importlib.import_module("learn_bpe").learn(documents("held-out"), 1008)
  finally:
    sys.path.pop(0)


def documents(name: str) -> list[str]:
  return (TEXT / f"{name}.txt").read_text().removesuffix("\n").split("\n\n\n")


def lines(name: str) -> list[dict[str, str]]:
  return [json.loads(line) for line in (TEXT / f"{name}.jsonl").read_text().splitlines()]


def model() -> dict:
  return yaml.safe_load(MODEL.read_text())


# The text


def test_the_stored_text_is_small_plain_and_licensed():
  assert sum(path.stat().st_size for path in TEXT.iterdir()) < 1_500_000
  for name in ("train", "held-out"):
    assert regex.fullmatch(r"[\n -~]*", (TEXT / f"{name}.txt").read_text())
  assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (TEXT / "LICENSE").read_text()


def test_a_twentieth_of_the_text_is_held_out_and_no_paragraph_of_it_is_in_the_rest():
  train, held_out = documents("train"), documents("held-out")
  assert 0.04 < sum(map(len, held_out)) / sum(map(len, train)) < 0.06
  paragraphs = [{" ".join(p.split()) for d in part for p in d.split("\n\n")} for part in (train, held_out)]
  assert not [p for p in paragraphs[0] & paragraphs[1] if len(p) >= 40]


def test_wrapped_prose_and_bullets_become_one_line_and_code_stays(script):
  text = """
Title
*****

A paragraph of prose that was wrapped by somebody at its left-
hand side.  It ends.

   if x:
     y = 1

* a bullet of the list whose text is long enough to go on
  in the next line

>>> session
1

+---+---+
| a | b |
+---+---+
"""
  assert script("corpus")._paragraphs(text) == [
    "Title",
    "A paragraph of prose that was wrapped by somebody at its left-hand side. It ends.",
    "   if x:\n     y = 1",
    "* a bullet of the list whose text is long enough to go on in the next line",
  ]


# The questions


def test_the_stored_questions_are_those_of_the_generator_and_none_is_in_training(script):
  train, held_out = script("questions").split()
  assert held_out == lines("questions")
  assert not {row["question"] for row in train} & {row["question"] for row in held_out}
  assert 20 <= len(held_out) <= len(train) / 15


def test_every_answer_is_right_and_follows_four_hashes(script):
  for rows in script("questions").split():
    for row in rows:
      working, result = row["answer"].split("\n#### ")
      match = re.fullmatch(r"(\d+) ([+-]) (\d+) = (\d+)", working)
      assert match
      a, sign, b, c = match.groups()
      assert int(a) + (int(b) if sign == "+" else -int(b)) == int(c) == int(result)
      assert re.findall(r"\d+", row["question"]) == [a, b]


# The vocabulary


def test_pairs_are_learnt_by_frequency_inside_words(learn_bpe):
  # "low" 5 times, "lower" twice, each " low" behind a space once: l-o 8, o-w 8 (then lo-w), e-r 2.
  tokens = learn_bpe.learn(["low\n" * 5 + "lower\n" * 2 + "a low"], 256 + 4)
  assert tokens[256:] == [b"lo", b"low", b"er", b"lower"]


def test_the_vocabulary_ends_with_the_special_tokens_of_the_model(learnt, learn_bpe, tmp_path):
  assert len(learnt) == model()["vocab_size"] - learn_bpe.SPECIAL_PLACES
  learn_bpe.write(tmp_path, learnt)
  added = json.loads((tmp_path / "tokenizer_config.json").read_text())["added_tokens_decoder"]
  names = {token["content"]: int(i) for i, token in added.items()}
  assert len((tmp_path / "tiktoken.model").read_text().splitlines()) == names["[BOS]"] == model()["bos_token_id"]
  assert names["[EOS]"] == names["[BOS]"] + 1 == model()["eos_token_id"]
  assert names["<|end_of_msg|>"] == names["[BOS]"] + 2
  assert names["[PAD]"] == model()["pad_token_id"] == model()["vocab_size"] - 1


def test_any_text_comes_back(learnt, learn_bpe, tmp_path):
  learn_bpe.write(tmp_path, learnt)
  tokenizer = TiktokenTokenizer(tmp_path)
  every_byte = [tokenizer._encoding.encode_single_token(bytes([b])) for b in range(256)]
  assert b"".join(map(tokenizer._bytes, every_byte)) == bytes(range(256))
  for text in ["".join(map(chr, range(0x800))), "你好 🙂\r\n\t[EOS]<|open|>", *documents("held-out")]:
    assert tokenizer.decode(tokenizer.encode(text)) == text
  assert max(tokenizer.encode("[EOS]<|open|>")) < 1008


def test_the_tokenizer_merges_as_the_pairs_were_learnt(learn_bpe, tmp_path):
  """By tiktoken and `regex` text is split by two engines, which must read the pattern alike."""
  text = "\n\n".join(documents("held-out"))[:20_000] + " Ünïcode's 你好 12345 I'M\r\n\n  x"
  tokens = learn_bpe.learn([text], 600)
  learn_bpe.write(tmp_path, tokens)
  rank = {token: i for i, token in enumerate(tokens)}
  expected = []
  for word in regex.finditer(SPLIT_PATTERN, text, regex.V1):
    parts = [bytes([b]) for b in word.group().encode()]
    while pairs := {i: rank[a + b] for i, (a, b) in enumerate(pairwise(parts)) if a + b in rank}:
      i = min(pairs, key=lambda i: (pairs[i], i))
      parts[i : i + 2] = [parts[i] + parts[i + 1]]
    expected += [rank[part] for part in parts]
  assert TiktokenTokenizer(tmp_path).encode(text) == expected


# The ids


@pytest.mark.slow
def test_maxtext_reads_the_documents_and_parts_them_where_they_end(script, tmp_path):
  from maxtext.input_pipeline._mmap_datasource import MMapIndexedDataset, create_mmap_npy_source
  from maxtext.input_pipeline.input_pipeline_utils import MegatronSplitInputsTargets

  settings = yaml.safe_load(TRAINING.read_text())
  assert settings["packing_max_segments_per_sample"] == 0  # else MaxText joins documents that are shorter than a 25th
  end, length = settings["mmap_eod_id"], 32
  written = [np.array([*range(n), end], np.uint16) for n in (3, 1, 50, 7, 0, 31, 64)]
  script("write_ids").write(tmp_path / "train", written)
  read = MMapIndexedDataset(str(tmp_path / "train"))
  assert [read.get(i).tolist() for i in range(len(read))] == [d.tolist() for d in written]

  source = create_mmap_npy_source(f"{tmp_path}/index|{tmp_path}/train", end, length, False, num_samples=4)
  split = MegatronSplitInputsTargets(eod_id=end, eod_mask_loss=settings["eod_mask_loss"])
  ends = 0
  for sample in map(split.map, source):
    np.testing.assert_array_equal(sample["inputs"][1:], sample["targets"][:-1])
    is_end = sample["inputs"] == end
    np.testing.assert_array_equal(sample["inputs_segmentation"], 1 + np.cumsum(is_end) - is_end)
    np.testing.assert_array_equal(sample["targets_segmentation"] == 0, is_end)  # what follows an end is no target
    ends += is_end.sum()
  assert ends >= 4


# The configs


def test_the_model_has_about_3_million_parameters_and_every_feature_of_k3():
  config = from_maxtext(model())
  matrices = 3 * config.expert_dim * model()["base_moe_mlp_dim"] * config.num_experts * sum(config.moe_layers)
  assert 1_500_000 < matrices < 2_000_000
  released = yaml.safe_load((REPO / "configs" / "models" / "kimi-k3.yml").read_text())
  assert model().keys() == released.keys()
  switches = [key for key, value in released.items() if isinstance(value, bool | str) or value is None]
  assert {key: model()[key] for key in switches} == {key: released[key] for key in switches}
  assert model()["full_attention_layers"] == [4, 8, 9]


@pytest.mark.slow
def test_the_training_config_is_one_that_can_be_trained():
  from kimi_k3.maxtext_adapter.settings import read_config
  from kimi_k3.maxtext_adapter.training import check_trainable

  config = read_config(str(TRAINING), ["run_name=test", "grain_train_files=index|train"])
  check_trainable(config)
  assert config.mmap_eod_id == model()["eos_token_id"]
  assert config.vocab_size == model()["vocab_size"]
