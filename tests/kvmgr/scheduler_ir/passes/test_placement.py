"""Prefill and decode apart, attention and feed-forward apart: advice by cost models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from sagellm.core.config import Config, SchedulerConfig
from sagellm.core.errors import ConfigError
from sagellm.core.plan import PhasePlacement
from sagellm.core.protocols.scheduler_ir import StepFacts
from sagellm.core.types import RequestStatus
from sagellm.engines.build import build_engine, build_passes
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir.passes.af_separation import AFSeparationPass
from sagellm.kvmgr.scheduler_ir.passes.pd_separation import PDSeparationPass
from tests.builders import expected_tokens, fake_engine, request
from tests.kvmgr.scheduler_ir.passes.desk import Desk, admit, state

DECODER: Mapping[str, Any] = {"link_bytes_s": 1e6, "step_s": 0.01, "seq_s": 0.001}


def _at(pass_: PDSeparationPass, steps: int = 20, duration_s: float = 0.05) -> Desk:
    """A desk whose steps with decodes took so long."""
    desk = Desk(pass_)
    for i in range(steps):
        desk.view.last_step = StepFacts(duration_s + i * 1e-9, 4, 0)
        desk.step()
    return desk


def test_long_outputs_decode_where_steps_are_short_and_short_ones_stay() -> None:
    separation = PDSeparationPass({"d": DECODER}, bytes_per_token=1000)
    desk = _at(separation)
    desk.waiting = [state("long", 100, max_tokens=200), state("short", 100, max_tokens=2)]
    desk.step()
    assert separation.placements == {
        "long": PhasePlacement(decode="d")
    }  # 0.1 s of transfer: 200 * 0.04 s against 2 * 0.04 s


def test_a_slow_link_or_a_full_instance_keeps_it_here() -> None:
    for change in ({"link_bytes_s": 1e3}, {"seq_s": 0.05}):
        separation = PDSeparationPass({"d": {**DECODER, **change}}, bytes_per_token=1000)
        desk = _at(separation)
        desk.waiting = [state("long", 100, max_tokens=200)]
        desk.step()
        assert separation.placements == {}


def test_an_instance_fills_up() -> None:
    separation = PDSeparationPass({"d": {**DECODER, "seq_s": 0.005}}, bytes_per_token=1)
    desk = _at(separation)
    desk.waiting = [state(f"r{i}", 10, max_tokens=200) for i in range(20)]
    desk.step()
    assert 0 < len(separation.placements) < 10
    for one in desk.waiting:
        one.status = RequestStatus.FINISHED
    desk.step()
    assert separation.placements == {}
    assert separation.sites["d"].num_decodes == 0


def test_prompts_go_where_they_are_done_first() -> None:
    prefill = {"link_bytes_s": 1e9, "token_s": 1e-5}
    separation = PDSeparationPass({"p": prefill}, bytes_per_token=1000)
    separation.step_time.token_s, separation.step_time.is_known = 1e-4, True
    desk = Desk(separation)
    desk.waiting = [state(f"r{i}", 1000) for i in range(12)]
    desk.step()
    assert separation.placements == {f"r{i}": PhasePlacement("p") for i in range(len(separation.placements))}
    assert 0 < len(separation.placements) < 12  # until its queue is as long as the one here


def test_the_transfer_comes_after_the_prompt_and_again_after_a_preemption() -> None:
    separation = PDSeparationPass({"d": DECODER}, bytes_per_token=1000)
    desk = _at(separation)
    one = state("long", 100, max_tokens=200)
    desk.waiting = [one]
    desk.step()
    admit(one, 100)
    desk.waiting = []
    desk.step()
    assert desk.draft.placements == {"long": PhasePlacement(decode="d")}
    assert desk.draft.transfers == []  # its last chunk may not be computed yet
    one.decoding = True
    desk.step()
    assert [(t.request_id, t.block_ids, t.target_instance) for t in desk.draft.transfers] == [
        ("long", (), "d")
    ]
    desk.step()
    assert desk.draft.transfers == []
    one.num_preemptions += 1
    desk.step()
    assert len(desk.draft.transfers) == 1


def test_separation_is_harmless_in_an_engine() -> None:
    backend = TokenMemoryBackend()
    site = {"link_bytes_s": 1e12, "token_s": 1e-9, "step_s": 1e-9, "seq_s": 1e-9}
    separation = PDSeparationPass({"d": site}, bytes_per_token=1)
    engine = fake_engine(backend, passes=[separation, AFSeparationPass(("a",), ("f",))])
    for i in range(5):
        engine.add(request(str(i), [i] * 9, 5))
    got: dict[str, list[int]] = {}
    sent = []
    while engine.has_work():
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
        assert engine.last_plan is not None
        sent += [(one.request_id, len(one.block_ids)) for one in engine.last_plan.transfers]
    assert got == {str(i): expected_tokens(backend, [i] * 9, 5) for i in range(5)}
    assert sorted(sent) == [(str(i), 3) for i in range(5)]


NEEDS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "pd_separation": ({"sites": {"d": DECODER}}, "pd_separation"),
    "af_separation": ({"attention": ["a0"], "ffn": ["f0"]}, "af_separation"),
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_strategy_that_the_backend_does_not_carry_out_is_refused(name: str) -> None:
    options, feature = NEEDS[name]
    backend = TokenMemoryBackend()
    config = Config.model_validate(
        {
            "kv": {"block_size": backend.capability().block_size},
            "scheduler": {"passes": [name], "pass_options": {name: options}},
        }
    )
    with pytest.raises(ConfigError) as error:
        build_engine(config, backend)
    assert f"pass '{name}' needs a backend with {feature}" in str(error.value)
    assert "take the pass out of scheduler.passes" in str(error.value)
    backend._capability = replace(backend.capability(), features=frozenset({feature}))
    engine = build_engine(config, backend)
    assert [one.name for one in engine.scheduler.passes] == [name]


def test_a_separation_without_other_instances_needs_nothing() -> None:
    for name in ("pd_separation", "af_separation"):
        backend = TokenMemoryBackend()
        config = Config.model_validate(
            {"kv": {"block_size": backend.capability().block_size}, "scheduler": {"passes": [name]}}
        )
        build_engine(config, backend)


@pytest.mark.parametrize(
    ("sites", "told"),
    [
        ({"d": {"link_bytes_s": 0.0}}, "link_bytes_s of a site must be positive, got 0"),
        ({"d": {"link_bytes_s": "fast"}}, "link_bytes_s of a site must be a number from 0 on, got 'fast'"),
        ({"d": {"link_bytes_s": 1, "step_s": -1}}, "step_s of a site must be a number from 0 on, got -1"),
        ({"d": {"step_s": 1}}, "site 'd' of pd_separation needs link_bytes_s"),
        (
            {"d": {"link_bytes_s": 1, "speed": 2}},
            "site 'd' of pd_separation has no option 'speed'; it takes link_bytes_s, token_s, step_s, seq_s",
        ),
        ({"d": 3}, "site 'd' of pd_separation must be a mapping of link_bytes_s"),
        (["d"], "sites of pd_separation must be a mapping by name, got ['d']"),
    ],
)
def test_a_broken_site_is_explained(sites: Any, told: str) -> None:
    config = SchedulerConfig(passes=("pd_separation",), pass_options={"pd_separation": {"sites": sites}})
    with pytest.raises(ConfigError) as error:
        build_passes(config)
    assert told in str(error.value)


def test_attention_instances_get_even_shares_and_requests_stay() -> None:
    separation = AFSeparationPass(("a0", "a1"), ("f",))
    desk = Desk(separation)
    batch = [state(str(i), 10 + 10 * (i == 0)) for i in range(6)]
    desk.waiting = batch
    desk.step()
    assert separation.placements == {}
    desk.waiting, desk.running = [], [admit(one) for one in batch]
    desk.step(num_new_running=6)
    placed = dict(separation.placements)
    assert {name: one.attention for name, one in desk.draft.placements.items()} == placed
    assert {one.ffn for one in desk.draft.placements.values()} == {"f"}
    assert sorted(separation.num_tokens.values()) == [30, 40]
    batch[0].status = RequestStatus.FINISHED
    desk.running = batch[1:]
    desk.step()
    assert separation.placements == {name: site for name, site in placed.items() if name != "0"}
    assert sum(separation.num_tokens.values()) == 50


@pytest.mark.parametrize(("link_s", "count"), [(0.0, 2), (1e-4, 4), (5e-5, 3)])
def test_micro_batches_hide_the_link(link_s: float, count: int) -> None:
    assert AFSeparationPass(("a",), ("f",), link_s=link_s).num_micro_batches == count


def test_attention_and_ffn_are_named_together() -> None:
    with pytest.raises(ValueError, match="for attention and for ffn"):
        AFSeparationPass(("a",))


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("priority_based", {"age_s": "soon"}, "pass 'priority_based' with {'age_s': 'soon'}: "),
        ("vllm_like", {"watermark": -1}, "watermark must be at least 0, got -1"),
        ("chunked_prefill", {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
    ],
)
def test_a_value_that_a_pass_refuses_is_an_error_of_the_configuration(
    name: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build_passes(SchedulerConfig(passes=(name,), pass_options={name: options}))
    assert told in str(error.value)
