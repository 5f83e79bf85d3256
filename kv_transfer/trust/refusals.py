"""Counts connections that were refused because a proof was missing or wrong; logs each peer once a minute at most."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from kv_transfer.errors import Untrusted

logger = logging.getLogger(__name__)

_MAX_PEERS: Final = 256
_LOG_INTERVAL_S: Final = 60.0


class Refusals:
    """The counters of refused connections, for any thread. Strangers can fill neither the memory nor the log."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, on_refused: Callable[[int], None] | None = None
    ) -> None:
        """on_refused: called with this process's new total after each refusal, on the thread that refused

        It must return at once.
        """
        self._clock = clock
        self._on_refused = on_refused
        self._totals_of_others: dict[str, int] = {}
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._logged: OrderedDict[tuple[str, str], float] = OrderedDict()
        """When each peer was last logged with each kind of refusal, as (kind, host); the latest comes last."""

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of refusals in this process since the start, by kind: a subclass of Untrusted, as wrong_secret."""
        with self._lock:
            return dict(self._counts)

    @property
    def total(self) -> int:
        """The number of refusals since the start, in this process and in those that note_total() was called for."""
        with self._lock:
            return self._counts.total() + sum(self._totals_of_others.values())

    def note_total(self, name: str, total: int) -> None:
        """Note the number of refusals of another process, which counts for this one, since that process's start."""
        with self._lock:
            self._totals_of_others[name] = total

    def add(self, purpose: str, peer: str, error: Untrusted) -> None:
        """Count a refusal, and log it unless one of this peer and kind was logged within the last minute.

        peer: the other end's address; its port is ignored, because each connection has another one
        """
        kind, host = _kind(error), _host(peer)
        with self._lock:
            self._counts[kind] += 1
            is_news, total = self._note(kind, host), self._counts.total()
        if self._on_refused is not None:
            self._on_refused(total)
        if is_news:
            fields = {"peer": host, "purpose": purpose, "kind": kind, "reason": str(error)}
            logger.warning("a connection was refused: it did not prove the cluster's secret", extra=fields)

    def _note(self, kind: str, host: str) -> bool:
        now_s = self._clock()
        last_s = self._logged.get((kind, host))
        if last_s is not None and now_s < last_s + _LOG_INTERVAL_S:
            return False
        if last_s is None and len(self._logged) >= _MAX_PEERS and now_s < self._oldest_s() + _LOG_INTERVAL_S:
            # All peers that can be remembered were logged within the last minute, so no further peer is logged.
            return False
        self._logged[kind, host] = now_s
        self._logged.move_to_end((kind, host))
        if len(self._logged) > _MAX_PEERS:
            self._logged.popitem(last=False)
        return True

    def _oldest_s(self) -> float:
        return next(iter(self._logged.values()))


def _kind(error: Untrusted) -> str:
    name = type(error).__name__
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).strip("_")


def _host(peer: str) -> str:
    """Return an address without its port: of gRPC, such as ipv4:127.0.0.1:50000, or of a socket."""
    return peer.rpartition(":")[0] or peer
