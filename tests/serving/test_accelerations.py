"""What is accelerated, over HTTP: reported, switched by an operator, and in the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.scripted_engine import scripted_llm
from tests.serving.live import Live, serving

PATH = "/v1/admin/accelerations"
ADMIN = {"Authorization": "Bearer admin"}
ASKED = {"messages": [{"role": "user", "content": "hi"}], "n": 6, "early_stop": {"window": 2}}


@pytest.fixture
def live() -> Iterator[Live]:
    with serving(scripted_llm("7"), admin_key="admin") as running:
        yield running


def listed(live: Live) -> dict[str, dict[str, Any]]:
    answer = live.http.get(PATH, headers=ADMIN).json()
    return {each["name"]: each for each in answer["data"]}


def test_savings_are_listed_and_in_the_metrics(live: Live) -> None:
    assert listed(live)["early_stop"] == {
        "name": "early_stop", "on": True, "exact": False, "saved": {}, "spent": {},
    }  # fmt: skip
    assert live.http.post("/v1/chat/completions", json=ASKED).json()["early_stop"][0]["samples_saved"] == 4
    assert listed(live)["early_stop"]["saved"] == {"samples": 4}
    assert live.metric("sagellm_acceleration_saved", acceleration="early_stop", unit="samples") == 4


def test_an_operator_switches_them(live: Live) -> None:
    assert live.http.get(PATH).status_code == 401
    assert live.http.put(PATH, json={"name": "early_stop", "on": False}).status_code == 401
    switched = live.http.put(PATH, json={"name": "early_stop", "on": False}, headers=ADMIN).json()
    assert [each["on"] for each in switched["data"] if each["name"] == "early_stop"] == [False]
    assert live.http.post("/v1/chat/completions", json=ASKED).json()["early_stop"][0]["samples_saved"] == 0
    live.http.put(PATH, json={"name": "early_stop", "on": True}, headers=ADMIN)
    assert live.http.post("/v1/chat/completions", json=ASKED).json()["early_stop"][0]["samples_saved"] == 4


@pytest.mark.parametrize("body", [{"name": "speculation", "on": True}, {"name": "early_stop"}, {"on": 1}, []])
def test_what_cannot_be_switched_is_refused(live: Live, body: object) -> None:
    answer = live.http.put(PATH, json=body, headers=ADMIN)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
