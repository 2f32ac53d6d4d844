"""Ctrl-C is noted once and raises the second time; afterwards the handler is what it was."""

from __future__ import annotations

import signal

import pytest

from sagellm.cli.run import interrupts_delayed


def test_the_first_is_noted_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts_delayed() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
