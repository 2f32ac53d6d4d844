"""`Communication`, and our patch 0004 with real process groups; `test_patches.py` runs these in a copy."""

from __future__ import annotations

import ast
import asyncio
import logging
import multiprocessing
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.engines.lmdeploy.communication import (
    CallCount,
    CommOperation,
    Communication,
    watch_communication,
)

PLUGIN = "sagellm.engines.lmdeploy:watch_communication"
NUM_ROWS, WIDTH = 6, 8
FLOAT_BYTES = 4


def test_calls_bytes_and_seconds_are_sums() -> None:
    """Calls overlap, as transfers do; against sums that are kept beside it."""
    clock, rng = ManualClock(), random.Random(1)
    made, open_ones = Communication(clock), list[tuple[Any, float]]()
    expected: dict[CommOperation, list[float]] = {}
    for _ in range(500):
        clock.advance(rng.random())
        if open_ones and rng.random() < 0.5:
            call, began_s = open_ones.pop(rng.randrange(len(open_ones)))
            made.end(call)
            sums = expected.setdefault(call.operation, [0, 0, 0, 0])
            for index, value in enumerate((1, call.is_launch, call.num_bytes, clock.now() - began_s)):
                sums[index] += value
        else:
            name, group = rng.choice(["all_reduce", "broadcast"]), rng.choice(["tp", "", None])
            call = made.begin(name, rng.randrange(100), group, is_launch=rng.random() < 0.3)
            open_ones.append((call, clock.now()))
        made.check()
    assert set(made.counts) == set(expected)
    for operation, count in made.counts.items():
        sums = expected[operation]
        assert (count.num_calls, count.num_launched, count.num_bytes) == tuple(sums[:3])
        assert count.seconds == pytest.approx(sums[3])
    made.counts[CommOperation("broken", "")] = CallCount(1, 2)
    with pytest.raises(BookkeepingError, match="broken: 1 calls, 2 of them launches only"):
        made.check()


def test_a_report_when_it_is_due(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lmdeploy.sagellm")
    clock = ManualClock()
    made = Communication(clock, report_s=10.0)
    for step in range(3):
        call = made.begin("all_reduce", 1_500_000, "tp", is_launch=step == 0)
        clock.advance(4.0)
        made.end(call)
    assert [record.getMessage() for record in caplog.records] == [
        "sageLLM: communication: all_reduce tp: 3 calls, 1 of them launches only, 4.5 MB, 12.000 s"
    ]


def test_settings_are_those_of_the_guest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGELLM_LMDEPLOY", '{"mode": "on", "swap": true, "report_s": 7}')
    assert watch_communication()._report_s == 7
    monkeypatch.setenv("SAGELLM_LMDEPLOY", '{"report_s": -1}')
    with pytest.raises(ConfigError, match="report_s"):
        watch_communication()


# -- with LMDeploy


def comm_hooks() -> Any:
    """The module of our patch; skips where LMDeploy is not patched."""
    return pytest.importorskip("lmdeploy.pytorch.comm_hooks", reason="needs patch 0004")


def with_two_ranks(work: Callable[[int], Any], folder: Path) -> list[Any]:
    """What `work` returns on each rank of a gloo group, in processes that watch their communication."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(work, rank, str(folder), answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    got = dict(answers.get(timeout=300) for _ in ranks)
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    for rank in range(2):
        assert not isinstance(got[rank], str), got[rank]
    return [got[rank] for rank in range(2)]


def _rank(work: Callable[[int], Any], rank: int, folder: str, answers: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        answers.put((rank, work(rank)))
    except Exception as error:  # noqa: BLE001 - the test shows it
        answers.put((rank, repr(error)))
    finally:
        dist.destroy_process_group()


def counted() -> dict[str, tuple[int, int, int]]:
    """Calls, launches and bytes of this process by operation, over all groups."""
    found = comm_hooks().hooks
    found.check()
    sums: dict[str, tuple[int, int, int]] = {}
    for (name, _), count in found.counts.items():
        before = sums.get(name, (0, 0, 0))
        assert count.seconds > 0
        now = (count.num_calls, count.num_launched, count.num_bytes)
        sums[name] = tuple(map(sum, zip(before, now, strict=True)))  # type: ignore[assignment]
    return sums


def every_wrapper(rank: int) -> Any:
    """LMDeploy's own functions and layers in a group of a real `DistContext`; the results are right too."""
    import torch
    from lmdeploy.pytorch import distributed as dist
    from lmdeploy.pytorch.backends.default.linear import DefaultLinearImpl
    from lmdeploy.pytorch.backends.default.token_dispatcher import AlltoAllTokenDispatcher
    from lmdeploy.pytorch.config import DistConfig

    context = dist.DistContext.build(rank, DistConfig(tp=2), ccl_backend="gloo")
    ones = torch.ones(NUM_ROWS, WIDTH)
    with dist.get_dist_manager().context(context):
        reduced = ones.clone()
        dist.all_reduce(reduced)
        assert (reduced == 2).all()
        dist.all_reduce(reduced, async_op=True).wait()
        assert (reduced == 4).all()
        received = torch.full((WIDTH,), float(rank))
        dist.broadcast(received, 1)
        assert (received == 1).all()
        gathered = [torch.empty(WIDTH) for _ in range(2)]
        dist.all_gather(gathered, torch.full((WIDTH,), float(rank)))
        assert [float(each[0]) for each in gathered] == [0, 1]
        whole = torch.empty(2 * WIDTH)
        dist.all_gather_into_tensor(whole, torch.full((WIDTH,), float(rank)))
        assert whole.tolist() == [0.0] * WIDTH + [1.0] * WIDTH
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, rank)
        assert objects == [0, 1]
        group = context.tp_group.gpu_group
        assert (dist.gather_by_tp_sizes(ones[:3], [3, 3], group=group) == 1).all()
        halves = list(torch.full((2, WIDTH), 1.0).split(1))
        half = torch.empty(1, WIDTH)
        dist.reduce_scatter(half, halves)
        assert (half == 2).all()
        part = dist.reduce_scatter_by_tp_sizes(ones.clone(), rank, [NUM_ROWS], group=group)
        assert part.shape == (NUM_ROWS, WIDTH)
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        dispatcher = AlltoAllTokenDispatcher(group, 2, 1)
        swapped = dispatcher.all_to_all(group, ones[:2], torch.tensor([1, 1]), torch.tensor([1, 1]))
        assert swapped.shape == (2, WIDTH)
        # a linear layer calls `torch.distributed` itself
        weight = torch.full((WIDTH, WIDTH), 1.0 + rank)
        out = DefaultLinearImpl().forward(ones, weight, all_reduce=True, group=group)
        assert (out == 3 * WIDTH).all()
    return counted()


@pytest.mark.peer
def test_every_function_of_lmdeploy_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comm_hooks()
    monkeypatch.setenv("LMDEPLOY_COMM_PLUGIN", PLUGIN)
    row = WIDTH * FLOAT_BYTES
    assert with_two_ranks(every_wrapper, tmp_path) == 2 * [
        {
            "all_reduce": (3, 1, 3 * NUM_ROWS * row),
            "broadcast": (1, 0, row),
            "all_gather": (2, 0, 2 * row + 6 * row),
            "reduce_scatter": (2, 0, 2 * row + 2 * NUM_ROWS * row),
            "all_to_all_single": (1, 0, 2 * row),
            "all_gather_into_tensor": (1, 0, 2 * row),
            "all_gather_object": (1, 0, 0),
        }
    ]


def no_plug_in(rank: int) -> Any:
    import torch
    from lmdeploy.pytorch import comm_hooks, distributed

    tensor = torch.ones(1)
    distributed.all_reduce(tensor, group=torch.distributed.GroupMember.WORLD)
    is_untouched = "comm_hooks" not in torch.distributed.all_reduce.__code__.co_filename
    return [float(tensor), comm_hooks.hooks is None, is_untouched]


@pytest.mark.peer
@pytest.mark.parametrize("name", [None, "not_there:plug_in"])
def test_without_a_plug_in_torch_is_untouched(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm_hooks()
    monkeypatch.delenv("LMDEPLOY_COMM_PLUGIN", raising=False)
    if name is not None:
        monkeypatch.setenv("LMDEPLOY_COMM_PLUGIN", name)
    assert with_two_ranks(no_plug_in, tmp_path) == [[2.0, True, True]] * 2


class Failing:
    def begin(self, *arguments: Any, **options: Any) -> None:
        raise RuntimeError("no idea")


def a_failing_plug_in(rank: int) -> Any:
    import torch
    from lmdeploy.pytorch import comm_hooks, distributed

    warnings = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lmdeploy").addHandler(handler)
    tensor = torch.ones(1)
    for _ in range(2):
        distributed.all_reduce(tensor, group=torch.distributed.GroupMember.WORLD)
    return [float(tensor), comm_hooks.hooks is None, warnings]


@pytest.mark.peer
def test_a_plug_in_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comm_hooks()
    monkeypatch.setenv("LMDEPLOY_COMM_PLUGIN", f"{__name__}:Failing")
    warning = "communication is not watched any more: RuntimeError('no idea')"
    assert with_two_ranks(a_failing_plug_in, tmp_path) == [[4.0, True, [warning]]] * 2


@pytest.mark.peer
def test_migrations_between_instances_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real `CacheEngine.migrate`, to a backend that moves nothing."""
    hooks = comm_hooks()
    from lmdeploy.pytorch.disagg.conn.protocol import MigrationProtocol
    from lmdeploy.pytorch.disagg.messages import MigrationExecutionBatch

    from tests.engines.lmdeploy.drivers import SIZE
    from tests.engines.lmdeploy.test_swap import HEAD_DIM, HEADS, LAYERS, on_cpu

    clock, assigned = ManualClock(), list[Any]()

    async def migrate(assignment: Any) -> None:
        assigned.append(assignment)
        clock.advance(2.0)

    engine = on_cpu(4, 1)
    remote = SimpleNamespace(remote_engine_config=SimpleNamespace(num_gpu_blocks=8))
    engine.migration_backend_impl = SimpleNamespace(links={"prefill": remote}, p2p_migrate=migrate)
    batch = MigrationExecutionBatch(protocol=MigrationProtocol.RDMA, requests=[("prefill", [(1, 2), (3, 0)])])
    asyncio.run(engine.migrate(batch))
    monkeypatch.setattr(hooks, "hooks", Communication(clock))
    asyncio.run(engine.migrate(batch))
    num_bytes = sum(each.length for each in assigned[1].batch)
    assert num_bytes == 2 * 2 * LAYERS * SIZE * HEADS * HEAD_DIM * FLOAT_BYTES
    assert assigned[0] == assigned[1]
    assert hooks.hooks.counts == {CommOperation("p2p_migrate", "prefill"): CallCount(1, 0, num_bytes, 2.0)}


@pytest.mark.peer
def test_the_engine_reports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = comm_hooks()
    from tests.engines.lmdeploy.test_engine import attached

    _, engine = attached(10)
    assert engine.communication() == {}
    made = Communication(ManualClock())
    made.end(made.begin("broadcast", 8, None, is_launch=False))
    monkeypatch.setattr(hooks, "hooks", made)
    assert engine.communication() == {CommOperation("broadcast", ""): CallCount(1, 0, 8, 0.0)}


@pytest.mark.peer
def test_every_collective_that_lmdeploy_calls_is_watched() -> None:
    """What its layers, backends and strategies call on `torch.distributed`, or on a name for it."""
    hooks = comm_hooks()
    called = set[str]()
    for path in Path(hooks.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if owner in ("dist", "torch.distributed"):
                    called.add(node.func.attr)
    wrappers = {"gather_by_tp_sizes", "reduce_scatter_by_tp_sizes"}
    setup = {"destroy_process_group", "init_process_group", "is_initialized", "new_group"}
    others = {name for name in called - wrappers - setup if not name.startswith("get_")}
    assert others <= set(hooks.OPERATIONS)
    assert {"all_reduce", "all_to_all_single", "broadcast"} <= called & set(hooks.OPERATIONS)
