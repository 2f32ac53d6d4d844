"""Hints of clients inside another engine: what a request may say, and what it moves."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError, RequestError
from sagellm.core.types import Namespace
from sagellm.engines.build_kv import make_policy
from sagellm.engines.guests import ShadowCache
from sagellm.engines.guests.request_hints import HINT_KINDS, NO_HINTS, RequestHints, hints_of
from sagellm.engines.guests.settings import GuestSettings

CAPACITY = 4


def digests(name: int, length: int = 2) -> list[bytes]:
    return [(1000 * name + i).to_bytes(32, "little") for i in range(length)]


def action(kind: str, **payload: Any) -> dict[str, Any]:
    return {"actions": [{"action_type": kind, "payload": payload}]}


def cache(*kinds: str, policy: str = "lru") -> tuple[ShadowCache, ManualClock]:
    clock = ManualClock()
    made = partial(make_policy, policy, capacity=CAPACITY, clock=clock)
    return ShadowCache(CAPACITY, made, clock, hint_kinds=kinds), clock


def serve(
    shadow: ShadowCache, clock: ManualClock, name: int, said: RequestHints = NO_HINTS, tenant: str = ""
) -> int:
    clock.advance(1.0)
    path, space = digests(name), Namespace(tenant=tenant)
    hits = shadow.admit(str(name), path, len(path), space)
    shadow.finish(str(name), path, said=said)
    shadow.check()
    return hits


def test_the_fields_of_a_request() -> None:
    said = hints_of({"sage_session": "s", "sage_hints": action("session.end"), "sage_pin_s": 60, "other": 1})
    assert said.session_id == "s"
    assert [kind for kind, _ in said.actions] == ["session.end", "pin"]
    assert said.actions[1][1].payload == {"priority": 100, "duration_s": 60.0}
    assert hints_of({"sage_hints": json.dumps(action("kv.expect"))}).actions[0][0] == "kv.expect"
    assert hints_of({}) == NO_HINTS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sage_session": ""}, "sage_session must be a string of 1 to 256 characters"),
        ({"sage_session": 7}, "sage_session must be"),
        ({"sage_hints": "{"}, "sage_hints is no JSON"),
        ({"sage_hints": "[]"}, "kv_hints must be an object"),
        ({"sage_hints": action("session.end", token_ids=[1])}, "name a session_id"),
        ({"sage_hints": "[" * 60_000}, "sage_hints is no JSON"),
        ({"sage_hints": '{"actions":' * 5_000}, "sage_hints is no JSON"),
        ({"sage_hints": " " * 100_000 + "{}"}, "sage_hints has 100002 characters, at most 65536"),
        (["sage_pin_s"], "must be an object, got list"),
        ("sage_pin_s", "must be an object, got str"),
        ({"sage_pin_s": 10**400}, "sage_pin_s must be a number"),
        ({"sage_pin_s": float("nan")}, "sage_pin_s must be a number"),
        ({"sage_pin_s": -1}, "sage_pin_s must be a number from 0 to"),
        ({"sage_pin_s": "long"}, "sage_pin_s must be a number"),
    ],
)
def test_wrong_fields_are_named(fields: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        hints_of(fields)


def test_a_session_that_ends_goes_first() -> None:
    for kinds, kept in ((("session.end",), True), ((), False), (("pin",), False)):
        shadow, clock = cache(*kinds)
        serve(shadow, clock, 1)
        serve(shadow, clock, 2, hints_of({"sage_hints": action("session.end")}))
        serve(shadow, clock, 3)  # needs the room of one of them
        assert serve(shadow, clock, 1) == (2 if kept else 0)


@pytest.mark.parametrize(("tenant", "kept"), [("a", True), ("b", False)])
def test_a_session_is_ended_by_its_tenant_only(tenant: str, kept: bool) -> None:
    shadow, clock = cache("session.end")
    serve(shadow, clock, 1, tenant="a")
    serve(shadow, clock, 2, hints_of({"sage_session": "chat"}), tenant="a")
    end = hints_of({"sage_hints": action("session.end", session_id="chat")})
    shadow.admit("ends", [], 0, Namespace(tenant=tenant))
    shadow.finish("ends", [], said=end)
    serve(shadow, clock, 3, tenant="a")  # needs the room of one of them
    assert serve(shadow, clock, 1, tenant="a") == (2 if kept else 0)


def test_a_pinned_prompt_goes_last() -> None:
    for kinds, kept in ((("pin",), True), (("kv.retain",), False)):
        shadow, clock = cache(*kinds)
        serve(shadow, clock, 1, hints_of({"sage_pin_s": 60}))
        for name in range(2, 9):
            serve(shadow, clock, name)
        assert serve(shadow, clock, 1) == (2 if kept else 0)
        clock.advance(100.0)  # the time of the pin is over
        for name in range(12, 19):
            serve(shadow, clock, name)
        assert serve(shadow, clock, 1) == 0


def test_the_setting_names_kinds() -> None:
    assert GuestSettings.of({"hints": "all"}).hints == HINT_KINDS
    assert GuestSettings.of({"hints": ["pin", "session.end"]}).hints == ("session.end", "pin")
    for wrong in ("pin", ["pins"], [["pin"]], 3):
        with pytest.raises(ConfigError, match=r"hints must be .all. or a list of kv\.retain"):
            GuestSettings.of({"hints": wrong})
