"""Greedy tokens through the bridge are those of transformers: each architecture, and through the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from sagellm.accel.quantization.round_to_nearest import RoundToNearest
from sagellm.core.protocols.fusion import KernelSet
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine, build_passes, load_config
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.footprint import footprint
from tests.bridged_models import BRIDGED_MODELS, save_bridged
from tests.builders import PreemptAtRandom, run_all
from tests.engines.native.driver import RecordingBackend
from tests.engines.native.test_parity import LOGIT_TOLERANCE, NEW_TOKENS, Tally, generate, prompts, reference

PROMPT_LENGTHS = (5, 33, 46, 70)
FAST = ("gpt2", "cohere2", "minicpm3")
"""Learned positions and Conv1D; windows in groups, scaled logits; values narrower than keys."""
ALL = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in sorted(BRIDGED_MODELS)
]
quiet = pytest.mark.filterwarnings("ignore")


@quiet
@pytest.mark.parametrize("model_type", ALL)
def test_greedy_parity_in_batches_and_chunks(model_type: str, tmp_path: Path) -> None:
    model = save_bridged(tmp_path, model_type)
    backend = RecordingBackend(
        tmp_path, num_blocks=64, max_num_seqs=6, block_size=8, threads=1, implementation="transformers"
    )
    requests = prompts(PROMPT_LENGTHS)
    expected = [reference(model, prompt, NEW_TOKENS) for prompt in requests]
    tally = Tally()
    for chunks in ((10_000,), (1, 7, 16, 30)):
        for sequence, (tokens, logits) in zip(generate(backend, chunks, requests), expected, strict=True):
            equal = tally.compare(model_type, sequence.outputs, tokens, logits)
            for mine, theirs in zip(sequence.logits[:equal], logits, strict=False):
                torch.testing.assert_close(mine, theirs, atol=LOGIT_TOLERANCE, rtol=0)
    assert len(tally.ties) <= 1
    backend.close()


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    return reference(model, prompt, NEW_TOKENS)[0]


ENGINE = ["cohere2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "olmoe", "gpt2"))]


@quiet
@pytest.mark.parametrize("model_type", ENGINE)
def test_the_engine_reuses_prefixes_and_resumes_preempted_requests(model_type: str, tmp_path: Path) -> None:
    model = save_bridged(tmp_path, model_type)
    settings = {
        "model.name": str(tmp_path),
        "model.implementation": "transformers",
        "kv.block_size": 4,
        "kv.num_blocks": 48,
        "scheduler.max_batched_tokens": 24,
        "scheduler.max_num_seqs": 4,
        "engine.threads": 1,
    }
    config = load_config(cli=settings, environ={}).config
    engine = build_engine(config)
    engine.set_passes([PreemptAtRandom(3, 0.1, 6), *build_passes(config.scheduler)])
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    shared = prompts((40,), seed=5)[0]
    batch = {str(i): shared + own for i, own in enumerate(prompts((3, 9, 14, 22), seed=6))}
    for name, prompt in batch.items():
        engine.add(Request(name, Tokens(prompt), params))
    got = run_all(engine)
    assert got == {name: greedy(model, prompt) for name, prompt in batch.items()}
    assert engine.stats().num_preemptions > 0
    before = engine.stats().reuse
    again = batch["3"] + got["3"] + [7, 8, 9]
    engine.add(Request("again", Tokens(again), params))
    assert run_all(engine)["again"] == greedy(model, again)
    after = engine.stats().reuse
    assert before is not None
    assert after is not None
    assert after.num_hit_tokens - before.num_hit_tokens > 40


@quiet
def test_plain_linears_are_quantized(tmp_path: Path, kernels: KernelSet) -> None:
    model, prompt = save_bridged(tmp_path, "gpt2"), prompts((33,))[0]
    backend = NativeBackend(
        tmp_path, num_blocks=8, threads=1, kernels=lambda threads: kernels, quantizer=RoundToNearest(8)
    )
    ours, theirs = backend.prompt_logits(prompt), reference(model, prompt, 1)[1][0]
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.999
    size = footprint(tmp_path, kernels=lambda threads: kernels, quantizer=RoundToNearest(8))
    assert size.is_bridged
    assert [code.bits for code in size.codes] == [8]
    backend.close()
