"""A model with recurrent states over HTTP: a second turn begins where a state was kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from sagellm.engines.build import load
from tests.serving.live import serving
from tests.tiny_models import save_tiny
from tests.toy_tokenizers import byte_level


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
def test_a_second_turn_is_the_same_and_reuses_the_first(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    settings = {"kv.num_blocks": 96, "kv.block_size": 4, "model.dtype": "float32"}
    first = {"prompt": list(range(1, 40)), "max_tokens": 8, "temperature": 0}
    with serving(load(str(tmp_path), settings | {"kv.prefix_caching": False})) as live:
        expected = live.http.post("/v1/completions", json=first).json()["choices"][0]["text"]
        second = first | {"prompt": [*range(1, 40), *range(50, 60)]}
        second_expected = live.http.post("/v1/completions", json=second).json()["choices"][0]["text"]
    with serving(load(str(tmp_path), settings)) as live:
        for body, text, cached in (
            (first, expected, 0),
            (first, expected, 36),
            (second, second_expected, 36),
        ):
            answer = live.http.post("/v1/completions", json=body).json()
            assert answer["choices"][0]["text"] == text
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert live.metric("sagellm_kv_checkpoints") > 0
