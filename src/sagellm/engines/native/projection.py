"""One projection of the step's tokens, by the form that is fastest for their number.

For a decode batch the float32 GEMM of x86 CPUs (MKL) is slow as x W^T and a third faster as (W x^T)^T: at 16
rows of 1024 inputs 20 against 32 GFLOP/s on one AVX-512 core, at 32 rows 32 against 52. The second form wants
x transposed, which is cheap (x is small), and returns a transposed result, which elementwise operations keep:
the gated MLP runs transposed from end to end. Below and above that range the plain form is as fast or faster.

Kernels (`core/protocols/fusion.py`) are further forms, and weights in half precision may need one: torch
multiplies equal dtypes only. Which form to take for how many rows is measured at start (`Projection`).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from sagellm.core.protocols.fusion import FusedKernel

FEWEST_ROWS, MOST_ROWS = 5, 192
MEASURED_ROWS = (1, 4, 8, 12, 16, 24, 32, 64, 128)
_INPUTS, _OUTPUTS, _REPEATS = 1024, 384, 3

Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x` [T, in] times `weight` [out, in], as [T, out]; the result may be the view of an [out, T] tensor.

    A weight of another dtype than x is widened first, whole.
    """
    weight = weight.to(x.dtype)
    few = FEWEST_ROWS <= len(x) <= MOST_ROWS
    if not few or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    columns = x.t().contiguous()
    if bias is None:
        return torch.mm(weight, columns).t()
    return torch.addmm(bias[:, None], weight, columns).t()


class Projection:
    """`project` by the fastest of `kernels` and torch for activations of `dtype` and matrices of
    `weight_dtype`.

    `table` names the winner for up to so many rows; the last one holds for more. Without a kernel that
    supports these dtypes it is torch for all, and nothing is measured.
    """

    def __init__(self, kernels: Sequence[FusedKernel], dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
        x, weight = torch.ones(1, _INPUTS, dtype=dtype), torch.ones(_OUTPUTS, _INPUTS, dtype=weight_dtype)
        usable = [kernel for kernel in kernels if kernel.supports(x, weight).usable]
        self._forms: list[Form] = [project]
        self._names = ["torch"]
        if usable:
            best = _fastest([("torch", project), *((k.name, k.apply) for k in usable)], dtype, weight)
            self._names, self._forms = [name for name, _ in best], [form for _, form in best]

    @property
    def table(self) -> dict[int, str]:
        """The winner's name by number of rows."""
        return dict(zip(MEASURED_ROWS, self._names, strict=False))

    @property
    def uses_kernels(self) -> bool:
        return set(self._names) != {"torch"}

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `project`."""
        form = self._forms[min(bisect_left(MEASURED_ROWS, len(x)), len(self._forms) - 1)]
        return form(x, weight, bias)


def _fastest(
    forms: Sequence[tuple[str, Form]], dtype: torch.dtype, weight: torch.Tensor
) -> list[tuple[str, Form]]:
    """The winner for each of `MEASURED_ROWS`, by one thread's own clock: other processes do not tip it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            min(forms, key=lambda form: _cpu_s(form[1], torch.ones(rows, _INPUTS, dtype=dtype), weight))
            for rows in MEASURED_ROWS
        ]
    finally:
        torch.set_num_threads(threads)


def _cpu_s(form: Form, x: torch.Tensor, weight: torch.Tensor) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.thread_time()
        form(x, weight, None)
        best = min(best, time.thread_time() - start)
    return best
