"""Pytest plugin of `tools/mutants.py`: bounds memory, and notes which marked statements a test executes."""

from __future__ import annotations

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

EXECUTED: set[str] = set()
"""`path:line` of statements since the test began; the marked source writes to it."""
MAX_BYTES = 4 << 30
"""A mutant that appends without end fails, and does not exhaust the machine."""

resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
_of_fixtures: defaultdict[str, set[str]] = defaultdict(set)
"""By test file: what its fixtures executed that live longer than one test."""


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    before = EXECUTED.copy() if fixturedef.scope != "function" else EXECUTED
    result = yield
    _of_fixtures[request.node.nodeid.partition("::")[0]] |= EXECUTED - before
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    EXECUTED.clear()
    start = time.perf_counter()
    result = yield
    if report := os.environ.get("MUTANTS_REPORT"):
        executed = sorted(EXECUTED | _of_fixtures[item.nodeid.partition("::")[0]])
        line = {"test": item.nodeid, "seconds": time.perf_counter() - start, "executed": executed}
        with Path(report).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return result
