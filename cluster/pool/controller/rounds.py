"""The controller's rounds, repeated until the controller stops.

A failed call to an actor or to Ray is nothing unusual: the next round decides anew. Any other exception is a bug of
ours: it is logged, shown in the journal, and followed by a pause that doubles. A bug that occurs in five rounds running
ends the process. Ray then starts the controller again, which goes on from its saved state. Engines and ingresses serve
meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Final

from actors.process.ray_calls import RayCallFailed
from cluster.pool.journal import Journal
from cluster.pool.ray_objects.head_probe import HeadProbe

logger = logging.getLogger(__name__)

_MAX_BUGS: Final = 5
_FIRST_PAUSE_S: Final = 1.0
_PAUSE_BEFORE_THE_END_S: Final = 10.0
"""The pause before the process ends: the next controller may meet the same bug, and would die as quickly."""


async def begin_anew(doing: str) -> None:
    """End this process after a pause, so that Ray starts the controller again.

    A controller that has restored only a part of the cluster would end the rest of it; starting again is better.
    doing: what has failed, for the log
    """
    logger.critical("the controller ends and is started again", exc_info=True, extra={"doing": doing})
    await asyncio.sleep(_PAUSE_BEFORE_THE_END_S)
    os._exit(1)


def end_replaced() -> None:
    """End this process at once, since Ray has started the controller on another node, or is about to.

    Two controllers would give the same names to different engines, and each would end what the other one starts.
    """
    logger.critical("the controller ends: Ray has declared its node dead, and starts the controller on another one")
    os._exit(1)


class Rounds:
    """The repetition of rounds, and what a failed round leads to."""

    def __init__(
        self,
        journal: Journal,
        head: HeadProbe,
        is_stopping: asyncio.Event,
        *,
        first_pause_s: float = _FIRST_PAUSE_S,
        end: Callable[[str], Awaitable[None]] = begin_anew,
        end_replaced: Callable[[], None] = end_replaced,
    ) -> None:
        """Begin without a failed round.

        is_stopping:  set when the rounds should stop
        end:          ends the process, called with what has failed
        end_replaced: ends the process of a controller that Ray has replaced
        """
        self._journal = journal
        self._head = head
        self._is_stopping = is_stopping
        self._first_pause_s = first_pause_s
        self._end = end
        self._end_replaced = end_replaced

    async def repeat(
        self, doing: str, look: Callable[[], Awaitable[None]], wait: Callable[[], Awaitable[None]]
    ) -> None:
        """Call look() and wait() in turn until the controller stops. doing: what look() does, for logs"""
        num_bugs = 0
        while not self._is_stopping.is_set():
            if self._head.is_own_node_dead:
                self._end_replaced()
                return
            try:
                await look()
                num_bugs = 0
            except RayCallFailed as failed:
                logger.warning("a round failed", extra={"doing": doing, "error": str(failed)})
            except Exception as error:
                if not self._head.is_answering:
                    logger.warning(
                        "a round failed because Ray's head does not answer", extra={"doing": doing, "error": str(error)}
                    )
                else:
                    num_bugs += 1
                    await self._after_bug(doing, error, num_bugs)
            await wait()

    async def _after_bug(self, doing: str, error: Exception, num_bugs: int) -> None:
        logger.exception("a round failed because of a bug", extra={"doing": doing, "num_bugs": num_bugs})
        self._journal.add(f"{doing} failed by a bug, {num_bugs} of {_MAX_BUGS} times: {type(error).__name__}: {error}")
        if num_bugs >= _MAX_BUGS:
            await self._end(doing)
        try:
            async with asyncio.timeout(self._first_pause_s * 2 ** (num_bugs - 1)):
                await self._is_stopping.wait()
        except TimeoutError:
            return
