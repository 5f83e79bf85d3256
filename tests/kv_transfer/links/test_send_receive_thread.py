"""The reports of a data thread on its link while it opens, moves and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kv_transfer.errors import ChunkTimeout
from kv_transfer.links.send_receive_thread import ChunkJob, DataThread
from kv_transfer.transports.base import ComputeEvent

_TIMEOUT_S = 60.0


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


class SendingLink:
    """A link that notes when each chunk left."""

    def __init__(self) -> None:
        self.sent_s: list[float] = []

    def send(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        self.sent_s.append(time.monotonic())

    def receive(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        raise AssertionError("a producer's end")

    def is_cut(self) -> bool:
        return False

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class SendingEvents(Events):
    def __init__(self) -> None:
        super().__init__()
        self.has_moved = threading.Semaphore(0)

        self.jobs: list[ChunkJob] = []

    def on_chunk_moved(self, job: ChunkJob) -> None:
        self.jobs.append(job)
        self.has_moved.release()


def start_sending(
    link: SendingLink, events: SendingEvents, max_bytes_per_s: float, chunk_timeout_s: float
) -> DataThread:
    return DataThread(
        "test",
        lambda opening: link,
        events,
        is_sender=True,
        chunk_timeout_s=chunk_timeout_s,
        max_bytes_per_s=max_bytes_per_s,
    )


def test_chunks_keep_to_the_bandwidth() -> None:
    link, events = SendingLink(), SendingEvents()
    began_s = time.monotonic()
    thread = start_sending(link, events, max_bytes_per_s=10_000.0, chunk_timeout_s=_TIMEOUT_S)
    for _ in range(3):
        thread.put(ChunkJob("a", [torch.zeros(500, dtype=torch.uint8)]))
    for _ in range(3):
        assert events.has_moved.acquire(timeout=_TIMEOUT_S)
    thread.abort()
    assert events.is_dead.wait(_TIMEOUT_S)
    assert link.sent_s[0] - began_s >= 0.05
    assert link.sent_s[2] - began_s >= 0.15


def test_a_chunk_waits_at_most_for_a_third_of_its_time() -> None:
    link, events = SendingLink(), SendingEvents()
    thread = start_sending(link, events, max_bytes_per_s=0.001, chunk_timeout_s=0.3)
    thread.put(ChunkJob("a", [torch.zeros(500, dtype=torch.uint8)]))
    assert events.has_moved.acquire(timeout=_TIMEOUT_S)
    thread.abort()
    assert events.is_dead.wait(_TIMEOUT_S)


def test_an_abort_ends_the_pause_and_nothing_is_sent() -> None:
    link, events = SendingLink(), SendingEvents()
    thread = start_sending(link, events, max_bytes_per_s=0.001, chunk_timeout_s=1000.0)
    thread.put(ChunkJob("a", [torch.zeros(500, dtype=torch.uint8)]))
    thread.abort()
    assert events.is_dead.wait(_TIMEOUT_S)
    assert thread.join(_TIMEOUT_S)
    assert not link.sent_s


class Computation:
    """A point on a device's stream that is passed when it is asked for the second time."""

    def __init__(self) -> None:
        self.is_passed = False

    def query(self) -> bool:
        was_passed, self.is_passed = self.is_passed, True
        return was_passed


def test_a_chunk_reports_how_long_it_took_and_whether_it_waited_for_its_computation() -> None:
    link, events = SendingLink(), SendingEvents()
    thread = start_sending(link, events, max_bytes_per_s=10_000.0, chunk_timeout_s=_TIMEOUT_S)
    computation, blocks = Computation(), [torch.zeros(500, dtype=torch.uint8)]
    for after in (None, computation, computation):
        thread.put(ChunkJob("a", blocks, after))
    for _ in range(3):
        assert events.has_moved.acquire(timeout=_TIMEOUT_S)
    thread.abort()
    assert events.is_dead.wait(_TIMEOUT_S)
    assert [job.was_computed for job in events.jobs] == [True, False, True]
    assert all(job.moved_s >= 0.05 for job in events.jobs)
