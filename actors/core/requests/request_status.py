"""The statuses of a request, and the only transitions between them.

docs/states.md shows TRANSITIONS as render_transitions() prints it; a test compares the two.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType


class RequestStatus(enum.IntEnum):
    """The status of a request. Every status after PREEMPTED is final."""

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
        """Whether the status is final."""
        return self > RequestStatus.PREEMPTED


class FinishReason(enum.StrEnum):
    """Why a request ended, as its client is told."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


FINISH_REASONS: Mapping[RequestStatus, FinishReason] = MappingProxyType(
    {
        RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
        RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
        RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
        RequestStatus.FINISHED_IGNORED: FinishReason.ERROR,
        RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    }
)

_S = RequestStatus

TRANSITIONS: Mapping[RequestStatus, Mapping[RequestStatus, str]] = MappingProxyType(
    {
        _S.WAITING: {
            _S.WAITING_FOR_FSM: "its grammar is being compiled",
            _S.WAITING_FOR_REMOTE_KVS: "consumer: its blocks are reserved, the producer is told READY; others: more of "
            "their prefix is elsewhere than here",
            _S.RUNNING: "admitted to the batch",
            _S.FINISHED_STOPPED: "resumed, or loaded, with a last token that ends it",
            _S.FINISHED_LENGTH_CAPPED: "resumed, or loaded, with all its tokens",
            _S.FINISHED_ABORTED: "aborted, or past its deadline",
            _S.FINISHED_IGNORED: "refused: it can never fit here",
            _S.FINISHED_ERROR: "producer: its consumer is gone; loaded: its grammar does not allow the first token; "
            "its adapter cannot be loaded, or not in time",
        },
        _S.WAITING_FOR_FSM: {
            _S.WAITING: "its grammar is ready",
            _S.FINISHED_ABORTED: "aborted, or past its deadline",
            _S.FINISHED_ERROR: "its grammar does not compile, or not in time",
        },
        _S.WAITING_FOR_REMOTE_KVS: {
            _S.WAITING: "its KV is here; or the load failed and it is prefilled here",
            _S.FINISHED_STOPPED: "the producer finished it: nothing is left to do",
            _S.FINISHED_ABORTED: "aborted, or past its deadline; its blocks stay until the link has drained",
            _S.FINISHED_ERROR: "the load failed and the policy is to fail",
        },
        _S.RUNNING: {
            _S.PREEMPTED: "another request needs its blocks",
            _S.FINISHED_STOPPED: "EOS, a stop token or repetition; pooling: its vector is there",
            _S.FINISHED_LENGTH_CAPPED: "max_tokens or max_model_len; producer: handed over",
            _S.FINISHED_ABORTED: "aborted, or past its deadline",
            _S.FINISHED_ERROR: "producer: its consumer is gone; its grammar does not allow what was sampled",
        },
        _S.PREEMPTED: {
            _S.WAITING_FOR_REMOTE_KVS: "more of its prefix is elsewhere than here",
            _S.RUNNING: "admitted again, from its longest cached prefix",
            _S.FINISHED_STOPPED: "its client has all that it wants",
            _S.FINISHED_LENGTH_CAPPED: "its client has all that it wants",
            _S.FINISHED_ABORTED: "aborted, or past its deadline",
            _S.FINISHED_ERROR: "the engine gives it up",
        },
    }
)


def render_transitions() -> str:
    """Render TRANSITIONS as the Markdown table of docs/states.md."""
    lines = ["| from | to | when |", "|---|---|---|"]
    lines += [
        f"| {source.name} | {target.name} | {reason} |"
        for source, targets in TRANSITIONS.items()
        for target, reason in targets.items()
    ]
    return "\n".join(lines) + "\n"
