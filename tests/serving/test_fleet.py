"""A fleet of real processes behind one endpoint: requests, operations, the ends of processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sagellm.control_plane.kv_events import BlockStored, KVEventSubscriber, ReceivedBatch
from sagellm.core.types import SamplingParams
from sagellm.engines.build import load_config
from sagellm.engines.llm import LLM
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.tokenizer_of import tokenizer_of
from tests import forked_commands
from tests.builders import fake_engine
from tests.serving.fleet_processes import Fleet, running_fleet
from tests.slow_tokens import SlowTokens

SETTINGS: dict[str, Any] = {
    "engine.backend": "tests.slow_tokens:SlowTokens",
    "server.admin_key": "an admin key",
    "log.level": "info",
    "fleet.tenant_quotas": {"limited": {"max_requests": 1, "tokens_per_s": 10, "burst_tokens": 200}},
    "fleet.quota_patience_s": 2.0,
}
ADMIN = {"Authorization": "Bearer an admin key"}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("events")
    events = {"events.endpoint": f"ipc://{folder}/e", "events.replay_endpoint": f"ipc://{folder}/r"}
    with running_fleet("--prefill", "1", "--decode", "2", settings={**SETTINGS, **events}) as made:
        yield made


@pytest.fixture(scope="module")
def one_engine() -> LLM:
    """What the fleet must answer."""
    engine = fake_engine(SlowTokens(step_s=0.0), max_batched_tokens=2048)
    tokenizer = tokenizer_of(load_config(environ={}).config, DEMO_MODEL)
    return LLM(engine, tokenizer, model_name="m", max_model_len=4096)


def prompt_of(number: int, length: int = 60) -> list[int]:
    return random.Random(number).choices(range(1, 400), k=length)


def expected(llm: LLM, tokens: list[int], max_tokens: int) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate(tokens, params)[0].text


def asked(fleet: Fleet, number: int, max_tokens: int = 40) -> str:
    answer = fleet.complete(prompt_of(number), max_tokens, ignore_eos=True)
    assert answer["status"] == 200, answer
    text: str = answer["choices"][0]["text"]
    return text


def test_answers_are_those_of_one_engine(fleet: Fleet, one_engine: LLM) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda number: asked(fleet, number), range(16)))
    assert texts == [expected(one_engine, prompt_of(number), 40) for number in range(16)]
    status = fleet.status()
    assert {each["name"] for each in status["instances"]} == {"prefill-0", "decode-0", "decode-1"}
    assert status["num_requests"] == 0


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_a_killed_instance_loses_no_request(fleet: Fleet, one_engine: LLM, name: str) -> None:
    fleet.wait_until_healthy(20)
    [pid] = [each["pid"] for each in fleet.status()["instances"] if each["name"] == name]
    with ThreadPoolExecutor(6) as pool:
        texts = [pool.submit(asked, fleet, 100 + number, 200) for number in range(6)]
        time.sleep(0.4)
        os.kill(pid, signal.SIGKILL)
        found = [text.result() for text in texts]
    assert found == [expected(one_engine, prompt_of(100 + number), 200) for number in range(6)]
    fleet.wait_until_healthy(20)


def test_an_instance_that_hangs_holds_up_nothing(fleet: Fleet, one_engine: LLM) -> None:
    fleet.wait_until_healthy(20)
    [pid] = [each["pid"] for each in fleet.status()["instances"] if each["name"] == "decode-1"]
    with ThreadPoolExecutor(6) as pool:
        texts = [pool.submit(asked, fleet, 200 + number, 200) for number in range(6)]
        time.sleep(0.4)
        os.kill(pid, signal.SIGSTOP)
        try:
            found = [text.result() for text in texts]
        finally:
            os.kill(pid, signal.SIGCONT)
    assert found == [expected(one_engine, prompt_of(200 + number), 200) for number in range(6)]
    fleet.wait_until_healthy(20)
    assert {each["pid"] for each in fleet.status()["instances"]} >= {pid}


def test_operations_lose_no_request(fleet: Fleet, one_engine: LLM) -> None:
    fleet.wait_until_healthy(20)
    stop = threading.Event()
    failures: list[str] = []

    def ask_on(first: int) -> None:
        number = first
        while not stop.is_set():
            try:
                if asked(fleet, number, 30) != expected_texts[number % 4]:
                    failures.append("another text")
            except AssertionError as error:
                failures.append(str(error))

    expected_texts = [expected(one_engine, prompt_of(number), 30) for number in range(4)]
    threads = [threading.Thread(target=ask_on, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for path, body in (
            ("drain", {"name": "decode-0"}),
            ("resume", {"name": "decode-0"}),
            ("restart", {"name": "decode-1"}),
            ("switch", {"name": "decode-0", "type": "prefilling"}),
            ("switch", {"name": "decode-1", "type": "hybrid"}),
            ("restart", {"name": "decode-1"}),
            ("scale", {"group": "decode", "count": 3}),
            ("switch", {"name": "decode-0", "type": "decoding"}),
            ("scale", {"group": "decode", "count": 2}),
        ):
            answer = httpx2.post(f"{fleet.url}/v1/admin/fleet/{path}", json=body, headers=ADMIN, timeout=60)
            assert answer.status_code == 200, answer.text
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    types = {each["name"]: each["type"] for each in fleet.status()["instances"]}
    assert types == {"prefill-0": "prefilling", "decode-0": "decoding", "decode-1": "hybrid"}
    answer = httpx2.post(
        f"{fleet.url}/v1/admin/fleet/switch", json={"name": "decode-1", "type": "decoding"}, headers=ADMIN
    )
    assert answer.status_code == 200
    assert {each["name"] for each in fleet.status()["instances"]} == {"prefill-0", "decode-0", "decode-1"}


def test_a_tenant_over_its_quota_hears_when_to_come_again(fleet: Fleet) -> None:
    fleet.wait_until_healthy(20)

    def ask(max_tokens: int) -> httpx2.Response:
        body = {
            "model": "sagellm-demo", "prompt": prompt_of(7), "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "cache_salt": "limited",
        }  # fmt: skip
        return fleet.client.post(f"{fleet.url}/v1/completions", json=body, timeout=60.0)

    assert ask(100).status_code == 200
    soon = ask(100)
    assert soon.status_code == 429
    assert 5 <= int(soon.headers["Retry-After"]) <= 12
    assert "10 tokens per second" in soon.json()["error"]["message"]
    never = ask(141)
    assert never.status_code == 429
    assert never.headers["x-should-retry"] == "false"
    assert "Retry-After" not in never.headers
    assert "shorten the prompt or max_tokens by 1" in never.json()["error"]["message"]
    assert asked(fleet, 8, 5)
    assert fleet.status()["quotas"] == [
        {"name": "limited", "num_requests": 0, "num_waiting": 0, "num_refused": 2},
        {"name": "(other)", "num_requests": 0, "num_waiting": 0, "num_refused": 0},
    ]
    text = fleet.client.get(f"{fleet.url}/metrics", timeout=20.0).text
    assert 'sagellm_tenant_refused_requests_total{model_name="sagellm-demo",tenant="limited"} 2.0' in text


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("drain", {}, 400, "which instance"),
        ("drain", {"name": "x"}, 404, "prefill-0"),
        ("switch", {"name": "x", "type": "hybrid"}, 404, "prefill-0"),
        ("switch", {"name": "decode-0", "type": "embedding"}, 400, "hybrid"),
        ("scale", {"group": "x", "count": 1}, 400, "prefill, decode"),
        ("scale", {"group": "decode", "count": -1}, 400, "count"),
    ],
)
def test_wrong_operations(fleet: Fleet, path: str, body: dict[str, Any], status: int, word: str) -> None:
    answer = httpx2.post(f"{fleet.url}/v1/admin/fleet/{path}", json=body, headers=ADMIN, timeout=30)
    assert answer.status_code == status
    assert word in answer.text


def test_commands(fleet: Fleet) -> None:
    fleet.wait_until_healthy(20)
    shown = _run("fleet", "status", "--url", fleet.url)
    assert shown.returncode == 0
    assert "decode-1" in shown.stdout
    assert "ready" in shown.stdout
    refused = _run("fleet", "drain", "decode-0", "--url", fleet.url)
    assert refused.returncode == 2
    assert "admin key" in refused.stderr
    drained = _run("fleet", "drain", "decode-0", "--url", fleet.url, "--admin-key", "an admin key")
    assert drained.returncode == 0
    assert "drained" in drained.stdout
    resumed = _run("fleet", "resume", "decode-0", "--url", fleet.url, "--admin-key", "an admin key", "--json")
    assert resumed.returncode == 0
    assert '"ready"' in resumed.stdout
    for kind in ("hybrid", "decoding"):
        arguments = ("--to", kind, "--url", fleet.url, "--admin-key", "an admin key")
        switched = _run("fleet", "switch", "decode-0", *arguments)
        assert switched.returncode == 0
        assert kind in switched.stdout
    nobody = _run("fleet", "status", "--url", "http://127.0.0.1:9")
    assert nobody.returncode == 2
    assert "--url" in nobody.stderr


def test_an_operator_watches_the_fleet(fleet: Fleet) -> None:
    fleet.wait_until_healthy(20)
    for number in range(4):
        asked(fleet, 300 + number)
    watching = ("watch", "--url", fleet.url, "--duration", "1.5", "--interval", "0.5")
    shown = _run(*watching, "--instance", "prefill-0", "--admin-key", "an admin key")
    assert shown.returncode == 0, shown.stderr
    for word in ("decode-1", "3 of 3 ready", "KV blocks cached", "KV events: sagellm watch ipc://"):
        assert word in shown.stdout, shown.stdout
    unknown = _run(*watching, "--instance", "x", "--admin-key", "an admin key")
    assert unknown.returncode == 2
    assert "no instance is named 'x'" in unknown.stderr
    without_key = _run(*watching, "--instance", "prefill-0")
    assert without_key.returncode == 2
    assert "admin key" in without_key.stderr


def test_the_last_failure_of_an_instance_is_shown(fleet: Fleet) -> None:
    fleet.wait_until_healthy(20)
    [pid] = [each["pid"] for each in fleet.status()["instances"] if each["name"] == "decode-1"]
    os.kill(pid, signal.SIGKILL)
    fleet.wait_until_healthy(20)
    until_s = time.monotonic() + 10
    while not (shown := instance_of(fleet, "decode-1"))["last_failure"].endswith("SIGKILL"):
        assert time.monotonic() < until_s, shown
        time.sleep(0.05)
    assert shown["last_failure_s_ago"] < 30
    assert shown["num_lost"] >= 1
    fleet.wait_until_healthy(20)
    assert instance_of(fleet, "decode-0")["version"] == instance_of(fleet, "decode-1")["version"] != ""


def instance_of(fleet: Fleet, name: str) -> dict[str, Any]:
    [found] = [each for each in fleet.status()["instances"] if each["name"] == name]
    return dict(found)


def test_a_router_outside_follows_each_instance(fleet: Fleet) -> None:
    """Each publishes at the configured endpoint and its number on this host."""
    fleet.wait_until_healthy(20)
    ends = {each["name"]: each["kv_events"] for each in fleet.status()["instances"]}
    numbers = {"prefill-0": "", "decode-0": "_dp1", "decode-1": "_dp2"}
    assert ends == {name: ends["prefill-0"] + end for name, end in numbers.items()}
    before = {name: instance_of(fleet, name)["num_prompt_tokens"] for name in numbers}
    asked(fleet, 400)
    [name] = [name for name in numbers if instance_of(fleet, name)["num_prompt_tokens"] > before[name]]
    with KVEventSubscriber(ends[name], instance_of(fleet, name)["kv_replay"]) as reader:
        while not isinstance(item := reader.poll(10.0), ReceivedBatch) or not item.batch.events:
            assert item is not None, "nothing was published"
        assert isinstance(item.batch.events[0], BlockStored)
        assert item.batch.data_parallel_rank == list(numbers).index(name)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked_commands.sagellm(*arguments, environment={**os.environ, "COLUMNS": "200"})


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--set", "fleet.router=costs", "--decode", "1"], "Did you mean 'cost'"),
        (["--set", "fleet.admission=fido", "--decode", "1"], "Did you mean 'fifo'"),
        (["--prefill", "0"], "--prefill"),
    ],
)
def test_what_cannot_start_is_said_at_once(arguments: list[str], word: str) -> None:
    refused = _run("serve", "--port", "0", *arguments)
    assert refused.returncode == 2
    assert word in refused.stderr


def test_nothing_is_left_when_the_supervisor_is_killed() -> None:
    with running_fleet("--decode", "1", settings=SETTINGS) as fleet:
        pids = list(fleet.children().values())
        assert len(pids) == 2
        fleet.process.kill()
        until_s = time.monotonic() + 10
        while any(_lives(pid) for pid in pids) and time.monotonic() < until_s:
            time.sleep(0.05)
        assert not any(_lives(pid) for pid in pids)


def test_the_front_is_started_again(fleet: Fleet, one_engine: LLM) -> None:
    fleet.wait_until_healthy(20)
    instance_pids = {each["pid"] for each in fleet.status()["instances"]}
    [front] = [pid for pid in fleet.children().values() if pid not in instance_pids]
    os.kill(front, signal.SIGKILL)
    assert fleet.wait_until_healthy(20) < 20
    assert {each["pid"] for each in fleet.status()["instances"]} == instance_pids
    assert asked(fleet, 7) == expected(one_engine, prompt_of(7), 40)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_hundred_kills(one_engine: LLM) -> None:
    """`kill -9` of any process at random moments under load.

    Nothing is lost but the connections of a front.
    """
    rng = random.Random(1)
    with running_fleet("--prefill", "1", "--decode", "2", settings=SETTINGS) as fleet:
        stop, answered, cut = threading.Event(), [0], [0]
        wrong: list[object] = []
        texts = [expected(one_engine, prompt_of(number), 60) for number in range(8)]

        def ask_on(number: int) -> None:
            while not stop.is_set():
                try:
                    answer = fleet.complete(prompt_of(number), 60, ignore_eos=True)
                except httpx2.HTTPError:
                    cut[0] += 1  # the front was killed: its connections end
                    continue
                if answer["status"] != 200 or answer["choices"][0]["text"] != texts[number]:
                    wrong.append(answer)
                answered[0] += 1

        threads = [threading.Thread(target=ask_on, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        recoveries, num_front = [], 0
        try:
            for _ in range(100):
                time.sleep(rng.uniform(0.0, 0.6))
                pids = sorted(fleet.children().values())
                instances = {each["pid"] for each in fleet.status()["instances"]}
                pid = rng.choice(pids)
                num_front += pid not in instances
                os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
                recoveries.append(fleet.wait_until_healthy(30))
                print(f"{len(recoveries)}: {recoveries[-1]:.2f} s", flush=True)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not wrong
        assert cut[0] <= 8 * num_front
        blocks = [each["kv_cache_usage"] for each in _settled(fleet)["instances"]]
        assert blocks == [0.0] * 3
        print(
            f"{answered[0]} answers, {cut[0]} connections of {num_front} fronts; healthy after "
            f"{max(recoveries):.1f} s at most, {sorted(recoveries)[50]:.1f} s in the median"
        )
        assert max(recoveries) < 5.0


def _settled(fleet: Fleet) -> dict[str, Any]:
    until_s = time.monotonic() + 10
    while True:
        status = fleet.status()
        if not any(each["kv_cache_usage"] for each in status["instances"]) or time.monotonic() > until_s:
            return status
        time.sleep(0.1)
