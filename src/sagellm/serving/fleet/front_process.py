"""The process of the front: the HTTP server over a `FleetEngine`."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sagellm.control_plane.fleet.client import Instances
from sagellm.control_plane.fleet.engine import FleetEngine
from sagellm.control_plane.fleet.keys import FleetKey
from sagellm.control_plane.fleet.plain_server import PlainServers, PlainTerms
from sagellm.control_plane.fleet.record import RecordedClient
from sagellm.control_plane.fleet.served import FleetPolicy
from sagellm.control_plane.fleet_instances import api_key, fleet_instances
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.config import Config
from sagellm.engines.build import located
from sagellm.engines.llm import LLM
from sagellm.engines.native import DEMO_MODEL, DEMO_NAME
from sagellm.engines.native.folder_files import ConfigJson, read_checked
from sagellm.engines.native.tokenizer import Tokenizer
from sagellm.engines.native.tokenizer_of import tokenizer_of
from sagellm.engines.validation import check_request
from sagellm.kvmgr.manager.prefix_sharing import SharingGroups
from sagellm.serving.fleet.policies import make_admission, make_fleet_router, make_replicator
from sagellm.serving.fleet.starting import wait_for_instance
from sagellm.serving.server import serve

if TYPE_CHECKING:
    from sagellm.core.child_process import Inbox

log = logging.getLogger("sagellm.fleet")
SAMPLE = "It is 17:25, na\u00efve \u4e16\u754c: def f(x): return x ** 2"
"""A text that other tokenizers are unlikely to split in the same way."""


class SupervisorLink:
    """Implements `Lifecycle` by commands to the supervisor, a JSON line each."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "wb", buffering=0)

    def complete(self) -> None:
        """Say that the fleet serves."""
        self._send({"command": "complete"})

    def serves(self, name: str) -> None:
        """Say that an instance has come to serve."""
        self._send({"command": "serves", "name": name})

    def restart(self, name: str) -> None:
        self._send({"command": "restart", "name": name})

    def start(self, group: str, number: int) -> None:
        self._send({"command": "start", "group": group, "number": number})

    def end(self, name: str) -> None:
        self._send({"command": "end", "name": name})

    def _send(self, command: Mapping[str, object]) -> None:
        self._pipe.write(json.dumps(command).encode() + b"\n")


def run(options: Mapping[str, Any], inbox: Inbox) -> None:
    """The entry of a child process. Ends with the inbox, or after the message "stop".

    `options`: `config`, `key`, `listener` and `commands` (file numbers), `instances`: endpoint by name, and
    `is_first`: whether the fleet has not served yet; then it ends without any instance in
    `fleet.start_timeout_s`. It serves as soon as one is there.
    """
    config = Config.model_validate(options["config"])
    if config.model.name is not None and not Path(config.model.name).is_dir():
        config = located(config)  # a name of the hub; torch is imported for it
    fleet = config.fleet
    clock = MonotonicClock()
    instances = Instances(
        FleetKey(options["key"]),
        clock,
        lease_s=fleet.lease_s,
        ping_s=fleet.heartbeat_s,
        silence_s=fleet.silence_s,
    )
    link = SupervisorLink(options["commands"])
    engine = _engine(config, instances, clock, link)
    apply = partial(_apply, engine, instances)
    apply(options["instances"])
    listener = socket.socket(fileno=options["listener"])
    folder = Path(config.model.name or DEMO_MODEL)
    tokenizer = tokenizer_of(config, folder)
    terms = _plain_terms(config, folder, tokenizer)
    _know_plain_servers(config, engine, instances, terms)
    serving = threading.Event()
    arguments = inbox, engine, apply, serving
    threading.Thread(target=_listen, args=arguments, name="lifeline", daemon=True).start()
    limit_s = fleet.start_timeout_s if options["is_first"] else None
    wait_for_instance(engine, config.server, listener, limit_s)
    llm = LLM(
        engine,
        tokenizer,
        model_name=terms.model,
        max_model_len=engine.max_model_len,
        defaults=tokenizer.default_sampling,
    )
    log.info("instances: %s", ", ".join(name for name, each in engine.members.items() if each.is_ready))
    link.complete()
    serving.set()
    serve(
        llm,
        config.server,
        listener=listener,
        log_level=config.log.level,
        log_format=config.log.format,
        log_requests=config.log.requests,
        config=config,
        lifecycle=link,
    )


def _engine(config: Config, instances: Instances, clock: Clock, link: SupervisorLink) -> FleetEngine:
    fleet, prefixes = config.fleet, PrefixIndex(clock)
    return FleetEngine(
        instances,
        make_fleet_router(fleet, clock, config.scheduler.max_batched_tokens),
        prefixes,
        _check,
        clock=clock,
        admission=make_admission(fleet, clock),
        namespace_of=SharingGroups(config.kv.group_of).namespace_of,
        replicator=make_replicator(fleet, prefixes, clock),
        on_serving=link.serves,
        policy=FleetPolicy(
            patience_s=fleet.patience_s,
            hand_over_lease_s=fleet.handover_lease_s,
            on_failure=fleet.handover_policy,
            seed=config.engine.seed,
        ),
    )


def _check(request: Any, capability: Any, max_model_len: int) -> None:
    check_request(request, capability, max_model_len, capability.num_blocks * capability.block_size)


def _apply(engine: FleetEngine, instances: Instances, endpoints: Mapping[str, str]) -> None:
    """Know these instances and no others, but for plain servers."""
    known = instances.endpoints
    for name in known.keys() - endpoints.keys():
        engine.forget(name)
        instances.remove(name)
    for name, endpoint in endpoints.items():
        if name not in known:
            engine.know(instances.add(name, endpoint))
        elif known[name] != endpoint:  # a launcher has started it elsewhere
            instances.add(name, endpoint)


def _plain_terms(config: Config, folder: Path, tokenizer: Tokenizer) -> PlainTerms:
    model, fleet = read_checked(ConfigJson, folder / "config.json"), config.fleet
    text = model if model.vocab_size is not None or model.text_config is None else model.text_config
    return PlainTerms(
        config.model.served_name or config.model.name or DEMO_NAME,
        text.vocab_size or tokenizer.vocab_size,
        (SAMPLE, tuple(tokenizer.encode(SAMPLE, add_special_tokens=False))),
        interval_s=fleet.heartbeat_s,
        lease_s=fleet.lease_s,
    )


def _know_plain_servers(config: Config, engine: FleetEngine, instances: Instances, terms: PlainTerms) -> None:
    named = [each for each in fleet_instances(config.fleet) if each.server is not None]
    servers = PlainServers(terms, engine.clock, instances.wake) if named else None
    for each in named:
        assert servers is not None
        assert each.server is not None
        client = servers.add(each.name, each.server, api_key(each.name, each.server))
        instances.include(client)
        engine.know(client)


def _note_ends(engine: FleetEngine, reasons: Mapping[str, str]) -> None:
    """Remember why processes of instances have ended."""
    for name, reason in reasons.items():
        if name in engine.members:
            cast(RecordedClient, engine.members[name].client).record.ended(reason)


def _listen(inbox: Inbox, engine: FleetEngine, apply: Any, serving: threading.Event) -> None:
    """Carry out what the supervisor says. At its end this process drains as after SIGTERM, if it serves."""
    while (message := inbox.get()) is not None:
        told = json.loads(message)
        if "instances" in told:
            engine.call_soon(partial(apply, told["instances"]))
        elif "ended" in told:
            engine.call_soon(partial(_note_ends, engine, told["ended"]))
        elif told.get("stop"):
            break
    if not serving.is_set():
        os._exit(0)
    while True:  # the server may not have its handler yet
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.5)
