"""What the connector's worker side reports to the scheduler: one list of events, each of which names its transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kv_transfer.connector.fetches import WantedFetch
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.store_steps import LoadedBlocks, StoreStats
from kv_transfer.ranges import MAX_ITEMS, Bulk, Count, LongText, TokenId, WireName
from kv_transfer.transfer_stats import TransferStats, TransferTimings


class LoadOutcome(StrEnum):
    """How a consumer's load ended. After any of them nothing writes the request's blocks any more."""

    LOADED = "loaded"
    RELEASED = "released"
    """The producer finished the request itself: nothing is left to do here."""
    CANCELLED = "cancelled"
    """The drain after a consumer_cancel is over."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ReceivedKV:
    """What became of a consumer's load.

    num_valid_tokens: so many tokens from the start have their KV in place (all of the prompt if LOADED)
    first_token_id:   token 0, set iff a handoff is LOADED
    """

    outcome: LoadOutcome
    num_valid_tokens: Count = 0
    first_token_id: TokenId | None = None
    reason: LongText = ""
    timings: TransferTimings | None = None


class ReadyToPrefill(msgspec.Struct, frozen=True, tag="ready_to_prefill"):
    """A producer's consumer has reserved its blocks."""

    key: TransferKey


class FailedSending(msgspec.Struct, frozen=True, tag="failed_sending"):
    """A producer's consumer is gone or has let go: give the request up. FinishedSending follows once it has ended."""

    key: TransferKey
    reason: LongText


class FinishedSending(msgspec.Struct, frozen=True, tag="finished_sending"):
    """Nobody reads the blocks of a finished producer any more: free them."""

    key: TransferKey


class FinishedReceiving(msgspec.Struct, frozen=True, tag="finished_receiving"):
    """The one and only report on a consumer's load: nothing writes its blocks any more.

    data: what a fetch of bytes has brought, whole slots of it
    """

    key: TransferKey
    received: ReceivedKV
    data: Bulk | None = None


class PartFailed(msgspec.Struct, frozen=True, tag="part_failed"):
    """A load of which one rank's part, or one link's, has failed while others wait: it has to be cancelled."""

    key: TransferKey


class FinishedLoading(msgspec.Struct, frozen=True, tag="finished_loading"):
    """A request's load from stores is over."""

    request_id: WireName
    loaded: LoadedBlocks


class FetchWanted(msgspec.Struct, frozen=True, tag="fetch_wanted"):
    """Another engine wants something."""

    want: WantedFetch


TransferReport: TypeAlias = (
    ReadyToPrefill | FailedSending | FinishedSending | FinishedReceiving | PartFailed | FinishedLoading | FetchWanted
)


@dataclass(slots=True)
class KVConnectorOutput:
    """What happened on the worker side since the last call, in order. Late and duplicate reports are harmless."""

    reports: Annotated[list[TransferReport], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    stats: TransferStats | None = None
    store_stats: StoreStats | None = None

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.reports

    def merge(self, later: KVConnectorOutput) -> None:
        """Add what happened afterwards; its stats take the place of these."""
        self.reports += later.reports
        self.stats = later.stats or self.stats
        self.store_stats = later.store_stats or self.store_stats
