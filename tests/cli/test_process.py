"""The program as a process: what it does when its output is full or closed, at Ctrl-C, and without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
WITHOUT = """
import sys
sys.modules[{package!r}] = None
sys.argv = ["sagellm", *{arguments!r}]
from sagellm.cli import main
main()
"""
SMALL = """
import sys
sys.modules.update(dict.fromkeys(["torch", "fastapi", "tokenizers", "safetensors", "matplotlib"]))
sys.argv = ["sagellm", *{arguments!r}]
from sagellm.cli import main
main()
"""
INTERRUPTED = """
import signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in a background job


class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "sagellm.core.config":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["sagellm", "version"]
from sagellm.cli import main
main()
"""
IMPORTED = """
import sys
sys.argv = ["sagellm", "run", "17 + 25"]
from sagellm.cli import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def python(code: str, **options: int) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SAGELLM_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        stdout=options.get("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )


def sagellm(*arguments: str, **options: int) -> subprocess.CompletedProcess[str]:
    return python(
        f"import sys; sys.argv = ['sagellm', *{arguments!r}]; from sagellm.cli import main; main()", **options
    )


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [("run", "17 + 25"), ("config", "show"), ("--help",), ("version",)])
def test_a_full_output_is_one_line(arguments: tuple[str, ...]) -> None:
    full = os.open(FULL, os.O_WRONLY)
    try:
        done = sagellm(*arguments, stdout=full)
    finally:
        os.close(full)
    assert (done.returncode, done.stderr) == (
        2,
        "sagellm: cannot write the output: No space left on device\n",
    )


@pytest.mark.parametrize("arguments", [("run", "17 + 25"), ("config", "show"), ("version",)])
def test_a_reader_that_has_gone_ends_it_silently(arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = sagellm(*arguments, stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_without_standard_streams_it_writes_nowhere() -> None:
    code = "import os; [os.close(fd) for fd in (0, 1)]; import sys; sys.stdin = sys.stdout = None"
    done = python(f"{code}; sys.argv = ['sagellm', 'version']; from sagellm.cli import main; main()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_an_interrupt_while_it_starts_shows_no_traceback() -> None:
    done = python(INTERRUPTED)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("arguments", [("bench", "engine"), ("run", "x")])
def test_without_torch_it_says_what_to_install(arguments: tuple[str, ...]) -> None:
    done = python(WITHOUT.format(package="torch", arguments=arguments))
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("sagellm: ")
    assert "pip install" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_answer_does_not_import_torchs_compiler() -> None:
    """torch._dynamo takes 1.5 s of CPU time to import."""
    done = python(IMPORTED)
    assert done.returncode == 0, done.stderr
    assert {"torch._dynamo", "torch._inductor", "sympy"} & set(done.stderr.split()) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", "{trace}", "--policy", "adaptive", "--capacity", "10%"),
        ("trace", "info", "{trace}"),
        ("simulate", "--trace", "{trace}", "--requests", "20"),
    ],
)
def test_the_small_install_runs_the_tools(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """`pip install .` brings neither torch nor fastapi, tokenizers or matplotlib."""
    trace = tmp_path / "trace.jsonl"
    record = '{"time_s": %d, "ids": [0, 1, %d], "num_input_tokens": 48, "num_output_tokens": 4}'
    lines = ['{"sagellm_trace": 1, "block_tokens": 16}', *(record % (n, n) for n in range(2, 30))]
    trace.write_text("\n".join(lines), encoding="utf-8")
    done = python(SMALL.format(arguments=[argument.format(trace=trace) for argument in arguments]))
    assert done.returncode == 0, done.stderr
