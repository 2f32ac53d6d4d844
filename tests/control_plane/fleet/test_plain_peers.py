"""A fleet over real vLLM and SGLang servers gives our engine's tokens.

`SAGELLM_PEER_VLLM` names the interpreter of an environment with vLLM's CPU build. `SAGELLM_PEER_SERVERS`
names servers that run already, of either kind: a JSON list of `servers` of a fleet file, which serve our demo
model with a context of 512 tokens.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sagellm.control_plane.fleet.client import Instances
from sagellm.control_plane.fleet.engine import FleetEngine
from sagellm.control_plane.fleet.plain_server import PlainServers, PlainTerms
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.core.clock import MonotonicClock
from sagellm.core.fleet_config import PlainServerConfig
from sagellm.core.types import FinishReason, Namespace, Request, RequestOutput, SamplingParams, Tokens
from sagellm.engines.build import load
from sagellm.engines.llm import LLM
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.tokenizer import Tokenizer
from tests.control_plane.fleet.plain_stand_in import wait_until
from tests.control_plane.fleet.scene import KEY, InTurn, _check
from tests.serving.live import LOCALHOST, free_port

pytestmark = [pytest.mark.peer, pytest.mark.timeout(900)]

MODEL, SAMPLE = "sagellm-demo", "1 + 2 = 3, the capital of France"
PROMPTS = ["1 + 1 = 2, 1 + 2 = 3, 1 + 3 =", "What is 17 + 25?", "a", "The sun is a star. " * 8]


def vllm_command(python: str, port: int, events: int, replay: int) -> list[str]:
    publish = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO_MODEL)]
    command += ["--served-model-name", MODEL, "--host", LOCALHOST, "--port", str(port)]
    command += ["--block-size", "32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--enable-prompt-tokens-details", "--num-gpu-blocks-override", "400"]
    return [*command, "--kv-events-config", json.dumps(publish)]


class Peer:
    """A server as fleet files name it, and its process if it is ours."""

    def __init__(self, config: PlainServerConfig, process: subprocess.Popen[bytes] | None = None) -> None:
        self.config, self.process = config, process


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Peer]]:
    named, python = os.environ.get("SAGELLM_PEER_SERVERS"), os.environ.get("SAGELLM_PEER_VLLM")
    if named is not None:
        yield [Peer(PlainServerConfig.model_validate(each)) for each in json.loads(named)]
        return
    if python is None or not Path(python).exists():
        pytest.skip("neither SAGELLM_PEER_SERVERS nor SAGELLM_PEER_VLLM is set")
    port, events, replay = free_port(), free_port(), free_port()
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment = {**os.environ, **small, "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    config = PlainServerConfig(
        url=f"http://{LOCALHOST}:{port}",
        events=f"tcp://{LOCALHOST}:{events}",
        replay=f"tcp://{LOCALHOST}:{replay}",
    )
    command = vllm_command(python, port, events, replay)
    with subprocess.Popen(command, env=environment, start_new_session=True, **quiet) as process:
        try:
            yield [Peer(config, process)]
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def ours() -> Iterator[LLM]:
    llm = load(None, {"kv.num_blocks": 400})
    yield llm
    llm.close()


class Front:
    """A fleet of these servers, whose turns the test takes."""

    def __init__(self, configs: Sequence[PlainServerConfig]) -> None:
        clock = MonotonicClock()
        self.tokenizer = Tokenizer.from_folder(DEMO_MODEL)
        sample = tuple(self.tokenizer.encode(SAMPLE, add_special_tokens=False))
        terms = PlainTerms(MODEL, self.tokenizer.vocab_size, (SAMPLE, sample), interval_s=0.1, lease_s=5.0)
        self.instances, self.prefixes = Instances(KEY, clock), PrefixIndex(clock)
        self.plain = PlainServers(terms, clock, self.instances.wake)
        self.engine = FleetEngine(self.instances, InTurn(), self.prefixes, _check, clock=clock)
        for number, config in enumerate(configs):
            client = self.plain.add(f"p-{number}", config)
            self.instances.include(client)
            self.engine.know(client)
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.engine.wait_until_ready(600.0)

    def turn(self) -> None:
        for output in self.engine.step():
            self.outputs.setdefault(output.request_id, []).append(output)

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            self.turn()
            return is_so()

        wait_until(look, what)

    def finish(self) -> None:
        self.until(lambda: not len(self.engine.requests), "all answers")

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.new_token_ids]

    def close(self) -> None:
        self.engine.close()
        self.plain.close()


@pytest.fixture(scope="module")
def front(peers: list[Peer]) -> Iterator[Front]:
    made = Front([peer.config for peer in peers])
    yield made
    made.close()


def request(front: Front, name: str, prompt: str, **params: Any) -> Request:
    tokens = front.tokenizer.encode(prompt)
    chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **params})
    return Request(name, Tokens(tokens), chosen, front.tokenizer.eos_token_ids)


def reference(ours: LLM, given: Request) -> tuple[list[int], list[Any]]:
    """Tokens and log-probabilities of our own engine, which computes the request alone."""
    engine = ours.engine
    engine.add(given)
    outputs: list[RequestOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += engine.step()
    tokens = [token for output in outputs for token in output.new_token_ids]
    return tokens, [each for output in outputs for each in output.logprobs]


def test_the_tokens_are_those_of_our_engine(front: Front, ours: LLM) -> None:
    for round_ in range(2):
        for number, prompt in enumerate(PROMPTS):
            front.engine.add(request(front, f"t{round_}-{number}", prompt))
    front.finish()
    for round_ in range(2):
        for number, prompt in enumerate(PROMPTS):
            name = f"t{round_}-{number}"
            assert front.tokens(name) == reference(ours, request(front, name, prompt))[0]
            last = front.outputs[name][-1]
            assert last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert last.num_output_tokens == len(front.tokens(name))


def test_log_probabilities_are_those_of_our_engine(front: Front, ours: LLM) -> None:
    given = request(front, "lp", PROMPTS[0], max_tokens=6, logprobs=3, prompt_logprobs=2)
    front.engine.add(given)
    front.finish()
    expected = reference(ours, given)[1]
    found = [each for output in front.outputs["lp"] for each in output.logprobs]
    assert [each.token_id for each in found] == [each.token_id for each in expected]
    for mine, theirs in zip(expected, found, strict=True):
        assert theirs.logprob == pytest.approx(mine.logprob, abs=0.05)
        assert len(theirs.top) == 3
        assert theirs.top[0] == (theirs.token_id, theirs.logprob)
    [prompt] = [o.prompt_logprobs for o in front.outputs["lp"] if o.prompt_logprobs is not None]
    assert [each.token_id for each in prompt] == list(given.tokens)[1:]


def test_an_answer_goes_on_behind_its_tokens(front: Front, ours: LLM) -> None:
    given = request(front, "go", PROMPTS[3], max_tokens=20, ignore_eos=True)
    whole = reference(ours, given)[0]
    front.engine.add(given)
    front.until(lambda: "go" in front.outputs and len(front.tokens("go")) >= 4, "four tokens")
    front.engine.move_away(next(iter(front.engine.members)))
    front.finish()
    assert front.tokens("go") == whole


def test_sampling_parameters_are_accepted(front: Front) -> None:
    every = {
        "temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "presence_penalty": 0.5,
        "frequency_penalty": 0.5, "logit_bias": {5: -10.0}, "min_tokens": 3, "stop_token_ids": (11,),
    }  # fmt: skip
    front.engine.add(request(front, "s", PROMPTS[1], **every))
    front.engine.add(request(front, "z", PROMPTS[1], max_tokens=0))
    front.finish()
    assert front.outputs["s"][-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert len(front.tokens("s")) >= 3
    assert (front.outputs["z"][-1].finish_reason, front.tokens("z")) == (FinishReason.LENGTH, [])


def test_its_cache_and_load_are_known(front: Front, peers: list[Peer]) -> None:
    long = PROMPTS[3] * 3
    tokens = front.tokenizer.encode(long)
    for number in range(2 * len(peers)):  # in turn: each server twice
        front.engine.add(request(front, f"c{number}", long, max_tokens=2))
        front.finish()
    for number, peer in enumerate(peers):
        member = front.engine.members[f"p-{number}"]
        assert member.facts is not None
        assert member.load is not None
        assert member.facts.max_model_len == 512
        assert member.load.num_blocks * member.facts.capability.block_size >= 512
        if peer.config.events is not None:
            [cached] = front.prefixes.lookup(tokens, Namespace(), [f"p-{number}"])
            assert cached.num_device_tokens >= len(tokens) - 32
            assert member.load.is_fresh
            front.engine.add(request(front, f"d{number}", long, max_tokens=2))
            front.finish()


def test_an_abort_ends_it_there(front: Front) -> None:
    front.engine.add(request(front, "a", PROMPTS[3], max_tokens=300, ignore_eos=True))
    front.until(lambda: "a" in front.outputs, "a token")
    assert front.engine.abort("a")

    def is_idle() -> bool:
        loads = [member.load for member in front.engine.members.values()]
        return all(load is not None and load.num_requests == 0 for load in loads)

    front.until(is_idle, "the server is idle")


def test_a_killed_server_is_lost(front: Front, peers: list[Peer]) -> None:
    """The last test of this file: the server is not started again."""
    process = peers[0].process
    if process is None:
        pytest.skip("the server is not ours to kill")
    front.engine.add(request(front, "k", PROMPTS[3], max_tokens=300, ignore_eos=True))
    front.until(lambda: "k" in front.outputs, "a token")
    os.killpg(process.pid, signal.SIGKILL)
    front.until(lambda: front.engine.members["p-0"].facts is None, "the loss")
    assert front.engine.requests.get("k") is not None  # it waits for another server
