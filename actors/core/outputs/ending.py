"""How a request ends: what a part of the scheduler returns, so that the scheduler alone ends requests."""

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

    new_token_ids: the last tokens of its output, which its client has not been told yet
    is_silent: the client gets no output, since it knows of the end
    producer_end, first_token_id: what a producer's connector is told
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
