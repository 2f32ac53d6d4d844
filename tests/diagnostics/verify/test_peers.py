"""`verify` on other servers that run already: SAGELLM_VERIFY_URLS names them, separated by commas.

vLLM's CPU build: `vllm serve MODEL --enable-prompt-tokens-details --num-gpu-blocks-override 200`. llama.cpp:
`python -m llama_cpp.server --model MODEL.gguf`.
"""

from __future__ import annotations

import asyncio
import os

import pytest

from sagellm.diagnostics.verify import verify

URLS = [url for url in os.environ.get("SAGELLM_VERIFY_URLS", "").split(",") if url]


@pytest.mark.peer
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("url", URLS)
def test_twenty_clean_runs_of_another_server_have_no_finding(url: str, seed: int) -> None:
    report = asyncio.run(verify(url, "minute", seed=seed))
    assert (report.outcome, report.findings) == ("clean", ()), report.reason
