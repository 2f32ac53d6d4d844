"""One OpenAI endpoint in front of plain servers, by supervisor and front."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from sagellm.control_plane.fleet_instances import api_key
from sagellm.core.errors import ConfigError
from sagellm.core.fleet_config import PlainServerConfig
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.tokenizer import Tokenizer
from tests.control_plane.fleet.plain_stand_in import continued, standing_in
from tests.serving.fleet_processes import running_fleet

PROMPT = [5, 9, 11, 13, 400, 3]
DEMO = {"models": ["sagellm-demo"], "vocab": 700}


def test_a_key_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    server = PlainServerConfig(url="http://h", api_key_variable="A_KEY")
    with pytest.raises(ConfigError, match="environment variable A_KEY"):
        api_key("vllm-0", server)
    monkeypatch.setenv("A_KEY", " word\n")
    assert api_key("vllm-0", server) == "word"
    monkeypatch.setenv("A_KEY", "w\u00f6rd")
    with pytest.raises(ConfigError, match="no key"):
        api_key("vllm-0", server)
    assert api_key("vllm-0", PlainServerConfig(url="http://h")) is None


def test_one_endpoint_in_front_of_vllm_and_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    tokenizer = Tokenizer.from_folder(Path(DEMO_MODEL))
    words = lambda text: list(tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
    with (
        standing_in("vllm", key="secret", tokenize=words, **DEMO) as vllm,
        standing_in("sglang", tokenize=words, **DEMO) as sglang,
    ):
        servers = [{"url": vllm.url, "api_key_variable": "A_KEY"}, {"url": f"{sglang.url}/v1"}]
        with running_fleet(settings={"fleet.groups": {"plain": {"servers": servers}}}) as fleet:
            status = fleet.status()
            assert [each["state"] for each in status["instances"]] == ["ready", "ready"]
            for number in range(6):
                answer = fleet.complete([number + 20, *PROMPT], 8, ignore_eos=True)
                tokens = continued([number + 20, *PROMPT], 8, 700)
                assert answer["choices"][0]["text"] == tokenizer.decode(tokens)
                assert answer["usage"]["completion_tokens"] == 8
            stopped = fleet.complete(PROMPT, 30, stop=[tokenizer.decode(continued(PROMPT, 9, 700)[5:])])
            assert stopped["choices"][0]["finish_reason"] == "stop"
            vllm.kill()
            for number in range(4):
                answer = fleet.complete([number + 20, *PROMPT], 8, ignore_eos=True)
                assert answer["choices"][0]["text"] == tokenizer.decode(
                    continued([number + 20, *PROMPT], 8, 700)
                )
            restart = httpx2.post(
                f"{fleet.url}/v1/admin/fleet/restart",
                json={"name": "plain-0"},
                headers={"Authorization": "Bearer none"},
                timeout=20.0,
            )
            assert restart.status_code in (400, 401, 403)
