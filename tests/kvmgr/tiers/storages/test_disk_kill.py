"""`DiskStorage` after kill -9: the old block, the new one or none."""

from __future__ import annotations

import multiprocessing
import os
import random
from pathlib import Path
from threading import Timer

import pytest

from sagellm.core.protocols.kv_tiers import ReadOutcome
from tests.kvmgr.tiers.storages import killed_writer
from tests.kvmgr.tiers.storages.stored_blocks import open_disk, read, token_hash

MOST_S = 0.3
"""Blocks are written for a random time up to this."""


class Slots:
    """What each slot may hold, by what the writer has said."""

    def __init__(self) -> None:
        self.sure: dict[int, bytes] = {}
        self.maybe: dict[int, set[bytes]] = {slot: set() for slot in range(killed_writer.NUM_SLOTS)}

    def follow(self, output: str) -> int:
        """Take in whole lines; returns how many blocks were written to the end."""
        num_written = 0
        begun: dict[int, bytes] = {}
        for line in output.splitlines(keepends=True):
            match line.split() if line.endswith("\n") else []:
                case ["begin", number, slot]:
                    self._let_go(int(slot))
                    begun[int(slot)] = token_hash(int(number))
                    self.maybe[int(slot)].add(begun[int(slot)])
                case ["end", slot]:
                    self.sure[int(slot)] = begun.pop(int(slot))
                    self.maybe[int(slot)] = set()
                    num_written += 1
                case ["forget", slot]:
                    self._let_go(int(slot))
        return num_written

    def _let_go(self, slot: int) -> None:
        if slot in self.sure:
            self.maybe[slot].add(self.sure.pop(slot))


def kill_and_verify(folder: Path, num_kills: int) -> None:
    rng = random.Random(num_kills)
    slots = Slots()
    num_written = num_torn = 0
    for seed in range(num_kills):
        num_written += slots.follow(_written_until_killed(folder, seed, MOST_S * rng.random() ** 2))
        storage = open_disk(folder, killed_writer.NUM_SLOTS)
        blocks = storage.recover()
        found = {each.slot: each.token_hash for each in blocks}
        assert found.items() >= slots.sure.items(), "a block whose write had returned is lost"
        for slot, key in found.items():
            assert key == slots.sure.get(slot) or key in slots.maybe[slot]
        outcomes = read(storage, *blocks)  # compares the bytes, too
        assert all(
            outcome is ReadOutcome.OK
            for each, outcome in zip(blocks, outcomes, strict=True)
            if each.slot in slots.sure
        )
        num_torn += sum(outcome is not ReadOutcome.OK for outcome in outcomes)
        storage.check()
        storage.close()
        slots.sure, slots.maybe = found, {slot: set() for slot in slots.maybe}
    print(f"{num_kills} kills, {num_written} blocks written, {num_torn} torn")
    assert num_written > 10 * num_kills


def _written_until_killed(folder: Path, seed: int, after_s: float) -> str:
    """Start the writer and kill it later. Returns what it said."""
    processes = multiprocessing.get_context("forkserver")  # imports once
    processes.set_forkserver_preload([killed_writer.__name__])
    ours, theirs = processes.Pipe(duplex=False)
    writer = processes.Process(target=killed_writer.main, args=(folder, seed, theirs))
    writer.start()
    theirs.close()
    killer = Timer(after_s, writer.kill)
    with os.fdopen(os.dup(ours.fileno()), encoding="ascii") as lines:
        assert lines.readline() == "ready\n"
        killer.start()
        output = lines.read()
    killer.join()
    writer.join()
    writer.close()
    ours.close()
    return output


def test_kill_20_times(tmp_path: Path) -> None:
    kill_and_verify(tmp_path / "tier", 20)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_200_times(tmp_path: Path) -> None:
    kill_and_verify(tmp_path / "tier", 200)
