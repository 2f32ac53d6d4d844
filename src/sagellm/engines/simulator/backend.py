"""`SimulatedBackend` computes nothing and takes the time that a cost model says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

from sagellm.core.blocks import Tier, cdiv
from sagellm.core.clock import Clock, ManualClock
from sagellm.core.config import Config
from sagellm.core.errors import CapacityError, ConfigError
from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.core.protocols.kv_tiers import BlockStorage
from sagellm.core.types import CapabilityDescriptor, KVCacheSchema, TokenLogprob
from sagellm.engines.simulator.cost_model import CostModel, StepShape
from sagellm.engines.simulator.devices import GIB, device
from sagellm.engines.simulator.fast_forward import SimulatedEngine
from sagellm.engines.simulator.models import ModelShape, model
from sagellm.engines.simulator.tiers import SimulatedMigrator, SimulatedStorage
from sagellm.kvmgr.kv_pool.tiers.migrator import HashesOf, Migrator

StepListener = Callable[[StepShape, float], None]
"""Called with the shape of each step and its seconds, before the clock moves."""

LONG_PROMPT = 2048
"""Tokens of the chunk from whose price `prefill_token_s` follows."""


class SimulatedBackend:
    """Implements `InferenceBackend` on a simulated clock, which `execute` advances.

    All tokens of a request are the same token, a hash of its id that never ends it, so that outputs of two
    requests do not look like a shared prefix. The work per step depends on rows, never on tokens.
    """

    engine_type = SimulatedEngine

    def __init__(
        self,
        cost_model: CostModel,
        clock: ManualClock,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        vocab_size: int | None = None,
        on_step: StepListener | None = None,
    ) -> None:
        model = cost_model.model
        self.cost_model = cost_model
        self.clock = clock
        self._on_step = on_step
        self._bytes_per_block = model.kv_bytes_per_token * block_size
        prefill_s, behind_s = (
            cost_model.step_s(StepShape(prefills=((first, LONG_PROMPT),))) for first in (0, LONG_PROMPT)
        )
        self._capability = CapabilityDescriptor(
            cost_model.device.name,
            model.dtype,
            vocab_size or model.vocab_size,
            max_model_len or model.max_model_len,
            num_blocks,
            block_size,
            max_num_seqs,
            model.kv_schema(block_size),
            memory_bytes=cost_model.device.memory_bytes,
            prefill_token_s=prefill_s / LONG_PROMPT,
            prefill_token_squared_s=(behind_s - prefill_s) / LONG_PROMPT**2,
        )
        self._tokens: dict[int, int] = {}
        self._wants_logprobs: set[int] = set()
        self._next = StepShape()
        self._migrator: SimulatedMigrator | None = None

    def capability(self) -> CapabilityDescriptor:
        return self._capability

    def get_kv_schema(self) -> KVCacheSchema:
        assert self._capability.kv_schema is not None
        return self._capability.kv_schema

    def simulated_tiers(
        self, num_slots: Mapping[Tier, int], hashes_of: HashesOf
    ) -> tuple[Mapping[Tier, BlockStorage], Migrator]:
        """Tiers with so many slots, and what moves blocks to and from them.

        Each device of a tensor-parallel group moves its heads over its own PCIe link; they share the disk.
        """
        storages = {tier: SimulatedStorage(count) for tier, count in num_slots.items()}
        device, model = self.cost_model.device, self.cost_model.model
        num_links = min(self.cost_model.tensor_parallel, model.num_kv_heads)
        self._migrator = SimulatedMigrator(
            storages,
            hashes_of,
            self.clock,
            bytes_per_block=self.get_kv_schema().bytes_per_block,
            pcie=num_links * device.pcie,
            nvme=device.nvme,
        )
        return storages, self._migrator

    @property
    def next_kv_report_s(self) -> float:
        """When the next move of KV between tiers ends; infinite without any."""
        return math.inf if self._migrator is None else self._migrator.next_report_s

    def execute(self, plan: ExecutionPlan) -> StepResult:
        for join in plan.joined:
            ends = join.eos_token_ids.union(join.params.stop_token_ids)
            self._tokens[join.row] = self.token_of(join.request_id, ends)
            if join.params.logprobs is None:
                self._wants_logprobs.discard(join.row)
            else:
                self._wants_logprobs.add(join.row)
        shape = self.shape_of(plan)
        seconds = self.cost_model.step_s(shape)
        if self._on_step is not None:
            self._on_step(shape, seconds)
        self.clock.advance(seconds)
        tokens = self._tokens
        drawn = tuple([tokens[row] for row in plan.sample_rows])
        if not self._wants_logprobs and not plan.chains:
            return StepResult(plan.step, drawn, {})
        accepted = {
            chain.row: len(chain.accepted([tokens[chain.row]] * (1 + len(chain.token_ids))))
            for chain in plan.chains
        }
        drawn = tuple([tokens[row] for row in plan.sample_rows for _ in range(1 + accepted.get(row, 0))])
        logprobs = {
            row: (TokenLogprob(tokens[row], 0.0),) * (1 + accepted.get(row, 0))
            for row in self._wants_logprobs.intersection(plan.sample_rows)
        }
        return StepResult(plan.step, drawn, logprobs, num_accepted=tuple(accepted.values()))

    def price_decodes(self, positions: Sequence[int], num_steps: int) -> list[float]:
        """Seconds of each of the next `num_steps` steps, which only decode.

        `positions`: where the rows decode in the first of them. The seconds are those that `execute` would
        take for one step after the other; `pass_decodes` lets them pass.
        """
        num_decodes = len(positions)
        self._next = StepShape(num_decodes, sum(positions) + num_decodes)
        found: list[float] = self.cost_model.decode_steps_s(self._next, num_steps).tolist()
        return found

    def pass_decodes(self, seconds: Sequence[float]) -> None:
        """Let the time of the next steps pass that `price_decodes` has priced."""
        for step_s in seconds:
            if self._on_step is not None:
                self._on_step(self._next, step_s)
                context = self._next.decode_context + self._next.num_decodes
                self._next = self._next._replace(decode_context=context)
            self.clock.advance(step_s)

    def repeated_tokens(self, rows: Sequence[int]) -> Sequence[int]:
        """The token that each row draws in every step."""
        return [self._tokens[row] for row in rows]

    def close(self) -> None:
        self._tokens.clear()

    def shape_of(self, plan: ExecutionPlan) -> StepShape:
        """What the plan computes and moves. A row with a chain costs as much as a chunk of its length."""
        num_decodes, decode_context = len(plan.decode_positions), sum(plan.decode_positions)
        chunks = [(op.start, op.num_tokens) for op in plan.prefills]
        if plan.chains:
            position_of = dict(zip(plan.decode_rows, plan.decode_positions, strict=True))
            chunks += [(position_of[chain.row], 1 + len(chain.token_ids)) for chain in plan.chains]
            num_decodes -= len(plan.chains)
            decode_context -= sum(position_of[chain.row] for chain in plan.chains)
        return StepShape(
            num_decodes,
            decode_context + num_decodes,
            tuple(chunks),
            len(plan.copies) * self._bytes_per_block,
            sum(len(transfer.block_ids) for transfer in plan.transfers) * self._bytes_per_block,
        )

    def token_of(self, request_id: str, ends: frozenset[int] = frozenset()) -> int:
        """The token that a request draws in every step; none of `ends`."""
        digest = blake2b(request_id.encode(), digest_size=8).digest()
        size = self._capability.vocab_size
        first = int.from_bytes(digest, "little") % size
        return next(token for token in ((first + i) % size for i in range(size)) if token not in ends)


def simulated_backend(
    config: Config,
    *,
    clock: Clock | None = None,
    hardware: str = "h100-80g",
    shape: str = "llama-3.1-8b",
    tensor_parallel: int = 1,
) -> SimulatedBackend:
    """A simulated device and model by name, with the default coefficients.

    The clock must be a `ManualClock`, which the backend moves; without one it makes its own. Raises
    `ConfigError` for unknown names and for another clock.
    """
    if clock is not None and not isinstance(clock, ManualClock):
        raise ConfigError(f"a simulated backend moves its clock: give a ManualClock, not {clock!r}")
    cost_model = CostModel(device(hardware), model(shape), tensor_parallel=tensor_parallel)
    return configured_backend(cost_model, config, clock or ManualClock())


def configured_backend(
    cost_model: CostModel,
    config: Config,
    clock: ManualClock,
    *,
    max_model_len: int | None = None,
    on_step: StepListener | None = None,
) -> SimulatedBackend:
    """The backend of an instance with this configuration; `max_model_len` goes before that of `config`."""
    return SimulatedBackend(
        cost_model,
        clock,
        num_blocks=configured_blocks(cost_model, config),
        block_size=config.kv.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=max_model_len or config.model.max_model_len,
        on_step=on_step,
    )


def configured_blocks(cost_model: CostModel, config: Config) -> int:
    """`kv.num_blocks`, or what memory leaves; raises `CapacityError` if that is nothing."""
    return config.kv.num_blocks or num_kv_blocks(
        cost_model,
        block_size=config.kv.block_size,
        utilization=config.kv.memory_fraction or UTILIZATION,
        max_batched_tokens=config.scheduler.max_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
    )


# -- memory on a device

UTILIZATION = 0.9
"""Default share of the device's memory for weights, activations and KV."""
RUNTIME_BYTES = GIB // 5
"""Memory that libraries and communication hold outside the allocator of tensors."""
SAMPLER_BYTES = 24
"""Bytes per row and vocabulary entry at the peak of sampling.

These are logits, sorted logits, probabilities and their sums as float32, and the order as int64."""


def activation_bytes(
    model: ModelShape, max_batched_tokens: int, max_num_seqs: int, tensor_parallel: int = 1
) -> int:
    """Peak memory of one device beside weights and KV.

    It is the sum of the widest layer in a full step and the sampler on a full batch, since an allocator keeps
    the memory of one while the other runs.
    """
    width = model.shared_intermediate_size + model.intermediate_size * max(1, model.experts_per_token)
    layer = max_batched_tokens * (3 * width // tensor_parallel + 3 * model.hidden_size) * model.itemsize
    return layer + max_num_seqs * model.vocab_size * SAMPLER_BYTES


def num_kv_blocks(
    cost_model: CostModel,
    *,
    block_size: int = 16,
    utilization: float = UTILIZATION,
    max_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
) -> int:
    """Blocks of `block_size` tokens that fit beside the model; raises `CapacityError` if none does.

    Blocks, rows and tokens count all data-parallel groups together.
    """
    device, model, shards = cost_model.device, cost_model.model, cost_model.tensor_parallel
    experts = model.num_experts * model.expert_params * model.itemsize
    weights = cdiv(model.weight_bytes - experts, shards) + cdiv(experts, cost_model.num_devices)
    usable = int(device.memory_bytes * utilization) - RUNTIME_BYTES - weights
    groups = cost_model.data_parallel
    usable -= activation_bytes(model, cdiv(max_batched_tokens, groups), cdiv(max_num_seqs, groups), shards)
    blocks = usable // (cdiv(model.kv_bytes_per_token, min(shards, model.num_kv_heads)) * block_size)
    if blocks < 1:
        need = weights / GIB
        raise CapacityError(
            f"{model.name} ({need:.1f} GiB of weights per device) leaves no room for KV on {device.name} "
            f"({device.memory_bytes / GIB:.1f} GiB) with a memory fraction of {utilization:g}: take "
            "more devices (tensor parallel), a larger one or a larger kv.memory_fraction"
        )
    return blocks * groups
