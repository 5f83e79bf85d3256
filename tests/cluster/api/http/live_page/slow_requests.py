"""The four slow requests of docs/observability.md as records, with the times that stand there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from cluster.routing.request_record import AttemptRecord, EngineTimes, RequestRecord, StatusAt
from tests.cluster.observability.stories.story_samples import ended

_QUEUED: Final = AttemptRecord(
    0.0015,
    ("decode-1",),
    "prefill-0",
    num_new_tokens=8,
    prefill=EngineTimes(6.411, 0.7273, 1800),
    decode=EngineTimes(
        0.000305,
        0.0,
        transfer_s=0.6749,
        exposed_transfer_s=0.0075,
        num_transferred_bytes=9_200_000,
        statuses=(
            StatusAt("WAITING", 0.0),
            StatusAt("WAITING_FOR_REMOTE_KVS", 0.000305),
            StatusAt("WAITING", 7.1466),
            StatusAt("RUNNING", 7.1474),
            StatusAt("FINISHED_LENGTH_CAPPED", 7.2766),
        ),
    ),
    first_token_s=7.14,
)
_FULL: Final = AttemptRecord(
    0.0025,
    ("decode-0",),
    "prefill-0",
    num_new_tokens=700,
    prefill=EngineTimes(0.1347, 0.1189, 300),
    decode=EngineTimes(
        0.000232,
        0.0,
        num_preemptions=1,
        transfer_s=0.0594,
        exposed_transfer_s=0.0,
        num_transferred_bytes=1_540_000,
        statuses=(
            StatusAt("WAITING", 0.0),
            StatusAt("WAITING_FOR_REMOTE_KVS", 0.000232),
            StatusAt("WAITING", 0.2536),
            StatusAt("RUNNING", 0.2557),
            StatusAt("PREEMPTED", 3.057),
            StatusAt("RUNNING", 6.117),
            StatusAt("FINISHED_LENGTH_CAPPED", 9.3075),
        ),
    ),
    first_token_s=0.2814,
)
_SLOW_LINK: Final = AttemptRecord(
    0.001,
    ("decode-0",),
    "prefill-0",
    num_new_tokens=40,
    prefill=EngineTimes(0.0081, 0.5936, 1500),
    decode=EngineTimes(
        0.000338,
        0.0,
        transfer_s=5.4536,
        exposed_transfer_s=4.87,
        num_transferred_bytes=7_700_000,
        statuses=(
            StatusAt("WAITING", 0.0),
            StatusAt("WAITING_FOR_REMOTE_KVS", 0.000338),
            StatusAt("WAITING", 5.4717),
            StatusAt("RUNNING", 5.4727),
            StatusAt("FINISHED_LENGTH_CAPPED", 6.149),
        ),
    ),
    first_token_s=0.6101,
)
_KILLED: Final = AttemptRecord(
    0.000792,
    ("decode-1",),
    "prefill-0",
    num_new_tokens=12,
    prefill_failure="engine prefill-0 is lost: the session broke",
    decode=EngineTimes(
        0.000286,
        0.1598,
        num_prompt_tokens_computed=1900,
        statuses=(
            StatusAt("WAITING", 0.0),
            StatusAt("WAITING_FOR_REMOTE_KVS", 0.000286),
            StatusAt("WAITING", 0.4504),
            StatusAt("RUNNING", 0.4504),
            StatusAt("FINISHED_LENGTH_CAPPED", 0.715),
        ),
    ),
    first_token_s=0.611,
)
CAUSES: Final[Mapping[str, str]] = {
    "queue-11": "in the queue of prefill-0: other requests came first",
    "full-3": "decode-0 had no free blocks: preempted once, for 3.06 s in all",
    "slow-2": "transfer exposed for 4.87 s: 7.7 MB from prefill-0 to decode-0 at 1.4 MB/s",
    "prefill-killed": "engine prefill-0 is lost: the session broke: decode-1 computed the prompt itself",
}
"""The page says this about each of them, by its id."""


def slow_requests() -> list[RequestRecord]:
    """The four, which end now one after the other."""
    now_s = time.time()
    return [
        _record(
            now_s - 12, "queue-11", _QUEUED, 1800, ttft_s=7.14, itl_p50_s=0.0171, itl_max_s=0.0346, duration_s=7.28
        ),
        _record(now_s - 14, "full-3", _FULL, 300, ttft_s=0.2814, itl_p50_s=0.0083, itl_max_s=3.14, duration_s=9.31),
        _record(now_s - 8, "slow-2", _SLOW_LINK, 1500, ttft_s=0.61, itl_p50_s=0.0125, itl_max_s=4.92, duration_s=6.15),
        _record(
            now_s - 2,
            "prefill-killed",
            _KILLED,
            1900,
            ttft_s=0.611,
            itl_p50_s=0.007,
            itl_max_s=0.0327,
            duration_s=0.7158,
        ),
    ]


def _record(
    arrived_s: float, name: str, attempt: AttemptRecord, num_prompt_tokens: int, **times: float
) -> RequestRecord:
    return ended(
        attempt,
        request_id=name,
        tenant="",
        arrived_at_s=arrived_s,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=attempt.num_new_tokens,
        **times,
    )
