"""Lets each sender do a few things at a time; the others of the same sender wait for their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SenderTurns:
    """The turns of all senders. It belongs to one event loop, and keeps nothing of senders that do nothing."""

    def __init__(self, max_at_once: int) -> None:
        """max_at_once: the most things of one sender at a time"""
        self._max_at_once = max_at_once
        self._turns: dict[str, _TurnsOfOne] = {}

    @asynccontextmanager
    async def turn(self, sender: str) -> AsyncIterator[None]:
        """Wait for a turn of this sender, which lasts as long as the context."""
        turns = self._turns.get(sender)
        if turns is None:
            turns = self._turns[sender] = _TurnsOfOne(self._max_at_once)
        turns.num_users += 1
        try:
            async with turns.turn:
                yield
        finally:
            turns.num_users -= 1
            if not turns.num_users:
                del self._turns[sender]


class _TurnsOfOne:
    """The turns of one sender, those that wait included."""

    def __init__(self, max_at_once: int) -> None:
        self.turn = asyncio.Semaphore(max_at_once)
        self.num_users = 0
