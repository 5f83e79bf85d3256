"""A pool's memory: where it comes from, who may do what with it, and when it goes."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from kv_transfer.transports import shared_pool
from kv_transfer.transports.shared_pool import allocate_shared_pool, open_pool, take_other_pages
from tests.kv_transfer.connected_workers import LAYOUT

SIZE_BYTES = LAYOUT.num_blocks * LAYOUT.block_size_bytes
UNKNOWN_ADVICE = 9999


def num_descriptors() -> int:
    """Return how many descriptors of memory files are open. Sockets of earlier tests may be closed meanwhile."""
    return sum(map(_is_memory_file, Path("/proc/self/fd").iterdir()))


def _is_memory_file(fd: Path) -> bool:
    try:
        return "memfd:" in str(fd.readlink())
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("advice", [shared_pool._MADV_POPULATE_WRITE, UNKNOWN_ADVICE], ids=["asked for", "touched"])
def test_a_new_pool_is_zeros_and_all_of_it_is_there(monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    monkeypatch.setattr(shared_pool, "_MADV_POPULATE_WRITE", advice)
    pool = allocate_shared_pool(LAYOUT)
    fd = open_pool(pool)
    assert fd is not None
    try:
        assert os.fstat(fd).st_blocks * 512 >= SIZE_BYTES
    finally:
        os.close(fd)
    assert (tuple(pool.shape), pool.dtype, pool.is_contiguous()) == (LAYOUT.shape, torch.float32, True)
    assert not pool.any()


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the first part of a pool, and the slices of the rest, one page each."""
    monkeypatch.setattr(shared_pool, "_FIRST_BYTES", mmap.PAGESIZE)
    monkeypatch.setattr(shared_pool, "_SLICE_BYTES", mmap.PAGESIZE)


def num_pages(pool: torch.Tensor) -> int:
    fd = open_pool(pool)
    assert fd is not None
    try:
        return os.fstat(fd).st_blocks * 512 // mmap.PAGESIZE
    finally:
        os.close(fd)


@pytest.mark.usefixtures("small_slices")
def test_the_pages_behind_the_first_ones_are_taken_later_and_what_is_written_meanwhile_stays() -> None:
    pool = allocate_shared_pool(LAYOUT)
    assert num_pages(pool) == 1 < SIZE_BYTES // mmap.PAGESIZE
    pool[-1].fill_(7.0)

    thread = take_other_pages(pool)
    assert thread is not None
    thread.join(30.0)

    assert num_pages(pool) == -(-SIZE_BYTES // mmap.PAGESIZE)
    assert bool((pool[-1] == 7.0).all())
    assert not pool[:-1].any()


@pytest.mark.usefixtures("small_slices")
def test_a_lack_of_memory_for_later_pages_is_logged_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = allocate_shared_pool(LAYOUT)

    def refuse(kv_cache: torch.Tensor, start: int, stop: int) -> bool:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(shared_pool, "_take_pages", refuse)
    thread = take_other_pages(pool)
    assert thread is not None
    thread.join(30.0)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "lower cache.kv_cache_memory_gib" in record.message


def test_a_small_pool_and_one_in_no_file_have_no_pages_left_to_take() -> None:
    assert take_other_pages(allocate_shared_pool(LAYOUT)) is None
    assert take_other_pages(torch.zeros(LAYOUT.shape)) is None


def test_memory_that_is_not_to_be_had_is_an_error_and_no_signal() -> None:
    """A file that has become too short answers a touch as one whose pages are not to be had does: by SIGBUS."""
    fd = os.memfd_create("short")
    try:
        os.ftruncate(fd, 8192)
        storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, 8192)
        assert isinstance(storage, torch.UntypedStorage)
        os.ftruncate(fd, 0)
        with pytest.raises(OSError, match="a memory file of 8192 bytes: Bad address"):
            shared_pool._populate(torch.empty(0, dtype=torch.uint8).set_(storage))
    finally:
        os.close(fd)


def test_a_file_that_torch_cannot_map_is_an_os_error_and_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pool, "_FD_DIRECTORY", "/nowhere/")
    num_fds = num_descriptors()
    with pytest.raises(OSError, match="torch cannot map the memory file"):
        allocate_shared_pool(LAYOUT)
    assert num_descriptors() == num_fds


def test_a_peer_can_only_read_the_pool() -> None:
    fd = open_pool(allocate_shared_pool(LAYOUT))
    assert fd is not None
    try:
        with pytest.raises(OSError):
            os.write(fd, b"x")
        with pytest.raises(OSError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def test_a_pools_descriptor_goes_with_its_last_view() -> None:
    gc.collect()
    num_fds = num_descriptors()
    view = allocate_shared_pool(LAYOUT)[3]
    assert num_descriptors() == num_fds + 1
    assert not view.any()
    del view
    assert num_descriptors() == num_fds


def test_a_pool_that_was_opened_anew_for_writing_cannot_be_written_but_by_its_owner() -> None:
    pool = allocate_shared_pool(LAYOUT)
    fd = open_pool(pool)
    assert fd is not None
    try:
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        anew = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.pwrite(anew, b"forged", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(anew, SIZE_BYTES)
            with pytest.raises(PermissionError):
                os.ftruncate(anew, 0)
        finally:
            os.close(anew)
        pool.fill_(7.0)
        assert np.frombuffer(os.pread(fd, 8, 0), np.float32).tolist() == [7.0, 7.0]
    finally:
        os.close(fd)


def test_a_kernel_without_the_seal_gets_no_shared_pool_and_no_descriptor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pool, "_F_SEAL_FUTURE_WRITE", 0x4000)
    num_fds = num_descriptors()
    with pytest.raises(OSError, match="Invalid argument"):
        allocate_shared_pool(LAYOUT)
    gc.collect()
    assert num_descriptors() == num_fds
