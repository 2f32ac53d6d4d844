"""Starts the processes of the other ranks, and joins all ranks to a group."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any

from torch._C._distributed_c10d import FileStore

from sagellm.comm.collectives.shared_kernels import native_library
from sagellm.core.errors import CommError, EngineFailedError, KernelError
from sagellm.core.processes import REPORT_S, ProcessGroup, Role
from sagellm.core.protocols.collectives import CommBackendProtocol
from sagellm.core.registry import registry
from sagellm.engines.native.parallel.ranks import Ranks
from sagellm.engines.native.parallel.split import Split

log = logging.getLogger("sagellm.ranks")
START_S = 300.0
"""Within this time all ranks have joined, or starting them has failed. A first one compiles the kernels."""
TIMEOUT_S = 3600.0
"""A rank waits so long for others: one may still load its weights. The end of a process is seen at once."""
LOOPBACK = "127.0.0.1"
"""Where gloo listens: on other addresses, strangers could connect to it."""
FFN_CELL_BYTES = 2 << 20
"""A ring has four cells. Hidden states that fit into it travel while both ranks compute."""
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_LOOK_S = 0.02


def launch(
    split: Split, entry: str, options: Mapping[str, Any], backend: str | None = None,
    backend_options: Mapping[str, Any] = NO_OPTIONS,
) -> Ranks:  # fmt: skip
    """Start the other ranks, and join them. `entry(options, inbox)` calls `join` with what is added to
    `options`: "split", "store" and "collectives". `backend` names the collectives; None: the fastest.

    Raises `EngineFailedError` with the reason of a rank that ends, or if they do not join within `START_S`.
    """
    folder = Path(tempfile.mkdtemp(prefix="sagellm-ranks-"))
    path, name = str(folder / "store"), backend or _fastest_collectives()
    collectives = {**backend_options, "name": name}
    if split.ffn and name == "shared_memory":
        collectives = {"cell_bytes": FFN_CELL_BYTES, **collectives}
    given = {**options, "store": path, "collectives": collectives}
    roles = [
        Role(f"rank {rank}", entry, {**given, "split": asdict(split.with_rank(rank))})
        for rank in range(1, split.num_ranks)
    ]
    try:
        processes = ProcessGroup.start(roles)
        try:
            return _joined(split, path, collectives, processes)
        except BaseException as error:
            failure = _failure(error, name, processes)
            processes.close(0.0)
            if failure is None:
                raise
            raise failure from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _failure(error: BaseException, name: str, processes: ProcessGroup) -> EngineFailedError | None:
    """Why the ranks cannot communicate; None for another error. The end of a rank comes first."""
    if not isinstance(error, CommError | RuntimeError):  # RuntimeError: of torch
        return None
    try:
        processes.wait_for_failure(REPORT_S)
    except EngineFailedError as failure:
        return failure
    return EngineFailedError(f"the ranks cannot join over {name}: {error}")


def _joined(split: Split, path: str, collectives: Mapping[str, Any], processes: ProcessGroup) -> Ranks:
    """The first rank, when all have joined.

    The group may wait for a rank that has died, so it is made in a thread, and the processes are watched
    meanwhile. Where one ends, the thread is left behind and ends by the group's own limit.
    """
    end_s = time.monotonic() + START_S

    def watch() -> None:
        processes.wait_for_failure(_LOOK_S)
        if time.monotonic() > end_s:
            raise EngineFailedError(f"not all ranks have joined within {START_S:g} s")

    store = FileStore(path, split.num_ranks)
    for rank in range(1, split.num_ranks):
        while not store.check([_ready(rank)]):
            watch()
    joining: Future[CommBackendProtocol] = Future()
    Thread(target=_carry_out, args=(joining, partial(_group, split, store, collectives)), daemon=True).start()
    while not wait([joining], _LOOK_S).done:
        watch()
    return Ranks(split, joining.result(), processes, store)


def join(split: Split, path: str, collectives: Mapping[str, Any]) -> Ranks:
    """Join the ranks that `launch` has started. `collectives`: the plug-in's "name", and its options."""
    store = FileStore(path, split.num_ranks)
    store.set(_ready(split.rank), "")
    return Ranks(split, _group(split, store, collectives), store=store)


def _ready(rank: int) -> str:
    return f"rank {rank} is there"


def _group(split: Split, store: object, collectives: Mapping[str, Any]) -> CommBackendProtocol:
    """The group by the plug-in, when all ranks have joined it."""
    plugins, name = registry("collectives"), collectives["name"]
    asked, usual = plugins.options(name), {"timeout_s": TIMEOUT_S, "hostname": LOOPBACK}
    options = {key: usual[key] for key in usual if key in asked} | dict(collectives)
    del options["name"]
    made: CommBackendProtocol = plugins.create(
        name, rank=split.rank, world_size=split.num_ranks, store=store, **options
    )
    made.barrier().wait()
    return made


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
        future.set_exception(error)


def _fastest_collectives() -> str:
    """Shared memory, or gloo where its kernel cannot be compiled."""
    try:
        native_library()
    except KernelError as error:
        log.warning("ranks add over gloo, not in shared memory: %s", error)
        return "torch_distributed"
    return "shared_memory"
