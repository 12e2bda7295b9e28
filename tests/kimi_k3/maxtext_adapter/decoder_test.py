from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_k3.maxtext_adapter.register import register


@pytest.fixture(scope="module")
def decoder():
  register()
  from kimi_k3.maxtext_adapter import decoder

  return decoder


@pytest.mark.parametrize(
  ("segment_ids", "valid", "resets"),
  [
    ([1, 1, 1, 1], "1111", "0000"),
    ([1, 1, 0, 0], "1100", "0000"),
    ([1, 1, 2, 2], "1111", "0010"),
    ([1, 2, 3, 3], "1111", "0110"),
    ([1, 0, 2, 2], "1011", "0010"),  # a pad between two documents
    ([0, 0, 1, 1], "0011", "0000"),  # pads before the first: its state is empty already
    ([1, 2, 2, 0], "1110", "0100"),
  ],
)
def test_packed_documents_start_anew_where_the_id_changes(decoder, segment_ids, valid, resets):
  found = decoder._segments(jnp.array([segment_ids]), packed=True)
  expected = [[c == "1" for c in flags] for flags in (valid, resets)]
  np.testing.assert_array_equal(found[0][0], expected[0])
  np.testing.assert_array_equal(found[1][0], expected[1])


def test_a_prompt_is_one_document(decoder):
  valid, resets = decoder._segments(jnp.array([[1, 1, 0]]), packed=False)
  np.testing.assert_array_equal(valid, [[True, True, False]])
  assert resets is None


@pytest.mark.parametrize(
  "name",
  [
    *("previous_chunk", "kv_caches", "attention_metadata", "deepstack_visual_embeds", "multimodal_input"),
    "forced_routed_experts",
  ],
)
def test_what_the_decoder_would_ignore_is_refused_by_name(decoder, name):
  nothing = object.__new__(decoder.KimiDecoder)
  value = {name: [jnp.zeros(1)] if name in ("kv_caches", "deepstack_visual_embeds") else jnp.zeros(1)}
  with pytest.raises(NotImplementedError, match=f"{name}: not supported by the Kimi K3 decoder"):
    decoder.KimiDecoder.__call__(nothing, object.__new__(decoder.nnx.Module), jnp.zeros(1), jnp.zeros(1), **value)
