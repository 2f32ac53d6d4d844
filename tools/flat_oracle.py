"""Counts hits of eviction policies on flat streams of blocks. Compares ours with libCacheSim's as an oracle.

    python tools/flat_oracle.py --ours [--write]              every registered policy
    python tools/flat_oracle.py --peer PYTHON [--write]       libcachesim, by the Python that has it installed
    python tools/flat_oracle.py --speed                       µs per evicted block, hit and miss

Prints JSON; `--write` keeps the numbers in tests/golden/eviction_flat.json, which the tests compare with.
libCacheSim is GPL: it runs in an environment of its own, and only its numbers come back.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import random
import subprocess
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sagellm.core.protocols.eviction import EvictionPolicy, SimpleExtent

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "eviction_flat.json"
CAPACITIES = (60, 200, 600)
NUM_ACCESSES = 20_000
NUM_KEYS = 2_000
BATCH = 32
PEER_CLASSES = {
    "lru": "LRU", "fifo": "FIFO", "lfu": "LFU", "arc": "ARC", "sieve": "Sieve", "two_q": "TwoQ",
    "s3fifo": "S3FIFO", "lfu_da": "LFUDA",
}  # fmt: skip


# -- streams


def zipf(generator: random.Random, num_keys: int, exponent: float) -> Iterator[int]:
    """Endless keys 1..num_keys, key k with a weight of k ** -exponent."""
    bounds = list(itertools.accumulate(key**-exponent for key in range(1, num_keys + 1)))
    while True:
        yield 1 + min(bisect_left(bounds, generator.random() * bounds[-1]), num_keys - 1)


def zipf_stream(seed: int) -> list[int]:
    return list(itertools.islice(zipf(random.Random(seed), NUM_KEYS, 0.9), NUM_ACCESSES))


def scan_stream(seed: int) -> list[int]:
    """A Zipf stream with scans at intervals. A scan reads keys in order that occur nowhere else."""
    generator = random.Random(seed)
    popular = zipf(generator, NUM_KEYS // 2, 0.9)
    keys: list[int] = []
    while len(keys) < NUM_ACCESSES:
        keys += itertools.islice(popular, generator.randrange(200, 800))
        first = NUM_KEYS // 2 + generator.randrange(NUM_KEYS // 2 - 300)
        keys += range(first, first + generator.randrange(50, 300))
    return keys[:NUM_ACCESSES]


def drift_stream(seed: int) -> list[int]:
    """A working set that changes: half of it loops, half is drawn. At intervals a part is replaced."""
    generator = random.Random(seed)
    keys: list[int] = []
    first = 1
    while len(keys) < NUM_ACCESSES:
        size = generator.randrange(80, 400)
        for _ in range(generator.randrange(2, 8)):
            keys += range(first, first + size // 2)
            keys += (first + generator.randrange(size) for _ in range(size // 2))
        first = 1 + (first + generator.randrange(size)) % (NUM_KEYS - 400)
    return keys[:NUM_ACCESSES]


def streams() -> dict[str, list[int]]:
    """The three streams of the golden numbers. Their seeds were fixed before the first run."""
    return {"zipf": zipf_stream(1), "scan": scan_stream(2), "drift": drift_stream(3)}


def tenant_stream(seed: int, num_accesses: int = 60_000) -> list[tuple[str, int]]:
    """Three tenants with rates 8:1:1 and disjoint contents: (tenant, key).

    Six in ten accesses of a tenant are to what it used d accesses of its own ago, d lognormal with a median
    of 150, as if each held about as many conversations; the others are to something new. So all tenants
    would have the same hit ratio in caches of their own.
    """
    generator = random.Random(seed)
    past: dict[str, list[int]] = {"busy": [], "quiet": [], "calm": []}
    fresh = itertools.count()
    names = generator.choices(list(past), weights=(8, 1, 1), k=num_accesses)
    return [(name, _again_or_new(generator, past[name], fresh)) for name in names]


def _again_or_new(generator: random.Random, past: list[int], fresh: Iterator[int]) -> int:
    distance = 1 + int(150 * math.exp(generator.gauss(0.0, 1.0)))
    reused = generator.random() < 0.6 and distance <= len(past)
    past.append(past[-distance] if reused else next(fresh))
    return past[-1]


def digest(keys: Iterable[int]) -> str:
    return hashlib.sha256(array("q", keys).tobytes()).hexdigest()


# -- ours


class FlatCache:
    """A cache of single blocks around a policy. It does the least that an owner of extents has to do.

    With `announce` it tells the policy which key is coming before it asks for room.
    """

    def __init__(self, policy: EvictionPolicy, capacity: int, *, announce: bool = False) -> None:
        self.policy = policy
        self.capacity = capacity
        self.announce = announce
        self.resident: dict[int, SimpleExtent] = {}
        self.tick = 0

    def access(self, key: int, tenant: str = "") -> bool:
        """Use a block, inserting it if it is not there; True if it was."""
        from sagellm.core.protocols.eviction import Hint, SimpleExtent, UseListener

        self.tick += 1
        listener = self.policy if isinstance(self.policy, UseListener) else UseListener()
        run = self.resident.get(key)
        if run is not None:
            self.policy.pin(key)
            listener.found(run, 0)
            run.num_uses += 1
            run.last_use, run.used_s = self.tick, float(self.tick)
            self.policy.unpin(run)
            listener.used(run)
            return True
        if self.announce:
            self.policy.hint(key, Hint(wanted_by=1))
        if len(self.resident) == self.capacity:
            self.policy.evict(1, self._give_up)
        run = self.resident[key] = SimpleExtent(
            key, 1, last_use=self.tick, used_s=float(self.tick), tenant=tenant
        )
        run.content = key.to_bytes(8, "little", signed=True)
        listener.added(run, 1, len(self.resident))
        self.policy.insert(run)
        listener.used(run)
        return False

    def hits(self, keys: Iterable[int]) -> int:
        return sum(map(self.access, keys))

    def _give_up(self, run: SimpleExtent, num_blocks: int) -> None:
        run.num_blocks -= num_blocks
        del self.resident[run.key]


def make(name: str, capacity: int, **options: Any) -> EvictionPolicy:
    """Makes a policy by name, with a capacity and seed if needed."""
    from sagellm.core.registry import registry

    policies = registry("policy")
    offered = {"capacity": capacity, "seed": 0, **options}
    taken = policies.options(name)
    policy: EvictionPolicy = policies.create(
        name, **{key: value for key, value in offered.items() if key in taken}
    )
    return policy


def variants() -> dict[str, tuple[str, Mapping[str, Any], bool]]:
    """What is counted: a label, the policy, its options, and whether keys are announced."""
    from sagellm.core.registry import registry

    plain: dict[str, tuple[str, Mapping[str, Any], bool]] = {
        name: (name, {}, False) for name in registry("policy").names()
    }
    return {
        **plain,
        "arc announced": ("arc", {}, True),
        "lfu without ageing": ("lfu", {"ageing": False}, False),
    }


def count_hits(label: str, keys: Iterable[int], capacity: int) -> int:
    name, options, announce = variants()[label]
    return FlatCache(make(name, capacity, **options), capacity, announce=announce).hits(keys)


def our_hits() -> dict[str, dict[str, dict[str, int]]]:
    return {
        stream: {
            str(capacity): {label: count_hits(label, keys, capacity) for label in variants()}
            for capacity in CAPACITIES
        }
        for stream, keys in streams().items()
    }


def decision_us(name: str, num_resident: int = 10_000, num_rounds: int = 500) -> dict[str, float]:
    """µs of CPU time on single blocks in a full cache. `evict` is per evicted block, asked for 32 at a time
    as a request does; the others are per hit and per miss, with the events and the driver's own work."""
    from sagellm.core.protocols.eviction import SimpleExtent

    generator = random.Random(0)
    cache = FlatCache(make(name, num_resident), num_resident)
    cache.hits(range(num_resident))
    hit_us = _each_us(cache.access, generator.choices(range(num_resident), k=num_resident))
    spent_s, next_key = 0.0, num_resident
    for _ in range(num_rounds):
        start_s = time.thread_time()
        cache.policy.evict(BATCH, cache._give_up)
        spent_s += time.thread_time() - start_s
        for _ in range(BATCH):
            cache.tick += 1
            next_key += 1
            run = SimpleExtent(next_key, 1, last_use=cache.tick, used_s=float(cache.tick))
            cache.resident[next_key] = run
            cache.policy.insert(run)
    miss_us = _each_us(cache.access, list(range(next_key + 1, next_key + 1 + num_resident)))
    evict_us = 1e6 * spent_s / (num_rounds * BATCH)
    return {"evict": round(evict_us, 2), "hit": round(hit_us, 2), "miss": round(miss_us, 2)}


def _each_us(access: Callable[[int], bool], keys: list[int]) -> float:
    start_s = time.thread_time()
    for key in keys:
        access(key)
    return 1e6 * (time.thread_time() - start_s) / len(keys)


# -- the oracle


def peer_hits() -> dict[str, Any]:
    """Runs in the oracle's Python. Returns hits of its policies, get by get, for blocks of size 1."""
    import libcachesim as peer  # type: ignore[import-not-found]

    def hits(class_name: str, keys: list[int], capacity: int) -> int:
        cache, request = getattr(peer, class_name)(capacity, hashpower=14), peer.Request()
        request.obj_size = 1
        count = 0
        for key in keys:
            request.obj_id = key
            count += cache.get(request)
        return count

    return {
        stream: {
            str(capacity): {label: hits(name, keys, capacity) for label, name in PEER_CLASSES.items()}
            for capacity in CAPACITIES
        }
        for stream, keys in streams().items()
    }


def ask_peer(python: str) -> dict[str, Any]:
    command = [python, __file__, "--inside-peer"]
    answer: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return answer


def keep(part: str, numbers: Mapping[str, Any]) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    golden["streams"] = {name: digest(keys) for name, keys in streams().items()}
    golden[part] = numbers
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Hit counts of eviction policies on flat streams.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--ours", action="store_true", help="count for every registered policy")
    what.add_argument("--peer", metavar="PYTHON", help="count with libcachesim, in this Python")
    what.add_argument("--speed", action="store_true", help="time every registered policy")
    what.add_argument("--inside-peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=f"keep the numbers in {GOLDEN.name}")
    chosen = parser.parse_args(arguments)
    numbers: Mapping[str, Any]
    if chosen.inside_peer:
        numbers = peer_hits()
    elif chosen.speed:
        numbers = {label: decision_us(label) for label in variants() if " " not in label}
    else:
        part, numbers = ("peer", ask_peer(chosen.peer)) if chosen.peer else ("ours", our_hits())
        if chosen.write:
            keep(part, numbers)
    print(json.dumps(numbers, indent=1, sort_keys=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
