"""What each step of the scheduler asks of the connector's worker side: plain values, which go to every rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from kv_transfer.connector.fetches import Fetch
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.store_steps import StoreMetadata
from kv_transfer.params import KVTransferParams
from kv_transfer.ranges import (
    MAX_ITEMS,
    BlockIds,
    Bulk,
    Count,
    TokenId,
)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Consumer, scheduler -> worker: these blocks wait for a producer's KV; tell it READY.

    block_ids: every block of the prompt in order, those that hit the local prefix cache included
    num_local_blocks: the first so many of them are already here and must not be sent
    fetch: what is wanted, if this is no handoff
    """

    key: TransferKey
    params: KVTransferParams
    block_ids: BlockIds
    num_local_blocks: Count
    num_prompt_tokens: Count
    fetch: Fetch | None = None


@dataclass(frozen=True, slots=True)
class ProducerProgress:
    """Producer, scheduler -> worker: how far this request's KV is before and after this step's forward.

    block_ids: every block that the request holds, in order
    """

    key: TransferKey
    block_ids: BlockIds
    num_computed_tokens_before: Count
    num_computed_tokens_after: Count


@dataclass(frozen=True, slots=True)
class StagedBytes:
    """Producer, scheduler -> worker: put these bytes into these blocks before the step's transfers begin.

    key: of the transfer that sends them; the blocks are zeroed when it reports FinishedSending
    """

    key: TransferKey
    block_ids: BlockIds
    data: Bulk


class ProducerEnd(StrEnum):
    """How a producer's request ended."""

    HANDED_OVER = "handed_over"
    """Prefill is done and token 0 sampled; the consumer goes on."""
    FINISHED_HERE = "finished_here"
    """Token 0 ended the request (EOS, a stop token, max_tokens=1): the consumer lets go."""
    PREFIX_SENT = "prefix_sent"
    """A fetch: what is cached here of the prefix is sent, which may be less than was wanted."""
    ABORTED = "aborted"
    """The request was aborted or failed here; the consumer is told."""


@dataclass(frozen=True, slots=True)
class ProducerFinish:
    """Producer, scheduler -> worker: the request has ended here; its blocks stay until FinishedSending.

    first_token_id is set iff end is HANDED_OVER.
    """

    key: TransferKey
    end: ProducerEnd
    first_token_id: TokenId | None = None


@dataclass(frozen=True, slots=True)
class KVConnectorMetadata:
    """What one step of the scheduler asks of the worker side."""

    new_producers: Annotated[tuple[tuple[TransferKey, KVTransferParams, Count], ...], Meta(max_length=MAX_ITEMS)] = ()
    """(key, ticket, num_prompt_tokens) of requests that this engine will produce for; expect their READY."""
    reservations: Annotated[tuple[Reservation, ...], Meta(max_length=MAX_ITEMS)] = ()
    progress: Annotated[tuple[ProducerProgress, ...], Meta(max_length=MAX_ITEMS)] = ()
    producer_finishes: Annotated[tuple[ProducerFinish, ...], Meta(max_length=MAX_ITEMS)] = ()
    consumer_cancels: Annotated[tuple[TransferKey, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Consumer requests that ended (abort, deadline) while their blocks may still be written: drain, then report."""
    stores: StoreMetadata | None = None
    staged: Annotated[tuple[StagedBytes, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Of producers that begin with this step."""

    def is_empty(self) -> bool:
        """Whether the worker side has nothing to do."""
        has_handoffs = self.new_producers or self.reservations or self.progress
        has_ends = self.producer_finishes or self.consumer_cancels
        return not (has_handoffs or has_ends or self.stores)
