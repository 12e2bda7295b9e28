"""Keeping MaxText's chatter off stdout, which belongs to results, and off a stderr that should say one thing."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Drops what is printed, logged below an error, or warned of while MaxText is imported or builds something."""
  os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # no Google Cloud client is needed to run a model
  previous = logging.root.manager.disable
  logging.disable(logging.WARNING)
  try:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
      warnings.simplefilter("ignore")
      yield
  finally:
    logging.disable(previous)
