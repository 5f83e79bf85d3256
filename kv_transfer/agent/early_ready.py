"""READY messages that came to a producer before their requests, and requests that ended before their READY came.

A request goes to both of its engines at once, and the consumer may get its part first. So a READY is kept until the
producer has the request, for a limited time. The other way round, the id of a transfer that has ended without a READY
is kept, so that its READY is refused at once when it comes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kv_transfer.handoff.control_messages import Ready
from kv_transfer.links.peer_link import PeerLink
from kv_transfer.params import TransferId

_MAX_KEPT: Final = 4096


class EarlyReadies:
    """The READY messages that were kept, and the ids of the transfers that ended. It belongs to the agent's thread.

    Invariants: at most 4096 of each are kept; no transfer is in both; kept messages are in the order of deadlines.
    """

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: how long a READY is kept."""
        self._timeout_s = timeout_s
        self._kept: OrderedDict[TransferId, tuple[float, PeerLink, Ready]] = OrderedDict()
        self._ended: OrderedDict[TransferId, None] = OrderedDict()

    def put(self, link: PeerLink, message: Ready, now_s: float) -> bool:
        """Keep a READY, in place of an earlier one of the same transfer. now_s: monotonic.

        Returns False if the READY has to be refused now: its request has ended, too many are kept, or one of a later
        attempt is kept already.
        """
        earlier = self._kept.get(message.transfer_id)
        if earlier is not None and message.attempt < earlier[2].attempt:
            return False
        # The kept messages are in the order of their deadlines, so a message that replaces another one goes to the end.
        self._kept.pop(message.transfer_id, None)
        if message.transfer_id in self._ended or len(self._kept) >= _MAX_KEPT:
            self._ended.pop(message.transfer_id, None)
            return False
        self._kept[message.transfer_id] = (now_s + self._timeout_s, link, message)
        return True

    def take(self, transfer_id: TransferId, link: PeerLink | None = None) -> tuple[PeerLink, Ready] | None:
        """Remove and return a transfer's READY and the link on which it came; None if there is none.

        link: return a READY that came on this link only
        """
        found = self._kept.get(transfer_id)
        if found is None or (link is not None and found[1] is not link):
            return None
        del self._kept[transfer_id]
        return found[1], found[2]

    def refuse_later(self, transfer_id: TransferId) -> None:
        """Refuse the transfer's READY when it comes: the transfer has ended here without it."""
        self._ended[transfer_id] = None
        if len(self._ended) > _MAX_KEPT:
            self._ended.popitem(last=False)

    def expire(self, now_s: float) -> list[tuple[PeerLink, Ready]]:
        """Remove the messages whose time is up, and return those whose links can still carry an answer."""
        expired = []
        while self._kept and (first := next(iter(self._kept.values())))[0] <= now_s:
            self._kept.popitem(last=False)
            expired.append((first[1], first[2]))
        return [(link, message) for link, message in expired if link.is_usable]

    def next_deadline(self) -> float | None:
        """Return the monotonic time at which the first message expires; None if none is kept."""
        return next(iter(self._kept.values()))[0] if self._kept else None
