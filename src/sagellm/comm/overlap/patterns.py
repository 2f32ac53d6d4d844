"""Task graphs of the patterns in which inference overlaps communication with computation.

Each function returns computation and communication, for `OverlapManager.schedule`. Tasks are named by kind
and number, as `compute:3`. Lanes are `COMPUTE` and `NETWORK`.
"""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.core.protocols.overlap import Task

COMPUTE, NETWORK = "compute", "network"
Tasks = tuple[list[Task], list[Task]]


def double_buffered(fetch_s: Sequence[float], compute_s: Sequence[float], *, num_buffers: int = 2) -> Tasks:
    """Pieces are fetched into a few buffers while earlier pieces are computed on.

    The buffer of piece i then takes piece i + `num_buffers`. With as many buffers as pieces this is KV that
    is loaded layer by layer under the prefill of what follows it (CachedAttention: Gao et al., USENIX ATC
    2024).
    """
    _same_length(fetch_s, compute_s)
    if num_buffers < 1:
        raise ValueError(f"num_buffers must be at least 1, got {num_buffers}")
    fetches, computes = [], []
    for i, (fetch, compute) in enumerate(zip(fetch_s, compute_s, strict=True)):
        freed_by = {f"compute:{i - num_buffers}"} if i >= num_buffers else set()
        fetches.append(Task(f"fetch:{i}", NETWORK, fetch, frozenset(freed_by)))
        computes.append(Task(f"compute:{i}", COMPUTE, compute, frozenset({f"fetch:{i}"})))
    return computes, fetches


def ping_pong(compute_s: Sequence[float], comm_s: Sequence[float], *, num_micro_batches: int = 2) -> Tasks:
    """Micro-batches that take turns: while one communicates behind stage i, another computes.

    Stage i of a micro-batch computes `compute_s[i]`, then communicates `comm_s[i]` (an all-reduce, dispatch
    or combine), then its next stage may compute (two micro-batches: DeepSeek-V3 technical report, 2024).
    """
    _same_length(compute_s, comm_s)
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches must be at least 1, got {num_micro_batches}")
    computes, comms = [], []
    for batch in range(num_micro_batches):
        for i, (compute, comm) in enumerate(zip(compute_s, comm_s, strict=True)):
            before = {f"comm:{batch}.{i - 1}"} if i else set()
            computes.append(Task(f"compute:{batch}.{i}", COMPUTE, compute, frozenset(before)))
            comms.append(Task(f"comm:{batch}.{i}", NETWORK, comm, frozenset({f"compute:{batch}.{i}"})))
    return computes, comms


def sent_by_layer(compute_s: Sequence[float], send_s: Sequence[float]) -> Tasks:
    """The KV of a layer is sent while the next layers are computed.

    There may be several chunks: entry i is layer i % num_layers of chunk i // num_layers (Splitwise: Patel et
    al., ISCA 2024).
    """
    _same_length(compute_s, send_s)
    computes, sends = [], []
    for i, (compute, send) in enumerate(zip(compute_s, send_s, strict=True)):
        before = {f"compute:{i - 1}"} if i else set()
        computes.append(Task(f"compute:{i}", COMPUTE, compute, frozenset(before)))
        sends.append(Task(f"send:{i}", NETWORK, send, frozenset({f"compute:{i}"})))
    return computes, sends


def _same_length(some: Sequence[float], others: Sequence[float]) -> None:
    if len(some) != len(others):
        raise ValueError(f"give both durations for each step: {len(some)} and {len(others)} were given")
