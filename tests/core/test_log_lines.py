"""Lines of the log: their time, their two forms, and that nothing in them can look like another line."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.log_lines import FIELDS, JsonLines, TextLines, key_values, one_line

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def record(
    message: str, *args: object, error: BaseException | None = None, fields: dict[str, Any] | None = None
) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("sagellm.test", logging.INFO, "file.py", 1, message, args, exc_info)
    if fields is not None:
        setattr(made, FIELDS, fields)
    return made


def raised(message: str) -> ValueError:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


def test_a_line_of_text_has_its_time_in_utc() -> None:
    made = record("loaded in %d s", 3)
    made.created, made.msecs = 1795364846.123, 123.0
    assert TextLines().format(made) == "2026-11-22T16:27:26.123Z INFO sagellm.test: loaded in 3 s"
    assert json.loads(JsonLines().format(made)) == {
        "time": "2026-11-22T16:27:26.123Z",
        "level": "INFO",
        "logger": "sagellm.test",
        "message": "loaded in 3 s",
    }


def test_fields_stand_behind_the_message_or_in_the_object() -> None:
    fields = {"status": 200, "total_s": 0.25, "tenant": 'a "b"\n', "path": "/v1/x", "none": None}
    made = record("request", fields=fields)
    assert (
        TextLines()
        .format(made)
        .endswith('request status=200 total_s=0.25 tenant="a \\"b\\"\\n" path=/v1/x none=None')
    )
    assert fields.items() <= json.loads(JsonLines().format(made)).items()


@given(st.text(), st.text())
def test_no_text_makes_a_second_line(message: str, value: str) -> None:
    for lines in (TextLines(), JsonLines()):
        shown = lines.format(record("%s", message, fields={"value": value}))
        assert len(shown.splitlines()) == 1
        assert not re.search(r"[\x00-\x1f\x7f-\x9f]", shown)


@pytest.mark.parametrize("end", ["\n", "\r", "\v", "\x85", "\u2028", "\x1b[2K\r"])
def test_an_exception_forges_no_line(end: str) -> None:
    forged = "2026-11-22T16:27:26.123Z INFO sagellm.access: request"
    shown = TextLines().format(record("failed", error=raised(f"bad{end}{forged}")))
    first, *others = shown.splitlines()
    assert first.endswith("failed")
    assert all(line.startswith("    ") for line in others)
    line = JsonLines().format(record("failed", error=raised(f"bad{end}{forged}")))
    assert len(line.splitlines()) == 1
    assert forged in json.loads(line)["exception"]


def test_ordinary_text_stays_as_it_is() -> None:
    assert one_line("schön: 12 % \u4e2d") == "schön: 12 % \u4e2d"
    assert key_values({"a": "b-c", "empty": "", "n": 1}) == 'a=b-c empty="" n=1'


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_process_writes_lines_of_that_form(form: str) -> None:
    code = f"""
from sagellm.core.log_lines import set_up_logging
import logging
set_up_logging("info", "{form}")
set_up_logging("debug", "text")  # has no effect: handlers are there
logging.getLogger("sagellm.x").info("hello")
logging.getLogger("sagellm.x").debug("not shown")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    [line] = done.stderr.splitlines()
    if form == "text":
        assert re.fullmatch(rf"{TIME} INFO sagellm.x: hello", line)
    else:
        assert re.fullmatch(TIME, json.loads(line)["time"])
