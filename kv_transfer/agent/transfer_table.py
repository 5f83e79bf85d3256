"""Every transfer of this engine's rank: hands each event to its transfers, and collects the transfers' reports."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from kv_transfer.agent.consumer_transfers import ConsumerTransfers
from kv_transfer.agent.producer_transfers import ProducerTransfers
from kv_transfer.agent.transfer_reports import TransferReports
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.reports import KVConnectorOutput
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerProgress
from kv_transfer.errors import ProtocolViolation
from kv_transfer.handoff.control_messages import Cancel, Chunk, ChunkSum, Finished, Ready
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.link_table import LinkTable
from kv_transfer.links.peer_link import PeerLink
from kv_transfer.links.send_receive_thread import ChunkJob
from kv_transfer.transports.base import ComputeEvent

logger = logging.getLogger(__name__)

_MAX_STORIES: Final = 8
"""How many stories are logged for a lost link: its other transfers have mostly the same story."""


class TransferTable:
    """The transfers of one rank, at either end. The object belongs to the agent's thread."""

    def __init__(self, config: KVTransferConfig, layout: KVCacheLayout, links: LinkTable) -> None:
        self._links = links
        self._reports = TransferReports()
        self._producing = ProducerTransfers(config, layout, self._reports)
        self._consuming = ConsumerTransfers(config, layout, self._reports)

    @property
    def output(self) -> KVConnectorOutput:
        """Return the reports since the last take_output(), without taking them."""
        return self._reports.output

    def take_output(self, num_links: int, epoch_s: float = 0.0) -> KVConnectorOutput:
        """Return the reports since the last call, with a copy of the counters.

        num_links: links that are open, or opening
        epoch_s:   the Unix time of the monotonic clock's zero
        """
        output, self._reports.output = self._reports.output, KVConnectorOutput()
        stats, pins = self._reports.stats, (self._producing.pins, self._consuming.pins)
        oldest_s = min((pin.oldest_s for pin in pins if pin.oldest_s is not None), default=None)
        output.stats = replace(
            stats,
            num_links=num_links,
            num_links_lost=self._links.num_lost,
            num_active_transfers=len(self._producing) + len(self._consuming),
            num_pinned_blocks=sum(pin.num_blocks for pin in pins),
            oldest_pin_at_s=None if oldest_s is None else epoch_s + oldest_s,
            link_loads=self._producing.meter.loads(),
            dropped_messages=dict(stats.dropped_messages),
            failures=dict(stats.failures),
        )
        return output

    def count_dropped(self, reason: str) -> None:
        """Count a message that was dropped. reason: one of a few fixed texts"""
        self._reports.count_dropped(reason)

    def count_stall(self) -> None:
        """Count a chunk that has missed its deadline."""
        self._reports.stats.num_stalls += 1

    def take_breaches(self) -> list[tuple[PeerLink, ProtocolViolation]]:
        """Remove and return the links that the last step has found to break the protocol."""
        return self._producing.take_breaches()

    # -- what the scheduler asks for -----------------------------------------------------------------------------

    def on_step(self, metadata: KVConnectorMetadata, now_s: float, after: ComputeEvent | None = None) -> None:
        """Begin what a step asks for, before its forward pass.

        after: the point on the device's compute stream at which all earlier steps are computed; None on the CPU
        A request's progress is taken in before its finish, so its blocks are queued before FINISHED is sent.
        """
        for key, params, num_prompt_tokens in metadata.new_producers:
            self._producing.begin(key, params, num_prompt_tokens, now_s)
        # Blocks that come from the prefix cache are sent before this step's forward pass computes the others.
        cached = ((p.key, p.block_ids, p.num_computed_tokens_before) for p in metadata.progress)
        self._producing.on_progress(cached, after)
        for reservation in metadata.reservations:
            self._consuming.begin(reservation, self._links.to_producer(reservation.params.peer), now_s, after)
        for finish in metadata.producer_finishes:
            self._producing.on_finish(finish)
        for key in metadata.consumer_cancels:
            self._consuming.on_cancel(key, now_s)

    def on_computed(self, progress: Iterable[ProducerProgress], after: ComputeEvent | None = None) -> None:
        """Queue the blocks that a step's forward pass has computed once the device has passed `after`."""
        computed = ((p.key, p.block_ids, p.num_computed_tokens_after) for p in progress)
        self._producing.on_progress(computed, after)

    # -- what peers send, and what links do ----------------------------------------------------------------------

    def on_consumer_message(self, link: PeerLink, message: Ready | Cancel, now_s: float) -> None:
        """Give a consumer's message to its transfer at this producer. Raises ProtocolViolation."""
        self._producing.on_message(link, message, now_s)

    def on_producer_message(self, link: PeerLink, message: Chunk | ChunkSum | Finished, now_s: float) -> None:
        """Give a producer's message to its load at this consumer. Raises ProtocolViolation."""
        self._consuming.on_message(link, message, now_s)

    def on_chunk_moved(self, link: PeerLink, job: ChunkJob, now_s: float) -> None:
        """Count a chunk that a data thread has moved. Raises ProtocolViolation."""
        stats = self._reports.stats
        num_blocks = job.num_blocks
        num_bytes = job.num_bytes
        link.num_bytes += num_bytes
        link.last_active_s = now_s
        if link.is_producer:
            stats.num_sent_chunks += 1
            stats.num_sent_blocks += num_blocks
            stats.num_sent_bytes += num_bytes
            self._producing.on_chunk_sent(link, job)
        else:
            stats.num_received_chunks += 1
            stats.num_received_blocks += num_blocks
            stats.num_received_bytes += num_bytes
            self._consuming.on_chunk_received(link, job, now_s)

    def on_pong(self, link: PeerLink, now_s: float) -> None:
        """Measure the round trip on a link on which this rank sends. now_s: monotonic"""
        round_trip_s = link.take_round_trip_s(now_s)
        if round_trip_s is not None and link.is_producer:
            self._producing.meter.on_round_trip(link.peer[0], round_trip_s)

    def on_link_dead(self, link: PeerLink) -> None:
        """Fail the link's transfers, and log their stories. The link's data thread has ended."""
        reason = f"link with {link.peer[0]} lost: {link.reason}"
        self._log_stories(link)
        self._producing.on_link_dead(link, reason)
        self._consuming.on_link_dead(link, reason)

    def _log_stories(self, link: PeerLink) -> None:
        """Log the stories of a lost link's transfers: they show what led to a stall, a breach or a refusal."""
        stories = [*self._producing.stories_on(link), *self._consuming.stories_on(link)]
        if stories:
            fields = {
                "peer": link.peer[0],
                "reason": link.reason,
                "num_transfers": len(stories),
                "stories": " | ".join(stories[:_MAX_STORIES]),
            }
            logger.warning("a KV link was lost while transfers used it", extra=fields)

    def on_time(self, now_s: float) -> list[PeerLink]:
        """Apply the transfers' deadlines; return the links on which a cancel was not answered in time."""
        self._producing.on_time(now_s)
        return self._consuming.overdue(now_s)

    def next_deadline(self) -> float | None:
        """Return the monotonic time of the first deadline of any transfer; None if there is none."""
        return min([*self._producing.deadlines(), *self._consuming.deadlines()], default=None)
