"""A native engine after `kill -9`: what its disk tier has is right, and hits."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch

from sagellm.core.types import Namespace, Tokens
from tests.engines.native import killed_engine
from tests.engines.native.tiered import BLOCK, WHOLE, ask, engine, hierarchy, kv_of, prompts
from tests.tiny_models import save_tiny

NUM_SLOTS = 100
"""Blocks of the disk: about half of what the prompts and their answers have, so blocks are overwritten."""
MOST_S = 0.8
"""An engine works for a random time up to this."""


@contextmanager
def running(*arguments: Any) -> Iterator[tuple[Any, Any]]:
    """An engine in a process, and the lines that it says."""
    processes = multiprocessing.get_context("forkserver")  # imports once
    processes.set_forkserver_preload([killed_engine.__name__])
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=killed_engine.main, args=(*arguments, theirs))
    process.start()
    theirs.close()
    try:
        with os.fdopen(os.dup(ours.fileno()), encoding="ascii") as lines:
            assert lines.readline() == "ready\n"
            yield process, lines
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def test_a_warm_start_after_kill_9(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    disk = {"kv.disk_gb": 0.05, "kv.dir": str(tmp_path / "kv")}
    alone = engine(tmp_path / "model")
    expected = [ask(alone, f"r{i}", prompt)[0] for i, prompt in enumerate(prompts())]
    alone.close()
    with running(tmp_path / "model", disk, prompts(), None) as (process, lines):
        assert [lines.readline() for _ in range(5)] == ["answered\n"] * 4 + ["settled\n"]
        process.kill()
        process.join()
    again = engine(tmp_path / "model", **disk)
    for i, prompt in enumerate(prompts()):
        assert ask(again, f"r{i}", prompt) == (expected[i], WHOLE)
    [state] = hierarchy(again).states()
    assert (state.loaded, dict(state.misses), state.fault) == (4 * WHOLE // BLOCK, {}, "")
    again.check()
    again.close()


def kill_and_verify(tmp_path: Path, num_kills: int) -> None:
    rng, asked = random.Random(num_kills), prompts(seed=1, count=12)
    save_tiny(tmp_path / "model", "llama")
    alone = engine(tmp_path / "model")
    block_gb = alone.backend.get_kv_schema().bytes_per_block / 2**30
    expected = []
    for i, prompt in enumerate(asked):
        drawn, _ = ask(alone, f"r{i}", prompt)
        expected.append((drawn, kv_of(alone, prompt)))
    alone.close()
    disk = {"kv.disk_gb": (NUM_SLOTS + 0.5) * block_gb, "kv.dir": str(tmp_path / "kv")}
    num_answered = num_hits = num_misses = 0
    for seed in range(num_kills):
        with running(tmp_path / "model", disk, asked, seed) as (process, lines):
            killer = Timer(MOST_S * rng.random(), process.kill)
            killer.start()
            num_answered += len(lines.readlines())
            killer.join()
        again = engine(tmp_path / "model", **disk)
        [tier] = hierarchy(again).tiers
        found = [tier.lookup(Tokens(prompt), Namespace()).num_blocks for prompt in asked]
        for i in sorted(range(len(asked)), key=lambda i: -found[i]):  # before others have it evicted
            drawn, num_cached = ask(again, f"r{i}", asked[i])  # checks all books after each step
            assert drawn == expected[i][0]
            torch.testing.assert_close(kv_of(again, asked[i]), expected[i][1], rtol=1e-4, atol=1e-4)
            num_hits += num_cached
        [state] = hierarchy(again).states()
        assert not state.fault
        num_misses += sum(state.misses.values())
        again.close()
    print(f"{num_kills} kills, {num_answered} answers before, {num_hits} tokens hit, {num_misses} misses")
    assert num_answered
    assert num_hits


def test_kill_9_at_3_moments(tmp_path: Path) -> None:
    kill_and_verify(tmp_path, 3)


@pytest.mark.slow
def test_kill_9_at_20_moments(tmp_path: Path) -> None:
    kill_and_verify(tmp_path, 20)
