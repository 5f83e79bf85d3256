"""Counts the requests of an ingress that are in flight, and the adapters that they need, as these change.

An endpoint picker asks for these counts many times a second, so they are not counted anew over thousands of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """The requests of an ingress now.

    num_waiting, num_running:           those without and with output tokens
    waiting_adapters, running_adapters: the adapters that they need, each once
    """

    num_waiting: int = 0
    num_running: int = 0
    waiting_adapters: tuple[str, ...] = ()
    running_adapters: tuple[str, ...] = ()


NOTHING_IN_FLIGHT: Final = RequestLoad()


class LoadCounts:
    """The counts of one ingress. It belongs to the ingress's event loop.

    Invariant: each adapter has the number of requests that need it, and only adapters with requests are kept.
    """

    def __init__(self) -> None:
        """Begin without requests."""
        self._num = {False: 0, True: 0}
        """The requests by whether they have output tokens."""
        self._adapters: dict[bool, dict[str, int]] = {False: {}, True: {}}

    def add(self, adapter: str, *, has_tokens: bool) -> None:
        """Count a request. adapter: "" if it needs none, or if its adapter is not known yet"""
        self._num[has_tokens] += 1
        if adapter:
            counts = self._adapters[has_tokens]
            counts[adapter] = counts.get(adapter, 0) + 1

    def remove(self, adapter: str, *, has_tokens: bool) -> None:
        """Count a request no longer that add() has counted so."""
        self._num[has_tokens] -= 1
        if not adapter:
            return
        counts = self._adapters[has_tokens]
        counts[adapter] -= 1
        if not counts[adapter]:
            del counts[adapter]

    def load(self) -> RequestLoad:
        """Return the counts as they are now."""
        return RequestLoad(self._num[False], self._num[True], tuple(self._adapters[False]), tuple(self._adapters[True]))
