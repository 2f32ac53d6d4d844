"""A network within one thread that loses links, and messages that come late, twice, reordered or damaged."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.comm.kv_transfer.transports.in_process import InProcessNetwork, InProcessTransport
from sagellm.core.clock import ManualClock
from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_tiers import KVCodec
from sagellm.core.protocols.kv_transfer import BlockLayout, Message, Ticket, TransferStatus
from sagellm.core.types import Tokens
from sagellm.kvmgr.kv_pool.tiers.codecs import CODECS
from tests.comm.kv_transfer.world import HEAD_FIRST, INDEX, LAYOUT, SIZE, Inline, Instance, introduce

OPTIONS = ChannelOptions(
    chunk_bytes=LAYOUT.bytes_per_block, credits=3, max_credits=5, stall_s=1.0, offer_wait_s=0.5,
    backoff_s=0.1, drain_s=0.2, resume_s=0.3,
)  # fmt: skip


class FaultyNetwork(InProcessNetwork):
    """Delivers one of the first messages when told to. `share`: of messages to which something happens."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__(threaded=False)
        self.rng, self.share = random.Random(seed), share
        self.num_faults = 0

    def run_one(self) -> bool:
        if len(self._tasks) > 1 and self.rng.random() < self.share:
            self._tasks.rotate(-self.rng.randrange(min(4, len(self._tasks))))
            self.num_faults += 1
        return super().run_one()

    def run_all(self) -> None:
        while self.run_one():
            pass


class FaultyTransport(InProcessTransport):
    """Posts through a `FaultyNetwork`."""

    def __init__(self, node: str, network: FaultyNetwork) -> None:
        super().__init__(node, network)
        self._faults = network

    def post(self, link: int, message: Message) -> None:
        rng, share = self._faults.rng, self._faults.share
        if rng.random() > share * (1 + message.is_chunk):
            super().post(link, message)
            return
        self._faults.num_faults += 1
        fault = rng.choice(["twice", "late", "damage", "reset"])
        if fault == "reset" and rng.random() < 0.3:
            self.reset(link, "a fault")
        copied = message._replace(payload=[b"".join(map(bytes, message.payload))])
        if fault == "damage" and message.is_chunk:
            data = bytearray(copied.payload[0])
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            super().post(link, message._replace(payload=[data]))
            return
        super().post(link, message)
        if fault in ("twice", "late"):
            again: Callable[[], None] = partial(self._again, link, copied)
            for _ in range(0 if fault == "twice" else rng.randrange(1, 60)):
                again = partial(self._network.submit, again)
            self._network.submit(again)

    def _again(self, link: int, message: Message) -> None:
        """Deliver a copy, to whatever the other end is now."""
        if link not in self._ends or self._is_closed:
            return
        node, other = self._ends[link]
        peer = self._network.nodes.get(node)
        if peer is not None and other:
            try:
                peer.take(other, message)
            except KVDataError as error:
                peer._break(other, str(error))


RANKS = ("rank 0", "rank 1")


def _zstd(layout: BlockLayout | None) -> KVCodec:
    return CODECS.create("zstd", dtype="float32", layout=layout)


class FaultyWorld:
    """Four instances with different blocks, two ranks of a fifth, and prompts that share prefixes."""

    def __init__(self, seed: int, share: float = 0.15, num_blocks: int = 20) -> None:
        self.rng, self.clock = random.Random(seed), ManualClock()
        self.network = FaultyNetwork(seed, share)
        head_first = LAYOUT.__class__(HEAD_FIRST, 3, 4, 8, SIZE, "float32")
        kinds: dict[str, dict[str, Any]] = {
            "plain": {},
            "gpu": {"has_views": False},
            "head first": {"layout": head_first},
            "zstd": {"codec": _zstd},
        }
        self.names = list(kinds)
        kinds |= {name: {"layout": LAYOUT.of_heads(2 * i, 2 * i + 2)} for i, name in enumerate(RANKS)}
        self.instances = {
            name: Instance(
                name, FaultyTransport(name, self.network), num_blocks=num_blocks, options=OPTIONS,
                clock=self.clock, worker=Inline(), **given,
            )
            for name, given in kinds.items()
        }  # fmt: skip
        introduce(*self.instances.values())
        self.prompts = [self._prompt(number) for number in range(24)]
        self.open: dict[tuple[str, Ticket], tuple[str, str]] = {}
        """The request and the target of transfers that have not ended."""
        self.done: list[tuple[tuple[str, str], str]] = []
        """Of transfers that have: who sent which request, and to whom."""
        self.num_sent = 0
        self.outcomes: dict[TransferStatus, int] = dict.fromkeys(TransferStatus, 0)

    def _prompt(self, number: int) -> Tokens:
        """One of three beginnings, and an end of its own."""
        begin = [number % 3] * (SIZE * 2)
        return Tokens([*begin, *([100 + number] * (SIZE * (1 + number % 7)))])

    def compute(self, name: str, number: int) -> None:
        self.instances[name].compute(self.prompts[number])

    def send(self, name: str, target: str, number: int, *, by_layer: bool) -> None:
        asked, tokens = self.instances[name], self.prompts[number]
        request_id = f"r{self.num_sent}"
        ticket = asked.send(tokens, target, request_id, by_layer=by_layer)
        if by_layer:
            asked.channel.computed(ticket, self.rng.randrange(4))
        self.open[name, ticket] = request_id, target
        self.num_sent += 1

    def send_heads(self, target: str, number: int, *, by_layer: bool) -> None:
        """Both ranks send theirs; something may happen in between."""
        tokens, request_id = self.prompts[number], f"r{self.num_sent}"
        for name in self.rng.sample(RANKS, 2):
            rank = self.instances[name]
            rank.compute(tokens)
            ticket = rank.send(tokens, target, request_id, by_layer=by_layer)
            if by_layer:
                rank.channel.computed(ticket, self.rng.randrange(4))
            self.open[name, ticket] = request_id, target
            self.num_sent += 1
            for _ in range(self.rng.randrange(12)):
                self.network.run_one()

    def poll(self) -> None:
        for name, each in self.instances.items():
            each.poll()
            for key in [key for key in self.open if key[0] == name and key[1] in each.reports]:
                status = each.reports[key[1]].status
                self.outcomes[status] += 1
                request_id, target = self.open.pop(key)
                if status is TransferStatus.DONE:
                    self.done.append(((name, request_id), target))

    def do(self) -> None:
        """Something happens."""
        rng, names = self.rng, self.names
        chance = rng.random()
        name, number = rng.choice(names), rng.randrange(len(self.prompts))
        if chance < 0.08:
            self.compute(name, number)
        elif chance < 0.12:
            self.instances[name].evict_all()
        elif chance < 0.3:
            if len(self.open) < 8:
                target, by_layer = rng.choice([each for each in names if each != name]), rng.random() < 0.3
                if rng.random() < 0.3:
                    self.send_heads(target, number, by_layer=by_layer)
                else:
                    self.compute(name, number)
                    self.send(name, target, number, by_layer=by_layer)
        elif chance < 0.33 and self.open:
            sender, ticket = rng.choice(list(self.open))
            self.instances[sender].channel.cancel(ticket)
        elif chance < 0.4 and self.open:
            sender, ticket = rng.choice(list(self.open))
            self.instances[sender].channel.computed(ticket, rng.randrange(4))
        elif chance < 0.45:
            self.clock.advance(rng.choice([0.01, 0.1, 1.5]))
        elif chance < 0.9:
            for _ in range(rng.randrange(12)):
                self.network.run_one()
        self.poll()

    def finish(self) -> None:
        """Every transfer ends, and every block is some prompt's or free."""
        self.network.share = 0.0
        for _ in range(200):
            if not self.open and not any(each.arrivals.num_blocks for each in self.instances.values()):
                break
            for sender, ticket in self.open:
                self.instances[sender].channel.computed(ticket, 3)
            self.network.run_all()
            self.poll()
            self.clock.advance(0.3)
        assert not self.open, "each transfer is reported"
        self.network.run_all()
        self.clock.advance(OPTIONS.resume_s + 0.1)
        self.poll()
        self.check()
        self._check_received()
        for each in self.instances.values():
            assert not each.arrivals.num_blocks
            assert each.pool.num_free + each.pool.num_held(INDEX) == each.pool.total_blocks

    def check(self) -> None:
        for each in self.instances.values():
            each.check(*self.prompts)

    def _check_received(self) -> None:
        """An engine sees each transfer once, and all that its sender has reported as DONE."""
        for name, each in self.instances.items():
            seen = Counter((one.source, one.request_id) for one in each.received)
            assert all(count == 1 for count in seen.values()), (name, seen)
            done = {
                (one.source, one.request_id) for one in each.received if one.status is TransferStatus.DONE
            }
            assert {sent for sent, target in self.done if target == name} <= done
