"""`ProcessGroup`: child processes that are started, watched and ended together.

Each child runs `python -m sagellm.core.child_process`, which calls an entry "package.module:function". What a
child needs comes over its standard input: its role, then messages. The input is also its lifeline: when the
parent dies, even by `kill -9`, it ends, and then the child does. So nothing is left behind, and nothing
secret is in a command line or an environment. Only a child that is stopped (SIGSTOP) when its parent dies
stays until it is continued; `close` kills it.

A child that ends unasked ends the others. `failure` then says which one, and why.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from sagellm.core.errors import EngineFailedError
from sagellm.core.log_lines import FIELDS

log = logging.getLogger("sagellm.processes")
LENGTH_BYTES = 8
"""A message is preceded by its length, little-endian."""
REPORT_S = 5.0
"""The longest time between the end of a child's input and output and the moment when its end is known."""
KILLED_S = 5.0
"""A process that was killed and is still there after so long is left: a driver of a device may hold it."""


@dataclass(frozen=True, slots=True)
class Role:
    """What one child does: `entry(options, inbox)`.

    `name` is in its log lines and in errors. `options` go through JSON. `environment` is added to the
    parent's. `files`: open files of the parent that the child has too, under the same numbers.
    """

    name: str
    entry: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    files: tuple[int, ...] = ()


@dataclass(slots=True)
class _Child:
    """A running child, and the last lines that it has written."""

    role: Role
    process: subprocess.Popen[bytes]
    reader: threading.Thread
    last_lines: deque[str]

    @property
    def input(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin


def child_environment() -> dict[str, str]:
    """Environment variables with which a child process imports the same packages."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class ProcessGroup:
    """The children of some roles, from `start` to `close`.

    `on_failure(reason)` is called once, in a thread of the group's, when a child has ended unasked. Methods
    may be called from any thread, `send` from one at a time.
    """

    def __init__(self, on_failure: Callable[[str], object] | None = None) -> None:
        self.failure: str | None = None
        self._on_failure = on_failure
        self._children: list[_Child] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._closing = False

    @classmethod
    def start(cls, roles: Sequence[Role], on_failure: Callable[[str], object] | None = None) -> ProcessGroup:
        """Start a child for each role. Returns before they are ready: what they need is up to the entry."""
        group = cls(on_failure)
        try:
            for role in roles:
                group._children.append(_started(role))
        except OSError:
            group.close(grace_s=0.0)
            raise
        for child in group._children:
            threading.Thread(target=group._watch, args=(child,), name=child.role.name, daemon=True).start()
        return group

    @property
    def pids(self) -> list[int]:
        """The process id of each role."""
        return [child.process.pid for child in self._children]

    def send(self, message: bytes | memoryview) -> None:
        """Send a message to every child. Raises `EngineFailedError` if one has ended, or after `close`."""
        if self._closing:
            raise EngineFailedError(self.failure or "the processes have been ended: start new ones")
        size = len(message).to_bytes(LENGTH_BYTES, "little")
        try:
            for child in self._children:
                child.input.write(size)
                child.input.write(message)
                child.input.flush()
        except (OSError, ValueError):  # ValueError: the file is closed
            self.wait_for_failure(REPORT_S)
            raise

    def check(self) -> None:
        """Raise `EngineFailedError` with the reason if a child has ended unasked."""
        if self.failure is not None:
            raise EngineFailedError(self.failure)

    def wait_for_failure(self, timeout_s: float) -> None:
        """Raise as `check`, if a child ends within this time. Returns at once after `close`."""
        self._ended.wait(timeout_s)
        self.check()

    def close(self, grace_s: float = REPORT_S) -> None:
        """End all children: their input ends, and after `grace_s` they are killed. May be called again."""
        with self._lock:
            self._closing = True
        self._ended.set()  # nothing waits for a failure any longer
        self._end(grace_s)

    def ask_to_end(self, message: bytes, within_s: float) -> None:
        """Send a message at which each child ends. `close` after so long."""
        with self._lock:
            if self._closing:
                return
        with suppress(OSError, ValueError, EngineFailedError):
            self.send(message)
        with self._lock:
            self._closing = True
        until_s = time.monotonic() + within_s
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, until_s - time.monotonic()))
        self.close()

    def _watch(self, child: _Child) -> None:
        """Wait for the child's end. If it comes unasked, end the others."""
        code = child.process.wait()
        if code > 0:  # its last line is the reason
            child.reader.join(1.0)
        with self._lock:
            if self._closing or self.failure is not None:
                return
            self.failure = _reason(child, code)
        log.error("%s", self.failure)
        self._ended.set()
        self._end(REPORT_S)
        if self._on_failure is not None:
            self._on_failure(self.failure)

    def _end(self, grace_s: float) -> None:
        end_s = time.monotonic() + grace_s + KILLED_S
        timer = threading.Timer(grace_s, self._kill)
        timer.daemon = True
        timer.start()  # first: a thread that sends to a child that does not read holds up `close`
        for child in self._children:
            with suppress(OSError):  # what was not sent yet has no reader any more
                child.input.close()
        for child in self._children:
            try:
                child.process.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.error("%s (process %d) was killed and has not ended", child.role.name, child.process.pid)
        timer.cancel()

    def _kill(self) -> None:
        for child in self._children:
            child.process.kill()


def _started(role: Role) -> _Child:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "sagellm.core.child_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**child_environment(), **role.environment},
        pass_fds=role.files,
    )
    last_lines: deque[str] = deque(maxlen=20)
    reader = threading.Thread(
        target=_log_lines,
        args=(role.name, process.stdout, last_lines),
        name=f"log of {role.name}",
        daemon=True,
    )
    child = _Child(role, process, reader, last_lines)
    reader.start()
    level = logging.getLogger().getEffectiveLevel()
    start = {"name": role.name, "entry": role.entry, "options": dict(role.options), "log_level": level}
    encoded = json.dumps(start).encode()
    with suppress(OSError):  # it has ended already, as the watching thread will say
        child.input.write(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)
        child.input.flush()
    return child


def _log_lines(name: str, output: IO[bytes], last_lines: deque[str]) -> None:
    """Log what a child writes, line by line, with its name. What its loggers say keeps level and fields."""
    for raw in output:
        line = raw.decode(errors="replace").rstrip("\n")
        record = _record(line)
        text = str(record.pop("message"))
        level = logging.getLevelNamesMapping().get(str(record.pop("level")), logging.WARNING)
        logger = logging.getLogger(str(record.pop("logger")))
        if text.strip():
            last_lines.append(text)
            logger.log(level, "[%s] %s", name, text, extra={FIELDS: record} if record else None)
    output.close()


def _record(line: str) -> dict[str, Any]:
    """The fields of a log record; of any other line, those of a warning."""
    if line.startswith('{"time":'):
        with suppress(ValueError):
            record: dict[str, Any] = json.loads(line)
            if record.keys() >= {"time", "level", "logger", "message"}:
                del record["time"]
                return record
    return {"level": "WARNING", "logger": log.name, "message": line}


def _reason(child: _Child, code: int) -> str:
    """Why a child has ended, in one line."""
    if code < 0:
        try:
            what = f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            what = f"was ended by signal {-code}"
        return f"{child.role.name} (process {child.process.pid}) {what}"
    if code == 0:
        return f"{child.role.name} (process {child.process.pid}) ended before it was asked to"
    last = child.last_lines[-1] if child.last_lines else f"exit status {code}"
    return f"{child.role.name} failed: {last}"
