"""One module answers all that depends on a tensor's device, so that a test can walk a GPU's branches."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from kv_transfer.device_kind import find_accelerator, is_accelerator, mark_stream, pin_for

_ROOT = Path(__file__).parents[2]
_FLOORS = ("actors", "kv_transfer")
_ASKS = re.compile(
    r"torch\.cuda\b|\.is_cuda\b|device\.type (?:==|!=|in)|device\.type\]|torch\.accelerator\b|get_device_module"
)
_MAY_ASK = {
    "kv_transfer/device_kind.py",
    # cupy and NCCL know CUDA devices only.
    "kv_transfer/transports/nccl_device.py",
    "kv_transfer/transports/nccl_library.py",
    # `raypd doctor` reports what CUDA says.
    "actors/process/device_probe.py",
}


def test_nothing_else_asks_what_kind_of_device_it_is() -> None:
    found = {
        f"{path.relative_to(_ROOT)}:{number}: {line.strip()}"
        for floor in _FLOORS
        for path in (_ROOT / floor).rglob("*.py")
        if str(path.relative_to(_ROOT)) not in _MAY_ASK
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if _ASKS.search(line)
    }
    assert found == set()


def test_every_device_but_the_cpu_is_an_accelerator() -> None:
    assert not is_accelerator(torch.device("cpu"))
    assert is_accelerator(torch.device("cuda", 1))
    assert is_accelerator(torch.device("privateuseone"))


def test_on_a_cpu_nothing_is_marked_or_pinned() -> None:
    cpu, tensor = torch.device("cpu"), torch.arange(3)
    assert mark_stream(cpu) is None
    assert pin_for(cpu, tensor) is tensor


def test_an_accelerator_is_found_only_with_a_gpu() -> None:
    assert (find_accelerator() is None) == (not torch.cuda.is_available())
