"""The one place where modules are joined: config in, engine out. It wires; it holds no logic."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sagellm.core.clock import Clock
from sagellm.core.config import Config, SchedulerConfig
from sagellm.core.config_layers import (
    COMMAND_LINE,
    Layer,
    Resolved,
    env_layer,
    given_layer,
    preset_layer,
    resolve,
)
from sagellm.core.errors import ConfigError
from sagellm.core.events import EventBus
from sagellm.core.garbage import nothing_collected
from sagellm.core.protocols.engine import EngineCore, InferenceBackend, Progress
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.registry import registry
from sagellm.core.types import CapabilityDescriptor
from sagellm.engines.build_kv import (
    build_kv,
    build_tiers,
    build_token_copies,
    check_dropped_blocks,
    kv_config_of,
    prefill_costs,
    remote_options,
)
from sagellm.engines.build_speculation import build_reasoning_drafter, build_speculation
from sagellm.engines.config_file import kv_preset_layer, read_config_file
from sagellm.engines.engine import Engine
from sagellm.engines.llm import LLM
from sagellm.engines.native import DEMO_NAME
from sagellm.kvmgr.kv_pool.tiers.disk_folder import check_kv_folder
from sagellm.kvmgr.scheduler_ir import PassPipeline, strategies


def load_config(
    path: str | Path | None = None,
    *,
    preset: str | None = None,
    kv_preset: str | None = None,
    cli: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    given_in: str = COMMAND_LINE,
) -> Resolved:
    """The configuration from all its layers.

    `path` and `preset` default to SAGELLM_CONFIG and SAGELLM_PRESET. `kv_preset`, of
    `kv_runtime_presets.yaml`, wins over `preset`, and everything else over both.
    """
    env = os.environ if environ is None else environ
    preset = preset or env.get("SAGELLM_PRESET")
    path = path or env.get("SAGELLM_CONFIG")
    layers: list[Layer] = [preset_layer(preset)] if preset else []
    if kv_preset:
        layers.append(kv_preset_layer(kv_preset))
    if path:
        layers.append(read_config_file(Path(path)))
    return resolve([*layers, env_layer(env), given_layer(cli or {}, given_in)])


def located(config: Config) -> Config:
    """`config` with the model's folder in place of a hub name. Clients still use the hub name.

    Fetches the model if it is not there, and raises as `native.from_config.model_source` does.
    """
    model = config.model
    if model.name is None:
        return config
    from sagellm.engines.native.from_config import model_source

    found = {"name": str(model_source(config)), "served_name": model.served_name or model.name}
    return config.model_copy(update={"model": model.model_copy(update=found)})


@nothing_collected()
def build_backend(
    config: Config, *, clock: Clock | None = None, progress: Progress | None = None
) -> InferenceBackend:
    """The configured backend, as its plug-in's factory makes it (see `InferenceBackend`).

    Raises `ModelError` before anything is allocated, and `ConfigError` for options that are settings.
    """
    name, options = config.engine.backend, config.engine.backend_options
    if config.parallel.num_ranks > 1 and name != "native":
        raise ConfigError(
            f"parallel.*: engine.backend {name!r} runs on one rank: set parallel.tensor and "
            "parallel.pipeline to 1 and parallel.ffn to 0, or engine.backend to native"
        )
    sections = (config.model, config.kv, config.scheduler, config.engine)
    settings = {setting for section in sections for setting in type(section).model_fields}
    given = {"config": config, "clock": clock, "progress": progress}
    if taken := sorted((settings | given.keys()) & options.keys()):
        raise ConfigError(f"engine.backend_options: {', '.join(taken)} is given by the engine: leave it out")
    backends = registry("backend")
    asked = backends.options(name)
    made: InferenceBackend = backends.create(name, **{k: given[k] for k in given if k in asked}, **options)
    return made


def build_engine(
    config: Config,
    backend: InferenceBackend | None = None,
    *,
    clock: Clock | None = None,
    events: EventBus | None = None,
    progress: Progress | None = None,
) -> Engine:
    """An engine around `backend`, or around the configured one. A backend with a clock of its own sets the
    engine's clock.
    """
    if backend is not None:
        return _engine_around(backend, config, clock, events)
    remote_options(config.kv)  # its errors, and those of the folder, come before the weights load
    check_kv_folder(config.kv)
    backend = build_backend(config, clock=clock, progress=progress)
    try:
        return _engine_around(backend, config, clock, events)
    except BaseException:
        backend.close()  # it may have processes
        raise


def _engine_around(
    backend: InferenceBackend, config: Config, clock: Clock | None, events: EventBus | None
) -> Engine:
    clock = clock or getattr(backend, "clock", None)
    events = events or EventBus()
    capability = backend.capability()
    passes = build_passes(config.scheduler)
    check_features(passes, capability)
    check_dropped_blocks(config.kv, capability)
    kv = build_kv(
        kv_config_of(config.kv, capability),
        capability.num_blocks,
        tiers=build_tiers(config.kv, backend, clock, events),
        window=capability.sliding_window,
        groups=capability.kv_schema.groups if capability.kv_schema else (),
        state_pages=capability.kv_schema.state_pages if capability.kv_schema else 0,
        max_chunk=config.scheduler.max_batched_tokens,
        prefill_token_s=capability.prefill_token_s,
        cost_model=prefill_costs(capability),
        clock=clock,
        events=events,
    )
    engine_type: type[Engine] = getattr(backend, "engine_type", Engine)
    return engine_type(
        backend,
        kv,
        PassPipeline(passes),
        max_batched_tokens=config.scheduler.max_batched_tokens,
        overlap=config.engine.overlap,
        speculation=build_speculation(
            config,
            capability,
            build_backend,
            clock,
            getattr(backend, "drafter", None),
            getattr(backend, "self_draft", None),
        ),
        token_copies=build_token_copies(config.kv, backend),
        recompute_tokens=config.kv.approximate_recompute_tokens,
        compress_reasoning=config.kv.compress_reasoning,
        clock=clock,
        events=events,
    )


def build_passes(config: SchedulerConfig) -> list[SchedulerPass]:
    """The passes that are listed, or those of the strategy."""
    if config.passes is None:
        return strategies.make(config.strategy, config.pass_options)
    strangers = sorted(config.pass_options.keys() - set(config.passes))
    if strangers:
        raise ConfigError(f"scheduler.pass_options: {strangers[0]} is none of {', '.join(config.passes)}")
    return [strategies.make_pass(name, config.pass_options.get(name, {})) for name in config.passes]


def check_features(passes: Sequence[SchedulerPass], capability: CapabilityDescriptor) -> None:
    """Raise `ConfigError` where a pass decides what the backend does not carry out."""
    for each in passes:
        missing = sorted(getattr(each, "requires", frozenset()) - capability.features)
        if missing:
            raise ConfigError(
                f"pass {each.name!r} needs a backend with {', '.join(missing)}; this one, on device "
                f"{capability.device!r}, has {', '.join(sorted(capability.features)) or 'no features'}: "
                f"take the pass out of scheduler.passes"
            )


def replace_strategy(engine: EngineCore, name: str, /, **options: Mapping[str, Any]) -> None:
    """Replace the scheduling strategy of a live engine, by name.

    It decides from the next step on. `options` are by name of pass. Raises `UnknownNameError` or
    `ConfigError` before anything changes.
    """
    passes = strategies.make(name, options)
    check_features(passes, engine.capability())
    engine.set_passes(passes)


def build_llm(
    config: Config,
    *,
    clock: Clock | None = None,
    events: EventBus | None = None,
    progress: Progress | None = None,
) -> LLM:
    """The configured model, ready to answer."""
    from sagellm.engines.native.from_config import read_tokenizer

    config = located(config)
    tokenizer = read_tokenizer(config)  # first: it is quick, so its errors come before the weights load
    engine = build_engine(config, clock=clock, events=events, progress=progress)
    try:
        drafter = build_reasoning_drafter(config, engine.capability(), partial(build_engine, clock=clock))
    except BaseException:
        engine.close()
        raise
    return LLM(
        engine,
        tokenizer,
        model_name=config.model.served_name or config.model.name or DEMO_NAME,
        max_model_len=engine.max_model_len,
        defaults=tokenizer.default_sampling,
        clock=clock,
        drafter=drafter,
    )


def load(model: str | None = None, settings: Mapping[str, Any] | None = None) -> LLM:
    """A model in one line: `load()`, or `load("folder", {"kv.block_size": 32})`.

    Without a model it is the demo model. `settings` are configuration keys, dotted or nested; environment
    variables and SAGELLM_CONFIG count as usual.
    """
    given = dict(settings or {})
    if model is not None:
        given["model.name"] = model
    return build_llm(load_config(cli=given, given_in="the settings of load()").config)
