"""The messages between an ingress and an engine on a session, the one gRPC stream between them.

A session is private to one cluster version: both ends come from the same code, so messages are msgspec's, not protobuf.
The engine speaks first, with its Hello; then batches of outputs, one message per step, and a heartbeat in between. It
says that it has got requests before it computes anything of them: who dies without that word has not died of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Final

import msgspec

from actors.core.outputs.engine_core_outputs import EngineCoreOutputs
from actors.core.requests.request import EngineCoreRequest, StatusChange
from kv_transfer.message_ranges import MALFORMED, MAX_ITEMS, Clock, Count, Incarnation, Name

SESSION_METHOD: Final = "/raypd.engine.v1.Engine/Session"
MAX_MESSAGE_BYTES: Final = 64 * 2**20


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Run these requests.

    sent_at_s: the sender's monotonic clock, as the times in its requests are; the receiver's has another zero
    """

    requests: list[EngineCoreRequest]
    sent_at_s: float


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A request of a Submit that has a field out of its range."""

    request_id: str
    attempt: int
    reason: str


class ReceivedSubmit(msgspec.Struct, frozen=True, tag="submit"):
    """A Submit whose requests are decoded one by one: a malformed one is refused alone."""

    requests: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=65_536)]
    sent_at_s: Clock

    def received(self, now_s: float) -> list[EngineCoreRequest | RefusedRequest]:
        """Return the requests by the receiver's monotonic clock.

        Each request has as much time left, and is as old, as when it was sent; the time that the message took to come
        is not known and not counted. No wall clock has a part in it, so a step of one changes no deadline.
        Raises msgspec.MsgspecError if a request does not even have an id to refuse it by.
        """
        skew_s = now_s - self.sent_at_s
        return [_received(request, skew_s) for request in self.requests]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End these requests, as (request_id, attempt)."""

    requests: Annotated[list[tuple[Name, Count]], msgspec.Meta(max_length=MAX_ITEMS)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The engine that answers: a client that expected another incarnation hangs up."""

    engine_id: Name
    incarnation: Incarnation


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """One more Submit has come. There is one for each, in order."""


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """The outputs of one step for this client; empty for a heartbeat. Times in it are Unix times in seconds."""

    batch: EngineCoreOutputs

    @classmethod
    def sent(cls, batch: EngineCoreOutputs, epoch_s: float) -> Outputs:
        """Return the message for a batch whose times are monotonic; its timings are changed in place.

        epoch_s: the Unix time of the monotonic clock's zero
        """
        for output in batch.others:
            if output.timings is not None:
                changes = output.timings.status_changes
                changes[:] = [StatusChange(change.status, epoch_s + change.at_s) for change in changes]
        return cls(batch)


class _RequestName(msgspec.Struct, frozen=True):
    request_id: Name
    attempt: Count = 0


ClientMessage = Submit | Abort
ReceivedMessage = ReceivedSubmit | Abort
EngineMessage = Hello | Taken | Outputs

encode: Final = msgspec.msgpack.Encoder().encode
decode_client_message: Final = msgspec.msgpack.Decoder(ReceivedMessage).decode
decode_engine_message: Final = msgspec.msgpack.Decoder(EngineMessage).decode


_decode_request: Final = msgspec.msgpack.Decoder(EngineCoreRequest).decode
_decode_name: Final = msgspec.msgpack.Decoder(_RequestName).decode


def _received(raw: msgspec.Raw, skew_s: float) -> EngineCoreRequest | RefusedRequest:
    try:
        request = _decode_request(raw)
    except MALFORMED as error:
        name = _decode_name(raw)
        return RefusedRequest(name.request_id, name.attempt, f"the request is malformed: {error}")
    deadline_s = None if request.deadline_s is None else request.deadline_s + skew_s
    return replace(request, arrival_time_s=request.arrival_time_s + skew_s, deadline_s=deadline_s)
