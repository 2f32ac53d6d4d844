"""Less by default, everything when asked for."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.effort import examples, usual


@pytest.mark.parametrize(("profile", "count"), [("sagellm", 30), ("slow", 60), ("explore", 60)])
def test_examples_follow_the_profile(profile: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.effort.settings", lambda: settings.get_profile(profile))
    assert examples(60) == count
    assert examples(1) == 1


def test_what_is_not_usual_is_slow() -> None:
    params = usual([(1, "a")], [(1, "a"), (2, "b")])
    assert [(one.values, [mark.name for mark in one.marks]) for one in params] == [
        ((1, "a"), []), ((2, "b"), ["slow"]),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="none of the cases"):
        usual([3], [1, 2])
