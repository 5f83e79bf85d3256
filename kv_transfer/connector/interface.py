"""The connector's two interfaces: all that an engine sees of kv_transfer.

The scheduler side decides, in the scheduler's thread; the worker side moves bytes on threads of its own. The two sides
exchange values only: KVConnectorMetadata (steps.py) goes down inside the scheduler's output, KVConnectorOutput
(reports.py) comes back up inside the model runner's output. So one scheduler can drive several tensor-parallel ranks,
each with its own worker side. The scheduler side has most of its methods' names from vLLM's KVConnectorBase_V1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.connector.reports import KVConnectorOutput
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd, ProducerProgress
from kv_transfer.params import KVTransferParams


class KVConnectorScheduler(Protocol):
    """The scheduler's side of the connector.

    It only keeps state: no call blocks or does I/O. All calls come from the engine thread.
    """

    def on_new_request(self, request_id: str, params: KVTransferParams, num_prompt_tokens: int) -> None:
        """Take note of a request with a ticket; the scheduler calls this when the request is added."""

    def get_num_new_matched_tokens(self, request_id: str, num_local_tokens: int) -> int | None:
        """Return how many tokens beyond the local prefix hit come from outside; None: ask again later.

        For a consumer's request that is num_prompt_tokens - num_local_tokens. The number may be 0: token 0 still comes
        from the producer. It is None while max_reserved_requests are in transfer.
        For a producer's request it is None until READY has arrived, and then 0.
        For a request without a ticket it is 0.
        vLLM's function of this name returns a second value too; see actors/core/vllm_view.py.
        """

    def update_state_after_alloc(self, request_id: str, block_ids: Sequence[int], num_local_tokens: int) -> None:
        """Note that a consumer's blocks are allocated: the next metadata carries the reservation.

        block_ids: every block of the prompt in order, those of the local prefix hit included
        """

    def build_connector_meta(self, progress: Sequence[ProducerProgress]) -> KVConnectorMetadata:
        """Return what this step asks of the worker side, and begin to collect for the next step."""

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Take in what the worker side reported: which READY messages have arrived, which loads are over."""

    def request_finished(self, request_id: str, end: ProducerEnd, first_token_id: int | None = None) -> bool:
        """Note that a request has ended in the scheduler, for whatever reason; called exactly once for each request.

        Returns True if a link may still read or write the request's blocks: then the scheduler keeps the blocks until
        FinishedSending (producer) or FinishedReceiving (consumer) names the request.
        end, first_token_id: of a producer's request; ignored for a consumer's, whose load is cancelled if it is under
                             way
        """

    def cancel_load(self, request_id: str) -> None:
        """Cancel a consumer's load that took too long; the request goes on and keeps its blocks.

        The next metadata names the load in consumer_cancels. FinishedReceiving follows as after an abort, with the
        outcome CANCELLED and num_valid_tokens, or with another outcome if the load came to its end first.
        request_finished is still called, once, when the request ends.
        """


class KVConnectorWorker(Protocol):
    """The worker's side of the connector. Calls come from the engine thread and return at once; others do the I/O."""

    def start_step(self, metadata: KVConnectorMetadata) -> None:
        """Begin what a step asks for, before its forward pass: every part of the metadata.

        Blocks that the prefix cache already holds may leave now.
        """

    def finish_step(self, metadata: KVConnectorMetadata) -> None:
        """Let the blocks leave that the step's forward pass has completed."""

    def take_output(self) -> KVConnectorOutput:
        """Return what has happened since the last call."""

    def shutdown(self) -> None:
        """Close every link, stop every thread and release every file descriptor, within a few seconds."""
