"""The name of the device that a model computes on, which the durations of steps depend on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

import torch

from kv_transfer.device_kind import device_module, is_accelerator

_PROCESSORS: Final = Path("/proc/cpuinfo")


def device_name(device: torch.device) -> str:
    """Return a GPU's name, or the processor's with the number of threads."""
    if is_accelerator(device):
        return device_module(device).get_device_name(device)
    return f"{_processor_name() or platform.machine() or device.type}, {torch.get_num_threads()} threads"


def _processor_name() -> str:
    try:
        lines = _PROCESSORS.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
