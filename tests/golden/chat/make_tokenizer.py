"""Makes the small vocabulary of the chat tests: tiktoken.model and tokenizer_config.json, beside this file.

    python tests/golden/chat/make_tokenizer.py

The 256 bytes have the ids of the released vocabulary, the special tokens their released names and ids, and so have the
pieces of text below: they are those of released.json, which google-deepmind/simply publishes with their ids
(simply/zoo/kimi_k3/utils/testdata at b5aec4a7b6f3). Where the release makes several tokens of a piece, what each of
them holds is our reading of that. Other text is split otherwise than by the release, into more tokens.
"""

from __future__ import annotations

import base64
import json
from itertools import count
from pathlib import Path

HERE = Path(__file__).parent

SPECIAL = {
  163584: "[BOS]", 163585: "[EOS]", 163586: "<|end_of_msg|>", 163587: "<|open|>", 163588: "<|close|>",
  163589: "<|sep|>", 163590: "[start_header_id]", 163591: "[end_header_id]", 163593: "[EOT]",
  163602: "<|media_begin|>", 163603: "<|media_content|>", 163604: "<|media_end|>", 163605: "<|media_pad|>",
  163649: "<osagent_mode>", 163838: "[UNK]", 163839: "[PAD]",
}  # fmt: skip

TOKENS: dict[str, int] = {
  # tags and attributes
  "message": 2778, " role": 6244, '="': 878, "user": 2482, "system": 14062, "assistant": 69702, "think": 39964,
  "response": 12092, "tools": 25385, "call": 10257, " tool": 4453, " index": 4002, "argument": 47185, " key": 2355,
  " type": 1798, " name": 1530, "tool": 20960, "string": 2033, "number": 10006, "object": 3721,
  # the system messages that the encoder makes
  "thinking": 130400, "_eff": 123074, "-eff": 59991, "ort": 470, " guides": 28560, " on": 418, " how": 1632,
  " much": 2455, " to": 308, " think": 2704, " in": 306, " your": 651, " thinking": 9545, " channel": 8491,
  " (": 347, "not": 2976, " including": 3411, " the": 276, " response": 4503, "),": 904, " supported": 9141,
  " values": 4661, " include": 3867, " `": 1268, "low": 1332, "`,": 5713, "medium": 50004, "high": 19421,
  " and": 316, "max": 5354, "`.\n": 16518, "Now": 10048, " system": 2403, " is": 387, " invoked": 42070,
  " with": 472, "=max": 105281, "`.": 11369, " Tools": 30391, "Here": 12214, " are": 554, " available": 2878,
  " tools": 7697, " described": 11880, " JSON": 11419, "Schema": 11438, ".\n\n": 1481, "```": 3251, "json": 5534,
  '[{"': 81103, "function": 3879, '":{"': 22849, "description": 11031, '":"': 7471, '","': 3923, "name": 1152,
  "parameters": 24453, "properties": 27129, "type": 2217, '"}}': 60336, ',"': 2020, "required": 20331, '":["': 46890,
  '"],"': 131917, '"}': 16934, "]\n": 1641, '"}\n': 35823, '{"': 8264, '"},"': 60027, "-decl": 120083, "are": 677,
  "-choice": 135230, "_choice": 79535, "The": 1008, "You": 3900, " MUST": 44322, " call": 2390, " next": 2897,
  " message": 3996, "-format": 46906, "_format": 15764, "=json": 129392, "_object": 9318, "_schema": 36512,
  "Your": 12080, " must": 2746, " be": 413, " raw": 10872, " data": 1544, " without": 2932, " markdown": 66661,
  " code": 3253, " blocks": 13825, " or": 528, " any": 1178, " additional": 6031, " formatting": 44768, ".\n": 341,
  " match": 4620, " following": 4111, " schema": 14453, ":\n": 777, "##": 798, " New": 2964, " Available": 29270,
  " dynamically": 57880, " extends": 6061, "set": 1216, " via": 6274, " lazy": 29292, "-loading": 106000,
  " have": 714, " access": 3199, " all": 799, " existing": 7942, " extended": 15875, " specs": 48209, " for": 395,
  # what is said in the conversations
  "What": 5376, " +": 715, " a": 261, " helpful": 13205, " assistant": 26626, "Hi": 18699, "Hello": 19180,
  " How": 3653, " can": 691, " I": 374, " help": 1833, " user": 2742, " gre": 23320, "ets": 2088, " me": 1019,
  "Tell": 69211, " joke": 49759, "ping": 15203, "go": 3743, "bash": 26523, "Run": 6237, " bash": 38178,
  " command": 5850, " &": 841, " return": 745, " its": 1682, " output": 4332, "command": 9106, " coding": 24423,
  " agent": 12218, "List": 1606, " files": 5395, " should": 1765, " run": 2284, " ls": 35291, "Listing": 62992,
  "ls": 4925, " -": 635, "la": 7288, ".txt": 8842, "&amp": 42055, ";b": 54677, "&quot": 39877, ";c": 82190,
  "we": 1352, "ird": 3854, ";&": 11371, "quot": 13847, "two": 35558, " things": 3456, "doing": 93130, " both": 2957,
  "grep": 71588, "pattern": 26271, "files": 12481, "match": 13903, "start": 5402, "search": 3021, "now": 6440,
  " search": 4580, "give": 74644, " json": 8915, "boss": 32190, "sys": 13224, "ong": 886, "no": 4069,
  " please": 5462, "none": 13871, " NOT": 5795, "alice": 100478, "world": 23617, "\u4f60\u597d": 33845,
  "\u597d\u7684": 2084,
}  # fmt: skip
# Must merge before "la" and " tools" do, as in the release, which has them at ids that no piece above shows.
EARLY = {"ar": 256, "se": 257}
WAVE = (b" \xf0\x9f\x91", 130732)  # the first bytes of a space and a hand: a character cut between tokens


def byte_ids() -> dict[int, int]:
  """Returns the id of each byte: those that print in Latin-1 come first, as in GPT-2's table."""
  first = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
  return {b: i for i, b in enumerate(first + [b for b in range(256) if b not in first])}


def main() -> None:
  """Writes both files."""
  ids = {bytes([b]): i for b, i in byte_ids().items()}
  ids |= {text.encode(): i for text, i in (TOKENS | EARLY).items()} | {WAVE[0]: WAVE[1]}
  ours = count(160000)  # released ids that no piece above has
  for token in list(ids):
    for end in range(2, len(token)):  # what a token grows from, byte by byte, where a piece holds more than it
      if token[:end] not in ids:
        ids[token[:end]] = next(ours)
  lines = [f"{base64.b64encode(token).decode()} {i}\n" for token, i in sorted(ids.items(), key=lambda item: item[1])]
  (HERE / "tiktoken.model").write_text("".join(lines))
  added = {str(i): {"content": name, "special": True} for i, name in SPECIAL.items()}
  (HERE / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}, indent=1) + "\n")


if __name__ == "__main__":
  main()
