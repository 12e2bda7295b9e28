"""Perplexity: exp of the mean negative log-likelihood of a token, each predicted once, in windows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from kimi_k3.errors import InputError

DEFAULT_WINDOW = 2048  # tokens: what published perplexities mostly use
MARGINS = (1e-3, 1e-2, 1e-1)  # of the two largest logits


class Scores(NamedTuple):
  """Of a batch of windows; what stands at pads means nothing.

  Attributes:
    nll: Negative log-likelihood of each target, nats.
    margin: Largest minus second largest logit.
    finite: Whether all logits of the window's real positions are.
  """

  nll: Float[np.ndarray, "B T"]
  margin: Float[np.ndarray, "B T"]
  finite: Bool[np.ndarray, " B"]


@runtime_checkable
class Scorer(Protocol):
  """A model that says what it thinks of each next token."""

  def __call__(
    self, inputs: Int[np.ndarray, "B T"], targets: Int[np.ndarray, "B T"], lengths: Int[np.ndarray, " B"]
  ) -> Scores:
    """Returns the scores of targets [b, t] after inputs [b, 0] to [b, t], the first `lengths` of a row being real."""
    ...


@dataclasses.dataclass(frozen=True)
class Window:
  """Tokens that are given to the model at once, and how many of what it then predicts counts.

  Attributes:
    document: Which one.
    start: Place of its first token in the document.
    tokens: That are given; each is followed by a prediction.
    counted: The last ones, which no window before has predicted.
  """

  document: int
  start: int
  tokens: int
  counted: int


def cut_windows(lengths: Sequence[int], window: int, stride: int) -> list[Window]:
  """Returns the windows of documents of these lengths: every token of a document but its first counts once.

  A window starts `stride` tokens after the one before and is given `window` tokens, fewer at the end of a document. Its
  last predictions count, `stride` of them or all in the first window: so each is made from at least
  `window - stride + 1` tokens, where the document has as many. These are the windows of Hugging Face's strided
  perplexity (https://huggingface.co/docs/transformers/perplexity) with max_length = window + 1.

  Args:
    lengths: Tokens of each document, the one for its start included. A document of one has no window.
    window: Tokens given at once.
    stride: Between the starts of two windows, 1 to `window`.

  Raises:
    InputError: if there is nothing to predict.
  """
  assert 1 <= stride <= window
  windows = []
  for document, length in enumerate(lengths):
    last, counted_to = length - 1, 0
    for start in range(0, last, stride):
      end = min(start + window, last)
      windows.append(Window(document, start, end - start, end - counted_to))
      counted_to = end
      if end == last:
        break
  if not windows:
    raise InputError("nothing to predict: no document has a token that another precedes; give a longer text, or --bos")
  return windows


def check_window(window: int | None, stride: int | None, longest: int) -> tuple[int, int]:
  """Returns window and stride, the defaults filled in: 2048 or as many as the model takes, and no overlap.

  Raises:
    InputError: if the window is longer than the model's max_position_embeddings, or the stride than the window.
  """
  found = min(DEFAULT_WINDOW, longest) if window is None else window
  if not 1 <= found <= longest:
    raise InputError(f"--window is {found}, expected 1 to {longest} (max_position_embeddings of the model)")
  step = found if stride is None else stride
  if not 1 <= step <= found:
    raise InputError(f"--stride is {step}, expected 1 to the window of {found}: what lies between would not be counted")
  return found, step


def perplexity(
  score: Scorer,
  documents: Sequence[Sequence[int]],
  *,
  window: int,
  stride: int,
  rows: int,
  bos_id: int | None = None,
  padded: Callable[[int], int] = lambda tokens: tokens,
  num_bytes: int | None = None,
  on_batch: Callable[[int], object] = lambda _: None,
) -> dict[str, Any]:
  """Returns perplexity and what belongs to it, as JSON; see docs/eval.md for each field.

  Sums are float64. A window with logits that are not finite is listed, and then there is no perplexity.

  Args:
    score: The model.
    documents: Token ids.
    window: See cut_windows.
    stride: See cut_windows.
    rows: Windows that are scored at once; the last batch is filled up with windows of no token.
    bos_id: Is put in front of each document, so that its first token is predicted too; None: nothing is.
    padded: Tokens of the longest window to the length of all arrays, so that one program serves all of them.
    num_bytes: Of the text, as UTF-8; None: not known.
    on_batch: Called with the number of windows done, after each batch.

  Raises:
    InputError: if there is nothing to predict.
  """
  before = [] if bos_id is None else [bos_id]
  arrays = [np.array([*before, *document], np.int32) for document in documents]
  windows = cut_windows([array.size for array in arrays], window, stride)
  width = padded(max(w.tokens for w in windows))
  nats, margins, faulty = [], [], []
  for first in range(0, len(windows), rows):
    batch = windows[first : first + rows]
    scores = score(*_batch(arrays, batch, rows, width))
    for row, (w, finite) in enumerate(zip(batch, scores.finite, strict=False)):
      counted = slice(w.tokens - w.counted, w.tokens)
      nll = scores.nll[row, counted]
      if not (finite and np.isfinite(nll).all()):
        faulty.append(first + row)
      nats.append(nll.sum(dtype=np.float64))
      margins.append(scores.margin[row, counted])
    on_batch(len(batch))
  predicted = sum(w.counted for w in windows)
  return {
    **_values(math.fsum(nats), predicted, num_bytes, margins if not faulty else None),
    "tokens": sum(map(len, documents)),
    "predicted": predicted,
    "documents": len(documents),
    "bos": bos_id is not None,
    "bytes": num_bytes,
    "windows": len(windows),
    "window": window,
    "stride": stride,
    "windows_not_finite": faulty,
  }


def _batch(
  documents: Sequence[np.ndarray], windows: Sequence[Window], rows: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  inputs, targets, lengths = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.int32), np.zeros(rows, int)
  for row, w in enumerate(windows):
    tokens = documents[w.document][w.start : w.start + w.tokens + 1]
    inputs[row, : w.tokens], targets[row, : w.tokens], lengths[row] = tokens[:-1], tokens[1:], w.tokens
  return inputs, targets, lengths.astype(np.int32)


def _values(nats: float, predicted: int, num_bytes: int | None, margins: list[np.ndarray] | None) -> dict[str, Any]:
  if margins is None:
    return dict.fromkeys(("perplexity", "nats_per_token", "bits_per_byte", "nats", "margins"))
  mean = nats / predicted
  return {
    "perplexity": math.exp(mean) if mean < math.log(np.finfo(np.float64).max) else None,  # JSON has no infinity
    "nats_per_token": mean,
    "bits_per_byte": nats / math.log(2) / num_bytes if num_bytes else None,
    "nats": nats,
    "margins": _margins(np.concatenate(margins)),
  }


def _margins(margins: np.ndarray) -> dict[str, Any]:
  """How near to a tie the model's first choice is."""
  return {
    "smallest": float(margins.min()),
    "median": float(np.median(margins)),
    "share_below": {f"{limit:g}": float((margins < limit).mean()) for limit in MARGINS},
  }
