"""The ends of an engine's last steps, from which the gaps between a request's tokens follow."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

import numpy as np

from actors.core.outputs.engine_core_outputs import DecodedTokens, EngineCoreOutput
from actors.costs.step_shape import Floats

_MAX_ENDS: Final = 8192
_FEW: Final = 32
"""Fewer numbers than these are added faster one by one."""


class StepLog:
    """The times at which an engine's steps ended. Steps are counted from 0.

    A request that decodes gets a token with each step. So the engine need not note any token of it: the step with which
    it began, and their number, tell when the tokens came. Ends before the oldest open request are forgotten.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        """Seconds in steps."""
        self._begun_s = 0.0
        self._ends = array("d")
        self._num_forgotten = 0
        self._open: dict[str, int] = {}

    def __len__(self) -> int:
        """Return how many ends are kept."""
        return len(self._ends)

    def begin(self, now_s: float) -> None:
        """Note that a step begins, or the first one of several that follow each other."""
        self._begun_s = now_s

    def add(self, end_s: float) -> None:
        """Note the end of a step, which began at begin(), or when the one before it ended."""
        self.busy_s += end_s - self._begun_s
        self._begun_s = end_s
        self._ends.append(end_s)
        if len(self._ends) > _MAX_ENDS:
            self._forget()

    def add_all(self, ends_s: Floats) -> None:
        """Note the ends of several steps."""
        if len(ends_s) < _FEW:
            for end_s in ends_s.tolist():
                self.add(end_s)
            return
        seconds = np.diff(ends_s, prepend=self._begun_s)
        # A cumulative sum adds one number after the other, as single steps do.
        self.busy_s = float(np.cumsum(np.concatenate(([self.busy_s], seconds)))[-1])
        self._begun_s = float(ends_s[-1])
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

    def all_open(self, request_ids: Iterable[str]) -> bool:
        """Whether all of these requests decode here."""
        return all(map(self._open.__contains__, request_ids))

    def unopened(self, decoded: DecodedTokens | None) -> list[EngineCoreOutput]:
        """Return the outputs of requests that are not open.

        Those were preempted, and a single token was left to compute: that step looks like any other one of a decode.
        """
        if decoded is None or self.all_open(decoded.req_ids):
            return []
        return [output for output in decoded if not self.is_open(output.request_id)]

    def _forget(self) -> None:
        newest = self._num_forgotten + len(self._ends) - 1
        oldest = min(self._open.values(), default=newest) - self._num_forgotten
        if oldest > _MAX_ENDS // 2:
            del self._ends[:oldest]
            self._num_forgotten += oldest
