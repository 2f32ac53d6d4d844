"""An engine whose model is divided among processes: as one process, and what happens when a rank dies."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from sagellm.core.config import Config
from sagellm.core.errors import ConfigError, EngineFailedError
from sagellm.core.plan import ExecutionPlan, PhasePlacement, StepResult
from sagellm.engines import build
from sagellm.engines import engine as engine_module
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.engine import RANKS_LOOK_S, Engine
from sagellm.engines.llm import LLM
from sagellm.engines.native.parallel import start
from sagellm.engines.native.parallel.backends import LeadingRank
from tests.builders import request, run_all
from tests.effort import usual
from tests.scripted_engine import toy_tokenizer
from tests.tiny_models import VOCAB, save_tiny

MOST_S = 20.0
"""Seconds until the death of a rank is known; a busy machine takes longer than the usual half a second."""
SMALL: dict[str, Any] = {
    "model.dtype": "float64",
    "kv.num_blocks": 24,
    "kv.block_size": 8,
    "engine.threads": 1,
    "scheduler.max_num_seqs": 4,
    "scheduler.max_batched_tokens": 32,
    "speculative.method": "suffix",
    "speculative.method_options": {"branches": 3, "min_probability": 0.0},
    "speculative.adaptive": False,
    "engine.overlap": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder, "llama")
    return folder


def settings(model: Path, **given: Any) -> Config:
    return load_config(cli={"model.name": str(model), **SMALL, **given}, environ={}).config


@contextmanager
def engine(model: Path, **given: Any) -> Iterator[Engine]:
    made = build_engine(settings(model, **given))
    try:
        yield made
    finally:
        made.close()


def processes(made: Engine) -> list[int]:
    assert isinstance(made.backend, LeadingRank)
    group = made.backend._ranks._processes
    assert group is not None
    return group.pids


def answers(made: Engine) -> dict[str, list[int]]:
    """Prompts that share a prefix, repeat themselves, and do not all fit into the pool."""
    rng = random.Random(5)
    prefix = [rng.randrange(3, VOCAB) for _ in range(20)]
    for i in range(8):
        prompt = prefix[: 10 * (i % 3)] + [rng.randrange(3, VOCAB) for _ in range(5 + 7 * i)]
        params = {"temperature": 0.8, "seed": i, "logprobs": 2} if i == 3 else {"temperature": 0.0}
        made.add(request(f"r{i}", prompt + prompt[:9], 14, ignore_eos=True, **params))
    return run_all(made)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_as_one_process(model: Path) -> None:
    with engine(model) as whole:
        expected = answers(whole)
        assert whole.stats().num_preemptions
    with engine(model, **{"parallel.tensor": 2}) as divided:
        assert answers(divided) == expected
        assert divided.stats().num_preemptions == whole.stats().num_preemptions
        found = divided.diagnostics()
        assert found.communication_s is not None
        assert 0 < found.communication_s < found.step_s
        reuse = divided.stats().reuse
        assert reuse is not None
        assert reuse.num_hit_tokens
        pids = processes(divided)
        with pytest.raises(ConfigError, match="a part of each block"):
            divided.backend.kv_bytes()  # type: ignore[attr-defined]
    assert not any(map(is_there, pids))


@pytest.mark.parametrize("num_ranks", usual({1}, (1, 2)))
def test_mlps_in_other_processes(model: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All KV is on the first rank, so tiers and copies of KV work; and the scheduler may place halves."""
    settings = {
        "kv.host_gb": 0.01,
        "scheduler.pass_options": {"af_separation": {"attention": ["attention"], "ffn": ["ffn"]}},
    }
    passes = {"scheduler.passes": ["chunked_prefill", "memory_aware_preemption", "af_separation"]}
    with engine(model, **{"kv.host_gb": 0.01}) as whole:
        expected = answers(whole)
    settings |= {"parallel.ffn": num_ranks, "parallel.micro_batch_tokens": 3, **passes}
    with engine(model, **settings) as divided:
        placements: set[PhasePlacement] = set()
        execute = divided.backend.execute

        def watched(plan: ExecutionPlan) -> StepResult:
            placements.update(placement for _, placement in plan.placements)
            return execute(plan)

        monkeypatch.setattr(divided.backend, "execute", watched)
        assert answers(divided) == expected
        assert placements == {PhasePlacement(attention="attention", ffn="ffn")}
        found = divided.diagnostics()
        assert found.communication_s is not None
        assert 0 < found.communication_s < found.step_s
        assert isinstance(divided.backend, LeadingRank)
        divided.backend.kv_bytes()
        divided.backend.token_copier()
        pids = processes(divided)
    assert len(pids) == num_ranks
    assert not any(map(is_there, pids))


@pytest.mark.parametrize(
    ("key", "backend"),
    usual(
        {
            ("parallel.tensor", "shared_memory"),
            ("parallel.pipeline", "torch_distributed"),
            ("parallel.ffn", "shared_memory"),
        },
        product(
            ("parallel.tensor", "parallel.pipeline", "parallel.ffn"), ("shared_memory", "torch_distributed")
        ),
    ),
)
def test_a_killed_rank_ends_the_engine(model: Path, key: str, backend: str) -> None:
    with engine(model, **{key: 3 if "pipeline" in key else 2, "parallel.backend": backend}) as made:
        for i in range(4):
            made.add(request(f"r{i}", range(3, 9), 400, temperature=0.0, ignore_eos=True))
        for _ in range(5):
            made.step()
        pids = processes(made)
        os.kill(pids[0], signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(EngineFailedError, match=r"rank 1 \(process \d+\) was ended by SIGKILL"):
            run_all(made, check=False)
        assert time.monotonic() - began_s < MOST_S
    assert not any(map(is_there, pids)), "the others have ended with it"


def test_an_idle_engine_sees_that_a_rank_has_died(model: Path) -> None:
    with engine(model, **{"parallel.tensor": 2}) as made:
        assert not made.has_work()
        assert made.idle_s() == RANKS_LOOK_S
        assert made.diagnostics().communication_s is not None
        os.kill(processes(made)[0], signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(EngineFailedError, match="was ended by SIGKILL"):
            wait_for_work(made, MOST_S)
        assert time.monotonic() - began_s < MOST_S


def test_closing_does_not_wait_for_a_rank_that_does_not_answer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "RANKS_END_S", 0.5)
    made = build_engine(settings(model, **{"parallel.tensor": 2, "speculative.method": "none"}))
    llm = LLM(made, toy_tokenizer(), model_name="toy", max_model_len=made.max_model_len)
    [pid] = processes(made)
    os.kill(pid, signal.SIGSTOP)
    try:
        llm.submit(range(3, 30), llm.sampling_params(ignore_eos=True))
        current = made._begin_step()  # another thread computes it, and waits for the other rank
        made._planner.plan_ahead(current, made.view)  # interrupted here, the blocks of the step are published
        closing = threading.Thread(target=llm.close, daemon=True)
        closing.start()
        closing.join(MOST_S)
        assert not closing.is_alive()
        assert not is_there(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for_work(made: Engine, most_s: float) -> None:
    end_s = time.monotonic() + most_s
    while not made.has_work() and time.monotonic() < end_s:
        time.sleep(0.01)


def test_what_does_not_divide_starts_no_process(model: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"4 heads are not divisible by it.* 1, 2, 4 would do"),
        engine(model, **{"parallel.tensor": 3}),
    ):
        pass


def test_a_rank_that_cannot_start_says_why(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "ENTRY", "tests.core.processes_entries:fail_by_a_bug")
    with (
        pytest.raises(EngineFailedError, match="rank 1 failed: ZeroDivisionError: a bug"),
        engine(model, **{"parallel.tensor": 2}),
    ):
        pass


def test_no_rank_is_left_where_the_engine_cannot_be_built(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings of what is around the backend are checked once its ranks have started."""
    made: list[int] = []
    first_rank = start.first_rank

    def watched(*arguments: Any) -> LeadingRank:
        backend = first_rank(*arguments)
        group = backend._ranks._processes
        assert group is not None
        made.extend(group.pids)
        return backend

    def refuse(*_: object) -> None:
        raise ConfigError("no such pass")

    monkeypatch.setattr(start, "first_rank", watched)
    monkeypatch.setattr(build, "build_passes", refuse)
    with pytest.raises(ConfigError, match="no such pass"), engine(model, **{"parallel.tensor": 2}):
        pass
    assert len(made) == 1
    assert not is_there(made[0])
