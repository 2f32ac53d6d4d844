"""KV of tokens copied to other positions, beside a slow twin that moves one token at a time."""

from __future__ import annotations

import cmath
import random
from pathlib import Path

import pytest
import torch

from sagellm.core.errors import PlanError, UnsupportedModelError
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.model import DecoderModel
from sagellm.engines.native.rope import inverse_frequencies
from sagellm.engines.native.token_copies import TokenCopier, plain_attention
from tests.tiny_models import save_tiny

PLAIN = (
    "llama", "llama-head80-tied", "rope-linear", "rope-llama3", "rope-yarn", "qwen3", "phi3-longrope-partial",
    "glm", "olmo2",
)  # fmt: skip
OTHERS = (
    "opt", "mistral-window", "gpt-oss", "qwen3-next", "deepseek2", "rope-dynamic", "gemma2", "llama4",
    "smollm3", "gemma4",
)  # fmt: skip
BLOCK, NUM_BLOCKS = 4, 32


def backend_of(folder: Path, name: str, dtype: str = "float32") -> NativeBackend:
    save_tiny(folder, name)
    return NativeBackend(
        folder, device="cpu", dtype=dtype, compute_dtype=dtype, block_size=BLOCK, num_blocks=NUM_BLOCKS,
        max_num_seqs=1,
    )  # fmt: skip


def slow_copy(
    model: DecoderModel, kv: PagedKV, sources: list[int], targets: list[int], distance: int
) -> None:
    """One token, one head, one pair of numbers at a time, in double precision."""
    before = [(keys.clone(), values.clone()) for keys, values in zip(kv.keys, kv.values, strict=True)]
    rows = [
        (divmod(source, BLOCK), divmod(target, BLOCK))
        for source, target in zip(sources, targets, strict=True)
    ]
    for layer, (keys, values) in enumerate(before):
        angles = inverse_frequencies(model._ropes[plain_attention(model._layers[layer]).rope]._spec).tolist()
        for (block, at), (new_block, new_at) in rows:
            kv.values[layer][new_block, new_at] = values[block, at]
            for head, key in enumerate(keys[block, at].double()):
                half = len(key) // 2
                for i, angle in enumerate([*angles, *[0.0] * (half - len(angles))]):
                    turned = complex(key[i], key[i + half]) * cmath.exp(1j * angle * distance)
                    kv.keys[layer][new_block, new_at, head, i] = turned.real
                    kv.keys[layer][new_block, new_at, head, i + half] = turned.imag


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", PLAIN)
def test_it_copies_what_its_slow_twin_copies(name: str, dtype: str, tmp_path: Path) -> None:
    backend = backend_of(tmp_path, name, dtype)
    draw, kv = random.Random(name), backend._kv
    copier = backend.token_copier()
    assert isinstance(backend._model, DecoderModel)
    for distance in (-7, 0, 1, 90):
        for pool in kv._pools:
            pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(distance)))
        kept = [pool.clone() for pool in kv._pools]
        blocks = draw.sample(range(NUM_BLOCKS), 12)
        source_at, target_at, size = draw.randrange(9), draw.randrange(9), draw.randrange(1, 14)
        sources = [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(source_at, source_at + size)]
        targets = [blocks[6 + at // BLOCK] * BLOCK + at % BLOCK for at in range(target_at, target_at + size)]
        copier.copy(sources, targets, distance)
        found = [pool.clone() for pool in kv._pools]
        for pool, before in zip(kv._pools, kept, strict=True):
            pool.copy_(before)
        last, first_of_last = targets[-1] // BLOCK, targets[-1] // BLOCK * BLOCK
        if first_of_last in targets:
            kv.clear_blocks([last])
        slow_copy(backend._model, kv, sources, targets, distance)
        for ours, theirs in zip(found, kv._pools, strict=True):
            torch.testing.assert_close(ours, theirs)
    backend.close()


@pytest.mark.parametrize("name", ["llama", "phi3-longrope-partial", "glm"])
def test_a_rotated_key_is_the_computed_one(name: str, tmp_path: Path) -> None:
    """In the first layer KV depends on the token and its position alone."""
    backend = backend_of(tmp_path, name)
    kv, text = backend._kv, [5, 9, 200, 31, 7, 90]
    for prompt, block in (([1, 2, 3, *text], 0), ([4, 4, 4, 8, 8, 8, 8, 8, *text], 8)):
        backend.prompt_logits(prompt)
        kv.copy_blocks([])
        for pool in kv._pools:
            pool[block + 4 : block + 8] = pool[:4]
    backend.token_copier().copy(range(4 * BLOCK + 3, 4 * BLOCK + 9), range(20 * BLOCK, 20 * BLOCK + 6), 5)
    moved = kv.keys[0].flatten(0, 1)[20 * BLOCK : 20 * BLOCK + 6]
    torch.testing.assert_close(
        moved, kv.keys[0].flatten(0, 1)[12 * BLOCK + 8 : 12 * BLOCK + 14], atol=1e-5, rtol=1e-5
    )
    backend.close()


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_refused(name: str, tmp_path: Path) -> None:
    backend = backend_of(tmp_path, name)
    with pytest.raises(UnsupportedModelError):
        backend.token_copier()
    backend.close()


def test_wrong_slots_change_nothing(tmp_path: Path) -> None:
    backend = backend_of(tmp_path, "llama")
    copier = TokenCopier(backend._model, backend._kv)
    for sources, targets in (([0], [0]), ([0], [BLOCK * NUM_BLOCKS]), ([-1], [4]), ([0, 1], [4]), ([], [])):
        with pytest.raises(PlanError):
            copier.copy(sources, targets, 1)
    assert not any(pool.any() for pool in backend._kv._pools)
    with pytest.raises(UnsupportedModelError, match="transformers"):
        TokenCopier(object(), backend._kv)
    backend.close()
