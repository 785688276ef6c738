"""Sets up the log of a process: text or JSON lines, with the time zone, for an engine and for its ranks."""

from __future__ import annotations

import json
import logging
import os
from datetime import datetime

FORMATS = ("text", "json")
FORMAT_VARIABLE = "MILLRACE_LOG_FORMAT"
"""The environment variable with the format, which the processes of the ranks inherit."""


def set_up_logs(level: str) -> None:
    """Log to stderr, in the format that the environment variable names, and log Python's warnings too."""
    handler = logging.StreamHandler()
    is_json = os.environ.get(FORMAT_VARIABLE) == "json"
    handler.setFormatter(
        JsonFormatter() if is_json else TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)


class TextFormatter(logging.Formatter):
    """Writes local times with their offset from UTC."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


class JsonFormatter(TextFormatter):
    """Writes one JSON object a line. `extra={"fields": {...}}` of a log call adds fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
