"""`kimi-k3 VERB`: parses the command line and turns errors into exit codes, once.

Exit codes: 0 done; 1 done, but a row, leaf or check failed; 2 bad input or refused.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from kimi_k3.errors import LOST_PROCESS_CODE, InputError, LostProcess

VERBS = ("convert", "verify", "export", "inspect", "slice", "decode", "batch", "logits", "eval", "plan", "run")
# What people look for and does not exist, each with the reason.
_REFUSED_VERBS = {"serve": "there is no server; use batch for many prompts"}

_EPILOG = """\
examples:
  kimi-k3 convert Kimi-K3/ OUT/
  kimi-k3 verify Kimi-K3/ OUT/ --report verified.json
  kimi-k3 export OUT/ HF_DIR/ --vision-from Kimi-K3/
  kimi-k3 inspect Kimi-K3/
  kimi-k3 slice Kimi-K3/ OUT/ --layers 0-7 --experts 64
  kimi-k3 decode OUT/decode.yml --prompt-ids prompts.json --max-new-tokens 64
  kimi-k3 batch OUT/decode.yml --in prompts.jsonl --out completions.jsonl
  kimi-k3 logits OUT/decode.yml --tokens prompts.json --out logits.npz
  kimi-k3 eval OUT/decode.yml --text held-out.txt
  kimi-k3 plan configs/models/kimi-k3.yml --topology tpu7x:2x2x4 --decode 64,8192
  kimi-k3 run maxtext.checkpoint_conversion.inspect_checkpoint maxtext model_name=kimi-k3 scan_layers=true

`kimi-k3 VERB --help` explains each.
"""


class Parser(argparse.ArgumentParser):
  """A parser whose errors are one line."""

  def __init__(self, **kwargs):
    super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter} | kwargs)

  def error(self, message: str):
    """Raises what `main` prints."""
    raise InputError(f"{message} (see `{self.prog} --help`)")


def build_parser() -> Parser:
  """Returns the parser of all verbs."""
  parser = Parser(
    prog="kimi-k3",
    description="Kimi K3 on MaxText: convert a released checkpoint, decode with it, measure it.",
    epilog=_EPILOG,
  )
  subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
  for verb in VERBS:
    module = importlib.import_module(f"kimi_k3.cli.{verb}")
    module.add_parser(subparsers).set_defaults(run=module.run)
  return parser


# Set before JAX and transformers are imported: notes about devices and about PyTorch's absence are not the user's.
_QUIET_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "1", "TRANSFORMERS_VERBOSITY": "error"}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one verb and returns its exit code."""
  argv = sys.argv[1:] if argv is None else list(argv)
  for name, value in _QUIET_ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  _make_streams_safe()
  try:
    if argv and argv[0] in _REFUSED_VERBS:
      raise InputError(f"{argv[0]}: {_REFUSED_VERBS[argv[0]]}")
    args = _parse(build_parser(), argv)
    with _ended_by_interrupt(args.verb):
      code = args.run(args)
    sys.stdout.flush()  # here, where a full disk behind it is still told
    return code
  except InputError as error:
    print(f"kimi-k3: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("kimi-k3: interrupted", file=sys.stderr)
    return 130
  except BrokenPipeError:  # the reader of our output has gone
    sys.stderr.close()
    return 141
  except LostProcess as error:
    print(f"kimi-k3: error: {' '.join(str(error).split())}", file=sys.stderr)
    return LOST_PROCESS_CODE
  except OSError as error:  # a full disk behind stdout, a file gone while it was read
    print(f"kimi-k3: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 1


# Those that run JAX for long and leave nothing half-written.
_ENDED_AT_ONCE = ("decode", "logits", "eval", "plan")


@contextlib.contextmanager
def _ended_by_interrupt(verb: str) -> Iterator[None]:
  """Ends a verb of _ENDED_AT_ONCE on Ctrl-C, by a thread of its own.

  Python runs a handler when the main thread is back from C++, and a compile takes minutes; the exception that it raises
  there can fall into a callback of JAX's, which drops it.
  """
  if verb not in _ENDED_AT_ONCE or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
    yield
    return
  told, tell = os.pipe()
  os.set_blocking(tell, False)

  def wait() -> None:
    with open(told, "rb", buffering=0) as numbers:
      while number := numbers.read(1):
        if number[0] == signal.SIGINT:
          os.write(2, b"kimi-k3: interrupted\n")
          os._exit(130)

  try:
    before = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
  except ValueError:  # not the main thread, which gets no signals
    os.close(told)
    os.close(tell)
    yield
    return
  signal.signal(signal.SIGINT, lambda *_: None)
  threading.Thread(target=wait, daemon=True).start()
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(before)
    os.close(tell)


def _make_streams_safe() -> None:
  """A closed stream takes what is written to it; a name that the terminal cannot show is escaped, not an error."""
  for name in ("stdout", "stderr"):
    stream = getattr(sys, name)
    if stream is None:
      setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for the rest of the process)
    elif hasattr(stream, "reconfigure"):
      stream.reconfigure(errors="backslashreplace")


def _parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
  """Parses; what argparse leaves over is key=value for the verbs that take settings, and an error otherwise."""
  args, rest = parser.parse_known_args(argv)
  if not hasattr(args, "settings"):
    if rest:
      raise InputError(f"unrecognized arguments: {' '.join(rest)} (see `kimi-k3 {args.verb} --help`)")
    return args
  unknown = [a for a in rest if a.startswith("-") or "=" not in a]
  if unknown:
    raise InputError(
      f"unrecognized arguments: {' '.join(unknown)} (settings are key=value; see `kimi-k3 {args.verb} --help`)"
    )
  args.settings = rest
  return args


if __name__ == "__main__":
  sys.exit(main())
