"""`RemoteTier`: instances share blocks, and a server that fails costs no request more than its limit."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sagellm.core.blocks import Tier
from sagellm.core.protocols.kv_tiers import ReadOutcome, TierLookup
from sagellm.core.types import Namespace, Tokens
from sagellm.kvmgr.kv_pool.tiers.remote_tier import RemoteTier
from tests.kvmgr.tiers.drivers import (
    BLOCK_BYTES,
    SIZE,
    FakeDevice,
    FakeServer,
    FaultyStorage,
    User,
    hashes_of,
)

SPACE = Namespace()


def prompt(name: int, num_blocks: int) -> Tokens:
    return Tokens([1000 * name + i for i in range(num_blocks * SIZE)])


def user_of(server: FakeServer, num_blocks: int = 8, num_host: int = 0) -> User:
    return User(num_blocks, [(Tier.DRAM, FaultyStorage(num_host))] if num_host else [], server=server)


def remote(user: User) -> RemoteTier:
    tier = user.tiers[-1]
    assert isinstance(tier, RemoteTier)
    return tier


def save(user: User, tokens: Tokens, name: str) -> None:
    """Compute a prompt, and wait until the server has it."""
    user.serve(tokens, name)
    user.settle()
    assert user.remote.flush(10.0)
    user.hierarchy.poll()


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


def test_an_instance_loads_what_another_has_computed(server: FakeServer) -> None:
    first, second = user_of(server), user_of(server, num_host=64)
    for name in range(4):
        save(first, prompt(name, 5), f"a{name}")
    assert [second.serve(prompt(name, 5), f"b{name}") for name in range(4)] == [5] * 4
    second.settle()
    host, shared = second.hierarchy.states()
    assert (shared.tier, shared.loaded, shared.stored, shared.dropped) == (Tier.REMOTE, 20, 0, 0)
    assert host.stored == 20  # what came is offered to the nearer tiers like what was computed
    assert "put" not in server.calls[server.calls.index("get") :]
    assert [second.serve(prompt(name, 5), f"c{name}") for name in range(4)] == [5] * 4
    assert second.tiers[0].num_loaded > 0
    for user in (first, second):
        user.check()
        user.hierarchy.close()


def test_the_server_is_asked_once_and_only_where_it_could_help(server: FakeServer) -> None:
    user = user_of(server, num_host=64)
    tokens = prompt(1, 4)
    save(user, tokens, "first")
    assert server.calls.count("ask") == 1
    user.serve(tokens, "on the device")
    for name in (2, 3):
        save(user, prompt(name, 4), f"other {name}")
    num_asked = server.calls.count("ask")
    assert user.serve(tokens, "in host memory") == 4
    assert server.calls.count("ask") == num_asked
    remote(user).ask_s = 1000.0
    assert user.serve(prompt(9, 4), "answers take too long") == 0
    assert server.calls.count("ask") == num_asked
    assert remote(user).ask_s < 1000.0
    user.hierarchy.close()


def test_the_longer_prefix_wins(server: FakeServer) -> None:
    first, second = user_of(server, 16), user_of(server, 16, num_host=64)
    long = prompt(1, 8)
    save(first, long, "all")
    second.serve(Tokens(long.slice(0, 3 * SIZE)), "head")
    for name in (2, 3):
        second.serve(prompt(name, 8), f"other {name}")
    second.settle()
    assert second.serve(long, "all") == 8
    assert remote(second).num_loaded > 4
    first.hierarchy.close()
    second.hierarchy.close()


def test_what_the_server_has_lost_is_put_again_at_once(server: FakeServer) -> None:
    user, tokens = user_of(server), prompt(1, 6)
    save(user, tokens, "first")
    save(user, prompt(2, 8), "other")
    for token_hash in hashes_of(bytes(tokens.slice(0)), SPACE)[2:]:
        del server.kept[token_hash]
    assert user.serve(tokens, "again") == 2
    user.settle()
    assert user.remote.flush(10.0)
    assert len(server.kept) == 14
    assert remote(user).misses == {}
    user.check()
    user.hierarchy.close()


def test_a_damaged_block_is_a_miss_and_is_put_again(server: FakeServer) -> None:
    user, tokens = user_of(server), prompt(1, 6)
    save(user, tokens, "first")
    save(user, prompt(2, 8), "other")
    server.kept[hashes_of(bytes(tokens.slice(0)), SPACE)[3]] = b"x" * BLOCK_BYTES
    assert user.serve(tokens, "again") == 3
    assert remote(user).misses == {ReadOutcome.CORRUPT: 1}
    save(user, prompt(2, 8), "other again")
    assert user.serve(tokens, "repaired") == 6
    user.check()
    user.hierarchy.close()


def test_a_dead_server_is_not_waited_for_and_comes_back(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    user = user_of(server)
    save(user, prompt(1, 4), "before")
    save(user, prompt(2, 8), "other")
    server.is_dead = True  # from now on
    assert user.serve(prompt(1, 4), "finds out") == 0
    for number in range(5):
        assert user.hierarchy.request(f"r{number}", prompt(1, 6), SPACE, 12) is TierLookup.MISS
        user.hierarchy.poll()
    assert user.hierarchy.faults() == ["remote: no answer"]
    assert user.hierarchy.states()[0].fault == "no answer"
    assert caplog.text.count("is not used until it works again") == 1
    server.is_dead = False
    user.clock.advance(5.5)
    assert user.hierarchy.request("probes", prompt(1, 6), SPACE, 12) is TierLookup.MISS
    deadline_s = time.monotonic() + 10.0
    while user.remote.fault and time.monotonic() < deadline_s:
        time.sleep(0.001)
    user.hierarchy.poll()
    assert not user.hierarchy.faults()
    save(user, prompt(3, 8), "evicts")
    assert user.serve(prompt(1, 4), "is back") == 4
    user.check()
    user.hierarchy.close()


def test_a_request_waits_for_no_answer_longer_than_its_limit(server: FakeServer) -> None:
    first, user = user_of(server), user_of(server)
    tokens = prompt(1, 4)
    save(first, tokens, "first")
    server.gate.clear()
    assert user.hierarchy.request("a", tokens, SPACE, 8) is TierLookup.HIT_PENDING
    assert user.hierarchy.request("a", tokens, SPACE, 8) is TierLookup.HIT_PENDING
    assert remote(user).is_asking
    assert user.hierarchy.poll() == []
    user.clock.advance(1.01)
    assert user.hierarchy.poll() == ["a"]
    assert user.hierarchy.is_idle
    assert user.hierarchy.request("a", tokens, SPACE, 8) is TierLookup.MISS
    user.check()
    server.gate.set()
    assert user.migrator.wait(10.0)  # the late answer is learned, and names no request
    assert user.hierarchy.poll() == []
    assert remote(user).index.num_cached == 4
    assert user.serve(tokens, "b") == 4
    user.hierarchy.close()
    first.hierarchy.close()


def test_a_cancelled_question_leaves_nothing_behind(server: FakeServer) -> None:
    user = user_of(server)
    server.gate.clear()
    for name in ("a", "b"):
        assert user.hierarchy.request(name, prompt(1, 4), SPACE, 8) is TierLookup.HIT_PENDING
        user.hierarchy.cancel(name)
    assert user.hierarchy.is_idle
    server.gate.set()
    user.hierarchy.close()
    assert user.hierarchy.poll() == []
    assert server.calls.count("ask") <= 1


def loading(server: FakeServer) -> tuple[User, Tokens]:
    """A user whose load of two chunks waits for the server."""
    first, user = user_of(server), user_of(server)
    tokens = prompt(1, 6)
    save(first, tokens, "first")
    first.hierarchy.close()
    assert user.hierarchy.request("a", tokens, SPACE, 12) is TierLookup.HIT_PENDING
    assert user.settle() == ["a"]
    server.gate.clear()
    assert user.hierarchy.request("a", tokens, SPACE, 12) is TierLookup.HIT_PENDING
    assert user.pool.num_free == 2
    while server.calls[-1] != "get":
        time.sleep(0.001)
    return user, tokens


def test_blocks_are_given_back_while_the_server_is_silent(server: FakeServer) -> None:
    """And what it sends afterwards is written nowhere."""
    user, tokens = loading(server)
    assert user.hierarchy.give_way()
    assert user.hierarchy.poll() == ["a"]
    assert user.pool.num_free == 8
    assert user.hierarchy.is_idle
    device = user.device
    assert isinstance(device, FakeDevice)
    before = device.blocks.copy()
    server.gate.set()
    assert user.migrator.wait(10.0)
    assert user.hierarchy.poll() == []
    assert (device.blocks == before).all()
    user.check()
    assert user.serve(tokens, "b") == 6
    user.hierarchy.close()


def test_a_load_that_takes_longer_than_computing_is_given_up(server: FakeServer) -> None:
    user, _ = loading(server)
    user.clock.advance(11.0)
    assert user.hierarchy.poll() == []
    user.clock.advance(1.1)
    before = user.hierarchy.bandwidths()[Tier.REMOTE]
    assert user.hierarchy.poll() == ["a"]
    assert user.pool.num_free == 8
    assert user.hierarchy.bandwidths()[Tier.REMOTE] < before
    server.gate.set()
    user.check()
    user.hierarchy.close()


def test_what_waits_to_be_put_is_bounded_and_what_is_dropped_is_put_later(server: FakeServer) -> None:
    user = user_of(server, 40)
    server.gate.clear()
    for name in range(4):
        remote(user).answered.add(f"r{name}")  # asking would wait
        user.serve(prompt(name, 8), f"r{name}")
        user.settle()
    state = user.hierarchy.states()[0]
    assert state.dropped == 32 - 19  # the queue holds 20 blocks, and chunks have 3 or 2
    server.gate.set()
    assert user.remote.flush(10.0)
    user.hierarchy.poll()
    for name in range(4):
        save(user, prompt(name, 8), f"again {name}")
    assert len(server.kept) == 32
    assert user.hierarchy.states()[0].stored == 32
    user.check()
    user.hierarchy.close()


def test_a_full_server_is_read_and_tried_again(server: FakeServer) -> None:
    user = user_of(server)
    save(user, prompt(1, 4), "before")
    server.is_full = True
    save(user, prompt(2, 4), "refused")
    assert user.hierarchy.faults() == ["remote: full"]
    num_puts = server.calls.count("put")
    save(user, prompt(3, 6), "not tried")
    assert server.calls.count("put") == num_puts
    assert user.serve(prompt(1, 4), "is read") == 4
    server.is_full = False
    user.clock.advance(5.5)
    save(user, prompt(4, 6), "is written")
    assert user.hierarchy.faults() == []
    assert len(server.kept) == 10
    user.hierarchy.close()


def test_tenants_do_not_share(server: FakeServer) -> None:
    first, second = user_of(server), user_of(server)
    first.serve(prompt(1, 4), "a", Namespace(tenant="one"))
    first.settle()
    assert first.remote.flush(10.0)
    assert second.serve(prompt(1, 4), "b", Namespace(tenant="two")) == 0
    assert second.serve(prompt(1, 4), "c", Namespace(tenant="one")) == 4
    first.hierarchy.close()
    second.hierarchy.close()


def test_a_tail_comes_from_the_server(server: FakeServer) -> None:
    first, second = user_of(server), user_of(server, num_host=64)
    save(first, prompt(1, 6), "a")
    second.split_loads()
    assert second.begin_tail(prompt(1, 6), "b") == 3
    assert second.end_tail("b") == 3
    second.settle()
    assert [tier.num_loaded for tier in second.tiers] == [0, 3]
    assert len(second.tiers[0].index.all_block_ids()) == 6, "the host tier has it now, too"
    second.check()
    first.hierarchy.close()
    second.hierarchy.close()


def test_a_tail_that_takes_too_long_ends_with_what_came(server: FakeServer) -> None:
    """The thread hangs in the network; nothing waits for it, and it writes no block any more."""
    first, second = user_of(server), user_of(server)
    save(first, prompt(1, 6), "a")
    second.split_loads()
    second.hierarchy.request("b", prompt(1, 6), SPACE, 12, tail_blocks=6)
    second.settle()
    server.gate.clear()
    assert second.begin_tail(prompt(1, 6), "b", tail_blocks=6) == 3
    second.hierarchy.poll()
    assert second.hierarchy.take_tail("b") is None
    second.clock.advance(20.0)  # longer than computing takes
    second.hierarchy.poll()
    assert second.end_tail("b") == 0
    server.gate.set()
    second.settle()
    second.check()
    assert second.arrivals.num_blocks == 0
    first.hierarchy.close()
    second.hierarchy.close()


def test_a_request_that_asks_anew_while_its_old_tail_ends(server: FakeServer) -> None:
    first, second = user_of(server), user_of(server)
    save(first, prompt(1, 6), "a")
    second.split_loads()
    second.hierarchy.request("b", prompt(1, 6), SPACE, 12, tail_blocks=6)
    second.settle()
    server.gate.clear()
    assert second.begin_tail(prompt(1, 6), "b", tail_blocks=6) == 3
    assert second.end_tail("b", leaves=True) == 0  # it is preempted; the thread still reads
    assert second.hierarchy.request("b", prompt(1, 6), SPACE, 12) is TierLookup.HIT_PENDING
    assert second.hierarchy.give_way()
    server.gate.set()
    assert second.settle() == ["b"]
    second.check()
    first.hierarchy.close()
    second.hierarchy.close()


class Instances(RuleBasedStateMachine):
    """Two instances over one server that fails, loses, damages and refuses blocks. No byte is ever wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.server = FakeServer()
        self.rng = random.Random(0)
        self.users = [user_of(self.server, 12, num_host=20), user_of(self.server, 12)]
        self.sessions = [prompt(name, 2) for name in range(5)]
        self.num_requests = 0

    @rule(user=st.integers(0, 1), session=st.integers(0, 4), grows=st.booleans())
    def serve(self, user: int, session: int, grows: bool) -> None:
        tokens = self.sessions[session]
        self.users[user].serve(tokens, self._name(), Namespace(tenant=str(session % 2)))
        if grows:
            more = [self.rng.randrange(1 << 20) for _ in range(SIZE)]
            whole = len(tokens) >= 10 * SIZE
            self.sessions[session] = prompt(100 + self.num_requests, 2) if whole else Tokens([*tokens, *more])

    @rule(user=st.integers(0, 1), session=st.integers(0, 4), stays=st.booleans(), start=st.booleans())
    def ask(self, user: int, session: int, stays: bool, start: bool) -> None:
        hierarchy, name, tokens = self.users[user].hierarchy, self._name(), self.sessions[session]
        space = Namespace(tenant=str(session % 2))
        hierarchy.request(name, tokens, space, len(tokens), start=start)
        if stays:  # asks again without waiting, as after `poll`
            hierarchy.poll()
            hierarchy.request(name, tokens, space, len(tokens), start=start)
        else:
            hierarchy.cancel(name)

    @rule(user=st.integers(0, 1), session=st.integers(0, 4), tail_blocks=st.integers(1, 6))
    def begin_tail(self, user: int, session: int, tail_blocks: int) -> None:
        """Of a prompt that an instance has computed, this one or the other."""
        if len(self.sessions[session]) < 5 * SIZE:
            self.sessions[session] = prompt(100 + self.num_requests, 5)
        tokens, space = self.sessions[session], Namespace(tenant=str(session % 2))
        self.users[session % 2].serve(tokens, self._name(), space)
        self.users[session % 2].settle()
        self.users[session % 2].remote.flush(10.0)
        self.users[user].split_loads()
        self.users[user].begin_tail(tokens, self._name(), space, tail_blocks)

    @rule(user=st.integers(0, 1), leaves=st.booleans())
    def end_tail(self, user: int, leaves: bool) -> None:
        for name in list(self.users[user].running)[:1]:
            self.users[user].end_tail(name, leaves=leaves)

    @rule(
        user=st.integers(0, 1), what=st.sampled_from(["poll", "give_way", "clear", "settle", "start_loads"])
    )
    def move(self, user: int, what: str) -> None:
        if what == "settle":
            self.users[user].settle()
        else:
            getattr(self.users[user].hierarchy, what)()

    @rule(user=st.integers(0, 1), seconds=st.sampled_from([0.5, 2.0, 100.0]))
    def pass_time(self, user: int, seconds: float) -> None:
        self.users[user].clock.advance(seconds)

    @rule(is_dead=st.booleans(), is_full=st.booleans(), fault_rate=st.sampled_from([0.0, 0.0, 0.2]))
    def fail(self, is_dead: bool, is_full: bool, fault_rate: float) -> None:
        self.server.is_dead, self.server.is_full, self.server.fault_rate = is_dead, is_full, fault_rate

    @rule(number=st.integers(0, 1000), damages=st.booleans())
    def lose(self, number: int, damages: bool) -> None:
        keys = sorted(self.server.kept.copy())  # a thread may put
        if not keys:
            return
        token_hash = keys[number % len(keys)]
        if damages:
            self.server.kept[token_hash] = b"x" * BLOCK_BYTES
        else:
            self.server.kept.pop(token_hash, None)

    @invariant()
    def books_balance(self) -> None:
        for user in self.users:
            user.check()

    def teardown(self) -> None:
        for user in self.users:
            for name in list(user.running):
                user.end_tail(name)
            user.settle()
            user.check()
            assert user.arrivals.num_blocks == 0
            user.hierarchy.close()

    def _name(self) -> str:
        self.num_requests += 1
        return f"r{self.num_requests}"


TestInstances = Instances.TestCase
TestInstances.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
