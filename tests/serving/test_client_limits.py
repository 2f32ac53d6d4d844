"""Which client sent a request, and how much of the server it may use at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pydantic import ValidationError

from sagellm.core.config import ServerConfig
from sagellm.core.errors import ConfigError, RequestError
from sagellm.engines.build import build_llm, load_config
from sagellm.serving import create_app
from sagellm.serving.clients import ClientLoad, _network, allowed_priority
from sagellm.serving.errors import OverloadedError
from tests.scripted_engine import ScriptedEngine, scripted_llm
from tests.serving.live import PATIENCE_S, Live, serving, wait_until

COMPLETIONS = "/v1/completions"
ENDLESS: dict[str, Any] = {"prompt": "x", "ignore_eos": True, "stream": True, "max_tokens": 400}


def post(live: Live, address: str = "10.0.0.1", key: str = "", **fields: Any) -> httpx.Response:
    """One request; the server believes loopback clients which address they forward."""
    headers = {"X-Forwarded-For": address} | ({"Authorization": f"Bearer {key}"} if key else {})
    return live.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2} | fields, headers=headers)


@contextmanager
def stream(live: Live, address: str = "10.0.0.1", **fields: Any) -> Iterator[None]:
    """A long answer, which runs meanwhile."""
    headers = {"X-Forwarded-For": address}
    with live.http.stream("POST", COMPLETIONS, json=ENDLESS | fields, headers=headers) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        left = threading.Event()
        reader = threading.Thread(target=lambda: any(left.is_set() for _ in lines))
        reader.start()
        try:
            yield
        finally:
            left.set()
            reader.join(PATIENCE_S)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error["message"]
    return error


def engine_of(live: Live) -> ScriptedEngine:
    engine = live.llm._engine
    assert isinstance(engine, ScriptedEngine)
    return engine


@pytest.fixture
def slow() -> Iterator[Live]:
    llm = scripted_llm("a b c ", step_s=0.005)
    with serving(llm, max_n=4, max_request_tokens=3000, max_client_tokens=2000, max_priority=3) as live:
        yield live


def test_n_is_limited() -> None:
    with serving(scripted_llm()) as live:
        assert post(live, n=128).status_code == 200
        response = post(live, n=129)
        assert (response.status_code, error_of(response)["param"]) == (400, "n")
    with serving(scripted_llm(), max_n=4) as live:
        assert post(live, n=4).status_code == 200
        response = post(live, n=5)
        error = error_of(response)
        assert (response.status_code, error["param"], error["code"]) == (400, "n", "integer_above_max_value")
        assert "at most 4" in error["message"]


def test_the_tokens_of_one_request_are_limited(slow: Live) -> None:
    response = post(slow, n=4, max_tokens=500)
    assert response.status_code == 400
    assert "server.max_client_tokens" in error_of(response)["message"]
    response = post(slow, prompt=["a"] * 8, max_tokens=400)
    assert response.status_code == 400
    assert "server.max_request_tokens" in error_of(response)["message"]
    assert post(slow, max_tokens=500).status_code == 200


def test_the_tokens_of_a_client_are_limited_until_it_has_fewer_open(slow: Live) -> None:
    with stream(slow, n=4), stream(slow, address="10.0.0.2", n=4):
        response = post(slow, max_tokens=450)
        error = error_of(response)
        assert (response.status_code, error["type"]) == (429, "rate_limit_error")
        assert error["code"] == "rate_limit_exceeded"
        assert int(response.headers["retry-after"]) >= 1
        assert post(slow, user="another name", max_tokens=450).status_code == 429
        assert post(slow, address="10.0.0.3", max_tokens=450).status_code == 200
    wait_until(lambda: not engine_of(slow).running)
    wait_until(lambda: post(slow, max_tokens=450).status_code == 200)


def test_one_client_cannot_fill_the_queue() -> None:
    llm = scripted_llm("a b c ", step_s=0.3)
    with serving(llm, max_waiting=16) as live:
        gateway = live.gateway
        gateway.load.enter(("address 10.0.0.1", ""), 10, 0)
        refused = post(live, n=3)
        assert refused.status_code == 429
        assert "server.client_waiting_share" in error_of(refused)["message"]
        assert post(live, address="10.0.0.2", n=4).status_code == 200
        refused = post(live, address="10.0.0.2", n=6)
        assert refused.status_code == 429
        gateway.load.start(("address 10.0.0.1", ""), 10)


def test_priority_and_tier_reach_the_engine(slow: Live) -> None:
    for fields, priority in (
        ({}, 0),
        ({"priority": 2}, 2),
        ({"service_tier": "priority"}, 1),
        ({"service_tier": "flex", "priority": 1}, 0),
        ({"service_tier": "auto"}, 0),
        ({"priority": -5}, -5),
        ({"priority": 3, "service_tier": "priority"}, 3),
        ({"priority": 4, "service_tier": "flex"}, 3),
    ):
        assert post(slow, **fields).status_code == 200
        assert engine_of(slow).added[-1].priority == priority
    for fields in ({"priority": 4}, {"priority": 4, "service_tier": "priority"}):
        response = post(slow, **fields)
        assert (response.status_code, error_of(response)["param"]) == (400, "priority")
        assert "server.max_priority" in error_of(response)["message"]


def test_a_client_may_lower_its_priority_and_not_raise_it() -> None:
    with serving(scripted_llm()) as live:
        response = post(live, priority=100)
        assert (response.status_code, error_of(response)["param"]) == (400, "priority")
        assert "at most 0 is allowed" in error_of(response)["message"]
        for fields, priority in (
            ({"priority": 0}, 0),
            ({"priority": -100}, -100),
            ({"service_tier": "priority"}, 0),
            ({"service_tier": "priority", "priority": -1}, 0),
            ({"service_tier": "flex"}, -1),
        ):
            assert post(live, **fields).status_code == 200
            assert engine_of(live).added[-1].priority == priority
        schemas = live.http.get("/openapi.json").json()["components"]["schemas"]
        assert schemas["ChatRequest"]["properties"]["priority"]["anyOf"][0]["maximum"] == 0


@pytest.mark.parametrize(
    ("limit", "priority", "tier", "served"),
    [
        (None, 100, "priority", 101),
        (-2, None, None, -2),
        (-2, 0, "priority", -2),
        (-2, -3, None, -3),
        (5, 5, None, 5),
    ],
)
def test_the_operator_chooses_the_highest_priority(
    limit: int | None, priority: int | None, tier: str | None, served: int
) -> None:
    assert allowed_priority(ServerConfig(max_priority=limit), priority, tier) == served


def test_the_setting_is_the_limit_of_the_server() -> None:
    assert load_config(environ={}).config.server.max_priority == ServerConfig().max_priority == 0
    config = load_config(environ={"SAGELLM_SERVER_MAX_PRIORITY": "none"}).config
    assert config.server.max_priority is None


def test_the_engine_knows_the_client() -> None:
    with serving(scripted_llm()) as live:
        post(live, address="10.0.0.9")
        post(live, address="10.0.0.9", user="ann", n=2)
        post(live, address="2001:db8:1:2:3::4", prompt=["a", "b"])
        paths = [request.client for request in engine_of(live).added]
    assert [path[:2] for path in paths] == [
        ("address 10.0.0.9", ""),
        *[("address 10.0.0.9", "ann")] * 2,
        *[("address 2001:db8:1:2::/64", "")] * 2,
    ]
    assert paths[1] == paths[2]  # of one call
    assert paths[3] == paths[4]
    assert len({path[2] for path in paths}) == 3


def test_a_key_names_its_client() -> None:
    with serving(scripted_llm(), api_key="main", client_keys={"ann": "one", "bob": "two"}) as live:
        for key, name in (("one", "key ann"), ("two", "key bob"), ("main", "address 10.0.0.1")):
            assert post(live, key=key).status_code == 200
            assert engine_of(live).added[-1].client[0] == name
        assert post(live, key="three").status_code == 401
        assert post(live).status_code == 401


def test_a_trusted_user_is_the_client() -> None:
    with serving(scripted_llm(), trust_user=True) as live:
        for user, name in (("ann", "user ann"), (None, "address 10.0.0.1"), ("x" * 999, f"user {'x' * 256}")):
            post(live, user=user)
            assert engine_of(live).added[-1].client[:2] == (name, "")


@pytest.mark.parametrize("keys", [{"ann": ""}, {"ann": " "}, {"ann": "k", "bob": "k"}])
def test_keys_that_name_nobody_are_refused(keys: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="a key of its own"):
        create_app(scripted_llm(), ServerConfig.model_construct(client_keys=keys))


@pytest.mark.parametrize(
    "options", [{"max_n": 0}, {"client_waiting_share": 0.0}, {"client_waiting_share": 1.5}]
)
def test_limits_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ServerConfig(**options)


def test_networks() -> None:
    assert _network("10.1.2.3") == "10.1.2.3"
    assert _network("::ffff:10.1.2.3") == "10.1.2.3"
    assert _network("2001:db8::1") == _network("2001:db8::2:1")
    assert _network("/run/x.sock") == "/run/x.sock"


def test_a_flood_over_http_does_not_hold_up_the_others() -> None:
    """The demo model: a small request and an urgent one end while most of the flood still waits."""
    config = load_config(cli={"scheduler.max_num_seqs": 8, "kv.num_blocks": 2000}, environ={}).config
    with serving(build_llm(config), max_priority=5) as live:
        steps = 0
        step = live.llm.step

        def counted() -> Any:
            nonlocal steps
            steps += 1
            return step()

        live.llm.step = counted  # type: ignore[method-assign]
        with stream(live, n=100, max_tokens=400), stream(live, n=100, max_tokens=400, user="me"):
            for fields in (
                {"address": "10.0.0.2"},
                {"address": "10.0.0.1", "user": "you"},
                {"address": "10.0.0.1"},
                {"address": "10.0.0.1", "service_tier": "priority"},
                {"address": "10.0.0.1", "priority": 5},
            ):
                before = steps
                assert post(live, max_tokens=8, **fields).status_code == 200
                assert steps - before <= 8 + 30, fields  # its tokens, and steps that ran as it came and went
            assert live.llm.stats().num_waiting > 150


class Loads(RuleBasedStateMachine):
    """Requests come, start and end in any order; what was let in never exceeds the limits."""

    def __init__(self) -> None:
        super().__init__()
        self.load = ClientLoad(ServerConfig(max_client_tokens=100, max_waiting=20))
        self.waiting: list[tuple[tuple[str, str], int, int]] = []
        self.running: list[tuple[tuple[str, str], int, int]] = []

    @rule(
        name=st.sampled_from("abc"),
        user=st.sampled_from(["", "x", "y"]),
        n=st.integers(1, 9),
        size=st.integers(1, 60),
    )
    def come(self, name: str, user: str, n: int, size: int) -> None:
        client = (name, user)
        try:
            self.load.check_waiting(client, n)
            self.load.check_tokens(client, size, max_model_len=8)
        except OverloadedError:
            return
        self.load.enter(client, n, size)
        self.waiting.append((client, n, size))

    @rule(place=st.integers(0, 20))
    def start(self, place: int) -> None:
        if place < len(self.waiting):
            client, n, size = self.waiting.pop(place)
            self.load.start(client, n)
            self.running.append((client, n, size))

    @rule(place=st.integers(0, 20))
    def end(self, place: int) -> None:
        if place < len(self.running):
            client, _, size = self.running.pop(place)
            self.load.leave(client, size)

    @invariant()
    def counts_balance(self) -> None:
        self.load.check()
        assert self.load.num_waiting == sum(n for _, n, _ in self.waiting) <= 20
        for name in "abc":
            tokens = [size for client, _, size in self.waiting + self.running if client[0] == name]
            assert self.load._tokens[name] == sum(tokens) <= 100

    @invariant()
    def a_newcomer_finds_a_place(self) -> None:
        if self.load.num_waiting < 20:
            self.load.check_waiting(("newcomer", ""), 1)


TestLoads = Loads.TestCase


def test_a_request_that_can_never_be_taken_is_no_429() -> None:
    load = ClientLoad(ServerConfig(max_request_tokens=10, max_client_tokens=20))
    with pytest.raises(RequestError) as caught:
        load.check_tokens(("a", ""), 11, max_model_len=8)
    assert caught.value.status == 400
    load.check_tokens(("a", ""), 11, max_model_len=11)
