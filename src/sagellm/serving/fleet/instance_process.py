"""The process of one instance: an engine, and the server around it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import sagellm
from sagellm.comm.kv_transfer.transports.shared_memory import SharedMemoryTransport
from sagellm.comm.kv_transfer.transports.tcp import TcpTransport
from sagellm.control_plane.fleet.host_names import addresses_of, tcp_endpoint
from sagellm.control_plane.fleet.instance_server import REPORT_S, InstanceServer
from sagellm.control_plane.fleet.keys import FleetKey
from sagellm.control_plane.kv_events import KVEventPublisher
from sagellm.core.config import Config
from sagellm.core.cores import keep_to
from sagellm.core.errors import ConfigError
from sagellm.core.events import EventBus
from sagellm.core.protocols.kv_transfer import TransportEngine
from sagellm.core.protocols.router import InstanceType
from sagellm.engines.build import build_engine, located, replace_strategy
from sagellm.engines.build_kv import replace_policy
from sagellm.engines.build_transfers import build_transfers
from sagellm.engines.engine import Engine
from sagellm.engines.hand_over import HandOvers

if TYPE_CHECKING:
    from sagellm.core.child_process import Inbox

log = logging.getLogger("sagellm.fleet")


def run(options: Mapping[str, Any], inbox: Inbox) -> None:
    """The entry of a child process. Serves until the inbox ends.

    `options`: those of `instance_server`, and `cpus`, on which the process stays.
    """
    keep_to(options.get("cpus", ()))
    server = instance_server(options)
    threading.Thread(target=_stop_at_end, args=(inbox, server), name="lifeline", daemon=True).start()
    serve_instance(server)


def serve_instance(server: InstanceServer) -> None:
    """Serve until the server is stopped, and close all of it."""
    try:
        server.run()
    finally:
        server.close()
        if server.hand_overs is not None:
            server.hand_overs.close()
        if server.publisher is not None:
            server.publisher.close()
        server.engine.close()


def instance_server(options: Mapping[str, Any]) -> InstanceServer:
    """The server of one instance. `options`: `name`, `kind`, `endpoint`, `key`, `config`, `rank`, `host`.

    It publishes KV events if `config` says where. `rank`: its number among those of its host. `host`: where
    its KV is reached by TCP; empty: by shared memory, from this host alone.
    """
    name, key, config = options["name"], FleetKey(options["key"]), Config.model_validate(options["config"])
    if not options.get("host") and config.kv.share_pool is None:
        config = config.model_copy(update={"kv": config.kv.model_copy(update={"share_pool": True})})
    events, publisher = EventBus(), None
    if config.events.endpoint is not None:  # first: a port that is taken is told before a model is loaded
        rank = options.get("rank", 0)
        publisher = KVEventPublisher.of(events, config.events, config.kv.block_size, rank=rank)
    engine = build_engine(located(config), events=events)
    hand_overs = _hand_overs(engine, name, key, options.get("host", ""))
    server = InstanceServer(
        name,
        engine,
        options["endpoint"],
        key,
        max_model_len=engine.max_model_len,
        kind=InstanceType(options["kind"]),
        events=events,
        report_s=options.get("report_s", REPORT_S),
        publisher=publisher,
        version=f"sageLLM {sagellm.__version__}",
        hand_overs=hand_overs,
        transfers=b"" if hand_overs is None else hand_overs.transfers.channel.metadata(),
        actions={
            "hot_prefixes": engine.kv.index.hot_prefixes,
            "set_policy": lambda policy, given: replace_policy(engine, policy, **given),
            "set_strategy": lambda strategy, given: replace_strategy(engine, strategy, **given),
        },
    )
    log.info("%s is at %s", name, server.endpoint)
    return server


def listening_endpoint(name: str, host: str, port: int, listen_host: str | None) -> str:
    """Where an instance listens that a front elsewhere reaches at `host`.

    `listen_host`: as `fleet.listen_host` says. Raises `ConfigError` if it is no address of this host.
    """
    if listen_host == "*":
        return f"tcp://*:{port}"
    wanted = listen_host or host
    own = next(filter(_is_own, _addresses(wanted)), None)
    if own is not None:
        return tcp_endpoint(own, port)
    if listen_host is not None:
        raise ConfigError(
            f"fleet.listen_host {listen_host} is no address of this host: give one of its addresses, or '*'"
        )
    log.warning(
        "%s listens on all interfaces: %s, its address in the fleet file, is not one of this host's; "
        "fleet.listen_host names another, or '*'",
        name,
        host,
    )
    return f"tcp://*:{port}"


def _addresses(host: str) -> list[str]:
    try:
        return addresses_of(host.strip("[]"))
    except (OSError, ValueError):  # ValueError: no text that a name can have
        return []


def _is_own(address: str) -> bool:
    """Whether this host has it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _hand_overs(engine: Engine, name: str, key: FleetKey, host: str) -> HandOvers | None:
    """None where the engine's KV cannot be sent; one line says why."""
    transport: TransportEngine
    transport = TcpTransport(key.text.encode(), host, 0) if host else SharedMemoryTransport(key.text.encode())
    try:
        return HandOvers(build_transfers(engine, name, transport))
    except ConfigError as error:
        log.warning("%s exchanges no KV: %s", name, error)
        return None


def _stop_at_end(inbox: Inbox, server: InstanceServer) -> None:
    while inbox.get() is not None:
        pass
    server.stop()
