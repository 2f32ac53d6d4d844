"""What the backend `sagellm` makes: SGLang's own TreeCore watched, or one guided.

    SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=sagellm [SAGELLM_MODE=on] python -m sglang.launch_server ...

In the mode `shadow` SGLang's own TreeCore decides everything; `Follower` sees what requests do, by methods of
the cache that each of them passes. In the mode `on` the Python TreeCore is guided.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import create_tree_core

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import ConfigError, RequestError
from sagellm.core.protocols.eviction import PolicyFactory, Use
from sagellm.core.types import Tokens
from sagellm.engines.guests.comparison import Comparison
from sagellm.engines.guests.request_hints import NO_HINTS, RequestHints, hints_of
from sagellm.engines.guests.settings import GuestSettings
from sagellm.engines.sglang.mirror import TOKENS_PER_ID, Mirror, namespace_of, path_of_ids

logger = logging.getLogger("sagellm.sglang")
STOCK = "rust"
"""SGLang's default; it takes the Python TreeCore itself where the other cannot be used."""
RANKS = ("tp_cache_group", "attn_cp_cache_group", "attn_tp_cache_group", "pp_cache_group")
CACHE_NAMES = (
    "checkpoint_into_tree", "on_release", "evict_for_alloc", "reset", "token_to_kv_pool_allocator",
)  # fmt: skip
MAX_RUNNING = 8192
"""Requests that are followed at a time; the oldest is dropped then."""


def settings_of(environment: Mapping[str, str]) -> GuestSettings:
    """`SAGELLM_MODE`, `SAGELLM_POLICY`, `SAGELLM_OPTIONS`, `SAGELLM_HINTS` and `SAGELLM_REPORT_S`.

    The last three are JSON.

    Raises `ConfigError` for what is not known.
    """
    given: dict[str, Any] = {
        name: environment[f"SAGELLM_{name.upper()}"]
        for name in ("mode", "policy")
        if environment.get(f"SAGELLM_{name.upper()}")
    }
    for name in ("options", "hints", "report_s"):
        text = environment.get(f"SAGELLM_{name.upper()}")
        if text:
            try:
                given[name] = json.loads(text)
            except ValueError as error:
                raise ConfigError(f"SAGELLM_{name.upper()}={text!r} is not JSON: {error}") from error
    return GuestSettings.of(given)


def tree_core(params: Any, components: Any) -> Any:
    """A TreeCore for SGLang's cache, by the settings of the environment."""
    return make_core(params, components, settings_of(os.environ), MonotonicClock())


def make_core(
    params: Any, components: Any, settings: GuestSettings, clock: Clock, policy: PolicyFactory | None = None
) -> Any:
    """A TreeCore for SGLang's cache. `policy`: in place of that of the settings."""
    refusal = _refusal(params, components)
    if params.disable or refusal:
        if not params.disable:
            logger.warning("sageLLM does nothing here: %s", refusal)
        return create_tree_core(STOCK, params, components)
    cache, page_size = components[ComponentType.FULL].cache, params.page_size
    capacity = params.token_to_kv_pool_allocator.size // page_size
    comparison = Comparison("SGLang", capacity, page_size, TOKENS_PER_ID * page_size, settings, clock, logger)
    core = None
    if settings.mode == "on":
        core = _guided(params, components, comparison, clock, policy or comparison.policy)
    Follower(cache, core, comparison, page_size)
    return core if core is not None else create_tree_core(STOCK, params, components)


def _refusal(params: Any, components: Any) -> str:
    """Why nothing is done for this cache; empty if something can be."""
    if set(components) != {ComponentType.FULL}:
        names = ", ".join(component.name for component in components)
        return f"the cache has the components {names}; full attention alone is supported"
    if params.is_eagle:
        return "keys of the EAGLE kind (bigrams) are not supported"
    if params.enable_session_radix_cache:
        return "--enable-session-radix-cache orders evictions by sessions"
    groups = [getattr(params, name, None) for name in RANKS]
    if any(group is not None and group.size() > 1 for group in groups):
        return "several ranks must evict alike, and our policies look at each rank's own clock"
    cache = getattr(components[ComponentType.FULL], "cache", None)
    missing = [name for name in CACHE_NAMES if not hasattr(cache, name)]
    return f"{type(cache).__name__} of this SGLang has no {', '.join(missing)}" if missing else ""


def _guided(params: Any, components: Any, comparison: Comparison, clock: Clock, policy: PolicyFactory) -> Any:
    """A guided TreeCore; None, with a warning, where a name has moved."""
    try:
        from sagellm.engines.sglang.tree_core import GuidedTreeCore, require_names

        core = GuidedTreeCore(params, components)
        require_names(core)
    except (ImportError, AttributeError) as error:
        logger.warning("sageLLM: SGLang evicts in its own order: %s", error)
        return None
    core.guide(
        lambda: Mirror(params.page_size, policy, clock, comparison.settings.hints),
        params.token_to_kv_pool_allocator.available_size,
    )
    comparison.guide = core
    return core


class Followed(NamedTuple):
    """A request that has begun and not ended. `num_found`: pages that it reused."""

    req: ReferenceType[Any]
    num_found: int

    def is_of(self, req: Any) -> bool:
        """Whether it is this object, and not another one with its id."""
        return self.req() is req


class Follower:
    """Wraps methods of one cache, to see its requests begin, end, and need room.

    `core` is the guided TreeCore, None in the mode `shadow`. An error ends the comparison, not the serving.
    """

    def __init__(self, cache: Any, core: Any, comparison: Comparison, page_size: int) -> None:
        self._core, self._page_size = core, page_size
        self._comparison: Comparison | None = comparison
        self._running: dict[str, Followed] = {}
        self._gone: list[str] = []
        self._hears_hints, self._warned_of_hints = bool(comparison.settings.hints), False
        self._wrap(cache)
        if core is not None:
            self._wrap_eviction(cache, core)

    def _wrap(self, cache: Any) -> None:
        checkpoint_into_tree, on_release, reset = cache.checkpoint_into_tree, cache.on_release, cache.reset

        def checkpoint_and_follow(req: Any, *, up_to: int, **options: Any) -> None:
            self._heard(self._before_checkpoint, req)
            if self._core is None:
                checkpoint_into_tree(req, up_to=up_to, **options)
            else:
                self._core.locks_move()
                try:
                    checkpoint_into_tree(req, up_to=up_to, **options)
                finally:
                    self._core.locks_moved()
            if req.finished():
                self._heard(self._ends, req, req.full_untruncated_fill_ids[:up_to])

        def release_and_follow(req: Any, **options: Any) -> None:
            on_release(req, **options)
            if req.finished():
                self._heard(self._ends, req, ())

        def reset_and_clear() -> None:
            reset()
            self._heard(self._cleared)

        cache.checkpoint_into_tree, cache.on_release = checkpoint_and_follow, release_and_follow
        cache.reset = reset_and_clear

    def _wrap_eviction(self, cache: Any, core: Any) -> None:
        """Tell the TreeCore how much room is needed; SGLang does not."""
        evict_for_alloc, allocator = cache.evict_for_alloc, cache.token_to_kv_pool_allocator

        def evict_what_is_needed(params: Any, **options: Any) -> Any:
            if options.get("allocation_reclaim_satisfied") is None:
                core.wanted_free = allocator.available_size() + params.num_tokens
            try:
                return evict_for_alloc(params, **options)
            finally:
                core.wanted_free = None

        cache.evict_for_alloc = evict_what_is_needed

    def _heard(self, listener: Callable[..., None], *arguments: Any) -> None:
        if self._comparison is None:
            return
        try:
            listener(*arguments)
        except Exception as error:
            logger.debug("sageLLM: %s failed", listener.__name__, exc_info=True)
            logger.warning("sageLLM no longer counts what is reused: %s", f"{type(error).__name__}: {error}")
            self._comparison = None
            if self._core is not None:
                self._core.give_back("what it reuses cannot be compared with LRU any more")

    # -- requests

    def _before_checkpoint(self, req: Any) -> None:
        """KV enters the tree: after each chunk of a prompt, and at the end."""
        known = self._running.get(req.rid)
        if self._comparison is None or (known is not None and known.is_of(req)):
            return
        if known is not None:
            self._drop(req.rid, self._comparison)
        self._drop_gone(self._comparison)
        prompt, size = req.origin_input_ids, self._page_size
        num_found = min((req.kv.cache_protected_len - req.host_loaded_length) // size, len(prompt) // size)
        if len(self._running) >= MAX_RUNNING:
            self._drop(next(iter(self._running)), self._comparison)
        rid = req.rid
        self._running[rid] = Followed(ref(req, lambda _: self._gone.append(rid)), num_found)
        path, space = self._path(prompt), namespace_of(req)
        self._comparison.began(req.rid, path, num_found, len(prompt), space)
        if self._core is not None:
            self._core.request_began(req.last_node)

    def _drop_gone(self, comparison: Comparison) -> None:
        """Let go of requests that were retracted and are gone.

        SGLang does not say so where one is aborted while it waits.
        """
        while self._gone:
            rid = self._gone.pop()
            if rid in self._running and self._running[rid].is_of(None):
                self._drop(rid, comparison)

    def _drop(self, rid: str, comparison: Comparison) -> None:
        """Follow a request no longer; it has no end that policies learn from."""
        del self._running[rid]
        comparison.ended(rid, Tokens())

    def _ends(self, req: Any, ids: Sequence[int]) -> None:
        """A request has ended with these token ids in the tree."""
        known = self._running.get(req.rid)
        if known is None or not known.is_of(req) or self._comparison is None:
            return
        num_found = self._running.pop(req.rid).num_found
        num_blocks = len(req.origin_input_ids) // self._page_size
        use = Use(len(req.output_ids), num_found, num_blocks, req.priority or 0)
        said = self._said(req)
        if self._core is not None and ids:
            self._core.request_ends(req.last_node, use, said)
        self._comparison.ended(req.rid, self._path(ids), use, said)

    def _said(self, req: Any) -> RequestHints:
        """The hints in the `custom_params` of a request. Wrong ones are ignored, with one warning."""
        fields = req.sampling_params.custom_params if self._hears_hints else None
        if not fields:
            return NO_HINTS
        try:
            return hints_of(fields)
        except RequestError as error:
            if not self._warned_of_hints:
                logger.warning("sageLLM: hints of request %s are ignored: %s", req.rid, error)
            self._warned_of_hints = True
            return NO_HINTS

    def _path(self, ids: Sequence[int]) -> Tokens:
        """The path of whole pages."""
        whole = ids[: len(ids) - len(ids) % self._page_size]
        return path_of_ids(whole if isinstance(whole, array) else array("q", whole))

    def _cleared(self) -> None:
        if self._comparison is not None:
            self._comparison.cleared()
