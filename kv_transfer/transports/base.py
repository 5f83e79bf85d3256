"""The interface of a transport, which opens data links. On a data link runs of bytes go one way, in order.

All calls but abort() and is_cut() come from the link's own thread and may block, each up to its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kv_transfer.transports.link_opening import Opening
from kv_transfer.trust.secret import KeySource

if TYPE_CHECKING:
    # The simulator reads this file, and torch takes seconds to load.
    from torch import Tensor


class ComputeEvent(Protocol):
    """A point on a device's compute stream, recorded by the engine thread."""

    def query(self) -> bool:
        """Return whether the device has done everything that was launched before this point."""


class DataLink(Protocol):
    """One end of a data link.

    After a LinkLost, and after close(), the end is dead, and touches no tensor any more. abort() ends the call that is
    under way with LinkLost.

    after: the tensors may be touched once the device has passed this event; None, as always on the CPU: at once. A
           transport of device memory lets the device wait for the event, never the host.
    """

    def send(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Send the bytes of contiguous tensors, at the producer; return once the tensors may be overwritten.

        Raises ChunkTimeout if that takes longer than timeout_s, or LinkLost.
        """

    def receive(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Fill contiguous tensors with the next bytes, at the consumer. Raises ChunkTimeout or LinkLost."""

    def is_cut(self) -> bool:
        """Return whether the connection is known to be gone, though nothing moves on it; from any thread, at once."""

    def abort(self) -> None:
        """End the call that is under way on this end with LinkLost; from any thread, without blocking."""

    def close(self) -> None:
        """Release sockets and memory."""


class PendingLink(Protocol):
    """A producer's end that waits for its consumer."""

    @property
    def rendezvous(self) -> str:
        """Return the address that the consumer connects to, in the transport's own format."""

    def accept(self, timeout_s: float, opening: Opening | None = None) -> DataLink:
        """Wait for the consumer, and return this end. Raises LinkLost.

        opening: ends the wait when it is given up, if the transport can
        """


class Transport(Protocol):
    """Opens data links: the producer listens, its rendezvous travels over the control stream, the consumer connects."""

    @property
    def name(self) -> str:
        """Return the transport's name, as in KVTransferConfig.transport; both ends must have the same."""

    def listen(self, key: KeySource | None = None) -> PendingLink:
        """Prepare a link at the producer, for a consumer to connect to. Raises LinkLost.

        key: the key of the control stream that the link belongs to. On every connection of the link, the two ends prove
             to each other that they have the key. None: they prove that they know the rendezvous
        """

    def connect(
        self, rendezvous: str, timeout_s: float, opening: Opening | None = None, key: KeySource | None = None
    ) -> DataLink:
        """Join a link, at the consumer. Raises LinkLost. opening: as for accept(); key: as for listen()"""
