"""The worker side of one tensor-parallel rank: cuts each transfer into one part for every peer rank with common heads.

Ranks are engines to each other: every pair of ranks has links and transfers of its own, which know nothing of the
others. Here a transfer is cut into parts, and the parts' reports are put together again. A producer's rank may have no
part in a transfer (a replica from which no consumer takes heads); it reports at once that it is ready, and sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kv_transfer.connector.fetches import WantedFetch
from kv_transfer.connector.interface import KVConnectorWorker
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.reports import (
    FetchWanted,
    FinishedReceiving,
    FinishedSending,
    KVConnectorOutput,
    ReadyToPrefill,
    TransferReport,
)
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerFinish, ProducerProgress
from kv_transfer.layout import KVCacheLayout, plan_pairs
from kv_transfer.params import KVTransferParams, TransferPart, TransferRole
from kv_transfer.sides.part_reports import PartReports, WantCounts


class RankParts:
    """A KVConnectorWorker around another one, which knows only transfers between two ranks.

    The object belongs to the engine thread. Invariant: a transfer's parts are known from the step that begins it until
    the whole transfer is reported as finished.
    """

    def __init__(self, pairs: KVConnectorWorker, layout: KVCacheLayout) -> None:
        self._pairs = pairs
        self._layout = layout
        self._parts: dict[TransferKey, tuple[TransferKey, ...]] = {}
        self._reports = PartReports(lambda key: len(self._parts.get(key, ())))
        self._wants = WantCounts()
        self._news = KVConnectorOutput()

    def start_step(self, metadata: KVConnectorMetadata) -> None:
        """Begin what a step asks for, each transfer cut into its parts."""
        new_producers = tuple(
            (part, params, num_prompt_tokens)
            for key, ticket, num_prompt_tokens in metadata.new_producers
            for part, params in self._cut(key, ticket)
        )
        reservations = tuple(
            replace(reservation, key=part, params=params)
            for reservation in metadata.reservations
            for part, params in self._cut(reservation.key, reservation.params)
        )
        self._news.reports += [ReadyToPrefill(key) for key, _, _ in metadata.new_producers if not self._parts[key]]
        finishes = tuple(self._finishes(metadata.producer_finishes))
        cancels = tuple(part for key in metadata.consumer_cancels for part in self._parts.get(key, ()))
        progress = self._progress(metadata.progress)
        self._pairs.start_step(KVConnectorMetadata(new_producers, reservations, progress, finishes, cancels))

    def finish_step(self, metadata: KVConnectorMetadata) -> None:
        """Let the blocks leave that the step's forward pass has completed."""
        self._pairs.finish_step(KVConnectorMetadata(progress=self._progress(metadata.progress)))

    def take_output(self) -> KVConnectorOutput:
        """Return the reports since the last call that are true of whole transfers."""
        news, self._news = self._news, KVConnectorOutput()
        parts = self._pairs.take_output()
        for report in parts.reports:
            if isinstance(report, FetchWanted):
                news.reports += self._take_want(report.want)
            else:
                news.reports += self._reports.add(report)
        for report in news.reports:
            if isinstance(report, FinishedSending | FinishedReceiving):
                self._parts.pop(report.key, None)
        news.stats = parts.stats
        return news

    def _take_want(self, want: WantedFetch) -> list[TransferReport]:
        """Return the report of a whole fetch once every part of it that concerns this rank has come."""
        layout = self._layout
        pairs = plan_pairs(layout.total_kv_heads_of_groups, layout.tp_size, want.peer.tp_size)
        num_parts = sum(producer_rank == layout.tp_rank for producer_rank, _ in pairs)
        if not self._wants.is_last(want.fetch.fetch_id, num_parts):
            return []
        num_ranks = len({producer_rank for producer_rank, _ in pairs})
        peer = want.peer.of_all_ranks()
        return [FetchWanted(WantedFetch(want.attempt, peer, want.fetch, num_ranks))]

    def shutdown(self) -> None:
        """Close every link."""
        self._pairs.shutdown()

    def _cut(self, key: TransferKey, ticket: KVTransferParams) -> list[tuple[TransferKey, KVTransferParams]]:
        """Note a transfer's parts, and return their keys and tickets. Both ends of a part give it one transfer id."""
        layout, peer, whole = self._layout, ticket.peer, ticket.transfer_id
        assert isinstance(whole, str), "only whole transfers are cut"
        is_producer = ticket.role is TransferRole.PRODUCER
        sizes = (layout.tp_size, peer.tp_size) if is_producer else (peer.tp_size, layout.tp_size)
        parts = []
        for producer_rank, consumer_rank in plan_pairs(layout.total_kv_heads_of_groups, *sizes):
            ours, theirs = (producer_rank, consumer_rank) if is_producer else (consumer_rank, producer_rank)
            if ours == layout.tp_rank:
                transfer_id = TransferPart(whole, producer_rank, consumer_rank)
                part = replace(ticket, transfer_id=transfer_id, peer=peer.of_rank(theirs))
                parts.append((key.of_part(theirs), part))
        self._parts[key] = tuple(part for part, _ in parts)
        return parts

    def _finishes(self, finishes: Iterable[ProducerFinish]) -> Iterable[ProducerFinish]:
        for finish in finishes:
            parts = self._parts.get(finish.key)
            if not parts:
                self._news.reports.append(FinishedSending(finish.key))
                continue
            yield from (replace(finish, key=part) for part in parts)

    def _progress(self, progress: Iterable[ProducerProgress]) -> tuple[ProducerProgress, ...]:
        return tuple(replace(entry, key=part) for entry in progress for part in self._parts.get(entry.key, ()))
