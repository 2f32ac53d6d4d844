"""`RayLauncher`: instances as actors of a Ray cluster, on bundles of placement groups.

Ray decides where they run and starts their processes again. Each process is asked where it serves; the front
connects to that address by ZeroMQ, as it does to instances of other hosts.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sagellm.control_plane.fleet.keys import FleetKey
from sagellm.control_plane.fleet_instances import FleetInstance, instance_config
from sagellm.core.config_layers import Resolved
from sagellm.core.errors import ConfigError
from sagellm.serving.fleet.launcher import StartEvents, free_number, instance_options
from sagellm.serving.fleet.ray_cluster import ActorLostError, RayCluster, Resources

log = logging.getLogger("sagellm.fleet")
GIB = 1 << 30
LOOK_S = 0.5
RETRY_S = 0.1
"""While Ray starts a process again, it is asked for so often."""
STOP_S = 5.0
HIDDEN_CHIPS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}


@dataclass(slots=True, eq=False)
class _Gang:
    """A placement group, and the places of its bundles."""

    handle: Any
    places: list[_Place] = field(default_factory=list)
    is_ready: bool = False


@dataclass(slots=True, eq=False)
class _Place:
    """A bundle of a placement group. `owner`: the instance there; empty: it is free for one of its group.

    `actor`: from the first start until it is ended for good; changed under `lock`.
    """

    gang: _Gang
    bundle: int
    resources: Resources
    group: str
    number: int
    owner: str = ""
    actor: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class RayLauncher:
    """Implements `Launcher`. The fleet ends with this process, as Ray removes what a driver leaves.

    What is reserved together is one placement group, so all of it has a place or nothing has. Only instances
    of groups that autoscaling changes have one each, since a placement group cannot shrink. A bundle that is
    free is kept for the next instance of its group. Raises `ConfigError`, also for keys of the file that name
    chips of one host.
    """

    def __init__(self, resolved: Resolved, key: FleetKey, cluster: RayCluster | None = None) -> None:
        self._resolved, self._key = resolved, key
        fleet = resolved.config.fleet
        for name, group in fleet.groups.items():
            for given in ("chip_names", "shares_chips"):
                if getattr(group, given):
                    raise ConfigError(
                        f"fleet.groups.{name}.{given} is for chips of one host: with --ray use "
                        "ray_resources, as {h100: 1} for labelled nodes or {GPU: 0.5} for a part of a chip"
                    )
        self._cluster = cluster or RayCluster(logs=resolved.config.log.format == "text")
        self._places: dict[str, _Place] = {}
        self._gangs: list[_Gang] = []

    def reserve(self, instances: Sequence[FleetInstance]) -> None:
        """Returns before Ray has found the places.

        `on_refusal` says if it has none within `fleet.ray_timeout_s`.
        """
        nodes = self._cluster.nodes()
        groups = self._resolved.config.fleet.groups
        resources = {each.name: self._resources(each.group, nodes) for each in instances}
        together: list[FleetInstance] = []
        for instance in instances:
            if (place := self._free_place(instance.group)) is not None:
                place.owner, self._places[instance.name] = instance.name, place
            elif groups[instance.group].max_count is not None:
                self._reserve([instance], resources)
            else:
                together.append(instance)
        if together:
            self._reserve(together, resources)

    def release(self, name: str) -> None:
        place = self._places.pop(name)
        self._end_actor(place)
        place.owner = ""
        if not any(each.owner for each in place.gang.places):
            self._gangs.remove(place.gang)
            self._cluster.remove(place.gang.handle)

    def endpoint(self, name: str) -> str:
        return ""

    def start(self, instance: FleetInstance, events: StartEvents) -> _ActorStart:
        place = self._places[instance.name]
        options = instance_options(self._resolved, instance, place.number, self._key)
        config = options["config"]
        if config["engine"]["threads"] is None:
            ranks = instance_config(self._resolved, instance.group).parallel.num_ranks
            config["engine"]["threads"] = max(1, int(place.resources.get("CPU", 1)) // ranks)
        if config["model"]["name"] is not None and Path(config["model"]["name"]).is_dir():
            config["model"]["name"] = str(Path(config["model"]["name"]).resolve())
        log_config = self._resolved.config.log
        options |= {"log_level": log_config.level, "log_format": log_config.format}
        options["environment"] = {} if place.resources.keys() & {"GPU", "NPU"} else HIDDEN_CHIPS
        return _ActorStart(self, place, json.dumps(options), events)

    def close(self) -> None:
        for place in self._places.values():
            self._end_actor(place)
        for gang in self._gangs:
            self._cluster.remove(gang.handle)
        self._cluster.close()

    def _reserve(self, instances: Sequence[FleetInstance], resources: Mapping[str, Resources]) -> None:
        fleet = self._resolved.config.fleet
        bundles = [resources[each.name] for each in instances]
        gang = _Gang(self._cluster.reserve(bundles, fleet.ray_strategy))
        self._gangs.append(gang)
        for number, (instance, bundle) in enumerate(zip(instances, bundles, strict=True)):
            taken = {place.number for each in self._gangs for place in each.places}
            place = _Place(gang, number, bundle, instance.group, free_number(taken), instance.name)
            gang.places.append(place)
            self._places[instance.name] = place
            log.info("%s asks Ray for %s", instance.name, amounts(bundle))

    def _free_place(self, group: str) -> _Place | None:
        places = (place for gang in self._gangs for place in gang.places)
        return next((place for place in places if not place.owner and place.group == group), None)

    def _resources(self, name: str, nodes: Sequence[Resources]) -> Resources:
        """What an instance of this group asks for.

        Without `chips`: one for each rank, where nodes have some. Without `cores`: one.
        """
        group, config = self._resolved.config.fleet.groups[name], instance_config(self._resolved, name)
        has = {each for node in nodes for each in node}
        kind = "NPU" if group.chip_kind == "npu" or ("GPU" not in has and "NPU" in has) else "GPU"
        num_chips = group.chips
        if num_chips is None:
            num_chips = config.parallel.num_ranks if kind in has and config.model.device != "cpu" else 0
        found: dict[str, float] = {"CPU": float(group.cores or 1)}
        if num_chips:
            found[kind] = float(num_chips)
        elif group.memory_gb is not None:
            found["memory"] = float(int(group.memory_gb * GIB))
        return {**found, **group.ray_resources}

    def missing(self, gang: _Gang) -> str:
        """Why a placement group has no place, in one line."""
        fleet = self._resolved.config.fleet
        asked = {place.owner: place.resources for place in gang.places}
        found = missing_resources(asked, self._cluster.nodes(), self._cluster.free(), fleet.ray_strategy)
        return (
            f"the Ray cluster has had no room for {', '.join(asked)} within {fleet.ray_timeout_s:g} s: "
            f"{found}. Add nodes, or ask for less (cores, chips, memory_gb, ray_resources of a group)"
        )

    def _end_actor(self, place: _Place) -> None:
        with place.lock:
            actor, place.actor = place.actor, None
        if actor is not None:
            self._cluster.kill(actor, for_good=True)


class _ActorStart:
    """Implements `Running`: a thread that starts an instance and waits for its end."""

    def __init__(self, launcher: RayLauncher, place: _Place, options: str, events: StartEvents) -> None:
        self._launcher, self._cluster = launcher, launcher._cluster
        self._place, self._name, self._options, self._events = place, place.owner, options, events
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"actor of {self._name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._place.lock:
            self._closing.set()
            actor, self._place.actor = self._place.actor, None
        if actor is not None:
            try:
                self._cluster.call(actor, "stop", within_s=STOP_S)
            except ActorLostError as error:
                log.debug("%s is ended without its help: %s", self._name, error)
            self._cluster.kill(actor, for_good=True)
        self._thread.join(STOP_S)

    def _run(self) -> None:
        if not self._has_place():
            if not self._closing.is_set():
                self._events.on_refusal(self._launcher.missing(self._place.gang))
            return
        with self._place.lock:
            if self._closing.is_set():
                return
            if self._place.actor is None:
                gang, place = self._place.gang, self._place
                place.actor = self._cluster.make_actor(self._name, gang.handle, place.bundle, place.resources)
            actor = self._place.actor
        reason = self._served(actor)
        if not self._closing.is_set():
            log.error("%s has ended: %s", self._name, reason)
            self._events.on_end(reason)

    def _has_place(self) -> bool:
        """Wait for the placement group, once.

        Ray itself finds another place for its bundles if a node is lost.
        """
        gang = self._place.gang
        until_s = time.monotonic() + self._launcher._resolved.config.fleet.ray_timeout_s
        while not gang.is_ready and not self._closing.is_set() and time.monotonic() < until_s:
            gang.is_ready = self._cluster.is_reserved(gang.handle, LOOK_S)
        return gang.is_ready

    def _served(self, actor: Any) -> str:
        """Start the instance and wait for its end; the reason of it."""
        try:
            answer = json.loads(self._answer(actor))
            if "error" in answer:
                self._cluster.kill(actor, for_good=False)
                return str(answer["error"])
            log.info("%s is at %s", self._name, answer["endpoint"])
            self._events.on_endpoint(answer["endpoint"])
            return self._cluster.call(actor, "watch") or "it is watched by another"
        except ActorLostError as error:
            if not error.returns:
                with self._place.lock:
                    self._place.actor = None  # the next start makes another
            return str(error)

    def _answer(self, actor: Any) -> str:
        """What `start` answers, also if Ray has yet to start the process again."""
        while True:
            try:
                return self._cluster.call(actor, "start", self._options)
            except ActorLostError as error:
                if not error.returns or self._closing.wait(RETRY_S):
                    raise


def amounts(resources: Resources) -> str:
    """As 'CPU 4, h100 1, memory 2 GiB'."""
    return ", ".join(
        f"{name} {amount / GIB:.3g} GiB" if name == "memory" else f"{name} {amount:g}"
        for name, amount in resources.items()
    )


def missing_resources(
    asked: Mapping[str, Resources], nodes: Sequence[Resources], free: Resources, strategy: str
) -> str:
    """Why these bundles have no place on these nodes. `asked`: by instance."""
    found = []
    for name in dict.fromkeys(name for bundle in asked.values() for name in bundle):
        wanted = sum(bundle.get(name, 0.0) for bundle in asked.values())
        total = sum(node.get(name, 0.0) for node in nodes)
        if wanted > total:
            found.append(f"{amounts({name: wanted})} asked, the cluster has {amounts({name: total})}")
    for instance, bundle in asked.items():
        if not found and not any(all(node.get(k, 0.0) >= v for k, v in bundle.items()) for node in nodes):
            found.append(f"{instance} asks for {amounts(bundle)}, and no node has all of that")
    if strategy == "strict_spread" and len(asked) > len(nodes):
        found.append(f"strict_spread wants {len(asked)} nodes, the cluster has {len(nodes)}")
    if not found:
        names = dict.fromkeys(name for bundle in asked.values() for name in bundle)
        left = {name: free.get(name, 0.0) for name in names}
        found.append(f"other work holds it, or it is free on different nodes; free now: {amounts(left)}")
    return "; ".join(found)
