"""What eviction policies weigh on the native backend: what it measured, and a request's goal and priority."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sagellm.core.config import Config, KVConfig, ModelConfig
from sagellm.core.types import SLO, Tokens
from sagellm.engines.build import build_engine
from sagellm.engines.engine import Engine
from sagellm.engines.native.backend import NativeBackend
from sagellm.kvmgr.eviction import PrefillCostModel
from tests.builders import request, run_all
from tests.tiny_models import save_tiny

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "qwen3")
    return path


def native_engine(folder: Path, policy: str, num_blocks: int = 64) -> Engine:
    return build_engine(
        Config(
            model=ModelConfig(name=str(folder), device="cpu"),
            kv=KVConfig(eviction=policy, block_size=BLOCK_SIZE, num_blocks=num_blocks),
        )
    )


@pytest.fixture
def engines(folder: Path) -> Iterator[dict[str, Engine]]:
    made = {name: native_engine(folder, name) for name in ("cost_benefit", "slo", "lru")}
    yield made
    for engine in made.values():
        engine.close()


def policy_of(engine: Engine) -> Any:
    index: Any = engine.kv.index
    return index._leaves.default_share.policy


def test_policies_get_what_the_native_backend_measured(engines: dict[str, Engine]) -> None:
    for name in ("cost_benefit", "slo"):
        engine = engines[name]
        assert isinstance(engine.backend, NativeBackend)
        said, spec = engine.backend.capability(), engine.backend.spec
        assert said.prefill_token_s > 0
        heads, layers = spec.num_heads * spec.head_dim, spec.num_layers
        assert 0 < said.prefill_token_squared_s / said.prefill_token_s < 4 * layers * heads
        bytes_per_block = 2 * layers * spec.num_kv_heads * spec.head_dim * 4 * BLOCK_SIZE  # float32
        assert policy_of(engine)._model == PrefillCostModel(
            BLOCK_SIZE, bytes_per_block, said.prefill_token_s, said.prefill_token_squared_s
        )
    assert engines["lru"].backend.capability().prefill_token_s == 0.0  # measured only for who asks


def test_policies_get_a_requests_goal_and_priority(engines: dict[str, Engine]) -> None:
    for name in ("cost_benefit", "slo"):
        engine = engines[name]
        engine.add(request("a", range(40), 2, priority=7, slo=SLO(ttft_s=0.25)))
        run_all(engine)
        index: Any = engine.kv.index
        (leaf,) = [node for node in index.tree.nodes() if not node.children]
        assert leaf.key in policy_of(engine)._held
        assert (leaf.use.priority, leaf.use.ttft_slo_s) == (7, 0.25)
        assert leaf.use.num_prompt_blocks == 40 // BLOCK_SIZE


@pytest.mark.parametrize("policy", ["slo", "lru"])
def test_what_an_urgent_request_left_outlives_later_ones(folder: Path, policy: str) -> None:
    """24 blocks: the third prompt takes 16, and one of the two before it has to go."""
    engine = native_engine(folder, policy, num_blocks=24)
    urgent = request("urgent", range(32), 1, priority=3)
    later = request("later", range(40, 72), 1)
    for one in (urgent, later, request("large", [7] * 60, 2)):
        engine.add(one)
        run_all(engine)
    kept = [engine.kv.index.lookup(Tokens(one.tokens)).num_tokens for one in (urgent, later)]
    assert kept == ([32, 0] if policy == "slo" else [0, 32])
    engine.close()
