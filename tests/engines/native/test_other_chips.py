"""The native engine on other vendors' chips: which device it takes, its memory, its kernels, its answers."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import backend_registration

from sagellm.comm.interconnect.ascend import Ascend
from sagellm.comm.interconnect.metax import MetaX
from sagellm.comm.interconnect.vendor import VendorInterconnect
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.interconnect import InterconnectInfo
from sagellm.engines.native.accelerators import default_device, free_bytes, runs_triton
from sagellm.engines.native.measure import in_turns
from sagellm.engines.native.options import usable_device
from tests.comm.interconnect.emulated_vendor import FREE_BYTES, EmulatedVendor

PROGRAM = Path(__file__).with_name("chip_program.py")


@pytest.fixture
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every vendor's device files are looked for below this folder."""
    monkeypatch.setattr(VendorInterconnect, "__init__", lambda self: setattr(self, "_root", tmp_path))
    return tmp_path


def vendor(info: InterconnectInfo, root: Path, patch: pytest.MonkeyPatch) -> EmulatedVendor:
    made = EmulatedVendor(info, root, patch)
    made.plug_in()
    return made


def test_without_chips_the_device_is_as_before(below: Path) -> None:
    assert default_device() == torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert usable_device("cpu") == torch.device("cpu")
    assert runs_triton(torch.device("cuda"))
    assert not runs_triton(torch.device("cpu"))


def test_a_chip_that_torch_calls_cuda_runs_on_plain_operators(
    below: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip = vendor(MetaX.info, below, monkeypatch)
    chip.install()
    assert default_device() == torch.device("cuda")
    assert free_bytes(torch.device("cuda:2")) == FREE_BYTES - 2
    chip.devices.set_device(1)
    assert free_bytes(torch.device("cuda")) == FREE_BYTES - 1
    assert not runs_triton(torch.device("cuda"))


def test_a_chip_without_its_package_is_named_and_not_passed_over(
    below: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vendor(Ascend.info, below, monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert default_device() == torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert "torch_npu is not installed" in caplog.text
    with pytest.raises(ConfigError, match="torch_npu is not installed"):
        usable_device("npu:0")


def test_a_chip_that_is_not_there_says_what_was_looked_for(below: Path) -> None:
    with pytest.raises(ConfigError, match=r"no device: no file is named dev/cambricon_dev"):
        usable_device("mlu")


def test_a_cpu_is_timed_by_its_own_time() -> None:
    [seconds] = in_turns(torch.device("cpu"), [lambda: None], 2)
    assert seconds >= 0.0


def test_an_emulated_npu_answers_as_the_cpu_does(tmp_path: Path) -> None:
    """The whole engine with a tier in host memory; the device is made in Python, by torch's own means."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch takes no device made in Python")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "davinci0").touch()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["default"] == "npu"
    assert found["usable"] == "npu:0"
    assert found["free_bytes"] == 1 << 28
    assert not found["runs_triton"]
    assert found["texts"]["npu"] == found["texts"]["cpu"]
    assert found["distance"] < 1e-3
    assert all(found["calls"].values()), found["calls"]
