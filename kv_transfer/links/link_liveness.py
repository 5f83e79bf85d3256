"""Finds links that are dead although nothing has failed on them.

If a network drops everything, neither end is told: a link over it looks idle. So each end sends Ping to a peer from
which it has received no message for a while; any message of the peer counts as an answer. A link whose peer has sent
nothing for the whole timeout is silent, whatever the state of its connections, and is closed: its transfers fail, their
requests are recovered, and the next transfer dials a new link. No Ping goes over the data connection: the kernel probes
it (transports/tcp.py), and each check asks the kernel whether it is gone.

An agent that was itself stopped for a while must not close its links: messages of the peers may lie unread. If a check
comes more than one interval late, every peer gets until the next check.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kv_transfer.links.peer_link import LinkState, PeerLink

NUM_BEATS: Final = 4
"""The number of checks in one timeout; a silent link is found at most one interval after the timeout."""


@dataclass(frozen=True, slots=True)
class Lifeless:
    """A link that is dead and has to be closed, and why."""

    link: PeerLink
    reason: str


class LinkLiveness:
    """The checks of all links of one agent. Times are monotonic seconds, which the caller passes in."""

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: how long a peer may send nothing"""
        self._timeout_s = timeout_s
        self._interval_s = timeout_s / NUM_BEATS
        self._next_s: float | None = None

    def next_deadline(self, links: Iterable[PeerLink]) -> float | None:
        """Return when the next check is due; None while no link is open."""
        return self._next_s if any(link.state is LinkState.OPEN for link in links) else None

    def beat(self, links: Iterable[PeerLink], now_s: float) -> list[Lifeless]:
        """Check every open link, if it is time: send Ping on quiet ones, and return those that are dead."""
        due_s, is_due = self._next_s, self._next_s is None or now_s >= self._next_s
        if not is_due:
            return []
        self._next_s = now_s + self._interval_s
        was_stopped = due_s is None or now_s - due_s > self._interval_s
        lifeless = []
        for link in links:
            if link.state is not LinkState.OPEN:
                continue
            if was_stopped:
                link.heard_s = max(link.heard_s, now_s - self._timeout_s + self._interval_s)
            if (reason := self._examine(link, now_s)) is not None:
                lifeless.append(Lifeless(link, reason))
        return lifeless

    def _examine(self, link: PeerLink, now_s: float) -> str | None:
        """Return why the link is dead, or None; send Ping if its peer has been quiet."""
        if link.data is not None and link.data.is_cut:
            return "the data connection broke while nothing moved on it"
        quiet_s = now_s - link.heard_s
        if quiet_s >= self._timeout_s:
            return f"the peer has been silent for {self._timeout_s:g} s"
        if quiet_s >= self._interval_s:
            link.ping(now_s)
        return None
