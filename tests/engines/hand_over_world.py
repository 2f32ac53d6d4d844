"""Instances within one thread, over a network that loses, repeats and delays messages, and a front."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from sagellm.comm.kv_transfer.channel import TransferChannel
from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.core.clock import ManualClock
from sagellm.core.protocols.fleet import (
    FailurePolicy,
    HandOver,
    HandOverPart,
    HandOverReport,
    HandOverState,
)
from sagellm.core.types import FinishReason, Namespace, Request, RequestOutput, Tokens
from sagellm.engines.build_kv import hashes_of
from sagellm.engines.hand_over import HandOvers
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.transfers import KVTransfers
from tests.builders import check_books, expected_tokens, fake_engine, request
from tests.comm.kv_transfer.faulty import FaultyNetwork, FaultyTransport
from tests.comm.kv_transfer.world import Inline

OPTIONS = ChannelOptions(
    chunk_bytes=1024, credits=3, max_credits=8, stall_s=1.0, offer_wait_s=0.5, backoff_s=0.1, drain_s=0.2,
    resume_s=0.3,
)  # fmt: skip
EARLY_S = 3.0


class Instance:
    """An engine with its hand-overs. `inbox`: what the front has sent and was not delivered yet."""

    def __init__(
        self, name: str, network: FaultyNetwork, clock: ManualClock, *, num_blocks: int = 24,
        overlap: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.inbox = name, deque[Callable[[], None]]()
        backend = TokenMemoryBackend(num_blocks, max_num_seqs=4, max_model_len=64)
        self.engine = fake_engine(backend, clock=clock, overlap=overlap, max_batched_tokens=16)
        channel = TransferChannel(
            name, FaultyTransport(name, network), backend.kv_bytes(), backend.get_kv_schema(), None,
            self.engine.kv.arrivals, partial(hashes_of, 4), options=OPTIONS, clock=clock, worker=Inline(),
        )  # fmt: skip
        self.transfers = KVTransfers(self.engine, channel, lambda: None)
        self.hand_overs = HandOvers(self.transfers, early_s=EARLY_S, max_early=4)

    def check(self) -> None:
        check_books(self.engine)
        self.hand_overs.check()
        self.transfers.channel.check()


@dataclass
class Asked:
    """A request as the front knows it: `said` has reached its client. `at`: where it is now."""

    request: Request
    policy: FailurePolicy
    expected: list[int]
    said: list[int] = field(default_factory=list)
    attempt: int = 0
    at: str = ""
    peer: str = ""
    ended: str = ""


class World:
    """Three instances and a front that places, aborts, and replaces requests of lost instances."""

    def __init__(self, seed: int, share: float = 0.0, *, overlap: bool = False, num_blocks: int = 24) -> None:
        self.rng, self.clock = random.Random(seed), ManualClock()
        self.network = FaultyNetwork(seed, share)
        self.instances = {
            name: Instance(name, self.network, self.clock, overlap=overlap, num_blocks=num_blocks)
            for name in ("p", "d", "e")
        }
        for each in self.instances.values():
            for other in self.instances.values():
                if other is not each:
                    each.transfers.channel.add_peer(other.transfers.channel.metadata())
        self.asked: dict[str, Asked] = {}
        self.reports: list[tuple[str, HandOverReport]] = []
        self.lease_s = 2.0
        beginnings = [[self.rng.randrange(97) for _ in range(12)] for _ in range(3)]
        self.prompts = [
            [*beginnings[number % 3], *([number] * (1 + 3 * number % 17))][: 3 + 2 * number]
            for number in range(12)
        ]
        self.prompts.append([self.rng.randrange(97) for _ in range(50)])

    # -- the front

    def ask(
        self, number: int, max_tokens: int, policy: FailurePolicy = FailurePolicy.RECOMPUTE, *,
        prefill: str = "p", decode: str = "d", stops: bool = False,
    ) -> Asked:  # fmt: skip
        """Place a request: apart if `prefill` and `decode` differ."""
        prompt, backend = self.prompts[number], self.instances["p"].engine.backend
        assert isinstance(backend, TokenMemoryBackend)
        expected = expected_tokens(backend, prompt, max_tokens)
        stop = (self.rng.choice(expected),) if stops else ()
        if stop:
            expected = expected[: expected.index(stop[0]) + 1]
        one = request(f"r{len(self.asked)}", prompt, max_tokens, stop_token_ids=stop)
        asked = self.asked[one.request_id] = Asked(one, policy, expected)
        self._place(asked, prefill, decode)
        return asked

    def _place(self, asked: Asked, prefill: str, decode: str) -> None:
        asked.attempt += 1
        asked.at, asked.peer = prefill, decode if decode != prefill else ""
        one, instance = self._continued(asked), self.instances[prefill]
        if not asked.peer:
            instance.inbox.append(lambda: instance.engine.add(one))
            return
        hand_over = HandOver(HandOverPart.PREFILL, decode, policy=asked.policy, attempt=asked.attempt)
        instance.inbox.append(lambda: instance.hand_overs.prefill(one, hand_over))

    def fetch(self, asked_number: int, source: str, target: str, max_tokens: int) -> Asked:
        """Ask a request at `target`, which gets what `source` has cached of its prompt."""
        asked = self.ask(asked_number, max_tokens, prefill=target, decode=target)
        instance, one = self.instances[target], asked.request
        instance.inbox.pop()
        hand_over = HandOver(HandOverPart.FETCH, source, self.lease_s, attempt=asked.attempt)
        instance.inbox.append(lambda: instance.hand_overs.expect(one, hand_over))
        attempt, other = asked.attempt, self.instances[source]
        other.inbox.append(
            lambda: other.hand_overs.send_prefix(one.request_id, one.tokens, target, attempt=attempt)
        )
        return asked

    def _continued(self, asked: Asked) -> Request:
        return replace(asked.request, generated=tuple(asked.said))

    def abort(self, asked: Asked) -> None:
        asked.ended = "abort"
        for instance in self.instances.values():
            instance.inbox.append(partial(self._abort, instance, asked.request.request_id))

    @staticmethod
    def _abort(instance: Instance, name: str) -> None:
        instance.hand_overs.abort(name)
        assert not instance.hand_overs.abort(name)

    def lose(self, name: str) -> None:
        """An instance is given up: its requests go on elsewhere. It aborts all it has, as its lease is over."""
        lost = self.instances[name]
        lost.inbox.clear()
        for other in self.instances.values():
            if other is not lost:
                other.hand_overs.peer_lost(name)
        for request_id, asked in self.asked.items():
            lost.inbox.append(partial(self._abort, lost, request_id))
            if asked.at == name and not asked.ended:
                others = [each for each in self.instances if each != name]
                self._place(asked, self.rng.choice(others), self.rng.choice(others))

    # -- what happens

    def deliver_to(self, name: str) -> None:
        if self.instances[name].inbox:
            self.instances[name].inbox.popleft()()

    def step(self, name: str) -> None:
        instance = self.instances[name]
        outputs = list(instance.engine.step()) if instance.engine.has_work() else []
        self._progress(instance, outputs)

    def poll(self, name: str) -> None:
        self._progress(self.instances[name], [])

    def _progress(self, instance: Instance, outputs: Sequence[RequestOutput]) -> None:
        progress = instance.hand_overs.poll()
        for output in (*outputs, *progress.outputs):
            asked = self.asked[output.request_id]
            if asked.ended or asked.at != instance.name:
                continue
            self._said(asked, output)
        for report in progress.reports:
            self.reports.append((instance.name, report))
            asked = self.asked[report.request_id]
            is_sender = report.part is HandOverPart.PREFILL and report.state is HandOverState.FAILED
            if is_sender and report.attempt == asked.attempt and not asked.ended and asked.at == asked.peer:
                target, name, attempt = self.instances[asked.at], report.request_id, report.attempt
                target.inbox.append(partial(target.hand_overs.fail, name, attempt, report.reason))

    def _said(self, asked: Asked, output: RequestOutput) -> None:
        asked.said += output.new_token_ids
        assert asked.said == asked.expected[: len(asked.said)], output.request_id
        if output.finish_reason is FinishReason.ERROR:
            assert asked.policy is FailurePolicy.FAIL, output.error
            assert output.error is not None
            assert "its KV did not come" in output.error
            asked.ended = "error"
        elif output.finish_reason is FinishReason.MOVED:
            assert asked.peer
            source, asked.at = asked.at, asked.peer
            one, target = self._continued(asked), self.instances[asked.peer]
            hand_over = HandOver(HandOverPart.DECODE, source, self.lease_s, asked.policy, asked.attempt)
            target.inbox.append(lambda: target.hand_overs.expect(one, hand_over))
        elif output.finish_reason is not None:
            assert asked.said == asked.expected
            asked.ended = output.finish_reason.value

    def check(self) -> None:
        for instance in self.instances.values():
            instance.check()

    def finish(self) -> None:
        """Every request ends, and no block is held."""
        self.network.share = 0.0
        for _ in range(400):
            for name in self.instances:
                self.deliver_to(name)
                self.step(name)
            self.network.run_all()
            self.clock.advance(0.05)
            if all(asked.ended for asked in self.asked.values()) and not self._busy():
                break
        assert all(asked.ended for asked in self.asked.values()), self.asked
        self.clock.advance(EARLY_S + OPTIONS.resume_s)
        for name in self.instances:
            self.poll(name)
        self.check()
        for name, each in self.instances.items():
            assert not each.hand_overs.has_work, name
            assert each.hand_overs.idle_s() is None
            assert each.engine.kv.block_states().active == 0, name
            assert not each.engine.kv.pins.kept_names
            assert not each.engine.kv.blocks_move

    def _busy(self) -> bool:
        return any(
            each.inbox or each.engine.has_work() or each.engine.kv.blocks_move
            for each in self.instances.values()
        )

    def close(self) -> None:
        for each in self.instances.values():
            each.hand_overs.close()
            each.transfers.close()
            each.engine.close()


def whole_blocks(tokens: Sequence[int]) -> int:
    return len(tokens) // 4 * 4


def cached(instance: Instance, tokens: Sequence[int]) -> int:
    return instance.engine.kv.index.lookup(Tokens(tokens), Namespace()).num_tokens
