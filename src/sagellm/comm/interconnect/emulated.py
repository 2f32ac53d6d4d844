"""An emulated chip on the CPU, whose `hccl` is gloo: for trials anywhere."""

from __future__ import annotations

import os
from threading import Lock
from typing import Any

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.collectives import CommBackendProtocol
from sagellm.core.protocols.interconnect import Availability, InterconnectInfo, MemoryInfo
from sagellm.core.registry import registry

_REGISTERING = Lock()
"""Names of backends are the process's: of two threads that make a group, one registers."""


class EmulatedInterconnect:
    """Implements `DomesticCommBackend` with `num_devices` devices, which share the host's memory.

    Tensors stay on the CPU. The backend takes the name `backend` in `torch.distributed` of this process.
    """

    def __init__(self, num_devices: int = 2, backend: str = "hccl") -> None:
        if num_devices < 1:
            raise ConfigError(f"num_devices must be at least 1, got {num_devices}")
        self.info = InterconnectInfo(
            vendor="emulation",
            link="host memory",
            library="gloo",
            device_type="cpu",
            torch_module="",
            backend=backend,
            visible_devices="",
            device_files=(),
            topology_command=(),
            topology_labels={},
            sources=("torch.distributed documentation, Backend.register_backend",),
        )
        self._num_devices, self.current_device = num_devices, 0

    def is_available(self) -> Availability:
        return Availability(True, has_device=True)

    def device_count(self) -> int:
        return self._num_devices

    def set_device(self, index: int) -> None:
        self._check(index)
        self.current_device = index

    def memory_info(self, index: int) -> MemoryInfo:
        """An equal part of the host's memory."""
        self._check(index)
        page = os.sysconf("SC_PAGE_SIZE") // self._num_devices
        return MemoryInfo(page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES"))

    def init_process_group(
        self, rank: int, world_size: int, store: Any, *, timeout_s: float = 300.0
    ) -> CommBackendProtocol:
        self._register()
        group: CommBackendProtocol = registry("collectives").create(
            "torch_distributed", rank=rank, world_size=world_size, store=store,
            backend=self.info.backend, timeout_s=timeout_s,
        )  # fmt: skip
        return group

    def _register(self) -> None:
        """Raises `ConfigError` where the name belongs to a real backend."""
        import torch.distributed as dist

        name = self.info.backend
        with _REGISTERING:
            known = dist.Backend._plugins.get(name.upper())
            if known is None and hasattr(dist.Backend, name.upper()):
                raise ConfigError(f"backend {name!r} is torch's own: emulate another name")
            if known is not None and known.creator_fn is not _gloo:
                raise ConfigError(f"backend {name!r} is real in this process: emulate another name")
            if known is None:
                dist.Backend.register_backend(name, _gloo, devices=["cpu"])

    def _check(self, index: int) -> None:
        if not 0 <= index < self._num_devices:
            raise ConfigError(f"device {index}: {self._num_devices} devices are emulated, numbered from 0")


def _gloo(store: Any, rank: int, world_size: int, timeout: Any) -> Any:
    """A gloo group, as `register_backend` asks for it."""
    import torch.distributed as dist

    return dist.ProcessGroupGloo(store, rank, world_size, timeout)


PLUGIN = EmulatedInterconnect
