"""What an ingress and an engine say to each other on a session, the one gRPC stream between them.

A session is private to one cluster version: both ends come from the same code, so messages are msgspec's, not protobuf.
The engine speaks first, with its Hello; then batches of outputs, one message per step, and a heartbeat in between. It
says that it has got requests before it computes anything of them: who dies without that word has not died of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec

from actors.core.outputs import EngineCoreOutputs
from actors.core.request import EngineCoreRequest

SESSION_METHOD: Final = "/raypd.engine.v1.Engine/Session"
MAX_MESSAGE_BYTES: Final = 64 * 2**20


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Run these requests.

    sent_at_s: the sender's wall clock, which the receiver's need not agree with
    """

    requests: list[EngineCoreRequest]
    sent_at_s: float

    def received(self, now_s: float) -> list[EngineCoreRequest]:
        """The requests by the receiver's wall clock: each has as much time left, and is as old, as when it was sent."""
        skew_s = now_s - self.sent_at_s
        return [_moved(request, skew_s) for request in self.requests]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End these requests, as (request_id, attempt)."""

    requests: list[tuple[str, int]]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Who answers: a client that expected another incarnation hangs up."""

    engine_id: str
    incarnation: int


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """One more Submit has come. There is one for each, in order."""


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What one step had for this client; empty for a heartbeat."""

    batch: EngineCoreOutputs


ClientMessage = Submit | Abort
EngineMessage = Hello | Taken | Outputs

encode: Final = msgspec.msgpack.Encoder().encode
decode_client_message: Final = msgspec.msgpack.Decoder(ClientMessage).decode
decode_engine_message: Final = msgspec.msgpack.Decoder(EngineMessage).decode


def _moved(request: EngineCoreRequest, skew_s: float) -> EngineCoreRequest:
    deadline_s = None if request.deadline_s is None else request.deadline_s + skew_s
    return replace(request, arrival_time_s=request.arrival_time_s + skew_s, deadline_s=deadline_s)
