"""Layers with recurrent states: the gated delta rule, Mamba-2, and the rows that hold the states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.core.errors import CapacityError, PlanError, UnsupportedModelError
from sagellm.core.plan import ExecutionPlan, Join, Prefill
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.native.architectures import read_spec
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.recurrent import state_space
from sagellm.engines.native.recurrent.delta_rule import CHUNK, DeltaInputs, chunks, sequence, unit
from sagellm.engines.native.recurrent.state_space import SpaceInputs
from tests.engines.native.driver import GREEDY, Driver, RecordingBackend, Running
from tests.tiny_models import save_tiny


def inputs(num_tokens: int, heads: int, key: int, value: int, seed: int) -> DeltaInputs:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, heads, *shape, generator=generator, dtype=torch.float64)

    decay = -torch.nn.functional.softplus(3 * random())
    return DeltaInputs(unit(random(key)), unit(random(key)), random(value), decay, random().sigmoid())


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 2 * CHUNK + 9),
    split=st.integers(0, 2 * CHUNK),
    heads=st.integers(1, 3),
    key=st.integers(1, 9),
    value=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_chunks_compute_what_single_tokens_do(
    num_tokens: int, split: int, heads: int, key: int, value: int, seed: int
) -> None:
    given_inputs = inputs(num_tokens, heads, key, value, seed)
    start = torch.randn(heads, key, value, generator=torch.Generator().manual_seed(seed)).double()
    expected, last = sequence(given_inputs, start)
    first, state = chunks(given_inputs.of(0, split), start)
    second, state = chunks(given_inputs.of(split, num_tokens), state)
    torch.testing.assert_close(torch.cat([first, second]), expected, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(state, last, atol=1e-10, rtol=1e-9)


def test_strong_decay_stays_finite() -> None:
    given_inputs = inputs(CHUNK, 2, 4, 4, 0)._replace(
        log_decay=torch.full((CHUNK, 2), -60.0, dtype=torch.float64)
    )
    outputs, state = chunks(given_inputs, torch.ones(2, 4, 4, dtype=torch.float64))
    expected, last = sequence(given_inputs, torch.ones(2, 4, 4, dtype=torch.float64))
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(state, last)


def space_inputs(num_tokens: int, groups: int, shared: int, value: int, state: int, seed: int) -> SpaceInputs:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, dtype=torch.float64)

    step = torch.nn.functional.softplus(3 * random(groups * shared))
    return SpaceInputs(
        random(groups * shared, value), random(groups, state), random(groups, state), -step, step
    )


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 2 * state_space.CHUNK + 9),
    split=st.integers(0, 2 * state_space.CHUNK),
    groups=st.integers(1, 3),
    shared=st.integers(1, 3),
    value=st.integers(1, 9),
    state=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_chunks_of_mamba_compute_what_single_tokens_do(
    num_tokens: int, split: int, groups: int, shared: int, value: int, state: int, seed: int
) -> None:
    all_inputs = space_inputs(num_tokens, groups, shared, value, state, seed)
    start = torch.randn(groups * shared, state, value, generator=torch.Generator().manual_seed(seed)).double()
    expected, last = state_space.sequence(all_inputs, start)
    first, found = state_space.chunks(all_inputs.of(0, split), start)
    second, found = state_space.chunks(all_inputs.of(split, num_tokens), found)
    torch.testing.assert_close(torch.cat([first, second]), expected, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(found, last, atol=1e-10, rtol=1e-9)


def test_a_token_of_mamba_is_the_recurrence() -> None:
    """S = exp(g) S + s B x^T, output = S^T C, head by head."""
    given_inputs = space_inputs(3, 2, 2, 5, 4, 1)
    states = torch.randn(3, 4, 4, 5, generator=torch.Generator().manual_seed(2)).double()
    outputs, found = state_space.token(given_inputs, states)
    for row in range(3):
        for head in range(4):
            write, read = given_inputs.write[row, head // 2], given_inputs.read[row, head // 2]
            taken = given_inputs.step[row, head] * torch.outer(write, given_inputs.value[row, head])
            expected = given_inputs.log_decay[row, head].exp() * states[row, head] + taken
            torch.testing.assert_close(found[row, head], expected)
            torch.testing.assert_close(outputs[row, head], read @ expected)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-moe", "granite-hybrid-moe-rope"])
def test_the_kernels_give_the_tokens_of_torch(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    found: list[list[Running]] = []
    for kernels in (None, cpu_kernels):
        backend = RecordingBackend(
            tmp_path, num_blocks=64, block_size=4, max_num_seqs=4, threads=2, kernels=kernels
        )
        driver = Driver(backend)
        found.append([driver.add(range(3, end), 12) for end in (5, 30, 90)])
        driver.run()
        backend.close()
    for mine, theirs in zip(*found, strict=True):
        assert mine.outputs == theirs.outputs
        torch.testing.assert_close(torch.stack(mine.logits), torch.stack(theirs.logits), atol=1e-3, rtol=1e-3)


def test_rows_of_a_failed_step_must_join_anew(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3.5")
    backend = RecordingBackend(tmp_path, num_blocks=32, block_size=4, max_num_seqs=3, threads=1)
    driver = Driver(backend)
    driver.add([5, 6, 7, 8, 9])
    driver.step()
    backend.fail_with = CapacityError("no memory")
    with pytest.raises(CapacityError):
        driver.step()
    with pytest.raises(PlanError, match="lost their recurrent state in a failed step"):
        driver.step()
    backend.close()


def test_a_row_cannot_begin_behind_token_0_without_a_state(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3.5")
    backend = NativeBackend(tmp_path, num_blocks=32, block_size=4, max_num_seqs=3, threads=1)
    join = Join(0, "r", Tokens([3] * 6).tobytes(), 6, 4, (0, 1), GREEDY, frozenset())
    with pytest.raises(PlanError, match="r joins at token 4 without the recurrent state"):
        backend.execute(ExecutionPlan(0, joined=(join,), prefills=(Prefill(0, "r", 4, 2, samples=True),)))
    backend.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_goes_on_after_a_failed_step(tmp_path: Path, overlap: bool) -> None:
    save_tiny(tmp_path, "qwen3-next")
    backend = RecordingBackend(tmp_path, num_blocks=64, block_size=4, max_num_seqs=4, threads=1)
    settings_of = {"kv.block_size": 4, "kv.checkpoint_interval": 8, "engine.overlap": overlap}
    config = load_config(cli=settings_of, environ={}).config

    def answers(*, failing: bool) -> dict[str, list[int]]:
        engine = build_engine(config, backend)
        for number in range(3):
            prompt = Tokens([3 + number, *range(4, 20)])
            params = SamplingParams(temperature=0.0, max_tokens=12)
            engine.add(Request(f"r{number}", prompt, params))
        found: dict[str, list[int]] = {}
        for step in range(200):
            if failing and step in (2, 5):
                backend.fail_with = CapacityError("no memory") if step == 2 else RuntimeError("broken")
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.new_token_ids)
            engine.check()
            if not engine.has_work():
                return found
        raise AssertionError("the engine did not come to its end")

    assert answers(failing=True) == answers(failing=False)
    backend.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["linear_attention"] * 2}, "at least one full_attention"),
        ({"layer_types": ["mamba", "full_attention"]}, "unknown: mamba"),
        ({"linear_num_value_heads": 3}, "3 value heads of linear attention, not a multiple of 2 key heads"),
        ({"linear_conv_kernel_dim": 0}, "conv_width of recurrent layers must be positive, got 0"),
        ({"num_experts": 0}, "count must be positive, got 0"),
    ],
)
def test_malformed_configurations_are_refused_in_words(changes: dict[str, object], reason: str) -> None:
    config = {
        "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 64, "hidden_size": 32, "head_dim": 16,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "full_attention_interval": 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, **changes,
    }  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=reason):
        read_spec(config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["mamba", "mamba"]}, "at least one full_attention"),
        ({"layer_types": ["mamba", "moe"]}, "unknown: moe"),
        ({"mamba_n_groups": 3}, "4 Mamba heads, not a multiple of 3 groups"),
        ({"mamba_n_heads": 3}, "3 Mamba heads of 16, not mamba_expand x hidden_size = 64"),
        ({"mamba_d_head": "wide"}, "head_dim of recurrent layers must be positive, got 'wide'"),
        ({"mamba_d_conv": 0}, "conv_width of recurrent layers must be positive, got 0"),
        ({"time_step_limit": [0.001, 0.1]}, "only \\[0, inf\\]"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported in Mamba layers, only silu"),
        ({"num_experts_per_tok": 9}, "a token takes 9 experts, but there are only 8"),
    ],
)
def test_malformed_granite_hybrids_are_refused_in_words(changes: dict[str, object], reason: str) -> None:
    config = {
        "architectures": ["GraniteMoeHybridForCausalLM"], "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    }  # fmt: skip
    assert read_spec(config).recurrent is not None
    with pytest.raises(UnsupportedModelError, match=reason):
        read_spec({**config, **changes})
