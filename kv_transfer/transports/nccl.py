"""The NCCL transport: GPU memory to GPU memory, one two-rank communicator per link, through cupy.

The producer draws a unique id, which travels as the rendezvous over the control stream; then both ends initialise and
warm up, each before its deadline. Chunks go straight from cache to cache (nccl_messages.py cuts them into messages), in
the order of the link's control stream. A receive is launched only for a CHUNK that has arrived, because NCCL compares
neither sizes nor order.
"""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from kv_transfer.errors import LinkLost
from kv_transfer.transports.base import ComputeEvent
from kv_transfer.transports.link_opening import Opening
from kv_transfer.transports.nccl_communicator import Communicator
from kv_transfer.transports.nccl_device import Device
from kv_transfer.transports.nccl_library import NcclLibrary
from kv_transfer.transports.nccl_messages import MESSAGE_SIZE_BYTES, STAGING_SIZE_BYTES, cut_messages
from kv_transfer.trust.secret import KeySource

logger = logging.getLogger(__name__)

ABORT_MARGIN_S: Final = 10.0
"""How long an abort may take beyond a chunk's deadline.

An abort takes a fraction of a second by itself. But it waits for the step of the engine that its stream waits for. It
also frees device memory, for which CUDA may wait for every kernel on the device, other links' receives included, each
until its own chunk's deadline.
"""

_PRODUCER_RANK: Final = 0
_CONSUMER_RANK: Final = 1


class NcclLink:
    """One end of a link.

    Invariant: when a call raises LinkLost, the device touches the link's blocks no more, or on_wedged was called, and
    the engine ends.
    """

    def __init__(
        self,
        communicator: Communicator,
        message_size_bytes: int,
        abort_timeout_s: float,
        on_wedged: Callable[[str], None],
    ) -> None:
        self._communicator = communicator
        self._message_size_bytes = message_size_bytes
        self._abort_timeout_s = abort_timeout_s
        self._on_wedged = on_wedged
        self._is_closed = False

    def send(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Send blocks from where they are, once the device has passed `after`; see DataLink."""
        self._exchange(blocks, timeout_s, after, is_send=True)

    def receive(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Receive blocks to where they are, once the device has passed `after`; see DataLink."""
        self._exchange(blocks, timeout_s, after, is_send=False)

    def is_cut(self) -> bool:
        """Return False: NCCL reports a broken connection only while something moves."""
        return False

    def abort(self) -> None:
        """End the call under way on this end. The other end fails by NCCL's error, its control stream or a deadline."""
        self._communicator.abort()

    def close(self) -> None:
        """Abort the communicator, and wait until the device touches no block any more; call on_wedged otherwise."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._communicator.close(self._abort_timeout_s):
            self._on_wedged(f"an NCCL link could not be aborted within {self._abort_timeout_s:g} s")

    def _exchange(
        self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None, *, is_send: bool
    ) -> None:
        messages = cut_messages(blocks, self._message_size_bytes)
        try:
            self._communicator.exchange(messages, is_send=is_send, timeout_s=timeout_s, after=after)
        except BaseException:
            self.close()
            raise


class NcclTransport:
    """A Transport for the KV cache of one device."""

    name = "nccl"

    def __init__(
        self,
        library: NcclLibrary,
        device: Device,
        on_wedged: Callable[[str], None],
        abort_timeout_s: float,
        *,
        message_size_bytes: int = MESSAGE_SIZE_BYTES,
    ) -> None:
        """on_wedged: called with the reason, on a link's thread before its LinkLost, when an abort does not end in time

        abort_timeout_s:    the links' chunk deadline plus ABORT_MARGIN_S
        message_size_bytes: of this engine as a producer; a consumer takes its producer's
        """
        self._library = library
        self._device = device
        self._on_wedged = on_wedged
        self._message_size_bytes = message_size_bytes
        self._abort_timeout_s = abort_timeout_s
        self._launch_lock = threading.Lock()
        self._abandoned_lock = threading.Lock()
        self._abandoned: list[Communicator] = []

    @property
    def num_abandoned(self) -> int:
        """How many initialisations have missed their deadline and not returned: each keeps a thread inside NCCL."""
        with self._abandoned_lock:
            self._abandoned = [communicator for communicator in self._abandoned if not communicator.is_quiet]
            return len(self._abandoned)

    def listen(self, key: KeySource | None = None) -> _PendingNcclLink:
        """Draw a unique id, which becomes the rendezvous; see Transport."""
        try:
            unique_id = self._library.make_unique_id()
        except (RuntimeError, KeyError) as error:
            raise LinkLost(f"NCCL cannot open a rendezvous: {error}") from error
        return _PendingNcclLink(self, Rendezvous(self._library.version, self._message_size_bytes, unique_id))

    def connect(
        self, rendezvous: str, timeout_s: float, opening: Opening | None = None, key: KeySource | None = None
    ) -> NcclLink:
        """Join the producer's communicator; see Transport."""
        del opening  # An initialisation cannot be interrupted.
        parsed = Rendezvous.parse(rendezvous)
        if parsed.nccl_version != self._library.version:
            raise LinkLost(
                f"the consumer has NCCL {self._library.version}, the producer {parsed.nccl_version}: install the same "
                "version on both nodes"
            )
        return self.join(parsed, _CONSUMER_RANK, timeout_s)

    def join(self, rendezvous: Rendezvous, rank: int, timeout_s: float) -> NcclLink:
        """Make this end of the communicator, and warm it up. Raises LinkLost, also after timeout_s."""
        communicator = Communicator(self._library, self._device, rendezvous.unique_id, rank, self._launch_lock)
        try:
            communicator.open(timeout_s)
        except LinkLost:
            with self._abandoned_lock:
                self._abandoned.append(communicator)
            logger.warning("an NCCL link did not open", extra={"num_abandoned": self.num_abandoned})
            raise
        return NcclLink(communicator, rendezvous.message_size_bytes, self._abort_timeout_s, self._on_wedged)


class _PendingNcclLink:
    def __init__(self, transport: NcclTransport, rendezvous: Rendezvous) -> None:
        self._transport = transport
        self._rendezvous = rendezvous

    @property
    def rendezvous(self) -> str:
        return self._rendezvous.format()

    def accept(self, timeout_s: float, opening: Opening | None = None) -> NcclLink:
        del opening  # An initialisation cannot be interrupted.
        return self._transport.join(self._rendezvous, _PRODUCER_RANK, timeout_s)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The facts that the producer sends to the consumer: both ends need the same NCCL, and must cut messages alike.

    Its text is nccl_version/message_size_bytes/unique id in base64.
    """

    nccl_version: int
    message_size_bytes: int
    unique_id: bytes

    def format(self) -> str:
        """Return the rendezvous as one line of text."""
        unique_id = base64.b64encode(self.unique_id).decode("ascii")
        return f"{self.nccl_version}/{self.message_size_bytes}/{unique_id}"

    @classmethod
    def parse(cls, text: str) -> Rendezvous:
        """Read a rendezvous from its text. Raises LinkLost if the text is none."""
        try:
            nccl_version, message_size_bytes, unique_id = text.split("/", 2)
            parsed = cls(int(nccl_version), int(message_size_bytes), base64.b64decode(unique_id, validate=True))
        except ValueError as error:
            raise LinkLost(f"the peer named {text!r}, which is no NCCL rendezvous") from error
        if not 0 < parsed.message_size_bytes <= STAGING_SIZE_BYTES:
            raise LinkLost(
                f"the peer's messages of {parsed.message_size_bytes} bytes do not fit the staging buffer of "
                f"{STAGING_SIZE_BYTES} bytes"
            )
        return parsed
