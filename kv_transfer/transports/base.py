"""The interface of a transport, which opens data links: runs of bytes go one way on them, in order.

All calls but abort() come from the link's own thread and may block, each up to its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kv_transfer.transports.link_opening import Opening
from kv_transfer.trust.secret import KeySource


class ComputeEvent(Protocol):
    """A point on a device's compute stream, recorded by the engine thread."""

    def query(self) -> bool:
        """Whether the device has done all that was launched before it."""


class DataLink(Protocol):
    """One end of a link. After a LinkLost, abort() or close() it is dead, and touches no tensor any more.

    after: the tensors may be touched once the device has passed this event. None, as always on the CPU: at once. A
    transport of device memory lets the device wait for it, never the host.
    """

    def send(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Producer: put these contiguous tensors' bytes on the link; returns once they may be overwritten.

        Raises ChunkTimeout, or LinkLost.
        """

    def receive(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Consumer: fill these contiguous tensors with the next bytes. Raises ChunkTimeout, or LinkLost."""

    def is_cut(self) -> bool:
        """From any thread: whether the connection is known to be gone, though nothing moves on it. Does not block."""

    def abort(self) -> None:
        """From any thread: wake whoever waits on this end with LinkLost. Does not block."""

    def close(self) -> None:
        """Release sockets and memory."""


class PendingLink(Protocol):
    """A producer's end that waits for its consumer."""

    @property
    def rendezvous(self) -> str:
        """Return the address that the consumer connects to, in the transport's own words."""

    def accept(self, timeout_s: float, opening: Opening | None = None) -> DataLink:
        """Wait for the consumer. Raises LinkLost. opening: ends the wait, where the transport can."""


class Transport(Protocol):
    """Opens links. The producer listens, its rendezvous travels over the control stream, the consumer connects."""

    @property
    def name(self) -> str:
        """Return the transport's name, as in KVTransferConfig.transport; both ends must have the same."""

    def listen(self, key: KeySource | None = None) -> PendingLink:
        """Producer: prepare a link. Raises LinkLost.

        key: of the control stream that the link belongs to, which both ends prove to each other on every connection
            of the link. Without it they prove that they know the rendezvous
        """

    def connect(
        self, rendezvous: str, timeout_s: float, opening: Opening | None = None, key: KeySource | None = None
    ) -> DataLink:
        """Consumer: join a link. Raises LinkLost. opening: as for accept(); key: as for listen()."""
