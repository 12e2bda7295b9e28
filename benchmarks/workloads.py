"""What is measured, by name and as data: shapes of K3 at its released sizes, and of the nano model for a CPU.

Benchmarks and tests take the same names, so that a shape that a benchmark times is one that a test has checked. Sizes
are not typed in here: they are those of configs/models/. `hbm_bytes` and `flops` of a workload are the least that its
definition takes, whatever the implementation: what a device must move and multiply, once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Literal

from kimi_k3.config import MXFP4_GROUP, KimiK3Config
from kimi_k3.errors import InputError
from kimi_k3.maxtext_keys import from_maxtext
from kimi_k3.resources import configs_dir

PRESETS = ("tiny", "k3")
_MODELS = {"tiny": "kimi-k3-nano", "k3": "kimi-k3"}
_FLOAT32, _BFLOAT16 = 4, 2  # bytes
_CODE_BITS = 4


@functools.cache
def model(preset: str) -> KimiK3Config:
  """Returns the architecture of a preset: the released K3, or the nano model that `make demo` decodes.

  Raises:
    InputError: if there is no such preset.
  """
  if preset not in _MODELS:
    raise InputError(f"--preset {preset}: expected one of {', '.join(PRESETS)}")
  import yaml

  return from_maxtext(yaml.safe_load((configs_dir() / "models" / f"{_MODELS[preset]}.yml").read_text()))


@dataclasses.dataclass(frozen=True)
class Workload:
  """One shape of one operation.

  Attributes:
    preset: One of PRESETS.
  """

  preset: str

  @property
  def name(self) -> str:
    """By which it is chosen and reported."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class KdaChunk(Workload):
  """Chunked KDA over padded rows.

  Attributes:
    lengths: Real tokens of each row; the rows are padded to the longest.
    heads: On the device.
    channels: K = V of a head.
  """

  lengths: tuple[int, ...]
  heads: int
  channels: int

  @property
  def name(self) -> str:
    ragged = "" if len(set(self.lengths)) == 1 else " ragged"
    return f"kda-chunk B{len(self.lengths)} T{self.padded}{ragged}"

  @property
  def padded(self) -> int:
    """Positions of a row."""
    return max(self.lengths)

  @property
  def tokens(self) -> int:
    """Real ones."""
    return sum(self.lengths)

  @property
  def positions(self) -> int:
    return len(self.lengths) * self.padded

  @property
  def hbm_bytes(self) -> int:
    """q, k, v and the decay's input in bfloat16, beta and the output in float32, of real tokens; the state each way."""
    a_token = self.heads * (4 * self.channels * _BFLOAT16 + _FLOAT32 + self.channels * _FLOAT32)
    return self.tokens * a_token + 2 * len(self.lengths) * state_bytes(self.heads, self.channels)

  @property
  def flops(self) -> int:
    """Of the recurrence: two products with the state and one update of it, a token and head."""
    return 6 * self.tokens * self.heads * self.channels**2


@dataclasses.dataclass(frozen=True)
class KdaStep(Workload):
  """One token of each row against its state, on a stack of layers, so that a call is long enough to be timed.

  Attributes:
    rows: Each with a token.
    layers: Of the stack, all of them moved on in one call.
  """

  rows: int
  heads: int
  channels: int
  layers: int

  @property
  def name(self) -> str:
    return f"kda-step B{self.rows}"

  @property
  def hbm_bytes(self) -> int:
    """Of one layer: the state each way, and q, k, v, g and the output in float32."""
    a_row = 2 * state_bytes(self.heads, self.channels) + 5 * self.heads * self.channels * _FLOAT32
    return self.rows * a_row

  @property
  def flops(self) -> int:
    """Of one layer."""
    return 6 * self.rows * self.heads * self.channels**2


@dataclasses.dataclass(frozen=True)
class MlaDecode(Workload):
  """One token of each row against its cached latents.

  Attributes:
    context: Positions that each row attends to, the new one included.
    allocated: Positions that a row's cache has room for.
    latent: Of the channels of a position, those that are averaged.
    tail: The others.
    layers: Of the stack, all walked in one call.
  """

  rows: int
  context: int
  allocated: int
  heads: int
  latent: int
  tail: int
  layers: int

  @property
  def name(self) -> str:
    return f"mla-decode B{self.rows} S{self.context}"

  @property
  def hbm_bytes(self) -> int:
    """Of one layer: what is seen of the cache, queries and outputs, in bfloat16."""
    seen = self.context * (self.latent + self.tail)
    return _BFLOAT16 * self.rows * (seen + self.heads * (2 * self.latent + self.tail))

  @property
  def flops(self) -> int:
    """Of one layer: scores over latents and tails, averages over latents."""
    return 2 * self.rows * self.heads * self.context * (2 * self.latent + self.tail)


@dataclasses.dataclass(frozen=True)
class ExpertMatmul(Workload):
  """The routed experts of one device in MXFP4.

  Attributes:
    tokens: Rows of the input.
    pairs: (token, choice) pairs whose expert is here.
    hit: Experts that have a pair.
    held: Experts whose weights are on the device.
    choices: Of a token, here or elsewhere.
    latent: Width of the input.
    width: Of an expert.
  """

  tokens: int
  pairs: int
  hit: int
  held: int
  choices: int
  latent: int
  width: int

  def __post_init__(self) -> None:
    a_token = self.pairs_a_token
    if not (a_token <= min(self.choices, self.hit) and self.pairs % a_token == 0 and self.hit <= self.held):
      raise InputError(f"{self}: no such routing: at most {self.choices} different experts a token")
    if self.hit > self.pairs:
      raise InputError(f"{self}: {self.hit} experts cannot be hit by {self.pairs} pairs")

  @property
  def name(self) -> str:
    return f"experts N{self.tokens} hit {self.hit}/{self.held}"

  @property
  def pairs_a_token(self) -> int:
    return -(-self.pairs // self.tokens)

  def ids(self) -> list[list[int]]:
    """The chosen experts of each token: `held` means one of another device."""
    a_token, elsewhere = self.pairs_a_token, [self.held]
    rows = []
    for token in range(self.tokens):
      here = [(token * a_token + i) % self.hit for i in range(a_token)] if token < self.pairs // a_token else []
      rows.append(here + elsewhere * (self.choices - len(here)))
    return rows

  @property
  def expert_bytes(self) -> int:
    """Codes and scales of one expert."""
    weights = 3 * self.latent * self.width
    return weights * _CODE_BITS // 8 + weights // MXFP4_GROUP

  @property
  def hbm_bytes(self) -> int:
    """The experts that are hit, once; input in bfloat16, output in float32."""
    return self.hit * self.expert_bytes + self.tokens * self.latent * (_BFLOAT16 + _FLOAT32)

  @property
  def flops(self) -> int:
    return 6 * self.pairs * self.latent * self.width


@dataclasses.dataclass(frozen=True)
class AttnRes(Workload):
  """One mixing site of attention residuals.

  Attributes:
    snapshots: In the buffer, all of them filled.
  """

  rows: int
  tokens_a_row: int
  hidden: int
  snapshots: int

  @property
  def name(self) -> str:
    return f"attn-res B{self.rows} T{self.tokens_a_row} J{self.snapshots}"

  @property
  def tokens(self) -> int:
    return self.rows * self.tokens_a_row

  @property
  def hbm_bytes(self) -> int:
    """Candidates in and the mix out, in bfloat16."""
    return _BFLOAT16 * self.tokens * self.hidden * (self.snapshots + 2)

  @property
  def flops(self) -> int:
    """Of each candidate: its square, its score and its share of the mix."""
    return 6 * self.tokens * self.hidden * (self.snapshots + 1)


CollectiveKind = Literal["all-to-all", "all-reduce", "all-gather"]


@dataclasses.dataclass(frozen=True)
class Message(Workload):
  """What one device puts into a collective of a decoding step.

  Attributes:
    what: In words.
    kind: The opcode that the compiled program must have.
    shape: Of one device's operand, in bfloat16. An all-to-all cuts its longest axis.
    calls: In one program, each of which needs the one before.
    overlapped: Whether it is also measured beside products that do not need it.
  """

  what: str
  kind: CollectiveKind
  shape: tuple[int, ...]
  calls: int = 32
  overlapped: bool = False

  @property
  def name(self) -> str:
    return f"{self.kind} {self.what}"

  @property
  def cut(self) -> int:
    """The axis that an all-to-all cuts: the first that is longest but for the last one."""
    return max(range(len(self.shape) - 1), key=lambda axis: self.shape[axis])

  @property
  def operand_bytes(self) -> int:
    return math.prod(self.shape) * _BFLOAT16


@dataclasses.dataclass(frozen=True)
class DummyMoe(Workload):
  """Layers of nothing but experts' products and what devices send each other for them.

  Attributes:
    layers: As many as K3 has with experts.
    rows: On all devices.
    latent: Width of what is sent.
    width: Of the part of the experts on one device; a dummy's, so that the weights of all layers fit.
    kinds: Opcodes of a layer's collectives -> how many it has.
  """

  label: str
  layers: int
  rows: int
  latent: int
  width: int
  kinds: tuple[tuple[str, int], ...]

  @property
  def name(self) -> str:
    return f"{self.layers} layers, {self.label}"


@dataclasses.dataclass(frozen=True)
class Generation(Workload):
  """The whole model: rows in slots, each with a prompt.

  Attributes:
    slots: Rows that decode together.
    prompt: Tokens of a prompt, real ones.
    new_tokens: That each row gets.
    max_prompt: Room of the caches for a prompt.
    max_length: Room of the caches for prompt and new tokens.
  """

  slots: int
  prompt: int
  new_tokens: int
  max_prompt: int
  max_length: int

  def __post_init__(self) -> None:
    if self.prompt > self.max_prompt or self.prompt + self.new_tokens > self.max_length:
      raise InputError(f"{self}: prompt and new tokens do not fit")

  @property
  def name(self) -> str:
    return f"model B{self.slots} S{self.max_length} prompt {self.prompt}"


@dataclasses.dataclass(frozen=True)
class Serving(Workload):
  """A standard load: every request there at the start, as many at a time as there are slots.

  Attributes:
    prompt: Most tokens of a prompt.
    new_tokens: Most new tokens of a row; the end token is ignored.
    concurrency: Slots.
    requests: In all.
    range_ratio: Lengths are drawn evenly from this share of the most, to the most.
  """

  label: str
  prompt: int
  new_tokens: int
  concurrency: int
  requests: int
  range_ratio: float

  @property
  def name(self) -> str:
    return f"serve-{self.label}-c{self.concurrency}"


def state_bytes(heads: int, channels: int) -> int:
  """Of one row and layer of KDA, float32."""
  return _FLOAT32 * heads * channels**2


def _kda_chunks() -> Iterable[KdaChunk]:
  for preset, rows in (
    ("tiny", ((256,), (128, 100, 64, 17))),
    ("k3", ((1024,), (8192,), (4096,) * 8, (4096, 3000, 2048, 1025, 777, 512, 65, 1))),
  ):
    config = model(preset)
    for lengths in rows:
      yield KdaChunk(preset, lengths, config.kda_num_heads, config.kda_head_dim)


def _kda_steps() -> Iterable[KdaStep]:
  for preset, rows, layers in (("tiny", (1, 4, 16), 8), ("k3", (1, 8, 32, 64, 256), 8)):
    config = model(preset)
    for number in rows:
      yield KdaStep(preset, number, config.kda_num_heads, config.kda_head_dim, layers)


def _mla_decodes() -> Iterable[MlaDecode]:
  for preset, points in (
    ("tiny", ((4, 64), (4, 256), (4, 1024))),
    ("k3", ((8, 1024), (8, 8192), (8, 32768), (8, 131072), (64, 8192))),
  ):
    config = model(preset)
    for rows, context in points:
      yield MlaDecode(
        preset, rows, context, context, config.num_heads, config.kv_lora_rank, config.qk_rope_head_dim, layers=2
      )


def _expert_matmuls() -> Iterable[ExpertMatmul]:
  # K3: the 28 experts of one of 32 devices, and 56 as on the H200 that the anchors were taken on.
  for preset, points in (
    ("tiny", ((1, 2, 2, 16), (16, 32, 4, 16), (16, 32, 16, 16), (64, 128, 16, 16))),
    ("k3", ((1, 16, 16, 28), (64, 64, 8, 28), (64, 64, 28, 28), (56, 56, 56, 56), (512, 512, 56, 56))),
  ):
    config = model(preset)
    for tokens, pairs, hit, held in points:
      choices = config.num_experts_per_token
      yield ExpertMatmul(preset, tokens, pairs, hit, held, choices, config.expert_dim, config.expert_mlp_dim)


def _attn_res() -> Iterable[AttnRes]:
  for preset, points in (
    ("tiny", ((4, 1, 2), (1, 256, 1), (1, 256, 2))),
    ("k3", ((64, 1, 8), (1, 4096, 1), (1, 4096, 8))),
  ):
    for rows, tokens, snapshots in points:
      yield AttnRes(preset, rows, tokens, model(preset).hidden_size, snapshots)


def _messages() -> Iterable[Message]:
  for preset, rows, heads, part, calls in (("tiny", 16, 1, 8, 8), ("k3", 64, 3, 32, 32)):
    config = model(preset)
    # What MLA sends with latents cut by rows: queries of a device's heads there, averages back.
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    yield Message(preset, "one row", "all-to-all", (1, part, 28), calls)
    yield Message(preset, "queries", "all-to-all", (rows, heads, latent), calls, overlapped=True)
    yield Message(preset, "one row", "all-reduce", (1, config.hidden_size), calls)
    yield Message(preset, "hidden states", "all-reduce", (rows, config.hidden_size), calls, overlapped=True)
    yield Message(preset, "hidden states", "all-gather", (2, config.hidden_size), calls, overlapped=True)


def _dummies() -> Iterable[DummyMoe]:
  for preset, rows, width in (("tiny", 16, 16), ("k3", 64, 256)):
    config = model(preset)
    sizes = (sum(model("k3").moe_layers), rows, config.expert_dim, width)
    yield DummyMoe(preset, "all-reduce", *sizes, kinds=(("all-reduce", 1),))
    yield DummyMoe(preset, "all-to-all", *sizes, kinds=(("all-to-all", 2),))
    yield DummyMoe(preset, "all-gather, reduce-scatter", *sizes, kinds=(("all-gather", 1), ("reduce-scatter", 1)))


# The loop of one process takes these in all its benchmarks: each shape more is half a minute of compiling.
_TINY_GENERATIONS = tuple(
  Generation("tiny", slots=slots, prompt=40, new_tokens=64, max_prompt=64, max_length=128) for slots in (1, 4)
)


def _generations() -> Iterable[Generation]:
  yield from _TINY_GENERATIONS
  yield Generation("k3", slots=8, prompt=1000, new_tokens=128, max_prompt=1024, max_length=2048)
  yield Generation("k3", slots=64, prompt=1000, new_tokens=128, max_prompt=1024, max_length=2048)
  yield Generation("k3", slots=64, prompt=8000, new_tokens=128, max_prompt=8192, max_length=9216)


def _decode_loops() -> Iterable[Generation]:
  yield from _TINY_GENERATIONS
  yield Generation("k3", slots=64, prompt=1000, new_tokens=128, max_prompt=1024, max_length=2048)


def _servings() -> Iterable[Serving]:
  yield Serving("tiny", "tiny", prompt=64, new_tokens=64, concurrency=4, requests=12, range_ratio=0.5)
  for label, prompt, new_tokens in (("1k-8k", 1024, 8192), ("8k-1k", 8192, 1024)):
    for concurrency in (8, 64, 256):
      # Each slot twice: the second prompt enters while others decode.
      yield Serving("k3", label, prompt, new_tokens, concurrency, requests=2 * concurrency, range_ratio=0.8)


KDA_CHUNKS = tuple(_kda_chunks())
KDA_STEPS = tuple(_kda_steps())
MLA_DECODES = tuple(_mla_decodes())
EXPERT_MATMULS = tuple(_expert_matmuls())
ATTN_RES = tuple(_attn_res())
MESSAGES = tuple(_messages())
DUMMIES = tuple(_dummies())
GENERATIONS = tuple(_generations())
DECODE_LOOPS = tuple(_decode_loops())
SERVINGS = tuple(_servings())
ALL: tuple[Workload, ...] = (
  *KDA_CHUNKS, *KDA_STEPS, *MLA_DECODES, *EXPERT_MATMULS, *ATTN_RES, *MESSAGES, *DUMMIES, *GENERATIONS, *DECODE_LOOPS,
  *SERVINGS,
)  # fmt: skip


def of_preset[W: Workload](workloads: Iterable[W], preset: str) -> list[W]:
  """Returns those of a preset, in order."""
  return [one for one in workloads if one.preset == preset]


def named[W: Workload](workloads: Iterable[W], name: str) -> W:
  """Returns the workload of a name. Raises InputError, with the names there are, if there is none."""
  found = {one.name: one for one in workloads}
  if name not in found:
    raise InputError(f"workload {name!r}: unknown, expected one of {', '.join(found)}")
  return found[name]
