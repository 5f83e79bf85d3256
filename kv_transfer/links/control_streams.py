"""Control streams: ordered messages between two engines.

A stream is dialled by the consumer. Sending never blocks and may come from any thread; what arrives, and the stream's
end, is handed to the engine's StreamEvents, whose methods must return at once. After on_closed nothing more arrives.
"""

from __future__ import annotations

from typing import Protocol

from kv_transfer.handoff.control_messages import ControlMessage
from kv_transfer.params import EngineAddress
from kv_transfer.trust.handshake import Proven
from kv_transfer.trust.refusals import Refusals
from kv_transfer.trust.tls import InternalTls


class ControlStream(Protocol):
    """One end of a stream."""

    @property
    def proven(self) -> Proven | None:
        """Return the engines at the two ends, and a key that only they have; None until the handshake is over."""

    def send(self, message: ControlMessage) -> None:
        """Queue a message; a closed stream drops it."""

    def close(self) -> None:
        """Hang up. Both ends hear of it through on_closed."""


class StreamEvents(Protocol):
    """The events of an engine's streams; called on the control's own thread."""

    def on_message(self, stream: ControlStream, message: ControlMessage) -> None:
        """A message has arrived; on a stream that someone else dialled, the first one is how it is heard of."""

    def on_malformed(self, stream: ControlStream, reason: str) -> None:
        """Something has arrived that is no message. The control ends the stream."""

    def on_closed(self, stream: ControlStream, reason: str) -> None:
        """The stream is over."""


class Control(Protocol):
    """How an engine gets at the control streams of others, and they at its own."""

    @property
    def tls(self) -> InternalTls | None:
        """Return the certificates that encrypt this engine's connections with others; None: they are not encrypted."""

    @property
    def refusals(self) -> Refusals:
        """Counts those who connect to this engine and do not prove that they belong to its cluster."""

    def serve(self, events: StreamEvents) -> None:
        """Hand what comes on streams that others dial to `events`, from now on."""

    def dial(self, peer: EngineAddress, events: StreamEvents) -> ControlStream:
        """Open a stream; returns at once. If nobody answers, on_closed says so."""
