"""Loading a converted checkpoint into its devices, against reading the same files.

    python benchmarks/bench_load.py --out load.json
    python benchmarks/bench_load.py --preset k3 --config OUT/decode.yml partitioning=manual

Every call begins with the checkpoint's files dropped from this machine's page cache. Loading compares tree, shapes and
checksums on the way, as `kimi-k3 decode` does; nothing of that is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import models
import workloads
from bench_convert import drop, files, size
from checks import Work

from kimi_k3.errors import InputError

REPEATS = {"tiny": 5, "k3": 3}
_READ_BYTES = 16 * 2**20  # at a time


def main(argv: Sequence[str]) -> int:
  """Times both, in turns."""
  parser = harness.parser(__doc__)
  models.add_config(parser)
  args = parser.parse_args(argv)
  args.repeats = REPEATS[args.preset] if args.repeats is None else args.repeats
  session = harness.session("load", args)
  with models.checkpoint(args) as path:
    work = workloads.of_preset(workloads.GENERATIONS, args.preset)[0]
    sizes = {"slots": work.slots, "max_prompt": work.max_prompt, "max_length": work.max_length}
    config = models.read_config(path, args.settings, **sizes)
    items = items_of(config)
    stored = size(items)
    shapes: list[Any] = []

    def fresh() -> None:
      shapes[:] = [model_of(config)]
      drop(items)

    subjects = [
      harness.Procedure("read files", lambda _: read(items), Work(), before=lambda: drop(items)),
      harness.Procedure("load", lambda _: load(config, shapes.pop()), Work(), before=fresh),
    ]
    session.compare(f"load {stored} bytes", subjects, axes={"bytes": stored})
  return session.finish()


def items_of(config: Any) -> Path:
  """Returns the checkpoint's directory. Raises InputError for a bucket, whose caches are not this machine's."""
  from kimi_k3.maxtext_adapter.engine import checkpoint_path

  path = checkpoint_path(config)
  if "://" in path:
    raise InputError(f"load_parameters_path is {path}: expected a directory: mount the bucket")
  return Path(path)


def read(items: Path) -> int:
  """Reads every file and returns their bytes."""
  total = 0
  for path in files(items):
    with path.open("rb", buffering=0) as file:
      while part := file.read(_READ_BYTES):
        total += len(part)
  return total


def model_of(config: Any) -> Any:
  """Returns the model as shapes, which loading fills in."""
  if config.partitioning == "manual":
    from kimi_k3.maxtext_adapter.spmd_engine import build_model

    return build_model(config, None)
  from flax import nnx
  from maxtext.common.common_types import MODEL_MODE_TRAIN

  from kimi_k3.maxtext_adapter.engine import abstract_model

  _, abstract = abstract_model(config, MODEL_MODE_TRAIN)
  return nnx.split(abstract, nnx.Param, ...)[1]


def load(config: Any, model: Any) -> Any:
  """Returns the parameters, each where its sharding puts it."""
  if config.partitioning == "manual":
    from kimi_k3.maxtext_adapter import spmd_engine

    return spmd_engine.load(model, config, None)
  from flax import nnx

  from kimi_k3.maxtext_adapter.checkpoint import load_params, storage_settings
  from kimi_k3.maxtext_adapter.engine import checkpoint_path

  return nnx.to_pure_dict(load_params(checkpoint_path(config), model, storage_settings(config)))


if __name__ == "__main__":
  harness.exit_with(main, __file__)
