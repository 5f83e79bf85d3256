"""How the controller asks an actor for its health, and how long the actor's silence may last."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.process.ray_calls import RayCallFailed, call
from cluster.pool.ray_objects.head_probe import HeadProbe


class ActorLost(Exception):
    """An actor is dead, or has been silent for too long; the message says which."""


class Heartbeat:
    """The questions to one actor. silent_s: for how long it has not answered; 0 while it answers."""

    def __init__(self) -> None:
        self.silent_s = 0.0
        self._silent_since_s: float | None = None
        """When it was asked what it has not answered, on the event loop's clock; None while it answers."""

    @property
    def is_silent(self) -> bool:
        """Whether it has not answered since it was last asked."""
        return self._silent_since_s is not None

    async def ask(self, health: Any, head: HeadProbe, timeout_s: float) -> Any:
        """Return what the actor's method `health` answers, or None if it is silent. Raises ActorLost.

        Silence that Ray's head shares does not count (HeadProbe); other silence may last for timeout_s.
        """
        asked_at_s = asyncio.get_running_loop().time()
        try:
            answer = await call(health, timeout_s=timeout_s)
        except RayCallFailed as failed:
            if not failed.is_silence:
                raise ActorLost(str(failed)) from failed
            self._silent_since_s = asked_at_s if self._silent_since_s is None else self._silent_since_s
            self.silent_s = head.silence_s(self._silent_since_s)
            if self.silent_s >= timeout_s:
                raise ActorLost(f"it has not answered for {self.silent_s:.0f} s") from failed
            return None
        self._silent_since_s, self.silent_s = None, 0.0
        return answer
