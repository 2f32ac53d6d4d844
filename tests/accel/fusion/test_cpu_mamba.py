"""The C++ step of Mamba-2 against its slow twin, and against the layer in torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.core.errors import KernelError
from sagellm.core.protocols.fusion import FusedKernel
from sagellm.engines.native.layer_parts import Linear
from sagellm.engines.native.matrices import Dense
from sagellm.engines.native.recurrent.mamba_layer import MambaLayer
from sagellm.engines.native.recurrent.states import LayerStates, RecurrentRows, RecurrentSpan
from sagellm.engines.native.recurrent_spec import MambaSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLOTS = 7


class Shape(NamedTuple):
    groups: int
    heads: int
    state_dim: int
    head_dim: int
    width: int


SHAPES = [
    Shape(1, 1, 1, 1, 1),
    Shape(2, 4, 16, 12, 4),
    Shape(2, 2, 33, 70, 2),
    Shape(1, 3, 8, 131, 3),
    Shape(1, 48, 128, 64, 4),
]


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "helped"])
def kernel(request: pytest.FixtureRequest) -> FusedKernel:
    found = cpu_kernels(request.param).mamba_step
    if found is None:
        pytest.skip("no C++ compiler")
    return found


class Inputs(NamedTuple):
    """Those of the kernel, in its order."""

    projected: torch.Tensor
    slots: torch.Tensor
    tails: torch.Tensor
    states: torch.Tensor
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    decay: torch.Tensor
    step_bias: torch.Tensor
    skip: torch.Tensor

    def copy(self) -> Inputs:
        return self._replace(tails=self.tails.clone(), states=self.states.clone())


def inputs(
    shape: Shape, rows: Sequence[int], dtype: torch.dtype, seed: int = 0, *, bias: bool = True
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    inner = shape.heads * shape.head_dim
    channels = inner + 2 * shape.groups * shape.state_dim
    return Inputs(
        random(len(rows), inner + channels + shape.heads).to(dtype),
        torch.tensor(rows, dtype=torch.int64),
        random(SLOTS, shape.width - 1, channels).to(dtype),
        random(SLOTS, shape.heads, shape.state_dim, shape.head_dim),
        random(shape.width, channels).to(dtype),
        random(channels).to(dtype) if bias else None,
        random(shape.heads),
        3 * random(shape.heads),
        random(shape.heads),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_is_that_of_the_twin(kernel: FusedKernel, shape: Shape, dtype: torch.dtype) -> None:
    for rows in ([], [5], [3, 0, 6, 1]):
        mine = inputs(shape, rows, dtype, bias=len(rows) != 1)
        twin, before = mine.copy(), mine.copy()
        found, expected = kernel.apply(*mine), kernel.reference(*twin)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(mine.states, twin.states, atol=1e-4, rtol=1e-4)
        assert torch.equal(mine.tails, twin.tails)
        others = [slot for slot in range(SLOTS) if slot not in rows]
        assert torch.equal(mine.states[others], before.states[others])
        assert torch.equal(mine.tails[others], before.tails[others])


def test_a_row_has_the_same_bits_in_any_batch(kernel: FusedKernel) -> None:
    together = inputs(SHAPES[1], [4, 2, 0], torch.bfloat16)
    apart = together.copy()
    found = kernel.apply(*together)
    for i in range(3):
        own = apart._replace(projected=apart.projected[i : i + 1], slots=apart.slots[i : i + 1])
        assert torch.equal(kernel.apply(*own), found[i : i + 1])
    assert torch.equal(apart.states, together.states)


def test_strided_inputs(kernel: FusedKernel) -> None:
    """A projection in columns, and states that lie behind each other by slot."""
    plain = inputs(SHAPES[1], [1, 6], torch.float32)
    wide = torch.zeros(SLOTS, plain.states[0].numel() + 5)
    states = wide[:, : plain.states[0].numel()].view(plain.states.shape)
    states.copy_(plain.states)
    strided = plain._replace(
        projected=plain.projected.t().contiguous().t(), states=states, tails=plain.tails.clone()
    )
    assert torch.equal(kernel.apply(*strided), kernel.apply(*plain))
    assert torch.equal(states, plain.states)
    assert not wide[:, plain.states[0].numel() :].any()


def test_large_steps_stay_finite(kernel: FusedKernel) -> None:
    mine = inputs(SHAPES[1], [0, 1], torch.float32)
    mine.projected[:, -4:] = torch.tensor([[-90.0, -20.0, 20.0, 90.0], [90.0, 0.0, -1.0, 21.0]])
    twin = mine.copy()
    found, expected = kernel.apply(*mine), kernel.reference(*twin)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "wrong", "reason"),
    [
        ("slots", torch.tensor([SLOTS]), "index"),
        ("slots", torch.tensor([-1]), "index"),
        ("slots", torch.tensor([0], dtype=torch.int32), "int64"),
        ("slots", torch.tensor([0, 1]), r"slots is \[2\], not \[1\]"),
        ("states", torch.zeros(SLOTS, 4, 16, 12, dtype=torch.float64), "float32"),
        ("states", torch.zeros(SLOTS, 4, 12, 16).transpose(2, 3), "contiguous"),
        ("states", torch.zeros(SLOTS, 3, 16, 12), "channels for 3 heads"),
        ("states", torch.zeros(SLOTS + 1, 4, 16, 12), "no states and tails"),
        ("conv_bias", torch.zeros(112, dtype=torch.bfloat16), "no kernel for"),
        ("conv_bias", torch.zeros(111), r"conv_bias is \[111\], not \[112\]"),
        ("conv", torch.zeros(3, 112), r"conv is \[3, 112\], not \[4, 112\]"),
        ("skip", torch.zeros(3), r"skip is \[3\], not \[4\]"),
    ],
)
def test_wrong_inputs_are_refused_and_change_nothing(
    kernel: FusedKernel, name: str, wrong: torch.Tensor, reason: str
) -> None:
    mine = inputs(SHAPES[1], [2], torch.float32)
    before = mine.copy()
    with pytest.raises(KernelError, match=reason):
        kernel.apply(*Inputs(**{**mine._asdict(), name: wrong}))
    assert torch.equal(mine.states, before.states)
    assert torch.equal(mine.tails, before.tails)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_with_the_kernel_is_the_layer_in_torch(kernel: FusedKernel, dtype: torch.dtype) -> None:
    """Decode rows beside a prompt, several steps, so that the states of both stay together."""
    spec = MambaSpec((True,), 4, 4, 12, 16, 2, 1e-6, has_bias=False, conv_bias=True)
    generator = torch.Generator().manual_seed(3)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    def linear(outputs: int, columns: int) -> Linear:
        return Linear(Dense(random(outputs, columns) * columns**-0.5), None)

    channels = spec.conv_channels
    by_torch = MambaLayer(
        linear(spec.inner_size + channels + 4, 24), linear(24, spec.inner_size), random(4, channels),
        random(channels), spec, random(4).float(), random(4).float(), random(4).float(),
        random(spec.inner_size),
    )  # fmt: skip
    by_kernel = replace(by_torch, kernel=kernel)
    mine, theirs = (
        LayerStates(torch.zeros(5, 3, channels, dtype=dtype), torch.zeros(5, *spec.state_shape), 0)
        for _ in range(2)
    )
    limit = next(t for t in kernel.tolerances if str(dtype).endswith(t.dtype))
    for rows in (
        RecurrentRows(torch.tensor([], dtype=torch.long), [RecurrentSpan(0, 9, 2), RecurrentSpan(9, 3, 4)]),
        RecurrentRows(torch.tensor([4, 2]), [RecurrentSpan(2, 10, 0)]),
        RecurrentRows(torch.tensor([0, 4, 2]), []),
    ):
        x = random(len(rows.decode) + sum(span.num_tokens for span in rows.prefill), 24)
        found, expected = by_kernel(x, rows, mine), by_torch(x, rows, theirs)
        torch.testing.assert_close(found, expected, atol=8 * limit.absolute, rtol=8 * limit.relative)
        torch.testing.assert_close(
            mine.matrix, theirs.matrix, atol=8 * limit.absolute, rtol=8 * limit.relative
        )
        torch.testing.assert_close(mine.conv, theirs.conv, atol=0, rtol=0)
