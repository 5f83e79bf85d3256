"""The handoff protocol without I/O: one machine for each end of a transfer takes events and returns instructions.

    producer (producer_machine.py)                       consumer (consumer_machine.py)
    created .......... waits for READY      <--- READY - created: blocks are reserved
    computed: chunks are queued
    a chunk's turn --- CHUNK, then its bytes --------->  posts a receive once the header is seen
    finished --------- FINISHED (token 0, number of chunks, those included that are still queued)
    a chunk's turn --- CHUNK, then its bytes --------->  receives
    every queued chunk has left: over                    so many chunks are in: reports, once

- Transfers of a link take turns, one chunk at a time (chunk_queue.py). FINISHED waits for no turn: the consumer learns
  at once of token 0 and of the number of chunks, and each later CHUNK counts towards that number.
- The producer queues only blocks that its request holds, and the request holds them until they have left or the link
  is dead.
- The consumer receives everything that was announced, also after a cancel. Only then, or when the link is dead, the
  consumer reports; after its report nothing writes its blocks.
- If the consumer does not go on with the request (a cancel, an abort, a request that token 0 ended), the queued chunks
  are dropped: FINISHED's number is that of the announced chunks. If an earlier FINISHED has promised more, a second
  FINISHED takes the promise back.
- So a cancel is answered: by FINISHED, or by the last CHUNK that FINISHED had promised. Once FINISHED has arrived, the
  consumer knows how many chunks are still to come.

docs/kv_transfer.md has the protocol with diagrams; docs/states.md shows both machines' tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.connector.reports import ReceivedKV
from kv_transfer.handoff.control_messages import Cancel, Finished, Ready


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message on the link's control stream."""

    message: Ready | Finished | Cancel


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Queue a chunk. When its turn comes, announce it, call on_chunk_announced and put its bytes on the data link.

    first_block: the first block's index in the prompt
    block_ids:   the chunk's blocks in the producer's KV cache

    Both count pieces where the two ends have different block sizes (layout.py).
    """

    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropQueued:
    """Drop the transfer's chunks whose turn has not come."""


@dataclass(frozen=True, slots=True)
class ReceiveBlocks:
    """Receive the next bytes on the data link into these blocks, or pieces, of the consumer's KV cache."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReportReady:
    """Tell the scheduler that READY has arrived: the request may be admitted."""


@dataclass(frozen=True, slots=True)
class ReportFailedSending:
    """Tell the scheduler that the request has to end, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReportFinishedSending:
    """Tell the scheduler that nothing reads the request's blocks any more: the producer's last instruction."""


@dataclass(frozen=True, slots=True)
class ReportReceived:
    """Tell the scheduler that nothing writes the request's blocks any more: the consumer's last instruction."""

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
