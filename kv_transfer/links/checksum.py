"""Checksums of chunks: each end computes its own of what it has moved, and the consumer compares.

The producer's word (ChunkSum) comes on the control stream once the chunk has left. Chunks and words of a link have one
order, so the k-th word is about the k-th chunk.
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
from kv_transfer.links.data_thread import ChunkJob

_MAX_WORDS: Final = 65_536


def checksum_of(blocks: Sequence[Tensor]) -> int:
    """xxh3_64 over these contiguous tensors' bytes, one after the other. A device's are copied to the host first."""
    digest = xxhash.xxh3_64()
    for block in blocks:
        digest.update(block.view(-1).view(torch.uint8).cpu().numpy().data)
    return digest.intdigest()


class ComparedChunks:
    """Compares, at one link's consumer, chunks that are in with the producer's checksums; either may come first."""

    def __init__(self) -> None:
        self._jobs: deque[ChunkJob] = deque()
        self._words: deque[ChunkSum] = deque()

    def add_job(self, job: ChunkJob) -> None:
        """A chunk is in, with our own checksum."""
        self._jobs.append(job)

    def add_word(self, word: ChunkSum) -> None:
        """The producer's checksum of a chunk. Raises ProtocolViolation if too many are of chunks that are not in."""
        if len(self._words) >= _MAX_WORDS:
            raise ProtocolViolation(f"{_MAX_WORDS} checksums of chunks that have not come")
        self._words.append(word)

    def take(self) -> tuple[ChunkJob, bool] | None:
        """The next chunk of which both are known, and whether they are equal. Raises ProtocolViolation."""
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
        """At the link's end: the chunks about which no word came."""
        jobs, self._jobs = list(self._jobs), deque()
        return jobs
