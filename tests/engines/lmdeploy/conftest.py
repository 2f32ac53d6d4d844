"""These tests run in an environment with LMDeploy: `make test-lmdeploy LMDEPLOY_PYTHON=...`."""

from __future__ import annotations

import importlib.util

NEED_LMDEPLOY = ["test_block_trie.py", "test_engine.py", "test_order.py", "test_patches.py", "test_swap.py"]
collect_ignore_glob = [] if importlib.util.find_spec("lmdeploy") else NEED_LMDEPLOY
