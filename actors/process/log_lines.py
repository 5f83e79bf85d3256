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
    """Time (UTC), level, logger, message and fields: `… WARNING cluster.pool.fleet an engine died engine_id=decode-0`.

    What has spaces or quotes in it is quoted as in JSON.
    """

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's own
        """Format the message and its fields, for logging, which adds a traceback behind it."""
        # RAY: whoever imports it has its _ray_timestamp_ns in each record.
        fields = {name: value for name, value in vars(record).items() if name not in _NO_FIELDS and name[0] != "_"}
        return " ".join((super().formatMessage(record), *(f"{name}={_text(value)}" for name, value in fields.items())))


def write_log_lines() -> None:
    """Write what raypd says in this process to stderr, of which Ray keeps a file for each process.

    From the level that RAYPD_LOG_LEVEL names on; default: INFO. Where logging was set up by somebody else, such as by
    Ray's LoggingConfig, it stays as it is.
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
        logger.warning("no such level of logging, INFO is taken", extra={LEVEL_VARIABLE: wanted})


def _text(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
