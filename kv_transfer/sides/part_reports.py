"""Makes one report of the reports of a transfer's parts: each link, or each rank, that works on a transfer is a part.

A transfer is ready, sent or received when all of its parts are; it has failed as soon as one part has. Each part
reports each kind of event at most once, and FinishedSending or FinishedReceiving last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Final

from kv_transfer.connector.keys import TransferKey, TransferKind
from kv_transfer.connector.reports import (
    FailedSending,
    FetchWanted,
    FinishedLoading,
    FinishedReceiving,
    FinishedSending,
    LoadOutcome,
    PartFailed,
    ReadyToPrefill,
    ReceivedKV,
    TransferReport,
)
from kv_transfer.connector.store_steps import LoadedBlocks
from kv_transfer.transfer_stats import TransferStats, TransferTimings

# The most serious outcome comes first. RELEASED is the most serious one, because the producer has already answered the
# client.
_GRAVITY = (LoadOutcome.RELEASED, LoadOutcome.FAILED, LoadOutcome.CANCELLED, LoadOutcome.LOADED)

_MAX_WANTS: Final = 1024


@dataclass(slots=True)
class _Transfer:
    num_ready: int = 0
    num_sent: int = 0
    has_failed: bool = False
    received: list[ReceivedKV] = field(default_factory=list)


class PartReports:
    """The reports that some of a transfer's parts have made, while other parts have still to report.

    The object belongs to one thread. Invariant: a transfer is kept from its first part's report to its last part's.
    The bytes of a fetch are not merged, so engines of several ranks fetch none: models with images run on one rank.
    """

    def __init__(self, num_parts: Callable[[TransferKey], int]) -> None:
        """num_parts: returns the number of parts of the whole transfer with this key"""
        self._num_parts = num_parts
        self._transfers: dict[TransferKey, _Transfer] = {}
        self._loads: dict[str, list[LoadedBlocks]] = {}
        self._wants = WantCounts()

    def add(self, report: TransferReport) -> list[TransferReport]:
        """Take in one part's report, and return the reports that are now true of its whole transfer."""
        match report:
            case FinishedLoading(request_id, loaded):
                return self._add_load(request_id, loaded)
            case FetchWanted(want):
                return [report] if self._wants.is_last(want.fetch.fetch_id, want.num_ranks) else []
            case PartFailed(key):
                return [PartFailed(key.whole)]
        key = report.key.whole
        transfer = self._transfers.setdefault(key, _Transfer())
        match report:
            case ReadyToPrefill():
                transfer.num_ready += 1
                return [ReadyToPrefill(key)] if transfer.num_ready == self._num_parts(key) else []
            case FailedSending(_, reason):
                is_first, transfer.has_failed = not transfer.has_failed, True
                return [FailedSending(key, reason)] if is_first else []
            case FinishedSending():
                transfer.num_sent += 1
                if transfer.num_sent < self._num_parts(key):
                    return []
                del self._transfers[key]
                return [FinishedSending(key)]
            case FinishedReceiving(_, received):
                return self._add_received(key, transfer, received)

    def _add_received(self, key: TransferKey, transfer: _Transfer, received: ReceivedKV) -> list[TransferReport]:
        transfer.received.append(received)
        if len(transfer.received) == self._num_parts(key):
            del self._transfers[key]
            return [FinishedReceiving(key, merge_received(transfer.received))]
        # The producer may be waiting for the READY of this part before it sends anything on the other parts.
        return [PartFailed(key)] if received.outcome is LoadOutcome.FAILED else []

    def _add_load(self, request_id: str, loaded: LoadedBlocks) -> list[TransferReport]:
        loads = self._loads.setdefault(request_id, [])
        loads.append(loaded)
        if len(loads) < self._num_parts(TransferKey(TransferKind.PREFIX_FETCH, request_id)):
            return []
        return [FinishedLoading(request_id, min(self._loads.pop(request_id), key=lambda load: load.num_blocks))]


class WantCounts:
    """Counts the parts of other engines' fetches, until every part of a fetch has come. At most 1024 are counted."""

    def __init__(self) -> None:
        self._num_parts: dict[str, int] = {}

    def is_last(self, fetch_id: str, num_parts: int) -> bool:
        """Count a part, and return whether it is the last of num_parts."""
        count = self._num_parts.pop(fetch_id, 0) + 1
        if count == num_parts:
            return True
        self._num_parts[fetch_id] = count
        if len(self._num_parts) > _MAX_WANTS:
            # The other parts of the oldest fetch never came, and the engine that fetches has given up by now.
            del self._num_parts[next(iter(self._num_parts))]
        return False


def merge_received(parts: list[ReceivedKV]) -> ReceivedKV:
    """Merge the results of a load's parts: the most serious outcome, and the tokens that all parts have received."""
    worst = min(parts, key=lambda part: _GRAVITY.index(part.outcome))
    return ReceivedKV(
        outcome=worst.outcome,
        num_valid_tokens=min(part.num_valid_tokens for part in parts),
        first_token_id=worst.first_token_id,
        reason=worst.reason,
        timings=_merge_timings([part.timings for part in parts if part.timings is not None]),
    )


def _merge_timings(parts: list[TransferTimings]) -> TransferTimings | None:
    """Merge the timings of parts that moved at the same time: the same blocks, of different heads."""
    if not parts:
        return None
    return TransferTimings(
        num_blocks=max(part.num_blocks for part in parts),
        num_bytes=sum(part.num_bytes for part in parts),
        num_chunks=max(part.num_chunks for part in parts),
        transfer_s=max(part.transfer_s for part in parts),
        exposed_s=max(part.exposed_s for part in parts),
    )


def add_stats(parts: Iterable[TransferStats]) -> TransferStats:
    """Return the counters of all ranks together. Transfers, links and pinned blocks count once on each rank."""
    total = TransferStats()
    for part in parts:
        for counter in fields(TransferStats):
            mine, more = getattr(total, counter.name), getattr(part, counter.name)
            if isinstance(more, dict):
                mine = {key: mine.get(key, 0) + more.get(key, 0) for key in mine | more}
            elif counter.name == "oldest_pin_at_s":
                mine = min((at_s for at_s in (mine, more) if at_s is not None), default=None)
            else:
                mine += more
            setattr(total, counter.name, mine)
    return total
