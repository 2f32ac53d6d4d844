"""These tests run in an environment with vLLM: `make test-vllm VLLM_PYTHON=...`."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
