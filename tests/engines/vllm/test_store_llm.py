"""The store in vLLM's `LLM` on a CPU, with a random model: no token changes, and a restart is warm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

from sagellm.benchmarks.engine.shapes import shape_named, write_model
from tests.engines.vllm.llm_run import generated
from tests.engines.vllm.store_world import store_config

pytestmark = [
    pytest.mark.peer,
    pytest.mark.slow,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="needs vLLM's CPU build"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(shape_named("tiny"), folder)
    return folder


@pytest.fixture(scope="module")
def stock(model: Path) -> tuple[list[list[int]], int]:
    """Tokens of the answers, and reused tokens of prompts."""
    return generated(model, None)[:2]


def test_host_memory_beside_our_eviction_policy(model: Path, stock: tuple[Any, int]) -> None:
    guide = {
        "kv_connector": "SageConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"mode": "on"},
    }
    both = {"connectors": [guide, store_config(host_gb=0.2)]}
    tokens, num_cached, _ = generated(model, store_config(**both) | {"kv_connector": "MultiConnector"})
    assert tokens == stock[0]
    assert num_cached > 2 * stock[1]


def test_a_disk_after_kill_damage_and_with_other_weights(
    model: Path, stock: tuple[Any, int], tmp_path: Path
) -> None:
    config = store_config(disk_gb=0.2, dir=str(tmp_path / "kv"))
    tokens, num_cached, _ = generated(model, config, dies=True)
    assert tokens == stock[0]
    assert num_cached > 2 * stock[1]
    (slab,) = (tmp_path / "kv").rglob("slab*")
    with slab.open("r+b") as file:
        file.seek(3 * (4096 + 65_536) + 5000)
        file.write(b"damage")
    tokens, num_warm, log = generated(model, config)
    assert tokens == stock[0]
    assert num_warm > num_cached + 9 * 96  # also the first turn of each session
    assert "blocks from before" in log
    assert "Recovered from KV load failure" in log
    other = tmp_path / "other"
    other.mkdir()
    write_model(shape_named("tiny"), other, seed=1)
    changed, num_changed, log = generated(other, config)
    assert changed != stock[0]
    assert num_changed == num_cached
    assert "starts empty" in log


def test_weights_that_are_reloaded(model: Path, stock: tuple[Any, int], tmp_path: Path) -> None:
    """No KV of the one weights is used with the others, nor after a restart."""
    other, config = tmp_path / "other", store_config(disk_gb=0.2, dir=str(tmp_path / "kv"))
    other.mkdir()
    write_model(shape_named("tiny"), other, seed=1)
    expected = generated(model, None, reloaded=other)[0]
    tokens, _, log = generated(model, config, reloaded=other)
    assert tokens == expected
    assert tokens[:18] == stock[0][:18]
    assert tokens[18:] != stock[0][18:]
    assert log.count("weights were replaced") == 1
    tokens, num_warm, log = generated(model, config)
    assert tokens == stock[0]
    assert num_warm > 2 * stock[1]
    assert "blocks from before" in log
