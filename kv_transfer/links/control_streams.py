"""The interface of control streams, which carry ordered messages between two engines.

The consumer dials a stream. Sending never blocks and may come from any thread. Each message that arrives, and the
stream's end, is handed to the engine's StreamEvents, whose methods must return at once. After on_closed no message
arrives.
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
        """Close the stream. Both ends are told by on_closed."""


class StreamEvents(Protocol):
    """Takes the events of an engine's streams. The control calls the methods on a thread of its own."""

    def on_message(self, stream: ControlStream, message: ControlMessage) -> None:
        """Take a message that has arrived. The first message of a stream that another engine dialled announces it."""

    def on_malformed(self, stream: ControlStream, reason: str) -> None:
        """Note that something has arrived that is no message. The control ends the stream."""

    def on_closed(self, stream: ControlStream, reason: str) -> None:
        """Note that the stream is over. reason: why, for the link's statistics and the log"""


class Control(Protocol):
    """Opens an engine's control streams to other engines, and accepts theirs."""

    @property
    def tls(self) -> InternalTls | None:
        """Return the certificates that encrypt this engine's connections with others; None: they are not encrypted."""

    @property
    def refusals(self) -> Refusals:
        """Return the counter of connections to this engine that did not prove that they belong to its cluster."""

    def serve(self, events: StreamEvents) -> None:
        """Hand the messages of streams that other engines dial to `events`, from now on."""

    def dial(self, peer: EngineAddress, events: StreamEvents) -> ControlStream:
        """Open a stream and return it at once. If it cannot be opened, on_closed gives the reason."""
