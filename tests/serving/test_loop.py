"""`EngineLoop` between requests: it sleeps, and wakes for KV that a client expects."""

from __future__ import annotations

import time

from sagellm.core.clock import MonotonicClock
from sagellm.engines.llm import LLM
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.manager.hints import LOAD_MARGIN_S
from sagellm.serving.loop import EngineLoop
from tests.builders import fake_engine, request
from tests.engines.kv_scenes import OLD, YOUNG, resident, serve, session
from tests.scripted_engine import toy_tokenizer


def test_an_idle_loop_wakes_for_what_is_expected() -> None:
    tokenizer = toy_tokenizer()
    backend = TokenMemoryBackend(num_blocks=12, vocab_size=tokenizer.vocab_size)
    engine = fake_engine(backend, host_blocks=60, clock=MonotonicClock())
    serve(engine, session("old", OLD), session("young", YOUNG), request("filler", range(56, 96), 1))
    assert resident(engine, OLD) == 0
    llm = LLM(engine, tokenizer, model_name="toy", max_model_len=48)
    payload = {"session_id": "old", "in_s": LOAD_MARGIN_S + 0.3}
    llm.hint({"actions": [{"action_type": "kv.expect", "payload": payload}]})
    assert not llm.has_work()
    asked: list[float] = []

    def has_work() -> bool:
        asked.append(time.monotonic())
        return LLM.has_work(llm)

    llm.has_work = has_work  # type: ignore[method-assign]
    loop = EngineLoop(llm, lambda events: None)
    began_s = time.monotonic()
    loop.start()
    while engine.diagnostics().tiers[0].loaded < 4 and time.monotonic() < began_s + 10:
        time.sleep(0.01)
    loop.request_stop()
    while not loop.stopped:
        time.sleep(0.01)
    assert loop.failure is None
    assert resident(engine, OLD) == 4
    assert len([at_s for at_s in asked if at_s < began_s + 0.2]) <= 2, "it did not sleep"
    engine.close()
