"""The worker side of one tensor-parallel rank: each request becomes one transfer for every peer rank with common heads.

Ranks are engines to each other: every pair of ranks has links and transfers of its own, which know nothing of the
others. Here a request is cut into such parts and their reports are put together again. A producer's rank may have no
part in a transfer at all (a replica that no consumer takes its heads from), and then has nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kv_transfer.connector.interface import KVConnectorWorker
from kv_transfer.connector.reports import KVConnectorOutput, WantedPrefix
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerFinish, ProducerProgress
from kv_transfer.layout import KVCacheLayout, plan_transfer
from kv_transfer.params import KVTransferParams, TransferRole
from kv_transfer.sides.part_reports import PartReports, WantCounts


class RankParts:
    """A KVConnectorWorker around another that knows only transfers between two ranks."""

    def __init__(self, pairs: KVConnectorWorker, layout: KVCacheLayout) -> None:
        self._pairs = pairs
        self._layout = layout
        self._parts: dict[str, tuple[str, ...]] = {}
        self._request_of_part: dict[str, str] = {}
        self._reports = PartReports(lambda request_id: len(self._parts.get(request_id, ())))
        self._wants = WantCounts()
        self._news = KVConnectorOutput()

    def start_step(self, metadata: KVConnectorMetadata) -> None:
        """Before the forward."""
        new_producers = tuple(
            (part, params, num_prompt_tokens)
            for request_id, ticket, num_prompt_tokens in metadata.new_producers
            for part, params in self._cut(request_id, ticket)
        )
        reservations = tuple(
            replace(reservation, request_id=part, params=params)
            for reservation in metadata.reservations
            for part, params in self._cut(reservation.request_id, reservation.params)
        )
        self._news.ready_to_prefill.update(
            request_id for request_id, _, _ in metadata.new_producers if not self._parts[request_id]
        )
        finishes = tuple(self._finishes(metadata.producer_finishes))
        cancels = tuple(part for request_id in metadata.consumer_cancels for part in self._parts.get(request_id, ()))
        progress = self._progress(metadata.progress)
        self._pairs.start_step(KVConnectorMetadata(new_producers, reservations, progress, finishes, cancels))

    def finish_step(self, metadata: KVConnectorMetadata) -> None:
        """After the forward."""
        self._pairs.finish_step(KVConnectorMetadata(progress=self._progress(metadata.progress)))

    def take_output(self) -> KVConnectorOutput:
        """What happened since the last call, to whole requests."""
        news, self._news = self._news, KVConnectorOutput()
        parts = self._pairs.take_output()
        for output in self._by_part(parts):
            news.merge(self._reports.add(output))
        for request_id in [*news.finished_sending, *news.finished_recving]:
            for part in self._parts.pop(request_id, ()):
                del self._request_of_part[part]
        news.stats = parts.stats
        news.wanted_prefixes = self._take_wants(parts.wanted_prefixes)
        return news

    def _take_wants(self, wants: Iterable[WantedPrefix]) -> list[WantedPrefix]:
        """The fetches for which every part has come that concerns this rank."""
        whole = []
        for want in wants:
            transfer_id, _, _ = want.transfer_id.rpartition("#")
            routes = plan_transfer(self._layout.total_num_kv_heads, self._layout.tp_size, want.peer.tp_size)
            num_parts = sum(route.producer_rank == self._layout.tp_rank for route in routes)
            if self._wants.is_last(transfer_id, num_parts):
                num_ranks = len({route.producer_rank for route in routes})
                peer = want.peer.of_all_ranks()
                whole.append(replace(want, transfer_id=transfer_id, peer=peer, num_ranks=num_ranks))
        return whole

    def shutdown(self) -> None:
        """Close every link."""
        self._pairs.shutdown()

    def _cut(self, request_id: str, ticket: KVTransferParams) -> list[tuple[str, KVTransferParams]]:
        """A request's parts and their tickets: both ends of a part give it the same transfer id."""
        layout, peer = self._layout, ticket.peer
        is_producer = ticket.role is TransferRole.PRODUCER
        sizes = (layout.tp_size, peer.tp_size) if is_producer else (peer.tp_size, layout.tp_size)
        parts = []
        for route in plan_transfer(layout.total_num_kv_heads, *sizes):
            ours, theirs = route.producer_rank, route.consumer_rank
            if not is_producer:
                ours, theirs = theirs, ours
            if ours == layout.tp_rank:
                transfer_id = f"{ticket.transfer_id}#{route.producer_rank}-{route.consumer_rank}"
                parts.append(
                    (f"{request_id}#{theirs}", replace(ticket, transfer_id=transfer_id, peer=peer.of_rank(theirs)))
                )
        self._parts[request_id] = tuple(part for part, _ in parts)
        self._request_of_part.update((part, request_id) for part, _ in parts)
        return parts

    def _finishes(self, finishes: Iterable[ProducerFinish]) -> Iterable[ProducerFinish]:
        for finish in finishes:
            parts = self._parts.get(finish.request_id)
            if not parts:
                self._news.finished_sending.add(finish.request_id)
                continue
            yield from (replace(finish, request_id=part) for part in parts)

    def _progress(self, progress: Iterable[ProducerProgress]) -> tuple[ProducerProgress, ...]:
        return tuple(
            replace(entry, request_id=part) for entry in progress for part in self._parts.get(entry.request_id, ())
        )

    def _by_part(self, output: KVConnectorOutput) -> Iterable[KVConnectorOutput]:
        """One output for each report, in the name of its request: parts of one request may report together."""
        requests = self._request_of_part
        for part in output.ready_to_prefill:
            yield KVConnectorOutput(ready_to_prefill={requests[part]})
        for part, reason in output.failed_sending.items():
            yield KVConnectorOutput(failed_sending={requests[part]: reason})
        for part in output.finished_sending:
            yield KVConnectorOutput(finished_sending={requests[part]})
        for part, received in output.finished_recving.items():
            yield KVConnectorOutput(finished_recving={requests[part]: received})
