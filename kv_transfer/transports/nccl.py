"""The NCCL transport: GPU memory to GPU memory, one two-rank communicator per link, through cupy.

The producer draws a unique id, which travels as the rendezvous over the control stream; then both ends initialise and
warm up, each under its deadline. Chunks go straight from cache to cache (nccl_messages.py says how they are cut), in
the order of the link's control stream: a receive is posted for a header that was seen, never on speculation, since NCCL
compares neither sizes nor order.
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

By itself it takes a fraction of a second. But it waits for what its stream waits for, a step of the engine, and it
frees device memory, for which CUDA may wait for every kernel on the device: other links' receives among them, each
until its own chunk's deadline.
"""

_PRODUCER_RANK: Final = 0
_CONSUMER_RANK: Final = 1


class NcclLink:
    """One end of a link. A LinkLost leaves it only when the device touches its blocks no more, or the engine ends."""

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
        """Send from where the blocks are, once the device has passed `after`."""
        self._exchange(blocks, timeout_s, after, is_send=True)

    def receive(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Receive to where the blocks are, once the device has passed `after`."""
        self._exchange(blocks, timeout_s, after, is_send=False)

    def is_cut(self) -> bool:
        """NCCL does not tell while nothing moves."""
        return False

    def abort(self) -> None:
        """Wake this end. NCCL may tell the other end, or leave it to the control stream and its deadline."""
        self._communicator.abort()

    def close(self) -> None:
        """Abort, and wait for it."""
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
        """on_wedged: called once on a link's thread, before its LinkLost, when an abort hangs: the engine has to end.

        abort_timeout_s: the links' chunk deadline plus ABORT_MARGIN_S
        message_size_bytes: as a producer; consumers take their producer's
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
        """Initialisations that missed their deadline and have not come back: a thread of each is still in NCCL."""
        with self._abandoned_lock:
            self._abandoned = [communicator for communicator in self._abandoned if not communicator.is_quiet]
            return len(self._abandoned)

    def listen(self, key: KeySource | None = None) -> _PendingNcclLink:
        """Draw a unique id."""
        try:
            unique_id = self._library.make_unique_id()
        except (RuntimeError, KeyError) as error:
            raise LinkLost(f"NCCL opens no rendezvous: {error}") from error
        return _PendingNcclLink(self, Rendezvous(self._library.version, self._message_size_bytes, unique_id))

    def connect(
        self, rendezvous: str, timeout_s: float, opening: Opening | None = None, key: KeySource | None = None
    ) -> NcclLink:
        """Join the producer's communicator."""
        del opening  # An initialisation cannot be interrupted.
        parsed = Rendezvous.parse(rendezvous)
        if parsed.nccl_version != self._library.version:
            raise LinkLost(f"NCCL {self._library.version} at the consumer, {parsed.nccl_version} at the producer")
        return self.join(parsed, _CONSUMER_RANK, timeout_s)

    def join(self, rendezvous: Rendezvous, rank: int, timeout_s: float) -> NcclLink:
        """Make this end of the communicator and warm it up. Raises LinkLost."""
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
    """The producer's message to the consumer: both must have the same NCCL and cut messages alike.

    On the wire: nccl_version/message_size_bytes/unique id in base64
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
        """Raises LinkLost if it is none."""
        try:
            nccl_version, message_size_bytes, unique_id = text.split("/", 2)
            parsed = cls(int(nccl_version), int(message_size_bytes), base64.b64decode(unique_id, validate=True))
        except ValueError as error:
            raise LinkLost(f"not an NCCL rendezvous: {text!r}") from error
        if not 0 < parsed.message_size_bytes <= STAGING_SIZE_BYTES:
            raise LinkLost(f"messages of {parsed.message_size_bytes} bytes do not fit the staging buffer")
        return parsed
