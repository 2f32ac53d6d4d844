"""Measured numbers that are kept, so that all runs on a machine choose alike."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sagellm.engines.native import measure
from sagellm.engines.native.measure import recorded


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
