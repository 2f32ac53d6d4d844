"""Names of hosts: a slow or unknown one holds up no other connection, and a new address is found."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from sagellm.control_plane.fleet import client
from sagellm.control_plane.fleet.client import Instances, RemoteInstance
from sagellm.control_plane.fleet.host_names import HostNames, addresses_of, is_address, tcp_endpoint
from sagellm.control_plane.fleet.instance_server import InstanceServer
from sagellm.core.clock import MonotonicClock
from sagellm.core.errors import ConfigError
from tests.builders import fake_engine
from tests.control_plane.fleet.scene import KEY

CLOCK = MonotonicClock()


class Hosts:
    """Instances behind names, and what resolves the names."""

    def __init__(self) -> None:
        self.addresses: dict[str, Sequence[str]] = {}
        self.asked: list[str] = []
        self.slow = threading.Event()
        self.servers: list[InstanceServer] = []
        self.instances = Instances(KEY, CLOCK, resolve=self.resolve)

    def resolve(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        if host == "slow.test":
            self.slow.wait()
        if host not in self.addresses:
            raise OSError(-2, "Name or service not known")
        return self.addresses[host]

    def serve(self, name: str, endpoint: str = "tcp://127.0.0.1:0") -> tuple[InstanceServer, int]:
        server = InstanceServer(name, fake_engine(clock=CLOCK), endpoint, KEY, max_model_len=4096)
        self.servers.append(server)
        return server, int(server.endpoint.rpartition(":")[2])

    def until(self, is_so: Callable[[], bool], within_s: float = 20.0) -> None:
        until_s = CLOCK.now() + within_s
        while not is_so():
            assert CLOCK.now() < until_s, f"not so within {within_s} s"
            for server in self.servers:
                server.wake()
                server.turn()
            for each in self.instances.wait(0.02):
                each.poll()

    def until_connected(self, *found: RemoteInstance) -> None:
        self.until(lambda: all(each.facts is not None for each in found))

    def close(self) -> None:
        self.slow.set()
        self.instances.close()
        for server in self.servers:
            server.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    made.close()


def test_a_slow_name_holds_up_no_other(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "NAME_S", 0.3)
    hosts.addresses = {"slow.test": ["127.0.0.1"], "quick.test": ["127.0.0.1"]}
    _, slow_port = hosts.serve("slow")
    _, quick_port = hosts.serve("quick")
    slow = hosts.instances.add("slow", f"tcp://slow.test:{slow_port}")
    quick = hosts.instances.add("quick", f"tcp://quick.test:{quick_port}")
    hosts.until_connected(quick)
    hosts.until(lambda: "no name server" in slow.fault)
    assert slow.facts is None
    assert hosts.asked.count("slow.test") == 1, "a look-up that goes on is not begun again"
    hosts.slow.set()
    hosts.until_connected(slow, quick)


def test_an_unknown_name_is_a_reason_and_is_asked_again(hosts: Hosts) -> None:
    _, port = hosts.serve("later")
    later = hosts.instances.add("later", f"tcp://later.test:{port}")
    hosts.until(lambda: "later.test is not known" in later.fault)
    hosts.until(lambda: len(hosts.asked) >= 3)
    hosts.addresses["later.test"] = ["127.0.0.1"]
    hosts.until_connected(later)
    assert not later.fault


def test_a_new_address_is_found_when_the_connection_is_lost(hosts: Hosts) -> None:
    """As that of a Kubernetes pod that is started anew."""
    first, port = hosts.serve("pod")
    hosts.addresses["pod.test"] = ["127.0.0.1"]
    pod = hosts.instances.add("pod", f"tcp://pod.test:{port}")
    hosts.until_connected(pod)
    hosts.servers.remove(first)
    first.close()
    hosts.until(lambda: pod.facts is None)
    hosts.serve("pod", f"tcp://127.0.0.2:{port}")
    hosts.addresses["pod.test"] = ["127.0.0.2"]
    hosts.until_connected(pod)


def test_each_address_of_a_host_is_tried(hosts: Hosts) -> None:
    _, port = hosts.serve("two")
    hosts.addresses["two.test"] = ["127.0.0.3", "127.0.0.1"]
    two = hosts.instances.add("two", f"tcp://two.test:{port}")
    hosts.until_connected(two)


def test_numbers_are_not_looked_up(hosts: Hosts) -> None:
    _, port = hosts.serve("number")
    number = hosts.instances.add("number", f"tcp://127.0.0.1:{port}")
    hosts.until_connected(number)
    assert not hosts.asked


@pytest.mark.parametrize("endpoint", ["tcp://host", "tcp://:1", "tcp://host:0", "tcp://host:65536", "x"])
def test_what_is_no_endpoint_is_refused_at_once(hosts: Hosts, endpoint: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        hosts.instances.add("bad", endpoint)


def test_more_names_than_threads() -> None:
    done = threading.Semaphore(0)
    names = HostNames(lambda: done.release(), lambda host: [host])
    found = [names.look_up(f"host-{number}") for number in range(100)]
    for _ in found:
        assert done.acquire(timeout=20.0)
    assert [each.addresses for each in found] == [(f"host-{number}",) for number in range(100)]
    assert names.look_up("host-0") is not found[0], "a name is asked anew each time"


def test_addresses() -> None:
    assert "127.0.0.1" in addresses_of("localhost")
    assert ":" not in addresses_of("localhost")[0], "IPv4 first"
    assert is_address("::1")
    assert is_address("[::1]")
    assert not is_address("decode-0.decode")
    assert tcp_endpoint("::1", 1) == "tcp://[::1]:1"
