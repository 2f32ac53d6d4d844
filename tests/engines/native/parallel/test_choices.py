"""What the ranks choose together: forms of a computation by the first, the number of blocks by the least."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.comm.collectives.shared_memory import SharedMemoryBackend
from sagellm.core.protocols.fusion import KernelSet
from sagellm.engines.native import attention, backend, matrices, options
from sagellm.engines.native.attention import AttentionPlanner, attention_planner
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.loading import CheckedModel
from sagellm.engines.native.measure import torch_threads
from sagellm.engines.native.parallel.split import Split
from tests.engines.native.driver import GREEDY, Driver
from tests.engines.native.parallel.rank_threads import first_rank
from tests.tiny_models import save_tiny

FREE_BYTES = 3 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder, "llama")
    return folder


def test_stages_of_different_size_take_no_more_memory_than_is_given(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three layers the first rank has one and the second two."""
    events: list[str] = []
    pools: list[tuple[int, int]] = []
    load = NativeBackend._load

    def loaded(self: NativeBackend, *given: Any) -> Any:
        found = load(self, *given)
        events.append("loaded")
        return found

    def available(device: torch.device) -> int:
        events.append("measured")
        return FREE_BYTES

    def pool(*given: Any, **named: Any) -> Any:
        made = PagedKV(*given, **named)
        pools.append((made.num_blocks, sum(part.nbytes for part in (*made.keys, *made.values))))
        return made

    monkeypatch.setattr(NativeBackend, "_load", loaded)
    monkeypatch.setattr(backend, "available_bytes", available)
    monkeypatch.setattr(backend, "PagedKV", pool)
    given: dict[str, Any] = {"num_blocks": None, "kv_memory_fraction": 1.0, "split_kv": False}
    with first_rank(model, Split(0, pipeline=2), max_num_seqs=64, **given):
        pass
    assert events == ["loaded", "loaded", "measured", "measured"]
    (blocks, first_bytes), (others, second_bytes) = sorted(pools, key=lambda made: made[1])
    assert blocks == others
    assert second_bytes > 1.5 * first_bytes
    assert first_bytes + second_bytes <= FREE_BYTES
    assert second_bytes > 0.9 * FREE_BYTES / 2, "the larger one fills its share"


@pytest.mark.parametrize("wins", [True, False])
def test_the_first_rank_chooses_for_all(model: Path, wins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu_kernels(1).attention is None:
        pytest.skip("no C++ compiler")
    main, asked = threading.current_thread(), list[str]()
    planners: list[AttentionPlanner] = []

    def made(*given: Any, **named: Any) -> AttentionPlanner:
        planners.append(attention_planner(*given, **named))
        return planners[-1]

    def says(name: str) -> Any:
        def answer(*_: object, **__: object) -> bool:
            asked.append(name)
            return wins == (threading.current_thread() is main)

        return answer

    for module, name in (
        (attention, "kernel_wins_prefill"),
        (options, "is_emulated"),
        (matrices, "time_kernel"),
    ):
        answer = says(name)
        if name == "time_kernel":
            monkeypatch.setattr(module, name, lambda *_, a=answer: {1: (2.0, 1.0) if a() else (1.0, 2.0)})
        else:
            monkeypatch.setattr(module, name, answer)
    monkeypatch.setattr(backend, "attention_planner", made)
    with first_rank(model, Split(0, tensor=2), dtype="bfloat16", kernels=cpu_kernels) as first:
        assert first._compute_dtype == (torch.float32 if wins else torch.bfloat16)
        assert first._packed == wins
        driver = Driver(first, (7, 30), seed=2)
        driver.add(list(range(3, 40)), 4, GREEDY, name="r")
        driver.run()
    assert [made.kernel is not None and made._chunks for made in planners] == [wins, wins]
    assert sorted(asked) == ["is_emulated", "kernel_wins_prefill", "time_kernel"], "the others are not asked"


@pytest.mark.parametrize("split", [Split(0, tensor=2), Split(0, pipeline=2)])
def test_the_first_rank_chooses_the_threads_of_all(
    model: Path, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the parameters of the whole model, also where the parts differ."""
    whole = CheckedModel.of(model, "cpu", None, None, None).num_weights
    main, used, asked = threading.current_thread(), list[int](), list[tuple[int, ...]]()

    def suitable(*given: int) -> int:
        asked.append(given)
        return 2 if threading.current_thread() is main else 1

    def kernels(threads: int) -> KernelSet:
        used.append(threads)
        return KernelSet()

    monkeypatch.setattr(backend, "suitable_threads", suitable)
    given: dict[str, Any] = {"threads": None, "split_kv": split.pipeline == 1, "kernels": kernels}
    with torch_threads(torch.get_num_threads()), first_rank(model, split, **given):
        pass
    assert asked == [(whole, 2)], "the other rank is not asked"
    assert used == [2, 2]


def test_a_rank_without_the_kernels_of_the_others_is_refused(model: Path) -> None:
    main = threading.current_thread()

    def kernels(threads: int) -> KernelSet:
        return cpu_kernels(threads) if threading.current_thread() is main else KernelSet()

    if cpu_kernels(1).linear is None:
        pytest.skip("no C++ compiler")
    with (
        pytest.raises(Exception, match="could not build them: start again"),
        first_rank(model, Split(0, tensor=2), SharedMemoryBackend, kernels=kernels),
    ):
        pass


@pytest.mark.parametrize("split", [Split(0, tensor=2), Split(0, pipeline=2)])
def test_all_communication_of_a_step_is_counted(model: Path, split: Split) -> None:
    with first_rank(model, split, split_kv=split.pipeline == 1) as first:
        before_s = first.communication_s
        driver = Driver(first, (7, 30), seed=2)
        driver.add(list(range(3, 40)), 4, GREEDY, name="r")
        driver.run()
        assert first.communication_s > before_s
