"""Makes what proposes tokens or reasoning, and the backend of a draft model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sagellm.accel.speculative.lengths import ChainLengths
from sagellm.core.clock import Clock
from sagellm.core.config import Config, KVConfig, ParallelConfig, SpeculativeConfig
from sagellm.core.errors import ConfigError, UnknownNameError, nearest
from sagellm.core.features import SYNTHETIC_DRAWS
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.core.protocols.speculative import TokenDrafter
from sagellm.core.registry import registry
from sagellm.core.types import CapabilityDescriptor
from sagellm.engines.engine import Engine
from sagellm.engines.speculation import Speculation

log = logging.getLogger("sagellm.engine")
NONE, AUTO, SELF_DRAFT = "none", "auto", "self_draft"
OTHER_NAMES = {
    **dict.fromkeys(("block", "eagle", "eagle3", "medusa", "mtp", "nextn"), "heads"),
    "ngram": "prompt_lookup",
}
"""What vLLM, SGLang and papers call our methods, and the kinds of heads."""
OPTIONS_OF_SELF_DRAFT, OPTIONS_OF_DRAFT = ("layers", "quantization", "num_blocks"), ("model", "num_blocks")
"""Those that the backend of the draft takes; the others are the proposer's."""
MakeBackend: TypeAlias = Callable[[Config], InferenceBackend]


def build_speculation(
    config: Config, capability: CapabilityDescriptor, make_backend: MakeBackend, clock: Clock | None = None,
    drafter: TokenDrafter | None = None, make_self_draft: Callable[[], InferenceBackend] | None = None,
) -> Speculation | None:  # fmt: skip
    """The configured proposer, or None for the method "none".

    The method "auto" takes what there is. `make_backend`: for a proposer that runs a model; `drafter`: for
    one that runs the served model's head; `make_self_draft`: for one that runs a part of that model. Raises
    `ConfigError` for a backend or model that computes no chains of proposed tokens.
    """
    settings = config.speculative
    can_verify = "speculative_decoding" in capability.features
    method = settings.method
    if method == AUTO:
        if settings.method_options:
            raise ConfigError("speculative.method auto takes no method_options: name the method")
        method = ("suffix" if drafter is None else "heads") if can_verify else NONE
        log.info("speculative.method auto: %s", method)
    if method == NONE:
        return None
    check_method(method)
    if not can_verify:
        raise ConfigError(
            f"speculative.method {method!r} needs a backend and a model that compute proposed "
            f"tokens; those on device {capability.device!r} do not (states of recurrent layers do not go "
            "back): set speculative.method to none"
        )
    options: dict[str, Any] = {**settings.method_options, "name": method}
    if method == "synthetic":
        options |= synthetic_options(config, capability)
    given = registry("proposer").options(method)
    if "drafter" in given:
        if drafter is None:
            raise ConfigError(
                f"speculative.method {method!r} needs a backend that runs a model's draft head: "
                "set engine.backend to native, or take another method"
            )
        options.pop("model", None)  # the backend has found it
        proposer = registry("proposer").create_from({**options, "drafter": drafter})
    elif "backend" not in given:
        proposer = registry("proposer").create_from(options)
    else:
        check_draft_options(method, options, given)
        if method == SELF_DRAFT:
            draft, options = build_self_draft(make_self_draft, options)
        else:
            draft, options = build_draft(config, capability, make_backend, options)
        try:
            proposer = registry("proposer").create_from({**options, "backend": draft})
        except BaseException:
            draft.close()
            raise
    lengths = ChainLengths() if settings.adaptive else None
    return Speculation(proposer, settings.num_tokens, lengths, clock, drafter if "drafter" in given else None)


def check_method(method: str) -> None:
    """Raise `UnknownNameError` for an unknown method, with ours for names of others."""
    known = sorted([NONE, AUTO, *registry("proposer").names()])
    if method in known or ":" in method:
        return
    ours = OTHER_NAMES.get(method)
    listed = f" Known: {', '.join(known)}."
    guess = f" Set it to {ours}." if ours else nearest(method, known).replace(listed, "")
    raise UnknownNameError(f"unknown speculative.method {method!r}.{guess}{listed}")


def check_draft_options(
    method: str, options: Mapping[str, Any], of_proposer: Mapping[str, inspect.Parameter]
) -> None:
    """Raise `UnknownNameError` for an option that proposer and draft do not take."""
    of_backend = OPTIONS_OF_SELF_DRAFT if method == SELF_DRAFT else OPTIONS_OF_DRAFT
    known = [*of_backend, *(name for name in of_proposer if name != "backend")]
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in of_proposer.values())
    for option in options:
        if option not in (*known, "name") and not takes_any:
            raise UnknownNameError(
                f"speculative.method {method!r} has no option {option!r}; it takes {', '.join(known)}."
            )


def synthetic_options(config: Config, capability: CapabilityDescriptor) -> dict[str, Any]:
    """What the proposer must know of the engine.

    Raises `ConfigError` for a backend that draws its own tokens.
    """
    if SYNTHETIC_DRAWS not in capability.features:
        raise ConfigError(
            "speculative.method 'synthetic' needs a backend that makes up its tokens: set engine.backend to "
            "native"
        )
    return {"vocab_size": capability.vocab_size, "engine_seed": config.engine.seed}


def build_self_draft(
    make: Callable[[], InferenceBackend] | None, options: Mapping[str, Any]
) -> tuple[InferenceBackend, dict[str, Any]]:
    """The backend of a part of the served model, and the other options."""
    if make is None:
        raise ConfigError(
            f"speculative.method {SELF_DRAFT!r} needs a backend that runs a part of its model: set "
            "engine.backend to native, or take another method"
        )
    return make(), {name: value for name, value in options.items() if name not in OPTIONS_OF_SELF_DRAFT}


def build_draft(
    config: Config, capability: CapabilityDescriptor, make_backend: MakeBackend, options: Mapping[str, Any]
) -> tuple[InferenceBackend, dict[str, Any]]:
    """The backend of a draft model, and the options that are left.

    `options`: `model`, a folder or hub name, and `num_blocks` of its KV; by default as many tokens as the
    engine's pool. Raises `ConfigError` for a model with other tokens.
    """
    left, method = dict(options), config.speculative.method
    name, num_blocks = left.pop("model", None), left.pop("num_blocks", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"speculative.method {method!r} needs a draft: set speculative.method_options to "
            "{model: FOLDER}, a small model with the tokens of the one that is served"
        )
    if num_blocks is not None and (not isinstance(num_blocks, int) or num_blocks < 1):
        raise ConfigError(f"speculative.method_options: num_blocks is a number of blocks, not {num_blocks!r}")
    draft = make_backend(small_config(config, capability, name, num_blocks))
    found = draft.capability()
    own, problem = found.kv_schema, other_tokens(found, capability)
    if not problem and own is not None and own.state_bytes:
        problem = "has recurrent layers, whose states do not go back"
    if problem:
        draft.close()
        raise ConfigError(f"the draft {name!r} {problem}: take another one, of the served model's family")
    return draft, left


def build_reasoning_drafter(
    config: Config, served: CapabilityDescriptor, make_engine: Callable[[Config], Engine]
) -> Engine | None:
    """The engine of `speculative.reasoning_model`; None without one.

    Raises `ConfigError` for a model with other tokens.
    """
    name = config.speculative.reasoning_model
    if name is None:
        return None
    drafter = make_engine(small_config(config, served, name))
    if problem := other_tokens(drafter.capability(), served):
        drafter.close()
        raise ConfigError(
            f"speculative.reasoning_model {name!r} {problem}: take another one, of the served model's family"
        )
    return drafter


def small_config(
    config: Config, capability: CapabilityDescriptor, name: str, num_blocks: int | None = None
) -> Config:
    """The configuration of a small model beside the served one, on one rank.

    Its KV has `num_blocks`, by default as many tokens as the served model's pool.
    """
    schema = capability.kv_schema
    as_many = capability.num_blocks // (schema.num_groups if schema else 1)
    model = {"name": name, "quantization": "none", "max_model_len": None, "served_name": None}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "kv": KVConfig(block_size=config.kv.block_size, num_blocks=num_blocks or as_many),
            "parallel": ParallelConfig(),
            "speculative": SpeculativeConfig(),
        }
    )


def other_tokens(small: CapabilityDescriptor, served: CapabilityDescriptor) -> str:
    """How a small model's tokens differ from the served one's; empty: they do not."""
    if small.vocab_size == served.vocab_size:
        return ""
    return f"has {small.vocab_size} tokens, the served model {served.vocab_size}"
