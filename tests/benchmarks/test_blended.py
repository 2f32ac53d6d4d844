"""KV from elsewhere, blended: with all of it recomputed, or all of it exact, the logits are the engine's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.blend_error import Prompt, at_random, at_starts, by_deviation, cached_kv, load
from benchmarks.blended import BlendModel, LayerKV, joined, part_of
from sagellm.core.errors import UnsupportedModelError
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.backend import NativeBackend
from tests.tiny_models import save_tiny

PLAIN = (
    "llama", "llama-biases", "llama-head80-tied", "rope-linear", "rope-llama3", "rope-yarn", "mistral-full",
    "qwen3", "qwen3-moe", "mixtral", "phi3-longrope-partial", "glm", "olmo2",
)  # fmt: skip
OTHERS = (
    "opt", "mistral-window", "gpt-oss", "qwen3-next", "deepseek2", "rope-dynamic", "gemma2", "llama4",
    "smollm3", "gemma4",
)  # fmt: skip
CONTEXT = [5, 9, 200, 31, 7, 7, 90, 14, 61, 3, 77, 150]
END = [8, 120, 33]


def backend_of(folder: Path, name: str) -> NativeBackend:
    save_tiny(folder, name)
    return NativeBackend(folder, device="cpu", dtype="float64", num_blocks=32, max_num_seqs=1)


@pytest.fixture(scope="module", params=PLAIN)
def pair(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[BlendModel, NativeBackend]]:
    backend = backend_of(tmp_path_factory.mktemp(request.param), request.param)
    yield BlendModel(backend._model), backend  # type: ignore[arg-type]
    backend.close()


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=1e-5)


def test_exact_kv_gives_the_logits_of_the_engine(pair: tuple[BlendModel, NativeBackend]) -> None:
    model, backend = pair
    found = model.logits([*CONTEXT, *END], model.kv_of(CONTEXT), len(CONTEXT), None)
    assert sum(found.num_computed) == 0
    for at in range(len(END)):
        close(found.logits[at], backend.prompt_logits([*CONTEXT, *END[: at + 1]]))


def test_computing_all_of_it_again_repairs_any_kv(pair: tuple[BlendModel, NativeBackend]) -> None:
    model, backend = pair
    exact = model.kv_of(CONTEXT)
    wrong = [LayerKV(torch.cat([k[:4], k[4:] + 9.0]), torch.cat([v[:4], v[4:] - 9.0])) for k, v in exact]
    found = model.logits([*CONTEXT, *END], wrong, 4, by_deviation(1.0))
    assert set(found.num_computed) == {len(CONTEXT) - 4}
    close(found.logits[-1], backend.prompt_logits([*CONTEXT, *END]))
    spoilt = model.logits([*CONTEXT, *END], wrong, 4, None).logits[-1]
    assert not torch.allclose(spoilt.float(), found.logits[-1].float(), atol=1e-3)


def test_keys_are_rotated_to_their_new_position(pair: tuple[BlendModel, NativeBackend]) -> None:
    """In the first layer KV depends on token and position alone."""
    model, _ = pair
    old = part_of(model.kv_of([1, 2, 3, *END]), 3)
    for distance in (-3, 0, 7):
        before = CONTEXT[: 3 + distance]
        new = part_of(model.kv_of([*before, *END]), len(before))
        moved = model.moved(old, distance)
        close(moved[0].keys, new[0].keys)
        close(moved[0].values, new[0].values)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_refused(name: str, tmp_path: Path) -> None:
    backend = backend_of(tmp_path, name)
    with pytest.raises(UnsupportedModelError):
        BlendModel(backend._model)  # type: ignore[arg-type]
    backend.close()


def test_a_share_is_computed_behind_the_first_layer(pair: tuple[BlendModel, NativeBackend]) -> None:
    model, _ = pair
    for choose in (by_deviation(0.3), at_random(0.3), at_starts(0.3, [2, 7])):
        found = model.logits([*CONTEXT, *END], model.kv_of(CONTEXT), 2, choose)
        assert found.num_computed[0] == 10
        assert set(found.num_computed[1:]) == {math.ceil(0.3 * 10)}
        close(found.logits, model.logits([*CONTEXT, *END], model.kv_of(CONTEXT), 12, None).logits)


def test_which_tokens_are_chosen() -> None:
    rows, deviation = torch.arange(2, 10), torch.tensor([1.0, 9, 2, 8, 3, 7, 4, 6])
    assert by_deviation(0.25)(1, rows, deviation).nonzero().flatten().tolist() == [1, 3]
    assert by_deviation(0.25)(2, rows, deviation).all()
    assert sorted(rows[at_starts(0.5, [2, 7])(1, rows, deviation)].tolist()) == [2, 3, 7, 8]
    assert int(at_random(0.5)(1, rows, deviation).sum()) == 4


def test_sources_of_the_demo_model() -> None:
    model, backend, _ = load(DEMO_MODEL)
    prompt = Prompt([[5, 6, 7], [8, 9], [10, 11, 12]], list(range(20, 60)), [3])
    other = Prompt([[90, 91]], [], [])
    exact = model.kv_of([5, 6, 7, 8, 9, 10, 11, 12])
    for source, size in (("alone", 8), ("behind", 8), ("moved", 8), ("slices", 3 + 5 + 40 - 16)):
        kv = cached_kv(model, prompt, other, source)
        assert {len(part) for layer in kv for part in layer} == {size}
        close(kv[0].keys[:8], exact[0].keys)
        close(kv[-1].keys[:3], exact[-1].keys[:3])
    stale = cached_kv(model, prompt, other, "alone", rotated=False)
    assert not torch.allclose(stale[0].keys[3:8], exact[0].keys[3:8], atol=1e-3)
    assert len(joined([exact, exact])[0].keys) == 16
    backend.close()
