"""A process that writes blocks until it is killed, and says what it does.

A line `begin NUMBER SLOT` comes before a block is written, `end SLOT` when its write has returned, and
`forget SLOT` before it is forgotten.
"""

from __future__ import annotations

import os
import random
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

from tests.kvmgr.tiers.storages.stored_blocks import block, open_disk, read, write

NUM_SLOTS = 64


def main(folder: Path, seed: int, output: Connection) -> None:
    def say(*words: object) -> None:
        os.write(output.fileno(), (" ".join(map(str, words)) + "\n").encode())

    storage = open_disk(folder, NUM_SLOTS)
    found = {each.slot: each for each in storage.recover()}
    say("ready")

    def work(slots: range, number: int) -> None:
        rng = random.Random(seed + slots.start)
        held = {slot: found[slot] for slot in slots if slot in found}
        while True:
            chosen = rng.sample(slots, rng.randint(1, 4))
            if rng.random() < 0.2:
                for slot in chosen:
                    say("forget", slot)
                storage.forget(chosen)
                held = {slot: held[slot] for slot in held if slot not in chosen}
                continue
            blocks = [block(slot, number + index) for index, slot in enumerate(chosen)]
            number += len(blocks)
            for index, each in enumerate(blocks):
                say("begin", number - len(blocks) + index, each.slot)
            write(storage, *blocks)
            for each in blocks:
                say("end", each.slot)
                held[each.slot] = each
            storage.touch(chosen)
            read(storage, *rng.sample(list(held.values()), 1))

    half = NUM_SLOTS // 2
    Thread(target=work, args=(range(half), (2 * seed + 1) << 32)).start()
    work(range(half, NUM_SLOTS), (2 * seed + 2) << 32)
