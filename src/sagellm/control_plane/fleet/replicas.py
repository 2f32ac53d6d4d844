"""`PrefixCopies`: carries out what a `Replicator` decides, by the transfers between instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from sagellm.control_plane.fleet.members import Member
from sagellm.control_plane.replication import Replicator
from sagellm.core.types import Namespace, Request


class PrefixCopies:
    """For the front's thread. Copies belong to no request: the source sends what it has cached, as it does
    for a request that fetches a prefix, and the target caches it. A target that is lost ends its transfers.

    `origin`: names the front, whose successor counts copies from 1 again. Without a `replicator` nothing is
    copied.
    """

    def __init__(
        self, replicator: Replicator | None, origin: str, namespace_of: Callable[[Namespace], Namespace]
    ) -> None:
        self.replicator, self._origin, self._namespace_of = replicator, origin, namespace_of

    def count(self, request: Request) -> None:
        """A request was placed."""
        if self.replicator is not None:
            indexed = self._namespace_of(request.namespace)
            self.replicator.count(request.tokens, request.namespace, indexed)

    def turn(self, members: Mapping[str, Member]) -> None:
        """Have hot prefixes copied, if it is time for that."""
        replicator = self.replicator
        if replicator is None or not replicator.is_due():
            return
        able = [each for each in members.values() if each.is_ready and each.facts and each.facts.transfers]
        schemas = [each.facts.capability.kv_schema for each in able if each.facts is not None]
        sizes = [schema.bytes_per_token for schema in schemas if schema is not None]
        replicator.options = replace(replicator.options, bytes_per_token=max(sizes, default=0))
        loads = [each.load for each in able if each.load is not None and not each.draining]
        for copy in replicator.decide([load for load in loads if load.is_fresh]):
            name = f"{self._origin}~{copy.copy_id}"
            arguments = name, copy.tokens, copy.target, copy.namespace
            members[copy.source].client.call("send_prefix", arguments)

    def lost(self, instance_id: str) -> None:
        if self.replicator is not None:
            self.replicator.lost(instance_id)
