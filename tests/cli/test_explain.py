"""`sagellm explain`: plans, stories, differences, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from sagellm.cli.explain import ScenarioRequest, explain, parse_request, read_requests, to_requests
from sagellm.core.errors import ConfigError
from sagellm.core.types import SLO
from sagellm.kvmgr.scheduler_ir import strategies
from sagellm.kvmgr.scheduler_ir.text import parse_plan

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = ["--max-num-seqs", "4", "--max-batched-tokens", "16"]
FIFO = ["--preset", "fifo"]


@pytest.fixture
def run() -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(explain)

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(app, arguments, catch_exceptions=False)

    return call


def test_each_step_shows_its_plan_and_why(run: Any) -> None:
    result = run("a=40+2", "b=8+2,at=1,priority=1", *SMALL, *FIFO)
    assert result.exit_code == 0, result.stderr
    steps = result.stdout.strip("\n").split("\n\n")
    assert steps[0].splitlines()[:3] == [
        "# 0.000 s: 0 decode and 16 prompt tokens; then 1 run, 0 wait; blocks: 1 used, 0 cached, 3 free",
        "step 0 @local",
        '// chunked_prefill admit "a": "16 tokens from 0 on"',
    ]
    assert [text.splitlines()[0].split(" s:")[0] for text in steps[:3]] == ["# 0.000", "# 0.050", "# 0.100"]
    assert '# chunked_prefill "a": computes tokens 16:32, before it 16:40' in steps[1]


@pytest.mark.parametrize("preset", strategies.STRATEGIES)
def test_every_strategy_makes_plans_that_are_right(run: Any, preset: str) -> None:
    requests = [f"r{i}={7 + 9 * i}+{9 + i},at={i},priority={i % 2},prefix=p{i % 2}:6" for i in range(6)]
    result = run(*requests, *SMALL, "--num-blocks", "8", "--set", f"scheduler.strategy={preset}")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\nstep ") == 20


def test_which_steps_are_shown(run: Any) -> None:
    whole = run("a=40+9", *SMALL, "--steps", "50").stdout
    some = run("a=40+9", *SMALL, "--from", "3", "--steps", "2").stdout
    assert whole.count("step ") == 11
    assert some.splitlines()[-1] == "# 6 more steps; --from 5 shows them"
    assert some.rpartition("# ")[0] in whole
    assert some.startswith("# 0.150 s")


def test_stories_of_requests(run: Any) -> None:
    result = run("a=40+2", "b=8+2,at=1", *SMALL, "--request", "b", "--request", "a")
    first, second = (text.splitlines() for text in result.stdout.split("\n\n"))
    assert (first[0], first[1].split()) == ("request b", ["step", "1", "arrived"])
    assert (second[0], second[1].split()) == ("request a", ["step", "0", "arrived"])
    assert first[-1].endswith("ends (length) after 2 tokens")


def test_what_changes_between_steps(run: Any) -> None:
    result = run("a=40+2", *SMALL, "--diff")
    assert '~ "a" computes prompt tokens 16:32, before prompt tokens 0:16' in result.stdout.splitlines()


def test_memory_is_short_only_where_asked(run: Any) -> None:
    tight = ["--num-blocks", "3"]
    assert "preempt" not in run("a=15+20", "b=15+20", *SMALL, *FIFO, "--request", "b").stdout
    assert "preempt" in run("a=15+20", "b=15+20", *SMALL, *FIFO, *tight, "--request", "b").stdout


def test_a_shared_prefix_is_reused(run: Any) -> None:
    shared = ["a=40+9,prefix=system:32", "b=50+2,at=6,prefix=system:32"]
    assert "with 32 tokens cached" in run(*shared, *SMALL, "--request", "b").stdout
    assert "with 0 tokens cached" in run("a=40+9", "b=50+2,at=6", *SMALL, "--request", "b").stdout


def test_requests_of_a_file(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    lines = [
        {"id": "a", "prompt": [5, 6, 7], "output": 2, "tenant": "x", "class": "gold", "ttft": 0.5},
        {"id": "b", "prompt": 9, "output": 1, "at": 2, "prefix": "s:4"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    a, b = read_requests(path, 9, 0.05)
    assert (a.tokens, a.num_prompt, a.slo, a.service_class) == ((5, 6, 7), 3, SLO(ttft_s=0.5), "gold")
    assert b == ScenarioRequest("b", 9, 1, at=2, prefix=("s", 4))
    (_, first), (at, second) = to_requests([b, a], 0.05)[::1]
    assert (at, second.arrival_s, list(first.tokens)) == (2, 0.1, [5, 6, 7])
    assert min(second.tokens) > 7, "its tokens are its own"
    assert run("--requests", str(path), *SMALL, "--request", "b").stdout.startswith("request b\nstep 2")


def test_requests_of_a_trace(run: Any) -> None:
    path = GOLDEN / "traces" / "chat.jsonl"
    found = read_requests(path, 5, 10.0)
    assert [one.name for one in found] == ["r0", "r1", "r2", "r3", "r4"]
    assert all(len(one.tokens) == one.num_prompt for one in found)
    assert sorted(one.at for one in found) == [one.at for one in found]
    arguments = ["--requests", str(path), "--limit", "3", "--step-ms", "10000", "--request", "r2"]
    result = run(*arguments, "--set", "kv.block_size=64")
    assert result.exit_code == 0, result.stderr
    assert "request r2" in result.stdout


def test_a_trace_of_lengths_alone(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,20,3\n2023-11-16 18:17:04.9,10,4\n"
    )
    one, other = read_requests(path, 5, 0.5)
    assert (one.num_prompt, one.num_output, other.at) == (20, 3, 2)
    assert not set(one.tokens) & set(other.tokens)


def test_what_is_printed_can_be_parsed(run: Any) -> None:
    text = run("a=4+2", *SMALL).stdout.split("\n\n")[1]
    assert parse_plan(text).decode_rows == (0,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to schedule: give requests as NAME=PROMPT+OUTPUT"),
        (["a"], "request 'a': write NAME=PROMPT+OUTPUT"),
        (["a=4"], "request 'a=4': write NAME=PROMPT+OUTPUT"),
        (["a=4+x"], "output is 'x'; write a whole number from 1 on"),
        (["a=0+1"], "prompt is '0'; write a whole number from 1 on"),
        (["a=4+1,at=-1"], "at is '-1'; write a whole number from 0 on"),
        (["a=4+1,at"], "'at' is not KEY=VALUE; keys are at, priority"),
        (["a=4+1,prioriti=1"], "no key 'prioriti'. Did you mean 'priority'?"),
        (["a=4+1,ttft=0"], "ttft is '0'; write seconds above 0"),
        (["a=4+1,prefix=s"], "prefix is 's'; write NAME:TOKENS"),
        (["a=4+1,prefix=s:5"], "a prefix of 5 tokens needs a prompt of so many"),
        (["a=4+1", "a=4+1"], "two requests are named 'a'"),
        (["a=4+1", "--request", "b"], "--request 'b': no such request. Known: a."),
        (["a=4+1", "--steps", "0"], "--steps and --limit begin with 1"),
        (["a=4+1", "--step-ms", "0"], "--step-ms 0.0: write milliseconds above 0"),
        (["a=40+1", "--num-blocks", "1"], "maximum context length is 16 tokens, but the prompt has 40"),
        (["--requests", "nowhere.jsonl"], "cannot read the requests in nowhere.jsonl"),
    ],
)
def test_what_is_refused_is_explained(run: Any, arguments: list[str], message: str) -> None:
    result = run(*arguments, *SMALL)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: write a JSON object with id, prompt and output"),
        ('{"id": "b", "prompt": 4}', "line 2: 'output' is missing"),
        ('{"id": "b", "prompt": [], "output": 1}', "line 2: prompt must hold token ids from 0"),
        ('{"id": "b", "prompt": [-1], "output": 1}', "line 2: prompt must hold token ids from 0"),
        ('{"id": "b", "prompt": 4.5, "output": 1}', "line 2: prompt is 4.5; write a whole number from 1 on"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(f'{{"id": "a", "prompt": 4, "output": 1}}\n{line}\n')
    with pytest.raises(ConfigError) as caught:
        read_requests(path, 9, 0.05)
    assert message in str(caught.value)


def test_a_request_in_one_line() -> None:
    text = "b=40+8,at=3,priority=-1,tenant=x,class=gold,prefix=system:16,ttft=0.5,tpot=0.02"
    assert parse_request(text) == ScenarioRequest(
        "b", 40, 8, 3, -1, "x", "gold", ("system", 16), SLO(0.5, 0.02)
    )
