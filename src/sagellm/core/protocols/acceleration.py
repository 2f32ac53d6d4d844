"""Contract of the controller of accelerations: which are on, and what each has saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sagellm.core.protocols.cot import CoTAccelerator, EarlyExit, EarlyStop, SpeculativeReasoning


@dataclass(frozen=True, slots=True)
class AccelReport:
    """One acceleration since the start.

    `is_exact`: outputs are those that would come without it. `saved` and `spent` are by unit (seconds,
    tokens, samples). What was spent would not have been without it, such as tokens proposed in vain.
    """

    name: str
    is_on: bool
    is_exact: bool
    saved: Mapping[str, float]
    spent: Mapping[str, float]


class AccelController(Protocol):
    """What of `accel` is on, and what it has saved. For the thread of the engine.

    It switches what the configuration and requests ask for, and constructs no model. How much of an
    acceleration pays at this load, each decides itself (`accel.speculative.lengths`).
    """

    def is_on(self, name: str) -> bool:
        """False also for what this engine does not have."""

    def switch(self, name: str, *, on: bool) -> None:
        """From the next step or request on. Raises `RequestError` for a name that is not in the report."""

    def early_stop(self, num_samples: int, rule: EarlyStop) -> CoTAccelerator:
        """Decides which samples of a request run; all of them where `early_stop` is off."""

    def early_exit(self, rule: EarlyExit) -> CoTAccelerator:
        """Decides when the reasoning of a choice is closed. Asked while `early_exit` is on."""

    def speculative_reasoning(self, rule: SpeculativeReasoning) -> CoTAccelerator:
        """Decides which steps of a small model stay. Asked while `speculative_reasoning` is on."""

    def count(
        self, name: str, *, saved: Mapping[str, float] | None = None, spent: Mapping[str, float] | None = None
    ) -> None:
        """Add what an acceleration has saved and spent."""

    def report(self) -> Sequence[AccelReport]:
        """All that this engine has, whether on or off."""
