"""The backend `sagellm` of SGLang: off, shadow, on, and what it does where it cannot help."""

from __future__ import annotations

import logging
import types
from array import array
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from sglang.srt.environ import envs
from sglang.srt.mem_cache.unified_cache import tree_core_registry
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from benchmarks.hosts.sglang import Request, Serving, guided_cache, prefix_cache
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.engines.guests import comparison
from sagellm.engines.guests.settings import GuestSettings
from sagellm.engines.sglang import register
from sagellm.engines.sglang.mirror import Mirror
from sagellm.engines.sglang.plugin import settings_of
from sagellm.engines.sglang.tree_core import GuidedTreeCore
from sagellm.kvmgr.eviction import LRUPolicy

pytestmark = pytest.mark.peer
END = '{"actions": [{"action_type": "session.end"}]}'


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with mock.patch.dict(tree_core_registry._TREE_CORE_REGISTRY):
        register()
        register()
        yield


def made(monkeypatch: pytest.MonkeyPatch, num_tokens: int = 40, **environment: str) -> Any:
    """A cache as a server makes it, with these variables set."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    backend = environment.get("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "rust")
    with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(backend):
        return prefix_cache(num_tokens, None, max_context=512)


def served(cache: Any) -> list[tuple[int, list[int]]]:
    """Hits and slots of some requests that need more than the cache has."""
    serving, seen = Serving(cache), []
    for number in range(24):
        path = [number % 5] * (6 + number % 3) + [number]
        req = Request(f"r{number}", array("q", path))
        assert serving.begin(req)
        row = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(path)].tolist()
        serving.end(req)
        seen.append((req.num_found, row))
    cache.sanity_check()
    return seen


def test_off_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the plug-in loaded and the variable not set, the cache is SGLang's."""
    cache = made(monkeypatch)
    assert type(cache.tree_core).__module__.startswith("sglang.")
    assert not {"checkpoint_into_tree", "on_release", "reset", "evict_for_alloc"} & vars(cache).keys()


def test_shadow_decides_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    stock = served(made(monkeypatch))
    cache = made(
        monkeypatch, SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND="sagellm", SAGELLM_REPORT_S="0.000001",
        SAGELLM_POLICY="s3fifo",
    )  # fmt: skip
    assert type(cache.tree_core) is type(made(monkeypatch).tree_core)
    with caplog.at_level(logging.INFO, "sagellm.sglang"):
        assert served(cache) == stock
    report = caplog.records[-1].getMessage()
    assert report.startswith("sageLLM: order of eviction: SGLang's own; ")
    assert " lru " in report
    assert " s3fifo " in report


def test_on_is_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = made(monkeypatch, SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND="sagellm", SAGELLM_MODE="on")
    assert isinstance(cache.tree_core, GuidedTreeCore)
    served(cache)
    assert cache.tree_core.mirror is not None
    assert type(cache.tree_core.mirror.index._leaves.default_share.policy).__name__ == "AdaptivePolicy"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SAGELLM_MODE": "off"}, "use shadow or on"),
        ({"SAGELLM_POLICY": "nothing"}, "nothing"),
        ({"SAGELLM_OPTIONS": "{"}, "SAGELLM_OPTIONS='{' is not JSON"),
        ({"SAGELLM_OPTIONS": '{"capacity": 3}'}, "capacity is given by the host"),
        ({"SAGELLM_REPORT_S": '"x"'}, "report_s must be a number"),
        ({"SAGELLM_HINTS": '["pins"]'}, "hints must be"),
    ],
)
def test_settings_that_cannot_be(environment: dict[str, str], message: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        settings_of(environment)


def test_settings_of_the_environment() -> None:
    given = {
        "SAGELLM_MODE": "on",
        "SAGELLM_POLICY": "sieve",
        "SAGELLM_OPTIONS": "{}",
        "SAGELLM_HINTS": '["pin"]',
        "SAGELLM_REPORT_S": "5",
    }
    assert settings_of(given) == GuestSettings("on", "sieve", {}, ("pin",), report_s=5)
    assert settings_of({}) == GuestSettings()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_eagle": True}, "EAGLE"),
        ({"enable_session_radix_cache": True}, "--enable-session-radix-cache"),
        ({"tp_cache_group": types.SimpleNamespace(size=lambda: 2)}, "several ranks"),
    ],
)
def test_what_is_not_supported(changes: dict[str, Any], reason: str) -> None:
    from sagellm.engines.sglang.plugin import _refusal

    cache = prefix_cache(20, "python", max_context=64)
    params = types.SimpleNamespace(is_eagle=False, enable_session_radix_cache=False)
    components = cache.components
    assert _refusal(params, components) == ""
    assert reason in _refusal(types.SimpleNamespace(**vars(params) | changes), components)
    assert "full attention alone" in _refusal(params, components | {ComponentType.SWA: None})


def test_a_name_that_has_moved_leaves_sglang_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(UnifiedTreeCore, "_split_node")
    cache = made(monkeypatch, SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND="sagellm", SAGELLM_MODE="on")
    assert not isinstance(cache.tree_core, GuidedTreeCore)
    assert "GuidedTreeCore of this SGLang has no _split_node" in caplog.text
    assert served(cache) == served(made(monkeypatch))


def test_a_module_that_has_moved(caplog: pytest.LogCaptureFixture) -> None:
    name = "sglang.srt.mem_cache.unified_cache.tree_core_registry"
    with mock.patch.dict("sys.modules", {name: None}):
        register()
    assert "this SGLang cannot be guided" in caplog.text


def test_a_request_that_is_not_as_expected_ends_the_comparison(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = made(monkeypatch, SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND="sagellm", SAGELLM_MODE="on")
    monkeypatch.delattr(comparison.Comparison, "ended")
    served(cache)
    assert cache.tree_core.mirror is None
    warnings = [record.getMessage() for record in caplog.records if record.name == "sagellm.sglang"]
    assert len(warnings) == 2
    assert "no longer counts" in warnings[0]
    assert "cannot be compared" in warnings[1]


def test_a_policy_that_loses_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class MRU(LRUPolicy):
        """Gives up what was used last."""

        def insert(self, extent: Any) -> None:
            self._push(extent, -extent.used_s)

    monkeypatch.setattr(comparison, "JUDGED_TOKENS", 200)
    monkeypatch.setattr(comparison.Comparison, "policy", lambda asked: MRU())
    clock = ManualClock(0.0)
    cache = guided_cache(60, GuestSettings("on", report_s=0), clock, MRU, max_context=512)
    serving = Serving(cache)
    for number in range(60):
        clock.advance(1.0)
        req = Request(f"r{number}", array("q", [number * (number % 2)] * 20))
        assert serving.begin(req)
        serving.end(req)
        if cache.tree_core.mirror is None:
            break
    assert "fewer than LRU would" in caplog.text
    assert cache.tree_core.mirror is None
    cache.sanity_check()


def test_what_sglang_moves_back_from_the_host_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that the mirror does not know enters it with the next lock."""
    cache = made(monkeypatch, SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND="sagellm", SAGELLM_MODE="on")
    serving, core = Serving(cache), cache.tree_core
    req = Request("a", array("q", range(10)))
    assert serving.begin(req)
    serving.end(req)
    core.mirror = Mirror(1, LRUPolicy, ManualClock(0.0))
    again = Request("b", array("q", range(12)))
    assert serving.begin(again)
    assert core.mirror.index.num_cached == 12
    assert core.mirror.num_evictable == 0
    serving.end(again)
    assert core.mirror.num_evictable == 12
    core.mirror.check()


@pytest.mark.parametrize(
    ("fields", "kept"), [({"sage_hints": END}, True), ({}, False), ({"sage_hints": "{"}, False)]
)
def test_a_session_that_ends_goes_first(
    fields: dict[str, Any], kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(0.0)
    settings = GuestSettings("on", "lru", hints=("session.end",), report_s=0)
    cache = guided_cache(30, settings, clock, LRUPolicy, max_context=512)
    serving = Serving(cache)

    def serve(name: int, said: dict[str, Any]) -> int:
        clock.advance(1.0)
        params = types.SimpleNamespace(custom_params=said)
        req = Request(f"r{clock.now()}", array("q", [name] * 12), sampling_params=params)
        assert serving.begin(req)
        serving.end(req)
        cache.tree_core.mirror.check()
        return int(req.num_found)

    serve(1, {})
    serve(2, fields)
    serve(3, {})  # needs the room of one of them
    found = serve(1, {})
    assert found == 12 if kept else found < 12
    assert caplog.text.count("are ignored") == (fields.get("sage_hints") == "{")
    cache.sanity_check()


@pytest.mark.parametrize("same_name", [False, True])
def test_a_request_that_is_aborted_while_retracted_holds_no_shadow(same_name: bool) -> None:
    """SGLang retracts it with a release that is no end, and aborts it without another."""
    clock = ManualClock(0.0)
    found: list[comparison.Comparison] = []
    made_one = comparison.Comparison.__init__

    def noted(made: comparison.Comparison, *arguments: Any) -> None:
        made_one(made, *arguments)
        found.append(made)

    with mock.patch.object(comparison.Comparison, "__init__", noted):
        settings = GuestSettings("on", "lru", report_s=0)
        serving = Serving(guided_cache(30, settings, clock, LRUPolicy, max_context=512))
    req = Request("r0", array("q", [7] * 12))
    assert serving.begin(req)
    serving.end(req, finished=False)
    del req
    for number in range(3):
        clock.advance(1.0)
        req = Request("r0" if same_name else f"r{1 + number}", array("q", [number] * 8))
        assert serving.begin(req)
        serving.end(req)
    for shadow in found[0].shadows.values():
        shadow.check()
        assert shadow.num_held == 0
    assert found[0].reuse.num_blocks == 12 + 3 * 8
