"""These tests run in an environment with SGLang: `make test-sglang SGLANG_PYTHON=...`."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]
