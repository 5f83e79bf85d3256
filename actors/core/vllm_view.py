"""The part of vLLM's interface that nothing in raypd reads: each function has the name that it has in vLLM.

The scheduler's interface and its data are vLLM's (docs/scheduler.md). For data that raypd's own parts read in another
shape, or do not read at all, a program that was written for vLLM's scheduler calls these functions. Each result is
computed at the call, so a step pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.core.outputs.model_runner_output import NO_TOKEN, ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.request import Request
from actors.core.scheduler import Scheduler
from kv_transfer.connector.interface import KVConnectorScheduler
from kv_transfer.connector.reports import FinishedReceiving, FinishedSending

# -- Scheduler ---------------------------------------------------------------------------------------------------------


def get_num_unfinished_requests(scheduler: Scheduler) -> int:
    """Return the number of requests that have not ended."""
    return len(scheduler.requests)


def has_unfinished_requests(scheduler: Scheduler) -> bool:
    """Whether any request has not ended."""
    return bool(scheduler.requests)


def get_kv_connector(scheduler: Scheduler) -> KVConnectorScheduler | None:
    """Return the scheduler side of the connector."""
    return scheduler.remote.connector


def reset_encoder_cache(scheduler: Scheduler) -> bool:
    """Forget all encoder outputs. Refuses, and returns False, while a request still has to read any."""
    return scheduler.encoder_cache_manager.reset()


# -- KVConnectorScheduler ----------------------------------------------------------------------------------------------


def get_num_new_matched_tokens(
    connector: KVConnectorScheduler, request: Request, num_computed_tokens: int
) -> tuple[int | None, bool]:
    """Return how many tokens can be loaded beyond the computed ones, and whether a load of them ends in a later step.

    vLLM's scheduler lets a request with True wait in WAITING_FOR_REMOTE_KVS, and computes one with False in the same
    step, which a load inside the forward pass serves. Every load of raypd ends in a later step, so the second value is
    False only where nothing is loaded; vLLM demands False there.
    The first value is None, and the second False, if the scheduler has to ask again later.
    """
    num_tokens = connector.get_num_new_matched_tokens(request.request_id, num_computed_tokens)
    return num_tokens, bool(num_tokens)


# -- Request -----------------------------------------------------------------------------------------------------------


def num_tokens_with_spec(request: Request) -> int:
    """Return how many tokens a request has so far, drafted ones included."""
    return request.num_tokens + len(request.spec_token_ids)


def trace_headers(request: Request) -> dict[str, str] | None:
    """Return the headers of the request's trace context; None if the request is not traced and brought none."""
    return None if request.traceparent is None else {"traceparent": request.traceparent}


# -- SchedulerOutput ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class CachedRequestData:
    """The changes of the requests that the worker knows already. The lists are parallel.

    resumed_from_preemption: new_block_ids replace the request's blocks instead of being appended
    new_token_ids: output tokens that the worker did not sample itself; always empty lists, since it samples them all
    num_output_tokens: output tokens that the worker has when it begins this step
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_from_preemption: list[bool] = field(default_factory=list)
    new_token_ids: list[list[int]] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...]] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


def scheduled_cached_reqs(step: SchedulerOutput) -> CachedRequestData:
    """Return the requests of a step that the worker knows."""
    batch = step.batch
    grown: dict[int, list[int]] = {}
    for row, block_id in batch.grown[::2].T.tolist():
        grown.setdefault(row, []).append(block_id)
    new = {request.req_id for request in step.scheduled_new_reqs}
    resumed = {request.req_id: request for request in step.scheduled_resumed_reqs}
    known = [index for index, req_id in enumerate(batch.req_ids) if req_id not in new]
    req_ids = [batch.req_ids[index] for index in known]
    return CachedRequestData(
        req_ids=req_ids,
        resumed_from_preemption=[req_id in resumed for req_id in req_ids],
        new_token_ids=[[] for _ in known],
        new_block_ids=[
            resumed[req_id].block_ids if req_id in resumed else (grown.get(int(batch.rows[index]), []),)
            for index, req_id in zip(known, req_ids, strict=True)
        ],
        num_computed_tokens=batch.num_computed_tokens[known].tolist(),
        num_output_tokens=batch.num_output_tokens[known].tolist(),
    )


def free_encoder_input_ids(step: SchedulerOutput, requests: Mapping[str, Request]) -> list[tuple[str, int]]:
    """Return the multimodal items whose last token a step computes, as (request id, index of the item).

    vLLM names these items in the step after it.
    requests: by id, as Scheduler.requests has them when the step is scheduled
    """
    batch, passed = step.batch, []
    starts, sizes = batch.num_computed_tokens.tolist(), batch.num_new_tokens.tolist()
    for req_id, start, num_new_tokens in zip(batch.req_ids, starts, sizes, strict=True):
        for input_id, feature in enumerate(requests[req_id].mm_features):
            if start < feature.end <= start + num_new_tokens:
                passed.append((req_id, input_id))
    return passed


# -- ModelRunnerOutput -------------------------------------------------------------------------------------------------


def req_id_to_index(output: ModelRunnerOutput) -> dict[str, int]:
    """Return the index of each request."""
    return {req_id: index for index, req_id in enumerate(output.req_ids)}


def sampled_token_ids(output: ModelRunnerOutput) -> list[list[int]]:
    """Return the sampled tokens, parallel to req_ids; empty for a request whose prompt is not all computed yet."""
    return [[token_id for token_id in row if token_id != NO_TOKEN] for row in output.token_ids.tolist()]


def finished_sending(output: ModelRunnerOutput) -> set[str]:
    """Return the requests whose blocks have left this engine."""
    reports = output.kv_connector_output.reports if output.kv_connector_output else ()
    return {report.key.name for report in reports if isinstance(report, FinishedSending)}


def finished_recving(output: ModelRunnerOutput) -> set[str]:
    """Return the requests whose blocks have arrived in this engine, or never will."""
    reports = output.kv_connector_output.reports if output.kv_connector_output else ()
    return {report.key.name for report in reports if isinstance(report, FinishedReceiving)}
