"""A KV pool in an anonymous memory file, which another process of this host can map.

memfd rather than a file in /dev/shm: it needs no name, so a killed process leaves nothing behind; it is not bounded by
the size of /dev/shm, which is 64 MiB in most containers; and its descriptor crosses a socket even where the two ends'
file systems are not shared. Its size is sealed: whoever maps it cannot be hit by a shrinking file. And it is sealed
against writing by anything but this process's own mapping: a descriptor that was passed read-only could be opened anew
for writing through /proc, whatever its mode. A kernel that does not know that seal (before Linux 5.1) refuses it; then
there is no such pool, and KV travels by TCP.

The descriptor lives as long as the tensor's storage, which knows it by its file name.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import weakref
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kv_transfer.layout import KVCacheLayout

_FD_DIRECTORY: Final = "/proc/self/fd/"
_F_SEAL_FUTURE_WRITE: Final = 0x10
"""Linux 5.1; Python 3.11 does not name it."""
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; Python 3.11 does not name it."""


def allocate_shared_pool(layout: KVCacheLayout) -> Tensor:
    """[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim], zeros, on the CPU, in a memory file.

    All of it is taken at once, as torch.zeros does and in the same time (docs/decisions/0010): blocks are handed out in
    turn, so every transfer would pay for a first touch until each block has been used.
    Raises OSError if it cannot be made.
    """
    dtype = getattr(torch, layout.dtype)
    assert isinstance(dtype, torch.dtype)
    storage = _make_file_storage(layout.num_blocks * layout.block_size_bytes)
    kv_cache = torch.empty(0, dtype=dtype).set_(storage).view(layout.shape)
    _populate(kv_cache)
    return kv_cache


def _make_file_storage(size_bytes: int) -> torch.UntypedStorage:
    """Zeros, of which no page is there yet. Raises OSError."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "memory files need memfd_create, of Linux")
    fd = os.memfd_create("raypd-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        os.fchmod(fd, 0o600)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        storage = torch.UntypedStorage.from_file(f"{_FD_DIRECTORY}{fd}", True, size_bytes)
        # Only now that it is mapped here: no later mapping or write() changes it, by whatever descriptor.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except RuntimeError as error:
        os.close(fd)
        raise OSError(errno.ENOMEM, f"torch does not map the memory file: {error}") from error
    except BaseException:
        os.close(fd)
        raise
    assert isinstance(storage, torch.UntypedStorage)
    weakref.finalize(storage, os.close, fd)
    return storage


def _populate(kv_cache: Tensor) -> None:
    """Take all pages. Raises OSError if they are not to be had, where a write would end the process by SIGBUS."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if madvise(kv_cache.data_ptr(), kv_cache.nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    error_number = ctypes.get_errno()
    if error_number != errno.EINVAL:
        raise OSError(error_number, f"a memory file of {kv_cache.nbytes} bytes: {os.strerror(error_number)}")
    kv_cache.zero_()  # The kernel is too old to be asked.


def open_pool(kv_cache: Tensor) -> int | None:
    """A new read-only descriptor of a pool's file; None if it is not in one. The caller closes it."""
    if kv_cache.device.type != "cpu":
        return None
    file_name = kv_cache.untyped_storage().filename
    if file_name is None or not file_name.startswith(_FD_DIRECTORY):
        return None
    return os.open(file_name, os.O_RDONLY | os.O_CLOEXEC)


def pool_bytes(kv_cache: Tensor) -> np.ndarray:
    """[size in bytes] uint8: a pool as this process sees its own."""
    bytes_: np.ndarray = kv_cache.view(-1).view(torch.uint8).numpy()
    return bytes_


def map_pool(fd: int) -> np.ndarray:
    """[size in bytes] uint8, read-only: a pool of another process. Raises OSError, ValueError."""
    return np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), dtype=np.uint8)
