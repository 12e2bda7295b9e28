"""The whole model: prefill by length and a decoding step by rows and context, with the bytes that must be moved.

    python benchmarks/bench_model.py --out model.json
    python benchmarks/bench_model.py --preset k3 --config OUT/decode.yml partitioning=manual     released sizes

A decoding step is one of many in one program, as `kimi-k3 decode` runs it. Its bound is of the bytes of one device: all
weights that a token needs, experts as expected of even choices, states, and the latents of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bench_decode_loop
import harness
import models
import workloads
from checks import Work


def main(argv: Sequence[str]) -> int:
  """Runs the workloads of a preset."""
  parser = harness.parser(__doc__)
  harness.add_only(parser)
  models.add_config(parser)
  args = parser.parse_args(argv)
  session = harness.session("model", args)
  with models.checkpoint(args) as path:
    for work in harness.chosen(workloads.GENERATIONS, args):
      engine = models.make_engine(path, models.settings(args), work)
      prompt = models.padded(models.prompt_ids(engine.config.vocab_size, work.prompt, seed=0), work.max_prompt)
      prefills = [prefill(engine, work)]
      axes = {"batch": work.slots, "context": work.max_length}
      padding = len(prompt) - work.prompt
      session.compare(
        f"prefill {work.prompt}, {work.name}", prefills, axes=axes | {"operation": "prefill"}, padding=padding
      )
      with bench_decode_loop.Loop(engine, work) as loop:
        form = loop.on_device(step_work(engine, work))
        session.compare(f"decode, {work.name}", [form], axes=axes | {"operation": "decode"})
      del engine, prefills, form, loop  # before the caches of the next
  return session.finish()


def prefill(engine: Any, work: workloads.Generation) -> harness.Procedure:
  """Returns prefill of one prompt; the prompts of two calls differ."""
  import jax

  from kimi_k3.capacity.memory import prefill_flops
  from kimi_k3.maxtext_adapter.config import architecture

  vocab_size = engine.config.vocab_size
  prompts = [models.padded(models.prompt_ids(vocab_size, work.prompt, i), work.max_prompt) for i in range(2)]
  flops = prefill_flops(architecture(engine.config), tokens=work.prompt) / jax.device_count()

  def call(i: int) -> Any:
    return engine.prefill(prompts[i % 2], work.prompt).logits

  return harness.Procedure("prefill", call, Work(work.prompt, (work.prompt,), None, flops))


def step_work(engine: Any, work: workloads.Generation) -> Work:
  """Returns the tokens of a step and the bytes that one device must move for it; None where the cuts do not say."""
  import jax

  from kimi_k3.capacity.memory import traffic_of
  from kimi_k3.maxtext_adapter.config import architecture
  from kimi_k3.spmd.cuts import Cuts

  if hasattr(engine, "model"):
    cuts = engine.model.cuts
  elif jax.device_count() == 1:
    cuts = Cuts.of({})
  else:
    return Work(work.slots)
  context = work.prompt + work.new_tokens // 2  # in the middle of the run
  cached = {"latent_dtype_bytes": jax.numpy.dtype(engine.config.mla_cache_dtype or engine.config.dtype).itemsize}
  moved = traffic_of(architecture(engine.config), cuts, batch=work.slots, context=context, **cached)
  return Work(work.slots, None, moved.total)


if __name__ == "__main__":
  harness.exit_with(main, __file__)
