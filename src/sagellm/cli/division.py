"""What `sagellm doctor` says where there are several accelerators: how to divide the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from sagellm.cli._loading import as_text
from sagellm.core.errors import SageError

if TYPE_CHECKING:
    from sagellm.core.config import Config
    from sagellm.core.protocols.topology import TopologyInfo
    from sagellm.engines.native.footprint import Footprint

MOST_RANKS = 64
GPU_NOTE = "sagellm itself runs several ranks on CPUs only so far"


def division_line(config: Config, size: Footprint, free_bytes: Mapping[str, int], info: TopologyInfo) -> str:
    """How to divide a model over accelerators with that much free memory, and why.

    The memory is to hold the weights and the KV of one request of full length.
    """
    from sagellm.comm.topology.division import best_division
    from sagellm.engines.native.architectures import read_config
    from sagellm.engines.native.from_config import model_source
    from sagellm.engines.native.implementations import described
    from sagellm.engines.native.parallel.split import Split

    spec = described(read_config(model_source(config)), config.model.implementation)

    def divides(split: Split) -> bool:
        try:
            split.check(spec)
        except SageError:
            return False
        return True

    sizes = [n for n in range(1, MOST_RANKS + 1) if n == 1 or divides(Split(0, tensor=n))]
    stages = [n for n in range(1, MOST_RANKS + 1) if n == 1 or divides(replace(Split(0), pipeline=n))]
    needed = size.weight_bytes + size.max_model_len * size.kv_bytes_per_token
    found = best_division(info, free_bytes, needed, sizes, max(stages))
    if found is None:
        what = f"{as_text(needed)} for weights and one request of full length"
        return f"{what} fit no division of {len(free_bytes)} devices"
    if len(found.devices) == 1:
        return f"no division needed: weights and one request of full length fit {found.devices[0]}"
    key = f"parallel.tensor: {found.tensor}" if found.tensor > 1 else f"parallel.pipeline: {found.pipeline}"
    return f"division: {key} on {', '.join(found.devices)}, since {found.reason} ({GPU_NOTE})"
