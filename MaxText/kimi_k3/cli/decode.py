"""`kimi-k3 decode CONFIG`: prompts in, tokens out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3.cli.inputs import check_vocabulary, check_writable, read_rows, write_whole
from kimi_k3.cli.multihost import HELP, add_flags, joined, lost_processes, shown_by
from kimi_k3.errors import InputError

if TYPE_CHECKING:
  from kimi_k3.generate.loop import Row
  from kimi_k3.generate.sampling import SamplingOptions
  from kimi_k3.generate.tokenizer import Tokenizer
  from kimi_k3.maxtext_adapter.distributed import Processes

DESCRIPTION = """\
Decodes prompts with a converted checkpoint. Rows may have any lengths and number: those beyond the slots wait. Without
explicit lengths the caches are sized from the longest row and --max-new-tokens. A row ends at the config's
eos_token_id.

On many devices: partitioning=auto leaves the collectives to the compiler; partitioning=manual has them written down and
takes TPU kernels by name (configs/tpu7x-32.yml, docs/sharding.md).

Greedy by default. For a draw at a temperature: decode_sampling_strategy=weighted decode_sampling_temperature=0.7
decode_sampling_seed=1; the same seed gives a row the same tokens in any slot and beside any neighbours. Strategies topk
(with decode_sampling_top_k), nucleus (with decode_sampling_nucleus_p) and composite (with both) draw from fewer tokens.

{multihost}"""
EPILOG = """\
examples:
  kimi-k3 decode OUT/decode.yml prompt="The capital of France is" --max-new-tokens 32
  kimi-k3 decode OUT/decode.yml --prompt-ids prompts.json --max-new-tokens 64 --out completions.json
  kimi-k3 decode OUT/decode.yml --prompt-ids prompts.json dtype=float32 matmul_precision=highest
  kimi-k3 decode OUT/decode.yml --prompt-ids prompts.json partitioning=manual --multihost auto
"""
_PROMPT = "prompt="
_MAX_DEFAULT_SLOTS = 16
_DEFAULT_NEW_TOKENS = 64
# Refused by name: they would be parsed and ignored.
_REFUSED_KEYS = {
  "enable_prefix_caching": "prefix caching is not supported: a KDA layer keeps one state, not a state a token",
  "prefix_caching": "prefix caching is not supported: a KDA layer keeps one state, not a state a token",
  "prefix_caching_hbm_byte": "prefix caching is not supported: a KDA layer keeps one state, not a state a token",
  "prefix_caching_dram_byte": "prefix caching is not supported: a KDA layer keeps one state, not a state a token",
  "speculative_decoding": "speculative decoding is not supported: a KDA state cannot be taken back",
  "num_speculative_tokens": "speculative decoding is not supported: a KDA state cannot be taken back",
  "speculative_config": "speculative decoding is not supported: a KDA state cannot be taken back",
  "draft_model": "speculative decoding is not supported: a KDA state cannot be taken back",
  "use_chunked_prefill": "chunked prefill is not supported yet: leave it out",
}


def add_parser(subparsers) -> argparse.ArgumentParser:
  """Adds the verb to the command line."""
  parser = subparsers.add_parser(
    "decode", help="prompts in, tokens out", description=DESCRIPTION.format(multihost=HELP), epilog=EPILOG
  )
  parser.add_argument("config", metavar="CONFIG.yml", help="decode.yml of a converted checkpoint; key=value may follow")
  parser.add_argument("--prompt-ids", metavar="FILE.json", help="list of lists of token ids")
  parser.add_argument(
    "--max-new-tokens", type=int, default=_DEFAULT_NEW_TOKENS, metavar="N", help="at most, a row (default: %(default)s)"
  )
  parser.add_argument("--ignore-eos", action="store_true", help="go on after the end token")
  parser.add_argument("--out", metavar="FILE.json", help="write the rows there (default: stdout)")
  add_flags(parser)
  parser.set_defaults(settings=[])
  return parser


def run(args: argparse.Namespace) -> int:
  """Decodes all rows; exit code 1 if one of them ended with an error."""
  with joined(args) as processes:
    given = processes.together(lambda: _read(args, processes))
    processes.agree(given.shown)
    engine = processes.together(lambda: _load(given.config, args))
    with lost_processes(processes):
      rows, summary = _generate(engine, given, args, processes)
    processes.together(lambda: _finish(rows, summary, given, args, processes))
  return 1 if any(row.finish_reason == "error" for row in rows) else 0


@dataclasses.dataclass(frozen=True)
class _Given:
  """All that was given.

  Attributes:
    config: MaxText's HyperParameters.
    prompts: Rows of token ids.
    tokenizer: None if there is none.
    shown: What must be the same in every process; nothing in one alone.
  """

  config: Any
  prompts: list[list[int]]
  tokenizer: Tokenizer | None
  shown: dict[str, str]


def _read(args: argparse.Namespace, processes: Processes) -> _Given:
  if args.max_new_tokens < 1:
    raise InputError(f"--max-new-tokens is {args.max_new_tokens}, expected 1 or more")
  if args.out and processes.first:
    check_writable(args.out)
  from kimi_k3.generate.lengths import cache_lengths
  from kimi_k3.maxtext_adapter.settings import explicit_settings, read_config

  prompt, settings = _split_prompt(args.settings)
  explicit = explicit_settings(args.config, settings) | prompt
  refuse_ignored(explicit)
  tokenizer = find_tokenizer(args.config, explicit)
  prompts, source = _prompts(args, explicit, tokenizer)
  lengths = cache_lengths(prompts, args.max_new_tokens, explicit)
  config = read_config(args.config, settings, **lengths, per_device_batch_size=slots_a_device(len(prompts)))
  check_vocabulary(prompts, config.vocab_size, source)
  return _Given(config, prompts, tokenizer, shown_by(processes, config, args, prompts))


def _finish(rows: list[Row], summary: str, given: _Given, args: argparse.Namespace, processes: Processes) -> None:
  if not processes.first:
    return
  _deliver([_as_dict(row, given.tokenizer) for row in rows], args.out)
  print(summary, file=sys.stdout if args.out else sys.stderr)


def _split_prompt(settings: Sequence[str]) -> tuple[dict[str, str], list[str]]:
  """The prompt as it was typed, if there is one, and the other settings, which are read as YAML."""
  texts = [s.removeprefix(_PROMPT) for s in settings if s.startswith(_PROMPT)]
  if len(texts) > 1:
    raise InputError("prompt= given twice; give --prompt-ids FILE.json for many prompts")
  others = [s for s in settings if not s.startswith(_PROMPT)]
  return ({"prompt": texts[0]} if texts else {}), others


def refuse_ignored(explicit: Mapping[str, Any]) -> None:
  """Raises InputError for a setting that would be parsed and ignored in decoding."""
  for key in sorted(explicit.keys() & _REFUSED_KEYS.keys()):
    if explicit[key]:
      raise InputError(f"{key}: {_REFUSED_KEYS[key]}")
  if explicit.get("decode_sampling_strategy", "greedy") == "greedy" and explicit.get("decode_sampling_temperature"):
    raise InputError(
      f"decode_sampling_temperature is {explicit['decode_sampling_temperature']}, which decode_sampling_strategy "
      "greedy ignores: use weighted"
    )


def tokenizer_directory(config: str, explicit: Mapping[str, Any]) -> Path:
  """Returns where the tokenizer is looked for: tokenizer_path, relative to the config file, or else beside that."""
  return Path(config).resolve().parent / (explicit.get("tokenizer_path") or "")


def find_tokenizer(config: str, explicit: Mapping[str, Any]) -> Tokenizer | None:
  """Returns the tokenizer of a config, None if there is none. Raises InputError if one is named that is not there."""
  from kimi_k3.generate.tokenizer import load_tokenizer

  named = explicit.get("tokenizer_path")
  tokenizer = load_tokenizer(tokenizer_directory(config, explicit))
  if named and tokenizer is None and Path(named) != Path():
    raise InputError(f"tokenizer_path is {named!r}: no tiktoken.model or tokenizer.json there")
  return tokenizer


def _prompts(args, explicit: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[list[list[int]], str]:
  """The rows to decode and where they come from."""
  text = explicit.get("prompt")
  if args.prompt_ids and text is not None:
    raise InputError("give either --prompt-ids or prompt=, not both")
  if args.prompt_ids:
    return read_rows(args.prompt_ids), args.prompt_ids
  if text is None:
    raise InputError("nothing to decode: give --prompt-ids FILE.json or prompt=TEXT")
  if tokenizer is None:
    raise InputError(
      "prompt= needs a tokenizer: no tiktoken.model or tokenizer.json beside the config; give --prompt-ids"
    )
  ids = tokenizer.encode(str(text))
  if not ids:
    raise InputError("prompt= is empty")
  return [ids], "prompt"


def slots_a_device(rows: int) -> int:
  """Returns the slots of each device where the user sets none: one for each row, up to 16 of all devices."""
  import jax

  return -(-min(rows, _MAX_DEFAULT_SLOTS) // jax.device_count())


def _load(config: Any, args: argparse.Namespace) -> Any:
  from kimi_k3.maxtext_adapter.engine import make_engine

  run_sampling(config)  # what it refuses comes before the weights
  return make_engine(config, args.check_placement)


def run_sampling(config: Any) -> SamplingOptions:
  """Returns how a config chooses tokens. Raises InputError if its decode_sampling_* settings do not fit together."""
  from kimi_k3.generate.sampling import check_seed, sampling_of

  check_seed("decode_sampling_seed", config.decode_sampling_seed)
  return sampling_of(
    config.decode_sampling_strategy.value,
    float(config.decode_sampling_temperature),
    config.decode_sampling_top_k,
    float(config.decode_sampling_nucleus_p),
  )


def _generate(engine: Any, given: _Given, args: argparse.Namespace, processes: Processes) -> tuple[list[Row], str]:
  from tqdm import tqdm

  from kimi_k3.generate.clock import CompileClock
  from kimi_k3.generate.loop import Request, generate

  config = given.config
  stop_ids = () if args.ignore_eos else (config.eos_token_id,)
  sampling = run_sampling(config)
  requests = [Request(i, prompt, args.max_new_tokens, sampling) for i, prompt in enumerate(given.prompts)]
  shown = None if processes.first else True  # None: where there is a terminal
  with tqdm(total=len(requests), unit="row", file=sys.stderr, disable=shown) as bar:
    rows, timing = generate(
      engine,
      requests,
      stop_ids=stop_ids,
      clock=CompileClock(),
      seed=config.decode_sampling_seed,
      on_finished=lambda _: bar.update(),
    )
  return rows, f"{len(rows)} rows on {engine.num_slots} slots: {timing.summary()}"


def _as_dict(row: Row, tokenizer: Tokenizer | None) -> dict[str, Any]:
  return {
    "index": row.index,
    "prompt_ids": row.prompt_ids,
    "ids": row.ids,
    "text": None if tokenizer is None else tokenizer.decode(row.ids),
    "finish_reason": row.finish_reason,
    "error": row.error,
  }


def _deliver(result: list[dict[str, Any]], out: str | None) -> None:
  lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in result)
  if out is None:
    print(f"[{lines}]")
  else:
    write_whole(out, lambda file: file.write(f"[{lines}]\n".encode()))
