"""Moves numbers between the host and the device that has the logits.

Sampling waits for the device once: for the numbers of a Fetch, at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.model import uploads
from kv_transfer.device_kind import is_accelerator, mark_for_waiting


def is_on_host(tensor: Tensor) -> bool:
    """Whether the host computes with the tensor, so that reading its numbers waits for nothing."""
    return not is_accelerator(tensor.device)


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Return the array's numbers on the device, through pinned memory; on the CPU they share the array's memory."""
    [tensor] = uploads.upload([array], device)
    return tensor


class Fetch:
    """Tensors on their way to the host, all in one transfer, which is queued behind what computes them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Queue the transfer. tensors: integers below 2**53, or float32, which float64 represents exactly"""
        self._shapes = [tensor.shape for tensor in tensors]
        packed = torch.cat([tensor.flatten().double() for tensor in tensors])
        self._packed = packed
        if not is_on_host(packed):
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
        self._event = mark_for_waiting(packed.device)

    def wait(self) -> list[np.ndarray]:
        """Wait until the numbers have come; returns arrays of the tensors' shapes, float64."""
        if self._event is not None:
            self._event.synchronize()
        ends = np.cumsum([shape.numel() for shape in self._shapes])
        parts = np.split(self._packed.numpy(), ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]
