"""Chips that are not there, or not whole; and a vendor's package that is really imported."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from sagellm.comm.interconnect.ascend import Ascend
from sagellm.comm.interconnect.emulated import EmulatedInterconnect
from sagellm.comm.interconnect.lookup import interconnect_for, interconnects
from sagellm.comm.interconnect.metax import MetaX
from sagellm.core import registry as registry_module
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.interconnect import ChipKernels, Maturity
from sagellm.core.registry import registry
from tests.comm.interconnect.emulated_vendor import EmulatedVendor, emulated

VENDORS = [name for name in registry("interconnect").own_names() if name != "emulated"]


@pytest.mark.parametrize("name", VENDORS)
def test_without_a_device_nothing_is_usable_and_nothing_raises(name: str, tmp_path: Path) -> None:
    chip = registry("interconnect").create(name, root=str(tmp_path))
    found = chip.is_available()
    assert not found.usable
    assert not found.has_device
    assert found.reason == f"no device: no file is named {' or '.join(chip.info.device_files)}"
    for hook in (chip.device_count, lambda: chip.set_device(0), lambda: chip.memory_info(0)):
        with pytest.raises(ConfigError, match="cannot be used: no device"):
            hook()
    with pytest.raises(ConfigError, match="cannot be used: no device"):
        chip.init_process_group(0, 1, None)


def test_a_device_without_its_package_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    EmulatedVendor(Ascend.info, tmp_path, monkeypatch).plug_in()
    found = Ascend(str(tmp_path)).is_available()
    assert found.has_device
    assert found.reason == "torch_npu is not installed; Huawei Ascend provides it"
    with pytest.raises(ConfigError, match=r"Huawei Ascend \(npu\) cannot be used: torch_npu is not"):
        Ascend(str(tmp_path)).device_count()


def test_a_package_that_brings_no_devices_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated("ascend", tmp_path, monkeypatch)
    monkeypatch.delattr(torch, "npu")
    with pytest.raises(ConfigError, match=r"torch_npu cannot be used for Huawei Ascend: .*'npu'; check that"):
        Ascend(str(tmp_path)).device_count()


def test_a_torch_without_the_vendors_backend_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip = emulated("cambricon", tmp_path, monkeypatch)
    monkeypatch.delitem(dist.Backend._plugins, "CNCL")
    with pytest.raises(Exception, match="this torch has no backend 'cncl'"):
        chip.init_process_group(0, 1, HashStore())


BROKEN = "raise OSError('libascend_hal.so: cannot open shared object file')"
WHOLE = """
import types, torch
import torch.distributed as dist
dist.Backend.register_backend("hccl", lambda s, r, w, t: dist.ProcessGroupGloo(s, r, w, t), devices=["cpu"])
torch.npu = types.SimpleNamespace(device_count=lambda: 2, set_device=print, mem_get_info=lambda i: (5, 7))
"""
USE = """
import sys, threading, torch
import torch.distributed as dist
from sagellm.core.errors import ConfigError
from sagellm.core.registry import registry

chip = registry("interconnect").create("ascend", root=sys.argv[1])
assert chip.is_available().usable
assert "torch_npu" not in sys.modules
try:
    count = chip.device_count()
except ConfigError as error:
    sys.exit(str(error))
store = dist.FileStore(sys.argv[1] + "/store", 2)
def rank(number):
    group = chip.init_process_group(number, 2, store)
    buffer = torch.ones(3) * (number + 1)
    group.all_reduce(buffer).wait()
    print(count, chip.memory_info(0), buffer.tolist())
threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.mark.parametrize(("package", "said"), [(WHOLE, "[3.0, 3.0, 3.0]"), (BROKEN, "libascend_hal.so")])
def test_the_vendors_package_is_imported_when_it_is_first_needed(
    tmp_path: Path, package: str, said: str
) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(package)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "davinci3").touch()
    environment = {"PYTHONPATH": ":".join([str(tmp_path), *sys.path]), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert said in (done.stdout if package is WHOLE else done.stderr), done.stderr
    assert (done.returncode == 0) == (package is WHOLE)
    if package is WHOLE:
        assert done.stdout.count("2 MemoryInfo(free_bytes=5, total_bytes=7) [3.0, 3.0, 3.0]") == 2


def test_the_emulated_chip_does_not_take_a_real_backends_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="backend 'gloo' is torch's own"):
        EmulatedInterconnect(backend="gloo").init_process_group(0, 1, HashStore())
    monkeypatch.setitem(dist.Backend._plugins, "XCCL2", dist.Backend._BackendPlugin(print, False))
    with pytest.raises(ConfigError, match="backend 'xccl2' is real in this process"):
        EmulatedInterconnect(backend="xccl2").init_process_group(0, 1, HashStore())
    with pytest.raises(ConfigError, match="num_devices must be at least 1"):
        EmulatedInterconnect(0)


def test_threads_that_make_their_groups_at_once_register_one_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch sets the attribute of a name first and its plug-in last; a thread between sees a real backend."""
    register, num_calls = dist.Backend.register_backend, []

    def slowly(name: str, *given: object, **named: object) -> None:
        num_calls.append(name)
        setattr(dist.Backend, name.upper(), name)
        time.sleep(0.2)
        register(name, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(dist.Backend, "register_backend", slowly)
    chip, errors = EmulatedInterconnect(backend="hccl3"), list[Exception]()

    def register_it() -> None:
        try:
            chip._register()
        except ConfigError as error:
            errors.append(error)

    threads = [threading.Thread(target=register_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert num_calls == ["hccl3"]


@pytest.mark.parametrize("name", VENDORS)
def test_our_rows_claim_no_more_than_was_tried(name: str) -> None:
    info = registry("interconnect").create(name).info
    assert (info.maturity, info.kernels, info.claimed) == (Maturity.EMULATION, ChipKernels.TORCH, None)


def test_whatever_a_vendors_torch_raises_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip = emulated("moore_threads", tmp_path, monkeypatch)

    def fail() -> int:
        raise AssertionError("driver too old")

    monkeypatch.setattr(torch.musa, "device_count", fail)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="torch_musa cannot be used for Moore Threads: driver too old"):
        chip.memory_info(0)


def test_a_broken_package_of_a_vendor_ends_torch_and_not_sagellm(tmp_path: Path) -> None:
    """Torch imports what is registered under "torch.backends"; our program imports it when it is needed."""
    (tmp_path / "torch_broken.py").write_text("raise OSError('libdriver.so: not found')")
    metadata = tmp_path / "torch_broken-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-broken\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nbroken = torch_broken:load\n")
    ours = "import sys; from sagellm.cli import main; sys.argv[1:] = ['--version']\n"
    ours += "try: main()\nexcept SystemExit: pass\n"
    environment = {"PYTHONPATH": ":".join([str(tmp_path), *sys.path])}
    outcomes = [
        subprocess.run(
            [sys.executable, "-c", f"{before}import torch; print('imported')"],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        for before in ("", ours)
    ]
    assert "Failed to load the backend extension: broken" in outcomes[0].stderr
    assert "imported" in outcomes[1].stdout, outcomes[1].stderr


def test_emulated_devices_share_the_hosts_memory() -> None:
    one, four = EmulatedInterconnect(1), EmulatedInterconnect(4)
    assert four.memory_info(3).total_bytes == one.memory_info(0).total_bytes // 4


def test_chips_of_other_packages_come_by_entry_point_and_a_broken_one_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"ascend2": f"{Ascend.__module__}:Ascend", "broken": "no_such_package:Chip"}
    group = "sagellm.interconnects"
    points = [EntryPoint(name, value, group) for name, value in names.items()]
    monkeypatch.setattr(registry_module, "entry_points", lambda *, group: points)
    assert {name for name, _ in interconnects()} == {*VENDORS, "ascend2"}
    assert "interconnect 'broken' cannot be loaded: ModuleNotFoundError" in caplog.text


def test_which_vendor_a_device_type_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name for name, _ in interconnects()} == {*VENDORS}
    assert interconnect_for("cuda") is None
    assert interconnect_for("mps") is None
    ascend = interconnect_for("npu")
    assert ascend is not None
    assert ascend.info.vendor == "Huawei Ascend"
    EmulatedVendor(MetaX.info, tmp_path, monkeypatch).plug_in()
    monkeypatch.setattr(MetaX, "__init__", lambda self: setattr(self, "_root", tmp_path))
    metax = interconnect_for("cuda")
    assert metax is not None
    assert metax.info.vendor == "MetaX"
