"""Clients and evaluations of other people against the server: `tools/check_clients.py`, one at a time.

`SAGELLM_CLIENT_ENVIRONMENTS` names the folder of their environments; they are made where they are missing.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import check_clients


@pytest.mark.peer
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", check_clients.KNOWN)
def test_a_client_gets_what_it_wants(name: str) -> None:
    folder = Path(os.environ.get("SAGELLM_CLIENT_ENVIRONMENTS", check_clients.ENVIRONMENTS))
    print(check_clients.check(name, folder))


def test_the_sums_have_one_right_choice_each() -> None:
    for one in check_clients.sums(50):
        choices, right = one["choices"], one["label"]
        assert isinstance(choices, list)
        assert len(set(choices)) == 4
        [found] = [i for i, text in enumerate(choices) if text.endswith(f">{one['a'] + one['b']}")]  # type: ignore[operator]
        assert found == right
