"""vLLM's `LLM` on a CPU, with a random model: the plug-in changes no token, and vLLM finds it by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.platforms import current_platform

from sagellm.benchmarks.engine.shapes import shape_named, write_model
from tests.engines.vllm.llm_run import generated

pytestmark = [
    pytest.mark.peer,
    pytest.mark.slow,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="needs vLLM's CPU build"),
]


def test_the_tokens_are_the_same_off_in_shadow_and_on(tmp_path: Path) -> None:
    write_model(shape_named("tiny"), tmp_path)
    own = {"kv_connector": "SageConnector", "kv_role": "kv_both"}
    modes = {
        mode: own | {"kv_connector_extra_config": {"mode": mode, "report_s": 1e-3}}
        for mode in ("shadow", "on")
    }
    stock, num_stock, _ = generated(tmp_path, None)
    shadow, num_shadow, log = generated(tmp_path, modes["shadow"])
    guided, num_guided, guided_log = generated(tmp_path, modes["on"])
    assert stock == shadow == guided
    assert len(stock) == 36
    assert num_stock == num_shadow > 0
    assert num_guided > 0
    assert "order of eviction: vLLM's own" in log
    assert "order of eviction: adaptive" in guided_log
