"""The figures that makers of GPUs give: memory, and how fast it and the arithmetic are at most.

The figures are those of NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM, DGX B200 (an eighth of the system),
L4 and L40S, and of the architecture papers "Ada" (GeForce RTX 4090) and "RTX Blackwell PRO" (RTX PRO 6000). Products of
matrices are dense, with sums in 32 bits: data sheets that count with sparsity say twice as much.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from cluster.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class GpuDataSheet:
    """One kind of GPU.

    memory_gb:        10^9 bytes
    memory_gb_per_s:  10^9 bytes a second, from memory
    bf16_tflops:      10^12 operations a second in bf16 or fp16
    fp8_tflops:       the same in fp8; None: it computes fp8 no faster than bf16
    link_gb_per_s:    10^9 bytes a second to the other GPUs of its host, in one direction
    """

    memory_gb: float
    memory_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float | None
    link_gb_per_s: float

    def flops(self, bytes_per_weight: float) -> float:
        """Return operations a second with weights of so many bytes."""
        tflops = self.fp8_tflops if bytes_per_weight <= 1 and self.fp8_tflops is not None else self.bf16_tflops
        return tflops * 1e12


GPU_DATA_SHEETS: Final = {
    "a100": GpuDataSheet(80, 2039, 312, None, 300),
    "h100": GpuDataSheet(80, 3350, 989, 1979, 450),
    "h200": GpuDataSheet(141, 4800, 989, 1979, 450),
    "b200": GpuDataSheet(180, 8000, 2250, 4500, 900),
    "l4": GpuDataSheet(24, 300, 121, 242, 32),
    "l40s": GpuDataSheet(48, 864, 362, 733, 32),
    "rtx4090": GpuDataSheet(24, 1008, 165.2, 330.3, 32),
    "rtxpro6000": GpuDataSheet(96, 1792, 503.8, 1007.6, 64),
}
"""The GPUs by name. Those without NVLink reach each other over 16 lanes of PCIe, of generation 4 or 5."""


def find_data_sheet(name: str) -> GpuDataSheet:
    """Return the data sheet of a GPU by its name. Raises InvalidConfig for others."""
    found = data_sheet_in(name)
    if found is None:
        raise InvalidConfig("--gpu", [f"{name!r} has no data sheet here; there are {', '.join(GPU_DATA_SHEETS)}"])
    return found


def data_sheet_in(text: str) -> GpuDataSheet | None:
    """Return the data sheet of the GPU that a text names, such as "NVIDIA GeForce RTX 4090"; None if it names none."""
    name = gpu_in(text)
    return None if name is None else GPU_DATA_SHEETS[name]


def gpu_in(text: str) -> str | None:
    """Return the name here of the GPU that a text names; None if it names none."""
    for name in sorted(GPU_DATA_SHEETS, key=len, reverse=True):
        pattern = re.sub("(rtx|pro)", r"\1[ _-]*", name)
        if re.search(rf"(?<![a-z0-9]){pattern}(?![0-9])", text.lower()):
            return name
    return None
