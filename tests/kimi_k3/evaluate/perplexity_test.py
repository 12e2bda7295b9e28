"""Windows and the arithmetic of perplexity, with a scorer whose answers are known."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from kimi_k3.errors import InputError
from kimi_k3.evaluate.perplexity import Scores, Window, check_window, cut_windows, perplexity


@pytest.mark.parametrize(
  ("lengths", "window", "stride", "expected"),
  [
    ([2], 8, 8, [Window(0, 0, 1, 1)]),
    ([9], 8, 8, [Window(0, 0, 8, 8)]),
    ([10], 8, 8, [Window(0, 0, 8, 8), Window(0, 8, 1, 1)]),
    ([11], 4, 2, [Window(0, 0, 4, 4), Window(0, 2, 4, 2), Window(0, 4, 4, 2), Window(0, 6, 4, 2)]),
    ([10], 4, 3, [Window(0, 0, 4, 4), Window(0, 3, 4, 3), Window(0, 6, 3, 2)]),
    ([3, 1, 4], 2, 2, [Window(0, 0, 2, 2), Window(2, 0, 2, 2), Window(2, 2, 1, 1)]),
  ],
)
def test_windows_are_these(lengths, window, stride, expected):
  assert cut_windows(lengths, window, stride) == expected


def predicted_from(window: Window) -> list[tuple[int, int]]:
  """Each counted token of a window's document, and how many tokens it is predicted from."""
  last = window.start + window.tokens
  return [(token, token - window.start) for token in range(last - window.counted + 1, last + 1)]


@pytest.mark.parametrize("length", [2, 3, 9, 30])
@pytest.mark.parametrize("window", [1, 2, 7, 40])
def test_every_token_but_the_first_counts_once_and_has_the_context_promised(length, window):
  for stride in range(1, window + 1):
    found = [pair for w in cut_windows([length], window, stride) for pair in predicted_from(w)]
    assert [token for token, _ in found] == list(range(1, length))
    assert all(min(token, window - stride + 1) <= context <= window for token, context in found)


@pytest.mark.parametrize("length", [2, 3, 9, 30])
@pytest.mark.parametrize("window", [1, 2, 7, 40])
def test_the_windows_are_those_of_hugging_face_with_one_token_more(length, window):
  """Its loop: spans [begin, end), of which the last end - previous end are labels; the first token never is one."""
  for stride in range(1, window + 1):
    spans, previous = [], 1
    for begin in range(0, length, stride):
      end = min(begin + window + 1, length)
      spans.append((begin, end, end - previous))
      previous = end
      if end == length:
        break
    assert spans == [(w.start, w.start + w.tokens + 1, w.counted) for w in cut_windows([length], window, stride)]


def test_documents_of_one_token_have_nothing_to_predict():
  with pytest.raises(InputError, match=r"nothing to predict: .*; give a longer text, or --bos"):
    cut_windows([1, 1], 4, 4)


@pytest.mark.parametrize(
  ("window", "stride", "longest", "expected"),
  [
    (None, None, 4096, (2048, 2048)),
    (None, None, 512, (512, 512)),
    (None, 100, 512, (512, 100)),
    (64, None, 512, (64, 64)),
    (512, 1, 512, (512, 1)),
  ],
)
def test_window_and_stride_have_defaults(window, stride, longest, expected):
  assert check_window(window, stride, longest) == expected


@pytest.mark.parametrize(
  ("window", "stride", "said"),
  [
    (513, None, "--window is 513, expected 1 to 512 (max_position_embeddings of the model)"),
    (0, None, "--window is 0, expected 1 to 512"),
    (64, 65, "--stride is 65, expected 1 to the window of 64"),
    (64, 0, "--stride is 0, expected 1 to the window of 64"),
    (None, 513, "--stride is 513, expected 1 to the window of 512"),
  ],
)
def test_a_window_that_cannot_be_is_refused(window, stride, said):
  with pytest.raises(InputError, match=re.escape(said)):
    check_window(window, stride, 512)


class Context:
  """A scorer: a target's nll is its id plus a hundredth of the tokens before it. Token 99 breaks its window.

  Pads are NaN.
  """

  def __init__(self):
    self.shapes = []

  def __call__(self, inputs, targets, lengths) -> Scores:
    self.shapes.append(inputs.shape)
    before = np.arange(1, inputs.shape[1] + 1)
    pads = before > lengths[:, None]
    nll = np.where(pads, np.nan, targets + before / 100).astype(np.float32)
    margin = np.where(pads, np.nan, targets / 1000).astype(np.float32)
    return Scores(nll, margin, ~((inputs == 99) & ~pads).any(axis=1))


DOCUMENTS = [[5, 1, 2, 3, 4, 6], [7], [8, 9]]


def test_nats_are_summed_over_what_counts_in_each_window():
  found = perplexity(Context(), DOCUMENTS, window=3, stride=2, rows=2)
  # Document 0: tokens 1 2 3 from 1, 2, 3 before them; then 4 6 from 2, 3 more of a window that starts at place 2.
  nats = (1 + 2 + 3 + 4 + 6) + (1 + 2 + 3 + 2 + 3) / 100 + 9 + 1 / 100
  assert found["nats"] == pytest.approx(nats, rel=1e-6)  # each of six numbers is float32
  assert found["nats_per_token"] == pytest.approx(nats / 6, rel=1e-6)
  assert found["perplexity"] == pytest.approx(math.exp(nats / 6), rel=1e-5)
  assert found["bits_per_byte"] is None
  counts = {name: found[name] for name in ("tokens", "predicted", "documents", "windows", "window", "stride", "bos")}
  assert counts == {
    "tokens": 9, "predicted": 6, "documents": 3, "windows": 3, "window": 3, "stride": 2, "bos": False,
  }  # fmt: skip


def test_with_bos_every_token_is_predicted():
  found = perplexity(Context(), DOCUMENTS, window=10, stride=10, rows=1, bos_id=50)
  assert (found["tokens"], found["predicted"], found["windows"], found["bos"]) == (9, 9, 3, True)
  nats = sum(map(sum, DOCUMENTS)) + (1 + 2 + 3 + 4 + 5 + 6 + 1 + 1 + 2) / 100
  assert found["nats"] == pytest.approx(nats, rel=1e-6)


def test_bits_a_byte_are_of_the_whole_text():
  found = perplexity(Context(), [[1, 2, 3]], window=4, stride=4, rows=1, num_bytes=11)
  assert found["bytes"] == 11
  assert found["bits_per_byte"] == pytest.approx(found["nats"] / math.log(2) / 11, rel=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
@pytest.mark.parametrize("width", [3, 16])
def test_batches_and_padding_change_nothing_and_have_one_shape(rows, width):
  plain, batched = Context(), Context()
  expected = perplexity(plain, DOCUMENTS, window=3, stride=2, rows=1)
  done = []
  found = perplexity(batched, DOCUMENTS, window=3, stride=2, rows=rows, padded=lambda _: width, on_batch=done.append)
  assert found == expected
  assert set(batched.shapes) == {(rows, width)}
  assert sum(done) == 3


def test_margins_say_how_often_two_logits_are_nearly_equal():
  found = perplexity(Context(), [[9, 0, 5, 20, 50, 200]], window=8, stride=8, rows=1)
  assert found["margins"] == {
    "smallest": 0.0,
    "median": pytest.approx(0.02, rel=1e-6),
    "share_below": {"0.001": 0.2, "0.01": 0.4, "0.1": 0.8},
  }


def test_windows_that_are_not_finite_are_named_and_there_is_no_perplexity():
  found = perplexity(Context(), [[1, 2, 3, 4, 99, 6, 7]], window=2, stride=2, rows=2)
  assert found["windows_not_finite"] == [2]
  names = ("perplexity", "nats_per_token", "bits_per_byte", "nats", "margins")
  assert [found[name] for name in names] == [None] * len(names)
  assert (found["predicted"], found["windows"]) == (6, 3)


def test_a_perplexity_beyond_float64_is_none_beside_its_logarithm():
  found = perplexity(Context(), [[1, 100000]], window=2, stride=2, rows=1)
  assert found["perplexity"] is None
  assert found["nats_per_token"] == pytest.approx(100000.01)
  json.dumps(found, allow_nan=False)
