"""Calls to Ray actors that may be dead or stuck."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.process.ray_calls import FailureKind, RayCallFailed, ask_head, call

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S: Final = 2.0
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
    """The error's own words, or its name if it has none."""
    return str(error).strip() or type(error).__name__
