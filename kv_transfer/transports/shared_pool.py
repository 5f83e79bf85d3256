"""A KV pool in an anonymous memory file, which another process of this host can map.

memfd rather than a file in /dev/shm: it needs no name, so a killed process leaves nothing behind; it is not bounded by
the size of /dev/shm, which is 64 MiB in most containers; and its descriptor crosses a socket even where the two ends'
file systems are not shared. Its size is sealed: whoever maps it cannot be hit by a shrinking file.

The descriptor lives as long as the tensor's storage, which knows it by its file name.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kv_transfer.layout import KVCacheLayout

_FD_DIRECTORY: Final = "/proc/self/fd/"


def allocate_shared_pool(layout: KVCacheLayout) -> Tensor:
    """[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim], zeros, on the CPU, in a memory file.

    All of it is touched, and so taken, at once: a first touch costs ten times as much as for other memory, and blocks
    are handed out in turn, so every transfer would pay for it until each block has been used.
    Raises OSError if it cannot be made.
    """
    dtype = getattr(torch, layout.dtype)
    assert isinstance(dtype, torch.dtype)
    size_bytes = layout.num_blocks * layout.block_size_bytes
    fd = os.memfd_create("raypd-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        storage = torch.UntypedStorage.from_file(f"{_FD_DIRECTORY}{fd}", True, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    assert isinstance(storage, torch.UntypedStorage)
    weakref.finalize(storage, os.close, fd)
    return torch.empty(0, dtype=dtype).set_(storage).view(layout.shape).zero_()


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
