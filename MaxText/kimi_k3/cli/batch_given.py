"""What `kimi-k3 batch` is given: its config, its lines, and what decides the tokens of a row."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3.cli.decode import find_tokenizer, refuse_ignored, run_sampling, slots_a_device, tokenizer_directory
from kimi_k3.cli.inputs import check_writable, descriptor_of
from kimi_k3.cli.multihost import shown_by
from kimi_k3.errors import InputError
from kimi_k3.generate.batch_input import PromptFile, Rules
from kimi_k3.generate.batch_output import Completions

if TYPE_CHECKING:
  from kimi_k3.generate.sampling import SamplingOptions
  from kimi_k3.generate.tokenizer import Tokenizer
  from kimi_k3.maxtext_adapter.distributed import Processes

_FAULTS_REFUSED = 5
# Of the settings, those that say where and how wide a run is and not what a row's tokens are.
_NOT_OF_TOKENS = (
  "_path", "_dir", "_directory", "_parallelism", "_cut", "per_device_batch_size", "max_prefill_predict_length",
  "max_target_length", "run_name", "partition_mesh", "partition_rules", "logical_axis_rules", "log_config", "hardware",
)  # fmt: skip
_TOKENIZER_FILES = ("tiktoken.model", "tokenizer.json", "tokenizer_config.json")


@dataclasses.dataclass(frozen=True)
class Given:
  """All that was given.

  Attributes:
    config: MaxText's HyperParameters.
    prompts: The input, looked through.
    tokenizer: None if there is none.
    sampling: Of lines that say nothing.
    stop_ids: Tokens that end a row.
    settings: What changes tokens, by name.
    shown: What must be the same in every process; nothing in one alone.
  """

  config: Any
  prompts: PromptFile
  tokenizer: Tokenizer | None
  sampling: SamplingOptions
  stop_ids: frozenset[int]
  settings: dict[str, str]
  shown: dict[str, str]


def read_given(args: argparse.Namespace, processes: Processes) -> Given:
  """Returns all that was given, every line of it checked; loads and writes nothing.

  Raises:
    InputError: for what cannot be met, and with --strict for a bad line.
  """
  if processes.first:
    _check_files(args)
  from kimi_k3.maxtext_adapter.settings import explicit_settings, read_config

  explicit = explicit_settings(args.config, args.settings)
  refuse_ignored(explicit)
  if "prompt" in explicit:
    raise InputError("prompt= given, which batch does not read: give --in FILE.jsonl")
  tokenizer = find_tokenizer(args.config, explicit)
  # The model's sizes, whatever the lengths: those come from the rows.
  model = read_config(args.config, args.settings, **_lengths([(1, 1)], explicit))
  sampling = run_sampling(model)
  if args.max_new_tokens >= model.max_position_embeddings:
    raise InputError(
      f"--max-new-tokens is {args.max_new_tokens}, expected less than {model.max_position_embeddings}, which a prompt "
      "and its new tokens may have together (max_position_embeddings of the model)"
    )
  prompts = PromptFile(args.input, _rules(args, model, tokenizer, sampling))
  lengths = _lengths(zip(prompts.prompt_tokens, prompts.new_tokens, strict=True), explicit)
  config = read_config(args.config, args.settings, **lengths, per_device_batch_size=slots_a_device(prompts.rows))
  prompts.refuse(lambda tokens, new: _does_not_fit(tokens, new, config))
  if args.strict and prompts.bad:
    said = "; ".join(f"line {i + 1}: {reason}" for i, reason in sorted(prompts.faults.items())[:_FAULTS_REFUSED])
    more = f"; and {prompts.bad - _FAULTS_REFUSED} more" if prompts.bad > _FAULTS_REFUSED else ""
    raise InputError(f"{args.input}: {prompts.bad} bad line(s): {said}{more}: mend them or leave out --strict")
  stop_ids = frozenset() if args.ignore_eos else _stop_ids(config, tokenizer)
  directory = tokenizer_directory(args.config, explicit)
  settings = _settings(args, explicit, config, directory, stop_ids)
  shown = shown_by(processes, config, args, [])
  if shown:
    digest = hashlib.sha256(prompts.digests).hexdigest()[:16]
    shown |= {"--in": f"{len(prompts.kinds)} lines {digest}"}
    shown |= {f"{name} (batch)": value for name, value in settings.items()}
  return Given(config, prompts, tokenizer, sampling, stop_ids, settings, shown)


def _check_files(args: argparse.Namespace) -> None:
  """Refuses files that cannot be written, and one file for two things."""
  check_writable(args.out)
  if descriptor_of(args.out) is not None or (Path(args.out).exists() and not Path(args.out).is_file()):
    raise InputError(f"{args.out}: is no file, expected one that can be gone on with")
  if args.summary:
    check_writable(args.summary)
  # Files beside --out are replaced and removed by their names.
  paths = {"CONFIG": args.config, "--in": args.input, "--out": args.out, "--summary": args.summary}
  found = {name: Path(path).resolve() for name, path in paths.items() if path}
  found |= {f"{path.name} beside --out": path for path in Completions(args.out).beside}
  for one, other in itertools.combinations(found, 2):
    if found[one] == found[other]:
      raise InputError(f"{one} and {other} are one file: {found[one]}")


def _rules(args: argparse.Namespace, model: Any, tokenizer: Tokenizer | None, sampling: SamplingOptions) -> Rules:
  def encode_messages(messages: list[Any], options: Mapping[str, Any]) -> list[int]:
    from kimi_k3.chat import encode_conversation

    assert tokenizer is not None
    return encode_conversation(tokenizer, messages, **options)  # pyright: ignore[reportArgumentType]

  return Rules(
    vocab_size=model.vocab_size,
    longest=model.max_position_embeddings,
    max_new_tokens=args.max_new_tokens,
    encode=None if tokenizer is None else tokenizer.encode,
    encode_messages=None if tokenizer is None else encode_messages,
    check_sampling=lambda given: dataclasses.replace(sampling, **given),
  )


def _lengths(pairs: Iterable[tuple[int, int]], explicit: Mapping[str, Any]) -> dict[str, int]:
  """The caches' two lengths: for all rows, or as they were set, for those rows that fit.

  Args:
    pairs: Tokens of each prompt and its new ones at most; 0 for bad lines.
    explicit: What the user set.
  """
  from kimi_k3.generate.lengths import cache_lengths

  prefill, target = (
    value if isinstance(value := explicit.get(key), int) and value > 0 else None
    for key in ("max_prefill_predict_length", "max_target_length")
  )
  longest = new = 1
  for tokens, own in pairs:
    if tokens and (prefill is None or tokens <= prefill) and (target is None or tokens + own <= target):
      longest, new = max(longest, tokens), max(new, own)
  if target is not None:
    new = max(1, min(new, target - (longest if prefill is None else prefill)))
  return cache_lengths([range(longest)], new, explicit)


def _does_not_fit(tokens: int, new: int, config: Any) -> str | None:
  prefill, target = config.max_prefill_predict_length, config.max_target_length
  if tokens > prefill:
    return f"the prompt has {tokens} tokens, longer than the prompt cache: max_prefill_predict_length is {prefill}"
  if tokens + new > target:
    return f"{tokens} + {new} tokens needed, more than the cache holds: max_target_length is {target}"
  if new > target - prefill:
    return (
      f"{new} new tokens do not fit: max_target_length {target} - max_prefill_predict_length {prefill} leaves "
      f"{target - prefill}"
    )
  return None


def _stop_ids(config: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
  from kimi_k3.chat import stop_ids

  return stop_ids(tokenizer, config.eos_token_id)  # pyright: ignore[reportArgumentType]


def _settings(
  args: argparse.Namespace, explicit: Mapping[str, Any], config: Any, tokenizer: Path, stop_ids: frozenset[int]
) -> dict[str, str]:
  """What changes the tokens or the text of a row, by name."""
  from kimi_k3.maxtext_adapter.distributed import checkpoint_files
  from kimi_k3.maxtext_adapter.engine import checkpoint_path

  settings = {key: value for key, value in explicit.items() if not key.endswith(_NOT_OF_TOKENS)}
  settings |= {"--max-new-tokens": args.max_new_tokens, "stop tokens": sorted(stop_ids)}
  for name in _TOKENIZER_FILES:
    if (path := tokenizer / name).is_file():
      settings[f"{name} of the tokenizer"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
  said = {key: json.dumps(value, default=str, sort_keys=True) for key, value in settings.items()}
  return said | checkpoint_files(checkpoint_path(config))
