"""What the TPU kernels of a decoding step read and write, for counting a compiled program's HBM traffic."""

from __future__ import annotations

from kimi_k3.capacity.hlo import KernelBytes, layer_of_stack

_EXPERT_WEIGHTS = range(8, 14)  # codes and scales of three matrices, after scalars, choices and rows
_KDA_STATES = 8
_LATENTS = 6


def decode_kernel_bytes(*, hit: float = 1.0, filled: float = 1.0) -> dict[str, KernelBytes]:
  """Returns bytes a call by pattern of the kernel's name, for `capacity.hlo.hbm_bytes`.

  Args:
    hit: Part of a device's experts that tokens have chosen: only these are read.
    filled: Part of the latent cache that rows have filled: only this is read. One token is written.
  """
  return {
    "kda_step*": layer_of_stack({_KDA_STATES}),
    "expert_decode": layer_of_stack(_EXPERT_WEIGHTS, share=dict.fromkeys(_EXPERT_WEIGHTS, hit)),
    "latent_step": layer_of_stack({_LATENTS}, share={_LATENTS: filled, -1 - 2: 0.0}),
  }
