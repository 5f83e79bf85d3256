"""Calls to Ray actors that may be dead or stuck."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

logger = logging.getLogger(__name__)


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


def one_line(error: BaseException) -> str:
    """The cause in its own words, without Ray's traceback."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    text = str(cause).strip() or type(cause).__name__
    if not isinstance(error, RayActorError):
        return text
    # Ray goes on with guesses at the cause.
    return text.splitlines()[-1].partition(" Some common causes")[0]
