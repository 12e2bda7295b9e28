"""`kimi-k3 eval CONFIG`: perplexity of a text, exact match over questions."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3.cli.decode import find_tokenizer, refuse_ignored, slots_a_device, tokenizer_directory
from kimi_k3.cli.inputs import check_vocabulary, check_writable, read_rows, write_whole
from kimi_k3.cli.multihost import HELP, add_flags, joined, lost_processes, shown_by
from kimi_k3.errors import InputError
from kimi_k3.evaluate import exact_match
from kimi_k3.evaluate.perplexity import DEFAULT_WINDOW, check_window, cut_windows, perplexity

if TYPE_CHECKING:
  from kimi_k3.generate.tokenizer import Tokenizer
  from kimi_k3.maxtext_adapter.distributed import Processes

SCHEMA = 1
_DEFAULT_NEW_TOKENS = 256
_STEPS_BETWEEN_STOPS = 16  # stop strings are looked for on the host: the device runs on for so many steps at most
DESCRIPTION = """\
Measures a converted checkpoint (docs/eval.md): perplexity of --text or --tokens, exact match over --questions, or both.
The result is one JSON object, to --out or stdout.

Perplexity is exp of the mean negative log-likelihood of a token. The text is cut into windows of --window tokens, and
each token is predicted once: windows start --stride apart, and of one that overlaps the one before only the last
--stride predictions count. The smaller the stride, the more each token is predicted from, and the longer it takes. The
first token is predicted only if one stands before it, which --bos and --no-bos decide; without either, add_bos_token of
tokenizer_config.json.

Questions are lines of gsm8k's form: {{"question": "What is 5 plus 7?", "answer": "5 + 7 = 12\\n#### 12"}}. Completions
are greedy and end at the config's eos_token_id or a stop string. strict: the number after "#### " is right; flexible:
that or else the last number in the completion.

{multihost}"""
EPILOG = """\
examples:
  kimi-k3 eval OUT/decode.yml --text held-out.txt
  kimi-k3 eval OUT/decode.yml --text held-out.txt --window 1024 --stride 512 --out result.json
  kimi-k3 eval OUT/decode.yml --tokens rows.json dtype=float32 matmul_precision=highest
  kimi-k3 eval OUT/decode.yml --questions test.jsonl --few-shot train.jsonl 5 --limit 100 --out result.json
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
  """Adds the verb to the command line."""
  parser = subparsers.add_parser(
    "eval", help="perplexity, exact match", description=DESCRIPTION.format(multihost=HELP), epilog=EPILOG
  )
  parser.add_argument("config", metavar="CONFIG.yml", help="decode.yml of a converted checkpoint; key=value may follow")
  text = parser.add_argument_group("perplexity")
  text.add_argument("--text", metavar="FILE.txt", help="UTF-8, one document")
  text.add_argument("--tokens", metavar="FILE.json", help="list of lists of token ids, each a document")
  text.add_argument(
    "--window",
    type=int,
    metavar="N",
    help=f"tokens given to the model at once (default: {DEFAULT_WINDOW}, or max_position_embeddings if that is less)",
  )
  text.add_argument("--stride", type=int, metavar="N", help="tokens between two windows (default: the window)")
  questions = parser.add_argument_group("exact match")
  questions.add_argument("--questions", metavar="FILE.jsonl", help="a question a line")
  questions.add_argument("--limit", type=int, metavar="N", help="the first N questions only")
  questions.add_argument(
    "--max-new-tokens", type=int, metavar="N", help=f"at most, a question (default: {_DEFAULT_NEW_TOKENS})"
  )
  questions.add_argument(
    "--prompt",
    metavar="TEMPLATE",
    help=f"with {{question}} in it; \\n is a line end (default: {_shown(exact_match.DEFAULT_PROMPT)})",
  )
  questions.add_argument(
    "--few-shot", nargs=2, metavar=("FILE.jsonl", "K"), help="the first K of these stand, answered, before each"
  )
  questions.add_argument(
    "--stop",
    action="append",
    metavar="TEXT",
    help=f"ends a completion; may be given more than once; \\n is a line end (default: {exact_match.DEFAULT_STOP})",
  )
  parser.add_argument(
    "--bos",
    action=argparse.BooleanOptionalAction,
    help="put the config's bos_token_id before each document and prompt",
  )
  parser.add_argument("--out", metavar="FILE.json", help="write the result there (default: stdout)")
  add_flags(parser)
  parser.set_defaults(settings=[])
  return parser


def run(args: argparse.Namespace) -> int:
  """Measures; exit code 1 if a window's logits are not finite or a question's row failed."""
  with joined(args) as processes:
    given = processes.together(lambda: _read(args, processes))
    processes.agree(given.shown)
    result = {"schema": SCHEMA, "config": given.described, "perplexity": None, "exact_match": None}
    if given.text is not None:
      result["perplexity"] = _perplexity(given.text, args, processes)
    if given.quiz is not None:
      result["exact_match"] = _exact_match(given.quiz, args, processes)
    processes.together(lambda: _deliver(result, args, processes))
  return 0 if _is_sound(result) else 1


@dataclasses.dataclass(frozen=True)
class _Text:
  """What perplexity is of.

  Attributes:
    config: MaxText's HyperParameters.
    documents: Token ids.
    bos_id: Stands before each; None: nothing does.
    num_bytes: Of the text; None for ids.
    window: Tokens.
    stride: Tokens.
    num_windows: That makes.
    longest: Tokens of the longest window.
    lossless: Whether the tokenizer gives the text back; None for ids.
    rows_explicit: Whether the user has set how many windows are scored at once.
  """

  config: Any
  documents: list[list[int]]
  bos_id: int | None
  num_bytes: int | None
  window: int
  stride: int
  num_windows: int
  longest: int
  lossless: bool | None
  rows_explicit: bool


@dataclasses.dataclass(frozen=True)
class _Quiz:
  """What is asked.

  Attributes:
    config: MaxText's HyperParameters.
    questions: And their answers.
    texts: The prompts.
    prompts: The same as token ids, the bos included.
    tokenizer: Theirs.
    max_new_tokens: At most, a question.
    stops: Strings that end a completion.
  """

  config: Any
  questions: list[exact_match.Question]
  texts: list[str]
  prompts: list[list[int]]
  tokenizer: Tokenizer
  max_new_tokens: int
  stops: list[str]


@dataclasses.dataclass(frozen=True)
class _Given:
  """All that was given.

  Attributes:
    text: None if there is none.
    quiz: None if there is none.
    described: The config, for the result.
    shown: What must be the same in every process; nothing in one alone.
  """

  text: _Text | None
  quiz: _Quiz | None
  described: dict[str, Any]
  shown: dict[str, str]


# Flags that say how one of the two is measured.
_OF_TEXT = ("window", "stride")
_OF_QUESTIONS = ("limit", "max_new_tokens", "prompt", "few_shot", "stop")


def _read(args: argparse.Namespace, processes: Processes) -> _Given:
  _check_flags(args)
  if args.out and processes.first:
    check_writable(args.out)
  from kimi_k3.maxtext_adapter.settings import explicit_settings

  explicit = explicit_settings(args.config, args.settings)
  refuse_ignored(explicit)
  if "prompt" in explicit:
    raise InputError("prompt= given, which eval does not read: give --questions, or --prompt for a template")
  tokenizer = None
  if args.text or args.questions:
    tokenizer = find_tokenizer(args.config, explicit)
    if tokenizer is None:
      given = "--text" if args.text else "--questions"
      instead = "; --tokens takes ids" if args.text else ""
      raise InputError(
        f"{given} needs a tokenizer: no tiktoken.model or tokenizer.json in "
        f"{tokenizer_directory(args.config, explicit)}{instead}"
      )
  bos = bool(args.bos)
  if args.bos is None and tokenizer is not None:
    bos = _starts_with_bos(tokenizer_directory(args.config, explicit))
  own_bos = bos if args.text else bool(args.bos)  # ids are taken as they are
  text = _read_text(args, explicit, tokenizer, own_bos) if args.text or args.tokens else None
  quiz = _read_quiz(args, explicit, tokenizer, bos) if args.questions and tokenizer else None
  config = next(part.config for part in (text, quiz) if part is not None)
  shown: dict[str, str] = {}
  for name, part, rows in (("text", text, text and text.documents), ("questions", quiz, quiz and quiz.prompts)):
    if part is not None:
      shown |= {f"{key} ({name})": value for key, value in shown_by(processes, part.config, args, rows or []).items()}
  return _Given(text, quiz, _described(config, args), shown)


def _check_flags(args: argparse.Namespace) -> None:
  if not (args.text or args.tokens or args.questions):
    raise InputError("nothing to measure: give --text FILE.txt, --tokens FILE.json or --questions FILE.jsonl")
  if args.text and args.tokens:
    raise InputError("give either --text or --tokens, not both")
  for names, wanted, present in (
    (_OF_TEXT, "--text or --tokens", args.text or args.tokens),
    (_OF_QUESTIONS, "--questions", args.questions),
  ):
    for name in names:
      if getattr(args, name) is not None and not present:
        raise InputError(f"--{name.replace('_', '-')} given without {wanted}: leave it out")
  for name in ("limit", "max_new_tokens"):
    value = getattr(args, name)
    if value is not None and value < 1:
      raise InputError(f"--{name.replace('_', '-')} is {value}, expected 1 or more")
  if any(not stop for stop in args.stop or ()):
    raise InputError("--stop is empty, expected text: every completion would end before it starts")


def _read_text(args: argparse.Namespace, explicit: Mapping[str, Any], tokenizer: Tokenizer | None, bos: bool) -> _Text:
  from kimi_k3.maxtext_adapter.settings import read_config

  num_bytes = lossless = None
  if args.text:
    assert tokenizer is not None
    text = _read_file(args.text)
    documents, num_bytes = [tokenizer.encode(text)], len(text.encode())
    lossless = tokenizer.decode(documents[0]) == text
    if not lossless:
      print(
        f"note: {args.text}: the tokenizer does not give the text back: some of it is not measured", file=sys.stderr
      )
  else:
    documents = read_rows(args.tokens)
  config = read_config(args.config, args.settings)
  window, stride = check_window(args.window, args.stride, config.max_position_embeddings)
  check_vocabulary(documents, config.vocab_size, args.text or args.tokens)
  bos_id = config.bos_token_id if bos else None
  windows = cut_windows([len(document) + bos for document in documents], window, stride)
  longest = max(w.tokens for w in windows)
  given = "per_device_batch_size" in explicit
  return _Text(config, documents, bos_id, num_bytes, window, stride, len(windows), longest, lossless, given)


def _read_quiz(args: argparse.Namespace, explicit: Mapping[str, Any], tokenizer: Tokenizer, bos: bool) -> _Quiz:
  from kimi_k3.generate.lengths import cache_lengths
  from kimi_k3.generate.sampling import GREEDY
  from kimi_k3.maxtext_adapter.settings import read_config

  questions = exact_match.read_questions(args.questions)[: args.limit]
  template = exact_match.DEFAULT_PROMPT if args.prompt is None else _unescaped(args.prompt)
  texts = exact_match.prompts(questions, template, _examples(args.few_shot))
  new = _DEFAULT_NEW_TOKENS if args.max_new_tokens is None else args.max_new_tokens
  encoded = [tokenizer.encode(text) for text in texts]
  lengths = cache_lengths([[0] * (len(ids) + bos) for ids in encoded], new, explicit)
  rows = slots_a_device(len(encoded))
  config = read_config(args.config, args.settings, **lengths, per_device_batch_size=rows)
  if config.decode_sampling_strategy.value != GREEDY:
    raise InputError(
      f"decode_sampling_strategy is {config.decode_sampling_strategy.value!r}: exact match is greedy, leave it out"
    )
  check_vocabulary(encoded, config.vocab_size, args.questions)
  bos_id = config.bos_token_id if bos else None
  prompts = encoded if bos_id is None else [[bos_id, *ids] for ids in encoded]
  longest = config.max_position_embeddings
  for question, prompt in zip(questions, prompts, strict=True):
    if len(prompt) + new > longest:
      raise InputError(
        f"{args.questions}: line {question.line}: {len(prompt)} tokens and {new} new ones, expected {longest} at most "
        "(max_position_embeddings of the model): take fewer examples or a smaller --max-new-tokens"
      )
  stops = [_unescaped(stop) for stop in args.stop or [exact_match.DEFAULT_STOP]]
  return _Quiz(config, questions, texts, prompts, tokenizer, new, stops)


def _examples(given: Sequence[str] | None) -> list[exact_match.Question]:
  if given is None:
    return []
  path, count = given
  if not (count.isascii() and count.isdigit() and int(count)):
    raise InputError(f"--few-shot {path} {count}: expected a file and a number of examples, 1 or more")
  found = exact_match.read_questions(path)
  if len(found) < int(count):
    raise InputError(f"--few-shot: {path} holds {len(found)} examples, expected {count}")
  return found[: int(count)]


def _starts_with_bos(directory: Path) -> bool:
  """What tokenizer_config.json says of a document's start."""
  path = directory / "tokenizer_config.json"
  if not path.is_file():
    return False
  try:
    said = json.loads(path.read_bytes()).get("add_bos_token", False)
  except (ValueError, AttributeError) as error:
    raise InputError(f"{path}: cannot be read: {error}") from error
  if not isinstance(said, bool):
    raise InputError(f"{path}: add_bos_token is {said!r}, expected true or false")
  return said


def _read_file(path: str) -> str:
  try:
    text = Path(path).read_bytes().decode()
  except OSError as error:
    raise InputError(f"{path}: cannot be read: {error.strerror}") from error
  except UnicodeDecodeError as error:
    raise InputError(f"{path}: not UTF-8: {error.reason} at byte {error.start}; convert it first") from error
  if not text:
    raise InputError(f"{path}: is empty")
  return text


def _perplexity(given: _Text, args: argparse.Namespace, processes: Processes) -> dict[str, Any]:
  from tqdm import tqdm

  from kimi_k3.generate.lengths import bucket
  from kimi_k3.maxtext_adapter.scoring import make_scorer, rows_at_a_time

  width, explicit = bucket(given.longest), given.rows_explicit
  rows = processes.together(lambda: rows_at_a_time(given.config, given.num_windows, width, explicit=explicit))
  score = processes.together(lambda: make_scorer(given.config, args.check_placement))
  with (
    lost_processes(processes),
    tqdm(total=given.num_windows, unit="window", file=sys.stderr, disable=None if processes.first else True) as bar,
  ):
    found = perplexity(
      score,
      given.documents,
      window=given.window,
      stride=given.stride,
      rows=rows,
      bos_id=given.bos_id,
      padded=bucket,
      num_bytes=given.num_bytes,
      on_batch=bar.update,
    )
  return found | {"lossless": given.lossless}


def _exact_match(given: _Quiz, args: argparse.Namespace, processes: Processes) -> dict[str, Any]:
  from tqdm import tqdm

  from kimi_k3.generate.clock import CompileClock
  from kimi_k3.generate.loop import Request, generate
  from kimi_k3.maxtext_adapter.engine import make_engine

  engine = processes.together(lambda: make_engine(given.config, args.check_placement))
  stop_id = given.config.eos_token_id
  shown = None if processes.first else True
  with (
    lost_processes(processes),
    tqdm(total=len(given.prompts), unit="question", file=sys.stderr, disable=shown) as bar,
  ):
    rows, timing = generate(
      engine,
      [Request(i, prompt, given.max_new_tokens) for i, prompt in enumerate(given.prompts)],
      stop_ids=(stop_id,),
      clock=CompileClock(),
      ends=_ends_at(given.stops, given.tokenizer),
      steps_per_call=_STEPS_BETWEEN_STOPS,
      on_finished=lambda _: bar.update(),
    )
  if processes.first:
    print(f"{len(rows)} questions on {engine.num_slots} slots: {timing.summary()}", file=sys.stderr)
  completions = []
  for row in rows:
    ids = row.ids[:-1] if row.ids and row.ids[-1] == stop_id else row.ids
    completions.append(exact_match.cut_at(given.tokenizer.decode(ids), given.stops))
  return exact_match.grade(given.questions, given.texts, completions, [row.error for row in rows])


def _ends_at(stops: Sequence[str], tokenizer: Tokenizer):
  """Whether the text of ids has come to a stop string: looked for in its end, as it is asked after each token."""
  tail = 2 * max(len(stop.encode()) for stop in stops) + 8  # tokens; one has a byte or more

  def ends(ids: list[int]) -> bool:
    text = tokenizer.decode(ids[-tail:])
    return any(stop in text for stop in stops)

  return ends


def _described(config: Any, args: argparse.Namespace) -> dict[str, Any]:
  import jax

  return {
    "file": args.config,
    "settings": list(args.settings),
    "dtype": str(config.dtype),
    "matmul_precision": getattr(config.matmul_precision, "value", config.matmul_precision),
    "partitioning": config.partitioning,
    "scan_layers": config.scan_layers,
    "devices": jax.device_count(),
  }


def _is_sound(result: Mapping[str, Any]) -> bool:
  text, quiz = result["perplexity"], result["exact_match"]
  sound = text is None or not text["windows_not_finite"]
  return sound and (quiz is None or all(row["error"] is None for row in quiz["rows"]))


def _deliver(result: dict[str, Any], args: argparse.Namespace, processes: Processes) -> None:
  if not processes.first:
    return
  encoded = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
  if args.out is None:
    print(encoded)
  else:
    write_whole(args.out, lambda file: file.write(f"{encoded}\n".encode()))
  to = sys.stdout if args.out else sys.stderr
  if text := result["perplexity"]:
    print(_line_of_text(text), file=to)
    if faulty := text["windows_not_finite"]:
      print(f"kimi-k3: window(s) {', '.join(map(str, faulty))} hold logits that are not finite", file=sys.stderr)
  if quiz := result["exact_match"]:
    print(
      "exact match: "
      + ", ".join(f"{name} {quiz['correct'][name]} of {quiz['total']} ({quiz[name]:.1%})" for name in quiz["correct"]),
      file=to,
    )
    if failed := [str(row["id"]) for row in quiz["rows"] if row["error"] is not None]:
      print(f"kimi-k3: question(s) {', '.join(failed)} failed: logits that are not finite", file=sys.stderr)


def _line_of_text(text: Mapping[str, Any]) -> str:
  counted = f"{text['predicted']} of {text['tokens']} tokens in {text['windows']} windows of {text['window']}"
  where = f"{counted}, stride {text['stride']}"
  if text["nats_per_token"] is None:
    return f"perplexity: none, {where}"
  bits = "" if text["bits_per_byte"] is None else f", {text['bits_per_byte']:.4f} bits a byte"
  found = math.inf if text["perplexity"] is None else text["perplexity"]
  return f"perplexity {found:.6g} ({text['nats_per_token']:.4f} nats a token{bits}): {where}"


def _unescaped(text: str) -> str:
  return text.replace("\\n", "\n")


def _shown(text: str) -> str:
  return text.replace("\n", "\\n")
