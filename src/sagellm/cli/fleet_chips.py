"""`sagellm fleet chips`: the chips of this host, and which instance gets which."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.cli._loading import as_text
from sagellm.cli._options import command, flag
from sagellm.core.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from sagellm.control_plane.chip_pool import ChipPool
    from sagellm.core.config_layers import Resolved


@command
def chips(
    config: Path | None = flag("--config -c FILE", "Fleet file: also show what its instances would get."),
    save: Path | None = flag("FILE", "Write measured figures there, for fleet.chips_file."),
    *,
    measure: bool = flag("--measure", "Measure FLOP/s and bandwidth of each chip, for some seconds.", False),
) -> None:
    """Show the chips and cores of this host, and which instance of a fleet file gets which."""
    from sagellm.control_plane.chip_pool.figures import write_figures
    from sagellm.engines.build import load_config
    from sagellm.serving.fleet.chips import host_pool

    if save is not None and not measure:
        raise ConfigError("--save keeps measured figures: give --measure too")
    resolved = load_config(config)
    pool = host_pool(resolved.config.fleet, measure=measure)
    for chip in pool.chips.values():
        size = as_text(chip.memory_bytes) if chip.memory_bytes else "memory unknown"
        rates = f"{chip.flops / 1e12:.3g} TFLOP/s, {chip.bandwidth_bytes_per_s / 1e9:.3g} GB/s"
        print(
            f"{chip.name:<8} {chip.model or chip.kind.value}, {size}, {rates} ({chip.confidence.value}: {chip.source})"
        )
    print(f"{pool.num_free_cores()} core(s)")
    _print_readings()
    if save is not None:
        write_figures(save, pool.chips.values())
    if resolved.config.fleet.groups:
        _print_assignment(resolved, pool)


def _print_readings() -> None:
    """What NVML says of GPUs; nothing where there are none."""
    from sagellm.control_plane.chip_pool.readings import read_chips

    try:
        readings = read_chips()
    except ConfigError:
        return
    for reading in readings:
        parts = [f"{as_text(reading.free_bytes)} free"] if reading.free_bytes is not None else []
        parts += [f"{reading.utilization:.0%} busy"] if reading.utilization is not None else []
        parts += [f"{reading.power_w:.0f} W"] if reading.power_w is not None else []
        parts += [f"{reading.temperature_c:.0f} C"] if reading.temperature_c is not None else []
        print(f"{reading.name:<8} now: {', '.join(parts) or 'no reading'}")


def _print_assignment(resolved: Resolved, pool: ChipPool) -> None:
    from sagellm.control_plane.chip_pool import RequestWork
    from sagellm.control_plane.chip_pool.from_fleet import needs_of
    from sagellm.control_plane.fleet_instances import fleet_instances

    needs = needs_of(resolved, fleet_instances(resolved.config.fleet), pool, RequestWork())
    try:
        assignment = pool.assign(needs)
    except CapacityError as error:
        raise ConfigError(f"the fleet does not fit this host: {error}") from error
    print("\ninstances, for a model of 8 B parameters")
    for lease in assignment.leases:
        kind = "own" if lease.has_own_cores else "shared"
        print(f"  {lease.owner}: {assignment.reasons[lease.owner]}; {len(lease.cores)} {kind} core(s)")
