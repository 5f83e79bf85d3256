"""Calls to Ray actors that may be dead or stuck."""

from __future__ import annotations

import asyncio
import logging
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
    """Whether Ray's head answers this process. One that is cut off hears nobody: that is not the others' fault."""

    def __init__(self) -> None:
        self._asking: asyncio.Future[object] | None = None

    async def answers(self) -> bool:
        """Ask; at most one question is under way at any time."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(asyncio.to_thread(ray.nodes))
        done, _ = await asyncio.wait({self._asking}, timeout=_PROBE_TIMEOUT_S)
        return bool(done) and self._asking.exception() is None


def one_line(error: BaseException) -> str:
    """The cause in its own words, without Ray's traceback."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    text = str(cause).strip() or type(cause).__name__
    if not isinstance(error, RayActorError):
        return text
    # Ray goes on with guesses at the cause.
    return text.splitlines()[-1].partition(" Some common causes")[0]
