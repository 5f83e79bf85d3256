"""Formats the log records of a cluster's processes: a line for each record, with its fields."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from typing import Any, Final

LEVEL_VARIABLE: Final = "RAYPD_LOG_LEVEL"
_FLOORS: Final = ("cluster", "actors", "kv_transfer")
_NO_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_PLAIN: Final = re.compile(r"[^\s\"=]+")


class LineFormatter(logging.Formatter):
    """Formats a record as time (UTC), level, logger, message and fields.

    Example: `… WARNING cluster.pool.fleet an engine died engine_id=decode-0`. A field's value that has spaces, quotes
    or equals signs in it is quoted as in JSON.
    """

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's own
        """Format the message and its fields; logging adds a traceback after them."""
        # RAY: importing Ray adds _ray_timestamp_ns to each record.
        fields = {name: value for name, value in vars(record).items() if name not in _NO_FIELDS and name[0] != "_"}
        return " ".join((super().formatMessage(record), *(f"{name}={_text(value)}" for name, value in fields.items())))


def write_log_lines() -> None:
    """Write raypd's log records of this process to stderr, which Ray keeps in a file for each process.

    RAYPD_LOG_LEVEL names the lowest level that is written; the default is INFO. Logging that is configured already,
    such as by Ray's LoggingConfig, stays as it is.
    """
    if logging.getLogger().handlers or logging.getLogger(_FLOORS[0]).handlers:
        return
    wanted = os.environ.get(LEVEL_VARIABLE, "INFO")
    level = logging.getLevelNamesMapping().get(wanted.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    for floor in _FLOORS:
        logger = logging.getLogger(floor)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if level is None else level)
    if level is None:
        logger.warning("the log level is unknown, so INFO is used", extra={LEVEL_VARIABLE: wanted})


def _text(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
