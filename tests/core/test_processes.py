"""Child processes: messages, log lines, reasons of an end, and none that is left behind."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sagellm.core import processes
from sagellm.core.errors import EngineFailedError
from sagellm.core.processes import ProcessGroup, Role
from tests.core.processes_entries import HERE

LONG_S = 60.0


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def groups() -> Iterator[list[ProcessGroup]]:
    """Groups to be closed."""
    made: list[ProcessGroup] = []
    yield made
    for group in made:
        group.close(grace_s=0.0)


def test_messages_reach_every_child_in_order(
    tmp_path: Path, groups: list[ProcessGroup], caplog: pytest.LogCaptureFixture
) -> None:
    files = [str(tmp_path / name) for name in "ab"]
    groups.append(
        ProcessGroup.start(
            [
                Role(f"rank {i}", f"{HERE}:echo", {"file": file}, {"SAGELLM_TEST_NAME": f"n{i}"})
                for i, file in enumerate(files)
            ]
        )
    )
    large = bytes(range(256)) * 2000
    with caplog.at_level(logging.INFO):
        for message in (b"one", b"", large):
            groups[0].send(message)
        groups[0].close()
        groups[0].close()
    for i, file in enumerate(files):
        assert Path(file).read_bytes() == b"one" + large
        assert Path(file + ".end").exists(), "the entry was told of the end"
        assert ("sagellm.test", logging.WARNING, f"[rank {i}] hello from n{i}") in caplog.record_tuples
    assert groups[0].failure is None
    with pytest.raises(EngineFailedError, match="have been ended"):
        groups[0].send(b"late")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("fail", "rank 1 failed: it is too warm"),
        ("fail_by_a_bug", "rank 1 failed: ZeroDivisionError: a bug"),
        ("end", "ended before it was asked to"),
        ("nothing", "has no attribute 'nothing'"),
    ],
)
def test_one_that_ends_ends_the_others_with_its_reason(
    entry: str, reason: str, groups: list[ProcessGroup]
) -> None:
    told: list[str] = []
    roles = [Role("rank 1", f"{HERE}:{entry}", {"reason": "it is too warm"}), Role("rank 2", f"{HERE}:wait")]
    groups.append(ProcessGroup.start(roles, told.append))
    if entry == "fail":
        groups[0].send(b"go")
    with pytest.raises(EngineFailedError, match=reason):
        groups[0].wait_for_failure(LONG_S)
    wait_until(lambda: bool(told) and not any(map(is_alive, groups[0].pids)))
    assert told == [groups[0].failure]


def test_a_killed_child_is_named_with_its_signal(groups: list[ProcessGroup]) -> None:
    groups.append(ProcessGroup.start([Role(f"rank {i}", f"{HERE}:sleep") for i in (1, 2)]))
    os.kill(groups[0].pids[1], signal.SIGKILL)
    with pytest.raises(EngineFailedError, match=r"rank 2 \(process \d+\) was ended by SIGKILL"):
        groups[0].wait_for_failure(LONG_S)
    with pytest.raises(EngineFailedError, match="SIGKILL"):
        groups[0].send(b"x")


def test_none_is_left_when_the_parent_is_killed(tmp_path: Path, groups: list[ProcessGroup]) -> None:
    file = tmp_path / "pids"
    groups.append(ProcessGroup.start([Role("parent", f"{HERE}:parent", {"file": str(file)})]))
    wait_until(lambda: file.exists() and len(file.read_text().split()) == 2)
    pids = [int(pid) for pid in file.read_text().split()]
    assert all(map(is_alive, pids))
    os.kill(groups[0].pids[0], signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, pids)))


def test_one_that_does_not_end_is_killed(groups: list[ProcessGroup]) -> None:
    groups.append(ProcessGroup.start([Role("rank 1", f"{HERE}:sleep")]))
    groups[0].close(grace_s=0.1)
    assert not is_alive(groups[0].pids[0])
    assert groups[0].failure is None


def test_a_child_imports_nothing_from_the_current_folder(
    tmp_path: Path, groups: list[ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    file = str(tmp_path / "file")
    groups.append(ProcessGroup.start([Role("rank 1", f"{HERE}:echo", {"file": file})]))
    groups[0].send(b"here")
    groups[0].close(LONG_S)
    assert Path(file).read_bytes() == b"here"


def test_a_signal_to_all_processes_leaves_the_end_to_the_parent(
    tmp_path: Path, groups: list[ProcessGroup]
) -> None:
    file = str(tmp_path / "file")
    groups.append(ProcessGroup.start([Role("rank 1", f"{HERE}:echo", {"file": file})]))
    groups[0].send(b"first")
    wait_until(lambda: Path(file).exists() and Path(file).stat().st_size > 0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(groups[0].pids[0], number)
    groups[0].send(b" second")
    groups[0].close(LONG_S)
    assert Path(file).read_bytes() == b"first second"


def test_a_child_that_reads_nothing_does_not_hold_up_the_end(groups: list[ProcessGroup]) -> None:
    groups.append(ProcessGroup.start([Role("rank 1", f"{HERE}:sleep")]))
    os.kill(groups[0].pids[0], signal.SIGSTOP)

    def send() -> None:
        with suppress(EngineFailedError, OSError, ValueError):
            groups[0].send(bytes(10_000_000))

    sender = threading.Thread(target=send)
    sender.start()
    closer = threading.Thread(target=groups[0].close, args=(0.2,))
    closer.start()
    closer.join(LONG_S)
    sender.join(LONG_S)
    assert not closer.is_alive()
    assert not sender.is_alive()


def test_a_child_that_stays_though_it_was_killed_is_left(
    groups: list[ProcessGroup], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that a device's driver holds: here nothing kills it."""
    groups.append(ProcessGroup.start([Role("rank 1", f"{HERE}:sleep")]))
    [pid] = groups[0].pids
    os.kill(pid, signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(processes, "KILLED_S", 0.2)
        patched.setattr(groups[0], "_kill", lambda: None)
        groups[0].close(0.1)
    assert f"rank 1 (process {pid}) was killed and has not ended" in caplog.text
    groups[0].close(0.0)
    assert not is_alive(pid)
