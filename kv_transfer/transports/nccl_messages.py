"""Cuts a chunk's blocks into NCCL messages: the same cut at both ends, wherever the blocks are in their memories.

NCCL pairs the k-th send with the k-th receive and never compares their sizes. The two ends have a chunk's blocks at
different addresses: blocks that are consecutive at one end may be scattered at the other. So the cut must not depend on
addresses. It depends on the blocks' sizes only, which are the same at both ends:

- blocks are packed, in order, into messages of at most message_size_bytes; a larger block is a message of its own;
- a message whose blocks are consecutive in memory goes straight from, or into, the cache; another message goes through
  a staging buffer. Each end decides that for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MESSAGE_SIZE_BYTES: Final = 2 << 20
"""The most bytes of blocks that share a message: larger blocks are sent one by one, in place (docs/decisions/0006)."""
STAGING_SIZE_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Message:
    """One NCCL message. pieces: flat uint8 views of blocks, in order; more than one only up to message_size_bytes"""

    pieces: tuple[Tensor, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes of all pieces together."""
        return sum(piece.numel() for piece in self.pieces)

    @property
    def is_consecutive(self) -> bool:
        """Whether the pieces lie one after the other in memory."""
        address = self.pieces[0].data_ptr()
        for piece in self.pieces:
            if piece.data_ptr() != address:
                return False
            address += piece.numel()
        return True


def cut_messages(blocks: Iterable[Tensor], message_size_bytes: int) -> list[Message]:
    """Cut a chunk's contiguous tensors, of any dtype, into messages. The cut depends on the tensors' sizes only."""
    messages: list[Message] = []
    pieces: list[Tensor] = []
    size_bytes = 0
    for block in blocks:
        piece = block.view(-1).view(torch.uint8)
        if pieces and size_bytes + piece.numel() > message_size_bytes:
            messages.append(Message(tuple(pieces)))
            pieces, size_bytes = [], 0
        pieces.append(piece)
        size_bytes += piece.numel()
    return [*messages, Message(tuple(pieces))] if pieces else messages


def cut_groups(messages: Sequence[Message], staging_size_bytes: int) -> Iterator[list[Message]]:
    """Cut messages into NCCL groups, each of which fits into the staging buffer even if every message is scattered.

    Only messages of several pieces may need the buffer, so a chunk of large blocks is one group. Both ends cut alike.
    """
    group: list[Message] = []
    staged_bytes = 0
    for message in messages:
        needed_bytes = message.size_bytes if len(message.pieces) > 1 else 0
        if group and staged_bytes + needed_bytes > staging_size_bytes:
            yield group
            group, staged_bytes = [], 0
        group.append(message)
        staged_bytes += needed_bytes
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class Placement:
    """The memory of a group's messages at this end.

    runs:   (address, size in bytes) of each message, in order
    staged: parts of the staging buffer, one for each of `pieces`
    pieces: the blocks of the messages that go through the staging buffer
    """

    runs: tuple[tuple[int, int], ...]
    staged: tuple[Tensor, ...]
    pieces: tuple[Tensor, ...]


def place(group: Sequence[Message], allocate_staging: Callable[[], Tensor]) -> Placement:
    """Find the memory of every message of a group. allocate_staging is called only if a message is scattered."""
    runs: list[tuple[int, int]] = []
    staged: list[Tensor] = []
    pieces: list[Tensor] = []
    offset = 0
    for message in group:
        if message.is_consecutive:
            runs.append((message.pieces[0].data_ptr(), message.size_bytes))
            continue
        buffer = allocate_staging()[offset : offset + message.size_bytes]
        offset += message.size_bytes
        runs.append((buffer.data_ptr(), message.size_bytes))
        staged.extend(torch.split(buffer, [piece.numel() for piece in message.pieces]))
        pieces.extend(message.pieces)
    return Placement(tuple(runs), tuple(staged), tuple(pieces))
