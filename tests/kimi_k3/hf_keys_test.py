from __future__ import annotations

import dataclasses

from kimi_k3.config import KimiK3Config
from kimi_k3.hf_keys import HARMLESS_KEYS, HARMLESS_WRAPPER_KEYS


def test_whatever_the_installed_transformers_serialises_is_known():
  import transformers

  assert set(transformers.PretrainedConfig().to_dict()) <= HARMLESS_KEYS


def test_the_usual_bookkeeping_of_a_released_file_is_known():
  released = """
    _name_or_path add_cross_attention architectures auto_map bad_words_ids chunk_size_feed_forward do_sample dtype
    id2label label2id initializer_range is_decoder max_length num_beams output_attentions pruned_heads return_dict
    temperature tokenizer_class top_k top_p torchscript transformers_version use_bfloat16 use_cache
  """.split()
  assert set(released) <= HARMLESS_KEYS


def test_no_key_with_arithmetic_is_called_harmless():
  keys = {f.metadata["key"].hf for f in dataclasses.fields(KimiK3Config) if f.metadata}
  # These four are read as fields in the text config, and compared with it where the wrapper repeats them.
  repeated = {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"}
  assert keys & (HARMLESS_KEYS | HARMLESS_WRAPPER_KEYS) == repeated
