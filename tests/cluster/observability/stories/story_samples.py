"""Records of requests for the tests of stories: a handoff, with the reports that real engines send."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.routing.request_record import AttemptRecord, EngineTimes, RequestRecord, StatusAt
from tests.cluster.routing.record_samples import decision

PRODUCER = EngineTimes(
    queued_s=0.5,
    prefill_s=1.0,
    num_prompt_tokens_computed=90,
    num_cached_tokens=10,
    statuses=(StatusAt("WAITING", 0.0), StatusAt("RUNNING", 0.5), StatusAt("FINISHED_LENGTH_CAPPED", 1.5)),
)
CONSUMER = EngineTimes(
    queued_s=0.2,
    prefill_s=1.9,
    transfer_s=1.0,
    exposed_transfer_s=0.4,
    num_transferred_bytes=12_000_000,
    statuses=(
        StatusAt("WAITING", 0.0),
        StatusAt("WAITING_FOR_REMOTE_KVS", 0.2),
        StatusAt("WAITING", 1.9),
        StatusAt("RUNNING", 2.0),
        StatusAt("FINISHED_LENGTH_CAPPED", 6.0),
    ),
)
HANDOFF = AttemptRecord(
    0.1,
    ("decode-0",),
    "prefill-0",
    decision(),
    num_new_tokens=30,
    prefill=PRODUCER,
    decode=CONSUMER,
    first_token_s=1.6,
)
ALONE = AttemptRecord(
    0.0,
    ("both-0",),
    num_new_tokens=5,
    decode=EngineTimes(
        0.5,
        1.0,
        num_prompt_tokens_computed=100,
        statuses=(StatusAt("WAITING", 0.0), StatusAt("RUNNING", 0.5), StatusAt("FINISHED_STOPPED", 3.0)),
    ),
    first_token_s=1.5,
)


def ended(*attempts: AttemptRecord, **given: Any) -> RequestRecord:
    """The record of a request that has ended, after 6.2 s unless given otherwise, with these fields."""
    fields: dict[str, Any] = {
        "request_id": "r",
        "tenant": "alice",
        "arrived_at_s": 1000.0,
        "outcome": "length",
        "model_version": 1,
        "num_prompt_tokens": 100,
        "num_output_tokens": 30,
        "ttft_s": 1.6,
        "itl_p50_s": 0.1,
        "itl_max_s": 0.5,
        "duration_s": 6.2,
        "model": "tiny",
    }
    return RequestRecord(ingress="ingress-0", attempts=attempts or (HANDOFF,), **(fields | given))


def preempted(times: EngineTimes, *intervals: tuple[float, float]) -> EngineTimes:
    """The report of an engine that preempted the request in these intervals of its decode."""
    statuses = list(times.statuses)
    for began_s, ended_s in intervals:
        statuses[-1:-1] = [StatusAt("PREEMPTED", began_s), StatusAt("RUNNING", ended_s)]
    return msgspec.structs.replace(times, statuses=tuple(statuses), num_preemptions=len(intervals))
