"""The handoff protocol, sans I/O: one machine for each end of a transfer. Events in, instructions out.

    producer (producer_machine.py)                       consumer (consumer_machine.py)
    created .......... waits for READY      <--- READY - created: blocks are reserved
    computed: chunks are queued
    a chunk's turn --- CHUNK, then its bytes --------->  posts a receive once the header is seen
    finished --------- FINISHED (token 0, number of chunks, those included that are still queued)
    a chunk's turn --- CHUNK, then its bytes --------->  receives
    every queued chunk has left: over                    so many chunks are in: reports, once

- Transfers of a link take turns, one chunk at a time (chunk_queue.py). FINISHED waits for no turn: the consumer learns
  of token 0 and of what is still to come at once, and each later CHUNK counts towards FINISHED's number.
- The producer queues only what it holds, and holds it until it has left or the link is dead.
- The consumer receives everything that was announced, also after a cancel; only then, or when the link is dead, it
  reports, and after its report nothing writes its blocks.
- Who is let go (a cancel, an abort, a request that ended at the producer) has its queued chunks dropped: FINISHED's
  number is what was announced. If FINISHED has promised more already, a second one takes that back.
- So a cancel is answered: by FINISHED, or by the last CHUNK that was owed. Both ends always know how much is to come.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.connector.reports import ReceivedKV
from kv_transfer.handoff.control_messages import Cancel, Finished, Ready


@dataclass(frozen=True, slots=True)
class Send:
    """Say this on the control stream."""

    message: Ready | Finished | Cancel


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Queue this chunk: when its turn comes, announce it, put its bytes on the data link and say on_chunk_announced.

    first_block counts from the prompt's start.
    """

    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropQueued:
    """Forget the chunks whose turn has not come."""


@dataclass(frozen=True, slots=True)
class ReceiveBlocks:
    """Receive the next bytes on the data link into these blocks."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReportReady:
    """READY is in: the scheduler may admit the request."""


@dataclass(frozen=True, slots=True)
class ReportFailedSending:
    """The scheduler has to give the request up."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReportFinishedSending:
    """Nobody reads the request's blocks any more: the producer's last instruction."""


@dataclass(frozen=True, slots=True)
class ReportReceived:
    """Nothing writes the request's blocks any more: the consumer's last instruction."""

    received: ReceivedKV


Instruction = (
    Send
    | SendBlocks
    | DropQueued
    | ReceiveBlocks
    | ReportReady
    | ReportFailedSending
    | ReportFinishedSending
    | ReportReceived
)
