"""Which fields requests and messages may hold: those served, those that only OpenAI or vLLM know, typos."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, PrivateAttr, ValidationError

from sagellm.core.errors import RequestError, UnsupportedParameterError, nearest
from sagellm.serving.errors import MAX_ECHO_CHARS, clipped

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
        "repetition_detection", "request_id", "stream_interval", "thinking_token_budget", "truncation_side",
        "vllm_xargs",
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
"""Fields of a generation that tune other servers. They are ignored, and the answer says so in a header: what
a text may be does not depend on them."""

RENAMED: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "no_stop_trim": "include_stop_str_in_output",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "return_full_text": "echo",
    "sampling_seed": "seed",
}
"""Other servers' names of fields that are served here under OpenAI's or vLLM's."""

WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
"""Accepted with any value: they describe the caller, or tools of which there are none."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "ebnf": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": (),
    "lora": ([],),
    "lora_path": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "regex": (),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": (),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Known and not supported: the values, beside null, that ask for nothing."""

MESSAGE_FIELDS = frozenset({"role", "content", "name"})

MESSAGE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
"""The same for the fields of a message: an answer may come back as the client library dumped it."""

IGNORED_HEADER = "X-Sagellm-Ignored-Fields"
"""Names, in an answer, the fields of other servers that its request held."""

M = TypeVar("M", bound=BaseModel)


class LenientRequest(BaseModel):
    """A request that may hold `OF_OTHER_SERVERS` beside its own fields."""

    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @property
    def warning_headers(self) -> dict[str, str]:
        """What the answer's headers say of fields that were ignored."""
        return {IGNORED_HEADER: ", ".join(self._ignored)} if self._ignored else {}


def checked(model: type[M], fields: Mapping[str, Any]) -> M:
    """The request of these fields. Every defect is a `RequestError` that names one; fields of other servers
    are ignored by a `LenientRequest`, nothing is by others.
    """
    ignored = sorted(OF_OTHER_SERVERS & fields.keys()) if issubclass(model, LenientRequest) else []
    asked = {name: value for name, value in fields.items() if name not in ignored}
    if names_a_model(model):
        check_names(asked, model.model_fields.keys() | WITHOUT_EFFECT, NEUTRAL)
    else:
        check_names(asked, model.model_fields, {})
    known = {name: value for name, value in fields.items() if name in model.model_fields}
    try:
        request = model.model_validate(known)
    except ValidationError as error:
        raise _readable(error) from error
    if isinstance(request, LenientRequest):
        request._ignored = tuple(ignored)
    return request


def names_a_model(model: type[BaseModel]) -> bool:
    """Whether the request is one of those that clients of OpenAI's API make, which have further fields."""
    return "model" in model.model_fields


def check_names(
    fields: Mapping[str, Any],
    served: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
    prefix: str = "",
) -> None:
    """Refuse names that are neither `served` nor `neutral`, and those of the latter that ask for something.
    Errors put `prefix` (`messages[0].`) before the name.
    """
    for name, value in fields.items():
        if name in served:
            continue
        where = f"{prefix}{clipped(name)}"
        if name not in neutral:
            renamed = RENAMED.get(name)
            guess = f" Send {renamed!r} instead." if renamed in served else _guess(name, served)
            raise RequestError(f"unknown field {where!r}.{guess}", where, code="unknown_parameter")
        if value is not None and not _among(value, neutral[name]):
            allowed = _allowed(neutral[name])
            raise UnsupportedParameterError(f"{where!r} is not supported by this server{allowed}", where)


def _guess(name: str, served: Collection[str]) -> str:
    return nearest(name, served) if len(name) <= MAX_ECHO_CHARS else ""


def _among(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equality that tells 1 from True."""
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in neutral)


def _allowed(neutral: tuple[Any, ...]) -> str:
    values = " or ".join(json.dumps(value) for value in neutral)
    return f": leave it out, or send {values}" if values else ": leave it out"


def _readable(error: ValidationError) -> RequestError:
    """The first field in error, by its JSON path, with what its alternatives expect."""
    details = error.errors(include_url=False, include_input=False)
    path = _path(details[0]["loc"])
    messages = [one["msg"] for one in details if _path(one["loc"]) == path]
    message = " or ".join(dict.fromkeys(_lowered(text) for text in messages))
    if details[0]["type"] == "extra_forbidden":
        message = (
            f"unknown field {clipped(str(details[0]['loc'][-1]))!r}; GET /openapi.json lists the known ones"
        )
    return RequestError(f"{path or 'body'}: {message}", path or None)


def _lowered(message: str) -> str:
    return message.removeprefix("Value error, ").replace("Input should be", "should be")


def _path(location: tuple[int | str, ...]) -> str:
    """`stop` or `messages[0]`: pydantic's location without the names of union branches."""
    path = str(location[0]) if location else ""
    return path + "".join(f"[{part}]" for part in location[1:2] if isinstance(part, int))
