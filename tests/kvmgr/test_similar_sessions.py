"""`SimilarSessions` beside exact cosines."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.errors import RequestError
from sagellm.kvmgr.manager.similar_sessions import MAX_DIMENSIONS, SimilarSessions


def at_angle(radians: float, size: int = 8) -> list[float]:
    return [math.cos(radians), math.sin(radians), *[0.0] * (size - 2)]


@given(st.lists(st.floats(0, math.pi), min_size=1, max_size=12), st.floats(0, math.pi), st.integers(0, 3))
def test_the_nearest_is_about_as_near_as_the_exact_one(angles: list[float], asked: float, seed: int) -> None:
    sessions = SimilarSessions(seed=seed)
    for number, angle in enumerate(angles):
        sessions.describe(("t", str(number)), at_angle(angle))
    found = sessions.nearest("t", at_angle(asked))
    assert found is not None
    exact = abs(angles[int(found.session[1])] - asked)
    assert exact <= min(abs(angle - asked) for angle in angles) + 0.8, "four deviations of two estimates"
    assert abs(math.acos(min(1.0, found.similarity)) - exact) <= 0.5


def test_the_scale_of_an_embedding_does_not_count() -> None:
    sessions = SimilarSessions()
    vector = np.random.default_rng(1).standard_normal(MAX_DIMENSIONS)
    sessions.describe(("t", "a"), (vector * 1e-300).tolist())
    assert sessions.nearest("t", (vector * 1e300).tolist()) == (("t", "a"), 1.0)
    opposite = sessions.nearest("t", (-vector).tolist())
    assert opposite is not None
    assert opposite.similarity == -1.0


def test_sessions_are_of_their_tenant_and_size() -> None:
    sessions = SimilarSessions()
    sessions.describe(("t", "a"), [1, 2.5])
    assert sessions.nearest("u", [1, 2.5]) is None
    assert sessions.nearest("t", [1, 2.5, 0]) is None
    sessions.forget(("t", "a"))
    assert sessions.nearest("t", [1, 2.5]) is None


def test_the_sessions_described_last_are_kept() -> None:
    sessions = SimilarSessions(max_sessions=2)
    for name in "abac":
        sessions.describe(("t", name), [1, 1] if name == "b" else [1, -1])
    assert sessions.nearest("t", [1, 1]) is not None
    found = sessions.nearest("t", [1, -1])
    assert found == (("t", "c"), 1.0), "the latest of equals"
    sessions.forget(("t", "c"))
    assert sessions.nearest("t", [1, -1]) == (("t", "a"), 1.0)


@pytest.mark.parametrize(
    "embedding",
    [
        None,
        "text",
        [],
        [0, 0],
        [1, None],
        [True],
        [[1]],
        [math.nan],
        [math.inf],
        [10**400],
        [1] * 4097,
        {"a": 1},
    ],
)
def test_what_is_no_embedding(embedding: Any) -> None:
    with pytest.raises(RequestError, match="embedding must be"):
        SimilarSessions().describe(("t", "a"), embedding)
