"""Calls to Ray actors that may be dead or stuck."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

logger = logging.getLogger(__name__)

_HEAD_TIMEOUT_S: Final = 10.0
_PROBE_TIMEOUT_S: Final = 2.0


def remote_class(cls: type, **options: Any) -> Any:  # a class that Ray makes at run time
    """An actor class."""
    return ray.remote(**options)(cls) if options else ray.remote(cls)


async def within(call: Awaitable[Any], timeout_s: float) -> None:
    """Await a call that may meet a dead or stuck actor; that is logged, not raised."""
    try:
        async with asyncio.timeout(timeout_s):
            await call
    except (RayActorError, RayTaskError, TimeoutError) as error:
        logger.warning("a call to an actor failed", extra={"error": one_line(error)})


async def end_actor(actor: Any) -> None:
    """Kill it. While Ray's head is away that waits for it, here for a while, then in the background."""
    await _in_thread(ray.kill, actor)


async def release_group(group: PlacementGroup) -> None:
    """Give a placement group's resources back; as for end_actor()."""
    await _in_thread(remove_placement_group, group)


async def _in_thread(call: Callable[[Any], object], argument: Any) -> None:
    try:
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            await asyncio.to_thread(call, argument)
    except (RayError, TimeoutError, ValueError) as error:
        logger.warning("Ray did not do as it was told", extra={"call": str(call), "error": str(error)})


class HeadProbe:
    """Whether Ray's head answers this process. One that is cut off hears nobody: that is not the others' fault.

    When a network is back, the head may be heard again before others are, whose connections still back off. So silence
    counts only from when the head has answered without a break.
    """

    def __init__(self) -> None:
        self._answering_since_s: float | None = -math.inf
        """On the event loop's clock; None while it does not."""

    @property
    def is_answering(self) -> bool:
        """Whether it has answered its newest question, and soon."""
        return self._answering_since_s is not None

    def silence_s(self, since_s: float) -> float:
        """For how long somebody has been silent who was last heard of then."""
        now_s = asyncio.get_running_loop().time()
        return 0.0 if self._answering_since_s is None else now_s - max(since_s, self._answering_since_s)

    async def watch(self, interval_s: float) -> None:
        """Ask again and again; at most one question is under way at any time."""
        loop = asyncio.get_running_loop()
        while True:
            asking = asyncio.ensure_future(asyncio.to_thread(ray.nodes))
            done, _ = await asyncio.wait({asking}, timeout=_PROBE_TIMEOUT_S)
            if not done:
                self._answering_since_s = None
                await asyncio.wait({asking})
            if asking.exception() is not None:
                self._answering_since_s = None
            elif self._answering_since_s is None:
                self._answering_since_s = loop.time()
            await asyncio.sleep(interval_s)


def one_line(error: BaseException) -> str:
    """The cause in its own words, without Ray's traceback."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    text = str(cause).strip() or type(cause).__name__
    if not isinstance(error, RayActorError):
        return text
    # Ray goes on with guesses at the cause.
    return text.splitlines()[-1].partition(" Some common causes")[0]
