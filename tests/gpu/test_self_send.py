"""One process, one rank: NCCL's copies beside plain ones, and beside the engine's own work."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.nccl import SelfSend, seconds_per_call
from kv_transfer.device_kind import mark_stream
from kv_transfer.transports.nccl_device import CudaDevice
from kv_transfer.transports.nccl_library import load_nccl
from tests.gpu.conftest import Say

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nccl")]

DEVICE = torch.device("cuda", 0)
SIZE_BYTES = 64 << 20
MIN_PART_OF_COPY = 0.05
"""A transfer that is slower than this is broken, not slow: NCCL has few SMs for it, and a copy has all of them."""


def random_bytes() -> torch.Tensor:
    return torch.randint(256, (SIZE_BYTES,), dtype=torch.uint8, device=DEVICE)


def test_bytes_arrive_and_not_much_slower_than_by_a_plain_copy(say: Say) -> None:
    source, target = random_bytes(), torch.zeros(SIZE_BYTES, dtype=torch.uint8, device=DEVICE)
    with SelfSend(load_nccl(), DEVICE) as self_send:
        torch.cuda.synchronize(DEVICE)
        copy_s = seconds_per_call(self_send.stream, lambda: self_send.stream.copy([target], [source]))
        target.zero_()
        torch.cuda.synchronize(DEVICE)
        send_s = seconds_per_call(self_send.stream, lambda: self_send.move(source, target, 4 << 20))
    assert torch.equal(source, target)
    say(f"plain copy {SIZE_BYTES / copy_s / 1e9:.1f} GB/s, self-send {SIZE_BYTES / send_s / 1e9:.1f} GB/s")
    assert copy_s / send_s > MIN_PART_OF_COPY


def test_a_transfer_does_not_wait_for_compute_that_it_does_not_depend_on() -> None:
    source, target = random_bytes(), torch.zeros(SIZE_BYTES, dtype=torch.uint8, device=DEVICE)
    with SelfSend(load_nccl(), DEVICE) as self_send:
        self_send.move(source, target, 4 << 20)
        torch.cuda.synchronize(DEVICE)
        torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # torch's own
        computed = mark_stream(DEVICE)
        self_send.move(source, target, 4 << 20)
        self_send.stream.record().synchronize()
        assert computed is not None
        assert not computed.query(), "the transfer is over while the device computes on"


def test_a_transfer_waits_on_the_device_for_the_step_that_it_depends_on() -> None:
    source, target = (torch.zeros(SIZE_BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    with SelfSend(load_nccl(), DEVICE) as self_send:
        self_send.move(source, target, 4 << 20)
        torch.cuda.synchronize(DEVICE)
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # torch's own
        source.fill_(7)
        computed = mark_stream(DEVICE)
        assert computed is not None
        self_send.stream.wait(computed)
        self_send.move(source, target, 4 << 20)
        passed = self_send.stream.record()
        assert not passed.query(), "the host is ahead of the device"
        passed.synchronize()
    assert target.eq(7).all()


def test_streams_are_links_own_however_many() -> None:
    """torch's own pool would give the same stream twice after 32."""
    streams = [CudaDevice(DEVICE).new_stream() for _ in range(40)]
    assert len({stream.handle for stream in streams}) == 40
    for stream in streams:
        stream.close()


def test_bytes_go_up_come_down_and_are_gathered_as_they_are() -> None:
    device = CudaDevice(DEVICE)
    device.use()
    stream = device.new_stream()
    content = random.Random(0).randbytes(4096)
    up = device.upload(content, stream)
    staged = device.allocate(len(content), stream)
    stream.copy(torch.split(staged, 256)[::-1], torch.split(up, 256))
    assert stream.download(up) == content
    assert stream.download(staged) == b"".join(content[i : i + 256] for i in range(3840, -1, -256))
    stream.close()
