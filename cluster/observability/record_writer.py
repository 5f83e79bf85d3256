"""Collects what becomes of one request while it is served, and writes its record when it has ended.

Pure: the times are passed in. Only the newest attempt is asked for its state, when it ends or when the record is
written; of earlier attempts the writer keeps their records. Prompts and tokens are in no
record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from actors.core.requests.request import EngineCoreRequest, FinishReason
from actors.core.requests.slo import Slo
from cluster.observability.stopwatch import Stopwatch
from cluster.routing.request_record import AttemptRecord, RequestRecord

_MAX_ATTEMPTS: Final = 16
_MAX_FAILURE_CHARS: Final = 300

Describe: TypeAlias = Callable[[float], AttemptRecord]
"""Returns the record of an attempt as it is now; it gets the attempt's began_s."""


class RecordWriter:
    """The record of one request, as far as it is known."""

    def __init__(self, request_id: str, tenant: str, *, arrived_at_s: float, now_s: float) -> None:
        """Begin without attempts.

        arrived_at_s: Unix time at which the request arrived
        now_s:        the same time on the clock of begin()
        """
        self.request_id = request_id
        self.tenant = tenant
        self.model_version = 0
        self.num_prompt_tokens = 0
        self.slo: Slo | None = None
        self.arrived_at_s = arrived_at_s
        self.arrived_s = now_s
        self.model = ""
        self.traceparent: str | None = None
        """The trace context for engines, as a W3C header; None if there is none."""
        self.request: EngineCoreRequest | None = None
        """The tokenized request, for the request trace; None before it is tokenized."""
        self._ended: list[AttemptRecord] = []
        self._num_left_out = 0
        self._describe: Describe | None = None
        self._began_s = 0.0

    @property
    def has_attempts(self) -> bool:
        """Whether the request has been submitted to engines: without that, there is nothing to record."""
        return self._describe is not None or bool(self._ended)

    def begin(self, describe: Describe, now_s: float) -> None:
        """Note that an attempt begins; the one before it has ended. now_s: on the clock of __init__()"""
        self.fail("", now_s)
        self._describe, self._began_s = describe, now_s - self.arrived_s

    def fail(self, reason: str, now_s: float) -> None:
        """Note that the newest attempt has ended, and why. now_s: on the clock of __init__()"""
        if self._describe is None:
            return
        described = self._describe(self._began_s)
        ended_s = now_s - self.arrived_s
        self._ended.append(msgspec.structs.replace(described, failure=reason[:_MAX_FAILURE_CHARS], ended_s=ended_s))
        self._describe = None
        if len(self._ended) > _MAX_ATTEMPTS:
            del self._ended[1]
            self._num_left_out += 1

    def outline(self, ingress: str) -> RequestRecord:
        """Return the record as it is now, without what the times of its tokens say: its attempts. See record()."""
        return RequestRecord(
            request_id=self.request_id,
            tenant=self.tenant,
            ingress=ingress,
            arrived_at_s=self.arrived_at_s,
            model_version=self.model_version,
            num_prompt_tokens=self.num_prompt_tokens,
            attempts=self._attempts(),
            num_attempts_left_out=self._num_left_out,
            model=self.model,
            max_tokens=0 if self.request is None else self.request.sampling_params.max_tokens,
        )

    def record(self, ingress: str, stopwatch: Stopwatch) -> RequestRecord:
        """Return the record as it is now.

        ingress:   the name of the ingress, or of the simulation
        stopwatch: has the times of the request's tokens, and its outcome once it has ended
        """
        return msgspec.structs.replace(
            self.outline(ingress),
            outcome=stopwatch.outcome,
            num_output_tokens=stopwatch.num_tokens,
            ttft_s=stopwatch.ttft_s,
            itl_p50_s=stopwatch.itl_p50_s,
            itl_max_s=stopwatch.itl_max_s,
            duration_s=stopwatch.duration_s,
            ttft_aim_s=None if self.slo is None else self.slo.ttft_s,
            itl_aim_s=None if self.slo is None else self.slo.itl_s,
            has_met_aims=_has_met(self.slo, stopwatch),
            in_flight_s=stopwatch.in_flight_s,
        )

    def _attempts(self) -> tuple[AttemptRecord, ...]:
        newest = () if self._describe is None else (self._describe(self._began_s),)
        return (*self._ended, *newest)


def _has_met(slo: Slo | None, stopwatch: Stopwatch) -> bool | None:
    """Return whether a request met its aims; None if it has none, is in flight, or was given up by its client."""
    if slo is None or slo == Slo() or stopwatch.outcome in (None, "cancelled"):
        return None
    if stopwatch.outcome not in (FinishReason.STOP, FinishReason.LENGTH):
        return False
    measured = ((slo.ttft_s, stopwatch.ttft_s), (slo.itl_s, stopwatch.tpot_s))
    return all(aim_s is None or time_s is None or time_s <= aim_s for aim_s, time_s in measured)
