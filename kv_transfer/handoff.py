"""The handoff protocol, sans I/O: one machine for each end of a transfer. Events in, instructions out.

    producer (producer.py)                               consumer (consumer.py)
    created .......... waits for READY      <--- READY - created: blocks are reserved
    chunk computed --- CHUNK, then its bytes --------->  posts a receive once the header is seen
    finished --------- FINISHED (token 0, number of chunks)
    every announced chunk has left: over                 every announced chunk is in: reports, once

- The producer announces only what it holds, and holds it until it has left or the link is dead.
- The consumer receives everything that was announced, also after a cancel; only then, or when the link is dead, it
  reports, and after its report nothing writes its blocks.
- A cancel is answered by FINISHED like everything else, so both ends always know how much is still to come.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.connector import ReceivedKV
from kv_transfer.wire import Cancel, Finished, Ready


@dataclass(frozen=True, slots=True)
class Send:
    """Say this on the control stream."""

    message: Ready | Finished | Cancel


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Announce these blocks, then put their bytes on the data link. first_block counts from the prompt's start."""

    first_block: int
    block_ids: tuple[int, ...]


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
    Send | SendBlocks | ReceiveBlocks | ReportReady | ReportFailedSending | ReportFinishedSending | ReportReceived
)
