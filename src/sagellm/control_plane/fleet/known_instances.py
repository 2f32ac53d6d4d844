"""`KnownInstances`: what a front knows of its instances, and what it asks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sagellm.control_plane.fleet.counters import FleetCounters
from sagellm.control_plane.fleet.facts import joint_capability
from sagellm.control_plane.fleet.members import Member
from sagellm.control_plane.fleet.questions import Questions
from sagellm.control_plane.fleet.sums import summed_outcomes
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.core.clock import Clock
from sagellm.core.errors import EngineFailedError, RequestError
from sagellm.core.kv_hints import HintOutcome, KVHintsEnvelope
from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats, PinnedPrefix, PromptExplanation
from sagellm.core.protocols.eviction import EvictionPolicy
from sagellm.core.protocols.fleet import InstanceFacts
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.types import CapabilityDescriptor, Namespace, Tokens

FIGURES_S = {"stats": 1.0, "diagnostics": 5.0}
"""Each instance is asked for its figures so often. The second look at every block."""


class KnownInstances:
    """The part of `FleetEngine` that has no requests.

    Figures are those that instances last gave; nothing waits for them. Pins, hints and the like ask instances
    and wait: on the thread of the caller, while the thread that steps goes on (`Questions.ask`).
    """

    def __init__(
        self,
        prefixes: PrefixIndex,
        namespace_of: Callable[[Namespace], Namespace],
        clock: Clock,
        *,
        turn: Callable[[float], None],
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._prefixes, self._namespace_of, self._clock = prefixes, namespace_of, clock
        self._call_soon = call_soon
        self.members: dict[str, Member] = {}
        self._questions = Questions(turn, call_soon, clock)
        self._counters = FleetCounters()
        self._next_figures_s = dict.fromkeys(FIGURES_S, clock.now())
        self._capability: CapabilityDescriptor | None = None
        self._max_model_len = 0

    # -- what is known

    def _ready(self) -> list[Member]:
        return [member for member in list(self.members.values()) if member.is_ready]

    def _facts(self) -> list[InstanceFacts]:
        return [member.facts for member in self._ready() if member.facts is not None]

    @property
    def missing(self) -> list[str]:
        """The instances that are not connected, or have not reported, and why. For any thread."""
        away = [(name, each.why) for name, each in list(self.members.items()) if not each.is_here]
        return [f"{name} ({why})" if why else name for name, why in away]

    @property
    def has_instance(self) -> bool:
        """Whether an instance is there, also if it is drained. Any serves whole requests if it must."""
        return any(each.is_here for each in list(self.members.values()))

    @property
    def max_model_len(self) -> int:
        """The longest context that every instance has, or had when there was one."""
        known = [facts.max_model_len for facts in self._facts()]
        self._max_model_len = min(known, default=self._max_model_len)
        return self._max_model_len

    def capability(self) -> CapabilityDescriptor:
        """Of all instances together. Raises `EngineFailedError` while none is connected."""
        known = self._facts()
        if known:
            self._capability = joint_capability(known)
        elif self._capability is None:
            raise EngineFailedError("no instance of this fleet is connected")
        return self._capability

    # -- figures

    def _ask_for_figures(self, now_s: float) -> None:
        for name, interval_s in FIGURES_S.items():
            if now_s >= self._next_figures_s[name]:
                self._next_figures_s[name] = now_s + interval_s
                self._questions.ask_for_figures(self._ready(), name, self._on_figures)

    def _on_figures(self, instance_id: str, figures: EngineStats | EngineDiagnostics) -> None:
        member = self.members.get(instance_id)
        if member is None or not member.is_ready:
            return
        self._counters.take(instance_id, figures)
        if isinstance(figures, EngineStats):
            member.stats = figures
        else:
            member.diagnostics = figures

    def tier_faults(self) -> tuple[str, ...]:
        return tuple(
            f"{name}: {fault}"
            for name, member in list(self.members.items())
            for fault in (member.stats.tier_faults if member.stats is not None else ())
        )

    def diagnostics(self) -> EngineDiagnostics:
        """Of all instances, as they last reported."""
        present = {name for name, member in self.members.items() if member.diagnostics is not None}
        return self._counters.diagnostics(present)

    # -- questions

    def pin_prefix(self, tokens: Tokens, namespace: Namespace) -> PinnedPrefix:
        chosen: list[tuple[Member, InstanceFacts | None]] = []

        def choose() -> Sequence[Member]:
            members = self._with_most_cached(tokens, namespace)[:1]
            chosen.extend((member, member.facts) for member in members)
            return members

        [pinned] = self._questions.ask(choose, "pin", (tokens, namespace))
        [(member, facts)] = chosen

        def unpin() -> None:
            if member.facts is facts:  # else the session is over, and the pin with it
                member.client.call("unpin", (pinned.pin_id,))

        return PinnedPrefix(pinned.num_tokens, pinned.num_blocks, lambda: self._call_soon(unpin))

    def clear_cache(self, *, tiers: bool = False) -> int:
        return sum(self._questions.ask(self._ready, "clear_cache", (tiers,)))

    def hint(self, envelope: KVHintsEnvelope, namespace: Namespace) -> Sequence[HintOutcome]:
        return summed_outcomes(self._questions.ask(self._ready, "hint", (envelope, namespace)))

    def explain(
        self, tokens: Tokens, namespace: Namespace, session_id: str | None = None
    ) -> PromptExplanation:
        asked = tokens, namespace, session_id
        explained: PromptExplanation
        [explained] = self._questions.ask(
            lambda: self._with_most_cached(tokens, namespace)[:1], "explain", asked
        )
        return explained

    def set_policy(self, factory: Callable[[], EvictionPolicy]) -> None:
        raise RequestError("instances of a fleet are processes: give the name to replace_policy")

    def set_passes(self, passes: Sequence[SchedulerPass]) -> None:
        raise RequestError("instances of a fleet are processes: give the name to replace_strategy")

    def replace_policy(self, name: str, options: dict[str, Any]) -> None:
        """Have every instance evict by this policy from now on."""
        self._questions.ask(self._ready, "set_policy", (name, options))

    def replace_strategy(self, name: str, options: dict[str, dict[str, Any]]) -> None:
        """Have every instance schedule by this strategy from now on."""
        self._questions.ask(self._ready, "set_strategy", (name, options))

    def _with_most_cached(self, tokens: Tokens, namespace: Namespace) -> list[Member]:
        """Those that know most of a prompt, all equally much; none without an instance."""
        ready = {member.client.instance_id: member for member in self._ready()}
        cached = self._prefixes.lookup(tokens, self._namespace_of(namespace), list(ready))
        most = max((each.num_tokens for each in cached), default=0)
        return [
            member for member, each in zip(ready.values(), cached, strict=True) if each.num_tokens == most
        ]
