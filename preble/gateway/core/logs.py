"""The gateway's log: one JSON object a line on stderr, times in UTC. Owns the format; what is logged is said where it
happens."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import msgspec


def log_as_json(level: str, always: Mapping[str, Any]) -> None:
    """Let this process log so; the fields `always` are in every line."""
    logging.basicConfig(level=level.upper(), stream=sys.stderr, force=True)
    logging.captureWarnings(True)
    threading.excepthook = _log_end_of_thread
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines(always))


def _log_end_of_thread(failure: threading.ExceptHookArgs) -> None:
    """What a thread failed of."""
    thread = "a thread" if failure.thread is None else failure.thread.name
    error = failure.exc_value or failure.exc_type()
    logging.getLogger("preble.gateway").error("%s failed, which is a defect", thread, exc_info=error)


class JsonLines(logging.Formatter):
    """Each log record as one line of JSON; a record's `fields` are its own keys, `always` are those of all. Whatever is
    logged is a line: what JSON does not know is its `repr`, what is no UTF-8 (a path's bytes) is escaped."""

    def __init__(self, always: Mapping[str, Any]) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._always,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        try:
            return msgspec.json.encode(line, enc_hook=repr).decode()
        except UnicodeEncodeError:
            return json.dumps(line, default=repr)
