"""Describes how a request has to end. The scheduler's parts return Endings, and only the scheduler ends requests."""

from __future__ import annotations

from dataclasses import dataclass

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import Request
from actors.core.requests.request_status import RequestStatus
from kv_transfer.connector.steps import ProducerEnd


@dataclass(frozen=True, slots=True)
class Ending:
    """A request that has to end, and the last output for its client.

    status: the final status that the request enters
    error, cause: see EngineCoreOutput.error and end_cause
    is_silent: the client gets no output, since the client itself ended the request
    new_token_ids: the last tokens of the output, which have not been sent to the client yet
    producer_end, first_token_id: what the KV connector is told about the end of a producer
    """

    request: Request
    status: RequestStatus
    error: str | None = None
    cause: EndCause | None = None
    is_silent: bool = False
    new_token_ids: tuple[int, ...] | list[int] = ()
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooling_output: list[float] | None = None
    producer_end: ProducerEnd = ProducerEnd.ABORTED
    first_token_id: int | None = None
