"""A plan as a table for people and as one object for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kimi_k3.capacity.plan import Facts, Setup, engine_bytes

SCHEMA = 1
_K3_EXPERTS = 896  # what the others measured is this model
_GIB = 2**30
# Measured by others on real machines; docs/plan.md has the sources.
PEERS = (
  "measured by others, 16 chips of TPU7x, 8 users, 8K in and 1K out: 387 ms a token, 18.35 tok/s (tpu-inference 3333)",
  "measured by others, 8 x B300, 64 users: 40 ms a token (SGLang, MXFP4); 1 user: 183 tok/s (vLLM, draft model)",
)


def as_object(
  setup: Setup,
  programs: Mapping[str, Facts],
  fit: Mapping[str, Any] | None,
  *,
  one_engine: bool,
  quick_error: float | None,
) -> dict[str, Any]:
  """Returns the plan as plain values, sizes in bytes on one device.

  Args:
    setup: What was planned.
    programs: Facts by "decode" and "prefill".
    fit: What the search found.
    one_engine: Whether both programs were asked for, to run in one engine; not where a search found each for itself.
    quick_error: Largest relative error of the arithmetic against compiled programs; None where all is compiled.
  """
  t = setup.topology
  return {
    "schema": SCHEMA,
    "topology": t.name,
    "slices": t.slices,
    "chips": t.chips,
    "devices": t.devices,
    "mesh": dict(setup.sizes),
    "chosen": dict(setup.chosen),
    "limit_bytes": t.limit_bytes,
    "programs": {name: {k: v for k, v in facts.items() if k != "warnings"} for name, facts in programs.items()},
    "together": together(setup, programs) if one_engine else None,
    "fit": fit,
    "estimated": quick_error is not None,
    "quick_error": quick_error,
    "warnings": warnings(programs),
  }


def warnings(programs: Mapping[str, Facts]) -> list[dict[str, str]]:
  """Returns the traps of all programs, each naming its program."""
  return [
    {"trap": trap["trap"], "detail": f"{name}: {trap['detail']}"}
    for name, facts in programs.items()
    for trap in facts["warnings"]
  ]


def together(setup: Setup, programs: Mapping[str, Facts]) -> dict[str, int] | None:
  """Returns what an engine of both programs holds on a device, and what is left of it; None without both."""
  total = engine_bytes(programs)
  return None if total is None else {"total_bytes": total, "left_bytes": setup.topology.limit_bytes - total}


def table(
  setup: Setup,
  programs: Mapping[str, Facts],
  fit: Mapping[str, Any] | None,
  *,
  one_engine: bool,
  quick_error: float | None,
) -> str:
  """Returns the plan as text; arguments as in as_object."""
  parts = [_head(setup), _memory(setup, programs) if programs else ""]
  if one_engine and (both := together(setup, programs)) is not None:
    left = both["left_bytes"]
    how = f"{_gib(left)} GiB left" if left >= 0 else f"DOES NOT FIT by {_gib(-left)}"
    parts.append(f"decode and prefill in one engine: {_gib(both['total_bytes'])} GiB, {how}")
  for name, facts in programs.items():
    if lines := _running(name, facts):
      parts.append("\n".join(lines))
  if setup.config.num_experts == _K3_EXPERTS and "decode" in programs and programs["decode"]["bound_ms"] is not None:
    parts.append("\n".join(f"  {line}" for line in PEERS))
  if fit is not None:
    parts.append("\n".join(_fit(fit)))
  found = warnings(programs)
  parts.append("\n".join(f"WARNING {w['trap']}: {w['detail']}" for w in found) if found else _no_warning(quick_error))
  if quick_error is not None:
    parts.append(
      f"by arithmetic, nothing compiled: memory within {quick_error:.1%} of compiled programs so far; without --quick "
      "the compiler is asked"
    )
  return "\n\n".join(part for part in parts if part)


def _no_warning(quick_error: float | None) -> str:
  return "" if quick_error is not None else "no warnings"


def _head(setup: Setup) -> str:
  t = setup.topology
  mesh = ",".join(f"{axis}={size}" for axis, size in setup.sizes.items())
  slices = f"{t.slices} slices of {t.name}" if t.slices > 1 else t.name
  size = f"{_count(t.chips, 'chip')}, {_count(t.devices, 'device')}, {_count(t.hosts, 'host')}"
  lines = [f"{setup.config.num_layers} layers on {slices}: {size}, mesh {mesh}"]
  if setup.chosen:
    named = " ".join(f"{key}={value}" for key, value in setup.chosen.items())
    lines.append(f"not in the config, chosen here (decode takes them too): {named}")
  return "\n".join(lines)


def _count(number: int, what: str) -> str:
  return f"{number} {what}" + ("" if number == 1 else "s")


def title(name: str, facts: Facts) -> str:
  """Returns a program's name with its sizes."""
  if name == "decode":
    return f"decode {facts['batch']} x {facts['context']}"
  return f"prefill {facts['tokens']}" + (f" of {facts['length']}" if facts["history"] else "")


def _gib(value: int | float | None) -> str:
  return "?" if value is None else f"{value / _GIB:.2f}" if abs(value) >= _GIB else f"{value / _GIB:.3f}"


def _memory(setup: Setup, programs: Mapping[str, Facts]) -> str:
  kinds = list(dict.fromkeys(kind for facts in programs.values() for kind in facts["weights_bytes"]))
  rows: list[tuple[str, list[str]]] = [("GiB on one device", [title(name, facts) for name, facts in programs.items()])]
  every = list(programs.values())

  def row(name: str, values: Sequence[int | float | None]) -> None:
    rows.append((name, [_gib(value) for value in values]))

  for kind in kinds:
    if any(facts["weights_bytes"].get(kind) for facts in every):
      row(f"  weights: {kind.replace('_', ' ')}", [facts["weights_bytes"].get(kind, 0) for facts in every])
  row("  latent cache", [facts["latent_cache_bytes"] for facts in every])
  row("  KDA states", [facts["kda_state_bytes"] for facts in every])
  row("  padding, tokens", [_padding(facts) for facts in every])
  row("arguments", [facts["argument_bytes"] for facts in every])
  row("temporaries", [facts["temp_bytes"] for facts in every])
  row("code", [facts["code_bytes"] for facts in every])
  row("new results", [facts["output_bytes"] for facts in every])
  row("total", [facts["total_bytes"] for facts in every])
  row("limit", [setup.topology.limit_bytes for _ in every])
  rows.append(("", [_verdict(setup, facts) for facts in every]))
  return _columns(rows)


def _padding(facts: Facts) -> int | None:
  if facts["argument_bytes"] is None:
    return None
  known = sum(facts["weights_bytes"].values()) + facts["latent_cache_bytes"] + facts["kda_state_bytes"]
  return max(0, facts["argument_bytes"] - known)


def _verdict(setup: Setup, facts: Facts) -> str:
  if facts["fits"]:
    return f"fits, {_gib(setup.topology.limit_bytes - facts['total_bytes'])} left"
  return f"DOES NOT FIT by {_gib(facts['exceeds_bytes'])}"


def _columns(rows: Sequence[tuple[str, Sequence[str]]]) -> str:
  first = max(len(name) for name, _ in rows)
  widths = [max(len(values[i]) for _, values in rows) for i in range(len(rows[0][1]))]
  return "\n".join(
    f"{name:{first}}  " + "  ".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))
    for name, values in rows
  )


def _running(name: str, facts: Facts) -> list[str]:
  if facts["bound_ms"] is None:
    return []
  lines = [f"{title(name, facts)}:"]
  if facts["collectives"]:
    each = ", ".join(f"{c['count']} {c['kind']} ({c['bytes'] / 1e6:.1f} MB)" for c in facts["collectives"])
    lines.append(f"  collectives: {each}")
  if facts["reductions_per_layer"] is not None:
    lines.append(f"  reductions a layer: {facts['reductions_per_layer']:g}")
  if facts["hbm_bytes_per_step"] is not None:
    must = facts.get("must_move_bytes_per_step")
    ratio = (
      ""
      if not must or facts["estimated"]
      else (f", {facts['hbm_bytes_per_step'] / must:.2f} of what any program must move")
    )
    lines.append(f"  HBM: {_gib(facts['hbm_bytes_per_step'])} GiB read and written on a device{ratio}")
  lines += _bounds(name, facts)
  if facts["kernels"]:
    lines.append(f"  kernels: {', '.join(facts['kernels'])}")
  return lines


def _bounds(name: str, facts: Facts) -> list[str]:
  """The least time, as far as it is known; a real step is slower."""

  def line(what: str, ms: float) -> str:
    tokens = facts["batch"] if name == "decode" else facts["tokens"]
    return f"  bound by {what}: {_digits(ms)} ms, {tokens / ms * 1e3:,.0f} tok/s"

  if name != "decode":
    return [line(facts["bound_by"], facts["bound_ms"])]
  part = facts["expected_hit"]
  return [
    line("HBM, every expert hit that can be", facts["bound_ms"]),
    line(f"HBM, {part:.0%} of the experts hit, as uniform choices do", facts["expected_bound_ms"]),
  ]


def _digits(value: float) -> str:
  return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def _fit(fit: Mapping[str, Any]) -> list[str]:
  how = "by arithmetic" if fit["estimated"] else "by compiling both that size and the next"
  lines = [f"largest that fit with {_gib(fit['reserve_bytes'])} GiB in reserve, {how}:"]
  names = {
    "batch": lambda one: f"{one['largest']} rows of {one['context']} tokens (latents by {one['cache_cut']})",
    "context": lambda one: f"{one['batch']} rows of {one['largest']} tokens",
    "prefill": lambda one: f"{one['largest']} tokens of a prompt at a time" + _beside(one),
  }
  for key, text in names.items():
    one = fit.get(key)
    if one is None:
      continue
    total = "" if one["total_bytes"] is None else f": {_gib(one['total_bytes'])} GiB"
    more = "the model knows no more" if one["next"] is None else f"{one['next']}: {_gib(one['next_total_bytes'])} GiB"
    lines.append(f"  {text(one)}{total} ({more})")
  return lines


def _beside(one: Mapping[str, Any]) -> str:
  return f", beside caches of {_gib(one['beside_bytes'])} GiB" if one["beside_bytes"] else ""
