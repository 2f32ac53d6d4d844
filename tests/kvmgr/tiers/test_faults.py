"""All tiers, with faults in every call that moves bytes: no wrong block is served, and no request waits."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sagellm.core.blocks import Tier
from sagellm.core.types import Namespace, Tokens
from sagellm.kvmgr.prefix_cache.fingerprint import block_hash
from tests.effort import examples
from tests.kvmgr.tiers.drivers import BLOCK_BYTES, SIZE, FakeServer, FaultyStorage, User

NUM_SESSIONS = 6
SESSIONS = st.integers(0, NUM_SESSIONS - 1)
RATES = st.sampled_from([0.0, 0.1, 0.4])


def prompt(name: int) -> Tokens:
    """Four blocks, of which all prompts have the first."""
    return Tokens([*[1] * SIZE, *(1000 * name + i for i in range(3 * SIZE))])


class AllTiers(RuleBasedStateMachine):
    """Sessions over a small device, host memory, a disk and a server. Requests come, wait, end and go."""

    @initialize(
        seed=st.integers(0, 1 << 30), policy=st.sampled_from(["lru", "adaptive"]), writes_back=st.booleans()
    )
    def start(self, seed: int, policy: str, writes_back: bool) -> None:
        self.writes_back = writes_back
        self.rng, self.policy, self.num_requests = random.Random(seed), policy, 0
        self.server, self.disk = FakeServer(seed), FaultyStorage(24, seed + 1)
        self.sessions = [prompt(name) for name in range(NUM_SESSIONS)]
        self.user = self._user()

    def _user(self) -> User:
        self.host = FaultyStorage(20, self.rng.randrange(1 << 30))
        tiers = [(Tier.DRAM, self.host), (Tier.NVME, self.disk)]
        user = User(12, tiers, self.policy, self.server, writes_back=self.writes_back)
        user.hierarchy.most_polled_blocks = self.rng.choice([1, 5, 2048])
        return user

    @rule(sessions=st.lists(SESSIONS, min_size=1, max_size=8), grow=st.booleans(), end=st.booleans())
    def serve(self, sessions: list[int], grow: bool, end: bool) -> None:
        for session in sessions:
            path = self._path(session)
            self.user.serve(path["tokens"], self._name(), path["namespace"])
            if end:
                self.user.end(**path)
            if grow:
                self._grow(session)

    def _grow(self, session: int) -> None:
        tokens, more = self.sessions[session], [self.rng.randrange(1 << 20) for _ in range(SIZE)]
        is_long = len(tokens) >= 10 * SIZE
        self.sessions[session] = prompt(100 + self.num_requests) if is_long else Tokens([*tokens, *more])

    @rule(session=SESSIONS, start=st.booleans(), goes=st.booleans())
    def ask(self, session: int, start: bool, goes: bool) -> None:
        name = self._name()
        self.user.ask(name=name, **self._path(session), start=start)
        if goes:
            self.user.cancel(name)

    @rule(session=SESSIONS, tail_blocks=st.integers(1, 6), splits=st.booleans())
    def begin_tail(self, session: int, tail_blocks: int, splits: bool) -> None:
        """Begin to load the last blocks of a prompt while the others are computed."""
        if splits:
            self.user.split_loads()
        self.user.begin_tail(name=self._name(), tail_blocks=tail_blocks, **self._path(session))

    @rule(number=st.integers(0, 1000), leaves=st.booleans())
    def end_tail(self, number: int, leaves: bool) -> None:
        if self.user.running:
            self.user.end_tail(list(self.user.running)[number % len(self.user.running)], leaves=leaves)

    @rule(num_blocks=st.integers(1, 12))
    def write_back(self, num_blocks: int) -> None:
        self.user.write_back(num_blocks)

    @rule(session=SESSIONS)
    def preempt(self, session: int) -> None:
        self.user.preempt(name=f"preempted {session}", **self._path(session))

    @rule(session=SESSIONS)
    def let_go(self, session: int) -> None:
        self.user.hierarchy.let_go(f"preempted {session}")

    @rule(what=st.sampled_from(["poll", "poll", "give_way", "clear", "settle", "start_loads"]))
    def move(self, what: str) -> None:
        of_user = what in ("poll", "settle")
        getattr(self.user if of_user else self.user.hierarchy, what)()

    @rule(seconds=st.sampled_from([0.5, 2.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.user.clock.advance(seconds)

    @rule(device=RATES, reads=RATES, errors=RATES, on_disk=st.booleans(), is_full=st.booleans())
    def fail(self, device: float, reads: float, errors: float, on_disk: bool, is_full: bool) -> None:
        """Of the device, and of host memory or the disk, which may be full."""
        storage = self.disk if on_disk else self.host
        self.user.device.fault_rate = device
        storage.fault_rate, storage.error_rate, storage.fails_to_write = reads, errors, is_full

    @rule(rate=RATES, is_dead=st.booleans(), is_full=st.booleans())
    def fail_server(self, rate: float, is_dead: bool, is_full: bool) -> None:
        self.server.fault_rate, self.server.is_dead, self.server.is_full = rate, is_dead, is_full

    @rule(number=st.integers(0, 1000), damages=st.booleans())
    def lose_on_server(self, number: int, damages: bool) -> None:
        keys = sorted(self.server.kept.copy())  # a thread may put
        if keys and damages:
            self.server.kept[keys[number % len(keys)]] = b"x" * BLOCK_BYTES
        elif keys:
            self.server.kept.pop(keys[number % len(keys)], None)

    @rule()
    def restart(self) -> None:
        """Faults go, host memory is empty, and the disk has what it had."""
        self._stop()
        self.disk.fault_rate = self.disk.error_rate = 0.0
        self.disk.fails_to_write = False
        self.user = self._user()
        for tier in self.user.tiers:
            tier.recover(block_hash)

    @invariant()
    def books_balance(self) -> None:
        self.user.check()

    def teardown(self) -> None:
        if hasattr(self, "user"):
            self._stop()

    def _stop(self) -> None:
        for name in list(self.user.running):
            self.user.end_tail(name)
        self.user.settle()
        self.user.check()
        self.user.hierarchy.close()

    def _path(self, session: int) -> dict[str, Any]:
        return {"tokens": self.sessions[session], "namespace": Namespace(tenant=str(session % 2))}

    def _name(self) -> str:
        self.num_requests += 1
        return f"r{self.num_requests}"


TestAllTiers = AllTiers.TestCase
TestAllTiers.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
