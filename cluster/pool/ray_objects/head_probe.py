"""The probe of Ray's head, by which the silence of an actor is told from a network failure of the controller."""

from __future__ import annotations

import asyncio
import math
from typing import Final

import ray

from cluster.pool.ray_objects.ray_nodes import is_own_node_dead

_PROBE_TIMEOUT_S: Final = 2.0


class HeadProbe:
    """A probe that asks Ray's head again and again.

    If the head does not answer, this process may be cut off from the network, and the silence of actors says nothing
    about them. When the network is back, the head may answer before the actors do, whose connections still back off.
    So an actor's silence counts only from the moment since which the head has answered without a break.
    """

    def __init__(self) -> None:
        self._answering_since_s: float | None = -math.inf
        """The time on the event loop's clock since which the head has answered; None while it does not answer."""
        self.is_own_node_dead = False
        """Whether the head has said that it has declared the node of this process dead, which is final."""

    @property
    def is_answering(self) -> bool:
        """Whether the head has answered the newest question, within two seconds."""
        return self._answering_since_s is not None

    def silence_s(self, since_s: float) -> float:
        """Return the seconds of silence that count against an actor.

        since_s: when the silence began, on the event loop's clock
        """
        now_s = asyncio.get_running_loop().time()
        return 0.0 if self._answering_since_s is None else now_s - max(since_s, self._answering_since_s)

    async def watch(self, interval_s: float) -> None:
        """Ask the head every interval_s seconds until cancelled; at most one question is under way at any time."""
        loop = asyncio.get_running_loop()
        while True:
            asking = asyncio.ensure_future(asyncio.to_thread(ray.nodes))
            done, _ = await asyncio.wait({asking}, timeout=_PROBE_TIMEOUT_S)
            if not done:
                self._answering_since_s = None
                await asyncio.wait({asking})
            if asking.exception() is not None:
                self._answering_since_s = None
            else:
                self.is_own_node_dead = is_own_node_dead(asking.result())
                if self._answering_since_s is None:
                    self._answering_since_s = loop.time()
            await asyncio.sleep(interval_s)
