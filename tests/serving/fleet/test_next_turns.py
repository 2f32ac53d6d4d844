"""What the next turn of a chat begins with, computed by the instance of a fleet that has the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sagellm.control_plane.admission import AdmissionController
from sagellm.control_plane.quota_waits import QuotaWaits
from sagellm.control_plane.quotas import TenantQuotas
from sagellm.core.fleet_config import TenantQuota
from sagellm.core.protocols.router import CachedPrefix, ExecutionInstance, Placement, RequestMetadata
from sagellm.core.types import Namespace, SamplingParams, Tokens
from sagellm.engines.llm import LLM, RequestOptions
from sagellm.engines.llm.next_turns import NEXT_TURN, NextTurn, NextTurns
from tests.builders import request
from tests.control_plane.fleet.scene import InTurn, Scene, Separating
from tests.scripted_engine import toy_tokenizer

PROMPT = list(range(1, 41))
ANSWER = list(range(50, 60))
"""What a template leaves of an answer, behind the prompt."""
ASKED = SamplingParams(temperature=0, max_tokens=0)


class MostCached(InTurn):
    """Places where most of the prompt is cached."""

    def place(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> Placement:
        most = max(range(len(cached)), key=lambda number: cached[number].num_tokens)
        self.placed.append(instances[most].instance_id)
        return Placement(self.placed[-1], self.placed[-1])


class Front:
    """A scene whose front computes next turns, as the loop of a server does."""

    def __init__(
        self, folder: Path, num: int = 2, router: InTurn | None = None,
        admission: AdmissionController | None = None,
    ) -> None:  # fmt: skip
        is_separated = isinstance(router, Separating)
        self.scene = Scene(folder, num, router=router, exchanges=is_separated, admission=admission)
        front = self.scene.front
        self.llm = LLM(front, toy_tokenizer(), model_name="m", max_model_len=front.max_model_len)
        self.deferred: list[Callable[[], object]] = []
        self.turns = NextTurns(self.llm, self.scene.clock, self.deferred.append)

    def answer(self, name: str, tokens: Sequence[int] = PROMPT, num_tokens: int = 12) -> None:
        self.scene.front.add(request(name, list(tokens), num_tokens))
        self.scene.finish()

    def expect(self, first: int = PROMPT[0]) -> NextTurn:
        tokens = Tokens([first, *PROMPT[1:], *ANSWER])
        known = len(PROMPT)
        turn = NextTurn(tokens, Tokens([first, *PROMPT[1:], 99]), known, RequestOptions(ASKED), known)
        self.turns.add(turn)
        return turn

    def turn(self) -> None:
        for server in self.scene.servers.values():
            server.wake()
            server.turn()
        while self.scene.network is not None and self.scene.network.run_one():
            pass
        self.turns.begin_chunk()
        self.scene.front.wake()
        self.turns.take(self.llm.step())
        self.scene.front.check()

    def until(self, is_so: Callable[[], bool]) -> None:
        until_s = self.scene.clock.now() + 20
        while not is_so():
            assert self.scene.clock.now() < until_s
            self.turn()

    @property
    def num_spent(self) -> float:
        [found] = [each for each in self.llm.accelerations.report() if each.name == NEXT_TURN]
        return found.spent.get("tokens", 0)

    def cached(self, name: str, tokens: Tokens) -> int:
        return self.scene.engine(name).kv.index.lookup(tokens).num_tokens


def test_the_instance_that_has_the_answer_computes_the_turn(tmp_path: Path) -> None:
    front = Front(tmp_path, router=MostCached())
    front.answer("other", range(55, 95))
    front.answer("asked")
    [there] = [name for name in front.scene.servers if front.cached(name, Tokens(PROMPT)) == len(PROMPT)]
    turn = front.expect()
    front.until(lambda: turn.is_done)
    assert front.cached(there, turn.tokens) == len(turn.tokens) // 4 * 4
    assert front.num_spent >= len(ANSWER)
    assert len(front.deferred) == 1, "the old answer is let go by a thread that may wait"
    front.scene.close()


@pytest.mark.parametrize("num", [2, 3])
def test_a_separated_fleet_computes_turns_too(tmp_path: Path, num: int) -> None:
    front = Front(tmp_path, num, Separating())
    front.answer("asked")
    turn = front.expect()
    front.until(lambda: not front.turns.has_work)
    assert turn.is_done
    front.scene.finish()
    front.scene.check_idle()
    front.scene.close()


def test_a_turn_waits_for_its_instance_and_holds_up_no_other(tmp_path: Path) -> None:
    front = Front(tmp_path, router=MostCached())
    front.answer("asked")
    front.scene.front.add(request("busy", PROMPT, 400))
    front.scene.until(lambda: len(front.scene.tokens.get("busy", ())) > 2)
    waits, elsewhere = front.expect(), front.expect(first=77)  # of which no instance has anything
    assert not front.scene.front.is_idle(waits.tokens, Namespace())
    front.scene.front.abort("busy")
    front.until(lambda: waits.is_done and not front.turns.has_work)
    assert not elsewhere.is_done, "it was dropped: its prompt is cached nowhere"
    front.scene.close()


def test_with_quotas_no_turn_is_computed(tmp_path: Path) -> None:
    quotas = {"a": TenantQuota(max_requests=1)}
    admission = AdmissionController(quotas=QuotaWaits(TenantQuotas(quotas)))
    front = Front(tmp_path, router=MostCached(), admission=admission)
    front.answer("asked")
    turn = front.expect()
    for _ in range(30):
        front.turn()
    assert not turn.is_done
    assert front.num_spent == 0
    front.scene.close()


def test_a_fleet_whose_instances_are_gone_is_not_idle(tmp_path: Path) -> None:
    front = Front(tmp_path, 1)
    front.answer("asked")
    front.scene.kill("i-0")
    front.scene.until(lambda: not front.scene.front.is_available)
    assert not front.scene.front.is_idle(Tokens(PROMPT), Namespace())
    front.scene.front.close()
