"""`NativeBackend`: plans in, tokens out, on one torch device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sagellm.core.blocks import cdiv
from sagellm.core.clock import MonotonicClock
from sagellm.core.cores import usable_cores
from sagellm.core.errors import CapacityError, KernelError, PlanError
from sagellm.core.features import DROPPED_BLOCKS, PROMPT_LOGPROBS, REASONING_BUDGETS, SYNTHETIC_DRAWS
from sagellm.core.plan import Chain, ExecutionPlan, Join, Prefill, StepResult
from sagellm.core.protocols.engine import Progress
from sagellm.core.protocols.fusion import Capture, FusedKernel, KernelSet, KernelSource
from sagellm.core.protocols.quantization import FormatSource, WeightQuantizer
from sagellm.core.types import (
    CapabilityDescriptor,
    KVCacheSchema,
    SamplingParams,
    TokenLogprob,
    Tokens,
    width,
)
from sagellm.engines.native.accelerators import module_of, runs_triton
from sagellm.engines.native.attention import attention_planner
from sagellm.engines.native.block_bytes import PoolBytes
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.kv_schema import kv_schema
from sagellm.engines.native.loading import CheckedModel, ModelWeights, WeightLoader
from sagellm.engines.native.measure import Decide, alone, fastest
from sagellm.engines.native.memory import available_bytes, pool_blocks
from sagellm.engines.native.model import DecoderModel, StepInputs
from sagellm.engines.native.model_fingerprint import model_fingerprint
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.options import check_chunks, check_counts, dtype_name
from sagellm.engines.native.recorded_steps import MOST_CPU_ROWS, RecordedSteps, buckets
from sagellm.engines.native.recurrent.states import KeptPart, RecurrentStates
from sagellm.engines.native.rows import BatchRows
from sagellm.engines.native.sampler import ScoredPrompt, kernel_draw, prompt_logprobs, sample
from sagellm.engines.native.synthetic_draws import SyntheticDraws
from sagellm.engines.native.token_copies import TokenCopier, sees_kv_by_slot

if TYPE_CHECKING:
    from sagellm.engines.native.bridge.description import BridgedSpec
    from sagellm.engines.native.bridge.model import BridgedModel
    from sagellm.engines.native.parallel.ranks import Ranks

PARAMETERS_PER_THREAD = 8_000_000
MEASURED_TOKENS = 256
FEATURES = frozenset(
    {
        "chunked_prefill",
        "prefix_reuse",
        "mixed_batch",
        "logprobs",
        PROMPT_LOGPROBS,
        REASONING_BUDGETS,
        "penalties",
        "sliding_window",
        "speculative_decoding",
    }
)


NOT_RECURRENT = {"speculative_decoding"}
"""What a model with recurrent states cannot do: states do not go back."""
CaptureSource = Callable[[torch.device], Capture | None]


class NativeBackend:
    """Runs a Hugging Face model on one torch device. Implements `InferenceBackend`; not thread-safe.

    `model` is a folder or a hub name. `dtype` "auto" is the checkpoint's dtype. `compute_dtype` "auto" is
    float32 where this CPU only emulates `dtype` (see `options.fastest_dtype`), else `dtype`.

    The pool has `num_blocks` blocks, or as many as fit into `kv_memory_bytes` or into `kv_memory_fraction` of
    the available memory, but never more than `max_num_seqs` sequences of `max_model_len` tokens can use.
    `host_memory_bytes` are left to a tier in host memory. `measure_prefill`: start-up measures how long a
    prompt takes.

    `threads` defaults to one per 8 M parameters, at most one per physical core that this process may use. Of
    several ranks each has as many, of both its part.
    `progress(bytes_done, bytes_total)` is called while weights are loaded.

    On a CPU `kernels` provides kernels that are measured against torch. Where they are faster, matrices stay
    in the checkpoint's dtype and the kernels use their own threads. Torch then has one thread in the whole
    process until `close`, because its idle threads spin, except for long prefill chunks that it attends to
    faster than the kernel. `cuda_kernels` provides the kernels for a CUDA
    device, and for a chip of another vendor that takes them.

    With `capture` and an attention kernel, decode steps are recorded: at start where `capture` supports the
    device, else by the kernels themselves when a batch size first comes.

    `split_kv`: where windows differ by layer, layers are dealt into KV groups (`kv_cache.deal_layers`), and
    what windows have passed is freed. `num_blocks` then counts one block of each group as one.

    `implementation` is native, transformers (the bridge) or auto: native where the architecture is.

    `quantizer` quantizes matrices while they are loaded; `formats` reads matrices that a checkpoint stores
    quantized.

    `ranks`: the ranks among which the model is divided, of which this is one. They share the memory of a CPU.

    `synthetic_draws`: answers are made-up tokens (`SyntheticDraws`), for benchmarks.

    `head`: where to find a draft head; `HeadedBackend` uses it.

    `share_kv`: a CPU's KV pool lies in memory that other instances of the host may map, to read.

    Raises `ModelError` for a model that cannot be served, before any memory is allocated; `CapacityError`
    where memory is too small; `ConfigError` for an option that makes no sense.
    """

    def __init__(
        self, model: str | Path, *, device: str = "auto", dtype: str = "auto", compute_dtype: str = "auto",
        block_size: int = 16, num_blocks: int | None = None, kv_memory_fraction: float | None = None,
        kv_memory_bytes: int | None = None, host_memory_bytes: int = 0, measure_prefill: bool = False,
        max_num_seqs: int = 64, max_model_len: int | None = None, threads: int | None = None, seed: int = 0,
        progress: Progress | None = None, kernels: KernelSource | None = None,
        cuda_kernels: Callable[[], KernelSet] | None = None, capture: CaptureSource | None = None,
        quantizer: WeightQuantizer | None = None, formats: FormatSource | None = None,
        split_kv: bool = True, implementation: str = "auto", ranks: Ranks | None = None,
        synthetic_draws: bool = False, head: Path | None = None, share_kv: bool = False,
    ) -> None:  # fmt: skip
        check_counts(block_size=block_size, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
        check_counts(max_model_len=max_model_len, threads=threads)
        self._share_kv, split = share_kv, None if ranks is None else ranks.split
        sharing = 1 if split is None else split.num_kv_ranks
        more = implementation, split, head
        source = self._checked(model, device, max_model_len, quantizer, formats, *more)
        self._spec, self._device, self._max_num_seqs = source.spec, source.device, max_num_seqs
        self._max_model_len, spec = source.max_model_len, source.spec
        check_chunks(spec.kv_windows, block_size)
        self._torch_threads = torch.get_num_threads()
        with memory_errors(self._device):
            threads, kernel_set, measured_set, loader = choose(
                source, threads, kernels, cuda_kernels, dtype, compute_dtype, ranks
            )
            recording = capture(self._device) if capture and kernel_set.attention else None
            self._model, self._schema = self._load(
                source, loader, progress, kernel_set, block_size, split_kv, ranks
            )
            most, groups = max_num_seqs * cdiv(self._max_model_len, block_size), self._schema.num_groups
            block_bytes = self._schema.bytes_per_block
            if ranks is not None:
                ranks.barrier()  # all weights are loaded: what is free now is left for KV
            bytes_beside, bytes_kept = self._bytes_beside_pool(block_size, split_kv=split_kv)
            fitting = pool_blocks(
                self._device, num_blocks, most, block_bytes + bytes_beside, kv_memory_bytes,
                kv_memory_fraction, host_memory_bytes, available_bytes(self._device) // sharing - bytes_kept,
            )  # fmt: skip
            blocks = (fitting if ranks is None else ranks.least(fitting)) * groups
            self._kv = self._pool(blocks, block_size, has_scratch=recording is not None)
            attention = kernel_set.attention, measured_set.attention, self._model.scores, self._model.expands
            chunk_threads = threads if self._packed else None
            self._planner = attention_planner(
                self._kv, spec.num_heads, *attention, chunk_threads=chunk_threads,
                decide=alone if ranks is None or sharing == 1 else ranks.decide,
            )  # fmt: skip
            self._capture = recording, kernel_set.record if capture else None
            self._steps: RecordedSteps | None = None
            if isinstance(self._model, DecoderModel):
                self._steps = self._recorded(self._model, self._kv, max_num_seqs)
        if self._packed:
            torch.set_num_threads(1)
        draw = None if self._compute_dtype == torch.float64 else kernel_set.draw
        self._draw = kernel_draw(draw) if draw else None
        self._sample = SyntheticDraws(spec.vocab_size) if synthetic_draws else sample
        lengths = (self._max_model_len, blocks, block_size)
        self._rows = BatchRows(max_num_seqs, *lengths, spec.vocab_size, seed, groups)
        self._kept: defaultdict[int, list[KeptPart]] = defaultdict(list)
        self._make_drafter()
        self._measure_prefill(source.num_weights // sharing, prefill=measure_prefill)

    def _measure_prefill(self, num_weights: int, *, prefill: bool) -> None:
        """Measure what it costs to compute KV again.

        A token takes 2 FLOPs per parameter, and 2 per layer, dim of keys and values and token in front of it.
        """
        self._prefill_token_s = self._prefill_token_squared_s = 0.0
        spec, clock = self._spec, MonotonicClock()
        if prefill:
            num_blocks = self._kv.num_blocks // self._schema.num_groups
            most = min(self._max_model_len, num_blocks * self._kv.block_size)
            num_tokens = min(MEASURED_TOKENS, most)
            plan = self._lone_prompt(Tokens([0] * num_tokens))  # samples: the token drawn is waited for
            self._prefill_token_s = fastest(lambda: self.execute(plan), 3, clock.now) / num_tokens
            self.execute(ExecutionPlan(0, left=(0,)))
            attention_share = spec.num_layers * spec.num_heads * spec.prompt_head_dims / num_weights
            self._prefill_token_squared_s = self._prefill_token_s * attention_share

    def _load(
        self, source: CheckedModel, loader: WeightLoader, progress: Progress | None, kernel_set: KernelSet,
        block_size: int, split_kv: bool, ranks: Ranks | None,
    ) -> tuple[DecoderModel | BridgedModel, KVCacheSchema]:  # fmt: skip
        spec = source.spec
        self._dtype, self._compute_dtype = loader.dtype, loader.compute_dtype
        self._packed = loader.linear is not None
        model: DecoderModel | BridgedModel
        schema = kv_schema(
            spec, source.layout.kv_windows, loader.compute_dtype, block_size, split_kv=split_kv
        )
        groups = schema.groups
        if isinstance(spec, ModelSpec):
            weights = self._weights(source, loader, progress)
            whole = (spec, weights, self._compute_dtype, self._device, kernel_set, groups)
            model = DecoderModel(*whole) if ranks is None else ranks.model(*whole)
            self._take_head(source, weights, kernel_set)
            self._weight_bytes = weights.read_bytes
        else:
            from sagellm.engines.native.bridge.model import load

            model = load(spec, loader, groups, progress)
            self._weight_bytes = model.read_bytes
        fingerprint = ""
        if ranks is None or ranks.is_first:
            fingerprint = model_fingerprint(source.folder, source.checkpoint, dtype_name(loader.dtype))
        source.checkpoint.close()
        return model, replace(schema, model_fingerprint=fingerprint + source.label)

    def _checked(self, *options: Any) -> CheckedModel:
        """The model whose weights are loaded next. `options` are those of `CheckedModel.of`."""
        return CheckedModel.of(*options)

    def _weights(self, source: CheckedModel, loader: WeightLoader, progress: Progress | None) -> ModelWeights:
        return loader.weights(source.plan, progress)

    def _bytes_beside_pool(self, block_size: int, *, split_kv: bool) -> tuple[int, int]:
        """What is allocated beside the pool: for each of its blocks, and at all.

        The weights are loaded. `SelfDraftingBackend` has a draft's KV there.
        """
        return 0, self._max_num_seqs * self._schema.state_bytes

    def _take_head(self, source: CheckedModel, weights: ModelWeights, kernels: KernelSet) -> None:
        """The weights are loaded, with those of the draft head. Here there is none (`HeadedBackend`)."""

    def _make_drafter(self) -> None:
        """All that it needs is there, and no step has been computed."""

    def _num_draft_blocks(self, block_size: int) -> int:
        """Blocks for the KV of tokens that a draft head proposes."""
        return 0

    def _pool(self, num_blocks: int, block_size: int, *, has_scratch: bool) -> PagedKV:
        spec, schema = self._spec, self._schema
        return PagedKV(
            schema.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim, self._device,
            self._compute_dtype, has_scratch=has_scratch, groups=schema.groups, value_dim=spec.value_dim,
            states=self._working_states(), shapes=spec.kv_shapes,
            num_draft_blocks=self._num_draft_blocks(block_size), is_shared=self._share_kv,
        )  # fmt: skip

    def _working_states(self) -> RecurrentStates | None:
        """A recurrent state for each row of the batch, where the model has any."""
        spec = self._spec.recurrent
        if spec is None:
            return None
        return RecurrentStates(spec, self._max_num_seqs, self._device, self._compute_dtype)

    def _recorded(
        self, model: DecoderModel, kv: PagedKV, most: int, before: torch.Tensor | None = None, ahead: int = 0,
        draw_next: FusedKernel | None = None,
    ) -> RecordedSteps | None:  # fmt: skip
        """Recorded decode steps of up to `most` rows.

        None where torch computes a part of their attention.
        """
        at_start, when_run = self._capture
        kernel, capture = self._planner.kernel, at_start or when_run
        if capture is None or kernel is None or not (at_start or self._packed):
            return None
        if at_start and model.waits_for_routes:
            return None
        if kv.states is not None:  # their rows are not at fixed addresses
            return None
        sizes = buckets(most) if at_start else range(1, MOST_CPU_ROWS + 1)
        with self._current_device():
            length = self._max_model_len
            steps = RecordedSteps(
                model, kv, kernel, capture, sizes, length, before=before, ahead=ahead, draw_next=draw_next
            )
            if at_start:
                steps.record_all()
        return steps

    def _current_device(self) -> AbstractContextManager[object]:
        """Make the backend's device current: kernels and graphs run on the thread's current device."""
        if self._device.type == "cpu":
            return nullcontext()
        context: AbstractContextManager[object] = module_of(self._device).device(self._device)
        return context

    @property
    def spec(self) -> ModelSpec | BridgedSpec:
        """The model's shape, from config.json."""
        return self._spec

    def capability(self) -> CapabilityDescriptor:
        """`dtype` is the weights' dtype. The KV schema has the computing dtype."""
        windows = [window for window in self._spec.kv_windows if window is not None]
        all_windowed = len(windows) == self._schema.num_layers and not self._schema.groups
        return CapabilityDescriptor(
            device=str(self._device),
            dtype=dtype_name(self._dtype),
            vocab_size=self._spec.vocab_size,
            max_model_len=self._max_model_len,
            num_blocks=self._kv.num_blocks,
            block_size=self._kv.block_size,
            max_num_seqs=self._max_num_seqs,
            kv_schema=self._schema,
            memory_bytes=self._kv.num_blocks * self._schema.bytes_per_page,
            features=self._features(),
            sliding_window=max(map(width, windows)) if all_windowed else None,
            prefill_token_s=self._prefill_token_s,
            prefill_token_squared_s=self._prefill_token_squared_s,
            weight_bytes=self._weight_bytes,
        )

    def _features(self) -> frozenset[str]:
        more = {SYNTHETIC_DRAWS} if isinstance(self._sample, SyntheticDraws) else set[str]()
        more |= {DROPPED_BLOCKS} if sees_kv_by_slot(self._model) else set()
        return (FEATURES | more) - (NOT_RECURRENT if self._kv.states else set())

    def get_kv_schema(self) -> KVCacheSchema:
        return self._schema

    def kv_bytes(self) -> PoolBytes:
        """The KV pool's blocks as bytes, for tiers and transfers."""
        return PoolBytes(self._kv.as_bytes(), self._kv.shared_pages)

    def block_axes(self) -> str:
        """The axes of a block's bytes, for `BlockLayout`; empty where layers differ."""
        schema = self._schema
        is_plain = not (schema.groups or schema.values_in_keys or schema.layer_shapes or schema.state_bytes)
        return "kv.layer.token.head.dim" if is_plain else ""

    def token_copier(self) -> TokenCopier:
        """Copies KV to other positions. Raises `UnsupportedModelError` where keys cannot be moved."""
        return TokenCopier(self._model, self._kv)

    def execute(self, plan: ExecutionPlan) -> StepResult:
        """Run one step. Rows take in the drawn tokens only after everything else has worked. Raises
        `PlanError` for a plan that cannot be executed and `CapacityError` where memory runs out. In both
        cases the KV of rows outside the plan is untouched, and the step's rows may run or join again; where
        the model has recurrent states, they must join again.
        """
        states = self._kv.states
        with memory_errors(self._device), self._current_device():
            self._begin(plan)
            self._kv.copy_blocks(plan.copies)
            if not plan.num_tokens:
                return StepResult(plan.step)
            if states is None:
                return self._compute(plan)
            if plan.chains:
                raise PlanError("a model with recurrent states computes no chains: its states do not go back")
            starts = dict(zip(plan.decode_rows, plan.decode_positions, strict=True))
            starts |= {op.row: op.start for op in plan.prefills}
            with states.moved_on(list(starts)):
                self._kept = defaultdict(list)
                for row, num_tokens, _ in plan.kept_states:
                    part = KeptPart(num_tokens - starts[row], self._kv.state_buffer())
                    self._kept[row].append(part)
                result = self._compute(plan)
                for row, _, pages in plan.kept_states:
                    self._kv.save_state(self._kept[row].pop(0).buffer, pages)
                return result

    def execute_by_layer(self, plan: ExecutionPlan, on_layer: Callable[[int], None]) -> StepResult:
        """As `execute`. Calls `on_layer` with n once the KV of the first n layers of the step is written.

        On a device with streams it is launched then. Recorded steps, which compute no prompts, say nothing.
        """
        self._kv.on_layer = on_layer
        try:
            return self.execute(plan)
        finally:
            self._kv.on_layer = None

    def _begin(self, plan: ExecutionPlan) -> None:
        self._rows.apply(plan, self._device)
        states = self._kv.states
        for join in plan.joined if states is not None else ():
            assert states is not None
            states.begin(join, self._kv.load_state(join.state_pages) if join.state_pages else None)

    def _compute(self, plan: ExecutionPlan) -> StepResult:
        scored = self._rows.scored(plan) if plan.prefills else ()
        if scored:
            logits, prompts = self._logits_and_scores(plan, scored)
        else:
            logits, prompts = self._logits(plan), {}
        rows = plan.sample_rows
        if not rows:
            return StepResult(plan.step, prompt_logprobs=prompts)
        if plan.chains:
            return self._accepted(plan, logits, prompts)
        drawn = self._sample(logits, self._rows.samplers(rows), self._draw)
        self._rows.advance(rows, drawn.token_ids)
        logprobs: dict[int, tuple[TokenLogprob, ...]] = {rows[i]: (e,) for i, e in drawn.logprobs.items()}
        return StepResult(plan.step, tuple(drawn.token_ids), logprobs, prompts)

    def _accepted(
        self, plan: ExecutionPlan, logits: torch.Tensor, prompts: dict[int, tuple[TokenLogprob, ...]]
    ) -> StepResult:
        """As `_compute` with chains: draws up to the first token not proposed."""
        drawn = self._sample(logits, self._rows.chain_samplers(plan), self._draw)
        rows: list[int] = []
        token_ids: list[int] = []
        logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        chains, accepted, first = {chain.row: chain for chain in plan.chains}, dict[int, Sequence[int]](), 0
        for row in plan.sample_rows:
            chain = chains.get(row, Chain(row, ()))
            own = drawn.token_ids[first : first + 1 + len(chain.token_ids)]
            accepted[row] = chain.accepted(own)
            places = [first, *(first + 1 + index for index in accepted[row])]
            rows += [row] * len(places)
            token_ids += [drawn.token_ids[place] for place in places]
            if first in drawn.logprobs:
                logprobs[row] = tuple(drawn.logprobs[place] for place in places)
            first += len(own)
        sources, targets = self._rows.moved_slots(plan, accepted)
        if sources:
            self._move(sources, targets)
        self._rows.advance(rows, token_ids)
        num_accepted = tuple(len(accepted[chain.row]) for chain in plan.chains)
        return StepResult(plan.step, tuple(token_ids), logprobs, prompts, num_accepted)

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move KV of accepted tokens of trees between slots."""
        self._kv.move(sources, targets)

    def _logits(self, plan: ExecutionPlan) -> torch.Tensor:
        """Logits [S, vocab] of `plan.sample_rows`, of a chain all positions. Writes K and V to the pool."""
        if self._steps is not None and self._steps.can_run(plan):
            return self._steps.logits(plan, self._rows)
        return self._model.forward(self._inputs(plan), self._kv)

    def _logits_and_scores(
        self, plan: ExecutionPlan, scored: Sequence[ScoredPrompt]
    ) -> tuple[torch.Tensor, dict[int, tuple[TokenLogprob, ...]]]:
        """As `_logits`, with the log-probabilities of the `scored` prompt tokens, by row."""
        num_sampled = len(plan.sample_rows) + plan.num_proposed_tokens
        with torch.inference_mode():
            hidden = self._model.hidden(self._inputs(plan, scored), self._kv)
            logits = self._model.head(hidden[:num_sampled])
            found = prompt_logprobs(self._model.head, hidden[num_sampled:], scored, self._spec.vocab_size)
        return logits, found

    def _inputs(self, plan: ExecutionPlan, scored: Sequence[ScoredPrompt] = ()) -> StepInputs:
        """The step's tensors. Zeros blocks that kernels read beyond the computed tokens."""
        inputs = self._rows.inputs(
            plan, self._planner, self._model.kinds, self._device, scored,
            recurrent=self._kv.states is not None,
        )  # fmt: skip
        if inputs.recurrent is not None:
            inputs = replace(inputs, recurrent=replace(inputs.recurrent, kept=self._kept))
        fresh = self._rows.fresh_last_blocks(plan) if self._planner.reads_padding else ()
        if fresh:
            self._kv.clear_blocks(fresh)
        return inputs

    def prompt_logits(self, prompt: Sequence[int]) -> torch.Tensor:
        """Logits [vocab] after a prompt, in float32 on the CPU, to compare models. Runs in the first row and
        blocks, so no request may be running. Leaves no row behind.
        """
        plan = self._lone_prompt(Tokens(prompt))
        with memory_errors(self._device):
            self._begin(plan)
            logits = self._logits(plan)[0]
            self._rows.apply(ExecutionPlan(0, left=(0,)), self._device)
        return logits.float().cpu()

    def _lone_prompt(self, prompt: Tokens) -> ExecutionPlan:
        """Computes a prompt in the first row and blocks, which the next requests overwrite."""
        count, num_groups = len(prompt), self._schema.num_groups
        blocks = tuple(range(cdiv(count, self._kv.block_size) * num_groups))
        params = SamplingParams(max_tokens=1)
        join = Join(0, "start-up", prompt.tobytes(), count, 0, blocks, params, frozenset())
        return ExecutionPlan(0, joined=(join,), prefills=(Prefill(0, "start-up", 0, count, samples=True),))

    def expert_rows(self) -> dict[int, list[int]]:
        """By layer with experts, how many rows each expert has computed. Call it between steps."""
        return self._model.expert_rows() if isinstance(self._model, DecoderModel) else {}

    def close(self) -> None:
        """Free weights and KV, and restore torch's threads. The last call of a backend."""
        torch.set_num_threads(self._torch_threads)
        del self._model, self._kv, self._planner, self._rows, self._steps


class Choices(NamedTuple):
    """What is chosen before weights are loaded. `threads` are torch's; `measured` are kernels on one."""

    threads: int
    kernels: KernelSet
    measured: KernelSet
    loader: WeightLoader


def choose(
    source: CheckedModel, threads: int | None, kernels: KernelSource | None,
    cuda_kernels: Callable[[], KernelSet] | None, dtype: str, compute_dtype: str, ranks: Ranks | None,
) -> Choices:  # fmt: skip
    """What `NativeBackend` and `FfnRank` choose. Of several ranks the first does it for all of them."""
    decide, sharing = (alone, 1) if ranks is None else (ranks.decide, ranks.split.num_ranks)
    threads = threads or decide(lambda: suitable_threads(source.num_weights, sharing))
    torch.set_num_threads(threads)
    kernel_set, measured_set = _kernels(source.device, threads, kernels, cuda_kernels, decide)
    loader = source.loader(dtype, compute_dtype, kernel_set, measured_set, decide)
    return Choices(threads, kernel_set, measured_set, loader)


def _kernels(
    device: torch.device, threads: int, on_cpu: KernelSource | None,
    on_cuda: Callable[[], KernelSet] | None, decide: Decide,
) -> tuple[KernelSet, KernelSet]:  # fmt: skip
    """The kernels for `device`, and those to measure: on a CPU, one-threaded.

    Raises `KernelError` where they were built for only one of this rank and the first.
    """
    if on_cpu and device.type == "cpu":
        kernel_set = on_cpu(threads)
        is_built = kernel_set != KernelSet()
        if decide(lambda: is_built) != is_built:  # the ranks would add up rows in different orders
            raise KernelError(
                "one of this rank and the first has CPU kernels, and the other could not build them: start "
                "again, since they are built by now"
            )
        return kernel_set, on_cpu(1) if kernel_set != KernelSet() else kernel_set
    kernel_set = on_cuda() if on_cuda and runs_triton(device) else KernelSet()
    return kernel_set, kernel_set


def suitable_threads(num_parameters: int, sharing: int = 1) -> int:
    """One thread per 8 M parameters, at most one per core. `sharing` ranks have equal parts of both.

    In a small model parallel regions are so short that waiting for the last thread costs more than it saves,
    many times more on a machine with other work.
    """
    return max(1, min(usable_cores(), num_parameters // PARAMETERS_PER_THREAD) // sharing)


@contextmanager
def memory_errors(device: torch.device) -> Iterator[None]:
    """Turn torch's out-of-memory errors into `CapacityError`. On a CPU torch has no class for them, only a
    text.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise CapacityError(f"out of memory on {device}: {str(error).splitlines()[0]}") from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
        raise CapacityError(f"out of memory on {device}: {str(error).splitlines()[0]}") from error
