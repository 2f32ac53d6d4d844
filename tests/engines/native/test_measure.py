"""Measured numbers that are kept, so that all runs on a machine choose alike."""

from __future__ import annotations

import math
import time
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

from sagellm.engines.native import measure, options
from sagellm.engines.native.measure import in_turns, recorded


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "_in_this_process", {})
    return tmp_path / "sagellm" / "kernels"


def forget() -> None:
    """As another process."""
    measure._in_this_process.clear()


def test_the_first_numbers_count(folder: Path) -> None:
    numbers = iter([(1.5, 2.0), (2.5, 1.0), (3.0, 3.0)])
    for _ in range(2):
        assert recorded("a race", "v1", lambda: next(numbers)) == (1.5, 2.0)
        forget()
    assert recorded("a race", "v2", lambda: next(numbers)) == (2.5, 1.0), "another build is measured anew"
    assert recorded("a race", "", lambda: next(numbers)) == (3.0, 3.0), "without a build nothing is kept"
    assert len(list(folder.iterdir())) == 2


def test_of_two_that_measure_at_once_the_first_one_counts() -> None:
    def slow() -> tuple[float, ...]:
        forget()
        assert recorded("a race", "v1", lambda: (1.0,)) == (1.0,)  # another process ends before this one
        return (2.0,)

    assert recorded("a race", "v1", slow) == (1.0,)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"case": "another", "numbers": [9]}', '{"numbers": 3}'])
def test_a_damaged_record_is_measured_anew(text: str, folder: Path) -> None:
    recorded("a race", "v1", lambda: (1.0,))
    [file] = folder.iterdir()
    file.write_text(text)
    numbers = iter([(2.0,), (3.0,)])
    for _ in range(2):
        forget()
        assert recorded("a race", "v1", lambda: next(numbers)) == (2.0,)


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
def test_what_no_clock_should_give_is_not_kept(bad: float, folder: Path) -> None:
    assert recorded("a race", "v1", lambda: (1.0, bad))[0] == 1.0
    assert not list(folder.iterdir())


def test_a_record_that_comes_while_another_process_looks_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_late(path: Path, key: str) -> None:
        """Nothing was there; now it is."""
        monkeypatch.setattr(measure, "_record", record)
        forget()
        assert recorded("a race", "v1", lambda: (1.0,)) == (1.0,)

    record = measure._record
    monkeypatch.setattr(measure, "_record", look_late)
    assert recorded("a race", "v1", lambda: (2.0,)) == (1.0,)


def test_without_a_folder_they_last_as_long_as_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    numbers = iter([(1.0,), (2.0,)])
    for _ in range(2):
        assert recorded("a race", "v1", lambda: next(numbers)) == (1.0,)


CPU = torch.device("cpu")


def test_runs_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first round is not counted, and the order changes from round to round."""
    now_s, order = 0.0, ""

    def run(name: str, seconds: float) -> None:
        nonlocal now_s, order
        now_s += 100 * seconds if len(order) < 2 else seconds
        order += name

    monkeypatch.setattr(time, "thread_time", lambda: now_s)
    assert in_turns(CPU, [partial(run, "a", 1.0), partial(run, "b", 3.0)], 3) == [1.0, 3.0]
    assert order == "abbaabba"


def test_a_machine_that_becomes_slow_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, calls = 0.0, count()

    def run() -> None:
        nonlocal now_s
        now_s += 1.0 if next(calls) < 8 else 5.0

    monkeypatch.setattr(time, "thread_time", lambda: now_s)
    assert in_turns(CPU, [run, run], 7) == [5.0, 5.0]


def test_the_computing_dtype_is_measured_once_on_a_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near the ratio that decides, another run could choose otherwise, and answers would have other bits."""
    times = iter([[1.6, 1.0], [1.4, 1.0]])
    monkeypatch.setattr(options, "in_turns", lambda *_: next(times))
    for _ in range(2):
        assert options.is_emulated(torch.bfloat16)
        forget()
    assert not options.is_emulated(torch.float16), "another dtype is measured by itself"
    assert len(list(folder.iterdir())) == 2
