"""Processes that store pages through SGLang's HiCache until they are killed, and say which are stored.

The first process imports SGLang, which takes seconds, and forks a writer for each line `FOLDER FIRST` that it
reads. A writer says `ready PID` when the first prompt is stored, and `stored NUMBER` for each.
"""

from __future__ import annotations

import os
import sys

from benchmarks.hosts.sglang_hicache import Pages, hicache

PAGES_PER_PROMPT = 6


def prompt(number: int) -> list[int]:
    """Tokens of 6 pages that no other prompt begins with."""
    return [1000 + number, *range(4 * PAGES_PER_PROMPT - 1)]


def store_until_killed(folder: str, first: int) -> None:
    config = {"dir": folder, "disk_gb": 0.001, "weights_id": "w", "interface_v1": 1}
    with hicache(config) as cache:
        pages = Pages(cache)
        indices = pages.alloc(PAGES_PER_PROMPT)
        number = first
        while True:
            pages.fill(indices, number)
            assert pages.back_up(prompt(number), indices) == 4 * PAGES_PER_PROMPT
            if number == first:
                os.write(1, f"ready {os.getpid()}\n".encode())
            os.write(1, f"stored {number}\n".encode())
            number += 1


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if not child:
            store_until_killed(line.split()[0], int(line.split()[1]))
        os.waitpid(child, 0)
        os.write(1, b"ended\n")
