"""`RayCluster`: the calls to Ray of one driver.

Ray places and restarts processes. What it carries are the few words of `RayInstance`, as JSON texts;
requests, tokens and KV never pass through it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, TypeAlias

from sagellm.core.errors import ConfigError, MissingExtraError, SageError
from sagellm.serving.fleet.ray_instance import RayInstance

Resources: TypeAlias = Mapping[str, float]
"""Amounts by Ray's names: CPU, GPU, memory (bytes), and those that nodes have been given."""
OBJECT_STORE_BYTES = 80_000_000
"""Of a cluster that is started here. Ray wants 75 MB, and nothing of ours is in it."""
_OWN_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
MAX_CALLS = 16


class ActorLostError(SageError):
    """An actor has not answered. `returns`: Ray restarts its process, or the network to it is cut."""

    def __init__(self, reason: str, *, returns: bool) -> None:
        super().__init__(reason)
        self.returns = returns


class RayCluster:
    """A driver's connection, from when it is made to `close`. Methods are for any thread.

    Connects to the cluster at `RAY_ADDRESS`, or to the one that runs on this host; without both it starts one
    here, which ends with it. `logs`: print here what actors write. Raises `MissingExtraError`, and
    `ConfigError` for a cluster that cannot be reached.
    """

    def __init__(self, *, logs: bool) -> None:
        if find_spec("ray") is None:
            raise MissingExtraError("--ray", "ray")
        import ray

        address = os.environ.get("RAY_ADDRESS", "")
        if address.startswith("ray://"):
            raise ConfigError(
                f"RAY_ADDRESS={address} is Ray Client: run the command on a node of the cluster, with "
                "RAY_ADDRESS=auto or HOST:PORT"
            )
        self._ray = ray
        of_its_own = {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
        try:
            try:
                ray.init(
                    **(of_its_own if address == "local" else {"address": address or "auto"}),
                    log_to_driver=logs,
                )
            except ConnectionError:
                if address:
                    raise
                ray.init(**of_its_own, log_to_driver=logs)
        except (ConnectionError, OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ConfigError(
                f"Ray at {address or 'this host'} cannot be used: {error}. A cluster with tokens "
                "wants RAY_AUTH_MODE=token here too, unless RAY_ADDRESS is auto or not set"
            ) from error

    def nodes(self) -> list[Resources]:
        """What each node has in all."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def free(self) -> Resources:
        """What of the cluster is free now."""
        found: Resources = self._ray.available_resources()
        return found

    def reserve(self, bundles: Sequence[Resources], strategy: str) -> Any:
        """A placement group that ends with this driver. Ray looks for its place from now on.

        Raises `ConfigError` for amounts that Ray refuses.
        """
        try:
            return self._ray.util.placement_group([dict(each) for each in bundles], strategy=strategy.upper())
        except ValueError as error:
            raise ConfigError(
                f"Ray refuses the resources {[dict(each) for each in bundles]}: {error}"
            ) from error

    def is_reserved(self, group: Any, within_s: float) -> bool:
        """Whether a placement group has its place, waiting for it at most so long."""
        try:
            return bool(group.wait(timeout_seconds=within_s))
        except self._ray.exceptions.RayError:  # it is removed meanwhile
            return False

    def remove(self, group: Any) -> None:
        """Give a placement group's place back."""
        with suppress(self._ray.exceptions.RayError):  # a cluster that is gone holds nothing
            self._ray.util.remove_placement_group(group)

    def make_actor(self, name: str, group: Any, bundle: int, resources: Resources) -> Any:
        """An actor with `RayInstance` on a bundle, with all of its resources."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        own = {_OWN_OPTIONS[each]: amount for each, amount in resources.items() if each in _OWN_OPTIONS}
        others = {each: amount for each, amount in resources.items() if each not in _OWN_OPTIONS}
        made = self._ray.remote(RayInstance).options(
            **{"num_cpus": 0, "num_gpus": 0, **own},
            resources=others,
            max_restarts=-1,
            max_task_retries=0,  # the launcher asks again, a new process with the same words
            max_concurrency=MAX_CALLS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            ),
        )
        return made.remote(name)

    def call(self, actor: Any, method: str, *texts: str, within_s: float | None = None) -> str:
        """The answer of a method of `RayInstance`. Raises `ActorLostError`."""
        errors = self._ray.exceptions
        try:
            return str(self._ray.get(getattr(actor, method).remote(*texts), timeout=within_s))
        except errors.GetTimeoutError as error:
            raise ActorLostError(f"no answer within {within_s:g} s", returns=True) from error
        except errors.ActorUnavailableError as error:
            raise ActorLostError(_first_line(error), returns=True) from error
        except errors.RayError as error:
            raise ActorLostError(_first_line(error), returns=False) from error

    def kill(self, actor: Any, *, for_good: bool) -> None:
        """End an actor's process at once; Ray starts another unless it is for good."""
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(actor, no_restart=for_good)

    def close(self) -> None:
        """Disconnect. Ray ends what is left of this driver."""
        self._ray.shutdown()


def _first_line(error: Exception) -> str:
    """What of Ray's long texts says the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if "Error" in line), "") if len(lines) > 1 else ""
    return ": ".join(filter(None, (lines[0] if lines else type(error).__name__, reason)))[:500]
