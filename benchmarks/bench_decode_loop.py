"""The forms of a decode loop on one engine, in one run: eager, a jitted step a call, all steps in one program.

    python benchmarks/bench_decode_loop.py --out decode-loop.json
    python benchmarks/bench_decode_loop.py --preset k3 --config OUT/decode.yml

All start from the same prompts and must give the same greedy tokens, or nothing is reported; the preset tiny therefore
computes in float32. Times are of a step. The reference of the ratios is the jitted step a call: what a host does that
looks at every token. The eager form, a second a step even of the tiny model, runs for the first workload alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import harness
import models
import workloads
from checks import Refused, Work

EAGER_STEPS = 1
EAGER_REPEATS = 1


def main(argv: Sequence[str]) -> int:
  """Runs the workloads of a preset."""
  parser = harness.parser(__doc__)
  harness.add_only(parser)
  models.add_config(parser)
  parser.add_argument("--no-eager", action="store_true", help="leave out the eager form: minutes a step at full size")
  args = parser.parse_args(argv)
  session, first = harness.session("decode_loop", args), True
  settings = models.settings(args)
  with models.checkpoint(args) as path:
    for work in harness.chosen(workloads.DECODE_LOOPS, args):
      loop = Loop(models.make_engine(path, settings, work), work)
      forms = [loop.jitted(), loop.on_device()]
      if args.no_eager:
        session.absent("eager", "--no-eager")
      elif first:
        forms.append(loop.eager())
      first = False
      with loop:
        session.compare(work.name, forms, axes={"batch": work.slots, "context": work.max_length})
  return session.finish()


class Loop:
  """One engine, its prompt, and the forms of the loop on it."""

  def __init__(self, engine: Any, work: workloads.Generation):
    from kimi_k3.generate.sampling import Draws, SamplingOptions

    self.engine, self.work = engine, work
    self._used = False
    vocab_size = engine.config.vocab_size
    ids = models.prompt_ids(vocab_size, work.prompt, seed=0)
    self._prompt, self._first = models.padded(ids, work.max_prompt), 0
    self._draws = Draws.of([SamplingOptions()] * work.slots, range(work.slots), 0)
    self._expected: Any = None

  def jitted(self) -> harness.Procedure:
    """A call of a jitted step, then one of the sampler, for each token."""
    return self._form("a jitted step a call", self._stepped, self.work.new_tokens)

  def on_device(self, counted: Work | None = None) -> harness.Procedure:
    """One call for all steps. `counted` is what a step is worth, if more is known of it than its tokens."""
    options = {} if counted is None else {"counted": counted}
    return self._form("on-device loop", self._looped, self.work.new_tokens, **options)

  def eager(self) -> harness.Procedure:
    """The jitted form with jit switched off: each operation is dispatched alone."""
    import jax

    def call(steps: int) -> Any:
      with jax.disable_jit():
        return self._stepped(steps)

    return self._form("eager", call, EAGER_STEPS, repeats=EAGER_REPEATS, traces=True)

  def _form(
    self, name: str, call: Callable[[int], Any], steps: int, counted: Work | None = None, **options: Any
  ) -> harness.Procedure:
    return harness.Procedure(
      name,
      lambda _: call(steps),
      Work(self.work.slots) if counted is None else counted,
      count=self._count,
      before=self._start,
      times=steps,
      **options,
    )

  def __enter__(self) -> Loop:
    return self

  def __exit__(self, *_: object) -> None:
    """Empties the slots."""
    for slot in range(self.work.slots) if self._used else ():
      self.engine.release(slot)
    self._used = False

  def _start(self) -> None:
    """Puts the prompt into all slots, each then at the same place."""
    import numpy as np

    self.__exit__()
    slots = range(self.work.slots)
    prompt = self.engine.prefill(self._prompt, self.work.prompt)
    self._first = int(np.argmax(np.asarray(prompt.logits)))
    self.engine.insert(prompt, *slots)
    self._used = True

  def _stepped(self, steps: int) -> Any:
    import numpy as np

    from kimi_k3.generate.sampling import sample_everywhere

    tokens = np.full(self.work.slots, self._first, np.int32)
    found = []
    for step in range(steps):
      logits = self.engine.step(tokens)
      tokens, finite = sample_everywhere(logits, self._draws, np.full(self.work.slots, step + 1))
      if not finite.all():
        raise Refused("logits are not finite")
      found.append(tokens)
    return np.stack(found, axis=1)

  def _looped(self, steps: int) -> Any:
    import numpy as np

    from kimi_k3.generate.device_loop import NUM_STOP_IDS, Plan, Rows

    slots = self.work.slots
    counts = np.ones(slots, np.int32)
    rows = Rows(np.full(slots, self._first, np.int32), counts, counts + steps, self._draws)
    plan = Plan(np.full(NUM_STOP_IDS, -1, np.int32), np.int32(steps), np.int32(slots))
    found = self.engine.decode(rows, plan, buffer=steps)
    if found.counts.tolist() != [steps] * slots:
      raise Refused(f"{found.counts.tolist()} tokens from {steps} steps")
    return found.tokens

  def _count(self, tokens: Any) -> int:
    """The number of tokens, if they are those of the first form that ran.

    Raises:
      Refused: naming the step, if they are others.
    """
    longest = tokens if self._expected is None else max(tokens, self._expected, key=lambda found: found.shape[1])
    expected = tokens if self._expected is None else self._expected
    self._expected, steps = longest, min(tokens.shape[1], expected.shape[1])
    different = (tokens[:, :steps] != expected[:, :steps]).any(axis=0)
    if different.any():
      raise Refused(f"the forms give other tokens from step {int(different.argmax())} on: not the same computation")
    return int((tokens >= 0).sum())


if __name__ == "__main__":
  harness.exit_with(main, __file__)
