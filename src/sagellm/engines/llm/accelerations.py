"""`Accelerations`: the controller of what makes an `LLM` compute less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sagellm.accel.cot.early_exit import ProbeExit
from sagellm.accel.cot.judged_steps import JudgedSteps
from sagellm.accel.cot.self_consistency import SelfConsistency
from sagellm.core.errors import RequestError, nearest
from sagellm.core.features import REASONING_KV
from sagellm.core.protocols.acceleration import AccelReport
from sagellm.core.protocols.cot import CoTAccelerator, EarlyExit, EarlyStop, SpeculativeReasoning
from sagellm.engines.reasoning_kv import ReasoningKV
from sagellm.engines.speculation import Speculation

SPECULATION, EARLY_STOP, EARLY_EXIT = "speculation", "early_stop", "early_exit"
SPECULATIVE_REASONING = "speculative_reasoning"


@dataclass(slots=True)
class _Acceleration:
    is_exact: bool
    is_on: bool = True
    saved: Counter[str] = field(default_factory=Counter)
    spent: Counter[str] = field(default_factory=Counter)


class Accelerations:
    """Implements `AccelController` for the life of an `LLM`.

    `speculation` and `reasoning_kv`: those of the engine; None: it has none. The server adds what it does
    itself.
    """

    def __init__(self, speculation: Speculation | None, reasoning_kv: ReasoningKV | None = None) -> None:
        self._speculation, self._reasoning_kv = speculation, reasoning_kv
        self._known = {name: _Acceleration(is_exact=False) for name in (EARLY_STOP, EARLY_EXIT)}
        if speculation is not None:
            self.add(SPECULATION, is_exact=True)
        if reasoning_kv is not None:
            self.add(REASONING_KV, is_exact=False)

    def add(self, name: str, *, is_exact: bool) -> None:
        """Take in an acceleration, which is on."""
        self._known[name] = _Acceleration(is_exact)

    def is_on(self, name: str) -> bool:
        return name in self._known and self._known[name].is_on

    def switch(self, name: str, *, on: bool) -> None:
        if name not in self._known:
            known = ", ".join(self._known)
            hint = nearest(name, self._known)
            raise RequestError(f"no acceleration {name!r} is configured here: {known} are.{hint}", "name")
        self._known[name].is_on = on
        if name == SPECULATION and self._speculation is not None:
            self._speculation.is_on = on
        if name == REASONING_KV and self._reasoning_kv is not None:
            self._reasoning_kv.is_on = on

    def early_stop(self, num_samples: int, rule: EarlyStop) -> CoTAccelerator:
        return SelfConsistency(num_samples, rule if self.is_on(EARLY_STOP) else None)

    def early_exit(self, rule: EarlyExit) -> CoTAccelerator:
        return ProbeExit(rule)

    def speculative_reasoning(self, rule: SpeculativeReasoning) -> CoTAccelerator:
        return JudgedSteps(rule)

    def count(
        self, name: str, *, saved: Mapping[str, float] | None = None, spent: Mapping[str, float] | None = None
    ) -> None:
        self._known[name].saved.update(saved or {})
        self._known[name].spent.update(spent or {})

    def report(self) -> Sequence[AccelReport]:
        return [self._report(name, known) for name, known in self._known.items()]

    def _report(self, name: str, known: _Acceleration) -> AccelReport:
        saved, spent = dict[str, float](known.saved), dict[str, float](known.spent)
        if name == SPECULATION and self._speculation is not None:
            speculation = self._speculation
            accepted = speculation.num_accepted
            saved = {"tokens": accepted, "seconds": speculation.counts().saved_s}
            spent = {"tokens": speculation.num_proposed - accepted}
        if name == REASONING_KV and self._reasoning_kv is not None:
            saved = {"kv_tokens": self._reasoning_kv.num_tokens}
        return AccelReport(name, known.is_on, known.is_exact, saved, spent)
