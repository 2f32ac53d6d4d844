"""What a front asks its instances: tokens go on meanwhile, and figures never fall."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sagellm.control_plane.fleet import questions
from sagellm.control_plane.fleet.counters import FleetCounters
from sagellm.core.blocks import Tier
from sagellm.core.errors import RequestError
from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats
from sagellm.core.protocols.kv_tiers import TierState
from sagellm.core.protocols.prefix_cache import MissCounts
from sagellm.core.types import Namespace, Tokens
from tests.builders import request
from tests.control_plane.fleet.scene import Scene

PROMPT = list(range(1, 30))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


class Asking:
    """A question in a thread of its own. `error` or `result`, once it `is_done`."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self._ask = ask
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._ask()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()


def test_tokens_come_while_an_instance_does_not_answer(scene: Scene) -> None:
    scene.front.drain("i-1")
    silent = scene.servers.pop("i-1")
    asking = Asking(lambda: scene.front.clear_cache())
    scene.until(lambda: scene.front._questions.is_open)
    scene.front.add(request("r", PROMPT, 20))
    scene.finish()
    assert len(scene.tokens["r"]) == 20
    assert not asking.is_done
    scene.servers["i-1"] = silent
    scene.until(lambda: asking.is_done)
    assert asking.error is None


def test_a_question_has_a_limit_and_the_error_is_for_the_client(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "ANSWER_S", 0.3)
    monkeypatch.setattr(questions, "_SPARE_S", 60.0)
    silent = scene.servers.pop("i-1")
    asking = Asking(lambda: scene.front.clear_cache())
    scene.until(lambda: asking.is_done)
    assert isinstance(asking.error, RequestError)
    assert asking.error.status == 503
    assert "i-1 has not answered" in str(asking.error)
    scene.servers["i-1"] = silent


def test_a_pin_that_comes_too_late_is_given_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "ANSWER_S", 0.3)
    monkeypatch.setattr(questions, "_SPARE_S", 60.0)
    scene.front.drain("i-1")
    scene.front.add(request("r", PROMPT, 3))
    scene.finish()
    silent = scene.servers.pop("i-0")
    asking = Asking(lambda: scene.front.pin_prefix(Tokens(PROMPT), Namespace()))
    scene.until(lambda: asking.is_done)
    assert isinstance(asking.error, RequestError)
    scene.servers["i-0"] = silent
    scene.until(lambda: not scene.front._questions._late_pins)
    for _ in range(20):
        scene.turn()
    assert not scene.engine("i-0").diagnostics().num_pinned_prefixes


def test_a_pin_whose_caller_gave_it_up_is_given_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "_SPARE_S", -questions.ANSWER_S)  # it does not wait at all
    scene.front.drain("i-1")
    scene.front.add(request("r", PROMPT, 3))
    scene.finish()
    silent = scene.servers.pop("i-0")  # or the answer may be there before its caller looks
    asking = Asking(lambda: scene.front.pin_prefix(Tokens(PROMPT), Namespace()))
    scene.until(lambda: asking.is_done)
    assert isinstance(asking.error, RequestError)
    scene.servers["i-0"] = silent
    scene.until(lambda: not scene.front._questions.is_open)
    for _ in range(20):
        scene.turn()
    assert not scene.engine("i-0").diagnostics().num_pinned_prefixes


def test_a_lost_instance_answers_with_an_error(scene: Scene) -> None:
    silent = scene.servers.pop("i-1")
    asking = Asking(lambda: scene.front.clear_cache())
    scene.until(lambda: scene.front._questions.is_open)
    scene.servers["i-1"] = silent
    scene.kill("i-1")
    scene.until(lambda: asking.is_done)
    assert "i-1" in str(asking.error)
    scene.start("i-1")


def test_an_instance_that_leaves_answers_nothing_of_its_successor(scene: Scene) -> None:
    silent = scene.servers.pop("i-1")
    asking = Asking(lambda: scene.front.clear_cache())
    scene.until(lambda: scene.front._questions.is_open)
    scene.front.know(scene.instances.add("i-1", scene.endpoint("other")))
    scene.until(lambda: asking.is_done)
    assert "left the fleet" in str(asking.error)
    assert not [call for call in scene.front._questions._figures if call[0] == "i-1"]
    scene.servers["i-1"] = silent


def test_the_end_of_the_front_ends_questions(scene: Scene) -> None:
    scene.servers.pop("i-1").close()
    asking = Asking(lambda: scene.front.clear_cache())
    scene.until(lambda: scene.front._questions.is_open or asking.is_done)
    scene.front.close()
    asking._thread.join(20.0)
    assert asking.is_done
    assert asking.error is not None


def test_figures_are_there_without_a_question(scene: Scene) -> None:
    scene.front.add(request("r", PROMPT, 5))
    scene.finish()
    scene.until(lambda: all(member.diagnostics for member in scene.front.members.values()))
    silent = dict(scene.servers)
    scene.servers.clear()  # nothing answers any more
    assert scene.front.diagnostics().pass_time_s
    assert scene.front.stats().blocks_free
    scene.servers.update(silent)


def test_counters_stay_when_an_instance_is_lost_and_started_again(
    scene: Scene,
) -> None:
    def looked_for() -> int:
        reuse = scene.front.stats().reuse
        return 0 if reuse is None else reuse.num_tokens

    for number in range(2):
        scene.front.add(request(f"r{number}", PROMPT, 5))
    scene.finish()
    scene.until(lambda: looked_for() == 2 * len(PROMPT))
    scene.kill("i-0")
    scene.until(lambda: not scene.front.members["i-0"].is_ready)
    assert looked_for() == 2 * len(PROMPT)
    assert scene.front.stats().blocks_free <= scene.engine("i-1").capability().num_blocks
    scene.start("i-0")
    scene.until(lambda: scene.front.members["i-0"].stats is not None)
    assert looked_for() == 2 * len(PROMPT)
    for number in range(2):
        scene.front.add(request(f"s{number}", PROMPT, 5))
    scene.finish()
    scene.until(lambda: looked_for() == 4 * len(PROMPT))
    scene.front.forget("i-0")
    scene.instances.remove("i-0")
    assert looked_for() == 4 * len(PROMPT)


def tier(stored: int, cached: int) -> TierState:
    return TierState(next(iter(Tier)), 10, cached, 1, stored, 2, 3, {"damaged": 1}, "a fault")


def test_of_an_instance_that_is_away_only_counters_are_shown() -> None:
    stats = EngineStats(1, 2, 3, 4, 5, 6, 7, None, MissCounts(1, 2, 3))
    diagnostics = EngineDiagnostics(
        {"capacity": 3}, 0.5, 0.25, 2, 4, {"p": 1.5}, checkpoints={"resident": 3, "made": 5, "evicted": 2},
        tiers=[tier(8, 4)], step_s=2.0, communication_s=1.0,
    )  # fmt: skip
    counters = FleetCounters()
    counters.begin("a", "first")
    counters.begin("b", "first")
    for name in ("a", "b"):
        counters.take(name, stats)
        counters.take(name, diagnostics)
    both = counters.diagnostics({"a", "b"})
    assert (both.internal_fragmentation, both.num_pinned_prefixes, both.tiers[0].cached) == (0.5, 4, 8)
    for away in ({"a"}, {"a", "b"}):
        left = 2 - len(away)
        summed, found = (
            counters.stats({"a", "b"} - away, 0, 0, 0, ()),
            counters.diagnostics({"a", "b"} - away),
        )
        assert (summed.num_preemptions, summed.misses) == (12, MissCounts(2, 4, 6))
        assert (summed.blocks_active, summed.blocks_free) == (3 * left, 5 * left)
        assert found.evicted_blocks == {"capacity": 6}
        assert found.checkpoints == {"resident": 3 * left, "made": 10, "evicted": 4}
        assert (found.tiers[0].stored, found.tiers[0].cached, found.num_pinned_prefixes) == (
            16,
            4 * left,
            2 * left,
        )
        assert bool(found.tiers[0].fault) is bool(left)
        assert (found.step_s, found.communication_s) == (4.0, 2.0)
        assert found.internal_fragmentation == (0.5 if left else 0.0)
    counters.begin("a", "second")  # it begins at 0, and is added
    counters.take("a", replace(stats, num_preemptions=1))
    assert counters.stats({"a", "b"}, 0, 0, 0, ()).num_preemptions == 6 + 6 + 1
    counters.begin("a", "second")  # connected again: it goes on
    counters.take("a", replace(stats, num_preemptions=2))
    assert counters.stats({"a", "b"}, 0, 0, 0, ()).num_preemptions == 6 + 6 + 2
