"""The requests of each scheduler step to the connector's worker side: plain values, which go to every rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from kv_transfer.connector.fetches import Fetch
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.store_steps import StoreMetadata
from kv_transfer.message_ranges import (
    MAX_ITEMS,
    BlockIds,
    Bulk,
    Count,
    TokenId,
)
from kv_transfer.params import KVTransferParams


@dataclass(frozen=True, slots=True)
class Reservation:
    """Consumer, scheduler -> worker: these blocks wait for a producer's KV; send READY to the producer.

    block_ids:        every block of the prompt in order, those that hit the local prefix cache included; for a model
        with recurrent layers, then those of the request's slot
    num_local_blocks: how many of these, from the first one on, are already here and must not be sent
    fetch:            what to ask the other engine for; None: this is a handoff
    """

    key: TransferKey
    params: KVTransferParams
    block_ids: BlockIds
    num_local_blocks: Count
    num_prompt_tokens: Count
    fetch: Fetch | None = None


@dataclass(frozen=True, slots=True)
class ProducerProgress:
    """Producer, scheduler -> worker: how far a request's KV is computed before and after this step's forward pass.

    block_ids: every block that travels, in the order of Reservation.block_ids
    """

    key: TransferKey
    block_ids: BlockIds
    num_computed_tokens_before: Count
    num_computed_tokens_after: Count


@dataclass(frozen=True, slots=True)
class StagedBytes:
    """Producer, scheduler -> worker: put these bytes into these blocks before the step's transfers begin.

    key: of the transfer that sends the bytes; the blocks are zeroed when that transfer reports FinishedSending
    """

    key: TransferKey
    block_ids: BlockIds
    data: Bulk


class ProducerEnd(StrEnum):
    """How a producer's request ended."""

    HANDED_OVER = "handed_over"
    """Prefill is done and token 0 sampled; the consumer goes on."""
    FINISHED_HERE = "finished_here"
    """Token 0 ended the request (EOS, a stop token, max_tokens=1): the consumer frees its blocks."""
    PREFIX_SENT = "prefix_sent"
    """Everything that this engine has of a fetch has been queued, which may be less than was asked for."""
    ABORTED = "aborted"
    """The request was aborted, or failed, at the producer; the consumer is told."""


@dataclass(frozen=True, slots=True)
class ProducerFinish:
    """Producer, scheduler -> worker: the request has ended here; its blocks stay allocated until FinishedSending.

    first_token_id: token 0, set iff end is HANDED_OVER
    """

    key: TransferKey
    end: ProducerEnd
    first_token_id: TokenId | None = None


@dataclass(frozen=True, slots=True)
class KVConnectorMetadata:
    """All that one step of the scheduler asks of the worker side."""

    new_producers: Annotated[tuple[tuple[TransferKey, KVTransferParams, Count], ...], Meta(max_length=MAX_ITEMS)] = ()
    """(key, ticket, num_prompt_tokens) of each new transfer that this engine sends; READY may have come before it."""
    reservations: Annotated[tuple[Reservation, ...], Meta(max_length=MAX_ITEMS)] = ()
    progress: Annotated[tuple[ProducerProgress, ...], Meta(max_length=MAX_ITEMS)] = ()
    producer_finishes: Annotated[tuple[ProducerFinish, ...], Meta(max_length=MAX_ITEMS)] = ()
    consumer_cancels: Annotated[tuple[TransferKey, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Loads that are not wanted any more (an abort, a deadline): receive what was announced, then report."""
    stores: StoreMetadata | None = None
    staged: Annotated[tuple[StagedBytes, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Bytes of transfers in new_producers."""

    def is_empty(self) -> bool:
        """Return whether the worker side has nothing to do."""
        has_handoffs = self.new_producers or self.reservations or self.progress
        has_ends = self.producer_finishes or self.consumer_cancels
        return not (has_handoffs or has_ends or self.stores)
