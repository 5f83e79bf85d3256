"""Defines the messages of a session, the one gRPC stream between an ingress and an engine.

Both ends of a session run the same version of raypd, so messages are msgspec's and not protobuf's. The engine's first
message is its Hello. Then the engine sends a message with the outputs of each step, and a heartbeat when there are
none. To ingresses that ask, it also sends what its prefix cache has (block_messages.py). It acknowledges requests with
Taken before it computes them: an engine that dies without having sent Taken has not died because of these requests.
An ingress announces what work its requests bring, and when that has left; the engine tells that to all other ingresses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Final

import msgspec

from actors.core.outputs.engine_core_outputs import EngineCoreOutputs
from actors.core.outputs.sent_work import SentWork
from actors.core.requests.request import EngineCoreRequest, StatusChange
from actors.sessions.block_messages import CachedBlocks, KVEvents, WatchBlocks
from kv_transfer.message_ranges import MALFORMED, MAX_ITEMS, MAX_KINDS, Clock, Count, Incarnation, Name, Total

SESSION_METHOD: Final = "/raypd.engine.v1.Engine/Session"
MAX_MESSAGE_BYTES: Final = 64 * 2**20


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Asks the engine to run requests.

    sent_at_s: time on the sender's monotonic clock, like the times in the requests; the receiver's clock has another
               zero
    """

    requests: list[EngineCoreRequest]
    sent_at_s: float


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A request of a Submit that is malformed, or that the engine's model cannot be given."""

    request_id: str
    attempt: int
    reason: str


class ReceivedSubmit(msgspec.Struct, frozen=True, tag="submit"):
    """A Submit whose requests are decoded one by one: a malformed one is refused alone."""

    requests: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=65_536)]
    sent_at_s: Clock

    def received(self, now_s: float) -> list[EngineCoreRequest | RefusedRequest]:
        """Return the requests with their times converted to the receiver's monotonic clock.

        now_s: the time on the receiver's monotonic clock

        Each request has the same age, and the same time left, as when it was sent; how long the message took is not
        known and not counted. Wall clocks are not used, so setting a clock changes no deadline.
        Raises msgspec.MsgspecError if a malformed request has no id that a refusal could name.
        """
        skew_s = now_s - self.sent_at_s
        return [_received(request, skew_s) for request in self.requests]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Asks the engine to abort requests. requests: (request_id, attempt) of each"""

    requests: Annotated[list[tuple[Name, Count]], msgspec.Meta(max_length=MAX_ITEMS)]


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    """Says what work the newest requests of this client bring. Each request is announced after its Submit.

    left: the work of requests that were announced and that the engine has no more
    """

    works: Annotated[list[SentWork], msgspec.Meta(max_length=MAX_KINDS)]
    left: Annotated[list[SentWork], msgspec.Meta(max_length=MAX_KINDS)]


class Announced(msgspec.Struct, frozen=True, tag="announced"):
    """Tells a client what work another client has announced.

    num_submitted: how many requests the engine had got by then, in the order of LoadReport.num_taken_from_all: once a
                   report has that many, it counts these works
    """

    works: Annotated[list[SentWork], msgspec.Meta(max_length=MAX_KINDS)]
    left: Annotated[list[SentWork], msgspec.Meta(max_length=MAX_KINDS)]
    num_submitted: Total


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Names the engine that answers. A client that expected another engine or incarnation closes the session."""

    engine_id: Name
    incarnation: Incarnation


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """Acknowledges a Submit. The engine sends one Taken for each Submit, in order."""


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """The outputs of one step for this client; without outputs the message is a heartbeat.

    Times in the batch are Unix times in seconds.
    """

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


ClientMessage = Submit | Announce | Abort | WatchBlocks
ReceivedMessage = ReceivedSubmit | Announce | Abort | WatchBlocks
EngineMessage = Hello | Taken | Announced | Outputs | KVEvents | CachedBlocks

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
