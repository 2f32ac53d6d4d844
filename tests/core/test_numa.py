"""NUMA nodes by what a system's files say, and threads that stay on them."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sagellm.core.numa import cpus_of_node, node_of_pci, stay_on_node

GPU = "0000:3b:00.0"
needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads stay nowhere")


def write(root: Path, path: str, text: str) -> Path:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    return root


def write_node(root: Path, node: int, cpus: str) -> Path:
    return write(root, f"sys/devices/system/node/node{node}/cpulist", cpus)


@pytest.mark.parametrize(("text", "node"), [("0\n", 0), ("3\n", 3), ("-1\n", None), ("", None)])
def test_node_of_a_pci_device(tmp_path: Path, text: str, node: int | None) -> None:
    assert node_of_pci(GPU, write(tmp_path, f"sys/bus/pci/devices/{GPU}/numa_node", text)) == node
    assert node_of_pci("0000:99:00.0", tmp_path) is None


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0\n", {0}), ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("\n", set())],
    ids=["one", "ranges", "memory alone"],
)
def test_cpus_of_a_node(tmp_path: Path, text: str, cpus: set[int]) -> None:
    assert cpus_of_node(1, write_node(tmp_path, 1, text)) == cpus
    assert cpus_of_node(2, tmp_path) == set()


def cpus_after(node: int | None, root: Path) -> set[int]:
    """CPUs of a thread that was told to stay on a node."""
    with ThreadPoolExecutor(1, initializer=stay_on_node, initargs=(node, root)) as thread:
        return thread.submit(os.sched_getaffinity, 0).result()


@needs_affinity
def test_a_thread_stays_where_it_may(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    mine, foreign = min(allowed), max(allowed) + 1000
    write_node(tmp_path, 0, f"{mine},{foreign}\n")
    write_node(tmp_path, 1, f"{foreign}-{foreign + 3}\n")
    assert cpus_after(0, tmp_path) == {mine}
    assert [cpus_after(node, tmp_path) for node in (1, 2, None)] == [allowed] * 3
    assert os.sched_getaffinity(0) == allowed  # other threads are left alone


@needs_affinity
def test_a_system_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed | {9999})
    with caplog.at_level(logging.DEBUG, "sagellm.numa"):
        stay_on_node(0, write_node(tmp_path, 0, "9999"))
    assert "node 0: not here" in caplog.text
