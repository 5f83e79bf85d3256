"""A request inside an engine, and the statuses that it goes through."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from actors.core.sampling_params import SamplingParams
from kv_transfer.params import KVTransferParams


class RequestStatus(enum.IntEnum):
    """Where a request is. Everything after PREEMPTED is final."""

    WAITING = enum.auto()
    WAITING_FOR_FSM = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow."""
        return self > RequestStatus.PREEMPTED


class FinishReason(enum.StrEnum):
    """Why a request ended, as its client is told."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """A request as it is submitted to an engine, over the wire or in process (msgspec encodes it).

    attempt:          new each time the request is submitted again
    prompt_token_ids: at least one token
    output_token_ids: tokens that it already has (resume); the engine goes on at the next position
    eos_token_ids:    the model's end-of-sequence tokens
    arrival_time_s:   wall clock of its arrival at the cluster, orders the priority queue
    deadline_s:       wall clock after which nobody wants the answer, or None
    cache_salt:       separates the prefix cache between those who must not see each other's hits
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    attempt: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    arrival_time_s: float = 0.0
    deadline_s: float | None = None
    cache_salt: str | None = None
    kv_transfer_params: KVTransferParams | None = None
