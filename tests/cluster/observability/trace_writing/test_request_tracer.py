"""Requests are recorded in a thread, and what the disk cannot take is dropped and counted."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.core.requests.block_hash import PUBLIC_KEY, BlockHashKey
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from cluster.errors import InvalidConfig
from cluster.observability.status import RequestTraceView
from cluster.observability.trace_writing.request_tracer import (
    MAX_PENDING,
    MAX_PENDING_TOKENS,
    RequestTracer,
    start_tracer,
)
from cluster.observability.trace_writing.trace_parts import TraceLimits, TraceParts
from cluster.routing.request_record import RequestRecord
from cluster.settings.request_recording import RequestTraceConfig
from cluster.traces.request_trace import BlockHashes, TraceHeader
from cluster.traces.trace_reader import open_trace

HEADER = TraceHeader(began_at_s=1.7e9, ingress="ingress-0", part=1)


class Disk(TraceParts):
    """A disk that writes when it is told to. refused: the requests for whose lines it is full, by their numbers"""

    def __init__(self, folder: Path, refused: Sequence[int] = ()) -> None:
        super().__init__(folder, HEADER, TraceLimits(1 << 20, 4))
        self.may_write = threading.Event()
        self.waits = threading.Event()
        self.refused = refused
        self.num_writes = 0

    def append(self, lines: bytes) -> None:
        self.waits.set()
        assert self.may_write.wait(60)
        if any(f'"r-{number}"'.encode() in lines for number in self.refused):
            raise OSError(errno.ENOSPC, "No space left on device")
        super().append(lines)
        self.num_writes += 1


def record(number: int = 0) -> RequestRecord:
    return RequestRecord(f"r-{number}", "", "ingress-0", 1.7e9, outcome="stop", num_prompt_tokens=5)


def request(num_tokens: int) -> EngineCoreRequest:
    return EngineCoreRequest(request_id="r", prompt_token_ids=[1] * num_tokens, sampling_params=SamplingParams())


def file_in(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_what_is_recorded_can_be_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    settings = RequestTraceConfig(directory=tmp_path, block_hashes=BlockHashes.CLUSTER)
    tracer = start_tracer(settings, "ingress-0", PUBLIC_KEY, now_s=1.7e9, monotonic_s=100.0)
    tracer.put(record(1), 107.0, request(600))
    tracer.put(record(2), 105.0, request(600))
    tracer.close(60)
    assert tracer.view() == RequestTraceView(num_lines=2)
    first, second = open_trace(file_in(tmp_path)).requests()
    assert (first.request_id, first.arrival_s, second.request_id, second.arrival_s) == ("2", 0.0, "1", 2.0)
    assert len(first.blocks) == 2
    assert first.blocks == second.blocks


@pytest.mark.parametrize("num_requests", [1, MAX_PENDING])
def test_lines_are_written_soon_though_nothing_follows(num_requests: int, tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.may_write.set()
    tracer = RequestTracer(disk, 0.0)
    for number in range(num_requests):
        tracer.put(record(number), 0.0, None)
    assert disk.waits.wait(60), "nothing is written before the tracer is closed"
    tracer.close(60)
    assert tracer.view() == RequestTraceView(num_lines=num_requests)


def test_the_lines_of_many_requests_are_one_write(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    tracer = RequestTracer(disk, 0.0)
    tracer.put(record(), 0.0, None)
    assert disk.waits.wait(60)
    for number in range(100):
        tracer.put(record(number), 0.0, None)
    disk.may_write.set()
    tracer.close(60)
    assert (disk.num_writes, tracer.view()) == (2, RequestTraceView(num_lines=101))


def test_a_file_ends_with_the_line_that_crosses_its_limit_however_many_lines_come_at_once(tmp_path: Path) -> None:
    settings = RequestTraceConfig(directory=tmp_path, max_file_mib=1)
    tracer = start_tracer(settings, "ingress-0", PUBLIC_KEY, now_s=1.7e9, monotonic_s=0.0)
    tenant = "x" * 1000
    for number in range(2000):
        tracer.put(msgspec.structs.replace(record(number), tenant=tenant), 0.0, None)
    tracer.close(60)
    sizes = [file.stat().st_size for file in sorted(tmp_path.iterdir())]
    assert len(sizes) > 2
    assert all(1 << 20 <= size < (1 << 20) + 2000 for size in sizes[:-1]), sizes
    assert tracer.view() == RequestTraceView(num_lines=2000)


def test_hashes_are_not_those_of_the_clusters_key(tmp_path: Path) -> None:
    found = []
    for name, key in (("a", PUBLIC_KEY), ("b", PUBLIC_KEY), ("c", BlockHashKey(b"c" * 32))):
        settings = RequestTraceConfig(directory=tmp_path / name, block_hashes=BlockHashes.CLUSTER)
        tracer = start_tracer(settings, "ingress-0", key, now_s=1.7e9, monotonic_s=0.0)
        tracer.put(record(), 0.0, request(512))
        tracer.close(60)
        found.append(next(open_trace(file_in(tmp_path / name)).requests()).blocks)
    assert found[0] == found[1] != found[2]


def test_a_slow_disk_drops_lines_and_never_blocks(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    tracer = RequestTracer(disk, 0.0)
    tracer.put(record(), 0.0, None)
    assert disk.waits.wait(60)
    for number in range(MAX_PENDING + 5):
        tracer.put(record(number), 0.0, None)
    assert tracer.view() == RequestTraceView(num_lines=0, num_dropped_lines=5)
    disk.may_write.set()
    tracer.close(60)
    assert tracer.view() == RequestTraceView(num_lines=MAX_PENDING + 1, num_dropped_lines=5)


def test_prompts_that_wait_are_bounded_in_tokens(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    tracer = RequestTracer(disk, 0.0)
    tracer.put(record(), 0.0, None)
    assert disk.waits.wait(60)
    large = request(MAX_PENDING_TOKENS)
    tracer.put(record(1), 0.0, large)
    tracer.put(record(2), 0.0, request(1))
    tracer.put(record(3), 0.0, None)
    disk.may_write.set()
    tracer.close(60)
    assert tracer.view() == RequestTraceView(num_lines=3, num_dropped_lines=1)
    assert [one.request_id for one in open_trace(file_in(tmp_path)).requests()] == ["1", "2", "4"]


def test_a_full_disk_drops_lines_until_there_is_room_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    disk = Disk(tmp_path, refused=range(3))
    tracer = RequestTracer(disk, 0.0)
    for number in range(4):
        tracer.put(record(number), 0.0, None)
    disk.may_write.set()
    tracer.close(60)
    assert tracer.view() == RequestTraceView(1, 3, "")
    assert [line.message for line in caplog.records] == [
        "the request trace cannot be written: its lines are dropped",
        "the request trace is written again",
    ]


def test_while_the_disk_is_full_the_view_says_so(tmp_path: Path) -> None:
    disk = Disk(tmp_path, refused=[0])
    tracer = RequestTracer(disk, 0.0)
    tracer.put(record(), 0.0, None)
    disk.may_write.set()
    tracer.close(60)
    assert tracer.view() == RequestTraceView(0, 1, "No space left on device")


def test_a_request_of_which_no_line_can_be_made_costs_only_its_own(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    tracer = RequestTracer(disk, 0.0)
    broken: Any = None
    tracer.put(msgspec.structs.replace(record(), request_id=broken), 0.0, None)
    tracer.put(record(), 0.0, None)
    disk.may_write.set()
    tracer.close(60)
    assert tracer.view() == RequestTraceView(1, 1, "")


def test_a_disk_that_never_answers_does_not_keep_the_process_from_its_end(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    tracer = RequestTracer(disk, 0.0)
    tracer.put(record(), 0.0, None)
    assert disk.waits.wait(60)
    tracer.close(0.01)
    tracer.put(record(), 0.0, None)
    assert tracer.view().num_dropped_lines == 1
    disk.may_write.set()
    tracer.close(60)


def test_a_trace_of_nothing_leaves_no_file(tmp_path: Path) -> None:
    settings = RequestTraceConfig(directory=tmp_path)
    start_tracer(settings, "ingress-0", PUBLIC_KEY, now_s=1.7e9, monotonic_s=0.0).close(60)
    assert list(tmp_path.iterdir()) == []


def test_what_was_cut_off_by_a_crash_is_named(tmp_path: Path) -> None:
    tracer = start_tracer(RequestTraceConfig(directory=tmp_path), "ingress-0", PUBLIC_KEY, now_s=1.7e9, monotonic_s=0.0)
    tracer.put(record(), 0.0, request(5))
    tracer.close(60)
    file = file_in(tmp_path)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(InvalidConfig, match="line 2: the file ends in the middle of this line: remove the line"):
        open_trace(file)
