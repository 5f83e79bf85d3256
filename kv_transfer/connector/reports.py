"""What the connector's worker side reports to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from kv_transfer.connector.steps import BlockHashes
from kv_transfer.connector.store_steps import LoadedBlocks, StoreStats
from kv_transfer.params import EngineAddress
from kv_transfer.ranges import (
    MAX_ITEMS,
    Bulk,
    Count,
    LongText,
    PositiveCount,
    RequestIds,
    TokenId,
    WireName,
)
from kv_transfer.transfer_stats import TransferStats, TransferTimings


@dataclass(frozen=True, slots=True)
class WantedPrefix:
    """Producer, worker -> scheduler: another engine fetches these blocks, or as many of them as are cached here.

    The answer is a producer of this ticket, without a request, that has computed what is found and ends at once.
    num_ranks: so many ranks of this engine hear of it, each from those of its peers that want something of it
    """

    transfer_id: WireName
    attempt: Count
    peer: EngineAddress
    block_hashes: BlockHashes
    num_ranks: PositiveCount = 1


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
    """The one and only report on a consumer's load.

    num_valid_tokens: so many tokens from the start have their KV in place (all of the prompt if LOADED)
    first_token_id:   token 0, set iff LOADED
    """

    outcome: LoadOutcome
    num_valid_tokens: Count = 0
    first_token_id: TokenId | None = None
    reason: LongText = ""
    timings: TransferTimings | None = None


@dataclass(slots=True)
class KVConnectorOutput:
    """What happened on the worker side since the last call, by request id. Late and duplicate entries are harmless."""

    ready_to_prefill: RequestIds = field(default_factory=set)
    """Producer requests whose consumer has reserved its blocks."""
    finished_sending: RequestIds = field(default_factory=set)
    """Finished producer requests whose blocks nobody reads any more: free them."""
    failed_sending: Annotated[dict[WireName, LongText], Meta(max_length=MAX_ITEMS)] = field(default_factory=dict)
    """Producer requests, with the reason, whose consumer is gone or has let go: give them up. finished_sending follows
    once they have been finished."""
    finished_recving: Annotated[dict[WireName, ReceivedKV], Meta(max_length=MAX_ITEMS)] = field(default_factory=dict)
    doomed_loads: RequestIds = field(default_factory=set)
    """Loads of which one rank's part, or one link's, has failed while others wait: they have to be cancelled."""
    finished_loading: Annotated[dict[WireName, LoadedBlocks], Meta(max_length=MAX_ITEMS)] = field(default_factory=dict)
    """Loads from stores that are over."""
    wanted_prefixes: Annotated[list[WantedPrefix], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    received_bytes: Annotated[dict[WireName, Bulk], Meta(max_length=MAX_ITEMS)] = field(default_factory=dict)
    """What fetches of staged bytes have brought, whole slots of it; each is in finished_recving as well."""
    stats: TransferStats | None = None
    store_stats: StoreStats | None = None

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        has_received = self.finished_recving or self.finished_loading or self.wanted_prefixes
        has_failed = self.failed_sending or self.doomed_loads
        return not (self.ready_to_prefill or self.finished_sending or has_failed or has_received)

    def merge(self, later: KVConnectorOutput) -> None:
        """Add what happened afterwards; its stats take the place of these."""
        self.ready_to_prefill |= later.ready_to_prefill
        self.finished_sending |= later.finished_sending
        self.failed_sending |= later.failed_sending
        self.finished_recving |= later.finished_recving
        self.doomed_loads |= later.doomed_loads
        self.finished_loading |= later.finished_loading
        self.wanted_prefixes += later.wanted_prefixes
        self.received_bytes |= later.received_bytes
        self.stats = later.stats or self.stats
        self.store_stats = later.store_stats or self.store_stats
