"""The ends of an engine's last steps, from which the gaps between a request's tokens follow."""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from actors.costs.step_shape import Floats

_MAX_ENDS: Final = 8192


class StepLog:
    """The times at which an engine's steps ended. Steps are counted from 0.

    A request that decodes gets a token with each step. So the engine need not note any token of it: the step with which
    it began, and their number, tell when the tokens came. Ends before the oldest open request are forgotten.
    """

    def __init__(self) -> None:
        self._ends = array("d")
        self._num_forgotten = 0
        self._open: dict[str, int] = {}

    def __len__(self) -> int:
        """Return how many ends are kept."""
        return len(self._ends)

    def add(self, end_s: float) -> None:
        """Note the end of a step."""
        self._ends.append(end_s)
        if len(self._ends) > _MAX_ENDS:
            self._forget()

    def add_all(self, ends_s: Floats) -> None:
        """Note the ends of several steps."""
        self._ends.frombytes(ends_s.tobytes())
        if len(self._ends) > _MAX_ENDS:
            self._forget()

    def open(self, request_id: str) -> None:
        """Note that a request decodes from here on, and has got a token with the newest step."""
        self._open[request_id] = self._num_forgotten + len(self._ends) - 1

    def close(self, request_id: str, num_tokens: int) -> Floats:
        """Return the times of a request's tokens since open(), the one at open() first; [num_tokens + 1].

        num_tokens: how many it has got after that one
        """
        first = self._open.pop(request_id) - self._num_forgotten
        assert 0 <= first < len(self._ends) - num_tokens, "every token came with a step"
        found: Floats = np.array(self._ends[first : first + num_tokens + 1], dtype=np.float64)
        return found

    def is_open(self, request_id: str) -> bool:
        """Whether a request decodes here."""
        return request_id in self._open

    def _forget(self) -> None:
        newest = self._num_forgotten + len(self._ends) - 1
        oldest = min(self._open.values(), default=newest) - self._num_forgotten
        if oldest > _MAX_ENDS // 2:
            del self._ends[:oldest]
            self._num_forgotten += oldest
