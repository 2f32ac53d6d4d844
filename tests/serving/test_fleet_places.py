"""Where instances of a fleet run: on cores of their own, and on other hosts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sagellm.core.cores import usable_cores
from tests.serving.fleet_processes import running_fleet

START_S = 60.0
PROMPT = list(range(1, 60))


@pytest.mark.skipif(
    usable_cores() < 2 or not hasattr(os, "sched_getaffinity"), reason="two instances need two cores"
)
def test_instances_stay_on_their_cores(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("fleet: {groups: {a: {count: 2, chips: 0, cores: 1}}}", encoding="utf-8")
    with running_fleet("--config", str(file)) as fleet:
        fleet.wait_until_healthy(START_S)
        pids = {each["name"]: each["pid"] for each in fleet.status()["instances"]}
        cpus = {name: os.sched_getaffinity(pid) for name, pid in pids.items()}
        assert not cpus["a-0"] & cpus["a-1"]
        assert fleet.complete(PROMPT, 5)["status"] == 200


def test_a_fleet_that_does_not_fit_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("fleet: {groups: {a: {chips: 64}}}", encoding="utf-8")
    command = [sys.executable, "-m", "sagellm", "serve", "--port", "0", "--config", str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "a-0 needs 64 chip(s)" in done.stderr


@contextmanager
def instance_elsewhere(file: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process as another host would have it; stopped with SIGTERM, and ended well by it."""
    command = [sys.executable, "-m", "sagellm", "serve", "--config", str(file), "--instance", name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, env=environment) as process:
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_instances_elsewhere_serve(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
    addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "fleet:\n  shared_key: 0123456789abcdef\n  groups:\n"
        f"    prefill: {{type: prefilling, addresses: ['{addresses[0]}']}}\n"
        f"    decode: {{type: decoding, addresses: ['{addresses[1]}']}}\n",
        encoding="utf-8",
    )
    with (
        instance_elsewhere(file, "prefill-0"),
        instance_elsewhere(file, "decode-0"),
        running_fleet("--config", str(file)) as fleet,
    ):
        fleet.wait_until_healthy(START_S)
        texts = [fleet.complete(PROMPT, 20, ignore_eos=True)["choices"][0]["text"] for _ in range(3)]
        assert len(set(texts)) == 1
        assert {each["name"] for each in fleet.status()["instances"]} == {"prefill-0", "decode-0"}


def test_a_fleet_serves_without_the_instances_that_are_not_there(tmp_path: Path) -> None:
    """Nothing listens at one address, and the host of another has no name."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
    file = tmp_path / "fleet.yaml"
    ends = f"'tcp://127.0.0.1:{ports[0]}', 'tcp://127.0.0.1:{ports[1]}', 'tcp://nothing.invalid:5700'"
    file.write_text(
        f"fleet: {{shared_key: 0123456789abcdef, groups: {{a: {{addresses: [{ends}]}}}}}}", encoding="utf-8"
    )
    with instance_elsewhere(file, "a-0"), running_fleet("--config", str(file)) as fleet:
        assert fleet.complete(PROMPT, 5)["status"] == 200
        shown = {each["name"]: each for each in fleet.status()["instances"]}
        assert {name: each["state"] for name, each in shown.items()} == {
            "a-0": "ready", "a-1": "starting", "a-2": "starting"
        }  # fmt: skip
        assert shown["a-1"]["fault"]
        assert "nothing.invalid" in shown["a-2"]["fault"]
        missing = next(line for line in fleet.log if "not there yet" in line)
        assert "a-1" in missing
        assert "a-2" in missing


def test_only_an_instance_with_an_address_is_served_alone(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("fleet: {groups: {a: {}}}", encoding="utf-8")
    for name, words in (("a-0", "has no address"), ("b-0", "no instance 'b-0'")):
        command = [sys.executable, "-m", "sagellm", "serve", "--config", str(file), "--instance", name]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 2
        assert words in done.stderr
