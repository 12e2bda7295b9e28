"""`kimi-k3 decode`: what it refuses, what it prints where, and one real model behind it."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from kimi_k3.cli.decode import _REFUSED_KEYS
from kimi_k3.cli.main import main
from kimi_k3.generate.host_loop import decode_by_steps
from kimi_k3.maxtext_adapter import engine
from kimi_k3.resources import configs_dir

FLOAT32 = ("dtype=float32", "matmul_precision=highest")
VOCABULARY = 256
SUMMARY = "time to first token "


@pytest.fixture
def decode_yml(five_layers) -> str:
  return str(five_layers / "decode.yml")


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    (("no_such_key=1",), "unknown key no_such_key"),
    (("run_name=a", "run_name=b"), "run_name given twice"),
    (("vocab_size=many",), "vocab_size is 'many', expected int"),
    (("ici_context_parallelism=2",), "ici_context_parallelism is 2: not supported by this model"),
    (("ici_pipeline_parallelism=2",), "ici_pipeline_parallelism is 2: not supported by this model"),
    (("ici_tensor_parallelism=3",), "kda_num_heads is 4, which tensor parallelism of 3 does not divide"),
    (("scan_layers=false",), "scan_layers is false in the config, true in the checkpoint"),
    (
      ("base_num_decoder_layers=4", "kda_layers=[1,2,3]", "full_attention_layers=[4]"),
      "decoder.tail_0.attention.gate.kernel is not part of the model",
    ),
    (("vocab_size=512",), "token_embedder.embedding is bfloat16[256, 64], expected bfloat16[512, 64]"),
    (("weight_dtype=float32",), "bfloat16[64], expected float32[64]"),
    (("packed_modules=[]",), 'packed_modules is [] in the config, ["experts"] in the checkpoint'),
    (("max_prefill_predict_length=2",), "row 0 has 3 tokens, longer than the prompt cache"),
    (("max_target_length=4",), "row 0 needs 3 + 4 tokens, longer than the cache: max_target_length is 4"),
    (("max_target_length=0",), "max_target_length is 0, expected a positive whole number"),
    (("per_device_batch_size=0",), "per_device_batch_size is 0"),
    (("decode_sampling_strategy=nucleus",), "decode_sampling_strategy is nucleus: set decode_sampling_nucleus_p"),
    (("decode_sampling_top_k=5",), "decode_sampling_top_k is 5, which decode_sampling_strategy greedy ignores: use to"),
    (
      ("decode_sampling_strategy=weighted", "decode_sampling_temperature=0"),
      "decode_sampling_temperature is 0.0, expected a positive number",
    ),
    (("load_parameters_path=nowhere",), "nowhere': no Orbax checkpoint there"),
    (("prompt=Hello",), "give either --prompt-ids or prompt=, not both"),
    (("tokenizer_path=nowhere",), "tokenizer_path is 'nowhere': no tiktoken.model or tokenizer.json there"),
  ],
)
def test_a_setting_that_cannot_be_met_is_refused_by_name(refused, ids_file, decode_yml, tmp_path, settings, said):
  out = tmp_path / "out.json"
  out.write_text("old")
  words = ("--prompt-ids", ids_file(), "--max-new-tokens", "4", "--out", out)
  assert said in refused("decode", decode_yml, *words, *settings)
  assert out.read_text() == "old"
  assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.json", "out.json"]


@pytest.mark.parametrize("key", _REFUSED_KEYS)
def test_prefix_caching_and_speculative_decoding_are_refused_by_name(refused, ids_file, decode_yml, key):
  message = refused("decode", decode_yml, "--prompt-ids", ids_file(), f"{key}=1")
  assert message.startswith(f"{key}: ")
  assert "not supported" in message


@pytest.mark.parametrize(
  ("value", "said"),
  [
    ([], "expected a non-empty list of lists of token ids"),
    ([[1], []], "row(s) 1: expected a non-empty list of integer token ids"),
    ([[True]], "row(s) 0: expected a non-empty list of integer token ids"),
    ([[1], [2, 256]], "token ids outside the vocabulary of 256: row 1 position 1: 256"),
    ([[-1]], "token ids outside the vocabulary of 256: row 0 position 0: -1"),
  ],
)
def test_ids_that_are_none_are_refused(refused, ids_file, decode_yml, value, said):
  assert said in refused("decode", decode_yml, "--prompt-ids", ids_file(value))


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (("--prompt-ids", "nowhere.json"), "nowhere.json: cannot be read: No such file"),
    ((), "nothing to decode: give --prompt-ids FILE.json or prompt=TEXT"),
    (("prompt=Hello",), "prompt= needs a tokenizer: no tiktoken.model or tokenizer.json beside the config"),
    (("prompt=a", "prompt=b"), "prompt= given twice"),
    (("prompt=a", "--max-new-tokens", "0"), "--max-new-tokens is 0, expected 1 or more"),
    (("prompt=a", "--max-new-tokens", "-3"), "--max-new-tokens is -3, expected 1 or more"),
    (("prompt=a", "--out", "."), ".: is a directory, expected a file to write"),
    (("prompt=a", "--out", "nowhere/out.json"), "nowhere/out.json: its directory does not exist"),
    (("prompt=a", "prompt"), "unrecognized arguments: prompt (settings are key=value"),
  ],
)
def test_a_request_that_cannot_be_met_is_refused(refused, decode_yml, words, said):
  assert said in refused("decode", decode_yml, *words)


def test_text_that_is_no_json_is_refused(refused, ids_file, decode_yml):
  assert "ids.json: not JSON: " in refused("decode", decode_yml, "--prompt-ids", ids_file(text="[[1, 2]"))


def test_random_weights_are_never_decoded(refused, ids_file):
  words = (configs_dir() / "decode.yml", "model_name=kimi-k3-tiny", "--prompt-ids", ids_file())
  assert "load_parameters_path is empty: give the OUT/0/items" in refused("decode", *words)


def rewrite(out: Path, change: Callable[[dict], object]) -> None:
  """Saves the converted checkpoint again by Orbax after change(its layers and the rest of its decoder)."""
  import orbax.checkpoint as ocp

  items = out / "0" / "items"
  tree = ocp.PyTreeCheckpointer().restore(items)
  change(tree["params"]["params"]["decoder"])
  shutil.rmtree(items)
  ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)).save(items, tree)


def transpose(decoder: dict, name: str) -> None:
  matrix = decoder["lead_1"]["mlp"]["shared_experts"][name]
  matrix["kernel"] = np.ascontiguousarray(matrix["kernel"].T)


def exchange(decoder: dict) -> None:
  one, other = (decoder[layer]["attention"]["q_proj"] for layer in ("lead_0", "lead_1"))
  one["kernel"], other["kernel"] = other["kernel"], one["kernel"]


def halve_and_rename(decoder: dict) -> None:
  decoder["decoder_norm"]["scale"] = decoder["decoder_norm"]["scale"][:32]
  decoder["lead_0"]["input_normal"] = decoder["lead_0"].pop("input_norm")


REWRITTEN = {
  "nothing": (lambda _: None, ()),
  "a leaf halved, one renamed": (
    halve_and_rename,
    (
      "decoder.lead_0.input_norm.scale is missing; decoder.lead_0.input_normal.scale is not part of the model",
      "decoder.decoder_norm.scale is bfloat16[32], expected bfloat16[64]",
    ),
  ),
  "a square matrix transposed": (
    lambda decoder: transpose(decoder, "up_proj"),
    ("is not what was converted: decoder.lead_1.mlp.shared_experts.up_proj.kernel has checksum ",),
  ),
  "two leaves of one shape exchanged": (
    exchange,
    ("which is decoder.lead_1.attention.q_proj.kernel, ", "which is decoder.lead_0.attention.q_proj.kernel, "),
  ),
}


@pytest.mark.parametrize("change", REWRITTEN)
def test_a_converted_checkpoint_that_was_rewritten_is_refused_unless_it_is_the_same(
  refused, capsys, ids_file, five_layers, tmp_path, change
):
  out = shutil.copytree(five_layers, tmp_path / "out")
  make, said = REWRITTEN[change]
  rewrite(out, make)
  words = ("decode", out / "decode.yml", "--prompt-ids", ids_file([[1, 2, 3]]), "--max-new-tokens", "1")
  if said:
    message = refused(*words)
    assert all(part in message for part in said), message
  else:
    assert len(rows_of(capsys, *words)) == 1


@pytest.mark.parametrize("place", [0, 1, 3])
def test_settings_may_stand_anywhere_after_the_config(refused, ids_file, decode_yml, place):
  words = [("--prompt-ids", ids_file()), ("--max-new-tokens", "4"), ("--ignore-eos",)]
  words.insert(place, ("no_such_key=1",))
  assert "unknown key no_such_key" in refused("decode", decode_yml, *sum(words, ()))


class CountingEngine:
  """Logits that favour the fed token plus one, only a little; a prompt that starts with 99 breaks its row."""

  def __init__(self, config):
    self.num_slots = int(config.per_device_batch_size)
    self.max_prompt = config.max_prefill_predict_length
    self.max_steps = config.max_target_length - self.max_prompt
    self.slots = {}

  def logits(self, token, broken) -> np.ndarray:
    row = 0.5 * np.eye(VOCABULARY, dtype=np.float32)[(token + 1) % VOCABULARY]
    return row * (np.nan if broken else 1)

  def prefill(self, tokens, true_length):
    broken = tokens[0] == 99
    return types.SimpleNamespace(logits=jnp.asarray(self.logits(tokens[true_length - 1], broken)), broken=broken)

  def rows_together(self, _tokens):
    return 1

  def prefill_together(self, prompts, true_lengths):
    return [self.prefill(*one) for one in zip(prompts, true_lengths, strict=True)]

  def insert(self, prompt, *slots):
    self.slots |= dict.fromkeys(slots, prompt.broken)

  def step(self, tokens):
    return jnp.asarray([self.logits(token, self.slots.get(slot, True)) for slot, token in enumerate(tokens)])

  def decode(self, rows, plan, *, buffer):
    used = [slot in self.slots for slot in range(self.num_slots)]
    return decode_by_steps(self.step, rows, used, plan, buffer=buffer)

  def release(self, slot):
    del self.slots[slot]


@pytest.fixture
def counting(monkeypatch):
  """The verb with another engine: all but the model itself is real."""
  monkeypatch.setattr(engine, "Engine", CountingEngine)


def rows_of(capsys, *words) -> list[dict]:
  capsys.readouterr()
  assert main([str(word) for word in words]) in (0, 1)
  return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("counting")
def test_rows_beyond_the_slots_wait_and_come_back_in_order(capsys, ids_file, decode_yml):
  prompts = [[i] for i in range(0, 90, 2)]
  words = ("decode", decode_yml, "--prompt-ids", ids_file(prompts), "--max-new-tokens", "2")
  rows = rows_of(capsys, *words)
  assert [row["index"] for row in rows] == list(range(45))
  assert [row["prompt_ids"] for row in rows] == prompts
  assert [row["ids"] for row in rows] == [[p + 1, p + 2] for (p,) in prompts]
  main(list(words))
  assert "45 rows on 16 slots" in capsys.readouterr().err, "no more than 16 unless told so"
  main([*words, "per_device_batch_size=3"])
  assert "45 rows on 3 slots" in capsys.readouterr().err


@pytest.mark.usefixtures("counting")
def test_a_row_ends_at_the_configs_end_token_unless_told_to_go_on(capsys, ids_file, decode_yml):
  words = ("decode", decode_yml, "--prompt-ids", ids_file([[252], [3]]), "--max-new-tokens", "5")
  stopped, other = rows_of(capsys, *words)
  assert (stopped["ids"], stopped["finish_reason"]) == ([253, 254], "stop")  # eos_token_id is 254
  assert (other["ids"], other["finish_reason"]) == ([4, 5, 6, 7, 8], "length")
  assert rows_of(capsys, *words, "--ignore-eos")[0]["ids"] == [253, 254, 255, 0, 1]


@pytest.mark.usefixtures("counting")
def test_a_row_that_fails_is_reported_beside_the_others_with_exit_code_1(capsys, ids_file, decode_yml, tmp_path):
  out = tmp_path / "out.json"
  words = ("decode", decode_yml, "--prompt-ids", ids_file([[1], [99], [5]]), "--max-new-tokens", "2")
  assert main([*words, "--out", str(out)]) == 1
  good, bad, other = json.loads(out.read_text())
  assert bad == {
    "index": 1, "prompt_ids": [99], "ids": [], "text": None,
    "finish_reason": "error", "error": "logits of new token 0 are not finite",
  }  # fmt: skip
  assert (good["ids"], other["ids"]) == ([2, 3], [6, 7])
  assert "3 rows on 3 slots" in capsys.readouterr().out


@pytest.mark.usefixtures("counting")
def test_draws_depend_on_the_seed_and_not_on_slots_or_neighbours(capsys, ids_file, decode_yml):
  def draws(prompts, *settings: str) -> list[list[int]]:
    words = ("decode", decode_yml, "--prompt-ids", ids_file(prompts), "--max-new-tokens", "8", "--ignore-eos")
    weighted = ("decode_sampling_strategy=weighted", "decode_sampling_temperature=0.7")
    return [row["ids"] for row in rows_of(capsys, *words, *weighted, *settings)]

  prompts = [[1], [2], [3]]
  first = draws(prompts, "decode_sampling_seed=1")
  assert draws(prompts, "decode_sampling_seed=1", "per_device_batch_size=1") == first
  assert draws(prompts[:2], "decode_sampling_seed=1") == first[:2]
  assert draws(prompts, "decode_sampling_seed=2") != first
  assert len({tuple(row) for row in first}) == 3


def write_tokenizer(directory: Path) -> None:
  """One token a byte: ids of ASCII text are its code points."""
  lines = [base64.b64encode(bytes([b])) + b" %d" % b for b in range(VOCABULARY)]
  (directory / "tiktoken.model").write_bytes(b"\n".join(lines))


@pytest.fixture
def with_tokenizer(five_layers, tmp_path) -> Path:
  """A copy of the converted checkpoint with a tokenizer beside it."""
  out = shutil.copytree(five_layers, tmp_path / "out")
  write_tokenizer(out)
  return out


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("text", ["a: b", "1e3", "null", "[1, 2", "# no comment, x=1\n ${run_name} "])
def test_a_prompt_is_taken_as_it_is_typed(capsys, with_tokenizer, text):
  words = ("decode", with_tokenizer / "decode.yml", f"prompt={text}", "--max-new-tokens", "2")
  (row,) = rows_of(capsys, *words)
  assert row["prompt_ids"] == list(text.encode())
  assert row["text"] == bytes(row["ids"]).decode()


@pytest.mark.usefixtures("counting")
def test_a_prompt_may_stand_in_the_file_and_the_tokenizer_elsewhere(capsys, with_tokenizer, tmp_path):
  (tmp_path / "words").mkdir()
  shutil.move(with_tokenizer / "tiktoken.model", tmp_path / "words")
  path = with_tokenizer / "decode.yml"
  path.write_text(path.read_text() + "prompt: Hey\ntokenizer_path: ../words\n")
  (row,) = rows_of(capsys, "decode", path, "--max-new-tokens", "1")
  assert row["prompt_ids"] == list(b"Hey")


@pytest.mark.usefixtures("counting")
def test_text_is_shown_for_ids_too_if_there_is_a_tokenizer(capsys, ids_file, with_tokenizer):
  words = ("decode", with_tokenizer / "decode.yml", "--prompt-ids", ids_file([[64]]), "--max-new-tokens", "3")
  assert rows_of(capsys, *words)[0]["text"] == "ABC"


def test_an_empty_prompt_is_refused(refused, with_tokenizer):
  assert refused("decode", with_tokenizer / "decode.yml", "prompt=") == "prompt= is empty"


@pytest.fixture(scope="module")
def greedy(five_layers, tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
  """A run of the installed command on three rows and two slots, and what it wrote."""
  directory = tmp_path_factory.mktemp("greedy")
  (directory / "ids.json").write_text(json.dumps([list(b"Hi!"), [7] * 40, [200]]))
  words = ("--prompt-ids", "ids.json", "--max-new-tokens", "6", "--ignore-eos", "--out", "out.json")
  command = [Path(sys.executable).parent / "kimi-k3", "decode", five_layers / "decode.yml", *words, *FLOAT32]
  command.append("per_device_batch_size=2")
  run = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
  assert run.returncode == 0, run.stderr
  assert sorted(path.name for path in directory.iterdir()) == ["ids.json", "out.json"]
  return run, json.loads((directory / "out.json").read_text())


def test_a_real_run_writes_rows_and_prints_one_line(greedy):
  run, rows = greedy
  assert [row["index"] for row in rows] == [0, 1, 2]
  assert [len(row["prompt_ids"]) for row in rows] == [3, 40, 1]
  for row in rows:
    assert sorted(row) == ["error", "finish_reason", "ids", "index", "prompt_ids", "text"]
    assert len(row["ids"]) == 6
    assert all(0 <= i < VOCABULARY for i in row["ids"])
    assert (row["finish_reason"], row["text"], row["error"]) == ("length", None, None)
  assert run.stdout.startswith(f"3 rows on 2 slots: {SUMMARY}")
  assert "tok/s" in run.stdout
  assert run.stdout.count("\n") == 1


def test_nothing_but_progress_is_said_on_stderr(greedy):
  assert greedy[0].stderr == ""


def test_text_is_decoded_to_the_end_token_of_the_config(greedy, with_tokenizer, capsys):
  """The same prompt as text, alone in its batch, with one of its tokens made the end."""
  ids = greedy[1][0]["ids"]
  end = next(i for i in ids[1:] if i != ids[0])
  kept = ids[: ids.index(end) + 1]
  path = with_tokenizer / "decode.yml"
  path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"eos_token_id": end}))
  capsys.readouterr()
  assert main(["decode", str(path), "prompt=Hi!", "--max-new-tokens", "6", *FLOAT32]) == 0
  said = capsys.readouterr()
  assert json.loads(said.out) == [
    {
      "index": 0, "prompt_ids": list(b"Hi!"), "ids": kept, "text": bytes(kept).decode("utf-8", "replace"),
      "finish_reason": "stop", "error": None,
    }
  ]  # fmt: skip
  assert SUMMARY in said.err


@pytest.mark.usefixtures("counting")
def test_a_row_stops_at_the_configs_end_token_also_when_the_tokenizer_names_another(capsys, ids_file, with_tokenizer):
  """As in the release, whose tokenizer ends documents with one token and whose config ends turns with another."""
  (with_tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": "d"}))
  (with_tokenizer / "generation_config.json").write_text(json.dumps({"eos_token_id": ord("d")}))
  words = (
    "decode",
    with_tokenizer / "decode.yml",
    "--prompt-ids",
    ids_file([[ord("b")], [252]]),
    "--max-new-tokens",
    "4",
  )
  on, stopped = rows_of(capsys, *words)  # the config says 254
  assert (on["text"], on["finish_reason"]) == ("cdef", "length")
  assert (stopped["ids"], stopped["finish_reason"]) == ([253, 254], "stop")
  on, stopped = rows_of(capsys, *words, f"eos_token_id={ord('d')}")
  assert (on["text"], on["finish_reason"]) == ("cd", "stop")
  assert (stopped["ids"], stopped["finish_reason"]) == ([253, 254, 255, 0], "length")


def test_a_refusal_of_the_installed_command_is_one_line(five_layers, tmp_path):
  """In a process of its own, where whatever MaxText and JAX print while they start would show."""
  (tmp_path / "ids.json").write_text("[[1]]")
  command = [Path(sys.executable).parent / "kimi-k3", "decode", five_layers / "decode.yml", "--prompt-ids", "ids.json"]
  command += ["no_such_key=1", "--out", "out.json"]
  run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
  assert (run.returncode, run.stdout) == (2, "")
  assert run.stderr == f"kimi-k3: error: {five_layers / 'decode.yml'}: unknown key no_such_key\n"
  assert [path.name for path in tmp_path.iterdir()] == ["ids.json"]
