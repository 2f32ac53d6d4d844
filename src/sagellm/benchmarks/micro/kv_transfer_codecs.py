"""Section e of `sagellm bench micro kv_transfer`: the codecs of KV.

All KV is bfloat16: blocks of 1 MB of a normal distribution; and texts that the demo model writes, in chunks
of 1 MB as transfers have them, and block by block as tiers have them. Speeds are MB of KV per second of CPU
time of one thread, the best round. `max error` is relative to the largest number of a block, `rms error` to
the root mean square of all numbers.

Then the demo model continues texts greedily whose KV went through a codec: how many of the tokens are those
without it, up to the first other one, and how much the log-probability of the first changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.benchmarks.micro.cases import MicroBenchPlan, MicroBenchRow, Stopwatch
from sagellm.core.protocols.kv_tiers import KVCodec
from sagellm.core.protocols.kv_transfer import BlockLayout
from sagellm.core.types import MAX_LOGPROBS, Namespace, Request, SamplingParams, Tokens
from sagellm.engines.build_kv import block_layout
from sagellm.engines.engine import Engine
from sagellm.kvmgr.kv_pool.tiers.codecs import CODECS

DTYPE, CHUNK_BYTES = "bfloat16", 1 << 20
LAYOUT = BlockLayout("kv.layer.token.head.dim", 32, 4, 128, 16, DTYPE)
"""Of blocks of 1 MB."""
NORMAL, DEMO, ALONE = "normal numbers", "demo model", "demo model, block by block"
SHARE, MAX_ERROR, RMS_ERROR = "of bfloat16", "max error", "rms error"
ENCODE, DECODE = "encode MB/s", "decode MB/s"
SAME, CHANGE = "same tokens", "change of logprob"
TEXT_TOKENS, NEW_TOKENS = 256, 32


class Sample(NamedTuple):
    """KV as buffers that are encoded each by itself."""

    name: str
    layout: BlockLayout
    buffers: Sequence[bytes]


def codecs(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    """Section e. Without torch only of normal numbers."""
    num_mb = max(2, plan.moved_mb // 32)
    samples = [Sample(NORMAL, LAYOUT, _normal_blocks(num_mb, plan.seed))]
    texts = None
    with ExitStack() as stack:
        if find_spec("torch") is not None:
            texts = stack.enter_context(closing(DemoTexts(max(4, plan.moved_mb // 16), plan.seed)))
            samples += texts.samples(num_mb)
        for name in CODECS.names():
            if name == "raw":
                continue  # it copies nothing
            for sample in samples:
                codec = CODECS.create(name, dtype=DTYPE, layout=sample.layout)
                yield from _measured(codec, sample, plan.rounds)
            if texts is not None:
                yield from _continued(CODECS.create(name, dtype=DTYPE, layout=texts.layout), texts)


def _continued(codec: KVCodec, texts: DemoTexts) -> Iterator[MicroBenchRow]:
    for unit, value in zip((SAME, CHANGE), texts.continued_after(codec), strict=True):
        yield MicroBenchRow("e", f"{codec.name}, continued", texts.count, "", unit, round(value, 5))


def _measured(codec: KVCodec, sample: Sample, rounds: int) -> Iterator[MicroBenchRow]:
    stored = [bytes(codec.encode(data)) for data in sample.buffers]
    target = memoryview(bytearray(max(map(len, sample.buffers))))
    total = sum(map(len, sample.buffers))

    def encode() -> None:
        for data in sample.buffers:
            codec.encode(data)

    def decode() -> None:
        for data, encoded in zip(sample.buffers, stored, strict=True):
            codec.decode(encoded, target[: len(data)])

    largest, rms = _errors(codec, sample, stored)
    values = {
        SHARE: round(sum(map(len, stored)) / total, 4), ENCODE: round(_best_mb_s(encode, total, rounds)),
        DECODE: round(_best_mb_s(decode, total, rounds)), MAX_ERROR: round(largest, 5),
        RMS_ERROR: round(rms, 5),
    }  # fmt: skip
    for unit, value in values.items():
        yield MicroBenchRow("e", f"{codec.name}, {sample.name}", len(stored), "", unit, value)


def _best_mb_s(run: Callable[[], None], num_bytes: int, rounds: int) -> float:
    """Other programs only slow a round down."""
    seconds = []
    for _ in range(rounds):
        began_s = time.thread_time()
        run()
        seconds.append(time.thread_time() - began_s)
    return num_bytes / max(min(seconds), 1e-9) / 1e6


def _errors(codec: KVCodec, sample: Sample, stored: Sequence[bytes]) -> tuple[float, float]:
    """The largest error and the root mean square.

    The first is relative to its block's largest number, the second to the root mean square of all numbers.
    """
    largest, squares, of_errors = 0.0, 0.0, 0.0
    for data, encoded in zip(sample.buffers, stored, strict=True):
        target = bytearray(len(data))
        codec.decode(encoded, memoryview(target))
        before, after = _numbers(data), _numbers(target)
        errors = np.abs(after - before)
        rows = -1, sample.layout.bytes_per_block // 2
        most = np.abs(before).reshape(rows).max(axis=1)
        largest = max(largest, float((errors.reshape(rows).max(axis=1) / np.where(most == 0, 1, most)).max()))
        squares += float(np.square(before).sum())
        of_errors += float(np.square(errors).sum())
    return largest, (of_errors / squares) ** 0.5


def _numbers(data: bytes | bytearray) -> npt.NDArray[np.float64]:
    """Of bfloat16, the upper half of a float32."""
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)


def _normal_blocks(count: int, seed: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((count, LAYOUT.bytes_per_block // 2), np.float32)
    return [(block.view("<u4") >> 16).astype("<u2").tobytes() for block in numbers]


class DemoTexts:
    """Texts of the demo model, whose KV is cached in an engine."""

    def __init__(self, count: int, seed: int) -> None:
        from sagellm.engines.build import build_engine, load_config
        from sagellm.engines.native import DEMO_MODEL
        from sagellm.engines.native.tokenizer import Tokenizer

        settings = {
            "kv.num_blocks": 64 + 4 * count * TEXT_TOKENS // LAYOUT.block_size,
            "kv.block_size": LAYOUT.block_size,
            "engine.backend_options": {"compute_dtype": DTYPE},
        }
        self._engine: Engine = build_engine(load_config(cli=settings, environ={}).config)
        layout = block_layout(self._engine.backend)
        assert layout is not None
        self.layout, self.count = layout, count
        backend: Any = self._engine.backend
        self._memory = backend.kv_bytes()
        tokenizer, rng = Tokenizer.from_folder(DEMO_MODEL), np.random.default_rng(seed)
        asked = [f"What is {a} + {b}?" for a, b in rng.integers(10, 999, (count, 2)).tolist()]
        prompts = [list(tokenizer.encode_chat([{"role": "user", "content": text}])) for text in asked]
        drawn = self._ask(prompts, TEXT_TOKENS + 1, temperature=1.0)
        self._texts = [
            (prompt + tokens)[: TEXT_TOKENS + 1] for prompt, (tokens, _) in zip(prompts, drawn, strict=True)
        ]
        self._exact = self._ask(self._texts, NEW_TOKENS)
        self._kv = [self._read(text) for text in self._texts]

    def close(self) -> None:
        self._engine.close()

    def samples(self, num_mb: int) -> list[Sample]:
        """At most `num_mb` MB of KV, in chunks and block by block."""
        size = self.layout.bytes_per_block
        per_chunk = CHUNK_BYTES // size
        data = b"".join(self._kv)[: num_mb * per_chunk * size]
        chunks = [data[at : at + per_chunk * size] for at in range(0, len(data), per_chunk * size)]
        blocks = [data[at : at + size] for at in range(0, len(data), size)]
        return [Sample(DEMO, self.layout, chunks), Sample(ALONE, self.layout, blocks)]

    def continued_after(self, codec: KVCodec) -> tuple[float, float]:
        """The share of equal tokens, and the mean change of the first one's log-probability."""
        for text, data in zip(self._texts, self._kv, strict=True):
            target = bytearray(len(data))
            codec.decode(codec.encode(data), memoryview(target))
            self._memory.write_blocks(self._block_ids(text), target)
        found = self._ask(self._texts, NEW_TOKENS)
        for text, data in zip(self._texts, self._kv, strict=True):
            self._memory.write_blocks(self._block_ids(text), data)
        num_same, changes = 0, []
        for (tokens, logprobs), (others, of_others) in zip(self._exact, found, strict=True):
            equal = [ours == theirs for ours, theirs in zip(tokens, others, strict=True)]
            num_same += (*equal, False).index(False)
            first = tokens[0]
            changes.append(abs(of_others.get(first, min(of_others.values())) - logprobs[first]))
        return num_same / (self.count * NEW_TOKENS), float(np.mean(changes))

    def _block_ids(self, text: list[int]) -> Sequence[int]:
        index = self._engine.kv.index
        return list(index.block_ids(index.lookup(Tokens(text), Namespace(), TEXT_TOKENS)))

    def _read(self, text: list[int]) -> bytes:
        ids = self._block_ids(text)
        target = bytearray(len(ids) * self._memory.bytes_per_block)
        self._memory.read_blocks(ids, memoryview(target))
        return bytes(target)

    def _ask(
        self, prompts: Sequence[list[int]], num_tokens: int, temperature: float = 0.0
    ) -> list[tuple[list[int], dict[int, float]]]:
        """Of each prompt the tokens that follow.

        With them the best log-probabilities at the first.
        """
        found: dict[str, tuple[list[int], dict[int, float]]] = {}
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=temperature, seed=number, max_tokens=num_tokens, ignore_eos=True,
                logprobs=MAX_LOGPROBS,
            )  # fmt: skip
            self._engine.add(Request(str(number), Tokens(prompt), params))
            found[str(number)] = [], {}
        while self._engine.has_work():
            for output in self._engine.step():
                tokens, best = found[output.request_id]
                if output.logprobs and not tokens:
                    best.update(output.logprobs[0].top)
                tokens += output.new_token_ids
        return list(found.values())
