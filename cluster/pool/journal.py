"""The journal of the controller's newest decisions and their reasons, which `raypd status` shows."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from cluster.observability.status import Decision

logger = logging.getLogger(__name__)

_MAX_DECISIONS: Final = 200


class Journal:
    """The newest 200 decisions, oldest first."""

    def __init__(self) -> None:
        self._decisions: deque[Decision] = deque(maxlen=_MAX_DECISIONS)

    def add(self, text: str) -> None:
        """Note and log a decision, at the current time."""
        logger.info("decided", extra={"decision": text})
        self._decisions.append(Decision(time.time(), text))

    def restore(self, decisions: Iterable[Decision]) -> None:
        """Add the decisions of an earlier controller."""
        self._decisions.extend(decisions)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The remembered decisions, oldest first."""
        return tuple(self._decisions)
