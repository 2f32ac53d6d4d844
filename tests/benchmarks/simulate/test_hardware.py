"""Coefficients of a file: whom they hold for, and what is said where they may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sagellm.benchmarks.simulate.hardware import hardware
from sagellm.core.errors import ConfigError
from sagellm.engines.simulator.cost_model import Coefficients

OF_A_LLAMA: dict[str, Any] = {
    "device": "a100-80g",
    "model": "llama-3.1-8b",
    "tensor_parallel": 1,
    "data_parallel": 1,
    "coefficients": Coefficients(compute=0.6).as_dict(),
    "fitted": {"not_determined": ["link_bandwidth", "link_latency", "expert_bandwidth", "chunk_attention"]},
}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "cost.json"
    path.write_text(json.dumps(OF_A_LLAMA | changes))
    return path


def test_what_was_measured_is_used_without_a_word(tmp_path: Path) -> None:
    machine = hardware("a100", "meta-llama/Llama-3.1-8B-Instruct", cost_file=written(tmp_path))
    assert machine.cost_model.coefficients == Coefficients(compute=0.6)
    assert machine.warnings == ()


def test_coefficients_of_another_device_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="coefficients of a100-80g do not hold for h200: calibrate that"):
        hardware("h200", "llama-3.1-8b", cost_file=written(tmp_path))


def test_another_model_and_parallelism_are_a_warning_that_names_what_is_assumed(tmp_path: Path) -> None:
    machine = hardware("a100", "qwen3-32b", tensor_parallel=2, cost_file=written(tmp_path))
    unlike, assumed = machine.warnings
    assert unlike == "cost.json: fitted to llama-3.1-8b, used for qwen3-32b, tensor parallel 2"
    assert assumed.endswith("so assumed: chunk_attention, link_bandwidth, link_latency")
    assert machine.described()["warnings"] == list(machine.warnings)


def test_experts_are_assumed_where_none_were_measured_and_say_little_of_dense_models(tmp_path: Path) -> None:
    machine = hardware("a100", "qwen3-30b-a3b", data_parallel=2, cost_file=written(tmp_path))
    assert "expert_bandwidth" in machine.warnings[1]
    assert machine.cost_model.num_devices == 2
    of_experts = written(tmp_path, model="qwen3-30b-a3b", data_parallel=2)
    assert "says little of a dense model" in hardware("a100", "qwen3-32b", cost_file=of_experts).warnings[-1]


def test_a_file_of_coefficients_alone_does_not_say_what_it_is_of(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(Coefficients().as_dict()))
    assert hardware("a100", "llama-3.1-8b", cost_file=path).warnings == (
        "mine.json does not say which device its coefficients are of",
    )


def test_shared_experts_leave_more_room_for_kv() -> None:
    from sagellm.core.config import Config

    one, two = (hardware("h100", "qwen3-30b-a3b", data_parallel=n) for n in (1, 2))
    assert two.num_blocks(Config()) > 3 * one.num_blocks(Config())
