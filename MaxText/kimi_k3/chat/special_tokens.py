"""The special tokens of the released K3 tokenizer, as data.

163584 byte-pair ranks, then 256 ids of which 16 have a name; the others are called <|reserved_token_ID|>. The ranks are
those of Kimi K2 and Kimi-Linear, the names are not: there 163586 is <|im_end|>.

Source: added_tokens_decoder of tokenizer_config.json of moonshotai/Kimi-K3, as restated alike by google-deepmind/simply
(simply/zoo/kimi_k3/utils/tokenization.py at b5aec4a7b6f3, with goldens that the release made) and lablup/mlxcel #1338;
the rule for the ids without a name also by NVIDIA-NeMo/Automodel (nemo_automodel/components/models/kimi_k3/
tokenization.py at 0a8e1be0b62d).
"""

from __future__ import annotations

NUM_RANKS = 163584
NUM_SPECIAL = 256

END_OF_MSG = "<|end_of_msg|>"  # ends each message; what generation stops at
OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
CHAT_CONTROL = (END_OF_MSG, OPEN, CLOSE, SEP)

NAMED: dict[int, str] = {
  163584: "[BOS]",
  163585: "[EOS]",  # ends a document, not a message
  163586: END_OF_MSG,
  163587: OPEN,
  163588: CLOSE,
  163589: SEP,
  163590: "[start_header_id]",
  163591: "[end_header_id]",
  163593: "[EOT]",
  163602: "<|media_begin|>",
  163603: "<|media_content|>",
  163604: "<|media_end|>",
  163605: "<|media_pad|>",
  163649: "<osagent_mode>",
  163838: "[UNK]",
  163839: "[PAD]",
}


def reserved_name(i: int) -> str:
  """Returns what the released tokenizer calls a special id without a name."""
  return f"<|reserved_token_{i}|>"


RELEASED: dict[str, int] = {NAMED.get(i, reserved_name(i)): i for i in range(NUM_RANKS, NUM_RANKS + NUM_SPECIAL)}
