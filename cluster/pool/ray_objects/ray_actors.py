"""Ray actors and placement groups that may be dead or stuck: how they are made, found, called and ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.process.ray_calls import FailureKind, RayCallFailed, ask_head, call

logger = logging.getLogger(__name__)

_REASK_DELAY_S: Final = 1.0
_T = TypeVar("_T")


def remote_class(cls: type, **options: Any) -> Any:  # a class that Ray makes at run time
    """An actor class."""
    return ray.remote(**options)(cls) if options else ray.remote(cls)


async def call_if_alive(method: Any, *arguments: Any, timeout_s: float) -> None:
    """Call a method of an actor that may be dead or stuck; that the call failed is logged, not raised."""
    try:
        await call(method, *arguments, timeout_s=timeout_s)
    except RayCallFailed as failed:
        logger.warning("a call to an actor failed", extra={"kind": failed.kind.value, "error": str(failed)})


async def find_by_name(find: Callable[[str], _T], name: str) -> _T | None:
    """Ask Ray's head for what has this name, such as by ray.get_actor, until it answers; None if nothing has it."""
    while True:
        try:
            return await ask_head(find, name)
        except RayCallFailed as failed:
            if failed.kind is FailureKind.NOT_FOUND:
                return None
            logger.warning("Ray's head does not answer", extra={"kind": failed.kind.value, "error": str(failed)})
            await asyncio.sleep(_REASK_DELAY_S)


async def end_actor(actor: Any) -> None:
    """Kill it. While Ray's head is away that waits for it, here for a while, then in the background."""
    await _tell_head(ray.kill, actor)


async def release_group(group: PlacementGroup) -> None:
    """Give a placement group's resources back; as for end_actor()."""
    await _tell_head(remove_placement_group, group)


async def _tell_head(function: Callable[[Any], object], argument: Any) -> None:
    try:
        await ask_head(function, argument)
    except RayCallFailed as failed:
        logger.warning("Ray did not do as it was told", extra={"call": str(function), "error": str(failed)})


def one_line(error: BaseException) -> str:
    """The error's own words, or its name if it has none."""
    return str(error).strip() or type(error).__name__
