"""An instance whose KV leaves by shared memory alone keeps its pool where others read it."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Any

import pytest

from sagellm.serving.fleet.instance_process import instance_server
from tests.tiny_models import save_tiny


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
@pytest.mark.parametrize(
    ("host", "asked", "is_shared"),
    [("", None, True), ("", False, False), ("127.0.0.1", None, False), ("127.0.0.1", True, True)],
)
def test_a_pool_is_shared_where_the_fleet_is_on_one_host(
    host: str, asked: bool | None, is_shared: bool, tmp_path: Path
) -> None:
    save_tiny(tmp_path, "llama")
    kv = {"num_blocks": 8, "share_pool": asked}
    config = {"model": {"name": str(tmp_path)}, "kv": kv, "engine": {"threads": 1}}
    options: dict[str, Any] = {"name": "a", "kind": "general", "endpoint": "tcp://127.0.0.1:*"}
    server = instance_server(options | {"key": secrets.token_hex(32), "config": config, "host": host})
    try:
        memory = server.engine.backend.kv_bytes()  # type: ignore[attr-defined]
        assert (memory.shared_pages is not None) == is_shared
    finally:
        server.close()
        if server.hand_overs is not None:
            server.hand_overs.close()
        server.engine.close()
