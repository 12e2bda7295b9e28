"""Damaged and hostile checkpoints: whatever the files say, the outcome is a plan or one printable line, soon and small.

Every example starts from a valid checkpoint of two layers whose bodies are holes, and replaces or edits its header,
its index or its config.json. `test_..._long` draws many more from the same strategies.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_k3.convert import index, plan
from kimi_k3.errors import InputError

REPO = Path(__file__).resolve().parents[3]
SHARD = "model-00001-of-000001.safetensors"
MAX_PEAK_BYTES = 64 * 1024 * 1024  # 64 MiB: the valid checkpoint takes 2; no file here is larger than 1
MAX_SECONDS = 5.0  # an example takes 10 ms
MAX_MESSAGE = 20_000  # characters: eight offenders with names as long as names may be
SIZES = {
  "hidden_size": 64, "vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
  "routed_expert_hidden_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
  "qk_rope_head_dim": 8, "v_head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 1,
  "eos_token_id": 2, "pad_token_id": 3, "linear_attn_config.num_heads": 2, "linear_attn_config.head_dim": 32,
}  # fmt: skip


def _synthetic() -> ModuleType:
  spec = importlib.util.spec_from_file_location("synthetic", REPO / "scripts" / "synthetic_checkpoint.py")
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # dataclasses look their module up
  spec.loader.exec_module(module)
  return module


class Valid(NamedTuple):
  """The checkpoint that every example starts from: parsed, and the size of the shard's data."""

  config: dict[str, Any]
  index: dict[str, Any]
  header: dict[str, Any]
  data: int


def _valid() -> Valid:
  synthetic = _synthetic()
  config = synthetic.released_config(2, 2, 1, SIZES)
  tensors = synthetic.tensors(config, vision=False)
  header = json.loads(synthetic.header(tensors)[8:])
  weights = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": {t.name: SHARD for t in tensors}}
  return Valid(config, weights, header, weights["metadata"]["total_size"])


VALID = _valid()
NAMES = [name for name in VALID.header if name != "__metadata__"]


class Raw(NamedTuple):
  """JSON text by hand: what json.dumps cannot say, such as a key given twice."""

  text: str


class Example(NamedTuple):
  """The files of one example. A header is a value to dump, JSON text, or the bytes of the whole file."""

  header: Any = VALID.header
  index: Any = VALID.index
  config: Any = VALID.config
  length: int | None = None  # what the file says of its header; None: the truth
  data: int = VALID.data

  def write(self, directory: Path) -> None:
    """Replaces the files of `directory`."""
    (directory / "config.json").write_bytes(_text(self.config))
    (directory / index.INDEX_FILE).write_bytes(_text(self.index))
    with open(directory / SHARD, "wb") as file:
      if isinstance(self.header, bytes):
        file.write(self.header)
        return
      header = _text(self.header)
      file.write((len(header) if self.length is None else self.length).to_bytes(8, "little") + header)
      file.truncate(file.tell() + self.data)


def _text(value: Any) -> bytes:
  if isinstance(value, bytes):
    return value
  return value.text.encode() if isinstance(value, Raw) else json.dumps(value).encode()


def outcome(directory: Path) -> str | None:
  """The refusal of a checkpoint; None if it is accepted. Anything else than one short line, soon and small, fails."""
  tracemalloc.start()
  started = time.perf_counter()
  message = None
  try:
    with index.open_source(directory) as source:
      plan.make_plan(source, plan.Options())
  except InputError as error:
    message = str(error)
  finally:
    peak, seconds = tracemalloc.get_traced_memory()[1], time.perf_counter() - started
    tracemalloc.stop()
  assert peak < MAX_PEAK_BYTES
  assert seconds < MAX_SECONDS
  if message is not None:
    assert message.isprintable(), ascii(message)
    assert 20 < len(message) < MAX_MESSAGE
  return message


DEEP = 200_000  # levels: more than any parser's stack
NESTED = [Raw("[" * DEEP), Raw("[" * DEEP + "]" * DEEP), Raw('{"a":' * DEEP + "1" + "}" * DEEP)]
# What the parser takes must not overflow the stack of whoever prints or walks it later.
NESTED += [Raw('{"weight_map":' + "[" * n + "]" * n + "}") for n in (500, 990, 1_500, 2_900, 9_000)]
DEEP_LISTS = [json.loads("[" * n + "]" * n) for n in (40, 600)]
ODD_STRINGS = ["", "a\nb", "\r", "\0", "\x1b[2J", "\u2028", "\ud800", "x" * 5_000, "../x", "re:(", "nan", "\u202e"]
ODD_NUMBERS = [
  0, -1, -0.0, 0.5, 1e999, -1e999, float("nan"), 2**31, 2**63, 2**64 - 1, -(2**63), 10**18, 10**400, 10**4000,
]  # fmt: skip
ODD = [None, True, False, [], {}, [None], {"a": 1}, [[1]], *ODD_STRINGS, *ODD_NUMBERS, *DEEP_LISTS]
odd_values = st.one_of(st.sampled_from(ODD), st.integers(), st.floats(), st.text(max_size=20))
any_json = st.recursive(
  st.one_of(st.sampled_from(ODD), st.integers(), st.text(max_size=8)),
  lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
  max_leaves=20,
)
# More than a million axes of 0 to 2**62, or as many digits.
odd_shapes = st.one_of(
  st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**62, 10**19, -1]), max_size=40), st.just([10**18] * 2_000), odd_values
)
odd_names = st.one_of(st.sampled_from([*ODD_STRINGS, "__metadata__", *NAMES[:3]]), st.text(max_size=30))
LAST = VALID.data


@st.composite
def edited_headers(draw: st.DrawFn) -> Any:
  """A valid header after a few edits."""
  header = copy.deepcopy(VALID.header)
  for _ in range(draw(st.integers(1, 3))):
    name = draw(st.sampled_from([name for name in header if name != "__metadata__"] or [""]))
    entry = header.get(name)
    match draw(st.integers(0, 7)):
      case 0 if isinstance(entry, dict):
        entry["dtype"] = draw(st.one_of(st.sampled_from(["F32", "BF16", "U8", "F4", "f32", "Q7"]), odd_values))
      case 1 if isinstance(entry, dict):
        entry["shape"] = draw(odd_shapes)
      case 2 if isinstance(entry, dict):
        offsets = st.lists(st.sampled_from([0, 1, 64, LAST, LAST + 1, 2**63, -8, 1.0, True]), max_size=3)
        entry["data_offsets"] = draw(st.one_of(offsets, odd_values))
      case 3 if isinstance(entry, dict) and isinstance(entry.get("data_offsets"), list):
        shift = draw(st.integers(-(2**10), 2**10))
        entry["data_offsets"] = [at + shift for at in entry["data_offsets"] if type(at) is int]
      case 4:
        header[name] = draw(odd_values)
      case 5:
        header[draw(odd_names)] = header.pop(name, None)
      case 6:
        header.pop(name, None)
      case 7:
        header["__metadata__"] = draw(odd_values)
  return header


@st.composite
def text_edits(draw: st.DrawFn, value: Any) -> Raw | bytes:
  """The JSON text of a value, cut, repeated or with other bytes in it."""
  text = json.dumps(value)
  start = draw(st.integers(0, len(text)))
  stop = min(len(text), start + draw(st.integers(0, 60)))
  match draw(st.integers(0, 3)):
    case 0:
      return Raw(text[:start])
    case 1:
      return Raw(text[:stop] + text[start:])  # most of all: a key given twice
    case 2:
      return Raw(
        text[:start] + draw(st.sampled_from(["NaN", "-Infinity", "1" * 5_000, "{", "]", "\x00"])) + text[stop:]
      )
  return text[:start].encode() + draw(st.binary(max_size=8)) + text[stop:].encode()


@st.composite
def edited(draw: st.DrawFn, value: dict[str, Any]) -> dict[str, Any]:
  """A JSON object with one value replaced, one key removed, or one added, at any depth."""
  result = copy.deepcopy(value)
  node: Any = result
  while True:
    key = draw(st.sampled_from(sorted(node))) if isinstance(node, dict) else draw(st.integers(0, len(node) - 1))
    child = node[key]
    if isinstance(child, dict | list) and child and draw(st.booleans()):
      node = child
      continue
    match draw(st.integers(0, 2)):
      case 0 if isinstance(node, dict):
        node[draw(odd_names)] = draw(odd_values)
      case 1:
        del node[key]
      case _:
        node[key] = draw(odd_values)
    return result


STRATEGIES: dict[str, st.SearchStrategy[Example]] = {
  "a file of any bytes": st.binary(max_size=200).map(lambda data: Example(header=data)),
  "a header of any bytes": st.binary(max_size=200).map(
    lambda data: Example(header=len(data).to_bytes(8, "little") + data + bytes(64))
  ),
  "a header of any length": st.one_of(
    st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1, 100_000_001]), st.integers(0, 2**64 - 1)
  ).map(lambda length: Example(length=length)),
  "a file of any size": st.one_of(st.integers(0, VALID.data + 64), st.just(2**40)).map(lambda n: Example(data=n)),
  "a header of any JSON": any_json.map(lambda value: Example(header=value)),
  "an entry of any JSON": st.tuples(odd_names, any_json).map(lambda pair: Example(header={pair[0]: pair[1]})),
  "an edited header": edited_headers().map(lambda value: Example(header=value)),
  "edited text of a header": text_edits(VALID.header).map(lambda text: Example(header=text)).filter(
    lambda example: not isinstance(example.header, bytes)
  ),
  "nested headers": st.sampled_from(NESTED).map(lambda text: Example(header=text)),
  "an index of any JSON": any_json.map(lambda value: Example(index=value)),
  "an edited index": edited(VALID.index).map(lambda value: Example(index=value)),
  "edited text of an index": text_edits(VALID.index).map(lambda text: Example(index=text)),
  "a config of any JSON": any_json.map(lambda value: Example(config=value)),
  "an edited config": edited(VALID.config).map(lambda value: Example(config=value)),
  "edited text of a config": text_edits(VALID.config).map(lambda text: Example(config=text)),
  "nested configs and indexes": st.sampled_from(NESTED).flatmap(
    lambda text: st.sampled_from([Example(config=text), Example(index=text)])
  ),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The valid checkpoint, whose files each example replaces."""
  directory = tmp_path_factory.mktemp("fuzz")
  Example().write(directory)
  return directory


@contextlib.contextmanager
def _all_accepted_or_refused(directory: Path, what: str, **how: Any) -> Iterator[Callable[[], None]]:
  common = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

  @settings(**common, **how)
  @given(STRATEGIES[what])
  def run(example: Example) -> None:
    example.write(directory)
    outcome(directory)

  yield run
  Example().write(directory)


def test_the_checkpoint_that_is_edited_is_valid(checkpoint):
  assert outcome(checkpoint) is None


@pytest.mark.parametrize("what", STRATEGIES)
def test_any_files_give_a_plan_or_one_line(checkpoint, what):
  examples = {"nested headers": 3, "nested configs and indexes": 6}.get(what, 20)
  with _all_accepted_or_refused(checkpoint, what, max_examples=examples, derandomize=True) as run:
    run()


@pytest.mark.slow
@pytest.mark.parametrize("what", STRATEGIES)
def test_any_files_give_a_plan_or_one_line_long(checkpoint, what):
  with _all_accepted_or_refused(checkpoint, what, max_examples=1_000, print_blob=True) as run:
    run()


def _with(name: str, **fields: Any) -> dict[str, Any]:
  header = copy.deepcopy(VALID.header)
  header[name] |= fields
  return header


FIRST = NAMES[0]
HUGE = {
  "an integer of 5,000 digits": Example(
    header=Raw(json.dumps(VALID.header).replace("[64, 64]", f"[{'9' * 5_000}]", 1))
  ),
  "a product of 36,000 digits": Example(header=_with(FIRST, shape=[10**18] * 2_000)),
  "fifty thousand axes": Example(header=_with(FIRST, shape=[1] * 50_000)),
  "an offset past 64 bits": Example(header=_with(FIRST, data_offsets=[0, 10**400])),
  "a float setting past all floats": Example(config=VALID.config | {
    "text_config": VALID.config["text_config"] | {"routed_scaling_factor": 10**400}
  }),
  "a product of settings past all digits": Example(config=VALID.config | {
    "text_config": VALID.config["text_config"] | {"moe_intermediate_size": 10**4000 + 1, "num_shared_experts": 10**4000}
  }),
  "a name of 100,000 characters": Example(header={"x" * 100_000: VALID.header[FIRST]}),
  "a vision tensor named by half a character": Example(
    header=VALID.header | {"vision_tower.\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}},
    index=VALID.index | {"weight_map": VALID.index["weight_map"] | {"vision_tower.\ud800": SHARD}},
  ),
  "a file name of half a character": Example(index={"weight_map": dict.fromkeys(NAMES, "\ud800.safetensors")}),
}  # fmt: skip


@pytest.mark.parametrize("what", HUGE)
def test_what_no_message_could_show_is_refused_all_the_same(checkpoint, what):
  HUGE[what].write(checkpoint)
  try:
    assert outcome(checkpoint)
  finally:
    Example().write(checkpoint)


@pytest.mark.parametrize("name", ["config.json", index.INDEX_FILE])
def test_a_json_file_of_a_terabyte_is_refused_unread(checkpoint, name):
  with open(checkpoint / name, "r+b") as file:
    file.truncate(2**40)
  try:
    assert f"{name}: {2**40} bytes, expected at most" in (outcome(checkpoint) or "")
  finally:
    Example().write(checkpoint)
