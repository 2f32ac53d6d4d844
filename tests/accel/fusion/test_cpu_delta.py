"""The C++ step of the gated delta rule against its slow twin, and against the layer in torch."""

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
from sagellm.engines.native.recurrent.delta_layer import DeltaLayer
from sagellm.engines.native.recurrent.states import LayerStates, RecurrentRows, RecurrentSpan
from sagellm.engines.native.recurrent_spec import DeltaSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLOTS = 7


class Shape(NamedTuple):
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int


SHAPES = [
    Shape(1, 1, 1, 1, 1),
    Shape(2, 4, 16, 12, 4),
    Shape(2, 2, 33, 70, 2),
    Shape(1, 3, 8, 131, 3),
    Shape(16, 32, 128, 128, 4),
]


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "helped"])
def kernel(request: pytest.FixtureRequest) -> FusedKernel:
    found = cpu_kernels(request.param).delta_step
    if found is None:
        pytest.skip("no C++ compiler")
    return found


class Inputs(NamedTuple):
    """Those of the kernel, in its order."""

    mixed: torch.Tensor
    gates: torch.Tensor
    slots: torch.Tensor
    tails: torch.Tensor
    states: torch.Tensor
    conv: torch.Tensor
    decay: torch.Tensor
    step_bias: torch.Tensor
    norm: torch.Tensor
    eps: float

    def copy(self) -> Inputs:
        return self._replace(tails=self.tails.clone(), states=self.states.clone())


def inputs(shape: Shape, rows: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    channels = 2 * shape.key_heads * shape.key_dim + shape.heads * shape.value_dim
    return Inputs(
        random(len(rows), channels + shape.heads * shape.value_dim).to(dtype),
        (3 * random(len(rows), 2 * shape.heads)).to(dtype),
        torch.tensor(rows, dtype=torch.int64),
        random(SLOTS, shape.width - 1, channels).to(dtype),
        random(SLOTS, shape.heads, shape.key_dim, shape.value_dim),
        random(shape.width, channels).to(dtype),
        random(shape.heads),
        5 * random(shape.heads),
        random(shape.value_dim).to(dtype),
        1e-6,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_is_that_of_the_twin(kernel: FusedKernel, shape: Shape, dtype: torch.dtype) -> None:
    limit = next(t for t in kernel.tolerances if str(dtype).endswith(t.dtype))
    for rows in ([], [5], [3, 0, 6, 1]):
        mine = inputs(shape, rows, dtype)
        twin, before = mine.copy(), mine.copy()
        found, expected = kernel.apply(*mine), kernel.reference(*twin)
        torch.testing.assert_close(found, expected, atol=4 * limit.absolute, rtol=4 * limit.relative)
        torch.testing.assert_close(mine.states, twin.states, atol=1e-4, rtol=1e-4)
        assert torch.equal(mine.tails, twin.tails)
        others = [slot for slot in range(SLOTS) if slot not in rows]
        assert torch.equal(mine.states[others], before.states[others])


def test_a_row_has_the_same_bits_in_any_batch(kernel: FusedKernel) -> None:
    shape, rows = SHAPES[1], [4, 2, 0]
    together = inputs(shape, rows, torch.bfloat16)
    apart = together.copy()
    found = kernel.apply(*together)
    for i in range(3):
        own = apart._replace(
            mixed=apart.mixed[i : i + 1], gates=apart.gates[i : i + 1], slots=apart.slots[i : i + 1]
        )
        assert torch.equal(kernel.apply(*own), found[i : i + 1])
    assert torch.equal(apart.states, together.states)


def test_strided_inputs(kernel: FusedKernel) -> None:
    """A projection in columns, and states that lie behind each other by slot."""
    plain = inputs(SHAPES[1], [1, 6], torch.float32)
    wide = torch.zeros(SLOTS, plain.states[0].numel() + 5)
    states = wide[:, : plain.states[0].numel()].view(plain.states.shape)
    states.copy_(plain.states)
    strided = plain._replace(mixed=plain.mixed.t().contiguous().t(), states=states, tails=plain.tails.clone())
    assert torch.equal(kernel.apply(*strided), kernel.apply(*plain))
    assert torch.equal(states, plain.states)
    assert not wide[:, plain.states[0].numel() :].any()


def test_strong_decay_and_large_steps_stay_finite(kernel: FusedKernel) -> None:
    given = inputs(SHAPES[1], [0, 1], torch.float32)
    given.gates.copy_(torch.linspace(-90, 90, given.gates.numel()).view(given.gates.shape))
    twin = given.copy()
    found, expected = kernel.apply(*given), kernel.reference(*twin)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


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
        ("norm", torch.zeros(12, dtype=torch.bfloat16), "no kernel for"),
        ("conv", torch.zeros(3, 112), r"conv is \[3, 112\], not \[4, 112\]"),
        ("gates", torch.zeros(1, 4), r"gates is \[1, 4\], not \[1, 8\]"),
    ],
)
def test_wrong_inputs_are_refused_and_change_nothing(
    kernel: FusedKernel, name: str, wrong: torch.Tensor, reason: str
) -> None:
    given = inputs(SHAPES[1], [2], torch.float32)
    before = given.copy()
    with pytest.raises(KernelError, match=reason):
        kernel.apply(*Inputs(**{**given._asdict(), name: wrong}))
    assert torch.equal(given.states, before.states)
    assert torch.equal(given.tails, before.tails)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_with_the_kernel_is_the_layer_in_torch(kernel: FusedKernel, dtype: torch.dtype) -> None:
    """Decode rows beside a prompt, several steps, so that the states of both stay together."""
    spec, generator = DeltaSpec((True,), 4, 2, 4, 16, 12, by_head=False), torch.Generator().manual_seed(3)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    def linear(outputs: int, columns: int) -> Linear:
        return Linear(Dense(random(outputs, columns) * columns**-0.5), None)

    by_torch = DeltaLayer(
        linear(spec.conv_channels + spec.value_size, 24), linear(24, spec.value_size),
        random(4, spec.conv_channels), None, spec, 1e-6, linear(8, 24), random(4).float(),
        random(4).float(), random(12),
    )  # fmt: skip
    by_kernel = replace(by_torch, kernel=kernel)
    mine, theirs = (
        LayerStates(torch.zeros(5, 3, spec.conv_channels, dtype=dtype), torch.zeros(5, *spec.state_shape), 0)
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
