"""Log lines on stderr: one line per record, as text or JSON. A client cannot forge a line: control characters
and line ends are escaped."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any, Literal

LogFormat = Literal["text", "json"]

FIELDS = "fields"
"""Attribute of a log record for values by name: `log.info("message", extra={FIELDS: {...}})`."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_BARE = re.compile(r"[\w./:+@-]+", re.ASCII)


def set_up_logging(level: str, form: LogFormat = "text") -> None:
    """Make all loggers write such lines to stderr. Does nothing if the root logger has handlers."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def one_line(text: str) -> str:
    r"""The text with control characters and line ends written as `\xNN` or `\uNNNN`."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def key_values(fields: Mapping[str, Any]) -> str:
    """`key=value` pairs in one line. A value that is not a plain word or number is quoted as in JSON."""
    pairs = []
    for key, value in fields.items():
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        pairs.append(f"{key}={text if _BARE.fullmatch(text) else json.dumps(text)}")
    return " ".join(pairs)


class TextLines(logging.Formatter):
    """`2026-11-22T16:47:26.123Z INFO sagellm.start: message`; the lines of a traceback are indented."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        line, fields = super().formatMessage(record), getattr(record, FIELDS, None)
        return one_line(f"{line} {key_values(fields)}" if fields else line)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"    {one_line(line)}" for line in lines)


class JsonLines(TextLines):
    """One JSON object per line. Time, level, logger, message, then the fields of the record, and
    `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = logging.Formatter.formatException(self, record.exc_info)
        return json.dumps(line, default=str)
