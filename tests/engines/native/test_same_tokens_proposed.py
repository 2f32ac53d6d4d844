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
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.protocols.speculative import Proposal
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine
from sagellm.engines.build_speculation import build_speculation
from sagellm.engines.engine import Engine
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.speculation import Speculation
from sagellm.kvmgr.scheduler_ir.passes.chunked_prefill import ChunkedPrefillPass
from sagellm.kvmgr.scheduler_ir.passes.prefix_cache_aware import PrefixCacheAwarePass
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from tests.builders import OneByOne, PreemptAtRandom, run_all
from tests.effort import examples, usual
from tests.engines.native.test_same_tokens import SAMPLING, alone, backend, engine, prompt, requests
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
    specs=requests,
    num_blocks=st.integers(14, 60),
    budget=st.integers(3, 64),
    chunk=st.one_of(st.none(), st.integers(1, 17)),
    caching=st.booleans(),
    preempt=st.sampled_from([0.0, 0.15]),
    seed=st.integers(0, 99),
    stagger=st.integers(0, 2),
    most=st.integers(1, 9),
    adaptive=st.booleans(),
    overlap=st.booleans(),
    forks=st.booleans(),
)
def test_same_tokens_with_proposals_whatever_happens(
    name: str,
    specs: list[tuple[int, int, int, int, int]],
    num_blocks: int,
    budget: int,
    chunk: int | None,
    caching: bool,
    preempt: float,
    seed: int,
    stagger: int,
    most: int,
    adaptive: bool,
    overlap: bool,
    forks: bool,
) -> None:
    """The second turn finds the first in the cache, generated tokens included."""
    passes: list[SchedulerPass] = [PrefixCacheAwarePass(), PriorityBasedPass()]
    passes += [PreemptAtRandom(seed, preempt, 6), ChunkedPrefillPass(chunk)]
    adversary = Adversary(random.Random(seed))
    speculation = Speculation(adversary, most, ChainLengths() if adaptive else None, ManualClock())
    busy = engine(name, num_blocks, budget, passes, caching=caching, overlap=overlap, speculation=speculation)
    got, expected, chosen = dict[str, list[int]](), dict[str, tuple[int, ...]](), dict[str, int]()
    for turn in range(2):
        for index, (family, length, own, max_tokens, sampling) in enumerate(specs):
            request_id, tokens = f"{index}.{turn}", prompt(family, length, own)
            tokens += expected[f"{index}.0"] if turn else ()
            chosen[request_id] = sampling
            expected[request_id] = alone(name, tuple(tokens), max_tokens, sampling, request_id)
            adversary.answers[request_id] = expected[request_id]
            params = replace(
                SAMPLING[sampling], max_tokens=max_tokens, num_speculative_tokens=(None, None, 2, 0)[own]
            )
            busy.add(Request(request_id, Tokens(tokens), params, arrival_s=index, group=f"family {family}"))
            for _ in range(stagger):
                for output in busy.step():
                    got.setdefault(output.request_id, []).extend(output.new_token_ids)
            if forks:
                fork(busy, name, expected, chosen)
        for request_id, new in run_all(busy).items():
            got.setdefault(request_id, []).extend(new)
    assert {request_id: tuple(tokens) for request_id, tokens in got.items()} == expected
    assert busy.kv.block_states().active == 0


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
