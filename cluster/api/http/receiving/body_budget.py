"""Bounds the bytes of bodies that an ingress holds at the same time, over all connections."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Final, Self

from cluster.errors import Overloaded

FREE_BYTES: Final = 65_536
"""The bytes of each body that do not count. The number of connections bounds their sum; small bodies always pass."""
_RETRY_DELAY_S: Final = 1.0


class BodyBudget:
    """The bytes that all bodies of an ingress may have together. It belongs to one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._num_bytes_of: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes that are held now."""
        return self._num_bytes

    def share(self, token_name: str) -> BodyShare:
        """Return a share for one body. token_name: the name of its caller's token; "" if no tokens are needed"""
        return BodyShare(self, token_name)

    def take(self, token_name: str, num_bytes: int) -> None:
        """Count bytes of a body. Raises Overloaded if there are too many; then none are counted."""
        if self._num_bytes + num_bytes > self._max_bytes:
            message = f"{self._num_bytes} bytes of request bodies are held, and the limit is {self._max_bytes}"
            raise Overloaded(message, _RETRY_DELAY_S)
        if token_name and self._num_bytes_of[token_name] + num_bytes > self._max_bytes // 2:
            message = f"token {token_name!r} has {self._num_bytes_of[token_name]} bytes of request bodies held"
            raise Overloaded(f"{message}, and its limit is {self._max_bytes // 2}", _RETRY_DELAY_S)
        self._num_bytes += num_bytes
        self._num_bytes_of[token_name] += num_bytes

    def give_back(self, token_name: str, num_bytes: int) -> None:
        """Count bytes no longer, which take() has counted."""
        self._num_bytes -= num_bytes
        self._num_bytes_of[token_name] -= num_bytes
        if not self._num_bytes_of[token_name]:
            del self._num_bytes_of[token_name]


class BodyShare:
    """The bytes that one body takes of the budget, until the end of its context or release()."""

    def __init__(self, budget: BodyBudget, token_name: str) -> None:
        self._budget = budget
        self._token_name = token_name
        self._num_received = 0
        self._num_taken = 0

    def add(self, num_bytes: int) -> None:
        """Count further bytes of the body. Raises Overloaded."""
        self._num_received += num_bytes
        wanted = max(0, self._num_received - FREE_BYTES) - self._num_taken
        if wanted > 0:
            self._budget.take(self._token_name, wanted)
            self._num_taken += wanted

    def release(self) -> None:
        """Give back the bytes: the body is not needed any more."""
        if self._num_taken:
            self._budget.give_back(self._token_name, self._num_taken)
        self._num_taken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
