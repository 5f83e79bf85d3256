"""Copies of a step's arrays to the device, which the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kv_transfer.device_kind import is_accelerator, pin_for

_ALIGNMENT_BYTES = 16
"""Each uploaded array begins at a multiple of this: Triton compiles a kernel once more where an argument is aligned in
another way."""


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays of one dtype to the device, in one piece of pinned memory if the device is an accelerator.

    Returns a tensor for each array, with its shape. They may share their memory with each other, and on a CPU with the
    arrays, so none of them may be changed.
    """
    if not is_accelerator(device):
        return [torch.from_numpy(array) for array in arrays]
    dtype = arrays[0].dtype
    assert all(array.dtype == dtype for array in arrays), "one copy has one dtype"
    alignment = _ALIGNMENT_BYTES // dtype.itemsize
    sizes = [-(-array.size // alignment) * alignment for array in arrays]
    numbers, start = np.zeros(sum(sizes), dtype=dtype), 0
    for array, size in zip(arrays, sizes, strict=True):
        numbers[start : start + array.size] = array.reshape(-1)
        start += size
    parts = torch.split(pin_for(device, torch.from_numpy(numbers)).to(device, non_blocking=True), sizes)
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]
