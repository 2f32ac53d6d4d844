"""Quotas of tenants across the instances of a front: who waits, who is refused, what is given back."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sagellm.control_plane.admission import AdmissionController
from sagellm.control_plane.quota_waits import QuotaWaits
from sagellm.control_plane.quotas import TenantQuotas
from sagellm.core.clock import MonotonicClock
from sagellm.core.errors import RequestError
from sagellm.core.fleet_config import TenantQuota
from sagellm.core.protocols.engine import TenantUse
from sagellm.core.types import FinishReason, Namespace, Request
from tests.builders import expected_tokens, request
from tests.control_plane.fleet.scene import Scene, is_done

PROMPT = list(range(1, 30))


def scene_with(folder: Path, *, patience_s: float = 60.0, num: int = 2, **quotas: TenantQuota) -> Scene:
    clock = MonotonicClock()
    waits = QuotaWaits(TenantQuotas(quotas, clock), patience_s=patience_s, clock=clock)
    return Scene(folder, num, admission=AdmissionController(quotas=waits, clock=clock))


def of(tenant: str, name: str, num_tokens: int = 20) -> Request:
    return replace(request(name, PROMPT, num_tokens), namespace=Namespace(tenant))


def test_a_tenant_over_its_quota_waits_and_holds_up_no_other(tmp_path: Path) -> None:
    scene = scene_with(tmp_path, t=TenantQuota(max_requests=2))
    for number in range(40):
        scene.front.add(of("t", f"t{number}"))
    scene.front.add(of("u", "u"))
    most = 0
    while len(scene.front.requests):
        scene.turn()
        placed = [each for each in scene.front.requests.all() if each.placement is not None]
        most = max(most, sum(each.request.namespace.tenant == "t" for each in placed))
        if "u" in scene.ended:
            break
    assert sum(name.startswith("t") for name in scene.ended) < 10
    scene.finish()
    assert most == 2
    assert all(map(is_done, scene.ended.values()))
    assert scene.tokens["t39"] == expected_tokens(scene.backends["i-0"], PROMPT, 20)
    assert scene.front.tenants() == {"t": TenantUse(), "(other)": TenantUse()}
    scene.close()


def test_what_can_never_start_is_refused_at_once(tmp_path: Path) -> None:
    scene = scene_with(tmp_path, t=TenantQuota(tokens_per_s=10.0))
    with pytest.raises(RequestError, match="shorten the prompt or max_tokens by") as caught:
        scene.front.add(of("t", "r", 200))
    assert caught.value.status == 429
    assert not len(scene.front.requests)
    scene.front.add(of("t", "r", 20))
    scene.finish()
    scene.close()


def test_what_has_waited_for_too_long_ends_with_429(tmp_path: Path) -> None:
    scene = scene_with(tmp_path, patience_s=0.3, t=TenantQuota(max_requests=1))
    scene.front.add(of("t", "long", 3000))
    scene.front.add(of("t", "waits"))
    scene.until(lambda: "waits" in scene.ended)
    output = scene.ended["waits"]
    assert (output.finish_reason, output.error_status) == (FinishReason.ERROR, 429)
    assert "1 requests at a time" in (output.error or "")
    scene.front.abort("long")
    scene.front.add(of("t", "next"))
    scene.finish()
    assert is_done(scene.ended["next"])
    scene.close()


def test_a_request_that_begins_anew_is_counted_once_and_does_not_wait(tmp_path: Path) -> None:
    scene = scene_with(tmp_path, t=TenantQuota(max_requests=1, tokens_per_s=1.0, burst_tokens=400))
    scene.front.add(of("t", "r", 300))
    scene.until(lambda: len(scene.tokens.get("r", ())) > 3)
    scene.kill(scene.router.placed[-1])
    scene.finish()
    assert scene.tokens["r"] == expected_tokens(scene.backends["i-0"], PROMPT, 300)
    scene.close()


@pytest.mark.parametrize("seed", range(3))
def test_quotas_are_given_back_however_requests_end(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    others: dict[str, Any] = {"*": TenantQuota(max_requests=2, tokens_per_s=2000.0, burst_tokens=300)}
    scene = scene_with(tmp_path, patience_s=0.5, t=TenantQuota(max_requests=3), **others)
    for number in range(60):
        match rng.randrange(6):
            case 0 | 1 | 2:
                with contextlib.suppress(RequestError):
                    scene.front.add(of(rng.choice("tuv"), f"r{number}", rng.randrange(1, 60)))
            case 3:
                scene.front.abort(f"r{rng.randrange(number + 1)}")
            case 4 if len(scene.servers) == 2 and rng.random() < 0.3:
                scene.kill("i-1")
                scene.until(lambda: not scene.front.members["i-1"].is_ready)
                scene.start("i-1")
            case _:
                scene.turn()
    scene.finish()
    assert scene.front.tenants()["t"][:2] == (0, 0)
    assert scene.front.tenants()["(other)"][:2] == (0, 0)
    scene.check_idle()
    scene.close()
