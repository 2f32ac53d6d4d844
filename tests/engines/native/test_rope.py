"""RoPE: tables grow, dynamic scaling goes by position, rotation keeps lengths and depends on distances alone.

That each variant has the right frequencies is shown in test_parity against transformers.
"""

from __future__ import annotations

import pytest
import torch

from sagellm.engines.native.rope import RopeSpec, RopeTable, apply_rope, inverse_frequencies

CPU = torch.device("cpu")


def table(spec: RopeSpec) -> RopeTable:
    return RopeTable(spec, CPU, torch.float64)


def test_a_grown_table_repeats_the_small_one() -> None:
    spec = RopeSpec("dynamic", 16, 10000.0, factor=2.0, original_max=32)
    small, large = table(spec), table(spec)
    positions = torch.tensor([0, 31, 32, 700])
    before = small.cos_sin(positions, 700)
    large.cos_sin(torch.tensor([5000]), 5000)
    after = large.cos_sin(positions, 700)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_dynamic_scaling_is_plain_up_to_the_original_length_and_grows_from_there() -> None:
    dynamic = RopeSpec("dynamic", 16, 10000.0, factor=2.0, original_max=32)
    plain = RopeSpec("default", 16, 10000.0)
    positions = torch.arange(64)
    stretched, ordinary = table(dynamic).cos_sin(positions, 63), table(plain).cos_sin(positions, 63)
    torch.testing.assert_close(stretched[1][:32], ordinary[1][:32], atol=1e-6, rtol=0)
    assert (stretched[1][32:, -1] < ordinary[1][32:, -1]).all()
    theta = 10000.0 * (2.0 * 64 / 32 - 1.0) ** (16 / 14)
    angle = 63 * theta ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    torch.testing.assert_close(stretched[0][63], angle.cos(), atol=1e-5, rtol=0)


def test_llama3_keeps_high_and_divides_low_frequencies() -> None:
    plain = inverse_frequencies(RopeSpec("default", 64, 500000.0))
    spec = RopeSpec("llama3", 64, 500000.0, factor=8.0, original_max=8192)
    ratio = plain / inverse_frequencies(spec)
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(8.0)
    assert (ratio.diff() >= -1e-6).all()


def test_yarn_scales_cos_and_sin() -> None:
    spec = RopeSpec("yarn", 16, 10000.0, factor=4.0, original_max=32, attention_factor=1.5)
    cos, sin = table(spec).cos_sin(torch.tensor([0, 9]), 9)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, 2.25), atol=1e-5, rtol=0)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    cos, sin = table(RopeSpec("default", 8, 100.0)).cos_sin(torch.tensor([3, 10, 13, 20]), 20)
    heads = torch.stack([query, query, key, key])[:, None].clone()
    apply_rope(heads[[0, 2]], cos[[0, 2]], sin[[0, 2]])
    rotated = heads.clone()
    apply_rope(rotated, cos, sin)
    near, far = rotated[0, 0] @ rotated[2, 0], rotated[1, 0] @ rotated[3, 0]
    assert near == pytest.approx(float(far), abs=1e-5)
    assert rotated.norm(dim=-1)[0, 0] == pytest.approx(float(query.norm()))
