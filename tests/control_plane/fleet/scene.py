"""A fleet within one process: real sockets, engines that remember tokens, and turns that the test takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sagellm.comm.kv_transfer.transports.in_process import InProcessNetwork, InProcessTransport
from sagellm.control_plane.admission import AdmissionController
from sagellm.control_plane.fleet.client import PING_S, Instances
from sagellm.control_plane.fleet.engine import FleetEngine
from sagellm.control_plane.fleet.instance_server import InstanceServer
from sagellm.control_plane.fleet.keys import FleetKey
from sagellm.control_plane.fleet.served import FleetPolicy
from sagellm.control_plane.kv_events import KVEventPublisher
from sagellm.control_plane.rebalancing import RebalancingOptions
from sagellm.control_plane.replication import Replicator
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.core.clock import MonotonicClock
from sagellm.core.config import EventsConfig
from sagellm.core.errors import CapacityError
from sagellm.core.events import EventBus
from sagellm.core.protocols.router import (
    CachedPrefix,
    ExecutionInstance,
    InstanceType,
    Placement,
    RequestMetadata,
)
from sagellm.core.types import CapabilityDescriptor, FinishReason, Request, RequestOutput
from sagellm.engines.build_transfers import build_transfers
from sagellm.engines.engine import Engine
from sagellm.engines.hand_over import HandOvers
from sagellm.engines.simulator.token_memory import TokenMemoryBackend
from sagellm.engines.validation import check_request
from tests.builders import check_books, fake_engine

KEY = FleetKey("a key of sixteen or more")


class InTurn:
    """A router that takes the instances in turn, and counts what it is told."""

    reads_cache = True

    def __init__(self) -> None:
        self.turn = 0
        self.placed: list[str] = []

    def place(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> Placement:
        if not instances:
            raise CapacityError("no instance")
        chosen = instances[self.turn % len(instances)].instance_id
        self.turn += 1
        self.placed.append(chosen)
        return Placement(chosen, chosen)

    def observe(self, instance_id: str, latencies_s: object) -> None: ...


class Separating(InTurn):
    """Prompts on the first instance, answers on the others in turn; whole requests where one is left."""

    def place(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> Placement:
        first = instances[0].instance_id
        decode = super().place(request, instances[1:] or instances, cached).decode
        return Placement(first if first == "i-0" else decode, decode)


class Scene:
    """`num` instances and a front. Nothing moves but in `turn`."""

    def __init__(
        self,
        folder: Path,
        num: int = 2,
        *,
        policy: FleetPolicy | None = None,
        lease_s: float = 10.0,
        silence_s: float = 300.0,
        exchanges: bool = False,
        router: InTurn | None = None,
        publishes: bool = False,
        kinds: Mapping[str, InstanceType] | None = None,
        num_blocks: Mapping[str, int] | None = None,
        admission: AdmissionController | None = None,
        replication: RebalancingOptions | None = None,
    ):
        self.folder, self.clock = folder, MonotonicClock()
        self.publishes = publishes
        self.kinds, self.num_blocks = dict(kinds or {}), dict(num_blocks or {})
        self.policy, self.lease_s, self.silence_s = policy or FleetPolicy(), lease_s, silence_s
        self.admission, self.replication = admission, replication
        self.backends: dict[str, TokenMemoryBackend] = {}
        self.servers: dict[str, InstanceServer] = {}
        self.router = router or InTurn()
        self.network = InProcessNetwork(threaded=False) if exchanges else None
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, RequestOutput] = {}
        for number in range(num):
            self.start(f"i-{number}")
        self.start_front()

    def start_front(self) -> None:
        """A front that knows all instances that run; the one before is no longer turned."""
        self.instances = Instances(
            KEY,
            self.clock,
            lease_s=self.lease_s,
            ping_s=min(PING_S, self.lease_s / 10),
            silence_s=self.silence_s,
        )
        self.prefixes = PrefixIndex(self.clock)
        replicator = None
        if self.replication is not None:
            replicator = Replicator(self.prefixes, self.replication, self.clock)
        self.front = FleetEngine(
            self.instances,
            self.router,
            self.prefixes,
            _check,
            clock=self.clock,
            policy=self.policy,
            admission=self.admission,
            replicator=replicator,
        )
        for name in self.servers:
            self.front.know(self.instances.add(name, self.endpoint(name)))
        self.until(lambda: all(each.is_here for each in self.front.members.values()))

    def replace_front(self) -> None:
        """The front ends, and another one takes over."""
        self.front.close()
        self.start_front()

    def endpoint(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}"

    def start(self, name: str) -> InstanceServer:
        events = EventBus()
        self.backends[name] = TokenMemoryBackend(
            num_blocks=self.num_blocks.get(name, 1200), max_model_len=4096
        )
        engine = fake_engine(self.backends[name], events=events, clock=self.clock)
        hand_overs, metadata = None, b""
        publisher = None
        if self.publishes:
            config = EventsConfig(
                endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", topic=name
            )
            block_size = engine.capability().block_size
            publisher = KVEventPublisher.of(events, config, block_size, rank=len(self.servers))
        if self.network is not None:
            transfers = build_transfers(engine, name, InProcessTransport(name, self.network))
            hand_overs = HandOvers(transfers, early_s=0.3)
            metadata = hand_overs.transfers.channel.metadata()
        server = self.servers[name] = InstanceServer(
            name, engine, self.endpoint(name), KEY, max_model_len=engine.max_model_len,
            kind=self.kinds.get(name, InstanceType.GENERAL), events=events, hand_overs=hand_overs,
            transfers=metadata, actions={"hot_prefixes": engine.kv.index.hot_prefixes},
            publisher=publisher, version="sageLLM 1", clock=self.clock,
        )  # fmt: skip
        return server

    def kill(self, name: str) -> None:
        """As the process's end: the socket goes, and nothing is said."""
        server = self.servers.pop(name)
        server._socket.close(linger=0)
        server._context.term()
        server._bell.close()
        self._end_transfers(server)

    def _end_transfers(self, server: InstanceServer) -> None:
        if server.publisher is not None:
            server.publisher.close()
        if isinstance(server.hand_overs, HandOvers):
            server.hand_overs.close()
            server.hand_overs.transfers.close()

    def engine(self, name: str) -> Engine:
        engine = self.servers[name].engine
        assert isinstance(engine, Engine)
        return engine

    def turn(self) -> None:
        for server in self.servers.values():
            server.wake()
            server.turn()
            server.check()
            check_books(self.engine(server.instance_id))
        while self.network is not None and self.network.run_one():
            pass
        self.front.wake()
        for output in self.front.step():
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                assert output.request_id not in self.ended
                self.ended[output.request_id] = output
        self.front.check()

    def until(self, is_so: Callable[[], bool], within_s: float = 20.0) -> None:
        until_s = self.clock.now() + within_s
        while not is_so():
            assert self.clock.now() < until_s, f"not so within {within_s} s"
            self.turn()

    def until_dropped(self, name: str) -> None:
        """The front sleeps until an instance has ended its session."""
        until_s = self.clock.now() + 20.0
        while self.servers[name]._sessions:
            assert self.clock.now() < until_s
            self.servers[name].turn()

    def finish(self) -> None:
        self.until(lambda: not len(self.front.requests))

    def check_idle(self) -> None:
        """No instance has a request, and no block is held."""
        for name in self.servers:
            stats = self.engine(name).stats()
            assert (stats.num_running, stats.num_waiting, stats.blocks_active) == (0, 0, 0)

    def close(self) -> None:
        self.front.close()
        for server in self.servers.values():
            self._end_transfers(server)
            server.close()


def _check(request: Request, capability: CapabilityDescriptor, max_model_len: int) -> None:
    check_request(request, capability, max_model_len, capability.num_blocks * capability.block_size)


def is_done(output: RequestOutput) -> bool:
    return output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
