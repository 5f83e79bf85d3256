"""Whether links live while nothing moves on them.

A network that drops everything tells nobody: a link over it looks idle. So each end asks a peer from which it has heard
nothing for a while, by Ping, and any word of the peer's counts as an answer. A link whose peer says nothing for the
whole timeout is silent, whatever its connection may look like, and is closed: its transfers fail into recovery, and the
next one dials anew. The data connection has no words of its own: the kernel watches over it (transports/tcp.py), and is
asked here what it knows.

Who was stopped himself must not blame his peers: their words may lie unread. If a beat comes much later than it was
due, every peer gets the time of one more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kv_transfer.handoff.control_messages import Ping
from kv_transfer.links.peer_link import LinkState, PeerLink

NUM_BEATS: Final = 4
"""So often in the timeout quiet links are looked after; a silent one is found within one beat more than the timeout."""


@dataclass(frozen=True, slots=True)
class Lifeless:
    """A link to close, and why."""

    link: PeerLink
    reason: str


class LinkLiveness:
    """Watches the liveness of all links of one agent. Times are monotonic."""

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: how long a peer may say nothing"""
        self._timeout_s = timeout_s
        self._interval_s = timeout_s / NUM_BEATS
        self._next_s: float | None = None

    def next_deadline(self, links: Iterable[PeerLink]) -> float | None:
        """When the next beat is due; None while no link is open."""
        return self._next_s if any(link.state is LinkState.OPEN for link in links) else None

    def beat(self, links: Iterable[PeerLink], now_s: float) -> list[Lifeless]:
        """Ask quiet links, if it is time, and name those that are lifeless."""
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
        """Why the link is lifeless, if it is; a quiet one is asked."""
        if link.data is not None and link.data.is_cut:
            return "the data connection broke while nothing moved on it"
        quiet_s = now_s - link.heard_s
        if quiet_s >= self._timeout_s:
            return f"the peer has been silent for {self._timeout_s:g} s"
        if quiet_s >= self._interval_s:
            link.stream.send(Ping())
        return None
