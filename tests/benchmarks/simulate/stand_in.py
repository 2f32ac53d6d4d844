"""Hardware whose steps take what a test says, and workloads that fit on a hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sagellm.benchmarks.simulate.hardware import Hardware
from sagellm.benchmarks.simulate.simulation import ClusterLayout, ServiceGoals, SimulationResult, simulate
from sagellm.benchmarks.simulate.workload import WorkloadSpec, workload
from sagellm.benchmarks.traces import Trace, TraceRequest
from sagellm.core.clock import ManualClock
from sagellm.core.config import Config
from sagellm.core.config_layers import given_layer, resolve
from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.core.types import CapabilityDescriptor, KVCacheSchema, Namespace, Tokens
from sagellm.engines.simulator.cost_model import CostModel
from sagellm.engines.simulator.devices import device
from sagellm.engines.simulator.models import model

VOCAB = 70_000
STEP_S = 0.01
StepTime = Callable[[ExecutionPlan], float]


class FixedStepBackend:
    """Every step takes what `step_s` says of its plan, and every token drawn for a row is its number."""

    def __init__(self, clock: ManualClock, config: Config, num_blocks: int, step_s: StepTime) -> None:
        schema = KVCacheSchema(1, 1, 1, "int8", config.kv.block_size, "none")
        self._capability = CapabilityDescriptor(
            "stand-in", "int8", VOCAB, num_blocks * config.kv.block_size, num_blocks, config.kv.block_size,
            config.scheduler.max_num_seqs, schema,
        )  # fmt: skip
        self._clock = clock
        self._step_s = step_s

    def capability(self) -> CapabilityDescriptor:
        return self._capability

    def get_kv_schema(self) -> KVCacheSchema:
        assert self._capability.kv_schema is not None
        return self._capability.kv_schema

    def execute(self, plan: ExecutionPlan) -> StepResult:
        self._clock.advance(self._step_s(plan))
        return StepResult(plan.step, tuple(plan.sample_rows))

    def close(self) -> None:
        """Holds nothing."""


@dataclass(frozen=True)
class StandIn(Hardware):
    """A machine of `blocks` KV blocks; 2 bytes of KV per token. Its cost model prices nothing."""

    cost_model: CostModel = field(init=False)
    blocks: int = 1000
    step_s: StepTime = lambda plan: STEP_S
    network_bytes_per_s: float = 1000.0
    num_devices: int = 1

    def __post_init__(self) -> None:
        card = replace(device("l4"), network=self.network_bytes_per_s)
        shape = replace(model("llama-3.2-1b"), vocab_size=VOCAB)
        cost_model = CostModel(card, shape, tensor_parallel=self.num_devices)
        object.__setattr__(self, "cost_model", cost_model)

    def max_model_len(self, config: Config) -> int:
        return self.blocks * config.kv.block_size

    def num_blocks(self, config: Config) -> int:
        return self.blocks

    def backend(self, clock: ManualClock, config: Config) -> InferenceBackend:
        return FixedStepBackend(clock, config, self.blocks, self.step_s)

    def described(self) -> dict[str, Any]:
        return {"device": "stand-in", "model": "none", "tensor_parallel": 1}


def config(**settings: Any) -> Config:
    """Blocks of 4 tokens, steps of 16; keys are written `kv__num_blocks`."""
    made: dict[str, Any] = {
        "scheduler.max_num_seqs": 8,
        "scheduler.max_batched_tokens": 16,
        "kv.block_size": 4,
    }
    made |= {"kv.eviction": "lru", "scheduler.strategy": "fifo"}
    made |= {name.replace("__", "."): value for name, value in settings.items()}
    return resolve([given_layer(made)]).config


def request(
    time_s: float,
    num_input: int,
    num_output: int,
    ids: Sequence[int] = (),
    session: str | None = None,
    namespace: str = "",
    meta: Mapping[str, Any] | None = None,
) -> TraceRequest:
    return TraceRequest(
        time_s, Tokens(ids), Namespace(namespace), num_input, num_output, session, meta=meta or {}
    )


def trace(*requests: TraceRequest, block_tokens: int = 8) -> Trace:
    return Trace("made", "made", block_tokens, requests)


def served(
    made: Trace,
    *,
    spec: WorkloadSpec | None = None,
    machine: StandIn | None = None,
    layout: ClusterLayout | None = None,
    goals: ServiceGoals | None = None,
    preset: str = "test",
    **settings: Any,
) -> SimulationResult:
    """Simulate the trace on a stand-in."""
    machine, chosen = machine or StandIn(), config(**settings)
    work = workload(made, spec or WorkloadSpec(), machine.max_model_len(chosen))
    return simulate(preset, chosen, work, machine, layout, goals)
