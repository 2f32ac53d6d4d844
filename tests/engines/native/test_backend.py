"""The backend as an engine uses it: the same tokens in any batch, from any chunks, after preemption and
failure.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sagellm.core.errors import CapacityError, ConfigError, PlanError
from sagellm.core.plan import BlockCopy, BlockTableDelta, ExecutionPlan, Join, Prefill
from sagellm.core.types import SamplingParams, Tokens
from sagellm.engines.native import options
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.memory import available_bytes, kv_blocks
from tests.engines.native.driver import GREEDY, Driver, RecordingBackend, Running
from tests.engines.native.test_parity import prompts
from tests.tiny_models import save_tiny

CPU = torch.device("cpu")
FANCY = SamplingParams(
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    repetition_penalty=1.3,
    frequency_penalty=0.2,
    min_tokens=4,
    logprobs=3,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistral")
    save_tiny(path, "mistral-window")
    return path


@pytest.fixture
def backend(folder: Path) -> RecordingBackend:
    return RecordingBackend(
        folder, dtype="float64", num_blocks=60, max_num_seqs=5, block_size=4, threads=1, max_model_len=200
    )


def generate(
    backend: RecordingBackend, prompt: list[int], params: SamplingParams, name: str = "r"
) -> Running:
    driver = Driver(backend, scattered=False)
    sequence = driver.add(prompt, 16, params, name=name, eos=frozenset({2}))
    driver.run()
    return sequence


@pytest.mark.parametrize("params", [GREEDY, FANCY], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chunks", [(1,), (3, 5), (4,), (7, 64)])
def test_chunks_batch_and_preemption_change_nothing(
    backend: RecordingBackend, params: SamplingParams, chunks: tuple[int, ...]
) -> None:
    requests = prompts((1, 18, 30, 41))
    alone = [generate(backend, prompt, params, f"r{i}").outputs for i, prompt in enumerate(requests)]
    driver = Driver(backend, chunks, seed=sum(chunks))
    sequences = []
    for i, prompt in enumerate(requests):
        sequences.append(driver.add(prompt, 16, params, name=f"r{i}", eos=frozenset({2})))
        driver.step()
    for _ in range(3):
        for _ in range(driver.random.randint(1, 5)):
            driver.step()
        driver.preempt(driver.random.choice(driver.running))
    driver.run()
    assert [sequence.outputs for sequence in sequences] == alone


def test_seeds(backend: RecordingBackend, folder: Path) -> None:
    prompt, params = prompts((12,))[0], SamplingParams(temperature=1.5)
    unseeded = [generate(backend, prompt, params, name).outputs for name in ("a", "b", "a")]
    assert unseeded[0] == unseeded[2] != unseeded[1]
    seeded = [
        generate(backend, prompt, dataclasses.replace(params, seed=5), name).outputs for name in ("a", "b")
    ]
    assert seeded[0] == seeded[1]
    other = RecordingBackend(folder, dtype="float64", num_blocks=60, threads=1, seed=1)
    assert generate(other, prompt, params, "a").outputs != unseeded[0]
    assert generate(other, prompt, dataclasses.replace(params, seed=5), "a").outputs == seeded[0]


def test_min_tokens_hold_the_end_back(backend: RecordingBackend) -> None:
    always = SamplingParams(temperature=0.0, logit_bias={2: 100.0}, min_tokens=3)
    outputs = generate(backend, prompts((9,))[0], always).outputs
    assert 2 not in outputs[:3]
    assert outputs[3] == 2


def test_logprobs_are_those_of_the_reported_logits(backend: RecordingBackend) -> None:
    sequence = generate(backend, prompts((9,))[0], FANCY)
    assert len(sequence.logprobs) == 16
    for token, entry, logits in zip(sequence.outputs, sequence.logprobs, sequence.logits, strict=True):
        expected = logits.log_softmax(-1)
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(expected[token]))
        assert [i for i, _ in entry.top] == expected.topk(3).indices.tolist()


@pytest.mark.parametrize("failing_step", [0, 1, 2, 5])
def test_a_failed_step_can_be_repeated(backend: RecordingBackend, failing_step: int) -> None:
    prompt = prompts((11,))[0]
    expected = generate(backend, prompt, FANCY).outputs
    driver = Driver(backend, (6,))
    sequence = driver.add(prompt, 16, FANCY, name="r", eos=frozenset({2}))
    while not sequence.done:
        if driver.steps == failing_step:
            failing_step = -1
            plan, chunks = driver._plan()
            backend.fail_with = RuntimeError("kernel exploded")
            with pytest.raises(RuntimeError, match="exploded"):
                backend.execute(plan)
            result = backend.execute(plan)
            driver._commit(plan, chunks, result)
        else:
            driver.step()
    assert sequence.outputs == expected


def test_a_failed_row_can_join_again_and_others_are_untouched(backend: RecordingBackend) -> None:
    requests = prompts((11, 17))
    expected = [generate(backend, prompt, GREEDY).outputs for prompt in requests]
    driver = Driver(backend, (6,))
    first, second = (driver.add(prompt, 16, GREEDY) for prompt in requests)
    for _ in range(5):
        driver.step()
    plan, _ = driver._plan()
    backend.fail_with = RuntimeError("kernel exploded")
    with pytest.raises(RuntimeError, match="exploded"):
        backend.execute(plan)
    driver.preempt(first)
    driver.preempt(second)
    driver.run()
    assert [first.outputs, second.outputs] == expected


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        MemoryError("no more"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:128] DefaultCPUAllocator: can't allocate memory: you tried"
        ),
    ],
)
def test_out_of_memory_is_a_capacity_error(backend: RecordingBackend, error: Exception) -> None:
    driver = Driver(backend)
    driver.add([3, 4, 5], 2)
    backend.fail_with = error
    with pytest.raises(CapacityError, match="out of memory on cpu"):
        driver.step()


def test_blocks_shared_between_rows(backend: RecordingBackend) -> None:
    """A prefix that one request computed serves another: its table starts with the same blocks."""
    prompt = prompts((19,))[0]
    tail = [7, 8, 9]
    expected = generate(backend, prompt[:16] + tail, GREEDY).outputs[0]
    first = Join(0, "a", Tokens(prompt).tobytes(), 19, 0, (9, 3, 5, 7, 1), GREEDY, frozenset())
    backend.execute(ExecutionPlan(0, joined=(first,), prefills=(Prefill(0, "a", 0, 19, True),)))
    both = prompt[:16] + tail
    second = Join(3, "b", Tokens(both).tobytes(), 19, 16, (9, 3, 5, 7, 2), GREEDY, frozenset())
    result = backend.execute(ExecutionPlan(1, joined=(second,), prefills=(Prefill(3, "b", 16, 3, True),)))
    assert result.token_ids == (expected,)


def test_copied_blocks_serve_as_the_originals(backend: RecordingBackend) -> None:
    prompt = prompts((10,))[0]
    expected = generate(backend, prompt, GREEDY).outputs
    join = Join(0, "a", Tokens(prompt).tobytes(), 10, 0, (0, 1, 2), GREEDY, frozenset())
    backend.execute(ExecutionPlan(0, joined=(join,), prefills=(Prefill(0, "a", 0, 10, True),)))
    copies = tuple(BlockCopy(i, 40 - i) for i in range(3))
    moved = BlockTableDelta(0, 0, (40, 39, 38))
    result = backend.execute(
        ExecutionPlan(1, table_deltas=(moved,), copies=copies, decode_rows=(0,), decode_positions=(10,))
    )
    assert result.token_ids == (expected[1],)
    for missing in (BlockCopy(0, 1 << 20), BlockCopy(-1, 0)):
        with pytest.raises(PlanError, match="the device has"):
            backend.execute(ExecutionPlan(2, copies=(missing,)))


def test_plans_that_cannot_be(backend: RecordingBackend) -> None:
    def refused(words: str, **parts: object) -> None:
        with pytest.raises(PlanError, match=words):
            backend.execute(ExecutionPlan(0, **parts))  # type: ignore[arg-type]

    join = Join(0, "a", Tokens([1, 2, 3, 4, 5]).tobytes(), 5, 0, (0,), GREEDY, frozenset())
    refused("row 4", decode_rows=(4,), decode_positions=(0,))
    refused("row 7", joined=(replace(join, row=7),))
    refused("outside the pool", joined=(replace(join, block_ids=(60,)),))
    refused("outside the vocabulary", joined=(replace(join, tokens=Tokens([257]).tobytes()),))
    refused("4 slots in its blocks", joined=(join,), prefills=(Prefill(0, "a", 0, 5, False),))
    refused("5 tokens", table_deltas=(BlockTableDelta(0, 1, (1,)),), decode_rows=(0,), decode_positions=(5,))
    refused("grows at block 5", table_deltas=(BlockTableDelta(0, 5, (1,)),))
    long = replace(
        join, tokens=Tokens([1] * 220).tobytes(), num_prompt_tokens=220, block_ids=tuple(range(55))
    )
    refused("200 positions", joined=(long,), prefills=(Prefill(0, "a", 0, 220, False),))


def test_a_plan_without_work(backend: RecordingBackend) -> None:
    assert backend.execute(ExecutionPlan(7, left=(0, 1))).token_ids == ()


def test_capability_describes_the_pool(backend: RecordingBackend) -> None:
    capability = backend.capability()
    assert (capability.num_blocks, capability.block_size, capability.max_num_seqs) == (60, 4, 5)
    assert (capability.dtype, capability.vocab_size, capability.max_model_len) == ("float64", 257, 200)
    schema = backend.get_kv_schema()
    assert capability.kv_schema == schema
    assert schema.bytes_per_token == 2 * 3 * 2 * 64 * 8
    assert capability.memory_bytes == 60 * schema.bytes_per_block
    backend.close()


def test_the_pool_is_sized_by_memory_and_by_use(folder: Path) -> None:
    made = NativeBackend(folder, threads=1, max_num_seqs=2, max_model_len=100)
    assert made.capability().num_blocks == 2 * 7
    small = NativeBackend(folder, threads=1, kv_memory_bytes=10 * made.get_kv_schema().bytes_per_block + 1)
    assert small.capability().num_blocks == 10
    with pytest.raises(CapacityError, match=r"hold no block of 49,152 bytes.*at least 49,152"):
        NativeBackend(folder, threads=1, kv_memory_bytes=1000)
    available = available_bytes(CPU)
    assert 1 << 20 < available < 1 << 50
    assert kv_blocks(CPU, 1 << 10, 1 << 40, None, 0.5, available) == pytest.approx(available >> 11, rel=0.5)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"dtype": "int4"}, "int4.*bfloat16"),
        ({"compute_dtype": "half"}, "half.*float16"),
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"max_model_len": 513}, "513.*512"),
        ({"device": "warp9"}, "warp9.*cpu"),
    ],
)
def test_options_that_make_no_sense(folder: Path, option: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        NativeBackend(folder, threads=1, **option)  # type: ignore[arg-type]


def test_a_block_lies_in_one_chunk_of_attention(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama4-text-part")
    with pytest.raises(ConfigError, match=r"block_size 12 does not divide .* 32 tokens .*; 16 does"):
        NativeBackend(tmp_path, device="cpu", num_blocks=8, threads=1, block_size=12)


def test_half_precision_is_computed_in_float32_where_that_is_faster(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options.fastest_dtype(torch.float32, CPU, 10) == torch.float32
    assert options.fastest_dtype(torch.bfloat16, CPU, 1 << 50) == torch.bfloat16
    for seconds, expected in ((5.0, "float32"), (1.0, "bfloat16")):
        monkeypatch.setattr(options, "recorded", lambda *_, seconds=seconds: (seconds, 1.0))
        made = NativeBackend(folder, dtype="bfloat16", num_blocks=2, threads=1)
        assert made.capability().dtype == "bfloat16"
        assert made.get_kv_schema().dtype == expected


@pytest.mark.parametrize("name", ["llama", "opt-post-norm-projected", "qwen3-head80-window"])
def test_bfloat16_is_close_to_float32(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    logits = []
    for dtype in ("float32", "bfloat16"):
        made = RecordingBackend(tmp_path, dtype=dtype, compute_dtype=dtype, num_blocks=16, threads=1)
        logits.append(
            torch.stack(generate(made, prompts((30,))[0], replace(GREEDY, max_tokens=1)).logits[:1])
        )
    exact, rounded = logits
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=-1).min() > 0.99
