"""Counts of what was refused: messages, handshakes, connections. The first of each kind and origin is logged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Final

logger = logging.getLogger(__name__)

_MAX_ORIGINS: Final = 256
"""A stranger who comes from ever new addresses must fill neither the memory nor the log."""


class RefusedMessages:
    """Counters by kind; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._logged: set[tuple[str, str]] = set()

    def add(self, kind: str, origin: str, reason: str) -> None:
        """Count a refusal, and log it if it is the first of its kind from there.

        kind:   one of a few fixed words, such as "malformed message"
        origin: who sent it, as far as that is known
        """
        with self._lock:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            is_first = (kind, origin) not in self._logged and len(self._logged) < _MAX_ORIGINS
            if is_first:
                self._logged.add((kind, origin))
        if is_first:
            fields = {"kind": kind, "origin": origin, "reason": reason[:1000]}
            logger.warning("refused, further ones of this kind from there are only counted", extra=fields)

    def counts(self) -> Mapping[str, int]:
        """How many there were of each kind so far."""
        with self._lock:
            return dict(self._counts)
