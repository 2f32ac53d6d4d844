"""How many rows each expert has computed, in diagnostics and metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats
from sagellm.core.protocols.fusion import KernelSet
from sagellm.core.types import CapabilityDescriptor
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.serving.metrics import ServerMetrics
from tests.engines.native.driver import Driver, RecordingBackend
from tests.tiny_models import save_tiny


@pytest.mark.parametrize("by_kernel", [False, True], ids=["torch", "kernels"])
def test_rows_of_experts_are_counted(tmp_path: Path, by_kernel: bool) -> None:
    """A token uses `per_token` experts in each layer; the last layer computes sampled rows alone."""
    save_tiny(tmp_path, "qwen3-moe-some-dense")
    backend = RecordingBackend(
        tmp_path, num_blocks=24, max_num_seqs=3, max_model_len=64, block_size=8, threads=1, dtype="float32",
        kernels=cpu_kernels if by_kernel else lambda _: KernelSet(),
    )  # fmt: skip
    driver = Driver(backend)
    driver.add(range(3, 14), 4)
    driver.run()
    assert isinstance(backend.spec, ModelSpec)
    experts, last = backend.spec.experts, backend.spec.num_layers - 1
    assert experts is not None
    rows = backend.expert_rows()
    assert list(rows) == [i for i, has in enumerate(experts.layers) if has]
    assert 0 < len(rows) < backend.spec.num_layers
    for layer, counts in rows.items():
        num_tokens = 4 if layer == last else 11 + 3
        assert len(counts) == experts.count
        assert sum(counts) == num_tokens * experts.per_token
    backend.close()


def test_models_without_experts_have_no_counts(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    backend = RecordingBackend(tmp_path, num_blocks=8, max_model_len=64, block_size=8, threads=1)
    assert backend.expert_rows() == {}
    backend.close()


@pytest.mark.parametrize("asked", [False, True])
def test_the_metric_has_a_series_per_layer_and_expert(asked: bool) -> None:
    capability = CapabilityDescriptor("cpu", "float32", 8, 8, 1, 8, 1)
    metrics = ServerMetrics("m", capability, lambda: EngineStats(0, 0, 0, 0, 1), experts=asked)
    metrics.diagnostics = EngineDiagnostics(expert_rows={3: [5, 7]})
    line = 'sagellm_expert_rows_total{expert="1",layer="3",model_name="m"} 7.0'
    assert (line in metrics.text().decode()) is asked
