"""A storm of clients that break off in every way leaves the server as it was: see `tools/storm.py`."""

from __future__ import annotations

import pytest

from storm import storm
from tests.serving.live import free_port


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_storm_of_clients_leaves_nothing() -> None:
    assert storm(num_clients=256, seconds=120, seed=0, port=free_port()) == []
