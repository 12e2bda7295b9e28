"""Makes the stored text of the nano model out of the documentation that CPython itself carries.

    python scripts/train_tiny/corpus.py tests/golden/k3-nano/text

Writes train.txt, held-out.txt and LICENSE. The text differs from one release of Python to the next, so it was made
once, with Python 3.12.1, and is stored: training reads the stored files and never runs this.

A document is a topic of `pydoc_data.topics` (the language reference) or a module of the standard library: its
docstrings, each below its signature, as the reference shows signatures. Two empty lines part documents. Every 20th
document of either kind is held out, and what it says is in no other: a paragraph is kept once, held-out ones first.
"""

from __future__ import annotations

import argparse
import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SEPARATOR = "\n\n\n"
HELD_OUT_EVERY = 20
HELD_OUT_FIRST = 7  # counted from 0
SHORTEST_DOCUMENT = 300  # characters; what is left of most topics that are sections of larger ones is shorter
SHORTEST_DOCSTRING = 60  # shorter ones say "See base class."
SHORTEST_REPEAT = 40  # shorter paragraphs may come again: "For example:"
FULL_LINE = 50  # wrapped prose fills its lines further than this; code hardly does

# Not the library itself, or the same text a second time.
_SKIPPED = re.compile(
  r"(^|/)(test|idlelib|site-packages|ensurepip|lib2to3|turtledemo|pydoc_data|tkinter|config-[^/]*)/|(^|/)_(?!_init__)"
)

# Sessions, grammar, tables and addresses read as noise; a path of someone's machine belongs in no file of this project.
_NOISE = re.compile(r"(?m)>>>|::=|https?:|^\s*[|+][-=| ]|/(?:work|farm|root|home|Users|tmp|opt|mnt)/|[p]ypi\.org")
_TEXT = re.compile(r"[\n -~]*")
_RULE = re.compile(r"^\s*([*=~^+\"'-])\1{2,}\s*$")
_BULLET = re.compile(r"^(\s*)([*-]|\(?\w{1,2}[.)])\s+(?=\S)")

# What stands above some paragraphs and goes with them, and the paragraphs.
type Entry = tuple[list[str], list[str]]


def main() -> None:
  """Writes the three files and says how large they are."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
  parser.add_argument("out", type=Path)
  out = parser.parse_args().out
  topics, modules = dict(_topics()), dict(_modules())
  held_out = [*_every_20th(topics), *_every_20th(modules)]
  documents = topics | modules
  rest = [*sorted(topics, key=lambda name: -len(topics[name][0][1])), *modules]  # the larger topic has the whole
  kept = _kept_once([*held_out, *rest], documents)
  out.mkdir(parents=True, exist_ok=True)
  for name, members in {"held-out": held_out, "train": [n for n in documents if n not in held_out]}.items():
    texts = [text for m in members if len(text := "\n\n".join(kept[m])) >= SHORTEST_DOCUMENT]
    size = (out / f"{name}.txt").write_text(SEPARATOR.join(texts) + "\n")
    print(f"{out / name}.txt: {len(texts)} documents, {size} bytes")
  licence = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
  (out / "LICENSE").write_text(licence.read_text())


def _every_20th(documents: dict[str, list[Entry]]) -> list[str]:
  return sorted(documents)[HELD_OUT_FIRST::HELD_OUT_EVERY]


def _kept_once(order: list[str], documents: dict[str, list[Entry]]) -> dict[str, list[str]]:
  """Paragraphs of each document that none before it in `order` has, nor itself before."""
  seen: set[str] = set()
  kept: dict[str, list[str]] = {}
  for name in dict.fromkeys(order):
    kept[name] = []
    for signature, paragraphs in documents[name]:
      new = [p for p in paragraphs if len(plain := " ".join(p.split())) < SHORTEST_REPEAT or plain not in seen]
      seen.update(" ".join(p.split()) for p in new)
      kept[name] += [*signature, *new] if new else []
  return kept


def _topics() -> Iterator[tuple[str, list[Entry]]]:
  from pydoc_data import topics

  for name, text in sorted(topics.topics.items()):
    yield f"topic {name}", [([], _paragraphs(text))]


def _modules() -> Iterator[tuple[str, list[Entry]]]:
  """Docstrings of each module of the standard library that is public, of its public classes and functions."""
  library = Path(sysconfig.get_paths()["stdlib"])
  for path in sorted(library.rglob("*.py")):
    relative = path.relative_to(library).as_posix()
    if _SKIPPED.search(relative):
      continue
    name = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    tree = ast.parse(path.read_text())
    entries: list[Entry] = [([f'The "{name}" module'], _paragraphs(ast.get_docstring(tree) or ""))]
    for signature, docstring in _docstrings(tree, ""):
      if len(docstring) >= SHORTEST_DOCSTRING:
        entries.append(([signature], [re.sub(r"(?m)^(?=.)", "   ", p) for p in _paragraphs(docstring)]))
    yield f"module {name}", entries


def _docstrings(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
  for child in ast.iter_child_nodes(node):
    if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or child.name.startswith("_"):
      continue
    docstring = ast.get_docstring(child) or ""
    if isinstance(child, ast.ClassDef):
      yield f"class {child.name}", docstring
      yield from _docstrings(child, f"{child.name}.")
    else:
      arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(child.args))
      yield f"{prefix}{child.name}({arguments})", docstring


def _paragraphs(text: str) -> list[str]:
  """Blocks between empty lines, without lines of rules and noise, wrapped prose joined to one line."""
  lines = [line.rstrip().expandtabs() for line in text.split("\n")]
  blocks = re.split(r"\n{2,}", "\n".join(line for line in lines if not _RULE.match(line)).strip("\n"))
  return [_joined(b) for b in blocks if _TEXT.fullmatch(b) and b.strip() and not _NOISE.search(b)]


def _joined(block: str) -> str:
  """A paragraph of prose as one line; anything else as it is."""
  lines = block.split("\n")
  if len(lines) == 1:
    return block
  indents = [len(line) - len(line.lstrip()) for line in lines]
  bullet = _BULLET.match(lines[0])
  first = len(bullet.group()) if bullet else indents[0]
  same = all(indent == first for indent in indents[1:])
  full = all(len(line) >= FULL_LINE for line in lines[:-1])
  if not (same and full):
    return block
  joined = lines[0] + "".join(f" {line.strip()}" for line in lines[1:])
  return re.sub(r"(?<=[.!?:]) {2}(?=\S)", " ", re.sub(r"(?<=[a-z]-) (?=[a-z])", "", joined))


if __name__ == "__main__":
  main()
