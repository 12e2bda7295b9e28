"""A smaller checkpoint cut out of a released one: some of its layers, some of its experts, the released layout.

`make_slice` is pure: it renumbers layers, drops experts, rewrites config.json and holds the result against the same
rules as a conversion. `write_slice` then copies byte ranges, a block at a time: every tensor is kept whole or cut after
its first rows (router weight and bias), so no value is ever computed. The result appears by renaming, complete.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c

from kimi_k3.checksums import RECORD as CONVERSION_RECORD
from kimi_k3.config import KimiK3Config, LayerKind
from kimi_k3.convert import appear, plan, storage
from kimi_k3.convert.beside import Beside, Kept
from kimi_k3.convert.faults import listed
from kimi_k3.convert.index import DTYPES, INDEX_FILE, MAX_HEADER_BYTES, Source, StoredTensor, open_source
from kimi_k3.convert.store import LocalStore, is_url
from kimi_k3.errors import InputError

SCHEMA = 1
RECORD = "slice.json"  # in OUT: what it was cut from
MARKER = ".unfinished-slice"  # in OUT.partial: what is being cut
SHARD_BYTES = 5_000_000_000  # 5 GB: what Hugging Face's tools take for one file.
_ALIGNMENT = 8  # The safetensors library pads a header with spaces to whole words.
_BLOCK_BYTES = 8 * 1024 * 1024  # 8 MiB: what is in memory of the tensors.
_MANY_TENSORS = 100_000  # Fewer have a header far below the limit, of 100 MB.
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
  def names(self) -> tuple[str, ...]:
    """Of the shards, in the order of `files`."""
    return tuple(f"model-{i:05d}-of-{len(self.files):06d}.safetensors" for i in range(1, len(self.files) + 1))

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
  content = json.dumps(config, indent=2) + "\n"
  cut = dataclasses.replace(source, config=config, config_bytes=content.encode(), tensors=tensors)
  planned = plan.make_plan(cut, plan.Options())
  # No shard is larger than all tensors: a larger limit is none.
  shard_bytes = min(options.shard_bytes, sum(tensor.nbytes for tensor in tensors.values()))
  files = _files(tensors.values(), shard_bytes)
  _check_headers(files, tensors)
  copied, left = _other_files(source.directory)
  return Slice(
    source=cut,
    files=files,
    planned=planned,
    copied=copied,
    notes=tuple(_notes(source, c, planned.config, layers, left)),
    record={
      "schema": SCHEMA,
      "source": {"fingerprint": whole.fingerprint, "sample": source.sample()},
      "options": {"layers": list(layers), "experts": experts, "shard_bytes": shard_bytes},
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


def _check_headers(files: Iterable[Sequence[str]], tensors: Mapping[str, StoredTensor]) -> None:
  """The format has a limit for headers, which no reader would accept to be passed."""
  for file in files:
    if len(file) > _MANY_TENSORS and (size := len(_header([tensors[name] for name in file]))) > MAX_HEADER_BYTES:
      raise InputError(
        f"--shard-size: {len(file):,} tensors in one file, a header of {size:,} bytes, expected at most "
        f"{MAX_HEADER_BYTES:,}: give a smaller size"
      )


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


def check_output(out: str | Path, source: Source, cut: Slice, *, overwrite: bool) -> bool:
  """Returns whether `out` already holds this very slice, complete, so that nothing is to be written.

  Raises:
    InputError: if `out` holds anything else that must not be replaced, or lies in the source (or the source in it), or
      if anything but an unfinished slice stands beside it.
  """
  if is_url(str(out)):
    raise InputError(f"{out}: OUT is a local directory, no URL")
  here, there = appear.local(out), source.directory.resolve()
  if here.is_relative_to(there) or there.is_relative_to(here):
    raise InputError(f"{out}: OUT and SRC ({source.directory}) are the same or inside each other, choose another OUT")
  return _holds(out, cut, overwrite=overwrite)


def _holds(out: str | Path, cut: Slice, *, overwrite: bool) -> bool:
  """`check_output` without a look at where the source is."""
  here = appear.local(out)
  if Path(out).is_symlink() or (here.exists() and not here.is_dir()):
    raise InputError(f"{out}: not a directory, choose another OUT")
  place = Beside(here, MARKER, "slice")
  place.check()
  if not here.exists() or not any(here.iterdir()):
    return False
  if not (here / RECORD).is_file():
    raise InputError(f"{out}: holds files but no {RECORD}: not a slice, never overwritten; choose another OUT")
  try:
    record = json.loads((here / RECORD).read_bytes())
  except (OSError, ValueError, RecursionError):
    record = None
  same = record == cut.record
  fault = _incomplete(here, cut) if same else ""
  if same and not fault and (place.committed() or not overwrite):
    return True
  if not overwrite and fault:
    raise InputError(f"{out}: holds this slice, but {fault}; give --overwrite to write it anew")
  if not overwrite:
    raise InputError(f"{out}: holds another slice; give --overwrite to replace it or choose another OUT")
  return False


def _incomplete(out: Path, cut: Slice) -> str:
  """What of the slice is missing or differs, as far as that shows without reading tensors; empty for nothing."""
  sizes = {}
  for name, file in zip(cut.names, cut.files, strict=True):
    tensors = [cut.source.tensors[tensor] for tensor in file]
    sizes[name] = len(_header(tensors)) + sum(tensor.nbytes for tensor in tensors)
  sizes |= {name: (cut.source.directory / name).stat().st_size for name in cut.copied}
  faults = [name for name, size in sizes.items() if not (out / name).is_file() or (out / name).stat().st_size != size]
  for name, content in _small_files(cut).items():
    if not (out / name).is_file() or (out / name).read_bytes() != content:
      faults.append(name)
  return f"{listed(faults)} is missing or not what was written" if faults else ""


def _small_files(cut: Slice) -> dict[str, bytes]:
  """The files that are made for the slice, by name; its record last."""
  held = {tensor: name for name, file in zip(cut.names, cut.files, strict=True) for tensor in file}
  index = {"metadata": {"total_size": cut.nbytes}, "weight_map": dict(sorted(held.items()))}
  return {
    INDEX_FILE: json.dumps(index, indent=2).encode() + b"\n",
    "config.json": cut.source.config_bytes,
    RECORD: json.dumps(cut.record, indent=2).encode() + b"\n",
  }


def free_bytes(out: str | Path) -> int:
  """What the disk of `out` has left."""
  return LocalStore(appear.local(out)).free()


def tidy(out: str | Path) -> None:
  """Removes what a kill right after the commit left beside a finished `out`."""
  Beside(appear.local(out), MARKER, "slice").tidy()


def write_slice(
  out: str | Path, cut: Slice, progress: Callable[[int], Any], *, overwrite: bool = False
) -> tuple[str, ...]:
  """Writes the slice and puts it at `out`. Call `check_output` before, for what it says of the source.

  An error or Ctrl-C leaves `out` as it was and nothing beside it; what a kill leaves is removed by the next run. Only
  where somebody put something at `out` meanwhile is the finished slice kept beside it, for the next run to put there.

  Args:
    out: Where to.
    cut: What to write.
    progress: Called with a number of bytes when they are written.
    overwrite: Replace another slice, or write this one anew.

  Returns:
    Names of the shards.

  Raises:
    InputError: if `out` holds anything that must not be replaced, the source changed meanwhile, or the disk takes no
      more.
  """
  place = Beside(appear.local(out), MARKER, "slice")
  with place.lock():
    try:
      before = appear.contents(place.target)
      _holds(out, cut, overwrite=overwrite)  # Again: from `before` on, nothing goes unnoticed.
      if not _is_finished(place, cut, overwrite=overwrite):
        place.begin(cut.record, [*cut.names, *cut.copied, *_small_files(cut)])
        _check_space(place, cut)
        with _storing(place.out):
          sums = _write_files(place.out, cut, progress)
        place.finish(sums)
      place.put(before)
    except Kept:
      raise
    except BaseException:  # Ctrl-C too
      if not (place.state() or {}).get("made"):  # A finished one of an earlier run stays.
        place.remove()
      raise
  return cut.names


def _is_finished(place: Beside, cut: Slice, *, overwrite: bool) -> bool:
  """Whether an earlier run finished this slice and could not put it at its place."""
  state = place.state() or {}
  if not state.get("made"):
    return False
  if state.get("identity") != cut.record:
    if not overwrite:
      raise InputError(f"{place.root}: holds another finished slice, for the same OUT; --overwrite gives it up")
    return False
  return all(
    place.out.joinpath(name).is_file() and _sum(place.out / name) == said for name, said in state["files"].items()
  )


def _sum(path: Path) -> int:
  """CRC-32C of a file."""
  found = 0
  with path.open("rb", buffering=0) as file:
    while block := file.read(_BLOCK_BYTES):
      found = google_crc32c.extend(found, block)
  return found


def _check_space(place: Beside, cut: Slice) -> None:
  free = free_bytes(place.root)
  if free < cut.nbytes:
    raise InputError(
      f"{place.target.parent}: {free:,} bytes free, the slice takes {cut.nbytes:,}; make room or choose another OUT"
    )


def _write_files(directory: Path, cut: Slice, progress: Callable[[int], Any]) -> dict[str, int]:
  """Writes everything and returns the CRC-32C of each file."""
  sums = {}
  for name, file in zip(cut.names, cut.files, strict=True):
    tensors = [cut.source.tensors[tensor] for tensor in file]
    sums[name] = _write_shard(directory / name, tensors, cut.source, progress)
  for shard in sorted({tensor.shard for tensor in cut.source.tensors.values()}):
    cut.source.check_unchanged(shard)
  for name in cut.copied:
    try:
      content = (cut.source.directory / name).read_bytes()
    except OSError as error:
      raise InputError(f"{cut.source.directory / name}: cannot be read ({error.strerror})") from error
    sums[name] = _write_file(directory / name, [content])
  for name, content in _small_files(cut).items():
    sums[name] = _write_file(directory / name, [content])
  with open_source(directory) as written:  # What is on the disk, not what was meant.
    plan.make_plan(written, plan.Options())
  return sums


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


def _write_shard(path: Path, tensors: Sequence[StoredTensor], source: Source, progress: Callable[[int], Any]) -> int:
  def blocks() -> Iterator[Any]:
    yield _header(tensors)
    for tensor in tensors:
      for block in source.blocks(tensor.name, _BLOCK_BYTES):
        yield block
        progress(len(block))

  return _write_file(path, blocks())


def _write_file(path: Path, blocks: Iterable[Any]) -> int:
  """Writes a file to stable storage and returns its CRC-32C."""
  found = 0
  with open(path, "wb") as file:
    for block in blocks:
      file.write(block)
      found = google_crc32c.extend(found, bytes(block))
    file.flush()
    os.fsync(file.fileno())
  return found


@contextlib.contextmanager
def _storing(directory: Path) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    raise InputError(
      f"{directory}: cannot be written ({error.strerror}), nothing kept; make room or choose another OUT"
    ) from error
