"""Heartbeats: how the controller asks an actor for its health, and how long the actor may stay silent."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.process.ray_calls import RayCallFailed, call
from cluster.pool.ray_objects.head_probe import HeadProbe


class ActorLost(Exception):
    """An actor is dead, or has been silent for too long; the message says which."""


class Heartbeat:
    """The controller's questions to one actor. silent_s: for how long the actor has not answered; 0 while it does"""

    def __init__(self) -> None:
        self.silent_s = 0.0
        self._silent_since_s: float | None = None
        """When the first unanswered question was asked, on the event loop's clock; None while the actor answers."""

    @property
    def is_silent(self) -> bool:
        """Whether the actor has not answered the last question."""
        return self._silent_since_s is not None

    async def ask(self, health: Any, head: HeadProbe, timeout_s: float) -> Any:
        """Call the actor's method `health`. Returns its answer, or None if the actor is silent.

        Raises ActorLost if the actor is dead, or has been silent for timeout_s seconds. Silence does not count while
        Ray's head is silent as well (HeadProbe).
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
