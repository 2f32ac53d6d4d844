"""An instance that does not answer holds up its question alone: tokens and metrics go on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sagellm.engines.build import load_config
from sagellm.engines.llm import LLM
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.tokenizer_of import tokenizer_of
from tests.control_plane.fleet.scene import Scene
from tests.serving.live import serving, wait_until


def test_tokens_and_metrics_come_while_an_instance_is_silent(tmp_path: Path) -> None:
    scene, stop, silent = Scene(tmp_path, 2), threading.Event(), threading.Event()
    tokenizer = tokenizer_of(load_config(environ={}).config, DEMO_MODEL)
    llm = LLM(scene.front, tokenizer, model_name="m", max_model_len=scene.front.max_model_len)

    def turn() -> None:
        while not stop.is_set():
            for name, server in scene.servers.items():
                if not (name == "i-1" and silent.is_set()):
                    server.wake()
                    server.turn()

    turning = threading.Thread(target=turn)
    turning.start()
    try:
        with serving(llm, admin_key="an admin key") as live, ThreadPoolExecutor(1) as pool:
            scene.front.call_soon(lambda: scene.front.drain("i-1"))
            wait_until(lambda: live.http.get("/v1/fleet").json()["instances"][1]["state"] == "drained")
            silent.set()
            headers = {"Authorization": "Bearer an admin key"}
            cleared = pool.submit(live.http.post, "/reset_prefix_cache", headers=headers)
            wait_until(lambda: scene.front._questions.is_open or cleared.done())
            body = {"model": "m", "prompt": list(range(1, 30)), "max_tokens": 20, "ignore_eos": True}
            answer = live.http.post("/v1/completions", json=body)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 20
            assert live.metric("sagellm_generation_tokens_total") == 20
            assert not cleared.done()
            silent.clear()
            assert cleared.result().status_code == 200
    finally:
        stop.set()
        turning.join()
        for server in scene.servers.values():
            server.close()
