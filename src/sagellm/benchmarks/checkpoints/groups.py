"""`KVGroups`: the bytes that a hybrid model keeps of a prefix."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from sagellm.core.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KVGroups:
    """Bytes per token of full attention, and bytes of one checkpoint.

    `attention_bytes`: K and V of one token in all layers of full attention. `state_bytes`: the recurrent
    states of one sequence. `window_tokens`, `window_bytes`: layers of sliding-window attention keep so many
    last tokens, at so many bytes each; a checkpoint holds them too, because a prefix cannot be continued
    without them. Raises `ConfigError` for sizes out of range.
    """

    attention_bytes: int
    state_bytes: int
    window_tokens: int = 0
    window_bytes: int = 0

    def __post_init__(self) -> None:
        if self.attention_bytes < 1 or min(dataclasses.astuple(self)) < 0:
            raise ConfigError(f"bytes of attention must be positive, of no group negative: {self}")

    def checkpoint_bytes(self, num_tokens: int) -> int:
        """Bytes of the checkpoint behind so many tokens."""
        return self.state_bytes + min(num_tokens, self.window_tokens) * self.window_bytes


PRESETS: Mapping[str, KVGroups] = {
    # 48 layers, 12 of attention: 12 x (K, V) x 2 heads x 256 x 2 bytes. 36 of the gated delta rule: 32 heads
    # x 128 x 128 x 4 bytes, and 3 positions of a convolution over 8,192 channels x 2 bytes.
    "qwen3-next": KVGroups(24_576, 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)),
    # 52 layers, 4 of attention: 4 x (K, V) x 8 heads x 128 x 2 bytes. 24 of Mamba-2: 128 heads x 64 x 128 x 4
    # bytes, and 3 positions of a convolution over 10,240 channels x 2 bytes.
    "nemotron-h": KVGroups(16_384, 24 * (128 * 64 * 128 * 4 + 3 * 10_240 * 2)),
}
"""Qwen3-Next-80B-A3B and Nemotron-H-8B, from the published config.json, KV in 16 bits, states in 32."""


def parse_groups(text: str) -> KVGroups:
    """Returns a preset, or `attention_bytes=24576,state_bytes=...`. Raises `ConfigError`."""
    if text in PRESETS:
        return PRESETS[text]
    try:
        given = {name.strip(): int(value) for name, value in (part.split("=") for part in text.split(","))}
        return KVGroups(**given)
    except (ValueError, TypeError) as error:
        fields = ", ".join(field.name for field in dataclasses.fields(KVGroups))
        raise ConfigError(
            f"KV groups {text!r}: write {' or '.join(PRESETS)}, or name=bytes with commas, of {fields}"
        ) from error
