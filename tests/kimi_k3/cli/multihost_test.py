"""Flags of several processes that are refused before any process is looked for, and what one process makes of them."""

from __future__ import annotations

import contextlib

import pytest

from kimi_k3.cli.main import main

DECODE = ("decode", "none.yml", "--prompt-ids", "none.json")
LOGITS = ("logits", "none.yml", "--tokens", "none.json", "--out", "none.npz")


@pytest.mark.parametrize("verb", [DECODE, LOGITS])
@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (
      ("--multihost", "4"),
      "--multihost is '4', expected auto or ADDRESS:PORT,COUNT,ID such as 10.0.0.2:8476,4,0",
    ),
    (
      ("--multihost", "auto", "--multihost-timeout", "0"),
      "--multihost-timeout is 0, expected seconds above 0 and below 1000000",
    ),
    (
      ("--multihost-timeout", "5"),
      "--multihost-timeout given without --multihost: leave it out, or say where the processes meet",
    ),
  ],
)
def test_flags_that_say_nothing_are_refused_before_a_file_is_read(refused, verb, flags, said):
  assert refused(*verb, *flags) == said


def test_placement_is_not_checked_where_the_compiler_partitions(refused, five_layers, ids_file):
  said = "partitioning is auto, which it is not for: set partitioning=manual"
  words = (five_layers / "decode.yml", "--prompt-ids", ids_file(), "--check-placement", "all")
  assert refused("decode", *words) == f"--check-placement all: {said}"


def test_the_help_names_the_ways_to_meet(capsys):
  for verb in ("decode", "logits"):
    with contextlib.suppress(SystemExit):
      main([verb, "--help"])
    said = capsys.readouterr().out
    assert "--multihost auto|ADDRESS:PORT,COUNT,ID" in said
    assert "docs/multihost.md" in said
