"""The state that an engine keeps of each of its transfers, and of each link on which it sends."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.routing.engine_connection import EngineKey
from cluster.simulation.network.shared_network import Flow
from kv_transfer.connector.keys import TransferKey
from kv_transfer.handoff.chunk_queue import ChunkQueue, QueuedChunk
from kv_transfer.handoff.consumer_machine import ConsumerMachine
from kv_transfer.handoff.producer_machine import ProducerMachine, ProducerState


@dataclass(slots=True, eq=False)
class Sending:
    """A transfer to a consumer. num_promised_bytes: see LinkMeter.queue()"""

    key: TransferKey
    peer: EngineKey
    machine: ProducerMachine
    has_link: bool = False
    num_promised_bytes: int = 0
    num_queued_bytes: int = 0
    num_sent_bytes: int = 0
    num_counted_bytes: int = 0

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that the transfer is still to send, as far as they are known."""
        goes_on = self.machine.state in (ProducerState.AWAITING_READY, ProducerState.SENDING)
        return max(0, (self.num_promised_bytes if goes_on else self.num_queued_bytes) - self.num_sent_bytes)


@dataclass(slots=True, eq=False)
class Loading:
    """A load from a producer."""

    key: TransferKey
    peer: EngineKey
    machine: ConsumerMachine


@dataclass(slots=True, eq=False)
class SendingLink:
    """The data link to one consumer. jobs: announced chunks that have not left, the first one on its way"""

    chunks: ChunkQueue
    jobs: list[QueuedChunk]
    flow: Flow | None = None
    began_s: float = 0.0
