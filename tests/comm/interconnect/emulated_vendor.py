"""A vendor's torch on the CPU: its device files, its module, its devices, and its backend over gloo."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from sagellm.core.protocols.collectives import CommBackendProtocol
from sagellm.core.protocols.interconnect import DomesticCommBackend, InterconnectInfo
from sagellm.core.registry import registry

NUM_DEVICES, FREE_BYTES, TOTAL_BYTES = 4, 3 << 30, 4 << 30


class EmulatedVendor:
    """Puts what `info` names into this process and below `root`. `current`: the device that was set.

    `extended`: the backend takes torch's options in one object.
    """

    def __init__(
        self, info: InterconnectInfo, root: Path, patch: pytest.MonkeyPatch, *, extended: bool = False
    ) -> None:
        self.current, self.extended = 0, extended
        self.info, self.root, self._patch = info, root, patch
        self.devices = SimpleNamespace(
            device_count=lambda: NUM_DEVICES,
            set_device=self._set_device,
            current_device=lambda: self.current,
            mem_get_info=lambda index: (FREE_BYTES - index, TOTAL_BYTES),
            is_available=lambda: True,
        )

    def plug_in(self) -> None:
        """The kernel driver shows the chip."""
        for pattern in self.info.device_files:
            file = self.root / pattern.replace("[0-9]*", "0")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()

    def install(self) -> None:
        """Importing the vendor's module brings its devices into torch, and its backend."""
        if self.info.torch_module:
            module = ModuleType(self.info.torch_module)
            module.__spec__ = ModuleSpec(self.info.torch_module, None)
            self._patch.setitem(sys.modules, self.info.torch_module, module)
        self._patch.setattr(torch, self.info.device_type, self.devices, raising=False)
        plugin = dist.Backend._BackendPlugin(_gloo_of_options if self.extended else _gloo, self.extended)
        self._patch.setitem(dist.Backend._plugins, self.info.backend.upper(), plugin)

    def _set_device(self, index: int) -> None:
        self.current = index


def _gloo(store: Any, rank: int, world_size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, world_size, timeout)


def _gloo_of_options(given: Any, options: object) -> Any:
    assert options is None
    assert given.group_id.startswith("sagellm-")
    assert given.global_ranks_in_group == [*range(given.group_size)]
    return _gloo(given.store, given.group_rank, given.group_size, given.timeout)


def emulated(
    name: str, root: Path, patch: pytest.MonkeyPatch, *, extended: bool = False
) -> DomesticCommBackend:
    """The interconnect of that name on a machine that has its chip and its software."""
    found = registry("interconnect")
    made: DomesticCommBackend = found.create(name, **({"root": str(root)} if _has_root(name) else {}))
    if made.info.device_files:
        vendor = EmulatedVendor(made.info, root, patch, extended=extended)
        vendor.plug_in()
        vendor.install()
    return made


def _has_root(name: str) -> bool:
    return "root" in registry("interconnect").options(name)


def on_ranks(
    make: Callable[[int, Any], CommBackendProtocol], work: Callable[[CommBackendProtocol], Any]
) -> list[Any]:
    """What `work` returns on each of two ranks, which are threads."""
    store, results = HashStore(), [None, None]

    def rank(number: int) -> None:
        group = make(number, store)
        results[number] = work(group)
        group.close()

    threads = [Thread(target=rank, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results
