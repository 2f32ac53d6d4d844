"""`sagellm overlap`: how much of a transfer hides behind the computation of a prompt."""

from __future__ import annotations

from pathlib import Path

from sagellm.cli._options import argument, command, flag
from sagellm.core.errors import ConfigError

_PATTERN_HELP = "kv-send, kv-load or micro-batches."
_NETWORK_HELP = "Of one instance, for kv-send; default: the device's."
_CACHED_HELP = "Tokens of the prompt's head whose KV is in host memory, for kv-load."


@command
def overlap(
    pattern: str = argument("PATTERN", _PATTERN_HELP, ...),
    device: str = flag("NAME", "Device of the cost model.", "h100-80g"),
    model: str = flag("--model -m NAME", "Model, or a config.json.", "llama-3.1-8b"),
    tensor_parallel: int = flag("N", "Devices per instance.", 1),
    cost: Path | None = flag("FILE", "Coefficients that `calibrate` wrote."),
    tokens: int = flag("N", "Tokens of the prompt that are computed.", 8192),
    cached: int = flag("N", _CACHED_HELP, 0),
    chunk: int = flag("N", "Tokens computed in one step.", 2048),
    network: float | None = flag("GB/S", _NETWORK_HELP),
    width: int = flag("N", "Columns of the picture.", 72),
    plots: Path | None = flag("FOLDER", "Draw overlap.png there; needs the extra plots."),
) -> None:
    """Plan how a prefill overlaps with transfers, on a simulated device.

    kv-send: KV goes to another instance layer by layer. kv-load: KV of a cached prefix comes from host
    memory layer by layer. micro-batches: two halves of a batch take turns with the collectives of tensor
    parallelism.
    """
    from sagellm.benchmarks.reporting import check_folder, save_figures
    from sagellm.benchmarks.simulate.hardware import hardware
    from sagellm.benchmarks.simulate.overlap import PrefillCase, estimate, gantt_figure
    from sagellm.comm.overlap.gantt import gantt_text

    if width < 1:
        raise ConfigError(f"--width {width}: at least one column")
    if plots is not None:
        check_folder(plots)
    machine = hardware(device, model, tensor_parallel=tensor_parallel, cost_file=cost)
    rate = None if network is None else network * 1e9
    found = estimate(pattern, PrefillCase(machine.cost_model, tokens, cached, chunk, rate))
    for warning in machine.warnings:
        print(warning)
    print(f"{machine.cost_model.model.name} on {machine.cost_model.device.name}: {found.title}")
    overlapped_s = found.schedule.makespan_s
    print(f"without overlap {found.alone_s * 1e3:,.4g} ms, with overlap {overlapped_s * 1e3:,.4g} ms")
    print(gantt_text(found.schedule, width))
    if plots is not None:
        print(*save_figures(plots, {"overlap": gantt_figure(found)}), sep="\n")
