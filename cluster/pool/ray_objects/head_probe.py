"""Whether Ray's head answers, and for how long somebody has been silent who could have been heard."""

from __future__ import annotations

import asyncio
import math
from typing import Final

import ray

_PROBE_TIMEOUT_S: Final = 2.0


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
