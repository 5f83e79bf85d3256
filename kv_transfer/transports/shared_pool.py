"""A KV pool in an anonymous memory file, which another process of this host can map.

The file is a memfd, not a file in /dev/shm, for three reasons. A memfd needs no name, so a killed process leaves
nothing behind. The size of /dev/shm, which is 64 MiB in most containers, does not bound it. Its descriptor crosses a
socket even where the two ends share no file system.

The file's size is sealed, so that it cannot shrink under a process that maps it. It is also sealed against writing by
anything but this process's own mapping: a descriptor that was passed read-only could otherwise be opened again for
writing through /proc, whatever its mode. A kernel without that seal (before Linux 5.1) refuses it; then there is no
such pool, and KV travels by TCP.

The descriptor stays open for as long as the tensor's storage exists; the storage's file name tells its number.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import sys
import threading
import weakref
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kv_transfer.device_kind import is_accelerator
from kv_transfer.layout import KVCacheLayout

logger = logging.getLogger(__name__)

_FD_DIRECTORY: Final = "/proc/self/fd/"
_FIRST_BYTES: Final = 32 << 20
"""The part of a pool whose pages are taken before the pool is used. Blocks are handed out from the pool's beginning."""
_SLICE_BYTES: Final = 16 << 20
_F_SEAL_FUTURE_WRITE: Final = 0x10
"""Linux 5.1; Python 3.11 does not name it."""
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; Python 3.11 does not name it."""


def allocate_shared_pool(layout: KVCacheLayout) -> Tensor:
    """Return a KV cache of zeros in a memory file, on the CPU, in the layout's shape and dtype.

    The pages of the first 32 MiB are taken at once: blocks are handed out in turn, so otherwise every transfer would
    wait for new pages until each block has been used. take_other_pages() takes the rest (docs/decisions/0010).
    Raises OSError if the file cannot be made, or if there is not enough memory for the first pages.
    """
    dtype = getattr(torch, layout.dtype)
    assert isinstance(dtype, torch.dtype)
    storage = _make_file_storage(layout.num_blocks * layout.block_size_bytes)
    kv_cache = torch.empty(0, dtype=dtype).set_(storage).view(layout.shape)
    _populate(kv_cache)
    return kv_cache


def _make_file_storage(size_bytes: int) -> torch.UntypedStorage:
    """Return storage of zeros in a sealed memory file, without any page yet. Raises OSError."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "memory files need memfd_create, which only Linux has")
    fd = os.memfd_create("raypd-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        os.fchmod(fd, 0o600)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        storage = torch.UntypedStorage.from_file(f"{_FD_DIRECTORY}{fd}", True, size_bytes)
        # The seal is set after this process's mapping: no later mapping or write() can change the memory through any
        # descriptor.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except RuntimeError as error:
        os.close(fd)
        raise OSError(errno.ENOMEM, f"torch cannot map the memory file: {error}") from error
    except BaseException:
        os.close(fd)
        raise
    assert isinstance(storage, torch.UntypedStorage)
    weakref.finalize(storage, os.close, fd)
    return storage


def _populate(kv_cache: Tensor) -> None:
    """Take the first pages. Raises OSError without enough memory: a later write would end the process by SIGBUS."""
    if not _take_pages(kv_cache, 0, min(kv_cache.nbytes, _FIRST_BYTES)):
        kv_cache.zero_()


def take_other_pages(kv_cache: Tensor) -> threading.Thread | None:
    """Take the pages that allocate_shared_pool() left, on a thread that is returned; None if there are none.

    Taking a page changes no byte of it, so blocks can be used meanwhile. If there is not enough memory, the
    thread logs an error and ends. The process then ends by SIGBUS when a block without memory is written, and another
    engine continues its requests.
    """
    file_name = kv_cache.untyped_storage().filename if not is_accelerator(kv_cache.device) else None
    if file_name is None or kv_cache.nbytes <= _FIRST_BYTES:
        return None
    thread = threading.Thread(target=_take_slices, args=(kv_cache,), name="kv-pages", daemon=True)
    thread.start()
    return thread


def _take_slices(kv_cache: Tensor) -> None:
    try:
        for start in range(_FIRST_BYTES, kv_cache.nbytes, _SLICE_BYTES):
            if not _take_pages(kv_cache, start, min(kv_cache.nbytes, start + _SLICE_BYTES)):
                return  # _populate() has written zeros over the whole pool.
    except OSError as error:
        logger.error(
            "not enough memory for the rest of the KV cache: lower cache.kv_cache_memory_gib",
            extra={"reason": str(error), "size_bytes": kv_cache.nbytes},
        )


def _take_pages(kv_cache: Tensor, start: int, stop: int) -> bool:
    """Take the pages of the pool's bytes from start to stop; False if the kernel cannot (before Linux 5.14).

    start: a multiple of the page size
    Raises OSError if there is not enough memory.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if madvise(kv_cache.data_ptr() + start, stop - start, _MADV_POPULATE_WRITE) == 0:
        return True
    error_number = ctypes.get_errno()
    if error_number == errno.EINVAL:
        return False
    raise OSError(error_number, f"a memory file of {kv_cache.nbytes} bytes: {os.strerror(error_number)}")


def open_pool(kv_cache: Tensor) -> int | None:
    """Return a new read-only descriptor of a KV cache's file; None if it is in no file. The caller closes it."""
    if is_accelerator(kv_cache.device):
        return None
    file_name = kv_cache.untyped_storage().filename
    if file_name is None or not file_name.startswith(_FD_DIRECTORY):
        return None
    return os.open(file_name, os.O_RDONLY | os.O_CLOEXEC)


def pool_bytes(kv_cache: Tensor) -> np.ndarray:
    """Return the bytes of this process's own pool, in place: [size in bytes] uint8."""
    bytes_: np.ndarray = kv_cache.view(-1).view(torch.uint8).numpy()
    return bytes_


def map_pool(fd: int) -> np.ndarray:
    """Map another process's pool: [size in bytes] uint8, read-only. Raises OSError or ValueError."""
    return np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), dtype=np.uint8)
