"""The reports of a data thread on its link while it opens, moves and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from torch import Tensor

from kv_transfer.errors import ChunkTimeout
from kv_transfer.links.send_receive_thread import ChunkJob, DataThread
from kv_transfer.transports.base import ComputeEvent

_TIMEOUT_S = 10.0


class Link:
    """A link whose peer never sends; at its end it asks what others would see then."""

    def __init__(self) -> None:
        self.thread: DataThread | None = None
        self.is_broken = False
        self.seen_at_close: list[bool] = []

    def send(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        raise AssertionError("a consumer's end")

    def receive(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        raise ChunkTimeout("a chunk did not move before its deadline")

    def is_cut(self) -> bool:
        return self.is_broken

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self.is_broken = True
        assert self.thread is not None
        self.seen_at_close.append(self.thread.is_cut)


class Events:
    def __init__(self) -> None:
        self.reason = ""
        self.is_dead = threading.Event()

    def on_chunk_moved(self, job: ChunkJob) -> None:
        raise AssertionError("nothing moves")

    def on_dead(self, reason: str) -> None:
        self.reason = reason
        self.is_dead.set()


def start(link: Link, events: Events) -> DataThread:
    thread = DataThread("test", lambda opening: link, events, is_sender=False, chunk_timeout_s=1.0)
    link.thread = thread
    return thread


def test_a_connection_that_breaks_while_nothing_moves_is_cut() -> None:
    link, events = Link(), Events()
    thread = start(link, events)
    was_cut = thread.is_cut
    link.is_broken = True
    limit_s = time.monotonic() + _TIMEOUT_S
    while not thread.is_cut:
        assert time.monotonic() < limit_s
        time.sleep(0.001)
    assert not was_cut
    thread.abort()
    assert events.is_dead.wait(_TIMEOUT_S)


def test_what_a_link_failed_of_is_not_hidden_by_its_own_end() -> None:
    link, events = Link(), Events()
    thread = start(link, events)
    thread.put(ChunkJob("a", ()))
    assert events.is_dead.wait(_TIMEOUT_S)
    assert link.seen_at_close == [False]
    assert events.reason == "a chunk did not move before its deadline"
    assert thread.is_stalled
