"""The cluster that the tests in here share: what `raypd serve` starts, on a Ray of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_NUM_CPUS: Final = max(2, os.cpu_count() or 1)
DECODE_CPUS: Final = round(0.4 * _NUM_CPUS, 2)
"""The CPUs of a decode engine. There is room for two, and for two prefill engines beside them."""


def config(model_directory: Path) -> dict[str, object]:
    """One engine of each role and two ingresses, as they are to begin with."""
    return {
        "model": {"model": str(model_directory), "dtype": "float32"},
        "cache": {"num_blocks": 256},
        "scheduler": {"max_num_batched_tokens": 48, "max_num_seqs": 32},
        "parallel": {"num_threads": 1},
        "prefill": {"count": 1, "num_cpus": 0.1},
        "decode": {"count": 1, "num_cpus": DECODE_CPUS},
        "ingress": {"count": 2},
        "drain_timeout_s": 30,
    }
