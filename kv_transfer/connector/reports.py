"""The reports of the connector's worker side to the scheduler: one list of events, each of which names its transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kv_transfer.connector.fetches import WantedFetch
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.store_steps import LoadedBlocks, StoreStats
from kv_transfer.message_ranges import MAX_ITEMS, Bulk, Count, LongText, TokenId, WireName
from kv_transfer.transfer_stats import TransferStats, TransferTimings


class LoadOutcome(StrEnum):
    """How a consumer's load ended. After each of these ends nothing writes the request's blocks any more."""

    LOADED = "loaded"
    """The KV has arrived; for a prefix fetch, as much of it as the other engine had."""
    RELEASED = "released"
    """The producer finished the request itself: nothing is left to do here."""
    CANCELLED = "cancelled"
    """The load was cancelled here, and what was announced has been received, or the link is dead."""
    FAILED = "failed"
    """The load has ended early; the reason says why."""


@dataclass(frozen=True, slots=True)
class ReceivedKV:
    """The result of a consumer's load.

    num_valid_tokens: how many tokens from the start have their KV in place; all of the prompt if a handoff is LOADED
    first_token_id:   token 0, set iff a handoff is LOADED
    reason:           why the load failed; empty otherwise
    timings:          None if the link was lost before the end
    """

    outcome: LoadOutcome
    num_valid_tokens: Count = 0
    first_token_id: TokenId | None = None
    reason: LongText = ""
    timings: TransferTimings | None = None


class ReadyToPrefill(msgspec.Struct, frozen=True, tag="ready_to_prefill"):
    """The consumer of a producer's request has reserved its blocks: the request may compute."""

    key: TransferKey


class FailedSending(msgspec.Struct, frozen=True, tag="failed_sending"):
    """The consumer of a producer's request is gone or has cancelled: the request has to end.

    FinishedSending follows once the request has ended and nothing reads its blocks any more.
    """

    key: TransferKey
    reason: LongText


class FinishedSending(msgspec.Struct, frozen=True, tag="finished_sending"):
    """Nothing reads the blocks of a producer's finished request any more: they can be freed."""

    key: TransferKey


class FinishedReceiving(msgspec.Struct, frozen=True, tag="finished_receiving"):
    """The one and only report of a consumer's load: nothing writes the load's blocks any more.

    data: the bytes that a fetch of bytes has brought, with zeros up to the end of the last slot; None if it has not
          brought all of them, and for loads of KV
    """

    key: TransferKey
    received: ReceivedKV
    data: Bulk | None = None


class PartFailed(msgspec.Struct, frozen=True, tag="part_failed"):
    """One part of a load, between two ranks, has failed while others wait: the whole load has to be cancelled."""

    key: TransferKey


class FinishedLoading(msgspec.Struct, frozen=True, tag="finished_loading"):
    """A request's load from stores is over."""

    request_id: WireName
    loaded: LoadedBlocks


class FetchWanted(msgspec.Struct, frozen=True, tag="fetch_wanted"):
    """Another engine fetches something that this engine may have."""

    want: WantedFetch


TransferReport: TypeAlias = (
    ReadyToPrefill | FailedSending | FinishedSending | FinishedReceiving | PartFailed | FinishedLoading | FetchWanted
)


@dataclass(slots=True)
class KVConnectorOutput:
    """The reports of the worker side since the last call, in order. Late and duplicate reports are harmless.

    stats, store_stats: counters since the start, as of now; None: as before
    """

    reports: Annotated[list[TransferReport], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    stats: TransferStats | None = None
    store_stats: StoreStats | None = None

    def is_empty(self) -> bool:
        """Return whether there is no report. Counters do not count as one."""
        return not self.reports

    def merge(self, later: KVConnectorOutput) -> None:
        """Add the reports of a later output, and take its counters instead of these if it has any."""
        self.reports += later.reports
        self.stats = later.stats or self.stats
        self.store_stats = later.store_stats or self.store_stats
