"""Contract of fused kernels: one pass over memory instead of several. The result is that of the plain
operations within a stated tolerance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from sagellm.core.protocols.quantization import QuantizedMatrix


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a kernel may be from its plain twin, for one dtype."""

    dtype: str
    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class KernelSupport:
    """Whether a kernel runs on given inputs; `reason` is the first obstacle."""

    usable: bool
    reason: str = ""


class FusedKernel(Protocol):
    """One fused operation with its slow twin. Kernels are built at first use, never at import."""

    name: str
    tolerances: tuple[Tolerance, ...]

    def supports(self, *inputs: Any) -> KernelSupport:
        """Check device, dtype, shape and strides only; cheap enough for every call."""

    def apply(self, *inputs: Any) -> Any:
        """Compute the result, within `tolerances` of `reference`.

        Changes only the inputs that the operation is defined to change (`KernelSet` says which). Where
        `supports` says no, raises `SageError` with that reason and computes nothing: the caller decides to
        use the slow twin, so that a slow path is never taken unnoticed.
        """

    def reference(self, *inputs: Any) -> Any:
        """The same operation from plain operators; runs wherever the engine runs."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How one layer's attention scores differ from q k / sqrt(head_dim).

    A score is `scale` x q k; with `softcap`, that becomes softcap x tanh(score / softcap). `sinks` [heads],
    in float32 or float64, are logits without a key: each adds to the softmax's sum of weights and has no
    value.
    """

    scale: float
    softcap: float | None = None
    sinks: Any = None

    @property
    def is_scaled_only(self) -> bool:
        """Whether the scale is all that differs."""
        return self.softcap is None and self.sinks is None


class Zeros(Protocol):
    """Gives a tensor of zeros; where it lies is the caller's matter."""

    def __call__(self, shape: tuple[int, ...], /, *, dtype: Any) -> Any: ...


class Matrix(Protocol):
    """A weight [outputs, inputs] in the form in which it is multiplied by."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int: ...

    def multiply(self, x: Any, bias: Any = None, output: Any = None) -> Any:
        """`x W^T + bias` for `x` [T, inputs] and an optional bias [outputs]. The result [T, outputs] is
        written to `output` if given: contiguous, of x's dtype or float32."""

    def multiply_grouped(self, x: Any, starts: Any, bias: Any = None) -> Any:
        """The rows of `x` [T, inputs] times the matrices of a stack of n.

        They lie one below another: rows [starts[i], starts[i + 1]) are multiplied by the i-th, with an
        optional bias [n, outputs / n]. `starts` are int64 [n + 1], from 0 to T. The result is [T, outputs /
        n]."""


class StoredMatrix(Matrix, Protocol):
    """One whose values are a checkpoint's own."""

    @property
    def dtype(self) -> Any: ...

    def store(self, first: int, rows: Any) -> None:
        """`rows` [n, inputs], of `dtype`, become the outputs [first, first + n)."""

    def rows(self, index: Any, dtype: Any = None, scale: float = 1.0) -> Any:
        """The weights of some outputs times `scale`, [len(index), inputs]. `dtype`: the matrix's own, which
        is the default, or one in which it is multiplied."""


class LinearKernel(FusedKernel, Protocol):
    """`x W^T + bias` for a matrix that `empty` made. Inputs: x [T, in], the matrix, and optionally a bias
    [out] and the output tensor `output`."""

    def multiplies(self, dtype: Any, weight_dtype: Any) -> bool:
        """Whether it takes x of `dtype` and matrices of `weight_dtype`."""

    def empty(self, outputs: int, inputs: int, dtype: Any, zeros: Zeros) -> StoredMatrix:
        """A matrix of zeros, to be filled by `store`."""

    def apply_grouped(self, x: Any, matrix: Any, starts: Any, bias: Any = None) -> Any:
        """As `Matrix.multiply_grouped`."""

    def gather(self, table: Any, index: Any, dtype: Any, scale: float = 1.0) -> Any:
        """Rows `index` [n] of a contiguous `table` [m, k] times `scale`, as [n, k]. The result has the
        table's dtype or float32."""


Work = Callable[[], object]
Capture = Callable[[Work], Work | None]
"""Runs some work on fixed tensors and returns what runs it again; None where it cannot be run again so."""


class QuantizedKernel(FusedKernel, Protocol):
    """`x W^T + bias` for a W that `pack` made. Inputs: x [T, in], the packed matrix, and optionally a bias
    and the output tensor `output`."""

    def pack(self, matrix: QuantizedMatrix) -> Any:
        """The matrix in the kernel's layout; raises `KernelError` for a form without one."""

    def apply_grouped(self, x: Any, matrix: Any, starts: Any, bias: Any = None) -> Any:
        """As `Matrix.multiply_grouped`."""


class RoutingRule(Protocol):
    """How experts are chosen: see `engines.native.experts.ExpertSpec`."""

    @property
    def per_token(self) -> int: ...

    @property
    def scoring(self) -> str: ...

    @property
    def renormalize(self) -> bool: ...

    @property
    def scale(self) -> float: ...

    @property
    def groups(self) -> int: ...

    @property
    def kept_groups(self) -> int: ...

    @property
    def group_best(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Routes:
    """Rows sorted by expert.

    Row i is of token `tokens[i]`; expert e has rows [starts[e], starts[e + 1]). The
    j-th expert of token t has row `places[t, j]` and weight `weights[t, j]`.
    """

    tokens: Any
    starts: Any
    places: Any
    weights: Any


@dataclass(frozen=True, slots=True)
class KernelSet:
    """What a machine has kernels for; where there is none, plain operators do it.

    `linear` and `quantized` as their contracts say. `attention`: of query, pools of keys and values, spans,
    tables and maybe a window and `Scores`.

    `add_rms_norm`: of x [T, n], delta [T, n] or None, weight [n] or None, eps and maybe a delta weight [n]; x
    becomes x + delta, or x + RMSNorm(delta) with that weight; the result is its RMSNorm, or x.
    `rope_to_cache`: of heads [T, query + 2 kv heads, dim], cos and sin [T, dim / 2] or None, query and key
    weight [dim], or of all heads, or None, eps, slots int64 [T], pools of keys and values; queries and keys
    are normed and rotated in place, keys and values stored at the slots. `silu_and_mul` and `gelu_and_mul`
    (gelu by tanh): of [T, 2 n], gate beside up. `clamped_swiglu`: the same, and a limit and an alpha.

    `draw`: token ids int64 [S] of logits float32 [S, vocab] and, float64 [S, 5], temperature, top_k (0: all),
    top_p, min_p and a uniform number.

    `draw_next`: draws greedily from a recorded step's logits, and moves its inputs on to the tokens; see
    `accel/fusion/draw_next.py`.

    `route`: `Routes` of router logits float32 [T, experts], a correction of scores [experts] or None, a
    `RoutingRule` and counts int64 [experts], to which the rows of each expert are added. `combine`: the
    weighted sum [T, n] of expert outputs [rows, n] by `Routes`, and of [T, n] that is added, or None.
    `grouped`: `Matrix.multiply_grouped` of x, a plain tensor of the stack, starts and bias.

    `delta_step`: one token of each of T sequences by the gated delta rule, [T, heads x value dim], of the
    input projections [T, channels + heads x value dim] and [T, 2 heads], int64 [T] the state of each, tails
    of the convolution [n, width - 1, channels] and states float32 [n, heads, key dim, value dim], both moved
    on in place, and weights: [width, channels], decay and step bias float32 [heads], norm [value dim], eps.
    `mamba_step`: the same by Mamba-2 up to the norm, float32 [T, heads x head dim], of the input projection
    [T, heads x head dim + channels + heads], the state of each, tails, states float32 [n, heads, state dim,
    head dim], and weights: [width, channels], [channels] or None, decay, step bias and skip float32 [heads].

    `record` captures work that is done by these kernels alone. `between` does other work on the way, which
    the recording then repeats in its place; None: nothing repeats it.
    """

    linear: LinearKernel | None = None
    attention: FusedKernel | None = None
    add_rms_norm: FusedKernel | None = None
    rope_to_cache: FusedKernel | None = None
    silu_and_mul: FusedKernel | None = None
    gelu_and_mul: FusedKernel | None = None
    clamped_swiglu: FusedKernel | None = None
    draw: FusedKernel | None = None
    quantized: QuantizedKernel | None = None
    route: FusedKernel | None = None
    combine: FusedKernel | None = None
    grouped: FusedKernel | None = None
    draw_next: FusedKernel | None = None
    delta_step: FusedKernel | None = None
    mamba_step: FusedKernel | None = None
    record: Capture | None = None
    between: Callable[[Work], None] | None = None


KernelSource = Callable[[int], KernelSet]
"""Gives the kernels on so many threads."""
