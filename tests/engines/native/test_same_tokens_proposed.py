"""The same tokens with proposals of every kind, whatever else happens: the property of `test_same_tokens`.

In fp64 it holds token by token. In the dtypes of real caches the last bits of logits depend on how many
positions a step computes, so there a difference must be a near-tie of the two best logits (decision 0001).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.accel.speculative.lengths import ChainLengths
from sagellm.core.clock import ManualClock
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError, RequestError
from sagellm.core.protocols.speculative import Proposal
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine
from sagellm.engines.build_speculation import build_speculation
from sagellm.engines.engine import Engine
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.speculation import Speculation
from tests.builders import OneByOne, run_all
from tests.effort import examples, usual
from tests.engines.native.test_same_tokens import SAMPLING, Traffic, alone, backend, engine, prompt, traffics
from tests.tiny_models import DISTINCT, RECURRENT, VOCAB, save_tiny

GROUPS = sorted(set(DISTINCT) - RECURRENT)
"""Models with KV in one group or several: full, windows, attention chunks, latent, layers of two shapes."""


@dataclass
class Adversary(OneByOne):
    """Knows the answers: proposes them, others, a part of them and then others, or nothing."""

    random: random.Random
    answers: dict[str, Sequence[int]] = field(default_factory=dict)
    num_accepted: int = 0

    def propose_one(self, request: Request, tokens: Tokens, num_tokens: int) -> Proposal:
        done = len(tokens) - len(request.tokens)
        num_right = self.random.choice((0, num_tokens, self.random.randrange(num_tokens + 1)))
        right = list(islice(self.answers.get(request.request_id, ()), done, done + num_right))
        num_others = self.random.randrange(num_tokens - len(right) + 1)
        return Proposal((*right, *(self.random.randrange(VOCAB) for _ in range(num_others))))

    def observe(self, request_id: str, num_accepted: int) -> None:
        self.num_accepted += num_accepted

    def forget(self, request: Request, tokens: Tokens) -> None:
        self.answers.pop(request.request_id, None)


def fork(busy: Engine, name: str, expected: dict[str, tuple[int, ...]], sampling: dict[str, int]) -> None:
    """Fork a running request, if there is one; what comes behind its tokens is expected."""
    for parent in list(expected):
        child = f"fork of {parent}"
        if child in expected or parent.startswith("fork"):
            continue
        with suppress(RequestError):  # it does not run
            busy.fork(parent, child)
            forked = busy._request_table.states[child].request
            assert forked.params.max_tokens is not None
            sampling[child] = sampling[parent]
            expected[child] = alone(
                name, tuple(forked.tokens), forked.params.max_tokens, sampling[parent], child
            )
            return


@settings(max_examples=examples(40))
@given(
    name=st.sampled_from(GROUPS),
    traffic=traffics,
    most=st.integers(1, 9),
    adaptive=st.booleans(),
    overlap=st.booleans(),
    forks=st.booleans(),
)
def test_same_tokens_with_proposals_whatever_happens(
    name: str, traffic: Traffic, most: int, adaptive: bool, overlap: bool, forks: bool
) -> None:
    """The second turn finds the first in the cache, generated tokens included."""
    adversary = Adversary(random.Random(traffic.seed))
    speculation = Speculation(adversary, most, ChainLengths() if adaptive else None, ManualClock())
    busy = traffic.engine(name, overlap=overlap, speculation=speculation)
    expected, chosen = dict[str, tuple[int, ...]](), dict[str, int]()

    def add(request: Request, sampling: int) -> None:
        chosen[request.request_id] = sampling
        adversary.answers[request.request_id] = expected[request.request_id]
        allowed = (None, None, 2, 0)[len(request.tokens) % 4]
        busy.add(replace(request, params=replace(request.params, num_speculative_tokens=allowed)))

    def then() -> None:
        if forks:
            fork(busy, name, expected, chosen)

    traffic.compare(busy, name, 2, expected, add, then)


@pytest.mark.parametrize("name", usual(["qwen3", "gemma3", "llama4", "deepseek2-lite"], GROUPS))
def test_proposals_are_accepted_in_every_kind_of_kv(name: str) -> None:
    """The property above says nothing where nothing is accepted."""
    adversary = Adversary(random.Random(1))
    busy = engine(name, 60, 64, [], caching=True, speculation=Speculation(adversary, 5))
    for index in range(4):
        tokens = prompt(index % 2, 12 + index, index)
        expected = alone(name, tuple(tokens), 24, 0, f"{index}")
        adversary.answers[f"{index}"] = expected
        busy.add(Request(f"{index}", Tokens(tokens), replace(SAMPLING[0], max_tokens=24)))
    found = run_all(busy)
    for index in range(4):
        assert tuple(found[f"{index}"]) == alone(
            name, tuple(prompt(index % 2, 12 + index, index)), 24, 0, f"{index}"
        )
    assert adversary.num_accepted > 20


NEAR = {"float32": 1e-5, "float16": 0.02, "bfloat16": 0.1}
"""The largest distance of two logits that a step's shape may turn round; the models' are of a size of 1."""


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("name", usual(["qwen3", "gemma3", "deepseek3-yarn"], GROUPS))
def test_greedy_tokens_differ_at_near_ties_alone_in_every_kv_dtype(
    name: str, dtype: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, name)
    made = NativeBackend(
        tmp_path, dtype=dtype, compute_dtype=dtype, block_size=4, num_blocks=64, max_num_seqs=4,
        max_model_len=96, threads=1,
    )  # fmt: skip
    assert made.get_kv_schema().dtype == dtype
    config = Config.model_validate(
        {"kv": {"block_size": 4}, "scheduler": {"max_batched_tokens": 24, "max_num_seqs": 4}}
    )
    prompts = {f"{index}": prompt(index % 2, 9 + 5 * index, index) for index in range(6)}

    def answers(speculation: Speculation | None) -> dict[str, list[int]]:
        busy = build_engine(config, made)
        busy.speculation = busy._planner._speculation = speculation
        for request_id, tokens in prompts.items():
            busy.add(Request(request_id, Tokens(tokens), SamplingParams(temperature=0.0, max_tokens=24)))
        return run_all(busy)

    plain = answers(None)
    adversary = Adversary(random.Random(3), dict(plain))
    proposed, num_equal = answers(Speculation(adversary, 5)), 0
    assert adversary.num_accepted > 20
    for request_id, tokens in plain.items():
        places = zip(tokens, proposed[request_id], strict=True)
        differs = next((i for i, (one, other) in enumerate(places) if one != other), None)
        num_equal += differs is None
        if differs is not None:
            logits = made.prompt_logits(prompts[request_id] + tokens[:differs])
            gap = float(logits[tokens[differs]] - logits[proposed[request_id][differs]])
            assert abs(gap) < NEAR[dtype], f"{request_id} at {differs}: no near-tie"
    assert num_equal >= 3
    made.close()


@pytest.mark.parametrize("name", usual(["qwen3-next", "granite-hybrid"], sorted(RECURRENT)))
def test_recurrent_models_are_refused(name: str) -> None:
    config = Config.model_validate({"speculative": {"method": "suffix"}})
    with pytest.raises(ConfigError, match="states of recurrent layers do not go back"):
        build_speculation(config, backend(name, reference=True).capability(), lambda _: pytest.fail("unused"))
