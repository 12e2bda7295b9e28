"""Lays out a synthetic Kimi K3 checkpoint: released names, shapes, dtypes and file layout, other weights.

    python scripts/synthetic_checkpoint.py DIR --sparse --vision           all 96 shards, headers real, bodies holes
    python scripts/synthetic_checkpoint.py DIR --layers 5 --experts 8 --top-k 2      random bodies, as fast as the disk

For tests and benchmarks of whatever reads a checkpoint: nothing that reads it can tell it from the release before it
computes with the weights. Random bodies are valid (finite weights, scales of the released range, A_log padded with
zeros) and differ from tensor to tensor, so that two exchanged tensors are noticed. The names come from
tests/reference/make_tiny_checkpoint.py. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, ClassVar

import numpy as np

REFERENCE = Path(__file__).resolve().parents[1] / "tests" / "reference"

TEXT_SIZES = {
  "hidden_size": 7168, "vocab_size": 163840, "intermediate_size": 33792, "moe_intermediate_size": 3072,
  "routed_expert_hidden_size": 3584, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64, "v_head_dim": 128, "num_attention_heads": 96, "num_key_value_heads": 96,
  "attn_res_block_size": 12, "max_position_embeddings": 1048576, "bos_token_id": 163584, "eos_token_id": 163586,
  "pad_token_id": 163839,
}  # fmt: skip
LINEAR_SIZES = {"num_heads": 96, "head_dim": 128}
VISION_SIZES = {
  "init_pos_emb_height": 64, "init_pos_emb_time": 4, "init_pos_emb_width": 64, "mm_hidden_size": 1024,
  "qkv_hidden_size": 1536, "vt_hidden_size": 1024, "vt_intermediate_size": 4096, "vt_num_attention_heads": 12,
  "vt_num_hidden_layers": 27,
}  # fmt: skip
LAYERS, EXPERTS, TOP_K = 93, 896, 16
SHARD_BYTES = 16_300_000_000  # Gives the release's 96 shards at full size.

FLOAT32_ENDINGS = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
ITEM_BYTES = {"F32": 4, "BF16": 2, "U8": 1}  # Also the order within a shard: widest first, as the library stores them.
ALIGNMENT = 8  # The library pads a header with spaces to whole words.


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One tensor to lay out, `dtype` as safetensors spells it."""

  name: str
  dtype: str
  shape: tuple[int, ...]

  @property
  def nbytes(self) -> int:
    """Size of its data."""
    return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def _released_names() -> ModuleType:
  """A private copy of make_tiny_checkpoint.py: its table of vision sizes is set here and must not change for others."""
  path = REFERENCE / "make_tiny_checkpoint.py"
  spec = importlib.util.spec_from_file_location("_released_names", path)
  assert spec and spec.loader, path
  module = importlib.util.module_from_spec(spec)
  sys.path.insert(0, str(REFERENCE))  # It imports its neighbour.
  try:
    spec.loader.exec_module(module)
  finally:
    sys.path.remove(str(REFERENCE))
  vars(module)["VISION_CONFIG"] |= VISION_SIZES
  return module


_NAMES = _released_names()


def released_config(
  layers: int = LAYERS, experts: int = EXPERTS, top_k: int = TOP_K, sizes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Returns a config.json of the released structure.

  Args:
    layers: Of the language model. MLA is every fourth layer and the last.
    experts: Routed experts of a layer.
    top_k: Experts a token.
    sizes: Other values of text_config, `linear_attn_config.FIELD` for those of its inner object.
  """
  text = _NAMES.text_config("k3", "tiny", layers) | TEXT_SIZES
  text |= {"num_experts": experts, "num_experts_per_token": min(top_k, experts)}
  text["linear_attn_config"] |= LINEAR_SIZES
  text["quantization_config"] = _NAMES.quantization_config("experts")
  for path, value in (sizes or {}).items():
    scope, _, field = path.rpartition(".")
    (text[scope] if scope else text)[field] = value
  shared = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype")
  return {field: text[field] for field in shared} | {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "ignore_index": -100,
    "image_placeholder": "<|kimi_image_placeholder|>",
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k3",
    "text_config": text,
    "vision_config": _NAMES.VISION_CONFIG | {"text_hidden_size": text["hidden_size"]},
  }


def tensors(config: Mapping[str, Any], *, vision: bool) -> list[Tensor]:
  """Returns every tensor of a config of `released_config`, in the order of the model, those of vision last."""
  text = config["text_config"]
  return [*_text_tensors(text), *(_vision_tensors(text["hidden_size"]) if vision else ())]


def _text_tensors(text: Mapping[str, Any]) -> Iterator[Tensor]:
  for name, shape in _NAMES.tensor_shapes(text):
    name = f"language_model.{name}"
    if ".experts." in name:
      yield Tensor(f"{name}_packed", "U8", (shape[0], shape[1] // 2))
      yield Tensor(f"{name}_scale", "U8", (shape[0], shape[1] // 32))
    else:
      yield Tensor(name, "F32" if name.endswith(FLOAT32_ENDINGS) else "BF16", tuple(shape))


def _vision_tensors(hidden_size: int) -> Iterator[Tensor]:
  """168 at the released depth: six a block, and six around them."""
  for name, shape in _NAMES.vision_shapes(hidden_size):
    if ".blocks.0." not in name:
      yield Tensor(name, "BF16", tuple(shape))
      continue
    for block in range(VISION_SIZES["vt_num_hidden_layers"]):
      yield Tensor(name.replace(".blocks.0.", f".blocks.{block}."), "BF16", tuple(shape))


def shards(held: Sequence[Tensor], shard_bytes: int) -> list[list[Tensor]]:
  """Returns the tensors of each file: in their order, a new file where one would pass `shard_bytes`."""
  files, size = [], 0
  for tensor in held:
    size += tensor.nbytes
    if not files or size > shard_bytes:
      files.append([])
      size = tensor.nbytes
    files[-1].append(tensor)
  # Within a file as the safetensors library lays it out: the widest dtype first, then by name.
  return [sorted(file, key=lambda t: (-ITEM_BYTES[t.dtype], t.name)) for file in files]


def shard_name(number: int, count: int) -> str:
  """Name of the 0-based file, with the release's five and six digits."""
  return f"model-{number + 1:05d}-of-{count:06d}.safetensors"


def header(file: Sequence[Tensor]) -> bytes:
  """Returns what a safetensors file of these tensors starts with: length, then JSON."""
  entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  at = 0
  for tensor in file:
    entries[tensor.name] = {
      "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]
    }  # fmt: skip
    at += tensor.nbytes
  data = json.dumps(entries, separators=(",", ":")).encode()
  data += b" " * (-len(data) % ALIGNMENT)
  return len(data).to_bytes(8, "little") + data


class Bodies:
  """Random bytes at memory speed: each tensor is a window into one buffer of its kind, and no two windows are equal.

  The lengths of the buffers are primes, so that neither rows nor chunks of a large tensor repeat with the buffer.
  """

  _ITEMS: ClassVar = {"codes": 67_108_859, "scales": 16_777_213, "BF16": 33_554_393, "F32": 4_194_301}
  _STRIDE = 1_000_003  # From one tensor's window to the next: coprime to all lengths.
  _SCALES = (112, 122)  # The range reported for the release.

  def __init__(self, config: Mapping[str, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    self._first = int(rng.integers(1 << 20))
    self._heads = config["text_config"]["linear_attn_config"]["num_heads"]
    # Exponents of 2**-10 to 2**-3: finite, and of a sane size.
    halves, words = (rng.integers(0, 1 << 8 * n, self._ITEMS[kind], f"u{n}") for kind, n in (("BF16", 2), ("F32", 4)))
    self._buffers = {
      "codes": rng.integers(0, 256, self._ITEMS["codes"], np.uint8),
      "scales": rng.integers(self._SCALES[0], self._SCALES[1] + 1, self._ITEMS["scales"], np.uint8),
      "BF16": (halves & 0x83FF) + np.uint16(117 << 7),
      "F32": (words & np.uint32(0x83FFFFFF)) + np.uint32(117 << 23),
    }
    self._used = dict.fromkeys(self._ITEMS, 0)

  def place(self, held: Sequence[Tensor]) -> dict[str, tuple[str, int]]:
    """Returns kind and first item of the window of each tensor, by name."""
    places = {}
    for tensor in held:
      kind = {"U8": "scales" if tensor.name.endswith("_scale") else "codes"}.get(tensor.dtype, tensor.dtype)
      start = (self._first + self._STRIDE * self._used[kind]) % self._ITEMS[kind]
      self._used[kind] += 1
      assert self._used[kind] <= self._ITEMS[kind], "more tensors than windows"
      places[tensor.name] = (kind, start)
    return places

  def write(self, out: BinaryIO, tensor: Tensor, place: tuple[str, int]) -> None:
    """Appends a tensor's data to a file, without a copy of it."""
    kind, start = place
    buffer, left = self._buffers[kind], math.prod(tensor.shape)
    if tensor.name.endswith(".A_log"):
      values = buffer.take(range(start, start + left), mode="wrap")
      values[self._heads :] = 0
      out.write(values.data)
      return
    while left:
      part = buffer[start : start + left]
      out.write(part.data)
      left -= len(part)
      start = 0


def write(
  directory: Path, config: Mapping[str, Any], *, sparse: bool, seed: int, shard_bytes: int, vision: bool
) -> list[str]:
  """Writes the checkpoint and returns the names of its shards.

  Args:
    directory: Where to; made if it is not there.
    config: Of `released_config`.
    sparse: Leave the bodies holes, which read as zeros and take no disk.
    seed: Of the random bodies.
    shard_bytes: Size that no file passes, unless one tensor does. 10**9 to the GB.
    vision: Whether the vision tensors are there.
  """
  directory.mkdir(parents=True, exist_ok=True)
  held = tensors(config, vision=vision)
  files = shards(held, shard_bytes)
  names = [shard_name(i, len(files)) for i in range(len(files))]
  bodies = None if sparse else Bodies(config, seed)
  places = bodies.place(held) if bodies else {}
  for name, file in zip(names, files, strict=True):
    with open(directory / name, "wb", buffering=0 if bodies else -1) as out:
      start = header(file)
      out.write(start)
      if bodies is None:
        out.truncate(len(start) + sum(tensor.nbytes for tensor in file))
        continue
      for tensor in file:
        bodies.write(out, tensor, places[tensor.name])
  index = {
    "metadata": {"total_size": sum(tensor.nbytes for tensor in held)},
    "weight_map": {tensor.name: name for name, file in zip(names, files, strict=True) for tensor in file},
  }
  (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
  (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
  return names


def _setting(text: str) -> tuple[str, Any]:
  field, equals, value = text.partition("=")
  if not equals:
    raise argparse.ArgumentTypeError(f"{text!r}, expected FIELD=VALUE")
  try:
    return field, json.loads(value)
  except ValueError as error:
    raise argparse.ArgumentTypeError(f"{text!r}: the value is no JSON ({error})") from error


def _positive(text: str) -> int:
  value = int(text)
  if value < 1:
    raise argparse.ArgumentTypeError(f"{value}, expected 1 or more")
  return value


def main() -> int:
  """Runs the command line and returns its exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument("directory", type=Path, metavar="DIR", help="directory to make; must be empty or not there")
  for flag, default, what in (
    ("--layers", LAYERS, "layers of the language model"),
    ("--experts", EXPERTS, "routed experts of a layer"),
    ("--top-k", TOP_K, "experts a token"),
    ("--shard-bytes", SHARD_BYTES, "size of a shard"),
  ):
    parser.add_argument(flag, type=_positive, default=default, metavar="N", help=f"{what} (default: {default})")
  parser.add_argument("--sparse", action="store_true", help="real headers, bodies that are holes (default: random)")
  parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the random bodies (default: 0)")
  parser.add_argument("--vision", action="store_true", help="with the 168 vision tensors (default: without)")
  parser.add_argument(
      "--set", type=_setting, action="append", default=[], metavar="FIELD=VALUE",
      help="another value of text_config, or linear_attn_config.FIELD=VALUE; may be given again",
  )  # fmt: skip
  parser.add_argument("--dry-run", action="store_true", help="say what would be written and write nothing")
  args = parser.parse_args()
  if not args.dry_run and args.directory.exists() and (not args.directory.is_dir() or any(args.directory.iterdir())):
    parser.error(f"{args.directory}: not an empty directory, nothing is ever overwritten; choose another DIR")
  config = released_config(args.layers, args.experts, args.top_k, dict(args.set))
  held = tensors(config, vision=args.vision)
  nbytes = sum(tensor.nbytes for tensor in held)
  said = f"{len(held):,} tensors, {nbytes:,} bytes, {len(shards(held, args.shard_bytes))} shards"
  if args.dry_run:
    print(f"{args.directory}: would hold {said}{', all holes' if args.sparse else ''}")
    return 0
  args.directory.mkdir(parents=True, exist_ok=True)
  free = shutil.disk_usage(args.directory).free
  if not args.sparse and free < nbytes:
    parser.error(f"{args.directory}: {free:,} bytes free, {nbytes:,} needed; fewer --layers or --experts, or --sparse")
  write(
      args.directory, config, sparse=args.sparse, seed=args.seed, shard_bytes=args.shard_bytes, vision=args.vision
  )  # fmt: skip
  print(f"{args.directory}: {said}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
