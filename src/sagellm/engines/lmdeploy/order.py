"""`SequenceOrder`: our scheduling passes in LMDeploy's scheduler.

A scheduler with our patch `0003-scheduler-ir-integration` asks its `order` in which order sequences are
admitted, and in which order running ones get blocks: it preempts the last. Admission, memory and the choice
between prefill and decode stay LMDeploy's.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from sagellm.core.errors import SageError
from sagellm.core.types import Namespace, Request, SamplingParams, Tokens
from sagellm.engines.guests.hosted_passes import HostedPasses, HostOrder
from sagellm.engines.guests.settings import SchedulingSettings
from sagellm.engines.lmdeploy.block_trie import GuidedTrie, Sequence

logger = logging.getLogger("lmdeploy.sagellm")
Scheduler = Any
"""LMDeploy's `Scheduler`."""


class LMDeployKV:
    """What LMDeploy's block manager and a guided trie tell of the cache."""

    def __init__(self, scheduler: Scheduler, guided: GuidedTrie | None) -> None:
        self._manager, self._guided = scheduler.block_manager, guided
        self._sequences = scheduler.seq_manager._seq_map
        self.block_size, self.num_blocks = scheduler.cache_config.block_size, self._manager.num_gpu_blocks

    def _paths(self) -> Any:
        return self._guided.paths if self._guided is not None and self._guided.is_guided else None

    def num_free(self) -> int:
        """Free blocks, and cached ones that no sequence uses."""
        paths = self._paths()
        cached = paths.index.num_evictable if paths is not None else 0
        return int(self._manager.get_num_free_gpu_blocks()) + int(cached)

    def num_cached(self, request_id: str) -> int:
        """Cached leading tokens; 0 where the trie is not guided."""
        paths = self._paths()
        return 0 if paths is None else paths.num_cached(self._sequences[int(request_id)])

    def num_held(self, request_id: str) -> int:
        """Blocks of a running sequence."""
        return len(self._sequences[int(request_id)].logical_blocks)


class SequenceOrder:
    """The order of a scheduler's sequences, until a pass fails.

    Raises `AttributeError` for a scheduler without the patch.
    """

    def __init__(self, scheduler: Scheduler, settings: SchedulingSettings, guided: GuidedTrie | None) -> None:
        if not hasattr(scheduler, "order"):
            raise AttributeError("this LMDeploy has no patch 0003-scheduler-ir-integration")
        self._scheduler = scheduler
        self.passes = HostedPasses(
            settings.strategy,
            settings.options,
            LMDeployKV(scheduler, guided),
            max_num_seqs=scheduler.scheduler_config.max_batches,
            max_batched_tokens=scheduler.cache_config.max_prefill_token_num,
        )
        scheduler.order = self

    def waiting(self) -> list[Sequence]:
        """Waiting sequences in the order of their admission; some may have to wait on."""
        sequences = {str(sequence.seq_id): sequence for sequence in self._scheduler.waiting}
        order = self._ordered()
        if order is None:
            return sorted(sequences.values(), key=_arrival)
        if not order.waiting and not order.running:  # nothing else could run
            return [sequences[name] for name in order.deferred]
        return [sequences[name] for name in order.waiting]

    def running(self) -> list[Sequence]:
        """Running sequences; the last is preempted first."""
        sequences = {str(sequence.seq_id): sequence for sequence in self._scheduler.running}
        order = self._ordered()
        if order is None:
            return sorted(sequences.values(), key=_arrival)
        return [sequences[name] for name in order.running if name in sequences]

    def _ordered(self) -> HostOrder | None:
        """What the passes say now. An error gives LMDeploy's own order back."""
        try:
            waiting = sorted(self._scheduler.waiting, key=_arrival)
            running = sorted([*self._scheduler.running, *self._scheduler.locked], key=_arrival)
            self._follow(waiting, running)
            return self.passes.order(
                time.perf_counter(), *([str(s.seq_id) for s in each] for each in (waiting, running))
            )
        except Exception as error:  # noqa: BLE001 - a pass may fail in any way; the server must go on
            logger.warning("sageLLM: LMDeploy schedules in its own order from now on: %r", error)
            self._scheduler.order = None
            return None

    def _follow(self, waiting: list[Sequence], running: list[Sequence]) -> None:
        """Tell the passes what has come, progressed and ended."""
        known = self.passes.states
        present = {str(sequence.seq_id): sequence for sequence in (*waiting, *running)}
        for name in known.keys() - present.keys():
            self.passes.ended(name, whole=True)
        for name in present.keys() - known.keys():
            try:
                self.passes.enter(our_request(present[name]))
            except (SageError, TypeError, ValueError) as error:
                logger.warning("sageLLM: sequence %s keeps its place: %s", name, error)
        for sequence in running:
            if str(sequence.seq_id) in known:
                self.passes.progressed(str(sequence.seq_id), sequence.num_history_ids, sequence.num_all_ids)


def _arrival(sequence: Sequence) -> float:
    return float(sequence.arrive_time)


def our_request(sequence: Sequence) -> Request:
    """A sequence of LMDeploy as a request of ours. It has no priority, tenant or goals there."""
    return Request(
        str(sequence.seq_id),
        Tokens(sequence.all_ids.tolist()),
        SamplingParams(max_tokens=max(1, sequence.sampling_param.max_new_tokens)),
        arrival_s=sequence.arrive_time,
        namespace=Namespace(adapter=sequence.adapter_name or ""),
    )
