"""Checksums of chunks: each end computes the checksum of the bytes that it has moved, and the consumer compares.

The producer sends its checksum (ChunkSum) on the control stream once the chunk has left. Chunks and checksums of a link
have one order, so the k-th ChunkSum belongs to the k-th chunk. The checksum is xxh3_64 (XXH3 of the xxHash library, 64
bits): it finds damage, not forgery.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import torch
import xxhash
from torch import Tensor

from kv_transfer.errors import ProtocolViolation
from kv_transfer.handoff.control_messages import ChunkSum
from kv_transfer.links.send_receive_thread import ChunkJob

_MAX_WORDS: Final = 65_536


def checksum_of(blocks: Sequence[Tensor]) -> int:
    """Return xxh3_64 over the bytes of contiguous tensors, one after the other. Device memory is copied to the host."""
    digest = xxhash.xxh3_64()
    for block in blocks:
        digest.update(block.view(-1).view(torch.uint8).cpu().numpy().data)
    return digest.intdigest()


class ComparedChunks:
    """The chunks that one link has received and the producer's checksums, either of which may come first.

    It belongs to the agent's thread. Invariant: chunks and checksums are in the link's order, from the first one on
    that is not compared.
    """

    def __init__(self) -> None:
        self._jobs: deque[ChunkJob] = deque()
        self._words: deque[ChunkSum] = deque()

    def add_job(self, job: ChunkJob) -> None:
        """Add a chunk that was received, with the consumer's checksum."""
        self._jobs.append(job)

    def add_word(self, word: ChunkSum) -> None:
        """Add the producer's checksum of a chunk.

        Raises ProtocolViolation if too many checksums wait for chunks that have not been received.
        """
        if len(self._words) >= _MAX_WORDS:
            raise ProtocolViolation(
                f"the producer sent more than {_MAX_WORDS} checksums of chunks that have not been received"
            )
        self._words.append(word)

    def take(self) -> tuple[ChunkJob, bool] | None:
        """Remove and return the next chunk with both checksums, and whether they agree; None if one of them is missing.

        Raises ProtocolViolation if the next checksum belongs to another chunk.
        """
        if not (self._jobs and self._words):
            return None
        job, word = self._jobs.popleft(), self._words.popleft()
        if (job.transfer_id, job.attempt, job.index) != (word.transfer_id, word.attempt, word.index):
            raise ProtocolViolation(
                f"a checksum of chunk {word.index} of {word.transfer_id}, "
                f"but the next one is chunk {job.index} of {job.transfer_id}"
            )
        return job, job.checksum == word.checksum

    def take_unsure(self) -> list[ChunkJob]:
        """Remove and return the chunks whose checksum has not come when the link ends."""
        jobs, self._jobs = list(self._jobs), deque()
        return jobs
