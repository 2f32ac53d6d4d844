"""Rows that compute chains and trees of proposed tokens, by every way: the outputs are as without."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError, PlanError
from sagellm.core.plan import Chain, ExecutionPlan
from sagellm.core.protocols.fusion import KernelSet
from sagellm.core.protocols.speculative import Proposal
from sagellm.core.types import SamplingParams
from sagellm.engines.build import build_engine, load
from sagellm.engines.native import attention, matrices
from sagellm.engines.native import backend as native
from sagellm.engines.native.sampler import NO_TOKEN, RowSampler
from tests.bridged_models import save_bridged
from tests.builders import random_tree
from tests.effort import usual
from tests.engines.native.driver import GREEDY, Driver, RecordingBackend, Running
from tests.engines.native.test_recorded_steps import Recorder
from tests.tiny_models import DISTINCT, RECURRENT, TINY_MODELS, VOCAB, save_tiny

PARAMS = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=3, logprobs=2),
    SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=4),
    SamplingParams(
        temperature=0.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.9, logprobs=1
    ),
    SamplingParams(temperature=1.0, seed=5, frequency_penalty=1.5, min_tokens=9, stop_token_ids=(7, 8)),
    SamplingParams(temperature=0.7, seed=6, logit_bias={5: 4.0, 6: -4.0}, logprobs=0),
)


class Proposals:
    """What earlier runs have drawn, in part changed: chains of 1 to 5 tokens, right, wrong and mixed.

    With `trees`, mostly trees of 1 to 9 tokens.
    """

    def __init__(self, answers: Mapping[str, Sequence[int]], seed: int, *, trees: bool = False) -> None:
        self.answers, self.random, self.trees = answers, random.Random(seed), trees

    def __call__(self, sequence: Running) -> Sequence[int] | Proposal:
        done = len(sequence.outputs)
        left = sequence.max_new - done - 1
        if self.trees and left and self.random.random() < 0.7:
            count = self.random.randrange(1, min(10, left + 1))
            return random_tree(self.random, self.answers[sequence.name][done : done + count], VOCAB, count)
        own = list(self.answers[sequence.name][done : done + self.random.randrange(min(6, left + 1))])
        for i in range(len(own)):
            if self.random.random() < 0.15:
                own[i] = (own[i] + 1) % VOCAB
        return own


def generate(
    backend: RecordingBackend,
    propose: Callable[[Running], Sequence[int] | Proposal] = lambda _: (),
    seed: int = 0,
) -> tuple[list[Running], int]:
    """Prompts of 3 to 40 tokens, in chunks, one of them preempted; all kinds of sampling.

    Returns the sequences and the number of steps.
    """
    driver, done = Driver(backend, (10_000, 7), seed=seed, propose=propose), []
    generator = torch.Generator().manual_seed(2)
    for number, params in enumerate(PARAMS):
        prompt = torch.randint(3, VOCAB, (3 + 7 * number,), generator=generator).tolist()
        done.append(driver.add(prompt, 14, params, name=f"r{number}"))
        driver.step()
    driver.preempt(done[-1])
    driver.run()
    backend.execute(ExecutionPlan(0, left=tuple(driver.left)))
    return done, driver.steps


def compare(backend: RecordingBackend, other: RecordingBackend | None = None) -> None:
    plain, num_steps = generate(backend)
    answers = {sequence.name: sequence.outputs for sequence in plain}
    for seed in range(4):
        proposals = Proposals(answers, seed, trees=seed > 1)
        with_chains, fewer_steps = generate(other or backend, proposals, seed)
        assert fewer_steps < 0.8 * num_steps
        for one, two in zip(plain, with_chains, strict=True):
            assert one.outputs == two.outputs
            assert [p.token_id for p in one.logprobs] == [p.token_id for p in two.logprobs]
            for ours, theirs in zip(one.logprobs, two.logprobs, strict=True):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            for logits, reference in zip(one.logits, two.logits, strict=True):
                torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)


def made(folder: Path, kernels: KernelSet | None = None, **options: object) -> RecordingBackend:
    source = None if kernels is None else lambda _: kernels
    return RecordingBackend(
        folder, num_blocks=96, max_num_seqs=6, block_size=8, threads=1, dtype="float32", kernels=source,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("name", usual(set(DISTINCT) - RECURRENT, sorted(TINY_MODELS.keys() - RECURRENT)))
def test_the_same_outputs_by_torch(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    compare(made(tmp_path))


@pytest.mark.parametrize("model_type", ["gpt2", "cohere2"])
def test_the_same_outputs_through_the_bridge(model_type: str, tmp_path: Path) -> None:
    save_bridged(tmp_path, model_type)
    compare(made(tmp_path))


@pytest.fixture(scope="module")
def kernels() -> KernelSet:
    found = cpu_kernels(1)
    if found.attention is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt-oss", "deepseek3-yarn", "opt"])
def test_the_same_outputs_by_kernels(
    name: str, chunks: bool, kernels: KernelSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "kernel_wins_prefill", lambda *_: chunks)
    save_tiny(tmp_path, name)
    own = KernelSet(attention=kernels.attention)
    backend, recorded = made(tmp_path, own), made(tmp_path, own, capture=Recorder())
    for each in (*backend._kv.keys, *backend._kv.values, *recorded._kv.keys, *recorded._kv.values):
        each.fill_(math.nan)  # whatever an earlier owner left must not be read
    compare(backend)
    compare(backend, recorded)


def test_steps_with_chains_are_recorded_by_their_positions(
    kernels: KernelSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "MOST_CPU_ROWS", 8)
    save_tiny(tmp_path, "qwen3")
    recorder = Recorder()
    backend = made(tmp_path, KernelSet(attention=kernels.attention), capture=recorder)
    driver = Driver(backend, propose=lambda _: [1, 2])
    driver.add([5, 6, 7], 9)
    driver.step()
    for replays in (1, 2):
        driver.step()
        assert recorder.replays == replays
    for _ in range(2):
        driver.add([8, 9], 9)
    driver.step()
    driver.step()
    assert recorder.replays == 2, "nine positions are more than eight"


@pytest.mark.parametrize(("name", "is_recorded"), [("qwen3", True), ("gemma3", True), ("llama4", False)])
def test_chains_are_recorded_unless_they_may_leave_an_attention_chunk(
    name: str, is_recorded: bool, kernels: KernelSet, tmp_path: Path
) -> None:
    save_tiny(tmp_path, name)
    recorder = Recorder()
    backend = made(tmp_path, KernelSet(attention=kernels.attention), capture=recorder)
    driver = Driver(backend, propose=lambda _: [1, 2])
    driver.add([5, 6, 7, 8], 9)
    for _ in range(3):
        driver.step()
    assert (recorder.replays > 0) == is_recorded


def test_steps_with_trees_are_recorded_apart(kernels: KernelSet, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    recorder = Recorder()
    backend = made(tmp_path, KernelSet(attention=kernels.attention), capture=recorder)
    tree, replays = Proposal((1, 2, 3), parents=(-1, -1, 0)), []
    driver = Driver(backend, propose=lambda _: tree)
    driver.add([5, 6, 7], 12)
    for _ in range(4):
        driver.step()
        replays.append(recorder.replays)
    tree = Proposal((1, 2, 3))
    for _ in range(2):
        driver.step()
        replays.append(recorder.replays)
    assert replays == [0, 0, 1, 2, 3, 4], "without trees all sizes are recorded at start"


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_by_kernels_a_chain_has_the_bits_of_plain_decoding(
    dtype: str, trees: bool, kernels: KernelSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of a product, and a token's attention without a window, do not depend on what is beside them."""
    monkeypatch.setattr(matrices, "time_kernel", lambda *_: {1: (2.0, 1.0)})
    save_tiny(tmp_path, "qwen3")

    def generated(proposed: Proposals | None, capture: Recorder | None) -> list[Running]:
        backend = RecordingBackend(
            tmp_path, num_blocks=96, max_num_seqs=6, block_size=8, threads=1, dtype=dtype,
            kernels=lambda _: kernels, capture=capture,
        )  # fmt: skip
        driver = Driver(backend, propose=proposed or (lambda _: ()))
        done = [driver.add(list(range(3, 12 + 9 * i)), 30, PARAMS[i], name=f"r{i}") for i in range(3)]
        driver.run()
        return done

    plain = generated(None, None)
    answers = {sequence.name: sequence.outputs for sequence in plain}
    for capture in (None, Recorder()):
        for one, two in zip(plain, generated(Proposals(answers, 1, trees=trees), capture), strict=True):
            assert one.outputs == two.outputs
            assert all(map(torch.equal, one.logits, two.logits))


@pytest.mark.parametrize(
    ("chain", "told"),
    [
        (Chain(1, (5,)), r"rows \[1\] have chains, rows \[0\] decode"),
        (Chain(0, (VOCAB,)), f"tokens are 0 to {VOCAB - 1}"),
        (Chain(0, (-1,)), f"tokens are 0 to {VOCAB - 1}"),
        (Chain(0, ()), "row 0 has a chain"),
        (Chain(0, (1,) * 20), "slots in its blocks"),
        (Chain(0, (1, 2), (-1,)), "row 0 has proposed tokens that are no tree: 2 tokens with 1 parents"),
        (Chain(0, (1, 2), (-1, 1)), "a parent is -1 or an earlier token"),
        (Chain(0, tuple(range(20)), (-1,) * 20), "slots in its blocks"),
    ],
)
def test_a_chain_that_cannot_be_computed_is_refused(chain: Chain, told: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    backend = made(tmp_path)
    driver = Driver(backend)
    sequence = driver.add([5, 6, 7], 9)
    driver.step()
    assert sequence.row >= 0
    position = len(sequence.tokens) - 1
    moved = chain._replace(row=sequence.row + chain.row)
    told = told.replace(r"\[1\]", rf"\[{sequence.row + 1}\]").replace(
        "0\\] decode", f"{sequence.row}\\] decode"
    )
    plan = ExecutionPlan(1, decode_rows=(sequence.row,), decode_positions=(position,), chains=(moved,))
    with pytest.raises(PlanError, match=told.replace("row 0 has", f"row {sequence.row} has")):
        backend.execute(plan)
    driver.run()
    assert len(sequence.outputs) == 9


def test_a_sampler_after_tokens_leaves_the_first_alone() -> None:
    params = SamplingParams(frequency_penalty=1.0, min_tokens=3, stop_token_ids=(4,))
    row = RowSampler.of(params, 1, [5, 6], [7], (), 9, torch.device("cpu"))
    later = row.after((7, 8))
    assert row.counts is not None
    assert later.counts is not None
    assert later.seen is not None
    assert row.counts.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0]
    assert later.counts.tolist() == [0, 0, 0, 0, 0, 0, 0, 2, 1]
    assert later.seen.nonzero()[:, 0].tolist() == [5, 6, 7, 8]
    assert (row.num_outputs, later.num_outputs) == (1, 3)
    assert row.after(()) is row


def test_logits_that_are_no_numbers_end_the_chain(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    backend = made(tmp_path)
    driver = Driver(backend)
    sequence = driver.add([5, 6, 7], 9)
    driver.run()
    answer = sequence.outputs
    driver = Driver(backend, propose=lambda _: answer[1:4])
    driver.add([5, 6, 7], 9)
    driver.step()
    broken, logits = [2], backend._logits

    def with_nan(plan: ExecutionPlan) -> torch.Tensor:
        found = logits(plan).clone()
        found[broken] = math.nan
        return found

    backend._logits = with_nan  # type: ignore[method-assign]
    result = driver.step()
    assert result.token_ids == (*answer[1:3], NO_TOKEN)
    assert result.num_accepted == (2,)


def test_texts_with_a_proposer_are_those_without() -> None:
    """The demo model, greedy and sampled, with stop strings, log-probabilities and several choices."""
    prompts = ["one two one two one two one", "The cat sat. The cat sat. The", "x"]
    settings = {"scheduler.max_num_seqs": 4, "scheduler.max_batched_tokens": 32, "kv.num_blocks": 96}
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.8, seed=3, max_tokens=40, n=3, stop=("t",)),
        SamplingParams(temperature=0.0, max_tokens=40, repetition_penalty=1.1, min_tokens=12),
    ]

    def texts(method: str, overlap: bool, **options: int) -> tuple[list[object], int]:
        llm = load(
            None,
            {
                **settings,
                "speculative.method": method,
                "speculative.method_options": options,
                "engine.overlap": overlap,
                "speculative.adaptive": False,
            },
        )
        found: list[object] = []
        for one in params:
            for completion in llm.generate(prompts, one):
                assert completion.error is None
                for choice in completion.choices:
                    ids = [entry.token_id for entry in choice.logprobs]
                    found.append((choice.text, choice.token_ids, choice.finish_reason, ids))
        counts = llm.diagnostics().speculation
        num_accepted = sum(counts.accepted)
        assert num_accepted <= sum(counts.proposed)
        llm.close()
        return found, num_accepted

    plain, none = texts("none", overlap=False)
    assert none == 0
    for method, overlap in (("prompt_lookup", False), ("prompt_lookup", True), ("suffix", False)):
        found, num_accepted = texts(method, overlap)
        assert found == plain
        assert num_accepted > 20
    for overlap in (False, True):
        found, num_accepted = texts("suffix", overlap, branches=4)
        assert found == plain
        assert num_accepted > 20


@pytest.mark.parametrize("proposed", [(), (9, 8, 7)])
def test_a_prompt_is_scored_beside_a_chain(proposed: tuple[int, ...], tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    backend, prompt = made(tmp_path), [7, 30, 12, 5, 5, 90]
    driver = Driver(backend)
    driver.add(prompt, 3, SamplingParams(temperature=0.0, prompt_logprobs=1), name="scored")
    alone = driver.step()
    driver.run()
    driver = Driver(backend, propose=lambda _: proposed)
    driver.add([5, 6, 7], 9, name="chained")
    driver.step()
    scored = driver.add(prompt, 3, SamplingParams(temperature=0.0, prompt_logprobs=1), name="scored")
    beside = driver.step()
    [entries], found = alone.prompt_logprobs.values(), beside.prompt_logprobs[scored.row]
    assert [entry.token_id for entry in found] == prompt[1:]
    for entry, other in zip(found, entries, strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert beside.token_ids[-1] == alone.token_ids[0]
    assert len(beside.num_accepted) == bool(proposed)


def test_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, min(RECURRENT))
    settings = {"model": {"name": str(tmp_path)}, "kv": {"num_blocks": 32}, "scheduler": {"max_num_seqs": 2}}
    config = Config.model_validate(settings | {"speculative": {"method": "prompt_lookup"}})
    with pytest.raises(ConfigError, match="states of recurrent layers do not go back"):
        build_engine(config)
