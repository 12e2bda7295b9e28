"""A smaller checkpoint cut out of a released one: some of its layers, some of its experts, the released layout.

`make_slice` is pure: it renumbers layers, drops experts, rewrites config.json and holds the result against the same
rules as a conversion. `write_slice` then copies byte ranges, a block at a time: every tensor is kept whole or cut after
its first rows (router weight and bias), so no value is ever computed. The result appears by renaming, complete.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kimi_k3.checksums import RECORD as CONVERSION_RECORD
from kimi_k3.config import KimiK3Config, LayerKind
from kimi_k3.convert import plan, storage
from kimi_k3.convert.faults import refuse_any
from kimi_k3.convert.index import DTYPES, INDEX_FILE, Source, StoredTensor, open_source
from kimi_k3.errors import InputError

SCHEMA = 1
RECORD = "slice.json"  # in OUT: what it was cut from
MARKER = ".unfinished-slice"  # in the directory that becomes OUT, until it does
SHARD_BYTES = 5_000_000_000  # 5 GB: what Hugging Face's tools take for one file.
_ALIGNMENT = 8  # The safetensors library pads a header with spaces to whole words.
_BLOCK_BYTES = 8 * 1024 * 1024  # 8 MiB: what is in memory of the tensors.
_COPIED_SUFFIXES = (".py", ".json", ".model", ".tiktoken", ".txt", ".jinja")  # tokenizer, code, templates
_COPIED_STEMS = ("LICENSE", "NOTICE")
_REWRITTEN = ("config.json", INDEX_FILE, RECORD, CONVERSION_RECORD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """What the user chose.

  Attributes:
    layers: First and last layer, 0-based, both included; None for all.
    experts: How many of each layer, from the first on; None for all.
    shard_bytes: Size that no file of tensors passes, unless a single tensor does.
  """

  layers: tuple[int, int] | None = None
  experts: int | None = None
  shard_bytes: int = SHARD_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
  """What will be written.

  Attributes:
    source: The tensors of the slice under their new names, with the place of their bytes in the source's files.
    files: Names of the tensors of each file, in the order of their bytes.
    planned: The conversion that the slice would get: proof that it is a valid checkpoint.
    copied: Names of the files that are copied as they are.
    notes: What the slice leaves out or changes, for people.
    record: For RECORD.
  """

  source: Source
  files: tuple[tuple[str, ...], ...]
  planned: plan.Plan
  copied: tuple[str, ...]
  notes: tuple[str, ...]
  record: dict[str, Any]

  @property
  def nbytes(self) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in self.source.tensors.values())


def parse_layers(text: str) -> tuple[int, int]:
  """Returns first and last layer of a range such as 0-7.

  Raises:
    InputError: if it is no range.
  """
  match = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", text)
  if not match:
    raise InputError(f"--layers is {text!r}, expected one range such as 0-7 (0-based, both ends included)")
  first, last = int(match[1]), int(match[2])
  if first > last:
    raise InputError(f"--layers is {text}: ends before it starts; did you mean {last}-{first}?")
  return first, last


def make_slice(source: Source, options: Options) -> Slice:
  """Returns the slice that these options cut out of `source`.

  Raises:
    InputError: if the source is no valid checkpoint, or has no such layers or experts, or the slice would not be valid.
  """
  whole = plan.make_plan(source, plan.Options())
  c = whole.config
  layers = options.layers or (0, c.num_layers - 1)
  experts = c.num_experts if options.experts is None else options.experts
  if layers[1] >= c.num_layers:
    raise InputError(f"--layers is {layers[0]}-{layers[1]}: the checkpoint has layers 0-{c.num_layers - 1}")
  if not 1 <= experts <= c.num_experts:
    raise InputError(f"--experts is {experts}, expected 1 to {c.num_experts}, which is what each layer has")
  config = _config(source.config, c, layers, experts)
  tensors = _tensors(source, whole.form.prefix, layers, experts)
  content = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
  cut = dataclasses.replace(source, config=config, config_bytes=content.encode(), tensors=tensors)
  planned = plan.make_plan(cut, plan.Options())
  copied, left = _other_files(source.directory)
  return Slice(
    source=cut,
    files=_files(tensors.values(), options.shard_bytes),
    planned=planned,
    copied=copied,
    notes=tuple(_notes(source, c, planned.config, layers, left)),
    record={
      "schema": SCHEMA,
      "source": {"fingerprint": whole.fingerprint, "sample": source.sample()},
      "options": {"layers": list(layers), "experts": experts, "shard_bytes": options.shard_bytes},
    },
  )


def _config(config: Mapping[str, Any], c: KimiK3Config, layers: tuple[int, int], experts: int) -> dict[str, Any]:
  """config.json of the slice."""
  first, last = layers
  count = last - first + 1
  dense = min(max(c.first_k_dense_replace - first, 0), count)
  moe = tuple(i >= dense and i % c.moe_layer_freq == 0 for i in range(count))
  if moe != c.moe_layers[first : last + 1]:
    raise InputError(
      f"--layers is {first}-{last}: with moe_layer_freq {c.moe_layer_freq} other layers would have experts after "
      f"renumbering; start at a multiple of {c.moe_layer_freq}"
    )
  result = copy.deepcopy(dict(config))
  text = result.get("text_config", result)
  text["num_hidden_layers"] = count
  text["first_k_dense_replace"] = dense
  text["num_experts"] = experts
  text["num_experts_per_token"] = min(c.num_experts_per_token, experts)
  linear = text["linear_attn_config"]
  for key in ("kda_layers", "full_attn_layers"):  # 1-based
    linear[key] = [i - first for i in linear[key] if first + 1 <= i <= last + 1]
  for scope in (result, text):
    quantization = scope.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("ignore"):
      quantization["ignore"] = _ignored(quantization["ignore"], layers, experts)
  return result


def _ignored(patterns: Sequence[str], layers: tuple[int, int], experts: int) -> list[str]:
  """The ignore list: names follow their layer. Patterns stay; a plan refuses one that would exempt packed weights."""
  kept = []
  for pattern in dict.fromkeys(patterns):
    name = pattern if pattern.startswith("re:") else _renamed(pattern, layers, experts)
    if name is not None:
      kept.append(name)
  return kept


_LAYER = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?P<layer>\d+)(?P<after>(?:\..*)?)")
_EXPERT = re.compile(r"\.experts\.(\d+)(?:\.|$)")


def _renamed(name: str, layers: tuple[int, int], experts: int) -> str | None:
  """The name in the slice; None for what is not in it."""
  match = _LAYER.fullmatch(name)
  if match is None:
    return name
  layer, expert = int(match["layer"]), _EXPERT.search(match["after"])
  if not layers[0] <= layer <= layers[1] or (expert and int(expert[1]) >= experts):
    return None
  return f"{match['before']}{layer - layers[0]}{match['after']}"


def _tensors(source: Source, prefix: str, layers: tuple[int, int], experts: int) -> dict[str, StoredTensor]:
  """The slice's tensors by new name, in the order of the source's bytes."""
  kept = {}
  routers = tuple(f".block_sparse_moe.gate.{field}" for field in ("weight", "e_score_correction_bias"))
  for tensor in sorted(storage.text_tensors(source).values(), key=lambda t: (t.shard, t.offset)):
    inner = _renamed(tensor.name.removeprefix(prefix), layers, experts)
    if inner is None:
      continue
    shape = tensor.shape
    if inner.endswith(routers):
      shape = (experts, *shape[1:])  # The first rows are the first bytes.
    nbytes = math.prod(shape) * DTYPES[tensor.dtype].itemsize
    kept[prefix + inner] = dataclasses.replace(tensor, name=prefix + inner, shape=shape, nbytes=nbytes)
  return kept


def _files(tensors: Iterable[StoredTensor], shard_bytes: int) -> tuple[tuple[str, ...], ...]:
  files: list[list[StoredTensor]] = []
  size = 0
  for tensor in tensors:
    size += tensor.nbytes
    if not files or size > shard_bytes:
      files.append([])
      size = tensor.nbytes
    files[-1].append(tensor)
  # As the safetensors library lays out a file: the widest dtype first, then by name.
  ordered = (sorted(file, key=lambda t: (-DTYPES[t.dtype].itemsize, t.name)) for file in files)
  return tuple(tuple(tensor.name for tensor in file) for file in ordered)


def _other_files(directory: Path) -> tuple[tuple[str, ...], list[str]]:
  """Names of the files to copy, and of what is left behind."""
  copied, left = [], []
  for path in sorted(directory.iterdir()):
    if path.name in _REWRITTEN or path.suffix == ".safetensors":
      continue
    wanted = path.suffix in _COPIED_SUFFIXES or path.name.startswith(_COPIED_STEMS)
    (copied if wanted and path.is_file() else left).append(path.name)
  return tuple(copied), left


def _notes(
  source: Source, old: KimiK3Config, new: KimiK3Config, layers: tuple[int, int], left: Sequence[str]
) -> Iterator[str]:
  first, last = layers
  kda = sum(kind is LayerKind.KDA for kind in new.layer_kinds)
  yield (
    f"layers {first}-{last} of {old.num_layers} become 0-{last - first}: {kda} KDA, {new.num_layers - kda} MLA, "
    f"{sum(new.moe_layers)} with experts"
  )
  if new.first_k_dense_replace != old.first_k_dense_replace:
    yield f"first_k_dense_replace becomes {new.first_k_dense_replace} (was {old.first_k_dense_replace})"
  if old.attn_res_block_size is not None and first:
    yield (
      "attention-residual snapshots restart at the slice's first layer, whose input is the embedding: these layers "
      "compute something else than inside the whole model"
    )
  if new.num_experts != old.num_experts:
    yield f"experts 0-{new.num_experts - 1} of {old.num_experts} in each layer, router rows and bias cut alike"
  if new.num_experts_per_token != old.num_experts_per_token:
    yield f"num_experts_per_token lowered to {new.num_experts_per_token} (was {old.num_experts_per_token})"
  vision = len(source.tensors) - len(storage.text_tensors(source))
  if vision:
    yield f"{vision} vision tensors ({' or '.join(f'{p}*' for p in storage.VISION_PREFIXES)}) are not carried"
  if left:
    yield f"not copied: {', '.join(left)}"


def check_output(out: Path, source: Source, cut: Slice, *, overwrite: bool) -> bool:
  """Returns whether `out` already holds this very slice.

  Raises:
    InputError: if `out` holds anything else that must not be replaced, or lies in the source (or the source in it).
  """
  here, there = out.resolve(), source.directory.resolve()
  if here.is_relative_to(there) or there.is_relative_to(here):
    raise InputError(f"{out}: OUT and SRC ({source.directory}) are the same or inside each other, choose another OUT")
  if not out.exists() and not out.is_symlink():
    return False
  if not out.is_dir() or out.is_symlink():
    raise InputError(f"{out}: not a directory, choose another OUT")
  if not any(out.iterdir()):
    return False
  if not (out / RECORD).is_file():
    raise InputError(f"{out}: holds files but no {RECORD}: not a slice, never overwritten; choose another OUT")
  try:
    record = json.loads((out / RECORD).read_bytes())
  except (OSError, ValueError, RecursionError):
    record = None
  same = record == cut.record
  if not same and not overwrite:
    raise InputError(f"{out}: holds another slice; give --overwrite to replace it or choose another OUT")
  return same


def write_slice(out: Path, cut: Slice, progress: Callable[[int], Any]) -> list[str]:
  """Writes the slice and puts it at `out`, replacing what is there. Call `check_output` before.

  An error or Ctrl-C leaves `out` as it was and nothing beside it; what a kill leaves is removed by the next run.

  Args:
    out: Where to.
    cut: What to write.
    progress: Called with a number of bytes when they are written.

  Returns:
    Names of the shards.

  Raises:
    InputError: if the source changed meanwhile, or the disk takes no more.
  """
  out = out.resolve()
  names = [f"model-{i + 1:05d}-of-{len(cut.files):06d}.safetensors" for i in range(len(cut.files))]
  with _appearing(out, cut.nbytes) as directory, _storing(directory):
    for name, file in zip(names, cut.files, strict=True):
      _write_shard(directory / name, [cut.source.tensors[tensor] for tensor in file], cut.source, progress)
    for shard in sorted({tensor.shard for tensor in cut.source.tensors.values()}):
      cut.source.check_unchanged(shard)
    for name in cut.copied:
      shutil.copyfile(cut.source.directory / name, directory / name)
    held = {tensor: name for name, file in zip(names, cut.files, strict=True) for tensor in file}
    index = {"metadata": {"total_size": cut.nbytes}, "weight_map": dict(sorted(held.items()))}
    _write_file(directory / INDEX_FILE, json.dumps(index, indent=2).encode() + b"\n")
    _write_file(directory / "config.json", cut.source.config_bytes)
    _write_file(directory / RECORD, json.dumps(cut.record, indent=2).encode() + b"\n")
    with open_source(directory) as written:  # What is on the disk, not what was meant.
      plan.make_plan(written, plan.Options())
  return names


def _header(tensors: Sequence[StoredTensor]) -> bytes:
  entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  at = 0
  for tensor in tensors:
    offsets = [at, at + tensor.nbytes]
    entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    at += tensor.nbytes
  data = json.dumps(entries, separators=(",", ":")).encode()
  data += b" " * (-len(data) % _ALIGNMENT)
  return len(data).to_bytes(8, "little") + data


def _write_shard(path: Path, tensors: Sequence[StoredTensor], source: Source, progress: Callable[[int], Any]) -> None:
  with open(path, "wb") as file:
    file.write(_header(tensors))
    for tensor in tensors:
      for block in source.blocks(tensor.name, _BLOCK_BYTES):
        file.write(block)
        progress(len(block))
    file.flush()
    os.fsync(file.fileno())


def _write_file(path: Path, content: bytes) -> None:
  with open(path, "wb") as file:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def _storing(directory: Path) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    raise InputError(
      f"{directory}: cannot be written ({error.strerror}), nothing kept; make room or choose another OUT"
    ) from error


@contextlib.contextmanager
def _appearing(out: Path, nbytes: int) -> Iterator[Path]:
  """A fresh directory beside `out` that becomes `out` at the end, or vanishes on an error."""
  temporary = out.with_name(f"{out.name}.partial")
  replaced = _inode(out)
  try:
    temporary.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(temporary, os.O_RDONLY)
  except OSError as error:
    raise InputError(f"{temporary}: cannot be created ({error.strerror}), choose another OUT") from error
  try:
    _lock(descriptor, temporary)
    _make_empty(temporary, nbytes)
    try:
      yield temporary
      (temporary / MARKER).unlink()
      os.fsync(descriptor)
      _swap(temporary, out, replaced)
    except BaseException:  # Ctrl-C too
      shutil.rmtree(temporary, ignore_errors=True)
      raise
  finally:
    os.close(descriptor)


def _inode(path: Path) -> int | None:
  return path.stat().st_ino if path.exists() else None


def _lock(descriptor: int, directory: Path) -> None:
  """Makes the open `directory` ours, until it is closed or we are killed."""
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise InputError(f"{directory}: another slice is being written there, wait for it or choose another OUT") from error
  except OSError:
    pass  # A file system without locks: nothing can be told.
  if _inode(directory) != os.fstat(descriptor).st_ino:  # It was renamed between opening and locking.
    raise InputError(f"{directory}: another slice was being written there and has just ended, start again")


def _make_empty(directory: Path, nbytes: int) -> None:
  """Removes what a killed slice left, and nothing else. Checks that the disk has room for `nbytes`."""
  held = list(directory.iterdir())
  if held and not any((directory / name).is_file() for name in (MARKER, RECORD)):
    raise InputError(f"{directory}: holds {held[0].name}, which no slice left; remove it or choose another OUT")
  try:
    for path in held:
      if path.name != MARKER:  # The last to go: without it, what is left would be a stranger's.
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (directory / MARKER).touch()
    free = shutil.disk_usage(directory).free
  except OSError as error:
    raise InputError(f"{directory}: cannot be emptied ({error.strerror}), choose another OUT") from error
  if free < nbytes:
    shutil.rmtree(directory, ignore_errors=True)
    raise InputError(f"{directory.parent}: {free:,} bytes free, the slice takes {nbytes:,}; choose another OUT")


def _swap(temporary: Path, out: Path, replaced: int | None) -> None:
  """Renames `temporary` to `out`; what was there, the directory with inode `replaced`, goes away only after that."""
  if _inode(out) != replaced:
    raise InputError(f"{out}: changed meanwhile, nothing written; start again or choose another OUT")
  if replaced is None or not any(out.iterdir()):
    temporary.rename(out)
    return
  old = out.with_name(f"{out.name}.replaced")
  refuse_any([str(old)] if old.exists() else [], "what an earlier --overwrite left: look at it and remove it")
  out.rename(old)
  try:
    temporary.rename(out)
  except BaseException:
    old.rename(out)
    raise
  shutil.rmtree(old)
