"""Calls to Ray about actors and placement groups, and to actors that may be dead or stuck."""

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


def remote_class(cls: type, **options: Any) -> Any:  # Any: Ray defines this class at run time
    """Return a Ray actor class. options: as of ray.remote()"""
    return ray.remote(**options)(cls) if options else ray.remote(cls)


async def call_if_alive(method: Any, *arguments: Any, timeout_s: float) -> None:
    """Call a method of an actor that may be dead or stuck; a failed call is logged, not raised."""
    try:
        await call(method, *arguments, timeout_s=timeout_s)
    except RayCallFailed as failed:
        logger.warning("a call to an actor failed", extra={"kind": failed.kind.value, "error": str(failed)})


async def find_by_name(find: Callable[[str], _T], name: str) -> _T | None:
    """Return the Ray object of this name, or None if there is none; retry until Ray's head answers.

    find: a function that looks up a name, such as ray.get_actor
    """
    while True:
        try:
            return await ask_head(find, name)
        except RayCallFailed as failed:
            if failed.kind is FailureKind.NOT_FOUND:
                return None
            logger.warning("Ray's head does not answer", extra={"kind": failed.kind.value, "error": str(failed)})
            await asyncio.sleep(_REASK_DELAY_S)


async def end_actor(actor: Any) -> None:
    """Kill an actor. If Ray's head does not answer, wait for a while; the call then goes on in the background."""
    await _tell_head(ray.kill, actor)


async def release_group(group: PlacementGroup) -> None:
    """Release a placement group's resources. If Ray's head does not answer, wait as end_actor() does."""
    await _tell_head(remove_placement_group, group)


async def _tell_head(function: Callable[[Any], object], argument: Any) -> None:
    try:
        await ask_head(function, argument)
    except RayCallFailed as failed:
        logger.warning("a call to Ray's head failed", extra={"call": str(function), "error": str(failed)})


def one_line(error: BaseException) -> str:
    """Return the error's message, or the name of its class if it has none."""
    return str(error).strip() or type(error).__name__
