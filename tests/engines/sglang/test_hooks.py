"""`SAGELLM_SCHEDULING`: what is registered with SGLang's plug-in system, and where nothing is."""

from __future__ import annotations

import logging
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from sglang.srt import plugins
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.unified_cache import tree_core_registry
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams

from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.engines.guests.settings import SchedulingSettings
from sagellm.engines.sglang.hooks import (
    SCHEDULER_MODULE,
    VARIABLE,
    SGLangClock,
    refusal_of,
    register_scheduling,
    scheduling_of,
)
from tests.engines.sglang.drivers import Driver, hooked

pytestmark = pytest.mark.peer
FAIR = '{"strategy": "fair"}'


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our entry point, as `pip install` leaves it, whether sageLLM is installed here or not."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    group = project["entry-points"]["sglang.srt.plugins"]
    folder = tmp_path / "sagellm-0.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sagellm\nVersion: 0.0\n")
    lines = [f"{name} = {target}" for name, target in group.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *lines, ""]))
    monkeypatch.syspath_prepend(str(tmp_path))
    with mock.patch.dict(tree_core_registry._TREE_CORE_REGISTRY):
        yield


def load(monkeypatch: pytest.MonkeyPatch, setting: str | None) -> None:
    """SGLang's own `load_plugins`, as in its scheduler process."""
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setenv("SGLANG_PLUGINS", "sagellm")
    monkeypatch.delenv(VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(VARIABLE, setting)
    plugins.load_plugins()


def members() -> list[Any]:
    return [*vars(Scheduler).values(), *vars(SchedulePolicy).values(), *vars(ScheduleBatch).values()]


@pytest.mark.parametrize("setting", [None, ""])
def test_without_a_setting_nothing_of_it_runs(monkeypatch: pytest.MonkeyPatch, setting: str | None) -> None:
    with hooked(None, ManualClock(0.0)) as hooks:
        before = members()
        with mock.patch.dict("sys.modules"):
            sys.modules.pop("sagellm.engines.sglang.hooks", None)
            load(monkeypatch, setting)
            assert "sagellm.engines.sglang.hooks" not in sys.modules
        assert hooks is None
        assert not HookRegistry._hooks
        assert all(a is b for a, b in zip(before, members(), strict=True))


def test_sglang_loads_the_plugin_by_one_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with hooked(None, ManualClock(0.0)), caplog.at_level(logging.INFO):
        load(monkeypatch, FAIR)
        driver = Driver(ManualClock(0.0))
        driver.add("a", [1] * 9)
        driver.run()
        assert len(HookRegistry._patched) == 6
    assert "Executed general plugin: sagellm" in caplog.text
    assert "Failed" not in caplog.text
    assert "strategy fair orders SGLang's requests" in caplog.text
    assert driver.admitted == ["a"]


def test_processes_without_a_scheduler_get_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, SCHEDULER_MODULE)
    with hooked(FAIR, ManualClock(0.0)) as hooks:
        assert hooks is None
        assert not HookRegistry._hooks


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("fair", ConfigError, "is not JSON: .*use for example"),
        ("[1]", ConfigError, "is not a mapping; use for example"),
        ('{"policy": "fair"}', ConfigError, "use strategy, options"),
        ('{"strategy": "best"}', UnknownNameError, "adaptive, fair"),
        ('{"strategy": "vllm-like"}', ConfigError, "admits by itself"),
    ],
)
def test_settings_that_cannot_be(
    text: str, error: type[Exception], message: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """SGLang starts in its own order; the log says why."""
    with pytest.raises(error, match=message):
        scheduling_of({VARIABLE: text})
    with hooked(None, ManualClock(0.0)):
        load(monkeypatch, text)
        assert not HookRegistry._hooks
    assert caplog.text.count("SGLang schedules in its own order: ") == 1


def test_settings_of_the_environment() -> None:
    assert scheduling_of({}) is None
    assert scheduling_of({VARIABLE: FAIR}) == SchedulingSettings("fair", {})


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Scheduler, "_get_new_batch_prefill_raw"),
        (SchedulePolicy, "calc_priority"),
        (ScheduleBatch, "_get_decode_retraction_order"),
    ],
)
def test_a_function_that_has_moved_registers_nothing(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with hooked(None, ManualClock(0.0)):
        monkeypatch.delattr(owner, name)
        load(monkeypatch, FAIR)
        assert not HookRegistry._hooks
        with pytest.raises(AttributeError, match=name):
            register_scheduling({VARIABLE: FAIR})
        monkeypatch.undo()
    assert caplog.text.count("SGLang schedules in its own order: ") == 1


def test_an_attribute_that_has_moved_leaves_sglang_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Driver, "set_up", lambda driver, scheduler: delattr(scheduler, "result_queue"))
    with hooked(FAIR, ManualClock(0.0)) as hooks:
        assert hooks is not None
        driver = Driver(ManualClock(0.0))
        assert hooks.order is None
        driver.scheduler.result_queue = types.SimpleNamespace()
    assert "the scheduler of this SGLang has no result_queue" in caplog.text


@pytest.mark.parametrize("name", ["tp_size", "pp_size", "attn_cp_size"])
def test_several_ranks_are_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """All ranks must order alike, and the passes look at the clock of each."""
    with hooked(FAIR, ManualClock(0.0)) as hooks:
        assert hooks is not None
        driver = Driver(ManualClock(0.0))
        assert hooks.order is not None
        with mock.patch.dict(get_parallel()._overrides, {name: 2}):
            driver.scheduler.init_schedule_policy()
        assert hooks.order is None
        driver.scheduler.enable_priority_preemption = False
        driver.add("a", [1] * 9)
        driver.run()
        assert driver.admitted == ["a"]
    assert caplog.text.count(f"look at the clock of each: {name} is 2") == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_hybrid_swa": True}, "sliding windows"),
        ({"is_hybrid_ssm": True}, "recurrent states"),
        ({"dllm_config": object()}, "diffusion models"),
    ],
)
def test_what_is_not_ordered(changes: dict[str, Any], reason: str) -> None:
    with hooked(None, ManualClock(0.0)):
        scheduler = Driver(ManualClock(0.0)).scheduler
        assert refusal_of(scheduler) == ""
        vars(scheduler).update(changes)
        assert reason in refusal_of(scheduler)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_disaggregation_is_refused(mode: str) -> None:
    with hooked(None, ManualClock(0.0)):
        scheduler = Driver(ManualClock(0.0)).scheduler
        get_context().override("test", disaggregation_mode=mode)
        assert f"the disaggregation mode {mode!r} has queues of its own" in refusal_of(scheduler)


def test_another_scheduler_is_left_alone() -> None:
    """The hooks are those of the scheduler that was made last."""
    with hooked(FAIR, ManualClock(0.0)) as hooks:
        assert hooks is not None
        first, second = Driver(ManualClock(0.0)), Driver(ManualClock(0.0))
        for driver in (first, second):
            driver.add("a", [1] * 9)
        first.step()
        assert not hooks.order.requests
        second.step()
        assert list(hooks.order.requests) == ["a"]


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_sglangs_server_passes_the_fields_on(kind: Any) -> None:
    """From a body of its OpenAI interface to the sampling parameters and the priority of a request."""
    custom = {"sage_tenant": "t", "sage_ttft_s": 2.0}
    body = {"model": "m", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    asked = kind(**body, priority=3, custom_params=custom)
    if kind is ChatCompletionRequest:
        params = asked.to_sampling_params([], {}, None)
    else:
        params = OpenAIServingCompletion._build_sampling_params(mock.MagicMock(), asked)
    assert params["custom_params"] == custom
    assert SamplingParams(custom_params=params["custom_params"]).custom_params == custom
    assert asked.priority == 3


def test_the_clock_is_that_of_sglangs_times() -> None:
    with hooked(None, ManualClock(0.0)):
        req = Driver(ManualClock(0.0)).add("a", [1] * 9)
    assert 0 <= SGLangClock().now() - req.time_stats.wait_queue_entry_time < 60
