"""`CacheAccess`: one look-up in a watched cache.

Reconstructed from KV events, or seen by the proxy."""

from __future__ import annotations

from dataclasses import dataclass

from sagellm.core.types import Tokens


@dataclass(frozen=True, slots=True)
class CacheAccess:
    """The whole blocks of a request from the root on, numbered.

    Equal numbers are equal prefixes of one namespace.
    `num_queried` leading blocks count as queried prompt blocks; the others are generated, and are stored
    without being looked up. A request gives one access when its prompt is looked up, and one more with
    `num_queried` 0 for each time that it stores further blocks. `instance`: index of the endpoint.
    """

    time_s: float
    instance: int
    blocks: Tokens
    num_queried: int
