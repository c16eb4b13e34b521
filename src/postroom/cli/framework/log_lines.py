"""The log of a command, on stderr: one line for each event, for people (`text`) or machines (`json`).

    2026-11-15T17:00:00.000Z INFO postroom.serve serving url=postroom://127.0.0.1:7070 tls=false
    {"time":"2026-11-15T17:00:00.000Z","level":"info","logger":"postroom.serve","message":"serving","url":…}

What an event is about stands in fields of their own: `log.info("serving", extra=fields(url=…))`. Must never
show a secret: whatever looks like a token is cut out of the finished line, tracebacks included.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import show

__all__ = ["JsonLines", "TextLines", "fields", "logging_to_stderr"]

_TOKEN = re.compile(r"pst_[A-Za-z0-9_-]{8,}")
_PLAIN = re.compile(r"[^\s\"=]+")
_LOUD = ("", "uvicorn", "asyncio")  # loggers beside ours: what they warn of is worth a line


def fields(**values: Any) -> dict[str, Any]:
    """Return what an event is about, for `extra=`."""
    return {"fields": values}


@contextmanager
def logging_to_stderr(format: str, level: str) -> Iterator[None]:
    """Log to stderr while the block runs; nothing of it is left afterwards."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    levels = {logging.getLogger(name): logging.WARNING for name in _LOUD}
    levels[logging.getLogger("postroom")] = logging.getLevelNamesMapping()[level.upper()]
    before = {logger: logger.level for logger in levels}
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        for logger, wanted in levels.items():
            logger.setLevel(wanted)
        yield
    finally:
        root.removeHandler(handler)
        for logger, was in before.items():
            logger.setLevel(was)


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _TOKEN.sub("pst_…", self.line(record, getattr(record, "fields", {})))

    def line(self, record: logging.LogRecord, facts: dict[str, Any]) -> str:
        raise NotImplementedError


class JsonLines(_Lines):
    def line(self, record: logging.LogRecord, facts: dict[str, Any]) -> str:
        found = {
            "time": show.moment(round(record.created * 1000)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **facts,
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return show.encoded(found)


class TextLines(_Lines):
    def line(self, record: logging.LogRecord, facts: dict[str, Any]) -> str:
        time = show.moment(round(record.created * 1000))
        words = [time, record.levelname, record.name, " ".join(record.getMessage().split())]
        line = " ".join([*words, *(f"{name}={_value(value)}" for name, value in facts.items())])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _value(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if _PLAIN.fullmatch(text) else show.encoded(text)
