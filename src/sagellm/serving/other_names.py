"""Names of fields that other servers or another endpoint take."""

from __future__ import annotations

from collections.abc import Mapping

OF_OTHER_SERVERS = frozenset(
    {
        # llama.cpp's server
        "cache_prompt", "dry_allowed_length", "dry_base", "dry_multiplier", "dry_penalty_last_n",
        "dry_sequence_breakers", "dynatemp_exponent", "dynatemp_range", "id_slot", "min_keep", "mirostat",
        "mirostat_eta", "mirostat_tau", "n_discard", "n_indent", "n_keep", "penalize_nl",
        "post_sampling_probs", "reasoning_format", "repeat_last_n", "response_fields", "return_progress",
        "return_tokens", "samplers", "slot_id", "t_max_predict_ms", "t_max_prompt_ms", "tfs_z",
        "timings_per_token", "top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold",
        # Ollama
        "f16_kv", "keep_alive", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu",
        "num_gqa", "num_keep", "num_thread", "numa", "options", "use_mlock", "use_mmap", "vocab_only",
        # LM Studio
        "draft_model", "ttl",
        # vLLM
        "include_reasoning", "kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs",
        "repetition_detection", "request_id", "stream_interval", "truncation_side",
        # SGLang
        "bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_labels", "custom_params",
        "data_parallel_rank", "disagg_prefill_dp_rank", "extra_key", "images_config", "rid",
        "return_cached_tokens_details", "routed_dp_rank", "separate_reasoning", "session_params",
        "stream_reasoning",
        # Text Generation Inference
        "decoder_input_details", "details", "do_sample", "top_n_tokens", "watermark",
        # front ends that send the settings of every sampler that they know
        "epsilon_cutoff", "eta_cutoff", "guidance_scale", "skew", "smoothing_curve", "smoothing_factor",
        "tfs", "top_a", "truncation_length",
    }
)  # fmt: skip
"""Fields of a generation that tune other servers. They are ignored, since no restriction of the text depends
on them, and a header of the answer names them.
"""

RENAMED: Mapping[str, str] = {
    "disable_spec_decode": "num_speculative_tokens",
    "disable_speculative_decoding": "num_speculative_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "no_stop_trim": "include_stop_str_in_output",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "return_full_text": "echo",
    "sampling_seed": "seed",
    "speculative": "num_speculative_tokens",
    "speculative.n_max": "num_speculative_tokens",
    "thinking_budget": "max_reasoning_tokens",
    "thinking_token_budget": "max_reasoning_tokens",
}
"""Other servers' names for fields that OpenAI or vLLM name otherwise."""

ENDPOINT_OF: Mapping[str, str] = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""The endpoint of a prompt in each of its forms, where the other form was sent."""
