"""KVConnector: all that an engine sees of this floor.

The scheduler side decides with the scheduler, in its thread; the worker side moves bytes on threads of its own. They
talk through values only: KVConnectorMetadata (steps.py) goes down inside the scheduler's output, KVConnectorOutput
(reports.py) comes back up inside the model runner's. So one scheduler can drive several tensor-parallel ranks, each
with its own worker side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.connector.reports import KVConnectorOutput
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd, ProducerProgress
from kv_transfer.params import KVTransferParams


class KVConnectorScheduler(Protocol):
    """The scheduler's side: bookkeeping only, never blocks, no I/O. All calls come from the engine thread."""

    def on_new_request(self, request_id: str, params: KVTransferParams, num_prompt_tokens: int) -> None:
        """Take note of a request with a ticket; called from add_request."""

    def get_num_new_matched_tokens(self, request_id: str, num_local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the local prefix hit come from outside, and whether they come asynchronously.

        A consumer answers (num_prompt_tokens - num_local_tokens, True), also when that is 0: token 0 still comes from
        the producer. A producer answers (None, False), "ask again", until READY is in, and then (0, False).
        (None, False) is also a consumer's answer while max_reserved_requests are in transfer.
        Requests without a ticket get (0, False). The second value is there for vLLM's interface: nothing here reads it.
        """

    def update_state_after_alloc(self, request_id: str, block_ids: Sequence[int], num_local_tokens: int) -> None:
        """The consumer's blocks are allocated: the next metadata carries the reservation."""

    def build_connector_meta(self, progress: Sequence[ProducerProgress]) -> KVConnectorMetadata:
        """Collect what this step asks of the worker side; resets what was collected."""

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Take in what the worker side reported (READY received, loads and sends over)."""

    def request_finished(self, request_id: str, end: ProducerEnd, first_token_id: int | None = None) -> bool:
        """The request has ended in the scheduler, for whatever reason; called exactly once for each request.

        Returns True if its blocks may still be read or written: then the scheduler keeps them until FinishedSending
        (producer) or FinishedReceiving (consumer) names the request.
        For a consumer, end is ABORTED if the load is not over; it is ignored once the load is.
        """

    def cancel_load(self, request_id: str) -> None:
        """End a consumer's load that took too long, while the request lives on and keeps its blocks.

        The next metadata carries it in consumer_cancels; FinishedReceiving follows as after an abort (CANCELLED, with
        num_valid_tokens, or whatever outcome was quicker). request_finished still comes, once, when the request ends.
        """


class KVConnectorWorker(Protocol):
    """The worker's side. Calls come from the engine thread and return at once; I/O runs on other threads."""

    def start_step(self, metadata: KVConnectorMetadata) -> None:
        """Before the forward: reservations, cancels, finishes, and blocks that the prefix cache already holds."""

    def finish_step(self, metadata: KVConnectorMetadata) -> None:
        """After the forward: the blocks that it completed may leave."""

    def take_output(self) -> KVConnectorOutput:
        """What happened since the last call."""

    def shutdown(self) -> None:
        """Close every link, stop every thread, release every file descriptor; within a few seconds."""
