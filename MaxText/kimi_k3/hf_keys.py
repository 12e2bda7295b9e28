"""Keys of a Hugging Face config.json that carry no arithmetic for this model, by name.

A strict reader must know them: whatever is neither here nor a field of KimiK3Config is an error, since an unknown
key is the next model's new feature.
"""

# Every field a bare PretrainedConfig of transformers 4.56 serialises, and the usual bookkeeping.
_PRETRAINED_CONFIG_KEYS = """
  _attn_implementation _attn_implementation_autoset _name_or_path add_cross_attention architectures attn_implementation
  auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size
  decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
  exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder
  is_encoder_decoder label2id length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups
  num_beams num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix problem_type
  pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
  suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tie_word_embeddings
  tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16
""".split()

# Of the text model: rotary settings are void under NoPE, head_dim and initializer_range are not used in the forward.
_TEXT_KEYS = """
  attention_dropout head_dim initializer_range model_max_length rope_scaling rope_theta use_cache
""".split()

HARMLESS_KEYS = frozenset(_PRETRAINED_CONFIG_KEYS + _TEXT_KEYS)

# Beside text_config in K3's multimodal wrapper. Vision is not part of the text path.
HARMLESS_WRAPPER_KEYS = frozenset(
  """
  ignore_index image_placeholder media_placeholder_token_id quantization_config text_config use_unified_vision_chunk
  video_placeholder vision_config
""".split()
)
