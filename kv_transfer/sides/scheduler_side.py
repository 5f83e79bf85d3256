"""The connector's scheduler side: it keeps the state of each handoff, in the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.keys import TransferKey, TransferKind
from kv_transfer.connector.reports import FinishedReceiving, KVConnectorOutput, ReadyToPrefill
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd, ProducerFinish, ProducerProgress, Reservation
from kv_transfer.params import KVTransferParams, TransferRole


@dataclass(slots=True)
class _Request:
    """One request with a ticket.

    is_ready:   at a producer: READY has arrived
    is_loading: at a consumer: the load was begun, and its report has not come
    """

    params: KVTransferParams
    num_prompt_tokens: int
    is_ready: bool = False
    is_loading: bool = False


class SchedulerSide:
    """A KVConnectorScheduler for handoffs.

    Invariants: a producer's request is here until it ends; a consumer's until its load is reported, or until it ends if
    no load was begun. _num_loading is the number of requests here with is_loading.
    """

    def __init__(self, config: KVTransferConfig, block_size: int) -> None:
        self._max_reserved_requests = config.max_reserved_requests
        self._block_size = block_size
        self._requests: dict[str, _Request] = {}
        self._num_loading = 0
        self._new_producers: list[tuple[TransferKey, KVTransferParams, int]] = []
        self._reservations: list[Reservation] = []
        self._finishes: list[ProducerFinish] = []
        self._cancels: list[TransferKey] = []

    def on_new_request(self, request_id: str, params: KVTransferParams, num_prompt_tokens: int) -> None:
        """Take note of a request with a ticket; see KVConnectorScheduler."""
        self._requests[request_id] = _Request(params, num_prompt_tokens)
        if params.role is TransferRole.PRODUCER:
            self._new_producers.append((TransferKey.of_handoff(request_id), params, num_prompt_tokens))

    def get_num_new_matched_tokens(self, request_id: str, num_local_tokens: int) -> int | None:
        """Return how many tokens come from outside, or that it is too early to tell; see KVConnectorScheduler."""
        request = self._requests.get(request_id)
        if request is None:
            return 0
        if request.params.role is TransferRole.PRODUCER:
            return 0 if request.is_ready else None
        if self._num_loading >= self._max_reserved_requests:
            return None
        return request.num_prompt_tokens - num_local_tokens

    def update_state_after_alloc(self, request_id: str, block_ids: Sequence[int], num_local_tokens: int) -> None:
        """Note that a consumer's blocks are allocated; see KVConnectorScheduler."""
        request = self._requests[request_id]
        request.is_loading = True
        self._num_loading += 1
        num_local_blocks = -(-num_local_tokens // self._block_size)
        self._reservations.append(
            Reservation(
                TransferKey.of_handoff(request_id),
                request.params,
                tuple(block_ids),
                num_local_blocks,
                request.num_prompt_tokens,
            )
        )

    @property
    def has_news(self) -> bool:
        """Whether the next step's metadata asks the worker side for something, beside the step's own progress."""
        return bool(self._new_producers or self._reservations or self._finishes or self._cancels)

    def build_connector_meta(self, progress: Sequence[ProducerProgress]) -> KVConnectorMetadata:
        """Return what this step asks of the worker side; see KVConnectorScheduler."""
        metadata = KVConnectorMetadata(
            new_producers=tuple(self._new_producers),
            reservations=tuple(self._reservations),
            progress=tuple(progress),
            producer_finishes=tuple(self._finishes),
            consumer_cancels=tuple(self._cancels),
        )
        self._new_producers, self._reservations, self._finishes, self._cancels = [], [], [], []
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Take in the worker side's reports on handoffs; see KVConnectorScheduler."""
        for report in output.reports:
            match report:
                case ReadyToPrefill(TransferKey(TransferKind.HANDOFF, request_id)):
                    if (producer := self._requests.get(request_id)) is not None:
                        producer.is_ready = True
                case FinishedReceiving(TransferKey(TransferKind.HANDOFF, request_id)):
                    consumer = self._requests.pop(request_id, None)
                    self._num_loading -= consumer is not None and consumer.is_loading

    def request_finished(self, request_id: str, end: ProducerEnd, first_token_id: int | None = None) -> bool:
        """Note that a request has ended; return whether a link may still use its blocks. See KVConnectorScheduler."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.params.role is TransferRole.PRODUCER:
            del self._requests[request_id]
            self._finishes.append(ProducerFinish(TransferKey.of_handoff(request_id), end, first_token_id))
            return True
        if request.is_loading:
            # The request stays here until its load is reported: the load still counts.
            self._cancels.append(TransferKey.of_handoff(request_id))
            return True
        del self._requests[request_id]
        return False

    def cancel_load(self, request_id: str) -> None:
        """Cancel a consumer's load; see KVConnectorScheduler."""
        self._cancels.append(TransferKey.of_handoff(request_id))
