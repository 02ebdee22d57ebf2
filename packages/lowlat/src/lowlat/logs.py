"""Log lines: one event a line, as JSON or as text, never with prompts or answers in them."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import msgspec

_log = logging.getLogger("lowlat.server")


def log_event(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Write one event with its fields."""
    _log.log(level, event, extra={"fields": fields})


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "event", ...fields}`; an exception adds its type and where it was raised."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class TextFormatter(logging.Formatter):
    """`time level event key=value ...`, for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.levelname.lower()} "
        line += f"{record.getMessage()} {fields}".rstrip()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds * 1000) % 1000:03d}Z"


def set_up_logging(form: str = "auto", level: int = logging.INFO) -> bool:
    """Send lowlat's and uvicorn's log lines to stderr; returns whether they are JSON.

    `form` is `json`, `text` or `auto` (text on a terminal).
    """
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name, least in (("lowlat", level), ("uvicorn", max(level, logging.WARNING))):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(least)
    return form == "json"
