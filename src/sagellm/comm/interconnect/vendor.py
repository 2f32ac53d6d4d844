"""`VendorInterconnect`: the five hooks, through the torch module that a vendor's row names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.collectives import CommBackendProtocol
from sagellm.core.protocols.interconnect import Availability, InterconnectInfo, MemoryInfo
from sagellm.core.registry import registry

PCIE_LABELS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "between NUMA nodes",
}
"""Cells that vendors' tools share with `nvidia-smi topo -m`."""


class VendorInterconnect:
    """Implements `DomesticCommBackend`; a subclass gives `info`.

    `root`: where `device_files` are looked for.
    """

    info: ClassVar[InterconnectInfo]

    def __init__(self, root: str = "/") -> None:
        self._root = Path(root)

    def is_available(self) -> Availability:
        patterns = self.info.device_files
        if not any(any(self._root.glob(pattern.lstrip("/"))) for pattern in patterns):
            return Availability(False, f"no device: no file is named {' or '.join(patterns)}")
        for module in filter(None, ("torch", self.info.torch_module)):
            if not _is_installed(module):
                return Availability(
                    False, f"{module} is not installed; {self.info.vendor} provides it", has_device=True
                )
        return Availability(True, has_device=True)

    def device_count(self) -> int:
        return int(self._ask(self._torch().device_count))

    def set_device(self, index: int) -> None:
        self._ask(self._module_of(index).set_device, index)

    def memory_info(self, index: int) -> MemoryInfo:
        free, total = self._ask(self._module_of(index).mem_get_info, index)
        return MemoryInfo(int(free), int(total))

    def init_process_group(
        self, rank: int, world_size: int, store: Any, *, timeout_s: float = 300.0
    ) -> CommBackendProtocol:
        self._torch()  # registers the backend
        group: CommBackendProtocol = registry("collectives").create(
            "torch_distributed", rank=rank, world_size=world_size, store=store,
            backend=self.info.backend, timeout_s=timeout_s,
        )  # fmt: skip
        return group

    def _module_of(self, index: int) -> Any:
        """The vendor's torch, if it sees that device."""
        module, count = self._torch(), self.device_count()
        if not 0 <= index < count:
            raise ConfigError(
                f"{self.info.device_type}:{index}: {count} devices are visible, numbered from 0; "
                f"{self.info.visible_devices or 'no variable'} limits them"
            )
        return module

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What the vendor's torch says. Raises `ConfigError` where its driver fails."""
        try:
            return call(*arguments)
        except Exception as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> ConfigError:
        info, reason = self.info, str(error).splitlines()[0] if str(error) else type(error).__name__
        return ConfigError(
            f"{info.torch_module or 'torch'} cannot be used for {info.vendor}: {reason}; "
            "check that it matches the driver and this torch"
        )

    def _torch(self) -> Any:
        """The vendor's counterpart of `torch.cuda`. Raises `ConfigError` where it cannot be had."""
        info, found = self.info, self.is_available()
        if not found.usable:
            raise ConfigError(f"{info.vendor} ({info.device_type}) cannot be used: {found.reason}")
        try:
            torch = import_module("torch")
            if info.torch_module:
                import_module(info.torch_module)
            return getattr(torch, info.device_type)
        except Exception as error:  # a vendor's module and driver may raise anything
            raise self._unusable(error) from error


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a module that is half imported, or replaced by a test
        return False
