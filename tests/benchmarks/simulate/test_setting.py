"""Setting files: the committed one is complete, broken ones are explained, and a small one runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from sagellm.benchmarks.simulate import experiment
from sagellm.benchmarks.simulate.experiment import (
    ExperimentSetting,
    SimulationSetup,
    build_setup,
    read_setting,
    run_setting,
)
from sagellm.benchmarks.simulate.metrics import SLOPair
from sagellm.benchmarks.simulate.simulation import ServiceGoals
from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.engines.build import build_passes
from sagellm.kvmgr.scheduler_ir.strategies import CLOSING, STRATEGIES
from tests.benchmarks.simulate.stand_in import StandIn

COMMITTED = Path(__file__).parents[3] / "benchmarks" / "settings" / "ablation.yaml"
SMALL: dict[str, Any] = {
    "name": "small",
    "baseline": "default",
    "presets": ["default", "throughput"],
    "loads": [0.5, 2.0],
    "slos": [[1, 100]],
    "high_priority": {"share": 0.5, "uncached_below": 20},
    "config": {"kv.block_size": 4, "scheduler.max_batched_tokens": 16, "scheduler.max_num_seqs": 8},
    "traces": [{"file": "small.jsonl", "max_requests": 80}],
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "setting.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return path


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": 1000 * at, "input_length": 16, "output_length": 1, "hash_ids": [at]} for at in range(90)
    ]
    (tmp_path / "small.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return tmp_path


def test_the_committed_setting_is_the_experiment() -> None:
    setting = read_setting(COMMITTED)
    assert setting.baseline == setting.presets[0] == "vllm-like"
    assert setting.loads == (0.7, 0.9, 1.1)
    assert setting.slo_pairs == (SLOPair(1, 100), SLOPair(10, 30), SLOPair(3, 50))
    assert (setting.high_priority.share, setting.high_priority.uncached_below) == (0.1, 2000)
    assert all(one.sha256 for one in setting.traces)
    assert len(setting.traces) == 3


def test_each_pass_of_the_presets_stands_alone_in_the_committed_setting() -> None:
    """Beside what fifo has; so no pass is in a preset whose part in it nobody has measured."""
    setting = read_setting(COMMITTED)
    bench = build_setup(setting)
    alone = set()
    for name in setting.variants:
        passes = [one.name for one in build_passes(bench.config(name).scheduler)]
        if passes[1:] == [one for one, _ in CLOSING]:
            alone.add(passes[0])
        assert bench.config(name).scheduler.max_batched_tokens == 8192
    known = {one for preset in setting.presets for one, _ in STRATEGIES[preset]}
    assert known - {one for one, _ in CLOSING} - {"vllm_like"} <= alone
    assert alone - known == {"lifetime_aware"}


@pytest.mark.traces
def test_its_traces_are_the_ones_that_it_means() -> None:
    if "SAGELLM_TRACES" not in os.environ:
        pytest.skip("SAGELLM_TRACES names no collection of traces")
    for one in read_setting(COMMITTED).traces:
        assert one.read(Path(os.environ["SAGELLM_TRACES"])).requests


def test_a_setting_is_run(collection: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 requests of a step of 10 ms each: 100 a second is the capacity, 200 is too much."""

    def build_setup(setting: ExperimentSetting, cost_file: Path | None = None) -> SimulationSetup:
        return SimulationSetup(StandIn(), goals=ServiceGoals(setting.slo_pairs), settings=setting.config)

    monkeypatch.setattr(experiment, "build_setup", build_setup)
    said: list[str] = []
    changes = {"scheduler.max_num_seqs": 8, "scheduler.max_batched_tokens": 16, "kv.block_size": 4}
    made = run_setting(read_setting(write(collection, config=changes)), collection, say=said.append)
    capacity = made.capacities["small.jsonl"].rate
    assert capacity == pytest.approx(100, rel=0.05)
    assert [(one.load, one.preset) for one in made.results] == [
        (0.5, "default"), (0.5, "throughput"), (2.0, "default"), (2.0, "throughput"),
    ]  # fmt: skip
    assert made.results[2].workload.rate == pytest.approx(2 * capacity)
    assert made.results[2].figures["ttft_s_mean"] > 2 * made.results[0].figures["ttft_s_mean"]
    assert sum(made.results[0].workload.priorities) == 40
    assert any("capacity of default" in one for one in said)
    alone = run_setting(read_setting(write(collection)), collection, presets=["low_latency"])
    assert {one.preset for one in alone.results} == {"low_latency"}


def test_variants_run_behind_the_presets(collection: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own keys over those of the setting, and by its name."""

    def build_setup(setting: ExperimentSetting, cost_file: Path | None = None) -> SimulationSetup:
        goals = ServiceGoals(setting.slo_pairs)
        return SimulationSetup(StandIn(), goals=goals, settings=setting.config, variants=setting.variants)

    monkeypatch.setattr(experiment, "build_setup", build_setup)
    variants = {
        "narrow": {"preset": "fifo", "config": {"scheduler.max_num_seqs": 2}},
        "alone": {"preset": "fifo", "config": {"scheduler.passes": ["fairness"]}},
    }
    setting = read_setting(write(collection, variants=variants, loads=[0.5]))
    assert setting.names == ("default", "throughput", "alone", "narrow")
    made = run_setting(setting, collection)
    configs = {one.preset: one.config.scheduler for one in made.results}
    assert tuple(configs) == setting.names
    assert (configs["narrow"].max_num_seqs, configs["narrow"].strategy) == (2, "fifo")
    assert (configs["alone"].max_num_seqs, configs["alone"].passes) == (8, ("fairness",))
    one = run_setting(setting, collection, presets=["narrow"])
    assert [result.preset for result in one.results] == ["narrow"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loads": []}, "loads: Tuple should have at least 1 item"),
        ({"loads": [0]}, "numbers above 0, got 0"),
        ({"slos": [[1, -2]]}, "numbers above 0, got -2"),
        ({"slos": [[1]]}, "slos.0.1: Field required"),
        ({"speed": 1}, "speed: Extra inputs are not permitted; a setting has name, about, device"),
        ({"traces": [{"file": "x", "sha256": "abc"}]}, "traces.0.sha256"),
        ({"seed": -1}, "seed"),
        ({"variants": {"slow": {"preset": "fifo"}}}, "variants.slow.config: Field required"),
        ({"variants": {"fifo": {"preset": "slo", "config": {"engine.seed": 1}}}}, "fifo is a preset"),
    ],
)
def test_broken_settings_are_explained(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_setting(write(tmp_path, **changes))
    assert text in str(error.value)
    assert "setting.yaml" in str(error.value)


def test_what_a_setting_names_must_exist(collection: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown preset 'nope'.* There are: .*throughput"):
        run_setting(read_setting(write(collection, presets=["nope"])), collection)
    for changes, told in (
        ({"scheduler.passes": ["nope"]}, "unknown pass 'nope'"),
        (
            {"scheduler.passes": ["fairness"], "scheduler.pass_options": {"fairness": {"x": 1}}},
            "no option 'x'",
        ),
    ):
        variants: dict[str, Any] = {"mine": {"preset": "fifo", "config": changes}}
        with pytest.raises(UnknownNameError, match=told):
            run_setting(read_setting(write(collection, variants=variants)), collection)
    variants = {"mine": {"preset": "fifo", "config": {"engine.seed": 1}}}
    with pytest.raises(UnknownNameError, match=r"unknown preset or variant 'min'.* There are: .*mine"):
        run_setting(read_setting(write(collection, variants=variants)), collection, presets=["min"])
    with pytest.raises(ConfigError, match="no device 'abacus'"):
        run_setting(read_setting(write(collection, device="abacus")), collection)
    other = [{"file": "small.jsonl", "sha256": "0" * 64}]
    with pytest.raises(ConfigError, match="the setting was made for 0000"):
        run_setting(read_setting(write(collection, traces=other)), collection)
    with pytest.raises(ConfigError, match="cannot read the trace"):
        run_setting(read_setting(write(collection, traces=[{"file": "gone.jsonl"}])), collection)
