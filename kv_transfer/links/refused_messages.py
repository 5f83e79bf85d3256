"""Counts of refused messages and handshakes. The first refusal of each kind and origin is logged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Final

logger = logging.getLogger(__name__)

_MAX_ORIGINS: Final = 256
"""A stranger that connects from ever new addresses must fill neither the memory nor the log."""


class RefusedMessages:
    """The counters of refusals by kind. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._logged: set[tuple[str, str]] = set()

    def add(self, kind: str, origin: str, reason: str) -> None:
        """Count a refusal, and log it if it is the first of its kind from this origin.

        kind:   one of a few fixed words, such as "malformed message"
        origin: the sender, as far as it is known
        """
        with self._lock:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            is_first = (kind, origin) not in self._logged and len(self._logged) < _MAX_ORIGINS
            if is_first:
                self._logged.add((kind, origin))
        if is_first:
            fields = {"kind": kind, "origin": origin, "reason": reason[:1000]}
            logger.warning("a message was refused; further ones of this kind and origin are only counted", extra=fields)

    def counts(self) -> Mapping[str, int]:
        """Return how many refusals of each kind there were so far."""
        with self._lock:
            return dict(self._counts)
