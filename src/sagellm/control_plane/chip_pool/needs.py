"""What an instance needs, and what a request costs it on given chips: a roofline (Williams et al. 2009)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sagellm.control_plane.instance_types import serves_answers
from sagellm.core.protocols.chip_pool import ChipCapability
from sagellm.core.protocols.router import InstanceType
from sagellm.core.protocols.topology import DeviceKind

CHUNK_TOKENS = 2048
"""Prompt tokens for which a step reads the weights once."""


@dataclass(frozen=True, slots=True)
class RequestWork:
    """The model and the average request. Defaults: 8 B parameters in 16 bits, 32 layers of 8 x 128 KV."""

    num_params: float = 8e9
    weight_bytes: float = 16e9
    kv_bytes_per_token: float = 131072.0
    prompt_tokens: int = 2000
    answer_tokens: int = 200
    batch: int = 32

    def __post_init__(self) -> None:
        positive = (self.num_params, self.weight_bytes, self.prompt_tokens, self.answer_tokens, self.batch)
        if min(positive) <= 0 or self.kv_bytes_per_token < 0:
            raise ValueError("work of a request: all figures are positive")

    def prefill_s(self, flops: float, bytes_per_s: float) -> float:
        """Seconds to compute a prompt."""
        token_s = max(2 * self.num_params / flops, self.weight_bytes / CHUNK_TOKENS / bytes_per_s)
        return self.prompt_tokens * token_s

    def decode_s(self, flops: float, bytes_per_s: float) -> float:
        """Seconds that an answer keeps the chips busy: its part of steps of `batch` rows."""
        context = self.prompt_tokens + self.answer_tokens / 2
        read = self.weight_bytes + self.batch * context * self.kv_bytes_per_token
        step_s = max(2 * self.num_params * self.batch / flops, read / bytes_per_s)
        return self.answer_tokens * step_s / self.batch


@dataclass(frozen=True, slots=True)
class InstanceNeeds:
    """What one instance asks of the pool.

    `num_chips`: equal, joined accelerators; 0: it runs on CPU cores. `kind` and `chip_names` limit which.
    `memory_bytes`: of each chip, or of the node for an instance on CPU cores. `num_cores`: reserved for it;
    0: it runs on cores that no instance has reserved, with others. An instance that is not
    `is_exclusive` may share its chip with others of that sort, by memory.
    """

    name: str
    type: InstanceType = InstanceType.GENERAL
    num_chips: int = 1
    kind: DeviceKind | None = None
    chip_names: frozenset[str] = frozenset()
    is_exclusive: bool = True
    memory_bytes: int = 0
    num_cores: int = 0
    work: RequestWork = RequestWork()

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("an instance has a name: it owns what it reserves")
        if min(self.num_chips, self.memory_bytes, self.num_cores) < 0:
            raise ValueError(f"{self.name}: chips, cores and memory are not negative")
        if not self.is_exclusive and (self.num_chips != 1 or not self.memory_bytes):
            raise ValueError(f"{self.name}: a shared chip is one chip, of which some memory_bytes are reserved")

    def takes(self, chip: ChipCapability) -> bool:
        """Whether the chip would do, were it free."""
        if chip.is_cpu != (self.num_chips == 0) or chip.memory_bytes < self.memory_bytes:
            return False
        return self.kind in (None, chip.kind) and (not self.chip_names or chip.name in self.chip_names)

    def request_s(self, chip: ChipCapability, share: float = 1.0) -> float:
        """Seconds that a request keeps the instance busy, with a `share` of each of its chips."""
        part = share * max(1, self.num_chips)
        flops, bytes_per_s = chip.flops * part, chip.bandwidth_bytes_per_s * part
        prefill_s, decode_s = self.work.prefill_s(flops, bytes_per_s), self.work.decode_s(flops, bytes_per_s)
        if not serves_answers(self.type):
            return prefill_s
        return decode_s if self.type is InstanceType.DECODING else prefill_s + decode_s


def stage_weights(needs: Sequence[InstanceNeeds]) -> list[float]:
    """One over the instances of the same type: with these, costs sum to the seconds of a mean request."""
    kinds = [each.type for each in needs]
    count = {kind: kinds.count(kind) for kind in set(kinds)}
    return [1.0 / count[kind] for kind in kinds]
