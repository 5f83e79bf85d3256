"""The loopback transport: engines of one process copy straight from cache to cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kv_transfer.errors import ChunkTimeout, LinkLost
from kv_transfer.transports.base import ComputeEvent
from kv_transfer.transports.link_opening import Opening
from kv_transfer.trust.secret import KeySource


class Pipe:
    """One data link, as the object of both ends: the producer offers tensors, and waits until they are copied."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offered: Sequence[Tensor] | None = None
        self._is_dead = False

    def send(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Offer tensors, and wait until the consumer has copied them; see DataLink."""
        # The copies run on the default stream, on which the engines compute as well, so they need not wait for it.
        del after
        with self._changed:
            self._check()
            self._offered = blocks
            self._changed.notify_all()
            try:
                self._wait(lambda: self._offered is None, timeout_s)
            finally:
                self._offered = None

    def receive(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Wait for offered tensors, and copy them; see DataLink."""
        del after
        with self._changed:
            self._wait(lambda: self._offered is not None, timeout_s)
            assert self._offered is not None
            assert len(self._offered) == len(blocks), "the header and the bytes disagree"
            for source, target in zip(self._offered, blocks, strict=True):
                target.copy_(source)
            self._offered = None
            self._changed.notify_all()

    def is_cut(self) -> bool:
        """Return whether the pipe is closed."""
        return self._is_dead

    def abort(self) -> None:
        """Close the pipe: calls that wait at either end raise LinkLost."""
        with self._changed:
            self._is_dead = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close the pipe, as abort() does."""
        self.abort()

    def _wait(self, is_done: _Condition, timeout_s: float) -> None:
        is_over = self._changed.wait_for(lambda: self._is_dead or is_done(), timeout_s)
        if not is_over:
            self._is_dead = True
            self._changed.notify_all()
            raise ChunkTimeout(f"the peer did not move a chunk within {timeout_s:g} s")
        self._check()

    def _check(self) -> None:
        if self._is_dead:
            raise LinkLost("the link was closed")


class _Condition(Protocol):
    def __call__(self) -> bool: ...


class PipeSource(Protocol):
    """Makes pipes and finds them by name, within one process."""

    def make_pipe(self) -> tuple[str, Pipe]:
        """Return the name of a new pipe, and the pipe."""

    def take_pipe(self, name: str) -> Pipe | None:
        """Remove and return the pipe of this name; None if there is none, or it was taken before."""


class _PendingPipe:
    def __init__(self, name: str, pipe: Pipe) -> None:
        self.rendezvous = name
        self._pipe = pipe

    def accept(self, timeout_s: float, opening: Opening | None = None) -> Pipe:
        del timeout_s, opening  # A pipe exists without its second end.
        return self._pipe


class LoopbackTransport:
    """A Transport within one process."""

    name = "loopback"

    def __init__(self, pipes: PipeSource) -> None:
        self._pipes = pipes

    def listen(self, key: KeySource | None = None) -> _PendingPipe:
        """Make a pipe; its name is the rendezvous."""
        return _PendingPipe(*self._pipes.make_pipe())

    def connect(
        self, rendezvous: str, timeout_s: float, opening: Opening | None = None, key: KeySource | None = None
    ) -> Pipe:
        """Take the pipe that the producer has made. Raises LinkLost if there is none of this name."""
        del timeout_s, opening
        pipe = self._pipes.take_pipe(rendezvous)
        if pipe is None:
            raise LinkLost(f"no producer in this process offers the rendezvous {rendezvous!r}")
        return pipe
