"""READY messages that came before their requests: the way to the producer may be longer than that to the consumer.

Also the other way round: transfers that ended here before their READY came. Both are kept for so long, and so many.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kv_transfer.handoff.control_messages import Ready
from kv_transfer.links.peer_link import PeerLink

_MAX_KEPT: Final = 4096


class EarlyReadies:
    """Bounded in number and in time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._kept: OrderedDict[str, tuple[float, PeerLink, Ready]] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def put(self, link: PeerLink, message: Ready, now_s: float) -> bool:
        """Keep a READY; False if it is to be refused now: its request has ended, or too many are kept, or a later
        attempt is kept already. A later attempt takes an earlier one's place.
        """
        earlier = self._kept.get(message.transfer_id)
        if earlier is not None and message.attempt < earlier[2].attempt:
            return False
        # Invariant: in the order of their deadlines.
        self._kept.pop(message.transfer_id, None)
        if message.transfer_id in self._ended or len(self._kept) >= _MAX_KEPT:
            self._ended.pop(message.transfer_id, None)
            return False
        self._kept[message.transfer_id] = (now_s + self._timeout_s, link, message)
        return True

    def take(self, transfer_id: str, link: PeerLink | None = None) -> tuple[PeerLink, Ready] | None:
        """The READY of a transfer, once; with a link, only if it came on that one."""
        found = self._kept.get(transfer_id)
        if found is None or (link is not None and found[1] is not link):
            return None
        del self._kept[transfer_id]
        return found[1], found[2]

    def refuse_later(self, transfer_id: str) -> None:
        """The transfer has ended here without READY: refuse it when it comes."""
        self._ended[transfer_id] = None
        if len(self._ended) > _MAX_KEPT:
            self._ended.popitem(last=False)

    def expire(self, now_s: float) -> list[tuple[PeerLink, Ready]]:
        """Those whose time is up, removed; those of dead links go silently."""
        expired = []
        while self._kept and (first := next(iter(self._kept.values())))[0] <= now_s:
            self._kept.popitem(last=False)
            expired.append((first[1], first[2]))
        return [(link, message) for link, message in expired if link.is_usable]

    def next_deadline(self) -> float | None:
        """Monotonic time of the first one."""
        return next(iter(self._kept.values()))[0] if self._kept else None
