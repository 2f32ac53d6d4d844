"""`SimilarSessions`: the session whose embedding is nearest to a given one.

A client computes embeddings with a model of its own. Of each, only a fingerprint is kept: SimHash (Charikar
2002), the signs of random projections. Two fingerprints differ in a share of bits that is their angle / pi.
Similar is not equal: this names a session for a hint, and never KV for a request.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from sagellm.core.errors import RequestError

if TYPE_CHECKING:
    import numpy.typing as npt

BITS = 256
MAX_DIMENSIONS = 4096
Session = tuple[str, str]
"""A tenant and the id that it gave: a tenant cannot name the session of another."""


class SimilarSession(NamedTuple):
    """`similarity`: the estimated cosine. With 256 bits, the angle is off by 0.1 (one standard deviation)."""

    session: Session
    similarity: float


class SimilarSessions:
    """Fingerprints of the sessions that were described last.

    A search takes linear time in their number. Projections depend on `seed` alone.
    """

    def __init__(self, max_sessions: int = 1024, seed: int = 0) -> None:
        self._max_sessions, self._seed = max_sessions, seed
        self._fingerprints: OrderedDict[Session, tuple[int, int]] = OrderedDict()  # dimensions, bits

    def describe(self, session: Session, embedding: Any) -> None:
        """Keep the fingerprint. Raises `RequestError` for what is no embedding."""
        fingerprint = self._fingerprint(embedding)
        self.forget(session)
        self._fingerprints[session] = fingerprint
        if len(self._fingerprints) > self._max_sessions:
            self._fingerprints.popitem(last=False)

    def forget(self, session: Session) -> None:
        self._fingerprints.pop(session, None)

    def nearest(self, tenant: str, embedding: Any) -> SimilarSession | None:
        """The nearest of the tenant's sessions with as many dimensions; the latest of equals."""
        dimensions, bits = self._fingerprint(embedding)
        found, least = None, BITS + 1
        for session, (size, other) in self._fingerprints.items():
            if session[0] == tenant and size == dimensions:
                distance = (bits ^ other).bit_count()
                if distance <= least:
                    found, least = session, distance
        return None if found is None else SimilarSession(found, math.cos(math.pi * least / BITS))

    def _fingerprint(self, embedding: Any) -> tuple[int, int]:
        import numpy as np

        vector = np.array(_checked(embedding), dtype=np.float64)
        largest = np.abs(vector).max()
        if not 0 < largest < math.inf:
            raise RequestError("embedding must be of finite numbers, not all of them 0", "embedding")
        signs = self._projections[:, : len(vector)] @ (vector / largest).astype(np.float32) > 0
        return len(vector), int.from_bytes(np.packbits(signs).tobytes(), "big")

    @cached_property
    def _projections(self) -> npt.NDArray[Any]:
        import numpy as np

        return np.random.default_rng(self._seed).standard_normal((BITS, MAX_DIMENSIONS), dtype=np.float32)


def _checked(embedding: Any) -> Sequence[float]:
    is_list = isinstance(embedding, Sequence) and not isinstance(embedding, str)
    if not is_list or not 1 <= len(embedding) <= MAX_DIMENSIONS or {*map(type, embedding)} - {int, float}:
        raise RequestError(f"embedding must be a list of 1 to {MAX_DIMENSIONS} numbers", "embedding")
    try:
        return list(map(float, embedding))
    except OverflowError as error:
        raise RequestError("embedding must be of finite numbers", "embedding") from error
