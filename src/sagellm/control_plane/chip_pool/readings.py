"""What NVIDIA's management library (NVML) says of GPUs now: memory, load, power, temperature."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from sagellm.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ChipReading:
    """One GPU now; None for what it does not tell.

    `utilization`: share of the last second in which a kernel ran. `num_processes`: that compute on it.
    """

    name: str
    free_bytes: int | None = None
    total_bytes: int | None = None
    utilization: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    num_processes: int | None = None


def read_chips(nvml: Any = None) -> list[ChipReading]:
    """A reading of each GPU, named as topology names them ('cuda:0', in PCI order).

    `nvml`: the module `pynvml`, imported if not given. Raises `ConfigError` without it or without a driver.
    """
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            raise ConfigError("readings of GPUs need NVIDIA's library: pip install nvidia-ml-py") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ConfigError(f"NVML finds no driver ({error}): readings need an NVIDIA GPU") from error
    try:
        return [_reading(nvml, number) for number in range(nvml.nvmlDeviceGetCount())]
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _reading(nvml: Any, number: int) -> ChipReading:
    def ask(call: str, *arguments: Any) -> Any:
        """None where this GPU, its driver or our rights do not have it."""
        function: Callable[..., Any] | None = getattr(nvml, call, None)
        try:
            return None if function is None else function(*arguments)
        except nvml.NVMLError:
            return None

    name = f"cuda:{number}"
    handle = ask("nvmlDeviceGetHandleByIndex", number)
    if handle is None:
        return ChipReading(name)
    memory, rates = ask("nvmlDeviceGetMemoryInfo", handle), ask("nvmlDeviceGetUtilizationRates", handle)
    milliwatts, processes = ask("nvmlDeviceGetPowerUsage", handle), ask("nvmlDeviceGetComputeRunningProcesses", handle)
    degrees = ask("nvmlDeviceGetTemperature", handle, getattr(nvml, "NVML_TEMPERATURE_GPU", 0))
    return ChipReading(
        name,
        None if memory is None else int(memory.free),
        None if memory is None else int(memory.total),
        None if rates is None else rates.gpu / 100,
        None if milliwatts is None else milliwatts / 1000,
        None if degrees is None else float(degrees),
        None if processes is None else len(processes),
    )
