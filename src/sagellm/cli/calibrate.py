"""`sagellm calibrate`: a cost model for `simulate`, fitted to measured request timings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.benchmarks.reporting import Table, check_writable, print_tables, write_json
from sagellm.cli._options import OptionGroup, argument, command, flag
from sagellm.core.errors import ConfigError

if TYPE_CHECKING:
    from sagellm.core.config import Config
    from sagellm.engines.simulator.calibrate import Calibration, Prior
    from sagellm.engines.simulator.cost_model import CostModel
    from sagellm.engines.simulator.measured import RequestTiming, SimulatedRun

_BLOCKS_HELP = "KV blocks of the measured engine; default: what the device's memory leaves."
_SEQS_HELP = "Requests that ran together at most, per data-parallel rank; default: 256."
_BATCHED_HELP = "Tokens of one step at most, per data-parallel rank; default: 2048."
_CACHING_HELP = "Whether it reused prefixes (of preempted requests, here); default: yes."


@dataclass(frozen=True, slots=True)
class MeasuredEngine(OptionGroup):
    """How the measured engine was set up."""

    num_blocks: int | None = flag("N", _BLOCKS_HELP)
    block_size: int = flag("N", "Tokens per KV block; default: 16.", 16)
    max_num_seqs: int = flag("N", _SEQS_HELP, 256)
    max_batched_tokens: int = flag("N", _BATCHED_HELP, 2048)
    tensor_parallel: int = flag("N", "Devices that shared each layer; default: 1.", 1)
    data_parallel: int = flag("N", "Ranks with requests of their own that shared the experts; default: 1.", 1)
    memory_utilization: float = flag("X", "Share of the device's memory that it used; default: 0.9.", 0.9)
    preset: str = flag("NAME", "Preset whose scheduling it is like; default: vllm-like.", "vllm-like")
    prefix_caching: bool = flag("--prefix-caching/--no-prefix-caching", _CACHING_HELP, True)

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: it must be positive")
        if self.memory_utilization > 1:
            raise ConfigError(f"--memory-utilization {self.memory_utilization}: at most 1, all of it")

    def config(self, cost_model: CostModel) -> Config:
        """The configuration of the simulated engine; without --num-blocks, the blocks that fit the device.

        It ignores the environment, so that the same command gives the same file everywhere.
        """
        from sagellm.engines.build import load_config
        from sagellm.engines.simulator.backend import num_kv_blocks

        blocks = self.num_blocks or num_kv_blocks(
            cost_model,
            block_size=self.block_size,
            utilization=self.memory_utilization,
            max_batched_tokens=self.max_batched_tokens * self.data_parallel,
            max_num_seqs=self.max_num_seqs * self.data_parallel,
        )
        tokens = max(self.max_batched_tokens, self.max_num_seqs)
        settings: dict[str, Any] = {
            "scheduler.max_num_seqs": self.max_num_seqs * self.data_parallel,
            "scheduler.max_batched_tokens": tokens * self.data_parallel,
            "kv.num_blocks": blocks,
            "kv.block_size": self.block_size,
            "kv.prefix_caching": self.prefix_caching,
        }
        if self.data_parallel > 1 and self.preset == "vllm-like":  # a prompt is computed by one rank
            settings["scheduler.pass_options"] = {"vllm_like": {"long_prefill_tokens": tokens}}
        return load_config(preset=self.preset, cli=settings, environ={}).config


@command
def calibrate(
    requests: Path = argument("REQUESTS", "Measured requests, a JSON object per line; or .xz.", ...),
    device: str = flag("NAME", "The device, as rtx4090 or h100-80g.", ...),
    model: str = flag("--model -m NAME", "A model shape, or where a config.json is.", ...),
    out_file: Path = flag("--out -o FILE", "Write the coefficients there.", ...),
    fit: int | None = flag("N", "Fit to the first N by arrival, judge the rest; default: all."),
    rounds: int = flag("N", "Simulations at most.", 12),
    prior: Path | None = flag("FILE", "Another calibration of this device, to start from and stay near."),
    max_error: float = flag("X", "Write nothing if mean TPOT or TTFT of the fitted is off by more.", 0.25),
    *,
    open_end: bool = flag("--open-end", "Unknown others arrived after those that are fitted.", False),
    synchronous: bool = flag(
        "--synchronous", "The engine did not plan a step while the last one ran.", False
    ),
    instance: MeasuredEngine,
) -> None:
    """Fit a cost model for `simulate` to measured requests.

    Serves the requests again in simulated time, and changes the coefficients until the latencies agree.
    """
    from sagellm.benchmarks.simulate.hardware import hardware
    from sagellm.engines.build import build_engine
    from sagellm.engines.simulator.calibrate import calibrate as fitted
    from sagellm.engines.simulator.measured import read_measured, simulate

    check_writable(out_file)
    if not max_error > 0:
        raise ConfigError(f"--max-error {max_error}: it must be positive, as in 0.25")
    measured = read_measured(requests)
    if fit is not None and not 1 <= fit <= len(measured):
        raise ConfigError(f"--fit {fit}: {requests} holds {len(measured)} requests")
    ranks = {"tensor_parallel": instance.tensor_parallel, "data_parallel": instance.data_parallel}
    start, priors = _from_prior(prior, hardware(device, model, cost_file=prior, **ranks).cost_model)
    config = instance.config(start)

    def run(some: Sequence[RequestTiming], cost_model: CostModel) -> SimulatedRun:
        return simulate(some, cost_model, config, build_engine, pipelined=not synchronous)

    known = measured[:fit] if open_end else measured
    found = fitted(known, start, run, num_fitted=fit, open_end=open_end, rounds=rounds, priors=priors)
    print_tables(_tables(found, measured, run(measured, found.cost_model)))
    for text, names in (
        ("not determined, so near what is usual", found.undetermined),
        ("on the bound of what is plausible, so doubtful", found.on_a_bound),
    ):
        if names:
            print(f"{text}: {', '.join(names)}")
    origin = "as given" if instance.num_blocks else "as the device's memory leaves room for"
    print(f"{config.kv.num_blocks:,} blocks of {config.kv.block_size} tokens, {origin}")
    tpot, ttft = found.errors
    if not max(abs(tpot), abs(ttft)) <= max_error:
        raise ConfigError(
            f"no coefficients reproduce these timings: mean TPOT {tpot:+.0%}, mean TTFT {ttft:+.0%} at best; "
            "nothing is written. Check --device, --model, --max-num-seqs, --num-blocks, --tensor-parallel, "
            "--data-parallel; or allow it with --max-error"
        )
    write_json(out_file, _record(found, instance, config, requests))
    print(f"{out_file}: coefficients from {found.num_requests:,} requests, {found.num_rounds} simulations")


def _from_prior(path: Path | None, start: CostModel) -> tuple[CostModel, Mapping[str, Prior]]:
    """The model to start from and the priors. `start` has the coefficients of `path`, if there is one."""
    from sagellm.engines.simulator.calibrate import PRIORS, narrowed
    from sagellm.engines.simulator.cost_model import Coefficients

    if path is None:
        return start, PRIORS
    sigmas = json.loads(path.read_text(encoding="utf-8")).get("fitted", {}).get("log_sigmas", {})
    priors = narrowed(PRIORS, start.coefficients, sigmas)
    means = {name: found.mean for name, found in priors.items()}
    return replace(start, coefficients=Coefficients(**means)), priors


def _tables(found: Calibration, measured: Sequence[RequestTiming], run: SimulatedRun) -> list[Table]:
    """Coefficients, and latencies of the fitted requests and of any others."""
    from sagellm.engines.simulator.measured import compare

    coefficients = []
    for name, value in found.cost_model.coefficients.as_dict().items():
        remark = "not determined" if name in found.undetermined else ""
        if name in found.on_a_bound:
            remark = "on its bound"
        coefficients.append((name, f"{value:.4g}", f"{math.expm1(found.log_sigmas[name]):.0%}", remark))
    columns = ("coefficient", "value", "known to", "remark")
    tables = [Table("Coefficients", columns, coefficients, num_names=1)]
    latencies = ("latency", "", "measured s", "simulated s", "error")
    for part, title in ((slice(found.num_requests), "fitted"), (slice(found.num_requests, None), "judged")):
        rows = []
        for row in compare(measured[part], run.timings[part]) if measured[part] else ():
            times = f"{row.measured_s:.4f}", f"{row.simulated_s:.4f}", f"{row.error:+.1%}"
            rows.append((row.latency, row.statistic, *times))
        if rows:
            tables.append(Table(f"Requests that were {title}", latencies, rows, num_names=2))
    return tables


def _record(found: Calibration, instance: MeasuredEngine, config: Config, path: Path) -> dict[str, Any]:
    """What `simulate` reads, and the source of the coefficients."""
    cost_model = found.cost_model
    return {
        "device": cost_model.device.name,
        "model": cost_model.model.name,
        "tensor_parallel": cost_model.tensor_parallel,
        "data_parallel": cost_model.data_parallel,
        "num_blocks": config.kv.num_blocks,
        "num_blocks_given": instance.num_blocks is not None,
        "coefficients": cost_model.coefficients.as_dict(),
        "fitted": {
            "requests": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "num_requests": found.num_requests,
            "num_simulations": found.num_rounds,
            "not_determined": list(found.undetermined),
            "on_a_bound": list(found.on_a_bound),
            "log_sigmas": dict(found.log_sigmas),
            "relative_error_of_mean_tpot": found.errors[0],
            "relative_error_of_mean_ttft": found.errors[1],
        },
    }
