"""How a chunk's blocks become NCCL messages: the same cut at both ends, whatever blocks each of them has.

NCCL pairs the k-th send with the k-th receive and never compares their sizes. The two ends hold the same blocks' bytes
in different places: a run of blocks that is consecutive here may be scattered there. So the cut must not depend on
where blocks lie. It depends on their sizes only, which both ends have in common:

- blocks are packed, in order, into messages of at most message_size_bytes; a larger block is a message of its own;
- a message whose blocks are consecutive in memory goes straight from, or into, the cache; another one goes through a
  staging buffer, which is each end's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MESSAGE_SIZE_BYTES: Final = 2 << 20
"""Blocks of 1 MiB and more are sent one by one, in place; smaller ones together (docs/decisions/0006)."""
STAGING_SIZE_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Message:
    """pieces: flat uint8 views of blocks, in order; more than one only up to message_size_bytes."""

    pieces: tuple[Tensor, ...]

    @property
    def size_bytes(self) -> int:
        """All of it."""
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
    """Cut a chunk's contiguous tensors, of any dtype, into messages. Depends on nothing but their sizes."""
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
    """Cut messages into NCCL groups, each of which would fit into the staging buffer if it were scattered.

    Only messages of several pieces count: so a chunk of large blocks is one group. Both ends cut alike.
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
    """The memory of a group's messages at this end: runs are (address, size in bytes), one for each message, in order.

    staged: parts of the staging buffer, pair by pair those of the cache's pieces in `pieces`
    """

    runs: tuple[tuple[int, int], ...]
    staged: tuple[Tensor, ...]
    pieces: tuple[Tensor, ...]


def place(group: Sequence[Message], allocate_staging: Callable[[], Tensor]) -> Placement:
    """Give every message of a group its run of memory. The staging buffer is asked for only if one is scattered."""
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
