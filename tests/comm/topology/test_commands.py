"""Commands that hang, fail and print without end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from sagellm.comm.topology.commands import MAX_BYTES, CommandError, run_command


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_output_and_errors_come_back() -> None:
    assert (
        run_command(python("import sys; print('a'); sys.stdout.flush(); print('b', file=sys.stderr)"))
        == "a\nb\n"
    )


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import time; time.sleep(60)", "did not end within 0.5 s"),
        ("import os, time; os.close(1); os.close(2); time.sleep(60)", "did not end within 0.5 s"),
        ("import signal, time; signal.signal(15, lambda *_: None); time.sleep(60)", "within 0.5 s"),
        ("print('no driver'); raise SystemExit(9)", "exit status 9: no driver"),
        ("raise SystemExit(3)", "exit status 3"),
    ],
)
def test_what_goes_wrong_is_said(program: str, reason: str) -> None:
    with pytest.raises(CommandError, match=reason):
        run_command(python(program), 0.5 if "sleep" in program else 30)


def test_endless_output_is_cut() -> None:
    with pytest.raises(CommandError, match=f"more than {MAX_BYTES >> 20} MB"):
        run_command(python("while True: print('x' * 4096)"), 30)


def test_a_child_that_keeps_the_pipe_does_not_cost_the_output() -> None:
    child = "[sys.executable, '-c', 'import time; time.sleep(5)'], start_new_session=True"
    program = f"import subprocess, sys; print('all', flush=True); subprocess.Popen({child})"
    assert run_command(python(program), 4) == "all\n"


def test_no_such_command() -> None:
    with pytest.raises(CommandError, match="No such file"):
        run_command(["no-such-command-anywhere"])


def test_children_of_a_command_are_killed_too(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w')"
    program = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )
    with pytest.raises(CommandError, match="within"):
        run_command(python(program), 0.7)
    time.sleep(1.5)
    assert not mark.exists()
