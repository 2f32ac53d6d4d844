"""Measured figures of chips as a file, so that a fleet starts without measuring again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from sagellm.core.errors import ConfigError
from sagellm.core.files import read_text
from sagellm.core.protocols.chip_pool import ChipCapability

MAX_FILE_BYTES = 1 << 20


def write_figures(path: Path, chips: Iterable[ChipCapability]) -> None:
    """Write FLOP/s and bandwidth of each chip. Raises `ConfigError` if the file cannot be written."""
    rows = {
        chip.name: {
            "model": chip.model, "flops": chip.flops, "bandwidth_bytes_per_s": chip.bandwidth_bytes_per_s
        }
        for chip in chips
    }  # fmt: skip
    try:
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def with_figures(chips: Iterable[ChipCapability], path: Path) -> list[ChipCapability]:
    """The chips with the file's figures. Those of another model than was measured keep their own.

    Raises `ConfigError` for a file that is not of `write_figures`.
    """
    try:
        rows = json.loads(read_text(path, MAX_FILE_BYTES))
        found = []
        for chip in chips:
            row = rows.get(chip.name)
            if row is not None and row["model"] == chip.model:
                chip = chip.measured(float(row["flops"]), float(row["bandwidth_bytes_per_s"]))
            found.append(chip)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} holds no figures of chips ({error}): `sagellm fleet chips --measure --save {path}` makes it"
        ) from error
    return found
