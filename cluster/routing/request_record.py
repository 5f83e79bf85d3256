"""Describes what became of one request: each decision about its route, with what came true beside what was predicted.

These are values without prompts, tokens or texts, written by an ingress or by a simulation alike. A record is kept and
sent as MessagePack, and shown as JSON; both have the fields below, by these names. Durations are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from actors.core.outputs.engine_core_outputs import RequestTimings
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.core.requests.request import StatusChange
from cluster.routing.decision import Decision

SCHEMA: int = 1
"""The version of the fields below; it grows when one of them changes its meaning."""

_MAX_STATUSES: Final = 32


class StatusAt(msgspec.Struct, frozen=True, array_like=True):
    """The name of a RequestStatus, and when the request entered it: seconds after the engine got the request."""

    status: str
    at_s: float


class EngineTimes(msgspec.Struct, frozen=True):
    """The report of one engine about its part of an attempt.

    queued_s:           from the request's arrival at the engine until it was scheduled or its blocks were reserved
    prefill_s:          from then until the engine sampled the request's first token; 0 if it sampled none
    transfer_s:         from the first chunk of the handoff until the last block was there, at the consumer
    exposed_transfer_s: the part of transfer_s after the end of prefill, for which the client waits
    statuses:           the statuses that the request went through at the engine; of very many the first and last ones
    """

    queued_s: float
    prefill_s: float
    num_prompt_tokens_computed: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    transfer_s: float = 0.0
    exposed_transfer_s: float = 0.0
    num_transferred_bytes: int = 0
    statuses: tuple[StatusAt, ...] = ()

    @classmethod
    def of(cls, timings: RequestTimings | None) -> EngineTimes | None:
        """Return an engine's times from its report; None if it has not reported."""
        if timings is None:
            return None
        transfer = timings.transfer
        return cls(
            timings.queued_s,
            timings.prefill_s,
            timings.num_prompt_tokens_computed,
            timings.num_cached_tokens,
            timings.num_preemptions,
            0.0 if transfer is None else transfer.transfer_s,
            0.0 if transfer is None else transfer.exposed_s,
            0 if transfer is None else transfer.num_bytes,
            _statuses(timings.status_changes),
        )


class EngineQueue(msgspec.Struct, frozen=True):
    """The requests of an engine, from all ingresses, by its newest report on itself; one comes twice a second.

    num_waiting_for_reservation: of num_waiting, those for whose KV their decode engines have reserved no blocks yet
    num_waiting_for_batch:       of num_waiting, those whose KV is here
    num_waiting_for_kv:          those whose KV is on its way; they are not in num_waiting
    kv_cache_usage:              0 to 1
    """

    engine_id: str
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_reservation: int = 0
    num_waiting_for_batch: int = 0
    num_waiting_for_kv: int = 0
    kv_cache_usage: float = 0.0

    @classmethod
    def of(cls, engine_id: str, stats: SchedulerStats) -> EngineQueue:
        """Return the queue of an engine that has sent these counters."""
        reasons = stats.num_waiting_by_reason
        return cls(
            engine_id,
            stats.num_running_reqs,
            stats.num_waiting_reqs,
            reasons.get("reservation", 0),
            reasons.get("batch", 0),
            stats.num_waiting_for_remote_kvs,
            stats.kv_cache_usage,
        )


class AttemptRecord(msgspec.Struct, frozen=True):
    """One submission of the request to engines.

    began_s:            from the request's arrival to the submission
    decision:           why it went to these engines; None if nothing but a fixed rule chose them
    prefill_engine_id:  the engine that computed the prompt and handed it over; None if the first decode engine did
    decode_engine_ids:  the engines that decoded, in order; more than one if the request migrated
    num_new_tokens:     output tokens that the attempt has given
    failure:            why the attempt ended before the request did; "" if it did not
    prefill, decode:    the engines' reports; None if an engine sent none, as one that died. decode: of the last engine
    prefill_failure:    why the prefill engine failed, so that the decode engine computed the prompt; "" if it did not
    first_token_s:      from the request's arrival to the attempt's first token; None before it
    moved_s:            from the request's arrival to each migration: one less than there are decode_engine_ids
    ended_s:            from the request's arrival to the failure, or to when the request went elsewhere; None if the
                        attempt goes on, or was the last one and has not failed
    """

    began_s: float
    decode_engine_ids: tuple[str, ...]
    prefill_engine_id: str | None = None
    decision: Decision | None = None
    num_new_tokens: int = 0
    failure: str = ""
    prefill: EngineTimes | None = None
    decode: EngineTimes | None = None
    prefill_failure: str = ""
    first_token_s: float | None = None
    moved_s: tuple[float, ...] = ()
    ended_s: float | None = None

    @property
    def was_left(self) -> bool:
        """Whether the prompt still waited when the request was rerouted to an engine that had run out of prompts."""
        return self.ended_s is not None and not self.failure

    @property
    def computing_engine_id(self) -> str:
        """The engine that computed the prompt, or was to do so, when the attempt began."""
        return self.prefill_engine_id or self.decode_engine_ids[0]

    @property
    def silent_engine_ids(self) -> list[str]:
        """The engines that have told nothing of the request yet, not even by tokens, of an attempt under way."""
        silent = []
        producer = self.prefill_engine_id
        if producer is not None and self.prefill is None and self.first_token_s is None and not self.prefill_failure:
            silent.append(producer)
        # The first token of a handoff is its producer's.
        if self.decode is None and self.num_new_tokens <= int(producer is not None):
            silent.append(self.decode_engine_ids[-1])
        return silent

    @property
    def computing(self) -> EngineTimes | None:
        """The report of the engine that computed the prompt; None if that engine sent none, or if it is not known."""
        if self.prefill_engine_id is not None:
            return self.prefill
        return self.decode if len(self.decode_engine_ids) == 1 else None


class RequestRecord(msgspec.Struct, frozen=True):
    """The record of one request.

    tenant:                "" if the cluster has no tenants
    model:                 the served model's name, or the name of the request's LoRA adapter; "" if it is not known
    ingress:               the name of the ingress that served the request, or of the simulation
    arrived_at_s:          Unix time
    outcome:               the finish reason, or how the request failed; None while it is in flight
    attempts:              every submission, in order; of very many the first and the last ones
    num_attempts_left_out: attempts that are missing after the first one
    ttft_s:                from the request's arrival to its first token; None before it
    itl_p50_s, itl_max_s:  the median and the longest time between two output tokens; None before the second token
    duration_s:            from the request's arrival to its end; None while it is in flight
    in_flight_s:           from the request's arrival to the writing of the record; None once the request has ended
    ttft_aim_s, itl_aim_s: the request's aims, its own or the cluster's; None: it has no such aim
    has_met_aims:          whether it ended well, its first token was in time, and the mean time between its tokens was
                           within the aim; None: it has no aims, or is in flight, or its client has left
    max_tokens:            the most output tokens that the request allows; 0 if it is not known
    queues:                of the engines that have it and have told nothing of it yet, while it is in flight
    """

    request_id: str
    tenant: str
    ingress: str
    arrived_at_s: float
    outcome: str | None = None
    model_version: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    attempts: tuple[AttemptRecord, ...] = ()
    num_attempts_left_out: int = 0
    ttft_s: float | None = None
    itl_p50_s: float | None = None
    itl_max_s: float | None = None
    duration_s: float | None = None
    ttft_aim_s: float | None = None
    itl_aim_s: float | None = None
    has_met_aims: bool | None = None
    model: str = ""
    in_flight_s: float | None = None
    max_tokens: int = 0
    queues: tuple[EngineQueue, ...] = ()
    schema: int = SCHEMA

    @property
    def left_queues_s(self) -> float:
        """The time in the queues that the request has left for an engine without prompts; no engine reports it."""
        left = (one for one in self.attempts if one.was_left)
        return sum(one.ended_s - one.began_s for one in left if one.ended_s is not None)

    @property
    def predicted_ttft_s(self) -> float | None:
        """The time to the first token as it was predicted for the attempt that gave it; None without a prediction.

        None as well if an attempt failed before the first token: no prediction is about failures.
        """
        first = self.attempts[0] if self.attempts else None
        if first is None or not first.num_new_tokens or first.decision is None or first.decision.chosen is None:
            return None
        return first.began_s + first.decision.chosen.ttft_s

    def to_json(self) -> bytes:
        """Return the record as a JSON object."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> RequestRecord:
        """Return the record of a JSON object. Raises ValueError, naming the field that is wrong."""
        return _check_schema(_JSON.decode(data))

    def to_bytes(self) -> bytes:
        """Return the record as MessagePack, in about half of the size and time of JSON."""
        return _ENCODER.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> RequestRecord:
        """Return the record of to_bytes(). Raises ValueError, naming the field that is wrong."""
        return _check_schema(_MSGPACK.decode(data))


class Comparison(msgspec.Struct, frozen=True):
    """A predicted duration and the measured one, in seconds. measured_s: None if it was not measured"""

    what: str
    predicted_s: float
    measured_s: float | None

    @property
    def error(self) -> float | None:
        """How far the prediction was off: measured / predicted - 1; None if either is missing."""
        if self.measured_s is None or self.predicted_s <= 0:
            return None
        return self.measured_s / self.predicted_s - 1


def comparisons(record: RequestRecord, attempt: AttemptRecord) -> list[Comparison]:
    """Return what was predicted for one attempt of the record beside what came true; empty without a prediction.

    Times that clients see, to the first token and between tokens, are those of the whole request, so they are compared
    only if no attempt has failed, for the last one.
    """
    terms = None if attempt.decision is None else attempt.decision.chosen
    if terms is None:
        return []
    computing, decode = attempt.computing, attempt.decode
    *others, last = record.attempts
    is_whole = attempt == last and all(one.was_left for one in others)
    found = [
        Comparison("queue", terms.prefill_wait_s + terms.blocks_wait_s, _if(computing, "queued_s")),
        Comparison("prefill", terms.prefill_s + terms.fetch_s, _if(computing, "prefill_s")),
    ]
    if attempt.prefill_engine_id is not None:
        found.append(Comparison("exposed transfer", terms.transfer_s, _if(decode, "exposed_transfer_s")))
    ttft_s = terms.ttft_s + attempt.began_s
    found.append(Comparison("time to first token", ttft_s, record.ttft_s if is_whole else None))
    found.append(Comparison("time between tokens", terms.itl_s, record.itl_p50_s if is_whole else None))
    return found


def _if(times: EngineTimes | None, name: str) -> float | None:
    return None if times is None else float(getattr(times, name))


def _statuses(changes: Sequence[StatusChange]) -> tuple[StatusAt, ...]:
    if len(changes) > _MAX_STATUSES:
        changes = [*changes[: _MAX_STATUSES // 2], *changes[-(_MAX_STATUSES // 2) :]]
    # Only differences between times of one engine are used: its clock may differ from the ingress's.
    return tuple(StatusAt(change.status.name, change.at_s - changes[0].at_s) for change in changes)


def _check_schema(record: RequestRecord) -> RequestRecord:
    if record.schema != SCHEMA:
        problem = f"the record has schema {record.schema}, and this raypd reads {SCHEMA}"
        raise ValueError(f"{problem}: read it with the version of raypd that wrote it")
    return record


_ENCODER = msgspec.msgpack.Encoder()
_MSGPACK = msgspec.msgpack.Decoder(RequestRecord)
_JSON = msgspec.json.Decoder(RequestRecord)
