"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and ways to extend it.

    default   angle(p, i) = p * theta^(-2i/d)
    linear    positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595)
    dynamic   theta grows with the length ("dynamic NTK": bloc97 and emozilla, 2023)
    llama3    low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1, 2024)
    yarn      the same by number of rotations, a factor on cos and sin (Peng et al. 2023, arXiv:2309.00071)
    longrope  each frequency divided by a number of its own (Ding et al. 2024, arXiv:2402.13753)
    proportional  the first dims of each half of a head rotate as in a whole head, the others stay (Gemma 4)

Dynamic scaling is position-wise: query and key at position p use the theta for length max(p + 1,
max_position_embeddings). For prompts within `max_position_embeddings` this is what transformers computes,
token by token, generation beyond it included. For longer prompts the result of transformers depends on how
the prompt is fed, since all keys of one forward pass get the theta of its last position. The rule of this
module does not, so chunked prefill, prefix reuse and recomputation after preemption give the same keys.

LongRoPE has two sets of divisors, for lengths up to `original_max_position_embeddings` and beyond. Which one
is used follows, as in vLLM, from the longest sequence that the engine takes, since KV of the two cannot be
mixed.

A step rotates all dims of a head, element i with element i + head_dim / 2. Where a family rotates fewer dims,
or neighbours, the rows of its query and key projections are reordered when they are loaded
(`RopeSpec.head_order`): scores do not depend on the order of dims. Dims that stay have cos 1 and sin 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from sagellm.core.errors import UnsupportedModelError
from sagellm.engines.native.matrices import LookUp, look_up

VARIANTS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_FIRST_TABLE = 1024


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of one variant; those of other variants keep their defaults. `original_max` is the length
    before extension, in tokens. `attention_factor` multiplies cos and sin. The first `dim` numbers of a head
    are rotated, 0 means that `head_dim` is the same; as they are stored, pairs are neighbours if
    `interleaved`, else `dim / 2` apart.
    """

    variant: str
    dim: int
    theta: float
    head_dim: int = 0
    factor: float = 1.0
    original_max: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    interleaved: bool = False
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False
    num_rotated: int = 0
    """Of "proportional": pairs that rotate; the others stay."""

    def __post_init__(self) -> None:
        if self.dim % 2 or self.dim < 4 or self.head_dim % 2:
            dims = f"{self.dim} of {self.head_dim}" if self.head_dim else str(self.dim)
            raise UnsupportedModelError(f"RoPE needs an even head_dim of at least 4, got {dims}")
        if self.theta <= 0 or self.factor <= 0:
            raise UnsupportedModelError(f"RoPE: theta {self.theta} and factor {self.factor} must be positive")

    @property
    def head_order(self) -> tuple[int, ...]:
        """The stored dims of a head in the order of a step. Empty where that is the stored one."""
        head_dim = self.head_dim or self.dim
        if self.dim == head_dim and not self.interleaved:
            return ()
        first = range(0, self.dim, 2) if self.interleaved else range(self.dim // 2)
        second = range(1, self.dim, 2) if self.interleaved else range(self.dim // 2, self.dim)
        middle = (self.dim + head_dim) // 2
        return (*first, *range(self.dim, middle), *second, *range(middle, head_dim))

    def max_length(self, max_positions: int) -> int:
        """Tokens to which the variant extends `max_positions`."""
        if self.variant in ("linear", "dynamic"):
            return int(max_positions * self.factor)
        if self.variant == "yarn":
            return max(max_positions, int(self.original_max * self.factor))
        return max_positions

    def for_length(self, max_length: int) -> RopeSpec:
        """The same for an engine whose sequences have at most so many tokens."""
        return replace(self, is_long=max_length > self.original_max) if self.long_factors else self


def read_rope(config: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeSpec:
    """RoPE parameters of a config.json, transformers 4 or 5. Raises `UnsupportedModelError`."""
    params: dict[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if any(isinstance(value, dict) for value in params.values()):
        raise UnsupportedModelError("RoPE parameters that differ by layer type are not supported")
    variant = params.get("rope_type") or params.get("type") or "default"
    if variant not in VARIANTS or "mrope_section" in params:
        shown = "mrope" if "mrope_section" in params else variant
        raise UnsupportedModelError(f"RoPE type {shown!r} is not supported; these are: {', '.join(VARIANTS)}")
    partial = params.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if not 0 < partial <= 1:
        raise UnsupportedModelError(f"partial_rotary_factor must be above 0 and at most 1, got {partial}")
    theta = float(params.get("rope_theta") or config.get("rope_theta") or 10000.0)
    key = "original_max_position_embeddings"
    original = config.get(key) or params.get(key)
    if variant == "proportional":
        factor, num_rotated = float(params.get("factor") or 1.0), int(partial * head_dim // 2)
        return RopeSpec(variant, head_dim, theta, head_dim, factor, num_rotated=num_rotated)
    base = RopeSpec(variant, int(head_dim * partial), theta, head_dim)
    if variant == "default":
        return base
    return _extended(base, params, max_positions, int(original or max_positions))


def _extended(base: RopeSpec, params: Mapping[str, Any], max_positions: int, original_max: int) -> RopeSpec:
    factor = params.get("factor")
    if factor is None and base.variant in ("yarn", "longrope"):
        factor = max_positions / original_max
    wanted = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
    }.get(base.variant, ())
    missing = [key for key in wanted if params.get(key) is None]
    if factor is None or missing:
        missing += ["factor"] if factor is None else []
        raise UnsupportedModelError(f"RoPE type {base.variant!r} needs {', '.join(missing)} in config.json")
    if base.variant == "longrope":
        return _longrope(base, params, float(factor), original_max)
    return replace(
        base,
        factor=float(factor),
        original_max=max_positions if base.variant == "dynamic" else original_max,
        low_freq_factor=float(params.get("low_freq_factor") or 1.0),
        high_freq_factor=float(params.get("high_freq_factor") or 4.0),
        attention_factor=_yarn_attention(params, float(factor)) if base.variant == "yarn" else 1.0,
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        truncate=bool(params.get("truncate", True)),
    )


def _longrope(base: RopeSpec, params: Mapping[str, Any], factor: float, original_max: int) -> RopeSpec:
    lists = {key: params[key] for key in ("short_factor", "long_factor")}
    for key, values in lists.items():
        is_right = isinstance(values, list) and all(
            isinstance(x, int | float) and 0 < x < math.inf for x in values
        )
        if not is_right or len(values) != base.dim // 2:
            raise UnsupportedModelError(
                f"RoPE type 'longrope': {key} must be {base.dim // 2} positive numbers, one for each pair of "
                f"rotated dimensions"
            )
    if original_max < 2:
        raise UnsupportedModelError(f"RoPE: original_max_position_embeddings is {original_max}")
    attention = params.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original_max)) if factor > 1 else 1.0
    short, long = (tuple(map(float, lists[key])) for key in lists)
    return replace(
        base, factor=factor, original_max=original_max, attention_factor=float(attention),
        short_factors=short, long_factors=long,
    )  # fmt: skip


def _yarn_attention(params: Mapping[str, Any], factor: float) -> float:
    """The factor on cos and sin: as given, or 0.1 ln(factor) + 1 (eq. 22). With `mscale` and `mscale_all_dim`
    it is DeepSeek's ratio of two of those.
    """
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = params.get("mscale"), params.get("mscale_all_dim")
    return mscale(over) / mscale(under) if over and under else mscale(1.0)


def yarn_score_factor(config: Mapping[str, Any]) -> float:
    """The factor on attention scores that DeepSeek's `mscale_all_dim` asks for."""
    params: dict[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    weight, factor = params.get("mscale_all_dim") or 0.0, float(params.get("factor") or 1.0)
    return (0.1 * weight * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """Radians per position, [dim / 2] float32. For "dynamic" they hold below `original_max`."""
    frequencies = 1.0 / spec.theta ** _exponents(spec)
    if spec.variant == "longrope":
        divisors = spec.long_factors if spec.is_long else spec.short_factors
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * spec.theta ** _exponents(spec))
    if spec.variant == "linear":
        return frequencies / spec.factor
    if spec.variant == "proportional":
        rotates = torch.arange(len(frequencies)) < spec.num_rotated
        return torch.where(rotates, frequencies / spec.factor, 0.0)
    if spec.variant == "llama3":
        return _llama3(spec, frequencies)
    if spec.variant == "yarn":
        return _yarn(spec, frequencies)
    return frequencies


def _exponents(spec: RopeSpec) -> torch.Tensor:
    return torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim


def _llama3(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Divide wavelengths above original/low, keep those below original/high. Between, the ramp is linear in
    1/wavelength.
    """
    rotations = spec.original_max / (2 * math.pi / frequencies)
    ramp = (rotations - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = ramp.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / spec.factor + keep * frequencies


def _yarn(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Keep dimensions with over `beta_fast` rotations, divide those below `beta_slow` (section 3.2)."""

    def dimension(rotations: float) -> float:
        ratio = spec.original_max / (rotations * 2 * math.pi)
        return spec.dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies / spec.factor * ramp + frequencies * (1 - ramp)


class RopeTable:
    """cos and sin by position, grown when a longer sequence comes. Angles are float32, as in the reference,
    whatever `dtype` the model computes in.
    """

    def __init__(
        self, spec: RopeSpec, device: torch.device, dtype: torch.dtype, look_up: LookUp = look_up
    ) -> None:
        self._spec = spec
        self._look_up = look_up
        self._device = device
        self._dtype = dtype
        self._frequencies = inverse_frequencies(spec)
        self._num_still = (spec.head_dim or spec.dim) // 2 - spec.dim // 2
        self._cos = self._sin = torch.empty(0, spec.dim // 2 + self._num_still, dtype=dtype, device=device)

    def cos_sin(self, positions: torch.Tensor, max_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The cos and sin of `positions` [T], each [T, head_dim / 2]. No position exceeds `max_position`."""
        self.extend_to(max_position)
        look_up, dtype = self._look_up, self._dtype
        return look_up(self._cos, positions, dtype), look_up(self._sin, positions, dtype)

    def extend_to(self, max_position: int) -> None:
        """Extend the table to this position."""
        if max_position < len(self._cos):
            return
        length = max(_FIRST_TABLE, 1 << max_position.bit_length())
        angles = self._angles(torch.arange(length, dtype=torch.float32))
        scale = self._spec.attention_factor
        still = angles.new_ones(length, self._num_still)
        cos = torch.cat([angles.cos() * scale, still], dim=1)
        sin = torch.cat([angles.sin() * scale, still - 1], dim=1)
        self._cos, self._sin = cos.to(self._device, self._dtype), sin.to(self._device, self._dtype)

    def _angles(self, positions: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        if spec.variant != "dynamic":
            return positions[:, None] * self._frequencies
        length = (positions + 1).clamp(min=spec.original_max)
        growth = spec.factor * length / spec.original_max - (spec.factor - 1)
        theta = spec.theta * growth ** (spec.dim / (spec.dim - 2))
        return positions[:, None] * (1.0 / theta[:, None] ** _exponents(spec))


def apply_rope(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> None:
    """Rotate the first `dim` numbers of `heads` [T, H, head_dim] in place.

    `cos` and `sin` [T, dim / 2] are those of the angles. Element i of the first half of these numbers pairs
    with element i of the second half, or, if `interleaved`, element 2 i with the next one.
    """
    half = cos.shape[-1]
    rotated = heads[..., : 2 * half]
    first, second = rotated[..., :half], rotated[..., half:]
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.addcmul(first * cos, second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)
